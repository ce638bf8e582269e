"""The handler that explains the batches of any evaluator, by what its inferer is given and gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from monai.data import MetaTensor
from monai.transforms import Compose
from monai.utils import CommonKeys

from monai_saliency.bundle.attach_settings import NETWORK_INPUT, REGIONS, AttachSettings
from monai_saliency.bundle.batches import goes_through_all, input_key, is_input, items_of, keys_of
from monai_saliency.bundle.case_names import input_file
from monai_saliency.bundle.nnunet import WrappedNNUNet, predicting
from monai_saliency.bundle.placement import Placement
from monai_saliency.bundle.replay import Call, Recorder, Replay, own_inferer
from monai_saliency.cases import Case, image_spacing
from monai_saliency.errors import CaseError
from monai_saliency.fills.constant import fill_in_unit
from monai_saliency.handlers.made_by import warn_of_others
from monai_saliency.handlers.saliency_handler import Batch, SaliencyHandler, predictions_of
from monai_saliency.handlers.summary import Summary
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.inputs import ListInput, TensorInput
from monai_saliency.networks.outputs import rows
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

# Values in one batch of perturbed images, 64 MB in float32.
_BATCH_VALUES = 2**24
# What a case's dictionary comes to hold under keys of our own.
_OWN_KEYS = {"case": "the case", "explanation": "the explanation", "title": "the picture's title"}


class AttachedHandler(SaliencyHandler):
    """Explains the batches of any evaluator, by what its inferer is given and gives."""

    def __init__(self, settings: AttachSettings, words: str, evaluator: Any, postprocessing: Any, folder: Path) -> None:
        self._predicting = predicting(evaluator)
        self._wrapped = self._predicting if isinstance(self._predicting, WrappedNNUNet) else None
        super().__init__(
            settings.inferer(self._predicting, postprocessing),
            settings.network(self._predicting.network),
            Compose([self._place, settings.writers(folder)]),
            summary=Summary(folder / "summary.csv"),
            failures=Failures(folder / "failures.csv", settings.strict, shared=settings.engine is not None),
            store=settings.store(folder),
            network_id=settings.network_id,
            saliency_key=settings.key,
            label_key=None if settings.label_key is None else REGIONS,
            standard_error_key=error_key(settings.key) if settings.standard_error else None,
            trust=settings.trust,
        )
        self.settings = settings
        self.words = words
        self.folder = folder
        self.num_cases = 0
        self.last_case = "none"
        self._placement: Placement
        self._is_started = False
        self._is_found = False  # the image's key, by its values
        self._names: list[str] | None = None
        self._epoch_length: int | None = None
        self._explains = self.inferer
        self._postprocessing_read = postprocessing
        self._own = own_inferer(self._predicting)
        self._recorder = Recorder(evaluator.inferer)
        evaluator.inferer = self._recorder
        # Our own bundle lists cases that cannot be loaded.
        if isinstance(failures := getattr(evaluator, "failures", None), Failures):
            failures.withdraw_by(self.withdraw)

    def attach(self, engine: Engine) -> None:
        """Register with an evaluator."""
        super().attach(engine)
        # An iteration that came to no end has left its call.
        engine.add_event_handler(Events.ITERATION_STARTED, lambda _: self._recorder.calls.clear())

    def report_unmet(self) -> None:
        """Report cases that were listed but not met: MONAI's ``ThreadDataLoader`` ends silently at a broken scan."""
        failed = [] if self.failures is None else [row["case"] for row in self.failures.rows]
        ended = {*self.explained, *self.explainer.waiting, *failed}
        unmet = [name for name in self._names or [] if name not in ended]
        words = "the loader ended before it, as MONAI's ThreadDataLoader does at a scan that cannot be read"
        for name in unmet if goes_through_all(self._loader, self._epoch_length) else []:
            self.failures.add(name, "load", CaseError(name, f"{words}: it has no map"))  # type: ignore[union-attr]
        if unmet:
            words = "%s has not met %d of the cases that its loader's dataset lists (the first is %s)"
            logger.warning(f"{words}: they have no map", self.words, len(unmet), unmet[0])

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
        """What reads the label map of a case on the image's grid, if that is known; None if it has none."""
        read = super().label_of(item)
        if read is None or not self._placement.problem:
            return read

        def refuse() -> torch.Tensor:
            words = f"{self._placement.problem}, so where its label lies is not known"
            raise CaseError(str(item["case"]), words)

        return refuse

    def batches(self, engine: Engine) -> Iterator[Batch]:
        """The images of one iteration, in the groups that can be explained together."""
        call = self._recorder.take()
        images, self._epoch_length = call.images, engine.state.epoch_length
        items = items_of(engine.state.batch, len(images))
        if not self._is_started:
            self._start(engine, items, images, call)
        batch = self.explainer.assignment.place(engine.state.iteration - 1)
        places = [f"{batch}-{i}" if len(items) > 1 else str(batch) for i in range(len(items))]
        strange = [not self._is_input(*each) for each in zip(items, images, strict=True)]
        cases = [self._case(*each) for each in zip(items, call.inputs, places, strict=True)]
        changed = getattr(engine, "output_changed", False)
        if self._wrapped is not None:
            images, call, changed = self._inside(self._wrapped, cases)
        predictions = (None if changed else predictions_of(call.output, len(images))) or [None] * len(images)
        groups = ([i for i in group if self._has_place(cases[i], strange[i])] for group in call.groups())
        for group in filter(None, groups):
            # If a detector finds no box, the surest of those below its threshold is explained.
            unsure = call.is_list and finds_nothing(_predicted(engine, call)[group[0]])
            changes: dict[str, Any] = {"inputs": ListInput() if call.is_list else TensorInput()}
            changes["inferer"] = Replay.of(self._own, call.of(group), unsure)
            if self.settings.mask_batch_size is None:
                changes["mask_batch_size"] = max(1, min(16, _BATCH_VALUES // images[group[0]].numel()))
            self.num_cases += len(group)
            self.last_case = str(cases[group[-1]]["case"])
            together = torch.stack([images[i] for i in group])
            # A detector without its threshold gives more boxes than it predicted.
            predicted = [None if unsure else predictions[i] for i in group]
            yield Batch(together, [cases[i] for i in group], self._explains.replace(**changes), predicted)

    def _inside(self, wrapped: WrappedNNUNet, cases: list[dict[Any, Any]]) -> tuple[list[torch.Tensor], Call, bool]:
        """The images and the call inside of MONAI's wrapper of nnU-Net, and whether its output is another one."""
        if len(cases) > 1:
            raise ValueError(
                f"MONAI's wrapper of nnU-Net predicts the first image of a batch alone, and got {len(cases)}: let "
                "the loader give one at a time (batch_size 1)"
            )
        image = wrapped.preprocess(cases[0], self.image_key)
        if REGIONS in cases[0]:
            cases[0][REGIONS] = wrapped.on_grid(cases[0][REGIONS], image)
        cases[0][self.image_key] = image
        images = [plain(image)]
        return images, Call(images[0][None]), True  # a wrapper's labels cannot be compared with logits

    def _start(self, engine: Any, items: list[dict[Any, Any]], images: Sequence[torch.Tensor], call: Call) -> None:
        """Find the images among what the loader gives, and print what will be explained of the first."""
        item, image, settings = items[0], images[0], self.settings
        key = self._image_key(items, images)
        self.image_key = NETWORK_INPUT if key is None else key
        # The same target, which chooses once for the cohort.
        chosen = settings.inferer(engine if self._wrapped is None else self._wrapped, self._postprocessing_read, image)
        self._explains = chosen.replace(target=self.inferer.target)
        self._placement = placement = Placement(
            engine.data_loader if key is not None else None,
            self.image_key,
            self.saliency_key,
            self._explains.masks.by_region,
            settings.keeps_place,
            f"{settings.prefix}keeps_place",
        )
        if self._wrapped is not None:
            placement.begin_from(self._wrapped.transform(self.image_key))
        self._names = names = None if key is None else placement.names.all(item)
        if names is not None and self.failures is not None and self.summary is not None:
            self.failures.keep(names)
            warn_of_others(self.summary, names)
        fill = fill_in_unit(
            settings.fill, settings.fill_unit, placement.transform, self.image_key, f"{settings.prefix}fill"
        )
        self._explains = self._explains.replace(fill=fill)
        self._is_started = True
        found = "the network's input is no entry of the batch" if key is None else f"image {key!r}"
        print(
            f"monai_saliency: {self.words} ({type(engine).__name__}) runs {type(engine.network).__name__} by "
            f"{type(self._own).__name__} on {found} {tuple(image.shape)}; "
            f"{self._words(_predicted(engine, call), len(images), item, image)}; maps go to {self.folder}",
            flush=True,
        )

    def _image_key(self, items: list[dict[Any, Any]], images: Sequence[torch.Tensor]) -> Any:
        """The key of the network's input; None if no entry of the batch is it."""
        item, key = items[0], self.settings.image_key
        if key is not None and key not in item:
            raise ValueError(f"the batch has no key {key!r}: --saliency_image_key must be one of {keys_of(item)}")
        if self.saliency_key != "saliency" and self.saliency_key in item:
            raise ValueError(
                f"`saliency_key` {self.saliency_key!r} is a key of the batch, and names the map: choose another one "
                "(--saliency_image_key names the network's input)"
            )
        if key is None:
            key = input_key(items, images, [self.settings.label_key])
            self._is_found = key is not None
        if key in _OWN_KEYS:
            raise ValueError(f"the network's input has the key {key!r}, which names {_OWN_KEYS[key]} here: rename it")
        return key

    def _words(self, output: Any, count: int, item: dict[Any, Any], image: torch.Tensor) -> str:
        """What is explained of the first image, from the output that the evaluator has just computed for it."""
        label_key, target = self.settings.label_key, self.inferer.target
        try:
            labels = None if label_key is None else item.get(label_key)
            spacing = image_spacing(item[self.image_key][None]) if self.image_key in item else None
            masks = self._explains.masks.bind(image, labels, spacing)
            price = f"{'at most ' * masks.in_rounds}{masks.at_most + 1} forwards a case"
            words = type(target).__name__
            if self._wrapped is not None:
                words = "the logits of nnU-Net's network, on the grid that it sees"
            elif isinstance(target, AutoTarget):
                words = target.choose(rows(output, 0, 1, count), Case("the first case", image)).words
        except ValueError as error:  # raised again, with the case's name, when it is explained
            return f"the first case cannot be explained ({error})"
        return f"{words}; {self.settings.method.choose(self._own, image).name}, {price}"

    def _case(self, item: dict[Any, Any], image: Any, place: str) -> dict[Any, Any]:
        value = item.get(self.image_key, image)
        item[self.image_key] = value if isinstance(value, MetaTensor) else MetaTensor(value)
        item["case"] = self._placement.names.name(item, place)
        if self.settings.label_key is not None:
            if not isinstance(item.get(self.settings.label_key), torch.Tensor):
                raise ValueError(
                    f"the batch has no label map under `saliency_label_key` {self.settings.label_key!r}, but "
                    f"{keys_of(item)}"
                )
            item[REGIONS] = item[self.settings.label_key]
        # The summary reads a label from its file.
        label = input_file(item.get(CommonKeys.LABEL))
        if self.image_key != CommonKeys.LABEL:
            item["label"] = str(label) if label is not None and label.name.endswith((".nii", ".nii.gz")) else ""
        return item

    def _is_input(self, item: dict[Any, Any], image: torch.Tensor) -> bool:
        """Whether a case's entry is what the network got, if the key was found by the values of the first cases."""
        value = item.get(self.image_key)
        if not self._is_found:
            return True
        return isinstance(value, torch.Tensor) and value.ndim > 0 and is_input(value, image[: len(value)])

    def _has_place(self, case: dict[Any, Any], is_strange: bool) -> bool:
        """Whether a case's map can lie on its scan. The case fails if it cannot, and is left out if it was met."""
        if self._placement.names.is_again(case):
            return False
        problem = self._placement.names.problem(case, self.settings.dicom)
        if is_strange:
            problem = (
                f"its entry {self.image_key!r} is not the network's input, as it was in the first batch, so where the "
                "map lies is unknown: name the entry that is by --saliency_image_key"
            )
        if problem:
            self.explainer.refuse(CaseError(case["case"], problem))
        return not problem

    def _place(self, case: dict[Any, Any]) -> dict[Any, Any]:
        explanation = case["explanation"]
        scores = explanation.scores
        if len(scores) == 1:  # one region or channel, which is the whole image
            scores = torch.cat([scores, explanation.reference_scores[None]])
        span = scores.amax(dim=0) - scores.amin(dim=0)
        flat = [label for label, width in zip(explanation.target.labels, span.tolist(), strict=True) if width == 0]
        if len(flat) == len(span):
            raise CaseError(explanation.name, _constant(explanation, scores[0]))
        if flat:
            logger.warning(
                "case %s: no perturbed image changed the score of %s, so their maps are constant",
                explanation.name,
                ", ".join(map(str, flat)),
            )
        return self._placement({**case, NETWORK_INPUT: case[self.image_key]})


def _constant(explanation: Explanation, score: torch.Tensor) -> str:
    """Why a case has no map if all perturbed images have one score ``(K,)``."""
    count, labels = len(explanation.scores), ", ".join(map(str, explanation.target.labels))
    before = explanation.reference_scores.tolist()
    if bool((score == explanation.reference_scores).all()):
        return (
            f"none of {count} perturbed images changed what is explained ({labels}, {before}), so the map would be "
            "constant: the network does not look at the image, or its probability is saturated; try "
            "--saliency_activation none, another --saliency_fill or larger windows"
        )
    return (
        f"each of {count} perturbed images changed what is explained ({labels}) from {before} to {score.tolist()}, so "
        "the map would be constant: what is found is lost whatever is hidden; try to hide less, by smaller windows, "
        "regions or a higher --saliency_p1, or another --saliency_fill"
    )


def _predicted(engine: Any, call: Call) -> Any:
    """What an evaluator has predicted for a batch; what its inferer gave, if it was taken apart into images."""
    output = engine.state.output
    return output[CommonKeys.PRED] if isinstance(output, Mapping) and CommonKeys.PRED in output else call.output
