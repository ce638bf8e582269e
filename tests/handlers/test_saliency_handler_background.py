"""Explaining inside any evaluator, with the maps written beside the network's work."""

from __future__ import annotations

import csv
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from monai.engines import SupervisedEvaluator

import monai_saliency as ms
from monai_saliency.engines.evaluator import CohortEvaluator
from monai_saliency.handlers.background import Background
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.storage.failures import Failures
from monai_saliency.storage.score_store import ScoreStore

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
    postprocessing: Callable[[dict], dict], network: Network, kind: type = SupervisedEvaluator, **settings: Any
) -> SupervisedEvaluator:
    """Over six cases; 11 masks and the image make three batches of four."""
    batches = []
    for i, name in enumerate(CASES):
        image = torch.full((1, 1, 6, 6), float(i))
        batches.append({"image": image, "label": torch.zeros(1), "case": [name]})
    target = ms.ClassScore([0], activation="none")
    inferer = ms.PerturbationInferer(_Masks(11), target, ms.OcclusionScoring(), mask_batch_size=4)
    handler = SaliencyHandler(inferer, network, postprocessing, network_id="two logits", **settings)
    arguments = {"failures": settings.get("failures")} if kind is CohortEvaluator else {}
    return kind(torch.device("cpu"), batches, network, val_handlers=[handler], epoch_length=len(batches), **arguments)


class _Masks(ms.RISEMasks):
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


def test_a_map_is_written_while_the_network_explains_the_next_case(left: Callable[[], list[str]]) -> None:
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

    evaluator(postprocessing, Network(lambda case: reached[case].set())).run()
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

    evaluator(postprocessing, Network(), store=store).run()
    assert len(holders) == len(CASES)
    assert all(holder is not None for holder in holders)
    for name in CASES:
        with other.claim(name) as holder:
            assert holder is None


def fails_on(number: int, error: Exception, written: list[str]) -> Callable[[dict], dict]:
    def postprocessing(case: dict) -> dict:
        if case["case"] == CASES[number]:
            raise error
        written.append(case["case"])
        return case

    return postprocessing


@pytest.mark.parametrize("kind", [SupervisedEvaluator, CohortEvaluator])
def test_a_case_that_cannot_be_written_is_listed_under_its_own_name(kind: type, tmp_path: Path) -> None:
    written: list[str] = []
    failures = Failures(tmp_path / "failures.csv")
    evaluator(fails_on(2, ValueError("no\nink"), written), Network(), kind, failures=failures).run()
    assert written == [name for name in CASES if name != CASES[2]]
    with open(tmp_path / "failures.csv", newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [{"case": CASES[2], "stage": "explain", "error": "ValueError: no ink"}]


@pytest.mark.parametrize("error", [RuntimeError("out of paper"), KeyboardInterrupt()])
@pytest.mark.parametrize("in_the_way", [False, True])
def test_what_stops_the_network_leaves_no_thread_and_no_claim(
    left: Callable[[], list[str]], error: BaseException, in_the_way: bool, tmp_path: Path
) -> None:
    """Also where another handler raises before ours is asked to stop."""
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
    run = evaluator(postprocessing, Network(stop), store=store)
    if in_the_way:
        handlers = run._event_handlers[Events.EXCEPTION_RAISED]

        def raises(engine: Any, error: BaseException) -> None:
            raise error

        run.add_event_handler(Events.EXCEPTION_RAISED, raises)
        handlers.insert(0, handlers.pop())
    with pytest.raises(type(error)):
        run.run()
    if in_the_way:  # the handler was not called, so nobody has waited for the last case to be written
        for background in [each for each in gc.get_objects() if type(each) is Background]:
            background.finish()
    assert not left()
    # On Ctrl-C nothing is begun any more; what was explained before an error is written.
    assert written == CASES[: len(written)]
    assert len(written) == 3 or (isinstance(error, KeyboardInterrupt) and not in_the_way)
    for name in CASES:
        with ScoreStore(tmp_path).claim(name) as holder:
            assert holder is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_maps_from_a_gpu_are_those_of_the_host() -> None:
    maps: dict[str, list[torch.Tensor]] = {"cpu": [], "cuda": []}
    image = torch.rand(1, 1, 64, 64)
    for device, found in maps.items():

        def postprocessing(case: dict, found: list = found) -> dict:
            assert case["saliency"].device.type == case["image"].device.type == "cpu"
            found.append(case["saliency"].as_tensor().clone())
            return case

        network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64, 2))
        with torch.no_grad():
            network[1].weight.copy_(torch.linspace(-1, 1, 2 * 64 * 64).reshape(2, -1))
            network[1].bias.zero_()
        network = network.to(device)
        inferer = ms.rise(200, target=ms.ClassScore([0], activation="none"), mask_batch_size=16)
        batches = [{"image": image * i, "label": torch.zeros(1), "case": [f"{i}"]} for i in range(1, 6)]
        handler = SaliencyHandler(inferer, network, postprocessing)
        SupervisedEvaluator(torch.device(device), batches, network, val_handlers=[handler]).run()
    for cpu, cuda in zip(maps["cpu"], maps["cuda"], strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-3, atol=1e-3 * float(cpu.abs().max()))
