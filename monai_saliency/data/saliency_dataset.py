"""Image and saliency together, for those who train or audit with maps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from monai.config import KeysCollection
from monai.transforms import Compose, MapTransform
from monai.transforms.traits import RandomizableTrait
from monai.utils import CommonKeys

from monai_saliency.data.cached_dataset import CachedDataset, choose_backend
from monai_saliency.errors import CaseError, as_case_error
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.identity import strict_network_fingerprint
from monai_saliency.storage.fingerprint import Unfingerprintable, fingerprint
from monai_saliency.storage.locks import Locks
from monai_saliency.transforms import Saliencyd

__all__ = ["SaliencyDataset"]

# Of all datasets: two that share a network must not change its mode under each other.
_networks = Locks()
# What changes no map.
_SPEED = {"mask_batch_size", "meter", "progress", "sharing"}


class SaliencyDataset(CachedDataset):
    """A cohort whose items hold the saliency map of their image, computed at the first read and cached.

    The map is made of what stands before the first random transform, which is what the network must be given. Random
    transforms, and all that follows the first, see both, so that naming both keys augments them alike::

        Compose([LoadImaged("image"), ..., RandFlipd(["image", "saliency"], prob=0.5)])

    Preprocessed scans are cached as in :class:`monai_saliency.data.cached_dataset.CachedDataset`, which shares them
    where it has the
    same transforms. Maps are entries of their own beside them, so that another network or another way of explaining
    reads the scans and computes maps alone. A map is used for the same scan (its files, transforms and library
    versions), the same network, and the same inferer, as it was when the dataset was made, but for its batch size.

    A module is identified by its weights and buffers, its parts with their printed settings, the files that define
    their classes, and their plain attributes (see
    :func:`monai_saliency.networks.identity.strict_network_fingerprint`). All of it is looked at in each read, so that a
    change is noticed; a ``network_id`` saves that time. Maps of a module that holds a lambda, or that changes as it
    predicts, such as by counting its calls, are not cached without one, as a warning says. Explaining puts a module
    into evaluation mode for a while: do not give the very one that is trained meanwhile, but a copy.

    Any number of threads may read; a network explains for one at a time, and each map is computed once. With worker
    processes use the ``"disk"`` or ``"lmdb"`` cache, as each process has its own memory.

    Args:
        data: cases, as :func:`monai_saliency.data.cohort.find_cases` gives them.
        transform: the preprocessing, then the random transforms.
        network: any callable on batches ``(B, C, *spatial)``.
        inferer: what explains, as made by :func:`monai_saliency.rise` and its like.
        cache: ``"none"``, ``"memory"``, ``"disk"``, ``"lmdb"`` or ``"window"``, see
            :func:`monai_saliency.data.cached_dataset.cohort_dataset`.
        cache_dir: see there.
        network_id: the caller's own word for the network, which must change with it. Without one, maps of a network
            that cannot be told from others, such as one that is no module, are not cached.
        image_key: the image to explain, floating point, ``(C, *spatial)``.
        saliency_key: where its map goes, ``(K, *spatial)``: a MetaTensor with the image's affine and
            ``applied_operations``, on the image's device, in the score's unit; float32, or float64 for such an image.
        label_key: where an item holds its label map, for masks and targets that are made of regions.
        held_keys: where an item holds the network's other inputs, see :class:`monai_saliency.Saliencyd`.
        device: where to explain; the image's own device by default.
        checksum: see there.
        window: see there.
        map_size: see there.

    Raises:
        ValueError: when a transform before the first random one names ``saliency_key``, or for the cache's arguments.
        CaseError: on reading a case that cannot be loaded or explained. Others are not affected.
    """

    def __init__(
        self,
        data: Sequence[dict[str, Any]],
        transform: Sequence[Callable[[Any], Any]] | Callable[[Any], Any] | None,
        network: Callable[..., torch.Tensor],
        inferer: PerturbationInferer,
        cache: str = "memory",
        cache_dir: str | Path | None = None,
        network_id: str | None = None,
        image_key: str = CommonKeys.IMAGE,
        saliency_key: str = "saliency",
        label_key: str | None = None,
        held_keys: KeysCollection = (),
        device: torch.device | str | None = None,
        checksum: bool = False,
        window: int = 32,
        map_size: int = 1 << 30,
    ) -> None:
        # Two entries a scan: itself, and its map.
        super().__init__(data, transform, choose_backend(cache, cache_dir, window, map_size, entries=2), checksum)
        self.network_id = network_id
        self.image_key = image_key
        self.saliency_key = saliency_key
        self._to_map = Saliencyd(image_key, network, inferer, saliency_key, device, label_key, held_keys)
        self._process = os.getpid()
        steps = self._steps()
        self._num_prepared = next((i for i, step in enumerate(steps) if _is_random(step)), len(steps))
        self._check_names(steps)
        self._explaining = self._fingerprint_explaining(steps) if self.backend is not None else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process=os.getpid())

    def _check_names(self, steps: Sequence[Any]) -> None:
        for number, step in enumerate(steps[: self._num_prepared]):
            if self.saliency_key not in _keys(step):
                continue
            after, inner = "as no transform is random", ""
            if self._num_prepared < len(steps):
                random = f"transform {self._num_prepared + 1}, {type(steps[self._num_prepared]).__name__}"
                after, inner = f"right before the first random one ({random})", "list it after that one, or "
            raise ValueError(
                f"transform {number + 1} of {len(steps)}, {type(step).__name__}, names {self.saliency_key!r}, but maps "
                f"are made after it, {after}: {inner}give it to a monai.data.Dataset around this one"
            )

    def _fingerprint_explaining(self, steps: Sequence[Any]) -> str | None:
        """What tells how maps are made from others' ways; None, with a warning, where it cannot be told."""
        if self._num_cached < self._num_prepared:
            name = type(steps[self._num_cached]).__name__
            self._warn_uncached(f"what {name}, before the first random transform, does cannot be told")
            return None
        inferer = self._to_map.saliency.inferer
        settings = {name: value for name, value in inferer.settings.items() if name not in _SPEED}
        try:
            return fingerprint(
                [type(inferer), settings, self.image_key, self._to_map.label_key, self._to_map.held_keys]
            )
        except Unfingerprintable as error:
            self._warn_uncached(f"how they are made cannot be told: {error}")
            return None

    def _fingerprint_network(self) -> str | None:
        """What tells the network from others; None, with a warning, where it cannot be told."""
        if self._explaining is None:
            return None
        network: Any = self._to_map.saliency.network
        try:
            known = strict_network_fingerprint(network, self.network_id)
            if known is not None:
                return known
            reason = "is no module"
        except Unfingerprintable as error:
            reason = f"holds {error}"
        self._warn_uncached(f"the network {reason}; give it a network_id")
        return None

    def _warn_uncached(self, reason: str) -> None:
        self._warn("saliency", f"saliency maps are not cached, but computed at each read: {reason}")

    def _prepared(self, case: Any) -> Any:
        name = str(case.get("case", "without a name"))
        if not self.network_id:
            self._check_process(name)
        # All told before the scan is read, so that no map is kept for a scan or a network that is not the one it shows.
        key = self._case_key(case)
        network = self._fingerprint_network()
        item = self._preprocessed(case, key if self._num_cached else None)
        item = self._finish(item, self._steps()[self._num_cached : self._num_prepared])
        self._check_item(name, item)

        def is_current() -> bool:
            if self._fingerprint_network() == network:
                return self._key(case) == key
            self._warn(
                "changed",
                "a saliency map is not cached, as the network changed while it explained: one that changes itself, "
                "such as by counting its calls, needs a network_id to have its maps cached",
            )
            return False

        told = None if key is None or network is None else fingerprint([key, self._explaining, network])
        saliency = self._cached("saliency maps", told, lambda: self._explain(name, item), is_current)
        return {**item, self.saliency_key: saliency}

    def _check_item(self, name: str, item: Any) -> None:
        if not isinstance(item, Mapping):
            raise CaseError(
                name,
                f"the transforms before the first random one gave a {type(item).__name__}; they must give one "
                "dictionary, whose image is explained",
            )
        if self.image_key not in item:
            raise CaseError(name, f"it has no image_key {self.image_key!r} to explain, but {sorted(map(str, item))}")
        if self.saliency_key in item:
            raise CaseError(name, f"it holds a {self.saliency_key!r} of its own: choose another saliency_key")

    def _explain(self, name: str, item: Mapping[Any, Any]) -> Any:
        self._check_process(name)
        try:
            with _networks.only_one(str(id(self._to_map.saliency.network))):
                return self._to_map(item)[self.saliency_key]
        except Exception as error:
            raise as_case_error(error, name, "it could not be explained: ") from error

    def _check_process(self, name: str) -> None:
        if os.getpid() != self._process and self._is_on_cuda():
            raise CaseError(
                name,
                "a network on a CUDA device cannot be used in a forked worker process: use threads, give the loader "
                "multiprocessing_context='spawn', or fill a disk or lmdb cache first and give a network_id",
            )

    def _is_on_cuda(self) -> bool:
        network, device = self._to_map.saliency.network, self._to_map.saliency.device
        if device is not None:
            return torch.device(device).type == "cuda"
        return isinstance(network, torch.nn.Module) and any(weights.is_cuda for weights in network.parameters())


def _is_random(step: Any) -> bool:
    if type(step) is Compose:
        return any(_is_random(part) for part in step.transforms)
    return isinstance(step, RandomizableTrait)


def _keys(step: Any) -> Iterator[Any]:
    """The keys that a transform, or one inside it, names."""
    if isinstance(step, MapTransform):
        yield from step.keys
    for part in getattr(step, "transforms", ()):
        yield from _keys(part)
