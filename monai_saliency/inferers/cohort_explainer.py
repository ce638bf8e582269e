"""Explaining the cases of a cohort, batch by batch: claims, stored scores, parts of cases, and cases that fail."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import NothingToExplain
from monai_saliency.fills.base import CaseFill
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer, explaining
from monai_saliency.inferers.progress import Progress
from monai_saliency.networks.identity import network_key
from monai_saliency.sharding import WHOLE, Part
from monai_saliency.storage.key import Unfingerprintable, scores_key
from monai_saliency.storage.score_store import ScoreStore, StoredScores
from monai_saliency.storage.tables import Failures
from monai_saliency.utils.arguments import callable_network, instance
from monai_saliency.utils.tensors import plain

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assignment:
    """The share of one process in a run over a cohort: everything, by default."""

    part: Part = WHOLE
    places: Sequence[int] | None = None
    quiet: bool = False

    def place(self, number: int) -> int:
        """The place in the whole loader of the batch that is the ``number``-th of this run, both from 0."""
        return number if self.places is None else self.places[number]


@dataclass(frozen=True)
class ScoredCase:
    """A case that is scored.

    Attributes:
        index: its place in the batch.
        explanation: its explanation, whose map is made when it is first read, so that another thread can do it.
        claim: to be closed when the case is written.
        seconds: how long scoring it took; of cases that were scored together, each its share.
    """

    index: int
    explanation: Explanation
    claim: ExitStack
    seconds: float


@dataclass(frozen=True)
class _Claimed:
    """A case that this process holds, or the part of it that this process scores."""

    index: int
    case: Case
    claim: ExitStack
    held: Mapping[Any, torch.Tensor]


@dataclass(frozen=True)
class Keeper:
    """Finds the scores of cases on disk. Nothing is kept without a store."""

    store: ScoreStore | None = None
    network_id: str | None = None

    def __call__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., Any],
        cases: Sequence[Case],
        held: Sequence[Mapping[Any, torch.Tensor]] = (),
    ) -> list[StoredScores] | None:
        """The stored scores of each case, which has its image; None where none are kept."""
        if self.store is None:
            return None
        try:
            # For each batch: weights, or an attribute of a fill, may change in place between batches.
            key = network_key(network, self.network_id, kept=True)
            reads_file = isinstance(inferer.fill, CaseFill)
            settings = [[*inferer.deciding.values(), *([each] if each else [])] for each in held or [{}] * len(cases)]
            keys = [scores_key(key, *each, reads_file) for each in zip(settings, cases, strict=True)]
        except Unfingerprintable as error:
            warnings.warn(f"scores are not kept: {error}", stacklevel=2)
            return None
        return [self.store.open(case.name, key) for case, key in zip(cases, keys, strict=True)]


class CohortExplainer:
    """Explains cases that several processes may share, and that may fail one by one."""

    def __init__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., Any],
        store: ScoreStore | None = None,
        failures: Failures | None = None,
        network_id: str | None = None,
    ) -> None:
        self.inferer = explaining(inferer)
        self.inferer.target.of_image(0, 1)  # refuses a tensor of classes, which is of one batch
        self.network = callable_network(network)
        self.store = instance("store", store, ScoreStore, "ScoreStore(folder)", none=True)
        self.failures = instance("failures", failures, Failures, "Failures(path)", none=True)
        self.network_id = instance("network_id", network_id, (str, int), "a name of the network, in quotes", none=True)
        self.assignment = Assignment()
        self.progress = Progress()  # over all cases of a run
        self.explained: list[str] = []  # the cases whose maps are written
        self.waiting: list[str] = []  # cases that another process has to finish

    def take_over(self, explained: Iterable[str], waiting: Iterable[str]) -> None:
        """Note what another process reports: the cases that it has written, and those that wait."""
        self.explained = list(dict.fromkeys([*self.explained, *explained]))
        self.waiting += waiting

    def take_waiting(self) -> list[str]:
        """The waiting cases since this was last called."""
        found, self.waiting = self.waiting, []
        return found

    def explain(
        self,
        images: torch.Tensor,
        cases: Sequence[Case],
        write: Callable[[ScoredCase], None],
        inferer: PerturbationInferer | None = None,
        held: Mapping[Any, torch.Tensor] | None = None,
    ) -> None:
        """Explain a batch, but for the cases that another process holds. ``held`` are the network's other inputs that
        the inferer's ``inputs`` takes, each ``(B, ...)``.
        """
        with ExitStack() as stack:
            claimed = []
            for index, case in enumerate(cases):
                claim = stack.enter_context(ExitStack())
                try:
                    is_mine = self._claim(case.name, self.assignment.part, claim)
                except Exception as error:  # a name that no folder can have
                    self.refuse(case.name, error)
                else:
                    own = {name: plain(value)[index : index + 1] for name, value in (held or {}).items()}
                    claimed += [_Claimed(index, case, claim, own)] * is_mine
            if claimed:
                # Plain tensors from here on: the cases hold their meta data.
                free = plain(images)[[each.index for each in claimed]]
                self._explain(free, claimed, write, inferer or self.inferer)

    def refuse(self, case: str, error: Exception) -> None:
        """List a case as one that cannot be explained, or in which there is nothing to explain; without a list of
        failures the error is raised.
        """
        if self.failures is None:
            raise error
        self.progress.done += 1
        self.failures.add(case, "explain", error)

    def _claim(self, case: str, part: Part, claim: ExitStack) -> bool:
        holder = claim.enter_context(self.store.claim(case, part)) if self.store is not None else None
        if holder:
            logger.warning("case %s is being explained by %s: left to it", case, holder)
            self.waiting.append(case)
        return holder is None

    def _explain(
        self,
        images: torch.Tensor,
        claimed: Sequence[_Claimed],
        write: Callable[[ScoredCase], None],
        inferer: PerturbationInferer,
    ) -> None:
        cases, part = [each.case for each in claimed], self.assignment.part
        with_images = [replace(case, image=image) for case, image in zip(cases, images, strict=True)]
        stored = Keeper(self.store, self.network_id)(
            inferer, self.network, with_images, [each.held for each in claimed]
        )
        if stored is None and part.count > 1:
            names = ", ".join(case.name for case in cases)
            raise ValueError(
                f"part {part.index + 1} of {part.count} of {names} is to be done here, but its scores cannot be kept, "
                "so parts cannot come together: let workers share cases (--saliency_split cases)"
            )
        begun, found = time.perf_counter(), None
        try:
            held = {name: torch.cat([each.held[name] for each in claimed]) for name in claimed[0].held}
            inputs = inferer.inputs.join(images, held)
            found = self._assigned(inferer).score(inputs, self.network, cases=cases, stored=stored, part=part)
        except Exception as error:
            if len(claimed) == 1 or self.failures is None:
                self.refuse(cases[0].name, error)
                return
        # The error is gone by now, and with it the memory that its frames held.
        if found is None:
            for i, each in enumerate(claimed):
                self._explain(images[i : i + 1], [each], write, inferer)
            return
        seconds = (time.perf_counter() - begun) / len(claimed)  # scores were checked, so the device has come to its end
        for each, explanation in zip(claimed, found, strict=True):
            if explanation is None:
                self.waiting.append(each.case.name)
            elif explanation.target.nothing:
                self.refuse(each.case.name, NothingToExplain(each.case.name, explanation.target.nothing))
            # Whoever completes a case by its part holds all of it.
            elif part.count == 1 or self._claim(each.case.name, WHOLE, each.claim):
                write(ScoredCase(each.index, explanation, each.claim, seconds))
                continue
            each.claim.close()

    def _assigned(self, inferer: PerturbationInferer) -> PerturbationInferer:
        """An inferer with the progress bar of the whole run, or without one where the assignment is quiet."""
        shown = False if self.assignment.quiet else self.progress if inferer.progress else inferer.progress
        return inferer if shown is inferer.progress else inferer.replace(progress=shown)
