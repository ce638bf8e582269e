from itertools import product
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.scans import damage, rotation, write_scan
from helpers.tolerances import assert_same_bits
from matplotlib.figure import Figure
from monai.data import CacheDataset, LMDBDataset, MetaTensor, PersistentDataset, set_track_meta
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityd, Spacingd

from monai_saliency import ClassScore, Saliency, Saliencyd, channel_occlusion, sliding_window
from monai_saliency.data import CachedDataset
from monai_saliency.errors import CaseError, NothingToExplain, root_cause
from monai_saliency.transforms import CheckScand, SaveSaliencyd


def total(x: torch.Tensor) -> torch.Tensor:
    """A network whose score is the sum of squares, twice over for a second class."""
    score = (x**2).flatten(1).sum(1, keepdim=True)
    return torch.cat([score, 2 * score], dim=1)


EXPLAIN = sliding_window(2, 2, target=ClassScore([0, 1], "none"))
EXPLAIN_VOXELS = sliding_window(1, 1, target=ClassScore([0], "none"))


def oblique_affine() -> np.ndarray:
    """Rotated about two axes, left-handed, anisotropic, off centre."""
    affine = np.eye(4)
    affine[:3, :3] = rotation(0.2, -0.15) @ np.diag([-1.1, 1.3, 2.0])
    affine[:3, 3] = [17.0, -31.0, 5.5]
    return affine


SHAPE, PLANTED = (17, 14, 11), (11, 4, 7)


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """A dark scan with one bright spot, sform code 4, qform code 2, mm and milliseconds."""
    volume = np.zeros(SHAPE, dtype=np.int16)
    volume[PLANTED] = 1000
    image = nib.Nifti1Image(volume, oblique_affine())
    image.set_sform(oblique_affine(), code=4)
    image.set_qform(oblique_affine(), code=2)
    image.header.set_xyzt_units("mm", "msec")
    path = tmp_path / "scans" / "oblique.nii.gz"
    path.parent.mkdir()
    nib.save(image, path)
    return path


def loaded(path: Path) -> dict[str, Any]:
    return Compose([LoadImaged("image"), EnsureChannelFirstd("image")])({"image": str(path), "case": "sub/oblique"})


def on_scan(path: Path, maps: torch.Tensor) -> dict[str, Any]:
    """An item whose map lies on the scan."""
    item = loaded(path)
    item["saliency"] = MetaTensor(maps).copy_meta_from(item["image"])
    return item


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class TestSaliency:
    @pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, MetaTensor])
    def test_map_of_one_image_is_the_inferers(self, kind: Any) -> None:
        image = torch.randn(1, 6, 8, 4, generator=torch.Generator().manual_seed(0))
        saliency = Saliency(total, EXPLAIN)(kind(image))
        assert isinstance(saliency, MetaTensor)
        assert_same_bits(saliency.as_tensor(), EXPLAIN(image[None], total)[0])
        # By hand: hiding a block takes its sum of squares.
        assert float(saliency[1, 0, 0, 0]) == pytest.approx(2 * float((image[0, :2, :2, :2] ** 2).sum()), rel=1e-4)

    def test_law_6_meta_data_is_the_images(self, scan: Path) -> None:
        image = Spacingd("image", (1.0, 1.0, 2.5))(loaded(scan))["image"]
        before = image.clone()
        saliency = Saliency(total, EXPLAIN)(image)
        assert_same_bits(saliency.affine, image.affine)
        assert saliency.meta["filename_or_obj"] == str(scan)
        assert str(saliency.applied_operations) == str(image.applied_operations)
        saliency.applied_operations.clear()
        assert image.applied_operations
        assert_same_bits(image, before)

    @pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
    def test_without_meta_data_the_map_is_the_same(self, kind: Any, request: pytest.FixtureRequest) -> None:
        request.addfinalizer(lambda: set_track_meta(True))
        image = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0))
        set_track_meta(False)
        saliency = Saliency(total, EXPLAIN)(kind(image))
        for top, left in product((0, 2), repeat=2):
            block = float((image[0, top : top + 2, left : left + 2] ** 2).sum())
            assert saliency[0, top + 1, left].item() == pytest.approx(block, rel=1e-4)

    @pytest.mark.parametrize("dataset", [PersistentDataset, LMDBDataset, CacheDataset, CachedDataset])
    def test_caches_of_preprocessed_scans_hold_no_map(self, dataset: Any, tmp_path: Path) -> None:
        """They notice no other weights: the map of a score ``w * sum`` must change with ``w``."""
        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1, bias=False))
        steps = Compose([ScaleIntensityd("image"), Saliencyd("image", network, EXPLAIN_VOXELS)])
        folder = {"cache_dir": tmp_path} if dataset in (PersistentDataset, LMDBDataset) else {}
        data = dataset([{"case": "a", "image": torch.tensor([[[0.0, 4.0], [1.0, 2.0]]])}], steps, **folder)
        for weight in (1.0, -3.0):
            torch.nn.init.constant_(network[1].weight, weight)
            assert data[0]["image_saliency"].flatten().tolist() == [0, weight, weight / 4, weight / 2]


