"""Networks whose rows depend on each other, without an error: of a batch, each row differs from its image alone."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def _columns(x: torch.Tensor) -> torch.Tensor:
    return x.mean(dim=0, keepdim=True).expand_as(x) if len(x) > 1 else x


#: how rows come to depend on each other, by what a user would call it
COUPLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "statistics of the batch": lambda x: F.batch_norm(x, None, None, training=True),
    "normalised over the batch": lambda x: (x - x.mean()) / x.std(),
    "a softmax over the images": lambda x: x.softmax(dim=0) * x,
    "rows in another order": lambda x: x.flip(0),
    "one answer for the batch": _columns,
}


class Coupled(torch.nn.Module):
    """A network that is given images which were mixed before.

    Args:
        network: the network.
        coupling: a key of :data:`COUPLINGS`.
    """

    def __init__(self, network: Callable[[torch.Tensor], Any], coupling: str) -> None:
        super().__init__()
        self.network = network
        self.coupling = coupling
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.append(len(x))
        return self.network(COUPLINGS[self.coupling](x))


class Takes(torch.nn.Module):
    """A network that takes batches of one size only, as an exported engine does."""

    def __init__(self, network: Callable[[torch.Tensor], Any], size: int) -> None:
        super().__init__()
        self.network = network
        self.size = size

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) != self.size:
            raise RuntimeError(f"expected a batch of {self.size}, got {len(x)}")
        return self.network(x)


class WithDropout(torch.nn.Module):
    """A network with a dropout that is left on."""

    def __init__(self, network: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> Any:
        return self.network(F.dropout(x, 0.5, training=True))


@functools.cache
def weights(channels: int, dims: int) -> torch.Tensor:
    """Weights ``(channels, 1, 3, ...)`` of a convolution."""
    return torch.randn(channels, 1, *[3] * dims, generator=torch.Generator().manual_seed(5))


def segment(x: torch.Tensor) -> torch.Tensor:
    """Logits of three classes on the grid of one-channel images, each of its neighbourhood."""
    return (F.conv2d, F.conv3d)[x.ndim - 4](x, weights(3, x.ndim - 2).to(x), padding=1)


def classify(x: torch.Tensor) -> torch.Tensor:
    """Logits ``(B, 3)`` of one-channel images, each of another corner."""
    pool = (F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[x.ndim - 4]
    return 5 * pool(segment(x).relu(), 2).flatten(2)[..., 1]


class Layered(torch.nn.Module):
    """A function as a module with a layer, for methods that read one."""

    def __init__(self, network: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.cells = torch.nn.Identity()
        self.network = network

    def forward(self, x: torch.Tensor) -> Any:
        return self.network(self.cells(x))
