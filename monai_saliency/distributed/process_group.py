"""Explaining inside a process group, for pipelines of one's own: all ranks share the masks of each image.

Start the processes as you do (``torchrun``, MPI, a scheduler), and make the group with
``torch.distributed.init_process_group``; with NCCL, set each process's GPU (``torch.cuda.set_device``) before. Other
engines use this: :mod:`~monai_saliency.distributed.lightning`, :mod:`~monai_saliency.distributed.accelerate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.nn.functional as F
from monai.data import MetaTensor, decollate_batch
from monai.utils import CommonKeys
from torch.nn.parallel import DistributedDataParallel

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError, root_cause
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.inferer import Job, PerturbationInferer, Sharing
from monai_saliency.inferers.row_check import RowsDepend
from monai_saliency.inferers.sharing import WorkerScores, take_scores
from monai_saliency.sharding import Part, rank_of
from monai_saliency.utils.arguments import check_option
from monai_saliency.utils.tensors import with_meta_of

__all__ = ["BatchExplainer", "MasksOverRanks", "from_all_ranks", "merge_over_ranks"]


def from_all_ranks(mine: Any, error: Exception | None = None, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, on every rank, in rank order. If one has failed, all raise at once."""
    _, count = rank_of(group)
    everything: list[Any] = [(mine, None)] * count
    if count > 1:
        # In words: not every error can be pickled.
        dist.all_gather_object(everything, (mine, None if error is None else _told(error)), group=group)
    if error is not None:
        raise error
    for rank, (_, told) in enumerate(everything):
        if told is not None:
            raise CaseError(*told) if told[0] else RuntimeError(f"rank {rank} has failed: {told[1]}")
    return [theirs for theirs, _ in everything]


def _told(error: Exception) -> tuple[str, str]:
    """The case, if the error names one, and the problem."""
    cause = root_cause(error)
    return (cause.case, cause.problem) if isinstance(cause, CaseError) else ("", f"{type(cause).__name__}: {cause}")


def merge_over_ranks(states: Sequence[CaseState], group: dist.ProcessGroup | None = None) -> None:
    """Gather the scores of all ranks; each rank has scored another part of the same images' masks."""
    rank, count = rank_of(group)
    if count > 1:
        ranks = from_all_ranks([(_thumbnail(state), WorkerScores.of(state)) for state in states], group=group)
        _check_same(ranks)
        take_scores(states, [[scores for _, scores in theirs] for theirs in ranks], rank)
        for state in states:
            state.search.next_round()


def _thumbnail(state: CaseState) -> np.ndarray:
    """The image at 3 voxels or fewer along each axis, to notice a different image."""
    image = state.case.image
    pool = F.adaptive_avg_pool2d if image.ndim == 3 else F.adaptive_avg_pool3d
    return pool(image[None].float(), 3).numpy(force=True)


def _check_same(ranks: Sequence[Sequence[tuple[np.ndarray, WorkerScores]]]) -> None:
    """Refuse ranks that hold different images, or have other settings."""
    for rank, theirs in enumerate(ranks):
        found = [] if len(theirs) == len(ranks[0]) else [f"the number of images ({len(ranks[0])} and {len(theirs)})"]
        for (image, ours), (other, scores) in zip(ranks[0], theirs, strict=False):
            if not _same(image, other):
                found.append(f"the image ({ours.name} and another {scores.name})")
            if ours.one_by_one == scores.one_by_one:  # else some begin anew, see `take_scores`
                found += ours.differences(scores)
        if found:
            raise ValueError(
                "ranks share the masks of an image, so each must be given the same images in the same order, and have "
                f"the same settings and network: rank 0 and rank {rank} differ in {' and '.join(found)}. Leave out a "
                "sampler that shares images (DistributedSampler; in Lightning, Trainer(use_distributed_sampler=False))"
            )


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two thumbnails are of one image, up to what two machines' preprocessing differs by."""
    scale = float(np.nan_to_num(np.abs(one), posinf=0).max(initial=0))
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=1e-4 * scale, equal_nan=True))


