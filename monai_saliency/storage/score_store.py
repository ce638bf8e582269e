"""Scores on disk, so that a run resumes in the middle of a case and no work is done twice.

Below its folder the store keeps, for each case and *key* (a hash of the image, the network's weights and all settings),
one small ``.npy`` file for each range of masks, and ``reference.npy`` with the scores of the unperturbed image. Files
appear by rename and hold no pickle, so any number of writers on any file system do no harm: two that compute one range
write the same file.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from monai_saliency.sharding import Part
from monai_saliency.storage.files import atomic_path, locked
from monai_saliency.utils.tensors import to_host
from monai_saliency.utils.timing import Timestamp

__all__ = ["CaseScores", "ScoreStore"]

_RANGE = re.compile(r"(\d+)-(\d+)\.npy")


class ScoreStore:
    """The scores of a cohort.

    Args:
        root: the folder.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def claim(self, case: str, part: Part | None = None) -> AbstractContextManager[str | None]:
        """Hold a case while it is worked on, so that of several runs on one folder only one does it.

        Without locks (see :func:`monai_saliency.storage.files.locked`) two runs may do the same work: each range that
        they
        write is the same file.

        Args:
            case: its name.
            part: hold only this part of its masks.

        Yields:
            None when the case is held by this run, else who holds it.
        """
        name = "lock" if part is None or part.count == 1 else f"lock-{part.index}-of-{part.count}"
        return locked(self.root / case / name, wait=False)

    def open(self, case: str, key: str) -> CaseScores:
        """The scores of one case under one key; other keys' scores are left alone."""
        return CaseScores(self.root / case / key)


class CaseScores:
    """The scores of one case, under one key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pending: tuple[int, int, torch.Tensor, Timestamp] | None = None

    def reference(self) -> np.ndarray | None:
        """The stored scores ``(K,)`` of the unperturbed image."""
        return _read(self.folder / "reference.npy")

    def resume(self, reference: torch.Tensor) -> None:
        """Begin, or go on with what is stored if it is of the same thing; else that is removed.

        Args:
            reference: the scores ``(K,)`` of the unperturbed image, computed just now. They are the same thing's up to
                1e-6 of the largest, as far as two machines differ that compute the same: a run may go on elsewhere.
        """
        path = self.folder / "reference.npy"
        # Looked for first: a range of somebody who has taken the reference's place meanwhile is not among them.
        ranges = list(self.folder.glob("[!.]*-*.npy"))
        if path.exists():
            stored = self.reference()
            if stored is not None and _same(stored, reference.numpy(force=True)):
                return
            for old in ranges:
                old.unlink(missing_ok=True)
        # Where there was none nothing is removed: another may have begun just now, and be further. Written last, for no
        # kill to leave ranges under a reference that is not theirs.
        _write(path, reference)

    def ranges(self) -> list[tuple[int, int, np.ndarray]]:
        """The stored ranges of masks ``[start, stop)`` with their scores ``(stop - start, K)``."""
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
        """Keep the scores ``(stop - start, K)`` of a range of masks.

        They are written when the next range comes, or at :meth:`flush`: by then the device has them, and nothing waits.
        """
        # Copied now: a copy that is asked for later waits for the network's next batch, which stands before it.
        copy = start, stop, to_host(scores), Timestamp(scores.device)
        self.flush()
        self._pending = copy

    def flush(self) -> None:
        """Write what still waits."""
        pending, self._pending = self._pending, None
        if pending is not None:
            start, stop, scores, copied = pending
            copied.wait()
            _write(self.folder / f"{start}-{stop}.npy", scores)

    def finish(self, scores: torch.Tensor) -> None:
        """Replace the ranges by one file, once all scores ``(N, K)`` are there."""
        self._pending = None
        whole = self.folder / f"0-{len(scores)}.npy"
        _write(whole, scores)
        # What begins with a dot, another writer is about to rename.
        for path in self.folder.glob("[!.]*-*.npy"):
            if path != whole:
                path.unlink(missing_ok=True)


def _same(stored: np.ndarray, reference: np.ndarray) -> bool:
    """Whether two scores of the unperturbed image ``(K,)`` are those of one network and one image."""
    if stored.shape != reference.shape:
        return False
    return bool(np.allclose(stored, reference, rtol=0, atol=1e-6 * np.abs(reference).max(initial=0)))


def _read(path: Path) -> np.ndarray | None:
    """An array, or None where there is none that is whole: it is computed again then."""
    try:
        return np.load(path, allow_pickle=False)
    except Exception:  # numpy reads a header as Python's literals, so a damaged one raises whatever that may
        return None


def _write(path: Path, scores: torch.Tensor) -> None:
    with atomic_path(path) as temporary:
        np.save(temporary, scores.numpy(force=True), allow_pickle=False)
