"""Explaining somebody else's bundle: the code behind ``configs/explain.yaml``.

The bundle's own run is carried out, step by step, and just before the step that first names its evaluator a handler is
attached to that. So whatever the bundle does before, such as loading a checkpoint, is done, and its predictions and
outputs stay what they were.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from monai.bundle import ConfigParser
from monai.data import MetaTensor, decollate_batch
from monai.inferers import DiffusionInferer, Inferer, SlidingWindowInferer
from monai.utils import CommonKeys

from monai_saliency import distributed as engines
from monai_saliency import methods
from monai_saliency.bundle.config import BundleConfig, calling_parser, is_generative
from monai_saliency.bundle.placement import Placement, input_file
from monai_saliency.bundle.run import run as run_cohort
from monai_saliency.cases import Case, image_spacing
from monai_saliency.errors import CaseError, repeat_cause_last
from monai_saliency.fills.constant import ConstantFill
from monai_saliency.fills.scan_unit import ScanUnitFill
from monai_saliency.handlers.saliency_handler import Batch, SaliencyHandler
from monai_saliency.handlers.summary import Summary
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.masks.supervoxels import Supervoxels
from monai_saliency.networks.inputs import ListInput, TensorInput
from monai_saliency.networks.outputs import rows
from monai_saliency.storage.failures import Failures
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.targets import Target
from monai_saliency.targets.auto import AutoTarget, finds_nothing, read_postprocessing
from monai_saliency.utils.tensors import plain

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["Overlay", "OverlayHandler"]

logger = logging.getLogger(__name__)

_METHODS = ("rise", "sliding_window", "region_occlusion", "channel_occlusion")
# Where a case's label map is kept, since its own key comes to hold the label's file.
_REGIONS = "saliency_regions"
# Values in one batch of perturbed images, 64 MB in float32.
_BATCH_VALUES = 2**24


class Overlay:
    """Explains the bundle whose config it stands in. Its settings are those of ``configs/explain.yaml``.

    Args:
        output_dir: where maps, pictures, ``summary.csv``, ``failures.csv`` and scores go; ``saliency`` below the
            bundle's own output folder by default.
        evaluator: the id of the evaluator; found by its class by default.
        image_key: where a batch holds the network's input; found by its values by default.
        target: ``"auto"`` (:class:`~monai_saliency.targets.auto.AutoTarget`) or a target.
        output: the part of the network's output that is explained.
        classes: of the automatic target.
        activation: of the automatic target.
        method: ``"rise"``, ``"sliding_window"``, ``"region_occlusion"`` or ``"channel_occlusion"``.
        num_masks: of RISE.
        grid_size: of RISE.
        p1: of RISE.
        seed: of RISE.
        window_size: of sliding windows; an eighth of each axis by default.
        stride: of sliding windows.
        window_unit: of both, ``"voxel"`` or ``"mm"``.
        label_key: where a batch holds the label maps whose regions are hidden; supervoxels by default.
        num_supervoxels: how many of these.
        num_coalitions: how many random sets of regions; each region is hidden in turn by default.
        per_channel: whether each channel has a map of its own.
        fill: what hides a voxel: a number, or a fill.
        fill_unit: of a number: ``"network"`` for the network's input space, ``"scan"`` for the file's own.
        mask_batch_size: perturbed images in one batch; at most 16 by default, fewer where images are large.
        picture: whether to draw pictures.
        strict: raise the first failure instead of listing it.
        resume: whether to keep scores, so that a stopped run goes on where it was.
        network_id: names the network for the scores, where it is not a module.
        engine: shares the cohort with other processes (:mod:`monai_saliency.distributed`).
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        evaluator: str | None = None,
        image_key: str | None = None,
        target: Target | str = "auto",
        output: str | int | Sequence[str | int] | None = None,
        classes: Sequence[int] | str = "predicted",
        activation: str | None = None,
        method: str = "rise",
        num_masks: int = 1000,
        grid_size: int | Sequence[int] = 8,
        p1: float = 0.5,
        seed: int = 0,
        window_size: int | Sequence[int] | None = None,
        stride: int | Sequence[int] | None = None,
        window_unit: str = "voxel",
        label_key: str | None = None,
        num_supervoxels: int = 100,
        num_coalitions: int | None = None,
        per_channel: bool = False,
        fill: float | Callable[[torch.Tensor], torch.Tensor] = 0.0,
        fill_unit: str = "network",
        mask_batch_size: int | None = None,
        picture: bool = True,
        strict: bool = False,
        resume: bool = True,
        network_id: str | None = None,
        engine: engines.Engine | None = None,
    ) -> None:
        repeat_cause_last()
        if method not in _METHODS:
            raise ValueError(f"`saliency_method` must be one of {list(_METHODS)}, got {method!r}")
        if isinstance(target, str) and target != "auto":
            raise ValueError(f"`saliency_target` must be 'auto' or a target, got {target!r}")
        if fill_unit not in ("network", "scan") or (fill_unit == "scan" and not isinstance(fill, (int, float))):
            raise ValueError(
                f"`saliency_fill_unit` must be 'network', or 'scan' for a `saliency_fill` that is a number, got "
                f"{fill_unit!r} for {fill!r}"
            )
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.evaluator = evaluator
        self.image_key = image_key
        self.target = target
        self.output = output
        self.classes = classes
        self.activation = activation
        self.method = method
        self.masks: dict[str, Any] = {"num_masks": num_masks, "grid_size": grid_size, "p1": p1, "seed": seed}
        self.masks |= {"window_size": window_size, "stride": stride, "unit": window_unit, "per_channel": per_channel}
        if method == "region_occlusion":
            self.masks |= {"num_masks": num_coalitions, "regions": None if label_key else Supervoxels(num_supervoxels)}
        self.label_key = label_key
        self.fill = ConstantFill(float(fill)) if isinstance(fill, (int, float)) else fill
        self.scan_fill = float(fill) if fill_unit == "scan" else None  # type: ignore[arg-type]
        self.mask_batch_size = mask_batch_size
        self.picture = picture
        self.strict = strict
        self.resume = resume
        self.network_id = network_id
        self.engine = engine

    def explain(self, parser: ConfigParser | None = None) -> None:
        """Run the bundle and explain what it predicts.

        Args:
            parser: the bundle's; by default the one in whose expression this is called.

        Raises:
            ValueError: when the bundle is not one that can be explained, saying why.
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
        _refuse_generative(evaluator)
        folder = self.output_dir if self.output_dir is not None else bundle.output_dir() / "saliency"
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

    def inferer(self, predict: Inferer, postprocessing: Any) -> PerturbationInferer:
        """What explains, for an inferer that predicts and the postprocessing of its predictions."""
        target, output = self.target, self.output
        if isinstance(target, str):
            target = AutoTarget(read_postprocessing(postprocessing), self.classes, self.activation, self.output)
            output = None
        build = getattr(methods, self.method)
        settings = {name: value for name, value in self.masks.items() if name in inspect.signature(build).parameters}
        relative = self.method == "sliding_window" and settings["window_size"] is None
        if relative:
            if settings["unit"] != "voxel" or settings["per_channel"]:
                raise ValueError("`saliency_window_unit` mm and `saliency_per_channel` need a `saliency_window_size`")
            settings["window_size"] = 1
        explain: PerturbationInferer = build(
            **settings,
            target=target,
            fill=self.fill,
            inferer=predict,
            mask_batch_size=self.mask_batch_size or 1,
            progress=True,
            output=output,
        )
        return explain.replace(masks=_RelativeWindows(settings["stride"])) if relative else explain


def _refuse_generative(evaluator: Any) -> None:
    kinds = [type(evaluator.network).__name__, type(evaluator.inferer).__name__]
    if isinstance(evaluator.inferer, DiffusionInferer) or any(map(is_generative, kinds)):
        raise ValueError(
            f"this bundle is generative: its evaluator runs {kinds[0]} with {kinds[1]}, which makes images rather than "
            "a statement about one, and a saliency map says which part of an image a statement rests on"
        )


class OverlayHandler(SaliencyHandler):
    """Explains the batches of any evaluator, by what its inferer is given and gives.

    Args:
        overlay: the settings.
        evaluator_id: the evaluator's id.
        evaluator: the evaluator.
        postprocessing: what the bundle does with its predictions.
        folder: where maps and all else go.
    """

    def __init__(self, overlay: Overlay, evaluator_id: str, evaluator: Any, postprocessing: Any, folder: Path) -> None:
        self._predict = _AsPredicted(evaluator)
        super().__init__(
            overlay.inferer(self._predict, postprocessing),
            evaluator.network,
            self._place,
            summary=Summary(folder / "summary.csv"),
            failures=Failures(folder / "failures.csv", overlay.strict, shared=overlay.engine is not None),
            store=ScoreStore(folder / "scores") if overlay.resume else None,
            network_id=overlay.network_id,
            label_key=None if overlay.label_key is None else _REGIONS,
        )
        self.overlay = overlay
        self.evaluator_id = evaluator_id
        self.folder = folder
        self.num_cases = 0
        self.last_case = "none"
        self._placement: Placement | None = None
        self._explains = self.inferer
        self._recorder = _Recorder(evaluator.inferer)
        evaluator.inferer = self._recorder

    def __call__(self, engine: Engine) -> None:
        with _randomness_untouched():
            super().__call__(engine)

    def batches(self, engine: Engine) -> Iterator[Batch]:
        """One batch of all images, or each image alone where they are a list or come with further inputs."""
        inputs, args, kwargs = self._recorder.take()
        listed = isinstance(inputs, (list, tuple))
        tensors = [plain(image) for image in inputs]
        if not tensors or not all(isinstance(image, torch.Tensor) for image in tensors):
            raise ValueError(
                f"the evaluator gives its inferer a {type(inputs).__name__} without images, where a batch or a list of "
                "them can be explained"
            )
        items = _items(engine.state.batch, len(tensors))
        if self._placement is None:
            self._start(engine, items[0], tensors[0])
        batch = self.explainer.assignment.place(engine.state.iteration - 1)
        places = [f"{batch}-{i}" if len(items) > 1 else str(batch) for i in range(len(items))]
        cases = [self._case(*each) for each in zip(items, inputs, places, strict=True)]
        alone = listed or any(isinstance(value, torch.Tensor) for value in [*args, *kwargs.values()])
        groups = [[i] for i in range(len(cases))] if alone else [list(range(len(cases)))]
        for group in groups:
            images = torch.stack([tensors[i] for i in group])
            self._predict.hold(args, kwargs, group, len(cases))
            changes: dict[str, Any] = {"inputs": ListInput() if listed else TensorInput()}
            changes["inferer"] = self._predict.sliding_window or self._predict
            if listed:
                found = engine.state.output[CommonKeys.PRED]  # type: ignore[index]
                self._predict.lower_threshold(finds_nothing(found[group[0]]))
            if self.overlay.mask_batch_size is None:
                changes["mask_batch_size"] = max(1, min(16, _BATCH_VALUES // images[0].numel()))
            self.num_cases += len(group)
            self.last_case = str(cases[group[-1]]["case"])
            yield Batch(images, [cases[i] for i in group], self._explains.replace(**changes))

    def _start(self, engine: Any, item: dict[Any, Any], image: torch.Tensor) -> None:
        """Find the image among what the loader gives, and say what will be explained."""
        key, found = self.overlay.image_key, "the network's input is no entry of the batch"
        if key is not None and key not in item:
            raise ValueError(f"the batch has no key {key!r}: --saliency_key must be one of {sorted(map(str, item))}")
        if key is None:
            key = next((name for name, value in item.items() if _same(value, image)), None)
        if key is not None:
            found = f"image {key!r}"
        self.image_key = "network_input" if key is None else key
        loader = engine.data_loader if key is not None else None
        by_region = self.overlay.method in ("region_occlusion", "channel_occlusion")
        self._placement = Placement(
            self.folder, loader, self.image_key, self.saliency_key, self.overlay.picture, nearest=by_region
        )
        names = None if key is None else self._placement.names(item)
        if names is not None and self.failures is not None:
            self.failures.keep(names)
        if self.overlay.scan_fill is not None:
            if self._placement.transform is None:
                raise ValueError("`saliency_fill_unit` scan needs the bundle's preprocessing, which its loader hides")
            fill = ScanUnitFill(self.overlay.scan_fill, self._placement.transform, self.image_key)
            self._explains = self._explains.replace(fill=fill)
        try:
            labels = item.get(self.overlay.label_key) if self.overlay.label_key is not None else None
            spacing = image_spacing(item[key][None]) if key is not None else None
            forwards = len(self.inferer.masks.bind(image, labels, spacing)) + 1
            words = f"{self._words(engine, image)}; {self.overlay.method}, {forwards} forwards a case"
        except ValueError as error:  # told again, with the case's name, when it is explained
            words = f"the first case cannot be explained ({error})"
        print(
            f"monai_saliency: {self.evaluator_id} ({type(engine).__name__}) runs {type(engine.network).__name__} by "
            f"{type(self._recorder.inferer).__name__} on {found} {tuple(image.shape)}; {words}; "
            f"maps go to {self.folder}",
            flush=True,
        )

    def _words(self, engine: Any, image: torch.Tensor) -> str:
        """What is explained of the first image, from the output that the evaluator has just computed for it."""
        target = self.inferer.target
        if not isinstance(target, AutoTarget):
            return type(target).__name__
        output, count = engine.state.output[CommonKeys.PRED], len(engine.state.output[CommonKeys.IMAGE])
        return target.choose(rows(output, 0, 1, count), Case("the first case", image)).words

    def _case(self, item: dict[Any, Any], image: Any, place: str) -> dict[Any, Any]:
        assert self._placement is not None
        value = item.get(self.image_key, image)
        item[self.image_key] = value if isinstance(value, MetaTensor) else MetaTensor(value)
        item["case"] = self._placement.name(item, place)
        if self.overlay.label_key is not None:
            if not isinstance(item.get(self.overlay.label_key), torch.Tensor):
                raise ValueError(
                    f"the batch has no label map under `saliency_label_key` {self.overlay.label_key!r}, but "
                    f"{sorted(map(str, item))}"
                )
            item[_REGIONS] = item[self.overlay.label_key]
        # The summary reads a label from its file.
        label = input_file(item.get(CommonKeys.LABEL))
        item["label"] = str(label) if label is not None and label.name.endswith((".nii", ".nii.gz")) else ""
        return item

    def _place(self, case: dict[Any, Any]) -> dict[Any, Any]:
        assert self._placement is not None
        explanation = case["explanation"]
        span = explanation.scores.amax(dim=0) - explanation.scores.amin(dim=0)
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


class _Recorder(Inferer):
    """The bundle's inferer, remembering what it was given last."""

    def __init__(self, inferer: Any) -> None:
        super().__init__()
        self.inferer = inferer
        self._call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._call = inputs, args, kwargs
        return self.inferer(inputs, network, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "inferer":  # not there yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.inferer, name)

    def take(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The last call's inputs and further arguments, which are then forgotten.

        Raises:
            ValueError: when there was none.
        """
        if self._call is None:
            raise ValueError(
                "the bundle's evaluator predicts without its inferer, so nothing is known of how: give it an inferer "
                "that it calls, such as monai.inferers.SimpleInferer"
            )
        call, self._call = self._call, None
        return call


class _AsPredicted(Inferer):
    """Runs the bundle's inferer on perturbed images as its evaluator runs it on images.

    Args:
        evaluator: whose inferer and autocast are used.
    """

    def __init__(self, evaluator: Any) -> None:
        super().__init__()
        self.inferer = self._own = evaluator.inferer
        if getattr(self.inferer, "progress", False):
            # One bar for each batch of perturbed images would hide everything else.
            self.inferer = self._own = copy.copy(self.inferer)
            self.inferer.progress = False
        self.autocast = dict(evaluator.amp_kwargs) if evaluator.amp else None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def hold(self, args: Sequence[Any], kwargs: dict[str, Any], group: Sequence[int], count: int) -> None:
        """Take over the evaluator's further arguments.

        Args:
            args: further inputs. Tensors with a row an image are held while the image is perturbed.
            kwargs: likewise.
            group: the images that are explained now.
            count: all images of the batch.
        """

        def row(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == count and len(group) == 1:
                return value[group[0] : group[0] + 1]
            return value

        self.args = tuple(row(value) for value in args)
        self.kwargs = {name: row(value) for name, value in kwargs.items()}

    @property
    def sliding_window(self) -> SlidingWindowInferer | None:
        """The bundle's own inferer where it is all that predicts and cuts patches, which then are remembered."""
        alone = isinstance(self.inferer, SlidingWindowInferer) and self.autocast is None
        return self.inferer if alone and not self.args and not self.kwargs else None

    def lower_threshold(self, lower: bool) -> None:
        """Let a copy of the bundle's detector report boxes below its own threshold: where it finds none, the surest of
        these is explained.
        """
        self.inferer = self._own
        detectors = [name for name, part in vars(self._own).items() if hasattr(part, "box_selector")]
        if lower and detectors:
            detector = copy.copy(getattr(self._own, detectors[0]))
            detector.box_selector = copy.copy(detector.box_selector)
            detector.box_selector.score_thresh = 0.0
            self.inferer = copy.copy(self._own)
            setattr(self.inferer, detectors[0], detector)

    def __call__(self, inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        patches = isinstance(self.inferer, SlidingWindowInferer)

        def repeated(name: str, value: Any) -> Any:
            # What comes with patches must suit any number of them; but of a condition each image has its own patches.
            if (
                isinstance(value, torch.Tensor)
                and value.ndim
                and len(value) == 1
                and (not patches or name == "condition")
            ):
                return value.expand(len(inputs), *value.shape[1:])
            return value

        amp = self.autocast is not None and inputs[0].is_cuda
        with torch.autocast("cuda", **(self.autocast or {})) if amp else nullcontext():
            return self.inferer(
                inputs,
                network,
                *[repeated("", value) for value in self.args],
                **{name: repeated(name, value) for name, value in self.kwargs.items()},
            )


class _RelativeWindows(Masks):
    """Sliding windows of an eighth of each axis, whatever the image's shape."""

    def __init__(self, stride: int | Sequence[int] | None) -> None:
        self.stride = stride

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return SlidingWindowMasks([-(-n // 8) for n in image.shape[1:]], self.stride).bind(image, labels, spacing)


def _items(batch: Any, count: int) -> list[dict[Any, Any]]:
    """A batch's cases as dictionaries of their own; of batches that are no dictionaries by position."""
    if isinstance(batch, (list, tuple)) and len(batch) == count and all(isinstance(item, dict) for item in batch):
        return [dict(item) for item in batch]
    items = decollate_batch(batch)
    if len(items) != count:
        raise ValueError(f"a batch of {len(items)} cases gave the network {count} images, so which is whose is unknown")
    return [
        dict(item) if isinstance(item, dict) else dict(enumerate(item if isinstance(item, (list, tuple)) else [item]))
        for item in items
    ]


def _same(value: Any, image: torch.Tensor) -> bool:
    """Whether an entry of a case is the network's input."""
    if not isinstance(value, torch.Tensor) or value.shape != image.shape:
        return False
    return torch.equal(plain(value).to(image), image)


@contextmanager
def _randomness_untouched() -> Iterator[None]:
    """Leave the global random generators as they were: a bundle's later predictions may draw from them."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002, the global one is meant
    # Where CUDA has not begun, it has no generators, and need not begin.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
