"""What a batch of masks costs beside the network, counted on any machine: tensor operations.

On a GPU each is a launch. Views of a tensor, which compute and move nothing, are not counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from monai.inferers import SlidingWindowInferer
from torch.utils._python_dispatch import TorchDispatchMode

import monai_saliency as ms

SHAPES = {"2D": (1, 3, 32, 24), "3D": (1, 1, 16, 12, 20)}
IMAGES = {dims: torch.rand(shape, generator=torch.Generator().manual_seed(0)) for dims, shape in SHAPES.items()}
#: RISE in 3D needs 14, windows 10, and a Dice score 4 more than a class, of however many channels
AT_MOST, AT_MOST_OF_DICE = 15, 19
#: remembered patches need 8 for a batch of patches in 3D, and 17 more to exchange those of a batch of masks
AT_MOST_OF_PATCHES = 25


class Counted(TorchDispatchMode):
    """The names of operations outside of the network, in one list for each stretch between two forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[list[str]] = [[]]
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and not func.is_view and func.namespace != "profiler":
            self.stretches[-1].append(str(func))
        return func(*args, **kwargs or {})


class Network(torch.nn.Module):
    """Asks the mode to look away while it runs."""

    def __init__(self, image: torch.Tensor, mode: Counted) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(image.numel(), 3))
        self.mode = mode

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.mode.inside = True
        try:
            return self.inner(batch)
        finally:
            self.mode.inside = False
            self.mode.stretches.append([])


def of_a_batch(method: str, image: torch.Tensor, batch_size: int) -> list[str]:
    """The operations between two forwards in the middle of a run, where all are alike."""
    settings: dict[str, Any] = {"target": ms.ClassScore("all", "softmax"), "mask_batch_size": batch_size}
    # Nine batches, of which the first holds the unperturbed image too.
    number = 9 * batch_size - 1
    if method == "rise":
        explain = ms.rise(number, 4, **settings)
    elif method == "windows":
        explain = ms.sliding_window(8, 2 if image.ndim == 4 else 3, **settings)
    else:
        explain = ms.sliding_window(2, **settings)
    mode = Counted()
    network = Network(image, mode).eval()
    explain(image, network)  # what is found out once a network is not counted
    mode.stretches = [[]]
    with mode:
        explain(image, network)
    middle = mode.stretches[4:7]
    assert middle[0] == middle[1] == middle[2]
    return middle[0]


@pytest.mark.parametrize("dims", IMAGES)
@pytest.mark.parametrize("method", ["rise", "windows"])
def test_operations_of_a_batch(method: str, dims: str) -> None:
    few, many = (of_a_batch(method, IMAGES[dims], batch_size) for batch_size in (2, 16))
    assert any("lerp" in name for name in few)  # the work itself is seen
    assert few == many
    assert len(few) <= AT_MOST, few


@pytest.mark.parametrize("dims", IMAGES)
@pytest.mark.parametrize("batch_size", [2, 16])
def test_operations_of_a_batch_of_small_windows(batch_size: int, dims: str) -> None:
    """They stay in the batch: the image is put back where the last ones were, and the fill where the next ones are."""
    found = of_a_batch("small windows", IMAGES[dims], batch_size)
    assert sum("scatter" in name for name in found) == 2
    assert not any("lerp" in name for name in found)
    assert len(found) <= AT_MOST, found


@pytest.mark.parametrize("dims", IMAGES)
@pytest.mark.parametrize("channels", [[1], [0, 1], [1, 0]])
def test_operations_of_dice_scores(channels: list[int], dims: str) -> None:
    mode = Counted()
    network = Segmenter(IMAGES[dims], mode).eval()
    explain = ms.rise(35, 4, target=ms.DiceScore(channels, "softmax"), mask_batch_size=4)
    explain(IMAGES[dims], network)
    mode.stretches = [[]]
    with mode:
        explain(IMAGES[dims], network)
    assert all(any("masked_fill" in name for name in stretch) for stretch in mode.stretches[4:-1])
    assert max(map(len, mode.stretches[4:-1])) <= AT_MOST_OF_DICE + (channels == [1, 0]), mode.stretches[5]


class Segmenter(Network):
    """A segmentation of two classes."""

    def __init__(self, image: torch.Tensor, mode: Counted) -> None:
        super().__init__(image, mode)
        conv = torch.nn.Conv2d if image.ndim == 4 else torch.nn.Conv3d
        self.inner = conv(image.shape[1], 2, 3, padding=1)
        with torch.no_grad():  # each class is predicted somewhere
            self.inner.weight.normal_(generator=torch.Generator().manual_seed(0))
            self.inner.bias.zero_()


def of_patches(image: torch.Tensor, target: Any, batch_size: int, patches: int) -> list[list[str]]:
    """The operations between forwards of patches, from the first batches, some of which are compared with the same
    alone, to the last one, which is part-filled, and what is looked at again.
    """
    window = 8 if image.ndim == 4 else 6
    inferer = SlidingWindowInferer(8, patches, overlap=0.5)
    stride = 3 if batch_size * patches > 16 else 6
    explain = ms.sliding_window(window, stride, target=target, inferer=inferer, mask_batch_size=batch_size)
    mode = Counted()
    network = Segmenter(image, mode).eval()
    sizes: list[int] = []
    network.register_forward_hook(lambda module, given, output: sizes.append(len(output)))
    explain(image, network)
    mode.stretches = [[]]
    sizes.clear()
    with mode:
        explain(image, network)
    alone = max(place for place, size in enumerate(sizes[:-1]) if size == 1)
    return mode.stretches[alone + 3 : -1]


@pytest.mark.parametrize("dims", IMAGES)
@pytest.mark.parametrize(
    "target",
    [
        ms.RegionScore([0, 1], "softmax", "all"),
        ms.RegionScore(1, "sigmoid", "all"),
        ms.DiceScore(1, "softmax"),
        ms.DiceScore([0, 1], "sigmoid"),
    ],
    ids=["softmax", "sigmoid", "dice", "dice of two"],
)
def test_operations_of_remembered_patches(target: ms.Target, dims: str) -> None:
    longest = []
    for batch_size, patches in ((4, 4), (16, 4), (16, 16)):
        stretches = of_patches(IMAGES[dims], target, batch_size, patches)
        scored = [stretch for stretch in stretches if any("stack" in name for name in stretch)]
        assert len(stretches) > len(scored) > 2
        # The work itself is seen. What is looked at again in the end is not perturbed.
        assert all(any("lerp" in name for name in stretch) for stretch in stretches[:-1])
        longest.append(max(map(len, stretches)))
    assert len(set(longest)) == 1  # whatever the number of masks and of patches
    assert longest[0] <= AT_MOST_OF_PATCHES, longest
