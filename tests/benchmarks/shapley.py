"""Shapley values of organs in a CT, under a sliding-window model: how many patches go through the network.

    python tests/benchmarks/shapley.py [--organs 6 12 18 24] [--shape 270 270 225] [--patch 96] [--coalitions 2000]

Organs are ellipsoids at random places, with the background as a player; what is explained is the mean of one organ's
logits, or of its probabilities, or of the whole volume's. Counted are forwards of patches, running nothing: of the
exact values; and of KernelSHAP with random coalitions, whose patches are remembered too, or which run whole images.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.inferers.patch_plan import plan
from monai_saliency.utils.patch_grid import PatchGrid


def ellipsoids(shape: list[int], count: int, seed: int = 0) -> torch.Tensor:
    """A label map ``(1, *shape)``: radii from 3 to 13 % of the longest axis."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(shape, np.int32)
    axes = np.ogrid[tuple(slice(n) for n in shape)]
    for label in range(1, count + 1):
        centre = rng.uniform(0.2, 0.8, len(shape)) * shape
        radius = rng.uniform(0.03, 0.13, len(shape)) * max(shape)
        parts = zip(axes, centre, radius, strict=True)
        inside = sum(((axis - at) / edge) ** 2 for axis, at, edge in parts) < 1
        labels[inside & (labels == 0)] = label
    return torch.from_numpy(labels)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--organs", type=int, nargs="+", default=[6, 12, 18, 24])
    parser.add_argument("--shape", type=int, nargs="+", default=[270, 270, 225])
    parser.add_argument("--patch", type=int, default=96)
    parser.add_argument("--coalitions", type=int, default=2000)
    options = parser.parse_args()
    inferer = SlidingWindowInferer([options.patch] * len(options.shape), 4, 0.5)
    boxes = PatchGrid(inferer, options.shape).boxes
    image = torch.empty(1, *options.shape)
    print(f"{len(boxes)} patches of {options.patch}; KernelSHAP of {options.coalitions} coalitions")
    print("organs  reads          linear  coalitions  exact forwards  KernelSHAP remembered  KernelSHAP whole")
    for count in options.organs:
        labels = ellipsoids(options.shape, count)
        for reads, reach in (("one organ", labels[0] == count // 2), ("the volume", None)):
            drawn = plan(ms.CoalitionMasks(options.coalitions), inferer, image, labels, reach=reach)
            rest = f"{drawn.forwards:22}  {drawn.plain:16}"
            for linear in (True, False):
                masks = ms.CoalitionMasks(inferer=inferer, linear=linear)
                exact = plan(masks, inferer, image, labels, reach=reach)
                coalitions = exact.plain // len(boxes) - 1
                stopped = masks.bind(image, labels).stopped((), torch.zeros(0), torch.zeros(0))
                print(f"{count:6}  {reads:13}  {linear!s:6}  {coalitions:10}  {exact.forwards:14}  {rest}  {stopped}")


if __name__ == "__main__":
    main()
