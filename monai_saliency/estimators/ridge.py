"""Ridge regression (Hoerl and Kennard, 1970) of n values on many more features, by the products of the features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from monai_saliency.utils.precision import accumulation_dtype

# Strengths of the ridge penalty that are compared, relative to the mean eigenvalue of the masks.
_STRENGTHS = np.logspace(-3, 2, 31)
# Features that are multiplied at once, in a copy.
_COLUMNS = 2**12


class Ridge(NamedTuple):
    """A ridge regression of n values on features ``(n, bumps)``: the variance of their heights, what it explains, the
    error at each mask without it, and weights ``(n, n)``, the inverse of the products of features with the penalty.
    """

    variance: Tensor
    heights: Tensor
    explained: Tensor
    left_out: Tensor
    weights: Tensor

    @property
    def shares(self) -> Tensor:
        """``(n, n)``, the features' shares in how far the heights lie above those without each mask."""
        return self.left_out[:, None] * self.weights


def products_of(features: Tensor, variance: Tensor | None = None) -> Tensor:
    """The products ``(n, n)`` of features ``(n, bumps)``, less their mean and times the root of their variance."""
    total = torch.zeros([len(features)] * 2, dtype=accumulation_dtype(features.device), device=features.device)
    factors = None if variance is None else variance.to(features).split(_COLUMNS)
    for number, some in enumerate(features.split(_COLUMNS, dim=1)):
        total += (some if factors is None else some * factors[number]) @ some.T
    return centred_products(total.double().cpu())


def centred_products(products: Tensor) -> Tensor:
    """The products of features less their mean, from the products ``(n, n)`` of features."""
    products = products - products.mean(dim=0)
    return products - products.mean(dim=1, keepdim=True)


def spectrum_of(products: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors."""
    values, vectors = torch.linalg.eigh(products)
    return values.clamp_min_(0), vectors


def ridge(features: Tensor, spectrum: tuple[Tensor, Tensor], wanted: Tensor, variance: Tensor) -> Ridge:
    """The ridge regression of values on features, whose heights have some variance. The spectrum is that of their
    products. The penalty is halfway, in its logarithm, between the one with the least leave-one-out error and the
    largest one whose error is within one standard error of that.
    """
    values, vectors = spectrum[0][:, None], spectrum[1]
    strengths = (values.mean() * torch.from_numpy(_STRENGTHS)).clamp_min(torch.finfo(torch.float64).tiny)
    kept = values / (values + strengths)
    explained = vectors @ (kept * (vectors.T @ wanted)[:, None])
    own = vectors.square() @ kept + 1 / len(wanted)  # how far a mask's own score decides what is explained of it
    left_out = (wanted[:, None] - explained) / (1 - own).clamp_min(1e-6)
    squares = left_out.square()
    errors = squares.mean(dim=0)
    least = int(errors.argmin())
    largest = int((errors <= errors[least] + squares[:, least].std() / len(wanted) ** 0.5).nonzero().max())
    chosen = (least + largest + 1) // 2
    weights = (vectors / (values.T + strengths[chosen])) @ vectors.T
    heights = variance * (features.T @ (weights @ wanted).to(features)).to(wanted)
    return Ridge(variance, heights, explained[:, chosen], left_out[:, chosen], weights)


@contextmanager
def one_thread() -> Iterator[None]:
    """Small decompositions in one thread: several would wait for each other while writers keep the cores busy, and take
    15 times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
