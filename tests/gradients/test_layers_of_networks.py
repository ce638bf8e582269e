"""Grad-CAM and SmoothGrad against autograd on networks whose layers work in place, give channels last, or tokens."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from monai.inferers import Inferer, SlidingWindowInferer
from monai.networks.blocks import PatchEmbed
from monai.networks.nets import DenseNet121, SwinUNETR, UNet, ViT, resnet10
from monai.networks.nets.swin_unetr import PatchMerging, SwinTransformerBlock
from torch import nn

import monai_saliency as ms
from monai_saliency.errors import CaseError


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
    "densenet": (lambda: DenseNet121(2, 1, 3), (64, 64)),
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
FIRST, LAST, GRID = "channels first", "channels last", (4, 6)
#: how a layer's output is read, tokens on their grid; the first is the default layer where there is a "default"
LAYERS: dict[str, dict[str, Any]] = {
    "densenet": {"class_layers.relu": FIRST, "default": 0, "features.norm5": FIRST, "features.transition1.norm": FIRST},
    "resnet": {"layer4": FIRST, "default": 0, "layer4.0.bn2": FIRST, "layer3.0.bn2": FIRST, "bn1": FIRST},
    "unet": {"model.0.adn.N": FIRST},
    "relu": {"norm": FIRST, "default": 0, "conv": FIRST},
    "flat": {"conv": FIRST, "default": 0},
    "swin": {"second": LAST, "default": 0, "first.inside.0.norm1": LAST, "last": LAST, "down": LAST, "embed": FIRST},
    "swin 3d": {"second": LAST, "default": 0, "first.inside.0.norm1": LAST},
    "convnext": {"deep": FIRST, "norm": LAST, "grow": LAST, "act": LAST},
    "vit": {"block.inside.0": GRID, "default": 0, "before": GRID, "before.inside.3": GRID, "embed": FIRST},
    "vit without class": {"norm": GRID, "default": 0, "block": GRID, "block.inside.3": GRID},
    "merged tokens": {"down": (2, 3), "default": 0, "norm": GRID},
    "mixer": {"back": (4, 8), "default": 0, "norm": (4, 8)},
    "monai's vit": {"blocks.1.attn.qkv": GRID, "default": 0, "blocks.1.norm1": GRID},
    "swinunetr": {"encoder10": FIRST, "default": 0, "swinViT.layers1.0.blocks.0.norm1": LAST},
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
    activation, slope = (torch.moveaxis(each, -1, 1) if how == LAST else each for each in read)
    cam = sum(slope[:, c].mean() * activation[:, c] for c in range(slope.shape[1])).relu()
    return F.interpolate(cam[:, None], x.shape[2:], mode="bilinear" if x.ndim == 4 else "trilinear")


@pytest.mark.parametrize("name", NETWORKS)
def test_grad_cam_and_smoothgrad_are_autograds(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (network, x), layers, target = network_of(name), LAYERS[name], ms.ClassScore([0, 1], "none")
    caplog.set_level(logging.INFO)
    for layer, how in layers.items():
        named, how = (f"net.{layer}", how) if how else (f"net.{next(iter(layers))}", next(iter(layers.values())))
        found = ms.grad_cam(named if layer != "default" else None, target=target)(x, network)
        assert caplog.messages[-1] == f"Grad-CAM of Sequential reads the layer {named!r}"
        expected = torch.cat([by_autograd(network, x, named, how, k) for k in (0, 1)], dim=1)
        assert float(expected.max()) > 0
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9 * float(expected.max()))
    found, expected = ms.smoothgrad(2, 0.1, 3, "signed", target=target)(x, network), torch.zeros_like(x)
    for i in (0, 1):
        noise = torch.from_numpy(np.random.default_rng([3, i]).standard_normal(x.shape[1:]))
        noisy = (x + 0.1 * (x.max() - x.min()) * noise).requires_grad_()
        expected += torch.autograd.grad(network(noisy)[0, 0], noisy)[0] / 2
    torch.testing.assert_close(found, torch.cat([expected, -expected], dim=1), rtol=1e-6, atol=1e-12)


def test_tokens_patch_by_patch() -> None:
    """The score is the mean over patches, so each patch's map has its share."""
    torch.manual_seed(4)
    dense = {"grid": lambda x: x.square().mT.unflatten(2, (2, 3)), "up": nn.Upsample(scale_factor=8)}
    network, x = vit(**dense).double().eval(), torch.rand(1, 1, 32, 48, dtype=torch.float64)
    inferer, target = SlidingWindowInferer((16, 24), 3, 0), ms.RegionScore(1, "softmax", "all")
    found = ms.grad_cam("norm", target=target, inferer=inferer)(x, network)
    shares = chain(net=network, mean=lambda out: out.softmax(1)[:, 1:2].mean((2, 3)) / 4)
    for part in [(..., slice(i, i + 16), slice(j, j + 24)) for i in (0, 16) for j in (0, 24)]:
        torch.testing.assert_close(found[part], by_autograd(shares, x[part], "net.norm", (2, 3), 0))


UNCLEAR = {
    ("vit", "norm"): r"of the layer 'net.norm' the score reads the class token only: name one before an attention",
    ("convnext", "first"): r"for images \(1, 1, 32, 32\); 'net.first' gives \(1, 8, 8, 8\)",
    ("swin", "first.inside.0.attn"): r"'net.first.inside.0.attn' gives \(24, 16, 6\)",
    ("densenet", "class_layers.out"): r"\(net.class_layers.out\) gives a tensor \(n, channels.* gives \(1, 3\)",
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
@pytest.mark.parametrize("method", [partial(ms.grad_cam, "conv"), ms.smoothgrad, ms.integrated_gradients])
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
        torch.testing.assert_close(explain(x, network), expected)
