"""A target chosen from the network's output and the bundle's postprocessing, for bundles whose task is unknown."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from monai.utils import CommonKeys

from monai_saliency.cases import Case
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
from monai_saliency.targets.segmentation import PredictedRegionScore
from monai_saliency.utils.arguments import check_option, indices, whole_number

__all__ = ["AutoTarget", "Choice", "finds_nothing"]

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
    network ends in a softmax. Only ``scale`` looks at a case: a saturated probability is explained by its log-odds. In
    this order:

    1. ``activation``, where it is given. With ``"none"`` scores are the network's own numbers.
    2. The activation of the postprocessing.
    3. One channel that no postprocessing makes a class of: its own value. With several channels, or before an
       activation or a label, a function that cannot be read (such as ``Lambdad``) is refused with an error that asks
       for ``activation``.
    4. Probabilities, where the channels lie in [0, 1] and sum to 1 within 1e-4, as a network gives them that ends in a
       softmax. They are explained as they are. A case fails where an output of a perturbed image does not sum to 1.
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
        scale: ``"auto"``, ``"probability"`` or ``"log_odds"``, the scale of the probability of a class or in a region
            (:class:`~monai_saliency.ClassScore`).
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
        scale: str = "auto",
        against: int | None = None,
    ) -> None:
        if isinstance(classes, str) and classes not in ("predicted", "all"):
            raise ValueError(f"`classes` must be a list of indices, 'predicted' or 'all', got {classes!r}")
        self.readings = dict(readings or {})
        self.classes = classes if isinstance(classes, str) else indices("classes", classes, "'predicted' or 'all'")
        self.activation = None if activation is None else check_option("activation", activation, list(ACTIVATIONS))
        self.output = (output,) if isinstance(output, (str, int)) else None if output is None else tuple(output)
        self.scale = check_option("scale", scale, SCALES)
        self.against = None if against is None else whole_number("against", against, 0)

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        choice = self.choose(reference_output, case)
        if self.against is not None and not isinstance(choice.target, ClassScore):
            raise ValueError(f"`against` is for classes of the whole image, and this is {choice.words}: leave it out")
        if choice.assumed is not None:
            logger.info("case %s: the network's output is read as %s", case.name, choice.assumed)
        part = read(reference_output, choice.path)
        bound = choice.target.bind(part, case)
        is_softmax = getattr(choice.target, "activation", None) == "softmax"
        if self.scale == "probability" and is_softmax and bool((bound(part) > 1 - 1e-6).all()):
            logger.warning(
                "case %s: the explained probability is 1 to six digits, so its map shows only what changes it by more; "
                "scale='auto' (--saliency_scale auto) explains its log-odds instead",
                case.name,
            )
        # The chosen target holds labels as large as the output, which are bound by now.
        return _BoundChoice(replace(choice, target=self), bound)

    def choose(self, output: Any, case: Case) -> Choice:
        """Choose the target of a case by the network's output for the unperturbed case alone."""
        path = self.output if self.output is not None else _first(output)
        part = read(output, path)
        where = f" of output {'/'.join(map(str, path))}" if path else ""
        if _detections(part):
            return self._detection(part, case, path, where)
        if not isinstance(part, torch.Tensor):
            raise ValueError(
                f"the network gave a {type(part).__name__} with no tensor that could be explained{where}; choose one "
                "with --saliency_output, or give --saliency_target"
            )
        values = part.detach()
        if not values.is_floating_point():
            raise ValueError(
                f"the network's output{where} holds {str(values.dtype).removeprefix('torch.')} labels, which do not "
                "show how close another label was: explain a network that gives scores"
            )
        known = self.readings.get(path[-1] if path else CommonKeys.PRED, self.readings.get(CommonKeys.PRED))
        reading = known or Reading()
        spatial = values.ndim == case.image.ndim + 1
        one_channel = values.shape[1:2] == (1,)
        # One number or one image, and no step makes a class of it.
        own = one_channel and self.activation in (None, "none") and not (reading.activation or reading.discrete)
        if spatial and own:
            words = f"image regression: mean of output channel 0{where}, as the network gives it"
            return Choice(RegionScore(0, "none", "all"), words, path)
        if not spatial and (own or values.ndim != 2):
            self._check_numbers(values, reading, where)
            return self._regression(values, path, where)
        assumed = None
        activation = self.activation or reading.activation
        if activation is None:
            activation, assumed = self._assumed(values, reading)
        labels = reading.labels(values, activation)
        choose = self._segmentation if spatial else self._classification
        target, words = choose(values, activation, labels)
        name = f"{activation} probability"
        if activation == "none":
            name = "score" if assumed is None else "probability"
        is_single = reading.discrete == "threshold" and one_channel and not spatial
        single = int(labels.values) if is_single else None
        return Choice(target, words.format(name=name) + where, path, single, assumed)

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
                f"in a softmax or sigmoid, or activation={found!r} if it returns logits; in Python "
                f"target=ms.AutoTarget(activation='none') or target=ms.AutoTarget(activation={found!r})"
            )
        return found, f"logits, of which a {found} makes probabilities"

    def _classification(self, values: torch.Tensor, activation: str, labels: Labels) -> tuple[Target, str]:
        """The target of classes; where several may be predicted, of all that are."""
        classes: Any = self.classes
        if classes == "predicted" and labels.overlapping and bool(labels.values.any()):
            classes = labels.values.nonzero().flatten().tolist()
        named = {"predicted": "the predicted class", "all": "all classes"}
        what = named[classes] if isinstance(classes, str) else f"class {', '.join(map(str, classes))}"
        if values.shape[1] == 1:
            what = "prediction 1, the network's one output"
        what += f" against class {self.against}" * (self.against is not None)
        target = ClassScore(classes, activation, self.scale, self.against)
        return target, f"classification into {values.shape[1]}: {{name}} of {what}"

    def _segmentation(self, values: torch.Tensor, activation: str, labels: Labels) -> tuple[Target, str]:
        """The target of channels, in the voxels that have their label."""
        channels: Any = self.classes
        count = values.shape[1]
        what = f"segmentation into {count}: mean {{name}}"
        if channels == "all":
            channels = list(range(count))
        if not isinstance(channels, str):
            # Channels that the user chose may have no predicted voxel.
            target = RegionScore(channels, activation, "all", scale=self.scale)
            return target, f"{what} of channel {_listed(channels)} in the image"
        found = labels.channels(count)
        if not found:
            first = int(labels.background)
            means = values[0, first:].flatten(1).mean(dim=1)
            best = first + int(means.argmax())
            return (
                RegionScore(best, activation, "all", scale=self.scale),
                f"{what} of channel {best} in the whole image, since no voxel is predicted as any channel",
            )
        left = f", the largest of {len(found)}" if len(found) > _MAX_MAPS else ""
        found = sorted(found[:_MAX_MAPS])
        words = f"{what} of channel {_listed(found)} in its predicted region{left}"
        return PredictedRegionScore(found, activation, lambda _: labels, self.scale), words

    def _check_numbers(self, values: torch.Tensor, reading: Reading, where: str) -> None:
        """Refuse numbers that somebody takes for classes: in another shape these would be explained."""
        given = self.activation and f"activation={self.activation!r}"
        found = given or next(filter(None, (reading.activation, reading.discrete)), None)
        if found and self.activation != "none":
            raise ValueError(
                f"{given or f'the {found} of the postprocessing'} needs classes (B, C) or channels (B, C, *spatial), "
                f"and the network's output{where} is {shape(values)}: let it return the classes alone (such as "
                f"output[:, {'None' if values.ndim == 1 else 0}]), or say activation='none' "
                "(--saliency_activation none) for the numbers as they are"
            )

    def _regression(self, values: torch.Tensor, path: tuple[Any, ...] | None, where: str) -> Choice:
        count = values[0].numel()
        if not isinstance(self.classes, str) or self.classes == "all" or count <= 4:
            numbers = "all" if isinstance(self.classes, str) else self.classes
            words = f"regression: {_listed(numbers)} of {count} output values{where}"
            return Choice(RegressionScore(numbers), words, path)
        words = f"regression: how close all {count} output values {shape(values)}{where} stay to the unperturbed ones"
        return Choice(EmbeddingSimilarity(measure="distance"), words, path)

    def _detection(self, part: Any, case: Case, path: tuple[Any, ...] | None, where: str) -> Choice:
        if not isinstance(self.classes, str):
            raise ValueError("`classes` chooses no boxes: leave it out, or give target=DetectionScore(...)")
        if self.activation not in (None, "none"):
            raise ValueError("`activation` changes no boxes, which have their confidences: leave it out")
        target, which = DetectionScore(max_boxes=_MAX_MAPS), f"each box of confidence 0.5 or more, at most {_MAX_MAPS}"
        try:
            target.bind(part, case)
        except ValueError:
            target, which = DetectionScore(0.0, 1), "the most confident box, as none reaches 0.5"
        return Choice(target, f"detection: the same box, class and confidence again, for {which}{where}", path)


