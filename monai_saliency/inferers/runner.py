"""Runs the network for what walks ask for, and hands them its scores.

What several cases ask for is laid end to end and cut into batches of one size, at fixed places (law 7): a buffer is
filled with perturbed images, the network runs, and each case takes its scores. Where workers share a case, each runs a
share of the batches, and they exchange :class:`~monai_saliency.inferers.scores.Scores` before the cases go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from monai_saliency.errors import CaseError
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.perturbation import Whole
from monai_saliency.inferers.preflight import check_predicted
from monai_saliency.inferers.progress import Progress
from monai_saliency.inferers.walk import Walk
from monai_saliency.masks.base import Ids
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import rows
from monai_saliency.sharding import WHOLE, Part
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.timing import stage

#: values in a batch of perturbed images where its size is found by itself, 64 MB in float32, and the most images; on a
#: GPU twice as many values, since it runs larger batches faster
_VALUES, _MOST = 2**24, 16
_VALUES_ON_GPU, _MOST_ON_GPU = 2**25, 64

#: what each case asks for, by its number
Asks = Mapping[int, Ids]


class Run(NamedTuple):
    """A part of what one case asks for: the images ``ask[start:stop]``."""

    case: int
    ask: Ids
    start: int
    stop: int

    @property
    def ids(self) -> Ids:
        """The ids of its masks: without the whole images, which lead an ask."""
        return [name for name in self.ask[self.start : self.stop] if not isinstance(name, Whole)]

    @property
    def forwards(self) -> int:
        """Its images, but for the one with everything hidden, which is not counted."""
        return self.stop - self.start - self.ask[self.start : self.stop].count(Whole.HIDDEN)

    @property
    def binds(self) -> bool:
        """Whether it begins with the unperturbed image, to which the target is bound."""
        return self.ask[self.start] is Whole.IMAGE


class AutoSize(int):
    """A batch size that the image decides. As a number it is the one to take where no image is known."""


def batch_size(value: Any) -> int:
    """Check a setting ``mask_batch_size``: a whole number of at least 1, or ``"auto"``."""
    if isinstance(value, AutoSize) or (isinstance(value, str) and value == "auto"):
        return AutoSize(_MOST)
    return whole_number("mask_batch_size", value, 1)


def rows_in_batch(setting: int, walks: Sequence[Walk]) -> int:
    """Images in each batch of a call: as many as the setting allows, or all of the first round if these are fewer."""
    image = walks[0].case.image
    if isinstance(setting, AutoSize):
        values, most = (_VALUES_ON_GPU, _MOST_ON_GPU) if image.is_cuda else (_VALUES, _MOST)
        setting = max(1, min(most, values // max(1, image.numel())))
    return min(setting, sum(2 + len(walk.masks.first_round()) for walk in walks))


class Share:
    """What this worker runs of the batches, and how it exchanges scores: alone, it runs all of them."""

    def begin(self, walks: Sequence[Walk], deciding: Callable[[], Mapping[str, Any]]) -> None:
        """Before the first round; ``deciding`` gives what decides the scores, by name."""

    def mine(self, batches: list[list[Run]]) -> list[list[Run]]:
        """Those of a round's batches that run here."""
        return batches

    def gather(self, walks: Sequence[Walk]) -> None:
        """Exchange scores with the other workers, at the end of a round."""


class StoredShare(Share):
    """A part of the masks of cases whose other parts are run at other times, or elsewhere: they exchange scores on
    disk. Whoever finds the first round complete runs all that follow.
    """

    def __init__(self, part: Part) -> None:
        self.part = part

    def mine(self, batches: list[list[Run]]) -> list[list[Run]]:
        return of_part(batches, self.part)

    def gather(self, walks: Sequence[Walk]) -> None:
        if self.part.count > 1:
            for walk in walks:
                walk.scores.share()
        self.part = WHOLE


class Scorer(ABC):
    """Scores images: as whole ones, or by remembered patches."""

    per_prediction = 1

    def plan(self, asks: Asks, batches: Sequence[Sequence[Run]]) -> int:
        """Prepare a round; the number of forwards that it takes."""
        return sum(run.forwards for batch in batches for run in batch)

    @abstractmethod
    def score(self, batches: Sequence[Sequence[Run]], advance: Callable[[int], None]) -> None:
        """Score the images that have no scores yet; ``advance`` is told how many forwards are done."""


