import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.patches import WHOLE, Coupled, Network, blocks, images, patch_boxes
from helpers.tolerances import assert_close
from helpers.warned import logged_warnings
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from monai.inferers import SliceInferer, SlidingWindowInferer, SlidingWindowInfererAdapt

import monai_saliency as ms
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.patches import RememberedPatches
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.targets import BoundTarget, Target


def peak(output: torch.Tensor) -> torch.Tensor:
    """No sum of voxels: the highest probability of each channel but the first, of the whole volume."""
    return output.softmax(dim=1)[:, 1:].flatten(2).amax(dim=2)


class Keeper(Target):
    """Keeps the output of the unperturbed image."""

    def bind(self, reference_output: torch.Tensor, case: ms.Case) -> BoundTarget:
        self.output = reference_output.clone()
        return WHOLE.bind(reference_output, case)


def cases_of(labels: Sequence[torch.Tensor | None] | None) -> list[ms.Case] | None:
    return labels and [ms.Case(f"case {i}", labels=each) for i, each in enumerate(labels)]


def both(explain: ms.PerturbationInferer, inputs: torch.Tensor, network: Any, **given: Any) -> Any:
    """What remembered patches give, and what whole images give."""
    ours = explain.explain(inputs, network, **given)
    plain = ms.PerturbationInferer(
        explain.masks, explain.target, explain.estimator, explain.fill, explain.inferer, 4, patch_memory=False
    )
    return [ours, plain.explain(inputs, network, **given)]


