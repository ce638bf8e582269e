"""Explaining inside a process group, for pipelines of one's own: all ranks share the masks of each image.

Start the processes as you do (``torchrun``, MPI, a scheduler), and make the group with
``torch.distributed.init_process_group``; with NCCL, set each process's GPU (``torch.cuda.set_device``) before. Other
engines stand on this: :mod:`~monai_saliency.distributed.lightning`, :mod:`~monai_saliency.distributed.accelerate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from monai_saliency.distributed.sharing import SharingInferer
from monai_saliency.errors import CaseError, root_cause
from monai_saliency.inferers.case_state import CaseRun
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.sharding import Part
from monai_saliency.utils.monai_private import single_process
from monai_saliency.utils.ranks import rank_of

__all__ = [
    "MasksOverRanks",
    "alone",
    "from_all_ranks",
    "merge_over_ranks",
    "told_to_all",
    "undistributed",
    "wait_for_all",
]


def from_all_ranks(mine: Any, error: Exception | None = None, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank has, on every rank, in their order. Where one has failed all raise, and none waits for ever.

    Args:
        mine: what this rank has. It is sent by pickle.
        error: why this rank has nothing.
        group: the default group where None.

    Raises:
        Exception: ``error``, on the ranks that have one.
        CaseError, RuntimeError: on the others, the first rank's that has one.
    """
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

    Args:
        group: the default group where None.
    """
    try:
        yield
    except Exception as error:
        from_all_ranks(None, error, group)


def _told(error: Exception) -> tuple[str | None, str]:
    """An error in words, for it need not be one that can be pickled: the case, where it names one, and the problem."""
    cause = root_cause(error)
    return (cause.case, cause.problem) if isinstance(cause, CaseError) else (None, f"{type(cause).__name__}: {cause}")


def merge_over_ranks(runs: Sequence[CaseRun], group: dist.ProcessGroup | None = None) -> None:
    """Bring the scores of all ranks together, each of which has scored another part of the same images' masks.

    Afterwards the runs are the same to the bit on all ranks, and so are the maps that they make. Of what several ranks
    have scored (the first batch) the last one's counts, and of the unperturbed image the first one's.

    Scores are not looked at before they are together, so that all ranks refuse a case with NaN, or none.

    Args:
        runs: what :meth:`~monai_saliency.inferers.inferer.PerturbationInferer.score` gave here.
        group: the default group where None.

    Raises:
        ValueError: on all ranks, when they hold different images, or have other settings.
    """
    if rank_of(group)[1] > 1:
        _merge(runs, from_all_ranks([_Scored.of(run) for run in runs], group=group))


@dataclass(frozen=True)
class _Scored:
    """What one rank knows of a case, in the host's memory.

    Attributes:
        name: the case's name.
        thumbnail: the image, at most 3 voxels along each axis, by which another one is told.
        seen: bool ``(N,)``, which masks were scored.
        scores: ``(N, K)``.
        reference_scores: ``(K,)``.
        num_forwards: see :class:`~monai_saliency.inferers.case_state.Explanation`.
    """

    name: str
    thumbnail: np.ndarray
    seen: torch.Tensor
    scores: torch.Tensor
    reference_scores: torch.Tensor
    num_forwards: int

    @staticmethod
    def of(run: CaseRun) -> _Scored:
        pool = F.adaptive_avg_pool2d if run.case.image.ndim == 3 else F.adaptive_avg_pool3d
        thumbnail = pool(run.case.image[None].float(), 3).numpy(force=True)
        state = run.state
        values = (state.seen.cpu(), state.scores.detach().cpu(), state.reference_scores.detach().cpu())
        return _Scored(run.case.name, thumbnail, *values, run.num_forwards)


def _merge(runs: Sequence[CaseRun], ranks: Sequence[Sequence[_Scored]]) -> None:
    for rank, theirs in enumerate(ranks):
        for ours, other in zip(ranks[0], theirs, strict=False):
            if not _same(ours.thumbnail, other.thumbnail):
                raise ValueError(
                    f"ranks share the masks of an image, so each must be given the same images in the same order: rank "
                    f"0 has {ours.name}, rank {rank} another {other.name}. Leave out the sampler that shares images "
                    "(DistributedSampler; in Lightning, Trainer(use_distributed_sampler=False))"
                )
        known = [[(len(case.seen), *case.scores.shape) for case in cases] for cases in (ranks[0], theirs)]
        if known[0] != known[1]:
            raise ValueError(
                f"ranks share the masks of an image, so each must have the same settings: rank 0 has (masks, scores) "
                f"{known[0]}, rank {rank} has {known[1]}"
            )
    for index, run in enumerate(runs):
        cases = [theirs[index] for theirs in ranks]
        run.state = run.state.estimator.start(run.masks, cases[0].reference_scores.to(run.state.scores))
        for case in cases:
            seen = case.seen.nonzero().flatten().tolist()
            run.state.update(seen, case.scores[seen])
        run.num_forwards = sum(case.num_forwards for case in cases)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two thumbnails are of one image, up to what two machines' preprocessing differs by."""
    scale = float(np.nan_to_num(np.abs(one), posinf=0).max(initial=0))
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=1e-4 * scale, equal_nan=True))


