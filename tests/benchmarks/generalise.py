"""Do maps find the evidence on tasks and scans that no default was tuned on? Methods, fills, peers and controls.

    python tests/benchmarks/generalise.py [--half choose|final] [--num_cases 8] [--tasks xor_white lesions26 ...]
        [--methods default rise_350 ...] [--device cuda] [--workers 12] [--open_ms DIR] [--quick] [--json FILE] [--keep]
    PYTHONPATH=OTHER_CHECKOUT python tests/benchmarks/generalise.py --methods default --label _then --json then.json
    python tests/benchmarks/generalise.py --show now.json then.json

Tasks: ``generalise_tasks.py``; the first six were ``unlike_the_demo.py``. Methods are chosen on one half of the images
that a network gets right, and the table is of the other. AUPRC is the average precision of the map as a detector of the
evidence, ``inside`` the share of peaks in it, ``mass`` its share of the positive values; insertion and deletion are
areas in shares of the score, zeros being the fill. Networks with an accuracy below 0.9 are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generalise_tasks import DEMO, PATIENTS, TASKS, Question, questions
from record import add_options, keep, markdown, now

import monai_saliency as ms
from monai_saliency import fills, inferers
from monai_saliency.metrics import AUPRC, MassInLabel, Pointing, controls

try:
    from captum import attr
except ImportError:
    attr = None

Row = dict[str, Any]
#: a map ``(*spatial)``, how many predictions it took, and what else is known of it
Found = tuple[torch.Tensor, float, Row]
Method = Callable[[Question], Found]

OPEN_MS = Path(os.environ.get("OPEN_MS", Path(__file__).resolve().parents[3] / "shared" / "data" / "open_ms"))
STEPS = 20
FIGURES = ("AUPRC", "inside", "mass", "insertion", "deletion", "forwards", "seconds")


class Score:
    """The explained score of images ``(n, C, *spatial)``, as ``(n,)``; counts them."""

    def __init__(self, question: Question) -> None:
        self.question, self.count = question, 0
        with torch.no_grad():
            output = self.predict(question.image)
        self.bound = scaled(question.target, "probability").bind(output, ms.Case("image", question.image[0]))

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        inferer = self.question.settings.get("inferer")
        return self.question.network(images) if inferer is None else inferer(images, self.question.network)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.count += len(images)
        return torch.cat([self.bound(self.predict(some))[:, 0] for some in images.split(32)])


def scaled(target: ms.Target, scale: str) -> ms.Target:
    """The target with the probability of a class in a scale; others, and in a checkout without scales, as they are."""
    target = copy.copy(target)
    if isinstance(target, ms.ClassScore) and target.activation != "none" and hasattr(target, "scale"):
        target.scale = scale
    return target


def filled(name: str, question: Question) -> Any:
    """A fill by its name; zero in a checkout that cannot choose one."""
    if name == "mirror":
        return fills.MirrorFill(question.truth.ndim - 1)
    return getattr(fills, FILLS[name], fills.ConstantFill)()


def leaves(question: Question, explain: Any, scale: str) -> float:
    """How much of what a score can move by is left with everything hidden, by the network's output alone: of a class it
    moves to chance, of a segmentation's region to 0, of a number as far as 64 random masks move it.
    """
    fill = explain.fill.bind(ms.Case("image", question.image[0])) if hasattr(explain.fill, "bind") else explain.fill
    hidden, target = fill(question.image), question.target
    images, nothing = torch.cat([question.image, hidden]), 0.5
    if isinstance(target, ms.RegionScore):
        before, after = Score(question)(images).tolist()
        moves = before
    elif target.activation == "softmax":
        logits = question.network(images).double()
        before, after = (logits[:, target.classes[0]] - logits[:, 1 - target.classes[0]]).tolist()  # two classes
        if scale == "probability":
            before, after = (1 / (1 + np.exp(-each)) for each in (before, after))
        else:
            nothing = 0.0
        moves = abs(before - nothing)
    else:
        random = torch.Generator().manual_seed(0)
        cells = torch.rand(64, 1, *[7] * question.truth.ndim, generator=random).round().to(hidden.device)
        kind = {2: "bilinear", 3: "trilinear"}[question.truth.ndim]  # soft edges: hard ones are evidence to a counter
        masks = torch.nn.functional.interpolate(cells, question.truth.shape, mode=kind)
        scores = Score(question)(torch.cat([images, masks * question.image + (1 - masks) * hidden])).tolist()
        before, after, moves = scores[0], scores[1], max(abs(each - scores[0]) for each in scores)
    moved = abs(before - after)
    return 1 - moved / max(moved, moves) if moved or moves else 1.0


def ours(name: str, fill: str = "zero", scale: str = "log_odds", **settings: Any) -> Method:
    """A method of the package. Settings that are functions take the question."""

    def explain(question: Question) -> Found:
        given = {key: value(question) if callable(value) else value for key, value in settings.items()}
        given |= {"fill": filled(fill, question), "target": scaled(question.target, scale)}
        explain = getattr(ms, name)(**question.settings, **given)
        if isinstance(explain.fill, getattr(fills, "AutoFill", ())):
            cohort = question.image if question.cohort is None else question.cohort
            cases = [(image[None], ms.Case(f"image {number}")) for number, image in enumerate(cohort)]
            explain = inferers.choose_fill(explain, question.network, cases)
        (found,) = explain.explain(question.image, question.network)
        more = {key: float(value) for key in ("fill_leaves",) if (value := getattr(found, key, None)) is not None}
        if more:
            with torch.no_grad():
                more |= {"none": bool(leaves(question, explain, scale) > 0.5), "reported": bool(found.fill_problem)}
        return found.saliency.float().sum(0), found.num_forwards / found.per_prediction, more

    return explain


def peer(name: str, settings: Callable[[Question], Row]) -> Method:
    """A method of captum."""

    def explain(question: Question) -> Found:
        score = Score(question)
        found = getattr(attr, name)(score).attribute(question.image, **settings(question))
        return found[0].detach().float().sum(0), score.count, {}

    return explain


def window(question: Question) -> int:
    """Of 225 places in 2D and 343 in 3D, at steps of its half."""
    dims = question.truth.ndim
    return question.truth.shape[0] // {2: 8, 3: 4}[dims]


def windows(question: Question) -> Row:
    size, channels, dims = window(question), question.image.shape[1], question.truth.ndim
    sizes: Row = {"sliding_window_shapes": (channels, *[size] * dims), "strides": (channels, *[size // 2] * dims)}
    return sizes | {"perturbations_per_eval": 32}


def cubes(question: Question) -> Row:
    """64 squares, or 64 cubes."""
    tiles, dims = {2: 8, 3: 4}[question.truth.ndim], question.truth.ndim
    index = torch.arange(float(tiles**dims), device=question.image.device).reshape(1, 1, *[tiles] * dims)
    labels = torch.nn.functional.interpolate(index, question.truth.shape).long()
    return {"feature_mask": labels, "n_samples": 340, "perturbations_per_eval": 32}


#: what replaces a hidden voxel, by the end of a row's name
FILLS = {"zero": "ConstantFill", "auto": "AutoFill", "mean": "MeanFill", "blur": "BlurFill", "inpaint": "InpaintFill"}
FILLS["mirror"] = "MirrorFill"

#: by name what makes a map; a row more is a line more
METHODS: dict[str, Method] = {
    "default": ours("focused_rise", "auto"),
    **{
        f"default_{name}": ours("focused_rise", name)
        for name, kind in FILLS.items()
        if name != "auto" and hasattr(fills, kind)
    },
    "default_probability": ours("focused_rise", scale="probability"),
    "regression": ours("rise", num_masks=340, form="regression"),
    "rise_350": ours("rise", num_masks=340),
    "rise_1000": ours("rise", num_masks=1000),
    "sliding_window": ours("sliding_window", window_size=window, stride=lambda question: window(question) // 2),
    "smooth_window": ours(
        "sliding_window",
        window_size=window,
        stride=lambda question: window(question) // 2,
        smooth=lambda question: window(question) // 2,
    ),
    "hierarchical_occlusion": ours("hierarchical_occlusion"),
    "minimal_region": ours("minimal_region"),
    "hsic": ours("hsic", num_masks=340),
    "sobol": ours("sobol", num_designs=5, grid_size=4),
    "region_occlusion": ours("region_occlusion", num_supervoxels=200),
    "shapley": ours("shapley", num_coalitions=340, num_supervoxels=40),
    "mc_rise": ours("mc_rise", num_masks=340),
    "smoothgrad": ours("smoothgrad"),
    "integrated_gradients": ours("integrated_gradients"),
    "grad_cam": ours("grad_cam"),
    "captum_kernel_shap": peer("KernelShap", cubes),
    "captum_occlusion": peer("Occlusion", windows),
    "captum_integrated_gradients": peer("IntegratedGradients", lambda question: {"internal_batch_size": 8}),
    "random_weights": lambda question: METHODS["default"](replace(question, network=question.untrained)),
}
QUICK = ("default", "regression", "rise_1000", "smoothgrad", "random_weights")


def curves(score: Score, saliency: torch.Tensor) -> Row:
    """Insertion and deletion in equal steps, in shares of the score."""
    image = score.question.image
    order = saliency.flatten().argsort(descending=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    shares = torch.linspace(0, 1, STEPS + 1, device=order.device)
    chosen = (rank < shares[:, None] * len(order)).reshape(-1, 1, *saliency.shape)
    with torch.no_grad():
        scores = score(torch.cat([image * chosen, image * ~chosen])) / score(image)
    inserted, deleted = (torch.trapezoid(each, shares) for each in scores.chunk(2))
    return {"insertion": float(inserted), "deletion": float(deleted)}


def figures(score: Score, saliency: torch.Tensor) -> Row:
    given, truth = saliency[None, None], score.question.truth[None, None].float()
    metrics = {"AUPRC": AUPRC(), "inside": Pointing(), "mass": MassInLabel()}
    return {name: float(metric.compute(given, truth)) for name, metric in metrics.items()} | curves(score, saliency)


def explained(question: Question, methods: Iterable[str]) -> Iterator[Row]:
    """A row for each method and control."""
    score, device = Score(question), question.image.device.type
    with torch.no_grad():
        reference, filled = (float(score(image)) for image in (question.image, torch.zeros_like(question.image)))
    keys = {"task": question.task, "case": question.number, "accuracy": question.accuracy}
    keys |= {"reference": reference, "filled": filled}
    first = question.image[:, :1]
    known = controls(first, torch.zeros_like(first))  # maps that know nothing of the network
    for name, saliency in {**known, "blurred": -first}.items():
        given = {"method": f"control_{name}".replace("blurred", "dark"), "forwards": 0, "seconds": 0.0}
        yield keys | given | figures(score, saliency[0, 0])
    for name in methods:
        begun = now(device)
        try:
            saliency, forwards, more = METHODS[name](question)
        except (ValueError, NotImplementedError, AttributeError) as error:  # it has no such map, or captum is missing
            yield keys | {"method": name, "refused": str(error)[:200]}
            continue
        seconds = now(device) - begun
        yield keys | {"method": name, "forwards": forwards, "seconds": seconds} | more | figures(score, saliency)


def measure(unit: str, args: argparse.Namespace) -> list[Row]:
    """All rows of a task or of a patient; none where the network is not accurate."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for question in questions(unit, args.half, args.num_cases, args.device, args.open_ms):
        if question.accuracy < 0.9 and unit not in PATIENTS:  # a crop counts where its lesions are found
            print(f"{unit} is left out: accuracy {question.accuracy:.2f}", flush=True)
            break
        rows += explained(question, args.methods)
    return [row | {"method": row["method"] + args.label * (row["method"] in METHODS)} for row in rows]


