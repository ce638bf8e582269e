"""Scores on disk, with which a run resumes in the middle of a case.

The store has a folder for each case and *key* (a hash of the image, the weights of the network and all settings). It
holds a small ``.npy`` file for each range of masks, and ``reference.npy`` with the scores of the unperturbed image.
Files appear by renaming and hold no pickle. So any number of processes can write to the folder, on any file system: two
processes that compute the same range write the same file.
"""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from monai_saliency.sharding import Part
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.tensors import to_host
from monai_saliency.utils.timing import Timestamp

__all__ = ["CaseScores", "ScoreStore"]

_RANGE = re.compile(r"(\d+)-(\d+)\.npy")


class ScoreStore:
    """The scores of a cohort.

    Example::

        store = ScoreStore("out/scores")
        with store.claim("sub-01") as holder:
            if holder is None:
                ranges = store.open("sub-01", key).ranges()

    Args:
        root: the folder of the store.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = a_path("root", root)

    def claim(self, case: str, part: Part | None = None) -> AbstractContextManager[str | None]:
        """Lock a case, so that only one of several runs on the folder explains it.

        Without locks (see :func:`monai_saliency.storage.files.locked`) two runs may explain the same case. They write
        the same files.

        Args:
            case: the name of the case.
            part: lock only this part of the masks. Default: all masks.

        Yields:
            None when this run holds the lock, otherwise who holds it.
        """
        # Hidden, so that no case below a folder of this name, such as "a/lock" beside "a", has its folder there.
        name = ".lock" if part is None or part.count == 1 else f".lock-{part.index}-of-{part.count}"
        return locked(self.root / case / name, wait=False)

    def open(self, case: str, key: str) -> CaseScores:
        """The scores of one case under one key. Scores under other keys are not touched.

        Args:
            case: the name of the case.
            key: a hash of everything that decides the scores.
        """
        return CaseScores(self.root / case / key)


class CaseScores:
    """The scores of one case under one key.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pending: tuple[int, int, torch.Tensor, Timestamp] | None = None

    def one_by_one(self) -> CaseScores:
        """The scores of the same case where images go through the network one at a time, in a folder of their own."""
        other = copy.copy(self)
        other.folder = self.folder.with_name(f"{self.folder.name}-one-by-one")
        other._pending = None
        return other

    def reference(self) -> np.ndarray | None:
        """The stored scores ``(K,)`` of the unperturbed image. None if there are none."""
        return _read(self.folder / "reference.npy")

    def resume(self, reference: torch.Tensor) -> None:
        """Resume from stored scores if they belong to this image and network; otherwise delete them.

        Args:
            reference: the scores ``(K,)`` of the unperturbed image, computed just now. Stored scores belong to the same
                image and network if their reference is equal up to 1e-6 of its largest value. Two machines may differ
                by as much, and a run may be resumed on another machine.
        """
        path = self.folder / "reference.npy"
        # Listed first, so that ranges of another process that writes a new reference in between are not deleted.
        ranges = list(self.folder.glob("[!.]*-*.npy"))
        if path.exists():
            stored = self.reference()
            if stored is not None and _same(stored, reference.numpy(force=True)):
                return
            for old in ranges:
                old.unlink(missing_ok=True)
        # Without a stored reference nothing is deleted, since another process may have begun just now. The reference is
        # written last, so that a kill never leaves ranges with the reference of other scores.
        _write(path, reference)

    def ranges(self) -> list[tuple[int, int, np.ndarray]]:
        """The stored ranges of masks: ``start``, ``stop`` and the scores ``(stop - start, K)`` of each."""
        found = []
        for path in sorted(self.folder.glob("*-*.npy")):
            match = _RANGE.fullmatch(path.name)
            scores = _read(path) if match else None
            if match and scores is not None:
                start, stop = int(match[1]), int(match[2])
                if scores.ndim == 2 and len(scores) == stop - start:
                    found.append((start, stop, scores))
        return found

    def add(self, start: int, stop: int, scores: torch.Tensor) -> None:
        """Store the scores of a range of masks.

        They are written with the next range, or by :meth:`flush`. By then the copy from the device has arrived, so that
        nothing waits for it.

        Args:
            start: the index of the first mask.
            stop: the index after the last mask.
            scores: ``(stop - start, K)``.
        """
        # Copied now: a later copy would wait for the next batch of the network.
        copy = start, stop, to_host(scores), Timestamp(scores.device)
        self.flush()
        self._pending = copy

    def flush(self) -> None:
        """Write the last range."""
        pending, self._pending = self._pending, None
        if pending is not None:
            start, stop, scores, copied = pending
            copied.wait()
            _write(self.folder / f"{start}-{stop}.npy", scores)

    def finish(self, scores: torch.Tensor) -> None:
        """Replace all ranges by one file.

        Args:
            scores: the scores of all masks, ``(N, K)``.
        """
        self._pending = None
        whole = self.folder / f"0-{len(scores)}.npy"
        _write(whole, scores)
        # Files with a dot are temporary files of other processes.
        for path in self.folder.glob("[!.]*-*.npy"):
            if path != whole:
                path.unlink(missing_ok=True)


def _same(stored: np.ndarray, reference: np.ndarray) -> bool:
    """Whether two scores ``(K,)`` of an unperturbed image belong to the same image and network."""
    if stored.shape != reference.shape:
        return False
    return bool(np.allclose(stored, reference, rtol=0, atol=1e-6 * np.abs(reference).max(initial=0)))


def _read(path: Path) -> np.ndarray | None:
    """The array of a file. None if the file is missing or damaged: its scores are computed again."""
    try:
        return np.load(path, allow_pickle=False)
    except Exception:  # numpy reads the header as a Python literal, and a damaged one raises errors of any type
        return None


def _write(path: Path, scores: torch.Tensor) -> None:
    with atomic_path(path) as temporary:
        np.save(temporary, scores.numpy(force=True), allow_pickle=False)
