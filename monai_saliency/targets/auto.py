"""A target chosen from the network's output and the bundle's postprocessing, for bundles whose task is unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from monai.utils import CommonKeys

from monai_saliency.cases import Case
from monai_saliency.errors import NothingToExplain, SettingError
from monai_saliency.networks.outputs import choices, read, shape
from monai_saliency.targets import (
    BoundTarget,
    ClassScore,
    DetectionScore,
    EmbeddingSimilarity,
    RegionScore,
    RegressionScore,
    Target,
)
from monai_saliency.targets.base import ACTIVATIONS, SCALES, Quantity, check_indices, in_unit_interval, rows_sum_to_one
from monai_saliency.targets.postprocessing import Reading
from monai_saliency.targets.regions import Labels
from monai_saliency.utils.arguments import check_option, indices_or_word, whole_number
from monai_saliency.utils.tensors import Box, columns

_MAX_MAPS = 10
_SUMS_TO_ONE = 1e-4  # how near: far from what logits of float32 do by chance, and above the rounding of a softmax
#: how it is known what an output's numbers mean
GIVEN = "the setting `activation`"
PIPELINE = "the bundle's postprocessing"
SOFTMAX = "the output, which lies in [0, 1] and sums to 1"
ANY = "nothing: all readings give the same map"


@dataclass(frozen=True)
class Choice:
    """The target chosen for one case, and the part of the output that it reads."""

    target: Target
    words: str  # what is explained and why
    source: str = ANY  # how it is known what the numbers mean: GIVEN, PIPELINE, SOFTMAX or ANY
    path: tuple[Any, ...] | None = None  # keys and indices, from the outside in; None for all
    prediction: int | None = None  # 1 or 0, where the bundle makes it of one output by a threshold


class AutoTarget(Target):
    """Explains the network's prediction for a case, whatever the task. The target is chosen from the output.

    ============================  ===================================================================================
    output for one image          what is explained
    ============================  ===================================================================================
    ``(C,)``                      the predicted class; with several labels per image, all that are predicted; a single
                                  number as it is, which is the log-odds of a class after a sigmoid
    ``(C, *spatial)``             for each predicted channel, the mean probability in its predicted region
    dictionary with boxes         for each detection, how well it is found again (D-RISE)
    other dictionaries and lists  the only part of one of these forms, or the one that the postprocessing names
    any other tensor              how close all its numbers stay to the unperturbed ones
    ============================  ===================================================================================

    Predicted is what the bundle's own postprocessing makes a label of: the highest channel, or all that reach its
    threshold, after its own activation. If it makes no labels, it is the highest channel, or all with a probability
    above 0.5 after a sigmoid. If no voxel is predicted, the likeliest channel is explained in the whole image; a case
    without a voxel of the channels that ``classes`` lists has nothing to explain.

    What several numbers mean (classes that exclude each other, labels beside each other, or numbers) is never guessed,
    since their maps differ. It is known, in this order, by

    1. ``activation``. With ``"none"`` scores are the network's own numbers.
    2. The postprocessing: its activation; an argmax (softmax) or a threshold (sigmoid) of logits; a step that saves an
       output of one channel as it is.
    3. The output, where the channels lie in [0, 1] and sum to 1 within 1e-4, as a network gives them that ends in a
       softmax. A case fails where an output of a perturbed image does not sum to 1.

    Otherwise an error lists the settings to choose from. The difference of two outputs (``against``) is the same for
    logits of both kinds and for numbers, so it needs none if ``classes`` are given.

    Args:
        readings: what the bundle's postprocessing does with its predictions, from
            :func:`~monai_saliency.targets.postprocessing.read_postprocessing`.
        classes: ``"predicted"``, ``"all"``, or a list of classes, channels or numbers, to choose what is explained.
        activation: ``"softmax"``, ``"sigmoid"`` or ``"none"``. By default the activation of the postprocessing; without
            one see above.
        output: the part of the output to explain: a key, an index, or several from the outside in; needed where several
            parts could be explained.
        scale: ``"probability"`` or ``"log_odds"``, the scale of the probability of a class or in a region. By default
            a class is explained by its log-odds (:class:`~monai_saliency.ClassScore`), a region by its mean probability
            (:class:`~monai_saliency.RegionScore`).
        against: the index of a class B, to explain why the network chooses a class A and not B.

    Raises:
        ValueError: for another string as ``classes``, and (from ``bind``) when it is not known which part of the output
            is explained or what its numbers mean, or when an activation is for classes and the output has another
            shape, such as ``(B, 1, C)``.
        NothingToExplain: from ``bind``, when no voxel is predicted as one of the channels of ``classes``.

    Example::

        >>> import torch
        >>> from monai_saliency import AutoTarget, Case
        >>> target = AutoTarget(activation="none").bind(torch.tensor([[0.1, 0.9]]), Case("a", torch.zeros(1, 4, 4)))
        >>> target.labels, target(torch.tensor([[0.5, 0.5]])).tolist()
        ([1], [[0.5]])
    """

    def __init__(
        self,
        readings: Mapping[Any, Reading] | None = None,
        classes: Sequence[int] | str = "predicted",
        activation: str | None = None,
        output: str | int | Sequence[str | int] | None = None,
        scale: str | None = None,
        against: int | None = None,
    ) -> None:
        self.readings = dict(readings or {})
        self.classes = indices_or_word("classes", classes, ["predicted", "all"])
        self.activation = None if activation is None else check_option("activation", activation, list(ACTIVATIONS))
        self.output: tuple[str | int, ...] | None = None
        if output is not None:
            self.output = (output,) if isinstance(output, (str, int)) else tuple(output)
        self.scale = None if scale is None else check_option("scale", scale, SCALES)
        self.against = None if against is None else whole_number("against", against, 0)

    @property
    def path(self) -> tuple[str | int, ...] | None:  # type: ignore[override]
        return self.output

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        choice = self.choose(reference_output, case)
        bound = choice.target.bind(read(reference_output, choice.path), case)
        # The chosen target holds labels as large as the output, which are bound by now.
        return _BoundChoice(replace(choice, target=self), bound)

    def choose(self, output: Any, case: Case) -> Choice:
        """Choose the target of a case by the network's output for the unperturbed case alone."""
        path = self.output if self.output is not None else self._part(output)
        where = f" of output {'/'.join(map(str, path))}" if path else ""
        part = read(output, path)
        is_classes = isinstance(part, torch.Tensor) and part.ndim == 2 and part.shape[1] > 1
        if self.against is not None and not is_classes:
            found = shape(part) if isinstance(part, torch.Tensor) else f"a {type(part).__name__}"
            raise SettingError(f"`against` is for classes of the whole image (B, C), and this is {found}: leave it out")
        if _is_detection(part):
            choice = self._detection(part, case)
        else:
            choice = self._of_tensor(_checked(part, where), self._reading(path), case, where)
        known = f", known by {choice.source}" if choice.source in (PIPELINE, SOFTMAX) else ""
        return replace(choice, words=choice.words + where + known, path=path)

    def _part(self, output: Any) -> tuple[Any, ...] | None:
        """The path of the only part that can be explained, or of the one that the postprocessing names."""
        paths = list(_parts(output))
        if len(paths) > 1:
            named = [path for path in paths if path[-1] in self.readings]
            if len(named) != 1:
                raise SettingError(f"the network gives several parts that could be explained: {choices(output)}")
            paths = named
        return (paths[0] or None) if paths else None

    def _reading(self, path: tuple[Any, ...] | None) -> Reading:
        """What the postprocessing does with the part of the output at a path."""
        key = path[-1] if path and path[-1] in self.readings else CommonKeys.PRED
        return self.readings.get(key, Reading())

    def _of_tensor(self, values: torch.Tensor, reading: Reading, case: Case, where: str) -> Choice:
        """The choice for an output ``(1, ...)``."""
        is_volume = values.ndim == case.image.ndim + 1
        is_named_class = self.activation not in (None, "none") or reading.activation or reading.discrete
        is_value = values.shape[1:2] == (1,) and not is_named_class
        if is_volume and is_value:
            if self.activation is None and (reading.unread or not reading.is_saved):
                raise self._unknown(values, reading, where, is_volume)
            if not isinstance(self.classes, str):
                check_indices(self.classes, 1, "classes", "channel")
            words = "image regression: mean of output channel 0 in the image, as the network gives it"
            return Choice(RegionScore(0, "none", "all"), words, GIVEN if self.activation else PIPELINE)
        if is_volume or (values.ndim == 2 and not is_value):
            return self._of_classes(values, reading, case, where)
        self._check_numbers(values, reading, where)
        return self._regression(values, reading, where)

    def _of_classes(self, values: torch.Tensor, reading: Reading, case: Case, where: str) -> Choice:
        """The choice for classes ``(1, C)``, or for channels ``(1, C, *spatial)``."""
        activation, source = self._activation(values, reading, where)
        name = f"{activation} probability"
        if activation == "none":
            name = "probability" if source == SOFTMAX else "score"
        labels = reading.labels(values, activation)
        if values.ndim > 2:
            return replace(self._segmentation(values, activation, labels, name, case), source=source)
        scale = "log_odds" if self.scale is None and source == SOFTMAX else self.scale
        choice = self._classification(values.shape[1], activation, labels, name, scale)
        if source == ANY:
            less = f"output {_listed(self.classes)} less output {self.against} of {values.shape[1]}"
            choice = replace(choice, words=f"{less}: the same for logits and for numbers")
        is_single = reading.discrete == "threshold" and values.shape[1] == 1
        return replace(choice, source=source, prediction=int(labels.values) if is_single else None)

    def _activation(self, values: torch.Tensor, reading: Reading, where: str) -> tuple[str, str]:
        """The activation of an output ``(1, C, ...)``, and how it is known."""
        if self.activation is not None:
            return self.activation, GIVEN
        if reading.activation is not None:
            return reading.activation, PIPELINE
        several = values.shape[1] > 1
        if not reading.unread:
            if several and bool(rows_sum_to_one(values, _SUMS_TO_ONE).all()):
                return "none", SOFTMAX
            if reading.discrete and not in_unit_interval(values):
                return "softmax" if several and reading.discrete == "argmax" else "sigmoid", PIPELINE
            is_difference = self.against is not None and self.classes != "predicted" and self.scale is None
            if is_difference and values.ndim == 2 and not in_unit_interval(values):
                return "none", ANY
        raise self._unknown(values, reading, where, is_volume=values.ndim > 2)

    def _unknown(self, values: torch.Tensor, reading: Reading, where: str, is_volume: bool) -> SettingError:
        """Asks what the numbers of an output ``(1, C, ...)`` mean, by the settings to choose from."""
        index: Any = 0 if isinstance(self.classes, str) else self.classes
        index = index[0] if isinstance(index, list) and len(index) == 1 else index
        is_probability = in_unit_interval(values)
        words = "may hold logits of classes, logits of labels or numbers, whose maps differ"
        if reading.unread:
            words = f"may hold anything, since the bundle's postprocessing {reading.unread}"
        elif is_probability:
            words = f"in [{float(values.min()):.3g}, {float(values.max()):.3g}], may hold probabilities or logits"
        lines: dict[str, tuple[str, str]] = {}  # what it holds: the setting in Python, and the flag of a bundle
        if (is_volume or values.ndim == 2) and values.shape[1] > 1:
            lines["classes that exclude each other"] = 'activation="softmax"', "--saliency_activation softmax"
            lines["labels beside each other"] = 'activation="sigmoid"', "--saliency_activation sigmoid"
            if is_probability:
                what = "probabilities already, of which the highest is predicted"
                lines[what] = 'activation="none"', "--saliency_activation none"
        elif is_volume:
            words = words.replace("logits of classes, logits of labels", "logits of a segmentation")
            lines["a segmentation by one logit"] = 'activation="sigmoid"', "--saliency_activation sigmoid"
        number, given = f"RegressionScore({index})", {"_target_": "monai_saliency.RegressionScore", "values": index}
        if is_volume:
            number = f'RegionScore({index}, "none", "all")'
            given = {"_target_": "monai_saliency.RegionScore", "channel": index, "activation": "none", "region": "all"}
        flag = "--saliency_activation none" if values.shape[1] == 1 and is_volume else f'--saliency_target "{given}"'
        lines["numbers"] = f"target=ms.{number}", flag
        listed = "".join(f"\n- {what}: {python} (in a bundle {flag})" for what, (python, flag) in lines.items())
        return SettingError(f"the network's output{where} {shape(values)} {words}; say what it holds:{listed}")

    def _classification(self, count: int, activation: str, labels: Labels, name: str, scale: str | None) -> Choice:
        """The target of classes; where several may be predicted, of all that are."""
        classes: Any = self.classes
        if classes == "predicted" and labels.overlapping and bool(labels.values.any()):
            classes = labels.values.nonzero().flatten().tolist()
        if count == 1:
            what = "prediction 1, the network's one output"
        elif isinstance(classes, str):
            what = {"predicted": "the predicted class", "all": "all classes"}[classes]
        else:
            what = f"class {_listed(classes)}"
        if self.against is not None:
            what += f" against class {self.against}"
        target = ClassScore(classes, activation, scale, self.against)
        if target.scale == "log_odds":
            name = f"log-odds of the {name}"
        return Choice(target, f"classification into {count}: {name} of {what}")

    def _segmentation(self, values: torch.Tensor, activation: str, labels: Labels, name: str, case: Case) -> Choice:
        """The target of channels, each in the voxels that have its label."""
        count, scale = values.shape[1], self.scale or "probability"
        what = f"segmentation into {count}: mean {name} of channel"
        if self.classes != "predicted":
            channels = list(range(count)) if isinstance(self.classes, str) else self.classes
            check_indices(channels, count, "classes", "channel")
            predicted = shown = [channel for channel in channels if bool(labels.region(channel).any())]
            if not shown:
                raise NothingToExplain(case.name, f"no voxel is predicted as channel {_listed(channels)}")
        else:
            predicted = labels.channels(count)
            shown = sorted(predicted[:_MAX_MAPS])
        if not shown:
            first = int(labels.background)
            best = first + int(values[0, first:].flatten(1).mean(dim=1).argmax())
            words = f"{what} {best} in the whole image, since no voxel is predicted as any channel"
            return Choice(RegionScore(best, activation, "all", scale=scale), words)
        words = f"{what} {_listed(shown)} in its predicted region"
        if len(predicted) > len(shown):
            words += f", the largest of {len(predicted)}"
        return Choice(RegionScore(shown, activation, labels, scale=scale), words)

    def _check_numbers(self, values: torch.Tensor, reading: Reading, where: str) -> None:
        """Refuse numbers that somebody takes for classes: in another shape these would be explained."""
        if self.activation == "none":
            return
        of_postprocessing = reading.activation or reading.discrete
        if self.activation or of_postprocessing:
            given = (
                f"activation={self.activation!r}"
                if self.activation
                else f"the {of_postprocessing} of the postprocessing"
            )
            raise SettingError(
                f"{given} needs classes (B, C) or channels (B, C, *spatial), and the network's output{where} is "
                f"{shape(values)}: let it return the classes alone (such as "
                f"output[:, {'None' if values.ndim == 1 else 0}]), or say activation='none' "
                "(--saliency_activation none) for the numbers as they are"
            )

    def _regression(self, values: torch.Tensor, reading: Reading, where: str) -> Choice:
        count = values[0].numel()
        if count == 1:
            numbers: Any = 0 if isinstance(self.classes, str) else self.classes
            return Choice(RegressionScore(numbers), "the network's one number, as it gives it")
        if self.classes == "predicted" and (count > 4 or self.activation is None):
            words = f"regression: how close all {count} output values {shape(values)} stay to the unperturbed ones"
            return Choice(EmbeddingSimilarity(measure="distance"), words)
        if self.activation is None:
            raise self._unknown(values, reading, where, is_volume=False)
        numbers = "all" if isinstance(self.classes, str) else self.classes
        return Choice(RegressionScore(numbers), f"regression: {_listed(numbers)} of {count} output values", GIVEN)

    def _detection(self, part: Any, case: Case) -> Choice:
        if not isinstance(self.classes, str):
            raise SettingError("`classes` chooses no boxes: leave it out, or give target=DetectionScore(...)")
        if self.activation not in (None, "none"):
            raise SettingError("`activation` changes no boxes, which have their confidences: leave it out")
        what = "detection: the same box, class and confidence again, for"
        target = DetectionScore(max_boxes=_MAX_MAPS)
        try:
            target.bind(part, case)
        except ValueError:
            return Choice(DetectionScore(0.0, 1), f"{what} the most confident box, as none reaches 0.5")
        return Choice(target, f"{what} each box of confidence 0.5 or more, at most {_MAX_MAPS}")


