"""Nothing waits for the device between the batches of a round, counted on a device that is made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.pretend_device import Counted, off_device, on_device
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms

IMAGES = {"2D": torch.rand(1, 3, 32, 24), "3D": torch.rand(1, 1, 16, 12, 20)}
BATCH = 4
#: beside the network, in a batch of masks
AT_MOST = 25


def classifier(image: torch.Tensor) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(image.numel(), 3)).eval()


def segmenter(image: torch.Tensor) -> torch.nn.Module:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d if image.ndim == 4 else torch.nn.Conv3d
    return conv(image.shape[1], 2, 3, padding=1).eval()


TARGETS: dict[str, tuple[Callable[[torch.Tensor], torch.nn.Module], Callable[[], Any]]] = {
    "one class": (classifier, lambda: ms.ClassScore([1], "softmax")),
    "classes": (classifier, lambda: ms.ClassScore([0, 2], "softmax")),
    "values": (classifier, lambda: ms.RegressionScore([2, 0])),
    "region": (segmenter, lambda: ms.RegionScore([0, 1], "softmax")),
    "components": (segmenter, lambda: ms.RegionScore(1, "softmax", components=2)),
    "dice": (segmenter, lambda: ms.DiceScore(1, "softmax")),
}


def between(image: torch.Tensor, explain: Any, inner: Any, first: int) -> tuple[list[list[str]], list[list[str]]]:
    """The operations, and those that wait, between the forwards of full batches, from the one numbered ``first`` on.

    The map must be what it is on the CPU, so that the device that is made up computes right.
    """
    mode = Counted()
    network, placed = mode.network(inner), on_device(image)
    with mode:
        explain(placed, network)  # what is found out once a network is not counted
        mode.begin()
        found = explain(placed, network)
    torch.testing.assert_close(off_device(found), explain(image, inner), rtol=0, atol=0)
    full = [number for number, size in enumerate(mode.sizes) if size == BATCH]
    assert len(full) - first >= 5
    stretches = slice(full[first] + 1, full[-1] + 1)
    return mode.stretches[stretches], mode.waits[stretches]


def explainer(method: str, image: torch.Tensor, **settings: Any) -> Any:
    settings = {"mask_batch_size": BATCH} | settings
    if method == "rise":
        return ms.rise(9 * BATCH - 1, 4, **settings)
    return ms.sliding_window(5, 2 if image.ndim == 4 else 3, **settings)


@pytest.mark.parametrize(
    ("method", "dims", "target"),
    [
        ("windows", "3D", "region"),
        *(("rise", "2D", target) for target in TARGETS),
    ],
)
def test_whole_images_wait_for_nothing(method: str, dims: str, target: str) -> None:
    image = IMAGES[dims]
    network, made = TARGETS[target]
    # The first batch, which holds the unperturbed image, is compared with the image alone before the second is run.
    stretches, waits = between(image, explainer(method, image, target=made()), network(image), 1)
    assert waits == [[]] * len(waits)
    assert max(map(len, stretches)) <= AT_MOST, max(stretches, key=len)


@pytest.mark.parametrize("masks", ["supervoxels", "channels", "smooth"])
def test_other_masks_wait_for_nothing(masks: str) -> None:
    image, target = IMAGES["2D"], ms.ClassScore([1], "softmax")
    settings = {"target": target, "mask_batch_size": BATCH}
    explain = {
        "supervoxels": lambda: ms.hsic(9 * BATCH - 1, regions=ms.Supervoxels(20), **settings),
        "channels": lambda: ms.sliding_window(5, 3, per_channel=True, **settings),
        "smooth": lambda: ms.sliding_window(5, 3, smooth=2, **settings),
    }[masks]
    _, waits = between(image, explain(), classifier(image), 1)
    assert waits == [[]] * len(waits)


@pytest.mark.parametrize("dims", IMAGES)
@pytest.mark.parametrize("kind", [ms.RegionScore, ms.DiceScore])
def test_remembered_patches_wait_for_nothing(kind: Callable[..., Any], dims: str) -> None:
    image = IMAGES[dims]
    inferer = SlidingWindowInferer(8, BATCH, overlap=0.5)
    target = kind([0, 1], "softmax")
    explain = ms.sliding_window(8 if dims == "2D" else 6, 6, target=target, inferer=inferer, mask_batch_size=BATCH)
    patches = number_of_patches(image, inferer)
    # The unperturbed patches, and the first batch of perturbed ones, of which some are compared with the same alone.
    _, waits = between(image, explain, segmenter(image), -(-patches // BATCH) + 1)
    assert waits == [[]] * len(waits)


def number_of_patches(image: torch.Tensor, inferer: SlidingWindowInferer) -> int:
    seen = []
    inferer(image, lambda batch: seen.append(len(batch)) or batch)
    return sum(seen)


class Waiting(ms.ClassScore):
    """A target that asks the device for something in every batch."""

    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__([1], "softmax")
        self.ask = ask

    def bind(self, reference_output: Any, case: Any) -> Any:
        inner, ask = super().bind(reference_output, case), self.ask

        class Asks(type(inner)):
            def __call__(self, output: torch.Tensor) -> torch.Tensor:
                ask(output)
                return super().__call__(output)

        inner.__class__ = Asks
        return inner


@pytest.mark.parametrize(
    "ask",
    [
        lambda output: output[0, 0].item(),
        lambda output: bool((output > 0).all()),
        lambda output: output[:, [0, 2]],
        lambda output: (output > 0).nonzero(),
        lambda output: torch.tensor([1.0], device=output.device),
    ],
)
def test_the_count_sees_what_waits(ask: Callable[[torch.Tensor], Any]) -> None:
    image = IMAGES["2D"]
    _, waits = between(image, explainer("rise", image, target=Waiting(ask)), classifier(image), 1)
    assert all(waits)


def test_tensors_of_both_sides_are_refused() -> None:
    with Counted(), pytest.raises(RuntimeError, match="tensors of two devices"):
        on_device(torch.zeros(2)) + torch.zeros(2)
