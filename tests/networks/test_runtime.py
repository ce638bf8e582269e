"""Networks in half precision, with channels last and compiled: the same maps up to rounding, and never another's."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import SlidingWindowInferer
from monai.networks import nets
from torch.nn.parallel import DataParallel

import monai_saliency as ms
from monai_saliency.errors import CaseError
from monai_saliency.networks import Ensemble, accelerated, network_fingerprint, runtime_settings
from monai_saliency.networks.runtime import network_key, same_network
from monai_saliency.storage.key import Unfingerprintable

TARGET = ms.ClassScore([1], "softmax")
EAGER = {"backend": "eager"}


class Noting(torch.nn.Module):
    """Notes the type and the memory of what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, bool]] = []

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        last = torch.channels_last if values.ndim == 4 else torch.channels_last_3d
        self.seen.append((values.dtype, values.is_contiguous(memory_format=last) and not values.is_contiguous()))
        return values


def network(dims: int = 2, channels: int = 1, seed: int = 0) -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        conv = (torch.nn.Conv2d, torch.nn.Conv3d)[dims - 2]
        pool = (torch.nn.AdaptiveAvgPool2d, torch.nn.AdaptiveAvgPool3d)[dims - 2](2)
        layers = [conv(channels, 4, 3, padding=1), Noting(), torch.nn.ReLU(), pool, torch.nn.Flatten()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(4 * 2**dims, 3)).eval()


def image(dims: int = 2, channels: int = 1) -> torch.Tensor:
    return torch.rand(1, channels, *[12] * dims, generator=torch.Generator().manual_seed(1))


def test_bf16_runs_in_it_and_gives_float32() -> None:
    inner, batch = network(3), image(3)
    with torch.no_grad():
        found = accelerated(inner, amp="bf16")(batch)
    assert found.dtype == torch.float32
    assert inner[1].seen == [(torch.bfloat16, False)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, inner(batch).float())
    assert next(inner.parameters()).dtype == torch.float32


@pytest.mark.parametrize(("dims", "channels"), [(2, 3), (3, 1)])
def test_convolutions_see_channels_last(dims: int, channels: int) -> None:
    """With one channel too, where both memory formats hold the same bytes."""
    inner = network(dims, channels)
    batch = torch.cat([image(dims, channels)] * 4)  # torch runs a single volume in its own way
    before = {name: each.stride() for name, each in inner.named_parameters()}
    with torch.no_grad():
        found = accelerated(inner, channels_last=True)(batch)
        assert inner[1].seen == [(torch.float32, True)]
        torch.testing.assert_close(found, inner(batch), rtol=1e-5, atol=1e-6)
    assert {name: each.stride() for name, each in inner.named_parameters()} == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"amp": True}, "`amp` must be false, bf16 or fp16, got True"),
        ({"channels_last": "yes"}, "`channels_last` must be"),
        ({"compile": "fastest"}, "`compile` must be one of"),
    ],
)
def test_settings_that_are_something_else(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        accelerated(network(), **settings)


def test_float16_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="`amp` fp16 cannot be run on the CPU"):
        accelerated(network(), amp="fp16")


@pytest.mark.parametrize("settings", [{"amp": "bf16"}, {"channels_last": True}, {"compile": EAGER}])
def test_each_setting_is_a_part_of_the_network(settings: dict[str, Any]) -> None:
    fingerprint, inner = network_fingerprint, torch.nn.Linear(4, 2)
    quick = accelerated(inner, **settings)
    assert fingerprint(quick) not in (None, fingerprint(inner))
    assert fingerprint(quick) == fingerprint(accelerated(torch.nn.Sequential(inner)[0], **settings))
    with torch.no_grad():
        before = fingerprint(quick)
        quick(torch.rand(1, 4))
    assert fingerprint(quick) == before
    # A name stands for the network, not for its precision.
    assert fingerprint(quick, "name") not in (fingerprint(inner, "name"), fingerprint(quick, "other"))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("settings", "tolerance"), [({"amp": "bf16"}, 0.05), ({"channels_last": True}, 1e-5)])