class TestSaliencyd:
    def test_each_key_gets_its_map(self) -> None:
        ct, mr = (torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
        item = {"ct": ct, "mr": mr, "age": 63}
        out = Saliencyd(["ct", "mr"], total, EXPLAIN)(item)
        maps = {"ct_saliency", "mr_saliency"}
        assert set(out) == {"ct", "mr", "age"} | maps | {f"{name}_legends" for name in maps}
        assert set(item) == {"ct", "mr", "age"}
        for key in ("ct", "mr"):
            assert_same_bits(out[f"{key}_saliency"].as_tensor(), EXPLAIN(item[key][None], total)[0])
            assert out[key] is item[key]

    def test_without_anything_to_explain(self, tmp_path: Path) -> None:
        """It raises, or where keys may be missing the item has no map, which later steps leave out too."""
        explain = sliding_window(2, 2, target=ClassScore("positive", "none"))
        item = {"image": torch.zeros(1, 4, 4)}
        with pytest.raises(NothingToExplain, match="no class scores above"):
            Saliencyd("image", total, explain)(item)
        steps = [Saliencyd("image", total, explain, "saliency", allow_missing_keys=True)]
        steps += [SaveSaliencyd("saliency", tmp_path, allow_missing_keys=True)]
        assert list(Compose(steps)(item)) == ["image"]
        assert not list(tmp_path.iterdir())

    def test_names(self) -> None:
        image = torch.ones(1, 4, 4)
        assert set(Saliencyd("image", total, EXPLAIN, names="why")({"image": image})) == {"image", "why", "why_legends"}
        out = Saliencyd(["a", "b"], total, EXPLAIN, names=["x", "y"])({"a": image, "b": 2 * image})
        assert (float(out["x"][0, 0, 0]), float(out["y"][0, 0, 0])) == (4.0, 16.0)
        with pytest.raises(ValueError, match="`names` must name one place for each of the keys"):
            Saliencyd(["a", "b"], total, EXPLAIN, names="why")


GOOD = MetaTensor(torch.rand(1, 4, 5, 6), affine=torch.diag(torch.tensor([0.005, 0.005, 0.02, 1.0])))


def broken(voxels: dict | None = None, affine: Any = None) -> MetaTensor:
    image = GOOD.clone()
    for voxel, value in (voxels or {}).items():
        image[voxel] = value
    if affine is not None:
        image.affine = torch.as_tensor(affine, dtype=torch.float64)
    return image


class TestCheckScand:
    def test_a_good_scan_passes_unchanged(self) -> None:
        """Small and anisotropic voxels are no fault."""
        item = {"image": GOOD, "case": "ct_7"}
        before = GOOD.clone()
        assert CheckScand("image")(item)["image"] is GOOD
        assert_same_bits(GOOD, before)
        CheckScand("image", spatial_dims=2)({"image": torch.rand(1, 4, 5)})
        CheckScand("image")({"image": torch.rand(2, 4, 5, 6), "channels": 2})
        CheckScand("image")({"image": MetaTensor(torch.rand(1, *SHAPE), affine=oblique_affine())})
        CheckScand(["image", "other"], allow_missing_keys=True)(item)

    @pytest.mark.parametrize(
        ("image", "match"),
        [
            (broken({(0, 1, 2, 3): float("nan"), (0, 0, 0, 0): float("nan")}), "2 of its voxels are NaN or infinite"),
            (broken({(0, 1, 2, 3): float("inf")}), "1 of its voxels are NaN or infinite"),
            (torch.rand(30, 4, 5, 6), r"4D series of 30 volumes .*\(4, 5, 6\).* 1 is expected: split it"),
            (torch.rand(1, 4, 5), r"2 spatial axes \(4, 5\), 3 are expected"),
            (torch.rand(1, 4, 5, 6, 7), r"4 spatial axes \(4, 5, 6, 7\), 3 are expected"),
            (broken(affine=np.diag([1.0, 0, 1, 1])), "is singular"),
            (broken(affine=np.array([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])), "is singular"),
            (broken(affine=np.diag([1.0, np.nan, 1, 1])), "is singular"),
            (broken(affine=[[1.0, 0, 0, 0], [0, 1, 0, np.nan], [0, 0, 1, 0], [0, 0, 0, 1]]), "its affine "),
        ],
    )
    def test_refused(self, image: torch.Tensor, match: str) -> None:
        with pytest.raises(CaseError, match=rf"case ct_7: .*{match}") as error:
            CheckScand("image")({"image": image, "case": "ct_7"})
        assert error.value.case == "ct_7"

    def test_affine_of_the_file(self, scan: Path) -> None:
        """MONAI's reader may put another affine in the place of a singular one."""
        image = nib.load(scan)
        image.set_qform(None, code=0)
        image.header.set_sform(np.diag([1.0, 0, 2, 1]), code=2)
        flat = scan.with_name("flat.nii.gz")
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj), None, image.header), flat)
        with pytest.raises(CaseError, match=r"case sub/oblique: its affine .* is singular"):
            CheckScand("image")(loaded(flat))