class MasksOverRanks(SharingInferer):
    """An inferer whose masks are shared by all ranks, each of which is given the same images and has all maps.

    Rank r of n scores part r of n of the network batches (and the first batch, in which it is decided what is
    explained), then the scores come together: a few kilobytes an image. All ranks get the same maps, to the bit those
    of ``inferer`` where the batch shape and the thread count are the same. Without a process group it is ``inferer``.

    All ranks must call it alike, since they meet there; they wait no longer than the group's timeout. Of a
    ``DistributedDataParallel`` network the module inside is run, as its own forwards meet other ranks.

    Example::

        dist.init_process_group("gloo")
        explain = MasksOverRanks(ms.rise(1000, target=ms.ClassScore("predicted", "softmax")))
        maps = explain(images, network)  # on every rank

    Args:
        inferer: what explains.
        group: the ranks; the default group where None.
    """

    def __init__(self, inferer: PerturbationInferer, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(inferer)
        self.group = group

    def score(
        self, inputs: Any, network: Callable[..., Any], *args: Any, part: Part | None = None, **kwargs: Any
    ) -> list[CaseRun]:
        """Score a batch of images; see :meth:`~monai_saliency.inferers.inferer.PerturbationInferer.score`.

        Args:
            inputs: the same on all ranks.
            network: the same on all ranks.
            args: as there.
            part: what to run here, and nothing comes together; by default this rank's share of all.
            kwargs: as there.

        Raises:
            ValueError: on all ranks, when they hold different images, or have other settings.
            CaseError, RuntimeError: when another rank has failed.
        """
        network = undistributed(network)
        rank, count = rank_of(self.group)
        if part is not None or count == 1:
            return self.whole.score(inputs, network, *args, part=part, **kwargs)
        with told_to_all(self.group):
            runs = self.whole.score(inputs, network, *args, part=Part(rank, count), **kwargs)
            scored = [_Scored.of(run) for run in runs]
        _merge(runs, from_all_ranks(scored, group=self.group))
        return runs


def undistributed(network: Callable[..., Any]) -> Callable[..., Any]:
    """The module inside of a ``DistributedDataParallel`` network, whose forwards meet those of other ranks; or it."""
    module: Callable[..., Any] = network.module if isinstance(network, DistributedDataParallel) else network
    return module


@contextmanager
def alone() -> Iterator[None]:
    """Let what a bundle gathers over a process group take this process for the only one.

    A bundle's handlers (``MetricsSaver``, ``ClassificationSaver``) wait for all processes in each of its evaluator's
    runs. Processes that each explain their own share do not come there equally often, and would wait for ever.
    """
    with single_process():
        yield


def wait_for_all(barrier: Callable[[], Any] = dist.barrier) -> None:
    """Wait until all processes are done.

    Args:
        barrier: meets the others.

    Raises:
        RuntimeError: when one has ended before.
    """
    try:
        barrier()
    except RuntimeError:
        raise RuntimeError("another process has ended before its share was done: its own message says why") from None
