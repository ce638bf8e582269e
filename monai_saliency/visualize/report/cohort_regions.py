"""What a cohort shows: the mean of its maps in each region of the label maps, over all cases."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from monai_saliency.storage.files import atomic_path
from monai_saliency.storage.tables import cell
from monai_saliency.visualize.report.cases import Cohort, Row, class_words

__all__ = ["cohort_regions", "region_panels", "save_cohort_regions"]

# What makes figures of several cases comparable.
_SAME = ("class", "channel", "quantity", "unit", "region", "name")
_COLUMNS = (*_SAME, "class_name", "cases", "saliency_mean", "saliency_sd", "mass_mean", "mass_sd")


def cohort_regions(cohort: Cohort) -> list[dict[str, Any]]:
    """The maps of a cohort in each region of the cases' label maps, from ``label_regions.csv``.

    A class by organ matrix over a cohort, after Agg2Exp (arXiv 2407.16653, section 3), which makes it of gradients.
    Maps of different scores are not mixed.

    Returns:
        a dictionary for each class, channel, score and region: the number of ``cases`` that have the region, the mean
        over these cases of ``saliency``, the map's mean in the region in the score's unit, and of ``mass``, the
        region's share of the map's values above 0; and their standard deviations of a sample, ``""`` for one case.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for case in cohort.cases:
        scores = {class_words(row): row for row in case.rows}
        for row in case.label_regions:
            known = {**scores.get(class_words(row), {}), **row}
            groups.setdefault(tuple(known.get(name, "") for name in _SAME), []).append(row)
    found = []
    for same, rows in groups.items():
        figures = [figure for name in ("saliency", "mass") for figure in _mean_and_spread(rows, name)]
        class_name = max(row.get("class_name", "") for row in rows)
        found.append(dict(zip(_COLUMNS, (*same, class_name, len(rows), *figures), strict=True)))
    return found


def _mean_and_spread(rows: Sequence[Row], name: str) -> tuple[float | str, float | str]:
    values = [float(row[name]) for row in rows if row[name]]
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else ""
    return (float(np.mean(values)) if values else ""), spread


def save_cohort_regions(folder: Path, cohort: Cohort) -> list[dict[str, Any]]:
    """Write ``cohort_regions.csv`` into an output folder, and return its rows."""
    path, rows = folder / "cohort_regions.csv", cohort_regions(cohort)
    with atomic_path(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows({name: cell(value) for name, value in row.items()} for row in rows)
    return rows


def region_panels(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[str], list[tuple[str, list[Any]]], float]]:
    """A matrix for each score: its words, the regions, for each class its cells, and the largest absolute mean."""
    scores: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        words = row["quantity"] + f" ({row['unit']})" * (row["unit"] not in ("", row["quantity"]))
        scores.setdefault(words or "score", []).append(row)
    found = []
    for words, own in scores.items():
        cells = {(class_words(row), _region(row)): row for row in own}
        regions = sorted({(int(row["region"]), _region(row)) for row in own})
        classes = sorted({explained for explained, _ in cells})
        lines = [(each, [cells.get((each, region)) for _, region in regions]) for each in classes]
        largest = max(abs(row["saliency_mean"]) for row in own) or 1.0
        found.append((words, [region for _, region in regions], lines, largest))
    return found


def _region(row: Row) -> str:
    return row["name"] or f"region {row['region']}"
