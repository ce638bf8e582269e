"""`attach`: the overlay's maps for an evaluator that is made in Python."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.dependent import classify
from helpers.files import maps, rows_of
from helpers.layouts import Bundle
from helpers.scans import LPS, volume
from monai.bundle import ConfigParser
from monai.data import DataLoader, Dataset, PatchDataset
from monai.engines import EnsembleEvaluator, IterationEvents, SupervisedEvaluator
from monai.inferers import SlidingWindowInferer
from monai.transforms import (
    Compose,
    EnsureChannelFirst,
    EnsureChannelFirstd,
    LoadImage,
    LoadImaged,
    Orientationd,
    RandSpatialCropSamples,
)

import monai_saliency as ms


def evaluator_of(bundle: Bundle, **changes: Any) -> Any:
    """A bundle's evaluator, with its weights."""
    parser = ConfigParser()
    parser.read_config(bundle.config)
    parser.update({**bundle.settings, **changes})
    evaluator = parser.get_parsed_content("evaluator")
    evaluator.network.load_state_dict(torch.load(bundle.root / bundle.layout.weights, weights_only=True))
    return evaluator


def files(folder: Path) -> dict[str, bytes]:
    """All of each map's file: voxels and header."""
    return {str(p.relative_to(folder)): gzip.decompress(p.read_bytes()) for p in folder.rglob("*_saliency.nii.gz")}


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
    handler = ms.attach(evaluator, output_dir=tmp_path / "attached", **given)
    evaluator.run()

    assert maps(tmp_path / "attached") == maps(tmp_path / "overlay") != {}
    assert files(tmp_path / "attached") == files(tmp_path / "overlay")
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


def test_under_amp_and_by_default(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Patches are remembered, the windows lie on their grid, and the price is told before."""
    network = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1))
    inferer = SlidingWindowInferer((6, 6, 6), 2, 0.5)
    run = evaluator(tmp_path, network=network, inferer=inferer, amp=True)
    ms.attach(run, tmp_path / "maps", store_dir="", classes=[1], activation="softmax")
    run.run()
    said = capfd.readouterr()
    assert "hierarchical_occlusion" in said.out
    rows = rows_of(tmp_path / "maps" / "summary.csv")
    assert all(1 < float(row["predictions"]) <= 40 for row in rows)
    assert all(float(row["predictions"]) < float(row["forwards"]) for row in rows)


def explained(run: Any, folder: Path) -> list[str]:
    """The cases that get a map, and that nothing else is listed."""
    handler = ms.attach(run, folder, method="sliding_window", window_size=4, stride=4, activation="none", picture=False)
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
    found = explained(run, tmp_path / "maps")
    assert len(set(found)) == 6


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
    ms.attach(run, tmp_path / "maps", method="sliding_window", window_size=4, stride=4, activation="none")
    with pytest.raises(ValueError, match="calls its inferer 2 times for one batch"):
        run.run()
    assert not maps(tmp_path / "maps")


def test_an_ensemble_is_refused(tmp_path: Path) -> None:
    run = EnsembleEvaluator(torch.device("cpu"), [], [Classify(), Classify()], ["a", "b"])
    with pytest.raises(ValueError, match=r"EnsembleEvaluator without a network .* Explain the members"):
        ms.attach(run, tmp_path / "maps")


class Conditioned(torch.nn.Module):
    def forward(self, x: torch.Tensor, cond: Any) -> torch.Tensor:
        given = cond["v"] if isinstance(cond, dict) else cond[0]
        return classify(x) * given.reshape(-1, 1)


@pytest.mark.parametrize("kind", ["dict", "tensor"])
def test_further_inputs_of_each_image(kind: str, tmp_path: Path) -> None:
    """Wherever they lie, each image keeps its own."""

    def further(v: torch.Tensor) -> Any:
        return {"dict": {"v": v}, "tensor": v}[kind]

    class Network(Conditioned):
        def forward(self, x: torch.Tensor, cond: Any) -> torch.Tensor:
            return super().forward(x, {"v": cond} if kind == "tensor" else cond)

    data = [{"image": torch.rand(1, 12, 11, 10, generator=torch.manual_seed(i)), "v": 1.0 + i} for i in range(3)]
    rows = []
    for batch_size in (1, 3):
        run = SupervisedEvaluator(
            torch.device("cpu"),
            DataLoader(Dataset(data), batch_size=batch_size),
            Network(),
            prepare_batch=lambda batch, *_, **__: (batch["image"], None, (), {"cond": further(batch["v"])}),
        )
        out = tmp_path / f"maps{batch_size}"
        given: dict[str, Any] = {"method": "sliding_window", "window_size": 6, "stride": 6, "classes": [0]}
        ms.attach(run, out, activation="none", network_id=f"conditioned by a {kind}", **given)
        run.run()
        rows.append([(row["score"], row["peak_saliency"]) for row in rows_of(out / "summary.csv")])
    assert rows[0] == rows[1]
    assert len({score for score, _ in rows[0]}) == 3


def in_memory(items: list[dict[str, Any]], network: torch.nn.Module, batch_size: int = 1, **settings: Any) -> Any:
    loader = DataLoader(Dataset(items), batch_size=batch_size)
    return SupervisedEvaluator(torch.device("cpu"), loader, network=network, **settings)


WINDOWS: dict[str, Any] = {"method": "sliding_window", "window_size": 4, "stride": 4, "activation": "none"}


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
