"""Ours against xaitk-saliency's: each method that both have, same masks, same network, one CPU thread.

    python tests/benchmarks/xaitk.py [--only RISE SBSM] [--num_masks 2000] [--size 224] [--rounds 3] [--output DIR]

Printed for each method: the largest difference of the two maps after xaitk-saliency's own normalisation, how many times
faster ours is from end to end, and how many times without the network, whose time is taken in the same calls. Rounds of
both alternate, so that a machine's moods hit both. Ratios are of sums over the rounds, of CPU seconds: other processes
change those least. Wall seconds stand beside them in the files. What xaitk-saliency needs to bring its images into the
network and the answers back is counted as the network's time, to its advantage.

Peak memory is what a fresh process needs above what it held when the network had run on a full batch. The last row is
RISE on a volume, which xaitk-saliency has not.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import itertools
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import add_inside, apart
from smqtk_classifier.interfaces.classify_image import ClassifyImage
from smqtk_descriptors.interfaces.image_descriptor_generator import ImageDescriptorGenerator
from smqtk_detection.interfaces.detect_image_objects import DetectImageObjects
from smqtk_image_io.bbox import AxisAlignedBoundingBox
from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.squared_difference_scoring import SquaredDifferenceScoring
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.mc_rise import MCRISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.occlusion_based import PerturbationOcclusion
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.slidingwindow import SlidingWindowStack
from xaitk_saliency.impls.gen_image_similarity_blackbox_sal.sbsm import SBSMStack
from xaitk_saliency.impls.gen_object_detector_blackbox_sal.drise import DRISEStack, RandomGridStack
from xaitk_saliency.impls.perturb_image.sliding_radial import SlidingRadial

import monai_saliency as ms

CLASSES, BOXES = 3, 2
P1, SEED = 0.5, 3
MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """What both sides explain.

    Attributes:
        num_masks: of random masks; windows and discs are about as many.
        size: of the image, along each axis.
        batch_size: images in a forward, on both sides.
        dims: spatial axes.
    """

    num_masks: int = 2000
    size: int = 224
    batch_size: int = 16
    dims: int = 2

    @property
    def window(self) -> tuple[int, int]:
        """The edge of a window, an eighth of the image."""
        return (max(2, self.size // 8),) * 2

    @property
    def stride(self) -> tuple[int, int]:
        """The step with which there are at most about as many windows as random masks."""
        return (max(1, round(self.size / self.num_masks**0.5)),) * 2

    @property
    def cell(self) -> tuple[int, int]:
        """The edge of a cell, an eighth of the image."""
        return self.window

    def image(self, seed: int = 0) -> torch.Tensor:
        """A smooth random image ``(channels, *spatial)``, values of bytes."""
        coarse = torch.rand(1, 3 if self.dims == 2 else 1, *[9] * self.dims, generator=_generator(seed))
        mode = "bilinear" if self.dims == 2 else "trilinear"
        return 255 * torch.nn.functional.interpolate(coarse, [self.size] * self.dims, mode=mode)[0]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Clock:
    """Seconds, on the wall and of the processor."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time inside."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - wall
            self.cpu += time.process_time() - cpu


class BlackBox:
    """A light network, for us and, through NumPy, for xaitk-saliency.

    Args:
        kind: what it answers: ``"classes"``, ``"embedding"`` or ``"boxes"``.
        setting: of the images.
    """

    def __init__(self, kind: str, setting: Setting) -> None:
        torch.manual_seed(0)
        self.kind, self.size, self.batch_size = kind, setting.size, setting.batch_size
        outputs = {"classes": CLASSES, "embedding": 16, "boxes": BOXES * (4 + CLASSES)}[kind]
        conv = torch.nn.Conv2d if setting.dims == 2 else torch.nn.Conv3d
        pool = torch.nn.AdaptiveAvgPool2d if setting.dims == 2 else torch.nn.AdaptiveAvgPool3d
        self.network = torch.nn.Sequential(
            conv(3 if setting.dims == 2 else 1, 8, 8, stride=8),
            torch.nn.Tanh(),
            pool(3),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 3**setting.dims, outputs),
        ).eval()
        self.clock = Clock()

    def __call__(self, batch: torch.Tensor) -> Any:
        """The network as we call it."""
        with self.clock.running(), torch.no_grad():
            return self._answers(batch)

    def _answers(self, batch: torch.Tensor) -> Any:
        found = self.network(batch / 255)
        if self.kind == "classes":
            return (5 * found).softmax(dim=1)
        if self.kind == "embedding":
            return found
        numbers = (3 * found).sigmoid().reshape(len(batch), BOXES, 4 + CLASSES)
        low = numbers[:, :, :2] * self.size / 3
        high = low + 3 + numbers[:, :, 2:4] * self.size / 2
        scores = numbers[:, :, 4:]
        # Ours end behind their last voxel, xaitk-saliency's at it.
        boxes = torch.cat([low, high + 1], dim=2)
        return [
            {"boxes": boxes[i], "labels": scores[i].argmax(dim=1), "labels_scores": scores[i]}
            for i in range(len(batch))
        ]

    def of_arrays(self, images: Iterable[np.ndarray]) -> Iterator[Any]:
        """The answer to each image ``(H, W, C)``, which go through the network in batches of the same size as ours."""
        images = iter(images)
        while chunk := list(itertools.islice(images, self.batch_size)):
            with self.clock.running(), torch.no_grad():
                answers = self._answers(torch.from_numpy(np.stack(chunk)).permute(0, 3, 1, 2).contiguous())
            yield from answers


