"""Scores on disk, with which a run resumes in the middle of a case.

The store has a folder for each case and *key* (a hash of the image, the weights of the network and all settings). It
holds a small ``.npy`` file for each range of masks, and ``decides.npy``: the hash of the masks, the scores of the
unperturbed image and, where these are the same for every image, other numbers of its output.
Files appear by renaming and hold no pickle. So any number of processes can write to the folder, on any file system: two
processes that compute the same range write the same file. Behind its array each file has a checksum. A file without it
(of an older version, or cut off when the power went) is not used, and its scores are computed again. A power cut costs
at most the ranges of the last seconds; a finished case is on the disk before its ranges are removed. Ranges that follow
each other are written together where a file of its own for each would take more than a hundredth of the time.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from monai_saliency.sharding import Part
from monai_saliency.storage.files import case_file, locked, write_whole
from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.tensors import to_host
from monai_saliency.utils.timing import Timestamp

__all__ = ["StoredScores", "ScoreStore"]

_CHECKSUM = len(b"crc00000000")
_DIGEST, _DECIDES = 8, "decides.npy"
_RANGE = re.compile(r"(\d+)-(\d+)\.npy")
# How many times as long as a file took to write until the next one.
_REST = 100


class ScoreStore:
    """The scores of a cohort in the folder ``root``, which runs give as ``scores`` in their output folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = a_path("root", root)

    def claim(self, case: str, part: Part | None = None) -> AbstractContextManager[str | None]:
        """Lock a case, or a part of its masks, so that only one of several runs on the folder explains it.

        It yields None when this run holds the lock, otherwise who holds it. On a file system without locks two runs may
        explain the same case: they write the same files.
        """
        # Hidden, so that no case below a folder of this name, such as "a/lock" for a case "a", has its folder there.
        name = ".lock" if part is None or part.count == 1 else f".lock-{part.index}-of-{part.count}"
        return locked(case_file(self.root, case, "") / name, wait=False)

    def open(self, case: str, key: str) -> StoredScores:
        """The scores of a case under a key, a hash of everything that decides them. Other keys are not touched."""
        return StoredScores(self.root / case / key)


