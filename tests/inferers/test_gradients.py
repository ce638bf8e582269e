"""White-box methods: against their papers in plain loops, answers by hand, captum, MONAI, and autograd as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import captum.attr
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer
from monai.networks.nets import DenseNet, UNet
from monai.visualize import GradCAM as MonaiGradCAM

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.metrics import Deletion
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore

FIRST = ms.ClassScore([0], "none")


def seeded(make: Callable[[], torch.nn.Module], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    return make().eval().to(dtype)


def classifier(dims: int = 3, channels: int = 1, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    made = {"init_features": 4, "growth_rate": 4, "block_config": (2, 2), "bn_size": 2}
    return seeded(lambda: DenseNet(dims, channels, 3, **made), dtype)


def segmenter(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return seeded(lambda: UNet(3, 1, 2, (4, 8), (2,), norm="batch"), dtype)


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


class Linear(torch.nn.Module):
    """Two scores, each a weighted sum of the voxels."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, None] * self.weight).flatten(2).sum(2) + 3


# Answers by hand. -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 4, 5, 3)])
@pytest.mark.parametrize("steps", [1, 7])
def test_of_a_linear_network_it_is_the_weight_times_the_way_from_the_fill(shape: tuple[int, ...], steps: int) -> None:
    network, x = Linear(*shape), image(2, *shape, dtype=torch.float64)
    settings: dict[str, Any] = {"target": ms.ClassScore([1, 0], "none"), "fill": ms.ConstantFill(0.25)}
    expected = ((x - 0.25)[:, None] * network.weight.detach().flip(0)).sum(2)
    torch.testing.assert_close(ms.integrated_gradients(steps, **settings)(x, network), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ms.smoothgrad(steps, **settings)(x, network), expected, rtol=0, atol=1e-12)
    signed = ms.smoothgrad(steps, reading="signed", **settings)(x, network)
    torch.testing.assert_close(signed, network.weight.detach().flip(0).sum(1).expand_as(signed))
    absolute = ms.smoothgrad(steps, reading="absolute", **settings)(x, network)
    torch.testing.assert_close(absolute, network.weight.detach().flip(0).abs().sum(1).expand_as(signed))


@pytest.mark.parametrize(
    ("network", "target", "inferer"),
    [
        (classifier(), ms.ClassScore([0, 2], "softmax"), SimpleInferer()),
        (classifier(), ms.ClassScore("predicted", "none"), SimpleInferer()),
        (segmenter(), ms.RegionScore([0, 1], "softmax", "all"), SimpleInferer()),
        (segmenter(), ms.RegionScore(1, "sigmoid", "all"), SlidingWindowInferer((8, 8, 8), 3, 0.5, mode="gaussian")),
    ],
)
def test_integrated_gradients_sum_to_the_difference_of_the_scores(
    network: torch.nn.Module, target: Any, inferer: Inferer, caplog: pytest.LogCaptureFixture
) -> None:
    x = image(1, 1, 12, 12, 16)
    (found,) = ms.integrated_gradients(target=target, inferer=inferer).explain(x, network)
    with torch.no_grad():
        scores = [found.target(inferer(each, network))[0] for each in (x, torch.zeros_like(x))]
    change = scores[0] - scores[1]
    assert bool((change.abs() > 1e-4).all())
    torch.testing.assert_close(found.saliency.flatten(1).sum(1), change, rtol=0.01, atol=0)
    torch.testing.assert_close(found.scores[-1], scores[1])
    assert found.num_forwards == 52
    assert not caplog.messages


# The papers in plain loops, and public peers. -------------------------------------------------------------------------


