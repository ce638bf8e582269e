"""Records the settings behind each row of a table, and reports rows of other settings, scans and cohorts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose
from monai.transforms.traits import RandomizableTrait
from monai.utils import OptionalImportError

from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.runtime import plain_network, runtime_settings
from monai_saliency.storage.dicom import is_dicom, series_files
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.storage.key import Unfingerprintable, fingerprint, input_files
from monai_saliency.storage.tables import CaseTable

__all__ = ["MadeBy", "described", "scan_mark", "warn_of_another_scan", "warn_of_others"]

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, np.generic, set, frozenset)
# How fast an inferer is, and where; the random state of a Compose.
_NO_MATTER = {"sw_batch_size", "progress", "cpu_thresh", "cache_roi_weight_map", "buffer_steps", "buffer_dim"}
_NO_MATTER |= {"device", "sw_device", "R", "log_stats"}
_DEEPEST, _MOST, _SHOWN = 5, 20, 5


def described(
    inferer: PerturbationInferer, network: Callable[..., Any], network_id: str | None = None, loader: Any = None
) -> dict[str, str]:
    """Describes what decides a map besides the image: values in words by their place, such as ``masks.seed``."""
    found: dict[str, str] = {}
    for name in ("masks", "fill", "target", "estimator", "inferer", "inputs", "output", "autocast"):
        _describe(getattr(inferer, name), name, found)
    found |= {f"network.{name}": str(value) for name, value in runtime_settings(network).items()}
    network = plain_network(network)
    found["network"] = f"{type(network).__name__} {(network_fingerprint(network, network_id) or 'unknown')[:8]}"
    _describe(_preprocessing(loader), "preprocessing", found)
    return found


def _preprocessing(loader: Any) -> Any:
    """The transform of a loader's dataset, or of the dataset inside it."""
    dataset = getattr(loader, "dataset", None)
    while dataset is not None and getattr(dataset, "transform", None) is None:
        dataset = getattr(dataset, "dataset", None)
    return getattr(dataset, "transform", None)


def _describe(value: Any, name: str, found: dict[str, str], depth: int = 0) -> None:
    """Add the words for a value, and for what it holds."""
    kind = type(value).__qualname__
    if isinstance(value, _PLAIN):
        found[name] = str(value)
    elif isinstance(value, torch.Tensor | np.ndarray):
        found[name] = f"{kind} {tuple(value.shape)} {_hash(value)}"
    elif isinstance(value, list | tuple | Mapping):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        found[name] = f"{len(value)} values"
        for key, each in [*items][:_MOST] if depth < _DEEPEST else ():
            _describe(each, f"{name}.{key}", found, depth + 1)
    elif hasattr(value, "__qualname__"):
        found[name] = f"{value.__module__}.{value.__qualname__}"
    elif not isinstance(value, torch.device):
        found[name] = kind
        # The attributes of a random transform are what it drew last.
        is_walked = depth < _DEEPEST and (type(value) is Compose or not isinstance(value, RandomizableTrait))
        for key, each in sorted(getattr(value, "__dict__", {}).items()) if is_walked else ():
            if not key.startswith("_") and key not in _NO_MATTER and not isinstance(value, torch.nn.Module):
                _describe(each, f"{name}.{key}", found, depth + 1)


def _hash(value: Any) -> str:
    try:
        return fingerprint(value)[:8]
    except Unfingerprintable:
        return "unknown"


class MadeBy:
    """Marks the rows of a table by the settings that made them, and reports rows of others.

    The mark is a short hash. A file beside the table, such as ``summary.settings.json``, says what it stands for.

    Args:
        table: has a column ``settings``.
        description: the settings of this run, see :func:`described`.

    Attributes:
        mark: eight hexadecimal digits.
    """

    def __init__(self, table: CaseTable, description: Mapping[str, str]) -> None:
        self.table = table
        self.description = dict(description)
        self.mark = sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()[:8]
        self.path = table.path.with_suffix(".settings.json")

    def note(self) -> None:
        """Write down what the mark stands for, and warn of rows with another one."""
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            known = self._known()
            if known.get(self.mark) != self.description:
                with atomic_path(self.path) as temporary:
                    temporary.write_text(json.dumps(known | {self.mark: self.description}, indent=1) + "\n")
        self.warn("those of cases that this run explains are replaced")

    def warn(self, what: str) -> None:
        """Warn of rows that other settings have made.

        Args:
            what: what becomes of them, in words.
        """
        others = {row["case"]: row["settings"] for row in self.table.read() if row["settings"] != self.mark}
        if not others:
            return
        case, mark = next(iter(others.items()))
        logger.warning(
            "%s holds %d case%s explained with other settings (%s; the first is %s): %s. The column `settings` tells "
            "them apart, and %s says what its values mean",
            self.table.path,
            len(others),
            "s" * (len(others) > 1),
            self._difference(self._known().get(mark)),
            case,
            what,
            self.path.name,
        )

    def _known(self) -> dict[str, dict[str, str]]:
        try:
            known = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _difference(self, other: dict[str, str] | None) -> str:
        """Where other settings differ from those of this run, in words."""
        if other is None:
            return "which are not known"
        names = [*self.description, *(name for name in other if name not in self.description)]
        found = [
            f"{name} {other.get(name, 'nothing')} there, {self.description.get(name, 'nothing')} here"
            for name in names
            if other.get(name) != self.description.get(name)
        ]
        return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def warn_of_others(table: CaseTable, cases: Collection[str]) -> None:
    """Report rows of cases that a cohort does not have. They stay: a run beside this one may be writing them."""
    known = set(cases)
    others = list(dict.fromkeys(row["case"] for row in table.read() if row["case"] not in known))
    if others:
        logger.warning(
            "%s holds %d case%s that this cohort does not have (the first is %s). They stay, and the figures count "
            "them: choose another output folder to keep cohorts apart",
            table.path,
            len(others),
            "s" * (len(others) > 1),
            others[0],
        )


def scan_mark(file: str | None) -> str:
    """Hashes the content of a scan's files, wherever they are.

    Args:
        file: the path of the scan: a file, any slice of a DICOM series, or a folder of slices.

    Returns:
        eight hexadecimal digits; empty where there is no such file.
    """
    files: Any = file
    if file and is_dicom(file):
        with suppress(OptionalImportError):  # a bundle may read it with another package
            files = [*map(str, series_files(file))]
    contents = sorted(content for _, content in input_files(files, checksum=True))
    return sha256("".join(contents).encode()).hexdigest()[:8] if any(contents) else ""


def warn_of_another_scan(table: CaseTable, case: str, scan: str) -> bool:
    """Report a row of a case that an earlier run has made of another scan, before it is replaced."""
    rows = table.read()
    before = next((row["scan"] for row in rows if row["case"] == case and row["scan"]), scan)
    if not scan or before == scan:
        return False
    logger.warning(
        "%s holds a row of case %s that was made of another scan (`scan` %s there, %s here), and is replaced now. Rows "
        "and maps of cases that this run does not reach may be of another cohort of the same names: choose another "
        "output folder to keep cohorts apart",
        table.path,
        case,
        before,
        scan,
    )
    return True
