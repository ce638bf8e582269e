"""Preprocessing that is computed once for each scan, and cached in memory, on disk, in LMDB or in a moving window.

Where a cache may be:

- ``memory``: in the process. Each worker process has its own cache, which ends with the process.
- ``disk``: in any folder, also one that several machines share. Entries are never removed: delete the folder when it is
  too large.
- ``lmdb``: on a local disk, on a cluster the scratch disk of the node. LMDB maps its file into memory, which network
  file systems do not support.

Reading an entry never runs code, whoever wrote it, but its voxels are used as they are. So share a folder only with
people who may also replace your scans.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from monai.data import get_track_meta
from monai.transforms import Compose, MapTransform, Transform
from monai.transforms.compose import execute_compose
from monai.transforms.traits import RandomizableTrait, ThreadUnsafe

from monai_saliency.data.cohort import CohortDataset
from monai_saliency.data.transform_ids import forget_ids
from monai_saliency.storage.backends import Backend, DiskBackend, LMDBBackend, MemoryBackend, guard
from monai_saliency.storage.key import Unfingerprintable, fingerprint, input_files, library_versions
from monai_saliency.storage.locks import Locks
from monai_saliency.storage.serialization import DamagedEntry, NotStorable, decode, encode
from monai_saliency.utils.arguments import check_option, flag, instance, whole_numbers
from monai_saliency.utils.monai_private import ItemDataset
from monai_saliency.utils.precision import chosen_arithmetic

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
    """The preprocessed scans of a cohort, with a cache.

    Args:
        data: the cases, as returned by :func:`monai_saliency.data.cohort.find_cases`.
        transform: the preprocessing. :class:`CachedDataset` describes which part of it is cached.
        cache: where preprocessed scans are kept:

            - ``"none"``: nowhere;
            - ``"memory"``: all scans in the memory of this process;
            - ``"disk"``: one file for each scan in ``cache_dir``;
            - ``"lmdb"``: an LMDB database in ``cache_dir``, which must not be on a network file system;
            - ``"window"``: the last ``window`` scans in memory, and all scans as files in ``cache_dir`` if it is given,
              for cohorts larger than memory. (A pass of MONAI's ``SmartCacheDataset`` is only a part of the cohort, and
              hangs at a broken scan. Here a pass reads every case, and only the broken one fails.)
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
    """The backend of a cache.

    Args:
        cache: the name of the cache, see :func:`cohort_dataset`.
        cache_dir: the folder of the cache, see :func:`cohort_dataset`.
        window: the number of scans in memory for ``"window"``, at least 1.
        map_size: the first size of an LMDB database in bytes.
        entries: how many entries a scan has.

    Returns:
        the backend. None for ``"none"``.

    Raises:
        ValueError: when there is no such cache, or an argument is missing or out of its range.
    """
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


