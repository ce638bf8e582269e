"""What an explanation costs beside its network: wall time over that of the same bare forwards, measured in one run.

    python tests/benchmarks/overhead.py [--rounds 3] [--num_masks 63] [--networks DenseNet121 ResNet18 light]
        [--device cpu] [--json FILE] [--keep [LABEL]]

Bare forwards run the network on the same batches, and do nothing else. On a CPU each of them follows the explanation's
own forward of that batch, so that a machine's moods hit both, and its time is taken out of the explanation's. The
voxels are the same too, since a forward's time depends on them: for the light network in 2D, black images take 17 %
less than noise. On a GPU, where that would make the explanation wait, rounds of both alternate, and bare forwards are
given the unperturbed image. Printed is the median of the rounds' ratios, with the smallest and the largest. The light
network is that of ``peers.py``; there are 1023 masks for it and 63 for the others, which are with the unperturbed image
full batches. ``focused_rise``, the bundle's method, has at most 350 for each: what its regressions cost is the same for
all networks.

``by hand`` is the least that a perturbation costs: a loop that multiplies the image by masks which lie ready, runs the
network and takes a class's probability. It makes no mask and no map, and checks nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from monai.networks.nets import DenseNet121, resnet18
from record import add_options, keep, now

import monai_saliency as ms


class ByHand:
    """A loop over masks that lie ready."""

    def __init__(self, image: torch.Tensor, num_masks: int, batch_size: int) -> None:
        self.mask_batch_size = batch_size
        self.num_batches = -(-num_masks // batch_size)
        self.masks = torch.rand(batch_size, 1, *image.shape[2:], device=image.device)
        self.batch = image.repeat(batch_size, *[1] * (image.ndim - 1))
        self.fill = torch.zeros_like(image)

    def __call__(self, image: torch.Tensor, network: torch.nn.Module) -> torch.Tensor:
        scores = []
        with torch.no_grad():
            for _ in range(self.num_batches):
                torch.lerp(self.fill, image, self.masks, out=self.batch)
                scores.append(network(self.batch).softmax(dim=1)[:, 1])
        return torch.cat(scores)


@dataclass(frozen=True)
class Question:
    """What is explained, and by how much."""

    network: torch.nn.Module
    image: torch.Tensor
    batch_size: int
    num_masks: int

    def methods(self) -> dict[str, ms.PerturbationInferer | ByHand]:
        """Windows, RISE with the cheapest fill and with the dearest, the bundle's method, and the least there is."""
        window = self.image.shape[-1] // round((self.num_masks + 1) ** (1 / (self.image.ndim - 2)))
        given: dict[str, Any] = {"target": ms.ClassScore([1], activation="softmax"), "mask_batch_size": self.batch_size}
        return {
            "windows": ms.sliding_window(window_size=window, stride=window, **given),
            "rise": ms.rise(self.num_masks, seed=0, **given),
            "rise, blurred fill": ms.rise(self.num_masks, fill=ms.BlurFill(5), **given),
            "focused_rise": ms.focused_rise(**given),
            "by hand": ByHand(self.image, self.num_masks, self.batch_size),
        }


#: by name: the network, spatial axes, voxels along each, images in a batch, and masks where no number is given
QUESTIONS = {
    "DenseNet121 3D 64^3": ("DenseNet121", 3, 64, 8, 63),
    "ResNet18 2D 224^2": ("ResNet18", 2, 224, 16, 63),
    "light 3D 64^3": ("light", 3, 64, 16, 1023),
    "light 2D 224^2": ("light", 2, 224, 16, 1023),
}


def question(name: str, num_masks: int | None, device: str) -> Question:
    """A network with random weights, and a random image.

    Args:
        name: a key of :data:`QUESTIONS`.
        num_masks: for the method; by default as many as are there.
        device: of both.
    """
    torch.manual_seed(0)
    kind, dims, size, batch_size, count = QUESTIONS[name]
    if kind == "light":
        from peers import Setting  # only here: it imports all peers

        light = Setting(kind, dims, size, 1, batch_size, device)
        return Question(light.made(), light.image(), batch_size, num_masks or count)
    if kind == "DenseNet121":
        network, channels = DenseNet121(spatial_dims=dims, in_channels=1, out_channels=2), 1
    else:
        network, channels = resnet18(spatial_dims=dims, n_input_channels=3, num_classes=10), 3
    image = torch.rand(1, channels, *[size] * dims)
    return Question(network.eval().to(device), image.to(device), batch_size, num_masks or count)


class Beside(torch.nn.Module):
    """A network that notes the sizes of its batches, and on a CPU times a bare forward behind each.

    What it notes is in lists: a network whose numbers change is checked anew by the package.

    Attributes:
        sizes: images in each batch.
        seconds: of each bare forward.
    """

    def __init__(self, network: torch.nn.Module, batch: torch.Tensor) -> None:
        super().__init__()
        self.network, self.batch = network, batch
        self.sizes: list[int] = []
        self.seconds: list[float] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(batch)
        self.sizes.append(len(batch))
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
    network: torch.nn.Module, image: torch.Tensor, explain: ms.PerturbationInferer | ByHand, rounds: int
) -> tuple[list[float], int]:
    """The ratio of each round, and how many images it runs."""
    beside = Beside(network, image.repeat(explain.mask_batch_size, *[1] * (image.ndim - 1))).eval()
    explain(image, beside)  # what is found out once a network is not timed
    ratios = []
    for _ in range(rounds):
        beside.sizes, beside.seconds = [], []
        start = now(str(image.device))
        explain(image, beside)
        spent = now(str(image.device)) - start - sum(beside.seconds)
        batches = (beside.batch[:size] for size in beside.sizes)
        ratios.append(spent / (beside.bare(batches) if image.is_cuda else sum(beside.seconds)))
    return ratios, sum(beside.sizes)


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
    for name in QUESTIONS:
        if QUESTIONS[name][0] not in args.networks:
            continue
        asked = question(name, args.num_masks, args.device)
        for method, explain in asked.methods().items():
            ratios, forwards = measure(asked.network, asked.image, explain, args.rounds)
            middle = statistics.median(ratios)
            row = {"network": name, "method": method, "batch": asked.batch_size, "forwards": forwards, "ratio": middle}
            rows.append({**row, "smallest": min(ratios), "largest": max(ratios)})
            print(
                f"{name:20s} {method:20s} batch {asked.batch_size:3d}: "
                f"{middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}) times {forwards} bare forwards",
                flush=True,
            )
    keep(args, "overhead", rows)


if __name__ == "__main__":
    main()
