"""Batches of a pipeline of one's own: what is in them, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monai.data import MetaTensor, decollate_batch
from monai.utils import CommonKeys

from monai_saliency.cases import Case
from monai_saliency.distributed.process_group import MasksOverRanks, unwrapped
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.utils.arguments import check_option
from monai_saliency.utils.tensors import with_meta_of

__all__ = ["BatchExplainer"]


class BatchExplainer:
    """Explains a batch, and gives each of its cases what is known of it.

    Args:
        network: the network. Of a ``DistributedDataParallel`` one the module inside is run, since its own forwards meet
            those of other ranks, which have other numbers of them.
        inferer: what explains.
        split: what ranks share: ``"cases"``, each explains its own batches; or ``"masks"``, all have the same batches,
            and each scores its share of every image's masks.
        image_key: the network's input, in a batch that is a dictionary.
        case_key: the cases' names, where a batch has them; their files' names otherwise.
        label_key: label maps ``(B, 1, *spatial)``, for masks and targets that are made of regions.
        held_keys: the network's other inputs, by the names that the inferer's ``inputs`` passes them on by.

    Raises:
        ValueError: when ``split`` is neither.
    """

    def __init__(
        self,
        network: Callable[..., Any],
        inferer: PerturbationInferer,
        split: str = "cases",
        image_key: str = CommonKeys.IMAGE,
        case_key: str = "case",
        label_key: str | None = None,
        held_keys: Sequence[str] = (),
    ) -> None:
        split = check_option("split", split, ("cases", "masks"))
        self.network = unwrapped(network)
        self.inferer = inferer.replace(sharing=MasksOverRanks()) if split == "masks" else inferer
        self.split = split
        self.image_key = image_key
        self.case_key = case_key
        self.label_key = label_key
        self.held_keys = tuple(held_keys)

    def __call__(self, batch: Any) -> list[dict[str, Any]]:
        """Explain a batch.

        Args:
            batch: images ``(B, C, *spatial)``, or a dictionary with them.

        Returns:
            a dictionary for each image:

            - ``case``: its name;
            - ``saliency``: its map ``(K, *spatial)`` (``(K * C, *spatial)`` where channels have masks of their own) on
              its device, a MetaTensor with its affine, ``applied_operations`` and other meta data;
            - ``explained``: what each map shows, see :class:`~monai_saliency.inferers.explanation.Explanation`.

        Raises:
            KeyError: when a batch lacks a key.
        """
        values: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {self.image_key: batch}
        images = values[self.image_key]
        inputs = self.inferer.inputs.join(images, {key: values[key] for key in self.held_keys})
        given: list[dict[str, Any]] = [{} for _ in images]
        for attribute, key in (("name", self.case_key), ("labels", self.label_key)):
            if key is not None and (attribute == "labels" or key in values):
                for known, value in zip(given, values[key], strict=True):
                    known[attribute] = str(value) if attribute == "name" else value
        cases = [Case.of(images, index, **known) for index, known in enumerate(given)]
        explanations = self.inferer.explain(inputs, self.network, cases=cases)
        scans = decollate_batch(images) if isinstance(images, MetaTensor) and images.is_batch else list(images)
        rows = []
        for scan, explanation in zip(scans, explanations, strict=True):
            maps = with_meta_of(scan, explanation.saliency)
            rows.append({"case": explanation.name, "saliency": maps, "explained": explanation.explained})
        return rows
