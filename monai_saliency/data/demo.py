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


class _Bright(NamedTuple):
    """A lesion or decoy, in the N voxels of a scan that it can reach."""

    voxels: np.ndarray  # (N,), their flat indices
    share: np.ndarray  # (N,), how much of each voxel it fills, 0 to 1
    intensity: np.ndarray  # (N,), in the template's units
    line: np.ndarray  # (M, 3), its middle, template mm
    radius: float  # how far from there it can reach, mm


@lru_cache(maxsize=1)
def _template() -> _Template:
    datasets = require("nilearn.datasets", extra="demo")
    image = datasets.load_mni152_template(resolution=1)
    intensity = np.asarray(image.dataobj, dtype=np.float32)
    brain = ndimage.binary_fill_holes(intensity > 0)
    depth = 2 * ndimage.distance_transform_edt(brain[::2, ::2, ::2])  # a coarse grid: 2 mm is fine for choosing places
    middle = np.mean(np.argwhere(brain), axis=0)
    centre = image.affine[:3, :3] @ middle + image.affine[:3, 3]
    return _Template(intensity, image.affine, depth.astype(np.float32), centre)


def make_scan(seed: int, lesion: bool | int) -> tuple[nibabel.Nifti1Image, nibabel.Nifti1Image]:
    """Make one skull-stripped T1 scan of the template brain, and the mask of its lesion."""
    template = _template()
    rng = np.random.default_rng([seed, 0])
    decoy_rng = np.random.default_rng([seed, 2])
    lesion_rng = np.random.default_rng([seed, 1])  # its own stream, so that a lesion changes nothing else

    pose = _pose(rng, template.centre)
    affine, shape = _grid(rng, pose)
    points = _points(rng, np.linalg.inv(pose) @ affine, shape)
    signal = _sampled(template, points).reshape(shape)
    brain = ndimage.binary_fill_holes(signal > 0.2)

    label = np.zeros(shape, dtype=np.uint8)
    signal = signal.astype(np.float64)
    bright = _decoys(decoy_rng, points, template)
    for decoy in bright:
        _add(decoy, signal)
    for _ in range(lesion):
        added = _lesion(lesion_rng, points, template, bright)
        _add(added, signal)
        label.flat[added.voxels[added.share >= 0.5]] = 1
        bright.append(added)
    label[~brain] = 0

    data = np.where(brain, np.rint(_acquired(rng, signal)), 0).astype(np.int16)
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
        head = index // 2 if paired else index
        files = make_scan(seed * SCANS_PER_SEED + head, lesion)
        case: dict[str, str | int] = {}
        for kind, image in zip(("image", "label"), files, strict=True):
            path = f"./{kind}s{suffix}/brain_{seed}_{index:03d}.nii.gz"
            (folder / path).parent.mkdir(exist_ok=True)
            image.to_filename(folder / path)
            case[kind] = path
        cases.append(case | {"lesion": int(lesion)})
    lists = {"training": [], "test": [], section: cases}
    content = {"modality": {"0": "T1"}, "labels": {"0": "background", "1": "lesion"}, **lists}
    (folder / "dataset.json").write_text(json.dumps(content, indent=2) + "\n")


# Geometry. ------------------------------------------------------------------------------------------------------------


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
    place = _shift(centre + rng.uniform(-15, 15, 3))
    turn = _rotation(rng, 10)
    return place @ turn @ scale @ _shift(-centre)


