"""A batch that the device has no memory for goes through the network in halves, and the run goes on.

All parts of a batch have one shape, as compiled networks need it: the last one begins earlier, and its first rows,
which the part before holds too, are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from monai_saliency.networks.outputs import joined, rows
from monai_saliency.utils.monai_private import tensor_version, tree_map

__all__ = ["Fitting", "is_out_of_memory"]

logger = logging.getLogger(__name__)

#: words in the errors of libraries that do not raise ``torch.OutOfMemoryError``
_WORDS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")

#: by network, then by the shape of an image and its device: as many images as fit, where fewer did than were asked for
_fits: WeakKeyDictionary[Any, dict[tuple[Any, ...], int]] = WeakKeyDictionary()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left for a tensor."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


class Fitting:
    """Runs batches in parts that fit. What fits is remembered as long as the network lives."""

    def __init__(self, network: Any) -> None:
        try:
            self._known = _fits.setdefault(getattr(network, "__self__", network), {})
        except TypeError:  # it cannot be referred to weakly
            self._known = {}

    def run(
        self,
        batch: torch.Tensor,
        call: Callable[[torch.Tensor, Mapping[Any, torch.Tensor]], Any],
        values: Mapping[Any, torch.Tensor] | None = None,
    ) -> Any:
        """What ``call`` gives for a batch ``(n, ...)``, with the same rows of further inputs by name."""
        size = min(len(batch), self._known.get(_kind(batch), len(batch)))
        version = tensor_version(batch)
        while True:
            try:
                return _in_parts(batch, dict(values or {}), size, call)
            except Exception as error:
                if size == 1 or not is_out_of_memory(error) or tensor_version(batch) != version:
                    raise
            # Here the error is gone, and with it the tensors that its traceback held.
            if batch.device.type == "cuda":
                torch.cuda.empty_cache()
            half = -(-size // 2)
            logger.warning(
                "no memory for %d images of %s in the network at once: it goes on with %d. A smaller mask_batch_size "
                "(or sw_batch_size) saves the attempt",
                size,
                tuple(batch.shape[1:]),
                half,
            )
            self._known[_kind(batch)] = size = half


def _kind(batch: torch.Tensor) -> tuple[Any, ...]:
    """What decides how many images fit."""
    return tuple(batch.shape[1:]), str(batch.device)


def _in_parts(batch: torch.Tensor, values: dict[Any, torch.Tensor], size: int, call: Callable[..., Any]) -> Any:
    count = len(batch)
    if size == count:
        return call(batch, values)
    # Copied before a network may change its input in place.
    last = batch[-size:].clone()
    outputs = []
    for start in range(0, count, size):
        fits = start + size <= count
        first = start if fits else count - size
        part = batch[start : start + size] if fits else last
        output = call(part, {name: value[first : first + size] for name, value in values.items()})
        output = rows(output, start - first, size, size)
        # The next call may overwrite it.
        outputs.append(tree_map(lambda each: each.clone() if isinstance(each, torch.Tensor) else each, output))
    return joined(outputs, [min(size, count - start) for start in range(0, count, size)])