def assert_same(results: list[list[ms.Explanation]], tolerance: float) -> None:
    for ours, plain in zip(*results, strict=True):
        largest = float(torch.cat([plain.scores, plain.reference_scores[None]]).abs().max())
        assert ours.scores.dtype == plain.scores.dtype
        for a, b in ((ours.scores, plain.scores), (ours.reference_scores, plain.reference_scores)):
            assert_close(a, b, scale=largest, within=tolerance)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A volume, an inferer, masks, a fill, a target and a memory."""
    dims = draw(st.sampled_from([2, 3]))
    shape = draw(st.tuples(*[st.integers(5, (17, 10)[dims - 2])] * dims))
    roi = draw(st.tuples(*[st.integers((3, 4)[dims - 2], (14, 9)[dims - 2])] * dims))
    padding_mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    if padding_mode in ("reflect", "circular"):
        assume(all(-(-(r - n) // 2) < n for r, n in zip(roi, shape, strict=True)))
    inferer = SlidingWindowInferer(
        roi,
        sw_batch_size=draw(st.integers(1, 6)),
        overlap=draw(st.sampled_from([0, 0.1, 0.25, 0.5, 0.6, 0.75])),
        mode=draw(st.sampled_from(["constant", "gaussian"])),
        padding_mode=padding_mode,
        cval=draw(st.sampled_from([0.0, -1.5])) if padding_mode == "constant" else 0.0,
        cache_roi_weight_map=draw(st.booleans()),
    )
    assume(len(patch_boxes(inferer, shape)[0]) <= 100)
    kind = draw(st.sampled_from(["window", "coalitions", "one region"]))
    if kind == "window":
        size = draw(st.integers(2, min(shape)))
        masks: ms.masks.Masks = ms.masks.SlidingWindowMasks(size, draw(st.integers(size // 2 + 1, size + 3)))
    else:
        masks = ms.masks.RegionMasks(10 if kind == "coalitions" else None, draw(st.sampled_from([0.2, 0.5, 0.9])))
    activation = draw(st.sampled_from(["softmax", "sigmoid", "none"]))
    region = draw(st.sampled_from(["predicted", "all", "label", "peak", "drift"]))
    if region in ("peak", "drift"):
        # The distance holds the unperturbed output itself.
        target: Target = ms.FunctionScore(peak) if region == "peak" else ms.EmbeddingSimilarity("distance")
    else:
        given_region = blocks(shape, 3, 3, 7) == 1 if region == "label" else region
        if region == "label":
            assume(bool(given_region.any()))
        # Of one channel alone, or of all in another order.
        target = ms.RegionScore(draw(st.sampled_from([[1], [2, 0, 1]])), activation, given_region)
    return {
        "shape": shape,
        "count": draw(st.integers(1, 2)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
        "labels": blocks(shape, draw(st.integers(2, 5)), draw(st.integers(2, 6))),
        "explain": ms.PerturbationInferer(
            masks,
            target,
            OcclusionScoring(),
            fill=draw(st.sampled_from([None, ms.ConstantFill(1.5), ms.MeanFill(), ms.BlurFill(1.0)])),
            inferer=inferer,
            mask_batch_size=draw(st.integers(1, 5)),
            patch_memory=draw(st.sampled_from([True, ms.PatchMemory(0, 0), ms.PatchMemory(0, 6000)])),
        ),
    }


@given(problems())
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_scores_are_those_of_whole_images(problem: dict[str, Any]) -> None:
    """Over random combinations, to 1e-9 in double and 1e-5 in single precision."""
    torch.set_num_threads(1)
    explain, shape = problem["explain"], problem["shape"]
    assume(bool(problem["labels"].any()))
    network = Network(len(shape)).to(problem["dtype"])
    inputs = images(problem["count"], 1, *shape, dtype=problem["dtype"])
    labels = [problem["labels"]] * problem["count"]
    assume(not isinstance(explain.target, ms.RegionScore) or _binds(explain, inputs, network))
    results = both(explain, inputs, network, cases=cases_of(labels))
    assert_same(results, 1e-5 if problem["dtype"] == torch.float32 else 1e-9)
    # Patches were run, not images.
    assert results[0][0].num_forwards >= len(patch_boxes(explain.inferer, shape)[0])


def _binds(explain: ms.PerturbationInferer, inputs: torch.Tensor, network: Network) -> bool:
    with torch.no_grad():
        outputs = explain.inferer(inputs, network)
    for i, image in enumerate(inputs):
        try:
            explain.target.bind(outputs[i : i + 1], ms.Case("case", image, i))
        except ValueError:
            return False  # an empty region
    return True


class TestExact:
    @pytest.mark.parametrize("mode", ["constant", "gaussian"])
    @pytest.mark.parametrize("shape", [(20, 13), (11, 14, 6)])
    def test_the_unperturbed_output_is_the_inferers(self, shape: tuple[int, ...], mode: str) -> None:
        inferer = SlidingWindowInferer((8,) * len(shape), overlap=0.6, mode=mode)
        network, image, target = Network(len(shape)).eval(), images(1, 1, *shape), Keeper()
        ms.sliding_window(4, target=target, inferer=inferer).explain(image, network)
        with torch.no_grad():
            assert torch.equal(target.output, inferer(image, network))

    @pytest.mark.parametrize(
        "inferer",
        [
            SlidingWindowInfererAdapt((8, 8, 8), 3, 0.5),
            SliceInferer(0, (8, 8), 3, 0.5),
            SliceInferer(2, roi_size=(8, 6), mode="gaussian"),
            SlidingWindowInferer((8, -1, None), 2),
            SlidingWindowInferer(8, 2, (0.5, 0, 0.25), device="cpu", sw_device="cpu"),
            SlidingWindowInferer((8, 8, 8), cpu_thresh=10),
            type("Renamed", (SlidingWindowInferer,), {"more": 1})((8, 8, 8)),
        ],
        ids=lambda inferer: type(inferer).__name__,
    )
    def test_other_inferers_of_the_same_arithmetic(self, inferer: SlidingWindowInferer, caplog: Any) -> None:
        network = Network(2 if isinstance(inferer, SliceInferer) else 3)
        results = both(ms.sliding_window(5, 4, target=WHOLE, inferer=inferer), images(2, 1, 9, 12, 10), network)
        assert_same(results, 1e-5)
        assert not logged_warnings(caplog)
        assert results[0][0].num_forwards != results[1][0].num_forwards

    @pytest.mark.parametrize("kind", ["half", "in place", "identity", "double"])
    def test_other_networks(self, kind: str) -> None:
        body = Network(2)
        network: Callable[[torch.Tensor], torch.Tensor] = {
            "half": lambda x: body(x).half(),
            "in place": lambda x: body(x.relu_()),
            "identity": lambda x: x,
            "double": lambda x: body(x).double(),
        }[kind]
        target = ms.RegionScore(0, "sigmoid", region="all")
        inferer = SlidingWindowInferer((8, 8), 3, 0.5, mode="gaussian")
        assert_same(both(ms.sliding_window(4, 3, target=target, inferer=inferer), images(1, 1, 20, 13), network), 1e-5)

    @pytest.mark.parametrize(("output", "wrap"), [("b", lambda x: {"a": x[:, :1], "b": x}), (1, lambda x: (-x, x))])
    def test_a_part_of_the_output(self, output: Any, wrap: Callable[[torch.Tensor], Any]) -> None:
        body, image = Network(2), images(1, 1, 20, 13)
        settings = {"target": WHOLE, "inferer": SlidingWindowInferer((8, 8), 3, 0.5)}
        (part,) = ms.sliding_window(4, 3, output=output, **settings).explain(image, lambda x: wrap(body(x)))
        (alone,) = ms.sliding_window(4, 3, **settings).explain(image, body)
        assert torch.equal(part.scores, alone.scores)
        assert part.num_forwards == alone.num_forwards


class Stop(Exception):
    pass


class Stopping:
    def __init__(self, network: Network, calls: int) -> None:
        self.network, self.calls = network, calls

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == 0:
            raise Stop
        self.calls -= 1
        return self.network(x)


class TestResume:
    @pytest.mark.parametrize("masks", [ms.masks.SlidingWindowMasks(4, 3), ms.masks.RegionMasks(15)])
    @pytest.mark.parametrize("memory", [True, ms.PatchMemory(0, 4000)])
    @pytest.mark.parametrize("share", [0, 0.6])
    def test_a_stopped_run_goes_on_to_the_same_bits(self, tmp_path: Path, masks: Any, memory: Any, share: Any) -> None:
        """After a share of the masks' network batches; the network tells batches and places in them apart."""
        shape = (18, 15)
        inputs, labels = images(2, 1, *shape), [blocks(shape, 4, 9), blocks(shape, 5, 9)]
        explain = ms.PerturbationInferer(
            masks,
            WHOLE,
            OcclusionScoring(),
            inferer=SlidingWindowInferer((8, 8), 5, 0.25),
            mask_batch_size=2,
            patch_memory=memory,
        )
        network = Coupled(2)
        expected = explain.explain(inputs, network, cases=cases_of(labels))
        # And of each image a patch alone.
        unperturbed = math.ceil(2 * len(patch_boxes(explain.inferer, shape)[0]) / 5) + 2
        calls = unperturbed + int(share * (len(network.calls) - unperturbed))
        store = ScoreStore(tmp_path)
        stored = [store.open(name, "key") for name in "ab"]
        with pytest.raises(Stop):
            explain.explain(inputs, Stopping(Coupled(2), calls), cases=cases_of(labels), stored=stored)
        done = len(stored[0].load())
        assert (done > 0) == (share > 0)
        stored = [store.open(name, "key") for name in "ab"]
        explanations = explain.explain(inputs, Coupled(2), cases=cases_of(labels), stored=stored)
        for explanation, whole in zip(explanations, expected, strict=True):
            assert torch.equal(explanation.scores, whole.scores)
            assert torch.equal(explanation.saliency, whole.saliency)
        if done and isinstance(masks, ms.masks.SlidingWindowMasks) and memory is True:
            assert explanations[0].num_forwards < expected[0].num_forwards
        # A finished case costs its unperturbed pass.
        stored = [store.open(name, "key") for name in "ab"]
        for again in explain.explain(inputs, Coupled(2), cases=cases_of(labels), stored=stored):
            assert again.num_forwards == again.per_prediction