class StoredScores:
    """The scores of one case under one key, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reference = np.zeros(0)  # the scores of the unperturbed image (K,)
        self._decides = np.zeros(0)  # what the file of this name must hold
        self._pending: list[tuple[int, int, torch.Tensor, Timestamp]] = []  # ranges, one behind the other
        self._rests_until = 0.0

    def beside(self, words: str) -> StoredScores:
        """The scores of the same case made in another way, such as by one network of an ensemble, in a folder of their
        own.
        """
        return StoredScores(self.folder.with_name(f"{self.folder.name}-{words}"))

    def resume(self, reference: torch.Tensor, masks: str = "", vouch: torch.Tensor | None = None) -> None:
        """Resume from stored scores if they belong to this image, network and masks; otherwise delete them.

        Args:
            reference: the scores ``(K,)`` of the unperturbed image.
            masks: what the masks are bound to, as text.
            vouch: other numbers ``(V,)`` of the output for the unperturbed image, by which it is recognised.
        """
        self._reference = reference.numpy(force=True).astype(float)
        others = [] if vouch is None else vouch.tolist()
        self._decides = np.array([*_digest(masks), *self._reference, *others], float)
        # Listed first, so that ranges of another process that writes a new file in between are not deleted.
        ranges = self._files()
        stored = _read(self.folder / _DECIDES)
        if self._is_mine(stored):
            return
        # Where nothing decides yet nothing is deleted, since another process may have begun just now.
        if stored is not None:
            _remove(ranges)
        _write(self.folder / _DECIDES, self._decides)

    def discard(self) -> None:
        """Delete all scores of masks."""
        self._pending = []
        _remove(self._files())

    def _files(self) -> list[Path]:
        """The files of ranges. Those with a dot are temporary files of other processes."""
        return sorted(self.folder.glob("[!.]*-*.npy"))

    def _is_mine(self, stored: np.ndarray | None) -> bool:
        """Whether stored scores are of the masks, the reference scores and the output of :meth:`resume`."""
        own = self._decides
        if stored is None or stored.shape != own.shape:
            return False
        stop = _DIGEST + len(self._reference)
        scores = slice(_DIGEST, stop)
        same_masks = np.array_equal(stored[:_DIGEST], own[:_DIGEST])
        same_scores = _close(stored[scores], own[scores], 1e-6)
        same_output = _close(stored[stop:], own[stop:], 1e-5)
        return same_masks and same_scores and same_output

    def check_unchanged(self) -> None:
        """Refuse to go on where another worker has found another reference, and so has removed this one's scores."""
        stored = _read(self.folder / _DECIDES)
        if not len(self._decides) or stored is None or self._is_mine(stored):
            return
        theirs, ours = stored[_DIGEST:].tolist()[:3], self._reference.tolist()[:3]
        raise ValueError(
            f"another worker scores the unperturbed image {theirs}, this one {ours}, or has other masks, and has "
            "removed this one's scores: give all workers the same weights, precision, packages and kind of device, or "
            "let them share cases (--saliency_split cases)"
        )

    def ranges(self) -> list[tuple[int, int, np.ndarray]]:
        """The stored ranges of masks: ``start``, ``stop`` and the scores ``(stop - start, K)`` of each."""
        found = []
        for path in self._files():
            match, scores = _RANGE.fullmatch(path.name), _read(path)
            if match is not None and scores is not None:
                found.append((int(match[1]), int(match[2]), scores))
        return found

    def add(self, start: int, stop: int, scores: torch.Tensor) -> None:
        """Store the scores ``(stop - start, K)`` of a range of masks."""
        # Copied now: a later copy would wait for the next batch of the network.
        copy = start, stop, to_host(scores), Timestamp(scores.device)
        if time.monotonic() >= self._rests_until or (self._pending and self._pending[-1][1] != start):
            self.flush()
        self._pending.append(copy)

    def flush(self) -> None:
        """Write the ranges that wait, in one file."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        (start, *_), (_, stop, _, copied) = pending[0], pending[-1]
        copied.wait()
        begun = time.monotonic()
        scores = torch.cat([scores for _, _, scores, _ in pending])
        # A fault that passes must not be kept: NaN and infinite scores are computed again.
        if bool(torch.isfinite(scores).all()):
            _write(self.folder / f"{start}-{stop}.npy", scores.numpy())
        ended = time.monotonic()
        self._rests_until = ended + _REST * (ended - begun)

    def finish(self, scores: torch.Tensor) -> None:
        """Replace all ranges by one file with the scores ``(N, K)`` of all masks."""
        self._pending = []
        whole = self.folder / f"0-{len(scores)}.npy"
        _write(whole, scores.numpy(force=True), durable=True)
        _remove(path for path in self._files() if path != whole)


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def _close(stored: np.ndarray, own: np.ndarray, tolerance: float) -> bool:
    """Whether numbers are equal but for a share of the largest of them."""
    return bool(np.allclose(stored, own, rtol=0, atol=tolerance * np.abs(own).max(initial=0)))


def _digest(masks: str) -> list[int]:
    """The hash of a text, as 8 numbers."""
    return list(hashlib.sha256(masks.encode()).digest()[:_DIGEST])


def _read(path: Path) -> np.ndarray | None:
    """The array of a file. None if the file is missing, damaged or without a checksum: it is computed again."""
    try:
        data = path.read_bytes()
        content, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
        return np.load(io.BytesIO(content), allow_pickle=False) if checksum == _checksum(content) else None
    except Exception:  # numpy reads the header as a Python literal, and a damaged one raises errors of any type
        return None


def _write(path: Path, numbers: np.ndarray, durable: bool = False) -> None:
    buffer = io.BytesIO()
    np.save(buffer, numbers, allow_pickle=False)
    write_whole(path, buffer.getvalue() + _checksum(buffer.getvalue()), durable)


def _checksum(content: bytes) -> bytes:
    return b"crc%08x" % zlib.crc32(content)
