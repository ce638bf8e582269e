"""What an explanation costs: wall time over that of the same bare forwards, measured in one run.

    python tests/benchmarks/overhead.py [--rounds 3] [--num_masks 63] [--networks DenseNet121 ResNet18 light]
        [--device cpu] [--json FILE] [--keep [LABEL]]

On a CPU a bare forward of the same batch follows each forward of the explanation, so that a machine's moods hit both,
and its time is taken out of the explanation's. On a GPU rounds of both alternate. Printed is the median of the rounds'
ratios, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from monai.networks.nets import DenseNet121, resnet18
from record import add_options, keep, light, markdown, now

import monai_saliency as ms


def methods(size: int, dims: int, batch_size: int, num_masks: int, **more: Any) -> dict[str, ms.PerturbationInferer]:
    """Windows, RISE with the cheapest fill and with the dearest, and the bundle's method."""
    window = size // round((num_masks + 1) ** (1 / dims))
    given = {"target": ms.ClassScore([1], activation="softmax"), "mask_batch_size": batch_size} | more
    return {
        "windows": ms.sliding_window(window_size=window, stride=window, **given),
        "rise": ms.rise(num_masks, seed=0, **given),
        "rise, blurred fill": ms.rise(num_masks, fill=ms.BlurFill(5), **given),
        "focused_rise": ms.focused_rise(**given),
    }


#: by name: the network, spatial axes, voxels along each, images in a batch, and masks where no number is given
QUESTIONS = {
    "DenseNet121 3D 64^3": ("DenseNet121", 3, 64, 8, 63),
    "ResNet18 2D 224^2": ("ResNet18", 2, 224, 16, 63),
    "light 3D 64^3": ("light", 3, 64, 16, 1023),
    "light 2D 224^2": ("light", 2, 224, 16, 1023),
}


def made(kind: str, dims: int, size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network with random weights, and a random image."""
    torch.manual_seed(0)
    if kind == "light":
        network, channels = light(dims), 3
    elif kind == "DenseNet121":
        network, channels = DenseNet121(spatial_dims=dims, in_channels=1, out_channels=2), 1
    else:
        network, channels = resnet18(spatial_dims=dims, n_input_channels=3, num_classes=10), 3
    return network.eval(), torch.rand(1, channels, *[size] * dims)


class Timed(torch.nn.Module):
    """A network that notes the sizes of its batches, and on a CPU times a bare forward after each."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network, self.batch = network, torch.empty(0)
        self.sizes: list[int] = []
        self.seconds: list[float] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(batch)
        self.sizes.append(len(batch))
        if len(self.batch) < len(batch):  # the largest one, of which bare forwards are made later
            self.batch = batch.clone()
        if not batch.is_cuda:
            self.seconds.append(self.bare([batch]))
        return found

    def bare(self, batches: Iterable[torch.Tensor]) -> float:
        """Seconds of forwards of some batches."""
        device = str(self.batch.device)
        start = now(device)
        with torch.no_grad():
            for batch in batches:
                self.network(batch)
        return now(device) - start


def measure(
    network: torch.nn.Module, image: torch.Tensor, explain: ms.PerturbationInferer, rounds: int
) -> tuple[list[float], int]:
    """The ratio of each round, and how many images it runs."""
    timed = Timed(network).eval()
    explain(image, timed)  # warms up
    ratios = []
    for _ in range(rounds):
        timed.sizes, timed.seconds = [], []
        start = now(str(image.device))
        explain(image, timed)
        spent = now(str(image.device)) - start - sum(timed.seconds)
        batches = (timed.batch[:size] for size in timed.sizes)
        ratios.append(spent / (timed.bare(batches) if image.is_cuda else sum(timed.seconds)))
    return ratios, sum(timed.sizes)


def main() -> None:
    """Print one line a network and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_masks", type=int, help="for all networks")
    parser.add_argument("--networks", nargs="+", default=["DenseNet121", "ResNet18", "light"])
    parser.add_argument("--device", default="cpu")
    add_options(parser)
    args = parser.parse_args()
    print(f"{args.rounds} rounds, {args.device}, {torch.get_num_threads()} threads")
    rows = []
    for name, (kind, dims, size, batch_size, count) in QUESTIONS.items():
        if kind not in args.networks:
            continue
        network, image = (each.to(args.device) for each in made(kind, dims, size))
        for method, explain in methods(size, dims, batch_size, args.num_masks or count).items():
            ratios, forwards = measure(network, image, explain, args.rounds)
            row = {"network": name, "method": method, "batch": batch_size, "forwards": forwards}
            row |= {"ratio": statistics.median(ratios), "smallest": min(ratios), "largest": max(ratios)}
            rows.append(row)
    print(markdown(rows))
    keep(args, "overhead", rows)


if __name__ == "__main__":
    main()