class Own(SlidingWindowInferer):
    """Averages over a flip."""

    def __call__(self, inputs: torch.Tensor, network: Any, *args: Any, **kwargs: Any) -> Any:
        flipped = super().__call__(inputs.flip(-1), network, *args, **kwargs)
        return (super().__call__(inputs, network, *args, **kwargs) + flipped.flip(-1)) / 2


PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "Own runs the network in a way of its own": (Own((8, 8, 8)), {}),
    "stitches through buffers": (SlidingWindowInferer((8, 8, 8), buffer_steps=1), {}),
    r"reads where a patch lies \(`with_coord`\)": (
        SlidingWindowInferer((8, 8, 8), with_coord=True),
        {"network": lambda x, where: torch.cat([x, -x], 1)},
    ),
    "RISEMasks do not tell what they hide": (SlidingWindowInferer((8, 8, 8)), {"masks": ms.masks.RISEMasks(5, 3)}),
    "the fill depends on the whole mask": (SlidingWindowInferer((8, 8, 8)), {"fill": ms.InpaintFill(0)}),
    r"called with \['buffer_dim'\]": (SlidingWindowInferer((8, 8, 8)), {"call": {"buffer_dim": 0}}),
    r"gives \(1, 2, 4, 4, 4\) for patches \(1, 1, 8, 8, 8\)": (
        SlidingWindowInferer((8, 8, 8)),
        {"network": lambda x: torch.cat([x, -x], 1)[..., ::2, ::2, ::2]},
    ),
    "not finite everywhere": (
        SlidingWindowInferer((8, 8, 8)),
        {"network": lambda x: torch.cat([x, torch.full_like(x, -math.inf)], 1), "target": ms.FunctionScore(peak)},
    ),
}


