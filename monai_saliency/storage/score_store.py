"""Scores on disk, with which a run resumes in the middle of a case.

The store has a folder for each case and *key* (a hash of the image, the weights of the network and all settings). It
holds small files, each with the ids of some masks and their scores, and ``decides.npy``: the hash of the masks, the
scores of the unperturbed image and, where these are the same for every image, other numbers of its output.
Files appear by renaming and hold no pickle. So any number of processes can write to the folder, on any file system: two
processes that score the same masks write the same file. Behind its content each file has a checksum. A file without it
(of an older version, or cut off when the power went) is not used, and its scores are computed again. A power cut costs
at most the scores of the last seconds; a finished case is on the disk before its files are removed. Scores that follow
each other are written together where a file of its own for each batch would take more than a hundredth of the time.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

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
_ENDING = ".scores"
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
        self._pending: list[tuple[Sequence[Any], torch.Tensor, Timestamp]] = []
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
        # Listed first, so that files of another process that writes a new file in between are not deleted.
        files = self._files()
        stored = _read(self.folder / _DECIDES)
        if self._is_mine(stored):
            return
        # Where nothing decides yet nothing is deleted, since another process may have begun just now.
        if stored is not None:
            _remove(files)
        _write(self.folder / _DECIDES, self._decides)

    def _files(self) -> list[Path]:
        """The files of scores. Those with a dot are temporary files of other processes."""
        return sorted(self.folder.glob(f"[!.]*{_ENDING}"))

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

    def load(self) -> list[tuple[list[Any], torch.Tensor]]:
        """What is stored: the ids of n masks, and their scores ``(n, K)``, file by file."""
        found = (_content(path) for path in self._files())
        return [content for content in found if content is not None]

    def add(self, ids: Sequence[Any], scores: torch.Tensor) -> None:
        """Store the scores ``(n, K)`` of n masks."""
        # Copied now: a later copy would wait for the next batch of the network.
        copy = ids, to_host(scores), Timestamp(scores.device)
        if time.monotonic() >= self._rests_until:
            self.flush()
        self._pending.append(copy)

    def flush(self) -> None:
        """Write the scores that wait, in one file."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        pending[-1][2].wait()
        begun = time.monotonic()
        ids = [mask for some, _, _ in pending for mask in some]
        self._write(ids, torch.cat([scores for _, scores, _ in pending]))
        ended = time.monotonic()
        self._rests_until = ended + _REST * (ended - begun)

    def finish(self, ids: Sequence[Any], scores: torch.Tensor) -> None:
        """Replace all files by one with the scores ``(N, K)`` of all masks."""
        self._pending = []
        whole = self._write(list(ids), scores, durable=True)
        _remove(path for path in self._files() if path != whole)

    def _write(self, ids: list[Any], scores: torch.Tensor, durable: bool = False) -> Path:
        """Write scores to a file that is named by its masks."""
        # A fault that passes must not be kept: NaN and infinite scores are computed again.
        known = torch.isfinite(scores).all(dim=1)
        if not bool(known.all()):
            ids, scores = [mask for mask, one in zip(ids, known.tolist(), strict=True) if one], scores[known]
        named = json.dumps(ids, separators=(",", ":"), default=int).encode()
        path = self.folder / f"{hashlib.sha256(named).hexdigest()[:16]}{_ENDING}"
        if ids:
            _write(path, scores.numpy(force=True), named, durable)
        return path


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
    found = _parts(path)
    return None if found is None else found[0]


def _content(path: Path) -> tuple[list[Any], torch.Tensor] | None:
    """The ids and scores of a file; None as for :func:`_read`."""
    found = _parts(path)
    if found is None:
        return None
    return [_as_id(mask) for mask in json.loads(found[1])], torch.from_numpy(found[0])


def _as_id(written: Any) -> Any:
    """An id as masks make it: a number, or a tuple of ids."""
    return tuple(map(_as_id, written)) if isinstance(written, list) else written


def _parts(path: Path) -> tuple[np.ndarray, bytes] | None:
    """The array of a file, and what stands behind it."""
    try:
        data = path.read_bytes()
        content, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
        if checksum != _checksum(content):
            return None
        file = io.BytesIO(content)
        return np.load(file, allow_pickle=False), file.read()
    except Exception:  # numpy reads the header as a Python literal, and a damaged one raises errors of any type
        return None


def _write(path: Path, numbers: np.ndarray, further: bytes = b"", durable: bool = False) -> None:
    buffer = io.BytesIO()
    np.save(buffer, numbers, allow_pickle=False)
    content = buffer.getvalue() + further
    write_whole(path, content + _checksum(content), durable)


def _checksum(content: bytes) -> bytes:
    return b"crc%08x" % zlib.crc32(content)
