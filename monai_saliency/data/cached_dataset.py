"""Preprocessing computed once a scan, and served from memory, disk, LMDB or a moving window.

Where a cache may live:

- ``memory``: in each process; with process workers each has its own, which ends with it.
- ``disk``: any folder, also one that several machines share; entries are never removed, so remove the folder when it
  has grown.
- ``lmdb``: a disk of the machine itself, on a cluster the node-local scratch. LMDB maps its file into memory, which
  network file systems do not keep coherent.

Reading an entry runs no code, whoever wrote it, but its voxels are believed: share a folder with those whom you would
let replace a scan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from monai.data import Dataset, MetaTensor, get_track_meta
from monai.transforms import Compose, Transform
from monai.transforms.compose import execute_compose
from monai.transforms.traits import RandomizableTrait, ThreadUnsafe
from monai.utils import TraceKeys

from monai_saliency.data.cohort import CohortDataset
from monai_saliency.storage.backends import Backend, DiskBackend, LMDBBackend, MemoryBackend, guard
from monai_saliency.storage.fingerprint import Unfingerprintable, fingerprint, input_files, library_versions
from monai_saliency.storage.locks import Locks
from monai_saliency.storage.serialization import DamagedEntry, NotStorable, decode, encode
from monai_saliency.utils.arguments import check_option, whole_numbers

__all__ = ["CachedDataset", "choose_backend", "cohort_dataset"]

_MISSING = object()


def cohort_dataset(
    data: Sequence[dict[str, Any]],
    transform: Sequence[Callable[[Any], Any]] | Callable[[Any], Any] | None,
    cache: str = "memory",
    cache_dir: str | Path | None = None,
    checksum: bool = False,
    window: int = 32,
    map_size: int = 1 << 30,
) -> CachedDataset:
    """The preprocessed scans of a cohort, kept where ``cache`` says.

    Args:
        data: cases, as :func:`monai_saliency.data.cohort.find_cases` gives them.
        transform: the preprocessing; see :class:`CachedDataset` for which part of it is cached.
        cache: ``"none"``, or one of

            - ``"memory"``: every scan in this process's memory;
            - ``"disk"``: a file a scan in ``cache_dir``;
            - ``"lmdb"``: an LMDB database in ``cache_dir``, which must not lie on a network file system;
            - ``"window"``: the last ``window`` scans in memory, in front of files in ``cache_dir`` if that is given,
              for cohorts larger than memory. Unlike MONAI's ``SmartCacheDataset``, whose one pass is a part of the
              cohort and hangs at a broken scan, it reads every case once a pass, and a broken one fails alone.
        cache_dir: see above; not used by the others.
        checksum: tell scans by their content rather than by size and modification time.
        window: see above.
        map_size: bytes that the LMDB database may hold at first; it grows as needed.

    Raises:
        ValueError: for another name, a missing ``cache_dir`` or a window below 1.
    """
    return CachedDataset(data, transform, choose_backend(cache, cache_dir, window, map_size), checksum)


def choose_backend(
    cache: str, cache_dir: str | Path | None, window: int, map_size: int, entries: int = 1
) -> Backend | None:
    """The backend that a config names; for all but ``entries``, how many a scan has, see :func:`cohort_dataset`."""
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


class _CachedItems(Dataset):
    """Items whose deterministic preprocessing goes through a cache. See :class:`CachedDataset`."""

    # Not MONAI's cached datasets: PersistentDataset and LMDBDataset return plain tensors from a warm cache, do not see
    # changed transforms and files, and unpickle; CacheDataset fails as a whole with one scan, and hands out the cached
    # object itself; for SmartCacheDataset see `cohort_dataset`.

    backend: Backend | None = None
    checksum = False

    def __init__(self, data: Sequence[Any], transform: Any) -> None:
        super().__init__(data, transform)
        self._warned: set[str] = set()
        self._locks = Locks()
        steps = self._steps()
        self._num_cached = self._num_prepared = self._count_cached(steps)
        # Where nothing is cached, nothing need be told.
        settings = [steps[: self._num_cached], _settings(self.transform)] if self._num_cached else None
        self._settings = [library_versions(), fingerprint(settings)]

    def _steps(self) -> tuple[Any, ...]:
        """The transforms with nested ``Compose`` objects laid out."""
        # Not Compose.flatten, which seeds all random transforms anew.
        return tuple(_flat(self.transform))

    def _count_cached(self, steps: Sequence[Any]) -> int:
        """How many transforms to cache, with a warning where one of them cannot be."""
        for number, step in enumerate(steps):
            if isinstance(step, RandomizableTrait) and type(step) is not Compose:
                return number
            reason = None if isinstance(step, Transform) else "it is no monai Transform, so it may be random"
            try:
                fingerprint([step, _settings(self.transform)])
            except Unfingerprintable as error:
                reason = f"what it does cannot be told: {error}"
            if reason and self.backend is not None:
                name = getattr(step, "__qualname__", type(step).__qualname__)
                self._warn(
                    "transform",
                    f"transform {number + 1} of {len(steps)}, {name}, is not cached, nor what follows it: {reason}. "
                    "Use monai transforms, and named functions of a module",
                )
            if reason:
                return number
        return len(steps)

    def _transform(self, index: int) -> Any:
        return self._finish(self._prepared(self.data[index]), self._steps()[self._num_prepared :])

    def _finish(self, item: Any, steps: Sequence[Any]) -> Any:
        """Run transforms that are not cached."""
        if not any(isinstance(step, ThreadUnsafe) for step in steps):
            return self._run(item, steps)
        # Random transforms keep their draw in themselves.
        with self._locks.only_one("random"):
            return self._run(item, steps)

    def _run(self, item: Any, steps: Sequence[Any], threading: bool = False) -> Any:
        outer = self.transform
        return execute_compose(
            item,
            steps,
            map_items=outer.map_items,
            unpack_items=outer.unpack_items,
            lazy=outer.lazy,
            overrides=outer.overrides,
            threading=threading,
            log_stats=outer.log_stats,
        )

    def _prepared(self, case: Any) -> Any:
        """The item after its first ``_num_prepared`` transforms."""
        return self._preprocessed(case, self._case_key(case) if self._num_cached else None)

    def _preprocessed(self, case: Any, key: str | None) -> Any:
        """The item after its first ``_num_cached`` transforms."""
        return self._cached("preprocessed scans", key, lambda: self._compute(case), lambda: self._key(case) == key)

    def _case_key(self, case: Any) -> str | None:
        """The case's key; None where it cannot be told, or there is no cache."""
        if self.backend is None:
            return None
        try:
            return self._key(case)
        except Unfingerprintable as error:
            self._warn("case", f"cases are not cached that hold what cannot be told: {error}")
            return None

    def _cached(self, what: str, key: str | None, compute: Callable[[], Any], is_current: Callable[[], bool]) -> Any:
        """What ``compute`` gives, from the cache where it is there.

        Args:
            what: its name in warnings, in the plural.
            key: it is not cached when None.
            compute: is called by one thread at a time for each key.
            is_current: whether, after computing, the key is still what it was, so that the result belongs to it.
        """
        if self.backend is None or key is None:
            return compute()
        found = self._stored(self.backend, key, what)
        if found is not _MISSING:
            return found
        with self._locks.only_one(key):
            found = self._stored(self.backend, key, what)
            if found is not _MISSING:
                return found
            return self._store(self.backend, key, what, compute(), is_current)

    def _key(self, case: Any) -> str:
        outside = [get_track_meta(), torch.get_default_dtype()]
        return fingerprint([self._settings, case, input_files(case, self.checksum), outside])

    def _compute(self, case: Any) -> Any:
        item = self._run(deepcopy(case), self._steps()[: self._num_cached], threading=True)
        _forget_ids(item)
        return item

    def _store(self, backend: Backend, key: str, what: str, item: Any, is_current: Callable[[], bool]) -> Any:
        try:
            data = encode(item, key)
        except NotStorable as error:
            self._warn("item", f"{what} are not cached, as they hold what cannot be stored: {error}")
            return item
        # A scan that was replaced meanwhile may have been read half old, half new.
        if is_current():
            try:
                backend.put(key, data)
            except OSError as error:
                self._refused(what, "written", error)
        # Not the item itself, so that the first read gives to the bit what all others give.
        del item
        return decode(data, key, trusted=True)

    def _stored(self, backend: Backend, key: str, what: str) -> Any:
        try:
            data = backend.get(key)
            return _MISSING if data is None else decode(data, key, backend.trusted)
        except OSError as error:
            self._refused(what, "read", error)
        except DamagedEntry as error:
            self._warn("damaged", f"entry {key} of the {what} is damaged, and computed anew: {error}")
        return _MISSING

    def _refused(self, what: str, action: str, error: OSError) -> None:
        text = f"{what} cannot be {action} in the cache, and are computed instead: {error}"
        self._warn(f"errno {error.errno}", f"{text}. Make room, mend the permissions, or choose another `cache_dir`")

    def _warn(self, about: str, text: str) -> None:
        with guard:
            if about in self._warned:
                return
            self._warned.add(about)
        warnings.warn(text, stacklevel=3)


