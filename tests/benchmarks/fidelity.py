"""Which method finds what the network saw, and at what price? The table and the plot that decide the defaults.

    python tests/benchmarks/fidelity.py [--task demo] [--num_scans 6] [--seed 0] [--methods focused_rise rise ...]
        [--budgets 50 200 350 1000 4000] [--reference_scans 2] [--csv FILE] [--plot FILE.png]
        [--json FILE] [--keep [LABEL]]

Tasks (``fidelity_tasks.py``): ``demo``, the class "lesion" of the demo's classifier; ``segmentation``, a small UNet
that segments thick bright lumps beside thin rods as bright (it is trained first, for a minute); ``patches``, the same
under a sliding-window inferer. Scans are seen in no training, and the network gets them right.

Methods (``fidelity_methods.py``) get settings for about so many forwards; a derivative of a white-box method counts as
three. ``full_occlusion`` is occlusion with windows of 2 voxels, whatever it costs. Of a scan's map it is noted:

- pointing: whether the peak lies strictly inside the lesion;
- AUPRC: the average precision of the map as a detector of the lesion's voxels;
- insertion and deletion: the areas under these curves, 20 steps, with the method's fill;
- reference: the rank correlation with a map of RISE with 50,000 masks, of the first ``--reference_scans`` scans. These
  maps are kept in ``--reference_dir``, and so made once;
- forwards: predictions of the image, where outputs of patches are remembered.

Controls stand beside: a random map, the scan's intensity and its edges, a blurred copy of each map, and the method at
``--random_budget`` forwards on the network at random weights. With ``--csv`` each map's figures are appended to a file
as soon as they are known, so that a killed run goes on where it was; without, they are kept nowhere.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fidelity_methods import METHODS, full_occlusion
from fidelity_tasks import TASKS, Scan, Task
from record import add_options, keep

import monai_saliency as ms
from monai_saliency.metrics import AUPRC, Deletion, Insertion, Pointing, controls, rank_correlation

KEYS = ("task", "scan", "weights", "method", "budget")
FIGURES = ("forwards", "seconds", "pointing", "auprc", "insertion", "deletion", "reference")
BLURRED = ("blurred_pointing", "blurred_auprc", "blurred_insertion", "blurred_deletion")

Row = dict[str, Any]


class Results:
    """Rows of figures, one a map, appended to a file as they come.

    Args:
        path: the file; None keeps them in memory alone.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            with path.open(newline="") as file:
                self.rows = [
                    {name: value if name in KEYS else float(value or "nan") for name, value in row.items()}
                    for row in csv.DictReader(file)
                    if None not in row.values()  # the end of a killed run
                ]

    def has(self, **keys: Any) -> bool:
        """Whether a map's figures are there."""
        return any(all(row[name] == str(keys[name]) for name in KEYS) for row in self.rows)

    def add(self, row: Row) -> None:
        """Note a map's figures."""
        row = {
            name: str(row[name]) if name in KEYS else row.get(name, float("nan")) for name in KEYS + FIGURES + BLURRED
        }
        self.rows.append(row)
        if self.path is not None:
            begins = not self.path.exists()
            with self.path.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                if begins:
                    writer.writeheader()
                writer.writerow(row)


