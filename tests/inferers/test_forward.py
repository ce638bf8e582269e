"""A batch that does not fit into memory is halved, and the map stays what it is."""

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import assert_close
from monai.data import DataLoader, Dataset, MetaTensor
from monai.engines import SupervisedEvaluator
from monai.inferers import SimpleInferer, SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.engines import CohortEvaluator
from monai_saliency.inferers.cohort_explainer import CohortExplainer
from monai_saliency.inferers.forward import Forward, evaluating
from monai_saliency.networks import Ensemble, accelerated
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.utils.monai_private import holds_compiled

IMAGE = torch.rand(1, 1, 12, 10, 8)


class Small(torch.nn.Module):
    """A network on a device whose memory shrinks: from a call on, no more than some images fit.

    Args:
        at: the number of the call.
        fits: how many images fit from there on.
        form: what is made of the output.
    """

    def __init__(self, at: int, fits: int, form: Callable[[torch.Tensor], Any] = lambda output: output) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(IMAGE.numel(), 3))
        self.at, self.fits, self.form = at, fits, form
        self.sizes: list[int] = []
        self.failed = 0

    def forward(self, batch: torch.Tensor) -> Any:
        self.sizes.append(len(batch))
        if len(self.sizes) > self.at and len(batch) > self.fits:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.form(self.inner(batch))


def explain(network: torch.nn.Module, **settings: Any) -> torch.Tensor:
    target = ms.ClassScore("all", "softmax")
    return ms.rise(40, 3, target=target, mask_batch_size=7, **settings)(IMAGE, network)


@pytest.mark.parametrize("fits", [1, 2, 3, 5])
@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_the_map_is_the_same_whenever_memory_runs_out(at: int, fits: int) -> None:
    network = Small(at, fits)
    assert_close(explain(network), explain(Small(0, 99)))
    assert network.failed
    after = network.sizes[max(i for i, size in enumerate(network.sizes) if size > fits) + 1 :]
    # It goes on with what fits, in batches of one shape, but for images that are looked at alone.
    assert len({*after} - {1}) <= 1
    failed = network.failed
    assert_close(explain(network), explain(Small(0, 99)))
    assert network.failed == failed  # what fits is known by now


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (lambda output: {"pred": output, "names": None}, "pred"),
        (lambda output: (output, [output * 2]), 0),
        (lambda output: [{"scores": row} for row in output], lambda found: torch.stack([e["scores"] for e in found])),
    ],
)
def test_structured_outputs_are_joined(form: Callable[[torch.Tensor], Any], output: Any) -> None:
    maps = [explain(Small(4, fits, form), output=output) for fits in (99, 2)]
    assert_close(*maps)


def test_patches_are_halved_too() -> None:
    class Segmenter(Small):
        def __init__(self, fits: int) -> None:
            super().__init__(5, fits)
            self.inner = torch.nn.Conv3d(1, 2, 3, padding=1)

    def of(network: torch.nn.Module) -> torch.Tensor:
        torch.manual_seed(1)
        inferer = SlidingWindowInferer(6, 5, overlap=0.5)
        target = ms.RegionScore([0, 1], "softmax", region="all")
        return ms.sliding_window(4, 4, target=target, inferer=inferer)(IMAGE, network)

    networks = Segmenter(99), Segmenter(2)
    networks[1].load_state_dict(networks[0].state_dict())
    assert_close(of(networks[0]), of(networks[1]))
    assert networks[1].failed == 2  # five patches, three, then two


def test_stored_scores_are_resumed_at_another_size(tmp_path: Path) -> None:
    network = Small(0, 99)
    inferer = ms.rise(40, 3, target=ms.ClassScore("all", "softmax"), mask_batch_size=7)
    stored = [ScoreStore(tmp_path).open("a", "key")]

    def cut_off(batch: torch.Tensor) -> torch.Tensor:
        if len(network.sizes) == 6:
            raise KeyboardInterrupt
        return network(batch)

    with pytest.raises(KeyboardInterrupt):
        inferer.explain(IMAGE, cut_off, stored=stored)
    small = Small(0, 3)
    found = inferer.explain(IMAGE, small, stored=[ScoreStore(tmp_path).open("a", "key")])
    assert_close(found[0].saliency[None], explain(Small(0, 99)))
    fresh = Small(0, 3)
    explain(fresh)
    assert sum(small.sizes) < sum(fresh.sizes) - 7  # batches of masks were there


def test_an_image_that_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        explain(Small(0, 0))


