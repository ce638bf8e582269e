"""The figures of a map: consistency, plausibility and fidelity, measured for one map or for several of one scan."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.simple import BlurFill, MeanFill
from monai_saliency.inferers.cohort_explainer import Keeper
from monai_saliency.inferers.explanation import Explanation, with_maps
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
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.utils.tensors import plain

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
    store: ScoreStore | None = None

    def mark(self, steps: int) -> str:
        """Sixteen hexadecimal digits of all that decides a case's figures; empty where that is not known."""
        inferer = self.inferer
        try:
            scores = scores_key(
                network_key(self.network, self.network_id),
                [*inferer.deciding.values(), inferer.estimator],
                replace(self.case, image=self.image),
                isinstance(inferer.fill, CaseFill),
            )
            label = None if self.label is None else plain(self.label()).cpu()
            return fingerprint([scores, label, steps, _SEED])[:16]
        except Exception as error:  # such as of the label, which the figures report
            logger.info("case %s: its figures of trust have no mark: %s", self.case.name, error)
            return ""


class AsExplained(Target):
    """The target of a case as it was bound for the explanation, whatever the network gives now."""

    def __init__(self, target: Target, bound: BoundTarget) -> None:
        self.target = target
        self.bound = bound

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        return self.bound


class MapFigures:
    """The figures of the maps of one case, while they are measured."""

    def __init__(self, given: Trusted, steps: int) -> None:
        self.given = given
        self.steps = steps
        self.maps = plain(given.explanation.saliency)[None]  # (1, K, *spatial)
        self.image = plain(given.image)[None].to(self.maps.device)
        # The reference is the case's own by now, and nobody has predicted the other networks' outputs.
        self.case = replace(given.case, prediction=None)
        target = AsExplained(given.inferer.target, given.explanation.target)
        self.inferer = given.inferer.replace(target=target, progress=False, sharing=None)
        self.keeper = Keeper(given.store, given.network_id)
        self.forwards = 0
        self.problems: list[str] = []
        # The figures of the K maps by name, with the ending of a control such as ``auprc_random``.
        self.figures: dict[str, Sequence[Any]] = {}
        # The maps that are measured against the label and by curves, by these endings.
        self.compared = {"": self.maps}
        # Of each map its curves by name and control.
        self.curves: list[dict[str, dict[str, Any]]] = [{} for _ in self.maps[0]]

    def rows(self, mark: str, only: Collection[str] = ()) -> list[dict[str, Any]]:
        """Measure each figure by itself, so that one that fails leaves the others; ``only`` some of them, by their
        words here. See :meth:`monai_saliency.handlers.trust.Trust.figures`.
        """
        measures: dict[str, Callable[[], None]] = {
            "the standard error": self._errors,
            "another seed": self._other_seed,
            "another fill": self._other_fill,
            "controls": self._controls,
            "insertion": partial(self._areas, "insertion", Insertion),
            "deletion": partial(self._areas, "deletion", Deletion),
            "the randomised network": self._other_network,
        }
        if self.given.label is not None:
            measures["the label"] = partial(self._plausibility, self.given.label)
        for name in measures:
            if name in (only or measures):
                self._try(name, measures[name])
        of_case = {"trust_of": mark, "trust_forwards": self.forwards, "trust_problem": "; ".join(self.problems)}
        rows = []
        for number, curves in enumerate(self.curves):
            row = of_case | {f"trust_{name}": _cell(values[number]) for name, values in self.figures.items()}
            if curves:
                row["trust_curves"] = json.dumps(curves, separators=(",", ":"))
            rows.append(row)
        return rows

    def _try(self, name: str, measure: Callable[[], None]) -> None:
        try:
            measure()
        except Exception as error:  # a figure must not cost a map
            words = " ".join(f"{name}: {error or type(error).__name__}".split())
            self.problems.append(words)
            logger.warning("case %s: a figure of trust could not be measured: %s", self.case.name, words)

    def _again(self, inferer: PerturbationInferer, network: Callable[..., Any]) -> torch.Tensor:
        """The maps ``(1, K, *spatial)`` of another explanation of the same question."""
        keeper = self.keeper
        if network is not self.given.network and keeper.network_id:
            keeper = replace(keeper, network_id=f"{keeper.network_id} at random weights")
        stored = keeper(inferer, network, [replace(self.case, image=self.image[0])])
        found: list[Any] = inferer.score(self.image, network, cases=[self.case], stored=stored)
        (explanation,) = with_maps(found)  # without the warning of its fill, which the map has given
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
        metric = kind(self.inferer, self.given.network, self.steps, keeper=self.keeper)
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


def _cell(value: Any) -> Any:
    """A figure in the table: empty where it is not a number."""
    if isinstance(value, bool):
        return value
    return round(value, 6) if math.isfinite(value) else ""
