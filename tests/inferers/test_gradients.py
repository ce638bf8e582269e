"""White-box methods: against their papers in plain loops, answers by hand, captum, MONAI, and autograd as a whole."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import captum.attr
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.tolerances import assert_close
from monai.data import MetaTensor
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer
from monai.networks.blocks import PatchEmbed
from monai.networks.nets import DenseNet, SwinUNETR, UNet, ViT, resnet10
from monai.networks.nets.swin_unetr import PatchMerging, SwinTransformerBlock
from monai.visualize import GradCAM as MonaiGradCAM
from torch import nn

import monai_saliency as ms
from monai_saliency.errors import CaseError
from monai_saliency.metrics import Deletion
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore

FIRST = ms.ClassScore([0], "none")


def seeded(make: Callable[[], torch.nn.Module], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    return make().eval().to(dtype)


def densenet(dims: int = 3) -> torch.nn.Module:
    return DenseNet(dims, 1, 3, init_features=4, growth_rate=4, block_config=(2, 2), bn_size=2)


def classifier() -> torch.nn.Module:
    return seeded(densenet)


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


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 4, 5, 3)])
@pytest.mark.parametrize("steps", [1, 7])
def test_of_a_linear_network_it_is_the_weight_times_the_way_from_the_fill(shape: tuple[int, ...], steps: int) -> None:
    network, x = Linear(*shape), image(2, *shape, dtype=torch.float64)
    settings: dict[str, Any] = {"target": ms.ClassScore([1, 0], "none"), "fill": ms.ConstantFill(0.25)}
    expected = ((x - 0.25)[:, None] * network.weight.detach().flip(0)).sum(2)
    assert_close(ms.integrated_gradients(steps, **settings)(x, network), expected)
    assert_close(ms.smoothgrad(steps, **settings)(x, network), expected)
    signed = ms.smoothgrad(steps, reading="signed", **settings)(x, network)
    assert_close(signed, network.weight.detach().flip(0).sum(1).expand_as(signed))
    absolute = ms.smoothgrad(steps, reading="absolute", **settings)(x, network)
    assert_close(absolute, network.weight.detach().flip(0).abs().sum(1).expand_as(signed))


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
    assert_close(found.scores[-1], scores[1])
    assert found.num_forwards == 52
    assert not caplog.messages


# The papers in plain loops, and public peers.
def test_integrated_gradients_are_captums() -> None:
    network, x = classifier(), image(2, 1, 16, 16, 16)
    found = ms.integrated_gradients(20, target=ms.ClassScore([2], "none"), mask_batch_size=7)(x, network)
    theirs = captum.attr.IntegratedGradients(network).attribute(x, torch.zeros_like(x), target=2, n_steps=20)
    assert_close(found, theirs.to(found))


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
    assert_close(found, theirs)


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
        assert_close(found.saliency[k], expected[0, 0])


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
        assert_close(method(mask_batch_size=size, **given)(x, network), expected)


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
    assert_close(found, x * weight * age[:, :, None, None])


def test_geometry_and_metrics() -> None:
    """Maps lie on the scan, and metrics perturb the image by their own masks."""
    x = MetaTensor(image(1, 1, 12, 12, 12), affine=torch.diag(torch.tensor([2.0, 3.0, 4.0, 1.0])))
    explain = ms.integrated_gradients(8, target=ms.ClassScore([1], "softmax"))
    saliency = explain(x, classifier())
    assert isinstance(saliency, MetaTensor)
    assert torch.equal(saliency.affine, x.affine)
    deletion = Deletion(explain, classifier())
    assert bool(torch.isfinite(deletion.compute(saliency.as_tensor(), x.as_tensor())).all())


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
    with pytest.raises(ValueError, match=r"the forwards of IntegratedGradients cannot be shared between workers"):
        explain.score(x, Linear(1, 4, 4), part=Part(0, 2))
    stored = [ScoreStore(tmp_path).open("ct_7", "key")]
    first, again = (explain.explain(x, Linear(1, 4, 4), cases=[ms.Case("ct_7")], stored=stored)[0] for _ in range(2))
    assert torch.equal(first.saliency, again.saliency)
    assert again.num_forwards == 7
    assert not stored[0].load()


# Grad-CAM and SmoothGrad against autograd on networks whose layers work in place, give channels last, or tokens.
class Do(nn.Module):
    """A function as a layer, of which nothing is known but its output."""

    def __init__(self, function: Any, *inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.function = nn.ModuleList(inside), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.inside)


def chain(**layers: Any) -> nn.Module:
    made = nn.Sequential()
    for name, layer in layers.items():
        made.add_module(name, layer if isinstance(layer, nn.Module) else Do(layer))
    return made


def two_scores(out: Any) -> torch.Tensor:
    """Of opposite sign, so that the Grad-CAM of one of them has something above 0."""
    flat = (out[0] if isinstance(out, tuple) else out).flatten(1)
    score = (flat * torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype)).sum(1, keepdim=True)
    return torch.cat([score, -score], dim=1)


def attend(x: torch.Tensor, norm: nn.Module, attention: nn.Module, second: nn.Module, mlp: nn.Module) -> torch.Tensor:
    x = x + attention(*[norm(x)] * 3)[0]
    return x + F.relu(mlp(second(x)), inplace=True)


def block() -> nn.Module:
    """A transformer's block on tokens: its layers are inside.0 to inside.3."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Do(attend, nn.LayerNorm(8), attention, nn.LayerNorm(8), nn.Linear(8, 8))


