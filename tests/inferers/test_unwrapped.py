"""Wrappers of a SlidingWindowInferer: what only calls it is seen through, what does more is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.patches import WHOLE, Network, images
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer

from monai_saliency.inferers import patches
from monai_saliency.inferers.unwrapped import SlidingCall, inside_of, sliding_call
from monai_saliency.methods import patch_windows, sliding_window

SHAPE = (1, 1, 20, 18)


class Wrapper(Inferer):
    """Calls what it holds, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = SlidingWindowInferer((8, 8), 3, 0.5, mode="gaussian")

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs, network, *args, **kwargs)


class Nested(Wrapper):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Wrapper()


class WithScale(Wrapper):
    """Every patch gets the same further argument."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs, network, torch.full((1, 1), 2.0))


class Scaled(Network):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale.mean()


class Normalizes(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner((inputs - inputs.mean()) / inputs.std(), network)


class NormalizesInPlace(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs /= 2
        return self.inner(inputs, network)


class Flips(Wrapper):
    """Test-time augmentation: two calls."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (self.inner(inputs, network) + self.inner(inputs.flip(2), network).flip(2)) / 2


class Doubles(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return 2 * self.inner(inputs, network)


class AddsInPlace(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs, network).add_(1)


class ScalesInPlace(Wrapper):
    """As with a temperature: zeros stay zeros."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        output /= 4
        return output


class ClampsInPlace(Wrapper):
    """Further out than most values."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs, network).clamp_(-1e12, 1e12)


class ScalesAChannel(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        output[:, 0] *= 3
        return output


class OutsideZero(Wrapper):
    """What leaves the output of an image without zeros as it is."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        output *= inputs != 0
        return output


class OfSeveralChannels(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        return 2 * output if output.shape[1] > 1 else output


class OfManyChannels(Wrapper):
    """Only of more channels than any small stand-in has."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        return output.softmax(1) if output.shape[1] > 4 else output


class OfThisManyChannels(Wrapper):
    """Only of as many channels as no stand-in has."""

    def __init__(self, channels: int = 5) -> None:
        super().__init__()
        self.channels = channels

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        return output / 3 if output.shape[1] == self.channels else output


class OfMoreThanSixtyFour(OfThisManyChannels):
    def __init__(self) -> None:
        super().__init__(70)


class OfTheNetworksValues(Wrapper):
    """Only where the output is as smooth as this network's."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        return output.clamp(-1, 1) if 1 < float(output.std()) < 2 else output


class OfPerturbedImages(Wrapper):
    """And only for images that are not the first one."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        changes = 1 < float(output.std()) < 2 and not torch.equal(inputs, images(*SHAPE))
        return output.clamp(-1, 1) if changes else output


class OfPositive(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        return output / output.max() if output.max() > 0 else output


class OfSpread(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        return (output - output.mean()) / output.std() if output.std() > 0 else output


class OwnNetwork(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs, lambda x: network(x)[:, :2])


class ByContent(Wrapper):
    """Brightens an image whose corner is dark, as that of one window is."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs if inputs[..., :2, :2].any() else inputs + 1, network)


class ArgumentByContent(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs, network, inputs.mean())


class Skips(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs, network) if inputs.any() else torch.zeros(len(inputs), 3, *inputs.shape[2:])


class RunsTheNetwork(Wrapper):
    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.inner(inputs, network) + network(inputs)


class HoldsTwo(Wrapper):
    def __init__(self) -> None:
        super().__init__()
        self.other = SlidingWindowInferer((4, 4))


@pytest.fixture(autouse=True)
def _said_nothing_yet() -> None:
    patches._say_once.cache_clear()


@pytest.mark.parametrize("kind", [Wrapper, Nested, WithScale])
def test_patches_are_remembered_and_scores_are_those_of_whole_images(kind: type[Wrapper]) -> None:
    network = Scaled(2) if kind is WithScale else Network(2)
    remembered = sliding_window(6, 5, target=WHOLE, inferer=kind(), mask_batch_size=4)
    (ours,) = remembered.explain(images(*SHAPE), network)
    (plain,) = remembered.replace(patch_memory=None).explain(images(*SHAPE), network)
    assert plain.num_forwards == len(plain.scores) + 1
    assert plain.per_prediction == 1
    assert ours.per_prediction > 1
    assert ours.num_forwards / ours.per_prediction < 0.7 * plain.num_forwards
    torch.testing.assert_close(ours.scores, plain.scores, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.saliency, plain.saliency, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        Normalizes,
        NormalizesInPlace,
        Flips,
        Doubles,
        AddsInPlace,
        ScalesInPlace,
        ClampsInPlace,
        ScalesAChannel,
        OutsideZero,
        OfSeveralChannels,
        OfManyChannels,
        OfPositive,
        OfSpread,
        OwnNetwork,
        ByContent,
        ArgumentByContent,
        Skips,
        RunsTheNetwork,
    ],
)
def test_whole_images_where_a_wrapper_does_more(kind: type[Wrapper], caplog: pytest.LogCaptureFixture) -> None:
    explain = sliding_window(6, 5, target=WHOLE, inferer=kind(), mask_batch_size=1)
    network = Network(2)
    if kind is ArgumentByContent:
        network.forward = lambda x, mean: Network.forward(network, x) * mean  # type: ignore[method-assign]
    (ours,) = explain.explain(3 * images(*SHAPE), network)
    (plain,) = explain.replace(patch_memory=None).explain(3 * images(*SHAPE), network)
    assert ours.num_forwards == plain.num_forwards == len(plain.scores) + 1
    assert torch.equal(ours.scores, plain.scores)
    (record,) = caplog.records
    assert f"{kind.__name__} does more than call its SlidingWindowInferer" in record.getMessage()


@pytest.mark.parametrize(
    ("kind", "classes"),
    [(OfThisManyChannels, 5), (OfMoreThanSixtyFour, 70), (OfTheNetworksValues, 3), (OfPerturbedImages, 3)],
)
def test_whole_images_where_a_wrapper_does_more_with_the_networks_own_output(
    kind: type[Wrapper], classes: int, caplog: pytest.LogCaptureFixture
) -> None:
    explain = sliding_window(6, 5, target=WHOLE, inferer=kind(), mask_batch_size=3)
    (ours,) = explain.explain(images(*SHAPE), Network(2, classes))
    (plain,) = explain.replace(patch_memory=None, mask_batch_size=1).explain(images(*SHAPE), Network(2, classes))
    assert torch.equal(ours.scores, plain.scores)
    (record,) = caplog.records
    assert re.search(
        rf"{kind.__name__} does more than call its SlidingWindowInferer: a perturbed image gives class 1 [-.\de]+ by "
        rf"{kind.__name__} and class 1 [-.\de]+ by its patches\. Its images go through the network one at a time",
        record.getMessage(),
    )


def test_a_wrappers_price_counts_the_image_that_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """One prediction of each case, which a plain inferer does not need."""
    caplog.set_level("INFO")
    told, ran = [], []
    for inferer in (Wrapper().inner, Wrapper()):
        explain, network = sliding_window(6, 5, target=WHOLE, inferer=inferer), Network(2)
        caplog.clear()
        each = explain.explain(images(2, *SHAPE[1:]), network)
        told.append(int(re.search(r"at least (\d+) patch forwards", caplog.text)[1]))  # type: ignore[index]
        ran.append(network.rows)
    assert told[1] - told[0] == ran[1] - ran[0] == 2 * each[0].per_prediction
    assert told[1] == sum(found.num_forwards + found.per_prediction for found in each)
    assert "of them for unperturbed images, and 2 predictions by Wrapper itself, for comparison;" in caplog.text


class AddsWhereHidden(Wrapper):
    """To an output that patches alone never change."""

    def __call__(self, inputs: torch.Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = self.inner(inputs, network)
        constant = float((output - 1.5).abs().max()) < 1e-4
        return output + torch.tensor([0.0, 1.0])[:, None, None] * (inputs == 0) if constant else output


def test_a_mask_is_compared_that_changes_no_score(caplog: pytest.LogCaptureFixture) -> None:
    explain = sliding_window(6, 5, target=WHOLE, inferer=AddsWhereHidden())
    (ours,) = explain.explain(images(*SHAPE), lambda x: torch.full((len(x), 2, *x.shape[2:]), 1.5))
    assert "AddsWhereHidden does more than call its SlidingWindowInferer" in caplog.text
    assert bool((ours.scores > ours.reference_scores).all())


def test_nothing_is_said_of_what_holds_none(caplog: pytest.LogCaptureFixture) -> None:
    assert inside_of(SimpleInferer()) is None
    sliding_window(6, 5, target=WHOLE).explain(images(*SHAPE), Network(2))
    assert not caplog.records


def test_of_several_none_is_taken() -> None:
    assert inside_of(HoldsTwo()) is None
    assert "does not hold exactly one" in sliding_call(HoldsTwo(), (), {}, [images(*SHAPE)])


def test_the_wrapper_itself_is_left_alone() -> None:
    wrapper = Nested()
    inner = wrapper.inner.inner
    call = sliding_call(wrapper, (), {}, [images(*SHAPE)])
    assert isinstance(call, SlidingCall)
    assert call.inferer is wrapper.inner.inner is inner
    assert type(inner) is SlidingWindowInferer


def test_patch_windows_take_the_grid_of_the_inferer_inside() -> None:
    inside = patch_windows(Wrapper().inner, target=WHOLE).masks.bind(images(*SHAPE)[0])
    assert patch_windows(Wrapper(), target=WHOLE).masks.bind(images(*SHAPE)[0]).key == inside.key
