"""Loading weights, and networks that ``torch.export`` has written to a ``.pt2`` file."""

from __future__ import annotations

import copy
import logging
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from monai_saliency.errors import SettingError
from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.networks.outputs import in_parts
from monai_saliency.utils.arguments import a_path
from monai_saliency.utils.monai_private import tree_leaves, tree_map
from monai_saliency.utils.plain_loading import load_plain

logger = logging.getLogger(__name__)

_WRAPPERS = ("state_dict", "model", "network", "net", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of data-parallel training, of torch.compile, of Lightning
# What torch.export.load runs of an archive: shared libraries, and objects that it gives to pickle.
_CODE = ("aotinductor/", "opaque_obj_")
_NO_CODE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}


def unloaded_network(network: torch.nn.Module, checkpoint: str | Path | Sequence[str | Path] | None) -> torch.nn.Module:
    """The network that a checkpoint is for. :func:`~monai_saliency.networks.load_checkpoint` then loads the weights.

    Args:
        network: the network for files of weights.
        checkpoint: a file of weights; a list of such files, for an :class:`~monai_saliency.networks.Ensemble` of copies
            of the network; or a network that ``torch.export`` has written (``.pt2``), which replaces ``network``. Even
            without pickled code it is a program, whose rules for shapes torch evaluates as Python code: use only those
            whose source you trust, as with TorchScript. ``"none"`` or None for a network that brings its weights.

    Raises:
        ValueError: when the checkpoint is empty, a list holds an exported network, or one cannot be read, or holds
            pickled code.
    """
    files = _files_of(checkpoint)
    if not isinstance(checkpoint, (list, tuple)):
        return exported_network(files[0]) if any(map(_is_exported, files)) else network
    if any(map(_is_exported, files)):
        raise ValueError("checkpoint lists an exported network (.pt2): an ensemble needs files of weights")
    return Ensemble([copy.deepcopy(network) for _ in files])


def _files_of(checkpoint: str | Path | Sequence[str | Path] | None) -> list[str]:
    """The files of a checkpoint; none where the network brings its weights. Refuse an empty one: it may be a variable
    that is not set, and the weights would be random.
    """
    if checkpoint is None or str(checkpoint).lower() == "none":
        return []
    files = checkpoint if isinstance(checkpoint, (list, tuple)) else [checkpoint]
    if not files or "" in map(str, files):
        raise SettingError(
            f"checkpoint is empty, got {checkpoint!r}: give the file of the network's weights (--checkpoint model.pt), "
            "or --checkpoint none if the network brings its weights, as a TorchScript file does"
        )
    return [str(a_path("checkpoint", file)) for file in files]


def load_checkpoint(network: torch.nn.Module, path: str | Path | Sequence[str | Path] | None) -> torch.nn.Module:
    """Load all weights of a checkpoint into a network. Pickled code is never run.

    Args:
        network: the module, on any device. It holds a part of the weights if loading fails.
        path: a file made by ``torch.save`` with a state dictionary, or with a dictionary that holds one under a usual
            key (``"state_dict"``, ``"model"``, ...). The prefixes ``module.``, ``_orig_mod.`` and ``model.``, which
            training puts before all names, are removed if the network has none of these names. None, ``"none"``, and an
            exported network (``.pt2``), which has its weights, load nothing. A list of files for an
            :class:`~monai_saliency.networks.Ensemble`, one for each member.

    Raises:
        FileNotFoundError: when the file does not exist.
        ValueError: when the path is empty, or the file does not hold a state dictionary, or one of another network.
    """
    files = _files_of(path)
    if not files:
        return network
    if isinstance(path, (list, tuple)):
        members = network.networks if isinstance(network, Ensemble) else [network]
        if len(members) != len(files):
            raise ValueError(
                f"checkpoint lists {len(files)} files, and the network is of {len(members)}: give one each"
            )
        for member, file in zip(members, files, strict=True):
            load_checkpoint(member, file)
        return network
    path = files[0]
    if _is_exported(path):
        if isinstance(network, (InBatchesOf, torch.fx.GraphModule)):
            return network
        words = f"checkpoint {path} is an exported network, whose weights fit no {type(network).__name__}"
        raise ValueError(f"{words}: take the network by monai_saliency.networks.unloaded_network(network, checkpoint)")
    weights = _renamed(_weights_in(Path(path)), network, path)
    try:
        network.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"checkpoint {path} does not fit the network {type(network).__name__}. Set network_def to the network that "
            f"the checkpoint was trained with. {error}"
        ) from None  # the cause is in the message, and whoever shows the cause alone shows the hint too
    return network


