"""Explaining what the predict step of a Lightning module predicts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from monai.inferers import Inferer

from monai_saliency.bundle.loop import LoopExplainer
from monai_saliency.bundle.replay import Call, Recorder

__all__ = ["ExplainedStep", "held_inferer", "held_network", "is_lightning"]


def is_lightning(value: Any) -> bool:
    """Whether a value is a Lightning module, of either of Lightning's packages, without importing one."""
    return any(
        cls.__name__ == "LightningModule" and cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        for cls in type(value).__mro__
    )


def held_network(module: torch.nn.Module, network: torch.nn.Module | str | None) -> torch.nn.Module:
    """The network that a Lightning module holds.

    Args:
        module: the Lightning module.
        network: a part of it, or its name; by default its one part with weights.

    Raises:
        ValueError: when it has another number of such parts, or not the one that is named.
    """
    parts = dict(module.named_modules())
    if isinstance(network, str) and network in parts:
        return parts[network]
    if network is not None:
        if isinstance(network, torch.nn.Module):
            return network
        raise ValueError(f"`network` must be a part of {type(module).__name__}, such as its name, got {network!r}")
    found = {name: part for name, part in module.named_children() if next(part.parameters(), None) is not None}
    if len(found) == 1 and not list(module.parameters(recurse=False)):
        return next(iter(found.values()))
    raise ValueError(
        f"{type(module).__name__} has weights in {sorted(found) or 'no part'}, so which network predicts is unknown: "
        "give `network`, the part that the predict step calls, or its name"
    )


def held_inferer(module: torch.nn.Module, inferer: Any = None) -> str | None:
    """The name of the inferer that a Lightning module holds; None where it holds none.

    Args:
        module: the Lightning module.
        inferer: one that it holds; by default its only one.

    Raises:
        ValueError: when it holds several, or not the one that is given.
    """
    found = {name: value for name, value in vars(module).items() if isinstance(value, Inferer)}
    names = [name for name, value in found.items() if inferer is None or value is inferer or name == inferer]
    if len(names) > 1 or (inferer is not None and not names):
        raise ValueError(
            f"`inferer` must be the one that {type(module).__name__} predicts by, as one of its attributes "
            f"{sorted(found)}, got {inferer!r}"
        )
    return names[0] if names else None


class ExplainedStep:
    """The predict step of a Lightning module, and what explains each batch right after it. Its outputs stay what they
    are.

    Args:
        module: the Lightning module. Its ``predict_step``, ``on_predict_start`` and ``on_predict_end`` are wrapped.
        network: the part of it that predicts.
        explainer: explains.
        inferer: the name of the attribute with the inferer that the step calls; None where it calls the network itself.
    """

    def __init__(self, module: Any, network: torch.nn.Module, explainer: LoopExplainer, inferer: str | None) -> None:
        self.network = network
        self.module = module
        self.explainer = explainer
        self.inferer = inferer
        self._dataset: Any = None
        for name, around in (
            ("predict_step", self._step),
            ("on_predict_start", self._start),
            ("on_predict_end", self._end),
        ):
            own = getattr(module, name)
            own = own.own if isinstance(own, _Around) else own  # attached before: this replaces it
            setattr(module, name, _Around(own, around))

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
        self.explainer.loop.data_loader = loaders[0]
        num_batches = trainer.num_predict_batches[0]
        with torch.inference_mode(False):
            self.explainer.begin(int(num_batches) if num_batches != float("inf") else None)
        own(*args, **kwargs)

    def _step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else next(iter(kwargs.values()))
        with self._noted() as calls:
            output = own(*args, **kwargs)
        by = "its network" if self.inferer is None else f"its `{self.inferer}`"
        if len(calls) != 1:
            raise ValueError(
                f"the predict step of {type(self.module).__name__} called {by} {len(calls)} times, where one call a "
                "batch can be explained: where it predicts by patches, let the module hold the inferer as an attribute "
                "and call that (self.inferer = SlidingWindowInferer(...)); else give `network`, the part that it calls"
            )
        self.explainer.explain(batch, calls[0])
        return output

    def _end(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.explainer.finish()
        own(*args, **kwargs)

    @contextmanager
    def _noted(self) -> Iterator[list[Call]]:
        """The calls of the inferer, or of the network, meanwhile."""
        calls: list[Call] = []
        if self.inferer is not None:
            own = getattr(self.module, self.inferer)
            setattr(self.module, self.inferer, _Noting(own, calls))
            try:
                yield calls
            finally:
                setattr(self.module, self.inferer, own)
            return

        def note(network: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            given = [*args, *kwargs.values()]
            further = {} if not args else kwargs
            calls.append(Call(given[0] if given else None, args[1:], further, output))

        hook = self.network.register_forward_hook(note, with_kwargs=True)
        try:
            yield calls
        finally:
            # It is no part of the network that is explained.
            hook.remove()


class _Noting(Recorder):
    """An inferer that notes all of its calls."""

    def __init__(self, inferer: Any, calls: list[Call]) -> None:
        super().__init__(inferer)
        self.calls = calls

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(inputs, network, *args, **kwargs)
        self.calls.append(self.take())
        return output


class _Around:
    """A method with something around it, that Lightning takes for the method: it looks at signatures."""

    def __init__(self, own: Callable[..., Any], around: Callable[..., Any]) -> None:
        self.own = own
        self.around = around
        functools.update_wrapper(self, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.own, *args, **kwargs)