@pytest.mark.parametrize("inferer", [None, SlidingWindowInferer(8, 4, overlap=0.5)])
def test_the_map_up_to_rounding(dims: int, settings: dict[str, Any], tolerance: float, inferer: Any) -> None:
    """Of whole images, and of remembered patches."""
    torch._dynamo.reset()
    inner, batch = network(dims), image(dims)
    target = TARGET
    if inferer is not None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            last = (torch.nn.Conv2d, torch.nn.Conv3d)[dims - 2](4, 2, 1)
        inner = torch.nn.Sequential(inner[0], Noting(), torch.nn.ReLU(), last).eval()
        target = ms.RegionScore([1], "softmax", region="all")
    explain = ms.sliding_window(4, 4, target=target, inferer=inferer, mask_batch_size=4)
    expected, found = explain(batch, inner), explain(batch, accelerated(inner, **settings))
    assert found.dtype == torch.float32
    largest = float(expected.abs().max())
    assert largest > 1e-4
    assert float((found - expected).abs().max()) < tolerance * largest + 1e-6  # of a probability


def small() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(200, 3)).eval()


def test_integrated_gradients() -> None:
    """Derivatives are of the uncompiled network, under the same autocast, and their sum is still the score's change."""
    inner = small()
    explain = ms.integrated_gradients(16, target=TARGET)
    expected = explain(image(), inner)
    compiled = explain(image(), accelerated(inner, compile=EAGER))
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-6)
    for settings, tolerance in (({"amp": "bf16"}, 0.1), ({"channels_last": True}, 1e-4)):
        found = explain(image(), accelerated(inner, **settings))
        assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())


def test_derivatives_in_float16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monai_saliency.inferers.gradients.runtime_settings", lambda _: {"amp": "fp16"})
    with pytest.raises(CaseError, match="float16 rounds small derivatives to zero, so switch `amp` off or use bf16"):
        ms.integrated_gradients(4, target=TARGET)(image(), small())


@pytest.mark.parametrize(("settings", "tolerance"), [({"amp": "bf16"}, 0.1), ({"channels_last": True}, 1e-4)])
def test_ensembles(settings: dict[str, Any], tolerance: float) -> None:
    folds = Ensemble([torch.nn.Sequential(*(network(seed=i)[k] for k in (0, 2, 3, 4, 5))) for i in range(3)]).eval()
    quick = accelerated(folds, **settings)
    assert isinstance(quick, Ensemble)
    assert runtime_settings(quick) == settings
    assert same_network(quick, folds)
    explain = ms.sliding_window(4, 4, target=TARGET, mask_batch_size=4)
    (expected,), (found,) = (explain.explain(image(), each) for each in (folds, quick))
    assert float((found.saliency - expected.saliency).abs().max()) < tolerance * float(expected.saliency.abs().max())
    assert found.disagreement is not None
    assert network_fingerprint(quick) != network_fingerprint(folds)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    torch._dynamo.reset()
    inner = small()
    explain = ms.rise(17, 3, target=TARGET, mask_batch_size=4)
    found = explain(image(), accelerated(inner, compile=True))
    torch.testing.assert_close(found, explain(image(), inner), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


# Scores and maps are served again only to a network that is known to be the same.
pytestmark = pytest.mark.filterwarnings("ignore")


def weights(value: float = 1.0) -> torch.Tensor:
    return torch.full((1, 4), value)


class Engine:
    """Not a module: it holds weights in a plain object."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.weights = weights(value)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights.T


class Holder(torch.nn.Module):
    """An ordinary module of somebody's own."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        torch.nn.init.ones_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def double(module: torch.nn.Module, inputs: Any) -> Any:
    return tuple(2 * each for each in inputs)


def hooked() -> torch.nn.Module:
    module = Holder()
    module.linear.register_forward_pre_hook(double)
    return module


def filled(value: float) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(4, 1)).eval()
    torch.nn.init.constant_(module[0].weight, value)
    torch.nn.init.zeros_(module[0].bias)
    return module