def test_integrated_gradients_are_captums() -> None:
    network, x = classifier(), image(2, 1, 16, 16, 16)
    found = ms.integrated_gradients(20, target=ms.ClassScore([2], "none"), mask_batch_size=7)(x, network)
    theirs = captum.attr.IntegratedGradients(network).attribute(x, torch.zeros_like(x), target=2, n_steps=20)
    torch.testing.assert_close(found, theirs.to(found), rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_smoothgrad_is_the_loop_of_the_paper(batch: int) -> None:
    network, x = classifier(2, 2, torch.float64), image(1, 2, 16, 16, dtype=torch.float64)
    target = ms.ClassScore([1], "softmax")
    signed = ms.smoothgrad(10, 0.2, 5, "signed", target=target, mask_batch_size=batch)(x, network)
    sigma = 0.2 * float(x.max() - x.min())
    expected = torch.zeros_like(x[0])
    for i in range(10):
        noise = torch.from_numpy(np.random.default_rng([5, i]).standard_normal(tuple(x.shape[1:])))
        noisy = (x[0] + sigma * noise)[None].requires_grad_()
        (gradient,) = torch.autograd.grad(network(noisy).softmax(1)[0, 1], noisy)
        expected += gradient[0] / 10
    torch.testing.assert_close(signed[0, 0], expected.sum(0), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("layer", [None, "class_layers.relu", "features.denseblock1", "features.transition1.conv"])
def test_grad_cam_is_monais(layer: str | None, caplog: pytest.LogCaptureFixture) -> None:
    network, others, x = classifier(), classifier(), image(1, 1, 24, 16, 16)
    for each in (network, others):
        each.class_layers.out.weight.data.neg_()  # so that something is above 0
    caplog.set_level(logging.INFO)
    found = ms.grad_cam(layer, target=ms.ClassScore("all", "none"))(x, network)
    used = layer or "class_layers.relu"
    assert f"Grad-CAM of DenseNet reads the layer '{used}'" in caplog.messages
    assert not any(module._forward_hooks for module in network.modules())
    monais = MonaiGradCAM(others, used, postprocessing=lambda cam: cam)
    theirs = torch.cat([monais(x, class_idx=k).detach() for k in range(3)], dim=1)
    assert float(theirs.max()) > 0
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6 * float(theirs.max()))


# Patch by patch. ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [ms.RegionScore([0, 1], "softmax"), ms.RegionScore(1, "none", "all")])
@pytest.mark.parametrize(
    "inferer",
    [
        SlidingWindowInferer((8, 8, 8), 1, 0.25),
        SlidingWindowInferer((8, 8, 8), 5, 0.5, mode="gaussian"),
        SlidingWindowInferer((16, 8, 8), 3, 0.5, buffer_steps=1, buffer_dim=0),
    ],
)
def test_patch_by_patch_is_the_derivative_of_the_whole(inferer: Inferer, target: Any) -> None:
    """Of the blended volume, by autograd through the inferer with every patch's graph kept."""
    network, x = segmenter(torch.float64), image(1, 1, 14, 12, 10, dtype=torch.float64)
    (found,) = ms.smoothgrad(1, 0, reading="signed", target=target, inferer=inferer).explain(x, network)
    leaf = x.clone().requires_grad_()
    scores = found.target(inferer(leaf, network))[0]
    for k in range(len(scores)):
        (expected,) = torch.autograd.grad(scores[k], leaf, retain_graph=True)
        torch.testing.assert_close(found.saliency[k], expected[0, 0], rtol=1e-9, atol=1e-15)


# Laws. ----------------------------------------------------------------------------------------------------------------

METHODS: list[Callable[..., ms.PerturbationInferer]] = [
    lambda **given: ms.integrated_gradients(9, **given),
    lambda **given: ms.smoothgrad(9, **given),
    lambda **given: ms.grad_cam(**given),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("inferer", [None, SlidingWindowInferer((8, 8, 8), 3, 0.5)])
def test_the_batch_size_and_the_other_images_change_nothing(method: Any, inferer: Inferer | None) -> None:
    network, x = segmenter(torch.float64), image(2, 1, 8, 12, 8, dtype=torch.float64)
    given = {"target": ms.RegionScore([0, 1], "softmax", "all"), "inferer": inferer}
    expected = torch.cat([method(mask_batch_size=1, **given)(each[None], network) for each in x])
    assert float(expected.abs().max()) > 0
    for size in (2, 4, 16):
        torch.testing.assert_close(method(mask_batch_size=size, **given)(x, network), expected, rtol=1e-9, atol=1e-15)


def test_the_network_is_left_as_it_was() -> None:
    network = classifier().train()
    network.class_layers.out.weight.grad = torch.ones_like(network.class_layers.out.weight)
    for method in METHODS:
        method(target=ms.ClassScore([1], "softmax"))(image(1, 1, 16, 16, 16), network)
    assert all(module.training for module in network.modules())
    assert bool((network.class_layers.out.weight.grad == 1).all())
    assert sum(each.grad is not None for each in network.parameters()) == 1
    assert all(each.requires_grad for each in network.parameters())
    relu = network.class_layers.relu
    assert relu.inplace  # which MONAI's switches off


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", METHODS)
def test_under_no_grad_and_inference_mode(method: Any, mode: Any) -> None:
    network, x = classifier(), image(1, 1, 16, 16, 16)
    explain = method(target=ms.ClassScore([1], "softmax"))
    expected = explain(x, network)
    with mode():
        found = explain(x.clone(), network)
    assert torch.equal(found, expected)


def test_several_inputs_and_a_structured_output() -> None:
    """A held channel goes to the network unchanged and gets no map; the output is a part of a dictionary."""

    def network(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        score = (inputs["image"] * inputs["map"]).flatten(1).sum(1, keepdim=True) * inputs["age"]
        return {"numbers": torch.arange(len(score)), "heads": [score.detach(), score]}

    x, weight, age = image(2, 1, 6, 5), image(2, 1, 6, 5) - 0.4, torch.tensor([[1.0], [3.0]])
    explain = ms.integrated_gradients(3, target=FIRST, inputs=ms.DictInput("image"), output=("heads", 1))
    found = explain({"image": x, "map": weight, "age": age}, network)
    torch.testing.assert_close(found, x * weight * age[:, :, None, None])


def test_geometry_and_metrics() -> None:
    """Maps lie on the scan, and metrics perturb the image by their own masks."""
    x = MetaTensor(image(1, 1, 12, 12, 12), affine=torch.diag(torch.tensor([2.0, 3.0, 4.0, 1.0])))
    explain = ms.integrated_gradients(8, target=ms.ClassScore([1], "softmax"))
    saliency = explain(x, classifier())
    assert isinstance(saliency, MetaTensor)
    assert torch.equal(saliency.affine, x.affine)
    deletion = Deletion(explain, classifier())
    assert bool(torch.isfinite(deletion.compute(saliency.as_tensor(), x.as_tensor())).all())


# What is refused. -----------------------------------------------------------------------------------------------------


class Remote(torch.nn.Module):
    """A network of which only numbers come back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inside, self.how = classifier(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return self.inside(x)
        if self.how == "inference_mode":
            with torch.inference_mode():
                return self.inside(x)
        if self.how == "numpy":
            return torch.from_numpy(self.inside(torch.from_numpy(x.numpy())).detach().numpy())
        return self.inside(x.detach())


@pytest.mark.parametrize("inferer", [None, SlidingWindowInferer((16, 16, 16), 2, 0)])
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "numpy", "detach"])
@pytest.mark.parametrize("method", METHODS)
def test_a_network_without_a_derivative_is_refused(method: Any, how: str, inferer: Inferer | None) -> None:
    network, x = Remote(how), image(1, 1, 16, 16, 16)
    target = ms.FunctionScore(lambda output: output.reshape(len(output), 3, -1).mean(2).softmax(1)[:, :1])
    if inferer is not None:
        network = torch.nn.Sequential(network, torch.nn.Unflatten(1, (3, 1, 1, 1)), torch.nn.Upsample((16, 16, 16)))
    if how == "detach" and method is METHODS[2]:
        pytest.skip("the layers behind have a derivative, which is what Grad-CAM reads")
    with pytest.raises(
        CaseError, match=r"needs the derivative of the score.* Explain by perturbation, which needs none"
    ):
        method(target=target, inferer=inferer)(x, network)
    # Which it does.
    assert ms.sliding_window(8, 8, target=target, inferer=inferer)(x, network).shape[1] == 1


def test_a_target_without_a_derivative_is_refused() -> None:
    target = ms.FunctionScore(lambda output: (output > 0).float().flatten(1).mean(1, keepdim=True))
    x = image(1, 1, 8, 8, 8) - 0.5
    with pytest.raises(CaseError, match=r"the target FunctionScore there is none: autograd sees no way"):
        ms.integrated_gradients(3, target=target)(x, torch.nn.Conv3d(1, 2, 3, padding=1))
    for explain in (ms.grad_cam(target=ms.EmbeddingSimilarity()), ms.smoothgrad(2, 0, target=ms.EmbeddingSimilarity())):
        with pytest.raises(CaseError, match=r"a similarity with the image's own output is highest there"):
            explain(x, classifier())


def test_torchscript_is_differentiated_but_has_no_layers_to_watch() -> None:
    network, x = classifier(), image(1, 1, 16, 16, 16)
    script = torch.jit.trace(network, x)
    target = ms.ClassScore([1], "softmax")
    expected = ms.smoothgrad(3, target=target)(x, network)
    torch.testing.assert_close(ms.smoothgrad(3, target=target)(x, script), expected, rtol=1e-4, atol=1e-9)


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(
        ValueError, match=r"`target_layer` 'class_layers.rel' is not a layer of DenseNet.*class_layers\."
    ):
        ms.grad_cam("class_layers.rel", target=FIRST)(image(1, 1, 16, 16, 16), classifier())


def test_parts_of_a_case_and_the_store(tmp_path: Path) -> None:
    """The samples of a case are not shared between workers, and no scores are kept."""
    explain, x = ms.integrated_gradients(5, target=FIRST), image(1, 1, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the samples of IntegratedGradients cannot be shared between workers"):
        explain.score(x, Linear(1, 4, 4), part=Part(0, 2))
    store = ScoreStore(tmp_path)
    stored = [store.open("ct_7", "key")]
    first, again = (explain.explain(x, Linear(1, 4, 4), cases=[Case("ct_7")], stored=stored)[0] for _ in range(2))
    assert torch.equal(first.saliency, again.saliency)
    assert again.num_forwards == 7
    assert not stored[0].ranges()
