"""A target chosen from the network's output and the bundle's postprocessing, for bundles whose task is unknown."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from monai.utils import CommonKeys

from monai_saliency.cases import Case
from monai_saliency.errors import SettingError
from monai_saliency.networks.outputs import read, shape
from monai_saliency.targets import (
    BoundTarget,
    ClassScore,
    DetectionScore,
    EmbeddingSimilarity,
    RegionScore,
    RegressionScore,
    Target,
)
from monai_saliency.targets.base import ACTIVATIONS, SCALES, Quantity, in_unit_interval, rows_sum_to_one
from monai_saliency.targets.postprocessing import Reading
from monai_saliency.targets.regions import Labels
from monai_saliency.utils.arguments import check_option, indices_or_word, whole_number
from monai_saliency.utils.tensors import Box, columns

logger = logging.getLogger(__name__)

_MAX_MAPS = 10
_PROBABILITIES = "probabilities, since it lies in [0, 1] and sums to 1"
_SUMS_TO_ONE = 1e-4  # how near: far from what logits of float32 do by chance, and above the rounding of a softmax
# Names of outputs that hold a prediction, among outputs that hold features or other intermediate results.
_PREDICTION = re.compile("pred|prob|class|cls|logit|seg|mask|out", re.IGNORECASE)


@dataclass(frozen=True)
class Choice:
    """The target chosen for one case, and the part of the output that it reads."""

    target: Target
    words: str  # what is explained and why
    path: tuple[Any, ...] | None = None  # keys and indices, from the outside in; None for all
    prediction: int | None = None  # 1 or 0, where the bundle makes it of one output by a threshold
    assumed: str | None = None  # what the output holds, where neither a setting nor the postprocessing says it


class AutoTarget(Target):
    """Explains the network's prediction for a case, whatever the task. The target is chosen from the output.

    ============================  ===================================================================================
    output for one image          what is explained
    ============================  ===================================================================================
    ``(C,)``                      the predicted class; with several labels per image, all that are predicted; a single
                                  number that the postprocessing does not make a class of, as it is
    ``(C, *spatial)``             for each predicted channel, the mean probability in its predicted region
    dictionary with boxes         for each detection, how well it is found again (D-RISE)
    other dictionaries and lists  the first part of one of these forms, if possible one named like a prediction
    any other tensor              up to 4 numbers: each of them; more: how close they stay to the unperturbed ones
    ============================  ===================================================================================

    Predicted is what the bundle's own postprocessing makes a label of: the highest channel, or all that reach its
    threshold, after its own activation. If it makes no labels, it is the highest channel, or all with a probability
    above 0.5 after a sigmoid.

    What a score means (a probability or the network's own number, one class of several or several at once) is the same
    for all cases of a cohort: it follows from these settings, the postprocessing, the output's shape and whether the
    network ends in a softmax. In this order:

    1. ``activation``, where it is given. With ``"none"`` scores are the network's own numbers.
    2. The activation of the postprocessing.
    3. One channel that no postprocessing makes a class of: its own value. With several channels, or before an
       activation or a label, a function that cannot be read (such as ``Lambdad``) is refused with an error that asks
       for ``activation``.
    4. Probabilities, where the channels lie in [0, 1] and sum to 1 within 1e-4, as a network gives them that ends in a
       softmax. A case fails where an output of a perturbed image does not sum to 1.
    5. Otherwise the network is taken to end in logits: softmax for several channels, unless the postprocessing applies
       a threshold, else sigmoid. A case whose output lies in [0, 1] may hold probabilities already, and fails with an
       error that asks for ``activation``.

    The log says which of the last two was taken.

    Args:
        readings: what the bundle's postprocessing does with its predictions, from
            :func:`~monai_saliency.targets.postprocessing.read_postprocessing`.
        classes: ``"predicted"``, ``"all"``, or a list of classes, channels or numbers, to choose what is explained.
        activation: ``"softmax"``, ``"sigmoid"`` or ``"none"``. By default the activation of the postprocessing; without
            one see above.
        output: the part of the output to explain: a key, an index, or several from the outside in. By default it is
            found automatically.
        scale: ``"probability"`` or ``"log_odds"``, the scale of the probability of a class or in a region. By default
            a class is explained by its log-odds (:class:`~monai_saliency.ClassScore`), a region by its mean probability
            (:class:`~monai_saliency.RegionScore`).
        against: the index of a class B, to explain why the network chooses a class A and not B.

    Raises:
        ValueError: for another string as ``classes``, and (from ``bind``) when the output has nothing to explain, when
            it may hold probabilities or logits and no setting decides which, or when an activation is for classes and
            the output has another shape, such as ``(B, 1, C)``.

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
        if self.against is not None and not isinstance(choice.target, ClassScore):
            raise SettingError(f"`against` is for classes of the whole image, and this is {choice.words}: leave it out")
        if choice.assumed is not None:
            logger.info("case %s: the network's output is read as %s", case.name, choice.assumed)
        bound = choice.target.bind(read(reference_output, choice.path), case)
        # The chosen target holds labels as large as the output, which are bound by now.
        return _BoundChoice(replace(choice, target=self), bound)

    def choose(self, output: Any, case: Case) -> Choice:
        """Choose the target of a case by the network's output for the unperturbed case alone."""
        path = self.output if self.output is not None else _first(output)
        where = f" of output {'/'.join(map(str, path))}" if path else ""
        part = read(output, path)
        if _is_detection(part):
            choice = self._detection(part, case)
        else:
            choice = self._of_tensor(_checked(part, where), self._reading(path), case.image.ndim - 1, where)
        return replace(choice, words=choice.words + where, path=path)

    def _reading(self, path: tuple[Any, ...] | None) -> Reading:
        """What the postprocessing does with the part of the output at a path."""
        key = path[-1] if path and path[-1] in self.readings else CommonKeys.PRED
        return self.readings.get(key, Reading())

    def _of_tensor(self, values: torch.Tensor, reading: Reading, spatial_dims: int, where: str) -> Choice:
        """The choice for an output ``(1, ...)``."""
        is_volume = values.ndim == spatial_dims + 2
        is_one_channel = values.shape[1:2] == (1,)
        is_named_class = self.activation not in (None, "none") or reading.activation or reading.discrete
        if is_one_channel and not is_named_class:
            if is_volume:
                words = "image regression: mean of output channel 0, as the network gives it"
                return Choice(RegionScore(0, "none", "all"), words)
            return self._regression(values)
        if is_volume or values.ndim == 2:
            return self._of_classes(values, reading, is_volume)
        self._check_numbers(values, reading, where)
        return self._regression(values)

    def _of_classes(self, values: torch.Tensor, reading: Reading, is_volume: bool) -> Choice:
        """The choice for classes ``(1, C)``, or for channels ``(1, C, *spatial)``."""
        assumed = None
        activation = self.activation or reading.activation
        if activation is None:
            activation, assumed = self._assumed(values, reading)
        name = f"{activation} probability"
        if activation == "none":
            name = "score" if assumed is None else "probability"
        labels = reading.labels(values, activation)
        if is_volume:
            return replace(self._segmentation(values, activation, labels, name), assumed=assumed)
        scale = self.scale
        if scale is None and assumed == _PROBABILITIES:
            scale = "log_odds"
        choice = self._classification(values.shape[1], activation, labels, name, scale)
        is_single = reading.discrete == "threshold" and values.shape[1] == 1
        return replace(choice, assumed=assumed, prediction=int(labels.values) if is_single else None)

    def _assumed(self, values: torch.Tensor, reading: Reading) -> tuple[str, str]:
        """The activation where none is given, and what the output ``(1, C, ...)`` is taken for."""
        if reading.unread:
            raise ValueError(
                f"the network's output {shape(values)} may hold anything: the bundle's postprocessing "
                f"{reading.unread}, so its scores are not known. Give activation='none' (--saliency_activation none) "
                "for the network's own numbers, or 'softmax' or 'sigmoid' if it returns logits of classes"
            )
        if values.shape[1] > 1 and bool(rows_sum_to_one(values, _SUMS_TO_ONE).all()):
            return "none", _PROBABILITIES
        found = "sigmoid" if reading.discrete == "threshold" or values.shape[1] == 1 else "softmax"
        if in_unit_interval(values):
            raise ValueError(
                f"the network's output {shape(values)}, in [{float(values.min()):.3g}, {float(values.max()):.3g}], may "
                "hold probabilities or logits: give activation='none' (--saliency_activation none) if the network ends "
                f"in a softmax or sigmoid, or activation={found!r} if it returns logits"
            )
        return found, f"logits, of which a {found} makes probabilities"

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

    def _segmentation(self, values: torch.Tensor, activation: str, labels: Labels, name: str) -> Choice:
        """The target of channels, in the voxels that have their label."""
        count, scale = values.shape[1], self.scale or "probability"
        what = f"segmentation into {count}: mean {name} of channel"
        if self.classes != "predicted":
            # Channels that the user chose may have no predicted voxel.
            channels = list(range(count)) if isinstance(self.classes, str) else self.classes
            target = RegionScore(channels, activation, "all", scale=scale)
            return Choice(target, f"{what} {_listed(channels)} in the image")
        predicted = labels.channels(count)
        if not predicted:
            first = int(labels.background)
            best = first + int(values[0, first:].flatten(1).mean(dim=1).argmax())
            words = f"{what} {best} in the whole image, since no voxel is predicted as any channel"
            return Choice(RegionScore(best, activation, "all", scale=scale), words)
        shown = sorted(predicted[:_MAX_MAPS])
        words = f"{what} {_listed(shown)} in its predicted region"
        if len(predicted) > _MAX_MAPS:
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

    def _regression(self, values: torch.Tensor) -> Choice:
        count = values[0].numel()
        if self.classes == "predicted" and count > 4:
            words = f"regression: how close all {count} output values {shape(values)} stay to the unperturbed ones"
            return Choice(EmbeddingSimilarity(measure="distance"), words)
        numbers = "all" if isinstance(self.classes, str) else self.classes
        return Choice(RegressionScore(numbers), f"regression: {_listed(numbers)} of {count} output values")

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
        self.channels_read = bound.channels_read if choice.assumed != _PROBABILITIES else None
        if choice.assumed == _PROBABILITIES:
            self.if_nan = (
                f"the network's output of the unperturbed image was read as {_PROBABILITIES}, and another image's is "
                "not: give activation='softmax' if the network returns logits, or activation='none' to explain its own "
                "numbers (--saliency_activation)"
            )

    def __call__(self, output: Any) -> torch.Tensor:
        part = read(output, self.choice.path)
        scores = self.bound(part)
        return self._checked(scores, part)

    def _checked(self, scores: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        if self.choice.assumed != _PROBABILITIES:
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

    def quantity(self) -> Quantity:
        return self.bound.quantity()

    def uninformed(self) -> list[float]:
        return self.bound.uninformed()


def _first(output: Any) -> tuple[Any, ...] | None:
    """The path of the first part that can be explained, if possible one named like a prediction; None for all."""
    paths = list(_parts(output))
    for path in paths:
        if path and _PREDICTION.search(str(path[-1])):
            return path
    return (paths[0] or None) if paths else None


def _parts(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts that can be explained."""
    if _is_detection(output) or (isinstance(output, torch.Tensor) and output.ndim > 1):
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
