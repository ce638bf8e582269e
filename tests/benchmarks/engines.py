"""What sharing brings, and what each engine costs: seconds against masks and images, one worker and two, in one run.

    python tests/benchmarks/engines.py [--seconds 120] [--only torchrun ray] [--plot engines.png]

Every figure is the wall time of a whole command, from the start of Python to its end: our bundle, one thread a worker,
made scans and a 3D DenseNet121. The masks of two scans are shared by ``--saliency_split masks``, and scans by
``--saliency_split cases``. Starting an interpreter and importing takes seconds that no worker can share, so two ratios
are given: of whole commands at the largest size, and of their slopes, the seconds that a further mask or scan takes.
SLURM is measured where one runs (``.ci/slurm``), by ``srun`` in an allocation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from launches import ENGINES, available
from launches import run as launch
from monai.networks.nets import DenseNet121
from scans import write_scans

SIZE, BATCH = 48, 8
NETWORK = {"_target_": "DenseNet121", "spatial_dims": 3, "in_channels": 1, "out_channels": 2}


def seconds_a_batch(network: torch.nn.Module) -> float:
    """Of forwards by one thread."""
    torch.set_num_threads(1)
    batch = torch.rand(BATCH, 1, *[SIZE] * 3)
    with torch.no_grad():
        network(batch)
        start = time.perf_counter()
        for _ in range(3):
            network(batch)
    return (time.perf_counter() - start) / 3


def run(engine: str, workers: int, split: str, scans: Path, num_masks: int, out: Path) -> float:
    """Seconds of a run; its maps are counted."""
    settings = {
        "dataset_dir": scans,
        "output_dir": out,
        "network_def": NETWORK,
        "checkpoint": scans.parent / "model.pt",
        "spatial_size": [SIZE] * 3,
        "pixdim": [1.5] * 3,
        "method": "rise",
        "num_masks": num_masks,
        "mask_batch_size": BATCH,
        "picture": "false",
        "cache": "none",
        "num_workers": 1,
    }
    seconds = launch(engine, workers, split, settings)
    found, expected = len(list(out.glob("*_saliency.nii.gz"))), len(list(scans.glob("*.nii.gz")))
    if found != expected:
        raise RuntimeError(f"{engine} made {found} of {expected} maps")
    return seconds


def main() -> None:
    """Print a table for each strategy, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="of forwards in the largest run, by one worker")
    parser.add_argument("--only", nargs="+", default=available(), choices=list(ENGINES), help="these engines")
    parser.add_argument("--plot", type=Path, help="a file for the plot")
    args = parser.parse_args()

    network = DenseNet121(spatial_dims=3, in_channels=1, out_channels=2).eval()
    batches = max(16, round(args.seconds / seconds_a_batch(network)))
    print(f"DenseNet121 on {SIZE}^3, batches of {BATCH}; the largest run has {batches} of them; one thread a worker")
    times: dict[tuple[str, str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(network.state_dict(), folder / "model.pt")
        write_scans(folder / "2", 2, (80, 80, 60))
        # By masks: two scans. By cases: two, four and sixteen scans with as many masks as make the same work.
        masks = [batches * share // 16 * BATCH - 1 for share in (1, 2, 8)]
        counts = [2, 4, 16]
        for count in counts[1:]:
            write_scans(folder / str(count), count, (80, 80, 60))
        sizes = {"masks": masks, "cases": counts}
        for split, values in sizes.items():
            engines = [name for name in args.only if split in ENGINES[name].splits]
            for value in values:
                # Engines take turns, so that a machine that is busy for a while slows all of them.
                for workers in (1, 2):
                    for engine in engines:
                        scans, num = (folder / "2", value) if split == "masks" else (folder / str(value), masks[0])
                        out = folder / f"{split}-{engine}-{value}-{workers}"
                        seconds = run(engine, workers, split, scans, num, out)
                        times.setdefault((split, engine, workers), []).append(seconds)
                        print(f"{engine} by {split}, {value}, {workers}: {seconds:.1f} s", file=sys.stderr, flush=True)
            report(split, values, engines, times)
    if args.plot:
        draw(args.plot, sizes, args.only, times)


def report(
    split: str, values: Sequence[int], engines: Sequence[str], times: dict[tuple[str, str, int], list[float]]
) -> None:
    """Print one strategy's table."""
    what = "masks of each of 2 scans" if split == "masks" else "scans"
    print(f"\nshared by {split}: seconds with one / two workers")
    columns = [*[f"{value} {what}" for value in values], "whole", "slope", "over torchrun"]
    print(f"| engine | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for engine in engines:
        one, two = (np.array(times[split, engine, workers]) for workers in (1, 2))
        cells = [f"{a:.1f} / {b:.1f}" for a, b in zip(one, two, strict=True)]
        slopes = [np.polyfit(values, each, 1)[0] for each in (one, two)]
        cells += [f"{one[-1] / two[-1]:.2f}", f"{slopes[0] / slopes[1]:.2f}"]
        if "torchrun" in engines:
            base = [times[split, "torchrun", workers] for workers in (1, 2)]
            over = [100 * (sum(each) / sum(plain) - 1) for each, plain in zip((one, two), base, strict=True)]
            cells.append(" / ".join(f"{value:+.0f} %" for value in over))
        else:
            cells.append("")
        print(f"| {engine} | {' | '.join(cells)} |", flush=True)


def draw(
    path: Path,
    sizes: dict[str, list[int]],
    engines: Sequence[str],
    times: dict[tuple[str, str, int], list[float]],
) -> None:
    """Draw seconds against masks and against scans."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for panel, (split, values) in zip(panels, sizes.items(), strict=True):
        for number, engine in enumerate(engines):
            for workers, style in ((1, "--o"), (2, "-s")):
                if (split, engine, workers) not in times:
                    continue
                label = f"{engine}, {workers} worker{'s' * (workers > 1)}"
                panel.plot(values, times[split, engine, workers], style, color=f"C{number}", label=label, markersize=4)
        panel.set(
            xlabel="masks of each of 2 scans" if split == "masks" else "scans",
            ylabel="seconds of the whole command",
            title=f"shared by {split}",
            ylim=(0, None),
        )
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