def _weights_in(path: Path) -> dict[str, torch.Tensor]:
    """The state dictionary in a file."""
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist: pass --checkpoint with the path of the weights")
    try:
        content: Any = load_plain(path, map_location="cpu")
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path} is not a file of weights that can be read without running code in it "
            f"({type(error).__name__}): save it again with torch.save(network.state_dict(), path), or export it by "
            "torch.export to a file that ends in .pt2; for a TorchScript file set network_def to "
            "$torch.jit.load(path), and checkpoint to none"
        ) from None
    content = _unwrapped(content)
    weights = content if isinstance(content, Mapping) else {}
    if not weights or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in weights.items()):
        raise ValueError(f"checkpoint {path} holds no state dictionary, but a {type(content).__name__}")
    return dict(weights)


def _unwrapped(content: Any) -> Any:
    """What a file's dictionary holds under a usual key, and so on inside it; else the content itself."""
    if isinstance(content, Mapping):
        for name in _WRAPPERS:
            if isinstance(content.get(name), Mapping):
                return _unwrapped(content[name])
    return content


def _renamed(weights: dict[str, torch.Tensor], network: torch.nn.Module, path: Any) -> dict[str, torch.Tensor]:
    """The weights by the network's own names, which a wrapper in training may have put a prefix before."""
    own = network.state_dict().keys()
    removed = ""
    for prefix in _PREFIXES * 2:  # one wrapper may lie around another
        if not own & weights.keys() and all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
            removed += prefix
    if removed:
        logger.warning("checkpoint %s: the prefix %s is removed from the names of its weights", path, removed)
    return weights


def _is_exported(path: str | Path) -> bool:
    return str(path).endswith(".pt2")


def exported_network(path: str | Path) -> torch.nn.Module:
    """A network that ``torch.export.save`` has written. One of limited batch sizes gets other batches in parts."""
    try:
        with _no_pickled_code(path):
            program = torch.export.load(path)
    except UnpicklingError:
        raise ValueError(
            f"checkpoint {path} holds pickled code, which is not run: export the network again by torch.export, with "
            "plain tensors as weights, constants and example inputs"
        ) from None  # torch's own text advises to run it
    except Exception as error:  # whatever a broken archive, or one of another release, raises
        raise ValueError(
            f"checkpoint {path} cannot be read as an exported network ({type(error).__name__}: {error}): write it by "
            f"torch.export.save, in a release of torch that is not newer than this one ({torch.__version__})"
        ) from error
    least, most = _batch_sizes(program)
    module = program.module()
    return module if least <= 1 and most is None else InBatchesOf(module, most, least)


@contextmanager
def _no_pickled_code(path: str | Path) -> Iterator[None]:
    """Let ``torch.export.load`` refuse pickled code, which it runs otherwise where plain weights are not found."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if any(code in name for code in _CODE):
                raise UnpicklingError(f"its part {name} is code")
    before = {name: os.environ.get(name) for name in _NO_CODE}
    os.environ.update(_NO_CODE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class InBatchesOf(torch.nn.Module):
    """A network of ``least`` to ``most`` images at a time. Other batches go in parts, which the last image fills."""

    def __init__(self, network: torch.nn.Module, most: int | None, least: int) -> None:
        super().__init__()
        self.network = network
        self.most = most
        self.least = least

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs of all images, as one batch."""
        tensors = [leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, torch.Tensor)]
        count = len(tensors[0])

        def part(places: list[int]) -> Any:
            def taken(leaf: Any) -> Any:
                is_batch = isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == count
                return leaf[places] if is_batch else leaf

            positional, by_name = tree_map(taken, (inputs, named))
            return self.network(*positional, **by_name)

        return in_parts(count, self.most or max(count, self.least), self.least, part)


def _batch_sizes(program: torch.export.ExportedProgram) -> tuple[int, int | None]:
    """The fewest and the most images that a program takes at a time; None for any number."""
    names = program.graph_signature.user_inputs
    count: Any = None
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" and node.name in names else None
        if count is None and isinstance(value, torch.Tensor) and value.ndim > 1:
            count = value.shape[0]
    if isinstance(count, int):
        return count, count
    limits = None if count is None else program.range_constraints.get(count.node.expr)
    if limits is None:
        return 1, None
    # What torch writes for "any number" is infinite, or larger than any batch.
    most = int(limits.upper) if limits.upper.is_finite and limits.upper < 2**31 else None
    return max(1, int(limits.lower)), most