class Classifier(ClassifyImage):
    """The network as xaitk-saliency's classifiers are."""

    def __init__(self, box: BlackBox) -> None:
        self.box = box

    def get_labels(self) -> list[int]:
        return list(range(CLASSES))

    def classify_images(self, img_iter: Any) -> Iterator[dict]:
        for answer in self.box.of_arrays(img_iter):
            yield dict(enumerate(answer.tolist()))

    def get_config(self) -> dict:
        return {}


class Descriptors(ImageDescriptorGenerator):
    """The network as xaitk-saliency's descriptor generators are."""

    def __init__(self, box: BlackBox) -> None:
        self.box = box

    def generate_arrays_from_images(self, img_mat_iter: Any) -> Iterator[np.ndarray]:
        for answer in self.box.of_arrays(img_mat_iter):
            yield answer.numpy()

    def get_config(self) -> dict:
        return {}


class Detector(DetectImageObjects):
    """The network as xaitk-saliency's detectors are."""

    def __init__(self, box: BlackBox) -> None:
        self.box = box

    def detect_objects(self, img_iter: Iterable[np.ndarray]) -> Iterator[list]:
        for answer in self.box.of_arrays(img_iter):
            corners, scores = answer["boxes"].numpy(), answer["labels_scores"].tolist()
            yield [
                (AxisAlignedBoundingBox(each[:2], each[2:] - 1), dict(enumerate(row)))
                for each, row in zip(corners, scores, strict=True)
            ]

    def get_config(self) -> dict:
        return {}


def _largest(maps: np.ndarray) -> np.ndarray:
    """xaitk-saliency's normalisation of most maps: each divided by its largest magnitude."""
    return maps / np.abs(maps).max(axis=(1, 2), keepdims=True)


def _range(maps: np.ndarray) -> np.ndarray:
    """Its normalisation of squared differences: one map of all classes, moved and scaled to [0, 1]."""
    total = maps.sum(axis=0)
    return (total - total.min()) / (total.max() - total.min())


