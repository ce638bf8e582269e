"""Windows that stay in the batch: each image that the network sees is the image with one window filled, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import monai_saliency as ms
from monai_saliency.inferers.window_rows import hidden_voxels

TARGET = ms.FunctionScore(lambda output: output)
SHAPES = {"2D": (2, 20, 27), "3D": (1, 9, 16, 12)}
FILLS = {
    "constant": ms.ConstantFill(-0.7),
    "channels": ms.ConstantFill([-0.7, 0.4]),
    "mean": ms.MeanFill(),
    "blur": ms.BlurFill(2.0),
}


class Seen(torch.nn.Module):
    """A sum of each image, which keeps what it was given; and then may change it.

    Args:
        change: changes a batch in place.
    """

    def __init__(self, change: Callable[[torch.Tensor], Any] = lambda batch: None) -> None:
        super().__init__()
        self.change = change
        self.seen: list[torch.Tensor] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 1:  # else it is an image alone, which a row is compared with
            self.seen.append(batch.clone())
        scores = batch.flatten(1) @ torch.linspace(-1, 1, batch[0].numel())
        self.change(batch)
        return scores[:, None]


def images_of(dims: str, count: int = 1) -> torch.Tensor:
    return torch.rand(count, *SHAPES[dims], generator=torch.Generator().manual_seed(1)) - 0.3


def by_hand(image: torch.Tensor, fill: torch.Tensor, window: int, stride: int) -> list[torch.Tensor]:
    """The image, then with each window filled, the last axis fastest."""
    found = [image]
    counts = [-(-n // stride) for n in image.shape[1:]]
    bound = ms.SlidingWindowMasks(window, stride).bind(image)
    for box in bound.hidden_boxes(range(len(bound))) or []:
        changed = image.clone()
        changed[(slice(None), *box)] = fill[(slice(None), *box)]
        found.append(changed)
    assert len(found) > max(counts)
    return found


def rows_of(seen: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[int]:
    """Which of the wanted images each row is; checks that all are there, and nothing else."""
    found = []
    for row in torch.cat(seen):
        places = [place for place, each in enumerate(wanted) if torch.equal(row, each)]
        assert places, "an image that is none of these was given to the network"
        found.append(places[0])
    assert set(found) >= {next(k for k, each in enumerate(wanted) if torch.equal(each, one)) for one in wanted}
    return found


@pytest.mark.usefixtures("no_faded_batch")
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dims", SHAPES)
def test_each_image_is_the_one_with_a_window_filled(dims: str, name: str, stride: int) -> None:
    """With windows beside each other, and such that overlap or are cut by the border."""
    if dims == "3D" and name == "channels":
        pytest.skip("one channel")
    image, network = images_of(dims), Seen()
    explain = ms.sliding_window(2, stride, target=TARGET, fill=FILLS[name], mask_batch_size=5)
    explain(image, network)
    wanted = by_hand(image[0], FILLS[name](image)[0], 2, stride)
    assert hidden_voxels(explain.masks.bind(image[0]), range(3)) is not None  # these are the windows that stay
    # In order: rows behind the end of the last batch hold what was there, and the unperturbed image.
    places = rows_of(network.seen, wanted)
    assert places[: len(wanted)] == [
        next(k for k, each in enumerate(wanted) if torch.equal(each, one)) for one in wanted
    ]


@pytest.mark.usefixtures("no_faded_batch")
def test_two_cases_and_a_held_input() -> None:
    """The rows of one case do not reach the next, and held channels stay what they are."""
    images, held = images_of("2D", 2), torch.rand(2, 1, 20, 27)
    network = Seen()

    def joined(named: dict[str, torch.Tensor]) -> torch.Tensor:
        return network(torch.cat([named["image"], named["prior"]], dim=1))

    explain = ms.sliding_window(2, 2, target=TARGET, inputs=ms.DictInput(perturb="image"), mask_batch_size=4)
    explain({"image": images, "prior": held}, joined)
    wanted = [
        torch.cat([each, prior])
        for image, prior in zip(images, held, strict=True)
        for each in by_hand(image, torch.zeros_like(image), 2, 2)
    ]
    rows_of(network.seen, wanted)


def uncounted(batch: torch.Tensor) -> None:
    batch.numpy()[batch.numpy() == -0.7] = 5.0  # only where something is hidden


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "counted": lambda batch: batch.add_(1.0),
    "all, uncounted": lambda batch: batch.data.add_(1.0),
    "where windows are, uncounted": uncounted,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_that_changes_its_input(change: str) -> None:
    """Its map is that of the network that works on a copy."""
    image = images_of("2D")
    explain = ms.sliding_window(2, 2, target=TARGET, fill=ms.ConstantFill(-0.7), mask_batch_size=8)
    expected = explain(image, Seen())
    network = Seen(CHANGES[change])
    assert torch.equal(explain(image, network), expected)
    wanted = by_hand(image[0], torch.full_like(image[0], -0.7), 2, 2)
    order = [next(k for k, each in enumerate(wanted) if torch.equal(each, row)) for row in network.seen[3]]
    assert len(order) == 8


def test_a_network_that_begins_to_change_its_input() -> None:
    """What torch counts is seen at any batch."""
    image, network = images_of("2D"), Seen()
    network.change = lambda batch: batch.add_(1.0) if len(network.seen) > 8 else None
    explain = ms.sliding_window(2, 2, target=TARGET, mask_batch_size=4)
    assert torch.equal(explain(image, network), explain(image, Seen()))
    assert len(network.seen) > 16


@pytest.mark.usefixtures("no_faded_batch")
def test_a_voxel_without_a_number() -> None:
    """Infinite where it is kept: the map is that of images made one by one."""
    image = images_of("2D")
    image[0, 0, 3, 4] = torch.inf
    network = Seen()
    explain = ms.sliding_window(2, 2, target=ms.FunctionScore(lambda output: output.nan_to_num(0, 0, 0)))
    explain.replace(mask_batch_size=8)(image, network)
    rows_of(network.seen[:4], by_hand(image[0], torch.zeros_like(image[0]), 2, 2)[:32])


class Counted(TorchDispatchMode):
    """How many numbers each kind of operation has written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if isinstance(found, torch.Tensor) and not func.is_view:
            name = func.name().split("::")[-1].split(".")[0]
            self.written[name] = self.written.get(name, 0) + (args[2].numel() if "scatter" in name else found.numel())
        return found


def written(window: int) -> dict[str, int]:
    """What is written to explain an image of 64 x 64 by windows, in batches of 16."""
    torch.manual_seed(0)
    image = torch.rand(1, 1, 64, 64)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64, 1)).eval()
    explain = ms.sliding_window(window, window, target=TARGET, mask_batch_size=16)
    explain(image, network)
    mode = Counted()
    with mode:
        explain(image, network)
    return mode.written


def test_small_windows_write_little() -> None:
    """Of 256 windows all but the first 31 and the last one change the batch in two windows alone."""
    few, whole = written(4), written(32)
    assert few["lerp"] <= 3 * 16 * 64 * 64  # the first two batches and the last one
    assert few["scatter_"] <= 2 * 256 * 16 + 16 * 16
    assert whole["lerp"] >= 4 * 64 * 64  # a quarter of the image is written faster as a whole
    assert "scatter_" not in whole
