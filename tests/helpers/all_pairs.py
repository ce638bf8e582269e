"""Few cases instead of all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any


def all_pairs(*axes: Sequence[Any], first: Iterable[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Cases in which every value of each axis meets every value of each other axis.

    Enough where a fault needs at most two of the settings together. The same cases each time.

    Args:
        axes: the values of each setting.
        first: cases that are wanted in any case.

    Example::

        all_pairs("ab", (1, 2), (True, False))  # 4 cases instead of 8
    """
    cases = list(first)
    missing = {pair for case in itertools.product(*axes) for pair in _pairs(case)}
    missing -= {pair for case in cases for pair in _pairs(case)}
    while missing:
        cases.append(max(itertools.product(*axes), key=lambda case: len(missing & _pairs(case))))
        missing -= _pairs(cases[-1])
    return cases


def _pairs(case: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(case), 2))