def swin(dims: int) -> nn.Module:
    blocks = [SwinTransformerBlock(width, 2, (4,) * dims, (0,) * dims) for width in (6, 12)]
    first, second = (Do(lambda x, inside: inside(x, None), each) for each in blocks)
    down, embed = PatchMerging(6, spatial_dims=dims), PatchEmbed(2, 1, 6, spatial_dims=dims)
    ends = {"last": lambda x: x.movedim(1, -1), "first": first, "down": down, "second": second}
    return chain(embed=embed, **ends, pool=lambda x: x.square().flatten(1, -2).mean(1))


def vit(add: nn.Module | None = None, **ends: Any) -> nn.Module:
    blocks = {"add": add or nn.Identity(), "before": block(), "block": block(), "norm": nn.LayerNorm(8)}
    return chain(embed=nn.Conv2d(1, 8, 8, 8), tokens=lambda x: x.flatten(2).mT, **blocks, **ends)


def convnext() -> nn.Module:  # of as many channels as rows and columns
    stem, deep = nn.Conv2d(1, 8, 4, 4), nn.Conv2d(8, 8, 3, padding=1, groups=8)
    mlp = {"norm": nn.LayerNorm(8), "grow": nn.Linear(8, 10), "act": nn.ReLU(inplace=True), "shrink": nn.Linear(10, 8)}
    return chain(stem=stem, deep=deep, last=lambda x: x.movedim(1, -1), **mlp, first=lambda x: x.movedim(-1, 1))


CLASS_TOKEN, MEAN = Do(lambda x: torch.cat([0 * x[:, :1] + 0.3, x], 1)), (lambda x: x.square().mean(1))
RELU, QUARTERS = (
    (lambda x: x.relu_().mean(3)),
    Do(lambda x: x.unflatten(1, (2, 2, 3, 2)).movedim(2, 3).flatten(3).flatten(1, 2)),
)
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "densenet": (lambda: densenet(2), (64, 64)),
    "resnet": (lambda: resnet10(spatial_dims=2, n_input_channels=1, num_classes=3), (48, 64)),
    "unet": (lambda: UNet(2, 1, 2, (4, 8, 8), (2, 2), act=("relu", {"inplace": True})), (32, 32)),
    "relu": (lambda: chain(conv=nn.Conv2d(1, 6, 3, 2), norm=nn.BatchNorm2d(6), end=RELU), (17, 25)),
    "flat": (lambda: chain(conv=nn.Conv2d(1, 16, 8, 8), flat=nn.Flatten(2), pool=lambda x: x.mT), (64, 64)),
    "swin": (lambda: swin(2), (32, 48)),
    "swin 3d": (lambda: swin(3), (16, 24, 8)),
    "convnext": (convnext, (32, 32)),
    "vit": (lambda: vit(CLASS_TOKEN, head=lambda x: x[:, 0]), (32, 48)),
    "vit without class": (lambda: vit(pool=MEAN), (32, 48)),
    "merged tokens": (lambda: vit(join=QUARTERS, down=nn.Linear(32, 8), pool=MEAN), (32, 48)),
    "mixer": (lambda: vit(turn=lambda x: x.mT, mix=nn.Linear(32, 32), back=lambda x: x.mT, pool=MEAN), (32, 64)),
    "monai's vit": (lambda: ViT(1, (32, 48), 8, 8, 12, 2, 2, classification=True, spatial_dims=2), (32, 48)),
    "swinunetr": (lambda: SwinUNETR(1, 2, feature_size=12, spatial_dims=2), (64, 64)),
}
CHANNELS_FIRST, CHANNELS_LAST, GRID = "channels first", "channels last", (4, 6)
#: how a layer's output is read, tokens on their grid; the first is the default, but for networks in NO_DEFAULT
NO_DEFAULT = ("unet", "convnext", "flat", "vit", "monai's vit")
LAYERS: dict[str, dict[str, Any]] = {
    "densenet": dict.fromkeys(["class_layers.relu", "features.norm5", "features.transition1.norm"], CHANNELS_FIRST),
    "resnet": dict.fromkeys(["layer4", "layer4.0.bn2", "layer3.0.bn2", "bn1"], CHANNELS_FIRST),
    "unet": {"model.0.adn.N": CHANNELS_FIRST},
    "relu": {"norm": CHANNELS_FIRST, "conv": CHANNELS_FIRST},
    "flat": {"conv": CHANNELS_FIRST},
    "swin": dict.fromkeys(["second", "first.inside.0.norm1", "last", "down"], CHANNELS_LAST)
    | {"embed": CHANNELS_FIRST},
    "swin 3d": {"second": CHANNELS_LAST, "first.inside.0.norm1": CHANNELS_LAST},
    "convnext": {"deep": CHANNELS_FIRST, "norm": CHANNELS_LAST, "grow": CHANNELS_LAST, "act": CHANNELS_LAST},
    "vit": {"block.inside.0": GRID, "before": GRID, "before.inside.3": GRID, "embed": CHANNELS_FIRST},
    "vit without class": {"norm": GRID, "block": GRID, "block.inside.3": GRID},
    "merged tokens": {"norm": GRID},
    "mixer": {"back": (4, 8), "norm": (4, 8)},
    "monai's vit": {"blocks.1.attn.qkv": GRID, "blocks.1.norm1": GRID},
    "swinunetr": {"encoder10": CHANNELS_FIRST, "swinViT.layers1.0.blocks.0.norm1": CHANNELS_LAST},
}


