"""The summary of a cohort: a row for each map of a case, the settings that made the rows, and figures over all rows."""

from __future__ import annotations

import json
import logging
import platform
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from enum import Enum
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.utils import OptionalImportError

from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.runtime import plain_network, runtime_settings
from monai_saliency.storage.dicom import is_dicom, series_files
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.storage.key import fingerprint, input_files
from monai_saliency.storage.label_maps import load_label
from monai_saliency.storage.scans import format_of
from monai_saliency.storage.tables import SUMMARY_COLUMNS as COLUMNS
from monai_saliency.storage.tables import CaseTable as Summary
from monai_saliency.version import __version__
from monai_saliency.visualize.legend import Legend, is_noise, legends_of

__all__ = ["COLUMNS", "Summary", "described", "figures", "note_settings", "scan_mark", "summarize", "warn_of_others"]

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, np.generic)
# How fast an inferer is, and where; the random state of a Compose.
_NO_MATTER = {"sw_batch_size", "progress", "cpu_thresh", "cache_roi_weight_map", "buffer_steps", "buffer_dim"}
_NO_MATTER |= {"device", "sw_device", "R", "log_stats"}
_DEEPEST, _MOST = 5, 20


def summarize(
    case: str,
    explanation: Explanation,
    maps: np.ndarray,
    affine: np.ndarray,
    label: str | Path | None = None,
    seconds: float = float("nan"),
    settings: str = "",
    scan: str = "",
    image: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """Rows of the summary for one case, one for each explained value.

    Args:
        case: the name of the case.
        explanation: the result of the inferer.
        maps: ``(K, *spatial)``, or ``(K * C, *spatial)`` with a map for each channel, on the scan's grid.
        affine: ``(4, 4)``, from the scan's voxels to scanner mm.
        label: the file of the label map, on any grid; None if there is none.
        seconds: how long explaining took.
        settings: the mark of :func:`note_settings`.
        scan: the mark of :func:`scan_mark`.
        image: the explained image ``(C, *spatial)``, for the scan's shape and affine in its meta data, or None.
        errors: the standard errors of the maps, in their shape and unit; None if there are none.

    Returns:
        dictionaries with the keys of :data:`COLUMNS`. Positions are in scanner mm. ``score`` is a probability where the
        map is of its log-odds; ``quantity`` and ``unit`` are of the map. ``verdict`` is a sentence if nothing matters
        or the map may be chance. ``images`` counts the masks and the unperturbed image, ``""`` for a method without
        masks; ``forwards`` counts the work of this run. ``noise`` and ``fill_leaves`` are ``""`` where
        they are not known, and ``peak_in_label`` without a label, or with one that is empty or cannot be read.
    """
    rows = []
    count = len(explanation.explained)
    chances, leaves = (
        [""] * count if each is None else each.repeat_interleave(count // len(each)).tolist()
        for each in (explanation.noise, explanation.fill_leaves)
    )
    errors_of = [None] * count if errors is None else errors.numpy(force=True)
    verdicts = map(Legend.verdict, legends_of(explanation, maps), maps, errors_of)
    each = zip(explanation.explained, explanation.quantities, maps, chances, verdicts, leaves, strict=True)
    for (label_index, channel, score), quantity, saliency, chance, verdict, left in each:
        peak = peak_voxel(saliency)
        # The voxels of a 2D scan have z = 0 in its affine.
        mm = (affine @ [*peak, *[0] * (3 - len(peak)), 1])[:3]
        rows.append(
            {
                "case": case,
                "prediction": "",
                "probability": "",
                "class": label_index,
                "channel": "" if channel is None else channel,
                "score": float(quantity.reported(score)),
                "quantity": quantity.words,
                "unit": quantity.unit,
                **dict(zip(("peak_x_mm", "peak_y_mm", "peak_z_mm"), mm.round(2).tolist(), strict=True)),
                "peak_saliency": float(saliency[peak]),
                "lowest_saliency": float(np.nanmin(saliency)),
                "noise": chance,
                "verdict": verdict,
                "peak_in_label": _in_label(case, mm, label, image),
                "fill_leaves": left if isinstance(left, str) else round(left, 4),
                "images": len(explanation.ids) + 1 if len(explanation.ids) else "",
                "forwards": explanation.num_forwards,
                "predictions": round(explanation.num_forwards / explanation.per_prediction, 3),
                "stopped": explanation.stopped,
                "seconds": round(seconds, 3),
                "settings": settings,
                "scan": scan,
            }
            | explanation.target.describe()
        )
    return rows


def _in_label(case: str, mm: np.ndarray, path: Any, image: torch.Tensor | None) -> bool | str:
    """Whether a place lies in a label. A label that cannot be read must not cost a finished map its row."""
    if not isinstance(path, (str, Path)) or not str(path):
        return ""
    try:
        values, affine = load_label(path, image)
        voxel = np.rint(nib.affines.apply_affine(np.linalg.inv(affine), mm)).astype(int)
    except Exception as error:
        logger.warning("case %s: its label %s cannot be used, so `peak_in_label` is empty: %s", case, path, error)
        return ""
    # A label that was resampled may be NaN outside of what was scanned.
    inside = ((values != 0) & (values == values)).any(axis=0)
    if not inside.any():
        return ""
    return bool(all(0 <= v < n for v, n in zip(voxel, inside.shape, strict=True)) and inside[tuple(voxel)])


def figures(rows: Sequence[dict[str, Any]], failures: int = 0) -> dict[str, float]:
    """The figures of a cohort, of rows made by :func:`summarize` or read from the file.

    Returns:
        ``cases``, ``failures``; the sums ``forwards`` and ``seconds``; where there are such rows, the means
        ``mean_score``, ``mean_peak_saliency`` (of maps in one unit) and ``peak_in_label`` in [0, 1], and the count
        ``maps_of_noise``.
    """
    # All rows of a case have the same forwards and seconds.
    by_case = {row["case"]: row for row in rows}
    found: dict[str, float] = {"cases": len(by_case), "failures": failures}
    for name in ("forwards", "seconds"):
        found[name] = float(np.nansum([float(row[name]) for row in by_case.values()]))
    means: dict[str, list[float]] = {
        "mean_score": [float(row["score"]) for row in rows],
        "mean_peak_saliency": [float(row["peak_saliency"]) for row in rows],
        "peak_in_label": [str(row["peak_in_label"]) == "True" for row in rows if str(row["peak_in_label"])],
    }
    if len({row.get("unit") for row in rows}) > 1:  # probabilities and log-odds have no mean
        del means["mean_peak_saliency"]
    found |= {name: float(np.mean(values)) for name, values in means.items() if values}
    noise = sum(map(is_noise, rows))
    return found | ({"maps_of_noise": noise} if noise else {})


# What made the rows. --------------------------------------------------------------------------------------------------


def described(
    inferer: PerturbationInferer, network: Callable[..., Any], network_id: str | None = None, loader: Any = None
) -> dict[str, str]:
    """Describe what decides a map besides the image: values in words by their place, such as ``masks.seed``."""
    found: dict[str, str] = {}
    for name in ("masks", "fill", "target", "estimator", "inferer", "inputs", "output", "autocast"):
        _describe(getattr(inferer, name), name, found)
    found |= {f"network.{name}": str(value) for name, value in runtime_settings(network).items()}
    network = plain_network(network)
    found["network"] = f"{type(network).__name__} {(network_fingerprint(network, network_id) or 'unknown')[:8]}"
    dataset = getattr(loader, "dataset", None)
    while dataset is not None and getattr(dataset, "transform", None) is None:
        dataset = getattr(dataset, "dataset", None)
    _describe(getattr(dataset, "transform", None), "preprocessing", found)
    return found


def _describe(value: Any, name: str, found: dict[str, str], depth: int = 0) -> None:
    """Add the words for a value, and for what it holds."""
    words = type(value).__qualname__
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, _PLAIN):
        words = str(value)
    elif isinstance(value, torch.Tensor | np.ndarray):
        words += f" {tuple(value.shape)} {fingerprint(value)[:8]}"
    elif isinstance(value, list | tuple | Mapping):
        words = f"{len(value)} values"
        inside = value.items() if isinstance(value, Mapping) else enumerate(value)
    elif hasattr(value, "__qualname__"):
        words = f"{value.__module__}.{value.__qualname__}"
    elif not isinstance(value, torch.nn.Module):
        attributes = sorted(getattr(value, "__dict__", {}).items())
        inside = [each for each in attributes if not each[0].startswith("_") and each[0] not in _NO_MATTER]
    found[name] = words
    for key, each in [*inside][:_MOST] if depth < _DEEPEST else ():
        _describe(each, f"{name}.{key}", found, depth + 1)


def note_settings(table: Summary, description: Mapping[str, str]) -> str:
    """Mark the rows of a run by its settings (:func:`described`), and warn of rows with another mark.

    A file next to the table, such as ``summary.settings.json``, gets the settings under the mark, and under
    ``runs`` the date, the command and the versions of the last run with this mark.
    """
    mark = sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]
    path = table.path.with_suffix(".settings.json")
    with locked(path.with_name(f".{path.name}.lock")):
        known = json.loads(path.read_text()) if path.exists() else {}
        known |= {mark: dict(description), "runs": known.get("runs", {}) | {mark: _this_run()}}
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(known, indent=1) + "\n")
    _warn(
        table,
        [row["case"] for row in table.read() if row["settings"] != mark],
        f"were explained with other settings (column `settings`, see {path.name}): this run replaces the rows of the "
        "cases that it explains",
    )
    return mark


