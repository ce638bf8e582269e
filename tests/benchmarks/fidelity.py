"""Which method finds what the network saw, and at what price? The table and the plot that decide the defaults.

    python tests/benchmarks/fidelity.py [--task demo] [--num_scans 6] [--seed 0] [--methods focused_rise rise ...]
        [--budgets 50 200 350 1000 4000] [--plot FILE.png] [--json FILE] [--keep [LABEL]]

Tasks are those of ``fidelity_tasks.py``; the networks have seen none of their scans, and get them right. Methods
(``fidelity_methods.py``) get settings for about so many forwards. Of each map: pointing (the peak lies strictly inside
the lesion), AUPRC (average precision as a detector of its voxels), the areas under the insertion and deletion curves,
and forwards (predictions of the image, where outputs of patches are remembered). Controls: a random map, intensity,
edges, a blurred copy of each map, and the method at ``--random_budget`` forwards on the network at random weights.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from fidelity_methods import METHODS
from fidelity_tasks import TASKS, Scan, Task
from record import add_options, keep, markdown

import monai_saliency as ms
from monai_saliency.metrics import AUPRC, Deletion, Insertion, Pointing, controls

FIGURES = ("forwards", "seconds", "pointing", "auprc", "insertion", "deletion")
BLURRED = ("blurred_pointing", "blurred_auprc", "blurred_insertion", "blurred_deletion")

Row = dict[str, Any]


class Measured:
    """The figures of maps of one scan."""

    def __init__(self, task: Task, scan: Scan, network: torch.nn.Module) -> None:
        self.images, self.truth = scan.image[None], scan.truth[None, None]
        explain = ms.rise(20, target=scan.target, mask_batch_size=20, **task.shared)
        self.perturbed = {"insertion": Insertion(explain, network), "deletion": Deletion(explain, network)}

    def against_label(self, saliency: torch.Tensor) -> Row:
        """Of a map ``(1, 1, *spatial)``."""
        metrics = {"pointing": Pointing(), "auprc": AUPRC()}
        return {name: float(metric.compute(saliency, self.truth)) for name, metric in metrics.items()}

    def all(self, saliency: torch.Tensor) -> Row:
        """Of a map ``(1, 1, *spatial)``, by curves too."""
        row = {name: float(metric.compute(saliency, self.images)) for name, metric in self.perturbed.items()}
        return self.against_label(saliency) | row

    def with_blurred(self, saliency: torch.Tensor) -> Row:
        """Of a map and of a blurred copy of it."""
        blurred = self.all(controls(self.images, saliency)["blurred"])
        return self.all(saliency) | {name: blurred[name.removeprefix("blurred_")] for name in BLURRED}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row of figures for each scan and control, and each scan, method, budget and network."""
    task = TASKS[args.task]()
    for number, scan in enumerate(islice(task.scans(args.seed), args.num_scans)):
        keys = {"task": args.task, "scan": scan.number}
        measured = Measured(task, scan, task.network)
        flat = torch.zeros(1, 1, *scan.image.shape[1:])
        for name, saliency in controls(scan.image[None], flat).items():
            if name != "blurred":
                yield keys | {"weights": "none", "method": name, "budget": 0} | measured.all(saliency)
        untrained = task.untrained(number)
        for method, budget in itertools.product(args.methods, args.budgets):
            for weights, network in (("trained", task.network), ("random", untrained)):
                if weights == "random" and budget != args.random_budget:
                    continue
                begun = time.perf_counter()
                try:
                    make = METHODS[method]
                    explain = make(budget, scan.image.shape[1:], target=scan.target, mask_batch_size=16, **task.shared)
                    (found,) = explain.explain(scan.image[None], network)
                except ValueError as error:
                    print(f"{method}, {budget} forwards: {error}", flush=True)
                    continue
                row = {"forwards": found.num_forwards / found.per_prediction, "seconds": time.perf_counter() - begun}
                figures = measured.with_blurred if weights == "trained" else measured.against_label
                row |= figures(found.saliency[None].float())
                yield keys | {"weights": weights, "method": method, "budget": budget} | row
        print(f"{number + 1} of {args.num_scans} scans", flush=True)


def means(rows: Iterable[Row]) -> Iterator[Row]:
    """For each network, method and budget: how many scans, and the mean of each figure."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["weights"], row["method"], row["budget"]), []).append(row)
    for (weights, method, budget), found in sorted(groups.items(), key=lambda each: each[0], reverse=True):
        row = {"weights": weights, "method": method, "budget": budget, "scans": len(found)}
        known = {name: [each[name] for each in found if name in each] for name in FIGURES + BLURRED}
        yield row | {name: sum(values) / len(values) for name, values in known.items() if values}


def plot(rows: Sequence[Row], path: Path) -> None:
    """AUPRC and pointing of :func:`means` against forwards; controls are dotted lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, name, title in zip(axes, ("auprc", "pointing"), ("AUPRC", "peak strictly inside"), strict=True):
        for place, method in enumerate(dict.fromkeys(row["method"] for row in rows if row["weights"] == "trained")):
            points = sorted(
                (row["forwards"], row[name]) for row in rows if (row["weights"], row["method"]) == ("trained", method)
            )
            style = {"color": f"C{place % 10}", "linestyle": "--" if place >= 10 else "-"}
            axis.plot(*zip(*points, strict=True), marker=".", label=method, **style)
        for place, row in enumerate(each for each in rows if each["weights"] == "none"):
            axis.axhline(row[name], color="gray", linestyle=(0, (1, 1 + place)), label=f"control: {row['method']}")
        axis.set(xscale="log", xlabel="forwards, in predictions of the scan", title=title, ylim=(-0.03, 1.03))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
    axes[1].legend(fontsize=7, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Measure, and print the means over scans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="demo")
    parser.add_argument("--num_scans", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the first scan")
    parser.add_argument("--methods", nargs="*", default=list(METHODS)[:-1], choices=METHODS)
    parser.add_argument("--budgets", nargs="*", type=int, default=[50, 100, 200, 350, 1000, 4000])
    parser.add_argument("--random_budget", type=int, default=350, help="of the network at random weights; 0 for none")
    parser.add_argument("--plot", type=Path)
    add_options(parser)
    args = parser.parse_args()
    rows = list(measure(args))
    print(markdown(list(means(rows))))
    keep(args, "fidelity", rows, ["scipy"])
    if args.plot is not None:
        plot(list(means(rows)), args.plot)


if __name__ == "__main__":
    main()
