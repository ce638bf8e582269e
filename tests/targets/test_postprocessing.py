"""What a bundle's postprocessing makes of a prediction, as it is read from its transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from monai.apps.vista3d.transforms import VistaPostTransformd
from monai.transforms import (
    Activations,
    Activationsd,
    AsDiscrete,
    AsDiscreted,
    Compose,
    Invertd,
    Lambdad,
    MapTransform,
    SaveImaged,
    ScaleIntensityd,
)

from monai_saliency.targets.postprocessing import Reading, read_postprocessing


def twice(values: Any) -> Any:
    return 2 * values


class Own(MapTransform):
    """Somebody's own."""

    def __call__(self, data: Any) -> Any:
        return {**data, "pred": twice(data["pred"])}


class Saves(SaveImaged):
    """Somebody's own, of a kind that leaves the numbers."""


def test_postprocessing_is_read_key_by_key() -> None:
    transform = Compose(
        [
            Activationsd(keys="pred", softmax=True),
            Compose([Invertd("pred", Compose([]), orig_keys="image"), SaveImaged("pred")]),
            AsDiscreted(keys=["pred", "label"], argmax=[True, False], to_onehot=[2, 2]),
            Activationsd(keys=["type", "edge"], sigmoid=[False, True], softmax=[True, False]),
            AsDiscreted(keys="edge", threshold=0.5),
        ]
    )
    assert read_postprocessing(transform) == {
        "pred": Reading("softmax", "argmax"),
        "label": Reading(),
        "type": Reading("softmax"),
        "edge": Reading("sigmoid", "threshold"),
    }
    assert read_postprocessing(None) == {}


SIGMOID, SOFTMAX = Reading("sigmoid"), Reading("softmax")


@pytest.mark.parametrize(
    ("transform", "reading"),
    [
        (Activations(sigmoid=True), SIGMOID),
        (AsDiscrete(threshold=0.3), Reading(None, "threshold", threshold=0.3)),
        (AsDiscreted(["label", "pred"], threshold=[0.3, 0.7]), Reading(None, "threshold", threshold=0.7)),
        # What leaves the prediction's numbers.
        *((each, None) for each in (Saves("pred"), Lambdad("image", func=twice), Own("image"))),
        (Lambdad("pred", func=twice, overwrite=False), None),
        (Compose([Activationsd("pred", softmax=True), Own("pred")]), SOFTMAX),
        (Compose([AsDiscreted("pred", argmax=True), Own("pred")]), Reading(None, "argmax")),
    ],
)
def test_what_is_known(transform: Any, reading: Reading | None) -> None:
    assert read_postprocessing(transform).get("pred") == reading


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (Activations(other=twice), "applies twice to it"),
        (Lambdad("pred", func=twice), "applies twice to it"),
        (torch.sigmoid, "applies sigmoid to it"),
        (Own("pred"), "applies Own to it"),
        (ScaleIntensityd("pred"), "applies ScaleIntensityd to it"),
        (VistaPostTransformd("pred"), "applies VistaPostTransformd to it"),
        (AsDiscrete(rounding="torchrounding"), "rounds it"),
        (AsDiscrete(threshold=torch.tensor([0.2, 0.3])), "compares it with a Tensor"),
        (Compose([Lambdad("pred", func=twice), Activationsd("pred", sigmoid=True)]), "applies twice to it"),
        (Compose([Activationsd("pred", sigmoid=True), Lambdad("pred", func=twice), AsDiscreted("pred", threshold=0.5)]),
         "applies twice to it"),
        (Compose([Activations(True, True), AsDiscrete(argmax=True)]), "applies a softmax to its sigmoid"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_said(transform: Any, words: str) -> None:
    assert read_postprocessing(transform)["pred"].unread == words
