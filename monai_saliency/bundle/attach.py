"""Explaining what an evaluator, a Lightning module or a loop predicts, in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from monai.engines import IterationEvents
from monai.inferers import Inferer, SimpleInferer
from monai.utils import CommonKeys

from monai_saliency.bundle.attach_settings import AttachSettings
from monai_saliency.bundle.attached_handler import AttachedHandler
from monai_saliency.bundle.replay import Call, Recorder
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.utils.arguments import require
from monai_saliency.utils.monai_private import event_handlers, postprocessing_of, tree_map

__all__ = ["Loop", "LoopExplainer", "attach", "attach_to"]

# `Any` for mypy, since ignite need not be installed.
ignite: Any = require("ignite.engine", extra="bundle")
Events = ignite.Events
Engine: Any = ignite.Engine


def attach(
    evaluator: Any,
    output_dir: str | Path,
    *,
    loader: Any = None,
    inferer: Any = None,
    network: Any = None,
    postprocessing: Any = None,
    **settings: Any,
) -> Any:
    """Explain each case that a MONAI evaluator, a Lightning module or a loop of your own predicts, right after its
    forward. The predictions stay what they are.

    This is what ``configs/explain.yaml`` does to the evaluator of a bundle, for what is made in Python. The maps are
    the same, byte for byte.

    Args:
        evaluator: what predicts:

            - an evaluator with a network and an inferer, such as MONAI's ``SupervisedEvaluator``. Its inferer is
              replaced by one that also records its calls;
            - a Lightning module, whose ``predict_step`` calls its network or an inferer that it holds as an attribute
              once a batch. It is explained under ``Trainer.predict`` on one device;
            - the network of a loop, in evaluation mode: any callable on batches ``(B, C, *spatial)``.
        output_dir: the folder for maps, pictures, ``summary.csv``, ``failures.csv`` and scores.
        loader: of a loop: gives its batches. Its dataset has the files' names and the preprocessing; without it maps
            lie on the grid of the network's input.
        inferer: of a loop: what calls the network; of a module: the inferer that its step calls, or the attribute's
            name, if it holds several.
        network: of a module: the part that predicts, or its name, if several parts have weights.
        postprocessing: of a loop or a module: the transform of its predictions, by whose activation they are explained,
            unless ``activation`` is given.
        settings: what is explained, and how: see
            :class:`~monai_saliency.bundle.attach_settings.AttachSettings`, such as ``method="rise"``, ``classes=[1]``
            or ``picture=False``, and the method's own.

    Returns:
        for an evaluator or a module the handler: ``explained`` lists the cases with maps, and ``failures`` those
        without. For a loop what explains a batch, a :class:`~LoopExplainer`, with the
        handler as ``handler``.

    Raises:
        ValueError: when a setting is wrong, or the predictions cannot be explained, with the reason.

    Example::

        >>> import torch
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from monai.data import DataLoader, Dataset, MetaTensor
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
        >>> loader = DataLoader(Dataset([{"image": MetaTensor(torch.rand(1, 4, 4, 4))}]), batch_size=1)
        >>> with TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
        ...     settings = {"activation": "softmax", "report": False, "picture": False}
        ...     with attach(network, folder, loader=loader, **settings) as explain:
        ...         for batch in loader:
        ...             explain(batch, network(batch["image"]))
        ...     len(list(Path(folder).glob("*_saliency.nii.gz")))
        monai_saliency: the loop (Loop) runs Sequential by SimpleInferer on image 'image' ...
        1
    """
    explaining, folder = AttachSettings.of(**settings), Path(output_dir)
    if hasattr(evaluator, "add_event_handler"):
        if any(given is not None for given in (loader, inferer, network, postprocessing)):
            raise ValueError("an evaluator has its own loader, inferer, network and postprocessing: give none")
        handler = attach_to(evaluator, folder, explaining, "the evaluator", postprocessing_of(evaluator))
        handler.report_at_end(evaluator)
        return handler
    if not callable(evaluator):
        raise ValueError(
            "`evaluator` must be a MONAI evaluator, a Lightning module or the network of a loop, got "
            f"{type(evaluator).__name__}"
        )
    step = _PredictStep(evaluator, network, inferer) if _is_lightning(evaluator) else None
    if step is None:
        loop, words = Loop(evaluator, inferer, loader), "the loop"
    else:
        loop, words = Loop(step.network, step.inferer, loader), f"the predict step of {type(evaluator).__name__}"
    handler = attach_to(loop, folder, explaining, words, postprocessing)
    handler.report_at_end(loop)
    explainer = LoopExplainer(handler, loop, explaining.image_key)
    if step is None:
        return explainer
    step.explain_by(explainer)
    return handler


def attach_to(
    evaluator: Any, folder: Path, settings: AttachSettings, words: str, postprocessing: Any
) -> AttachedHandler:
    """Attach the handler that explains to an evaluator, and detach those that explain already."""
    if not all(hasattr(evaluator, part) for part in ("network", "inferer")):
        raise ValueError(
            f"{words} is a {type(evaluator).__name__} without a network and an inferer: what can be explained is an "
            "evaluator with one of each, such as SupervisedEvaluator (--saliency_evaluator names the id of another "
            "one). Explain the members of an ensemble one by one, or make one network of them"
        )
    if type(evaluator.network).__name__ == "ModelnnUNetWrapper":
        raise ValueError(
            "MONAI's wrapper of nnU-Net gives labels, which show no gradual change: explain the model's own folder by "
            "our bundle with the overlay `nnunet`"
        )
    for event, function in event_handlers(evaluator):
        if isinstance(getattr(function, "__self__", function), SaliencyHandler):  # as our own bundle has one
            evaluator.remove_event_handler(function, event)
    handler = AttachedHandler(settings, words, evaluator, postprocessing, folder)
    handler.attach(evaluator)
    return handler


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

    def begin(self) -> None:
        """Begin a run, over any loader."""
        self.loop.state.iteration, self.handler.is_started = 0, False
        self.loop.fire_event(Events.STARTED)
        self.loop.fire_event(Events.ITERATION_STARTED)

    def __call__(self, batch: Any, prediction: Any, *args: Any, **kwargs: Any) -> None:
        """Explain a batch. Call it under the same autocast as the network."""
        self.explain(batch, Call(self._on_device(self._images(batch)), args, kwargs, prediction))

    def explain(self, batch: Any, call: Call) -> None:
        """Explain a batch by how it was predicted."""
        state, kind = self.loop.state, call.images[0].device.type
        self.loop.amp = torch.is_autocast_enabled(kind)
        self.loop.amp_kwargs = {"dtype": torch.get_autocast_dtype(kind)} if self.loop.amp else {}
        state.iteration += 1
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
        key = self.image_key if self.image_key is not None else CommonKeys.IMAGE if isinstance(batch, Mapping) else 0
        return batch if isinstance(batch, torch.Tensor) else batch[key]

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


def _is_lightning(value: Any) -> bool:
    """Whether a value is a Lightning module, of either of Lightning's packages, without importing one."""
    return any(
        cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        for cls in type(value).__mro__
    )


