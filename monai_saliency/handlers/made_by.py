"""What the rows of a table were made by: method, target and network in words, by which other settings are noticed."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
from monai_saliency.networks.identity import NetworkParts, network_fingerprint, own_attributes
from monai_saliency.networks.runtime import plain_network, runtime_settings
from monai_saliency.storage.dicom import is_dicom, series_files
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.storage.fingerprint import Unfingerprintable, fingerprint
from monai_saliency.storage.input_files import input_files
from monai_saliency.storage.tables import CaseTable

__all__ = ["MadeBy", "NetworkBefore", "described", "scan_mark", "warn_of_another_scan", "warn_of_others"]

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, np.generic)
# How fast an inferer is, and where.
_NO_MATTER = {"sw_batch_size", "progress", "cpu_thresh", "cache_roi_weight_map", "buffer_steps", "buffer_dim"}
_NO_MATTER |= {"device", "sw_device"}
_DEEPEST, _MOST, _SHOWN = 5, 20, 5


def described(
    inferer: PerturbationInferer,
    network: Callable[..., Any],
    network_id: str | None = None,
    loader: Any = None,
    before: NetworkBefore | None = None,
) -> dict[str, str]:
    """What decides a map besides the image: values in words by their place, such as ``masks.seed``.

    Args:
        inferer: explains images.
        network: the network.
        network_id: names the network where it is not a module.
        loader: the loader, whose dataset's transform is the preprocessing; None where there is none to describe.
        before: the network, noted before it ran. Default: as it is now. Attributes that have changed since, such as a
            counter of calls, are named and not compared.
    """
    found: dict[str, str] = {}
    for name in ("masks", "fill", "target", "estimator", "inferer", "inputs", "output", "autocast"):
        _describe(getattr(inferer, name), name, found)
    known, steady = (before or NetworkBefore(network, network_id)).state()
    found |= {f"network.{name}": str(value) for name, value in runtime_settings(network).items()}
    network = plain_network(network)
    found |= {"network": type(network).__name__, "weights": known[:8] if known else "unknown"}
    found |= _network_words(network, steady)
    _describe(_preprocessing(loader), "preprocessing", found)
    return found


class NetworkBefore:
    """What a network is before it runs, by which its rows are marked.

    Args:
        network: a module, or any other callable.
        network_id: names the network where it is not a module.
    """

    def __init__(self, network: Callable[..., Any], network_id: str | None = None) -> None:
        network = plain_network(network)  # how it is run has its own words
        self._network = network, network_id
        self._weights = self._weights_now()
        self._parts = NetworkParts(network, network_id)

    def _weights_now(self) -> str | None:
        try:
            return network_fingerprint(*self._network)
        except Unfingerprintable:
            return None

    def state(self) -> tuple[str | None, dict[str, str | None]]:
        """A hash of its weights, and of each other part, where it is what it was; None where it has changed since, or
        cannot be hashed. Rows of two states are told apart.
        """
        now = self._weights_now()
        return now if now == self._weights else None, self._parts.steady()


def _network_words(network: Any, steady: Mapping[str, str | None]) -> dict[str, str]:
    """The words for what a network is beside its weights. The first attributes are named, and a hash stands for all."""
    same = {name: known for name, known in steady.items() if known is not None}
    changing = sorted(steady.keys() - same.keys())
    found = {"network code and attributes": fingerprint(sorted(same.items()))[:8]} if steady else {}
    for name, value in [*own_attributes(network).items()][:_MOST]:
        if name in same:
            plain = isinstance(value, _PLAIN)
            found[f"network.{name}"] = str(value) if plain else f"{type(value).__qualname__} {same[name][:8]}"
    if changing:
        shown = ", ".join(changing[:_SHOWN]) + f" and {len(changing) - _SHOWN} more" * (len(changing) > _SHOWN)
        found["network, not compared"] = shown
        logger.info(
            "the network's %s changes as it runs, or cannot be identified: rows are not told apart by it", shown
        )
    return found


def _preprocessing(loader: Any) -> Any:
    """What the dataset of a loader, or the one that it wraps, applies."""
    dataset = getattr(loader, "dataset", None)
    while dataset is not None and getattr(dataset, "transform", None) is None:
        dataset = getattr(dataset, "dataset", None)
    return getattr(dataset, "transform", None)


def _describe(value: Any, name: str, found: dict[str, str], above: tuple[int, ...] = ()) -> None:
    """Add the words for a value, and for what it holds."""
    try:
        _add_words(value, name, found, above)
    except Exception:  # of somebody's own object, or of a tensor without values: a mark must not cost a map
        found[name] = type(value).__qualname__


def _add_words(value: Any, name: str, found: dict[str, str], above: tuple[int, ...]) -> None:
    if isinstance(value, _PLAIN):
        found[name] = str(value)
    elif isinstance(value, torch.device) or id(value) in above or len(above) == _DEEPEST:
        return
    elif isinstance(value, RandomizableTrait) and not isinstance(value, Compose):
        found[name] = type(value).__qualname__  # its attributes are what it drew last
    elif isinstance(value, set | frozenset):
        found[name] = str(sorted(map(str, value)))
    elif isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) <= _MOST:
        found[name] = str(value.tolist())
    elif isinstance(value, torch.Tensor | np.ndarray):
        try:
            found[name] = f"{type(value).__name__} {tuple(value.shape)} {fingerprint(value)[:8]}"
        except Unfingerprintable:
            found[name] = f"{type(value).__name__} {tuple(value.shape)}"
    elif isinstance(value, functools.partial):
        _describe([value.func, value.args, value.keywords], name, found, above)
    elif isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in [*items][:_MOST]:
            _describe(each, f"{name}.{key}", found, (*above, id(value)))
        found.setdefault(name, f"{len(value)} values")
    elif hasattr(value, "__qualname__"):
        found[name] = f"{value.__module__}.{value.__qualname__}"
    else:
        found[name] = type(value).__qualname__
        for key, each in sorted(getattr(value, "__dict__", {}).items()):
            if not key.startswith("_") and key not in _NO_MATTER and not isinstance(value, torch.nn.Module):
                _describe(each, f"{name}.{key}", found, (*above, id(value)))


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
    """Report rows of cases that a cohort does not have. They stay: a run beside this one may be writing them.

    Args:
        table: the table.
        cases: the names of the cohort's cases.
    """
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
    """Eight hexadecimal digits of what a scan's files hold, wherever they lie; empty where none is known.

    Args:
        file: the path of the scan: a file, any slice of a DICOM series, or a folder of slices.
    """
    if file and is_dicom(file):
        with suppress(OptionalImportError):  # a bundle may read it with another package
            contents = [content for _, content in input_files([*map(str, series_files(file))])]
            return sha256("".join(sorted(contents)).encode()).hexdigest()[:8]
    contents = [content for _, content in input_files(file)] if file else []
    return sha256("".join(contents).encode()).hexdigest()[:8] if any(contents) else ""


def warn_of_another_scan(table: CaseTable, case: str, scan: str) -> bool:
    """Report a row of a case that an earlier run has made of another scan, before it is replaced.

    Two cohorts of equal names in one output folder look alike otherwise, where the second run stops early.

    Args:
        table: has a column ``scan``.
        case: the name of the case.
        scan: the mark of the scan that is explained now.

    Returns:
        whether there is such a row.
    """
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