class Measured:
    """The figures of maps of one scan.

    Args:
        task: what is explained.
        scan: the scan.
        network: the trained network.
        reference: the map of many forwards ``(*spatial)``, where there is one.
    """

    def __init__(self, task: Task, scan: Scan, network: torch.nn.Module, reference: torch.Tensor | None) -> None:
        self.images, self.truth, self.reference = scan.image[None], scan.truth[None, None], reference
        explain = ms.rise(20, target=scan.target, mask_batch_size=20, **task.shared)
        self.perturbed = {"insertion": Insertion(explain, network), "deletion": Deletion(explain, network)}

    def against_label(self, saliency: torch.Tensor) -> Row:
        """Of a map ``(1, 1, *spatial)``."""
        metrics = {"pointing": Pointing(), "auprc": AUPRC()}
        return {name: float(metric.compute(saliency, self.truth)) for name, metric in metrics.items()}

    def all(self, saliency: torch.Tensor) -> Row:
        """Of a map ``(1, 1, *spatial)``."""
        row = self.against_label(saliency)
        row |= {name: float(metric.compute(saliency, self.images)) for name, metric in self.perturbed.items()}
        if self.reference is not None:
            row["reference"] = float(
                rank_correlation(saliency.reshape(1, -1), self.reference.reshape(1, -1).to(saliency))
            )
        return row

    def with_blurred(self, saliency: torch.Tensor) -> Row:
        """Of a map and of a blurred copy of it."""
        blurred = self.all(controls(self.images, saliency)["blurred"])
        return self.all(saliency) | {name: blurred[name.removeprefix("blurred_")] for name in BLURRED}


def reference_map(task: Task, name: str, scan: Scan, count: int, folder: Path) -> torch.Tensor:
    """The map of RISE with many masks, from a file where it is there."""
    path = folder / f"{name}_{scan.number}_{count}_{fingerprint(task.network, scan.image)}.npy"
    if not path.exists():
        explain = ms.rise(count, seed=1_000_003, target=scan.target, mask_batch_size=32, **task.shared)
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".new").open("wb") as file:
            np.save(file, explain(scan.image[None], task.network)[0, 0].numpy())
        path.with_suffix(".new").rename(path)
    return torch.from_numpy(np.load(path))


def fingerprint(network: torch.nn.Module, image: torch.Tensor) -> str:
    """Of the weights and the scan, so that no map of others is taken."""
    values = torch.stack([value.double().sum() for value in network.state_dict().values()])
    return f"{hash((*values.tolist(), float(image.double().sum()))) & 0xFFFFFFFF:08x}"


def explained(make: Callable[..., Any], task: Task, scan: Scan, network: torch.nn.Module) -> tuple[torch.Tensor, Row]:
    """A map ``(1, 1, *spatial)``, and what it took."""
    explain = make(target=scan.target, mask_batch_size=16, **task.shared)
    begun = time.perf_counter()
    (found,) = explain.explain(scan.image[None], network)
    row = {"forwards": found.num_forwards / found.per_prediction, "seconds": time.perf_counter() - begun}
    return found.saliency[None].float(), row


