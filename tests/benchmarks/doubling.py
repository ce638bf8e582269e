"""Twice the masks, or twice the images: time and peak memory over those of once.

    python tests/benchmarks/doubling.py [--cases rise_3d ...] [--num_masks 255] [--size 48] [--rounds 5]
        [--no-memory] [--json FILE] [--keep [LABEL]]

Cases: RISE and windows in 2D and 3D, windows over a segmentation whose patches are remembered, ``focused_rise`` and
Shapley values. Windows are doubled by half the stride along one axis. Twice the masks need not be twice the forwards,
whose number stands beside: a method that chooses masks itself may ask for less, and windows between patches change more
patches than those on their grid.

Time is of this process's processors, which others on the machine disturb less than the wall, and the least over rounds
in which both sizes alternate. What disturbs only ever adds: on a machine whose pace changed, a ratio of 1.7 was 1.2 to
2.5 by medians, and 1.7 to 1.9 so. Freed memory is kept, as by the bundle: else a run may by chance take all of its
memory anew each time, and twice the images 2.4 times the time. The peak is of resident memory, of a process of its own
for each size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from monai.inferers import SlidingWindowInferer
from record import add_inside, add_options, apart, keep, resident_peak

import monai_saliency as ms
from monai_saliency.utils.allocator import keep_freed_memory

__all__ = ["CASES", "measure", "run"]


class Run(NamedTuple):
    """One call.

    Attributes:
        masks: masks of an image.
        forwards: that the scores of all images needed, of patches where these are remembered.
        seconds: of the processors.
    """

    masks: int
    forwards: int
    seconds: float


def _classifier(dims: int) -> torch.nn.Module:
    conv, pool = (torch.nn.Conv2d, torch.nn.Conv3d)[dims - 2], (torch.nn.AdaptiveAvgPool2d, torch.nn.AdaptiveAvgPool3d)
    body = [conv(1, 8, 3, padding=1), torch.nn.ReLU(), conv(8, 2, 3, padding=1), pool[dims - 2](1), torch.nn.Flatten()]
    return torch.nn.Sequential(*body).eval()


def _segmenter(dims: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv3d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(8, 2, 3, padding=1)
    ).eval()


Explain = Callable[..., torch.Tensor]
_SHARED: dict[str, Any] = {"target": ms.ClassScore([1], "softmax"), "mask_batch_size": 16}


def _rise(dims: int, size: int, num_masks: int, times: int) -> Any:
    return ms.rise(times * (num_masks + 1) - 1, **_SHARED)


def _windows(dims: int, size: int, num_masks: int, times: int, **settings: Any) -> Any:
    window = size // 6
    return ms.sliding_window(window, (*[window] * (dims - 1), window // times), **_SHARED | settings)


def _patches(dims: int, size: int, num_masks: int, times: int) -> Any:
    inferer = SlidingWindowInferer([size // 3] * dims, 8, overlap=0.5)
    target = ms.RegionScore(1, "softmax", "all")
    return _windows(dims, size, num_masks, times, target=target, inferer=inferer)


def _focused(dims: int, size: int, num_masks: int, times: int) -> Any:
    return ms.focused_rise(times * num_masks, window_size=size // 4, levels=2, **_SHARED)


def _shapley(dims: int, size: int, num_masks: int, times: int) -> Any:
    def regions(image: torch.Tensor, spacing: Any) -> torch.Tensor:
        places = torch.arange(size) // (size // 3)
        return (9 * places[:, None, None] + 3 * places[:, None] + places)[None] + 1

    return ms.shapley(num_coalitions=times * num_masks, regions=regions, **_SHARED)


#: by name: spatial axes, the network, and what makes the method
CASES: dict[str, tuple[int, Callable[[int], torch.nn.Module], Callable[[int, int, int, int], Any]]] = {
    "rise_3d": (3, _classifier, _rise),
    "rise_2d": (2, _classifier, _rise),
    "windows_3d": (3, _classifier, _windows),
    "windows_2d": (2, _classifier, _windows),
    "patches_3d": (3, _segmenter, _patches),
    "focused_rise_3d": (3, _classifier, _focused),
    "shapley_3d": (3, _classifier, _shapley),
}


def run(case: str, num_masks: int, size: int, times: int = 1, images: int = 1) -> Run:
    """Explain made images.

    Args:
        case: a key of :data:`CASES`.
        num_masks: masks, where the method is asked for a number.
        size: of a volume along each axis, in voxels, a multiple of 12. An image in 2D is four times as large.
        times: how often as many masks.
        images: how many images.
    """
    dims, network, method = CASES[case]
    torch.manual_seed(0)
    size = size if dims == 3 else 4 * size
    batch = torch.rand(images, 1, *[size] * dims)
    made, explain = network(dims), method(dims, size, num_masks, times)
    begun = time.process_time()
    found = explain.explain(batch, made)
    seconds = time.process_time() - begun
    return Run(len(found[0].indices), sum(each.num_forwards for each in found), seconds)


def measure(case: str, num_masks: int, size: int, rounds: int, memory: bool = True) -> list[dict[str, Any]]:
    """A row for twice the masks, and one for twice the images.

    Args:
        case: a key of :data:`CASES`.
        num_masks: as for :func:`run`.
        size: as for :func:`run`.
        rounds: in which all sizes alternate.
        memory: whether peaks are measured too.
    """
    sizes = {"once": (1, 1), "masks": (2, 1), "images": (1, 2)}
    found: dict[str, list[Run]] = {name: [] for name in sizes}
    for number in range(rounds + 1):  # the first one is not counted
        for name, (times, images) in sizes.items():
            one = run(case, num_masks, size, times, images)
            found[name] += [one] if number else []
    seconds = {name: min(each.seconds for each in runs) for name, runs in found.items()}
    peaks = {name: apart(__file__, case, num_masks, size, *each) if memory else None for name, each in sizes.items()}
    rows = []
    for name in ("masks", "images"):
        many, few = peaks[name], peaks["once"]
        rows.append(
            {
                "case": case,
                "twice": name,
                "masks": found["once"][0].masks,
                "masks then": found[name][0].masks,
                "forwards": found["once"][0].forwards,
                "forwards then": found[name][0].forwards,
                "seconds": seconds["once"],
                "time ratio": seconds[name] / seconds["once"],
                "MiB": few,
                "memory ratio": None if many is None or few is None else many / few,
            }
        )
    return rows


def main() -> None:
    """Print a line a doubling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--num_masks", type=int, default=255, help="with the unperturbed image, full batches")
    parser.add_argument("--size", type=int, default=48, help="of a volume, along each axis: a multiple of 12")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peaks too")
    add_inside(parser)
    add_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.inside:
        run(*args.inside)
        print(resident_peak())
        return
    keep_freed_memory("cpu")
    rows = []
    for case in args.cases:
        found = measure(case, args.num_masks, args.size, args.rounds, args.memory)
        rows += found
        for row in found:
            print(
                f"{case:16s} twice the {row['twice']:6s}: {row['time ratio']:.2f} times the time "
                f"({row['seconds']:.2f} s, {row['forwards']} forwards, then {row['forwards then']})"
                + (f", {row['memory ratio']:.3f} times the peak memory ({row['MiB']:.0f} MiB)" if args.memory else ""),
                flush=True,
            )
    keep(args, "doubling", rows)


if __name__ == "__main__":
    main()
