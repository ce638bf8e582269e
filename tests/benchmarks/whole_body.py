"""A CT of the size of a body on a computer without a GPU: how long a map takes, and whether it finds what it must.

    python tests/benchmarks/whole_body.py [--size 256] [--window 32] [--stride 32]

The volume is synthetic: a body, a spine, two lungs, and an organ whose segmentation is explained. The network is a 3D
UNet with a planted truth: it finds bright tissue by its local mean, and otherwise costs what such a network costs.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import UNet

import monai_saliency as ms
from monai_saliency.inferers.patch_plan import plan


class PlantedUNet(torch.nn.Module):
    """Two channels: the organ's logit rises with the mean of 9^3 voxels; a UNet's output is mixed in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.nn.functional.avg_pool3d(x, 9, 1, 4)
        return torch.cat([0.5 - mean, mean - 0.5], dim=1) * 8 + 0.05 * self.body(x)


def body(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A volume ``(1, 1, size, size, size)`` in [0, 1] with noise, and its organ ``(size, size, size)``."""
    x, y, z = torch.meshgrid(*[torch.linspace(-1, 1, size)] * 3, indexing="ij")
    volume = torch.zeros(size, size, size)
    volume[(x / 0.8) ** 2 + (y / 0.6) ** 2 < 1] = 0.3
    volume[(x**2 + (y + 0.45) ** 2) < 0.01] = 0.6
    for side in (-0.35, 0.35):
        volume[((x - side) / 0.25) ** 2 + (y / 0.4) ** 2 + ((z - 0.5) / 0.4) ** 2 < 1] = 0.05
    organ = ((x - 0.3) / 0.3) ** 2 + ((y - 0.1) / 0.25) ** 2 + ((z + 0.3) / 0.25) ** 2 < 1
    volume[organ] = 0.9
    volume += 0.02 * torch.randn(volume.shape, generator=torch.Generator().manual_seed(0))
    return volume[None, None], organ


def main() -> None:
    """Print counts, times, memory and where the peak lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--stride", type=int, default=32)
    args = parser.parse_args()
    image, organ = body(args.size)
    explain = ms.sliding_window(
        args.window,
        args.stride,
        target=ms.RegionScore(1, "softmax", region="predicted"),
        inferer=SlidingWindowInferer((96, 96, 96), sw_batch_size=2, overlap=0.25, mode="gaussian"),
    )
    counts = plan(explain.masks, explain.inferer, image[0], reach=organ)
    print(
        f"{args.size}^3, windows of {args.window}, strides of {args.stride}, {torch.get_num_threads()} threads; "
        f"planned for the organ itself: {counts.forwards} patch forwards, {counts.plain} by whole images",
        flush=True,
    )
    start = time.perf_counter(), time.process_time()
    (explanation,) = explain.explain(image, PlantedUNet().eval())
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    saliency = explanation.saliency[0]
    peak = saliency == saliency.max()
    print(
        f"{explanation.num_forwards} patch forwards, {counts.plain / explanation.num_forwards:.0f} times fewer than by "
        f"whole images; {wall / 60:.1f} minutes ({cpu / 60:.1f} of processor time); peak memory "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
    )
    print(
        f"{float(organ[peak].double().mean()):.0%} of the peak's voxels lie in the organ, which fills "
        f"{float(organ.double().mean()):.1%} of the volume"
    )


if __name__ == "__main__":
    main()
