"""Somebody's own loop over batches, as the handler that explains sees an evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from monai.engines import IterationEvents
from monai.inferers import SimpleInferer
from monai.utils import CommonKeys

from monai_saliency.bundle.attached_handler import AttachedHandler
from monai_saliency.bundle.replay import Call
from monai_saliency.utils.arguments import require
from monai_saliency.utils.monai_private import tree_map

# `Any` for mypy, since ignite need not be installed.
ignite: Any = require("ignite.engine", extra="bundle")
Events = ignite.Events
Engine: Any = ignite.Engine


class Loop(Engine):
    """Somebody's own loop, as the handler that explains sees an evaluator: what predicts, and the batch at hand."""

    def __init__(self, network: Callable[..., Any], inferer: Any = None, loader: Any = None) -> None:
        super().__init__(lambda engine, batch: None)  # it is never run
        self.register_events(*IterationEvents)
        self.network = network
        self.inferer: Any = SimpleInferer() if inferer is None else inferer
        self.data_loader = loader
        self.amp = False
        self.amp_kwargs: dict[str, Any] = {}


class LoopExplainer:
    """Explains the batches of a loop, each when this is called, and has written their maps when it returns.

    Args:
        handler: explains.
        loop: takes the place of an engine: the handler is attached to it.

    Attributes:
        handler: ``explained`` lists the cases with maps, and ``failures`` those without.
    """

    def __init__(self, handler: AttachedHandler, loop: Loop) -> None:
        self.handler = handler
        self.loop = loop
        handler.report_at_end(loop)
        loop.fire_event(Events.STARTED)
        loop.fire_event(Events.ITERATION_STARTED)

    def __call__(self, batch: Any, prediction: Any, *args: Any, **kwargs: Any) -> None:
        """Explain a batch by how it was predicted. Call it under the same autocast as the network."""
        call = Call(self._on_device(self._images(batch)), args, kwargs, prediction)
        state, kind = self.loop.state, call.images[0].device.type
        self.loop.amp = torch.is_autocast_enabled(kind)
        self.loop.amp_kwargs = {"dtype": torch.get_autocast_dtype(kind)} if self.loop.amp else {}
        state.iteration += 1
        # Neither autocast, which would round masks and maps, nor inference mode, which other threads are not in.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
            free = Call(_free(call.inputs), _free(call.args), _free(call.kwargs), _free(call.output))
            state.batch, state.output = _free(batch), {CommonKeys.IMAGE: free.inputs, CommonKeys.PRED: free.output}
            self.loop.inferer.calls = [free]
            try:
                self.loop.fire_event(IterationEvents.FORWARD_COMPLETED)
            finally:
                # Nobody can say when such a loop ends, so that nothing is left to be written later.
                state.batch = state.output = None
                self.handler.finish()

    def finish(self) -> None:
        """End a run: report cases without a map. Needed once, unless this is used as a context."""
        self.loop.fire_event(Events.EPOCH_COMPLETED)
        self.loop.fire_event(Events.COMPLETED)

    def __enter__(self) -> LoopExplainer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.finish()

    def _images(self, batch: Any) -> Any:
        """The network's input in a batch: under ``image_key``, or else under ``"image"`` or first in a list."""
        if isinstance(batch, torch.Tensor):
            return batch
        key: Any = self.handler.settings.image_key
        if key is None:
            key = CommonKeys.IMAGE if isinstance(batch, Mapping) else 0
        return batch[key]

    def _on_device(self, images: Any) -> Any:
        """Images where the network is."""
        network = self.loop.network
        if not isinstance(network, torch.nn.Module) or not isinstance(images, torch.Tensor):
            return images
        parameter = next(network.parameters(), None)
        return images if parameter is None else images.to(parameter.device)


def _free(value: Any) -> Any:
    """The same, with copies of tensors that were made in inference mode and so cannot be changed outside of it."""

    def free(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_inference() else leaf

    return tree_map(free, value)