def network_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name in ("monai's vit", "swinunetr"):
        pytest.importorskip("einops", reason="MONAI's transformers need einops")
    torch.manual_seed(4)
    make, size = NETWORKS[name]
    return chain(net=make(), scores=two_scores).double().eval(), torch.rand(1, 1, *size, dtype=torch.float64)


def by_autograd(network: nn.Module, x: torch.Tensor, layer: str, how: Any, k: int) -> torch.Tensor:
    """The network goes on with a copy of the layer's output, so that nothing changes it."""
    kept: list[torch.Tensor] = []
    hook = network.get_submodule(layer).register_forward_hook(lambda _, given, out: kept.append(out) or out.clone())
    score = network(x)[0, k]
    hook.remove()
    read = [kept[-1].detach(), torch.autograd.grad(score, kept[-1])[0]]
    if isinstance(how, tuple):
        read = [each[:, each.shape[1] - int(np.prod(how)) :].mT.unflatten(2, how) for each in read]
    activation, slope = (torch.moveaxis(each, -1, 1) if how == CHANNELS_LAST else each for each in read)
    cam = sum(slope[:, c].mean() * activation[:, c] for c in range(slope.shape[1])).relu()
    return F.interpolate(cam[:, None], x.shape[2:], mode="bilinear" if x.ndim == 4 else "trilinear")