def wanted(methods: Sequence[str], budgets: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Methods and budgets; of occlusion at full resolution there is one."""
    for method in methods:
        yield from ((method, budget) for budget in ([0] if method == "full_occlusion" else budgets))


def measure(args: argparse.Namespace, results: Results) -> None:
    """Explain every scan by every method that has no figures yet."""
    task = TASKS[args.task]()
    for number, scan in enumerate(islice(task.scans(args.seed), args.num_scans)):
        keys = {"task": args.task, "scan": scan.number}
        reference = None
        if number < args.reference_scans:
            reference = reference_map(task, args.task, scan, args.reference_masks, args.reference_dir)
        measured = Measured(task, scan, task.network, reference)
        flat = torch.zeros(1, 1, *scan.image.shape[1:])
        for name, saliency in controls(scan.image[None], flat).items():
            at = keys | {"weights": "none", "method": name, "budget": 0}
            if name != "blurred" and not results.has(**at):
                results.add(at | measured.all(saliency))
        untrained = task.untrained(number)
        for method, budget in wanted(args.methods, args.budgets):
            make = maker(method, budget, scan.image.shape[1:])
            for weights, network in (("trained", task.network), ("random", untrained)):
                at = keys | {"weights": weights, "method": method, "budget": budget}
                if results.has(**at) or (weights == "random" and (not budget or budget != args.random_budget)):
                    continue
                try:
                    saliency, row = explained(make, task, scan, network)
                except ValueError as error:
                    if number == 0:
                        print(f"{method}, {budget} forwards: {error}", flush=True)
                    continue
                figures = measured.with_blurred if weights == "trained" else measured.against_label
                results.add(at | row | figures(saliency))
        print(f"{number + 1} of {args.num_scans} scans", flush=True)


def maker(method: str, budget: int, shape: Sequence[int]) -> Callable[..., Any]:
    """What makes a method of a budget, given what all methods share."""
    if method == "full_occlusion":
        return lambda **settings: full_occlusion(shape, **settings)
    return lambda **settings: METHODS[method](budget, shape, **settings)


def means(rows: Iterable[Row]) -> Iterator[tuple[tuple[str, str, int], int, Row]]:
    """For each network, method and budget: how many scans, and the mean of each figure."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["weights"], row["method"], int(row["budget"])), []).append(row)
    for group, found in groups.items():
        with np.errstate(all="ignore"):
            known = {name: [row[name] for row in found if row[name] == row[name]] for name in FIGURES + BLURRED}
        yield (
            group,
            len(found),
            {name: float(np.mean(values)) if values else float("nan") for name, values in known.items()},
        )


def table(rows: Iterable[Row]) -> str:
    """The means over scans, a line for each network, method and budget; behind a stroke those of blurred copies."""
    lines = [
        f"{'method':24s} {'budget':>6s} {'scans':>5s} {'forwards':>8s} {'seconds':>7s} {'pointing':>8s} {'AUPRC':>6s} "
        f"{'insert':>6s} {'delete':>6s} {'ref.':>5s} | blurred: pointing, AUPRC, insertion, deletion"
    ]
    order = {"trained": 0, "random": 1, "none": 2}
    for (weights, method, budget), count, row in sorted(
        means(rows), key=lambda each: (order[each[0][0]], each[0][1], each[0][2])
    ):
        name = {"trained": method, "random": f"{method}, random", "none": f"control: {method}"}[weights]
        numbers = [
            f"{row[figure]:{width}}"
            for figure, width in zip(FIGURES, ("8.0f", "7.1f", "8.2f", "6.3f", "6.3f", "6.3f", "5.2f"), strict=True)
        ]
        blurred = "  ".join(f"{row[figure]:.3f}" for figure in BLURRED)
        line = f"{name:24s} {budget or '':>6} {count:5d} {' '.join(numbers)} | {blurred}"
        lines.append(line.replace("nan", "  -"))
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """AUPRC and pointing against forwards; controls are dotted lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    found = list(means(rows))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, name, title in zip(axes, ("auprc", "pointing"), ("AUPRC", "peak strictly inside"), strict=True):
        for place, method in enumerate(dict.fromkeys(group[1] for group, _, _ in found if group[0] == "trained")):
            points = sorted((row["forwards"], row[name]) for group, _, row in found if group[:2] == ("trained", method))
            style = {"color": f"C{place % 10}", "linestyle": "--" if place >= 10 else "-"}
            axis.plot(*zip(*points, strict=True), marker=".", label=method, **style)
        for place, (group, _, row) in enumerate(each for each in found if each[0][0] == "none"):
            axis.axhline(row[name], color="gray", linestyle=(0, (1, 1 + place)), label=f"control: {group[1]}")
        axis.set(xscale="log", xlabel="forwards, in predictions of the scan", title=title, ylim=(-0.03, 1.03))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
    axes[1].legend(fontsize=7, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="demo")
    parser.add_argument("--num_scans", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the first scan")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=[*METHODS, "full_occlusion"])
    parser.add_argument("--budgets", nargs="*", type=int, default=[50, 100, 200, 350, 1000, 4000])
    parser.add_argument("--random_budget", type=int, default=350, help="of the network at random weights; 0 for none")
    parser.add_argument("--reference_scans", type=int, default=0)
    parser.add_argument("--reference_masks", type=int, default=50_000)
    parser.add_argument("--reference_dir", type=Path, default=Path("fidelity_reference"))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    add_options(parser)
    args = parser.parse_args()
    results = Results(args.csv)
    measure(args, results)
    rows = [row for row in results.rows if row["task"] == args.task]
    print(table(rows))
    keep(args, "fidelity", rows, ["scipy"])
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
