"""Does ``compare_methods`` name the method that finds the evidence best? On the tasks of ``generalise.py``.

    python tests/benchmarks/which_method.py [--tasks ring texture ...] [--num_cases 8] [--json FILE]
    python tests/benchmarks/which_method.py --show FILE ...

Of the final half of each task, the first cases choose: by their labels, and without labels, by planted evidence, on as
many images of all classes. All methods are then measured on as many further cases. AUPRC of a chosen method is compared
with the default's and with every fixed choice. A chosen method is the one that ``--method auto`` takes: where none is
recommended, since a control is as good, that of the highest AUPRC, and without a truth the default.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generalise_tasks import TASKS, Question, questions
from record import markdown

import monai_saliency as ms
from monai_saliency import metrics
from monai_saliency.fills import AutoFill
from monai_saliency.metrics.which_method import MethodComparison, default_methods, named

DEFAULT = "focused_rise"


def target_of(question: Question) -> Any:
    """The question of a whole task: what is predicted, or the one number."""
    activation = question.target.activation if isinstance(question.target, ms.ClassScore) else "none"
    if activation == "none":
        return question.target
    return ms.ClassScore("predicted", activation)


def compared(asked: list[Question], images: torch.Tensor, labels: torch.Tensor | None) -> MethodComparison:
    first = asked[0]
    return metrics.compare_methods(first.network, images, target_of(first), labels, **first.settings)


def precisions(asked: list[Question], chosen_on: torch.Tensor) -> dict[str, list[float]]:
    """AUPRC of each method and question; the fill is chosen on other images, as in a comparison."""
    first, found = asked[0], {}
    cases = [(image[None], ms.Case(f"image {number}")) for number, image in enumerate(chosen_on)]
    fill: Any = AutoFill()
    for name, settings in named(default_methods(first.truth.shape)).items():
        own = dict(settings)
        make = getattr(ms, own.pop("method"))
        explain = make(target=target_of(first), fill=fill, **first.settings, **own)
        explain = ms.inferers.choose_fill(explain, first.network, cases)
        fill = explain.fill
        found[name] = [precision(explain, each) for each in asked]
    return found


def precision(explain: ms.PerturbationInferer, question: Question) -> float:
    """AUPRC of one map; 0 where there is none, as of a network without a derivative."""
    try:
        saliency = explain(question.image, question.network)
    except ValueError:
        return 0.0
    return float(metrics.AUPRC().compute(saliency[:, :1], question.truth[None, None].float()))


def row_of(task: str, count: int) -> dict[str, Any]:
    """What each way names for a task, and the AUPRC of every method on cases that chose nothing."""
    asked = list(questions(task, "final", 2 * count, "cpu", Path()))
    choose, measure = asked[:count], asked[count:]
    images = torch.cat([each.image for each in choose])
    labels = torch.stack([each.truth[None].float() for each in choose])
    begun = time.perf_counter()
    by_labels = compared(choose, images, labels)
    seconds = time.perf_counter() - begun
    mixed = choose[0].cohort
    planted = compared(choose, images if mixed is None else mixed[:count], None)
    found = {"task": task, "accuracy": choose[0].accuracy, "seconds": seconds, "auprc": precisions(measure, images)}
    for way, each in (("labels", by_labels), ("planted", planted)):
        found[way] = {
            "best": each.best,
            "taken": each.taken,
            "truth": each.truth,
            "verdict": each.verdict,
            "table": str(each),
        }
    return found


def tables(rows: list[dict[str, Any]]) -> str:
    """AUPRC of each task by what was named, and the means."""
    lines, names = [], {}
    for row in rows:
        means = {name: float(np.mean(values)) for name, values in row["auprc"].items()}
        windows = [name for name in means if name.startswith("sliding_window")]  # their sizes are of the task
        names = {name: name for name in means} | dict(zip(windows, ("small windows", "large windows"), strict=True))
        line = {"task": row["task"], "best": max(means.values())}
        for way in ("labels", "planted"):
            line |= {way: means[row[way]["taken"] or DEFAULT], f"{way} named": row[way]["best"] or "none"}
        lines.append(line | {words: means[name] for name, words in names.items()})
    columns = ["best", "labels", "planted", *names.values()]
    means = {"task": "mean", **{name: float(np.mean([line[name] for line in lines])) for name in columns}}
    return markdown([*lines, means])


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--num_cases", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", nargs="*", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [json.loads(path.read_text()) for path in args.show or ()]
    for task in () if args.show else args.tasks:
        rows.append(row_of(task, args.num_cases))
        if args.json:
            args.json.write_text(json.dumps(rows[-1]))
    print(tables(rows))


if __name__ == "__main__":
    main()
