"""What every target is made of: the case, the two contracts, and the checks of what a network gave."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.networks.outputs import choices, shape
from monai_saliency.utils.boxes import Box
from monai_saliency.utils.precision import exact_arithmetic

__all__ = [
    "ACTIVATIONS",
    "BoundTarget",
    "Target",
    "check_activation",
    "check_finite",
    "check_indices",
    "check_tensor",
    "check_volume",
    "cosine",
    "label_name",
    "to_float",
]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda output: output.softmax(dim=1),
    "sigmoid": torch.sigmoid,
    "none": lambda output: output,
}


class BoundTarget(ABC):
    """A target with everything that depends on the case frozen.

    What it reads of a volume ``(B, C, *spatial)`` it may tell, so that no work goes into the rest
    (:mod:`monai_saliency.inferers.patches`): ``channels_read``, :meth:`reach` and, where its scores are sums over
    voxels,
    ``additive`` and :meth:`contribution`.
    """

    #: what each of the K scores is: the index of a class or channel, or words
    labels: Sequence[int | str]
    #: the output channels that the scores depend on, ascending; None for all
    channels_read: Sequence[int] | None = None
    #: whether the scores are sums of the :meth:`contribution` of boxes
    additive: bool = False

    @abstractmethod
    def __call__(self, output: Any) -> torch.Tensor:
        """Scores ``(B, K)`` of network outputs of B perturbed images."""

    def reach(self) -> torch.Tensor | None:
        """The output's voxels that the scores depend on, bool ``(*spatial)``; None for all."""
        return None

    def contribution(self, output: torch.Tensor, box: Box) -> torch.Tensor:
        """What the voxels of a box add to the scores, for ``additive`` targets.

        Over boxes that tile the volume the contributions sum up to the scores.

        Args:
            output: ``(B, C, *box)``, the network's output inside the box; C are the ``channels_read``.
            box: one slice with start and stop for each spatial axis.

        Returns:
            ``(B, K)``.
        """
        raise NotImplementedError(f"{type(self).__name__} is not additive")

    def describe(self) -> dict[str, Any]:
        """What the network made of the unperturbed case, for a summary: ``prediction`` and its ``probability``."""
        return {}


class Target(ABC):
    """Settings of a target."""

    @abstractmethod
    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        """Freeze what the question refers to.

        Args:
            reference_output: the network's output of the unperturbed case, ``(1, ...)``.
            case: the case.

        Raises:
            ValueError: when the output is not what the target reads, or the case has nothing to explain.
        """


def label_name(label: int | str) -> str:
    """What to call one of :attr:`BoundTarget.labels` in a sentence."""
    return label if isinstance(label, str) else f"class {label}"


def check_tensor(output: Any, case: Case, target: str) -> torch.Tensor:
    """The output, where it is a tensor.

    Raises:
        CaseError: for anything else, with the parts that it has.
    """
    if isinstance(output, torch.Tensor):
        return output
    parts = choices(output)
    raise CaseError(
        case.name,
        f"{target} reads a tensor, the network gave a {type(output).__name__}; "
        + (
            f"choose what is explained by the inferer's `output`: {parts}"
            if parts
            else "wrap the network so that it returns the tensor to be explained"
        ),
    )


def check_finite(output: torch.Tensor, case: Case) -> None:
    """Refuse an output that is NaN or infinite in places."""
    if not bool(torch.isfinite(output).all()):
        raise CaseError(
            case.name,
            "the network's output of the unperturbed image is NaN or infinite in places; check the network's weights "
            "and the preprocessing of this case",
        )


def check_indices(indices: Sequence[int], count: int, name: str, what: str, case: Case) -> None:
    """Refuse indices out of ``[0, count)``.

    Args:
        indices: of classes, channels or values.
        count: how many the network gives.
        name: the parameter that they were given by.
        what: what one of them is called.
        case: the case.
    """
    for index in indices:
        if not 0 <= index < count:
            plural = f"{what}es" if what.endswith("s") else f"{what}s"
            raise CaseError(
                case.name,
                f"{what} {index} is out of range: the network gives {count} {plural}, "
                f"so `{name}` must be in [0, {count - 1}]",
            )


def check_volume(output: Any, case: Case, target: str, what: str = "a segmentation") -> torch.Tensor:
    """The output, where it is ``(1, C, *spatial)`` with the image's number of axes, in a precision to score in."""
    output = check_tensor(output, case, target)
    if output.ndim != case.image.ndim + 1:
        raise CaseError(
            case.name,
            f"{target} reads {what} of shape (B, C, *spatial), the network gave {shape(output)}"
            + ("; use ClassScore for a classifier" if output.ndim == 2 else ""),
        )
    check_finite(output, case)
    return to_float(output)


def check_activation(output: torch.Tensor, activation: str, case: Case) -> None:
    """Refuse a softmax of one channel, and warn where an activation is applied to what looks like probabilities."""
    if activation == "none":
        return
    if activation == "softmax" and output.shape[1] == 1:
        raise CaseError(
            case.name,
            "the softmax of one channel is 1 whatever the network says; "
            "use activation='sigmoid' for a single logit or 'none' for a probability",
        )
    probable = bool(((output >= 0) & (output <= 1)).all())
    if activation == "softmax":
        probable = probable and bool(((output.sum(dim=1) - 1).abs() < 1e-3).all())
    if probable:
        warnings.warn(
            f"case {case.name}: the network's output already looks like probabilities, and a {activation} of it "
            "flattens the scores; use activation='none' if the network ends in one",
            stacklevel=3,
        )


def to_float(output: torch.Tensor) -> torch.Tensor:
    """The output in float32 or float64. Under autocast a network gives half precision, too coarse to compare scores."""
    return output if output.dtype in (torch.float32, torch.float64) else output.float()


def cosine(vectors: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Cosines ``(..., M)`` of vectors ``(..., D)`` and references ``(M, D)``, in full precision; 0 for zero vectors."""
    normalize = torch.nn.functional.normalize
    with exact_arithmetic(vectors.device):
        return normalize(vectors, dim=-1) @ normalize(references, dim=-1).T
