"""`attach`: the overlay's maps for an evaluator that is made in Python."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.brightness import Brightness
from helpers.dependent import classify
from helpers.dicom_series import expected_affine, write
from helpers.files import contents, maps, rows_of
from helpers.layouts import Bundle
from helpers.scans import LPS, volume
from helpers.tolerances import assert_same_bits
from monai.bundle import ConfigParser
from monai.data import DataLoader, Dataset, PatchDataset
from monai.engines import EnsembleEvaluator, IterationEvents, SupervisedEvaluator
from monai.inferers import SlidingWindowInferer
from monai.transforms import (
    Activationsd,
    Compose,
    EnsureChannelFirst,
    EnsureChannelFirstd,
    LoadImage,
    LoadImaged,
    Orientationd,
    RandSpatialCropSamples,
    ScaleIntensityd,
    Spacingd,
)

import monai_saliency as ms

WINDOWS: dict[str, Any] = {"method": "sliding_window", "window_size": 4, "stride": 4, "activation": "none"}


def evaluator_of(bundle: Bundle, **changes: Any) -> Any:
    """A bundle's evaluator, with its weights."""
    parser = ConfigParser()
    parser.read_config(bundle.config)
    parser.update({**bundle.settings, **changes})
    evaluator = parser.get_parsed_content("evaluator")
    evaluator.network.load_state_dict(torch.load(bundle.root / bundle.layout.weights, weights_only=True))
    return evaluator


@pytest.mark.parametrize(
    ("name", "method"),
    [("spleen_ct_segmentation", {}), ("breast_density_classification", {"method": "rise", "num_masks": 8})],
)
def test_the_overlays_maps(name: str, method: dict[str, Any], make: Callable[[str], Bundle], tmp_path: Path) -> None:
    bundle = make(name)
    chosen = {f"saliency_{id}": value for id, value in method.items()}
    overlay = {"saliency_dir": str(tmp_path / "overlay"), "output_dir": str(tmp_path / "out"), **chosen}
    bundle.explain(few_masks=bool(method), **overlay)
    evaluator = evaluator_of(bundle, output_dir=str(tmp_path / "out2"))
    given = method | ({"grid_size": 4} if method else {})
    handler = ms.attach(evaluator, output_dir=tmp_path / "attached", picture=False, report=False, **given)
    evaluator.run()
    files = [contents(tmp_path / out) for out in ("attached", "overlay")]
    saved, expected = ({name: each[name] for name in each if name.endswith("_saliency.nii.gz")} for each in files)
    assert saved == expected != {}  # voxels and headers
    first, second = (rows_of(tmp_path / out / "summary.csv") for out in ("attached", "overlay"))
    for row in [*first, *second]:
        del row["seconds"], row["settings"]
    assert first == second
    assert sorted(handler.explained) == sorted({row["case"] for row in first})


