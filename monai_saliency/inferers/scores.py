"""The scores of one case, from its first forward pass to its map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from monai_saliency.errors import CaseError
from monai_saliency.masks.base import Id, Ids
from monai_saliency.storage.score_store import StoredScores
from monai_saliency.targets.base import BoundTarget

# Scores of one image and network on two machines differ by less, relative to the largest of them, or by less than some
# roundings of a network in half precision.
_TOLERANCE, _ROUNDINGS = 1e-3, 20


@dataclass(frozen=True)
class Report:
    """What one rank tells the others of a case: all that it has scored, on the host."""

    case: str
    ids: Sequence[Id]
    values: Tensor
    reference: Tensor
    hidden: Tensor | None
    num_forwards: int
    rounding: float
    made_by: Mapping[str, str | None]

    def differences(self, other: Report) -> list[str]:
        """The differences to another rank, in words; empty if the scores belong together."""
        ours, theirs = self.made_by, other.made_by
        known = [name for name in ours if None not in (ours[name], theirs.get(name))]
        found = [name for name in known if ours[name] != theirs[name]]
        first, second = self.reference.double(), other.reference.double()
        if first.shape != second.shape:
            return [*found, f"the number of scores ({len(first)} and {len(second)})"]
        largest = float(first.nan_to_num(0, 0, 0).abs().max()) if len(first) else 0.0
        allowed = max(_TOLERANCE, _ROUNDINGS * self.rounding) * largest
        if not torch.allclose(first, second, rtol=0, atol=allowed, equal_nan=True):
            found.append(f"the score of the unperturbed image ({first.tolist()[:3]} and {second.tolist()[:3]})")
        return found


@dataclass(eq=False)
class Scores:
    """What is known of a case: the scores of its image, of the image with everything hidden, and of each mask by its
    id. A resumed run, a rank, a part of the masks and a member of an ensemble differ only in who has filled it.

    Attributes:
        case: the case's name.
        stored: the same on disk; None where nothing is kept.
        reference: ``(K,)``, of the unperturbed image, once :meth:`begin` has it.
        hidden: ``(K,)``, with everything hidden; None until that is known.
        forwards: what was run here for it; ``forwards_elsewhere`` by other ranks.
        per_prediction: how many forwards one prediction of the image is.
        rounding: how far a score may be off by the network's precision, relative to the largest one.
        made_by: hashes of what decides the scores, where ranks share them.
    """

    case: str
    stored: StoredScores | None = None
    hidden: Tensor | None = None
    forwards: int = 0
    forwards_elsewhere: int = 0
    per_prediction: int = 1
    rounding: float = 0.0
    made_by: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reference: Tensor
        self._if_nan, self._nothing = BoundTarget.if_nan, False
        self._rows: dict[Id, int] = {}  # of each mask in `_values`, in the order in which they came
        self._values: Tensor

    def begin(self, reference: Tensor, masks: str, target: BoundTarget) -> None:
        """Take the scores ``(K,)`` of the unperturbed image, and those of masks that are stored for it.

        Args:
            reference: the scores.
            masks: what decides the masks, as text.
            target: the target, bound to the image.
        """
        self.reference, self._if_nan = reference, target.if_nan
        self._rows, self._values = {}, reference.new_zeros(0, len(reference))
        self._nothing = bool(target.nothing)
        if self._nothing:  # no mask needs a score
            self.hidden = reference
        elif self.stored is not None:
            self.stored.resume(reference, masks, target.vouch)
            self.load()

    def __len__(self) -> int:
        """The number of masks that have a score."""
        return len(self._rows)

    def missing(self, ids: Iterable[Id]) -> list[Id]:
        """Those of some masks that have no score, each once; none where there is nothing to explain."""
        if self._nothing:
            return []
        return [mask for mask in dict.fromkeys(ids) if mask not in self._rows]

    def of(self, ids: Ids) -> Tensor:
        """The scores ``(n, K)`` of n masks."""
        return self._values[self._places(ids)]

    def _places(self, ids: Ids) -> slice | list[int]:
        """The rows of some masks: of those that follow each other as a slice, which copies nothing."""
        rows = [self._rows[mask] for mask in ids]
        follow = bool(rows) and rows == list(range(rows[0], rows[0] + len(rows)))
        return slice(rows[0], rows[0] + len(rows)) if follow else rows

    def add(self, ids: Ids, values: Tensor, keep: bool = True) -> None:
        """Take the scores ``(n, K)`` of n masks, and store them; those that came before are replaced."""
        for mask in ids:
            self._rows.setdefault(mask, len(self._rows))
        if len(self._rows) > len(self._values):  # doubled, so that all masks are copied a few times at most
            room = max(len(self._rows), 2 * len(self._values)) - len(self._values)
            self._values = torch.cat([self._values, self._values.new_zeros(room, self._values.shape[1])])
        self._values[self._places(ids)] = values.to(self._values)
        if keep and self.stored is not None and not self._nothing:
            self.stored.add(list(ids), values)

    def check(self) -> None:
        """Refuse scores that are NaN or infinite."""
        wrong = ~torch.isfinite(torch.cat([self.reference[None], self._values[: len(self)]]))
        if bool(wrong.any()):
            raise CaseError(
                self.case,
                f"{int(wrong.any(dim=1).sum())} of {len(wrong)} network scores are NaN or infinite; {self._if_nan}",
            )

    @property
    def num_forwards(self) -> int:
        """All forwards that the case has cost."""
        return self.forwards + self.forwards_elsewhere

    # On disk.
    def beside(self, words: str) -> None:
        """Store the scores in another folder, for those that are made in another way."""
        if self.stored is not None:
            self.stored = self.stored.beside(words)

    def flush(self) -> None:
        """Write what still waits."""
        if self.stored is not None:
            self.stored.flush()

    def load(self) -> None:
        """Take the scores on disk, whoever computed them."""
        if self.stored is None:
            return
        for ids, values in self.stored.load():
            if values.shape[1] == len(self.reference):
                unknown = set(self.missing(ids))
                rows = [row for row, mask in enumerate(ids) if mask in unknown]
                self.add([ids[row] for row in rows], values[rows], keep=False)

    def share(self) -> None:
        """Write what is known here, and take what other processes have written by now."""
        if self.stored is None or self._nothing:
            return
        self.flush()
        try:
            self.stored.check_unchanged()
        except ValueError as error:
            raise CaseError(self.case, str(error)) from error
        self.load()

    def finish(self, ids: Ids) -> None:
        """Put the scores of all masks into one file."""
        if self.stored is not None:
            self.stored.finish(ids, self.of(ids))

    # Between ranks.
    def report(self) -> Report:
        """What this rank knows, for the others."""
        ids, values = list(self._rows), self._values[: len(self)].detach().cpu()
        reference, hidden = self.reference.detach().cpu(), None if self.hidden is None else self.hidden.detach().cpu()
        return Report(self.case, ids, values, reference, hidden, self.forwards, self.rounding, self.made_by)

    def gather(self, reports: Sequence[Report], me: int) -> None:
        """Take the scores of all ranks, this one at ``me``, after which all have the same to the bit."""
        self.reference = reports[0].reference.to(self.reference)
        if reports[0].hidden is not None:
            self.hidden = reports[0].hidden.to(self.reference)
        for report in reports:
            self.add(report.ids, report.values, keep=False)
        self.forwards_elsewhere = sum(report.num_forwards for rank, report in enumerate(reports) if rank != me)
