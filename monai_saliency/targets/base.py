"""The contract of targets, and the checks of network outputs that they share."""

from __future__ import annotations

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from monai_saliency.cases import Case
from monai_saliency.errors import SettingError
from monai_saliency.networks.outputs import choices, num_rows, shape
from monai_saliency.utils.arguments import written
from monai_saliency.utils.precision import exact_arithmetic
from monai_saliency.utils.tensors import Box

logger = logging.getLogger(__name__)

#: what turns a network's output into scores; the channels are axis 1
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda output: output.softmax(dim=1),
    "sigmoid": torch.sigmoid,
    "none": lambda output: output,
}

#: what is explained of a probability
SCALES = ("probability", "log_odds")

#: the range of a score, by its unit
_SPANS = {"probability": 1.0, "0 to 1": 1.0, "-1 to 1": 2.0}


class Quantity(NamedTuple):
    """The name, unit and range of a score."""

    words: str
    unit: str

    @property
    def span(self) -> float | None:
        """How far apart two scores can be; None where the unit does not say so, as for logits and predicted values."""
        return _SPANS.get(self.unit)

    def reported(self, scores: Any) -> torch.Tensor:
        """Scores as tables report them: of log-odds the probability."""
        scores = torch.as_tensor(scores, dtype=torch.float64)
        return scores.sigmoid() if self.unit == "log-odds" else scores


def quantity_after(activation: str) -> Quantity:
    """The quantity of the network's output after an activation of :data:`ACTIVATIONS`."""
    if activation == "none":
        return Quantity("network output", "network output")
    return Quantity(f"{activation} probability", "probability")


class BoundTarget(ABC):
    """A target for one case, with everything that depends on the case frozen. It computes K scores per image.

    A target that reads only a part of an output volume ``(B, C, *spatial)`` may say so, and
    :mod:`monai_saliency.inferers.patches` then skips the rest: ``channels_read``, :meth:`reach` and, for scores that
    are sums over voxels, ``additive`` and :meth:`contribution`.

    Attributes:
        labels: what each of the K scores is: the index of a class or channel, or a description.
        channels_read: the output channels that the scores depend on, ascending; None for all.
        additive: whether the scores are the sum of the :meth:`contribution` of boxes.
        linear: whether the scores are sums of the output's numbers with weights that are frozen with the case.
        path: keys and indices of the part of the output that the target reads, where it chooses one itself.
        vouch: numbers ``(V,)`` of the output for the unperturbed image, to recognise stored scores; None
            where the scores of that image do this. A target whose own reference scores the same for every image
            sets it, by :func:`digits`.
        nothing: why there is nothing to explain, in words; empty where there is (see :class:`BoundNothing`).
        if_nan: what is likely wrong where a score is NaN or infinite, for errors.
    """

    labels: Sequence[int | str]
    channels_read: Sequence[int] | None = None
    additive: bool = False
    linear: bool = False
    path: Sequence[str | int] | None = None
    vouch: torch.Tensor | None = None
    nothing: str = ""
    if_nan: str = "check the network's weights and the preprocessing of this case"

    @abstractmethod
    def __call__(self, output: Any) -> torch.Tensor:
        """Scores ``(B, K)`` of the network's output for B perturbed images."""

    def reach(self) -> torch.Tensor | None:
        """The output voxels that the scores depend on, bool ``(*spatial)``; None for all."""
        return None

    def contribution(self, output: torch.Tensor, box: Box) -> torch.Tensor:
        """The part ``(B, K)`` of the scores that comes from the voxels of a box, for ``additive`` targets. Those of
        boxes that tile the volume sum to the scores. The output ``(B, C, *box)`` has only the channels that are read.
        """
        raise NotImplementedError(f"{type(self).__name__} is not additive")

    def describe(self) -> dict[str, Any]:
        """The network's prediction for the unperturbed case, for tables: ``prediction`` and its ``probability``.

        A key is missing where the target does not know it.
        """
        return {}

    def quantity(self) -> Quantity:
        """Name and unit of the K scores, for tables. They follow from the target's settings alone."""
        return Quantity(f"score of {type(self).__name__.removeprefix('_')}", "")

    def words(self) -> str:
        """What is explained, for the line that is printed before the maps: the target, its quantity and labels."""
        name = type(self).__name__.lstrip("_").removeprefix("Bound")
        return f"{name}: {self.quantity().words} ({', '.join(map(label_name, self.labels))})"

    def uninformed(self) -> list[float]:
        """Each of the K scores of an image that shows nothing: chance for the probability of a class, 0 for an overlap
        and for the probability in a region; NaN where that is not known, as for logits and predicted values.
        """
        return [0.0 if self.quantity().unit == "0 to 1" else math.nan] * len(self.labels)


