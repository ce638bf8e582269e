"""What half precision, channels last and compiling change and save: the same masks, interleaved in one run.

    python tests/benchmarks/precision.py [--rounds 3] [--num_masks 127] [--size 64] [--light] [--device cpu]
        [--json FILE] [--keep [LABEL]]

Each network is explained by RISE as it is, and by each way of running it faster
(``monai_saliency.networks.accelerated``). Rounds of all ways alternate, so that a machine's moods hit all; the first
call of each, which compiles, is not timed. Printed are, of each way: seconds over those of float32 (of sums over the
rounds), the correlation of its map with that of float32 (Pearson's of voxels, Spearman's of their ranks), the largest
difference in shares of the largest value of the map about its mean, and the seconds of the first call. Networks have
random weights, under which perturbing changes little beside the score itself, so that half precision shows.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from monai.networks.nets import DenseNet, DenseNet121, resnet18
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


def networks(size: int, light: bool) -> dict[str, tuple[torch.nn.Module, torch.Tensor, int]]:
    """Networks, one image for each, and the batch size."""
    torch.manual_seed(0)
    if light:
        small = {"init_features": 16, "growth_rate": 8, "block_config": (2, 2), "out_channels": 2}
        pairs = [(dims, DenseNet(dims, in_channels=1, **small).eval()) for dims in (3, 2)]
        sizes = {3: size, 2: 3 * size}
        return {
            f"{dims}D {sizes[dims]}^{dims} small DenseNet": (network, torch.rand(1, 1, *[sizes[dims]] * dims), 16)
            for dims, network in pairs
        }
    volume = DenseNet121(spatial_dims=3, in_channels=1, out_channels=2).eval()
    picture = resnet18(spatial_dims=2, n_input_channels=3, num_classes=10).eval()
    return {
        f"3D {size}^3 DenseNet121": (volume, torch.rand(1, 1, size, size, size), 8),
        "2D 224^2 ResNet18": (picture, torch.rand(1, 3, 224, 224), 16),
    }


def measure(
    name: str, network: torch.nn.Module, image: torch.Tensor, batch: int, masks: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each way of running a network."""
    explain = ms.rise(masks, target=ms.ClassScore([1], "none"), mask_batch_size=batch)
    quick = {way: accelerated(network, **settings) for way, settings in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    maps = {}
    for _, way in itertools.product(range(rounds + 1), WAYS):
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
    parser.add_argument("--size", type=int, default=64, help="of the volume, along each axis")
    parser.add_argument("--light", action="store_true", help="small networks, which compile in seconds")
    parser.add_argument("--device", default="cpu")
    add_options(parser)
    args = parser.parse_args()
    rows = []
    for name, (network, image, batch) in networks(args.size, args.light).items():
        on_device = network.to(args.device), image.to(args.device)
        rows += measure(name, *on_device, batch, args.num_masks, args.rounds)
    print(f"{args.num_masks} masks, {args.rounds} rounds, {machine(args.device)}\n\n{markdown(rows)}")
    keep(args, "precision", rows)


if __name__ == "__main__":
    main()
