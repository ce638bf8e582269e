"""Explaining inside any evaluator, with the maps written beside the network's work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.engines import SupervisedEvaluator

import monai_saliency as ms
from monai_saliency.engines.evaluator import CohortEvaluator
from monai_saliency.handlers.saliency_handler import SaliencyHandler
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


@pytest.mark.parametrize("error", [RuntimeError("out of paper"), KeyboardInterrupt()])
def test_what_stops_the_network_leaves_no_thread_and_no_claim(
    left: Callable[[], list[str]], error: BaseException, tmp_path: Path
) -> None:
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
    with pytest.raises(type(error)):
        run.run()
    assert not left()
    # On Ctrl-C nothing is begun any more; what was explained before an error is written.
    assert written == CASES[: len(written)]
    assert len(written) == 3 or isinstance(error, KeyboardInterrupt)
    for name in CASES:
        with ScoreStore(tmp_path).claim(name) as holder:
            assert holder is None
