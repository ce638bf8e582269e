"""A demonstration cohort made from a real T1 brain, with lesions whose place is known.

Nothing is downloaded: the brain is the MNI152 template that nilearn ships. Each scan poses, deforms, lights and
samples it differently, so a cohort varies as real ones do: spacing, shape, voxel orientation, oblique axes, intensity
scale. The scans are skull-stripped, with a background of exactly zero.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
from scipy import ndimage
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from monai_saliency.utils.arguments import require

__all__ = ["make_cohort", "make_scan"]

SPACINGS = ((2.0, 2.0, 2.0), (1.8, 1.8, 2.4), (2.1, 2.1, 1.7), (1.6, 1.6, 3.0), (1.9, 2.2, 2.0))  # mm, slices last
SCANS_PER_SEED = 100_000
WHITE_MATTER = 0.86  # the template's own units
LESION, DECOY = 1.3, 1.45  # times as bright as white matter, at least: thin things are dimmed by resampling
VESSELS, SPOTS = 3, 4  # decoys of each scan
CLEAR = 5.0  # mm at least between the surfaces of lesions and decoys


class _Template(NamedTuple):
    intensity: np.ndarray  # (X, Y, Z), 0 to 1, 0 outside the brain
    affine: np.ndarray  # voxel to template mm
    depth: np.ndarray  # mm below the brain's surface, on every second voxel
    centre: np.ndarray  # of the brain, template mm


@lru_cache(maxsize=1)
def _template() -> _Template:
    datasets = require("nilearn.datasets", extra="demo")
    image = datasets.load_mni152_template(resolution=1)
    intensity = np.asarray(image.dataobj, dtype=np.float32)
    brain = ndimage.binary_fill_holes(intensity > 0)
    depth = 2 * ndimage.distance_transform_edt(brain[::2, ::2, ::2])  # a coarse grid: 2 mm is fine for choosing places
    centre = image.affine[:3, :3] @ np.mean(np.argwhere(brain), axis=0) + image.affine[:3, 3]
    return _Template(intensity, image.affine, depth.astype(np.float32), centre)


def make_scan(seed: int, lesion: bool | int) -> tuple[nibabel.Nifti1Image, nibabel.Nifti1Image]:
    """Make one skull-stripped T1 scan of the template brain, and the mask of its lesion."""
    template = _template()
    rng = np.random.default_rng([seed, 0])
    lesion_rng = np.random.default_rng([seed, 1])  # its own stream, so that a lesion changes nothing else

    pose = _pose(rng, template.centre)
    affine, shape = _grid(rng, pose)
    points = _map_grid(np.linalg.inv(pose) @ affine, shape)  # template mm of every voxel, (3, *shape)
    for axis in range(3):
        points[axis] += rng.uniform(1, 3) * _smooth_field(rng, shape)  # no two brains have one shape
    voxels = np.linalg.inv(template.affine) @ np.concatenate([points.reshape(3, -1), np.ones((1, points[0].size))])
    voxels = voxels[:3].reshape(points.shape)
    signal = ndimage.map_coordinates(template.intensity, voxels, order=1)
    brain = ndimage.binary_fill_holes(signal > 0.2)

    label = np.zeros(shape, dtype=np.uint8)
    tissues, taken = _decoys(np.random.default_rng([seed, 2]), points, template)
    for share, tissue in tissues:
        signal = (1 - share) * signal + share * tissue
    for _ in range(lesion):
        share, tissue, centre, reach = _lesion(lesion_rng, points, template, taken)
        signal = (1 - share) * signal + share * tissue
        label[(share >= 0.5) & brain] = 1
        taken = [*taken, (centre[None], reach)]

    signal = np.clip(signal, 0, None) ** rng.uniform(0.85, 1.2)
    signal *= np.exp(rng.uniform(0.03, 0.1) * _smooth_field(rng, shape))  # the coil's bias field
    sigma = rng.uniform(0.015, 0.04)
    real, imaginary = rng.normal(0, sigma, (2, *shape))
    signal = np.hypot(signal + real, imaginary)  # Rician, as magnitude images have
    data = np.where(brain, np.rint(signal * rng.uniform(200, 3000)), 0).astype(np.int16)

    images = nibabel.Nifti1Image(data, affine), nibabel.Nifti1Image(label, affine)
    for image in images:
        image.set_sform(affine, code=1)
        image.set_qform(affine, code=1)
        image.header.set_xyzt_units("mm", "sec")
    return images


def make_cohort(
    dataset_dir: str | os.PathLike, num_scans: int, seed: int = 0, section: str = "test", paired: bool = False
) -> Path:
    """Write a cohort as a Medical Segmentation Decathlon folder, unless it exists already.

    Every second scan has a lesion. The folder is built under a temporary name and then renamed, so that an interrupted
    run leaves nothing under ``dataset_dir``. A folder that already holds a ``dataset.json`` is not changed, whatever
    its seed and number of scans; remove it to make another one.

    Args:
        dataset_dir: the folder to make.
        num_scans: the number of scans, at most 100,000.
        seed: cohorts of different seeds share no scan; scan ``i`` is ``make_scan(seed * 100_000 + i, i % 2 == 1)``.
        section: ``"training"`` (``imagesTr``, ``labelsTr``) or ``"test"`` (``imagesTs``, ``labelsTs``).
        paired: scans 0 and 1, 2 and 3, ... show the same head, first without and then with a lesion; scan ``i`` is
            ``make_scan(seed * 100_000 + i // 2, i % 2 == 1)``. Such pairs teach a network only the lesion.

    Returns:
        The path of ``dataset.json``. Its list named ``section`` has for each scan the ``image`` and ``label`` files,
        relative to the folder, and ``lesion``: 0 or 1, the class.

    Raises:
        ImportError: nilearn is not installed.
        OSError: ``dataset_dir`` exists, is not empty and holds no ``dataset.json``.
    """
    dataset_dir = Path(dataset_dir).absolute()
    datalist = dataset_dir / "dataset.json"
    if datalist.exists():
        return datalist
    building = dataset_dir.with_name(f".{dataset_dir.name}.{uuid.uuid4().hex}")
    building.mkdir(parents=True)
    try:
        _write_cohort(building, num_scans, seed, section, paired)
        building.replace(dataset_dir)
    except OSError:
        if not datalist.exists():  # another process has made it meanwhile: as good as ours
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return datalist


def _write_cohort(folder: Path, num_scans: int, seed: int, section: str, paired: bool) -> None:
    suffix = "Tr" if section == "training" else "Ts"
    cases = []
    for index in range(num_scans):
        lesion = index % 2 == 1
        case = {kind: f"./{kind}s{suffix}/brain_{seed}_{index:03d}.nii.gz" for kind in ("image", "label")}
        head = index // 2 if paired else index
        for path, image in zip(case.values(), make_scan(seed * SCANS_PER_SEED + head, lesion), strict=True):
            (folder / path).parent.mkdir(exist_ok=True)
            image.to_filename(folder / path)
        cases.append({**case, "lesion": int(lesion)})
    lists = {"training": [], "test": [], section: cases}
    content = {"modality": {"0": "T1"}, "labels": {"0": "background", "1": "lesion"}, **lists}
    (folder / "dataset.json").write_text(json.dumps(content, indent=2) + "\n")


def _rotation(rng: np.random.Generator, degrees: float) -> np.ndarray:
    """A (4, 4) rotation by up to ``degrees`` about each axis."""
    matrix = np.eye(4)
    matrix[:3, :3] = Rotation.from_euler("xyz", rng.uniform(-degrees, degrees, 3), degrees=True).as_matrix()
    return matrix


def _shift(offset: np.ndarray) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:3, 3] = offset
    return matrix


def _pose(rng: np.random.Generator, centre: np.ndarray) -> np.ndarray:
    """The (4, 4) matrix from template mm to scanner mm: the head lies differently in each scan."""
    scale = np.diag([*rng.uniform(0.93, 1.05, 3), 1])
    return _shift(centre + rng.uniform(-15, 15, 3)) @ _rotation(rng, 10) @ scale @ _shift(-centre)


def _grid(rng: np.random.Generator, pose: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the affine (voxel to scanner mm) and shape of a field of view that holds the posed head."""
    axes = rng.permutation(3)  # voxel axis i runs along scanner axis axes[i]
    directions = np.zeros((4, 4))
    directions[axes, range(3)] = rng.choice([-1, 1], 3)
    directions[3, 3] = 1
    spacing = np.array(SPACINGS[rng.integers(len(SPACINGS))])
    extent = rng.uniform([175, 205, 180], [200, 235, 205])[axes]
    shape = np.ceil(extent / spacing).astype(int)
    tilt = _rotation(rng, 12)
    tilt = np.eye(4) if rng.random() < 0.4 else tilt
    middle = (pose @ np.append(_template().centre, 1))[:3] + rng.uniform(-5, 5, 3)
    affine = _shift(middle) @ tilt @ directions @ np.diag([*spacing, 1]) @ _shift(-(shape - 1) / 2)
    return affine, tuple(int(size) for size in shape)


def _map_grid(matrix: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the (3, *shape) coordinates of a grid's voxels under a (4, 4) matrix."""
    i, j, k = np.ogrid[tuple(slice(size) for size in shape)]
    return np.stack([row[0] * i + row[1] * j + row[2] * k + row[3] for row in matrix[:3]])


def _smooth_field(rng: np.random.Generator, shape: tuple[int, ...], order: int = 3) -> np.ndarray:
    """Return a random field of the lowest cosines along each axis, with zero mean and values in [-1, 1]."""
    weights = rng.normal(size=(order, order, order))
    weights[0, 0, 0] = 0
    x, y, z = (np.cos(np.pi * np.outer(np.arange(order), np.arange(size) + 0.5) / size) for size in shape)
    field = np.einsum("abc,ai,bj,ck->ijk", weights, x, y, z, optimize=True)
    return field / np.abs(field).max()


def _decoys(rng: np.random.Generator, points: np.ndarray, template: _Template) -> tuple[list, list]:
    """Return each decoy's share of every voxel (0 to 1) and its intensity there, and where the decoys are: points
    ``(N, 3)`` in template mm, and the radius around them in mm.
    """
    tissues, taken = [], []
    places = np.argwhere(template.depth >= 8)
    for number in range(VESSELS + SPOTS):
        line, radius = _place(rng, places, template)[None], rng.uniform(3, 4)
        if number < VESSELS:
            along, bend = rng.normal(size=(2, 3))
            along, steps = along / np.linalg.norm(along), np.linspace(-1, 1, 61)[:, None]
            bend = np.cross(along, bend) / np.linalg.norm(np.cross(along, bend))
            line = line + steps * along * rng.uniform(20, 35) + steps**2 * bend * rng.uniform(0, 12)
            radius = rng.uniform(2.5, 3.2)
        low, high = line.min(axis=0) - radius - 2, line.max(axis=0) + radius + 2
        near = np.flatnonzero(((low < points.T) & (high > points.T)).all(axis=-1).T)
        distance, _ = cKDTree(line).query(points.reshape(3, -1)[:, near].T)
        share = np.clip(0.5 + (radius - distance) / 2, 0, 1)  # an edge 2 mm wide
        tissue = _bright(rng, points.reshape(3, -1)[:, near] - line[0][:, None], DECOY)
        tissues.append((_whole(points, near, share), _whole(points, near, tissue)))
        taken.append((line, radius))
    return tissues, taken


def _place(rng: np.random.Generator, places: np.ndarray, template: _Template) -> np.ndarray:
    """Return one of the places ``(N, 3)``, voxels of the depth's grid, in template mm."""
    return template.affine[:3, :3] @ (2 * places[rng.integers(len(places))]) + template.affine[:3, 3]


def _bright(rng: np.random.Generator, offset: np.ndarray, lowest: float) -> np.ndarray:
    """Return the textured intensity of a lesion or decoy at offsets ``(3, N)`` in mm, in the template's units."""
    texture = np.sin(rng.uniform(-0.5, 0.5, (6, 3)) @ offset + rng.uniform(0, 2 * np.pi, (6, 1))).mean(axis=0)
    return WHITE_MATTER * rng.uniform(lowest, lowest + 0.25) * (1 + 0.2 * texture)


def _lesion(
    rng: np.random.Generator, points: np.ndarray, template: _Template, taken: list
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return a lesion's share of every voxel (0 to 1), its intensity there in the template's units, its centre in
    template mm, and how far from it the lesion can reach, in mm.
    """
    axes = rng.uniform(7, 12) * rng.uniform(0.85, 1.15, 3)
    reach = 1.25 * axes.max() + 2  # as far out as the irregular boundary can reach
    places = np.argwhere(template.depth >= reach)
    centre = _place(rng, places[_is_clear(places, template, taken, reach + CLEAR)], template)
    turn = _rotation(rng, 180)[:3, :3]

    near = np.flatnonzero(np.sum((points - centre.reshape(3, 1, 1, 1)) ** 2, axis=0) < (2 * axes.max()) ** 2)
    offset = turn @ (points.reshape(3, -1)[:, near] - centre[:, None])
    radius = np.linalg.norm(offset / axes[:, None], axis=0)  # 1 on the ellipsoid
    direction = offset / np.maximum(np.linalg.norm(offset, axis=0), 1e-6)
    ripple = np.sin(rng.uniform(2, 5, (4, 3)) @ direction + rng.uniform(0, 2 * np.pi, (4, 1))).mean(axis=0)

    inside = (1 + 0.25 * ripple - radius) * axes.mean()  # about the depth under the lesion's surface, mm
    share = np.clip(0.5 + inside / 3, 0, 1)  # an edge 3 mm wide
    return _whole(points, near, share), _whole(points, near, _bright(rng, offset, LESION)), centre, reach


def _whole(points: np.ndarray, near: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the values of some voxels of a grid, by their flat indices, and 0 elsewhere."""
    whole = np.zeros(points[0].size)
    whole[near] = values
    return whole.reshape(points[0].shape)


def _is_clear(places: np.ndarray, template: _Template, taken: list, needed: float) -> np.ndarray:
    """Return which places ``(N, 3)`` are so far, in mm, from all that is taken, or the clearest twentieth."""
    mm = 2 * places @ template.affine[:3, :3].T + template.affine[:3, 3]
    clear = np.min([cKDTree(around).query(mm)[0] - radius for around, radius in taken], axis=0)
    return clear >= min(needed, float(np.quantile(clear, 0.95)))