class _BoundChoice(BoundTarget):
    """The bound target of a choice, which reads its part of each output."""

    def __init__(self, choice: Choice, bound: BoundTarget) -> None:
        self.choice = choice
        self.bound = bound
        self.labels = bound.labels
        if choice.assumed == _PROBABILITIES:
            self.if_nan = (
                f"the network's output of the unperturbed image was read as {_PROBABILITIES}, and another image's is "
                "not: give activation='softmax' if the network returns logits, or activation='none' to explain its own "
                "numbers (--saliency_activation; in Python target=ms.AutoTarget(activation=...))"
            )

    def __call__(self, output: Any) -> torch.Tensor:
        part = read(output, self.choice.path)
        scores = self.bound(part)
        if self.choice.assumed != _PROBABILITIES:
            return scores
        # NaN fails the case later, when scores are on the host: a check here would wait for the device.
        return scores.masked_fill(~rows_sum_to_one(part, _SUMS_TO_ONE)[:, None], math.nan)

    def describe(self) -> dict[str, Any]:
        found, made = self.bound.describe(), self.choice.prediction
        if made is None:
            return found
        if "probability" in found and found["prediction"] != made:
            found["probability"] = 1 - found["probability"]
        return {**found, "prediction": made}

    def quantity(self) -> Quantity:
        return self.bound.quantity()

    def quantities(self) -> list[Quantity]:
        return self.bound.quantities()

    def uninformed(self) -> list[float]:
        return self.bound.uninformed()