def run(network: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return Forward(SimpleInferer(), ms.networks.TensorInput(), network).patches(batch)


def test_a_batch_that_was_changed_in_place_is_not_run_again() -> None:
    def network(part: torch.Tensor) -> torch.Tensor:
        part.add_(1)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run(network, torch.rand(4, 2))


def test_other_errors_are_raised_at_once() -> None:
    calls = []

    def network(part: torch.Tensor) -> torch.Tensor:
        calls.append(len(part))
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        run(network, torch.rand(4, 2))
    assert calls == [4]


@pytest.mark.parametrize("words", ["CUDA out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_rows_stay_in_their_order(words: str) -> None:
    seen = []

    def network(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        if len(part) > 3:
            raise RuntimeError(words)
        return part * 10

    batch = torch.arange(10.0)[:, None]
    assert_close(run(network, batch), batch * 10)
    assert seen == [10, 5, 3, 3, 3, 3]


def test_held_inputs_stay_with_their_images() -> None:
    class Scaled(Small):
        def forward(self, given: dict[str, torch.Tensor]) -> Any:
            return super().forward(given["image"]) * given["age"]

    given = {"image": torch.cat([IMAGE, IMAGE.flip(2)]), "age": torch.tensor([[1.0], [3.0]])}
    target = ms.ClassScore("all", "none")
    maps = [
        ms.rise(40, 3, target=target, mask_batch_size=7, inputs=ms.DictInput("image"))(given, Scaled(2, fits))
        for fits in (99, 3)
    ]
    assert_close(*maps)


# A compiled network is compiled once for each shape of batch, and never again while it is explained.
COMPILED_ON = torch.rand(1, 1, 12, 10)


def compiled(module: torch.nn.Module) -> tuple[torch.nn.Module, list[tuple[int, ...]]]:
    """A module compiled for each shape alone, and the shapes for which it was compiled so far."""
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        shapes.append(tuple(next(each.shape for each in inputs if each.ndim == 4 and each.shape[1] == 1)))
        return graph

    torch._dynamo.reset()
    quick = ms.networks.accelerated(module.eval(), compile={"backend": backend})
    assert holds_compiled(quick)
    return quick, shapes


def network(last: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    # The weights have a first axis that no image has, so that inputs are told apart.
    return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1, bias=False), torch.nn.ReLU(), last)


@pytest.mark.parametrize("method", ["rise", "windows", "patches"])
@pytest.mark.parametrize("images", [1, 2])
def test_it_is_compiled_once(method: str, images: int) -> None:
    whole = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2 * 120, 3))
    inner = network(torch.nn.Conv2d(2, 2, 1) if method == "patches" else whole)
    quick, shapes = compiled(inner)
    settings: dict[str, Any] = {"target": TARGET, "mask_batch_size": 4}
    if method == "patches":
        settings |= {"target": WHOLE, "inferer": SlidingWindowInferer(6, 4, overlap=0.5)}
    # Neither number of masks fills the last batch.
    explain = ms.rise(17, 3, **settings) if method == "rise" else ms.sliding_window(4, 3, **settings)
    batch = torch.cat([COMPILED_ON, COMPILED_ON.flip(2)])[:images]
    maps = explain(batch, quick)
    assert len(shapes) == 1
    explain(batch, quick)
    assert len(shapes) == 1
    assert_close(maps, explain(batch, inner))


# A network in training mode, however it is hidden: the map of evaluation mode, computed here by plain loops, and the
# network afterwards as it was before, its running statistics to the bit.
SCAN = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(3))
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


