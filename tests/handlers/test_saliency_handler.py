import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.brightness import Brightness
from helpers.files import rows_of
from helpers.handler import handler_of
from helpers.scans import write_scan
from helpers.tolerances import assert_same_bits
from monai.data import DataLoader, Dataset, MetaTensor, list_data_collate
from monai.engines import SupervisedEvaluator
from monai.transforms import Compose, EnsureChannelFirstd, Invertd, LoadImaged, Spacingd

import monai_saliency as ms
from monai_saliency import attach
from monai_saliency.engines import CohortEvaluator
from monai_saliency.errors import CaseError
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks import Observed
from monai_saliency.methods import rise, sliding_window
from monai_saliency.storage.scans import scan_loader
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import Failures
from monai_saliency.targets import ClassScore, DetectionScore
from monai_saliency.transforms import Saliencyd, SaveDicomd, SaveSaliencyd
from monai_saliency.transforms.save import GRID_KEY

IMAGES = torch.stack([torch.full((1, 6, 6, 6), value) for value in (0.5, 1.0)])


def detector(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """One box at the mean brightness, and a second one, fainter, in bright images."""
    found = []
    for image in x:
        scores = image.mean() * torch.tensor([0.8, 0.6])
        kept = scores > 0.35
        boxes = torch.tensor([[0.0, 0, 0, 2, 2, 2], [3, 3, 3, 6, 6, 6]])
        found.append({"boxes": boxes[kept], "labels": torch.tensor([4, 7])[kept], "scores": scores[kept]})
    return found


def brightness(x: torch.Tensor) -> torch.Tensor:
    means = x.mean((1, 2, 3, 4))
    return torch.stack([means, 1 - means], 1)


def handle(inferer: PerturbationInferer, network: Any, folder: Path) -> list[dict[str, Any]]:
    """What postprocessing gets of a batch of two cases."""
    cases: list[dict[str, Any]] = []

    def postprocessing(case: dict[str, Any]) -> dict[str, Any]:
        cases.append(case)
        return case

    batch = list_data_collate([{"image": MetaTensor(image), "case": f"ct_{i}"} for i, image in enumerate(IMAGES, 1)])
    state = SimpleNamespace(output=batch, batch=batch)
    handler = handler_of(folder, inferer, network, postprocessing)
    handler(SimpleNamespace(state=state))
    handler.finish()
    return cases


def test_cases_with_different_numbers_of_boxes(tmp_path: Path) -> None:
    """Each box has a map and a row of its own."""
    explain = sliding_window(3, 3, target=DetectionScore(0.3), mask_batch_size=5)
    first, second = handle(explain, detector, tmp_path)
    assert (first["saliency"].shape, second["saliency"].shape) == ((1, 6, 6, 6), (2, 6, 6, 6))
    assert second["title"] == (
        "ct_2\npredicted 4 (0.800), explained: box 1 (class 4) scores 0.800; box 2 (class 7) scores 0.600"
    )
    rows = [(row["case"], row["class"], row["prediction"]) for row in rows_of(tmp_path / "summary.csv")]
    assert rows == [
        ("ct_1", "box 1 (class 4)", "4"),
        ("ct_2", "box 1 (class 4)", "4"),
        ("ct_2", "box 2 (class 7)", "4"),
    ]


class Unsure(RISEScoring):
    """Its map is made, and then there is no memory left, but for the second case."""

    def standard_error(self, observed: Observed) -> Any:
        if float(observed.reference_scores[0]) < 0.75:
            raise MemoryError("no memory left")
        return super().standard_error(observed)


@pytest.mark.parametrize("listed", [True, False])
def test_a_case_whose_standard_error_fails(listed: bool, tmp_path: Path) -> None:
    """It is a failure as any other, and the cases after it are explained."""
    explain = rise(20, 3, target=ClassScore([0], "none"), estimator=Unsure())
    cases: list[dict[str, Any]] = []
    parts = explain, brightness, lambda case: cases.append(case) or case
    handler = handler_of(tmp_path, *parts, strict=not listed, standard_error_key="error")
    items = [{"image": MetaTensor(image), "case": f"ct_{i}", "error": 0} for i, image in enumerate(IMAGES, 1)]
    batch = list_data_collate(items)
    engine = SimpleNamespace(state=SimpleNamespace(output=batch, batch=batch))

    def explained() -> None:
        handler(engine)
        handler.finish()

    if not listed:
        with pytest.raises(CaseError, match="case ct_1: MemoryError: no memory left"):
            explained()
        return
    explained()
    assert [row["case"] for row in handler.failures.read()] == ["ct_1"]
    (case,) = cases
    assert case["case"] == "ct_2"
    assert_same_bits(torch.as_tensor(case["error"]), case["explanation"].standard_error)
    assert case["error"].shape == (1, 6, 6, 6)


def test_items_without_a_name_are_called_after_their_files(tmp_path: Path) -> None:
    """Files of one name in two folders are kept apart, and nothing is written next to them."""
    files = [write_scan(tmp_path / f"{folder}/ct.nii.gz", (6, 6, 6), np.eye(4)) for folder in "ab"]
    dataset = Dataset(
        [{"image": str(file)} for file in files], Compose([scan_loader("image"), EnsureChannelFirstd("image")])
    )
    windows, out = sliding_window(3, 3, target=ClassScore([0], "none")), tmp_path / "out"
    handler = handler_of(tmp_path / "tables", windows, brightness, SaveSaliencyd("saliency", out, picture=False))
    batch = list_data_collate([dataset[0], dataset[1]])
    handler(SimpleNamespace(state=SimpleNamespace(output=batch, batch=batch)))
    handler.finish()
    expected = {f"ct-{sha256(str(file).encode()).hexdigest()[:8]}" for file in files}
    assert set(handler.explainer.explained) == expected
    assert {path.name for path in out.iterdir()} == {f"{name}_saliency.nii.gz" for name in expected}
    saved = SaveSaliencyd("map", out, picture=False)(Saliencyd("image", brightness, windows, names="map")(dataset[0]))
    assert Path(saved["map_path"]).parent == out
    assert Path(saved["map_path"]).name.removesuffix("_map.nii.gz") in expected


@pytest.mark.parametrize("stored", [False, True])
def test_a_name_that_leads_out_of_the_folder_is_refused(stored: bool, tmp_path: Path) -> None:
    """Nothing is written or removed outside, and the cases after it are explained."""
    inside, beside = tmp_path / "a/out", tmp_path / "a/x_saliency.nii.gz"
    names = ["../x", f"{tmp_path}/y", "b/../../../x", "sub/z"]
    items = [{"image": MetaTensor(IMAGES[0]), GRID_KEY: IMAGES[0], "case": name} for name in names]
    beside.parent.mkdir()
    beside.write_text("of somebody else")
    writers = Compose([SaveSaliencyd("saliency", inside), SaveDicomd("saliency", inside, dicom=False)])
    kept: dict[str, Any] = {"store": ScoreStore(inside / "scores"), "network_id": "brightness"} if stored else {}
    explain = sliding_window(3, 3, target=ClassScore(0, "none"))
    handler = handler_of(inside, explain, brightness, writers, strict=False, **kept)
    batch = list_data_collate(items)
    handler(SimpleNamespace(state=SimpleNamespace(output=batch, batch=batch)))
    handler.finish()
    failed = {row["case"]: row["error"] for row in handler.failures.read()}
    assert set(failed) == set(names[:3])
    assert all(
        f"its name leads out of {inside}" in error and "give its item a `case`" in error for error in failed.values()
    )
    assert beside.read_text() == "of somebody else"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["out", "x_saliency.nii.gz"]
    assert (inside / "sub/z_saliency.nii.gz").is_file()


def test_a_preprocessing_that_does_not_lead_back_is_refused(tmp_path: Path) -> None:
    """By the bundle's handler, and in other people's bundles."""
    write_scan(tmp_path / "scan.nii.gz", (12, 10, 8), np.eye(4))
    spacing = Spacingd("image", (2, 2, 2), recompute_affine=True)
    preprocessing = Compose([LoadImaged("image", ensure_channel_first=True), spacing])
    data = Dataset([{"image": str(tmp_path / "scan.nii.gz"), "case": "scan"}], preprocessing)
    network, explain = Brightness(spatial_dims=3, window=1), sliding_window(1, 1, target=ClassScore([1], "none"))
    invert = Invertd("saliency", preprocessing, orig_keys="image", nearest_interp=False)
    writers = Compose([invert, SaveSaliencyd("saliency", tmp_path / "ours", picture=False)])
    evaluator: Any = CohortEvaluator(torch.device("cpu"), DataLoader(data), network)
    handler_of(tmp_path / "ours", explain, network, writers, strict=False).attach(evaluator)
    evaluator.run()
    other = SupervisedEvaluator(torch.device("cpu"), DataLoader(data), network=network)
    settings: dict[str, Any] = {"window_size": 1, "stride": 1, "classes": [1], "activation": "none", "report": False}
    attach(other, tmp_path / "theirs", method="sliding_window", **settings)
    other.run()
    for folder in ("ours", "theirs"):
        (row,) = rows_of(tmp_path / folder / "failures.csv")
        assert row["case"] == "scan"
        assert "cannot be inverted, so the map would lie elsewhere: recompute_affine=True of Spacingd" in row["error"]
        assert not list((tmp_path / folder).glob("*.nii.gz"))


def test_a_case_that_another_process_holds_is_waited_for(tmp_path: Path) -> None:
    batch = list_data_collate([{"image": MetaTensor(IMAGES[0]), "case": "ct"}])
    store = ScoreStore(tmp_path)
    explain = sliding_window(3, 3, target=ClassScore([0], "none"))
    handler = handler_of(tmp_path, explain, brightness, lambda item: item, store=store, network_id="brightness")
    with store.claim("ct"):
        handler(SimpleNamespace(state=SimpleNamespace(output=batch, batch=batch)))
    assert handler.incomplete() == ["ct"]
    # What an earlier run could not explain is not what this one has explained.
    Failures(tmp_path / "failures.csv").add("ct", "load", ValueError("broken"))
    handler.failures = Failures(tmp_path / "failures.csv", cases=["ct"])
    assert handler.incomplete() == ["ct"]
    handler.failures.add("ct", "load", ValueError("broken"))
    assert handler.incomplete() == []
    handler(SimpleNamespace(state=SimpleNamespace(output=batch, batch=batch)))
    handler.finish()
    assert handler.incomplete() == []
    assert handler.failures.read() == []


@pytest.mark.parametrize(
    ("network", "error"),
    [(torch.nn.Identity(), None), (torch.nn.functional.dropout, "no fixed output")],
    ids=["prediction", "dropout"],
)
def test_what_the_evaluator_predicted(network: Any, error: str | None, tmp_path: Path) -> None:
    """It is compared at no forward, and a case that differs has no map."""
    seen: list[int] = []

    class Means(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return brightness(network(x))

    maps: list[Any] = []
    model = Means()
    explain = sliding_window(4, 2, target=ClassScore([0], "none"), mask_batch_size=4)
    handler = handler_of(tmp_path, explain, model, lambda case: maps.append(case) or case)
    data = [{"image": MetaTensor(image), "case": f"ct_{i}"} for i, image in enumerate(IMAGES)]
    steps = {"val_handlers": [handler], "decollate": False}
    evaluator = CohortEvaluator("cpu", [list_data_collate(data)], network=model, epoch_length=1, **steps)
    if error:
        with pytest.raises(CaseError, match=error):
            evaluator.run()
        assert not maps
    else:
        evaluator.run()
        assert len(maps) == 2
        assert seen[0] == 2
        assert seen.count(1) == 3  # once the network is looked at by images alone


# Explaining inside any evaluator, with the maps written beside the network's work.
WAIT = 30  # seconds; reached only by a test that fails
CASES = [f"case_{i}" for i in range(6)]


class Network(torch.nn.Module):
    """Two logits. Calls ``on(case number)`` in each batch of explaining a case."""

    def __init__(self, on: Callable[[int], None] = lambda case: None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.on = on
        self.batches = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            self.on(int(x[0, 0, 0, 0]))  # which no mask hides
            self.batches += 1
        return x.flatten(1)[:, :2] * self.weight


def evaluator(
    folder: Path,
    postprocessing: Callable[[dict], dict],
    network: Network,
    kind: type = SupervisedEvaluator,
    **settings: Any,
) -> SupervisedEvaluator:
    """Over six cases; 11 masks and the image make three batches of four."""
    batches = []
    for i, name in enumerate(CASES):
        image = torch.full((1, 1, 6, 6), float(i))
        batches.append({"image": image, "label": torch.zeros(1), "case": [name]})
    target = ms.ClassScore([0], activation="none")
    inferer = ms.PerturbationInferer(_Masks(11), target, ms.estimators.OcclusionScoring(), mask_batch_size=4)
    handler = handler_of(folder, inferer, network, postprocessing, network_id="two logits", **settings)
    arguments = {"failures": handler.failures} if kind is CohortEvaluator else {}
    return kind(torch.device("cpu"), batches, network, val_handlers=[handler], epoch_length=len(batches), **arguments)


class _Masks(ms.masks.RISEMasks):
    """That never hide the voxel with the case's number."""

    def bind(self, image: torch.Tensor, **known: Any) -> Any:
        bound = super().bind(image, **known)
        render = bound.render

        def keeping(ids: Any, device: Any = None) -> torch.Tensor:
            masks = render(ids, device)
            masks[..., 0, 0] = 1
            return masks

        bound.render = keeping
        return bound


def test_a_map_is_written_while_the_network_explains_the_next_case(
    left: Callable[[], list[str]], tmp_path: Path
) -> None:
    """Each case's postprocessing waits for the network to be at the next case: without an overlap it waits forever."""
    reached = [threading.Event() for _ in CASES]
    written, threads = [], set()

    def postprocessing(case: dict) -> dict:
        number = CASES.index(case["case"])
        if number + 1 < len(CASES):
            assert reached[number + 1].wait(WAIT)
        threads.add(threading.current_thread())
        written.append(case["case"])
        # What was explained is this case, not the next one, whose forwards are under way.
        assert float(case["explanation"].reference_scores[0]) == number
        assert not torch.is_grad_enabled()
        return case

    evaluator(tmp_path, postprocessing, Network(lambda case: reached[case].set())).run()
    assert written == CASES
    assert threading.main_thread() not in threads
    assert not left()


def test_a_case_is_held_until_it_is_written(tmp_path: Path) -> None:
    store, other = ScoreStore(tmp_path), ScoreStore(tmp_path)
    holders = []

    def postprocessing(case: dict) -> dict:
        with other.claim(case["case"]) as holder:
            holders.append(holder)
        return case

    evaluator(tmp_path, postprocessing, Network(), store=store).run()
    assert len(holders) == len(CASES)
    assert all(holder is not None for holder in holders)
    for name in CASES:
        with other.claim(name) as holder:
            assert holder is None


@pytest.mark.parametrize("error", [RuntimeError("out of paper"), KeyboardInterrupt()])
def test_what_stops_the_network_leaves_no_thread_and_no_claim(left: Any, error: BaseException, tmp_path: Path) -> None:
    written, saving = [], threading.Event()

    def postprocessing(case: dict) -> dict:
        saving.set()
        threading.Event().wait(0.1)
        written.append(case["case"])
        return case

    def stop(case: int) -> None:
        if case == 3:
            raise error
        if case == 2:
            assert saving.wait(WAIT)

    store = ScoreStore(tmp_path)
    run = evaluator(tmp_path, postprocessing, Network(stop), store=store)
    with pytest.raises((CaseError, KeyboardInterrupt)) as raised:
        run.run()
    assert error in (raised.value, raised.value.__cause__)
    assert not left()
    # On Ctrl-C nothing is begun any more; what was explained before an error is written.
    assert written == CASES[: len(written)]
    assert len(written) == 3 or isinstance(error, KeyboardInterrupt)
    for name in CASES:
        with ScoreStore(tmp_path).claim(name) as holder:
            assert holder is None
