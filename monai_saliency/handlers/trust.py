"""How far to trust the map of a case: the figures that ``--trust true`` adds to its row of ``summary.csv``.

:mod:`monai_saliency.handlers.trust_page` makes one page of the rows of a cohort.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from monai.data import MetaTensor

from monai_saliency.cases import Case
from monai_saliency.errors import AdviceError
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.simple import BlurFill, MeanFill
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.metrics.agreement import rank_correlation
from monai_saliency.metrics.base import SaliencyMetric
from monai_saliency.metrics.control_maps import controls
from monai_saliency.metrics.method_checks import Repeatability, randomised, resemblance
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.metrics.perturbation_curve import Deletion, Insertion
from monai_saliency.metrics.plausibility import AUPRC, Leakage, MassInLabel, Pointing
from monai_saliency.networks.identity import network_key
from monai_saliency.storage.key import fingerprint, scores_key
from monai_saliency.storage.label_maps import label_problem, load_label, on_image
from monai_saliency.storage.tables import TRUST_COLUMNS, CaseTable
from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.tensors import plain
from monai_saliency.utils.timing import stage

__all__ = ["Trust", "Trusted", "label_on_grid"]

logger = logging.getLogger(__name__)

# Of the randomised network, of the other masks (the next one, if the map has this one) and of the random control.
_SEED = 1


@dataclass(frozen=True)
class Trusted:
    """An explained case whose map is measured."""

    explanation: Explanation
    inferer: PerturbationInferer
    network: Callable[..., Any]
    image: torch.Tensor
    case: Case
    label: Callable[[], torch.Tensor] | None = None
    network_id: str | None = None


class Trust:
    """Measures how far to trust maps: consistency, plausibility and fidelity, compared with controls.

    For a map of N forwards the figures cost N for another seed (methods with one), N for another fill, N for the
    randomised network, and ``10 * (steps + 1)`` for each of the case's maps, for insertion and deletion of the map and
    its four controls. The other maps explain the same class, region or boxes as the map that they are compared with.

    Args:
        steps: perturbed images of each insertion and deletion curve, at least 1.

    Raises:
        ValueError: when it is out of its range.
    """

    def __init__(self, steps: int = 20) -> None:
        self.steps = whole_number("steps", steps, 1)

    def rows(self, case: Trusted, table: CaseTable) -> list[dict[str, Any]]:
        """The figures of each map of a case: from the table if they are of the same map, else measured."""
        mark = self.mark(case)
        rows = []
        for row in table.read():
            if mark and row["case"] == case.case.name and row.get("trust_of") == mark and not row["trust_problem"]:
                rows.append({name: row.get(name, "") for name in TRUST_COLUMNS})
        return rows if len(rows) == len(case.explanation.saliency) else self.figures(case, mark)

    def mark(self, case: Trusted) -> str:
        """Sixteen hexadecimal digits of all that decides a case's figures; empty where that is not known."""
        inferer = case.inferer
        try:
            scores = scores_key(
                network_key(case.network, case.network_id),
                [*inferer.deciding.values(), inferer.estimator],
                replace(case.case, image=case.image),
                isinstance(inferer.fill, CaseFill),
            )
            label = None if case.label is None else plain(case.label()).cpu()
            return fingerprint([scores, label, self.steps, _SEED])[:16]
        except Exception as error:  # such as of the label, which the figures report
            logger.info("case %s: its figures of trust have no mark: %s", case.case.name, error)
            return ""

    def figures(self, case: Trusted, mark: str = "") -> list[dict[str, Any]]:
        """The figures of each map of a case, with the case's :meth:`mark`.

        A figure that cannot be measured is missing, with the reason in ``trust_problem``.

        Returns:
            for each map a dictionary with keys of :data:`~monai_saliency.storage.tables.TRUST_COLUMNS`:

            - ``trust_forwards``: what the case's figures cost;
            - ``trust_repeatability``, ``trust_fill_agreement``, ``trust_randomised``: the rank correlation with the map
              of another seed, of another fill (blurred, or the mean), and of the network at random weights;
            - ``trust_relative_error``: the largest standard error over the range of the map;
              ``trust_peak_to_error``: the highest value over its standard error;
            - ``trust_labelled``: whether the label map has any voxel; empty without a label map;
            - ``trust_pointing``, ``trust_mass``, ``trust_leakage``, ``trust_auprc``: against the label;
              ``trust_insertion``, ``trust_deletion``: areas under the curves, in the score's unit. With the name of a
              control at the end: of this control. ``trust_curves``: the curves as JSON.
        """
        with torch.no_grad(), stage("trust"):
            return _Figures(case, self).rows(mark)


