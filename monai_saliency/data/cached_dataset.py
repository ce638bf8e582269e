"""Preprocessing that is computed once for each scan, and cached in memory, on disk, in LMDB or in a moving window.

Reading an entry never runs code, whoever wrote it, but its voxels are used as they are. So share a folder only with
people who may also replace your scans.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from monai.data import MetaTensor, get_track_meta
from monai.transforms import Compose, Transform
from monai.transforms.compose import execute_compose
from monai.transforms.traits import RandomizableTrait, ThreadUnsafe
from monai.transforms.utils import reset_ops_id

from monai_saliency.data.cohort import CohortDataset
from monai_saliency.storage.cache import (
    Backend,
    DiskBackend,
    EntryError,
    LMDBBackend,
    MemoryBackend,
    decode,
    encode,
)
from monai_saliency.storage.key import Unfingerprintable, fingerprint, input_files, library_versions
from monai_saliency.utils.arguments import check_option, flag, instance, whole_numbers
from monai_saliency.utils.precision import chosen_arithmetic

__all__ = ["CachedDataset", "ItemKey", "choose_backend", "cohort_dataset", "is_random", "reads_differ"]


class ItemKey(NamedTuple):
    """Identifies a result of a case in a cache: a hash of all that decides it, and the case's files."""

    digest: str
    files: tuple[str, ...]

    def without_names(self, item: Any) -> Any:
        return _renamed(item, {file: f"\0file {number}" for number, file in enumerate(self.files)})

    def with_names(self, item: Any) -> Any:
        return _renamed(item, {f"\0file {number}": file for number, file in enumerate(self.files)})


# Random transforms keep what they have drawn in their attributes, so one thread at a time draws. No fork finds it
# held.
_drawing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


def cohort_dataset(
    data: Sequence[dict[str, Any]],
    transform: Sequence[Callable[[Any], Any]] | Callable[[Any], Any] | None,
    cache: str = "memory",
    cache_dir: str | Path | None = None,
    checksum: bool = False,
    window: int = 32,
    map_size: int = 1 << 30,
) -> CachedDataset:
    """The preprocessed scans of a cohort, with a cache.

    Args:
        data: the cases, as returned by :func:`monai_saliency.data.cohort.find_cases`.
        transform: the preprocessing. :class:`CachedDataset` describes which part of it is cached.
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
        map_size: the first size of the LMDB database in bytes. It grows as needed.

    Raises:
        ValueError: when there is no such cache, or an argument is missing or out of its range.

    Example::

        >>> import torch
        >>> from monai.transforms import ScaleIntensityd
        >>> cases = [{"case": "a", "image": torch.tensor([[1.0, 3.0]])}]
        >>> cohort_dataset(cases, [ScaleIntensityd("image")], cache="memory")[0]["image"].tolist()
        [[0.0, 1.0]]
    """
    return CachedDataset(data, transform, choose_backend(cache, cache_dir, window, map_size), checksum)


def choose_backend(
    cache: str, cache_dir: str | Path | None, window: int, map_size: int, entries: int = 1
) -> Backend | None:
    """The backend of a cache with ``entries`` entries a scan. Other arguments and errors: :func:`cohort_dataset`."""
    whole_numbers("window", window, 1)
    whole_numbers("map_size", map_size, 1)
    if cache in {"disk", "lmdb"} and cache_dir is None:
        raise ValueError(f"cache {cache!r} needs `cache_dir`, a folder to keep the preprocessed scans in")
    folder = Path(cache_dir) if cache_dir is not None else None
    backends: dict[str, Callable[[], Backend | None]] = {
        "none": lambda: None,
        "memory": MemoryBackend,
        "disk": lambda: DiskBackend(folder or ""),
        "lmdb": lambda: LMDBBackend((folder or Path()) / "cache.lmdb", map_size),
        "window": lambda: MemoryBackend(window * entries, DiskBackend(folder) if folder else None),
    }
    return check_option("cache", cache, backends)()


