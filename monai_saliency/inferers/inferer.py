"""The loop that every explanation runs: make masks, perturb, run the network, read scores, make the map."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from monai.data import MetaTensor
from monai.inferers import Inferer, SimpleInferer
from monai.utils import convert_to_dst_type

from monai_saliency.cases import Case, case_name, image_spacing, source_file
from monai_saliency.errors import CaseError
from monai_saliency.estimators.base import Estimator
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.constant import ConstantFill
from monai_saliency.inferers.case_state import CaseRun, Explanation
from monai_saliency.inferers.patch_memory import PatchMemory
from monai_saliency.inferers.patches import remember
from monai_saliency.masks.base import Masks
from monai_saliency.networks.inputs import InputAdapter, SplitInputs, TensorInput
from monai_saliency.networks.outputs import OutputPath, check_rows, read
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import CaseScores
from monai_saliency.targets import Target
from monai_saliency.utils.arguments import whole_numbers
from monai_saliency.utils.optional_imports import require
from monai_saliency.utils.profiling import stage
from monai_saliency.utils.timing import BusyMeter

__all__ = ["PerturbationInferer"]


class PerturbationInferer(Inferer):
    """Explains images by perturbing them: images and network in, saliency maps out.

    For each image ``perturbed = mask * image + (1 - mask) * fill(image)`` is made for every mask, batch by batch on
    the image's device, and the inner inferer runs the network on it, as it does to predict. Every batch has one
    shape, and holds masks of several images where those share one call; the unperturbed image takes the row before
    its first mask.

    Args:
        masks: where images are perturbed.
        target: which number of the output is explained.
        estimator: how scores become a map.
        fill: what replaces hidden voxels; zeros by default.
        inferer: runs the network on a batch, any MONAI inferer; ``SimpleInferer`` by default.
        mask_batch_size: perturbed images in one network batch, at the most.
        progress: shows a progress bar that counts network forwards.
        output: which part of the network's output the target reads, where that is a dictionary, a tuple or a list: a
            key, an index, several such as ``("pred", 0)``, or a callable that takes the output. All of it by default.
        inputs: how the network takes its inputs, and which of them are perturbed
        (:mod:`monai_saliency.networks.inputs`); one
            tensor by default.
        meter: counts the time in which the network runs.
        patch_memory: under a ``SlidingWindowInferer``, run only those patches that a mask changes in a new way, and
            remember their outputs within these limits (True: the default ones). False runs whole images. Scores are
            the same; see :mod:`monai_saliency.inferers.patches`.

    Example::

        explain = PerturbationInferer(RISEMasks(1000), ClassScore([1], activation="softmax"), RISEScoring(p1=0.5))
        maps = explain(images, network)  # (B, C, *spatial) -> (B, 1, *spatial)
    """

    def __init__(
        self,
        masks: Masks,
        target: Target,
        estimator: Estimator,
        fill: Callable[[torch.Tensor], torch.Tensor] | CaseFill | None = None,
        inferer: Inferer | None = None,
        mask_batch_size: int = 16,
        progress: bool = False,
        output: OutputPath | None = None,
        inputs: InputAdapter | None = None,
        meter: BusyMeter | None = None,
        patch_memory: PatchMemory | bool = True,
    ) -> None:
        super().__init__()
        whole_numbers("mask_batch_size", mask_batch_size, 1)
        self.masks = masks
        self.target = target
        self.estimator = estimator
        self.fill = fill if fill is not None else ConstantFill(0.0)
        self.inferer = inferer if inferer is not None else SimpleInferer()
        self.mask_batch_size = int(mask_batch_size)
        self.progress = progress
        self.output = output
        self.inputs = inputs if inputs is not None else TensorInput()
        self.meter = meter
        self.patch_memory = PatchMemory() if patch_memory is True else patch_memory or None

    def __call__(self, inputs: Any, network: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Explain a batch of images.

        Args:
            inputs: ``(B, C, *spatial)``, floating point, or what the inferer's ``inputs`` is for.
            network: any callable on such inputs. A module runs in evaluation mode and is left in the mode it had.
            args: passed on to the inner inferer.
            kwargs: likewise.

        Returns:
            ``(B, K, *spatial)``, or ``(B, K * C, *spatial)`` where channels have masks of their own, on the inputs'
            device: float32, or float64 for float64 inputs. A MetaTensor with the
            inputs' affine, ``applied_operations`` and other meta data when they are one.

        Raises:
            TypeError, ValueError: when the inputs or the network's output are not what masks, fill and target read.
        """
        explanations = self.explain(inputs, network, *args, **kwargs)
        counts = sorted({len(explanation.saliency) for explanation in explanations})
        if len(counts) > 1:
            raise ValueError(
                f"the images have different numbers of maps {counts}: call `explain` to have them as a list"
            )
        maps = torch.stack([explanation.saliency for explanation in explanations])
        meta = self.inputs.split(inputs).meta
        if isinstance(meta, MetaTensor):
            maps = convert_to_dst_type(maps, meta, dtype=maps.dtype)[0]
        return maps

    def explain(
        self,
        inputs: Any,
        network: Callable[..., torch.Tensor],
        *args: Any,
        names: Sequence[str] | None = None,
        labels: Sequence[torch.Tensor | None] | None = None,
        spacings: Sequence[Sequence[float] | None] | None = None,
        sources: Sequence[str | None] | None = None,
        stored: Sequence[CaseScores] | None = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """Explain a batch of images, with all that is known of each.

        Args:
            inputs: as for calling.
            network: as for calling.
            names: what errors call each image; the files' names by default where the inputs know them.
            labels: each image's label map ``(1, *spatial)`` on its own grid, for masks and targets made of regions.
            spacings: each image's voxel sizes in mm, one per spatial axis, for masks whose sizes are in mm; those of
                the inputs' affines by default, where they are a MetaTensor.
            sources: each image's file, for fills in the scan's own units; those that the inputs' meta data name by
                default.
            stored: each image's scores on disk, under a key that covers all they depend on. Batches whose scores are
                there are not run again if the unperturbed image still scores the same, and new scores are added.
            args: passed on to the inner inferer.
            kwargs: likewise.
        """
        runs = self.score(
            inputs,
            network,
            *args,
            names=names,
            labels=labels,
            spacings=spacings,
            sources=sources,
            stored=stored,
            **kwargs,
        )
        with torch.no_grad():
            return [run.explanation() for run in runs]

    def score(
        self,
        inputs: Any,
        network: Callable[..., torch.Tensor],
        *args: Any,
        names: Sequence[str] | None = None,
        labels: Sequence[torch.Tensor | None] | None = None,
        spacings: Sequence[Sequence[float] | None] | None = None,
        sources: Sequence[str | None] | None = None,
        stored: Sequence[CaseScores] | None = None,
        part: Part | None = None,
        **kwargs: Any,
    ) -> list[CaseRun]:
        """Score a batch of images, or a part of their masks. Maps can be made once all parts are in one place.

        Batches are those of the whole, so that the scores are the same to the bit whoever computes them. The first one,
        which holds the unperturbed image, is in every part: what is explained is decided there.

        Args:
            inputs: as for :meth:`explain`, like all other arguments.
            network: likewise.
            args: likewise.
            names: likewise.
            labels: likewise.
            spacings: likewise.
            sources: likewise.
            stored: likewise.
            part: which network batches to run; all by default.
            kwargs: likewise.

        Returns:
            the cases, with the states of their scores.
        """
        if "condition" in kwargs:
            raise ValueError("`condition` does not follow its images' masks: make it a held input, by `inputs`")
        with torch.no_grad(), evaluating(network):
            runs, split = self.start(inputs, names, labels, spacings, sources)
            for run, scores in zip(runs, stored or [], strict=stored is not None):
                run.stored = scores
            self._run(runs, split, network, args, kwargs, part or Part())
        for run in runs:
            if run.stored is not None and not run.complete:  # else all are written in one file
                run.stored.flush()
        return runs

    def start(
        self,
        inputs: Any,
        names: Sequence[str] | None = None,
        labels: Sequence[torch.Tensor | None] | None = None,
        spacings: Sequence[Sequence[float] | None] | None = None,
        sources: Sequence[str | None] | None = None,
    ) -> tuple[list[CaseRun], SplitInputs]:
        """Bind masks and fill to a batch of images, running nothing.

        Args:
            inputs: as for :meth:`explain`, like all other arguments.
            names: likewise.
            labels: likewise.
            spacings: likewise.
            sources: likewise.

        Returns:
            the cases, and the inputs taken apart.
        """
        split = self.inputs.split(inputs)
        self.inputs.check_inferer(split, self.inferer)
        count = len(split.images)
        if names is None:
            names = [case_name(split.meta, index) for index in range(count)]
        spacings = [image_spacing(split.meta, i) for i in range(count)] if spacings is None else spacings
        sources = [source_file(split.meta, i) for i in range(count)] if sources is None else sources
        each = zip(
            split.images,
            split.held_images,
            names,
            [None] * count if labels is None else labels,
            spacings,
            sources,
            strict=True,
        )
        runs = [
            self._start(Case(name, image, i, regions, spacing, source), held)
            for i, (image, held, name, regions, spacing, source) in enumerate(each)
        ]
        return runs, split

    def _start(self, case: Case, held: torch.Tensor) -> CaseRun:
        try:
            masks = self.masks.bind(case.image, labels=case.labels, spacing=case.spacing)
            fill = (self.fill.bind(case) if isinstance(self.fill, CaseFill) else self.fill)(case.image[None])[0]
        except ValueError as error:
            raise CaseError(case.name, str(error)) from error
        if fill.shape != case.image.shape:
            raise CaseError(
                case.name, f"`fill` gave shape {tuple(fill.shape)} for an image of {tuple(case.image.shape)}"
            )
        return CaseRun(case, masks, fill.to(case.image), held)

    def _run(
        self,
        runs: Sequence[CaseRun],
        split: SplitInputs,
        network: Callable[..., Any],
        args: Any,
        kwargs: Any,
        part: Part,
    ) -> None:
        lengths = [len(run.masks) + 1 for run in runs]
        count = min(self.mask_batch_size, sum(lengths))
        batches = _of_part(list(_cut(lengths, count)), part)
        patches = remember(self, runs, batches, network, args, kwargs)
        if patches is not None:
            with self._bar(runs, patches.total, patches.done, patches.summary) as advance:
                patches.score(advance)
            return
        image = runs[0].case.image
        # One buffer serves all batches, so memory does not grow with the masks. Rows past the end of the last batch
        # hold what they held before, and their outputs are not read.
        batch = image.new_zeros(count, len(image) + split.held_images.shape[1], *image.shape[1:])
        inferer = self.inferer if self.meter is None else self.meter.watch(self.inferer)

        def infer(batch: Any, network: Callable[..., Any]) -> Any:
            return inferer(batch, network, *args, **kwargs)

        total = sum(stop - start for batch in batches for _, start, stop in batch)
        with self._bar(runs, total) as advance:
            for parts in batches:
                if all(runs[index].has(start, stop) for index, start, stop in parts):
                    advance(sum(stop - start for _, start, stop in parts))
                    continue
                offset = 0
                with stage("perturb"):
                    for index, start, stop in parts:
                        runs[index].perturb(start, stop, out=batch[offset : offset + stop - start])
                        offset += stop - start
                    values = split.values_of([(index, stop - start) for index, start, stop in parts], count)
                with stage("forward"):
                    output = self.inputs.run(infer, network, batch, partial(split.take_apart, values=values))
                try:
                    output = read(output, self.output)
                    check_rows(output, count)
                except ValueError as error:
                    raise CaseError(runs[parts[0][0]].case.name, str(error)) from error
                offset = 0
                with stage("read scores"):
                    for index, start, stop in parts:
                        runs[index].read(start, stop, output, offset, count, self)
                        runs[index].num_forwards += stop - start
                        offset += stop - start
                advance(offset)

    @contextmanager
    def _bar(
        self, runs: Sequence[CaseRun], total: int, done: int = 0, note: str = ""
    ) -> Iterator[Callable[[int], Any]]:
        if not self.progress:
            yield lambda count: None
            return
        tqdm = require("tqdm", extra="bundle").tqdm
        if note:
            tqdm.write(note, file=sys.stderr)
        name = runs[0].case.name if len(runs) == 1 else f"{len(runs)} cases"
        # A log file is not a screen: there a line every half minute is enough.
        interval = 0.5 if sys.stderr.isatty() else 30
        with tqdm(total=total, initial=done, desc=name, unit="forward", leave=False, mininterval=interval) as bar:
            yield bar.update


def _cut(lengths: Sequence[int], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut runs of rows, laid end to end, into batches of ``size``: lists of (run, first row, last row + 1)."""
    parts: list[tuple[int, int, int]] = []
    room = size
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            parts.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield parts
                parts, room = [], size
    if parts:
        yield parts


def _of_part(batches: list[list[tuple[int, int, int]]], part: Part) -> list[list[tuple[int, int, int]]]:
    """The batches that a part runs: its share, and all that hold an unperturbed image."""
    shared = [number for number, rows in enumerate(batches) if all(start > 0 for _, start, _ in rows)]
    others = set(shared) - {shared[i] for i in part.of(len(shared))}
    return [rows for number, rows in enumerate(batches) if number not in others]


@contextmanager
def evaluating(network: Any) -> Iterator[None]:
    """Evaluation mode for a module, and afterwards each of its parts back in the mode it had."""
    parts = network.modules() if isinstance(network, torch.nn.Module) else []
    # A frozen TorchScript module has no mode, and an exported program's is fixed: it refuses to change it.
    training = [part for part in parts if getattr(part, "training", False)]
    if training:
        with suppress(NotImplementedError):
            network.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
