"""A dataset of images with their saliency maps, for training and audits with maps."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from monai.config import KeysCollection
from monai.transforms import MapTransform
from monai.utils import CommonKeys

from monai_saliency.data.cached_dataset import CachedDataset, is_random
from monai_saliency.errors import as_case_error
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.identity import network_key
from monai_saliency.storage.key import Unfingerprintable, fingerprint
from monai_saliency.transforms import Saliencyd
from monai_saliency.utils.precision import chosen_arithmetic

# For all datasets: two datasets of one network must not switch its mode at the same time.
_explaining = threading.RLock()
# Where MONAI's transforms that move voxels are.
_MOVING = ("monai.transforms.spatial.", "monai.transforms.croppad.")


class SaliencyDataset(CachedDataset):
    """A cohort whose items hold the saliency map of their image, which is computed at the first read and cached.

    The image is explained after the last transform before the first random one: the network must accept it there.
    The first random transform and all transforms after it see both the image and the map, so that naming both keys
    augments both in the same way (a warning names a transform of MONAI that moves one of them alone)::

        Compose([LoadImaged("image"), ..., RandFlipd(["image", "saliency"], prob=0.5)])

    Preprocessed scans are cached as in :class:`monai_saliency.data.CachedDataset`, and shared with a dataset of that
    class. Maps are separate entries. A cached map is used for the same scan (its files, transforms and library
    versions), the same network and the same inferer, as they are at the read. The batch size may differ.

    A module is identified by its classes, weights, buffers and plain attributes; a ``network_id`` saves this time.
    Without one, maps of a module that holds something unknown (a hook, a lambda) are not cached, with a warning.
    Explaining switches a module to evaluation mode for a while, so give a copy of one that is trained meanwhile.

    Any number of threads may read, and one case at a time is explained. With worker processes use the ``"disk"`` or
    ``"lmdb"`` cache, since each process has its own memory.

    Args:
        data: the cases, as returned by :func:`monai_saliency.data.cohort.find_cases`.
        transform: the preprocessing, then the random transforms.
        network: any callable on batches ``(B, C, *spatial)``.
        inferer: the inferer, as made by :func:`monai_saliency.rise` and the other methods.
        cache: where scans and maps are kept: ``"none"``, ``"memory"``, ``"disk"``, ``"lmdb"`` or ``"window"``, see
            :class:`monai_saliency.data.CachedDataset`.
        cache_dir: the folder of ``"disk"``, ``"lmdb"`` and ``"window"``.
        network_id: a name chosen by the caller, which must change whenever the network does. Without it, maps of a
            network that cannot be identified, such as one that is not a module, are not cached.
        image_key: the key of the image to explain: floating point, ``(C, *spatial)``.
        saliency_key: the key of its map ``(K, *spatial)``: a MetaTensor with the image's affine and
            ``applied_operations``, on the image's device, in the unit of the score. Its type is float32, or float64 if
            the image has this type.
        label_key: the key of the label map, for masks and targets made of regions.
        held_keys: the keys of the network's other inputs, see :class:`monai_saliency.Saliencyd`.
        within_key: the key of the part that is perturbed, see :class:`monai_saliency.Saliencyd`.
        device: the device to explain on. Default: the device of the image.
        checksum: identify a scan's files by their content. Otherwise by path, size and modification time.

    Raises:
        ValueError: when an argument of the cache is missing or out of its range.
        CaseError: on reading a case that cannot be loaded or explained. Other cases are not affected.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> from monai.transforms import ScaleIntensityd
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        >>> explain = ms.sliding_window(2, target=ms.ClassScore([1], "softmax"))
        >>> cases = [{"case": "a", "image": torch.rand(1, 4, 4)}]
        >>> item = SaliencyDataset(cases, [ScaleIntensityd("image")], network, explain)[0]
        >>> tuple(item["image"].shape), tuple(item["saliency"].shape)
        ((1, 4, 4), (1, 4, 4))
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
        within_key: str | None = None,
    ) -> None:
        # For the last 32 scans of "window": each has two entries, the scan and its map.
        super().__init__(data, transform, cache, cache_dir, checksum, window=64)
        self.network_id = network_id
        self.image_key = image_key
        self.saliency_key = saliency_key
        self._to_map = Saliencyd(
            image_key, network, inferer, saliency_key, device, label_key, held_keys, within_key=within_key
        )
        random = [place for place, step in enumerate(self._steps) if is_random(step)]
        self._num_prepared = random[0] if random else len(self._steps)
        self._warn_of_one_moved(self._steps[self._num_prepared :])

    def _warn_of_one_moved(self, steps: Sequence[Any]) -> None:
        """Warn of a transform behind the map that moves the image and not the map, or the map alone."""
        for step in steps:
            keys = {self.image_key, self.saliency_key} & set(step.keys if isinstance(step, MapTransform) else ())
            if type(step).__module__.startswith(_MOVING) and len(keys) == 1:
                warnings.warn(
                    f"{type(step).__name__} moves '{keys.pop()}' alone, so the map does not lie on the image: name "
                    f"'{self.image_key}' and '{self.saliency_key}'",
                    stacklevel=3,
                )

    def _prepared(self, case: Any) -> Any:
        # The keys are computed before the scan is read, so that no map is cached for another scan or network.
        scan = self._key_of(case)
        key = self._map_key(scan)
        item = self._preprocessed(case, scan)
        item = self._finish(item, self._steps[self._num_cached : self._num_prepared])
        name = str(case.get("case", "without a name"))
        saliency = self._cached("saliency maps", key, lambda: self._explain(name, item), case)
        return {**item, self.saliency_key: saliency}

    def _map_key(self, scan: str | None) -> str | None:
        """A hash of all that decides the map of a scan. None, with a warning, when it cannot be identified."""
        if scan is None:
            return None
        network, inferer = self._to_map.saliency.network, self._to_map.saliency.inferer
        decides = [type(inferer), inferer.deciding, inferer.estimator]
        decides += [self.image_key, self._to_map.label_key, self._to_map.held_keys, self._to_map.within_key]
        try:
            if self._num_cached < self._num_prepared:
                name = type(self._steps[self._num_cached]).__name__
                raise Unfingerprintable(f"{name}, before the first random transform, cannot be identified")
            how = fingerprint([decides, chosen_arithmetic()], files=True)
            return fingerprint([scan, how, network_key(network, self.network_id)])
        except Unfingerprintable as error:
            self._warn("saliency", f"saliency maps are not cached, but computed at each read: {error}")
            return None

    def _explain(self, name: str, item: dict[Any, Any]) -> Any:
        try:
            with _explaining:
                return self._to_map(item)[self.saliency_key]
        except Exception as error:
            raise as_case_error(error, name, "it could not be explained: ") from error
