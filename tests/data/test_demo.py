"""The demo's scans: what is promised of them, and the demo as the README runs it."""

import json
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers import commands
from helpers.files import rows_of
from helpers.paths import ROOT, TESTS
from scipy import ndimage

from monai_saliency.data import demo
from monai_saliency.data.cohort import find_cases
from monai_saliency.data.demo import make_cohort, make_scan
from monai_saliency.metrics.peak import peak_voxel

OBLIQUE_SEED, ANISOTROPIC_SEED = 11, 16  # checked by test_seeds_differ_as_real_scans_do

made = lru_cache(maxsize=None)(make_scan)


def voxels(image: nib.Nifti1Image) -> np.ndarray:
    return np.asarray(image.dataobj)


def is_oblique(affine: np.ndarray) -> bool:
    """Whether some voxel axis is over half a degree off the scanner's axes."""
    return bool(np.rad2deg(nib.affines.obliquity(affine)).max() > 0.5)


def is_anisotropic(affine: np.ndarray) -> bool:
    edges = nib.affines.voxel_sizes(affine)
    return bool(edges.max() / edges.min() > 1.1)


def mm_to_lesion(label: nib.Nifti1Image) -> np.ndarray:
    """Millimetres from each voxel to the nearest voxel of the lesion."""
    return ndimage.distance_transform_edt(voxels(label) == 0, sampling=nib.affines.voxel_sizes(label.affine))


@pytest.mark.slow
def test_seeds_differ_as_real_scans_do() -> None:
    seeds = range(8, 17)
    shapes, affines = set(), {}
    for seed in seeds:
        scan, _ = made(seed, False)
        shapes.add(scan.shape)
        affines[seed] = scan.affine
    assert len(shapes) > len(seeds) / 2
    assert len({affine.tobytes() for affine in affines.values()}) == len(seeds)
    assert len({nib.aff2axcodes(affine) for affine in affines.values()}) >= 5
    oblique = {seed for seed in seeds if is_oblique(affines[seed])}
    assert OBLIQUE_SEED in oblique
    assert oblique < set(seeds)
    anisotropic = {seed for seed in seeds if is_anisotropic(affines[seed])}
    assert ANISOTROPIC_SEED in anisotropic
    assert anisotropic < set(seeds)
    # Some voxel axes are mirrored against the scanner's handedness, some are not.
    mirrored = {seed for seed in seeds if np.linalg.det(affines[seed][:3, :3]) < 0}
    assert set() < mirrored < set(seeds)