class _CachedItems(ItemDataset):
    """Items whose deterministic preprocessing goes through a cache. See :class:`CachedDataset`."""

    # Not MONAI's cached datasets: PersistentDataset and LMDBDataset return plain tensors from a warm cache, do not
    # notice changed transforms and files, and unpickle. CacheDataset fails for all scans when one fails, and returns
    # the cached object itself. `cohort_dataset` describes SmartCacheDataset.

    backend: Backend | None = None
    checksum = False

    def __init__(self, data: Sequence[Any], transform: Any) -> None:
        super().__init__(data, transform)
        self._warned: set[str] = set()
        self._locks = Locks()
        steps = self._steps()
        self._num_cached = self._num_prepared = self._count_cached(steps)
        self._folder_keys = _keys_of(steps[: self._num_cached])

    def _steps(self) -> tuple[Any, ...]:
        """The transforms, with those inside of nested ``Compose`` objects."""
        # Not Compose.flatten, which sets new seeds in random transforms.
        return tuple(_flat(self.transform))

    def _count_cached(self, steps: Sequence[Any]) -> int:
        """How many transforms are cached. Warns if a deterministic transform cannot be."""
        for number, step in enumerate(steps):
            if isinstance(step, RandomizableTrait) and type(step) is not Compose:
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

    def make_item(self, index: int) -> Any:
        return self._finish(self._prepared(self.data[index]), self._steps()[self._num_prepared :])

    def _finish(self, item: Any, steps: Sequence[Any]) -> Any:
        """Run the transforms that are not cached."""
        if not any(isinstance(step, ThreadUnsafe) for step in steps):
            return self._run(item, steps)
        # Random transforms keep what they have drawn in their attributes.
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
        """The item after the first ``_num_prepared`` transforms."""
        return self._preprocessed(case, self._identity(case) if self._num_cached else None)

    def _preprocessed(self, case: Any, identity: str | None) -> Any:
        """The item after the first ``_num_cached`` transforms."""
        return self._cached(
            "preprocessed scans", identity, lambda: self._compute(case), lambda: self._identity(case) == identity
        )

    def _identity(self, case: Any) -> str | None:
        """What identifies a case in the cache. None without a cache, or when the case cannot be identified."""
        if self.backend is None:
            return None
        try:
            return self._identified(case)
        except Unfingerprintable as error:
            self._warn("case", f"some cases are not cached, since they cannot be identified: {error}")
            return None

    def _cached(
        self, what: str, identity: str | None, compute: Callable[[], Any], is_current: Callable[[], bool]
    ) -> Any:
        """A result from the cache, or, if it is not there yet, from ``compute``.

        Args:
            what: what the results are called in warnings, in the plural.
            identity: what identifies the result in the cache. None does not cache it.
            compute: computes the result. For each key, one thread at a time calls it.
            is_current: called after computing. Returns whether the result still has this identity.
        """
        if self.backend is None or identity is None:
            return compute()
        found = self._stored(self.backend, identity, what)
        if found is not _MISSING:
            return found
        with self._locks.only_one(identity):
            found = self._stored(self.backend, identity, what)
            if found is not _MISSING:
                return found
            return self._store(self.backend, identity, what, compute(), is_current)

    def _identified(self, case: Any) -> str:
        files = input_files(case, self.checksum, self._folder_keys)
        # Each time: somebody may have changed an attribute of a transform.
        steps = [self._steps()[: self._num_cached], _settings(self.transform)] if self._num_cached else None
        outside = [get_track_meta(), torch.get_default_dtype(), torch.get_default_device().type, chosen_arithmetic()]
        return fingerprint([library_versions(), fingerprint(steps, files=True), case, files, outside])

    def _compute(self, case: Any) -> Any:
        item = self._run(deepcopy(case), self._steps()[: self._num_cached], threading=True)
        forget_ids(item)
        return item

    def _store(self, backend: Backend, identity: str, what: str, item: Any, is_current: Callable[[], bool]) -> Any:
        key = identity
        try:
            data = encode(item, key, on_device=_durable(backend) is None)
        except NotStorable as error:
            self._warn("item", f"{what} are not cached, as they cannot be stored: {error}")
            return item
        # If a scan was replaced meanwhile, half of the old one and half of the new one may have been read.
        if is_current():
            try:
                backend.put(key, data)
            except OSError as error:
                self._refused(what, "written", error)
        # Not the item itself: so the first read returns to the bit what all later reads return.
        del item
        return decode(data, key, trusted=True)

    def _stored(self, backend: Backend, identity: str, what: str) -> Any:
        key = identity
        try:
            data = backend.get(key)
            return _MISSING if data is None else decode(data, key, backend.trusted)
        except OSError as error:
            self._refused(what, "read", error)
        except DamagedEntry as error:
            self._warn("damaged", f"entry {key} of the {what} is damaged, and is computed again: {error}")
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

    The transforms before the first random one are cached. A transform that is not a monai ``Transform``, or that cannot
    be identified (it holds a lambda or a local function), is not cached either, nor are those after it. A warning names
    it. Transforms that are not cached run at each read.

    Every read returns the same values, from a cold or a warm cache, in any process: MetaTensors with all meta data, so
    that ``Invertd`` works. Each read returns a copy. The ``id`` of every transform in ``applied_operations`` is "none",
    with which ``Invertd`` accepts any transform of the same class.

    Transforms may run on a GPU, those of CuPy and cuCIM too, and items come back where they were
    (:mod:`monai_saliency.storage.devices`). In memory alone, without a folder behind it, tensors on a GPU are kept
    there until half of its memory is in use; all else is kept in the host's memory or on disk, and copied to the GPU
    at each read.

    An entry is used for the same case, the same files (see :func:`monai_saliency.storage.key.input_files`) and files
    that arguments of the transforms name, the same transforms with the same arguments
    (:func:`monai_saliency.storage.key.fingerprint`), the same versions of monai, torch, numpy, nibabel, this package
    and (where they are installed) CuPy and cuCIM, and the same autocast, TF32 and default device. If the cache cannot
    be read or written, or an item cannot be stored, the item is computed at each read, with a warning.

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

    def __init__(
        self,
        data: Sequence[dict[str, Any]],
        transform: Sequence[Callable[[Any], Any]] | Callable[[Any], Any] | None,
        backend: Backend | None = None,
        checksum: bool = False,
    ) -> None:
        words = "a backend such as MemoryBackend()"
        self.backend = instance("backend", backend, Backend, words, none=True)
        self.checksum = flag("checksum", checksum)
        # CohortDataset adds the case to errors of _CachedItems, which is the next base class.
        super().__init__(data, transform)  # type: ignore[arg-type]


def _durable(backend: Backend | None) -> Backend | None:
    """The part of a backend that later processes find."""
    return backend.behind if isinstance(backend, MemoryBackend) else backend


def _keys_of(steps: Sequence[Any]) -> set[Any] | None:
    """The keys of a case that transforms read; None where they may read any."""
    keys = [set(step.keys) if isinstance(step, MapTransform) else None for step in steps]
    return None if None in keys else set().union(*(each for each in keys if each is not None))


def _flat(transform: Compose) -> Iterator[Any]:
    for step in transform.transforms:
        if type(step) is Compose and _settings(step) == _settings(transform):
            yield from _flat(step)
        else:
            yield step


def _settings(transform: Compose) -> list[Any]:
    return [transform.map_items, transform.unpack_items, transform.lazy, transform.overrides]
