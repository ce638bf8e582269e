from __future__ import annotations

from typing import Any

import pytest
import torch
from monai.inferers import PatchInferer, SlidingWindowInferer, SlidingWindowSplitter

from monai_saliency.methods import rise, sliding_window
from monai_saliency.networks.inputs import ArgumentInputs, DictInput, ListInput, TensorInput
from monai_saliency.targets import ClassScore, RegionScore
from monai_saliency.transforms import Saliency, Saliencyd

TARGET = ClassScore("all", "none")


def random(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


IMAGES, PRIORS, AGES = random(3, 2, 9, 8), random(3, 1, 9, 8), random(3)


def score(image: torch.Tensor, prior: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
    """Two scores ``(B, 2)`` that need each image's own prior and age."""
    weighted = (image.tanh() * prior).mean((1, 2, 3))
    return torch.stack([weighted * (1 + age), weighted**2 + age], dim=1)


def one_by_one(images: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Each case alone, its held inputs part of its network."""
    maps = []
    for i, image in enumerate(images):
        network = lambda x, i=i: score(x, PRIORS[i : i + 1], AGES[i : i + 1])  # noqa: E731
        maps.append(rise(7, 3, target=TARGET, **settings)(image[None], network))
    return torch.cat(maps)


@pytest.mark.parametrize("mask_batch_size", [1, 5])
@pytest.mark.parametrize(
    ("adapter", "network"),
    [
        (DictInput("image"), lambda batch: score(batch["image"], batch["prior"], batch["age"])),
        (ArgumentInputs("image"), lambda image, prior, age: score(image, prior, age)),
        (ArgumentInputs("image", positional=["prior"]), lambda p, *, image, age: score(image, p, age)),
    ],
)
def test_held_inputs_follow_their_case(adapter: TensorInput, network: Any, mask_batch_size: int) -> None:
    """In batches that hold rows of several cases, and in the last one, which is not full."""
    explain = rise(7, 3, target=TARGET, inputs=adapter, mask_batch_size=mask_batch_size)
    maps = explain({"image": IMAGES, "prior": PRIORS, "age": AGES}, network)
    torch.testing.assert_close(maps, one_by_one(IMAGES), rtol=0, atol=1e-12)


def test_a_sequence_of_inputs_goes_by_place() -> None:
    explain = rise(7, 3, target=TARGET, inputs=ArgumentInputs(1))
    maps = explain((PRIORS, IMAGES, AGES), lambda prior, image, age: score(image, prior, age))
    torch.testing.assert_close(maps, one_by_one(IMAGES), rtol=0, atol=1e-12)


def test_planted_truth_in_the_perturbed_input_only() -> None:
    """The network reads one box of T1 and another of FLAIR; with T1 perturbed, only its box shows, at its weight."""
    boxes = (..., slice(0, 3), slice(3, 6)), (..., slice(3, 6), slice(0, 3))
    scans = {"t1": torch.ones(1, 1, 9, 9).double(), "flair": torch.ones(1, 1, 9, 9).double()}

    def network(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return 2 * batch["t1"][boxes[0]].mean((2, 3)) + 5 * batch["flair"][boxes[1]].mean((2, 3))

    for name, box, weight in (("t1", boxes[0], 2.0), ("flair", boxes[1], 5.0)):
        expected = torch.zeros(9, 9).double()
        expected[box] = weight
        maps = sliding_window(3, 3, target=ClassScore([0], "none"), inputs=DictInput(name))(scans, network)
        torch.testing.assert_close(maps[0, 0], expected)


@pytest.mark.parametrize("padded", [False, True])
def test_held_images_are_cut_by_a_sliding_window(padded: bool) -> None:
    """Each patch meets its own part of its own case's prior."""
    images, priors = random(2, 1, 12, 10), random(2, 1, 12, 10)
    window = SlidingWindowInferer((16, 5) if padded else (6, 5), sw_batch_size=3, overlap=0.5)
    target = RegionScore(0, "none", region="all")
    settings: dict[str, Any] = {"target": target, "inferer": window, "mask_batch_size": 4}
    explain = rise(5, 3, inputs=ArgumentInputs(0), **settings)
    maps = explain((images, priors), lambda image, prior: (image * prior).tanh())
    joined = torch.cat([images, priors], 1)
    for i in range(2):
        whole = rise(5, 3, target=target)(images[i : i + 1], lambda x, i=i: (x * joined[i, 1:]).tanh())
        torch.testing.assert_close(maps[i : i + 1], whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("adapter", [DictInput("image"), ArgumentInputs("image", positional=["image", "prior"])])
def test_as_a_transform(adapter: TensorInput) -> None:
    """Held inputs of one item have no batch axis, and may be arrays and numbers."""
    network: Any = lambda image, prior, age: score(image, prior, age)  # noqa: E731
    if isinstance(adapter, DictInput):
        network = lambda batch: score(batch["image"], batch["prior"], batch["age"])  # noqa: E731
    explain = Saliencyd("image", network, rise(7, 3, target=TARGET, inputs=adapter), held_keys=["prior", "age"])
    expected = one_by_one(IMAGES)
    for image, prior, age, each in zip(IMAGES, PRIORS, AGES, expected, strict=True):
        item = explain({"image": image, "prior": prior.numpy(), "age": float(age)})
        torch.testing.assert_close(item["image_saliency"].as_tensor(), each, rtol=0, atol=1e-6)


class TestErrors:
    def test_held_inputs_that_nobody_takes(self) -> None:
        with pytest.raises(ValueError, match=r"held inputs \['prior'\] are given, .*: set DictInput or ArgumentInputs"):
            Saliency(score, rise(3, 3, target=TARGET))(IMAGES[0], held={"prior": PRIORS[0]})
        with pytest.raises(ValueError, match=r"one image is given, and \['t1', 't2'\] are perturbed"):
            Saliency(score, rise(3, 3, target=TARGET, inputs=DictInput(["t1", "t2"])))(IMAGES[0])

    @pytest.mark.parametrize(
        ("adapter", "inputs", "match"),
        [
            (
                TensorInput(),
                {"image": IMAGES},
                r"`inputs` must be images .*got dict; set the inferer's `inputs` to DictInput",
            ),
            (DictInput("t1"), {"image": IMAGES}, r"`perturb` names \['t1'\], the inputs are \['image'\]"),
            (DictInput("image"), IMAGES, "must be a dictionary or a sequence of tensors for DictInput, got Tensor"),
            (DictInput("image"), {"image": IMAGES[0, 0]}, r"input 'image' must be images of shape .*got \(9, 8\)"),
            (DictInput("image"), {"image": IMAGES, "age": AGES[:2]}, r"held input 'age' .*3 cases, got \(2,\)"),
            (DictInput([0, 1]), (IMAGES, PRIORS[..., :4]), r"0 is \(3, 2, 9, 8\).*, 1 is \(3, 1, 9, 4\)"),
        ],
    )
    def test_inputs_that_do_not_fit(self, adapter: TensorInput, inputs: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            rise(3, 3, target=TARGET, inputs=adapter)(inputs, lambda x: x)

    @pytest.mark.parametrize(
        "inferer", [SlidingWindowInferer((4, 4)), PatchInferer(SlidingWindowSplitter((4, 4)))], ids=["window", "patch"]
    )
    def test_inferers_that_cut_patches(self, inferer: Any) -> None:
        with pytest.raises(ValueError, match=r"held inputs \['age'\] are not on the images' grid.*: use SimpleInferer"):
            rise(3, 3, target=TARGET, inputs=DictInput("image"), inferer=inferer)(
                {"image": IMAGES, "age": AGES}, lambda x: x["image"]
            )
        with pytest.raises(ValueError, match="does not take a list of images: use SimpleInferer"):
            rise(3, 3, target=TARGET, inputs=ListInput(), inferer=inferer)(IMAGES, torch.stack)

    def test_condition_of_a_sliding_window(self) -> None:
        """MONAI's inferers cut it by the rows of the batch, which are not the images'."""
        with pytest.raises(ValueError, match=r"`condition` does not follow .*: make it a held input"):
            rise(3, 3, target=TARGET)(IMAGES, lambda x, condition: x, condition=PRIORS)
