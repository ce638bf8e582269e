"""What keeping freed memory saves on the CPU, and what it takes: the same explanation with and without, in turns.

    python tests/benchmarks/kept_memory.py [--rounds 3] [--num_masks 15] [--networks UNet SegResNet] [--json FILE]
        [--keep [LABEL]]

Networks with random weights are explained by RISE, each time in a process of its own, since
``monai_saliency.utils.allocator.keep_freed_memory`` cannot be undone. Its first map is not timed. Printed are the
median of the rounds' ratios of time, with the smallest and the largest, that of the peaks of resident memory, the
largest peak without in MiB, and whether all maps are the same to the bit. How much it saves depends on what a new page
costs the system.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from typing import Any

import torch
from monai.networks.nets import SegResNet, UNet
from overhead import QUESTIONS, question
from record import add_inside, add_options, apart, keep, now, resident_peak

import monai_saliency as ms
from monai_saliency.utils.allocator import keep_freed_memory

NETWORKS = ("DenseNet121", "ResNet18", "UNet", "SegResNet")


def _unet() -> torch.nn.Module:
    return UNet(3, 1, 3, (16, 32, 64, 128), (2, 2, 2), num_res_units=2)


def _segresnet() -> torch.nn.Module:
    return SegResNet(3, 16, 1, 3)


def explained(name: str, num_masks: int, kept: bool) -> dict[str, Any]:
    """Seconds, MiB and the map's hash, of one network's explanation in this process."""
    if kept and not keep_freed_memory():
        raise RuntimeError("this system's C library is not glibc")
    torch.manual_seed(0)
    made = {"UNet": (_unet, 4), "SegResNet": (_segresnet, 2)}
    if name in made:
        network, batch_size = made[name][0]().eval(), made[name][1]
        image, target = torch.rand(1, 1, 96, 96, 96), ms.RegionScore(1, activation="softmax", region="all")
        explain = ms.rise(num_masks, target=target, mask_batch_size=batch_size)
    else:
        asked = question(next(full for full in QUESTIONS if full.startswith(name)), num_masks, "cpu")
        network, image, explain = asked.network, asked.image, asked.methods()["rise"]
    explain(image, network)
    start = now("cpu")
    found = explain(image, network)
    seconds = now("cpu") - start
    return {"seconds": seconds, "peak": resident_peak(), "map": hashlib.md5(found.numpy().tobytes()).hexdigest()}


def main() -> None:
    """Print one line a network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_masks", type=int, default=15)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    add_inside(parser)
    add_options(parser)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(explained(*args.inside)))
        return
    rows = []
    for name in args.networks:
        times, peaks, plain_peaks, maps = [], [], [], set()
        for _ in range(args.rounds):
            plain, kept = (apart(__file__, name, args.num_masks, kept) for kept in (False, True))
            times.append(kept["seconds"] / plain["seconds"])
            peaks.append(kept["peak"] / plain["peak"])
            plain_peaks.append(plain["peak"])
            maps |= {plain["map"], kept["map"]}
        row = {"network": name, "time": statistics.median(times), "smallest": min(times), "largest": max(times)}
        row |= {"memory": statistics.median(peaks), "MiB without": max(plain_peaks), "same maps": len(maps) == 1}
        rows.append(row)
        words = "the same maps" if row["same maps"] else "OTHER MAPS"
        print(
            f"{name:12s} time {row['time']:.3f} ({min(times):.3f} to {max(times):.3f}), peak memory "
            f"{row['memory']:.3f} of {row['MiB without']:.0f} MiB, {words}",
            flush=True,
        )
    keep(args, "kept_memory", rows)


if __name__ == "__main__":
    main()
