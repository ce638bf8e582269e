"""Networks in half precision, with channels last and compiled: the same maps up to rounding, and never another's."""

import shutil
from typing import Any

import pytest
import torch
from helpers.tolerances import assert_close, assert_same_bits
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.errors import CaseError
from monai_saliency.networks import Ensemble, accelerated, network_fingerprint, runtime_settings
from monai_saliency.networks.identity import same_network

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
        assert_same_bits(found, inner(batch).float())
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
        assert_close(found, inner(batch))
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
