"""Batches: a round of masks is cut into full ones of one shape, at fixed places (law 7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from monai_saliency.inferers.case_state import CaseState
from monai_saliency.sharding import Part
from monai_saliency.utils.arguments import whole_number

#: a case's place, its first row, and its last row + 1
Rows: TypeAlias = tuple[int, int, int]

#: values in a batch of perturbed images where its size is found by itself, 64 MB in float32, and the most images; on a
#: GPU twice as many values, since it runs larger batches faster
_VALUES, _MOST = 2**24, 16
_VALUES_ON_GPU, _MOST_ON_GPU = 2**25, 64


class AutoSize(int):
    """A batch size that the image decides. As a number it is the one to take where no image is known."""


def batch_size(value: Any) -> int:
    """Check a setting ``mask_batch_size``: a whole number of at least 1, or ``"auto"``."""
    if isinstance(value, AutoSize) or (isinstance(value, str) and value == "auto"):
        return AutoSize(_MOST)
    return whole_number("mask_batch_size", value, 1)


def rows_in_batch(setting: int, states: Sequence[CaseState]) -> int:
    """Rows in each batch of a call: as many as the setting allows, or all of the first round where these are fewer."""
    image = states[0].case.image
    if isinstance(setting, AutoSize):
        values, most = (_VALUES_ON_GPU, _MOST_ON_GPU) if image.is_cuda else (_VALUES, _MOST)
        setting = max(1, min(most, values // max(1, image.numel())))
    spans = [state.rows_of_round(0) for state in states]
    return min(setting, sum(stop - start for start, stop in spans))


def cut(spans: Sequence[tuple[int, int]], size: int) -> Iterator[list[Rows]]:
    """Cut runs of rows, laid end to end, into batches."""
    batch: list[Rows] = []
    room = size
    for index, (start, end) in enumerate(spans):
        while start < end:
            stop = min(end, start + room)
            batch.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def of_part(batches: list[list[Rows]], part: Part) -> list[list[Rows]]:
    """The batches of a round that a part runs: its share, and all that hold an unperturbed image."""
    if part.count == 1:
        return batches
    shared = [number for number, rows in enumerate(batches) if all(start > 0 for _, start, _ in rows)]
    others = set(shared) - {shared[i] for i in part.of(len(shared))}
    return [rows for number, rows in enumerate(batches) if number not in others]


class Plan(NamedTuple):
    """The forwards of a round, and how many of them are one prediction."""

    total: int
    done: int = 0
    per_prediction: int = 1
