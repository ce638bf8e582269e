"""Perturbed images as an iterable dataset, for those who run the network themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from monai.utils import CommonKeys, convert_to_tensor
from torch.utils.data import IterableDataset, get_worker_info

from monai_saliency.cases import Case, image_file
from monai_saliency.errors import CaseError
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.sharding import Unit, check_rank, units
from monai_saliency.utils.ranks import rank_of

__all__ = ["PerturbedImages"]


class PerturbedImages(IterableDataset):
    """The images that a network sees while a cohort is explained, one by one, to the bit those of the inferer.

    Every (case, mask) is given exactly once over all ranks and all loader workers, whatever their numbers: they share
    the units of work that all engines share (:mod:`monai_saliency.sharding`). Masks of a case are shared by the
    inferer's
    network batches (``mask_batch_size``), since that is how they are rendered.

    It needs no process group, and finds one that is there when the iteration begins, or when a loader starts its
    workers; each rank must have the same number of these. A loader of it must not be sharded once more: do not hand it
    to ``Accelerator.prepare``. Lightning leaves it alone.

    Example::

        loader = DataLoader(PerturbedImages(cohort, ms.rise(1000, target=target)), batch_size=16, num_workers=2)
        for batch in loader:
            outputs = network(batch["image"])  # of batch["case"], batch["mask"]

    Args:
        dataset: the cohort, with a length: images ``(C, *spatial)``, or dictionaries with them.
        inferer: what perturbs them.
        image_key: the image that is perturbed, in dictionaries.
        case_key: the case's name; its file's name where it has none, or its place.
        label_key: its label map ``(1, *spatial)``, for masks that are made of regions.
        held_keys: other inputs of the network, which are given as they are with each perturbed image.
        split: what ranks and workers share: ``"cases"``, ``"masks"``, or ``"auto"``; see
            :func:`monai_saliency.sharding.units`. A case whose masks are shared is loaded by each that has some.
        rank: of this process; the process group's by default.
        world_size: how many processes there are; as many as the process group has by default.

    Yields:
        dictionaries with the perturbed image ``(C, *spatial)`` under ``image_key``, ``case``, its name; ``index``, its
        place in the cohort; ``mask``, the index of the mask, -1 for the unperturbed image; and the held inputs.

    Raises:
        ValueError: when ``split`` is none of these, or ``rank`` or ``world_size`` is given alone or out of its range.
    """

    def __init__(
        self,
        dataset: Any,
        inferer: PerturbationInferer,
        image_key: str = CommonKeys.IMAGE,
        case_key: str = "case",
        label_key: str | None = None,
        held_keys: Sequence[str] = (),
        split: str = "auto",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        units(0, 1, split)  # refuses what is no split
        if (rank is None) != (world_size is None):
            raise ValueError(f"give `rank` and `world_size`, or neither: got {rank} and {world_size}")
        if rank is not None and world_size is not None:
            check_rank(rank, world_size)
        self.dataset = dataset
        self.inferer = inferer
        self.image_key = image_key
        self.case_key = case_key
        self.label_key = label_key
        self.held_keys = tuple(held_keys)
        self.split = split
        self.place = None if rank is None or world_size is None else (rank, world_size)
        self._place_when_sent = (0, 1)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned has no process group: it is told here, by the process that has.
        return {**self.__dict__, "_place_when_sent": self._rank_of()}

    def _rank_of(self) -> tuple[int, int]:
        if self.place is not None:
            return self.place
        found = rank_of()
        return found if found[1] > 1 else self._place_when_sent

    def units(self) -> list[Unit]:
        """What is given here: the share of this rank, and of this worker of it."""
        rank, world_size = self._rank_of()
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        shares = world_size * workers
        # Neighbouring units go to different ranks first, so that none has all of the work.
        return units(len(self.dataset), shares, self.split)[number * world_size + rank :: shares]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for unit in self.units():
            item = self.dataset[unit.index]
            values: Mapping[str, Any] = item if isinstance(item, Mapping) else {self.image_key: item}
            image = convert_to_tensor(values[self.image_key], track_meta=True)[None]
            name = values.get(self.case_key) or image_file(image) or f"image {unit.index}"
            labels = None if self.label_key is None else values[self.label_key]
            case = Case.of(image, name=str(name), labels=labels)
            (state,), _ = self.inferer.start(self.inferer.inputs.join(image, {}), [case])
            if state.masks.in_rounds:
                raise CaseError(case.name, "its later masks depend on scores, which only the inferer itself knows")
            count = state.num_rows
            size = min(self.inferer.mask_batch_size, count)
            starts = range(0, count, size)
            for number in unit.part.of(len(starts)):
                start, stop = starts[number], min(starts[number] + size, count)
                batch = state.case.image.new_empty(stop - start, *state.case.image.shape)
                with torch.no_grad():
                    state.perturb(start, stop, out=batch)
                for row, perturbed in enumerate(batch, start):
                    # A copy, so that who keeps one image keeps no batch of them.
                    found = {self.image_key: perturbed.clone(), "case": case.name, "index": unit.index}
                    yield {**{key: values[key] for key in self.held_keys}, **found, "mask": row - 1}
