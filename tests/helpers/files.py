"""What a run has written."""

import csv
import gzip
import os
from pathlib import Path

import nibabel as nib
import numpy as np

from monai_saliency.storage.score_store import StoredScores


def contents(folder: Path) -> dict[str, bytes]:
    """A folder's files by path, unpacked."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for name, path in files.items()
    }


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cases(folder: Path) -> list[str]:
    """The cases that the table of an output folder lists."""
    return [row["case"] for row in rows_of(folder / "summary.csv")]


def voxels(folder: Path) -> dict[str, bytes]:
    return {path.name: np.asarray(nib.load(path).dataobj).tobytes() for path in folder.glob("*.nii.gz")}


def maps(folder: Path) -> dict[str, bytes]:
    """The voxels of all maps below a folder."""
    files = sorted(folder.rglob("*_saliency.nii.gz"))
    return {str(p.relative_to(folder)): np.asarray(nib.load(p).dataobj).tobytes() for p in files}


def scores_of(store: Path) -> dict[str, np.ndarray]:
    """The scores ``(N, K)`` of cases that are complete in a store, each under one key, by case."""
    folders = [path.parent for path in store.rglob("decides.npy")]
    found = {folder.parent.relative_to(store).as_posix(): StoredScores(folder).load() for folder in folders}
    return {case: files[0][1].numpy() for case, files in found.items() if len(files) == 1}


class Trap:
    """What makes a folder where its pickle is read, so that a test sees whether code in a file was run."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)
