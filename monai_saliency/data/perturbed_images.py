"""Perturbed images as an iterable dataset, for programs that run the network themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.utils import CommonKeys, convert_to_tensor, ensure_tuple
from torch.utils.data import IterableDataset, get_worker_info

from monai_saliency.cases import Case, image_file
from monai_saliency.errors import CaseError
from monai_saliency.inferers.inferer import PerturbationInferer, explaining
from monai_saliency.sharding import Unit, rank_of, units

__all__ = ["PerturbedImages"]


class PerturbedImages(IterableDataset):
    """The perturbed images of a cohort, one by one, equal to the bit to the images that the inferer makes.

    Each pair of a case and a mask appears exactly once over all ranks and all workers of a loader. They share the units
    of work in the same way as all engines (:mod:`monai_saliency.sharding`). The masks of a case are divided between
    network batches of the inferer (``mask_batch_size``), since masks are rendered batch by batch.

    A process group is not needed. If there is one when the iteration or a loader's workers begin, it is used. Each
    rank must have the same number of workers. Do not shard a loader of this dataset again: never give it to
    ``Accelerator.prepare``. Lightning does not shard it.

    Args:
        dataset: the cohort, with a length. Its items are images ``(C, *spatial)``, or dictionaries with an image.
        inferer: the inferer that perturbs the images.
        image_key: the key of the image.
        label_key: the key of the label map ``(1, *spatial)``, for masks made of regions.
        held_keys: the keys of the network's other inputs, which are added unchanged to each perturbed image.
        split: how ranks and workers share the cohort: ``"cases"``, ``"masks"`` or ``"auto"``, see
            :func:`monai_saliency.sharding.units`. If they share the masks of a case, each of them loads the case, so
            leave random transforms out.

    Items:
        dictionaries with the perturbed image ``(C, *spatial)`` under ``image_key``; the name of the case under
        ``case``; its index in the cohort under ``index``; the index of the mask under ``mask``, -1 for the unperturbed
        image; and the inputs of ``held_keys``.

    Raises:
        ValueError: when ``split`` is unknown, or a key names something else that is yielded.
        CaseError: on iterating, when an item holds no image or lacks a key, or when the masks of a case depend on
            earlier scores.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> from monai.data import DataLoader
        >>> images = [torch.ones(1, 4, 4), torch.zeros(1, 4, 4)]
        >>> explain = ms.sliding_window(2, 2, target=ms.ClassScore([0], "none"))
        >>> batch = next(iter(DataLoader(PerturbedImages(images, explain), batch_size=3)))
        >>> tuple(batch["image"].shape), batch["index"].tolist(), batch["mask"].tolist()
        ((3, 1, 4, 4), [0, 0, 0], [-1, 0, 1])
    """

    def __init__(
        self,
        dataset: Any,
        inferer: PerturbationInferer,
        image_key: str = CommonKeys.IMAGE,
        label_key: str | None = None,
        held_keys: Sequence[str] = (),
        split: str = "auto",
    ) -> None:
        units(0, 1, split)  # checks `split`
        held_keys = ensure_tuple(held_keys)
        if clash := sorted({"case", "index", "mask"} & {image_key, *held_keys}):
            raise ValueError(f"{clash[0]!r} is a key of what is yielded: rename it in the dataset")
        self.dataset = dataset
        self.inferer = explaining(inferer)
        self.image_key = image_key
        self.label_key = label_key
        self.held_keys = held_keys
        self.split = split
        self._place_when_sent = (0, 1)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group, so the rank is sent with the dataset.
        return {**self.__dict__, "_place_when_sent": self._rank_of()}

    def _rank_of(self) -> tuple[int, int]:
        found = rank_of()
        return found if found[1] > 1 else self._place_when_sent

    def units(self) -> list[Unit]:
        """The units of work of this rank and of this worker of a loader."""
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        rank, world_size = self._rank_of()
        shares = world_size * workers
        # Neighbouring units go to different ranks first, so that no rank has all the work.
        return units(len(self.dataset), shares, self.split)[number * world_size + rank :: shares]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for unit in self.units():
            values = self._item(unit.index)
            image = convert_to_tensor(values[self.image_key], track_meta=True)[None]
            name = str(values.get("case") or image_file(image) or f"image {unit.index}")
            labels = None if self.label_key is None else values[self.label_key]
            case = Case.of(image, name=name, labels=labels)
            held = {key: values[key] for key in self.held_keys}
            for mask, perturbed in self._perturbed(unit, image, case):
                place = {"case": name, "index": unit.index, "mask": mask}
                yield {**held, self.image_key: perturbed, **place}

    def _item(self, index: int) -> Mapping[str, Any]:
        """An item of the cohort as a dictionary with all that is needed."""
        item = self.dataset[index]
        values = item if isinstance(item, Mapping) else {self.image_key: item}
        name = str(values.get("case") or f"image {index}")
        for key in (self.image_key, *self.held_keys, self.label_key):
            if key is not None and key not in values:
                raise CaseError(name, f"the dataset's item has no {str(key)!r}, only {sorted(map(str, values))}")
        image = values[self.image_key]
        if not isinstance(image, torch.Tensor | np.ndarray):
            kind = type(image).__name__
            raise CaseError(name, f"the dataset gives a {kind}, where an image (C, *spatial) is expected")
        return values

    def _perturbed(self, unit: Unit, image: torch.Tensor, case: Case) -> Iterator[tuple[int, torch.Tensor]]:
        """A unit's perturbed images ``(C, *spatial)`` of an image ``(1, C, *spatial)``, each with the index of its
        mask.
        """
        (state,), _ = self.inferer.start(self.inferer.inputs.join(image, {}), [case])
        if state.masks.adaptive:
            raise CaseError(case.name, "its later masks depend on scores, which only the inferer itself knows")
        size = min(self.inferer.mask_batch_size, state.num_rows)
        starts = range(0, state.num_rows, size)
        for number in unit.part.of(len(starts)):
            start = starts[number]
            stop = min(start + size, state.num_rows)
            batch = state.case.image.new_empty(stop - start, *state.case.image.shape)
            with torch.no_grad():
                state.images.write(start, stop, out=batch)
            for row, perturbed in enumerate(batch, start):
                # A copy, so that keeping one image does not keep the memory of its batch.
                yield row - 1, perturbed.clone()