class _PredictStep:
    """The predict step of a Lightning module, which explains each batch right after it."""

    def __init__(self, module: Any, network: torch.nn.Module | str | None, inferer: Any) -> None:
        self.module = module
        self.network = _held_network(module, network)
        self._name = _held_inferer(module, inferer)
        self.inferer = None if self._name is None else getattr(module, self._name)
        self._explainer: LoopExplainer

    def explain_by(self, explainer: LoopExplainer) -> None:
        """Explain each batch from now on, instead of what was attached before."""
        self._explainer = explainer
        around = {"predict_step": self._step, "on_predict_start": self._start, "on_predict_end": self._end}
        for name, wrapper in around.items():
            own = functools.partial(getattr(type(self.module), name), self.module)
            # Lightning looks at signatures, which `update_wrapper` keeps.
            wrapped = functools.update_wrapper(functools.partial(wrapper, own), own)
            setattr(self.module, name, wrapped)

    def _start(self, own: Callable[..., Any]) -> None:
        trainer = self.module.trainer
        loaders = trainer.predict_dataloaders
        loaders = list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
        if trainer.world_size > 1 or len(loaders) > 1:
            raise ValueError(
                f"`attach` explains what one device predicts of one loader, and the trainer has {trainer.world_size} "
                f"and {len(loaders)}: share a cohort by monai_saliency.distributed.lightning.SaliencyModule, or by the "
                "overlay `lightning`"
            )
        self._explainer.loop.data_loader = loaders[0]
        with torch.inference_mode(False):
            self._explainer.begin()
        own()

    def _step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._noted() as calls:
            output = own(*args, **kwargs)
        if len(calls) != 1:
            by = "its network" if self._name is None else f"its `{self._name}`"
            raise ValueError(
                f"the predict step of {type(self.module).__name__} called {by} {len(calls)} times, where one call a "
                "batch can be explained: where it predicts by patches, let the module hold the inferer as an attribute "
                "and call that (self.inferer = SlidingWindowInferer(...)); else give `network`, the part that it calls"
            )
        self._explainer.explain(args[0] if args else next(iter(kwargs.values())), calls[0])
        return output

    def _end(self, own: Callable[..., Any]) -> None:
        self._explainer.finish()
        own()

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
    if network is not None:
        return module.get_submodule(network) if isinstance(network, str) else network
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
