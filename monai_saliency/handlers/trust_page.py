"""``trust.md``: how far to trust the maps of a cohort, in one page made of the rows of ``summary.csv``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from monai_saliency.handlers.summary import is_noise
from monai_saliency.metrics.control_maps import CONTROLS, Controlled
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.storage.tables import CaseTable
from monai_saliency.targets.base import label_name

__all__ = ["Verdict", "trust_page", "verdict", "write_trust_page"]

Row = Mapping[str, Any]

_TITLE = "# How far to trust these maps"
# A randomised network's maps that agree more, in rank, are maps of the scan.
_AGREES = 0.5
# Nor may they find more of the label than this share of what the maps find.
_FINDS = 0.5
# A peak of more standard errors is significant.
_TIMES_ERROR = 2
_RANDOMISED = "randomised"
_WORDS = {
    "random": "a random map",
    "intensity": "intensity alone",
    "edges": "edges alone",
    "blurred": "a blurred copy of the map",
    _RANDOMISED: "the network at random weights",
}
#: of a metric: its column, its words, and whether higher is better
_AUPRC = ("auprc", "AUPRC", True)
_PLAUSIBLE = (
    ("pointing", "peak strictly inside", True),
    ("mass", "mass in the label", True),
    ("leakage", "leakage", False),
    _AUPRC,
)
_FAITHFUL = (("insertion", "insertion AUC", True), ("deletion", "deletion AUC", False))
_CONSISTENT = (
    ("rank correlation with the map of another seed", "trust_repeatability", "no other seed: nothing is random"),
    ("rank correlation with the map of another fill", "trust_fill_agreement", "not measured"),
    ("largest standard error, relative to the map's range", "trust_relative_error", "no standard error"),
)


class Verdict(NamedTuple):
    """Whether the maps of a cohort depend on what its network has learned; None where nothing was measured."""

    passes: bool | None
    words: str


def verdict(rows: Sequence[Row]) -> Verdict:
    """Compare maps with those of the network at random weights."""
    agreement = _agreement(rows)
    if not agreement:
        return Verdict(None, "not known: no map of the network at random weights was made")
    reasons = []
    if (size := float(np.median(agreement))) >= _AGREES:
        reasons.append(f"the network at random weights gives much the same map (rank correlation {_number(size)})")
    found = _controlled(rows, *_AUPRC)
    theirs = math.nan if found is None else found.controls.get(_RANDOMISED, math.nan)
    if found is not None and theirs > _FINDS * found.value:
        reasons.append(
            f"it finds the label without having learned anything (AUPRC {_number(theirs)}, the maps "
            f"{_number(found.value)})"
        )
    if reasons:
        return Verdict(False, "fails: " + ", and ".join(reasons))
    return Verdict(True, "passes: the map depends on what was learned")


def trust_page(rows: Sequence[Row]) -> str:
    """The page of a cohort, in Markdown: consistency, plausibility, fidelity and usefulness."""
    measured = [row for row in rows if _is_measured(row)]
    if not measured:
        return ""
    import jinja2  # which `import monai_saliency` need not wait for

    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"number": _number, "count": _count, "share": _share, "median": np.median}
    return environment.get_template("trust.md").render(_words(rows, measured))


def write_trust_page(summary: CaseTable) -> None:
    """Write the page of a table to ``trust.md`` in its folder. Remove that page where no row has figures any more."""
    path = summary.path.with_name("trust.md")
    if not path.exists() and not any(map(_is_measured, summary.read())):
        return
    # Read under the lock, so that of several processes the last one writes the page of all rows.
    with locked(path.with_name(f".{path.name}.lock")):
        page = trust_page(summary.read())
        if page:
            with atomic_path(path) as temporary:
                temporary.write_text(page, encoding="utf-8")
        elif path.exists() and path.read_text(encoding="utf-8").startswith(_TITLE):
            path.unlink()


def _words(rows: Sequence[Row], measured: Sequence[Row]) -> dict[str, Any]:
    """The values in the template."""
    by_case = {row["case"]: row for row in measured}
    labelled = [row for row in measured if _is_true(row, "trust_labelled")]
    return {
        "rows": measured,
        "cases": len(by_case),
        "without": len({row["case"] for row in rows} - by_case.keys()),
        "settings": len({row.get("settings", "") for row in measured}),
        "consistency": [(words, _numbers(measured, column), missing) for words, column, missing in _CONSISTENT],
        "labelled": len(labelled),
        "labelled_cases": len({row["case"] for row in labelled}),
        "plausible": _groups(labelled, _PLAUSIBLE),
        "faithful": _groups(measured, _FAITHFUL),
        "control_words": _WORDS,
        "verdict": verdict(measured).words,
        "agreement": _agreement(measured),
        "auprc": _controlled(measured, *_AUPRC),
        "most_agreement": _AGREES,
        "most_found": _FINDS,
        "noise": [is_noise(dict(row)) for row in measured],
        "significant": [ratio > _TIMES_ERROR for ratio in _numbers(measured, "trust_peak_to_error")],
        "times_error": _TIMES_ERROR,
        "cost": {name: _median(by_case.values(), name) for name in ("forwards", "predictions", "trust_forwards")},
        **_problems(by_case),
    }


def _groups(rows: Sequence[Row], metrics: Sequence[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    """Rows by what their maps explain: the metrics of each, and those that speak for the maps."""
    classes: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: str(row.get("class", ""))):
        classes.setdefault(str(row.get("class", "")), []).append(row)
    groups = []
    for name, group in classes.items():
        found = [each for metric in metrics if (each := _controlled(group, *metric)) is not None]
        good = [each.metric for each in found if not each.passed_by and {*CONTROLS} <= each.controls.keys()]
        words = label_name(int(name) if name.isdecimal() else name)
        groups.append({"words": words, "size": len(group), "metrics": found, "good": good})
    return groups


def _controlled(rows: Sequence[Row], column: str, words: str, higher: bool) -> Controlled | None:
    """The means of a metric, and of each control over the same maps; None where no map has one."""
    having = [row for row in rows if math.isfinite(_value(row, f"trust_{column}"))]
    if not having:
        return None
    controls = {name: _numbers(having, f"trust_{column}_{name}") for name in _WORDS}
    means = {name: float(np.mean(values)) for name, values in controls.items() if len(values) == len(having)}
    return Controlled(words, higher, float(np.mean(_numbers(having, f"trust_{column}"))), means)


def _problems(by_case: Mapping[str, Row]) -> dict[str, Any]:
    """Which figures are missing and why, the most frequent reasons first."""
    problems: dict[str, list[str]] = {}
    for case, row in by_case.items():
        if row.get("trust_problem", ""):
            problems.setdefault(str(row["trust_problem"]), []).append(case)
    ordered = sorted(problems.items(), key=lambda each: -len(each[1]))
    return {"problems": ordered, "problem_cases": sum(map(len, problems.values()))}


def _agreement(rows: Iterable[Row]) -> list[float]:
    return [abs(value) for value in _numbers(rows, "trust_randomised")]


def _is_measured(row: Row) -> bool:
    return row.get("trust_forwards", "") != ""


def _is_true(row: Row, column: str) -> bool:
    return str(row.get(column, "")) == "True"


def _value(row: Row, column: str) -> float:
    """NaN where a row has no number there."""
    text = row.get(column, "")
    return float(text) if text != "" else math.nan


def _numbers(rows: Iterable[Row], column: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := _value(row, column))]


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{float(value):.3g}"


def _median(rows: Iterable[Row], column: str) -> str:
    values = _numbers(rows, column)
    return f"{np.median(values):,.6g}" if values else "an unknown number of"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _share(found: Sequence[bool]) -> str:
    return f"{sum(found)} of {len(found)}"
