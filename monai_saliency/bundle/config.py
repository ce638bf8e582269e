"""What a bundle's configs hold, whatever its ids are called."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from monai.bundle import ConfigComponent, ConfigParser
from monai.engines import EnsembleEvaluator, Evaluator
from monai.inferers import DiffusionInferer

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["BundleConfig", "calling_parser", "is_generative", "refuse_generative"]

# Ids that MONAI gives a meaning, and under which no run is described.
_NO_RUNS = {"imports", "initialize", "finalize", "explain"}
# The run ids of the Model Zoo, the most usual first.
_RUN_IDS = ("run", "evaluating", "inference", "eval", "inferring", "evaluate")
# Not every autoencoder, for some of them segment (SegResNetVAE), and not the generators of a detector's anchors.
_GENERATIVE = re.compile(
    r"Diffusion|AutoencoderKL|VQVAE|VarAutoEncoder|ControlNet|(?<!Anchor)Generator|SPADE", re.IGNORECASE
)


def is_generative(kind: str) -> bool:
    """Whether networks or inferers of a class make images, rather than a statement about one, by the class's name."""
    return _GENERATIVE.search(kind) is not None


def is_plain(content: Any) -> bool:
    """Whether it is text, a number, a device, none, or a list or dictionary of these, and not to be evaluated."""
    if isinstance(content, dict):
        return "_target_" not in content and all(map(is_plain, content.values()))
    if isinstance(content, (list, tuple)):
        return all(map(is_plain, content))
    if isinstance(content, str):
        return not content.startswith(("$", "@", "%"))
    return content is None or isinstance(content, (bool, int, float, Path, torch.device))


