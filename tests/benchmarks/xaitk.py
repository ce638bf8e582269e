"""Ours against xaitk-saliency's: each method that both have, same masks, same network, one CPU thread.

    python tests/benchmarks/xaitk.py [--only RISE SBSM] [--num_masks 2000] [--size 224] [--rounds 3] [--output FILE]

For each method: the largest difference of the two maps after xaitk-saliency's own normalisation, and how many times
faster and smaller ours is. Rounds of both alternate; ratios are of CPU seconds, summed over the rounds. Peak memory is
what a fresh process needs above what it held after the network ran on a full batch.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import add_inside, apart, resident_peak
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
COLOURS = [[0, 0, 0], [255, 40, 0], [90, 200, 255]]
COLUMNS = {
    "difference": "largest difference",
    "ratio": "times faster",
    "ours_memory": "our peak, MiB",
    "theirs_memory": "its peak, MiB",
    "ratio_memory": "times less memory",
}


@dataclass(frozen=True)
class Setting:
    """The image and masks of both sides; windows and discs are about as many as random masks."""

    num_masks: int = 2000
    size: int = 224
    batch_size: int = 16

    @property
    def window(self) -> tuple[int, int]:
        return (max(2, self.size // 8),) * 2

    @property
    def stride(self) -> tuple[int, int]:
        return (max(1, round(self.size / self.num_masks**0.5)),) * 2

    def image(self, seed: int = 0) -> torch.Tensor:
        """A smooth random image ``(3, H, W)``, values of bytes."""
        coarse = torch.rand(1, 3, 9, 9, generator=torch.Generator().manual_seed(seed))
        return 255 * torch.nn.functional.interpolate(coarse, [self.size] * 2, mode="bilinear")[0]


class Network(torch.nn.Module):
    """A light network that gives ``"classes"``, an ``"embedding"`` or ``"boxes"``."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.size = kind, size
        outputs = {"classes": CLASSES, "embedding": 16, "boxes": BOXES * (4 + CLASSES)}[kind]
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 8, stride=8),
            torch.nn.Tanh(),
            torch.nn.AdaptiveAvgPool2d(3),
            torch.nn.Flatten(),
            torch.nn.Linear(72, outputs),
        )

    def forward(self, batch: torch.Tensor) -> Any:
        found = self.layers(batch / 255)
        if self.kind != "boxes":
            return (5 * found).softmax(dim=1) if self.kind == "classes" else found
        numbers = (3 * found).sigmoid().reshape(len(batch), BOXES, 4 + CLASSES)
        low = numbers[:, :, :2] * self.size / 3
        boxes = torch.cat([low, low + 4 + numbers[:, :, 2:4] * self.size / 2], dim=2)
        keys = "boxes", "labels_scores", "labels"
        return [
            dict(zip(keys, (box, row, row.argmax(dim=1)), strict=True))
            for box, row in zip(boxes, numbers[:, :, 4:], strict=True)
        ]


class Detector(ms.xaitk.Detector):
    """Our boxes end behind their last voxel, xaitk-saliency's at it."""

    def detect_objects(self, img_iter: Any) -> Any:
        for found in super().detect_objects(img_iter):
            yield [(type(box)(box.min_vertex, box.max_vertex - 1), scores) for box, scores in found]


def largest(maps: np.ndarray) -> np.ndarray:
    """xaitk-saliency's normalisation of most maps: each divided by its largest magnitude."""
    return maps / np.abs(maps).max(axis=(1, 2), keepdims=True)


def in_range(maps: np.ndarray) -> np.ndarray:
    """Its normalisation of squared differences: one map of all classes, moved and scaled to [0, 1]."""
    total = maps.sum(axis=0)
    return (total - total.min()) / (total.max() - total.min())


def by_fill(maps: np.ndarray) -> np.ndarray:
    """Its order of MC-RISE's maps: by fill, then by class."""
    return largest(maps).reshape(CLASSES, -1, *maps.shape[1:]).swapaxes(0, 1)


@dataclass(frozen=True)
class Method:
    """A row of the table: both methods of a setting, the network's kind, and xaitk-saliency's normalisation."""

    ours: Callable[..., ms.PerturbationInferer]
    theirs: Callable[[Setting], Any]
    kind: str = "classes"
    normalised: Callable[[np.ndarray], np.ndarray] = largest


def discs(s: Setting, scoring: Any) -> PerturbationOcclusion:
    return PerturbationOcclusion(SlidingRadial(s.window, s.stride), scoring)


