"""Saliency as MONAI transforms, an array and dictionary pair."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform, Transform
from monai.transforms.traits import RandomizableTrait
from monai.utils import TransformBackends, convert_to_tensor, ensure_tuple

from monai_saliency.cases import Case, case_name, image_file
from monai_saliency.errors import NothingToExplain
from monai_saliency.inferers.explanation import with_maps
from monai_saliency.inferers.inferer import PerturbationInferer, explaining
from monai_saliency.utils.arguments import callable_network, torch_device, written
from monai_saliency.utils.tensors import with_meta_of
from monai_saliency.visualize.legend import Legend, legends_text

logger = logging.getLogger(__name__)


# Of RandomizableTrait, although nothing is random: MONAI's caches stop before it. They do not notice other weights.
class Saliency(Transform, RandomizableTrait):
    """Explains one image.

    MONAI's caches (``CacheDataset``, ``PersistentDataset``, ``LMDBDataset``) and
    :class:`monai_saliency.data.CachedDataset` stop before it, so the map is computed at each read, with the weights
    that the network has then. :class:`monai_saliency.SaliencyDataset` caches maps too.

    Args:
        network: any callable on batches ``(B, C, *spatial)``.
        inferer: explains, as made by :func:`monai_saliency.rise` and the other methods.
        device: where to explain; the image's own device by default. The map comes back on the image's device.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> to_map = Saliency(torch.nn.Flatten(), ms.sliding_window(2, target=ms.ClassScore([0], "none")))
        >>> to_map(torch.rand(1, 4, 4)).shape
        torch.Size([1, 4, 4])
    """

    backend = [TransformBackends.TORCH]  # noqa: RUF012, MONAI's own convention

    __repr__ = written

    def __init__(
        self,
        network: Callable[..., torch.Tensor],
        inferer: PerturbationInferer,
        device: torch.device | str | None = None,
    ) -> None:
        self.network = callable_network(network)
        self.inferer = explaining(inferer)
        self.device = torch_device("device", device)

    def __call__(
        self, img: Any, labels: torch.Tensor | None = None, held: Mapping[str, Any] | None = None, within: Any = None
    ) -> MetaTensor:
        """The map of an image.

        Args:
            img: the image ``(C, *spatial)``, array or tensor.
            labels: its label map ``(1, *spatial)``, for masks and targets that are made of regions.
            held: the network's other inputs of this image, without a batch axis, by the names that the inferer's
                ``inputs`` passes them on by.
            within: the part that is perturbed, a mask ``(1, *spatial)`` or a box, see :class:`~monai_saliency.Case`.

        Returns:
            the map ``(K, *spatial)``, or ``(K * C, *spatial)`` where channels have masks of their own.

        Raises:
            NothingToExplain: when there is nothing to explain in the image.
        """
        return self._with_legends(img, held or {}, labels=labels, within=within)[0]

    def _with_legends(self, img: Any, held: Mapping[str, Any], **given: Any) -> tuple[MetaTensor, list[Legend]]:
        """The map of an image, and what its colours mean in a picture."""
        image = _loaded("the image", img)
        if image.ndim not in (3, 4):
            advice = "put EnsureChannelFirstd before Saliencyd"
            raise ValueError(f"the image must have shape (C, *spatial), got {tuple(image.shape)}: {advice}")
        batch = image[None] if self.device is None else image[None].to(self.device)
        others = {}
        for name, value in held.items():
            others[name] = _loaded(f"the input {name!r}", value).to(batch.device)[None]
        if given.get("labels") is not None:
            _loaded("the label map", given["labels"])
        case = Case.of(image[None], name=case_name(image), file=image_file(image), **given)
        inputs = self.inferer.inputs.join(batch, others)
        (explanation,) = with_maps(self.inferer.explain(inputs, self.network, cases=[case]))
        return with_meta_of(image, explanation.saliency.to(image.device)), Legend.of(explanation)


def _loaded(what: str, value: Any) -> Any:
    """A value as a tensor; refused where it is a path that nothing has loaded, or no array."""
    tensor = convert_to_tensor(value, track_meta=True)
    if isinstance(tensor, torch.Tensor):
        return tensor
    given = f"the path {str(value)!r}" if isinstance(value, (str, PathLike)) else f"a {type(value).__name__}"
    advice = "put LoadImaged and EnsureChannelFirstd before Saliencyd"
    raise ValueError(f"{what} must be a tensor or an array, got {given}: {advice}")


class Saliencyd(MapTransform, RandomizableTrait):
    """Dictionary form of :class:`Saliency`.

    Args:
        keys: the images to explain.
        network: any callable on batches ``(B, C, *spatial)``.
        inferer: explains, as made by :func:`monai_saliency.rise` and the other methods.
        names: where the maps go, one for each key; ``"<key>_saliency"`` by default. A text under ``"<name>_legends"``
            tells :class:`SaveSaliencyd` what the colours of its picture mean.
        device: where to explain; the image's own device by default.
        label_key: where an item holds its label map ``(1, *spatial)``, for masks and targets that are made of regions.
        held_keys: where an item holds the network's other inputs, which stay as they are; they are passed on under
            these names, see the inferer's ``inputs``.
        within_key: where an item holds the part that is perturbed: a mask ``(1, *spatial)``, such as of the brain, or a
            box. The map is 0 everywhere else.
        allow_missing_keys: don't raise for a key that an item lacks, nor for an image in which there is nothing to
            explain. Such an item has no map, so later steps, such as ``Invertd``, need ``allow_missing_keys=True`` too.

    Raises:
        NothingToExplain: when called, for an image in which there is nothing to explain; see ``allow_missing_keys``.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> explain = ms.sliding_window(2, target=ms.ClassScore([0], "none"))
        >>> item = Saliencyd("image", torch.nn.Flatten(), explain, names="saliency")({"image": torch.rand(1, 4, 4)})
        >>> item["saliency"].shape
        torch.Size([1, 4, 4])
    """

    backend = Saliency.backend

    __repr__ = written

    def __init__(
        self,
        keys: KeysCollection,
        network: Callable[..., torch.Tensor],
        inferer: PerturbationInferer,
        names: str | Sequence[str] | None = None,
        device: torch.device | str | None = None,
        label_key: str | None = None,
        held_keys: KeysCollection = (),
        allow_missing_keys: bool = False,
        within_key: str | None = None,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.label_key, self.within_key = label_key, within_key
        self.held_keys = ensure_tuple(held_keys)
        self.names = ensure_tuple([f"{key}_saliency" for key in self.keys] if names is None else names)
        if len(set(self.names)) != len(self.keys) or len(self.names) != len(self.keys):
            raise ValueError(f"`names` must name one place for each of the keys {self.keys}, got {[*self.names]}")
        self.saliency = Saliency(network, inferer, device)
        self.network, self.inferer, self.device = network, inferer, self.saliency.device

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        d = dict(data)
        for key, name in self.key_iterator(d, self.names):
            held = {other: d[other] for other in self.held_keys}
            labels = None if self.label_key is None else d[self.label_key]
            within = None if self.within_key is None else d[self.within_key]
            try:
                d[name], legends = self.saliency._with_legends(d[key], held, labels=labels, within=within)
            except NothingToExplain as error:
                if not self.allow_missing_keys:
                    raise
                logger.warning("%s, so the item has no %r", error, name)
            else:
                d[f"{name}_legends"] = legends_text(legends)
        return d
