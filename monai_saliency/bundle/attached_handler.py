"""The handler that explains the batches of any evaluator, by what its inferer is given and gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from monai.data import MetaTensor, decollate_batch
from monai.transforms import Compose
from monai.utils import CommonKeys

from monai_saliency.bundle.attach_settings import NETWORK_INPUT, REGIONS, AttachSettings
from monai_saliency.bundle.placement import Placement, input_file
from monai_saliency.bundle.replay import Call, Recorder, Replay, own_inferer
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.fills.named import AutoFill, fill_in_unit
from monai_saliency.handlers.saliency_handler import Batch, SaliencyHandler, predictions_of
from monai_saliency.handlers.summary import Summary, warn_of_others
from monai_saliency.inferers.fill_choice import choose_fill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.inputs import ListInput, TensorInput
from monai_saliency.networks.outputs import rows
from monai_saliency.storage.label_maps import label_problem
from monai_saliency.storage.tables import Failures
from monai_saliency.targets.auto import AutoTarget, finds_nothing
from monai_saliency.transforms.save import error_key
from monai_saliency.utils.arguments import require
from monai_saliency.utils.tensors import plain
from monai_saliency.visualize.report import try_report

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["AttachedHandler"]

Events = require("ignite.engine", extra="bundle").Events
logger = logging.getLogger(__name__)


class AttachedHandler(SaliencyHandler):
    """Explains the batches of any evaluator, by what its inferer is given and gives."""

    def __init__(self, settings: AttachSettings, words: str, evaluator: Any, postprocessing: Any, folder: Path) -> None:
        super().__init__(
            settings.inferer(evaluator, postprocessing),
            settings.network(evaluator.network),
            Compose([self._place, settings.writers(folder)]),
            summary=Summary(folder / "summary.csv"),
            failures=Failures(folder / "failures.csv", settings.strict, shared=settings.engine is not None),
            store=settings.store(folder),
            network_id=settings.network_id,
            saliency_key=settings.key,
            label_key=None if settings.label_key is None else REGIONS,
            standard_error_key=error_key(settings.key) if settings.standard_error else None,
            trust=settings.measures,
        )
        self.settings = settings
        self.words = words
        self.folder = folder
        self.is_started = False
        self._placement: Placement
        self._names: list[str] | None = None
        self._explains = self.inferer
        self._postprocessing_read = postprocessing
        self._own = own_inferer(evaluator)
        self._recorder = Recorder(evaluator.inferer)
        evaluator.inferer = self._recorder
        # Our own bundle lists cases that cannot be loaded.
        found = getattr(evaluator, "failures", None)
        self._own_failures = found if isinstance(found, Failures) else None
        if self._own_failures is not None:
            self._own_failures.withdraw_by(self.withdraw)

    def attach(self, engine: Engine) -> None:
        """Register with an evaluator."""
        super().attach(engine)
        # An iteration that came to no end has left its call.
        engine.add_event_handler(Events.ITERATION_STARTED, lambda _: self._recorder.calls.clear())

    def report_unmet(self) -> None:
        """Report cases that were listed but not met."""
        lists = [each.rows for each in (self.failures, self._own_failures) if each is not None]
        ended = {*self.explained, *self.explainer.waiting, *(row["case"] for rows in lists for row in rows)}
        if unmet := [name for name in self._names or [] if name not in ended]:
            logger.warning(
                "%s has not met %d of the cases that its loader's dataset lists (the first is %s): they have no map, "
                "since the loader leaves them out, or ended before, as MONAI's ThreadDataLoader does at a broken scan",
                self.words,
                len(unmet),
                unmet[0],
            )

    def report_at_end(self, engine: Engine) -> None:
        """Report unmet cases at the end of the evaluator's run, log how many cases have no map, and make the report."""

        def report(engine: Engine) -> None:
            self.report_unmet()
            failed = self.failures is not None and self.failures.rows
            if self.failures is not None and failed:
                logger.error("%s", self.failures.summary(failed))
            if self.settings.report and (self.explained or failed):
                try_report(self.folder)

        engine.add_event_handler(Events.COMPLETED, report)

    @property
    def whole_inferer(self) -> PerturbationInferer:
        """The inferer with its fill, and with the bundle's own inner inferer."""
        return self._explains.replace(inferer=self._own)

    def label_of(self, item: dict[Any, Any]) -> Callable[[], torch.Tensor] | None:
        """Reads the case's label map on the image's grid; None without one, or if a step may have moved it."""
        return None if self._placement.problem else super().label_of(item)

    def batches(self, engine: Engine) -> Iterator[Batch]:
        """The images of one iteration, in the groups that can be explained together."""
        call = self._recorder.take()
        images = call.images
        items = _items_of(engine.state.batch, len(images))
        if not self.is_started:
            self._start(engine, items, images, call)
        batch = self.explainer.assignment.place(engine.state.iteration - 1)
        places = [f"{batch}-{i}" if len(items) > 1 else str(batch) for i in range(len(items))]
        cases = [self._case(*each) for each in zip(items, call.inputs, places, strict=True)]
        changed = getattr(engine, "output_changed", False)
        predictions = (None if changed else predictions_of(call.output, len(images))) or [None] * len(images)
        groups = ([i for i in group if self._has_place(cases[i])] for group in call.groups())
        for group in filter(None, groups):
            # If a detector finds no box, the surest of those below its threshold is explained.
            unsure = call.is_list and finds_nothing(_predicted(engine, call)[group[0]])
            inputs = self.settings.inputs or (ListInput() if call.is_list else TensorInput())
            held, own = call.of(group).taken([*(self.settings.numbers or ())])
            changes: dict[str, Any] = {"inputs": inputs, "inferer": Replay.of(self._own, own, unsure)}
            # The cases have their own files and voxel sizes, and a stack would have the first one's.
            alone = len(group) == 1
            together = torch.stack([images[i] if alone else plain(images[i]) for i in group])
            # A detector without its threshold gives more boxes than it predicted.
            predicted = [None if unsure else predictions[i] for i in group]
            yield Batch(together, [cases[i] for i in group], self._explains.replace(**changes), predicted, held)

    def _start(self, engine: Any, items: list[dict[Any, Any]], images: Sequence[torch.Tensor], call: Call) -> None:
        """Find the images among what the loader gives, and print what will be explained of the first."""
        item, image, settings = items[0], images[0], self.settings
        key = self._image_key(items, images)
        self.image_key = NETWORK_INPUT if key is None else key
        # The same target, which chooses once for the cohort.
        chosen = settings.inferer(engine, self._postprocessing_read, image).replace(target=self.inferer.target)
        self._placement = placement = Placement(
            engine.data_loader if key is not None else None,
            self.image_key,
            self.saliency_key,
            chosen.masks.by_region,
            settings.keeps_place,
            f"{settings.prefix}keeps_place",
        )
        self._names = names = None if key is None else placement.all_names(item)
        if names is not None and self.failures is not None and self.summary is not None:
            self.failures.keep(names)
            warn_of_others(self.summary, names)
        fill = fill_in_unit(
            settings.fill, settings.fill_unit, placement.transform, self.image_key, f"{settings.prefix}fill"
        )
        self._explains = chosen.replace(fill=fill)
        if isinstance(fill, AutoFill):
            self._explains = chosen.replace(fill=self._chosen_fill(call, key is not None))
        self.is_started = self._is_opened = True
        found = "the network's input is not an entry of the batch" if key is None else f"image {key!r}"
        print(
            f"monai_saliency: {self.words} ({type(engine).__name__}) runs {type(engine.network).__name__} by "
            f"{type(self._own).__name__} on {found} {tuple(image.shape)}; "
            f"{self._words(_predicted(engine, call), len(images), image)}, by "
            f"{settings.choice.choose(self._own, image).name}, hidden by {getattr(fill, '__name__', fill)}; maps go to "
            f"{self.folder}",
            flush=True,
        )

    def _chosen_fill(self, call: Call, is_known: bool) -> Any:
        """The fill of the cohort. Where its first cases cannot be run without the evaluator, since the network's input
        is not known or it takes further inputs, the first candidate.
        """
        inputs = ListInput() if call.is_list else TensorInput()
        inferer = self._explains.replace(inputs=inputs, inferer=Replay.of(self._own, call.of([0])))
        alone = is_known and not (call.args or call.kwargs)
        cases = self.first_cases(call.images[0], self.settings.label_key) if alone else ()
        return choose_fill(inferer, self.explainer.network, cases).fill

    def _image_key(self, items: list[dict[Any, Any]], images: Sequence[torch.Tensor]) -> Any:
        """The key of the network's input; None if no entry of the batch is it."""
        item, key = items[0], self.settings.image_key
        if key is not None and key not in item:
            raise ValueError(f"the batch has no key {key!r}: --saliency_image_key must be one of {_keys_of(item)}")
        if self.saliency_key != "saliency" and self.saliency_key in item:
            raise ValueError(
                f"`saliency_key` {self.saliency_key!r} is a key of the batch, and names the map: choose another one "
                "(--saliency_image_key names the network's input)"
            )
        return _input_key(items, images, self.settings.label_key) if key is None else key

    def _words(self, output: Any, count: int, image: torch.Tensor) -> str:
        """What is explained of the first image, from the output that the evaluator has just computed for it."""
        target = self.inferer.target
        if not isinstance(target, AutoTarget):
            return type(target).__name__
        try:
            return target.choose(rows(output, 0, 1, count), Case("the first case", image)).words
        except ValueError as error:  # raised again, with the case's name, when it is explained
            return f"the first case cannot be explained ({error})"

    def _case(self, item: dict[Any, Any], image: Any, place: str) -> dict[Any, Any]:
        value = item.get(self.image_key, image)
        item[self.image_key] = value if isinstance(value, MetaTensor) else MetaTensor(value)
        item["case"] = self._placement.name(item, place)
        if (label_key := self.settings.label_key) is not None:
            if not isinstance(item.get(label_key), torch.Tensor):
                raise ValueError(
                    f"the batch has no label map under `saliency_label_key` {label_key!r}, but {_keys_of(item)}"
                )
            item[REGIONS] = item[label_key]
        # The summary reads a label from its file.
        label = input_file(item.get(CommonKeys.LABEL))
        if self.image_key != CommonKeys.LABEL:
            item["label"] = str(label) if label is not None and label.name.endswith((".nii", ".nii.gz")) else ""
        return item

    def _has_place(self, case: dict[Any, Any]) -> bool:
        """Whether a case's map can lie on its scan; the case fails if it cannot. One that was met has no name."""
        if not case["case"]:
            return False
        as_dicom = any(self.settings.others.get(name) for name in ("dicom", "dicom_seg"))
        problem = self._placement.problem_of(case, as_dicom)
        if problem is None and REGIONS in case and (wrong := label_problem(case[REGIONS], case[self.image_key])):
            problem = f"its label map {input_file(case[REGIONS])} cannot be used: {wrong}"
        if problem:
            self.explainer.refuse(case["case"], CaseError(case["case"], problem))
        return not problem

    def _place(self, case: dict[Any, Any]) -> dict[Any, Any]:
        explanation = case["explanation"]
        scores, before = explanation.scores, explanation.reference_scores
        # One region or channel may be the whole image.
        compared = torch.cat([scores, before[None]]) if len(scores) == 1 else scores
        if bool((compared == compared[0]).all()):
            labels = ", ".join(map(str, explanation.target.labels))
            raise CaseError(
                explanation.name,
                f"all {len(scores)} perturbed images changed the score by the same amount ({labels}: "
                f"{before.tolist()} unperturbed, {scores[0].tolist()} perturbed), so the map would be constant: the "
                "network does not look at the image, its probability is saturated, or what is found is lost whatever "
                "is hidden; try --saliency_activation none, another --saliency_fill, or to hide more or less",
            )
        return self._placement({**case, NETWORK_INPUT: case[self.image_key]})