def _this_run() -> dict[str, str]:
    versions = [f"{name} {version(name)}" for name in ("monai", "torch", "numpy", "nibabel")]
    return {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "versions": ", ".join([f"monai-saliency {__version__}", *versions, f"Python {platform.python_version()}"]),
    }


def warn_of_others(table: Summary, cases: Collection[str]) -> None:
    """Report rows of cases that a cohort does not have. They stay: another run may be writing them at the same time."""
    _warn(table, [row["case"] for row in table.read() if row["case"] not in cases], "are not of this cohort")


def _warn(table: Summary, cases: Sequence[str], words: str) -> None:
    if cases:
        logger.warning(
            "%s: %d cases (the first is %s) %s. Rows that stay count in the figures: choose another output folder to "
            "keep them apart",
            table.path,
            len(set(cases)),
            cases[0],
            words,
        )


def scan_mark(file: str | None) -> str:
    """Hash the content of a scan's files, any slice of a DICOM series standing for all; empty without such a file."""
    files: Any = file
    if file and format_of(file) is None and is_dicom(file):
        with suppress(OptionalImportError):  # a bundle may read it with another package
            files = [*map(str, series_files(file))]
    contents = sorted(content for _, content in input_files(files, checksum=True))
    return sha256("".join(contents).encode()).hexdigest()[:8] if any(contents) else ""