def _by_fill(maps: np.ndarray) -> np.ndarray:
    """Its order of MC-RISE's maps: by fill, then by class."""
    return _largest(maps).reshape(CLASSES, -1, *maps.shape[1:]).swapaxes(0, 1)


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        ours: makes our method for a setting, given its target and mask batch size.
        theirs: makes xaitk-saliency's; None for what it has not.
        kind: what the network answers.
        normalised: xaitk-saliency's normalisation, of our maps.
        dims: spatial axes.
    """

    ours: Callable[..., ms.PerturbationInferer]
    theirs: Callable[[Setting], Any] | None
    kind: str = "classes"
    normalised: Callable[[np.ndarray], np.ndarray] = _largest
    dims: int = 2


COLOURS = [[0, 0, 0], [255, 40, 0], [90, 200, 255]]


def _mc_rise(s: Setting, **settings: Any) -> ms.PerturbationInferer:
    first, *others = COLOURS
    return ms.mc_rise(s.num_masks, 8, P1, SEED, others, "xaitk", fill=ms.ConstantFill(first), **settings)


#: a method is added by one row
METHODS: dict[str, Method] = {
    "RISE": Method(
        lambda s, **settings: ms.rise(s.num_masks, 8, P1, SEED, form="debiased", **settings),
        lambda s: RISEStack(s.num_masks, 8, P1, SEED, threads=0, debiased=True),
    ),
    "sliding window": Method(
        lambda s, **settings: ms.sliding_window(s.window, s.stride, **settings),
        lambda s: SlidingWindowStack(s.window, s.stride, threads=0),
    ),
    "sliding radial": Method(
        lambda s, **settings: ms.sliding_radial(s.window, s.stride, **settings),
        lambda s: PerturbationOcclusion(SlidingRadial(s.window, s.stride), OcclusionScoring(), threads=0),
    ),
    "squared difference": Method(
        lambda s, **settings: ms.squared_difference(s.window, s.stride, **settings),
        lambda s: PerturbationOcclusion(SlidingRadial(s.window, s.stride), SquaredDifferenceScoring(), threads=0),
        normalised=_range,
    ),
    "MC-RISE": Method(
        _mc_rise, lambda s: MCRISEStack(s.num_masks, 8, P1, COLOURS, SEED, threads=0), normalised=_by_fill
    ),
    "SBSM": Method(
        lambda s, **settings: ms.sbsm(s.window, s.stride, **settings),
        lambda s: SBSMStack(s.window, s.stride, threads=0),
        kind="embedding",
    ),
    "D-RISE": Method(
        lambda s, **settings: ms.drise(s.num_masks, 8, P1, SEED, "plain", **settings),
        lambda s: DRISEStack(s.num_masks, 8, P1, SEED, threads=0),
        kind="boxes",
    ),
    "random grid, detector": Method(
        lambda s, **settings: ms.random_grid(
            s.num_masks, s.cell, P1, SEED, estimator=ms.DRISEScoring("plain"), **settings
        ),
        lambda s: RandomGridStack(s.num_masks, s.cell, P1, SEED, threads=0),
        kind="boxes",
    ),
    "RISE 3D": Method(
        lambda s, **settings: ms.rise(s.num_masks, 8, P1, SEED, form="debiased", **settings), None, dims=3
    ),
}


class Run:
    """One method on one image, explained by either side.

    Args:
        name: of the method.
        setting: what is explained.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        self.method = METHODS[name]
        self.setting = replace(setting, dims=self.method.dims)
        self.box = BlackBox(self.method.kind, self.setting)
        self.image, self.query = self.setting.image(), self.setting.image(1)

    def ours(self) -> np.ndarray:
        """Our maps, normalised as xaitk-saliency's."""
        with torch.no_grad():
            query = self.box.network(self.query[None] / 255) if self.method.kind == "embedding" else None
        target = {
            "classes": lambda: ms.ClassScore("all", "none"),
            "embedding": lambda: ms.EmbeddingSimilarity("distance", query),
            "boxes": lambda: ms.DetectionScore(0.0),
        }[self.method.kind]()
        explain = self.method.ours(self.setting, target=target, mask_batch_size=self.setting.batch_size)
        (found,) = explain.explain(self.image[None], self.box)
        maps = np.asarray(found.saliency)
        return self.method.normalised(maps) if self.setting.dims == 2 else maps

    def theirs(self) -> np.ndarray:
        """xaitk-saliency's maps."""
        if self.method.theirs is None:
            raise ValueError("xaitk-saliency does not have this method")
        stack, image = self.method.theirs(self.setting), _channel_last(self.image)
        if self.method.kind == "classes":
            return stack.generate(image, Classifier(self.box))
        if self.method.kind == "embedding":
            return stack.generate(image, [_channel_last(self.query)], Descriptors(self.box))
        (answer,) = self.box.of_arrays([image])
        order = answer["labels_scores"].amax(dim=1).argsort(descending=True)  # ours come the highest first
        corners, scores = (answer[key][order].numpy() for key in ("boxes", "labels_scores"))
        return stack.generate(image, corners - np.array([0, 0, 1, 1]), scores, Detector(self.box))

    def timed(self, side: str) -> tuple[np.ndarray, Clock, Clock]:
        """The maps, the time of all, and the time without the network."""
        clock, self.box.clock = Clock(), Clock()
        with clock.running():
            maps = getattr(self, side)()
        network = self.box.clock
        return maps, clock, Clock(clock.wall - network.wall, clock.cpu - network.cpu)