class _AsExplained(Target):
    """The target of a case as it was bound for the explanation, whatever the network gives now."""

    def __init__(self, target: Target, bound: BoundTarget) -> None:
        self.target = target
        self.bound = bound

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        return self.bound


class _Figures:
    """The figures of one case, while they are measured."""

    def __init__(self, given: Trusted, trust: Trust) -> None:
        self.given = given
        self.trust = trust
        self.maps = plain(given.explanation.saliency)[None]  # (1, K, *spatial)
        self.image = plain(given.image)[None].to(self.maps.device)
        # The reference is the case's own by now, and nobody has predicted the other networks' outputs.
        self.case = replace(given.case, prediction=None)
        target = _AsExplained(given.inferer.target, given.explanation.target)
        self.inferer = given.inferer.replace(target=target, progress=False, sharing=None)
        self.forwards = 0
        self.problems: list[str] = []
        # The figures of the K maps by name, with the ending of a control such as ``auprc_random``.
        self.figures: dict[str, Sequence[Any]] = {}
        # The maps that are measured against the label and by curves, by these endings.
        self.compared = {"": self.maps}
        # Of each map its curves by name and control.
        self.curves: list[dict[str, dict[str, Any]]] = [{} for _ in self.maps[0]]

    def rows(self, mark: str) -> list[dict[str, Any]]:
        """Measure each figure by itself, so that one that fails leaves the others; see :meth:`Trust.figures`."""
        self._try("the standard error", self._errors)
        self._try("another seed", self._other_seed)
        self._try("another fill", self._other_fill)
        self._try("controls", self._controls)
        self._try("insertion", self._areas, "insertion", Insertion)
        self._try("deletion", self._areas, "deletion", Deletion)
        self._try("the randomised network", self._other_network)
        if self.given.label is not None:
            self._try("the label", self._plausibility, self.given.label)
        of_case = {"trust_of": mark, "trust_forwards": self.forwards, "trust_problem": "; ".join(self.problems)}
        rows = []
        for number, curves in enumerate(self.curves):
            row = of_case | {f"trust_{name}": _cell(values[number]) for name, values in self.figures.items()}
            if curves:
                row["trust_curves"] = json.dumps(curves, separators=(",", ":"))
            rows.append(row)
        return rows

    def _try(self, name: str, measure: Callable[..., None], *given: Any) -> None:
        try:
            measure(*given)
        except Exception as error:  # a figure must not cost a map
            words = " ".join(f"{name}: {error or type(error).__name__}".split())
            self.problems.append(words)
            logger.warning("case %s: a figure of trust could not be measured: %s", self.case.name, words)

    def _again(self, inferer: PerturbationInferer, network: Callable[..., Any]) -> torch.Tensor:
        """The maps ``(1, K, *spatial)`` of another explanation of the same question."""
        (explanation,) = inferer.explain(self.image, network, cases=[self.case])
        self.forwards += explanation.num_forwards
        return plain(explanation.saliency)[None]

    def _errors(self) -> None:
        errors = self.given.explanation.standard_error
        if errors is None:
            return
        relative, peaks = [], []
        for saliency, error in zip(self.maps[0], errors, strict=True):
            relative.append(float(error.max() / (saliency.max() - saliency.min())))
            peak = peak_voxel(saliency.numpy(force=True))
            peaks.append(float(saliency[peak] / error[peak]))
        self.figures["relative_error"], self.figures["peak_to_error"] = relative, peaks

    def _other_seed(self) -> None:
        for seed in (_SEED, _SEED + 1):
            with suppress(ValueError):  # this very seed, or masks without one
                other = Repeatability(self.inferer, self.given.network, seed).inferers[0]
                break
        else:
            return
        self._compare("repeatability", other)

    def _other_fill(self) -> None:
        fill = MeanFill() if isinstance(self.inferer.fill, BlurFill) else BlurFill()
        self._compare("fill_agreement", self.inferer.replace(fill=fill))

    def _compare(self, name: str, inferer: PerturbationInferer) -> None:
        (others,) = self._again(inferer, self.given.network)
        self.figures[name] = rank_correlation(self.maps[0].flatten(1), others.flatten(1)).tolist()

    def _other_network(self) -> None:
        network: Any = self.given.network
        other = self._again(self.inferer, randomised(network, _SEED))
        self.figures["randomised"] = resemblance(self.maps[0], other[0]).tolist()
        self.compared["_randomised"] = other

    def _controls(self) -> None:
        for name, maps in controls(self.image, self.maps, _SEED).items():
            self.compared[f"_{name}"] = maps

    def _areas(self, name: str, kind: Callable[..., Insertion | Deletion]) -> None:
        """The areas under insertion or deletion curves, and the curves as they are drawn."""
        metric = kind(self.inferer, self.given.network, self.trust.steps)
        try:
            for ending, maps in self.compared.items():
                (curves,) = metric.curves(maps, self.image, [self.case])
                self.figures[name + ending] = [float(curve.auc) for curve in curves]
                for drawn, curve in zip(self.curves, curves, strict=True):
                    line = [_drawn(curve.fractions), _drawn(curve.scores)]
                    drawn.setdefault(name, {})[ending.removeprefix("_")] = line
        finally:
            self.forwards += metric.num_forwards

    def _plausibility(self, read: Callable[[], torch.Tensor]) -> None:
        label = plain(read())[None].to(self.maps.device)
        voxels = int((label != 0).sum())
        self.figures["labelled"] = [voxels > 0] * self.maps.shape[1]
        if not voxels:
            return
        metrics: dict[str, SaliencyMetric] = {
            "pointing": Pointing(),
            "mass": MassInLabel(),
            "leakage": Leakage(top=voxels / label.numel()),
            "auprc": AUPRC(),
        }
        for name, metric in metrics.items():
            for ending, maps in self.compared.items():
                self.figures[name + ending] = metric.compute(maps, label)[0].tolist()


