"""``trust.md``: how far to trust the maps of a cohort, in one page made of the rows of ``summary.csv``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
# Beyond so many of its standard errors a peak is there.
_TIMES_ERROR = 2.0

_RANDOMISED = "randomised"
_WORDS = {
    "random": "a random map",
    "intensity": "intensity alone",
    "edges": "edges alone",
    "blurred": "a blurred copy of the map",
    _RANDOMISED: "the network at random weights",
}
_BESIDE = {**{name: name for name in CONTROLS}, _RANDOMISED: "random weights"}


class _Measured(NamedTuple):
    """A metric as a column of the table, in words, and whether higher is better."""

    column: str
    words: str
    higher: bool


_PLAUSIBLE = (
    _Measured("pointing", "peak strictly inside", True),
    _Measured("mass", "mass in the label", True),
    _Measured("leakage", "leakage", False),
    _Measured("auprc", "AUPRC", True),
)
_FAITHFUL = (
    _Measured("insertion", "insertion AUC", True),
    _Measured("deletion", "deletion AUC", False),
)


class Verdict(NamedTuple):
    """Whether the maps of a cohort depend on what its network has learned.

    Attributes:
        passes: None where nothing was measured.
        words: one sentence.
    """

    passes: bool | None
    words: str


def verdict(rows: Sequence[Row]) -> Verdict:
    """Compare maps with those of the network at random weights.

    They pass where the median size of the rank correlation is below 0.5 and, where labels are known, the AUPRC of the
    network at random weights is at most half of the maps' own, both as means.

    Args:
        rows: rows of the summary.

    Example::

        >>> verdict([{"case": "a", "trust_randomised": "0.1", "trust_auprc": "0.8", "trust_auprc_randomised": "0.02"}])
        Verdict(passes=True, words='passes: the map depends on what was learned')
    """
    agreement = [abs(value) for value in _numbers(rows, "trust_randomised")]
    if not agreement:
        return Verdict(None, "not known: no map of the network at random weights was made")
    reasons = []
    if (size := float(np.median(agreement))) >= _AGREES:
        reasons.append(f"the network at random weights gives much the same map (rank correlation {_number(size)})")
    found = _controlled(rows, _PLAUSIBLE[-1])
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
    """The page of a cohort, in Markdown: consistency, plausibility, fidelity and usefulness.

    It is made of the rows alone, so whichever process ends last makes the page of the whole cohort.

    Args:
        rows: rows of the summary, as :meth:`CaseTable.read <monai_saliency.storage.tables.CaseTable.read>` gives them.
            Those without figures of ``--trust true`` are counted.

    Returns:
        the page; empty where no row has figures.
    """
    measured = [row for row in rows if _is_measured(row)]
    if not measured:
        return ""
    sections = {
        "Consistency": _consistency(measured),
        "Plausibility": _plausibility(measured),
        "Fidelity": _fidelity(measured),
        "Usefulness": _usefulness(measured),
    }
    lines = [_TITLE, "", *_scope(rows, measured)]
    for heading, content in sections.items():
        lines += ["", f"## {heading}", "", *content]
    if problems := _problems(measured):
        lines += ["", "---", "", *problems]
    return "\n".join(lines) + "\n"


def write_trust_page(summary: CaseTable) -> None:
    """Write the page of a table to ``trust.md`` beside it. Remove that page where no row has figures any more.

    Args:
        summary: the table.
    """
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


def _is_measured(row: Row) -> bool:
    return row.get("trust_forwards", "") != ""


def _scope(rows: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    cases, without = _cases(measured), set(_cases(rows)) - set(_cases(measured))
    lines = [
        f"Made of the {_count(len(cases), 'case')} ({_count(len(measured), 'map')}) of `summary.csv` that have figures "
        "of `--trust true`; its columns `trust_...` have them case by case."
    ]
    if without:
        lines.append(f"{_count(len(without), 'case')} of the table {_has(len(without))} none.")
    if len(settings := {row.get("settings", "") for row in measured}) > 1:
        lines.append(f"**The maps were made with {len(settings)} different settings** (column `settings`).")
    return lines


def _consistency(rows: Sequence[Row]) -> list[str]:
    figures = [
        ("rank correlation with the map of another seed", "trust_repeatability", "no other seed: nothing is random"),
        ("rank correlation with the map of another fill", "trust_fill_agreement", "not measured"),
        ("largest standard error, relative to the map's range", "trust_relative_error", "no standard error"),
    ]
    lines = ["| | median | lowest | highest | maps |", "|---|---|---|---|---|"]
    for words, column, missing in figures:
        values = _numbers(rows, column)
        spread = [_number(each(values)) for each in (np.median, min, max)] if values else [missing, "", ""]
        lines.append("| " + " | ".join([words, *spread, str(len(values))]) + " |")
    return [*lines, "", "A map may repeat well and be wrong: consistency is needed, and proves nothing alone."]


def _plausibility(rows: Sequence[Row]) -> list[str]:
    labelled = [row for row in rows if _is_true(row, "trust_labelled")]
    if not labelled:
        return ["No case has a label map with voxels in it, so nothing can be said."]
    words = f"{_count(len(labelled), 'map')} of {_count(len(_cases(labelled)), 'case')} with a label. A metric that a "
    lines = [f"{words}control reaches says nothing for the maps, and is marked."]
    for title, group in _by_class(labelled):
        lines += [*title, "", *_table(group, _PLAUSIBLE, (*CONTROLS, _RANDOMISED))]
    closing = (
        "Leakage is the share outside of the label of as many highest voxels as the label has. Where a blurred copy of "
        "the map reaches a metric, this does not see how sharp a map is."
    )
    return [*lines, "", *_praise(labelled, _PLAUSIBLE), "", closing]


def _fidelity(rows: Sequence[Row]) -> list[str]:
    lines = ["Insertion and deletion, scored by the network, are in the unit of its score."]
    for title, group in _by_class(rows):
        lines += [*title, "", *_table(group, _FAITHFUL, CONTROLS)]
    lines += ["", *_praise(rows, _FAITHFUL), "", f"**Randomised network: {verdict(rows).words}.**"]
    if agreement := [abs(value) for value in _numbers(rows, "trust_randomised")]:
        lines[-1] += (
            f" The same cases were explained with the network at random weights: the size of the rank correlation of "
            f"the maps is {_number(np.median(agreement))} (median of {_count(len(agreement), 'map')}, at most "
            f"{_number(max(agreement))})."
        )
    if (found := _controlled(rows, _PLAUSIBLE[-1])) is not None and _RANDOMISED in found.controls:
        theirs, ours = found.controls[_RANDOMISED], found.value
        fails = "fails" if theirs <= _FINDS * ours else "does not fail"
        lines[-1] += (
            f" The network at random weights {fails} to find the label: AUPRC {_number(theirs)}, the maps' own "
            f"{_number(ours)}."
        )
    rule = f"Maps pass below {_AGREES} and, where labels are known, with an AUPRC of the random weights of at most half"
    return [*lines, "", f"{rule} of their own."]


def _usefulness(rows: Sequence[Row]) -> list[str]:
    by_case = {row["case"]: row for row in rows}
    noise = _share((is_noise(dict(row)) for row in rows), "maps")
    lines = [f"- {noise} are noise: no value is further from 0 than chance puts it."]
    if ratios := _numbers(rows, "trust_peak_to_error"):
        share = _share((ratio > _TIMES_ERROR for ratio in ratios), "maps with a standard error")
        lines.append(
            f"- {share} have a peak above {_TIMES_ERROR:g} times its standard error; the highest of many voxels may be "
            "so by chance, which the noise allows for."
        )
    right = {case: found for case, row in by_case.items() if (found := _is_right(row)) is not None}
    if right:
        words = "predictions are right (class 1 where the label has voxels, class 0 where it has none)"
        lines.append(f"- {_share(right.values(), '')} {words}.")
    else:
        lines.append("- Whether predictions are right is not known from a label of two classes.")
    for wanted, words in ((True, "right"), (False, "wrong")):
        group = [row for row in rows if right.get(row["case"]) is wanted]
        if inside := [_is_true(row, "peak_in_label") for row in group if str(row.get("peak_in_label", "")) != ""]:
            lines.append(f"- Where the prediction is {words}: {_share(inside, 'peaks')} lie in the label.")
    cost = {name: _median(by_case.values(), name) for name in ("forwards", "predictions", "trust_forwards")}
    lines.append(
        f"- A case costs {cost['forwards']} forwards ({cost['predictions']} predictions of the whole image), its "
        f"figures of trust {cost['trust_forwards']} forwards more: medians. A resumed case costs less."
    )
    honest = "Whether a reader decides better or faster with these maps cannot be seen here: that needs readers."
    return [*lines, "", honest]


def _problems(rows: Sequence[Row]) -> list[str]:
    """Which figures are missing and why, the most frequent reasons first."""
    problems = {row["case"]: str(row["trust_problem"]) for row in rows if row.get("trust_problem", "")}
    if not problems:
        return []
    lines = [f"Figures of {_count(len(problems), 'case')} of {len(_cases(rows))} could not be measured:", ""]
    for problem, count in Counter(problems.values()).most_common():
        first = next(case for case, words in problems.items() if words == problem)
        lines.append(f"- {_count(count, 'case')} (the first is {first}): {problem}")
    return lines


def _by_class(rows: Sequence[Row]) -> list[tuple[list[str], list[Row]]]:
    """Rows by what their maps explain, each with a heading where there are several."""
    groups = _groups(rows)
    if len(groups) == 1:
        return [([], list(rows))]
    return [(["", f"### Maps of {_class_name(name)} ({len(group)})"], group) for name, group in groups.items()]


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by what their maps explain."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: str(row.get("class", ""))):
        groups.setdefault(str(row.get("class", "")), []).append(row)
    return groups


def _class_name(name: str) -> str:
    return label_name(int(name) if name.isdecimal() else name)


def _controlled(rows: Sequence[Row], metric: _Measured) -> Controlled | None:
    """The means of a metric, and of each control over the same maps; None where no map has one."""
    column = f"trust_{metric.column}"
    having = [row for row in rows if not math.isnan(_value(row, column))]
    if not having:
        return None
    means = {}
    for name in (*CONTROLS, _RANDOMISED):
        values = _numbers(having, f"{column}_{name}")
        if len(values) == len(having):
            means[name] = float(np.mean(values))
    return Controlled(metric.words, metric.higher, float(np.mean(_numbers(having, column))), means)


def _table(rows: Sequence[Row], metrics: Sequence[_Measured], beside: Sequence[str]) -> list[str]:
    names = [_BESIDE[name] for name in beside]
    lines = ["| " + " | ".join(["metric", "better", "map", *names, ""]) + " |", "|---" * (len(names) + 4) + "|"]
    for metric in metrics:
        found = _controlled(rows, metric)
        if found is None:
            continue
        values = [_number(found.controls.get(name, math.nan)) for name in beside]
        direction = "higher" if metric.higher else "lower"
        marks = " ".join(f"**{_WORDS[name]} reaches this.**" for name in found.passed_by)
        lines.append("| " + " | ".join([metric.words, direction, _number(found.value), *values, marks]) + " |")
    return lines if len(lines) > 2 else ["Not measured."]


def _praise(rows: Sequence[Row], metrics: Sequence[_Measured]) -> list[str]:
    """Which metrics speak for the maps: those that every control has been measured by, and none reaches."""
    lines = []
    for name, group in _groups(rows).items():
        found = [each for metric in metrics if (each := _controlled(group, metric)) is not None]
        good = [each.metric for each in found if not each.passed_by and {*CONTROLS} <= each.controls.keys()]
        of_class = f" for maps of {_class_name(name)}" if len(_groups(rows)) > 1 else ""
        lines += [f"What no control reaches{of_class}: {', '.join(good) or 'nothing'}."] if found else []
    return lines


def _is_right(row: Row) -> bool | None:
    """Whether a prediction of two classes is that of the label; None where that is not known."""
    labelled, predicted = str(row.get("trust_labelled", "")), str(row.get("prediction", ""))
    if not labelled or predicted not in ("0", "1"):
        return None
    return (predicted == "1") == (labelled == "True")


def _cases(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def _is_true(row: Row, column: str) -> bool:
    return str(row.get(column, "")) == "True"


def _value(row: Row, column: str) -> float:
    """NaN where a row has no number there."""
    text = row.get(column, "")
    return float(text) if text != "" else math.nan


def _numbers(rows: Iterable[Row], column: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := _value(row, column))]


def _number(value: Any) -> str:
    return "" if math.isnan(value) else f"{float(value):.3g}"


def _median(rows: Iterable[Row], column: str) -> str:
    values = _numbers(rows, column)
    return f"{np.median(values):,.6g}" if values else "an unknown number of"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _has(number: int) -> str:
    return "has" if number == 1 else "have"


def _share(found: Iterable[bool], words: str) -> str:
    each = list(found)
    return f"{sum(each)} of {len(each)} {words}".rstrip()