def _grid(rng: np.random.Generator, pose: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the affine (voxel to scanner mm) and shape of a field of view that holds the posed head."""
    axes = rng.permutation(3)  # voxel axis i runs along scanner axis axes[i]
    directions = np.zeros((4, 4))
    directions[axes, range(3)] = rng.choice([-1, 1], 3)
    directions[3, 3] = 1
    spacing = np.array(SPACINGS[rng.integers(len(SPACINGS))])
    extent = rng.uniform([175, 205, 180], [200, 235, 205])  # of the scanner's axes, mm
    shape = np.ceil(extent[axes] / spacing).astype(int)
    tilt = _rotation(rng, 12)
    if rng.random() < 0.4:
        tilt = np.eye(4)
    head = pose @ np.append(_template().centre, 1)
    middle = head[:3] + rng.uniform(-5, 5, 3)
    scale = np.diag([*spacing, 1])
    affine = _shift(middle) @ tilt @ directions @ scale @ _shift(-(shape - 1) / 2)
    return affine, tuple(shape.tolist())


def _points(rng: np.random.Generator, matrix: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The places (3, N) of a grid's voxels in template mm, by the (4, 4) matrix from voxels and a smooth deformation:
    no two brains have one shape.
    """
    i, j, k = np.ogrid[: shape[0], : shape[1], : shape[2]]
    points = []
    for a, b, c, offset in matrix[:3]:
        place = a * i + b * j + c * k + offset
        place += rng.uniform(1, 3) * _smooth_field(rng, shape)
        points.append(place.ravel())
    return np.stack(points)


def _smooth_field(rng: np.random.Generator, shape: tuple[int, ...], order: int = 3) -> np.ndarray:
    """Return a random field of the lowest cosines along each axis, with zero mean and values in [-1, 1]."""
    weights = rng.normal(size=(order, order, order))
    weights[0, 0, 0] = 0
    waves = []
    for size in shape:
        phase = np.outer(np.arange(order), np.arange(size) + 0.5)
        waves.append(np.cos(np.pi * phase / size))
    field = np.einsum("abc,ai,bj,ck->ijk", weights, *waves, optimize=True)
    return field / np.abs(field).max()


# What a scan shows. ---------------------------------------------------------------------------------------------------


def _sampled(template: _Template, points: np.ndarray) -> np.ndarray:
    """The template's intensity (N,) at places (3, N) in its mm."""
    ones = np.ones((1, points.shape[1]))
    homogeneous = np.concatenate([points, ones])
    voxels = np.linalg.inv(template.affine) @ homogeneous
    return ndimage.map_coordinates(template.intensity, voxels[:3], order=1)


def _acquired(rng: np.random.Generator, signal: np.ndarray) -> np.ndarray:
    """A signal as a scanner has it: with its contrast, bias field, noise and intensity scale."""
    signal = np.clip(signal, 0, None) ** rng.uniform(0.85, 1.2)
    signal *= np.exp(rng.uniform(0.03, 0.1) * _smooth_field(rng, signal.shape))  # the coil's bias field
    sigma = rng.uniform(0.015, 0.04)
    real, imaginary = rng.normal(0, sigma, (2, *signal.shape))
    signal = np.hypot(signal + real, imaginary)  # Rician, as magnitude images have
    return signal * rng.uniform(200, 3000)


def _add(bright: _Bright, signal: np.ndarray) -> None:
    """Add a lesion or decoy to a scan's signal, in place."""
    before = signal.flat[bright.voxels]
    signal.flat[bright.voxels] = (1 - bright.share) * before + bright.share * bright.intensity


def _decoys(rng: np.random.Generator, points: np.ndarray, template: _Template) -> list[_Bright]:
    """The decoys of a scan whose voxels lie at ``points`` (3, N): as bright as a lesion, but thin or small."""
    places = np.argwhere(template.depth >= 8)
    decoys = []
    for number in range(VESSELS + SPOTS):
        line = _place(rng, places, template)[None]
        radius = rng.uniform(3, 4)
        if number < VESSELS:
            line = _vessel(rng, line)
            radius = rng.uniform(2.5, 3.2)
        decoys.append(_decoy(rng, points, line, radius))
    return decoys


def _vessel(rng: np.random.Generator, start: np.ndarray) -> np.ndarray:
    """A bent line (61, 3) through a point (1, 3)."""
    along, other = rng.normal(size=(2, 3))
    along = along / np.linalg.norm(along)
    across = np.cross(along, other)
    across = across / np.linalg.norm(across)
    steps = np.linspace(-1, 1, 61)[:, None]
    straight = steps * along * rng.uniform(20, 35)
    bend = steps**2 * across * rng.uniform(0, 12)
    return start + straight + bend


def _decoy(rng: np.random.Generator, points: np.ndarray, line: np.ndarray, radius: float) -> _Bright:
    """What lies within a radius of a line (M, 3)."""
    margin = radius + 2
    low = line.min(axis=0)[:, None] - margin
    high = line.max(axis=0)[:, None] + margin
    is_near = (low < points) & (high > points)
    near = np.flatnonzero(is_near.all(axis=0))
    places = points[:, near]
    distance, _ = cKDTree(line).query(places.T)
    share = np.clip(0.5 + (radius - distance) / 2, 0, 1)  # an edge 2 mm wide
    intensity = _texture(rng, places - line[0][:, None], DECOY)
    return _Bright(near, share, intensity, line, radius)


def _lesion(rng: np.random.Generator, points: np.ndarray, template: _Template, taken: list[_Bright]) -> _Bright:
    """A lesion clear of what is there, in a scan whose voxels lie at ``points`` (3, N)."""
    axes = rng.uniform(7, 12) * rng.uniform(0.85, 1.15, 3)
    reach = 1.25 * axes.max() + 2  # as far out as the irregular boundary can reach
    places = np.argwhere(template.depth >= reach)
    is_clear = _is_clear(places, template, taken, reach + CLEAR)
    centre = _place(rng, places[is_clear], template)
    turn = _rotation(rng, 180)[:3, :3]

    from_centre = points - centre[:, None]
    squares = np.sum(from_centre**2, axis=0)
    near = np.flatnonzero(squares < (2 * axes.max()) ** 2)
    offset = turn @ from_centre[:, near]
    radius = np.linalg.norm(offset / axes[:, None], axis=0)  # 1 on the ellipsoid
    distance = np.linalg.norm(offset, axis=0)
    direction = offset / np.maximum(distance, 1e-6)
    ripple = _waves(rng, direction, 2, 5, 4)

    inside = (1 + 0.25 * ripple - radius) * axes.mean()  # about the depth under the lesion's surface, mm
    share = np.clip(0.5 + inside / 3, 0, 1)  # an edge 3 mm wide
    intensity = _texture(rng, offset, LESION)
    return _Bright(near, share, intensity, centre[None], reach)


def _texture(rng: np.random.Generator, offset: np.ndarray, lowest: float) -> np.ndarray:
    """The intensity of a lesion or decoy at offsets (3, N) in mm, in the template's units."""
    texture = _waves(rng, offset, -0.5, 0.5, 6)
    return WHITE_MATTER * rng.uniform(lowest, lowest + 0.25) * (1 + 0.2 * texture)


def _waves(rng: np.random.Generator, places: np.ndarray, low: float, high: float, count: int) -> np.ndarray:
    """The mean (N,) of some random waves at places (3, N); the wave vectors' entries lie between two limits."""
    vectors = rng.uniform(low, high, (count, 3))
    phases = rng.uniform(0, 2 * np.pi, (count, 1))
    return np.sin(vectors @ places + phases).mean(axis=0)


def _place(rng: np.random.Generator, places: np.ndarray, template: _Template) -> np.ndarray:
    """One of the places (N, 3), voxels of the depth's grid, in template mm."""
    chosen = places[rng.integers(len(places))]
    return _to_mm(chosen[None], template)[0]


def _to_mm(places: np.ndarray, template: _Template) -> np.ndarray:
    """Voxels (N, 3) of the depth's grid in template mm."""
    return 2 * places @ template.affine[:3, :3].T + template.affine[:3, 3]


def _is_clear(places: np.ndarray, template: _Template, taken: list[_Bright], needed: float) -> np.ndarray:
    """Which places (N, 3) are so far, in mm, from all that is taken, or the clearest twentieth."""
    mm = _to_mm(places, template)
    distances = [cKDTree(each.line).query(mm)[0] - each.radius for each in taken]
    clear = np.min(distances, axis=0)
    return clear >= min(needed, float(np.quantile(clear, 0.95)))
