"""Embeddings and displacement fields: how close the perturbed output stays to a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monai_saliency.cases import Case
from monai_saliency.targets.base import (
    BoundTarget,
    Quantity,
    Target,
    check_tensor,
    check_volume,
    cosine,
    digits,
    to_float,
)
from monai_saliency.utils.arguments import check_option, instance


def _negative_distance(embeddings: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """The negative distance ``(B, M)`` of embeddings ``(B, D)`` to each reference ``(M, D)``."""
    # Not from dot products: for close vectors their rounding errors would be larger than the distance.
    return -torch.stack([(embeddings - reference).norm(dim=1) for reference in references], dim=1)


_MEASURES = {"cosine": cosine, "distance": _negative_distance}


class EmbeddingSimilarity(Target):
    """The similarity of the perturbed image's embedding to a reference. The output is ``(B, ...)``, flattened.

    With :func:`monai_saliency.sbsm` this is similarity-based saliency (SBSM; Dong et al., "Explainability for
    content-based image retrieval", CVPR workshops 2019). The map is positive where hiding the image moves its embedding
    away from the reference. For registration, the warped image (chosen by the inferer's ``output``) can serve as the
    embedding.

    Args:
        measure: ``"cosine"``, in [-1, 1], or ``"distance"``, the negative Euclidean distance.
        reference: the embedding ``(*embedding)`` of a query or another image, or several, ``(M, *embedding)``, each
            with its own map. By default the unperturbed image's own embedding.

    Raises:
        ValueError: for another measure, and (from ``bind``) when the output is not a tensor or has NaN or infinite
            values, or when the shape of ``reference`` does not fit.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, EmbeddingSimilarity
        >>> bound = EmbeddingSimilarity("distance").bind(torch.tensor([[3.0, 4.0]]), Case("ct_7", torch.zeros(1, 8, 8)))
        >>> bound(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[-0.0], [-5.0]]
    """

    def __init__(self, measure: str = "cosine", reference: torch.Tensor | None = None) -> None:
        self.measure = check_option("measure", measure, list(_MEASURES))
        words = "an embedding as a tensor, torch.as_tensor(...)"
        self.reference = instance("reference", reference, torch.Tensor, words, none=True)

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        own = check_tensor(reference_output, case, "EmbeddingSimilarity")
        if self.reference is None:
            bound = _BoundEmbeddingSimilarity(["similarity to itself"], own.flatten(1).clone(), self.measure)
            bound.vouch = digits(own)
            return bound
        given = self.reference if self.reference.ndim == own.ndim else self.reference[None]
        if given.shape[1:] != own.shape[1:] or not len(given):
            raise ValueError(
                f"`reference` has shape {tuple(self.reference.shape)}, an embedding {tuple(own.shape[1:])}: give one "
                "embedding, or several along a first axis"
            )
        names = [f"similarity to reference {i}" for i in range(1, len(given) + 1)]
        return _BoundEmbeddingSimilarity(names, given.to(own).flatten(1), self.measure)


@dataclass(eq=False)
class _BoundEmbeddingSimilarity(BoundTarget):
    labels: Sequence[str]
    references: torch.Tensor  # (M, D)
    measure: str

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return _MEASURES[self.measure](to_float(output).reshape(len(output), -1), self.references)

    def quantity(self) -> Quantity:
        if self.measure == "distance":
            return Quantity("negative distance of embeddings", "network output")
        return Quantity("cosine similarity of embeddings", "-1 to 1")


class FieldSimilarity(Target):
    """How far a registration network's displacement field changes. The output is ``(B, axes, *spatial)``.

    The score is the negative mean Euclidean distance between the perturbed and the unperturbed displacements, in the
    field's unit. It is 0 for the unperturbed image and at most 0 otherwise. The map is positive where hiding the image
    changes the registration.

    Raises:
        ValueError: from ``bind``, when the output is not such a field or has NaN or infinite values.

    Example::

        >>> import torch
        >>> from monai_saliency import Case, FieldSimilarity
        >>> bound = FieldSimilarity().bind(torch.zeros(1, 2, 1, 2), Case("ct_7", torch.zeros(1, 1, 2)))
        >>> moved = torch.tensor([[[[3.0, 0.0]], [[4.0, 0.0]]]])  # one of two voxels, by 3 along x and 4 along y
        >>> bound(moved).tolist()
        [[-2.5]]
    """

    def bind(self, reference_output: Any, case: Case) -> BoundTarget:
        return _BoundFieldSimilarity(check_volume(reference_output, case, "FieldSimilarity", "a displacement field"))


class _BoundFieldSimilarity(BoundTarget):
    labels = ("displacement",)

    def __init__(self, reference: torch.Tensor) -> None:
        self.reference = reference.clone()
        self.vouch = digits(reference)

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        distances = (to_float(output) - self.reference).norm(dim=1)
        return -distances.flatten(1).mean(dim=1, keepdim=True)

    def quantity(self) -> Quantity:
        return Quantity("negative mean change of the displacement", "network output")