class TestFallback:
    @pytest.mark.parametrize("reason", PLAIN)
    def test_whole_images_where_exactness_cannot_be_told(self, reason: str, caplog: Any) -> None:
        inferer, more = PLAIN[reason]
        network = more.get("network") or Network(2 if isinstance(inferer, SliceInferer) else 3)
        explain = ms.PerturbationInferer(
            more.get("masks", ms.masks.SlidingWindowMasks(4, 5)),
            more.get("target", WHOLE),
            OcclusionScoring(),
            more.get("fill"),
            inferer,
            mask_batch_size=4,
        )
        image = images(1, 1, 9, 12, 10)
        for _ in range(2):
            (ours,), (plain,) = both(explain, image, network, **more.get("call", {}))
            assert torch.equal(ours.scores.nan_to_num(), plain.scores.nan_to_num())
            assert ours.num_forwards == plain.num_forwards == len(plain.scores) + 1
        (words,) = logged_warnings(caplog)
        assert "every mask runs whole images" in words
        assert re.search(reason, words)


@pytest.mark.cuda
@pytest.mark.parametrize("memory", [True, ms.PatchMemory(20_000, 20_000)])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_on_a_gpu(memory: ms.PatchMemory | bool, device: str | None) -> None:
    inferer = SlidingWindowInferer((8, 8, 8), 3, 0.5, device=device)
    explain = ms.PerturbationInferer(
        ms.masks.RegionMasks(40), WHOLE, OcclusionScoring(), inferer=inferer, mask_batch_size=8, patch_memory=memory
    )
    shape = (20, 16, 12)
    results = both(
        explain,
        images(1, 1, *shape, dtype=torch.float64).cuda(),
        Network(3).double().cuda(),
        cases=[ms.Case("x", labels=blocks(shape, 5, 20))],
    )
    assert_same(results, 1e-9)


@pytest.mark.parametrize(("value", "refused"), [(-1e9, True), (-1e6, True), (-1e4, False), (1e7, True)])
def test_voxels_that_are_masked_by_a_large_value(value: float, refused: bool, caplog: Any) -> None:
    """A mask that brings an ordinary value back where -1e9 was must not leave -1e9's rounding there."""
    network = lambda x: torch.cat([x, torch.where(x < 0.3, value, x.square())], 1)  # noqa: E731
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    inferer = SlidingWindowInferer((8, 8), sw_batch_size=3, overlap=0.5, mode="gaussian")
    explain = ms.sliding_window(4, 4, target=WHOLE, inferer=inferer, fill=ms.ConstantFill(0.5))
    assert_same(both(explain, image, network), 1e-4)
    assert ("lost in their rounding" in caplog.text) == refused


# Masks in rounds under a sliding-window inferer, for targets that read a part of the image alone.
METHODS: dict[str, Callable[..., ms.PerturbationInferer]] = {
    "hierarchical": lambda **settings: ms.hierarchical_occlusion(levels=3, **settings),
    "focused": lambda **settings: ms.focused_rise(30, **settings),
    "minimal": lambda **settings: ms.minimal_region(0.5, levels=2, **settings),
    "until": lambda **settings: ms.region_occlusion(8, regions=ms.Supervoxels(12), until=0.9, budget=30, **settings),
}