#: networks with equal parameters and buffers, and other outputs: what makes one of two values
KNOWN: dict[str, Callable[[int], torch.nn.Module]] = {
    "a number": lambda n: Holder(scale=n),
    "a tensor": lambda n: Holder(bias=weights(n)),
    "an object": lambda n: Holder(engine=Engine(n)),
    "modules in a plain list": lambda n: Holder(parts=[filled(n)]),
    "one layer twice": lambda n: torch.nn.Sequential(*[filled(1)] * n),
    "a traced graph": lambda n: torch.fx.symbolic_trace(filled(n)),
    "precision": lambda n: accelerated(filled(1), amp="bf16", channels_last=n == 1),
    "a stride": lambda n: torch.nn.Sequential(torch.nn.MaxPool2d(2, n)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_other_networks_have_other_keys(name: str) -> None:
    found = [network_fingerprint(KNOWN[name](n)) for n in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert None not in found


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: len, "the network is not a module"),
    "a hook": (hooked, "holds a hook on the forward of Linear"),
    "a lambda": (lambda: Holder(act=lambda x: x), "holds a lambda"),
    "an open file": (lambda: Holder(log=open(os.devnull)), "holds an object of _io.TextIOWrapper"),  # noqa: SIM115
    "a generator": (lambda: Holder(noise=np.random.default_rng(0)), "holds the random .* generator"),
    "TorchScript": (lambda: torch.jit.script(filled(1)), "is TorchScript"),
    "frozen TorchScript": (lambda: torch.jit.freeze(torch.jit.script(filled(1))), "is TorchScript"),
    "quantised": (lambda: torch.ao.quantization.quantize_dynamic(filled(1), {torch.nn.Linear}), "holds"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_network_needs_a_network_id(name: str) -> None:
    make, why = UNKNOWN[name]
    with pytest.raises(Unfingerprintable, match=f"{why}.*: give it a network_id"):
        network_key(make())
    assert network_fingerprint(make()) is None
    assert network_fingerprint(make(), "a") == network_fingerprint(make(), "a") != network_fingerprint(make(), "b")


def test_changes_in_place_are_noticed() -> None:
    engine = Engine(1)
    module = Holder(engine=engine, bias=weights(), array=np.ones(3))
    found = [network_fingerprint(module)]
    for change in (
        lambda: engine.weights.add_(1),
        lambda: module.array.__setitem__(0, 5),
        lambda: module.linear.weight.data.mul_(2),
        lambda: module.linear.weight.detach().numpy().__setitem__((0, 0), 7),
        lambda: module.linear.requires_grad_(False).weight.add_(1),
    ):
        change()
        found.append(network_fingerprint(module))
    assert len({*found} - {None}) == len(found)


def test_where_and_how_it_is_wrapped_does_not_count() -> None:
    before = network_fingerprint(Holder())
    assert network_fingerprint(torch.compile(Holder(), backend="eager")) == before
    assert network_fingerprint(DataParallel(Holder())) == before
    assert network_fingerprint(Holder(place=torch.device("cpu"))) == network_fingerprint(
        Holder(place=torch.device("meta"))
    )
    network = Holder().eval()
    before = network_fingerprint(network)
    torch.compile(network, backend="eager")(torch.zeros(1, 4))
    torch.export.export(network, (torch.zeros(1, 4),))
    assert network_fingerprint(network) == before


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "UNet": lambda: nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1, act="PRELU", norm="batch"),
    "SegResNet": lambda: nets.SegResNet(2, 8, 1, 2),
    "SwinUNETR": lambda: nets.SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), spatial_dims=2
    ),
    "DynUNet": lambda: nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], deep_supervision=True),
    "own": Holder,
    "own, with an engine": lambda: Holder(engine=Engine(1), bias=weights(), act=torch.nn.functional.gelu),
}
#: of an image, for networks that are run: they must not write to themselves
SIZES = {"UNet": (1, 1, 8, 8, 8), "DynUNet": (1, 1, 8, 8, 8), "SegResNet": (1, 1, 8, 8), "own": (1, 4)}


@pytest.mark.parametrize("name", NETWORKS)
def test_an_ordinary_network_is_known_by_its_weights(name: str) -> None:
    """They are loaded into a network that was made with others. A run writes nothing that counts."""
    network, other = NETWORKS[name]().eval(), NETWORKS[name]().eval()
    other.load_state_dict(network.state_dict())
    before = network_key(network)
    assert network_key(other) == before
    if name in SIZES:
        with torch.no_grad():
            other(torch.zeros(SIZES[name]))
    assert network_key(other) == before
