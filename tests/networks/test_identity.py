"""Maps are served again only to a network that is known to be the same."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import fork_server
from helpers.paths import ROOT, TESTS
from monai.networks import nets

from monai_saliency.networks.identity import strict_network_fingerprint
from monai_saliency.storage.fingerprint import Unfingerprintable

pytestmark = pytest.mark.filterwarnings("ignore")
logger = logging.getLogger(__name__)
FACTORS = {"scale": 1.0}


def weights(value: float = 1.0) -> torch.Tensor:
    return torch.full((1, 4), value)


class Engine:
    """Not a module: it holds weights in a plain object."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.weights = weights(value)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights.T


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Holder(torch.nn.Module):
    """An ordinary module of somebody's own: it logs, and reads a constant of its file."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        torch.nn.init.ones_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        for name, value in held.items():
            setattr(self, name, value)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logger.debug("forward")
        return self.linear(x) * FACTORS["scale"]


def double(module: torch.nn.Module, inputs: Any) -> Any:
    return tuple(2 * each for each in inputs)


def triple(module: torch.nn.Module, inputs: Any) -> Any:
    return tuple(3 * each for each in inputs)


def hooked(hook: Callable[..., Any]) -> torch.nn.Module:
    module = Holder()
    module.linear.register_forward_pre_hook(hook)
    return module


def filled(value: float) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(4, 1)).eval()
    torch.nn.init.constant_(module[0].weight, value)
    torch.nn.init.zeros_(module[0].bias)
    return module


def quantized(value: float) -> torch.nn.Module:
    return torch.ao.quantization.quantize_dynamic(filled(value), {torch.nn.Linear})


def patched(value: float) -> torch.nn.Module:
    module = Holder()
    module.forward = types.MethodType(lambda self, x: value * x, module)  # type: ignore[method-assign]
    return module


def notebook(factor: int) -> torch.nn.Module:
    """A class of a cell, which has no file."""
    cell = f"import torch\nclass Cell(torch.nn.Module):\n    def forward(self, x):\n        return {factor} * x\n"
    module = types.ModuleType("cells")
    sys.modules["cells"] = module
    exec(cell, vars(module))
    return module.Cell()  # type: ignore[no-any-return]


def local(factor: int) -> torch.nn.Module:
    class Local(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return factor * x

    return Local()


#: networks with equal parameters and buffers, and other outputs: what makes one of two values
OTHERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "a tensor": lambda n: Holder(bias=weights(n)),
    "a tensor in a list": lambda n: Holder(biases=[weights(0), {"a": weights(n)}]),
    "a conjugate view": lambda n: Holder(bias=torch.full((2,), n * 1j).conj()),
    "a negative view": lambda n: Holder(bias=torch.full((2,), n * 1j).conj().imag),
    "an array": lambda n: Holder(bias=np.full(4, n)),
    "a masked array": lambda n: Holder(bias=np.ma.array(np.ones(2), mask=[n == 1, False])),
    "an engine": lambda n: Holder(engine=Engine(n)),
    "an object with slots": lambda n: Holder(engine=Slotted(n)),
    "a config object": lambda n: Holder(config=types.SimpleNamespace(scale=n)),
    "a bound method": lambda n: Holder(act=Engine(n).__call__),
    "a forward pre-hook": lambda n: hooked(double if n == 1 else triple),
    "a hook that is a lambda": lambda n: hooked(lambda module, inputs: tuple(n * each for each in inputs)),
    "modules in a plain list": lambda n: Holder(parts=[filled(n)]),
    "frozen TorchScript": lambda n: torch.jit.freeze(torch.jit.script(filled(n))),
    "TorchScript inside": lambda n: torch.nn.Sequential(torch.jit.freeze(torch.jit.script(filled(n)))),
    "a quantised module": lambda n: quantized(n),
    "a traced graph": lambda n: torch.fx.symbolic_trace(filled(1) if n == 1 else torch.nn.Sequential(filled(1)[0])),
    "a class in a function": local,
    "a cell of a notebook": notebook,
    "a patched method": patched,
}


def identity_of(module: torch.nn.Module) -> str | None:
    """None where it is unknown."""
    try:
        return strict_network_fingerprint(module.eval())
    except Unfingerprintable:
        return None


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_networks_are_told_apart_or_unknown(make: Callable[[int], torch.nn.Module]) -> None:
    first, second = make(1), make(2)
    known = identity_of(first), identity_of(second)
    assert known[0] != known[1] or known == (None, None)
    assert identity_of(first) == known[0]


KNOWN = (
    "a tensor",
    "a conjugate view",
    "a negative view",
    "an array",
    "an engine",
    "a config object",
    "a bound method",
    "a forward pre-hook",
)
KNOWN += ("frozen TorchScript", "TorchScript inside", "a cell of a notebook", "modules in a plain list")


@pytest.mark.parametrize("name", KNOWN)
def test_equal_networks_are_recognised(name: str) -> None:
    found = {identity_of(OTHERS[name](1)) for _ in range(3)}
    assert len(found) == 1
    assert None not in found


def test_the_order_of_layers_counts() -> None:
    """Two networks with equal names and weights that run their layers in another order."""

    def of(*order: str) -> torch.nn.Module:
        torch.manual_seed(0)
        layers = {"convolution": torch.nn.Conv2d(1, 2, 3), "activation": torch.nn.ReLU()}
        return torch.nn.Sequential(OrderedDict((name, layers[name]) for name in order))

    first, second = of("convolution", "activation"), of("activation", "convolution")
    assert strict_network_fingerprint(first) == strict_network_fingerprint(of("convolution", "activation"))
    assert strict_network_fingerprint(first) != strict_network_fingerprint(second)


def test_changes_in_place_are_noticed() -> None:
    engine = Engine(1)
    module = Holder(engine=engine, bias=weights(), array=np.ones(3))
    found = [identity_of(module)]
    for change in (
        lambda: engine.weights.add_(1),
        lambda: engine.weights.data.numpy().__setitem__((0, 0), 7),
        lambda: module.array.__setitem__(0, 5),
        lambda: module.register_forward_pre_hook(double),
        lambda: module.linear.weight.data.mul_(2),
        lambda: setattr(Holder, "forward", Engine.__call__),
    ):
        before = Holder.forward
        change()
        found.append(identity_of(module))
        Holder.forward = before  # type: ignore[method-assign]
    assert len({*found}) == len(found)
    assert None not in found


def test_a_method_of_an_installed_class_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nets.BasicUNet(2, 1, 2, (4, 4, 4, 4, 4, 4))
    before = identity_of(module)
    monkeypatch.setattr(nets.BasicUNet, "forward", Engine.__call__)
    assert identity_of(module) != before


def test_a_constant_that_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of(Holder())
    monkeypatch.setitem(FACTORS, "scale", 2.0)
    assert identity_of(Holder()) != before


def test_hooks_of_all_modules_count() -> None:
    before = identity_of(Holder())
    handle = torch.nn.modules.module.register_module_forward_pre_hook(double)
    try:
        assert identity_of(Holder()) != before
    finally:
        handle.remove()
    assert identity_of(Holder()) == before


def test_comments_and_docstrings_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for comment, factor in (("", 2), ("# a comment\n", 2), ("", 3)):
        (tmp_path / "ms_helper.py").write_text(
            f"{comment}def scale(x):\n    '''Text {comment!r}.'''\n    return {factor} * x\n"
        )
        (tmp_path / "ms_network.py").write_text(
            f"import torch\nimport ms_helper\n{comment}class Network(torch.nn.Module):\n"
            f"    '''{comment}'''\n    def forward(self, x):\n        return ms_helper.scale(x)\n"
        )
        for name in ("ms_helper", "ms_network"):
            sys.modules.pop(name, None)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        importlib.invalidate_caches()
        found.append(identity_of(importlib.import_module("ms_network").Network()))
    assert found[0] == found[1] != found[2]
    assert None not in found


#: how a function of a package takes a constant of another one of its modules
IMPORTS = {
    "a module": ("import {0}.consts", "{0}.consts.SCALE"),
    "from a package": ("from {0} import consts", "consts.SCALE"),
    "relative": ("from . import consts", "consts.SCALE"),
    "a constant": ("from .consts import SCALE", "SCALE"),
    "a helper that reads it": ("from {0}.ops import helper", "helper()"),
    "a relative helper": ("from .ops import helper", "helper()"),
    "a helper of a helper": ("from .more import deep", "deep()"),
    "a helper's module": ("from . import more", "more.ops.helper()"),
    "a module under a local name": ("c = consts", "c.SCALE"),
    "a module in a table": ("c = TABLE['c']", "c.SCALE"),
}


@pytest.mark.parametrize("statement", IMPORTS)
@pytest.mark.parametrize("where", ["the same process", "another process"])
def test_what_is_imported_inside_a_function(
    statement: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lazily, and by its relative name: a constant of such a module decides, wherever it is read."""
    package = f"ms_lazy_{list(IMPORTS).index(statement)}_{len(where)}"
    folder = tmp_path / package
    folder.mkdir()
    line, value = (text.format(package) for text in IMPORTS[statement])
    files = {
        "__init__": "",
        "consts": "SCALE = VALUE\n",
        "ops": "from . import consts\ndef helper():\n    return consts.SCALE\n",
        "more": "from . import ops\ndef deep():\n    from .ops import helper\n    return helper()\n",
        "network": "import torch\nfrom . import consts\nTABLE = {'c': consts}\nclass Network(torch.nn.Module):\n"
        f"    def forward(self, x):\n        {line}\n        return {value} * x\n",
    }
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = []
    for scale in (1, 1, 2):
        if where == "another process" or not found:
            for name, text in files.items():
                (folder / f"{name}.py").write_text(text.replace("VALUE", str(scale)))
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                sys.modules.pop(name)
            importlib.invalidate_caches()
        module = importlib.import_module(f"{package}.network")
        sys.modules[f"{package}.consts"].SCALE = scale  # type: ignore[attr-defined]
        network = module.Network()
        before = identity_of(network)
        assert network(torch.ones(1)).item() == scale
        assert identity_of(network) == before  # also once it has imported
        found.append(before)
    assert found[0] == found[1] != found[2]
    assert None not in found


