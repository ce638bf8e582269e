"""The settings of an explanation, and its way from images and a network to maps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from monai.data import MetaTensor
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer
from monai.utils import convert_to_dst_type

from monai_saliency.cases import Case, Number, cases_of, image_file
from monai_saliency.errors import CaseError
from monai_saliency.estimators.base import Estimator
from monai_saliency.fills.base import CaseFill
from monai_saliency.fills.simple import ConstantFill
from monai_saliency.inferers.ensemble import of_members
from monai_saliency.inferers.explanation import Explanation, warned, with_maps
from monai_saliency.inferers.forward import Forward, evaluating
from monai_saliency.inferers.patch_memory import PatchMemory
from monai_saliency.inferers.patches import remember
from monai_saliency.inferers.perturbation import Perturbation
from monai_saliency.inferers.preflight import output_alone, rows_depend
from monai_saliency.inferers.progress import Progress, following
from monai_saliency.inferers.runner import (
    Scorer,
    Share,
    StoredShare,
    WholeImages,
    batch_size,
    explanations,
    rows_in_batch,
)
from monai_saliency.inferers.scores import Scores
from monai_saliency.inferers.setting_checks import check_settings
from monai_saliency.inferers.walk import Walk, bound_target
from monai_saliency.masks.base import BoundMasks, Masks
from monai_saliency.networks.ensemble import Ensemble
from monai_saliency.networks.inputs import SplitInputs, TensorInput
from monai_saliency.networks.outputs import OutputPath
from monai_saliency.sharding import WHOLE, Part
from monai_saliency.storage.label_maps import label_problem
from monai_saliency.storage.score_store import StoredScores
from monai_saliency.targets.base import BoundTarget, Target
from monai_saliency.utils.arguments import callable_network, instance, whole_number, written
from monai_saliency.utils.precision import score_precision
from monai_saliency.utils.tensors import plain, shape_in_words


@dataclass(frozen=True)
class Job:
    """What one call explains: images, the network, and what is known of the images. ``targets`` are frozen already, one
    for each image; None where they are bound to the network's own output.
    """

    inputs: Any
    network: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    cases: Sequence[Case] | None = None
    stored: Sequence[StoredScores] | None = None
    part: Part = WHOLE
    targets: Sequence[BoundTarget] | None = None


class PerturbationInferer(Inferer):
    """Explains images by perturbing them: images and network in, saliency maps out.

    For each image and mask it makes ``perturbed = mask * image + (1 - mask) * fill(image)``, batch by batch on the
    image's device, and the inner inferer runs the network on it, as it does to predict. The batches of a round have one
    shape. A batch holds masks of several images if these are given together. The unperturbed image comes before
    its first mask.

    Args:
        masks: where images are perturbed.
        target: which number of the output is explained.
        estimator: how scores become a map.
        fill: what replaces hidden voxels; zeros by default.
        inferer: runs the network on a batch, any MONAI inferer; ``SimpleInferer`` by default.
        mask_batch_size: perturbed images in one network batch, at the most; ``"auto"``: by the image.
        progress: True shows a bar that counts network forwards, without a terminal a line a minute. None, the default,
            shows the bar on a terminal after five seconds, False none.
        output: the part of the network's output that the target reads, where the output is a dictionary, a tuple or a
            list: a key, an index, several such as ``("pred", 0)``, or a callable that takes it; all by default.
        inputs: how the network takes its inputs, and which of them are perturbed
            (:mod:`monai_saliency.networks.inputs`); one tensor by default.
        autocast: arguments of ``torch.autocast`` for the network's calls on a GPU; None for none.
        sharing: how ranks share the masks, such as
            :class:`monai_saliency.distributed.process_group.MasksOverRanks`; None where all are scored here.
        patch_memory: under a ``SlidingWindowInferer``, run only those patches that a mask changes in a new way, and
            remember their outputs within these limits (True: the default limits). False runs whole images. Scores are
            the same; see :mod:`monai_saliency.inferers.patches`.
        seed_network: for networks that are random on purpose, such as MC dropout by ``F.dropout(..., training=True)``:
            the seed of torch's generators, on the CPU and the images' GPU, at each call of the network, so that every
            image gets the same draw. A row's draw depends on its place in the batch, so most such networks run one
            image at a time. An evaluator's own prediction is another draw, and is not compared. None, the default,
            seeds nothing.

    Settings never change once made: :meth:`replace` gives a changed copy.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> masks, estimator = ms.masks.RISEMasks(100), ms.estimators.RISEScoring(p1=0.5)
        >>> explain = PerturbationInferer(masks, ms.ClassScore([1], "softmax"), estimator)
        >>> explain(torch.rand(2, 1, 16, 16), torch.nn.Flatten()).shape
        torch.Size([2, 1, 16, 16])
    """

    __repr__ = written

    needs_masks = True

    def __init__(
        self,
        masks: Masks,
        target: Target,
        estimator: Estimator,
        fill: Callable[[torch.Tensor], torch.Tensor] | CaseFill | None = None,
        inferer: Inferer | None = None,
        mask_batch_size: int | str = 16,
        progress: Progress | bool | None = None,
        output: OutputPath | None = None,
        inputs: TensorInput | None = None,
        patch_memory: PatchMemory | bool | None = True,
        autocast: Mapping[str, Any] | None = None,
        sharing: Sharing | None = None,
        seed_network: int | None = None,
    ) -> None:
        super().__init__()
        check_settings(locals(), self.needs_masks)
        self.mask_batch_size = batch_size(mask_batch_size)
        self.sharing = instance("sharing", sharing, Sharing, "MasksOverRanks() or another Sharing", none=True)
        self.masks = masks
        self.target = target
        self.estimator = estimator
        self.fill = fill if fill is not None else ConstantFill(0.0)
        self.inferer = inferer if inferer is not None else SimpleInferer()
        self.progress = instance("progress", progress, (bool, Progress), "True, False or None", none=True)
        self.output = output
        self.inputs = inputs if inputs is not None else TensorInput()
        self.patch_memory = patch_memory
        self.autocast = autocast
        self.seed_network = None if seed_network is None else whole_number("seed_network", seed_network, 0)
        self._made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" in self.__dict__:
            raise AttributeError(f"`{name}` cannot be changed: `replace({name}=...)` gives a changed copy")
        super().__setattr__(name, value)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, by the names of the arguments."""
        return {name: value for name, value in vars(self).items() if name != "_made"}

    @property
    def by_region(self) -> bool:
        """Whether masks hide whole regions, so that a map is flat in each region."""
        return self.masks is not None and self.masks.by_region

    @property
    def needs_labels(self) -> bool:
        """Whether masks are of the regions of the case's label map."""
        return self.masks is not None and self.masks.needs_labels

    @property
    def deciding(self) -> dict[str, Any]:
        """The settings that decide the scores of a mask, by name. Others only decide how fast they are computed."""
        names = ("masks", "target", "fill", "inferer", "inputs", "output")
        deciding = {name: getattr(self, name) for name in names}
        further = {"autocast": self.autocast and dict(self.autocast), "seed_network": self.seed_network}
        return deciding | {name: value for name, value in further.items() if value is not None}

    def replace(self, **changes: Any) -> PerturbationInferer:
        """A copy with other settings.

        Raises:
            TypeError: when a setting is unknown.
        """
        return type(self)(**self.settings | changes)

    def __call__(self, inputs: Any, network: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """The maps ``(B, K, *spatial)`` of a batch of images; arguments as for :meth:`explain`.

        Raises:
            NothingToExplain: when there is nothing to explain in any image.
            ValueError: when the images have different numbers of maps.
        """
        return self.stacked(inputs, self.explain(inputs, network, *args, **kwargs))

    def stacked(self, inputs: Any, explanations: list[Explanation]) -> torch.Tensor:
        """The maps ``(B, K, *spatial)`` of explanations, with the inputs' meta data."""
        explanations = with_maps(explanations)
        counts = sorted({len(explanation.saliency) for explanation in explanations})
        if len(counts) > 1:
            without = [f"; {each.name} has none: {each.target.nothing}" for each in explanations if each.target.nothing]
            raise ValueError(
                f"the images have different numbers of maps {counts}, which one tensor cannot hold. For a list of "
                "explanations write ms.focused_rise(target=...).explain(images, network), or another method's name"
                + "".join(without[:1])
            )
        maps = torch.stack([explanation.saliency for explanation in explanations])
        meta = self.inputs.split(inputs).meta
        return convert_to_dst_type(maps, meta, dtype=maps.dtype)[0] if isinstance(meta, MetaTensor) else maps

    def explain(
        self,
        inputs: Any,
        network: Callable[..., torch.Tensor],
        *args: Any,
        cases: Sequence[Case] | None = None,
        stored: Sequence[StoredScores] | None = None,
        labels: Any = None,
        spacing: Sequence[Any] | None = None,
        names: Sequence[str] | None = None,
        within: Any = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """Explain a batch of images, and give all that is known of each. An image in which there is nothing to explain
        has an explanation without maps, ``(0, *spatial)``, and the reason in ``target.nothing``.

        Args:
            inputs: a tensor or NumPy array ``(B, C, *spatial)``, floating point, or what the setting ``inputs`` takes.
            network: any callable on such inputs. Its modules are in evaluation mode meanwhile: those of a module, and
                those in a closure, a partial or plain attributes. Call ``.eval()`` yourself on others.
            cases: for each image its name, label map, voxel sizes and file, as far as they are known; by default
                those of the inputs' meta data. Masks and targets of regions need label maps, masks in mm voxel sizes,
                and fills in the scan's unit files.
            stored: each image's scores on disk, under a key that covers all they depend on. Batches whose scores are
                there are not run again if the unperturbed image still scores the same, and new scores are added.
            labels: instead of ``cases``, label maps ``(B, 1, *spatial)`` on the images' grid.
            spacing: instead of ``cases``, voxel sizes in mm of all images, or a list of B of them.
            names: instead of ``cases``, B names.
            within: instead of ``cases``, the part of each image that is perturbed and has a map: masks
                ``(B, 1, *spatial)``, not 0 there, one mask ``(1, *spatial)`` for all, or a box ``(start, end)`` in
                voxels. Nothing else is hidden, and maps are 0 there.
            args: passed on to the inner inferer.
            kwargs: passed on to the inner inferer.
        """
        if any(each is not None for each in (labels, spacing, names, within)):
            if cases is not None:
                raise ValueError("`cases` have labels, spacing, names and within: give either these or `cases`")
            cases = cases_of(self.inputs.split(inputs).meta, labels, spacing, names, within)
        found = self.score(inputs, network, *args, cases=cases, stored=stored, **kwargs)
        explained = [explanation for explanation in found if explanation is not None]  # all: nothing is left to others
        for explanation in explained:
            _ = explanation.saliency
        return warned(explained)

    def score(
        self,
        inputs: Any,
        network: Callable[..., torch.Tensor],
        *args: Any,
        cases: Sequence[Case] | None = None,
        stored: Sequence[StoredScores] | None = None,
        part: Part = WHOLE,
        **kwargs: Any,
    ) -> list[Explanation | None]:
        """Run the network for a batch of images, or for a part of their masks. The maps are made when they are read.

        Batches are the same whoever runs them, so that the scores are the same to the bit. The first batch, which holds
        the unperturbed image, is in every part: it decides what is explained.

        A part is a part of the first round of masks, and needs ``stored``. Whoever finds a round complete, by the
        scores on disk, runs all rounds behind it.

        Args:
            inputs: as for :meth:`explain`.
            network: as for :meth:`explain`.
            cases: as for :meth:`explain`.
            stored: as for :meth:`explain`.
            part: which network batches to run; all by default.
            args: passed on to the inner inferer.
            kwargs: passed on to the inner inferer.

        Returns:
            the explanations; None for a case whose other parts are still to be run.
        """
        callable_network(network, inputs)
        if "condition" in kwargs:
            raise ValueError("`condition` does not follow its images' masks: make it a held input, by `inputs`")
        job = Job(inputs, network, args, kwargs, cases, stored, part)
        return self._score_members(network, job) if isinstance(network, Ensemble) else self._score_one(job)

    def _score_one(self, job: Job) -> list[Explanation | None]:
        return self.score_here(job) if self.sharing is None else self.sharing.score(self.replace(sharing=None), job)

    def _score_members(self, ensemble: Ensemble, job: Job) -> list[Explanation | None]:
        """Score by one member after another, for targets that are bound to the mean of their outputs."""
        split = self.inputs.split(job.inputs)
        cases = _known_cases(job.cases, split)
        with torch.no_grad(), evaluating(ensemble):
            targets = self._targets_of(job, split, cases)
        members = []
        for number, member in enumerate(ensemble.networks):
            kept = job.stored and [stored.beside(f"member-{number}") for stored in job.stored]
            alone = [replace(case, prediction=None) for case in cases]
            members.append(self._score_one(replace(job, network=member, cases=alone, stored=kept, targets=targets)))
        return [of_members(explanations) for explanations in zip(*members, strict=True)]

    def _targets_of(self, job: Job, split: SplitInputs, cases: Sequence[Case]) -> list[BoundTarget]:
        """The target, bound to the network's output of each case's unperturbed image alone."""
        self.inputs.check_inferer(split, self.inferer)
        forward = self.forward(job.network, job.args, job.kwargs)
        outputs = (output_alone(forward, split, i, case, self.mask_batch_size) for i, case in enumerate(cases))
        targets = [self.target.of_image(index, len(cases)) for index in range(len(cases))]
        return [bound_target(*each) for each in zip(targets, outputs, cases, strict=True)]

    def score_here(self, job: Job, share: Share | None = None) -> list[Explanation | None]:
        """Score in this process; what a :class:`Sharing` calls, with how workers exchange scores."""
        if job.part.count > 1 and job.stored is None:
            raise ValueError("a `part` of the masks needs `stored`: the parts of a case come together on disk")
        with torch.no_grad(), evaluating(job.network), following(self.progress) as progress:
            return self._score(job, share or StoredShare(job.part), progress)

    def forward(self, network: Any, args: Sequence[Any], kwargs: Any) -> Forward:
        """The seam around the calls of a network."""
        given = tuple(args), dict(kwargs or {})
        return Forward(self.inferer, self.inputs, network, self.output, *given, self.autocast, self.seed_network)

    def _score(self, job: Job, share: Share, progress: Progress) -> list[Explanation | None]:
        """Bind masks, fill and network to the cases, look at the network, and run it."""
        forward = self.forward(job.network, job.args, job.kwargs)
        if job.targets is None and self.masks.follows_target:
            split = self.inputs.split(job.inputs)
            job = replace(job, targets=self._targets_of(job, split, _known_cases(job.cases, split)))
        walks, split = self.start(job.inputs, job.cases, job.stored, job.targets)
        for walk in walks:
            dtypes = forward.autocast_dtype(walk.case.image), walk.case.image.dtype
            walk.scores.rounding = score_precision(forward.network, *dtypes)
        size = rows_in_batch(self.mask_batch_size, walks)
        scorer: Scorer | None = None
        if self.patch_memory and _cuts_patches(self.inferer):
            scorer = remember(forward, walks, PatchMemory() if self.patch_memory is True else self.patch_memory)
        one_by_one = scorer is None and rows_depend(forward, walks[0], split, size)
        if one_by_one:
            size = 1
            for walk in walks:
                walk.scores.beside("one-by-one")  # scores of batches must not be taken for scores of single images
        share.begin(walks, lambda: self._deciding_all(forward, split, one_by_one))
        return explanations(walks, scorer or WholeImages(forward, walks, split, size), size, share, progress)

    def _deciding_all(self, forward: Forward, split: SplitInputs, one_by_one: bool) -> dict[str, Any]:
        """Everything that decides scores but the network and the images, by what it is called in an error."""
        return {
            **self.deciding,
            "estimator": self.estimator,
            "further inputs": [forward.args, forward.kwargs, split.held_values],
            "whether images go through the network one at a time": one_by_one,
        }

    def start(
        self,
        inputs: Any,
        cases: Sequence[Case] | None = None,
        stored: Sequence[StoredScores] | None = None,
        targets: Sequence[BoundTarget] | None = None,
    ) -> tuple[list[Walk], SplitInputs]:
        """Bind masks and fill to a batch of images without running anything."""
        split = self.inputs.split(inputs)
        self.inputs.check_inferer(split, self.inferer)
        _check_count("stored", stored, len(split.images))
        walks = []
        for index, case in enumerate(_known_cases(cases, split)):
            bound = None if targets is None else targets[index]
            masks, fill, fill_of = self._bound(case, split.numbers_of(index), bound)
            images = Perturbation(case.image, split.held_images[index], fill, fill_of, masks, case.within)
            target = bound or self.target.of_image(index, len(split.images))
            scores = Scores(case.name, None if stored is None else stored[index])
            walks.append(Walk(case, images, target, self.estimator, scores))
        return walks, split

    def _bound(
        self, case: Case, numbers: Mapping[str, Number], target: BoundTarget | None
    ) -> tuple[BoundMasks, torch.Tensor, Any]:
        """The masks of a case, its fill ``(C, *spatial)``, and what makes the fill of each mask, or None."""
        try:
            masks = None
            if self.masks is not None:
                family = self.masks if target is None else self.masks.for_scores(target.additive, target.linear)
                masks = family.bind_with_numbers(numbers, case.image, case.labels, case.spacing)
                self.estimator.check(masks)
            bound = self.fill.bind(case) if isinstance(self.fill, CaseFill) else self.fill
            fill = bound(case.image[None])
        except ValueError as error:
            raise CaseError(case.name, str(error)) from error
        if not isinstance(fill, torch.Tensor) or fill[:1].shape != (1, *case.image.shape):
            images = shape_in_words(case.image[None])
            raise CaseError(case.name, f"`fill` gave {shape_in_words(fill)} for images of {images}")
        return masks, fill[0].to(case.image), getattr(bound, "of", None)


def _known_cases(cases: Sequence[Case] | None, split: SplitInputs) -> list[Case]:
    """The cases of a batch with their images and plain label maps; by default those of the images' meta data."""
    count = len(split.images)
    _check_count("cases", cases, count)
    given = [Case.of(split.meta, index) for index in range(count)] if cases is None else cases
    known = []
    for index, case in enumerate(given):
        instance("cases", case, Case, "a list of cases such as Case('patient_7', labels=organs)")
        image = split.images[index]
        _check_label(case, split.meta[index] if isinstance(split.meta, MetaTensor) else image)
        known.append(replace(case.with_image(image, index, split.meta), labels=plain(case.labels)))
    return known


def _check_label(case: Case, image: torch.Tensor) -> None:
    for name, label in {"label map": case.labels, "`within`": case.within}.items():
        if isinstance(label, MetaTensor) and (problem := label_problem(label, image)):
            raise CaseError(case.name, f"its {name} {image_file(label)} cannot be used: {problem}")


class Sharing(ABC):
    """How several workers share the masks of a batch of images."""

    @abstractmethod
    def score(self, inferer: PerturbationInferer, job: Job) -> list[Explanation | None]:
        """Score a batch of images together with other workers."""


def explaining(inferer: Any) -> PerturbationInferer:
    """Check that an argument is an inferer that explains."""
    words = "an inferer made by a method, such as sliding_window(target=...)"
    return instance("inferer", inferer, PerturbationInferer, words)


def _cuts_patches(inferer: Any) -> bool:
    """Whether an inferer, or one inside of it, cuts patches."""
    return any(isinstance(each, SlidingWindowInferer) for each in (inferer, *getattr(inferer, "__dict__", {}).values()))


def _check_count(name: str, given: Any, count: int) -> None:
    """Refuse what does not have an entry for each image."""
    if given is not None and (not isinstance(given, (list, tuple)) or len(given) != count):
        raise ValueError(f"`{name}` must be a list with one entry for each of {count} images, got {given!r}")