def evaluated(network: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(network).eval()


def slow_windows(network: torch.nn.Module) -> torch.Tensor:
    """The fall of the score while each window of 4 x 4 is 0, in evaluation mode."""
    still, found = evaluated(network), torch.zeros(8, 8)
    for row, column in [(0, 0), (0, 4), (4, 0), (4, 4)]:
        hidden = SCAN.clone()
        hidden[:, :, row : row + 4, column : column + 4] = 0
        probability = still(torch.cat([SCAN, hidden])).detach().softmax(1)[:, 1]
        # Of a segmentation the mean probability, of a class its log-odds.
        scores = probability.flatten(1).mean(1) if probability.ndim > 1 else probability.logit()
        found[row : row + 4, column : column + 4] = float(scores[0] - scores[1])
    return found


def state_of(network: torch.nn.Module) -> dict[str, Any]:
    modes = {name: part.training for name, part in network.named_modules()}
    return {**modes, **{f"{name}'s values": value.numpy().tobytes() for name, value in network.state_dict().items()}}


def called(call: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda images: call(images)


def compiled_by(call: Any, **settings: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, backend="eager", **settings)


class Service:
    """Runs images in threads of its own."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.networks = [network]

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self.networks[0](images)

    def predict(self, images: torch.Tensor, steps: int = 1) -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(lambda part: self.networks[0](part), images.split(steps))))


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
    "object": lambda network: Service(network),
    "function of a function": lambda network: called(called(network)),
    "scripted": lambda network: called(torch.jit.script(network)),
    "parallel": lambda network: called(torch.nn.DataParallel(network)),
    "compiled": lambda network: called(compiled_by(network, fullgraph=True)),
    "accelerated": lambda network: accelerated(network, compile={"backend": "eager"}),
    "compiled function": lambda network: compiled_by(called(network)),
    "compiled whole": lambda network: compiled_by(called(network), fullgraph=True),
    "threads": lambda network: functools.partial(Service(network).predict, steps=2),
    "threads, global": in_global,
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_map_of_evaluation_mode(hidden: str) -> None:
    network = Classifier()
    before, given = state_of(network), HIDDEN[hidden](network)
    for _ in range(2):  # the network is not in the way of a second map
        maps = WINDOWS(SCAN, given)
        assert_close(maps[0, 0], slow_windows(network), scale=1)  # of a probability
        assert state_of(network) == before


def slow_gradients(network: torch.nn.Module) -> torch.Tensor:
    """Integrated gradients of five points."""
    found = torch.zeros(8, 8, dtype=torch.float64)
    for point, weight in zip(*np.polynomial.legendre.leggauss(5), strict=True):
        leaf = (SCAN * (1 + point) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(evaluated(network)(leaf).softmax(1)[0, 1].logit(), leaf)
        found += weight / 2 * (slope * SCAN)[0, 0].double()
    return found.float()


def loader() -> DataLoader:
    return DataLoader(Dataset([{"image": MetaTensor(SCAN[0])}]), batch_size=1)


def predicted(network: torch.nn.Module) -> torch.Tensor:
    evaluator = CohortEvaluator(torch.device("cpu"), loader(), network)
    evaluator.run()
    return evaluator.state.output[0]["pred"].as_tensor()


def deletion(network: Any) -> torch.Tensor:
    return ms.metrics.Deletion(WINDOWS, network)(torch.arange(64.0).reshape(1, 1, 8, 8), SCAN)


PATCHES = SlidingWindowInferer(4, 2, overlap=0.5)
WHOLE = ms.RegionScore([1], "softmax", region="all")
PIXELS = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))  # each voxel gives its own output
#: what is made of a network in training mode, and what is right
PATHS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "Saliencyd": (lambda given: ms.Saliencyd("a", called(given), WINDOWS, "b")({"a": SCAN[0]})["b"][0], slow_windows),
    "ensemble": (lambda given: WINDOWS(SCAN, Ensemble([given, given]))[0, 0], slow_windows),
    "white box": (
        lambda given: ms.integrated_gradients(steps=5, target=TARGET)(SCAN, called(given))[0, 0],
        slow_gradients,
    ),
    "metric": (lambda given: deletion(called(given)), lambda network: deletion(evaluated(network))),
    "evaluator": (lambda given: predicted(given), lambda network: evaluated(network)(SCAN)[0].detach()),
    "patches": (
        lambda given: ms.sliding_window(4, 4, target=WHOLE, inferer=PATCHES)(SCAN, called(given))[0, 0],
        slow_windows,
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_way_in(path: str) -> None:
    network = PIXELS if path == "patches" else Classifier()
    before, (explain, right) = state_of(network), PATHS[path]
    torch.testing.assert_close(torch.as_tensor(explain(network)), right(network), rtol=1e-4, atol=1e-6)
    assert state_of(network) == before


def test_the_last_exit_restores_the_mode() -> None:
    shared, alone = torch.nn.BatchNorm1d(2), torch.nn.Dropout()
    first, second = torch.nn.Sequential(shared, alone), torch.nn.Sequential(shared)
    with ExitStack() as outer:
        with ExitStack() as inner:
            inner.enter_context(evaluating(first))
            outer.enter_context(evaluating(second))  # entered last, and it ends last
            outer.enter_context(evaluating(first.forward))
            assert not any(part.training for part in (first, second, shared, alone))
        assert not any(part.training for part in (first, second, shared, alone))
    assert all(part.training for part in (first, second, shared, alone))
    with pytest.raises(KeyError), evaluating(first):
        raise KeyError
    assert first.training


def test_two_threads_explain_one_network_in_training_mode() -> None:
    network, started, joined, ended = Classifier(), Event(), Event(), Event()
    before, right = state_of(network), WINDOWS(SCAN, evaluated(network))

    def first(images: torch.Tensor) -> torch.Tensor:
        started.set()
        assert joined.wait(60)
        return network(images)

    def second(images: torch.Tensor) -> torch.Tensor:
        joined.set()
        assert ended.wait(60)  # the first call is over, and this one still runs
        return network(images)

    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(WINDOWS, SCAN, first)
        assert started.wait(60)
        other = pool.submit(WINDOWS, SCAN, second)
        assert_close(call.result(), right)
        ended.set()
        assert_close(other.result(), right)
    assert state_of(network) == before


class Hidden(torch.nn.Module):
    """Holds its network where ``.eval()`` does not find it."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.networks = [network]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.networks[0](images)


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
    assert "no fixed output" in failed["error"]
    assert "left on: call .eval(), also on networks in a list" in failed["error"]


class Dropped(torch.nn.Module):
    """Dropout on purpose, also in evaluation mode: MC dropout."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(images, 0.5, training=True).flatten(2).sum(2)


class TestSeedNetwork:
    """Networks that are random on purpose."""

    IMAGE = torch.rand(1, 1, 4, 4, dtype=torch.float64) + 0.5

    @pytest.mark.parametrize("size", [1, 4])
    def test_each_image_gets_the_same_draw(self, size: int, caplog: pytest.LogCaptureFixture) -> None:
        """A window's fall is twice its voxel where the draw of the seed keeps it; the caller's generator stays."""
        explain = ms.sliding_window(1, target=ms.RegressionScore(0), mask_batch_size=size, progress=False)
        with pytest.raises(ValueError, match="seed_network=0"):
            explain.replace(mask_batch_size=1).explain(self.IMAGE, Dropped())
        before = torch.get_rng_state()
        (found,) = explain.replace(seed_network=7).explain(self.IMAGE, Dropped())
        assert torch.equal(torch.get_rng_state(), before)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            drawn = torch.nn.functional.dropout(self.IMAGE, 0.5, training=True)
        assert_close(found.saliency, drawn[0])
        assert 0 < int((drawn == 0).sum()) < 16
        assert ("one at a time" in caplog.text) == (size > 1)

    def test_under_a_sliding_window(self) -> None:
        """The draw is by patch, so patches one by one, remembered or not, are the same."""
        inferer = SlidingWindowInferer((2, 2))

        def network(images: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(images, 0.5, training=True)

        target = ms.RegionScore(0, "none", "all")
        explain = ms.sliding_window(1, target=target, inferer=inferer, seed_network=7, progress=False)
        (found,) = explain.explain(self.IMAGE, network)
        (whole,) = explain.replace(patch_memory=False).explain(self.IMAGE, network)
        assert found.per_prediction > 1
        assert_close(found.saliency, whole.saliency)
        assert bool(found.saliency.any())

    def test_it_decides_scores(self, tmp_path: Path) -> None:
        forwards = []
        for seed in (1, 2, 1):
            explain = ms.sliding_window(1, target=ms.RegressionScore(0), mask_batch_size=1, seed_network=seed)
            found: list[Any] = []
            CohortExplainer(explain, Dropped(), ScoreStore(tmp_path)).explain(self.IMAGE, [ms.Case("a")], found.append)
            forwards.append(found[0].explanation.num_forwards)
        assert forwards == [17, 17, 1]

    def test_the_derivative_is_of_the_same_draw(self) -> None:
        explain = ms.integrated_gradients(steps=3, target=ms.RegressionScore(0), seed_network=7)
        (found,) = explain.explain(self.IMAGE, Dropped())
        with torch.random.fork_rng():
            torch.manual_seed(7)
            assert_close(found.saliency, torch.nn.functional.dropout(self.IMAGE, 0.5, training=True)[0])

    @pytest.mark.cuda
    def test_on_a_gpu(self) -> None:
        before = torch.cuda.get_rng_state()
        explain = ms.sliding_window(1, target=ms.RegressionScore(0), seed_network=7)
        first, second = (explain.explain(self.IMAGE.cuda(), Dropped())[0].saliency for _ in range(2))
        assert torch.equal(first, second)
        assert bool(first.any())
        assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("patch_memory", [True, False])
def test_a_tuple_under_a_sliding_window(patch_memory: bool) -> None:
    """MONAI puts tensors together: the error says how to leave out what is none, and that runs."""
    images, target = torch.rand(1, 1, 8, 8), ms.RegionScore(0, "none", region="all")
    explain = ms.sliding_window(4, target=target, inferer=SlidingWindowInferer(4, 2), patch_memory=patch_memory)
    with pytest.raises(AttributeError, match=r"\(seg, None\), explain lambda images: network\(images\)\[0\]"):
        explain(images, lambda images: (images, None))
    assert explain(images, lambda images: (images, None)[0]).isfinite().all()


def test_the_volumes_of_a_4d_file() -> None:
    with pytest.raises(RuntimeError, match=r"takes 1 channels: the volumes of a 4D file .* images\[:, :1\]"):
        ms.explain(torch.nn.Conv3d(1, 2, 3), torch.rand(1, 3, 8, 8, 8))