@pytest.mark.parametrize("axis", range(3))
def test_right_front_and_top_are_where_the_affine_says(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A brain that gets brighter along one axis does so along that axis of the scanner; a real one is symmetric."""
    template = demo._template()
    voxels_from_middle = np.arange(template.intensity.shape[axis]) - (template.intensity.shape[axis] - 1) / 2
    ramp = 0.6 + 0.005 * voxels_from_middle * template.affine[axis, axis]
    along_axis = np.moveaxis(np.broadcast_to(ramp, (1, 1, len(ramp))), 2, axis)
    brighter = template._replace(intensity=along_axis * (template.intensity > 0))
    monkeypatch.setattr(demo, "_template", lambda: brighter)
    for seed in (OBLIQUE_SEED, ANISOTROPIC_SEED):
        scan, _ = make_scan(seed, lesion=False)
        inside = np.argwhere(voxels(scan) > 0)[::50]
        mm = nib.affines.apply_affine(scan.affine, inside)
        values = voxels(scan)[tuple(inside.T)].astype(float)
        gradient = np.linalg.lstsq(mm - mm.mean(axis=0), values - values.mean(), rcond=None)[0]
        assert gradient[axis] / np.linalg.norm(gradient) > np.cos(np.deg2rad(30))


def test_label_is_the_lesion() -> None:
    for seed in (OBLIQUE_SEED, ANISOTROPIC_SEED):
        scan, label = made(seed, True)
        healthy, empty = made(seed, False)
        for image in (label, healthy, empty):
            np.testing.assert_array_equal(image.affine, scan.affine)
            assert image.shape == scan.shape
        assert not voxels(empty).any()
        assert set(np.unique(voxels(label)).tolist()) == {0, 1}
        inside = voxels(label) == 1
        assert voxels(scan)[inside].min() > 0
        assert ndimage.binary_fill_holes(voxels(healthy) > 0)[inside].all()
        # One blob of the size that is promised: semi-axes of about 6 to 14 mm.
        assert ndimage.label(inside)[1] == 1
        volume = inside.sum() * abs(np.linalg.det(scan.affine[:3, :3]))
        assert 4 / 3 * np.pi * 5**3 < volume < 4 / 3 * np.pi * 15**3
        # The twins differ in the lesion, its 3 mm edge, and a few voxels' rounding; a voxel is up to 3 mm.
        before, after = voxels(healthy).astype(float), voxels(scan).astype(float)
        far = mm_to_lesion(label) > 6
        rounded = before[far] != after[far]
        assert rounded.mean() < 1e-4  # single precision is off by about 1e-4 of a unit at intensities of 1000
        assert np.abs(before - after)[far].max() <= 1
        assert after[inside].mean() > 1.2 * before[inside].mean()
        assert (after[inside] > before[inside]).mean() > 0.9


def test_header() -> None:
    for image, dtype in zip(made(OBLIQUE_SEED, True), (np.int16, np.uint8), strict=True):
        assert image.get_data_dtype() == dtype
        assert image.header["sform_code"] == image.header["qform_code"] == 1
        assert image.header.get_xyzt_units() == ("mm", "sec")
        np.testing.assert_allclose(image.get_sform(), image.get_qform(), atol=1e-3)
        np.testing.assert_allclose(image.get_sform(), image.affine, atol=1e-4)
    scan, _ = made(OBLIQUE_SEED, True)
    data = voxels(scan)
    assert data.min() == 0
    assert 0.05 < (data > 0).mean() < 0.6
    assert all((data.take(side, axis) == 0).mean() > 0.95 for axis in range(3) for side in (0, -1))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], tuple[nib.Nifti1Image, nib.Nifti1Image]]:
    """Tiny scans in place of brains, for tests of files alone."""

    def tiny(seed: int, lesion: bool) -> tuple[nib.Nifti1Image, nib.Nifti1Image]:
        label = np.zeros((2, 2, 2), np.uint8)
        label[0, 0, 0] = lesion
        return nib.Nifti1Image(np.full((2, 2, 2), seed, np.int32), np.eye(4)), nib.Nifti1Image(label, np.eye(4))

    monkeypatch.setattr(demo, "make_scan", tiny)
    return tiny


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("section", "suffix"), [("test", "Ts"), ("training", "Tr")])
def test_cohort_is_what_find_cases_reads(section: str, suffix: str, tmp_path: Path) -> None:
    listing = make_cohort(tmp_path / "demo", num_scans=6, seed=3, section=section)
    cases = find_cases(tmp_path / "demo")
    assert cases == find_cases(tmp_path / "demo", section=section)
    assert [case["case"] for case in cases] == [f"images{suffix}/brain_3_{index:03d}" for index in range(6)]
    entries = json.loads(listing.read_text())[section]
    for index, (case, entry) in enumerate(zip(cases, entries, strict=True)):
        assert case["channels"] == 1
        assert Path(case["image"]) == tmp_path / "demo" / entry["image"]
        assert Path(case["label"]) == tmp_path / "demo" / entry["label"]
        assert voxels(nib.load(case["image"]))[0, 0, 0] == 300_000 + index
        assert voxels(nib.load(case["label"])).any() == (entry["lesion"] == 1) == (index % 2 == 1)


@pytest.mark.usefixtures("quick")
def test_paired_cohort_shows_each_head_twice(tmp_path: Path) -> None:
    make_cohort(tmp_path / "demo", num_scans=4, paired=True)
    heads = [int(voxels(nib.load(case["image"]))[0, 0, 0]) for case in find_cases(tmp_path / "demo")]
    assert heads == [0, 0, 1, 1]


@pytest.mark.usefixtures("quick")
def test_second_call_leaves_the_files(tmp_path: Path) -> None:
    make_cohort(tmp_path / "demo", num_scans=4)
    before = files(tmp_path)
    assert len(before) == 9
    make_cohort(tmp_path / "demo", num_scans=4)
    assert files(tmp_path) == before


def test_interrupted_call_leaves_nothing(quick: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(seed: int, lesion: bool) -> tuple[nib.Nifti1Image, nib.Nifti1Image]:
        if seed == 2:
            raise KeyboardInterrupt
        return quick(seed, lesion)

    monkeypatch.setattr(demo, "make_scan", stops)
    with pytest.raises(KeyboardInterrupt):
        make_cohort(tmp_path / "sub" / "demo", num_scans=4)
    assert list((tmp_path / "sub").iterdir()) == []
    # What was stopped can be made afterwards.
    monkeypatch.setattr(demo, "make_scan", quick)
    make_cohort(tmp_path / "sub" / "demo", num_scans=4)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["demo"]


@pytest.mark.usefixtures("quick")
def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        make_cohort(tmp_path, num_scans=2)
    assert list(files(tmp_path)) == ["notes.txt"]


@pytest.fixture
def demo_run(tmp_path: Path) -> Path:
    """The folder of the demo's cohort, ``demo``, and of what the README's first command makes of it, ``eval``.

    ``.ci/run`` has just run that command, in an environment that holds nothing else, and names the folder here.
    """
    if "DEMO_RUN" in os.environ:
        return ROOT / os.environ["DEMO_RUN"]
    command = ["-m", "monai.bundle", "run", "--bundle_root", "bundle"]
    command += ["--config_file", "bundle/configs/inference.yaml", "--output_dir", tmp_path / "eval"]
    command += ["--demo_dir", tmp_path / "demo", "--dataset_dir", tmp_path / "demo"]
    done = commands.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return tmp_path


@pytest.mark.slow
def test_demo_end_to_end(demo_run: Path) -> None:
    entries = json.loads((demo_run / "demo" / "dataset.json").read_text())["test"]
    assert len(entries) == 10
    table = rows_of(demo_run / "eval" / "summary.csv")
    assert len(table) == len(entries)
    rows = {row["case"]: row for row in table}
    affines, right, near = [], [], []
    for entry in entries:
        case = entry["image"].removeprefix("./").removesuffix(".nii.gz")
        row = rows.pop(case)
        scan, label = (nib.load(demo_run / "demo" / entry[kind]) for kind in ("image", "label"))
        saliency = nib.load(demo_run / "eval" / f"{case}_saliency.nii.gz")
        assert saliency.shape == scan.shape
        np.testing.assert_allclose(saliency.affine, scan.affine, rtol=0, atol=1e-4)
        np.testing.assert_allclose(saliency.get_sform(), scan.get_sform(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(saliency.get_qform(), scan.get_qform(), rtol=0, atol=1e-3)
        for field in ("sform_code", "qform_code", "xyzt_units"):
            assert saliency.header[field] == scan.header[field]
        data = saliency.get_fdata(dtype=np.float32)
        assert np.isfinite(data).all()
        assert data.std() > 0
        affines.append(scan.affine)
        right.append(int(row["prediction"]) == entry["lesion"])
        if entry["lesion"] and right[-1]:
            near.append(mm_to_lesion(label)[peak_voxel(data)] <= 10)
        assert_picture(demo_run / "eval" / f"{case}_saliency.png")
    assert not rows
    assert any(map(is_oblique, affines))
    assert any(map(is_anisotropic, affines))
    assert any(is_oblique(affine) and is_anisotropic(affine) for affine in affines)
    assert sum(right) >= 8
    assert np.mean(near) >= 0.8
    assert not [*(demo_run / "demo").rglob(".tmp*"), *(demo_run / "eval").rglob(".tmp*")]


def assert_picture(path: Path) -> None:
    """A whole PNG that shows something in colour."""
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 200
    assert pixels.std() > 0.05
    assert np.ptp(pixels, axis=-1).max() > 0.3


def peak(*arguments: object) -> float:
    """The largest resident memory of a process of the benchmark, in MiB."""
    script = TESTS / "benchmarks" / "memory.py"
    return float((commands.run([script, "--inside", json.dumps(arguments)], check=True).stdout or "").split()[-1])


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_masks() -> None:
    assert peak("masks", 2000, 64) / peak("masks", 200, 64) < 1.02