class BoundNothing(BoundTarget):
    """The target of a case in which there is nothing to explain, for the reason in words: it has no scores."""

    labels = ()

    def __init__(self, reason: str) -> None:
        self.nothing = reason

    def __call__(self, output: Any) -> torch.Tensor:
        return torch.zeros(num_rows(output), 0)


class Target(ABC):
    """The settings of a target. A subclass implements :meth:`bind`."""

    __repr__ = written

    #: as :attr:`BoundTarget.path`, where settings give it
    path: Sequence[str | int] | None = None

    def of_image(self, index: int, count: int) -> Target:
        """The target of one of the ``count`` images of a batch: the same for all, by default."""
        return self

    @abstractmethod
    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        """Freeze what the question refers to (class, region, boxes) for one case.

        Args:
            reference_output: the network's output for the unperturbed case alone, a batch of one: ``(1, ...)``.
            case: the case.

        Raises:
            NothingToExplain: when there is nothing to explain in the case, such as a scan without a predicted channel.
            ValueError: when the target cannot read the output.
        """


def check_probabilities(scores: torch.Tensor) -> None:
    """Refuse scores of the unperturbed image that have no log-odds."""
    if not in_unit_interval(scores):
        raise ValueError(
            f"`scale` 'log_odds' needs probabilities, and the scores lie in [{float(scores.min()):.3g}, "
            f"{float(scores.max()):.3g}]; use activation='softmax' or 'sigmoid' for logits"
        )


