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
from monai_saliency.handlers.run_settings import warn_of_others
from monai_saliency.handlers.saliency_handler import Batch, Item, SaliencyHandler, predictions_of
from monai_saliency.inferers.fill_choice import choose_fill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.inputs import ListInput, TensorInput
from monai_saliency.networks.outputs import read, rows
from monai_saliency.networks.runtime import accelerated
from monai_saliency.storage.files import error_key
from monai_saliency.storage.label_maps import label_problem
from monai_saliency.storage.tables import CaseTable, Failures
from monai_saliency.targets.auto import AutoTarget, finds_nothing
from monai_saliency.utils.arguments import require
from monai_saliency.utils.tensors import plain
from monai_saliency.visualize.report import try_report

if TYPE_CHECKING:
    from ignite.engine import Engine

Events = require("ignite.engine", extra="bundle").Events
logger = logging.getLogger(__name__)


class AttachedHandler(SaliencyHandler):
    """Explains the batches of any evaluator, by what its inferer is given and gives."""

    def __init__(self, settings: AttachSettings, words: str, evaluator: Any, postprocessing: Any, folder: Path) -> None:
        super().__init__(
            settings.inferer(evaluator, postprocessing),
            accelerated(evaluator.network, **settings.runtime),
            Compose([self._place, settings.writers(folder)]),
            summary=CaseTable(folder / "summary.csv"),
            failures=Failures(folder / "failures.csv", settings.strict, shared=settings.engine is not None),
            store=settings.store(folder),
            network_id=settings.network_id,
            saliency_key=settings.key,
            label_key=None if settings.label_key is None else REGIONS,
            within_key=None if settings.within_key is None else f"saliency_within_{settings.within_key}",
            standard_error_key=error_key(settings.key) if settings.standard_error else None,
            trust=settings.measures,
            method=settings.chosen.name,
        )
        self.settings = settings
        self.words = words
        self.folder = folder
        self.is_started = False
        self._placement: Placement
        self._names: list[str] = []
        self._own = own_inferer(evaluator)
        self._recorder = Recorder(evaluator.inferer)
        evaluator.inferer = self._recorder

    def attach(self, engine: Engine) -> None:
        """Register with an evaluator."""
        super().attach(engine)
        # An iteration that came to no end has left its call.
        engine.add_event_handler(Events.ITERATION_STARTED, lambda _: self._recorder.calls.clear())

    def report_unmet(self) -> None:
        """Report cases that were listed but not met."""
        failed = [row["case"] for row in [*self.failures.rows, *self.failures.nothing]]
        ended = {*self.explained, *self.explainer.waiting, *failed}
        unmet = [name for name in self._names if name not in ended]
        if unmet:
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
            failed = self.failures.rows
            if failed:
                logger.error("%s", self.failures.summary(failed))
            if self.failures.nothing:
                logger.warning("%s", self.failures.nothing_summary())
            if self.settings.report and (self.explained or failed or self.failures.nothing):
                try_report(self.folder)

        engine.add_event_handler(Events.COMPLETED, report)

    def label_of(self, item: Item) -> Callable[[], torch.Tensor] | None:
        """Reads the case's label map on the image's grid; None without one, or if a step may have moved it."""
        return None if self._placement.problem else super().label_of(item)

    def batches(self, engine: Engine) -> Iterator[Batch]:
        """The images of one iteration, in the groups that can be explained together."""
        call = self._recorder.take()
        images = call.images
        items = _items_of(engine.state.batch, len(images))
        if not self.is_started:
            self._start(engine, items, images, call)
            if self.is_compared(engine, self._replaying(call, [0])[0], images[0]):
                return
        place = str(self.explainer.assignment.place(engine.state.iteration - 1))
        cases = []
        for i, (item, image) in enumerate(zip(items, call.inputs, strict=True)):
            cases.append(self._case(item, image, f"{place}-{i}" if len(items) > 1 else place))
        predictions = predictions_of(call.output, len(images))
        for group in call.groups():
            placed = [i for i in group if self._has_place(cases[i])]
            if not placed:
                continue
            stacked = torch.stack([images[i] for i in placed])
            # If a detector finds no box, the surest of those below its threshold is explained, among more boxes than it
            # predicted.
            is_unsure = call.is_list and finds_nothing(_predicted(engine, call)[placed[0]])
            inferer, held = self._replaying(call, placed, is_unsure)
            predicted = None if predictions is None or is_unsure else [predictions[i] for i in placed]
            yield Batch(stacked, [cases[i] for i in placed], inferer, predicted, held)

    def _replaying(
        self, call: Call, group: Sequence[int], is_unsure: bool = False
    ) -> tuple[PerturbationInferer, dict[str, torch.Tensor]]:
        """The inferer that runs perturbed images as a call ran a group of its images, and the call's numbers that it
        hides too.
        """
        numbers, others = call.of(group).taken(list(self.settings.numbers or ()))
        inputs: TensorInput | None = self.settings.inputs
        if inputs is None:
            inputs = ListInput() if call.is_list else TensorInput()
        return self.inferer.replace(inputs=inputs, inferer=Replay.of(self._own, others, is_unsure)), numbers

    def _start(self, engine: Any, items: list[Item], images: Sequence[torch.Tensor], call: Call) -> None:
        """Find the images among what the loader gives, and print what will be explained of the first."""
        settings = self.settings
        key = self._image_key(items, images)
        self.image_key = NETWORK_INPUT if key is None else key
        self._placement = Placement(
            None if key is None else engine.data_loader,
            self.image_key,
            self.saliency_key,
            self.inferer.by_region,
            settings.keeps_place,
            f"{settings.prefix}keeps_place",
        )
        self._names = [] if key is None else self._placement.all_names(items[0])
        if self._names:
            self.failures.keep(self._names)
            warn_of_others(self.summary, self._names)
        fill = fill_in_unit(
            settings.fill, settings.fill_unit, self._placement.transform, self.image_key, f"{settings.prefix}fill"
        )
        self.inferer = self.inferer.replace(fill=fill)
        if isinstance(fill, AutoFill) and self.compare is None:
            # The first cases can be run without the evaluator if all that the network gets is the image.
            is_alone = key is not None and not (call.args or call.kwargs)
            cases = self.first_cases(images[0]) if is_alone else ()
            chosen = choose_fill(self._replaying(call, [0])[0], self.explainer.network, cases).fill
            self.inferer = self.inferer.replace(fill=chosen)
        self.is_started = self._is_opened = True
        found = "the network's input is not an entry of the batch" if key is None else f"image {str(key)!r}"
        print(
            f"monai_saliency: {self.words} ({type(engine).__name__}) runs {type(engine.network).__name__} by "
            f"{type(self._own).__name__} on {found} {tuple(images[0].shape)}; "
            f"{self._words(_predicted(engine, call), len(images), images[0])}, by {settings.chosen.name}, hidden by "
            f"{getattr(self.inferer.fill, '__name__', self.inferer.fill)}; maps go to {self.folder}",
            flush=True,
        )

    def _image_key(self, items: list[Item], images: Sequence[torch.Tensor]) -> Any:
        """The key of the network's input; None if no entry of the batch is it."""
        item, key = items[0], self.settings.image_key
        if key is not None and key not in item:
            raise ValueError(f"the batch has no key {key!r}: --saliency_image_key must be one of {_keys_of(item)}")
        if self.saliency_key != "saliency" and self.saliency_key in item:
            raise ValueError(
                f"`saliency_key` {self.saliency_key!r} is a key of the batch, and names the map: choose another one "
                "(--saliency_image_key names the network's input)"
            )
        masks = self.settings.label_key, self.settings.within_key
        return _input_key(items, images, masks) if key is None else key

    def _words(self, output: Any, count: int, image: torch.Tensor) -> str:
        """What is explained of the first image, from the output that the evaluator has just computed for it."""
        target, first = self.inferer.target, rows(output, 0, 1, count)
        case = Case("the first case", image)
        try:
            if isinstance(target, AutoTarget):
                return target.choose(first, case).words
            return target.bind(read(first, self.inferer.output), case).words()
        except ValueError as error:
            if not isinstance(target, AutoTarget):  # one that needs the case's label map
                return type(target).__name__
            # Raised again, with the case's name, when it is explained.
            return f"the first case cannot be explained ({' '.join(str(error).split())})"

    def _case(self, item: Item, image: Any, place: str) -> Item:
        """A case of the batch with its name, and its image and regions under the keys where later steps look."""
        value = item.get(self.image_key, image)
        item[self.image_key] = value if isinstance(value, MetaTensor) else MetaTensor(value)
        item["case"] = self._placement.name(item, place)
        for setting, own in (("label_key", self.label_key), ("within_key", self.within_key)):
            key = getattr(self.settings, setting)
            if key is not None and not isinstance(item.get(key), torch.Tensor):
                raise ValueError(f"the batch has no label map under `saliency_{setting}` {key!r}, but {_keys_of(item)}")
            item |= {} if key is None else {own: item[key]}
        if self.image_key != CommonKeys.LABEL:
            # The summary reads a label from its file.
            file = input_file(item.get(CommonKeys.LABEL))
            item["label"] = str(file) if file is not None and file.name.endswith((".nii", ".nii.gz")) else ""
        return item

    def _case_of(self, item: Item, prediction: Any = None) -> Case:
        # Items of the loader's dataset, on which methods or fills are tried, have not been through `_case`.
        keys = ((self.label_key, self.settings.label_key), (self.within_key, self.settings.within_key))
        for place, key in keys:
            if place is not None:
                item.setdefault(place, item.get(key))
        return super()._case_of(item, prediction)

    def _has_place(self, case: Item) -> bool:
        """Whether a case's map can lie on its scan; the case fails if it cannot. One that was met has no name."""
        if not case["case"]:
            return False
        others = self.settings.others
        problem = self._placement.problem_of(case, bool(others.get("dicom") or others.get("dicom_seg")))
        for key in {self.label_key, self.within_key} & case.keys():
            if problem is None and (wrong := label_problem(case[key], case[self.image_key])):
                problem = f"its label map {input_file(case[key])} cannot be used: {wrong}"
        if problem:
            self.explainer.refuse(case["case"], CaseError(case["case"], problem))
        return not problem

    def _place(self, case: Item) -> Item:
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