@pytest.mark.parametrize("name", NETWORKS)
def test_grad_cam_and_smoothgrad_are_autograds(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (network, x), layers, target = network_of(name), LAYERS[name], ms.ClassScore([0, 1], "none")
    caplog.set_level(logging.INFO)
    by_default = [] if name in NO_DEFAULT else [(None, next(iter(layers)))]
    for asked, layer in [*((f"net.{each}", each) for each in layers), *by_default]:
        named, how = f"net.{layer}", layers[layer]
        found = ms.grad_cam(asked, target=target)(x, network)
        assert caplog.messages[-1] == f"Grad-CAM of Sequential reads the layer {named!r}"
        expected = torch.cat([by_autograd(network, x, named, how, k) for k in (0, 1)], dim=1)
        assert float(expected.max()) > 0
        assert_close(found, expected)
    found, expected = ms.smoothgrad(2, 0.1, 3, "signed", target=target)(x, network), torch.zeros_like(x)
    for i in (0, 1):
        noise = torch.from_numpy(np.random.default_rng([3, i]).standard_normal(x.shape[1:]))
        noisy = (x + 0.1 * (x.max() - x.min()) * noise).requires_grad_()
        expected += torch.autograd.grad(network(noisy)[0, 0], noisy)[0] / 2
    assert_close(found, torch.cat([expected, -expected], dim=1))


def test_tokens_patch_by_patch() -> None:
    """The score is the mean over patches, so each patch's map has its share."""
    torch.manual_seed(4)
    dense = {"grid": lambda x: x.square().mT.unflatten(2, (2, 3)), "up": nn.Upsample(scale_factor=8)}
    network, x = vit(**dense).double().eval(), torch.rand(1, 1, 32, 48, dtype=torch.float64)
    inferer, target = SlidingWindowInferer((16, 24), 3, 0), ms.RegionScore(1, "softmax", "all")
    found = ms.grad_cam("norm", target=target, inferer=inferer)(x, network)
    shares = chain(net=network, mean=lambda out: out.softmax(1)[:, 1:2].mean((2, 3)) / 4)
    for part in [(..., slice(i, i + 16), slice(j, j + 24)) for i in (0, 16) for j in (0, 24)]:
        assert_close(found[part], by_autograd(shares, x[part], "net.norm", (2, 3), 0))


UNCLEAR = {
    ("vit", "norm"): r"of the layer 'net.norm' the score reads the class token only: name one before an attention",
    ("convnext", "first"): r"for images \(1, 1, 32, 32\); 'net.first' gives \(1, 8, 8, 8\)",
    ("swin", "first.inside.0.attn"): r"'net.first.inside.0.attn' gives \(24, 16, 6\)",
    ("densenet", "class_layers.out"): r"\(net.class_layers.out\) gives a tensor \(n, channels.* gives \(1, 3\)",
    ("merged tokens", "down"): r"'net.down' gives \(1, 6, 8\)",
    ("mixer", "mix"): r"'net.mix' gives \(1, 8, 32\)",
    ("flat", "flat"): r"'net.flat' gives \(1, 16, 64\)",
}


@pytest.mark.parametrize(("name", "layer"), UNCLEAR)
def test_a_layer_that_cannot_be_read_is_refused(name: str, layer: str) -> None:
    network, x = network_of(name)
    with pytest.raises(CaseError, match=UNCLEAR[name, layer]):
        ms.grad_cam(f"net.{layer}", target=ms.ClassScore([0], "none"))(x, network)


@pytest.mark.parametrize("inferer", [None, SlidingWindowInferer((8, 8), 3, 0.5)])
@pytest.mark.parametrize("step", [torch.round, torch.floor, torch.sign, lambda x: 1 + 1e-5 * (x > 0)])
@pytest.mark.parametrize("method", [*METHODS[:2], partial(ms.grad_cam, "conv")])
def test_a_score_that_is_rounded_is_refused(method: Any, step: Any, inferer: Inferer | None) -> None:
    torch.manual_seed(1)
    conv, x = nn.Conv2d(1, 2, 3, padding=1), torch.rand(1, 1, 16, 16)
    network = chain(conv=conv, step=lambda x: torch.cat([x[:, :1], step(9 * x[:, 1:])], 1))
    with pytest.raises(CaseError, match=r"for class 1 it is zero at all \d+ images, though .*rounds.*Explain by pert"):
        method(target=ms.RegionScore([0, 1], "none", "all"), inferer=inferer)(x, network)
    method(target=ms.RegionScore(0, "none", "all"), inferer=inferer)(x, network)
    moved = ms.sliding_window(4, 4, target=ms.RegionScore(1, "none", "all"), inferer=inferer)(x, network)
    assert float(moved.abs().max()) > 0


def test_patches_without_a_slope_are_zero_and_images_may_be_changed_in_place() -> None:
    """One half of the image is dark, where no unit is active."""
    change, x = (lambda x: x.sub_(0.5).mul_(2)), torch.rand(1, 1, 8, 16, dtype=torch.float64)
    network = chain(change=change, relu=nn.ReLU(inplace=True), conv=nn.Conv2d(1, 1, 1)).double()
    x[..., 8:] *= 0.1
    expected = (x > 0.5) * 2 * network.conv.weight.detach() / x.numel()
    for inferer in (None, SlidingWindowInferer((8, 8), 2, 0)):
        explain = ms.smoothgrad(1, 0, reading="signed", target=ms.RegionScore(0, "none", "all"), inferer=inferer)
        assert_close(explain(x, network), expected)


def test_grad_cam_hears_its_own_thread_only() -> None:
    network = classifier()
    method = ms.grad_cam(target=FIRST)
    scans = [image(1, 1, 16, 16, 16), image(1, 1, 12, 12, 12)]  # the layers of the second are coarser
    right = [method(scan, network) for scan in scans]
    both, last = Barrier(2, timeout=60), network.class_layers

    def wait(*_: Any) -> None:  # both calls have passed their layers before either goes on
        both.wait()

    with last.register_forward_hook(wait), last.register_forward_pre_hook(wait), ThreadPoolExecutor(2) as pool:
        for ours, expected in zip(pool.map(lambda scan: method(scan, network), scans), right, strict=True):
            assert_close(ours, expected)
