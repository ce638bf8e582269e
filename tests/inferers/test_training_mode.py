"""A network in training mode, however it is hidden: the map of evaluation mode, computed here by plain loops, and the
network afterwards as it was before, its running statistics to the bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import DataLoader, Dataset, MetaTensor
from monai.engines import SupervisedEvaluator
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.distributed import MasksOverDevices
from monai_saliency.engines import CohortEvaluator
from monai_saliency.inferers.forward import evaluating
from monai_saliency.networks import Ensemble, accelerated

IMAGE = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(3))
TARGET = ms.ClassScore([1], "softmax")
WINDOWS = ms.sliding_window(4, 4, target=TARGET, mask_batch_size=3)


class Classifier(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.convolution = torch.nn.Conv2d(1, 4, 3, padding=1)
            self.norm, self.dropout = torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5)
            self.end = torch.nn.Linear(256, 3)
            self.norm(torch.randn(4, 4, 8, 8))
        self.train().convolution.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.convolution(images)).relu()
        # As in DenseNet's blocks, which read their own mode.
        dropped = torch.nn.functional.dropout(self.dropout(features), 0.5, self.training)
        return self.end(dropped.flatten(1))


class Hidden(torch.nn.Module):
    """Holds its network where ``.eval()`` does not find it."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.networks = [network]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.networks[0](images)


def evaluated(network: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(network).eval()


def slow_windows(network: torch.nn.Module) -> torch.Tensor:
    """The fall of the score while each window of 4 x 4 is 0, in evaluation mode."""
    still, found = evaluated(network), torch.zeros(8, 8)
    for row, column in [(0, 0), (0, 4), (4, 0), (4, 4)]:
        hidden = IMAGE.clone()
        hidden[:, :, row : row + 4, column : column + 4] = 0
        scores = still(torch.cat([IMAGE, hidden])).detach().softmax(1)[:, 1].reshape(2, -1).mean(1)
        found[row : row + 4, column : column + 4] = float(scores[0] - scores[1])
    return found


def state_of(network: torch.nn.Module) -> dict[str, Any]:
    modes = {name: part.training for name, part in network.named_modules()}
    return {**modes, **{f"{name}'s values": value.numpy().tobytes() for name, value in network.state_dict().items()}}


def called(call: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda images: call(images)


def compiled(call: Any, **settings: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, backend="eager", **settings)


class Gated(torch.nn.Module):
    """Reads the mode of a module that is never called, and that ``.eval()`` does not find."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network, self.parts = network, {"gates": [torch.nn.Module()]}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images) * (100 if self.parts["gates"][0].training else 1)


class Service:
    """Runs images in threads of its own."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.networks = {"first": [network]}

    def predict(self, images: torch.Tensor, steps: int = 1) -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(lambda part: self.networks["first"][0](part), images.split(steps))))


