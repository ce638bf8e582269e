"""Explaining inside a process group, for pipelines of one's own: all ranks share the masks of each image.

Start the processes as you do (``torchrun``, MPI, a scheduler), and make the group with
``torch.distributed.init_process_group``; with NCCL, set each process's GPU (``torch.cuda.set_device``) before. Other
engines stand on this: :mod:`~monai_saliency.distributed.lightning`, :mod:`~monai_saliency.distributed.accelerate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError, root_cause
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.inferer import PerturbationInferer, Sharing
from monai_saliency.inferers.row_check import RowsDepend
from monai_saliency.inferers.sharing import WorkerScores, take_scores
from monai_saliency.sharding import Part, rank_of
from monai_saliency.storage.score_store import CaseScores
from monai_saliency.utils.monai_private import single_process

__all__ = [
    "MasksOverRanks",
    "alone",
    "from_all_ranks",
    "merge_over_ranks",
    "told_to_all",
    "unwrapped",
    "wait_for_all",
]


def from_all_ranks(mine: Any, error: Exception | None = None, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank has, on every rank, in their order. Where one has failed all raise, and none waits for ever."""
    _, count = rank_of(group)
    everything: list[Any] = [(mine, None)]
    if count > 1:
        everything = [None] * count
        dist.all_gather_object(everything, (mine, None if error is None else _told(error)), group=group)
    if error is not None:
        raise error
    for rank, (_, told) in enumerate(everything):
        if told is not None:
            case, problem = told
            raise CaseError(case, problem) if case is not None else RuntimeError(f"rank {rank} has failed: {problem}")
    return [theirs for theirs, _ in everything]


@contextmanager
def told_to_all(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Tell all ranks what goes wrong here on this one alone: they raise where they next call :func:`from_all_ranks`,
    which nothing in here may do.
    """
    try:
        yield
    except Exception as error:
        from_all_ranks(None, error, group)


def _told(error: Exception) -> tuple[str | None, str]:
    """An error in words, for it need not be one that can be pickled: the case, where it names one, and the problem."""
    cause = root_cause(error)
    return (cause.case, cause.problem) if isinstance(cause, CaseError) else (None, f"{type(cause).__name__}: {cause}")


def merge_over_ranks(states: Sequence[CaseState], group: dist.ProcessGroup | None = None) -> None:
    """Bring the scores of all ranks together, each of which has scored another part of the same images' masks."""
    rank, count = rank_of(group)
    if count > 1:
        ranks = from_all_ranks([(_thumbnail(state), WorkerScores.of(state)) for state in states], group=group)
        _check_same(ranks)
        take_scores(states, [[scores for _, scores in theirs] for theirs in ranks], rank)
        for state in states:
            state.begin_round()


def _thumbnail(state: CaseState) -> np.ndarray:
    """The image, at most 3 voxels along each axis, by which another image is noticed."""
    image = state.case.image
    pool = F.adaptive_avg_pool2d if image.ndim == 3 else F.adaptive_avg_pool3d
    return pool(image[None].float(), 3).numpy(force=True)


def _check_same(ranks: Sequence[Sequence[tuple[np.ndarray, WorkerScores]]]) -> None:
    """Refuse ranks that hold different images, or have other settings."""
    for rank, theirs in enumerate(ranks):
        for (ours, our_scores), (other, scores) in zip(ranks[0], theirs, strict=False):
            if not _same(ours, other):
                raise ValueError(
                    f"ranks share the masks of an image, so each must be given the same images in the same order: rank "
                    f"0 has {our_scores.name}, rank {rank} another {scores.name}. Leave out the sampler that shares "
                    "images (DistributedSampler; in Lightning, Trainer(use_distributed_sampler=False))"
                )
        if any(ours.one_by_one != each.one_by_one for (_, ours), (_, each) in zip(ranks[0], theirs, strict=False)):
            continue  # maybe in another round: some begin anew, see `take_scores`
        known = [[(len(case.seen), *case.scores.shape) for _, case in cases] for cases in (ranks[0], theirs)]
        if known[0] != known[1]:
            raise ValueError(
                f"ranks share the masks of an image, so each must have the same settings: rank 0 has (masks, scores) "
                f"{known[0]}, rank {rank} has {known[1]}"
            )
        for (_, our_scores), (_, scores) in zip(ranks[0], theirs, strict=True):
            if found := our_scores.differences(scores):
                raise ValueError(
                    "ranks share the masks of an image, so each must have the same settings and the same network: case "
                    f"{our_scores.name}: rank 0 and rank {rank} differ in {' and '.join(found)}"
                )


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two thumbnails are of one image, up to what two machines' preprocessing differs by."""
    scale = float(np.nan_to_num(np.abs(one), posinf=0).max(initial=0))
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=1e-4 * scale, equal_nan=True))


class MasksOverRanks(Sharing):
    """All ranks share the masks of each image: each is given the same images, and has all maps.

    Rank r of n scores part r of n of the network batches (and the first batch, which decides what is explained). At the
    end of each round of masks the scores come together: a few kilobytes an image. All ranks get the same maps, equal to
    the bit to those of one process where the batch shape and the thread count are the same. Without a process group
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

    def score(
        self,
        inferer: PerturbationInferer,
        inputs: Any,
        network: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        cases: Sequence[Case] | None,
        stored: Sequence[CaseScores] | None,
        part: Part | None,
    ) -> list[CaseState]:
        """Score a batch of images; see :meth:`Sharing.score <monai_saliency.inferers.inferer.Sharing.score>`."""
        network = unwrapped(network)
        rank, count = rank_of(self.group)
        if part is not None or count == 1:
            return inferer.score_here(inputs, network, args, kwargs, cases=cases, stored=stored, part=part)
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
            mine = Part(rank, count)
            return inferer.score_here(inputs, network, args, kwargs, cases=cases, stored=stored, part=mine, meet=meet)
        except Exception as error:
            if not met:
                from_all_ranks(None, error, self.group)
            raise


def unwrapped(network: Callable[..., Any]) -> Callable[..., Any]:
    """The module inside of a ``DistributedDataParallel`` network, whose forwards meet those of other ranks; or it."""
    module: Callable[..., Any] = network.module if isinstance(network, DistributedDataParallel) else network
    return module


@contextmanager
def alone() -> Iterator[None]:
    """Let what a bundle gathers over a process group take this process for the only one."""
    with single_process():
        yield


def wait_for_all(barrier: Callable[[], Any] = dist.barrier) -> None:
    """Wait until all processes are done."""
    try:
        barrier()
    except RuntimeError:
        raise RuntimeError("another process has ended before its share was done: its own message says why") from None
