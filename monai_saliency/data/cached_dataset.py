"""Preprocessing that is computed once for each scan, and cached in memory, on disk or in LMDB.

Reading an entry never runs code, whoever wrote it, but its voxels are used as they are. So share a folder only with
people who may also replace your scans.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from monai.data import Dataset, MetaTensor, get_track_meta
from monai.transforms import Compose, Transform
from monai.transforms.compose import execute_compose
from monai.transforms.traits import RandomizableTrait, ThreadUnsafe
from monai.transforms.utils import reset_ops_id

from monai_saliency.data.cohort import loading_error
from monai_saliency.storage.cache import (
    Backend,
    DiskBackend,
    EntryError,
    LMDBBackend,
    MemoryBackend,
    decode,
    encode,
)
from monai_saliency.storage.key import Unfingerprintable, fingerprint, input_files, library_versions, paths_of
from monai_saliency.utils.arguments import a_path, check_option, flag, instance, whole_number
from monai_saliency.utils.precision import chosen_arithmetic

# Random transforms keep what they have drawn in their attributes, so one thread at a time draws.
_drawing = threading.RLock()


class CachedDataset(Dataset):
    """The preprocessed scans of a cohort, with a cache, and with errors that name the case.

    The transforms before the first random one are cached. A transform that is not a monai ``Transform``, or that cannot
    be identified (it holds a lambda or a local function), is not cached either, nor are those after it. A warning names
    it. Transforms that are not cached run at each read.

    Every read returns a copy with the same values, from a cold or a warm cache, in any process: MetaTensors with all
    meta data, so that ``Invertd`` works. Transforms may run on a GPU: tensors are kept in the host's memory or on disk,
    and come back on the current GPU, or on the CPU where the process cannot use one.

    An entry is used for the same case, the same files (see :func:`monai_saliency.storage.key.input_files`) and files
    that arguments of the transforms name, the same transforms with the same arguments
    (:func:`monai_saliency.storage.key.fingerprint`), the same versions of the packages, and the same autocast, TF32 and
    default device. This is compared at each read. If the cache cannot be read or written, or an item cannot be stored,
    the item is computed at each read, with a warning. Two threads or processes that read a scan for the first time may
    both compute it.

    Args:
        data: the cases, as returned by :func:`monai_saliency.data.find_cases`.
        transform: the preprocessing.
        cache: where preprocessed scans are kept:

            - ``"none"``: nowhere;
            - ``"memory"``: all scans in the memory of this process. Each worker process has its own cache;
            - ``"disk"``: one file for each scan in ``cache_dir``, which several machines may share. Files are never
              removed: delete the folder when it is too large;
            - ``"lmdb"``: an LMDB database in ``cache_dir``, which must not be on a network file system;
            - ``"window"``: the last ``window`` scans in memory, and all scans as files in ``cache_dir`` if it is given,
              for cohorts larger than memory.
        cache_dir: the folder of ``"disk"``, ``"lmdb"`` and ``"window"``.
        checksum: identify a scan's files by their content, which each process reads once. Otherwise by path, size and
            modification time.
        window: the number of scans in memory for ``"window"``, at least 1.

    Raises:
        ValueError: when the kind of cache is unknown, or an argument is missing or out of its range.
        CaseError: on reading a case that cannot be loaded. Other cases are not affected.

    Example::

        >>> import torch
        >>> from monai.transforms import ScaleIntensityd
        >>> dataset = CachedDataset([{"case": "a", "image": torch.tensor([[1.0, 3.0]])}], [ScaleIntensityd("image")])
        >>> dataset[0]["image"].tolist()
        [[0.0, 1.0]]
    """

    # Not MONAI's cached datasets: PersistentDataset and LMDBDataset return plain tensors from a warm cache, do not
    # notice changed transforms and files, and unpickle. CacheDataset fails for all scans when one fails, and returns
    # the cached object itself. A pass of SmartCacheDataset is a part of the cohort, and hangs at a broken scan.

    def __init__(
        self,
        data: Sequence[dict[str, Any]],
        transform: Sequence[Callable[[Any], Any]] | Callable[[Any], Any] | None = None,
        cache: str = "memory",
        cache_dir: str | Path | None = None,
        checksum: bool = False,
        window: int = 32,
    ) -> None:
        if not (isinstance(data, Sequence) and all(isinstance(case, Mapping) for case in data)):
            raise ValueError(f"`data` must be a list of cases such as find_cases(folder), got {data!r:.200}")
        if not isinstance(transform, (list, tuple)):
            words = "the preprocessing, such as Compose([LoadImaged(...), ...]), or a list of transforms"
            instance("transform", transform, (), words, function=True, none=True)
        super().__init__(data, transform)
        self.backend = _backend(cache, cache_dir, whole_number("window", window, 1))
        self.checksum = flag("checksum", checksum)
        self._warned: set[str] = set()
        self._num_cached = self._num_prepared = self._count_cached()

    @property
    def _steps(self) -> Sequence[Any]:
        """The transforms, in order."""
        return self.transform.transforms

    def _count_cached(self) -> int:
        """How many transforms are cached. Warns if a deterministic transform cannot be."""
        for number, step in enumerate(self._steps):
            if is_random(step):
                return number
            reason = "" if isinstance(step, Transform) else "it is not a monai Transform, so it may be random"
            try:
                fingerprint(self._how([step]))
            except Unfingerprintable as error:
                reason = f"it cannot be identified: {error}"
            if reason:
                name = getattr(step, "__qualname__", type(step).__qualname__)
                self._warn(
                    "transform",
                    f"transform {number + 1} of {len(self._steps)}, {name}, is not cached, nor are those after it: "
                    f"{reason}. Use monai transforms, and named functions of a module",
                )
                return number
        return len(self._steps)

    def _how(self, steps: Sequence[Any]) -> list[Any]:
        """All that decides what some transforms make of a case."""
        outer = self.transform
        return [[*steps], outer.map_items, outer.unpack_items, outer.lazy, outer.overrides]

    def __getitem__(self, index: int | slice | Sequence[int]) -> Any:
        if not isinstance(index, SupportsIndex):
            return super().__getitem__(index)  # a part of the dataset
        case = self.data[index]
        try:
            return self._finish(self._prepared(case), self._steps[self._num_prepared :])
        except Exception as error:
            raise loading_error(error, case, index) from error

    def _finish(self, item: Any, steps: Sequence[Any]) -> Any:
        """Run the transforms that are not cached."""
        if not any(isinstance(step, ThreadUnsafe) for step in steps):
            return self._run(item, steps)
        with _drawing:
            return self._run(item, steps)

    def _run(self, item: Any, steps: Sequence[Any], threading: bool = False) -> Any:
        outer = self.transform
        settings: dict[str, Any] = {"lazy": outer.lazy, "overrides": outer.overrides, "threading": threading}
        return execute_compose(item, steps, outer.map_items, outer.unpack_items, **settings)

    def _prepared(self, case: Any) -> Any:
        """The item after the first ``_num_prepared`` transforms."""
        return self._preprocessed(case, self._key_of(case))

    def _preprocessed(self, case: Any, key: str | None) -> Any:
        """The item after the first ``_num_cached`` transforms."""
        if not self._num_cached:
            return self._compute(case)
        return self._cached("preprocessed scans", key, lambda: self._compute(case), case)

    def _key_of(self, case: Any) -> str | None:
        """A hash of all that decides a preprocessed case. None without a cache, or when it cannot be identified."""
        if self.backend is None:
            return None
        # At each read, so that a changed file or transform is noticed.
        outside = [get_track_meta(), torch.get_default_dtype(), torch.get_default_device().type, chosen_arithmetic()]
        try:
            how = fingerprint(self._how(self._steps[: self._num_cached]), files=True)
            return fingerprint([library_versions(), how, case, input_files(case, self.checksum), outside])
        except Unfingerprintable as error:
            self._warn("case", f"some cases are not cached, since they cannot be identified: {error}")
            return None

    def _compute(self, case: Any) -> Any:
        item = self._run(deepcopy(case), self._steps[: self._num_cached], threading=True)
        reset_ops_id(item)  # a memory address, with which Invertd would refuse an item of another process
        return item

    def _cached(self, what: str, key: str | None, compute: Callable[[], Any], case: Any) -> Any:
        """A result from the cache, or from ``compute``. Warnings call it ``what``, in the plural. Entries do not name
        the case's files, whose folders are often called after patients.
        """
        if self.backend is None or key is None:
            return compute()
        hidden, shown = {}, {}
        for number, file in enumerate(sorted(filter(os.path.exists, paths_of(case)), key=len, reverse=True)):
            mark = f"\0file {number}\0"
            hidden[file], shown[mark] = mark, file
        try:
            stored = self.backend.get(key)
            if stored is not None:
                return _renamed(decode(stored, key), shown)
        except (OSError, EntryError) as error:
            self._warn(type(error).__name__, f"some {what} cannot be read, and are computed again: {error}")
        item = compute()
        try:
            made = encode(_renamed(item, hidden), key)
            item = decode(made, key)  # as all later reads will give it
            self.backend.put(key, made)
        except (OSError, EntryError) as error:
            self._warn(type(error).__name__, f"some {what} cannot be stored, so are computed again: {error}")
        return _renamed(item, shown)

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned and self.backend is not None:
            self._warned.add(about)
            warnings.warn(text, stacklevel=3)


def _backend(cache: str, cache_dir: str | Path | None, window: int) -> Backend | None:
    """Where entries are kept; None keeps none."""
    check_option("cache", cache, ("none", "memory", "disk", "lmdb", "window"))
    if cache in {"disk", "lmdb"} and cache_dir is None:
        raise ValueError(f"cache {cache!r} needs `cache_dir`, a folder to keep the preprocessed scans in")
    if cache == "lmdb":
        return LMDBBackend(a_path("cache_dir", cache_dir) / "cache.lmdb")
    if cache == "memory":
        return MemoryBackend()
    on_disk = cache in {"disk", "window"} and cache_dir is not None
    files = DiskBackend(a_path("cache_dir", cache_dir)) if on_disk else None
    return MemoryBackend(window, files) if cache == "window" else files


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A value whose texts have other names in them, in meta data too (in place)."""
    if type(value) is str:
        for old, new in names.items():
            value = value.replace(old, new)
    elif type(value) is dict:
        return {key: _renamed(content, names) for key, content in value.items()}
    elif type(value) in (list, tuple):
        return type(value)(_renamed(content, names) for content in value)
    elif isinstance(value, MetaTensor):
        value.meta = _renamed(value.meta, names)
    return value


def is_random(step: Any) -> bool:
    """Whether a transform is random, or a ``Compose`` with a random step."""
    if type(step) is Compose:
        return any(is_random(part) for part in step.transforms)
    return isinstance(step, RandomizableTrait)
