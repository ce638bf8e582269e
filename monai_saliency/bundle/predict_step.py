"""The predict step of a Lightning module, with an explanation right after it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from monai.inferers import Inferer

from monai_saliency.bundle.loop import LoopExplainer
from monai_saliency.bundle.replay import Call, Recorder

__all__ = ["PredictStep", "is_lightning"]


def is_lightning(value: Any) -> bool:
    """Whether a value is a Lightning module, of either of Lightning's packages, without importing one."""
    return any(
        cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        for cls in type(value).__mro__
    )


class PredictStep:
    """The predict step of a Lightning module, which explains each batch right after it."""

    def __init__(self, module: Any, network: torch.nn.Module | None, inferer: Inferer | None) -> None:
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
        trainer, given = self.module.trainer, self.module.trainer.predict_dataloaders
        loaders = list(given) if isinstance(given, (list, tuple)) else [given]
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


def _held_network(module: torch.nn.Module, network: torch.nn.Module | None) -> torch.nn.Module:
    """The network that a Lightning module holds."""
    if network is not None:
        return network
    parts = {name: part for name, part in module.named_children() if [*part.parameters()]}
    if len(parts) == 1 and not [*module.parameters(recurse=False)]:
        return next(iter(parts.values()))
    raise ValueError(
        f"{type(module).__name__} has weights in {sorted(parts) or 'no part'}, so which network predicts is unknown: "
        "give `network`, the part that the predict step calls"
    )


def _held_inferer(module: torch.nn.Module, inferer: Any) -> str | None:
    """The name of the inferer that a Lightning module holds; None if it holds none."""
    inferers = {name: value for name, value in vars(module).items() if isinstance(value, Inferer)}
    names = [name for name, value in inferers.items() if inferer is None or value is inferer]
    if len(names) > 1 or (inferer is not None and not names):
        raise ValueError(
            f"`inferer` must be the one that {type(module).__name__} predicts by, as one of its attributes "
            f"{sorted(inferers)}, got {inferer!r}"
        )
    return names[0] if names else None
