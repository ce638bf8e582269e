"""Explaining what a loop predicts that is not a MONAI evaluator's: a plain one, or the predict step of Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from monai.engines import IterationEvents
from monai.inferers import Inferer, SimpleInferer
from monai.utils import CommonKeys

from monai_saliency.bundle.attached_handler import AttachedHandler
from monai_saliency.bundle.replay import Call, Recorder
from monai_saliency.utils.arguments import require
from monai_saliency.utils.monai_private import tree_map

__all__ = ["ExplainedStep", "Loop", "LoopExplainer", "is_lightning"]

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

    Example::

        with ms.attach(network, output_dir="maps", loader=loader, inferer=inferer) as explain:
            for batch in loader:
                prediction = inferer(batch["image"], network)
                explain(batch, prediction)

    Args:
        handler: explains.
        loop: stands for the loop, with the handler attached to it.
        image_key: the key, or the place, of the network's input in a batch; ``"image"`` by default, or the first entry
            if a batch is a list.

    Attributes:
        handler: ``explained`` lists the cases with maps, and ``failures`` those without.
    """

    def __init__(self, handler: AttachedHandler, loop: Loop, image_key: Any = None) -> None:
        self.handler = handler
        self.loop = loop
        self.image_key = image_key
        self.begin()

    def begin(self, num_batches: int | None = None) -> None:
        """Begin a run."""
        self._counts = num_batches is None
        self.loop.state.iteration, self.loop.state.epoch_length = 0, num_batches
        self.loop.fire_event(Events.STARTED)
        self.loop.fire_event(Events.ITERATION_STARTED)

    def __call__(self, batch: Any, prediction: Any, *args: Any, **kwargs: Any) -> None:
        """Explain a batch. Call it under the same autocast as the network."""
        self.explain(batch, Call(self._on_device(self._images(batch)), args, kwargs, prediction))

    def explain(self, batch: Any, call: Call) -> None:
        """Explain a batch by how it was predicted."""
        state, kind = self.loop.state, call.images[0].device.type
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
        # Neither autocast, which would round masks and maps, nor inference mode, which other threads are not in.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
            call = Call(*(_free(each) for each in (call.inputs, call.args, call.kwargs, call.output)))
            state.batch, state.output = _free(batch), {CommonKeys.IMAGE: call.inputs, CommonKeys.PRED: call.output}
            self.loop.inferer.calls = [call]
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
        return images.to(parameter.device) if parameter is not None and isinstance(images, torch.Tensor) else images


def _free(value: Any) -> Any:
    """The same, with copies of tensors that were made in inference mode and so cannot be changed outside of it."""
    return tree_map(
        lambda each: each.clone() if isinstance(each, torch.Tensor) and each.is_inference() else each, value
    )


def is_lightning(value: Any) -> bool:
    """Whether a value is a Lightning module, of either of Lightning's packages, without importing one."""
    return any(
        cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        for cls in type(value).__mro__
    )


class ExplainedStep:
    """The predict step of a Lightning module, which explains each batch right after it. Its outputs stay
    what they are.
    """

    def __init__(self, module: Any, network: torch.nn.Module | str | None, inferer: Any) -> None:
        self.module = module
        self.network = _held_network(module, network)
        self._name = _held_inferer(module, inferer)
        self.inferer = None if self._name is None else getattr(module, self._name)
        self._dataset: Any = None
        self._explainer: LoopExplainer

    def explain_by(self, explainer: LoopExplainer) -> None:
        """Explain each batch from now on, instead of what was attached before."""
        self._explainer = explainer
        for name, around in (
            ("predict_step", self._step),
            ("on_predict_start", self._start),
            ("on_predict_end", self._end),
        ):
            own = getattr(self.module, name)
            own = getattr(own, "explained", own)  # attached before: this replaces it
            # Lightning looks at signatures, which `update_wrapper` keeps.
            wrapped: Any = functools.update_wrapper(functools.partial(around, own), own)
            wrapped.explained = own
            setattr(self.module, name, wrapped)

    def _start(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        trainer = self.module.trainer
        loaders = trainer.predict_dataloaders
        loaders = list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
        if trainer.world_size > 1:
            raise ValueError(
                f"`attach` explains what one device predicts, and the trainer has {trainer.world_size}: share a cohort "
                "by monai_saliency.distributed.lightning.SaliencyModule, or by the overlay `lightning`"
            )
        if len(loaders) != 1:
            raise ValueError(f"`attach` explains the cases of one loader, and the trainer predicts {len(loaders)}")
        dataset = getattr(loaders[0], "dataset", loaders[0])
        if self._dataset is not None and self._dataset is not dataset:
            raise ValueError("`attach` explains the cases of one dataset: attach again before another one is predicted")
        self._dataset = dataset
        self._explainer.loop.data_loader = loaders[0]
        num_batches = trainer.num_predict_batches[0]
        with torch.inference_mode(False):
            self._explainer.begin(int(num_batches) if num_batches != float("inf") else None)
        own(*args, **kwargs)

    def _step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else next(iter(kwargs.values()))
        with self._noted() as calls:
            output = own(*args, **kwargs)
        by = "its network" if self._name is None else f"its `{self._name}`"
        if len(calls) != 1:
            raise ValueError(
                f"the predict step of {type(self.module).__name__} called {by} {len(calls)} times, where one call a "
                "batch can be explained: where it predicts by patches, let the module hold the inferer as an attribute "
                "and call that (self.inferer = SlidingWindowInferer(...)); else give `network`, the part that it calls"
            )
        self._explainer.explain(batch, calls[0])
        return output

    def _end(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._explainer.finish()
        own(*args, **kwargs)

    @contextmanager
    def _noted(self) -> Iterator[list[Call]]:
        """The calls of the inferer, or of the network, meanwhile."""
        if self._name is not None:
            recorder = Recorder(self.inferer)
            setattr(self.module, self._name, recorder)
            try:
                yield recorder.calls
            finally:
                setattr(self.module, self._name, self.inferer)
            return
        calls: list[Call] = []

        def note(network: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            given = [*args, *kwargs.values()]
            calls.append(Call(given[0] if given else None, args[1:], kwargs if args else {}, output))

        hook = self.network.register_forward_hook(note, with_kwargs=True)
        try:
            yield calls
        finally:
            hook.remove()  # it is not a part of the network that is explained


def _held_network(module: torch.nn.Module, network: torch.nn.Module | str | None) -> torch.nn.Module:
    """The network that a Lightning module holds."""
    parts = dict(module.named_modules())
    if isinstance(network, torch.nn.Module):
        return network
    if network is not None:
        if network in parts:
            return parts[network]
        raise ValueError(f"`network` must be a part of {type(module).__name__}, such as its name, got {network!r}")
    found = {name: part for name, part in module.named_children() if next(part.parameters(), None) is not None}
    if len(found) == 1 and not list(module.parameters(recurse=False)):
        return next(iter(found.values()))
    raise ValueError(
        f"{type(module).__name__} has weights in {sorted(found) or 'no part'}, so which network predicts is unknown: "
        "give `network`, the part that the predict step calls, or its name"
    )


def _held_inferer(module: torch.nn.Module, inferer: Any) -> str | None:
    """The name of the inferer that a Lightning module holds; None if it holds none."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, Inferer)}
    names = [name for name, value in found.items() if inferer is None or value is inferer or name == inferer]
    if len(names) > 1 or (inferer is not None and not names):
        raise ValueError(
            f"`inferer` must be the one that {type(module).__name__} predicts by, as one of its attributes "
            f"{sorted(found)}, got {inferer!r}"
        )
    return names[0] if names else None