class Classify(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return classify(x)


def evaluator(tmp_path: Path, num_scans: int = 2, **settings: Any) -> SupervisedEvaluator:
    data = [{"image": str(volume(tmp_path / "scans" / f"s{i}.nii.gz", (12, 11, 10), LPS, i))} for i in range(num_scans)]
    transform = Compose([LoadImaged("image"), EnsureChannelFirstd("image"), Orientationd("image", "RAS", labels=None)])
    return SupervisedEvaluator(torch.device("cpu"), DataLoader(Dataset(data, transform)), **settings)


def explained(run: Any, folder: Path, **more: Any) -> list[str]:
    """The cases that get a map, and that nothing else is listed."""
    handler = ms.attach(run, folder, picture=False, **WINDOWS | more)
    run.run()
    assert not (folder / "failures.csv").exists()
    return handler.explained


def test_pieces_of_a_scan_are_cases_each(tmp_path: Path) -> None:
    """Of a dataset that cuts each scan into pieces, none is taken for one that was met before."""
    run = evaluator(tmp_path, network=Classify())
    files = [item["image"] for item in run.data_loader.dataset.data]
    scans = Dataset(files, Compose([LoadImage(image_only=True), EnsureChannelFirst()]))
    run.data_loader = DataLoader(PatchDataset(scans, RandSpatialCropSamples((6, 6, 6), 3, random_size=False), 3))
    run.state.epoch_length = None
    assert len(set(explained(run, tmp_path / "maps"))) == 6


class Mirrors(SupervisedEvaluator):
    """Test-time augmentation in the iteration."""

    def _iteration(self, engine: Any, batchdata: dict) -> dict:
        image = batchdata["image"]
        both = (self.inferer(image, self.network) + self.inferer(image.flip(-1), self.network)) / 2
        engine.state.output = {"image": image, "label": None, "pred": both}
        engine.fire_event(IterationEvents.FORWARD_COMPLETED)
        return engine.state.output


def test_an_evaluator_that_calls_its_inferer_twice_is_refused(tmp_path: Path) -> None:
    """Only the mirrored image's map was made, and lay mirrored on the scan."""
    loader = DataLoader(Dataset([{"image": torch.rand(1, 12, 11, 10)} for _ in range(2)]))
    run = Mirrors(torch.device("cpu"), loader, Classify())
    ms.attach(run, tmp_path / "maps", **WINDOWS)
    with pytest.raises(ValueError, match="calls its inferer 2 times for one batch"):
        run.run()
    assert not maps(tmp_path / "maps")


def test_an_ensemble_is_refused(tmp_path: Path) -> None:
    run = EnsembleEvaluator(torch.device("cpu"), [], [Classify(), Classify()], ["a", "b"])
    with pytest.raises(ValueError, match=r"EnsembleEvaluator without a network .* Explain the members"):
        ms.attach(run, tmp_path / "maps")


class Conditioned(torch.nn.Module):
    def forward(self, x: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
        return classify(x) * cond["v"].reshape(-1, 1)


def test_further_inputs_of_each_image(tmp_path: Path) -> None:
    """Wherever they lie, here in a dictionary, each image keeps its own."""
    data = [{"image": torch.rand(1, 12, 11, 10, generator=torch.manual_seed(i)), "v": 1.0 + i} for i in range(3)]
    prepare = lambda batch, *_, **__: (batch["image"], None, (), {"cond": {"v": batch["v"]}})  # noqa: E731
    rows = []
    for batch_size in (1, 3):
        run = in_memory(data, Conditioned(), batch_size, prepare_batch=prepare)
        out = tmp_path / f"maps{batch_size}"
        explained(run, out, window_size=6, stride=6, classes=[0], network_id="conditioned")
        rows.append([(row["score"], row["peak_saliency"]) for row in rows_of(out / "summary.csv")])
    assert rows[0] == rows[1]
    assert len({score for score, _ in rows[0]}) == 3


def halves(image: torch.Tensor, spacing: Any) -> torch.Tensor:
    return 1 + (torch.arange(image[0].numel()).reshape(1, *image.shape[1:]) > 400).long()


def test_numbers_of_each_image(tmp_path: Path) -> None:
    """Arguments that the evaluator gives its network by name are players; kept scores are of the same numbers."""
    baselines = {"clinical": {"age": 62.0, "crp": 3.0}}
    data = [{"image": torch.rand(1, 12, 11, 10, generator=torch.manual_seed(i)), "v": [71.0 + i, 9.0]} for i in (0, 1)]

    class Network(torch.nn.Module):
        def forward(self, x: torch.Tensor, clinical: torch.Tensor) -> torch.Tensor:
            return classify(x) * clinical[:, :1] + clinical[:, 1:]

    def run(items: list[dict[str, Any]], **settings: Any) -> list[str]:
        def prepare(batch: Any, *_: Any, **__: Any) -> Any:
            return batch["image"], None, (), {"clinical": torch.stack(batch["v"], dim=1).float()}

        evaluator = in_memory(items, Network(), batch_size=2, prepare_batch=prepare)
        given: dict[str, Any] = {"method": "shapley", "regions": halves, "classes": [0], "activation": "none"}
        given |= {"fill": 0.0, "mask_batch_size": 1, "network_id": "1", "report": False, **settings}
        ms.attach(evaluator, tmp_path, numbers=baselines, **given)
        evaluator.run()
        return [row["forwards"] for row in rows_of(tmp_path / "summary.csv")]

    assert run(data) == ["16", "16"]
    inputs = ms.DictInput("image", numbers=baselines)
    explain = ms.shapley(regions=halves, target=ms.ClassScore([0], "none"), inputs=inputs)
    table = rows_of(tmp_path / "regions.csv")
    for place, item in enumerate(data):
        given = {"image": item["image"][None], "clinical": torch.tensor([item["v"]])}
        (found,) = explain.explain(given, lambda batch: Network()(batch["image"], batch["clinical"]))
        rows = table[4 * place : 4 * place + 4]
        assert [row["name"] or row["region"] for row in rows] == ["1", "2", "age", "crp"]
        expected = ms.estimators.shapley_values(found).table().values()
        assert [float(row["saliency"]) for row in rows] == pytest.approx([*expected], rel=1e-4)
    assert run(data) == ["1", "1"]
    assert run([data[0], {**data[1], "v": [40.0, 9.0]}]) == ["1", "16"]
    with pytest.raises(ValueError, match=r"`numbers` names \['clinical'\]"):
        explained(evaluator(tmp_path, network=Classify()), tmp_path / "none", numbers=baselines)
    with pytest.raises(ValueError, match="`trust` measures networks of an image alone"):
        run(data, trust=True)


def in_memory(items: list[dict[str, Any]], network: torch.nn.Module, batch_size: int = 1, **settings: Any) -> Any:
    loader = DataLoader(Dataset(items), batch_size=batch_size)
    return SupervisedEvaluator(torch.device("cpu"), loader, network=network, **settings)


@pytest.mark.parametrize("first", ["mask", "image"])
def test_an_empty_first_scan_is_not_taken_for_its_mask(first: str, tmp_path: Path) -> None:
    """Its voxels equal those of the mask, whose affine is another one."""
    data = []
    key = "image" if first == "mask" else "scan"
    for i in range(2):
        scan = volume(tmp_path / "scans" / f"s{i}.nii.gz", (8, 8, 8), LPS, i)
        mask = volume(tmp_path / "masks" / f"m{i}.nii.gz", (8, 8, 8), np.diag([3.0, 3, 3, 1]), i)
        for file in (scan, mask) if i == 0 else (mask,):
            nib.save(nib.Nifti1Image(np.zeros((8, 8, 8), np.float32), nib.load(file).affine), file)
        data.append({"mask": str(mask), key: str(scan)})
    steps = Compose([LoadImaged(["mask", key]), EnsureChannelFirstd(["mask", key])])
    run = in_memory(data, Classify(), prepare_batch=lambda batch, *_, **__: (batch[key].clone(), None))
    run.data_loader.dataset.transform = steps
    handler = ms.attach(run, tmp_path / "maps", picture=False, fill=1.0, **WINDOWS)
    if key == "scan":
        with pytest.raises(ValueError, match="name it by --saliency_image_key"):
            run.run()
        return
    run.run()
    assert handler.explained == ["s0", "s1"]
    np.testing.assert_allclose(nib.load(tmp_path / "maps" / "s0_saliency.nii.gz").affine, LPS)


# `attach` for what is not a MONAI evaluator: a plain loop, which may be a Lightning module's predict step.
lightning: Any = pytest.importorskip("lightning.pytorch", reason='needs pip install "monai-saliency[lightning]"')


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return classify(x * self.scale)


def segmenter() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(2, 2, 1)).eval()


CLASSIFY: dict[str, Any] = {"method": "rise", "num_masks": 8, "grid_size": 3, "activation": "none", "classes": [1]}
CLASSIFY |= {"picture": False}
SEGMENT: dict[str, Any] = {"classes": [0], "store_dir": "", "picture": False}
#: by name: the network, the inferer that predicts, the images of a batch, and what is explained
KINDS: dict[str, tuple[Callable[[], torch.nn.Module], Any, int, dict[str, Any]]] = {
    "batches of two": (Scaled, None, 2, CLASSIFY),
    "sliding window": (segmenter, SlidingWindowInferer((12, 12, 12), 4, 0.25), 1, SEGMENT),
}
ACTIVATE = Activationsd("pred", softmax=True)


@pytest.fixture
def loader(tmp_path: Path) -> Callable[[int], DataLoader]:
    """Three scans through a preprocessing that changes their grid."""
    files = [volume(tmp_path / "scans" / f"s{i}.nii.gz", (12, 11, 10), LPS, i) for i in range(3)]
    steps = [Orientationd("image", "RAS", labels=None), Spacingd("image", (1.2, 1.2, 1.2)), ScaleIntensityd("image")]
    dataset = Dataset(
        [{"image": str(file)} for file in files], Compose([LoadImaged("image"), EnsureChannelFirstd("image"), *steps])
    )
    return lambda batch_size: DataLoader(dataset, batch_size=batch_size)


class Predicts(lightning.LightningModule):
    """Predicts by the network, or by an inferer."""

    def __init__(self, network: Any, inferer: Any = None) -> None:
        super().__init__()
        self.model = network
        if inferer is not None:
            self.inferer = inferer

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        images = batch["image"]
        return self.inferer(images, self.model) if hasattr(self, "inferer") else self.model(images)


class Explains(Predicts):
    """Has each batch explained right after its prediction."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        prediction = super().predict_step(batch, batch_idx)
        self.explain(batch, prediction)
        return prediction


def trainer(**settings: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, **quiet, **settings)


def by_evaluator(network: Any, inferer: Any, data: DataLoader, folder: Path, **settings: Any) -> Any:
    run = SupervisedEvaluator(torch.device("cpu"), data, network, inferer=inferer, postprocessing=Compose([ACTIVATE]))
    handler = ms.attach(run, folder, **settings)
    run.run()
    return handler


def same_rows(first: Path, second: Path) -> bool:
    """Whether two summaries hold the same, the time aside. Their marks name the loop's class."""
    rows = [rows_of(folder / "summary.csv") for folder in (first, second)]
    for row in (row for each in rows for row in each):
        del row["seconds"], row["settings"]
    return rows[0] == rows[1] != []


@pytest.mark.parametrize("kind", KINDS)
def test_a_predict_step_gets_the_evaluators_maps(kind: str, loader: Any, tmp_path: Path) -> None:
    make, inferer, batch_size, settings = KINDS[kind]
    network = make()
    by_evaluator(network, inferer, loader(batch_size), tmp_path / "evaluator", **settings)
    data = loader(batch_size)
    alone = trainer().predict(Predicts(network, inferer), data)
    module = Explains(network, inferer)
    given = {"loader": data, "inferer": inferer, "postprocessing": ACTIVATE, **settings}
    with ms.attach(network, tmp_path / "module", **given) as module.explain:
        explained = trainer().predict(module, data)
    assert maps(tmp_path / "module") == maps(tmp_path / "evaluator") != {}
    assert same_rows(tmp_path / "module", tmp_path / "evaluator")
    assert module.explain.handler.explained == ["s0", "s1", "s2"]
    assert all(map(torch.equal, alone, explained))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_gets_the_evaluators_maps(kind: str, loader: Callable[[int], DataLoader], tmp_path: Path) -> None:
    make, inferer, batch_size, settings = KINDS[kind]
    network = make()
    data = loader(batch_size)
    by_evaluator(network, inferer, data, tmp_path / "evaluator", **settings)
    given = {"loader": data, "inferer": inferer, "postprocessing": ACTIVATE, **settings}
    met = []
    with torch.no_grad(), ms.attach(network, tmp_path / "loop", **given) as explain:
        for batch in data:
            prediction = network(batch["image"]) if inferer is None else inferer(batch["image"], network)
            before = prediction.clone()
            explain(batch, prediction)
            assert_same_bits(prediction, before)
            met.append(len(list((tmp_path / "loop").glob("*_saliency.nii.gz"))))
    assert met == [min(3, batch_size * (i + 1)) for i in range(len(data))]  # nothing is written later
    assert maps(tmp_path / "loop") == maps(tmp_path / "evaluator") != {}
    assert same_rows(tmp_path / "loop", tmp_path / "evaluator")


@pytest.mark.parametrize(
    ("module", "settings", "match"),
    [
        (lambda: SupervisedEvaluator(torch.device("cpu"), [], Scaled()), {"loader": []}, "an evaluator has its own"),
        (lambda: Scaled(), {"method": "rice"}, r"`method` must be one of \["),
        (lambda: Scaled(), {"target": "predicted"}, r"`target` must be 'auto' or a target, got 'predicted'"),
        (lambda: Scaled(), {"target": ms.ClassScore(1, "none"), "classes": [0]}, "give them to ClassScore itself"),
        (lambda: Scaled(), {"target": ms.ClassScore(1, "none"), "activation": "softmax"}, "are for the target 'auto'"),
    ],
)
def test_what_cannot_be_attached_to(module: Callable[[], Any], settings: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        ms.attach(module(), tmp_path / "maps", **settings)


def test_another_prediction_than_the_networks_is_a_failure(loader: Callable[[int], DataLoader], tmp_path: Path) -> None:
    """What is explained is what was predicted (law 10)."""
    data, network = loader(1), Scaled()
    with torch.no_grad(), ms.attach(network, tmp_path / "maps", loader=data, **CLASSIFY) as explain:
        for number, batch in enumerate(data):
            explain(batch, network(batch["image"]) + (number == 1))
    assert explain.handler.explained == ["s0", "s2"]
    assert [row["case"] for row in rows_of(tmp_path / "maps" / "failures.csv")] == ["s1"]


@pytest.mark.parametrize("paired", [False, True])
def test_batches_that_are_no_dictionaries(paired: bool, loader: Callable[[int], DataLoader], tmp_path: Path) -> None:
    """The first entry is the image, and its transforms and file are found."""
    files = [item["image"] for item in loader(1).dataset.data]
    data, network = DataLoader(Dataset(files, Compose([LoadImage(), EnsureChannelFirst()]))), Scaled()
    with torch.no_grad(), ms.attach(network, tmp_path / "maps", loader=data, **CLASSIFY) as explain:
        for images in data:
            explain([images, torch.zeros(1)] if paired else images, network(images))
    assert explain.handler.explained == ["s0", "s1", "s2"]
    for path in (tmp_path / "maps").glob("*_saliency.nii.gz"):
        scan, found = nib.load(tmp_path / "scans" / path.name.replace("_saliency", "")), nib.load(path)
        assert (found.shape, found.affine.tolist()) == (scan.shape, scan.affine.tolist())


@pytest.fixture(autouse=True)
def global_state() -> Iterator[None]:
    yield
    assert not torch.is_inference_mode_enabled()


# DICOM series in somebody else's evaluator, which reads them with MONAI's own readers.
hd = pytest.importorskip("highdicom", reason="needs the dicom extra")

VOXELS = np.random.default_rng(0).integers(0, 50, (9, 11, 10)).astype(np.int16)
VOXELS[2:5, 4:8, 1:5] = 900


def in_order(step: int) -> Any:
    """Instance numbers that follow the positions, or lead against them."""

    def change(number: int, made: Any) -> Any:
        made.InstanceNumber = 50 + step * number
        return made

    return change


def gap(number: int, made: Any) -> Any:
    return None if number == 4 else in_order(1)(number, made)


def mixed(number: int, made: Any) -> Any:
    """Two slices in the middle have each other's number. MONAI makes its affine of the first and the last."""
    made.InstanceNumber = {3: 5, 5: 3}.get(number, number)
    return made


def explained_series(folders: list[Path], output_dir: Path, reader: str | None, **settings: Any) -> Any:
    steps = [LoadImaged("image", reader), EnsureChannelFirstd("image"), Orientationd("image", "RAS", labels=None)]
    dataset = Dataset([{"image": str(folder)} for folder in folders], Compose(steps))
    network = Brightness(spatial_dims=3, window=3)
    run = SupervisedEvaluator(torch.device("cpu"), DataLoader(dataset), network=network)
    handler = ms.attach(run, output_dir, classes=[1], report=False, **WINDOWS | settings)
    run.run()
    return handler


@pytest.mark.parametrize("reader", ["PydicomReader", None])  # None: ITK's where it is installed, else this one
def test_maps_go_back_to_their_series_whichever_way_it_was_read(reader: str | None, tmp_path: Path) -> None:
    """And series with a gap, or in an order that the reader may mistake, are refused."""
    series = {"up": in_order(1), "down": in_order(-1), "gap": gap, "mixed": mixed}
    folders = [tmp_path / "doe" / name for name in series]
    for number, (folder, change) in enumerate(zip(folders, series.values(), strict=True)):
        write(folder, f"1.2.{number + 3}", change, VOXELS)
    out = tmp_path / "out"
    handler = explained_series(folders, out, reader, dicom=True, dicom_seg=0.5, picture_scale=0.1)
    assert len(handler.explained) == 2
    failed = {row["error"] for row in rows_of(out / "failures.csv")}
    assert any("a gap of 5 mm after slice 4 of 8" in error for error in failed)
    assert any("instance numbers do not follow" in error for error in failed)
    assert len(failed) == 2
    assert not any(name in path.name for path in out.rglob("*") for name in (*series, "doe"))
    turned = []
    for case in handler.explained:
        saved = nib.load(out / f"{case}_saliency.nii.gz")
        turned.append(np.sign(np.linalg.det(saved.affine)))
        volume = hd.imread(out / f"{case}_saliency.dcm").get_volume(dtype=np.float64)
        values = saved.get_fdata()
        assert values.std() > 0
        region = hd.seg.segread(out / f"{case}_saliency_seg.dcm").get_volume(combine_segments=True)
        assert region.array.sum() == (values >= values.max() / 2).sum()
        for i, j, k in np.argwhere(np.ones(values.shape))[::37]:
            mm = np.diag([-1.0, -1, 1, 1]) @ saved.affine @ [i, j, k, 1]
            at = np.linalg.solve(volume.affine, mm)[:3]
            assert np.abs(at - np.rint(at)).max() < 1e-3
            assert volume.array[tuple(np.rint(at).astype(int))] == values[i, j, k]
        peak = saved.affine @ [*np.unravel_index(values.argmax(), values.shape), 1]
        column, row, number = np.linalg.solve(expected_affine(), peak)[:3]
        assert 0 <= column < 7
        assert 2 <= row < 10
        assert 0 <= number < 7
        assert len([*(out / f"{case}_saliency_colour").iterdir()]) == len(VOXELS)
    if reader:
        assert sorted(turned) == [-1, 1]  # MONAI's reader has the slices of one of them the other way round
