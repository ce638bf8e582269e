"""What `target` may be."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import assert_same_bits

import monai_saliency as ms
from monai_saliency.networks import Ensemble

SETTINGS: dict[str, Any] = {"method": "sliding_window", "window_size": 4, "stride": 4, "activation": "softmax"}
LABELS = [2, 0, 3]


def network_and_images() -> tuple[torch.nn.Module, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4)), torch.randn(3, 1, 8, 8)


@pytest.mark.parametrize("make", [torch.tensor, np.array])
@pytest.mark.parametrize("is_ensemble", [False, True])
def test_a_tensor_is_a_class_for_each_image(make: Any, is_ensemble: bool) -> None:
    network, images = network_and_images()
    network = Ensemble([network, network]) if is_ensemble else network
    maps = ms.explain(network, images, make(LABELS), **SETTINGS)
    for index, label in enumerate(LABELS):
        assert_same_bits(maps[index], ms.explain(network, images[index : index + 1], label, **SETTINGS)[0])


def test_a_list_is_classes_of_all_images_and_a_scalar_a_class() -> None:
    network, images = network_and_images()
    assert ms.explain(network, images, [0, 2], **SETTINGS).shape == (3, 2, 8, 8)
    wanted = ms.explain(network, images, 1, **SETTINGS)
    for scalar in (torch.tensor(1), np.array(1), np.int64(1)):
        assert_same_bits(ms.explain(network, images, scalar, **SETTINGS), wanted)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.tensor([1, 2]), r"each of 2 images, and there are 3: .*target=\[0, 2\]"),
        (torch.tensor([1.0, 2, 3]), r"whole numbers \(B,\).*got shape \(3,\) of torch.float32"),
        (torch.eye(4)[:3].long(), r"got shape \(3, 4\)"),
        (torch.tensor(1.5), "whole numbers"),
        (torch.tensor([True, False, True]), "torch.bool"),
        (torch.tensor([1, 2, 9]), "class 9 is out of range"),
        (np.array(["a", "b", "c"]), "whole numbers"),
    ],
)
def test_another_tensor_is_refused(target: Any, words: str) -> None:
    network, images = network_and_images()
    with pytest.raises(ValueError, match=words):
        ms.explain(network, images, target, **SETTINGS)
