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
    """Explains a batch, and gives each of its cases what is known of it."""

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
        """Explain a batch."""
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