def calling_parser() -> ConfigParser:
    """The parser whose expression is being evaluated."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, ConfigParser):
            return found
        frame = frame.f_back
    raise RuntimeError("no bundle to explain: this is for an expression of a MONAI config, or give `parser`")


class BundleConfig:
    """A bundle as its parser, with the bundle's configs read, knows it."""

    def __init__(self, parser: ConfigParser) -> None:
        self.parser = parser

    def get(self, id: str) -> Any:
        """What an id stands for, made or evaluated; None where there is no such id."""
        return self.parser.get_parsed_content(id) if id in self.parser else None

    def given(self, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
        """The values of those ids that there are, by name: the ids without the prefix."""
        return {name: self.get(f"{prefix}{name}") for name in names if f"{prefix}{name}" in self.parser}

    def output_dir(self) -> Path:
        """Where the bundle writes: its ``output_dir``, or else ``<bundle_root>/eval``."""
        folder = self.get("output_dir")
        if isinstance(folder, (str, Path)) and str(folder):
            return Path(folder)
        return Path(self.get("bundle_root") or ".") / "eval"

    def unread(self, prefix: str = "") -> list[str]:
        """Top-level ids of plain values that nothing in the config refers to: those that begin with the prefix, or
        without one those that are not the overlay's (``saliency_...``).
        """
        used = {id for text in _texts(self.parser.get()) for id in re.findall(r"[@%](\w+)", text)}
        return [
            id
            for id, content in self.parser.get().items()
            if id.startswith(prefix or "")
            and (prefix or not id.startswith(("saliency_", "_")))
            and id not in used
            and is_plain(content)
        ]

    def settings(self) -> dict[str, Any]:
        """What users change, by id: plain top-level values, and expressions of one or of a few numbers, without the
        overlay's.
        """
        found = {}
        for id, content in self.parser.get().items():
            if id.startswith(("saliency_", "_")) or id == "save_execute_config":
                continue
            if is_plain(content):
                found[id] = content
            elif isinstance(content, str) and is_plain(value := self.get(id)) and _is_short(value):
                found[id] = value
        return found

    def evaluator_id(self) -> str:
        """The id of the evaluator that the bundle runs."""
        components = dict(_components(self.parser.get()))
        run = {id for texts in self._runs().values() for text in texts for id in _calls_of_run(text)}
        for ids in (run & components.keys(), components.keys()):
            found = [id for id in components if id in ids and self._is_evaluator(components[id])]
            if len(found) > 1:
                found = [id for id in found if id == "evaluator"] or found
            if len(found) > 1:
                raise ValueError(
                    f"this bundle has several evaluators ({', '.join(found)}): say which one predicts with "
                    f"--saliency_evaluator {found[0]}"
                )
            if found:
                return found[0]
        raise ValueError(self._no_evaluator(components))

    def evaluator(self, id: str) -> Any:
        """The evaluator under an id."""
        evaluator = self.get(id)
        if isinstance(evaluator, EnsembleEvaluator):
            raise ValueError(
                f"{id} is an EnsembleEvaluator of {len(evaluator.networks)} networks, and a map explains one: run the "
                "bundle with one of them in a SupervisedEvaluator, and name it with --saliency_evaluator"
            )
        if not isinstance(evaluator, Evaluator) or not all(hasattr(evaluator, part) for part in ("network", "inferer")):
            what = "not in this bundle" if evaluator is None else f"a {type(evaluator).__name__}"
            raise ValueError(
                f"{id} is {what}, where an evaluator with a network and an inferer is needed, such as MONAI's "
                "SupervisedEvaluator: name it with --saliency_evaluator"
            )
        return evaluator

    def run_steps(self, evaluator_id: str) -> list[str]:
        """The ids of the expressions by which the bundle runs its evaluator, in order; none if it does not say."""
        runs = [id for id, texts in self._runs().items() if any(evaluator_id in _calls_of_run(text) for text in texts)]
        if not runs:
            return []
        id = min(runs, key=lambda run: _RUN_IDS.index(run) if run in _RUN_IDS else len(_RUN_IDS))
        content = self.parser[id]
        return [f"{id}::{i}" for i in range(len(content))] if isinstance(content, list) else [id]

    def names(self, step: str, id: str) -> bool:
        """Whether the expression of a step names an id."""
        return re.search(rf"@{re.escape(id)}(?!\w)", str(self.parser[step]).replace("#", "::")) is not None

    def evaluate(self, step: str) -> None:
        """Evaluate an expression of a run, as MONAI's workflow does: its value is not kept."""
        self.parser.get_parsed_content(step)
        self.parser.ref_resolver.remove_resolved_content(step)

    def _runs(self) -> dict[str, list[str]]:
        """The top-level lists of expressions, or single ones, by id."""
        config = self.parser.get()
        lists = {id: content if isinstance(content, list) else [content] for id, content in config.items()}
        return {
            id: [text for text in content if isinstance(text, str) and text.startswith("$")]
            for id, content in lists.items()
            if id not in _NO_RUNS and not id.startswith("saliency_")
        }

    def _is_evaluator(self, component: dict[str, Any]) -> bool:
        kind = self._class(component)
        return isinstance(kind, type) and issubclass(kind, Evaluator)

    def _class(self, component: dict[str, Any]) -> Any:
        """The class of a component that is not made yet; None where it cannot be found."""
        name = ConfigComponent(config=component, locator=self.parser.locator).resolve_module_name()
        try:
            return pydoc.locate(name) if isinstance(name, str) else name
        except pydoc.ErrorDuringImport:
            return None

    def _no_evaluator(self, components: dict[str, dict[str, Any]]) -> str:
        problem = (
            "this bundle has no evaluator (a component that derives from monai.engines.Evaluator), so it makes no "
            "prediction of a scan that could be explained"
        )
        kinds = {id: str(component["_target_"]).rpartition(".")[2] for id, component in components.items()}
        generative = [f"{id} ({kind})" for id, kind in kinds.items() if is_generative(kind)]
        if generative:
            return (
                f"{problem}. It is generative: {', '.join(generative)} make an image from noise, and a saliency map "
                "says which part of a given image a network's answer rests on"
            )
        return f"{problem}. Name the id that holds one with --saliency_evaluator, or write its run with an evaluator"


def _components(config: Any, id: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything in a config that is made by ``_target_``, with its id."""
    if isinstance(config, dict) and "_target_" in config:
        yield id, config
    pairs = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, content in pairs:
        if id or not str(key).startswith(("saliency_", "_meta_")):
            yield from _components(content, f"{id}::{key}" if id else str(key))


def _texts(config: Any) -> Iterator[str]:
    """All texts in a config."""
    if isinstance(config, str):
        yield config
    pairs = config.values() if isinstance(config, dict) else config if isinstance(config, (list, tuple)) else ()
    for content in pairs:
        yield from _texts(content)


def _calls_of_run(text: str) -> set[str]:
    """The ids whose ``run`` an expression calls."""
    return {id.replace("#", "::") for id in re.findall(r"@((?:\w|::|#)+)\.run\(", text)}


def refuse_generative(evaluator: Any) -> None:
    """Refuse an evaluator that makes images."""
    kinds = [type(evaluator.network).__name__, type(evaluator.inferer).__name__]
    if isinstance(evaluator.inferer, DiffusionInferer) or any(map(is_generative, kinds)):
        raise ValueError(
            f"this bundle is generative: its evaluator runs {kinds[0]} with {kinds[1]}, which makes images rather than "
            "a statement about one, and a saliency map says which part of an image a statement rests on"
        )


def _is_short(value: Any) -> bool:
    """Whether a value is a single one, or a few numbers such as voxel sizes."""
    if isinstance(value, list):
        return len(value) <= 8 and all(isinstance(each, (int, float)) for each in value)
    return not isinstance(value, dict)