class CachedDataset(CohortDataset, _CachedItems):
    """A cohort whose deterministic preprocessing is cached.

    Cached is what stands before the first transform that is random, is no monai ``Transform``, or holds what cannot be
    told from another (a lambda, a local function), which a warning names. That transform and all after it run at each
    read.

    Every read gives the same values, cold or warm, in any process: MetaTensors with all meta data, so that ``Invertd``
    works. Each is a copy. The ``id`` of the transform in ``applied_operations`` is "none" throughout, with which
    ``Invertd`` accepts any transform of the same class.

    An entry is used for the same case, the same files (see :func:`monai_saliency.storage.fingerprint.input_files`),
    the same
    transforms with the same arguments, and the same versions of monai, torch, numpy, nibabel and this package.
    A cache that cannot be read or written, or an item that cannot be stored, costs time and a warning, never an item.

    Args:
        data: cases, as :func:`monai_saliency.data.cohort.find_cases` gives them.
        transform: the preprocessing.
        backend: where bytes are kept; nothing is cached without one.
        checksum: tell scans by their content rather than by size and modification time.

    Raises:
        CaseError: on reading a case that cannot be loaded. Others are not affected.
    """

    def __init__(
        self,
        data: Sequence[dict[str, Any]],
        transform: Sequence[Callable[[Any], Any]] | Callable[[Any], Any] | None,
        backend: Backend | None = None,
        checksum: bool = False,
    ) -> None:
        self.backend = backend
        self.checksum = checksum
        # CohortDataset names the case of what goes wrong in _CachedItems, which comes next in the order of bases.
        super().__init__(data, transform)  # type: ignore[arg-type]


def _flat(transform: Compose) -> Iterator[Any]:
    for step in transform.transforms:
        if type(step) is Compose and _settings(step) == _settings(transform):
            yield from _flat(step)
        else:
            yield step


def _settings(transform: Compose) -> list[Any]:
    return [transform.map_items, transform.unpack_items, transform.lazy, transform.overrides]


def _forget_ids(value: Any, traced: bool = False) -> None:
    """Replace the ids of transforms, which are memory addresses, by "none", in place."""
    # Not monai's reset_ops_id, which turns tuples into lists.
    if isinstance(value, MetaTensor):
        _forget_ids(value.applied_operations, traced=True)
    elif isinstance(value, dict):
        if traced and TraceKeys.ID in value:
            value[TraceKeys.ID] = TraceKeys.NONE
        for key, content in value.items():
            _forget_ids(content, traced or str(key).endswith(TraceKeys.KEY_SUFFIX))
    elif isinstance(value, list | tuple):
        for content in value:
            _forget_ids(content, traced)