def _channel_last(image: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def resident(largest: bool) -> float:
    """Resident memory in MiB: what this process holds now, or the most that it held since :func:`forget_peak`."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(
            each for each in status.read_text().splitlines() if each.startswith("VmHWM:" if largest else "VmRSS:")
        )
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Give free memory back to the system, and let the peak start again where the system can do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def needed(name: str, side: str, setting: Setting) -> float:
    """The most memory in MiB that a side needs above what was held after a forward of a full batch, in this process."""
    # What is loaded once, and the network's own work, is in memory before.
    getattr(Run(name, replace(setting, num_masks=4, size=32)), side)()
    run = Run(name, setting)
    run.box(run.setting.image()[None].repeat(setting.batch_size, *[1] * (run.setting.dims + 1)))
    forget_peak()
    before = resident(largest=False)
    getattr(run, side)()
    return resident(largest=True) - before


def peak(name: str, side: str, setting: Setting) -> float:
    """:func:`needed`, in a fresh process."""
    return float(apart(__file__, name, side, asdict(setting)))


def compare(name: str, setting: Setting, rounds: int = 3) -> dict[str, Any]:
    """Time a method on both sides, one after the other.

    Args:
        name: of the method.
        setting: what is explained.
        rounds: how often.

    Returns:
        seconds of both, summed over the rounds, and the ratios of theirs to ours; without theirs, only ours.
    """
    run = Run(name, setting)
    sides = ["ours"] if run.method.theirs is None else ["ours", "theirs"]
    for side in sides:  # what is loaded or found out once
        getattr(Run(name, replace(setting, num_masks=4, size=32)), side)()
    row: dict[str, Any] = {"method": name, **asdict(run.setting), "rounds": rounds}
    row |= {f"{side}_{part}": 0.0 for side in sides for part in PARTS}
    maps = {}
    for _, side in itertools.product(range(rounds), sides):
        maps[side], whole, rest = run.timed(side)
        for part, seconds in zip(PARTS, (whole.wall, whole.cpu, rest.wall, rest.cpu), strict=True):
            row[f"{side}_{part}"] += seconds
    if "theirs" in maps:
        row["difference"] = float(np.abs(maps["theirs"] - maps["ours"]).max())
        row |= {f"ratio_{part}": row[f"theirs_{part}"] / row[f"ours_{part}"] for part in PARTS}
    return row


PARTS = ("wall", "cpu", "wall_without_network", "cpu_without_network")
COLUMNS = {
    "difference": "largest difference",
    "ratio_cpu": "times faster",
    "ratio_cpu_without_network": "without the network",
    "ours_memory": "our peak, MiB",
    "theirs_memory": "its peak, MiB",
    "ratio_memory": "times less memory",
}


def main() -> None:
    """Print a row for each method, and write them as JSON and CSV where a folder is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS), help="these methods")
    parser.add_argument("--num_masks", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224, help="of the image, along each axis")
    parser.add_argument("--size_3d", type=int, default=128, help="of the volume, along each axis")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder of xaitk.json and xaitk.csv")
    parser.add_argument("--memory", choices=["yes", "no"], default="yes", help="measure it, in further processes")
    add_inside(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.inside:
        name, side, setting = args.inside
        print(needed(name, side, Setting(**setting)))
        return
    rows = []
    print(
        f"{args.num_masks} masks, {args.size}^2 and {args.size_3d}^3, {args.rounds} rounds, batches of "
        f"{args.batch_size}"
    )
    print(f"| method | {' | '.join(COLUMNS.values())} |\n|---|{'---|' * len(COLUMNS)}", flush=True)
    for name in args.only:
        size = args.size if METHODS[name].dims == 2 else args.size_3d
        setting = Setting(args.num_masks, size, args.batch_size, METHODS[name].dims)
        row = compare(name, setting, args.rounds if METHODS[name].theirs else 1)
        sides = [side for side in ("ours", "theirs") if args.memory == "yes" and f"{side}_cpu" in row]
        row |= {f"{side}_memory": peak(name, side, setting) for side in sides}
        if len(sides) == 2:
            row["ratio_memory"] = row["theirs_memory"] / row["ours_memory"]
        rows.append(row)
        print(f"| {name} | {' | '.join(f'{row[key]:.3g}' if key in row else '' for key in COLUMNS)} |", flush=True)
    if args.output:
        _write(args.output, rows)


def _write(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "xaitk.json").write_text(json.dumps(rows, indent=2) + "\n")
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "xaitk.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
