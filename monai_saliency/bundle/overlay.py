"""Explaining somebody else's bundle: the code behind ``configs/explain.yaml``.

The bundle's own run is carried out, step by step, and just before the step that first names its evaluator a handler is
attached to that. So whatever the bundle does before, such as loading a checkpoint, is done, and its predictions and
outputs stay what they were.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from monai.transforms import Compose
from monai.utils import CommonKeys

from monai_saliency.bundle.batches import goes_through_all, is_input, items_of, keys_of
from monai_saliency.bundle.chosen_method import ChosenMethod, given_settings
from monai_saliency.bundle.config import BundleConfig, calling_parser, refuse_generative
from monai_saliency.bundle.placement import Placement, input_file
from monai_saliency.bundle.replay import Recorder, Replay, own_inferer, randomness_untouched
from monai_saliency.bundle.run import run as run_cohort
from monai_saliency.cases import Case, image_spacing
from monai_saliency.distributed.base import Engine as SharingEngine
from monai_saliency.errors import CaseError, repeat_cause_last
from monai_saliency.fills.unit import fill_in_unit
from monai_saliency.handlers.made_by import warn_of_others
from monai_saliency.handlers.saliency_handler import Batch, SaliencyHandler, predictions_of
from monai_saliency.handlers.summary import Summary
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.inputs import ListInput, TensorInput
from monai_saliency.networks.outputs import rows
from monai_saliency.storage.failures import Failures
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.targets import Target
from monai_saliency.targets.auto import AutoTarget, finds_nothing, read_postprocessing
from monai_saliency.transforms import SaveSaliencyd
from monai_saliency.utils.monai_private import event_handlers

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["Overlay", "OverlayHandler"]

logger = logging.getLogger(__name__)

# Where a case's label map is kept, since its own key comes to hold the label's file.
_REGIONS = "saliency_regions"
# Values in one batch of perturbed images, 64 MB in float32.
_BATCH_VALUES = 2**24


class Overlay:
    """Explains the bundle in whose config it stands. Its settings are the ids of ``configs/explain.yaml``.

    Example::

        parser = ConfigParser(...)  # with the configs of a bundle
        Overlay("maps", method="sliding_window", window_size=32).explain(parser)

    Args:
        dir: the folder for maps, pictures, ``summary.csv``, ``failures.csv`` and scores; ``saliency`` below the
            bundle's own output folder by default.
        evaluator: the id of the evaluator; found by its class by default.
        image_key: the key of a batch that holds the network's input; found by its values by default.
        key: the key of the map, and the ending of its files' names; ``saliency`` by default.
        label_key: the key of a batch that holds label maps, for regions and targets that are made of them.
        target: ``"auto"`` (:class:`~monai_saliency.targets.auto.AutoTarget`) or a target.
        output: the part of the network's output that is explained.
        classes: of the automatic target.
        activation: of the automatic target.
        method: the name of a function of :mod:`monai_saliency.methods`, or the dotted path of your own function.
        fill: what hides a voxel: a number, or a fill.
        fill_unit: of a number: ``"network"`` for the network's input space, ``"scan"`` for the file's own.
        mask_batch_size: perturbed images in one batch; at most 16 by default, fewer where images are large.
        picture: whether to draw pictures.
        strict: raise the first failure instead of listing it.
        store_dir: the folder for scores, so that a stopped run resumes; ``scores`` in ``dir`` by default, none where
            empty.
        network_id: a name for the network in the store, needed where it is not a module.
        engine: shares the cohort with other processes (:mod:`monai_saliency.distributed`).
        settings: the method's own settings, by default the method's own defaults, and 100 supervoxels for
            ``region_occlusion`` without ``label_key``.

    Raises:
        ValueError: when a setting is wrong.
    """

    def __init__(
        self,
        dir: str | Path | None = None,
        evaluator: str | None = None,
        image_key: str | None = None,
        key: str | None = None,
        label_key: str | None = None,
        target: Target | str = "auto",
        output: str | int | Sequence[str | int] | None = None,
        classes: Sequence[int] | str = "predicted",
        activation: str | None = None,
        method: str | Callable[..., PerturbationInferer] = "rise",
        fill: float | Callable[[torch.Tensor], torch.Tensor] = 0.0,
        fill_unit: str = "network",
        mask_batch_size: int | None = None,
        picture: bool = True,
        strict: bool = False,
        store_dir: str | Path | None = None,
        network_id: str | None = None,
        engine: SharingEngine | None = None,
        **settings: Any,
    ) -> None:
        repeat_cause_last()
        if isinstance(target, str) and target != "auto":
            raise ValueError(f"`saliency_target` must be 'auto' or a target, got {target!r}")
        # The scan's own unit needs the preprocessing, which is known at the first case.
        fill_in_unit(fill, fill_unit, Compose(), id="saliency_fill")
        made = label_key is None and settings.get("regions") is None
        self.method = ChosenMethod(method, settings, {"num_supervoxels": 100} if made else {}, prefix="saliency_")
        self.dir = None if dir is None else Path(dir)
        self.evaluator = evaluator
        self.image_key = image_key
        self.key = key or "saliency"
        self.label_key = label_key
        self.target = target
        self.output = output
        self.classes = classes
        self.activation = activation
        self.fill = fill
        self.fill_unit = fill_unit
        self.mask_batch_size = mask_batch_size
        self.picture = picture
        self.strict = strict
        self.store_dir = store_dir
        self.network_id = network_id
        self.engine = engine

    @classmethod
    def from_config(cls) -> Overlay:
        """The overlay with the settings of the config in which this is called: its ids that begin with ``saliency_``.

        The settings of a method need not be listed in a config file.
        """
        bundle = BundleConfig(calling_parser())
        ids = {name: f"saliency_{name}" for name in inspect.signature(cls).parameters}
        own = {name: bundle.get(id) for name, id in ids.items() if id in bundle.parser}
        return cls(**given_settings(own.get("method", "rise"), "saliency_") | own)

    def explain(self, parser: ConfigParser | None = None) -> None:
        """Run the bundle and explain what it predicts.

        Args:
            parser: the bundle's parser; by default the one in whose expression this is called.

        Raises:
            ValueError: when the bundle cannot be explained, with the reason.
            SystemExit: with one line that sums up the failures, where there are any.
        """
        bundle = BundleConfig(parser if parser is not None else calling_parser())
        evaluator_id = self.evaluator or bundle.evaluator_id()
        steps = bundle.run_steps(evaluator_id)
        names = [bundle.names(step, evaluator_id) for step in steps]
        first = names.index(True) if steps else 0
        for step in steps[:first]:
            bundle.evaluate(step)
        evaluator = bundle.evaluator(evaluator_id)
        refuse_generative(evaluator)
        _detach_others(evaluator)
        folder = self.dir if self.dir is not None else bundle.output_dir() / "saliency"
        postprocessing = bundle.get(f"{evaluator_id}::postprocessing")
        handler = OverlayHandler(self, evaluator_id, evaluator, postprocessing, folder)
        handler.attach(evaluator)

        def start() -> None:
            try:
                for step in steps[first:]:
                    bundle.evaluate(step)
            except Exception:
                logger.error(
                    "the run ended after %s explained cases, at the one after %r: where the bundle's own loader or "
                    "network fails on a case, it does so without this overlay too",
                    handler.num_cases,
                    handler.last_case,
                )
                raise
            if not steps:
                evaluator.run()
            if self.engine is None and getattr(evaluator, "failures", None) is None:  # our own bundle loses none
                handler.report_unmet()
            if not handler.num_cases and self.engine is None:
                raise ValueError(
                    f"{evaluator_id} met no case, so nothing was explained: check the bundle's data settings, such as "
                    "--dataset_dir"
                )

        run_cohort(
            evaluator,
            handler.failures,
            start=start,
            handler=handler,
            engine=self.engine,
            run_id="explain",
            parser=bundle.parser,
        )
        # Our own bundle lists cases that fail before they can be explained.
        failures = getattr(evaluator, "failures", None)
        if isinstance(failures, Failures) and failures.rows and self.engine is None:
            sys.exit(f"error: {failures.summary(failures.rows)}")

    def inferer(self, evaluator: Any, postprocessing: Any) -> PerturbationInferer:
        """Explains what an evaluator predicts, but for what is known only at its first case: the fill in the scan's own
        unit, and how its inferer is called.
        """
        target, output = self.target, self.output
        if isinstance(target, str):
            target = AutoTarget(read_postprocessing(postprocessing), self.classes, self.activation, self.output)
            output = None
        return self.method(
            target=target,
            fill=fill_in_unit(self.fill) if self.fill_unit == "network" else None,
            inferer=own_inferer(evaluator),
            mask_batch_size=self.mask_batch_size or 1,
            progress=True,
            output=output,
            meter=getattr(evaluator, "meter", None),
            autocast=dict(evaluator.amp_kwargs) if evaluator.amp else None,
        )

    def store(self, folder: Path) -> ScoreStore | None:
        """The scores that are kept, for maps in a folder."""
        if self.store_dir is None:
            return ScoreStore(folder / "scores")
        return ScoreStore(self.store_dir) if str(self.store_dir) else None


def _detach_others(evaluator: Any) -> None:
    """Leave out handlers that explain already, as our own bundle has one."""
    for event, function in event_handlers(evaluator):
        if isinstance(getattr(function, "__self__", function), SaliencyHandler):
            evaluator.remove_event_handler(function, event)


class OverlayHandler(SaliencyHandler):
    """Explains the batches of any evaluator, by what its inferer is given and gives.

    Args:
        overlay: the settings.
        evaluator_id: the evaluator's id.
        evaluator: the evaluator. Its inferer is replaced by one that also records its calls.
        postprocessing: what the bundle does with its predictions.
        folder: the folder for maps and tables.

    Attributes:
        num_cases: how many cases were met.
        last_case: the name of the last one.
    """

    def __init__(self, overlay: Overlay, evaluator_id: str, evaluator: Any, postprocessing: Any, folder: Path) -> None:
        super().__init__(
            overlay.inferer(evaluator, postprocessing),
            evaluator.network,
            self._place,
            summary=Summary(folder / "summary.csv"),
            failures=Failures(folder / "failures.csv", overlay.strict, shared=overlay.engine is not None),
            store=overlay.store(folder),
            network_id=overlay.network_id,
            saliency_key=overlay.key,
            label_key=None if overlay.label_key is None else _REGIONS,
        )
        self.overlay = overlay
        self.evaluator_id = evaluator_id
        self.folder = folder
        self.num_cases = 0
        self.last_case = "none"
        self._placement: Placement | None = None
        self._names: list[str] | None = None
        self._epoch_length: int | None = None
        self._explains = self.inferer
        self._own = own_inferer(evaluator)
        self._recorder = Recorder(evaluator.inferer)
        evaluator.inferer = self._recorder
        # Our own bundle lists cases that cannot be loaded.
        if isinstance(failures := getattr(evaluator, "failures", None), Failures):
            failures.withdraw_by(self.withdraw)

    def report_unmet(self) -> None:
        """Report cases that were listed but not met: MONAI's ``ThreadDataLoader`` ends silently at a broken scan.

        They are failures, unless the run was asked for fewer.
        """
        failed = [] if self.failures is None else [row["case"] for row in self.failures.rows]
        ended = {*self.explained, *self.explainer.waiting, *failed}
        unmet = [name for name in self._names or [] if name not in ended]
        words = "the loader ended before it, as MONAI's ThreadDataLoader does at a scan that cannot be read"
        for name in unmet if goes_through_all(self._loader, self._epoch_length) else []:
            self.failures.add(name, "load", CaseError(name, f"{words}: it has no map"))  # type: ignore[union-attr]
        if unmet:
            words = "%s has not met %d of the cases that its loader's dataset lists (the first is %s)"
            logger.warning(f"{words}: they have no map", self.evaluator_id, len(unmet), unmet[0])

    @property
    def whole_inferer(self) -> PerturbationInferer:
        """The inferer with its fill, and with the bundle's own inner inferer."""
        return self._explains.replace(inferer=self._own)

    def withdraw(self, case: str) -> None:
        """Remove the row, map and picture of a case that has failed now."""
        super().withdraw(case)
        SaveSaliencyd(self.saliency_key, self.folder).withdraw(case)

    def __call__(self, engine: Engine) -> None:
        with randomness_untouched():
            super().__call__(engine)

    def batches(self, engine: Engine) -> Iterator[Batch]:
        """The images of one iteration, in the groups that can be explained together."""
        call = self._recorder.take()
        images, self._epoch_length = call.images, engine.state.epoch_length
        items = items_of(engine.state.batch, len(images))
        if self._placement is None:
            self._start(engine, items[0], images[0])
        batch = self.explainer.assignment.place(engine.state.iteration - 1)
        places = [f"{batch}-{i}" if len(items) > 1 else str(batch) for i in range(len(items))]
        cases = [self._case(*each) for each in zip(items, call.inputs, places, strict=True)]
        changed = getattr(engine, "output_changed", False)
        predictions = (None if changed else predictions_of(call.output, len(images))) or [None] * len(images)
        for group in filter(None, ([i for i in group if self._has_place(cases[i])] for group in call.groups())):
            # Where a detector finds no box, the surest of those below its threshold is explained.
            unsure = call.is_list and finds_nothing(engine.state.output[CommonKeys.PRED][group[0]])  # type: ignore[index]
            changes: dict[str, Any] = {"inputs": ListInput() if call.is_list else TensorInput()}
            changes["inferer"] = Replay.of(
                self._own, call.of(group), unsure, whole_images=self.inferer.autocast is not None
            )
            if self.overlay.mask_batch_size is None:
                changes["mask_batch_size"] = max(1, min(16, _BATCH_VALUES // images[group[0]].numel()))
            self.num_cases += len(group)
            self.last_case = str(cases[group[-1]]["case"])
            together = torch.stack([images[i] for i in group])
            # A detector without its threshold gives more boxes than it predicted.
            predicted = [None if unsure else predictions[i] for i in group]
            yield Batch(together, [cases[i] for i in group], self._explains.replace(**changes), predicted)

    def _start(self, engine: Any, item: dict[Any, Any], image: torch.Tensor) -> None:
        """Find the image among what the loader gives, and print what will be explained."""
        key = self.overlay.image_key
        if key is not None and key not in item:
            raise ValueError(f"the batch has no key {key!r}: --saliency_image_key must be one of {keys_of(item)}")
        if self.saliency_key != "saliency" and self.saliency_key in item:
            raise ValueError(
                f"`saliency_key` {self.saliency_key!r} is a key of the batch, and names the map: choose another one "
                "(--saliency_image_key names the network's input)"
            )
        if key is None:
            key = next((name for name, value in item.items() if is_input(value, image)), None)
        self.image_key = "network_input" if key is None else key
        self._placement = placement = Placement(
            self.folder,
            engine.data_loader if key is not None else None,
            self.image_key,
            self.saliency_key,
            self.overlay.picture,
            nearest=self.inferer.masks.by_region,
        )
        self._names = names = None if key is None else placement.names(item)
        if names is not None and self.failures is not None and self.summary is not None:
            self.failures.keep(names)
            warn_of_others(self.summary, names)
        fill = fill_in_unit(
            self.overlay.fill, self.overlay.fill_unit, placement.transform, self.image_key, "saliency_fill"
        )
        self._explains = self._explains.replace(fill=fill)
        found = "the network's input is no entry of the batch" if key is None else f"image {key!r}"
        print(
            f"monai_saliency: {self.evaluator_id} ({type(engine).__name__}) runs {type(engine.network).__name__} by "
            f"{type(self._own).__name__} on {found} {tuple(image.shape)}; "
            f"{self._words(engine, item, image)}; maps go to {self.folder}",
            flush=True,
        )

    def _words(self, engine: Any, item: dict[Any, Any], image: torch.Tensor) -> str:
        """What is explained of the first image, from the output that the evaluator has just computed for it."""
        label_key, target = self.overlay.label_key, self.inferer.target
        try:
            labels = None if label_key is None else item.get(label_key)
            spacing = image_spacing(item[self.image_key][None]) if self.image_key in item else None
            forwards = len(self.inferer.masks.bind(image, labels, spacing)) + 1
            words = type(target).__name__
            if isinstance(target, AutoTarget):
                output, count = engine.state.output[CommonKeys.PRED], len(engine.state.output[CommonKeys.IMAGE])
                words = target.choose(rows(output, 0, 1, count), Case("the first case", image)).words
        except ValueError as error:  # raised again, with the case's name, when it is explained
            return f"the first case cannot be explained ({error})"
        return f"{words}; {self.overlay.method.name}, {forwards} forwards a case"

    def _case(self, item: dict[Any, Any], image: Any, place: str) -> dict[Any, Any]:
        assert self._placement is not None
        value = item.get(self.image_key, image)
        item[self.image_key] = value if isinstance(value, MetaTensor) else MetaTensor(value)
        item["case"] = self._placement.name(item, place)
        if self.overlay.label_key is not None:
            if not isinstance(item.get(self.overlay.label_key), torch.Tensor):
                raise ValueError(
                    f"the batch has no label map under `saliency_label_key` {self.overlay.label_key!r}, but "
                    f"{keys_of(item)}"
                )
            item[_REGIONS] = item[self.overlay.label_key]
        # The summary reads a label from its file.
        label = input_file(item.get(CommonKeys.LABEL))
        item["label"] = str(label) if label is not None and label.name.endswith((".nii", ".nii.gz")) else ""
        return item

    def _has_place(self, case: dict[Any, Any]) -> bool:
        """Whether a case's map can lie on its scan. The case fails where it cannot, and is left out if it was met."""
        assert self._placement is not None
        if self._placement.is_again(case):
            return False
        if problem := self._placement.problem(case):
            self.explainer.refuse(CaseError(case["case"], problem))
        return not problem

    def _place(self, case: dict[Any, Any]) -> dict[Any, Any]:
        assert self._placement is not None
        explanation = case["explanation"]
        scores = explanation.scores
        if len(scores) == 1:  # one region or channel, which is the whole image
            scores = torch.cat([scores, explanation.reference_scores[None]])
        span = scores.amax(dim=0) - scores.amin(dim=0)
        flat = [label for label, width in zip(explanation.target.labels, span.tolist(), strict=True) if width == 0]
        if len(flat) == len(span):
            raise CaseError(
                explanation.name,
                f"none of {len(explanation.scores)} perturbed images changed what is explained ("
                f"{', '.join(map(str, flat))}, {explanation.reference_scores.tolist()}), so the map would be constant: "
                "the network does not look at the image, or its probability is saturated; try "
                "--saliency_activation none, another --saliency_fill or larger windows",
            )
        if flat:
            logger.warning(
                "case %s: no perturbed image changed the score of %s, so their maps are constant",
                explanation.name,
                ", ".join(map(str, flat)),
            )
        return self._placement(case)