def in_threads(images: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(2) as pool:
        return torch.cat(list(pool.map(lambda part: GLOBAL[0](part), images.split(1))))


GLOBAL: list[torch.nn.Module] = []


def in_global(network: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    GLOBAL[:] = [network]
    return in_threads


HIDDEN: dict[str, Callable[[Classifier], Any]] = {
    "module": lambda network: network,
    "lambda": called,
    "method": lambda network: network.forward,
    "partial": lambda network: functools.partial(network.forward),
    "object": lambda network: type("Service", (), {"__call__": lambda self, images: network(images)})(),
    "list": Hidden,
    "list in a sequence": lambda network: torch.nn.Sequential(torch.nn.Identity(), Hidden(network)),
    "scripted": lambda network: called(torch.jit.script(network)),
    "parallel": lambda network: called(torch.nn.DataParallel(network)),
    "compiled": lambda network: called(compiled(network, fullgraph=True)),
    "compiled list": lambda network: compiled(Hidden(network)),
    "accelerated list": lambda network: accelerated(Hidden(network), compile={"backend": "eager"}),
    "compiled function": lambda network: compiled(called(network)),
    "compiled whole": lambda network: compiled(called(network), fullgraph=True),
    "gate": Gated,
    "gate in a lambda": lambda network: called(Gated(network)),
    "threads": lambda network: functools.partial(Service(network).predict, steps=2),
    "threads, global": in_global,
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_map_of_evaluation_mode(hidden: str) -> None:
    network = Classifier()
    before, given = state_of(network), HIDDEN[hidden](network)
    for _ in range(2):  # the network is not in the way of a second map
        maps = WINDOWS(IMAGE, given)
        torch.testing.assert_close(maps[0, 0], slow_windows(network), rtol=1e-5, atol=1e-6)
        assert state_of(network) == before


def test_a_compiled_whole_that_trains_is_refused() -> None:
    network = Classifier()
    before, far = state_of(network), [network]  # too many lists to be found
    for _ in range(8):
        far = [far]
    with pytest.raises(Exception, match=r"call its \.eval"):
        WINDOWS(IMAGE, compiled(lambda images: far[0][0][0][0][0][0][0][0][0](images), fullgraph=True))
    assert state_of(network) == before


def slow_gradients(network: torch.nn.Module) -> torch.Tensor:
    """Integrated gradients of five points."""
    found = torch.zeros(8, 8, dtype=torch.float64)
    for point, weight in zip(*np.polynomial.legendre.leggauss(5), strict=True):
        leaf = (IMAGE * (1 + point) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(evaluated(network)(leaf).softmax(1)[0, 1], leaf)
        found += weight / 2 * (slope * IMAGE)[0, 0].double()
    return found.float()


def loader() -> DataLoader:
    return DataLoader(Dataset([{"image": MetaTensor(IMAGE[0])}]), batch_size=1)


def predicted(network: torch.nn.Module) -> torch.Tensor:
    evaluator = CohortEvaluator(torch.device("cpu"), loader(), network)
    evaluator.run()
    return evaluator.state.output[0]["pred"].as_tensor()


def deletion(network: Any) -> torch.Tensor:
    return ms.metrics.Deletion(WINDOWS, network)(torch.arange(64.0).reshape(1, 1, 8, 8), IMAGE)


def on_devices(network: Any, count: int) -> torch.Tensor:
    return WINDOWS.replace(sharing=MasksOverDevices(["cpu"] * count))(IMAGE, network)[0, 0]


PATCHES = SlidingWindowInferer(4, 2, overlap=0.5)
WHOLE = ms.RegionScore([1], "softmax", region="all")
PIXELS = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))  # each voxel gives its own output
#: what is made of a network in training mode, and what is right
PATHS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "Saliencyd": (lambda given: ms.Saliencyd("a", called(given), WINDOWS, "b")({"a": IMAGE[0]})["b"][0], slow_windows),
    "ensemble": (lambda given: WINDOWS(IMAGE, Ensemble([Hidden(given), Hidden(given)]))[0, 0], slow_windows),
    "two devices": (lambda given: on_devices(Hidden(given), 2), slow_windows),
    "one device": (lambda given: on_devices(called(given), 1), slow_windows),
    "white box": (
        lambda given: ms.integrated_gradients(steps=5, target=TARGET)(IMAGE, called(given))[0, 0],
        slow_gradients,
    ),
    "metric": (lambda given: deletion(called(given)), lambda network: deletion(evaluated(network))),
    "evaluator": (lambda given: predicted(Hidden(given)), lambda network: evaluated(network)(IMAGE)[0].detach()),
    "patches": (
        lambda given: ms.sliding_window(4, 4, target=WHOLE, inferer=PATCHES)(IMAGE, called(given))[0, 0],
        slow_windows,
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_way_in(path: str) -> None:
    network = PIXELS if path == "patches" else Classifier()
    before, (explain, right) = state_of(network), PATHS[path]
    torch.testing.assert_close(torch.as_tensor(explain(network)), right(network), rtol=1e-4, atol=1e-6)
    assert state_of(network) == before


def test_attach(tmp_path: Path) -> None:
    given: dict[str, Any] = {"activation": "softmax", "classes": [1], "method": "sliding_window", "report": False}
    given |= {"window_size": 4, "stride": 4, "picture": False, "network_id": "a"}
    network = Classifier()
    before = state_of(network)
    with ms.attach(called(network), tmp_path / "loop", loader=loader(), **given) as explain:
        for batch in loader():
            explain(batch, evaluated(network)(batch["image"]))
    assert explain.handler.explained == ["case-0"]
    assert state_of(network) == before
    # MONAI's own evaluator lets a hidden network train.
    evaluator = SupervisedEvaluator(torch.device("cpu"), loader(), Hidden(network))
    handler = ms.attach(evaluator, tmp_path / "evaluator", **given)
    evaluator.run()
    (failed,) = handler.failures.rows
    assert "not what was predicted" in failed["error"]
    assert "in training mode (call .eval(), also on networks in a list" in failed["error"]


def test_other_threads_are_left_alone() -> None:
    network = torch.nn.Dropout()
    with evaluating(called(print)), ThreadPoolExecutor(1) as pool:
        pool.submit(network, IMAGE).result()
        assert network.training
        network(IMAGE)
        assert not network.training
    assert network.training
