"""A case on its way through the loop of :mod:`monai_saliency.inferers.inferer`, and what is known of it at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.estimators.base import ScoreState
from monai_saliency.masks.base import BoundMasks
from monai_saliency.networks.outputs import rows
from monai_saliency.storage.score_store import CaseScores
from monai_saliency.targets import BoundTarget
from monai_saliency.utils.boxes import Box
from monai_saliency.utils.profiling import stage

if TYPE_CHECKING:
    from monai_saliency.inferers.inferer import PerturbationInferer

__all__ = ["CaseRun", "Explanation", "merged"]


@dataclass(frozen=True)
class Explanation:
    """All that is known of one explained case.

    Attributes:
        name: the case's name.
        saliency: the map ``(K, *spatial)``, on the image's device, in the score's unit; ``(K * C, *spatial)`` where
            channels have masks of their own.
        scores: ``(N, K)``, one row a mask.
        reference_scores: ``(K,)``, of the unperturbed image.
        target: the target, bound to the case.
        masks: the masks, bound to the case.
        num_forwards: what went through the network for this case. Images: the masks and the unperturbed image, less
            the masks whose scores were stored; or patches of images, where their outputs are remembered
            (:mod:`monai_saliency.inferers.patches`).
    """

    name: str
    saliency: torch.Tensor
    scores: torch.Tensor
    reference_scores: torch.Tensor
    target: BoundTarget
    masks: BoundMasks
    num_forwards: int

    @property
    def explained(self) -> list[tuple[Any, int | None, float]]:
        """What each map shows: the class or channel explained, the image's channel (None where a map is of all), and
        the unperturbed image's score.
        """
        channels = [None] if self.masks.channels is None else range(self.masks.channels)
        scores = zip(self.target.labels, self.reference_scores.tolist(), strict=True)
        return [(label, channel, score) for label, score in scores for channel in channels]


class CaseRun:
    """One case on its way through the loop. Row 0 is the unperturbed image, row i + 1 mask i."""

    target: BoundTarget
    state: ScoreState
    stored: CaseScores | None = None
    num_forwards = 0

    def __init__(self, case: Case, masks: BoundMasks, fill: torch.Tensor, held: torch.Tensor) -> None:
        self.case = case
        self.masks = masks
        self.fill = fill
        self.held = held

    def perturb(self, start: int, stop: int, out: torch.Tensor, box: Box | None = None) -> None:
        """Write rows [start, stop) of the perturbed image to ``out``, and the held channels behind its own.

        With a box, only their part inside it.
        """
        inside = ... if box is None else (slice(None), *box)
        image, fill = self.case.image[inside], self.fill[inside]
        out[:, len(image) :] = self.held[inside]
        out = out[:, : len(image)]
        if start == 0:
            out[0] = image
            start, out = 1, out[1:]
        if start < stop:
            # Masks of one's own need not know boxes: only those that tell what they hide in one are asked for it.
            part: dict[str, Any] = {} if box is None else {"box": box}
            masks = self.masks.render(range(start - 1, stop - 1), **part).to(out.dtype)
            # lerp is mask * image + (1 - mask) * fill in one pass, and exact at mask 0 and 1.
            torch.lerp(fill, image, masks, out=out)

    def read(self, start: int, stop: int, output: Any, offset: int, count: int, settings: PerturbationInferer) -> None:
        """Score rows [start, stop), which stand at ``offset`` in the network's output of ``count`` images."""
        if start == 0:
            reference = rows(output, offset, offset + 1, count)
            self.target = settings.target.bind(reference, self.case)
            self.state = settings.estimator.start(self.masks, self.target(reference)[0].clone())
            if self.stored is not None:
                self.stored.resume(self.state.reference_scores)
                self.take_stored()
            start, offset = 1, offset + 1
        if start < stop:
            self.add(start, stop, self.target(rows(output, offset, offset + stop - start, count)))

    def add(self, start: int, stop: int, scores: torch.Tensor) -> None:
        """Take the scores of rows [start, stop), all of masks."""
        self.state.update(range(start - 1, stop - 1), scores)
        if self.stored is not None:
            # Not the scores themselves, which may live in a buffer that the next batch overwrites.
            self.stored.add(start - 1, stop - 1, self.state.scores[start - 1 : stop - 1])

    def has(self, start: int, stop: int) -> bool:
        """Whether rows [start, stop) need no forward. The unperturbed image always does: it vouches for the others."""
        return start > 0 and bool(self.state.seen[start - 1 : stop - 1].all())

    def take_stored(self) -> None:
        """Take the scores that are kept, whoever computed them."""
        for start, stop, scores in self.stored.ranges() if self.stored is not None else []:
            if stop <= len(self.masks) and scores.shape[1] == self.state.scores.shape[1]:
                self.state.update(range(start, stop), torch.from_numpy(scores))

    @property
    def complete(self) -> bool:
        """Whether every mask has its scores."""
        return bool(self.state.seen.all())

    def merge(self, other: CaseRun) -> None:
        """Take over the scores of another part of the same case, and what they cost."""
        self.state.merge(other.state)
        self.num_forwards += other.num_forwards

    def forget_images(self) -> None:
        """Let go of all that is only there for the network, so that what goes to another process is small."""
        self.case = replace(self.case, image=self.case.image.new_empty(0), labels=None)
        self.fill = self.held = self.case.image

    def check(self) -> None:
        """Refuse scores that are no numbers.

        Raises:
            CaseError: when there are any among those seen so far.
        """
        wrong = ~torch.isfinite(torch.cat([self.state.reference_scores[None], self.state.scores]))
        if bool(wrong.any()):
            raise CaseError(
                self.case.name,
                f"{int(wrong.any(dim=1).sum())} of {len(wrong)} network scores are NaN or "
                "infinite; check the network's weights and the preprocessing of this case",
            )

    def explanation(self) -> Explanation:
        """The case's map, and all that is known of it.

        Raises:
            CaseError: when scores are missing, or are no numbers.
        """
        self.check()
        if not self.complete:
            seen, count = int(self.state.seen.sum()), len(self.state.seen)
            raise CaseError(self.case.name, f"{seen} of {count} masks have scores: another part is still to be done")
        if self.stored is not None:
            self.stored.finish(self.state.scores)
        with stage("map"):
            return Explanation(
                name=self.case.name,
                saliency=self.state.compute(),
                scores=self.state.scores,
                reference_scores=self.state.reference_scores,
                target=self.target,
                masks=self.masks,
                num_forwards=self.num_forwards,
            )


@torch.no_grad()
def merged(parts: Iterable[Sequence[CaseRun]]) -> list[Explanation]:
    """The explanations of cases whose parts were scored apart, to the bit those of cases scored in one go.

    Args:
        parts: what :meth:`~monai_saliency.inferers.inferer.PerturbationInferer.score` gave for each part of the same
        cases.

    Raises:
        ValueError: when the parts are not of the same cases.
        CaseError: when a part is missing, or scores are no numbers.
    """
    explanations = []
    for run, *others in zip(*parts, strict=True):
        for other in others:
            run.merge(other)
        explanations.append(run.explanation())
    return explanations