def _predicted(engine: Any, call: Call) -> Any:
    """An evaluator's prediction for a batch; its inferer's output, if the batch was split into images."""
    output = engine.state.output
    return output[CommonKeys.PRED] if isinstance(output, Mapping) and CommonKeys.PRED in output else call.output


def _keys_of(item: Mapping[Any, Any]) -> list[str]:
    """The keys of a case in words, for messages."""
    return sorted(map(str, item))


def _items_of(batch: Any, count: int) -> list[dict[Any, Any]]:
    """A batch's cases as separate dictionaries; by position if the batch is not a dictionary."""
    if isinstance(batch, (list, tuple)) and len(batch) == count and all(isinstance(item, dict) for item in batch):
        return [dict(item) for item in batch]
    items = decollate_batch(batch)
    if len(items) != count and isinstance(batch, Mapping):
        items = _by_key(batch, count) or items
    if len(items) != count:
        raise ValueError(f"a batch of {len(items)} cases gave the network {count} images, so which is whose is unknown")
    return [
        dict(item) if isinstance(item, dict) else dict(enumerate(item if isinstance(item, (list, tuple)) else [item]))
        for item in items
    ]


def _by_key(batch: Mapping[Any, Any], count: int) -> list[dict[Any, Any]]:
    """The cases of a batch with entries of another length, such as lists of clicks, which each case gets whole; empty
    if no tensor of the batch has one entry for each image.
    """
    parts = {key: decollate_batch(value) for key, value in batch.items()}
    fits = {key: isinstance(part, (list, tuple)) and len(part) == count for key, part in parts.items()}
    if not any(fits[key] and isinstance(batch[key], torch.Tensor) for key in batch):
        return []
    return [{key: parts[key][i] if fits[key] else batch[key] for key in batch} for i in range(count)]


def _input_key(items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor], label_key: Any) -> Any:
    """The key under which the cases hold what their network got; None if there is none."""
    for channels in range(len(images[0]), 0, -1):
        parts = [image[:channels] for image in images]
        keys = [key for key in items[0] if key != label_key and _holds(key, items, parts)]
        if len(keys) > 1 and CommonKeys.IMAGE not in keys:
            raise ValueError(
                f"the batch's entries {', '.join(map(repr, keys))} are all equal to the network's input, as an empty "
                "scan and its mask are, so which of them it got is unknown: name it by --saliency_image_key"
            )
        if keys:
            return next((key for key in keys if key == CommonKeys.IMAGE), keys[0])
    return None


def _holds(key: Any, items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor]) -> bool:
    return all(_is_input(item.get(key), image) for item, image in zip(items, images, strict=True))


def _is_input(value: Any, image: torch.Tensor) -> bool:
    """Whether an entry of a case holds the voxels ``(C, *spatial)`` that its network got."""
    if not isinstance(value, torch.Tensor) or value.shape != image.shape:
        return False
    return torch.equal(plain(value).to(image).nan_to_num(), image.nan_to_num())
