"""What half precision, channels last and compiling change and save: the same masks, interleaved in one run.

    python tests/benchmarks/precision.py [--rounds 3] [--num_masks 127] [--size 32] [--device cpu]
        [--json FILE] [--keep [LABEL]]

RISE with each way of ``monai_saliency.networks.accelerated``: seconds over those of float32, the correlation with its
map (Pearson's of voxels, Spearman's of ranks), the largest difference in shares of the largest value about the mean,
and the seconds of the first call, which compiles. Networks have random weights, so that half precision shows.
"""

import argparse
import itertools
from typing import Any

import torch
from monai.networks.nets import DenseNet
from record import add_options, keep, machine, markdown, now
from scipy.stats import pearsonr, spearmanr

import monai_saliency as ms
from monai_saliency.networks import accelerated

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"amp": "bf16"},
    "channels_last": {"channels_last": True},
    "compile": {"compile": True},
    "bf16, channels_last": {"amp": "bf16", "channels_last": True},
    "bf16, compile": {"amp": "bf16", "compile": True},
}


def networks(size: int) -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    """Small networks, which compile in seconds, and one image for each."""
    torch.manual_seed(0)
    small = {"init_features": 16, "growth_rate": 8, "block_config": (2, 2), "out_channels": 2}
    made = [(dims, edge, DenseNet(dims, in_channels=1, **small).eval()) for dims, edge in ((3, size), (2, 3 * size))]
    return {f"{d}D {edge}^{d} small DenseNet": (net, torch.rand(1, 1, *[edge] * d)) for d, edge, net in made}


def measure(
    name: str, network: torch.nn.Module, image: torch.Tensor, masks: int, rounds: int, ways: Any = WAYS, batch: int = 16
) -> list[dict[str, Any]]:
    """A row for each way of running a network."""
    explain = ms.rise(masks, target=ms.ClassScore([1], "none"), mask_batch_size=batch)
    quick = {way: accelerated(network, **settings) for way, settings in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    maps = {}
    for _, way in itertools.product(range(rounds + 1), ways):
        begun = now(str(image.device))
        maps[way] = explain(image, quick[way]).double().cpu().flatten()
        seconds[way].append(now(str(image.device)) - begun)
    expected, rows = maps["float32"], []
    for way, found in maps.items():
        row = {"network": name, "way": way, "ratio": sum(seconds[way][1:]) / sum(seconds["float32"][1:])}
        row |= {"pearson": float(pearsonr(expected, found)[0]), "spearman": float(spearmanr(expected, found)[0])}
        row["largest"] = float((found - expected).abs().max() / (expected - expected.mean()).abs().max())
        rows.append({**row, "first": seconds[way][0]})
    return rows


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_masks", type=int, default=127, help="with the unperturbed image, full batches")
    parser.add_argument("--size", type=int, default=32, help="of the volume, along each axis")
    parser.add_argument("--device", default="cpu")
    add_options(parser)
    args = parser.parse_args()
    rows = []
    for name, (network, image) in networks(args.size).items():
        on_device = network.to(args.device), image.to(args.device)
        rows += measure(name, *on_device, args.num_masks, args.rounds)
    print(f"{args.num_masks} masks, {args.rounds} rounds, {machine(args.device)}\n\n{markdown(rows)}")
    keep(args, "precision", rows)


if __name__ == "__main__":
    main()
