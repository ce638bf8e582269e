"""Explaining inside a process group, for pipelines of one's own: all ranks share the masks of each image.

Start the processes as you do (``torchrun``, MPI, a scheduler), and make the group with
``torch.distributed.init_process_group``; with NCCL, set each process's GPU (``torch.cuda.set_device``) before. Other
engines use this: :mod:`~monai_saliency.distributed.lightning`, :mod:`~monai_saliency.distributed.accelerate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from monai.data import MetaTensor, decollate_batch
from monai.utils import CommonKeys
from torch.nn.parallel import DistributedDataParallel

from monai_saliency.cases import Case
from monai_saliency.errors import CaseError, root_cause
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import Job, PerturbationInferer, Sharing
from monai_saliency.inferers.runner import Run, Share, of_part
from monai_saliency.inferers.scores import Report
from monai_saliency.inferers.walk import Walk
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.runtime import runtime_settings
from monai_saliency.sharding import Part, rank_of
from monai_saliency.storage.key import Unfingerprintable, fingerprint
from monai_saliency.utils.arguments import check_option
from monai_saliency.utils.precision import chosen_arithmetic
from monai_saliency.utils.tensors import with_meta_of


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


class RankShare(Share):
    """All ranks run a part of each round's batches, and exchange their scores at its end."""

    def __init__(self, network: Any, group: dist.ProcessGroup | None) -> None:
        self.network, self.group = network, group
        self.rank, self.count = rank_of(group)
        self.told = False  # whether all ranks know of what fails here

    def begin(self, walks: Sequence[Walk], deciding: Callable[[], Mapping[str, Any]]) -> None:
        given = {**deciding(), "autocast or TF32": [*chosen_arithmetic(), runtime_settings(self.network)]}
        hashes = {name: _hash(value) for name, value in given.items()}
        hashes["the network"] = network_fingerprint(self.network, kept=True)
        for walk in walks:
            within = _hash(None if walk.case.within is None else walk.case.within.cpu())
            walk.scores.made_by = {**hashes, "masks": repr(walk.masks.key), "`within`": within}

    def mine(self, batches: list[list[Run]]) -> list[list[Run]]:
        self.told = False
        return of_part(batches, Part(self.rank, self.count))

    def gather(self, walks: Sequence[Walk]) -> None:
        self.told = True
        ranks = from_all_ranks([walk.scores.report() for walk in walks], group=self.group)
        _check_same(ranks)
        for number, walk in enumerate(walks):
            walk.scores.gather([reports[number] for reports in ranks], self.rank)


def _hash(value: Any) -> str | None:
    try:
        return fingerprint(value)
    except Unfingerprintable:
        return None


def _check_same(ranks: Sequence[Sequence[Report]]) -> None:
    """Refuse ranks that hold different images, or have other settings."""
    for rank, theirs in enumerate(ranks):
        found = [] if len(theirs) == len(ranks[0]) else [f"the number of images ({len(ranks[0])} and {len(theirs)})"]
        for ours, other in zip(ranks[0], theirs, strict=False):
            if ours.case != other.case:
                found.append(f"the image ({ours.case} and {other.case})")
            found += ours.differences(other)
        if found:
            raise ValueError(
                "ranks share the masks of an image, so each must be given the same images in the same order, and have "
                f"the same settings and network: rank 0 and rank {rank} differ in {' and '.join(found)}. Leave out a "
                "sampler that shares images (DistributedSampler; in Lightning, Trainer(use_distributed_sampler=False))"
            )


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

    def score(self, inferer: PerturbationInferer, job: Job) -> list[Explanation | None]:
        """Score a batch of images; see :meth:`Sharing.score <monai_saliency.inferers.inferer.Sharing.score>`."""
        job = replace(job, network=_unwrapped(job.network))
        if job.part.count > 1 or rank_of(self.group)[1] == 1:
            return inferer.score_here(job)
        share = RankShare(job.network, self.group)
        try:
            return inferer.score_here(job, share)
        except Exception as error:
            if not share.told:
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
        within_key: the key of masks ``(B, 1, *spatial)``: outside of them nothing is perturbed, and maps are 0.
    """

    def __init__(
        self,
        network: Callable[..., Any],
        inferer: PerturbationInferer,
        split: str = "cases",
        image_key: str = CommonKeys.IMAGE,
        label_key: str | None = None,
        held_keys: Sequence[str] = (),
        within_key: str | None = None,
    ) -> None:
        split = check_option("split", split, ("cases", "masks"))
        self.network = _unwrapped(network)
        self.inferer = inferer.replace(sharing=MasksOverRanks()) if split == "masks" else inferer
        self.image_key = image_key
        self.keys = {"labels": label_key, "within": within_key}
        self.held_keys = tuple(held_keys)

    def __call__(self, batch: Any) -> list[dict[str, Any]]:
        """For each image of a batch its ``case``, its map ``saliency``, and what is ``explained``."""
        values: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {self.image_key: batch}
        images = values[self.image_key]
        inputs = self.inferer.inputs.join(images, {key: values[key] for key in self.held_keys})
        cases = [self._case(values, images, index) for index in range(len(images))]
        explanations = self.inferer.explain(inputs, self.network, cases=cases)
        is_batch = isinstance(images, MetaTensor) and images.is_batch
        scans = decollate_batch(images) if is_batch else images
        rows = []
        for scan, explanation in zip(scans, explanations, strict=True):
            saliency = with_meta_of(scan, explanation.saliency)
            rows.append({"case": explanation.name, "saliency": saliency, "explained": explanation.explained})
        return rows

    def _case(self, values: Mapping[str, Any], images: Any, index: int) -> Case:
        """A case of a batch, as far as the batch names it."""
        given: dict[str, Any] = {}
        if "case" in values:
            given["name"] = str(values["case"][index])
        given |= {name: values[key][index] for name, key in self.keys.items() if key is not None}
        return Case.of(images, index, **given)