class _BoundChoice(BoundTarget):
    """The bound target of a choice, which reads its part of each output."""

    def __init__(self, choice: Choice, bound: BoundTarget) -> None:
        self.choice = choice
        self.bound = bound
        self.labels = bound.labels
        self.additive, self.linear, self.path = bound.additive, bound.linear, choice.path
        self.channels_read = bound.channels_read if choice.source != SOFTMAX else None
        if choice.source == SOFTMAX:
            self.if_nan = (
                "the network's output of the unperturbed image was read as probabilities, since it lies in [0, 1] and "
                "sums to 1, and another image's does not: give activation='softmax' if the network returns logits, or "
                "activation='none' to explain its own numbers (--saliency_activation)"
            )

    def __call__(self, output: Any) -> torch.Tensor:
        part = read(output, self.choice.path)
        scores = self.bound(part)
        return self._checked(scores, part)

    def _checked(self, scores: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        if self.choice.source != SOFTMAX:
            return scores
        # NaN fails the case later, when scores are on the host: a check here would wait for the device.
        return scores.masked_fill(~rows_sum_to_one(part, _SUMS_TO_ONE)[:, None], math.nan)

    def reach(self) -> torch.Tensor | None:
        return self.bound.reach()

    def contribution(self, output: torch.Tensor, box: Box) -> torch.Tensor:
        channels = self.bound.channels_read
        own = output if channels == self.channels_read else columns(output, channels or ())
        return self._checked(self.bound.contribution(own, box), output)

    def describe(self) -> dict[str, Any]:
        described, by_threshold = self.bound.describe(), self.choice.prediction
        if by_threshold is not None:
            if "probability" in described and described["prediction"] != by_threshold:
                described["probability"] = 1 - described["probability"]
            described["prediction"] = by_threshold
        return described

    def words(self) -> str:
        return self.choice.words

    def quantity(self) -> Quantity:
        return self.bound.quantity()

    def uninformed(self) -> list[float]:
        return self.bound.uninformed()


def _parts(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts that can be explained: boxes, and tensors of numbers with a batch axis."""
    if _is_detection(output) or (isinstance(output, torch.Tensor) and output.ndim and output.is_floating_point()):
        yield path
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        inside = output.items()
    elif isinstance(output, (list, tuple)):
        inside = enumerate(output)
    for key, part in inside:
        yield from _parts(part, (*path, key))


def _checked(part: Any, where: str) -> torch.Tensor:
    """The part that is explained, if it is a tensor of numbers that tell how close another label was."""
    if not isinstance(part, torch.Tensor):
        raise ValueError(
            f"the network gave a {type(part).__name__} with no tensor that could be explained{where}; choose one "
            "with --saliency_output, or give --saliency_target"
        )
    if not part.is_floating_point():
        raise ValueError(
            f"the network's output{where} holds {str(part.dtype).removeprefix('torch.')} labels, which do not "
            "show how close another label was: explain a network that gives scores"
        )
    return part.detach()


def _is_detection(output: Any) -> bool:
    """Whether an output is a detector's: a dictionary with boxes for each image."""
    if isinstance(output, (list, tuple)):
        return bool(output) and _is_detection(output[0])
    return isinstance(output, Mapping) and bool(_boxes(output))


def _boxes(image: Mapping[Any, Any]) -> list[torch.Tensor]:
    """What may be boxes in a detector's output for one image: ``(N, 4 or 6)``, or ``(0,)`` for none."""
    boxes = []
    for key, part in image.items():
        is_named = "box" in str(key).lower()
        if is_named and isinstance(part, torch.Tensor) and part.shape[-1:] in ((4,), (6,), (0,)):
            boxes.append(part)
    return boxes


def finds_nothing(output: Any) -> bool:
    """Whether a detector's output for one image holds no box."""
    boxes = _boxes(output) if isinstance(output, Mapping) else []
    return bool(boxes) and not any(map(len, boxes))


def _listed(numbers: Sequence[int] | str) -> str:
    """Numbers as text, ``"1, 2"``; a string unchanged."""
    return numbers if isinstance(numbers, str) else ", ".join(map(str, numbers))
