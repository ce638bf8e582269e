"""The scores of one case on disk: taken where they are known to be the same, and added to (laws 8 and 10)."""

from __future__ import annotations

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_search import CaseSearch
from monai_saliency.storage.score_store import StoredScores
from monai_saliency.targets.base import BoundTarget


class ScoreWatch:
    """Watches the loop, and keeps the scores of one case on disk.

    Args:
        stored: its scores on disk; None where none are kept, and then nothing happens here.
        search: the masks, and their scores.
    """

    def __init__(self, stored: StoredScores | None, search: CaseSearch) -> None:
        self.stored, self.search = stored, search

    def resume(self, target: BoundTarget) -> None:
        """Take what is stored, once the unperturbed image is scored."""
        if self.stored is not None:
            self.stored.resume(self.search.reference_scores, repr(self.search.masks.key), target.vouch)
            self.take()

    def add(self, start: int, stop: int) -> None:
        """Keep the scores of masks [start, stop) of the search."""
        if self.stored is not None:
            # Copies: what the network gave may live in a buffer that the next batch overwrites.
            self.stored.add(start, stop, self.search.scores[start:stop])

    def flush(self) -> None:
        """Write what still waits."""
        if self.stored is not None:
            self.stored.flush()

    def end_round(self, look_for_others: bool) -> None:
        """Write what still waits, unless the case is done and all its scores go into one file."""
        if self.stored is None:
            return
        if look_for_others or not self.search.scored:
            self.flush()
        if look_for_others:
            try:
                self.stored.check_unchanged()
            except ValueError as error:
                raise CaseError(self.search.name, str(error)) from error
            self.take()

    def take(self) -> None:
        """Take the scores on disk, whoever computed them, of all rounds that are complete and of the one behind."""
        if self.stored is None:
            return
        ranges = self.stored.ranges()
        while True:
            for start, stop, scores in ranges:
                known = min(stop, len(self.search.ids))
                if start < known and scores.shape[1] == self.search.scores.shape[1]:
                    self.search.update(range(start, known), torch.from_numpy(scores[: known - start]))
            if not self.search.next_round():
                return

    def finish(self) -> None:
        """Put the scores of all masks into one file."""
        if self.stored is not None:
            self.stored.finish(self.search.scores)

    def discard(self) -> None:
        """Delete what is stored: the network has changed meanwhile."""
        if self.stored is not None:
            self.stored.discard()
