"""Ours against xaitk-saliency's: the same masks, the same light network, one CPU thread.

    python tests/benchmarks/xaitk.py [--only RISE] [--num_masks 2000] [--size 224] [--rounds 3] [--json FILE]

The largest difference of the two maps after xaitk-saliency's own normalisation (each divided by its largest magnitude),
and how many times faster and smaller ours is. Rounds of both alternate; ratios are of CPU seconds, summed over the
rounds. Peak memory is what a fresh process needs above what it held after the network ran on a full batch.
"""

import argparse
import ctypes
import itertools
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import add_inside, add_options, apart, keep, markdown, resident_peak
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.slidingwindow import SlidingWindowStack

import monai_saliency as ms

CLASSES, P1, SEED = 3, 0.5, 3


@dataclass(frozen=True)
class Setting:
    """The image and masks of both sides; windows are about as many as random masks."""

    num_masks: int = 2000
    size: int = 224
    batch_size: int = 16

    @property
    def windows(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Their size and their stride."""
        return (max(2, self.size // 8),) * 2, (max(1, round(self.size / self.num_masks**0.5)),) * 2

    def image(self) -> torch.Tensor:
        """A smooth random image ``(3, H, W)``, values of bytes."""
        coarse = torch.rand(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))
        return 255 * torch.nn.functional.interpolate(coarse, [self.size] * 2, mode="bilinear")[0]


METHODS: dict[str, tuple[Any, Any]] = {
    "RISE": (
        lambda s, **others: ms.rise(s.num_masks, 8, P1, SEED, form="debiased", **others),
        lambda s: RISEStack(s.num_masks, 8, P1, SEED, threads=0),
    ),
    "sliding window": (
        lambda s, **others: ms.sliding_window(*s.windows, **others),
        lambda s: SlidingWindowStack(*s.windows),
    ),
}


def network() -> torch.nn.Module:
    """Three probabilities of an image of bytes."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 8, stride=8), torch.nn.Tanh(), torch.nn.AdaptiveAvgPool2d(3), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(72, CLASSES), torch.nn.Softmax(dim=1)).eval()


@torch.no_grad()
def explained(name: str, side: str, s: Setting) -> np.ndarray:
    """The normalised maps of a method of one side, ``"ours"`` or ``"theirs"``."""
    ours, theirs = METHODS[name]
    if side == "ours":
        explain = ours(s, target=ms.ClassScore("all", "none"), mask_batch_size=s.batch_size)
        maps = np.asarray(explain(s.image()[None], network())[0])
        return maps / np.abs(maps).max(axis=(1, 2), keepdims=True)
    box = ms.xaitk.Classifier(network(), CLASSES, "none", batch_size=s.batch_size)
    return theirs(s)(s.image().permute(1, 2, 0).numpy(), box)


def needed(name: str, side: str, s: Setting) -> float:
    """The most memory in MiB that a side needs, in this process."""
    explained(name, side, replace(s, num_masks=4, size=32))  # what is loaded once
    network()(s.image()[None].repeat(s.batch_size, 1, 1, 1))
    if sys.platform == "linux":  # give free memory back, and start the peak again
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    explained(name, side, s)
    return resident_peak() - before


def compare(name: str, s: Setting, rounds: int) -> dict[str, Any]:
    """The row of a method."""
    spent, memory, maps = {"ours": 0.0, "theirs": 0.0}, {}, {}
    for number, side in itertools.product(range(rounds + 1), spent):
        start = time.process_time()
        maps[side] = explained(name, side, s if number else replace(s, num_masks=4, size=32))
        spent[side] += time.process_time() - start if number else 0.0  # the first loads what is loaded once
        if not number:
            memory[side] = float(apart(__file__, name, side, asdict(s)))
    row = {"method": name, "difference": float(np.abs(maps["theirs"] - maps["ours"]).max())}
    row |= {"times faster": spent["theirs"] / spent["ours"], "our MiB": memory["ours"], "its MiB": memory["theirs"]}
    return {**row, "times less memory": memory["theirs"] / memory["ours"]}


def main() -> None:
    """Print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS), help="these methods")
    parser.add_argument("--num_masks", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224, help="of the image, along each axis")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    add_inside(parser)
    add_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.inside:
        name, side, setting = args.inside
        print(needed(name, side, Setting(**setting)))
        return
    rows = [compare(name, Setting(args.num_masks, args.size, args.batch_size), args.rounds) for name in args.only]
    print(markdown(rows))
    keep(args, "xaitk", rows, ["xaitk-saliency"])


if __name__ == "__main__":
    main()
