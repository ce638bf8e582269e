"""`attach` for what is not a MONAI evaluator: a Lightning module's predict step, and a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import pytest
import torch
from helpers.dependent import classify
from helpers.files import maps, rows_of
from helpers.scans import LPS, volume
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedEvaluator
from monai.inferers import SlidingWindowInferer, sliding_window_inference
from monai.transforms import (
    Activationsd,
    Compose,
    EnsureChannelFirst,
    EnsureChannelFirstd,
    LoadImage,
    LoadImaged,
    Orientationd,
    ScaleIntensityd,
    Spacingd,
)

import monai_saliency as ms

lightning: Any = pytest.importorskip("lightning.pytorch", reason='needs pip install "monai-saliency[lightning]"')


class Classify(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return classify(x * self.scale)


def segmenter() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(2, 2, 1)).eval()


CLASSIFY: dict[str, Any] = {
    "method": "rise",
    "num_masks": 8,
    "grid_size": 3,
    "activation": "none",
    "classes": [1],
    "picture": False,
}
SEGMENT: dict[str, Any] = {"classes": [1], "store_dir": "", "picture": False}
#: by name: the network, the inferer that predicts, the images of a batch, and what is explained
KINDS: dict[str, tuple[Callable[[], torch.nn.Module], Any, int, dict[str, Any]]] = {
    "batches of two": (Classify, None, 2, CLASSIFY),
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
def test_a_predict_step_gets_the_evaluators_maps(
    kind: str, loader: Callable[[int], DataLoader], tmp_path: Path
) -> None:
    make, inferer, batch_size, settings = KINDS[kind]
    network = make()
    by_evaluator(network, inferer, loader(batch_size), tmp_path / "evaluator", **settings)
    module = Predicts(network, inferer)
    alone = trainer().predict(module, loader(batch_size))

    handler = ms.attach(module, tmp_path / "module", postprocessing=ACTIVATE, **settings)
    explained = trainer().predict(module, loader(batch_size))

    assert maps(tmp_path / "module") == maps(tmp_path / "evaluator") != {}
    assert same_rows(tmp_path / "module", tmp_path / "evaluator")
    assert handler.explained == ["s0", "s1", "s2"]
    assert all(map(torch.equal, alone, explained))
    assert inferer is None or module.inferer is inferer
    assert not network._forward_hooks


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
            assert torch.equal(prediction, before)
            met.append(len(list((tmp_path / "loop").glob("*_saliency.nii.gz"))))

    assert met == [min(3, batch_size * (i + 1)) for i in range(len(data))]  # nothing is written later
    assert maps(tmp_path / "loop") == maps(tmp_path / "evaluator") != {}
    assert same_rows(tmp_path / "loop", tmp_path / "evaluator")


def test_the_last_attachment_counts(loader: Callable[[int], DataLoader], tmp_path: Path) -> None:
    """One of two would explain for nothing; and of two runs each explains all."""
    module = Predicts(Classify())
    first = ms.attach(module, tmp_path / "first", **CLASSIFY)
    second = ms.attach(module, tmp_path / "second", **CLASSIFY)
    data = loader(1)
    for _ in range(2):
        trainer().predict(module, data)
    assert not first.explained
    assert second.explained == ["s0", "s1", "s2"] * 2


class Patches(Predicts):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return sliding_window_inference(batch["image"], (6, 6, 6), 1, self.model)


class Nothing(Predicts):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return batch["image"]


class Two(Predicts):
    def __init__(self) -> None:
        super().__init__(segmenter())
        self.head = Classify()


@pytest.mark.parametrize(
    ("module", "settings", "match"),
    [
        (lambda: Two(), {}, r"Two has weights in \['head', 'model'\], so which network predicts is unknown"),
        (lambda: Predicts(Classify()), {"inferer": "window"}, r"`inferer` must be the one .* attributes \[\]"),
        (lambda: "network", {}, "`evaluator` must be a MONAI evaluator, a Lightning module or the network of a loop"),
        (lambda: SupervisedEvaluator(torch.device("cpu"), [], Classify()), {"loader": []}, "an evaluator has its own"),
        (lambda: Classify(), {"method": "rice"}, r"`method` must be one of \["),
        (lambda: Classify(), {"target": "predicted"}, r"`target` must be 'auto' or a target, got 'predicted'"),
        (lambda: Classify(), {"target": ms.ClassScore(1, "none"), "classes": [0]}, "give them to ClassScore itself"),
        (
            lambda: Classify(),
            {"target": ms.ClassScore(1, "none"), "activation": "softmax"},
            "are for the target 'auto'",
        ),
    ],
)
def test_what_cannot_be_attached_to(module: Callable[[], Any], settings: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        ms.attach(module(), tmp_path / "maps", **settings)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (lambda: Patches(segmenter()), r"called its network \d+ times, .* let the module hold the inferer"),
        (lambda: Nothing(segmenter()), "called its network 0 times"),
        (lambda: Nothing(segmenter(), SlidingWindowInferer((6, 6, 6))), "called its `inferer` 0 times"),
    ],
)
def test_a_step_that_cannot_be_repeated(
    module: Callable[[], Any], match: str, loader: Callable[[int], DataLoader], tmp_path: Path
) -> None:
    """Else a patch would be explained for the scan."""
    made = module()
    ms.attach(made, tmp_path / "maps", **SEGMENT)
    with pytest.raises(ValueError, match=match):
        trainer().predict(made, loader(1))
    assert not maps(tmp_path / "maps")


def test_several_devices_are_refused(
    loader: Callable[[int], DataLoader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, run = Predicts(Classify()), trainer()
    ms.attach(module, tmp_path / "maps", **CLASSIFY)
    monkeypatch.setattr(type(run), "world_size", 2)
    with pytest.raises(ValueError, match="what one device predicts of one loader, and the trainer has 2 "):
        run.predict(module, loader(1))


def test_another_prediction_than_the_networks_is_a_failure(loader: Callable[[int], DataLoader], tmp_path: Path) -> None:
    """What is explained is what was predicted (law 10)."""
    data, network = loader(1), Classify()
    with torch.no_grad(), ms.attach(network, tmp_path / "maps", loader=data, **CLASSIFY) as explain:
        for number, batch in enumerate(data):
            explain(batch, network(batch["image"]) + (number == 1))
    assert explain.handler.explained == ["s0", "s2"]
    assert [row["case"] for row in rows_of(tmp_path / "maps" / "failures.csv")] == ["s1"]


@pytest.mark.parametrize("paired", [False, True])
def test_batches_that_are_no_dictionaries(paired: bool, loader: Callable[[int], DataLoader], tmp_path: Path) -> None:
    """The first entry is the image, and its transforms and file are found."""
    files = [item["image"] for item in loader(1).dataset.data]
    data, network = DataLoader(Dataset(files, Compose([LoadImage(), EnsureChannelFirst()]))), Classify()
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