def test_attributes_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of(Holder(act=weights))
    monkeypatch.setattr(weights, "scale", 4, raising=False)
    assert identity_of(Holder(act=weights)) != before


def test_a_file_edited_after_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs here is the code that was imported: a later process, with the edited code, must not get its maps."""
    monkeypatch.syspath_prepend(tmp_path)
    text = "import torch\nclass Network(torch.nn.Module):\n    def forward(self, x):\n        return {} * x\n"
    (tmp_path / "ms_edited.py").write_text(text.format(2))
    importlib.invalidate_caches()
    module = importlib.import_module("ms_edited").Network()
    (tmp_path / "ms_edited.py").write_text(text.format(33))
    late = identity_of(module)
    sys.modules.pop("ms_edited")
    importlib.invalidate_caches()
    assert identity_of(importlib.import_module("ms_edited").Network()) != late


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "UNet": lambda: nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1, act="PRELU", norm="batch"),
    "BasicUNet": lambda: nets.BasicUNet(3, 1, 2, (4, 4, 8, 8, 8, 4)),
    "SegResNet": lambda: nets.SegResNet(2, 8, 1, 2),
    "DenseNet121": lambda: nets.DenseNet121(2, 1, 2),
    "SwinUNETR": lambda: nets.SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), spatial_dims=2
    ),
    "DynUNet": lambda: nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], deep_supervision=True),
    "VNet": lambda: nets.VNet(2, 1, 2),
    "AttentionUnet": lambda: nets.AttentionUnet(3, 1, 2, (4, 8), (2,)),
    "ResNet18": lambda: nets.resnet18(spatial_dims=2, n_input_channels=1, num_classes=2),
    "EfficientNet": lambda: nets.EfficientNetBN("efficientnet-b0", False, spatial_dims=2, in_channels=1),
    "HighResNet": lambda: nets.HighResNet(2, 1, 2),
    "AutoEncoder": lambda: nets.AutoEncoder(2, 1, 1, (4, 8), (2, 2)),
    "RegUNet": lambda: nets.RegUNet(2, 1, 4, 2),
    "Classifier": lambda: nets.Classifier((1, 8, 8), 2, (4,), (2,)),
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(1, 1, 1)),
    "own": Holder,
    "own, with an engine": lambda: Holder(engine=Engine(1), bias=weights(), act=torch.nn.functional.relu),
    "compiled": lambda: torch.compile(Holder(), backend="eager"),
    "TorchScript": lambda: torch.jit.script(filled(1)),
}


#: of an image, for networks that are run: they must not write to themselves
SIZES = {"UNet": (1, 1, 8, 8, 8), "DynUNet": (1, 1, 8, 8, 8), "SegResNet": (1, 1, 8, 8), "DenseNet121": (1, 1, 32, 32)}
SIZES |= {"VNet": (1, 1, 16, 16), "ResNet18": (1, 1, 16, 16), "weight norm": (1, 1, 2, 2), "own": (1, 4)}
SIZES |= {"HighResNet": (1, 1, 8, 8), "TorchScript": (1, 4), "compiled": (1, 4)}


def made(name: str) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name]().eval()


EXPORTS: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "copied": lambda network, image: copy.deepcopy(network),
    "compiled": lambda network, image: torch.compile(network, backend="eager")(image),
    "scripted": lambda network, image: torch.jit.script(network),
    "traced": lambda network, image: torch.jit.trace(network, image),
    "exported": lambda network, image: torch.export.export(network, (image,)),
    "symbolic": lambda network, image: torch.fx.symbolic_trace(network),
}


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("name", ["Classifier", "SegResNet"])
def test_a_network_that_was_exported_is_still_the_same(name: str, export: str) -> None:
    """What torch notes on a network that it has compiled or exported decides no score."""
    network = made(name)
    before = identity_of(network)
    assert before is not None
    EXPORTS[export](network, torch.zeros(SIZES.get(name, (1, 1, 8, 8))))
    assert identity_of(network) == before


def test_ordinary_networks_are_known_in_every_process(tmp_path: Path) -> None:
    """By their weights, loaded from a file into a network that was made with others."""
    torch.save({name: made(name).state_dict() for name in NETWORKS}, tmp_path / "weights.pt")
    code = (
        "import torch, test_identity as t\nweights = torch.load('weights.pt')\nfor name in t.NETWORKS:\n"
        "    torch.manual_seed(1)\n    module = t.NETWORKS[name]().eval()\n    module.load_state_dict(weights[name])\n"
        "    before = t.identity_of(module)\n    size = t.SIZES.get(name)\n"
        "    if size: module(torch.zeros(size))\n    print(before if t.identity_of(module) == before else 'changed')"
    )
    paths = f"{Path(__file__).parent}:{TESTS}:{ROOT}"
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONHASHSEED": "77"}
    found = fork_server.run(["-c", code], env=environment, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        here = {name: identity_of(made(name)) for name in NETWORKS}
    there = dict(zip(NETWORKS, found.stdout.split(), strict=True))
    assert {name: value for name, value in here.items() if value is None} == {}
    assert {name: there[name] for name in NETWORKS if there[name] != here[name]} == {}