def log_probabilities(output: torch.Tensor, activation: str, channel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithms of the probability of a channel and of its complement, ``(B, ...)`` each.

    They are computed from the logits ``(B, C, ...)``, so that 1 - 1e-12 is not rounded to 1. Without an activation the
    output holds probabilities, which are kept one rounding of their type away from 0 and 1.
    """
    own = output[:, channel]
    if activation == "sigmoid":
        return logsigmoid(own), logsigmoid(-own)
    if activation == "none":
        rounding = torch.finfo(own.dtype).eps
        own = own.clamp(rounding, 1 - rounding)
        return own.log(), (-own).log1p()
    others = torch.cat([output[:, :channel], output[:, channel + 1 :]], dim=1)
    total = output.logsumexp(dim=1)
    return own - total, others.logsumexp(dim=1) - total


def log_odds(output: torch.Tensor, activation: str, channel: int) -> torch.Tensor:
    """The log-odds ``(B, ...)`` of the probability of a channel: of a softmax its logit less the logsumexp of the
    others', which is finite where the probability rounds to 1.
    """
    if activation == "sigmoid":
        return output[:, channel]
    if activation == "softmax":
        others = torch.cat([output[:, :channel], output[:, channel + 1 :]], dim=1)
        return output[:, channel] - others.logsumexp(dim=1)
    own, rest = log_probabilities(output, activation, channel)
    return own - rest


def log_odds_of(quantity: Quantity, activation: str) -> Quantity:
    """The log-odds of a probability, in words."""
    clamped = "clamped " if activation == "none" else ""
    return Quantity(f"log-odds of the {clamped}{quantity.words}", "log-odds")


def in_unit_interval(values: torch.Tensor) -> bool:
    """Whether all values lie in [0, 1], as probabilities do."""
    return bool(((values >= 0) & (values <= 1)).all())


def rows_sum_to_one(values: torch.Tensor, within: float = 1e-3) -> torch.Tensor:
    """Which rows of values ``(B, C, ...)`` lie in [0, 1] and sum to 1 over the channels, as after a softmax: bool
    ``(B,)``. Both hold to ``within``, since patches are averaged with rounding.
    """
    rows = values.flatten(1)
    in_interval = (rows.amin(dim=1) >= -within) & (rows.amax(dim=1) <= 1 + within)
    off = (values.sum(dim=1, keepdim=True) - 1).abs()
    return in_interval & (off.flatten(1).amax(dim=1) < within)


def label_name(label: int | str) -> str:
    """A label of :attr:`BoundTarget.labels` as used in a sentence: ``"class 2"`` for 2, words unchanged."""
    return label if isinstance(label, str) else f"class {label}"


def check_tensor(output: Any, case: Case, target: str) -> torch.Tensor:
    """Return an output in float32 or float64, if it is a tensor of finite values."""
    if not isinstance(output, torch.Tensor):
        parts = choices(output)
        advice = f"choose what is explained by `output`: {parts}"
        if not parts:
            advice = "return it from the network"
        raise SettingError(f"{target} reads a tensor, the network gave a {type(output).__name__}; {advice}")
    if not bool(torch.isfinite(output).all()):
        wrong = int((~torch.isfinite(case.image)).sum())
        image = "the image is not"
        if wrong:
            image = f"so is the image that it gets, in {wrong} of {case.image.numel()} values"
        raise ValueError(
            f"the network's output of the unperturbed image is NaN or infinite, and {image}; check the scan, its "
            "preprocessing and the network's weights"
        )
    return to_float(output)


def check_indices(indices: Sequence[int], count: int, name: str, what: str) -> None:
    """Refuse indices that are not in ``[0, count)``."""
    for index in indices:
        if not 0 <= index < count:
            plural = f"{what}es" if what.endswith("s") else f"{what}s"
            raise SettingError(
                f"{what} {index} is out of range: the network gives {count} {plural}, "
                f"so `{name}` must be in [0, {count - 1}]"
            )


def check_volume(output: Any, case: Case, target: str, what: str = "a segmentation") -> torch.Tensor:
    """Return an output ``(1, C, *spatial)`` in float32 or float64, if it has as many spatial axes as the image."""
    output = check_tensor(output, case, target)
    if output.ndim != case.image.ndim + 1:
        raise SettingError(
            f"{target} reads {what} of shape (B, C, *spatial), the network gave {shape(output)}"
            + ("; use ClassScore for a classifier" if output.ndim == 2 else "")
        )
    return output


def check_activation(output: torch.Tensor, activation: str, case: Case) -> None:
    """Refuse a softmax of one channel, and warn of an activation on values that look like probabilities."""
    if activation == "none":
        return
    if activation == "softmax" and output.shape[1] == 1:
        raise SettingError(
            "the softmax of one channel is 1 for every image; "
            "use activation='sigmoid' for a single logit or 'none' for a probability"
        )
    looks_activated = bool(rows_sum_to_one(output).all()) if activation == "softmax" else in_unit_interval(output)
    if looks_activated:
        warnings.warn(
            f"case {case.name}: the network's output already looks like probabilities, and a {activation} of it "
            "flattens the scores; use activation='none' if the network ends in one",
            stacklevel=3,
        )


def digits(output: torch.Tensor) -> torch.Tensor:
    """A few numbers ``(4,)`` that differ between outputs, float64: the norm, the sum, and two weighted sums."""
    values = output.detach().flatten().double()
    places = torch.arange(len(values), dtype=values.dtype, device=values.device)
    fast = torch.cos(places + 1.0)
    slow = torch.cos(places * 0.0317 + 1.0)
    return torch.stack([values.norm(), values.sum(), values @ fast, values @ slow]).cpu()


def to_float(output: torch.Tensor) -> torch.Tensor:
    """The output in float32 or float64: half precision, as autocast networks give, is converted to float32."""
    return output if output.dtype in (torch.float32, torch.float64) else output.float()


def cosine(vectors: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Cosine similarity ``(..., M)`` of vectors ``(..., D)`` and references ``(M, D)``; 0 for zero vectors."""
    normalize = torch.nn.functional.normalize
    with exact_arithmetic(vectors.device):
        return normalize(vectors, dim=-1) @ normalize(references, dim=-1).T
