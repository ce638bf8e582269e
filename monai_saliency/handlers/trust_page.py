"""``trust.md``: how far to trust the maps of a cohort, in one page made of the rows of ``summary.csv``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from monai_saliency.metrics.control_maps import CONTROLS, Controlled
from monai_saliency.storage.files import locked, write_whole
from monai_saliency.storage.tables import CaseTable
from monai_saliency.visualize.legend import is_noise

logger = logging.getLogger(__name__)

Row = Mapping[str, str]

# A randomised network's maps that agree more, in rank, are maps of the scan. Nor may they find more of the label than
# this share of what the maps find.
_MOST = 0.5
_TITLE = "# How far to trust these maps\n"  # of templates/trust.md


def verdict(rows: Sequence[Row]) -> str:
    """Whether maps depend on what the network has learned, from the maps of the network at random weights."""
    agreement = np.abs(numbers(rows, "randomised"))
    if not agreement.size:
        return "not known: no map of the network at random weights was made"
    if all(map(is_noise, rows)):
        return "not known: chance alone can make each of these maps, so give more masks"
    reasons = []
    size = np.median(agreement)
    if size >= _MOST:
        reasons.append(f"the network at random weights gives much the same map (rank correlation {size:.3g})")
    precision = controlled(rows, "auprc", "AUPRC", True)
    if precision is not None:
        theirs = precision.controls.get("randomised", math.nan)
        if theirs > _MOST * precision.value:
            both = f"AUPRC {theirs:.3g}, the maps {precision.value:.3g}"
            reasons.append(f"it finds the label without having learned anything ({both})")
    seeds = np.abs(numbers(rows, "repeatability"))
    if seeds.size and np.median(seeds) <= size and (precision is None or reasons):
        both = f"{np.median(seeds):.3g}, with random weights {size:.3g}"
        return f"not known: maps of two seeds are no more alike (rank correlation {both}), so give more masks"
    return f"fails: {', and '.join(reasons)}" if reasons else "passes: the map depends on what was learned"


def trust_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of a cohort, in Markdown: consistency, plausibility, fidelity and usefulness."""
    texts = [{name: str(value) for name, value in row.items()} for row in rows]
    measured = [row for row in texts if _is_measured(row)]
    if not measured:
        return ""
    import jinja2  # which `import monai_saliency` need not wait for

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"number": "{:.3g}".format, "large": "{:,.6g}".format, "count": _count}
    environment.filters |= {"numbers": numbers, "controlled": controlled, "median": np.median}
    given = {"rows": texts, "measured": measured, "verdict": verdict(measured), "noise": list(map(is_noise, measured))}
    return environment.get_template("trust.md").render(given, control_names=CONTROLS)


def write_trust_page(summary: CaseTable) -> None:
    """Write the page of a table to ``trust.md`` in its folder. Remove that page where no row has figures any more. A
    ``trust.md`` of somebody else is left as it is.
    """
    path = summary.path.with_name("trust.md")
    if path.exists() and not path.read_bytes().startswith(_TITLE.encode()):
        logger.warning("%s is not a page of monai-saliency, and is left as it is: move it away, and run again", path)
        return
    # Read under the lock, so that the last of several processes writes the page with all rows.
    with locked(path.with_name(f".{path.name}.lock")):
        if page := trust_page(summary.read()):
            write_whole(path, page)
        else:
            path.unlink(missing_ok=True)


def controlled(rows: Sequence[Row], column: str, words: str, higher: bool) -> Controlled | None:
    """The means of a metric, and of each control over the same maps; None where no map has one."""
    measured = [row for row in rows if numbers([row], column)]
    if not measured:
        return None
    means = {}
    for name in (*CONTROLS, "randomised"):
        values = numbers(measured, f"{column}_{name}")
        if len(values) == len(measured):
            means[name] = float(np.mean(values))
    return Controlled(words, higher, float(np.mean(numbers(measured, column))), means)


def numbers(rows: Iterable[Row], column: str, prefix: str = "trust_") -> list[float]:
    """The numbers of a column, without rows that have none."""
    values = [float(text) for row in rows if (text := row.get(prefix + column, "")) != ""]
    return [value for value in values if math.isfinite(value)]


def _is_measured(row: Row) -> bool:
    return row.get("trust_forwards", "") != ""


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
