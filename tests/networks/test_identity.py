"""Scores and maps are served again only to a network that is known to be the same."""

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from monai.networks import nets
from torch.nn.parallel import DataParallel

from monai_saliency.networks import accelerated, identity, network_fingerprint
from monai_saliency.networks.identity import network_key
from monai_saliency.storage.key import Unfingerprintable, fingerprint

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


def layers() -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
        ).eval()


def optimized(network: torch.nn.Sequential) -> None:
    network(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(network.parameters(), lr=0.1).step()


#: what happens to a network between two cases
CHANGES: dict[str, Callable[[torch.nn.Sequential], Any]] = {
    "other weights": lambda net: net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()}),
    "weights that take the place": lambda net: net.load_state_dict(
        {name: value + 1 for name, value in net.state_dict().items()}, assign=True
    ),
    "an optimizer's step": optimized,
    "a replaced layer": lambda net: net.__setitem__(3, filled(2)),
    "a layer without weights": lambda net: net.__setitem__(2, torch.nn.GELU()),
    "swapped layers": lambda net: net.insert(1, net.pop(2)),
    "other data": lambda net: setattr(net[0].weight, "data", net[0].weight.detach() + 1),
    "double precision": lambda net: net.double(),
    "statistics": lambda net: net[1].running_mean.add_(1),
    "an attribute": lambda net: setattr(net[1], "eps", 0.1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kept_key_is_dropped_when_the_network_changes(name: str) -> None:
    network = layers()
    before = network_key(network, kept=True)
    assert before == network_key(network)
    CHANGES[name](network)
    after = network_key(network, kept=True)
    assert before != after == network_key(network)


def test_weights_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Any] = []
    monkeypatch.setattr(identity, "fingerprint", lambda value: hashed.append(value) or fingerprint(value))
    network = layers()
    compiled = torch.compile(network, backend="eager")
    for _ in range(3):
        with torch.no_grad():
            network(torch.ones(2, 4))
        network_key(network, kept=True)
        network_key(compiled, kept=True)
    assert len(hashed) == 1
    network_key(network)
    assert len(hashed) == 2


def test_a_layer_in_the_memory_of_another_is_noticed() -> None:
    """Python and the allocator give a new tensor the address of one that is gone."""
    network = layers()
    found = set()
    for value in range(20):
        network[3] = filled(value)
        found.add(network_key(network, kept=True))
    assert len(found) == 20


def test_changes_that_autograd_does_not_count_are_hashed_each_time() -> None:
    with torch.inference_mode():
        network = layers()
        found = [network_key(network, kept=True)]
        network[0].weight.add_(1)
        assert network_key(network, kept=True) not in found


def test_a_kept_key_keeps_nothing_alive() -> None:
    network = layers()
    network_key(network, kept=True)
    weight, gone = weakref.ref(network[0].weight), weakref.ref(network)
    network[0] = torch.nn.Linear(4, 3)
    gc.collect()
    assert weight() is None
    del network
    gc.collect()
    assert gone() is None
