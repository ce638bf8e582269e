"""A bundle by its config, whatever its ids are called: what it holds, and the run of its cohort, here or in processes
that an engine starts.
"""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from monai.bundle import ConfigComponent, ConfigParser
from monai.engines import Evaluator, SupervisedEvaluator
from monai.transforms import Compose

from monai_saliency.distributed.base import Cohort, Engine, local_device
from monai_saliency.engines.run import run
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.transforms.writers import case_writers, writer_settings
from monai_saliency.utils.arguments import a_path, did_you_mean, nearest

if TYPE_CHECKING:
    from types import FrameType

# Ids that MONAI gives a meaning, and under which no run is described.
_NO_RUNS = {"imports", "initialize", "finalize", "explain"}
# Ids of a network and of its weights, here and in the Model Zoo.
_OF_NETWORK = ("network_def", "network", "checkpoint", "ckpt_path")
# The run ids of the Model Zoo, the most usual first.
_RUN_IDS = ("run", "evaluating", "inference", "eval", "inferring", "evaluate")


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
        parser = frame.f_locals.get("self")
        if isinstance(parser, ConfigParser):
            return parser
        frame = frame.f_back
    raise RuntimeError("no bundle to explain: this is for an expression of a MONAI config, or give `parser`")


class BundleConfig:
    """A bundle as its parser, with the bundle's configs read, knows it."""

    def __init__(self, parser: ConfigParser) -> None:
        self.parser = parser

    def get(self, id: str) -> Any:
        """The value of an id, instantiated or evaluated; None if the config lacks it."""
        return self.parser.get_parsed_content(id) if id in self.parser else None

    def given(self, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
        """The values of those ids that there are, by name: the ids without the prefix."""
        # The parser itself measures how far a missing id is from each that it has, which takes milliseconds.
        return {name: self.get(f"{prefix}{name}") for name in names if f"{prefix}{name}" in self.parser.get()}

    def output_dir(self) -> Path:
        """Where the bundle writes: its ``output_dir``, or else ``<bundle_root>/eval``."""
        folder = self.get("output_dir")
        if folder not in (None, ""):
            return a_path("output_dir", folder)
        return Path(self.get("bundle_root") or ".") / "eval"

    def class_names(self, given: Any = None) -> dict[str, Any]:
        """The setting ``class_names``: as given, or else the ``channel_def`` of an output in the bundle's metadata,
        which is of the network in the bundle's own configs.
        """
        if given or not self._has_its_own_network():
            return {"class_names": given}
        outputs = self.parser.get("_meta_::network_data_format::outputs") or {}
        names = [output.get("channel_def") for output in outputs.values() if isinstance(output, dict)]
        return {"class_names": next(filter(None, names), None)}

    def _has_its_own_network(self) -> bool:
        """Whether the network and its weights are as a file in the bundle's ``configs`` defines them, so that neither a
        flag nor a further file has replaced them.
        """
        folder, config = Path(self.get("bundle_root") or ".") / "configs", self.parser.get()
        files = [path for path in sorted(folder.glob("*")) if path.suffix in (".json", ".yaml", ".yml")]
        own = [ConfigParser.load_config_file(path) for path in files]

        def text(content: Any) -> str:
            return repr(content).replace("#", "::")  # as a parser writes the ids in it

        of_network = [id for id in _OF_NETWORK if id in config]
        return all(any(text(each.get(id)) == text(config[id]) for each in own) for id in of_network)

    def unread(self) -> list[str]:
        """Top-level ids of plain values that nothing in the config refers to."""
        config = self.parser.get()
        used = {id for text in _texts(config) for id in re.findall(r"[@%](\w+)", text)}
        return [id for id in config.keys() - used if id[0] != "_" and is_plain(config[id])]

    def refuse_misspelt(self, read: Iterable[str], prefix: str = "") -> None:
        """Refuse ids that nothing reads and that look like one that is read. ``read`` are the ids that are read by
        their names, without the prefix; others are read where an ``@`` refers to them.

        Ids that begin with ``saliency_`` are ours, and are refused whatever they look like. Of another bundle (with a
        prefix) only flags of the command line are refused: what its configs hold is its own affair.
        """
        if isinstance(self.parser.get("saliency_engine"), _Taker):  # of a config that its driver has checked
            return
        named = {f"{prefix}{name}" for name in read}
        unread = {*self.unread()} - named
        known = {*self.parser.get()} - unread | named
        flags = {word.removeprefix("--").partition("=")[0] for word in sys.argv}
        for id in sorted(unread):
            if _is_ours(id):
                # The overlay checks them, where there is one.
                is_checked = prefix != "" or "saliency_overlay" not in known
            else:
                is_checked = prefix == "" or id in flags
            if is_checked:
                _refuse_misspelt_id(id, known)

    def settings(self) -> dict[str, Any]:
        """The values that users change, by id: plain values and expressions of a few numbers, without the overlay's."""
        values = {}
        for id, content in self.parser.get().items():
            if id.startswith(("saliency_", "_")) or id == "save_execute_config":
                continue
            if is_plain(content):
                values[id] = content
            elif isinstance(content, str) and _is_short(value := self.get(id)):
                values[id] = value
        return values

    def evaluator_id(self, given: str | None = None) -> str:
        """The id of the evaluator: as given, or of the one that the bundle runs, or else of the only one."""
        components = dict(_components(self.parser.get()))
        if given:
            if given not in self.parser:
                meant = did_you_mean(given, components)
                raise ValueError(f"`saliency_evaluator` must be an id of the bundle, got {given!r}{meant}")
            return given
        called = {id for steps in self._runs().values() for step in steps for id in _calls_of_run(step)}
        candidates = [id for id in components if id in called and self._is_evaluator(components[id])]
        candidates = candidates or [id for id in components if self._is_evaluator(components[id])]
        if "evaluator" in candidates:
            return "evaluator"
        if len(candidates) > 1:
            raise ValueError(
                f"this bundle has several evaluators ({', '.join(candidates)}): say which one predicts with "
                f"--saliency_evaluator {candidates[0]}"
            )
        if not candidates:
            raise ValueError(
                "this bundle has no evaluator (a component that derives from monai.engines.Evaluator), so it predicts "
                "no scan that could be explained, as generative bundles do not: name one with --saliency_evaluator"
            )
        return candidates[0]

    def run_steps(self, evaluator_id: str) -> list[str]:
        """The ids of the expressions that run the bundle's evaluator, in order; empty if the bundle names none."""
        runs = self._runs()
        calling = [id for id in runs if any(evaluator_id in _calls_of_run(step) for step in runs[id])]
        if not calling:
            return []
        usual = [id for id in _RUN_IDS if id in calling]
        return self.steps((usual or calling)[0])

    def steps(self, id: str) -> list[str]:
        """The ids of the expressions under a run's id: one, or a list of them."""
        content = self.parser.get(id, [])
        return [f"{id}::{i}" for i in range(len(content))] if isinstance(content, list) else [id]

    def names(self, step: str, id: str) -> bool:
        """Whether the expression of a step names an id."""
        return re.search(rf"@{re.escape(id)}(?!\w)", str(self.parser[step]).replace("#", "::")) is not None

    def evaluate(self, step: str) -> None:
        """Evaluate an expression of a run, as MONAI's workflow does: its value is not kept."""
        self.parser.get_parsed_content(step)
        self.parser.ref_resolver.remove_resolved_content(step)

    def carry_out(self, id: str) -> None:
        """Initialize the bundle, and evaluate the expressions under a run's id."""
        for step in [*self.steps("initialize"), *self.steps(id)]:
            self.evaluate(step)

    def _runs(self) -> dict[str, list[str]]:
        """The expressions in top-level lists, or single ones, by id."""
        runs = {}
        for id, content in self.parser.get().items():
            if id not in _NO_RUNS and not _is_ours(id):
                steps = content if isinstance(content, list) else [content]
                runs[id] = [step for step in steps if isinstance(step, str) and step.startswith("$")]
        return runs

    def _is_evaluator(self, component: dict[str, Any]) -> bool:
        """Whether a component, which is not made yet, will be an evaluator."""
        name = ConfigComponent(config=component, locator=self.parser.locator).resolve_module_name()
        try:
            kind = pydoc.locate(name) if isinstance(name, str) else name
        except pydoc.ErrorDuringImport:
            return False
        return isinstance(kind, type) and issubclass(kind, Evaluator)


def _refuse_misspelt_id(id: str, known: Collection[str]) -> None:
    """Refuse an id that nothing reads, if it is ours or looks like a known one."""
    meant = id.replace(".", "::") if id.partition(".")[0] in known else _nearest_id(id, known)
    if meant is not None:
        raise ValueError(f"nothing reads --{id}: did you mean --{meant}?")
    if _is_ours(id):
        raise ValueError(f"nothing reads --{id}: ids that begin with saliency_ are settings of this package")


def _nearest_id(id: str, known: Collection[str]) -> str | None:
    """The known id that another looks like, with or without ``saliency_``; of two, the one that is like it in this."""
    ours_alone = [other for other in known if _is_ours(other)] if _is_ours(id) else []
    alike_last = sorted(known, key=lambda other: _is_ours(other) == _is_ours(id))
    for candidates in (ours_alone, alike_last):
        by_name = {other.removeprefix("saliency_"): other for other in candidates}
        name = nearest(id.removeprefix("saliency_"), by_name)
        if name is not None:
            return by_name[name]
    return None if _is_ours(id) else nearest(id, known)


def _is_ours(id: str) -> bool:
    return id.startswith("saliency_")


def _components(config: Any, id: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything in a config that is made by ``_target_``, with its id."""
    if isinstance(config, dict) and "_target_" in config:
        yield id, config
    for key, content in _parts(config):
        if id or not str(key).startswith(("saliency_", "_meta_")):
            yield from _components(content, f"{id}::{key}" if id else str(key))


def _texts(config: Any) -> Iterator[str]:
    """All texts in a config."""
    if isinstance(config, str):
        yield config
    for _, content in _parts(config):
        yield from _texts(content)


def _parts(config: Any) -> Iterable[tuple[Any, Any]]:
    """What a part of a config holds, by keys or places; nothing in a single value."""
    if isinstance(config, dict):
        return config.items()
    return enumerate(config) if isinstance(config, (list, tuple)) else ()


def _is_short(value: Any) -> bool:
    """Whether a value is a single plain one, or a few numbers such as voxel sizes."""
    if isinstance(value, list):
        return len(value) <= 8 and all(isinstance(number, (int, float)) for number in value)
    return is_plain(value) and not isinstance(value, dict)


def _calls_of_run(text: str) -> set[str]:
    """The ids whose ``run`` an expression calls."""
    return {id.replace("#", "::") for id in re.findall(r"@((?:\w|::|#)+)\.run\(", text)}


def run_cohort(
    evaluator: SupervisedEvaluator,
    handler: SaliencyHandler,
    tracker: AbstractContextManager[Any] | None = None,
    engine: Engine | None = None,
    run_id: str = "run",
    parser: ConfigParser | None = None,
    **settings: Any,
) -> None:
    """Run an evaluator over its cohort, as :func:`~monai_saliency.engines.run.run` does."""
    recipe = None
    if engine is not None:
        recipe = partial(cohort_of, (parser or calling_parser()).get(), run_id, list(sys.path), os.getcwd())
    run(evaluator, handler, tracker, engine=engine, recipe=recipe, **settings)


def writers_of_config(output_dir: str) -> Compose:
    """The writers of each case, from the ids in the config that calls this which are settings of
    :func:`~monai_saliency.transforms.case_writers`.
    """
    bundle = BundleConfig(calling_parser())
    given = bundle.given(writer_settings())
    return case_writers(output_dir, **given | bundle.class_names(given.get("class_names")))


def best_method(prefix: str = "") -> dict[str, Any]:
    """The method that is best on the first cases of the bundle whose config calls this, with its settings: by the run
    ``compare_methods`` of a copy of the config, unless a process has found it before, in the same output folder.
    """
    here = {f"{prefix}method": None if prefix else "focused_rise", "saliency_engine": _Taker()}
    parser = ConfigParser(calling_parser().get() | here)
    bundle = BundleConfig(parser)
    choice = parser.get_parsed_content("saliency_overlay").comparison if prefix else bundle.get("comparison")
    choice.once = True
    try:
        bundle.carry_out("compare_methods")
    except SystemExit:  # such as for a scan that could not be read
        if choice.chosen is None:
            raise
    return dict(choice.chosen)


def cohort_of(config: dict[str, Any], run_id: str, path: Sequence[str], folder: str) -> Cohort:
    """The cohort of a bundle's run, made in the process that calls this, which then explains any units of it. It takes
    over the driver's path and working directory.
    """
    os.chdir(folder)
    # An empty entry means the folder that the driver was started in.
    entries = [entry or folder for entry in path]
    sys.path[:] = list(dict.fromkeys([*entries, *sys.path]))
    engine = _Taker()
    bundle = BundleConfig(ConfigParser(config | {"saliency_engine": engine}))
    try:
        bundle.carry_out(run_id)
    except SystemExit as error:
        raise RuntimeError(f"the bundle ended its run before anything could be explained: {error}") from None
    if engine.cohort is None:
        raise RuntimeError(f"{run_id!r} never called `saliency_engine`: it must be an id that explains the cohort")
    return engine.cohort


class _Taker(Engine):
    """Takes the cohort, and has nothing explained."""

    speaks = False

    def __init__(self) -> None:
        self.cohort: Cohort | None = None
        self.device = local_device()

    def run(self, cohort: Cohort) -> None:
        self.cohort = cohort