def _items_of(batch: Any, count: int) -> list[Item]:
    """A batch's cases as separate dictionaries, one for each of ``count`` images. Entries of a batch that is not a
    dictionary have their places as keys.
    """
    is_split = isinstance(batch, (list, tuple)) and len(batch) == count and isinstance(batch[0], dict)
    items = batch if is_split else decollate_batch(batch)
    if len(items) != count and isinstance(batch, Mapping):
        items = _by_key(batch, count)
    if len(items) != count:
        raise ValueError(f"a batch of {len(items)} cases gave the network {count} images, so which is whose is unknown")
    cases = []
    for item in items:
        if isinstance(item, dict):
            cases.append(dict(item))
        else:
            cases.append(dict(enumerate(item if isinstance(item, (list, tuple)) else [item])))
    return cases


def _by_key(batch: Mapping[Any, Any], count: int) -> list[Item]:
    """The cases of a batch with entries of another length, such as lists of clicks, which each case gets whole. Empty
    if no tensor of the batch has one entry for each image.
    """
    cases: list[Item] = [{} for _ in range(count)]
    has_tensor = False
    for key, value in batch.items():
        parts = decollate_batch(value)
        if not isinstance(parts, (list, tuple)) or len(parts) != count:
            parts = [value] * count
        elif isinstance(value, torch.Tensor):
            has_tensor = True
        for case, part in zip(cases, parts, strict=True):
            case[key] = part
    return cases if has_tensor else []


def _input_key(items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor], others: Sequence[Any]) -> Any:
    """The key under which the cases hold what their network got, or its first channels; None if there is none. It is
    none of ``others``.
    """
    for channels in range(len(images[0]), 0, -1):
        keys = [key for key in items[0] if key not in others and _holds_input(key, items, images, channels)]
        if CommonKeys.IMAGE in keys:
            return CommonKeys.IMAGE
        if len(keys) > 1:
            raise ValueError(
                f"the batch's entries {', '.join(map(repr, keys))} are all equal to the network's input, as an empty "
                "scan and its mask are, so which of them it got is unknown: name it by --saliency_image_key"
            )
        if keys:
            return keys[0]
    return None


def _holds_input(key: Any, items: Sequence[Mapping[Any, Any]], images: Sequence[torch.Tensor], channels: int) -> bool:
    """Whether an entry of each case holds the first channels of what its network got, ``(C, *spatial)``."""
    for item, image in zip(items, images, strict=True):
        value, first = item.get(key), image[:channels]
        if not isinstance(value, torch.Tensor) or value.shape != first.shape:
            return False
        if not torch.equal(plain(value).to(first).nan_to_num(), first.nan_to_num()):
            return False
    return True