def by_task(rows: Iterable[Row]) -> list[Row]:
    """For each task and method the mean of each figure."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "AUPRC" in row:
            groups.setdefault((row["task"], row["method"]), []).append(row)
    found = []
    for (task, method), each in groups.items():
        row = {"task": task, "method": method, "cases": len(each)}
        found.append(row | {name: float(np.mean([row[name] for row in each])) for name in ("accuracy", *FIGURES)})
    return found


def tables(rows: list[Row]) -> str:
    """The mean over tasks for each method, and AUPRC of each task."""
    means, summary = by_task(rows), []
    names = list(dict.fromkeys(row["method"] for row in means))
    for name in names:
        own = [row for row in means if row["method"] == name]
        row = {"method": name, "tasks": len(own), "lowest AUPRC": min(row["AUPRC"] for row in own)}
        summary.append(row | {key: float(np.mean([each[key] for each in own])) for key in FIGURES})
    each_task: dict[str, Row] = {}
    for row in means:
        known = {key: row[key] for key in ("task", "cases", "accuracy")}
        each_task.setdefault(row["task"], known | dict.fromkeys(names))[row["method"]] = row["AUPRC"]
    known = [row for row in rows if "reported" in row]
    reported = [sum(row["reported"] for row in known if row["none"] is none) for none in (True, False)]
    count = sum(row["none"] for row in known)
    words = (
        f"The fill is none in {count} maps, of which {reported[0]} say so, and one in {len(known) - count}, of which "
    )
    words += f"{reported[1]} say that it is none."
    return "\n\n".join([markdown(summary), words, "AUPRC of each task:", markdown(list(each_task.values()))])


def units(args: argparse.Namespace) -> list[str]:
    """Tasks and patients, the longest first."""
    if not args.open_ms.is_dir():
        print(f"no patients in {args.open_ms}: left out", flush=True)
    known = [*(PATIENTS if args.open_ms.is_dir() else ()), *sorted(TASKS, key=lambda name: "_3d" not in name)]
    known += [DEMO] if DEMO in (args.tasks or ()) else []  # where it is asked for
    chosen = ["xor_correlated", "ring", "rod_3d"] if args.quick and not args.tasks else args.tasks or known
    return [unit for unit in known if unit in chosen]


def run(args: argparse.Namespace) -> list[Row]:
    """All rows; written after each task."""
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        begun = time.perf_counter()
        waiting = {pool.submit(measure, unit, args): unit for unit in units(args)}
        for done in as_completed(waiting):
            try:
                rows += done.result()
            except Exception:  # the others are worth having
                traceback.print_exc()
            print(f"{waiting[done]}: done after {time.perf_counter() - begun:.0f} s", flush=True)
            keep(argparse.Namespace(**vars(args) | {"keep": None}), "generalise", rows)
    return rows


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("choose", "final"), default="choose")
    parser.add_argument("--num_cases", type=int, help="of each task, 8 by default; half of it for each patient")
    parser.add_argument("--tasks", nargs="*", choices=[*TASKS, *PATIENTS, DEMO])
    parser.add_argument("--methods", nargs="*", choices=METHODS)
    parser.add_argument("--label", default="", help="behind the names of methods, such as _then")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with one task at a time")
    parser.add_argument("--open_ms", type=Path, default=OPEN_MS, help="where the three patients lie")
    parser.add_argument("--quick", action="store_true", help="three tasks, three cases of each, five methods")
    parser.add_argument("--show", nargs="*", type=Path, help="files that --json wrote")
    add_options(parser)
    args = parser.parse_args()
    args.num_cases = args.num_cases or (3 if args.quick else 8)
    args.methods = args.methods or list(QUICK if args.quick else METHODS)
    if args.show:
        print(tables([row for path in args.show for row in json.loads(path.read_text())["rows"]]))
        return
    rows = run(args)
    print(tables(rows))
    keep(argparse.Namespace(**vars(args) | {"json": None}), "generalise", by_task(rows))


if __name__ == "__main__":
    main()
