"""Networks that were exported by ``torch.export`` to a ``.pt2`` file, in the place of a module and its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from monai_saliency.networks.ensemble import Ensemble, ensemble_of
from monai_saliency.networks.outputs import joined, rows
from monai_saliency.utils.arguments import whole_number
from monai_saliency.utils.monai_private import tree_leaves, tree_map

__all__ = ["InBatchesOf", "exported_network", "is_exported", "network_of"]


def is_exported(path: Any) -> bool:
    """Whether a checkpoint is the path of an exported network."""
    return isinstance(path, (str, Path)) and str(path).endswith(".pt2")


def network_of(network: torch.nn.Module, checkpoint: str | Path | Sequence[str | Path] | None) -> torch.nn.Module:
    """The network for a checkpoint. :func:`~monai_saliency.networks.load_checkpoint` loads the weights.

    Args:
        network: the network for files of weights.
        checkpoint: a file of weights, a list of such files for an :class:`~monai_saliency.networks.Ensemble`, or a
            network that ``torch.export`` has written (``.pt2``), which has its weights and replaces ``network``.

    Raises:
        FileNotFoundError: when an exported network does not exist.
        ValueError: when it cannot be read, or is one of a list.
    """
    if isinstance(checkpoint, (str, Path)) and is_exported(checkpoint):
        return exported_network(checkpoint)
    if isinstance(checkpoint, Sequence) and not isinstance(checkpoint, str) and any(map(is_exported, checkpoint)):
        raise ValueError(
            "checkpoint lists an exported network (.pt2): an ensemble needs files of weights. Give one file, or the "
            "weights of each"
        )
    found: torch.nn.Module | Ensemble = ensemble_of(network, checkpoint)
    return found


def exported_network(path: str | Path) -> torch.nn.Module:
    """A network that ``torch.export.save`` has written.

    Args:
        path: the file, ``.pt2``.

    Returns:
        a module on the device of the export. A program that limits the batch size gets larger and smaller batches in
        parts (:class:`InBatchesOf`).

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is not an exported network, or when this release of torch cannot read it.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"exported network {path} does not exist: pass --checkpoint with its path")
    try:
        program = torch.export.load(path)
    except Exception as error:  # whatever a broken archive, or one of another release, raises
        raise ValueError(
            f"{path} cannot be read as an exported network ({type(error).__name__}: {error}): write it with "
            "torch.export.save(torch.export.export(network, images, dynamic_shapes=...), path) by a release of torch "
            f"that is not newer than this one ({torch.__version__})"
        ) from error
    least, most = _batch_sizes(program)
    module = program.module()
    return module if least <= 1 and most is None else InBatchesOf(module, most, least)


class InBatchesOf(torch.nn.Module):
    """A network that takes between ``least`` and ``most`` images at a time: other batches go through it in parts."""

    def __init__(self, network: torch.nn.Module, most: int | None, least: int = 1) -> None:
        super().__init__()
        self.network = network
        self.least = whole_number("least", least, 1)
        self.most = None if most is None else whole_number("most", most, self.least)
        self.training = network.training

    def train(self, mode: bool = True) -> InBatchesOf:
        """Set the mode of the network; a NotImplementedError for an exported one, whose mode is fixed."""
        self.network.train(mode)
        self.training = mode
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs of all images, as one batch."""
        count = next(len(each) for each in tree_leaves((inputs, named)) if isinstance(each, torch.Tensor))
        most = self.most or max(count, self.least)
        if self.least <= count <= most:
            return self.network(*inputs, **named)
        outputs, counts = [], []
        for start in range(0, count, most):
            number = min(most, count - start)
            size = max(number, self.least)
            positional, by_name = tree_map(_cut(start, number, size, count), (inputs, named))
            outputs.append(rows(self.network(*positional, **by_name), 0, number, size))
            counts.append(number)
        return joined(outputs, counts)


def _cut(start: int, number: int, size: int, count: int) -> Callable[[Any], Any]:
    """Takes rows of inputs, and repeats the last one until there are enough."""

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != count:
            return value
        part = value[start : start + number]
        if number == size:
            return part
        return torch.cat([part, part[-1:].expand(size - number, *part.shape[1:])])

    return cut


def _batch_sizes(program: torch.export.ExportedProgram) -> tuple[int, int | None]:
    """The fewest and the most images that a program takes at a time; None for any number."""
    names = program.graph_signature.user_inputs
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    values = [node.meta.get("val") for node in nodes]
    image = next((value for value in values if isinstance(value, torch.Tensor) and value.ndim > 1), None)
    if image is None:
        return 1, None
    count = image.shape[0]
    if isinstance(count, int):
        return count, count
    limits = program.range_constraints.get(count.node.expr)
    if limits is None:
        return 1, None
    # What torch writes for "any number" is infinite, or larger than any batch.
    most = int(limits.upper) if limits.upper.is_finite and limits.upper < 2**31 else None
    return max(1, int(limits.lower)), most
