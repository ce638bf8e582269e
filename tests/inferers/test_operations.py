"""What a batch of masks costs beside the network, counted on any machine: tensor operations.

On a GPU each is a launch. Views of a tensor, which compute and move nothing, are not counted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import monai_saliency as ms

IMAGES = {"2D": torch.rand(1, 3, 32, 24), "3D": torch.rand(1, 1, 16, 12, 20)}
#: RISE in 3D needs 14, windows 10
AT_MOST = 15


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
    else:
        explain = ms.sliding_window(5, 2 if image.ndim == 4 else 3, **settings)
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
