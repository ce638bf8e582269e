"""Explaining what a loop predicts that is not a MONAI evaluator's: a plain one, or the predict step of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from monai.engines import IterationEvents
from monai.inferers import SimpleInferer
from monai.utils import CommonKeys

from monai_saliency.bundle.attached_handler import AttachedHandler
from monai_saliency.bundle.replay import Call, Recorder
from monai_saliency.utils.optional_imports import require

__all__ = ["Loop", "LoopExplainer"]

# `Any` for mypy, since ignite need not be installed.
ignite: Any = require("ignite.engine", extra="bundle")
Events = ignite.Events
Engine: Any = ignite.Engine


class Loop(Engine):
    """Somebody's own loop, as the handler that explains sees an evaluator: what predicts, and the batch at hand.

    Args:
        network: the network.
        inferer: calls the network; MONAI's ``SimpleInferer`` by default.
        loader: gives the batches. Its dataset has the cases' files, and the preprocessing that maps go back through.

    Attributes:
        amp, amp_kwargs: how the network was autocast on a GPU at the last prediction.
    """

    def __init__(self, network: Callable[..., Any], inferer: Any = None, loader: Any = None) -> None:
        super().__init__(lambda engine, batch: None)  # it is never run
        self.register_events(*IterationEvents)
        self.network = network
        self.inferer = SimpleInferer() if inferer is None else inferer
        self.data_loader = loader
        self.amp = False
        self.amp_kwargs: dict[str, Any] = {}


class LoopExplainer:
    """Explains the batches of a loop, each when this is called, and has written their maps when it returns.

    Example::

        with ms.attach(network, output_dir="maps", loader=loader, inferer=inferer) as explain:
            for batch in loader:
                prediction = inferer(batch["image"], network)
                explain(batch, prediction)

    Args:
        handler: explains.
        loop: stands for the loop, with the handler attached to it.
        image_key: the key, or the place, of the network's input in a batch; ``"image"`` by default, or the first entry
            where a batch is a list.

    Attributes:
        handler: ``explained`` lists the cases with maps, and ``failures`` those without.
    """

    def __init__(self, handler: AttachedHandler, loop: Loop, image_key: Any = None) -> None:
        self.handler = handler
        self.loop = loop
        self.image_key = image_key
        self.begin()

    def begin(self, num_batches: int | None = None) -> None:
        """Begin a run.

        Args:
            num_batches: how many batches it was asked for; where it is not known, as many as are explained.
        """
        self._counts = num_batches is None
        self.loop.state.iteration, self.loop.state.epoch_length = 0, num_batches
        self.loop.fire_event(Events.STARTED)
        self.loop.fire_event(Events.ITERATION_STARTED)

    def __call__(self, batch: Any, prediction: Any, *args: Any, **kwargs: Any) -> None:
        """Explain a batch. Call it under the same autocast as the network.

        Args:
            batch: what the loader gave: a dictionary, a list, or the images ``(B, C, *spatial)``.
            prediction: what the network gave for it, by the loop's inferer if it has one, before any postprocessing. A
                case for which it gives something else now is a failure, with both figures.
            args: further inputs of the network, as the loop gave them.
            kwargs: further inputs of the network, by name.

        Raises:
            ValueError: when the batch has no image, or another number of cases than of images, or when the network is
                autocast elsewhere than on CUDA.
            Exception: the error of a case that cannot be explained, with ``strict=True``.
        """
        self.explain(batch, Call(self._on_device(self._images(batch)), args, kwargs, prediction))

    def explain(self, batch: Any, call: Call) -> None:
        """Explain a batch by how it was predicted.

        Args:
            batch: what the loader gave.
            call: what the inferer was given, and gave.
        """
        state = self.loop.state
        images = call.images
        kind = images[0].device.type
        self.loop.amp = torch.is_autocast_enabled(kind)
        if self.loop.amp and kind != "cuda":
            raise ValueError(
                f"the network is autocast on the {kind}, where the perturbed images would not be, as in MONAI's "
                "evaluators: predict in full precision (precision='32-true' of a Lightning trainer)"
            )
        self.loop.amp_kwargs = {"dtype": torch.get_autocast_dtype(kind)} if self.loop.amp else {}
        state.iteration += 1
        if self._counts:
            state.epoch_length = state.iteration
        with _plain_arithmetic(kind):
            call = Call(*map(_free, (call.inputs, call.args, call.kwargs, call.output)))
            state.batch, state.output = _free(batch), {CommonKeys.IMAGE: call.inputs, CommonKeys.PRED: call.output}
            recorder = self.loop.inferer
            assert isinstance(recorder, Recorder)
            recorder.note(call)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def _images(self, batch: Any) -> Any:
        """The network's input in a batch."""
        if isinstance(batch, torch.Tensor):
            return batch
        key = self.image_key if self.image_key is not None else CommonKeys.IMAGE if isinstance(batch, Mapping) else 0
        try:
            return batch[key]
        except (KeyError, IndexError, TypeError) as error:
            held = f"the keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(f"`image_key` must name the network's input, got {key!r} for a batch of {held}") from error

    def _on_device(self, images: Any) -> Any:
        """Images where the network is."""
        network = self.loop.network
        parameter = next(iter(network.parameters()), None) if isinstance(network, torch.nn.Module) else None
        if parameter is None or not isinstance(images, torch.Tensor):
            return images
        return images.to(parameter.device)


@contextmanager
def _plain_arithmetic(kind: str) -> Iterator[None]:
    """Neither autocast, which would round masks and maps, nor inference mode, which other threads are not in."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
        yield


def _free(value: Any) -> Any:
    """The same, with copies of tensors that were made in inference mode and so cannot be changed outside of it."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, Mapping):
        return {key: _free(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_free, value))
    return value