class Local(torch.nn.Module):
    """The second channel stands out where the image is bright."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = torch.nn.functional.avg_pool2d(x, 3, 1, 1)
        return torch.cat([0.5 - bright, bright - 0.5], 1) * 4


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_patches_that_the_target_does_not_read(method: str, images: int) -> None:
    """They are not run, and every round gives what whole images give."""
    image = 0.1 * torch.rand(images, 1, 48, 56, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    image[..., 20:30, 34:44] += 1
    inferer = SlidingWindowInferer((16, 16), 4, 0.5)
    target = ms.RegionScore(1, "softmax", region="predicted")
    found: list[Any] = [
        METHODS[method](target=target, inferer=inferer, patch_memory=memory).explain(image, Local())
        for memory in (True, False)
    ]
    for remembered, whole in zip(*found, strict=True):
        assert remembered.num_forwards / remembered.per_prediction < 0.5 * whole.num_forwards
        if method == "minimal":  # windows that take next to nothing are ordered by rounding
            for each in (remembered, whole):
                (observed,) = each.observed
                assert observed.finding.kept_share >= 0.5
            continue
        assert list(remembered.ids) == list(whole.ids)
        assert_close(remembered.saliency, whole.saliency)


def test_the_price_of_a_later_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted without what earlier rounds have run."""
    explain = ms.hierarchical_occlusion(
        levels=3, target=ms.RegionScore(1, "softmax", "all"), inferer=SlidingWindowInferer((16, 16), 4, 0.5)
    )
    image = torch.zeros(1, 1, 64, 72)
    image[..., 20:30, 34:44] += 1
    plan, plans = RememberedPatches.plan, []
    monkeypatch.setattr(RememberedPatches, "plan", lambda *given: plans.append(plan(*given)) or plans[-1])
    (found,) = explain.explain(image, Local())
    assert len(plans) > 1
    assert found.per_prediction + sum(plans) == found.num_forwards


class Several(torch.nn.Module):
    """Gives its output as a part of a list, a tuple or a dictionary."""

    def __init__(self, form: Callable[[torch.Tensor], Any], ends_in_softmax: bool = False) -> None:
        super().__init__()
        self.inner, self.form, self.ends_in_softmax = Network(2).double(), form, ends_in_softmax

    def forward(self, x: torch.Tensor) -> Any:
        output = self.inner(x)
        return self.form(output.softmax(dim=1) if self.ends_in_softmax else output)


@pytest.mark.parametrize(
    ("form", "path"),
    [
        (lambda output: [output * 0, output], 1),
        (lambda output: (output, output * 0), (0,)),
        (lambda output: {"head": output, "other": output * 0}, "head"),
        (lambda output: output, None),
    ],
    ids=["list", "tuple", "dictionary", "tensor"],
)
@pytest.mark.parametrize("ends_in_softmax", [False, True])
def test_the_part_that_is_explained_is_remembered(form: Any, path: Any, ends_in_softmax: bool) -> None:
    """Whether the inferer or the automatic target is given the part."""
    network, inputs = Several(form, ends_in_softmax), images(1, 1, 12, 12, dtype=torch.float64)
    activation = None if ends_in_softmax else "softmax"
    of_target = ms.AutoTarget(activation=activation, output=path)
    of_inferer = ms.AutoTarget(activation=activation)
    predicted = form(Several(lambda output: output, ends_in_softmax)(inputs) + 1)
    for target, output in ((of_target, None), (of_inferer, path)):
        explain = ms.sliding_window(6, target=target, inferer=SlidingWindowInferer((4, 4)), output=output)
        (ours,) = explain.explain(inputs, network)
        (whole,) = explain.replace(patch_memory=False).explain(inputs, network)
        assert (ours.per_prediction > 1, whole.per_prediction) == (True, 1)
        assert_close(ours.saliency, whole.saliency)
        assert bool(ours.saliency.any())
        with pytest.raises(ValueError, match="not what was predicted"):  # by an evaluator
            explain.explain(inputs, network, cases=[ms.Case("a", prediction=predicted)])