class TestSaveSaliencyd:
    @pytest.mark.parametrize("count", [1, 2])
    def test_law_6_the_scans_own_header(self, scan: Path, tmp_path: Path, count: int) -> None:
        maps = torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))
        item = SaveSaliencyd("saliency", tmp_path / "out")(on_scan(scan, maps))
        path = tmp_path / "out" / "sub" / "oblique_saliency.nii.gz"
        assert item["saliency_path"] == str(path)
        written, original = nib.load(path), nib.load(scan)
        expected = maps[0] if count == 1 else maps.movedim(0, -1)
        assert_same_bits(written.get_fdata(dtype=np.float32), expected.numpy())
        assert written.get_data_dtype() == np.float32
        assert_same_bits(written.affine, original.affine)
        assert (int(written.header["sform_code"]), int(written.header["qform_code"])) == (4, 2)
        assert_same_bits(written.get_sform(), original.get_sform())
        assert_same_bits(written.get_qform(), original.get_qform())
        assert written.header.get_xyzt_units() == ("mm", "msec")
        assert written.header.get_zooms()[:3] == original.header.get_zooms()
        picture = path.with_name("oblique_saliency.png")
        assert files_below(tmp_path / "out") == [path, picture] or files_below(tmp_path / "out") == [picture, path]
        assert picture.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("count", [1, 2])
    def test_viewers_get_the_window_and_the_intent(self, count: int, scan: Path, tmp_path: Path) -> None:
        """What nibabel reads back: the window ends at the largest value, one-sided where no value is below zero."""
        maps = torch.rand(count, *SHAPE)
        maps[0, 0, 0, 0], maps[0, 1, 1, 1] = 7.5, torch.nan
        item = SaveSaliencyd("saliency", tmp_path / "out", picture=False)(on_scan(scan, maps))
        header = nib.load(item["saliency_path"]).header
        assert (float(header["cal_min"]), float(header["cal_max"])) == (0.0, 7.5)
        assert header.get_intent() == ("estimate", (), "saliency")
        assert header.get_xyzt_units()[0] == "mm"
        assert nib.load(item["saliency_path"]).get_data_dtype() == np.float32

    def test_pictures_name_the_channels(self, scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn = []

        def plot(*args: Any, labels: list[str] | None, **kwargs: Any) -> Figure:
            drawn.append(labels)
            return Figure()

        monkeypatch.setattr("monai_saliency.transforms.save.plot_saliency", plot)
        for explain in (channel_occlusion(target=ClassScore([1, 0], "none")), EXPLAIN):
            image = loaded(scan)["image"].float()
            (explanation,) = explain.explain(torch.cat([image, image])[None, :, :4, :4, :4], total)
            count = len(explanation.saliency)
            item = on_scan(scan, torch.ones(count, *SHAPE)) | {"explanation": explanation}
            SaveSaliencyd("saliency", tmp_path / "out")(item)
        names = [f"saliency of channel {channel} for {label}" for label in (1, 0) for channel in (0, 1)]
        assert drawn == [names, None]

    @pytest.mark.parametrize("fault", ["shape", "affine", "no meta data"])
    def test_a_map_off_the_grid_is_refused(self, scan: Path, tmp_path: Path, fault: str) -> None:
        item = on_scan(scan, torch.ones(1, *SHAPE))
        if fault == "shape":
            item["saliency"] = item["saliency"][:, 1:]
        elif fault == "affine":
            item["saliency"].affine[0, 3] += 1
        else:
            item["saliency"] = torch.ones(1, *SHAPE)
        with pytest.raises(CaseError, match="case sub/oblique: "):
            SaveSaliencyd("saliency", tmp_path / "out")(item)
        assert files_below(tmp_path / "out") == []

    def test_a_map_that_has_become_zero_is_refused(self, scan: Path, tmp_path: Path, caplog: Any) -> None:
        """One of a network that looks at nothing is zero from the start."""
        save = SaveSaliencyd("saliency", tmp_path / "out", picture=False)
        image, zeros = torch.ones(1, 1, 4, 4, 4), on_scan(scan, torch.zeros(2, *SHAPE))
        (seen,) = EXPLAIN.explain(image, total)
        with pytest.raises(CaseError, match="case sub/oblique: a map that was not zero is zero on the scan"):
            save(zeros | {"explanation": seen})
        assert files_below(tmp_path / "out") == []
        (blind,) = EXPLAIN.explain(image, lambda x: torch.zeros(len(x), 2))
        assert not nib.load(save(zeros | {"explanation": blind})["saliency_path"]).get_fdata().any()
        assert "hiding the whole scan leaves 100% of" in caplog.text

    def test_a_writer_that_fails_keeps_the_old_map(self, scan: Path, tmp_path: Path, monkeypatch: Any) -> None:
        save = SaveSaliencyd("saliency", tmp_path / "out", picture=False)
        path = Path(save(on_scan(scan, torch.ones(1, *SHAPE)))["saliency_path"])
        before = path.read_bytes()

        def fail(image: nib.Nifti1Image, path: Path) -> None:
            Path(path).write_bytes(b"half a file")
            raise KeyboardInterrupt

        monkeypatch.setattr(nib, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            save(on_scan(scan, torch.zeros(1, *SHAPE)))
        assert files_below(tmp_path / "out") == [path]
        assert path.read_bytes() == before


# Scans that would give a wrong map, or none after much work, are refused at once.
ONE = np.array([[-1.5, 0, 0, 20], [0, 1.5, 0, -30], [0, 0, 2.0, 10], [0, 0, 0, 1]])
SHIFTED = ONE + np.array([[0, 0, 0, 5.0]] + [[0.0] * 4] * 3)
WIDER = ONE @ np.diag([2.0, 1, 1, 1])
TILTED = ONE @ np.array([[1, 0, 0.2, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
ROUNDED = ONE + 1e-4


def check(path: Path, sform: tuple[np.ndarray, int], qform: tuple[np.ndarray, int], dims: int = 3) -> None:
    """Check a scan with such a header as our bundle does."""
    shape = (6, 5, 4)[:dims]
    image = nib.Nifti1Image(np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32), None)
    image.set_qform(qform[0], qform[1])
    image.set_sform(sform[0], sform[1], update_affine=True)
    nib.save(image, path)
    load(path, dims)


def load(path: Path, dims: int = 3) -> None:
    steps = [LoadImaged("image"), EnsureChannelFirstd("image"), CheckScand("image", spatial_dims=dims)]
    try:
        Compose(steps)({"image": str(path), "case": "ct"})
    except RuntimeError as error:
        raise root_cause(error) from None


@pytest.mark.parametrize("code", [1, 2])
def test_a_header_of_which_monai_reads_another_place(code: int, tmp_path: Path) -> None:
    """MONAI reads the form that agrees with the voxel sizes, nibabel and the saved map the sform."""
    with pytest.raises(CaseError, match=r"sform and the qform that MONAI reads put voxels up to 7.5 mm apart"):
        check(tmp_path / "ct.nii.gz", (WIDER, code), (ONE, 1))


@pytest.mark.parametrize(
    ("sform", "qform"),
    [
        ((ONE, 1), (ROUNDED, 1)),
        ((TILTED, 1), (TILTED, 1)),  # of which the qform keeps what it can hold
        ((ONE, 2), (SHIFTED, 0)),
        ((SHIFTED, 0), (ONE, 1)),
        # Two spaces: the scanner's, and that of the scan to which it was registered, in which the map lies.
        ((SHIFTED, 2), (ONE, 1)),
    ],
)
@pytest.mark.parametrize("dims", [2, 3])
def test_a_header_that_places_the_scan(sform: Any, qform: tuple[np.ndarray, int], dims: int, tmp_path: Path) -> None:
    check(tmp_path / "ct.nii.gz", sform, qform, dims)


def test_a_scan_that_is_not_what_was_packed(tmp_path: Path) -> None:
    """Which a checksum at the file's end shows, and nibabel does not read."""
    path = write_scan(tmp_path / "ct.nii.gz", (12, 13, 14), ONE)
    load(path)
    damage(path)
    with pytest.raises(CaseError, match=r"case ct: its file .*ct.nii.gz is damaged .CRC check failed.*: copy it again"):
        load(path)
