"""What an explanation costs beside its network: wall time over that of the same bare forwards, measured in one run.

    python tests/benchmarks/overhead.py [--rounds 3] [--num_masks 127] [--device cpu]
        [--json FILE] [--keep [LABEL]]

Bare forwards run the network on as many batches of the same sizes, and do nothing else. Rounds of both alternate, so
that a machine's moods hit both; each ratio is of the sums over the rounds.
"""

from __future__ import annotations

import argparse
import time

import torch
from monai.networks.nets import DenseNet121, resnet18
from record import add_options, keep

import monai_saliency as ms


def settings() -> dict[str, tuple[torch.nn.Module, torch.Tensor, int]]:
    """Networks, one image for each, and the batch size."""
    torch.manual_seed(0)
    return {
        "3D 64^3 DenseNet121": (
            DenseNet121(spatial_dims=3, in_channels=1, out_channels=2).eval(),
            torch.rand(1, 1, 64, 64, 64),
            8,
        ),
        "2D 224^2 ResNet18": (
            resnet18(spatial_dims=2, n_input_channels=3, num_classes=10).eval(),
            torch.rand(1, 3, 224, 224),
            16,
        ),
    }


def methods(num_masks: int, batch_size: int) -> dict[str, ms.PerturbationInferer]:
    """RISE, with the cheapest fill and with the dearest."""
    target = ms.ClassScore([1], activation="softmax")
    return {
        "rise": ms.rise(num_masks, seed=0, target=target, mask_batch_size=batch_size),
        "rise, blurred fill": ms.rise(num_masks, target=target, fill=ms.BlurFill(5), mask_batch_size=batch_size),
    }


def measure(
    network: torch.nn.Module, image: torch.Tensor, explain: ms.PerturbationInferer, rounds: int
) -> tuple[float, float, int]:
    """Seconds of explaining, seconds of bare forwards of as many batches of the same sizes, and how many images these
    hold in a round.
    """
    sizes: list[int] = []

    def noting(batch: torch.Tensor) -> torch.Tensor:
        sizes.append(len(batch))
        return network(batch)

    def synchronize() -> float:
        if image.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    explain(image, noting)  # what is found out once a network is not timed
    bare_batch = image.repeat(explain.mask_batch_size, *[1] * (image.ndim - 1))
    explained = bare = 0.0
    for _ in range(rounds):
        sizes.clear()
        start = synchronize()
        explain(image, noting)
        middle = synchronize()
        with torch.no_grad():
            for size in sizes:
                network(bare_batch[:size])
        end = synchronize()
        explained, bare = explained + middle - start, bare + end - middle
    return explained, bare, sum(sizes)


def main() -> None:
    """Print one line a network and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_masks", type=int, default=127, help="with the unperturbed image, full batches")
    parser.add_argument("--device", default="cpu")
    add_options(parser)
    args = parser.parse_args()
    print(f"{args.num_masks} masks, {args.rounds} rounds, {args.device}, {torch.get_num_threads()} threads")
    rows = []
    for name, (network, image, batch_size) in settings().items():
        for method, explain in methods(args.num_masks, batch_size).items():
            explained, bare, forwards = measure(network.to(args.device), image.to(args.device), explain, args.rounds)
            ratio = explained / bare
            rows.append({"network": name, "method": method, "batch": batch_size, "forwards": forwards, "ratio": ratio})
            print(
                f"{name:20s} {method:20s} batch {batch_size:3d}: {ratio:.3f} times {forwards} bare forwards",
                flush=True,
            )
    keep(args, "overhead", rows)


if __name__ == "__main__":
    main()
