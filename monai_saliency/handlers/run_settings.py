"""What made the rows of a summary: marks of their settings and scans, and the file of settings next to the table."""

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
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.utils import OptionalImportError

from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.runtime import plain_network, runtime_settings
from monai_saliency.storage.dicom import is_dicom, series_files
from monai_saliency.storage.files import locked, write_whole
from monai_saliency.storage.key import fingerprint, input_files
from monai_saliency.storage.scans import format_of
from monai_saliency.storage.tables import CaseTable
from monai_saliency.version import __version__

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, np.generic)
# How fast an inferer is, and where; the random state of a Compose.
_NO_MATTER = {"sw_batch_size", "progress", "cpu_thresh", "cache_roi_weight_map", "buffer_steps", "buffer_dim"}
_NO_MATTER |= {"device", "sw_device", "R", "log_stats"}
_DEEPEST, _MOST = 5, 20


def described(
    inferer: PerturbationInferer, network: Callable[..., Any], network_id: str | None = None, loader: Any = None
) -> dict[str, str]:
    """Describe what decides a map besides the image: values in words by their place, such as ``masks.seed``."""
    found: dict[str, str] = {}
    for name in ("masks", "fill", "target", "estimator", "inferer", "inputs", "output", "autocast"):
        _describe(getattr(inferer, name), name, found)
    if inferer.seed_network is not None:
        found["seed_network"] = str(inferer.seed_network)
    for name, value in runtime_settings(network).items():
        found[f"network.{name}"] = str(value)
    network = plain_network(network)
    weights = network_fingerprint(network, network_id) or "unknown"
    found["network"] = f"{type(network).__name__} {weights[:8]}"
    dataset = getattr(loader, "dataset", None)
    while dataset is not None and getattr(dataset, "transform", None) is None:
        dataset = getattr(dataset, "dataset", None)
    _describe(getattr(dataset, "transform", None), "preprocessing", found)
    return found


def _describe(value: Any, name: str, found: dict[str, str], depth: int = 0) -> None:
    """Add the words for a value, and for what it holds."""
    found[name] = _words(value)
    if depth < _DEEPEST:
        for key, part in islice(_parts(value), _MOST):
            _describe(part, f"{name}.{key}", found, depth + 1)


def _words(value: Any) -> str:
    """A plain value or a function as it is, and of anything else what it is."""
    kind = type(value).__qualname__
    if isinstance(value, _PLAIN):
        return str(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{kind} {tuple(value.shape)} {fingerprint(value)[:8]}"
    if isinstance(value, list | tuple | Mapping):
        return f"{len(value)} values"
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else kind


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a container or an object holds, by its keys, places or attributes that decide a map."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, (*_PLAIN, torch.Tensor, np.ndarray, torch.nn.Module)) or hasattr(value, "__qualname__"):
        return ()
    parts = []
    for name, part in sorted(getattr(value, "__dict__", {}).items()):
        if not name.startswith("_") and name not in _NO_MATTER:
            parts.append((name, part))
    return parts


def note_settings(table: CaseTable, description: Mapping[str, str]) -> str:
    """Mark the rows of a run by its settings (:func:`described`), and warn of rows with another mark.

    A file next to the table, such as ``summary.settings.json``, gets the settings under the mark, and under
    ``runs`` the date, the command and the versions of the last run with this mark.
    """
    mark = sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]
    path = table.path.with_suffix(".settings.json")
    with locked(path.with_name(f".{path.name}.lock")):
        known = json.loads(path.read_text()) if path.exists() else {}
        known |= {mark: dict(description), "runs": known.get("runs", {}) | {mark: _this_run()}}
        write_whole(path, json.dumps(known, indent=1) + "\n")
    others = [row["case"] for row in table.read() if row["settings"] != mark]
    words = (
        f"were explained with other settings (column `settings`, see {path.name}): this run replaces the rows of the"
    )
    _warn(table, others, f"{words} cases that it explains")
    return mark


def _this_run() -> dict[str, str]:
    versions = [f"monai-saliency {__version__}"]
    versions += [f"{name} {version(name)}" for name in ("monai", "torch", "numpy", "nibabel")]
    versions.append(f"Python {platform.python_version()}")
    return {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "versions": ", ".join(versions),
    }


def warn_of_others(table: CaseTable, cases: Collection[str]) -> None:
    """Report rows of cases that a cohort does not have. They stay: another run may be writing them at the same time."""
    _warn(table, [row["case"] for row in table.read() if row["case"] not in cases], "are not of this cohort")


def _warn(table: CaseTable, cases: Sequence[str], words: str) -> None:
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
            files = [str(path) for path in series_files(file)]
    hashes = sorted(content for _, content in input_files(files, checksum=True))
    if not any(hashes):
        return ""
    return sha256("".join(hashes).encode()).hexdigest()[:8]
