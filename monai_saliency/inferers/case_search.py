"""The rounds of masks of one case, with their scores: each explained score has a search of its own, driven once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monai_saliency.errors import CaseError
from monai_saliency.masks.base import BoundMasks, Id, Ids, Observed, Search
from monai_saliency.targets.base import BoundTarget


class CaseSearch:
    """Asks for masks round after round, and keeps their scores. It holds no image and no mask, so its memory does not
    depend on the image.

    A round has all masks that the searches ask for next and that have no scores yet. Where masks do not depend on
    scores one search serves all scores, and has one round.

    Args:
        name: the case's name.
        masks: its masks.

    Attributes:
        ids: the masks of all rounds so far, N of them, in the order in which they were asked for.
        reference_scores: ``(K,)``, of the unperturbed image, once :meth:`begin` has it.
        scores: ``(N, K)``, in the precision of ``reference_scores``; 0 where a mask has no score yet.
        seen: bool ``(N,)`` on the CPU, the masks that have a score.
        ends: for each round, the number of masks up to its end.
        observed: what the searches have returned: one for each explained score, or one for all.
    """

    reference_scores: Tensor
    scores: Tensor

    def __init__(self, name: str, masks: BoundMasks) -> None:
        self.name, self.masks = name, masks
        self.observed: list[Observed] = []
        self._running: list[_Running] | None = None  # None before the first round is scored
        self.restart()

    def restart(self) -> None:
        """Ask for the first round, before anything is scored."""
        self.ids: Ids = self.masks.first_round()
        self.seen = torch.zeros(len(self.ids), dtype=torch.bool, device="cpu")
        self.ends = [len(self.ids)]

    @property
    def complete(self) -> bool:
        """Whether every search has ended."""
        return self._running is not None and not self._running

    @property
    def scored(self) -> bool:
        """Whether all masks so far have scores."""
        return bool(self.seen.all())

    def begin(self, reference_scores: Tensor, if_nan: str = BoundTarget.if_nan) -> None:
        """Take the scores ``(K,)`` of the unperturbed image, and what is likely wrong where a score is NaN."""
        self.reference_scores = reference_scores
        self._if_nan = if_nan
        self.scores = reference_scores.new_zeros(len(self.ids), len(reference_scores))

    def update(self, rows: Sequence[int], scores: Tensor) -> None:
        """Take the scores ``(n, K)`` of n masks, in any order."""
        places = slice(rows.start, rows.stop) if isinstance(rows, range) and rows.step == 1 else list(rows)
        self.scores[places] = scores.to(self.scores)
        self.seen[places] = True

    def check(self) -> None:
        """Refuse scores that are NaN or infinite."""
        wrong = ~torch.isfinite(torch.cat([self.reference_scores[None], self.scores]))
        if bool(wrong.any()):
            raise CaseError(
                self.name,
                f"{int(wrong.any(dim=1).sum())} of {len(wrong)} network scores are NaN or infinite; {self._if_nan}",
            )

    def require_complete(self) -> None:
        """Refuse to go on while masks have no scores."""
        if not self.complete:
            raise CaseError(
                self.name,
                f"{int(self.seen.sum())} of {len(self.seen)} masks have scores: another part is still to be done. "
                "Later rounds of masks need a store, or ranks or devices that share them",
            )

    def next_round(self) -> bool:
        """Send the searches the scores of what they asked for. False where these are missing, or all have ended."""
        if self.complete or not self.scored:
            return False
        if self.masks.adaptive:
            self.check()  # scores decide what is asked next
        if self._running is None:
            self._running = self._started()
        rows = {mask: row for row, mask in enumerate(self.ids)}
        for search in self._running:
            while search.wanted is not None and all(mask in rows for mask in search.wanted):
                search.send(self.scores[[rows[mask] for mask in search.wanted]])
        if all(search.wanted is None for search in self._running):
            self.observed = [search.observed for search in self._running]
            self._running = []
            return False
        wanted = (mask for search in self._running for mask in search.wanted or ())
        self._add(list(dict.fromkeys(mask for mask in wanted if mask not in rows)))
        return True

    def _started(self) -> list[_Running]:
        """The search of each score; one for all where masks do not depend on scores."""
        reference, count = self.reference_scores, len(self.reference_scores)
        if not self.masks.adaptive:
            return [_Running(slice(0, count), BoundMasks.search(self.masks, reference))]
        columns = [slice(k, k + 1) for k in range(count)]
        return [_Running(column, self.masks.search(reference[column])) for column in columns]

    def _add(self, ids: list[Id]) -> None:
        """Begin a round of new masks."""
        self.ids = [*self.ids, *ids]
        self.scores = torch.cat([self.scores, self.scores.new_zeros(len(ids), self.scores.shape[1])])
        self.seen = torch.cat([self.seen, torch.zeros(len(ids), dtype=torch.bool, device="cpu")])
        self.ends.append(len(self.ids))


@dataclass
class _Running:
    """A search on its way: the columns of the scores that it is sent, and the masks that it wants next, None at its
    end.
    """

    columns: slice
    search: Search
    wanted: Ids | None = None

    def __post_init__(self) -> None:
        self.wanted = next(self.search)

    def send(self, scores: Tensor) -> None:
        """Send the scores ``(n, K)`` of the masks that it wanted."""
        try:
            self.wanted = self.search.send(scores[:, self.columns])
        except StopIteration as end:
            self.wanted, self.observed = None, end.value
