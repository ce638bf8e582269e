"""Scans and photographs, made."""

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np
from PIL import Image

OBLIQUE = np.array([[1.9, 0.3, -0.2, -20.0], [-0.25, 2.1, 0.4, 10.0], [0.2, -0.35, 2.6, 5.0], [0, 0, 0, 1]])


LPS = np.diag([-1.5, -1.5, 3.0, 1.0])


PERMUTED = np.array([[0, 0, 2.0, 1], [2.2, 0, 0, 2], [0, -1.8, 0, 3], [0, 0, 0, 1]])


def rotation(a: float, b: float) -> np.ndarray:
    """By ``b`` about the first axis and then by ``a`` about the third one, in radians."""
    about_z = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])
    return about_z @ np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])


def write_scan(path: Path, shape: tuple[int, ...], affine: np.ndarray, seed: int = 0, **header: int) -> Path:
    """A smooth random scan, reproducible, with a background."""
    rng = np.random.default_rng(seed)
    grid = np.meshgrid(*[np.linspace(-1, 1, n) for n in shape[:3]], indexing="ij")
    inside = sum(g**2 for g in grid) < 0.8
    data = (inside[(...,) + (None,) * (len(shape) - 3)] * rng.uniform(50, 150, shape)).astype(np.float32)
    image = nib.Nifti1Image(data, affine)
    image.set_sform(affine, code=header.get("sform", 1))
    image.set_qform(affine, code=header.get("qform", 1), strip_shears=True)
    image.header.set_xyzt_units("mm", "sec")
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(image, path)
    return path


def write_scans(folder: Path, count: int) -> Path:
    """Small scans ``s0``, ``s1``, ... in ``cohort`` below a folder; the folder."""
    for seed in range(count):
        write_scan(folder / "cohort" / f"s{seed}.nii.gz", (13, 12, 14), LPS, seed=seed)
    return folder


AFFINES = [OBLIQUE, LPS]


def volume(
    path: Path, shape: tuple[int, ...], affine: np.ndarray, seed: int, low: float = -50, high: float = 150
) -> Path:
    rng = np.random.default_rng(seed)
    image = nib.Nifti1Image(rng.uniform(low, high, shape).astype(np.float32), affine)
    image.set_sform(affine, code=2)
    image.set_qform(affine, code=1, strip_shears=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(image, path)
    return path


def damage(path: Path) -> None:
    """Change one voxel of a ``.nii.gz``, of which nibabel says nothing: the checksum at the file's end is not read."""
    before = np.asarray(nib.load(path).dataobj)
    packed = bytearray(gzip.compress(gzip.decompress(path.read_bytes()), 0))
    packed[-100] ^= 64
    path.write_bytes(packed)
    assert (np.asarray(nib.load(path).dataobj) != before).sum() == 1


def photograph(path: Path, width: int, height: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path


MARK = (slice(2, 9), slice(28, 37))  # rows and columns: at the top, on the right


def radiograph(path: Path, height: int, width: int, bits: int = 8, colours: bool = False) -> Path:
    """A picture with a bright mark at :data:`MARK`, in gray or in colours that are gray."""
    top = 2**bits - 1
    voxels = np.random.default_rng(height).uniform(0.1, 0.2, (height, width))
    voxels[MARK] = 0.9
    image = Image.fromarray(np.rint(voxels * top).astype(np.uint16 if bits > 8 else np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    (image.convert("RGB") if colours else image).save(path)
    return path


def mark_in_picture(path: Path, shape: tuple[int, int]) -> tuple[float, float]:
    """Row and column of the photograph's brightest part as a picture shows it, which a green cross spans."""
    red, green, blue = np.moveaxis(np.asarray(Image.open(path).convert("RGB")).astype(int), -1, 0)
    cross = np.argwhere((green > 150) & (red < 120) & (blue < 120))
    (top, left), (bottom, right) = cross.min(axis=0), cross.max(axis=0) + 1
    bright = np.argwhere(np.minimum(red, blue)[top:bottom, left:right] > 120) + 0.5
    rows, columns = bright.mean(axis=0) / (bottom - top, right - left) * shape
    return rows, columns