def explanations(
    walks: Sequence[Walk], scorer: Scorer, size: int, share: Share, progress: Progress
) -> list[Explanation | None]:
    """Run the network until each walk has its explanation; None for a case whose other parts are still to be run.

    Args:
        walks: the cases.
        scorer: runs the network.
        size: images in a batch.
        share: which batches run here, and how workers exchange scores.
        progress: shows how far it is.
    """
    found: list[Explanation | None] = [None] * len(walks)
    steps = [walk.steps() for walk in walks]
    asks = {number: next(step) for number, step in enumerate(steps)}
    is_first = True
    try:
        while asks:
            batches = share.mine(list(cut(asks, size)))
            progress.begin(scorer.plan(asks, batches), scorer.per_prediction, [walks[i] for i in asks], is_first)
            scorer.score(batches, progress.advance)
            share.gather([walks[number] for number in asks])
            is_first = False
            with stage("look"):
                for number, ask in list(asks.items()):
                    del asks[number]
                    if walks[number].scores.missing(Run(number, ask, 0, len(ask)).ids):
                        continue  # other parts are missing
                    try:
                        asks[number] = next(steps[number])
                    except StopIteration as end:
                        found[number] = end.value
    except CaseError:
        raise
    except BaseException:  # a run that is stopped keeps what it has scored
        for walk in walks:
            walk.scores.flush()
        raise
    for walk, explanation in zip(walks, found, strict=True):
        if explanation is None:
            walk.scores.flush()
    progress.end(len(walks))
    return found


def cut(asks: Asks, size: int) -> Iterator[list[Run]]:
    """Cut what the cases ask for, laid end to end, into batches."""
    batch: list[Run] = []
    room = size
    for case, ask in asks.items():
        start = 0
        while start < len(ask):
            stop = min(len(ask), start + room)
            batch.append(Run(case, ask, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def of_part(batches: list[list[Run]], part: Part) -> list[list[Run]]:
    """The batches of a round that a part runs: its share, and all that hold an unperturbed image."""
    if part.count == 1:
        return batches
    shared = [number for number, batch in enumerate(batches) if not any(run.binds for run in batch)]
    others = set(shared) - {shared[i] for i in part.of(len(shared))}
    return [batch for number, batch in enumerate(batches) if number not in others]


class WholeImages(Scorer):
    """Scores images by the inner inferer, in batches of one size.

    Args:
        forward: calls the network.
        walks: the cases.
        split: the inputs of the call, taken apart: images, what is held beside them, and numbers that masks may hide.
        size: images in the network's batches.
    """

    def __init__(self, forward: Forward, walks: Sequence[Walk], split: SplitInputs, size: int) -> None:
        self.forward, self.walks, self.split = forward, walks, split
        # One buffer serves all batches, so memory does not grow with the masks. Rows past the end of the last batch
        # hold what they held before, and nothing reads their outputs.
        image = walks[0].case.image
        self.batch = image.new_zeros(size, len(image) + split.held_images.shape[1], *image.shape[1:])

    def score(self, batches: Sequence[Sequence[Run]], advance: Callable[[int], None]) -> None:
        for batch in batches:
            # A batch with some stored scores is run as a whole, so that its scores do not depend on what was stored.
            if any(map(self._is_missing, batch)):
                self._score(batch)
            advance(sum(run.forwards for run in batch))

    def _is_missing(self, run: Run) -> bool:
        """Whether a run has an image without a score. The unperturbed one always runs: it decides what is explained."""
        scores = self.walks[run.case].scores
        lacks_hidden = scores.hidden is None and Whole.HIDDEN in run.ask[run.start : run.stop]
        return run.binds or lacks_hidden or bool(scores.missing(run.ids))

    def _score(self, batch: Sequence[Run]) -> None:
        """Perturb, run, read."""
        with stage("perturb"):
            offset = 0
            for case, ask, start, stop in batch:
                self.walks[case].images.write(ask, start, stop, self.batch[offset : offset + stop - start])
                offset += stop - start
        with stage("forward"):
            counts = [(run.case, run.stop - run.start) for run in batch]
            name = self.walks[batch[0].case].case.name
            output = self.forward.images(self.batch, self.split, counts, name, self._hidden_numbers(batch))
        with stage("read scores"):
            offset = 0
            for run in batch:
                count = run.stop - run.start
                self._read(run, rows(output, offset, offset + count, len(self.batch)), count)
                offset += count

    def _hidden_numbers(self, batch: Sequence[Run]) -> np.ndarray | None:
        """Which numbers each image of a batch hides; None where the image alone is hidden."""
        if not self.split.numbers:
            return None
        return np.concatenate(
            [self.walks[case].images.hidden_numbers(ask[start:stop]) for case, ask, start, stop in batch]
        )

    def _read(self, run: Run, output: Any, count: int) -> None:
        """Take the scores of a run's images from the network's output of them."""
        walk = self.walks[run.case]
        if run.binds:
            reference = rows(output, 0, 1, count)
            walk.bind(reference)
            check_predicted(self.forward, walk, reference)
        names, scores = run.ask[run.start : run.stop], walk.target(output)
        whole = sum(isinstance(name, Whole) for name in names)
        for name, score in zip(names[:whole], scores, strict=False):
            if name is Whole.HIDDEN:
                walk.scores.hidden = score.clone()
        walk.scores.forwards += run.forwards
        walk.scores.add(names[whole:], scores[whole:])