class CachedDataset(CohortDataset):
    """A cohort whose deterministic preprocessing is cached.

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
        data: the cases, as returned by :func:`monai_saliency.data.cohort.find_cases`.
        transform: the preprocessing.
        backend: where the bytes of items are kept. None caches nothing.
        checksum: identify a scan's files by their content, which each process reads once. Otherwise by path, size and
            modification time.

    Raises:
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
        transform: Sequence[Callable[[Any], Any]] | Callable[[Any], Any] | None,
        backend: Backend | None = None,
        checksum: bool = False,
    ) -> None:
        super().__init__(data, transform)  # type: ignore[arg-type]
        self.backend = instance("backend", backend, Backend, "a backend such as MemoryBackend()", none=True)
        self.checksum = flag("checksum", checksum)
        self._warned: set[str] = set()
        self._num_cached = self._num_prepared = self._count_cached(self._steps())

    def _steps(self) -> tuple[Any, ...]:
        """The transforms, with those inside of nested ``Compose`` objects."""
        # Not Compose.flatten, which sets new seeds in random transforms.
        return tuple(_flat(self.transform))

    def _count_cached(self, steps: Sequence[Any]) -> int:
        """How many transforms are cached. Warns if a deterministic transform cannot be."""
        for number, step in enumerate(steps):
            if is_random(step):
                return number
            reason = None if isinstance(step, Transform) else "it is not a monai Transform, so it may be random"
            try:
                fingerprint([step, _settings(self.transform)])
            except Unfingerprintable as error:
                reason = f"it cannot be identified: {error}"
            if reason and self.backend is not None:
                name = getattr(step, "__qualname__", type(step).__qualname__)
                self._warn(
                    "transform",
                    f"transform {number + 1} of {len(steps)}, {name}, is not cached, nor are those after it: {reason}. "
                    "Use monai transforms, and named functions of a module",
                )
            if reason:
                return number
        return len(steps)

    def read(self, index: int) -> Any:
        return self._finish(self._prepared(self.data[index]), self._steps()[self._num_prepared :])

    def _finish(self, item: Any, steps: Sequence[Any]) -> Any:
        """Run the transforms that are not cached."""
        if not any(isinstance(step, ThreadUnsafe) for step in steps):
            return self._run(item, steps)
        with _drawing:
            return self._run(item, steps)

    def _run(self, item: Any, steps: Sequence[Any], threading: bool = False) -> Any:
        outer = self.transform
        lazy, overrides = outer.lazy, outer.overrides
        return execute_compose(
            item, steps, outer.map_items, outer.unpack_items, lazy=lazy, overrides=overrides, threading=threading
        )

    def _prepared(self, case: Any) -> Any:
        """The item after the first ``_num_prepared`` transforms."""
        return self._preprocessed(case, self._key_of(case) if self._num_cached else None)

    def _preprocessed(self, case: Any, key: ItemKey | None) -> Any:
        """The item after the first ``_num_cached`` transforms."""
        return self._cached("preprocessed scans", key, lambda: self._compute(case))

    def _key_of(self, case: Any) -> ItemKey | None:
        """A hash of all that decides a preprocessed case. None without a cache, or when it cannot be identified."""
        if self.backend is None:
            return None
        # At each read, so that a changed file or transform is noticed.
        steps = [self._steps()[: self._num_cached], _settings(self.transform)] if self._num_cached else None
        outside = [get_track_meta(), torch.get_default_dtype(), torch.get_default_device().type, chosen_arithmetic()]
        try:
            files = input_files(case, self.checksum)
            digest = fingerprint([library_versions(), fingerprint(steps, files=True), case, files, outside])
            return ItemKey(digest, tuple(file for file, _ in files))
        except Unfingerprintable as error:
            self._warn("case", f"some cases are not cached, since they cannot be identified: {error}")
            return None

    def _compute(self, case: Any) -> Any:
        item = self._run(deepcopy(case), self._steps()[: self._num_cached], threading=True)
        reset_ops_id(item)  # a memory address, with which Invertd would refuse an item of another process
        return item

    def _cached(self, what: str, key: ItemKey | None, compute: Callable[[], Any]) -> Any:
        """A result from the cache, or from ``compute``. Warnings call it ``what``, in the plural."""
        if self.backend is None or key is None:
            return compute()
        try:
            data = self.backend.get(key.digest)
            if data is not None:
                return key.with_names(decode(data, key.digest))
        except OSError as error:
            self._refused(what, "read", error)
        except EntryError as error:
            self._warn("damaged", f"entry {key.digest} of the {what} is damaged, and is computed again: {error}")
        return self._store(self.backend, key, what, compute())

    def _store(self, backend: Backend, key: ItemKey, what: str, item: Any) -> Any:
        """Store a result, and return it as all later reads will."""
        try:
            data = encode(key.without_names(item), key.digest)
            item = decode(data, key.digest)
            backend.put(key.digest, data)
        except EntryError as error:
            self._warn("stored", f"some {what} cannot be stored, and are computed at each read: {error}")
        except OSError as error:
            self._refused(what, "written", error)
        return key.with_names(item)

    def _refused(self, what: str, action: str, error: OSError) -> None:
        text = f"{what} cannot be {action} in the cache, and are computed instead: {error}"
        self._warn(f"errno {error.errno}", f"{text}. Make room, mend the permissions, or choose another `cache_dir`")

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, stacklevel=3)


def is_random(step: Any) -> bool:
    """Whether a transform is random, or a ``Compose`` with a random step."""
    if type(step) is Compose:
        return any(is_random(part) for part in step.transforms)
    return isinstance(step, RandomizableTrait)


def reads_differ(dataset: Any) -> bool:
    """Whether a dataset, or one that it wraps, applies a random transform."""
    while dataset is not None:
        if is_random(getattr(dataset, "transform", None)):
            return True
        dataset = getattr(dataset, "dataset", None)
    return False


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A value whose texts are replaced, in meta data too (in place)."""
    if isinstance(value, str):
        return names.get(value, value)
    if type(value) is dict:
        return {key: _renamed(content, names) for key, content in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_renamed(content, names) for content in value)
    if isinstance(value, MetaTensor):
        value.meta = _renamed(value.meta, names)
    return value


def _flat(transform: Compose) -> Iterator[Any]:
    for step in transform.transforms:
        if type(step) is Compose and _settings(step) == _settings(transform):
            yield from _flat(step)
        else:
            yield step


def _settings(transform: Compose) -> list[Any]:
    return [transform.map_items, transform.unpack_items, transform.lazy, transform.overrides]
