"""Whether what is explained is what the network gives for the image alone, and what was predicted.

A batch of perturbed images assumes that each row of the output belongs to one image and does not depend on the others.
A softmax over the wrong axis, statistics of the batch, a prompt that takes the batch axis, or rows in another order
break this without an error, and a map made of such scores is wrong. So the unperturbed row of the first batch is
compared before any score of the case counts:

- with what an evaluator predicted for the image (:attr:`Case.prediction <monai_saliency.cases.Case>`), where it is at
  hand and has the same form;
- otherwise with one more forward, of this image alone. Under remembered patches it is one more patch. Nothing more is
  run where images go through one at a time from the beginning (``mask_batch_size=1``): there a network that draws
  random numbers is only found out under an evaluator.
- A network that takes one batch size only (an exported engine), or that would be compiled again for another one, gets a
  batch of that size in which every row is the image.

The unperturbed row may be right where others are not: ``x / x.max()`` of a batch which holds the unperturbed image
leaves it as it is alone. So one perturbed row of the first batch, the one whose scores changed most, is compared with
its image alone too: one forward a case, or none where no perturbed row of the case in its first batch has other scores.
A detector may drop single boxes beside other images: once a network at least seven of its perturbed rows are compared.

Small windows change little, so that the rows of a batch may hide that they depend on each other: the maximum of the
batch is then that of the image nearly everywhere, but in the batch whose window hides it. So once a network, a batch is
run of the image faded more and more (``lerp(fill, image, w)`` with w from 1 to 0.5), and a second one of the same
images in other rows, with the one that is faded most in two of them. Each image must give the same in both, this one
the same as alone, and the one that is not faded the same as in the first batch: two batches and one image more. This
shows thresholds on the whole batch, and what counts equal images. Where later rounds have batches of another size, one
is run again with its images in other rows, and the one whose scores changed most alone, once a network and size.

A network may give something else later: one that counts its calls, or warms up. So at the end of a call the unperturbed
image is looked at once more, in a row of the last batch that is left over, or else alone; where its scores are others,
the case fails.

Where they differ by more than rounding (:func:`monai_saliency.utils.precision.rounding_of`), :class:`RowsDepend` is
raised, images go through one at a time, and the log says so. Where that does not agree either, the case fails.

What is run for this changes no score, and is not counted in ``num_forwards``, which counts what the scores need. What
is compared is all that ``output`` reads, so ``output`` leaves out a part that may differ. A detector's boxes may come
in another order, so there the scores of the same boxes are compared. What leaves all these rows as they are alone is
not seen, such as a threshold on the batch that only images with more hidden reach. Nobody can know it without running
each image alone, as ``mask_batch_size=1`` does, and of patches ``sw_batch_size=1``.

An evaluator's prediction is compared where its network is the network that explains, as its inferer gave it, before any
postprocessing. It cannot be compared where the evaluator gives it another form, runs another object as its network (as
of ``torch.compile`` or ``DistributedDataParallel``), where postprocessing has changed it in place, or where a detector
found no box, so that boxes below its threshold are explained. Then the image alone is what is compared.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.expected import (
    BOXES,
    SUPPOSED,
    Expected,
    RowsDepend,
    are_detections,
    distrust,
    faded,
    figures,
    predicted,
    same_boxes,
    score_figures,
    scores_differ,
    scores_of,
    tolerance_of,
)
from monai_saliency.inferers.forward import Cancelled, Forward
from monai_saliency.inferers.once import Passed
from monai_saliency.networks.comparison import Difference, Excerpt, difference, excerpt
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.outputs import OutputPath, check_rows, read, rows
from monai_saliency.networks.runtime import runtime_settings
from monai_saliency.targets.base import BoundTarget, label_name
from monai_saliency.utils.monai_private import holds_compiled

__all__ = ["ReferenceCheck"]

logger = logging.getLogger(__name__)


class ReferenceCheck:
    """Compares the unperturbed row of a batch with the image alone.

    Args:
        forward: calls the network.
        states: the cases.
        split: the network's inputs, taken apart.
        output: the part of the network's output that is explained.
        batch_size: perturbed images in a batch.
        found: why images go through one at a time; None where they do not, or always did.
    """

    def __init__(
        self,
        forward: Forward,
        states: Sequence[CaseState],
        split: SplitInputs,
        output: OutputPath | None,
        batch_size: int,
        found: RowsDepend | None = None,
    ) -> None:
        self.forward = forward
        self.states = states
        self.split = split
        self.output = output
        self.batch_size = batch_size
        self.found = found
        self._expected: dict[int, Expected] = {} if found is None else dict(found.expected)
        self._unperturbed: dict[int, Excerpt] = {}

    @functools.cached_property
    def _tolerance(self) -> Callable[[torch.dtype], float]:
        return tolerance_of(self.forward, self.states[0])

    def expect(self, index: int) -> None:
        """Find out what a case must give, before its first batch: the network may write its outputs to one place."""
        prediction = predicted(self.states[index], self.output)
        if prediction is not None:
            self._expected[index] = prediction
            return
        if index not in self._expected and (self.batch_size > 1 or self.found is not None):
            self._expected[index] = self._run(index, self._image(index, 0))

    def has_other_form(self, index: int, row: Any) -> bool:
        """Whether a case's prediction cannot be compared with the network's output, so that :meth:`expect_alone` must
        be called.
        """
        expected = self._expected.get(index)
        if expected is None or not expected.predicted or are_detections(row):
            return False
        return difference(expected.excerpt, excerpt(row), self._tolerance) is None

    def expect_alone(self, index: int) -> None:
        """Expect what the network gives for the image alone rather than the evaluator's prediction."""
        del self._expected[index]
        if self.batch_size > 1 or self.found is not None:
            self._expected[index] = self._run(index, self._image(index, 0))

    def check(self, index: int, row: Any) -> None:
        """Compare the unperturbed row of a case's first batch.

        Args:
            index: the case's place.
            row: the network's output ``(1, ...)`` of its unperturbed image.

        Raises:
            RowsDepend: when it differs from what the image gives alone, and other images are in the batch.
            CaseError: when it differs, and no way is left to explain the case.
        """
        expected = self._expected.get(index)
        found = excerpt(row)
        if self.batch_size > 1:
            self._unperturbed[index] = found
        if expected is None:
            return
        state = self.states[index]
        gap = difference(expected.excerpt, found, self._tolerance)
        differs = gap is None or gap.beyond_rounding
        if differs and are_detections(row) and expected.output is not None:
            differs = not same_boxes(state.bound_to, expected.output, row, self._tolerance)
        if not differs and expected.predicted and "amp" in runtime_settings(self.forward.network):
            # Two classes may be nearer to each other than half precision resolves.
            wanted, asked = (self._asked(index, each) for each in (expected.output, row))
            differs = bool(wanted) and wanted != asked
        if not differs:
            return
        self._refuse_unperturbed(index, figures(state.bound_to, expected, row, self._here, gap), expected)

    def _asked(self, index: int, output: Any) -> list[str]:
        """What is explained of an output ``(1, ...)``, in words; nothing where that is not known."""
        if output is None or are_detections(output):
            return []
        try:
            return [label_name(label) for label in self.states[index].bound_to(output).labels]
        except ValueError:
            return []

    @property
    def _here(self) -> str:
        return f"in a batch of {self.batch_size}" if self.batch_size > 1 else "explained alone"

    def _refuse_unperturbed(self, index: int, both: str, expected: Expected) -> NoReturn:
        """Raise an error where the unperturbed image is not what it must be."""
        case, words = self.states[index].case.name, f"the unperturbed image gives {both}"
        if self.batch_size > 1:
            raise self._depend(index, words, expected.alone)
        if expected.predicted:
            raise CaseError(
                case,
                f"what is explained is not what was predicted: {words}. {SUPPOSED}, or "
                "the evaluator's other images of the batch change its prediction (let it predict one image at a time), "
                "or it predicts with another inferer, network or precision than explains",
            )
        again = words.replace("explained alone", "alone again")
        raise CaseError(case, f"the network gives no fixed output: {again}. {SUPPOSED}")

    def check_again(self, index: int, row: Any) -> None:
        """Compare the scores of the unperturbed image later in the case with those of the first batch.

        Args:
            index: the case's place.
            row: the network's output ``(1, ...)`` of its unperturbed image.

        Raises:
            CaseError: when they differ.
        """
        self._compare_again(index, Expected.of(row, "after other images", self.states[index], keep=False))

    def look_again(self, index: int) -> None:
        """Run the unperturbed image once more, alone, and compare it as :meth:`check_again` does: where no row of the
        last batch was left over for it.

        Raises:
            CaseError: as :meth:`check_again`.
        """
        self._compare_again(index, replace(self._run(index, self._image(index, 0)), words="after other images"))

    def _compare_again(self, index: int, now: Expected) -> None:
        """Raise an error where the unperturbed image has other scores than in the first batch."""
        state = self.states[index]
        boxes = are_detections(now.output)
        if boxes:  # their scores do not depend on the order in which they come
            now = replace(now, scores=state.target(now.output)[0].detach().clone())
        before = replace(now, words="before them", scores=state.state.reference_scores)
        times = BOXES if boxes else 1
        if scores_differ(state, before, now, lambda dtype: times * self._tolerance(dtype)):
            distrust(state)
            raise CaseError(
                state.case.name,
                f"the network gives no fixed output: the unperturbed image gives {score_figures(state, now, before)}. "
                f"{SUPPOSED}",
            )

    def check_batch_size(self, index: int, error: Exception) -> None:
        """Find out, where the first batch fails, whether a network takes images one at a time only, as a program of
        ``torch.export`` may.

        Args:
            index: the place of a case in the batch.
            error: of the batch.

        Raises:
            RowsDepend: where the image alone goes through, and a batch of its copies does not.
        """
        image = self._image(index, 0)
        try:
            alone = self._read(index, self._images(index, image, 1), 1, "alone")
        except Exception:
            return
        try:
            self._images(index, image.expand(self.batch_size, *image.shape[1:]).contiguous(), self.batch_size)
        except Cancelled:
            raise
        except Exception:
            problem = f"the network takes no batch of {self.batch_size} images ({type(error).__name__}: {error})"
            raise RowsDepend(self.states[index].case.name, problem, {index: alone}) from error

    def check_perturbed(self, chosen: Sequence[tuple[int, int, Any]]) -> None:
        """Compare perturbed rows of a batch with the same images alone.

        Args:
            chosen: for each a case's place, the row of its state, and the network's output ``(1, ...)`` of it.

        Raises:
            RowsDepend, CaseError: as :meth:`check`.
        """
        # All are copied first: the next forward may overwrite them.
        found = [(index, row, self._scored(index, row, output)) for index, row, output in chosen]
        for index, row, here in found:
            alone = self._run(index, self._image(index, row))
            gap = difference(alone.excerpt, here.excerpt, self._tolerance, self._unperturbed.get(index))
            self._refuse(index, f"a perturbed image (row {row})", alone, here, gap)

    def check_order(
        self, places: Sequence[int], output: Any, batch: torch.Tensor, values: Mapping[Any, torch.Tensor]
    ) -> None:
        """Compare the rows of a batch with the same images in other rows.

        Args:
            places: the case of each row that counts.
            output: the network's output of the batch, which no later call overwrites.
            batch: ``(batch_size, C, *spatial)``.
            values: held values ``(batch_size, ...)`` by name.

        Raises:
            RowsDepend, CaseError: as :meth:`check`.
        """
        moved, count = {name: value.roll(1, 0) for name, value in values.items()}, len(batch)
        again = self.forward.images(batch.roll(1, 0), self.split, moved)
        for row, index in enumerate(places):
            to = (row + 1) % count
            one = self._seen(index, output, count, f"in row {row} of {count}", row, keep=False)
            other = self._read(index, again, count, f"in row {to}", to, keep=False)
            gap = difference(one.excerpt, other.excerpt, self._tolerance, self._unperturbed.get(index))
            self._refuse(index, "a perturbed image", replace(one, alone=True), other, gap)

    def check_scores(self, index: int, row: Any) -> None:
        """Compare the scores of the unperturbed image with those of what it must give, once its batch is scored.

        Args:
            index: the case's place.
            row: as for :meth:`check`.

        Raises:
            RowsDepend, CaseError: as :meth:`check`.
        """
        expected, state = self._expected.get(index), self.states[index]
        if expected is None or expected.output is None:
            return
        expected = replace(expected, scores=scores_of(state, expected.output))
        here = self._scored(index, 0, row)
        # No way is left where images go through alone, and nothing says yet how much masks change: be sure.
        times = 1 if self.batch_size > 1 else 100
        if scores_differ(state, expected, here, lambda dtype: times * self._tolerance(dtype)):
            self._refuse_unperturbed(index, score_figures(state, here, expected), expected)

    def _scored(self, index: int, row: int, output: Any) -> Expected:
        """What a row of a case that is scored has given, ``(1, ...)``."""
        state, found = self.states[index].state, Expected.of(output, self._here)
        scores = state.scores[row - 1] if row else state.reference_scores
        return found if are_detections(output) else replace(found, scores=scores.clone())

    def check_faded(self, index: int, batch: torch.Tensor) -> None:
        """Compare images that are faded more and more with the same in other rows, and the last of them, which then
        stands there twice, with itself alone. The first one, which is not faded, is compared with what it must give.
        Once a network.

        Args:
            index: the place of a case whose unperturbed row is checked.
            batch: ``(batch_size, C, *spatial)``, is overwritten.

        Raises:
            RowsDepend, CaseError: as :meth:`check`.
        """
        state, count = self.states[index], len(batch)
        passed = Passed(self.forward, self.output, ["images", count], state.case.image, state.fill)
        if count < 2 or passed:
            return
        images = faded(state.case.image, state.fill, count)
        if torch.equal(images[0], images[-1]):  # nothing can be seen of it
            return
        batch[:] = torch.cat([state.case.image, state.held])
        order = [count - 1, count - 1, *range(count - 2)] if count > 2 else [1, 0]
        try:
            first, again = (self._rows(index, images[rows], batch) for rows in (list(range(count)), order))
        except (Cancelled, CaseError):
            raise
        except Exception:
            logger.debug("the network does not take an image faded by half", exc_info=True)
            return
        alone = self._run(index, torch.cat([images[-1], state.held])[None])
        others = [(replace(first[image], alone=alone.alone), again[row]) for row, image in enumerate(order)]
        for one, other in [(alone, first[-1]), *others]:
            gap = difference(one.excerpt, other.excerpt, self._tolerance, self._unperturbed.get(index))
            self._refuse(index, "an image faded by up to a half", one, other, gap)
        if (expected := self._expected.get(index)) is not None:
            gap = difference(expected.excerpt, first[0].excerpt, self._tolerance, self._unperturbed.get(index))
            self._refuse(index, "the unperturbed image beside darker or brighter ones", expected, first[0], gap)
        passed.note()

    def _rows(self, index: int, images: torch.Tensor, batch: torch.Tensor) -> list[Expected]:
        """What each row of a batch gives."""
        batch[:, : images.shape[1]] = images
        count = len(batch)
        output = self._images(index, batch, count)
        return [self._read(index, output, count, f"in row {row} of {count}", row, keep=False) for row in range(count)]

    def _refuse(self, index: int, what: str, alone: Expected, here: Expected, gap: Difference | None) -> None:
        """Raise an error where a perturbed row is not what its image gives alone."""
        state = self.states[index]
        if gap is not None and not gap.beyond_rounding:
            if scores_differ(state, alone, here, self._tolerance):
                raise self._depend(index, f"{what} gives {score_figures(state, here, alone)}", alone.alone)
            return
        bind = _as_bound(state)
        if not are_detections(here.output) or not same_boxes(bind, alone.output, here.output, self._tolerance):
            words = figures(bind, alone, here.output, here.words, gap)
            raise self._depend(index, f"{what} gives {words}", alone.alone)

    def _depend(self, index: int, words: str, alone: bool) -> CaseError:
        """The error of a case whose row of a batch is not what its image gives alone, or in a batch of copies."""
        name = self.states[index].case.name
        if alone or holds_compiled(self.forward.network):
            return RowsDepend(name, words, {place: each for place, each in self._expected.items() if each.alone})
        return CaseError(
            name,
            f"the network's rows depend on each other ({words}), and it takes no batch of one image, so that images "
            "cannot go through one at a time either",
        )

    def failed(self, error: Exception, index: int) -> CaseError:
        """The error of a case whose image cannot go through alone, after a batch of it was found wrong."""
        assert self.found is not None
        return CaseError(
            self.states[index].case.name,
            f"the network's rows depend on each other ({self.found.problem}), and images cannot go through one at a "
            f"time either: {type(error).__name__}: {error}",
        )

    def _image(self, index: int, row: int) -> torch.Tensor:
        """The image ``(1, C, *spatial)`` of a case's row."""
        state = self.states[index]
        image = torch.cat([state.case.image, state.held])[None]
        state.perturb(row, row + 1, out=image)
        return image

    def _run(self, index: int, image: torch.Tensor) -> Expected:
        """Run an image ``(1, C, *spatial)`` of a case alone, or where the network refuses it, a batch of its copies."""
        # Compiling again for another batch size takes minutes, and may change the bits of all other batches.
        if self.found is not None or not holds_compiled(self.forward.network):
            try:
                return self._read(index, self._images(index, image, 1), 1, "alone")
            except Cancelled:
                raise
            except Exception as error:
                if self.batch_size == 1:
                    if self.found is None:
                        raise
                    raise self.failed(error, index) from error
                logger.debug("the network takes no batch of one image", exc_info=True)
        size = self.batch_size
        copies = image.expand(size, *image.shape[1:]).contiguous()
        return self._read(index, self._images(index, copies, size), size, f"in a batch of {size} copies of it")

    def _images(self, index: int, batch: torch.Tensor, count: int) -> Any:
        return self.forward.images(batch, self.split, self.split.values_of([(index, count)], count))

    def _read(self, index: int, output: Any, count: int, words: str, row: int = 0, keep: bool = True) -> Expected:
        try:
            output = read(output, self.output)
            check_rows(output, count)
        except ValueError as error:
            raise CaseError(self.states[index].case.name, str(error)) from error
        return self._seen(index, output, count, words, row, keep)

    def _seen(self, index: int, output: Any, count: int, words: str, row: int = 0, keep: bool = True) -> Expected:
        return Expected.of(rows(output, row, row + 1, count), words, self.states[index], keep, alone=count == 1)


def _as_bound(state: CaseState) -> Callable[[Any], BoundTarget]:
    return lambda output: state.target
