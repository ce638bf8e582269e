"""The truth that maps are compared with: labels that the network uses, or evidence that is planted in other scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.cohort_explainer import Keeper
from monai_saliency.inferers.explanation import Explanation, with_maps
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.order import OrderMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.metrics.base import OneMap, Scored
from monai_saliency.metrics.map_figures import AsExplained
from monai_saliency.metrics.perturbation_curve import Deletion
from monai_saliency.targets.base import BoundTarget

#: fewer cases give no standard error that means anything
LEAST = 3
#: a place that matters is made of tiles of a seventh of each axis, of the highest of these, and at most of this share
_TILES, _HIGHEST, _LARGEST = 7, 16, 1 / 8
#: into how many scans a place is moved
_EACH = 3


@dataclass(frozen=True)
class Scan:
    """A scan that methods are compared on: its image ``(C, *spatial)``, its label or planted place, bool
    ``(*spatial)``, and for a planted one the question that the place answers.
    """

    image: torch.Tensor
    case: Case
    label: torch.Tensor | None = None
    target: BoundTarget | None = None

    def asked(self, inferer: PerturbationInferer) -> PerturbationInferer:
        """An inferer that asks the question of this scan."""
        return inferer if self.target is None else inferer.replace(target=AsExplained(inferer.target, self.target))


def find_truth(hiding: Hiding, scans: Sequence[Scan], say: Callable[[str], None]) -> tuple[str, list[Scan]]:
    """In words what is the truth, and the scans that maps are compared on: the labels where the network uses them in at
    least three cases; else what was planted, where it is found in as many; else nothing, and these scans have no label.
    Scans that are refused are left out, with a line.
    """
    scans = hiding.explained(scans, say)
    labelled = [scan for scan in scans if scan.label is not None and bool(scan.label.any())]
    used = [scan for scan in labelled if hiding.used(scan) is not None]
    unused = len(labelled) - len(used)
    words = f"the labels, in {len(used)} of {len(labelled)} cases"
    if unused:
        words += f". In {unused} of {len(labelled)} cases the network does not need the label: look for a shortcut"
    if len(used) >= LEAST:
        return words, used
    planted = hiding.planted(scans)
    why = f"not {words}. Instead " if labelled else "no label is given: "
    if len(planted) >= LEAST:
        what = f"places that matter, moved into another scan, in {len(planted)} cases"
        return why + what, planted
    what = "nothing: no place that matters could be moved into another scan, so deletion, insertion and the agreement "
    what += "of seeds are all there is, and these cannot tell fine maps from coarse ones"
    return why + what, [replace(scan, label=None) for scan in scans]


class Hiding:
    """Scores scans with parts of them hidden."""

    def __init__(self, inferer: PerturbationInferer, network: Callable[..., Any], keeper: Keeper) -> None:
        self.inferer, self.network, self.keeper = inferer, network, keeper

    def score(self, scan: Scan, order: torch.Tensor, steps: int = 2, keep: bool = False) -> Scored:
        """The scores while the highest voxels of ``order``, of the scan's spatial shape, are hidden or kept."""
        probe = Deletion(scan.asked(self.inferer), self.network, keeper=self.keeper)
        return probe.score(OneMap(order, 0, 1, scan.image, scan.case), OrderMasks(order, steps, keep))

    def windows(self, scan: Scan, edge: Sequence[int]) -> Explanation:
        """A scan, explained by windows that do not overlap."""
        inferer = self.inferer.replace(masks=SlidingWindowMasks(edge, edge), estimator=OcclusionScoring())
        stored = self.keeper(inferer, self.network, [replace(scan.case, image=scan.image)])
        (found,) = with_maps(inferer.explain(scan.image[None], self.network, cases=[scan.case], stored=stored))
        if len(found.saliency) > 1:
            raise ValueError(
                f"methods are compared by one score a case, and the target explains {len(found.saliency)} "
                f"({', '.join(map(str, found.target.labels))}): give one class"
            )
        return found

    def explained(self, scans: Sequence[Scan], say: Callable[[str], None]) -> list[Scan]:
        """The scans without those that are refused, such as one with NaN."""
        explained = []
        for scan in scans:
            try:
                self.windows(scan, scan.image.shape[1:])
            except CaseError as error:
                say(f"left out: {error}")
            else:
                explained.append(scan)
        if len(explained) < LEAST:
            raise ValueError(f"methods are compared on at least {LEAST} cases, and {len(explained)} can be explained")
        return explained

    def used(self, scan: Scan) -> float | None:
        """The score of a scan whose label is used: hiding it alone takes at least half of what hiding everything takes,
        and hiding all but the label at most half. None where it is not.
        """
        label = scan.label.double()  # type: ignore[union-attr]
        hidden, kept = self.score(scan, label), self.score(scan, label, keep=True)
        alone, everything = hidden.reference - hidden.scores[0], hidden.reference - hidden.scores[-1]
        others = kept.reference - kept.scores[-1]
        is_used = everything > 0 and 2 * alone >= everything and 2 * others <= everything
        return float(hidden.reference) if is_used else None

    def place(self, scan: Scan) -> tuple[torch.Tensor, BoundTarget, float] | None:
        """The smallest set of tiles whose hiding takes half of what hiding everything takes, bool ``(*spatial)``, with
        the question that it answers, and the scan's score; None where that is a large part of the scan.
        """
        spatial = scan.image.shape[1:]
        found = self.windows(scan, [math.ceil(size / _TILES) for size in spatial])
        drops = found.saliency[0]
        levels = drops.unique()
        order = drops.clamp(min=levels[-_HIGHEST:][0])
        scored: Any = self.score(scan, order, _TILES ** len(spatial))
        fallen = scored.reference - scored.scores
        step = int((2 * fallen >= fallen[-1]).nonzero()[0])
        is_large = scored.masks.hidden_fractions[step] > _LARGEST
        if fallen[-1] <= 0 or is_large or found.fill_problem:
            return None
        return scored.masks.first <= step, found.target, float(scored.reference)

    def planted(self, scans: Sequence[Scan]) -> list[Scan]:
        """The scans of lowest score with a place of another scan in them, as many as there are scans at most, where the
        score rises by at least half of the difference, and of the largest rise: less may be noise.
        """
        planted = []
        for source in scans:
            place = self.place(source)
            if place is not None:
                planted += self._planted(source, *place, scans)
        planted.sort(key=lambda each: -each[0])
        return [scan for rise, scan in planted[: len(scans)] if 2 * rise >= planted[0][0]]

    def _planted(
        self, source: Scan, inside: torch.Tensor, target: BoundTarget, before: float, scans: Sequence[Scan]
    ) -> list[tuple[float, Scan]]:
        """The place of one scan of score ``before`` in the scans of the lowest scores, with the rise of each."""
        scored = []
        for other in scans:
            if other is not source and other.image.shape == source.image.shape:
                asked = replace(other, target=target)
                scored.append((float(self.score(asked, inside.double(), 1).reference), asked))
        scored.sort(key=lambda each: each[0])
        planted = []
        for lowest, other in scored[:_EACH]:
            case = replace(other.case, name=f"{source.case.name} in {other.case.name}", prediction=None)
            image = torch.where(inside, source.image, other.image)
            scan = replace(other, image=image, case=case, label=inside)
            score = self.used(scan)
            if score is not None and 2 * (score - lowest) >= before - lowest > 0:
                planted.append((score - lowest, scan))
        return planted