class MasksOverRanks(Sharing):
    """All ranks share the masks of each image: each is given the same images, and has all maps.

    Rank r of n scores part r of n of the network batches (and the first batch, which decides what is explained). At the
    end of each round of masks the scores come together: a few kilobytes an image. All ranks get the same maps, equal to
    the bit to the maps of one process if the batch shape and the thread count are the same. Without a process group
    this process scores all masks.

    All ranks must call the inferer alike, since they meet there; they wait no longer than the group's timeout. Of a
    ``DistributedDataParallel`` network the module inside is run, because its own forwards meet other ranks.

    Example::

        dist.init_process_group("gloo")
        explain = ms.rise(1000, target=ms.ClassScore("predicted", "softmax"), sharing=MasksOverRanks())
        maps = explain(images, network)  # on every rank

    Args:
        group: the ranks; the default group where None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def score(self, inferer: PerturbationInferer, job: Job) -> list[CaseState]:
        """Score a batch of images; see :meth:`Sharing.score <monai_saliency.inferers.inferer.Sharing.score>`."""
        job = replace(job, network=_unwrapped(job.network))
        rank, count = rank_of(self.group)
        if job.part is not None or count == 1:
            return inferer.score_here(job)
        met = False

        def meet(states: Sequence[CaseState]) -> None:
            nonlocal met
            met = True  # from here on all ranks know of what fails here
            try:
                merge_over_ranks(states, self.group)
            except RowsDepend:
                met = False  # those that ran batches begin anew, and the others wait here for them
                raise
            met = all(state.complete for state in states)

        try:
            return inferer.score_here(replace(job, part=Part(rank, count)), meet)
        except Exception as error:
            if not met:
                from_all_ranks(None, error, self.group)
            raise


def _unwrapped(network: Callable[..., Any]) -> Callable[..., Any]:
    """The module inside a ``DistributedDataParallel`` network, whose forward waits for other ranks; else itself."""
    module: Callable[..., Any] = network.module if isinstance(network, DistributedDataParallel) else network
    return module


class BatchExplainer:
    """Explains the batches of a pipeline of one's own.

    Args:
        network: any callable on batches ``(B, C, *spatial)``.
        inferer: explains images, as made by :func:`monai_saliency.rise` and the other methods.
        split: what processes share: ``"cases"``, each explains its own batches; or ``"masks"``, each is given every
            batch and scores its share of the masks of every image.
        image_key: the key of the images, in batches that are dictionaries.
        label_key: the key of label maps ``(B, 1, *spatial)``, for masks and targets that are made of regions.
        held_keys: the keys of the network's other inputs, which the inferer's ``inputs`` passes on under these names.
    """

    def __init__(
        self,
        network: Callable[..., Any],
        inferer: PerturbationInferer,
        split: str = "cases",
        image_key: str = CommonKeys.IMAGE,
        label_key: str | None = None,
        held_keys: Sequence[str] = (),
    ) -> None:
        split = check_option("split", split, ("cases", "masks"))
        self.network = _unwrapped(network)
        self.inferer = inferer.replace(sharing=MasksOverRanks()) if split == "masks" else inferer
        self.image_key = image_key
        self.label_key = label_key
        self.held_keys = tuple(held_keys)

    def __call__(self, batch: Any) -> list[dict[str, Any]]:
        """For each image of a batch its ``case``, its map ``saliency``, and what is ``explained``."""
        values: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {self.image_key: batch}
        images = values[self.image_key]
        inputs = self.inferer.inputs.join(images, {key: values[key] for key in self.held_keys})
        given: list[dict[str, Any]] = [{} for _ in images]
        for known, name in zip(given, values.get("case", ()), strict=False):
            known["name"] = str(name)
        for known, labels in zip(given, () if self.label_key is None else values[self.label_key], strict=False):
            known["labels"] = labels
        cases = [Case.of(images, index, **known) for index, known in enumerate(given)]
        explanations = self.inferer.explain(inputs, self.network, cases=cases)
        scans = decollate_batch(images) if isinstance(images, MetaTensor) and images.is_batch else list(images)
        return [
            {"case": each.name, "saliency": with_meta_of(scan, each.saliency), "explained": each.explained}
            for scan, each in zip(scans, explanations, strict=True)
        ]