def _first(output: Any) -> tuple[Any, ...] | None:
    """The path of the first part that can be explained, if possible one named like a prediction; None for all."""
    paths = list(_parts(output))
    return (
        next((path for path in paths if path and _PREDICTION.search(str(path[-1]))), paths[0] if paths else ()) or None
    )


def _parts(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts that can be explained."""
    if _detections(output) or (isinstance(output, torch.Tensor) and output.ndim > 1):
        yield path
    elif isinstance(output, (Mapping, list, tuple)):
        for key, part in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from _parts(part, (*path, key))


def _detections(output: Any) -> bool:
    """Whether an output is a detector's: one dictionary per image, with boxes ``(N, 4 or 6)``, or ``(0,)`` for none."""
    if isinstance(output, (list, tuple)) and output:
        return _detections(output[0])
    return isinstance(output, Mapping) and any(
        "box" in str(key).lower() and isinstance(part, torch.Tensor) and part.shape[-1:] in ((4,), (6,), (0,))
        for key, part in output.items()
    )


def finds_nothing(output: Any) -> bool:
    """Whether a detector's output for one image holds no box."""
    return _detections(output) and not any(
        len(part) for key, part in output.items() if "box" in str(key).lower() and isinstance(part, torch.Tensor)
    )


def _listed(numbers: Sequence[int] | str) -> str:
    """Numbers as text, ``"1, 2"``; a string unchanged."""
    return numbers if isinstance(numbers, str) else ", ".join(map(str, numbers))