METHODS = {
    "RISE": Method(
        lambda s, **others: ms.rise(s.num_masks, 8, P1, SEED, form="debiased", **others),
        lambda s: RISEStack(s.num_masks, 8, P1, SEED, threads=0),
    ),
    "sliding window": Method(
        lambda s, **others: ms.sliding_window(s.window, s.stride, **others),
        lambda s: SlidingWindowStack(s.window, s.stride),
    ),
    "sliding radial": Method(
        lambda s, **others: ms.sliding_radial(s.window, s.stride, **others), lambda s: discs(s, OcclusionScoring())
    ),
    "squared difference": Method(
        lambda s, **others: ms.squared_difference(s.window, s.stride, **others),
        lambda s: discs(s, SquaredDifferenceScoring()),
        normalised=in_range,
    ),
    "MC-RISE": Method(
        lambda s, **others: ms.mc_rise(
            s.num_masks, 8, P1, SEED, COLOURS[1:], "xaitk", fill=ms.ConstantFill(COLOURS[0]), **others
        ),
        lambda s: MCRISEStack(s.num_masks, 8, P1, COLOURS, SEED, threads=0),
        normalised=by_fill,
    ),
    "SBSM": Method(
        lambda s, **others: ms.sbsm(s.window, s.stride, **others),
        lambda s: SBSMStack(s.window, s.stride),
        "embedding",
    ),
    "D-RISE": Method(
        lambda s, **others: ms.drise(s.num_masks, 8, P1, SEED, "plain", **others),
        lambda s: DRISEStack(s.num_masks, 8, P1, SEED, threads=0),
        "boxes",
    ),
    "random grid, detector": Method(
        lambda s, **others: ms.random_grid(
            s.num_masks, s.window, P1, SEED, estimator=ms.DRISEScoring("plain"), **others
        ),
        lambda s: RandomGridStack(s.num_masks, s.window, P1, SEED, threads=0),
        "boxes",
    ),
}


@torch.no_grad()
def explained(name: str, side: str, s: Setting) -> np.ndarray:
    """The normalised maps of a method of one side, ``"ours"`` or ``"theirs"``."""
    method, image = METHODS[name], s.image()
    network = Network(method.kind, s.size).eval()
    query = network(s.image(1)[None])
    if side == "ours":
        target = {
            "classes": lambda: ms.ClassScore("all", "none"),
            "embedding": lambda: ms.EmbeddingSimilarity("distance", query),
            "boxes": lambda: ms.DetectionScore(0.0),
        }[method.kind]()
        explain = method.ours(s, target=target, mask_batch_size=s.batch_size)
        return method.normalised(np.asarray(explain(image[None], network)[0]))
    array, stack = image.permute(1, 2, 0).numpy(), method.theirs(s)
    if method.kind == "classes":
        return stack(array, ms.xaitk.Classifier(network, CLASSES, "none", batch_size=s.batch_size))
    if method.kind == "embedding":
        other = s.image(1).permute(1, 2, 0).numpy()
        return stack(array, [other], ms.xaitk.Descriptor(network, batch_size=s.batch_size))
    (found,) = network(image[None])
    order = found["labels_scores"].amax(dim=1).argsort(descending=True)  # ours come the highest first
    boxes, scores = (found[key][order].numpy() for key in ("boxes", "labels_scores"))
    keys = ["boxes", "labels", "labels_scores"]
    box = Detector(network, CLASSES, keys=keys, rows_first=False, batch_size=s.batch_size)
    return stack(array, boxes - np.array([0, 0, 1, 1]), scores, box)


def needed(name: str, side: str, s: Setting) -> float:
    """The most memory in MiB that a side needs, in this process."""
    explained(name, side, replace(s, num_masks=4, size=32))  # what is loaded once
    Network(METHODS[name].kind, s.size)(s.image()[None].repeat(s.batch_size, 1, 1, 1))
    if sys.platform == "linux":  # give free memory back, and start the peak again
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    explained(name, side, s)
    return resident_peak() - before


def compare(name: str, s: Setting, rounds: int, memory: bool) -> dict[str, Any]:
    """The row of a method."""
    row: dict[str, Any] = {"method": name, **asdict(s), "rounds": rounds, "ours": 0.0, "theirs": 0.0}
    maps = {}
    for number, side in itertools.product(range(rounds + 1), ("ours", "theirs")):
        start = time.process_time()
        maps[side] = explained(name, side, s if number else replace(s, num_masks=4, size=32))
        row[side] += time.process_time() - start if number else 0.0  # the first loads what is loaded once
        if memory and not number:
            row[f"{side}_memory"] = float(apart(__file__, name, side, asdict(s)))
    row["difference"] = float(np.abs(maps["theirs"] - maps["ours"]).max())
    row["ratio"] = row["theirs"] / row["ours"]
    if memory:
        row["ratio_memory"] = row["theirs_memory"] / row["ours_memory"]
    return row


def main() -> None:
    """Print a row for each method, and write them as JSON where a file is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS), help="these methods")
    parser.add_argument("--num_masks", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224, help="of the image, along each axis")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a JSON file of the rows")
    parser.add_argument("--memory", choices=["yes", "no"], default="yes", help="measure it, in further processes")
    add_inside(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.inside:
        name, side, setting = args.inside
        print(needed(name, side, Setting(**setting)))
        return
    rows = []
    setting = Setting(args.num_masks, args.size, args.batch_size)
    print(f"| method | {' | '.join(COLUMNS.values())} |\n|---|{'---|' * len(COLUMNS)}", flush=True)
    for name in args.only:
        rows.append(compare(name, setting, args.rounds, args.memory == "yes"))
        cells = [f"{rows[-1][key]:.3g}" if key in rows[-1] else "" for key in COLUMNS]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if args.output:
        args.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
