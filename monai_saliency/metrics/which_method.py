"""Which method for a network, measured on some of its own scans."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from monai_saliency.cases import cases_of
from monai_saliency.fills.named import fill_in_unit
from monai_saliency.inferers.cohort_explainer import Keeper
from monai_saliency.inferers.explanation import with_maps
from monai_saliency.inferers.fill_choice import choose_fill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.methods.arguments import TargetLike
from monai_saliency.methods.settings import find_method
from monai_saliency.metrics.control_maps import controls
from monai_saliency.metrics.map_figures import MapFigures, Trusted
from monai_saliency.metrics.truth import LEAST, Hiding, Scan, find_truth
from monai_saliency.storage.key import fingerprint
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import CaseTable
from monai_saliency.utils.arguments import callable_network
from monai_saliency.utils.tensors import checked_label, plain

#: the figures of a method, by the columns of its table, with their words
FIGURES = {
    "forwards": "forwards",
    "seconds": "seconds",
    "auprc": "AUPRC",
    "pointing": "peak inside",
    "mass": "mass inside",
    "insertion": "insertion",
    "deletion": "deletion",
    "repeatability": "two seeds",
    "randomised": "random weights",
}
#: the columns of the table of each case and method
COLUMNS = ("case", "method", "mark", *FIGURES, "problem")
# Another seed and random weights cost as much as the map, so they are measured on the first cases alone.
_FIGURES, _COSTLY_FIGURES = ("insertion", "deletion", "the label"), ("another seed", "the randomised network")
_COSTLY = 3
# Perturbed images of each insertion and deletion curve.
_STEPS = 20

Row = dict[str, Any]


def default_methods(spatial: Sequence[int], has_regions: bool = False) -> list[Row]:
    """The methods that are compared by default on images of a spatial shape, each with its settings."""
    window = [max(2, size // (8 if len(spatial) == 2 else 4)) for size in spatial]
    stride = [size // 2 for size in window]
    return [
        {"method": "focused_rise"},
        {"method": "rise", "num_masks": 350},
        {"method": "rise", "num_masks": 1000},
        {"method": "hierarchical_occlusion"},
        {"method": "sliding_window", "window_size": window, "stride": stride},
        {"method": "sliding_window", "window_size": [2 * size for size in window], "stride": window},
        {"method": "region_occlusion"} | ({} if has_regions else {"num_supervoxels": 200}),
        {"method": "smoothgrad"},
        {"method": "integrated_gradients"},
    ]


def named(methods: Sequence[str | Mapping[str, Any]]) -> dict[str, Row]:
    """Methods with their settings by the words for them, such as ``"rise --num_masks 350"``."""
    by_name = {}
    for given in [methods] if isinstance(methods, (str, Mapping)) else methods:
        settings = {"method": given} if isinstance(given, str) else dict(given)
        method = settings.pop("method", None)
        if method is None:
            raise ValueError(f"each of `methods` must be a name, or a dictionary with a `method`, got {settings}")
        words = [method if isinstance(method, str) else method.__name__]
        words += [f'--{id} "{value}"' if " " in str(value) else f"--{id} {value}" for id, value in settings.items()]
        by_name[" ".join(words)] = {"method": method} | settings
    return by_name


@dataclass(frozen=True)
class MethodComparison:
    """Methods compared on some scans. Printed, it is a table.

    Attributes:
        best: the words for the method to take, with its settings; None where none is recommended.
        truth: what the maps were compared with, in words.
        verdict: in words, which method to take, or why none.
        summary: for each method and control a dictionary: its figures, means over cases, each with its standard error
            under ``<figure>_error``; ``cases``, and ``problem``, which is empty unless the method was left out.
        cases: the figures of each case and method.
        settings: of each method, by the words for it.
    """

    best: str | None
    truth: str
    verdict: str
    summary: list[Row]
    cases: list[Row]
    settings: Mapping[str, Row]

    @property
    def taken(self) -> str | None:
        """What ``--method auto`` takes: the best one. Where none is recommended, since a control is as good, the one of
        the highest mean AUPRC all the same; None without a truth.
        """
        known = {row["method"]: row["auprc"] for row in self.summary if "auprc" in row and not row["problem"]}
        return self.best or max(self.settings.keys() & known.keys(), key=lambda name: known[name], default=None)

    def __str__(self) -> str:
        measured = [row for row in self.summary if not row["problem"]]
        shown = {name: words for name, words in FIGURES.items() if any(name in row for row in measured)}
        lines = [["method", *shown.values()]]
        lines += [[row["method"], *(in_words(row, name) for name in shown)] for row in measured]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        texts += [f"left out: {row['method']}: {row['problem']}" for row in self.summary if row["problem"]]
        return "\n".join([f"The truth: {self.truth}.", "", *texts, "", self.verdict])


def in_words(row: Row, name: str) -> str:
    """A figure with its standard error."""
    if name not in row:
        return ""
    if name in ("forwards", "seconds"):
        return f"{row[name]:.4g}"
    return f"{row[name]:.2f} ± {row[f'{name}_error']:.2f}"


def compare_methods(
    network: Callable[..., Any],
    images: torch.Tensor,
    target: TargetLike = None,
    labels: Any = None,
    methods: Sequence[str | Mapping[str, Any]] | None = None,
    *,
    fill: Any = "auto",
    names: Sequence[str] | None = None,
    store: ScoreStore | None = None,
    network_id: str | None = None,
    **shared: Any,
) -> MethodComparison:
    """Which method, with which settings, shows best what a network looks at? Measured on some of its scans.

    The truth is, in this order:

    - the labels, in cases in which the network uses them: hiding the label alone takes at least half of what hiding
      everything takes from the score, and hiding all but the label at most half;
    - evidence that is planted: a place that matters in one scan is moved into the scan of the lowest score, and counts
      where the score rises by at least half of the difference;
    - where neither is found in three cases, nothing: no method is recommended.

    Methods are compared by AUPRC (:class:`~monai_saliency.metrics.AUPRC`), also with controls that know nothing of the
    network: the scan's intensity and its negative, its edges, a random map. A method or control is a tie if its mean
    difference to the best is at most one standard error of this difference over cases. The tie of the fewest forwards
    is recommended; no method is, where a control is a tie or better. Planted evidence is coarse and
    cannot tell which map is finer: by it the first of the methods that is better than every control is recommended.

    Args:
        network: any callable on images. The map of random weights needs a module.
        images: ``(B, C, *spatial)``, at least 3; about 8 are enough to tell methods apart.
        target: the one score that is explained, as for :func:`~monai_saliency.explain`; by default the class that the
            network predicts.
        labels: label maps ``(B, 1, *spatial)`` on the images' grid: the evidence, such as lesions, is not 0.
        methods: names, or dictionaries of a method with settings such as ``{"method": "rise", "num_masks": 500}``; by
            default those of :func:`default_methods`.
        fill: as in the bundle; ``"auto"`` is chosen on the first cases (:func:`~monai_saliency.inferers.choose_fill`).
        names: of the images.
        store: keeps scores, so that a stopped comparison resumes.
        network_id: a name of the network in the store, needed where it is not a module.
        shared: what all methods are given, such as ``mask_batch_size`` and ``inferer``.

    Raises:
        ValueError: for fewer than 3 images, other labels, an unknown method, or a target of several scores.

    Example::

        >>> images = 0.1 * torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
        >>> labels = torch.zeros(4, 1, 16, 16)
        >>> for number in range(4):
        ...     labels[number, 0, 3 * number : 3 * number + 4, 5:9] = 1
        >>> images += 0.8 * labels
        >>> network = lambda images: images.flatten(1).sort().values[:, -16:].sum(1, keepdim=True)
        >>> compared = compare_methods(network, images, labels=labels, methods=["rise", "hierarchical_occlusion"])
        >>> print(compared.verdict)
        none of these maps shows more than the scan's intensity: do not show them
    """
    callable_network(network)
    if len(images) < LEAST:
        raise ValueError(f"methods are compared on at least {LEAST} images, about 8 are better, got {len(images)}")
    cases = cases_of(images, labels, names=names)
    settings = named(methods or default_methods(images.shape[2:]))
    inferers = {}
    for name, own in settings.items():
        given = shared | own | {"target": target, "fill": fill_in_unit(fill)}
        inferers[name] = find_method(given.pop("method"), "methods")(**given)
    scans = []
    for number, case in enumerate(cases):
        label = None if labels is None else (checked_label(case.labels, images.shape[2:])[0] != 0).to(images.device)
        scans.append(Scan(plain(images)[number], replace(case, labels=None), label))
    return Comparison(inferers, network, settings, store, network_id).run(scans)


class Comparison:
    """Measures methods on scans.

    Args:
        inferers: by the words for each method.
        network: the network.
        settings: of each method, by its words.
        store: keeps scores.
        network_id: names the network there.
        table: keeps the figures of each case and method; None keeps none.
        say: is given a line after each case, with the remaining time.
        show: is given the maps ``(*spatial)`` of the first three cases, each with its scan and the words of its method.
    """

    def __init__(
        self,
        inferers: Mapping[str, PerturbationInferer],
        network: Callable[..., Any],
        settings: Mapping[str, Row],
        store: ScoreStore | None = None,
        network_id: str | None = None,
        table: CaseTable | None = None,
        say: Callable[[str], None] = lambda line: None,
        show: Callable[[Scan, str, torch.Tensor], None] = lambda scan, name, saliency: None,
    ) -> None:
        self.show = show
        self.inferers, self.network, self.settings = dict(inferers), network, settings
        self.store, self.network_id, self.table, self.say = store, network_id, table, say
        self.keeper = Keeper(store, network_id)

    def run(self, scans: Sequence[Scan]) -> MethodComparison:
        """Find the truth, measure all methods and controls, and decide."""
        first = next(iter(self.inferers.values()))
        first = choose_fill(first, self.network, [(scan.image[None], scan.case) for scan in scans], self.keeper)
        for name, inferer in self.inferers.items():
            self.inferers[name] = inferer.replace(fill=first.fill, sharing=None)
        hiding = Hiding(first.replace(progress=False, sharing=None), self.network, self.keeper)
        truth, scans = find_truth(hiding, scans, self.say)
        self.say(f"the truth: {truth}")
        is_module = isinstance(self.network, torch.nn.Module) and any(True for _ in self.network.parameters())
        rows: list[Row] = []
        begun = time.monotonic()
        for number, scan in enumerate(scans):
            figures = _FIGURES if number >= _COSTLY else (*_FIGURES, *_COSTLY_FIGURES[: 1 + is_module])
            rows += self._measured(scan, figures)
            left = (time.monotonic() - begun) / (number + 1) * (len(scans) - number - 1)
            done = f"case {number + 1} of {len(scans)}, {scan.case.name}: {len(self.inferers)} methods"
            self.say(f"{done}, about {left:.0f} s left")
        return self._decided(truth, rows, scans[0].target is not None)

    def _measured(self, scan: Scan, figures: Sequence[str]) -> list[Row]:
        """The rows of a scan, of each method and control: from the table if it has them, else measured."""
        label = None if scan.label is None else scan.label[None].float
        given = {}
        for name, inferer in self.inferers.items():
            asked, nothing = scan.asked(inferer).replace(progress=False), None
            scanned = scan.image, scan.case, label, self.network_id, self.store
            given[name] = Trusted(nothing, asked, self.network, *scanned)  # type: ignore[arg-type]
        marks = [each.mark(_STEPS) for each in given.values()]
        mark = fingerprint([marks, list(figures)])[:16] if all(marks) else ""
        about: Row = {"case": scan.case.name, "mark": mark}
        by_name: dict[str, Row] = {name: {} for name in given} | self._kept(mark)
        for name, each in given.items():
            if by_name[name]:
                continue
            try:
                with torch.no_grad():
                    measured, explained = self._row(each, figures)
            except Exception as error:
                measured = {"problem": " ".join(str(error).split())}
            else:
                if "control: random" not in by_name:
                    for control, row in self._of_controls(scan, explained).items():
                        by_name[control] = about | {"method": control} | row
                if len(figures) > len(_FIGURES):
                    self.show(scan, name, explained.explanation.saliency[0])
            by_name[name] = about | {"method": name} | measured
            if self.table is not None:  # after each method, so that a stopped comparison runs none again
                self.table.add([row for row in by_name.values() if row])
        if all(row.get("problem") for row in by_name.values()):
            raise ValueError(f"no method could explain {scan.case.name}: {next(iter(by_name.values()))['problem']}")
        return list(by_name.values())

    def _kept(self, mark: str) -> dict[str, Row]:
        """The rows of a scan in the table, by method; a method with a problem is tried again, which may have passed."""
        rows = [] if self.table is None or not mark else self.table.read()
        return {row["method"]: _read(row) for row in rows if row["mark"] == mark and not row.get("problem")}

    def _of_controls(self, scan: Scan, given: Trusted) -> dict[str, Row]:
        """The rows of the maps that know nothing of the network."""
        rows = {}
        known = controls(scan.image[None], given.explanation.saliency[None])
        known["darkness"] = -known["intensity"]
        for name in ("intensity", "edges", "random", "darkness"):
            shown = replace(given.explanation, maps=known[name][0])
            figures = MapFigures(replace(given, explanation=shown), _STEPS).rows("", _FIGURES)[0]
            rows[f"control: {name}"] = _own_names(figures)
        return rows

    def _row(self, given: Trusted, figures: Sequence[str]) -> tuple[Row, Trusted]:
        """Explain a scan by a method and measure its map."""
        stored = self.keeper(given.inferer, given.network, [replace(given.case, image=given.image)])
        is_resumed = bool(stored and stored[0].load())
        begun = time.perf_counter()
        scored: list[Any] = given.inferer.score(given.image[None], given.network, cases=[given.case], stored=stored)
        (found,) = with_maps(scored)
        _ = found.saliency
        if given.image.is_cuda:
            torch.cuda.synchronize(given.image.device)
        seconds = time.perf_counter() - begun
        given = replace(given, explanation=found)
        row = {} if is_resumed else {"forwards": found.num_forwards / found.per_prediction, "seconds": seconds}
        if is_resumed and found.per_prediction == 1:  # the price of remembered patches is not kept
            row["forwards"] = len(found.ids) + 1
        return row | _own_names(MapFigures(given, _STEPS).rows("", figures)[0]), given

    def _decided(self, truth: str, rows: Sequence[Row], is_planted: bool) -> MethodComparison:
        """The means of all rows, and the method to take."""
        by_method: dict[str, list[Row]] = {row["method"]: [] for row in rows}
        problems = {row["method"]: row["problem"] for row in rows if row.get("problem")}
        for row in rows:
            by_method[row["method"]].append(row)
        summary = [{"method": name, **_means(of), "problem": problems.get(name, "")} for name, of in by_method.items()]
        best = None
        verdict = "no method is recommended, since nothing tells which map is right: give labels, or more scans"
        if any("auprc" in row for row in rows):
            precision = {}
            for name in [name for name in by_method if name not in problems]:
                precision[name] = np.array([row.get("auprc", 0.0) for row in by_method[name]])
            forwards = {row["method"]: row.get("forwards", math.inf) for row in summary}
            best, verdict = best_of(precision, forwards, is_planted)
        return MethodComparison(best, truth, verdict, summary, list(rows), self.settings)


def best_of(
    precision: Mapping[str, np.ndarray], forwards: Mapping[str, float], is_planted: bool = False
) -> tuple[str | None, str]:
    """The cheapest of the methods that are as good as the best one, and the verdict in words. Planted places are larger
    than the evidence and prefer smooth maps, so they tell only the first method that shows more than the controls do.
    """
    controls = [name for name in precision if name.startswith("control: ")]
    methods = [name for name in precision if name not in controls]

    def is_tie(name: str, other: str) -> bool:
        """Whether a method or control is as good as another, but for one standard error."""
        behind = precision[other] - precision[name]
        return bool(behind.mean() <= behind.std(ddof=1) / math.sqrt(len(behind)))

    highest = max(methods, key=lambda name: precision[name].mean())
    ties = [name for name in precision if is_tie(name, highest)]
    reached = max(set(ties).intersection(controls), key=lambda name: precision[name].mean(), default="")
    if reached:
        what = "a random map" if reached == "control: random" else f"the scan's {reached.removeprefix('control: ')}"
        return None, f"none of these maps shows more than {what}: do not show them"
    if is_planted:
        first = next(name for name in methods if not any(is_tie(control, name) for control in controls))
        return first, f"best: {first}, the first that shows more than the controls: to tell which is finer, give labels"
    best = min(ties, key=lambda name: forwards[name])
    others = [name for name in ties if name != best]
    tied = f", the cheapest of the ties with {', '.join(others)}" if others else ""
    return best, f"best: {best}{tied}"


def _means(rows: Sequence[Row]) -> Row:
    """The mean of each figure and its standard error, over the rows that have it."""
    means: Row = {"cases": len(rows)}
    for name in FIGURES:
        values = np.array([row[name] for row in rows if row.get(name, "") != ""], float)
        if len(values):
            means[name] = float(values.mean())
            means[f"{name}_error"] = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
    return means


def _read(row: Mapping[str, str]) -> Row:
    """A row of the table, without what was not measured."""
    return {name: float(text) if name in FIGURES else text for name, text in row.items() if text != ""}


def _own_names(row: Row) -> Row:
    """The figures of a map, without the prefix that they have in ``summary.csv``."""
    names = {name: row.get(f"trust_{name}", "") for name in FIGURES if name != "forwards"}
    return {name: value for name, value in names.items() if value != ""}