def _drawn(values: Any) -> list[float]:
    """The values of a curve in four digits."""
    return [float(f"{value:.4g}") for value in values]


def label_on_grid(item: Mapping[Any, Any], image_key: Any) -> Callable[[], torch.Tensor] | None:
    """A function that reads a case's label map on the grid of its image, by nearest neighbour."""
    label, image = item.get("label"), item[image_key]
    if isinstance(label, torch.Tensor):
        is_on_grid = label.shape[1:] == image.shape[1:]
        return cache(partial(_own, label, image)) if is_on_grid else None
    if isinstance(label, (str, Path)) and str(label) and isinstance(image, MetaTensor):
        return cache(partial(_resampled, label, image))
    return None


def _own(label: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    if problem := label_problem(label, image):
        raise AdviceError(problem)
    return _inside(plain(label))


def _resampled(label: str | Path, image: MetaTensor) -> torch.Tensor:
    values, affine = load_label(label, image)
    inside = _inside(torch.as_tensor(values))[0].numpy()
    return torch.as_tensor(on_image(inside, affine, image))[None]


def _inside(label: torch.Tensor) -> torch.Tensor:
    return ((label != 0) & (label == label)).any(0, keepdim=True)


def _cell(value: Any) -> Any:
    """A figure in the table: empty where it is not a number."""
    if isinstance(value, bool):
        return value
    return round(value, 6) if math.isfinite(value) else ""
