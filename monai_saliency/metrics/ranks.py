"""Sorted maps: runs of equal values, ranks, and the rank correlation of two maps."""

from __future__ import annotations

import torch

from monai_saliency.utils.precision import accumulation_dtype

__all__ = ["correlation", "last_of_ties", "rank_correlation", "ranks"]


def last_of_ties(ordered: torch.Tensor) -> torch.Tensor:
    """For each place in sorted rows ``(n, N)``, the last place with an equal value: [5, 3, 3, 1] gives [0, 2, 2, 3]."""
    count = ordered.shape[1]
    places = torch.arange(count, device=ordered.device).expand_as(ordered)
    ends = torch.ones_like(ordered, dtype=torch.bool)
    ends[:, :-1] = ordered[:, 1:] != ordered[:, :-1]
    return torch.where(ends, places, count).flip(1).cummin(1).values.flip(1)


def ranks(values: torch.Tensor) -> torch.Tensor:
    """The rank of each value in its row of ``(n, N)``, from 0; equal values share the mean of their ranks."""
    ordered, order = values.sort(dim=1, stable=True)
    last = last_of_ties(ordered)
    first = values.shape[1] - 1 - last_of_ties(ordered.flip(1)).flip(1)
    mean = (first + last).to(accumulation_dtype(values.device)) / 2
    return torch.empty_like(mean).scatter_(1, order, mean)


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation ``(n,)`` of rows ``(n, N)``, in [-1, 1]; NaN where all values of a row are equal.

    Example::

        >>> rank_correlation(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0, 9.0, 5.0]])).tolist()
        [0.5]
    """
    return correlation(ranks(first), ranks(second))


def correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Pearson's correlation ``(n,)`` of rows ``(n, N)``, in [-1, 1]; NaN where all values of a row are equal."""
    ours, theirs = (rows.to(accumulation_dtype(rows.device)) for rows in (first, second))
    ours, theirs = (rows - rows.mean(1, keepdim=True) for rows in (ours, theirs))
    size = ((ours**2).sum(1) * (theirs**2).sum(1)).sqrt()
    return torch.where(size > 0, (ours * theirs).sum(1) / size, torch.nan)
