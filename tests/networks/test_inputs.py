import re
from typing import Any

import pytest
import torch
from helpers.tolerances import SINGLE, assert_close, assert_same_bits
from monai.inferers import PatchInferer, SlidingWindowInferer, SlidingWindowSplitter

import monai_saliency as ms
from monai_saliency.errors import CaseError, SettingError
from monai_saliency.networks.inputs import TensorInput
from monai_saliency.networks.outputs import check_rows, read, rows

TARGET = ms.ClassScore("all", "none")


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
        maps.append(ms.rise(7, 3, target=TARGET, **settings)(image[None], network))
    return torch.cat(maps)


@pytest.mark.parametrize("mask_batch_size", [1, 5])
@pytest.mark.parametrize(
    ("adapter", "network"),
    [
        (ms.DictInput("image"), lambda batch: score(batch["image"], batch["prior"], batch["age"])),
        (ms.ArgumentInputs("image"), lambda image, prior, age: score(image, prior, age)),
        (ms.ArgumentInputs("image"), lambda scan, *, prior, age: score(scan, prior, age)),
    ],
)
def test_held_inputs_follow_their_case(adapter: TensorInput, network: Any, mask_batch_size: int) -> None:
    """In batches that hold rows of several cases, and in the last one, which is not full."""
    explain = ms.rise(7, 3, target=TARGET, inputs=adapter, mask_batch_size=mask_batch_size)
    maps = explain({"image": IMAGES, "prior": PRIORS, "age": AGES}, network)
    assert_close(maps, one_by_one(IMAGES))


def test_a_sequence_of_inputs_goes_by_place() -> None:
    explain = ms.rise(7, 3, target=TARGET, inputs=ms.ArgumentInputs(1))
    maps = explain((PRIORS, IMAGES, AGES), lambda prior, image, age: score(image, prior, age))
    assert_close(maps, one_by_one(IMAGES))


def test_a_numpy_array_is_a_tensor() -> None:
    explain = ms.rise(7, 3, target=TARGET)
    network = lambda images: images.flatten(1)[:, :2]  # noqa: E731
    assert torch.equal(explain(IMAGES.numpy(), network), explain(IMAGES, network))
    flipped = IMAGES.numpy()[..., ::-1]
    assert torch.equal(explain(flipped, network), explain(IMAGES.flip(-1), network))
    named = ms.rise(7, 3, target=TARGET, inputs=ms.ArgumentInputs(1))
    arrays = PRIORS.numpy(), IMAGES.numpy(), AGES.numpy()
    maps = named(arrays, lambda prior, image, age: score(image, prior, age))
    assert_close(maps, one_by_one(IMAGES))


def test_a_tuple_of_images_is_told_what_to_write() -> None:
    """And what the error says works."""
    images = IMAGES[0].float(), IMAGES[1].float()
    with pytest.raises(ValueError, match=r"is a tuple of 2.*inputs=ms\.ListInput.*ArgumentInputs\(perturb=0") as error:
        ms.explain(torch.stack, images, 0)
    of_list, of_several = re.findall(r"ms\.explain\(.*?\)\)", str(error.value))

    def detector(given: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(given, list)
        return torch.stack([9 * image.mean() for image in given])

    maps = eval(of_list, {"ms": ms, "images": images, "network": detector})
    expected = ms.explain(lambda batch: 9 * batch.mean((1, 2, 3)), torch.stack(images))
    assert_close(maps, expected)

    def difference(fixed: torch.Tensor, moving: torch.Tensor) -> torch.Tensor:
        return 9 * (fixed - moving).mean((1, 2, 3))

    fixed, moving = images[0][None], images[1][None]
    maps = eval(of_several, {"ms": ms, "inputs": (fixed, moving), "network": difference})
    assert_close(maps, ms.explain(lambda image: difference(image, moving), fixed))


def test_planted_truth_in_the_perturbed_input_only() -> None:
    """The network reads one box of T1 and another of FLAIR; with T1 perturbed, only its box shows, at its weight."""
    boxes = (..., slice(0, 3), slice(3, 6)), (..., slice(3, 6), slice(0, 3))
    scans = {"t1": torch.ones(1, 1, 9, 9).double(), "flair": torch.ones(1, 1, 9, 9).double()}

    def network(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return 2 * batch["t1"][boxes[0]].mean((2, 3)) + 5 * batch["flair"][boxes[1]].mean((2, 3))

    for name, box, weight in (("t1", boxes[0], 2.0), ("flair", boxes[1], 5.0)):
        expected = torch.zeros(9, 9).double()
        expected[box] = weight
        maps = ms.sliding_window(3, 3, target=ms.ClassScore([0], "none"), inputs=ms.DictInput(name))(scans, network)
        assert_close(maps[0, 0], expected)


@pytest.mark.parametrize("padded", [False, True])
def test_held_images_are_cut_by_a_sliding_window(padded: bool) -> None:
    """Each patch meets its own part of its own case's prior."""
    images, priors = random(2, 1, 12, 10), random(2, 1, 12, 10)
    window = SlidingWindowInferer((16, 5) if padded else (6, 5), sw_batch_size=3, overlap=0.5)
    target = ms.RegionScore(0, "none", region="all")
    settings: dict[str, Any] = {"target": target, "inferer": window, "mask_batch_size": 4}
    explain = ms.rise(5, 3, inputs=ms.ArgumentInputs(0), **settings)
    maps = explain((images, priors), lambda image, prior: (image * prior).tanh())
    joined = torch.cat([images, priors], 1)
    for i in range(2):
        whole = ms.rise(5, 3, target=target)(images[i : i + 1], lambda x, i=i: (x * joined[i, 1:]).tanh())
        assert_close(maps[i : i + 1], whole)


@pytest.mark.parametrize("adapter", [ms.DictInput("image"), ms.ArgumentInputs("image")])
def test_as_a_transform(adapter: TensorInput) -> None:
    """Held inputs of one item have no batch axis, and may be arrays and numbers."""
    network: Any = lambda image, prior, age: score(image, prior, age)  # noqa: E731
    if isinstance(adapter, ms.DictInput):
        network = lambda batch: score(batch["image"], batch["prior"], batch["age"])  # noqa: E731
    explain = ms.Saliencyd("image", network, ms.rise(7, 3, target=TARGET, inputs=adapter), held_keys=["prior", "age"])
    expected = one_by_one(IMAGES)
    for image, prior, age, each in zip(IMAGES, PRIORS, AGES, expected, strict=True):
        item = explain({"image": image, "prior": prior.numpy(), "age": float(age)})
        assert_close(item["image_saliency"].as_tensor(), each, within=SINGLE)


class TestErrors:
    def test_held_inputs_that_nobody_takes(self) -> None:
        with pytest.raises(ValueError, match=r"held inputs \['prior'\] are given, .*: set DictInput or ArgumentInputs"):
            ms.Saliency(score, ms.rise(3, 3, target=TARGET))(IMAGES[0], held={"prior": PRIORS[0]})
        with pytest.raises(ValueError, match=r"one image is given, and \['t1', 't2'\] are perturbed"):
            ms.Saliency(score, ms.rise(3, 3, target=TARGET, inputs=ms.DictInput(["t1", "t2"])))(IMAGES[0])

    @pytest.mark.parametrize(
        ("adapter", "inputs", "match"),
        [
            (
                TensorInput(),
                {"image": IMAGES},
                r"`inputs` must be images .*got a dict with the keys \['image'\]: write batch.*DictInput",
            ),
            (ms.DictInput("t1"), {"image": IMAGES}, r"`perturb` names \['t1'\], the inputs are \['image'\]"),
            (
                ms.DictInput("image"),
                IMAGES,
                "must be a dictionary or a sequence of tensors for DictInput, got a Tensor",
            ),
            (ms.DictInput("image"), {"image": IMAGES[0, 0]}, r"input 'image' must be images .*got shape \(9, 8\)"),
            (ms.DictInput("image"), {"image": IMAGES, "age": AGES[:2]}, r"held input 'age' .*, got shape \(2,\)"),
            (ms.DictInput([0, 1]), (IMAGES, PRIORS[..., :4]), r"0 is \(3, 2, 9, 8\).*, 1 is \(3, 1, 9, 4\)"),
        ],
    )
    def test_inputs_that_do_not_fit(self, adapter: TensorInput, inputs: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            ms.rise(3, 3, target=TARGET, inputs=adapter)(inputs, lambda x: x)

    @pytest.mark.parametrize(
        "inferer", [SlidingWindowInferer((4, 4)), PatchInferer(SlidingWindowSplitter((4, 4)))], ids=["window", "patch"]
    )
    def test_inferers_that_cut_patches(self, inferer: Any) -> None:
        with pytest.raises(ValueError, match=r"held inputs \['age'\] are not on the images' grid.*: use SimpleInferer"):
            ms.rise(3, 3, target=TARGET, inputs=ms.DictInput("image"), inferer=inferer)(
                {"image": IMAGES, "age": AGES}, lambda x: x["image"]
            )
        with pytest.raises(ValueError, match="does not take a list of images: use SimpleInferer"):
            ms.rise(3, 3, target=TARGET, inputs=ms.ListInput(), inferer=inferer)(IMAGES, torch.stack)

    def test_condition_of_a_sliding_window(self) -> None:
        """MONAI's inferers cut it by the rows of the batch, which are not the images'."""
        with pytest.raises(ValueError, match=r"`condition` does not follow .*: make it a held input"):
            ms.rise(3, 3, target=TARGET)(IMAGES, lambda x, condition: x, condition=PRIORS)


LOGITS = torch.arange(12.0).reshape(4, 3)
DEEP = torch.arange(16.0).reshape(4, 2, 2)


class TestRead:
    OUTPUT = {"pred": (LOGITS, [DEEP, DEEP + 1]), "loss": None}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("output", "path", "expected"),
        [
            (LOGITS, None, LOGITS),
            ({"pred": LOGITS}, "pred", LOGITS),
            ((DEEP, LOGITS), 1, LOGITS),
            ((DEEP, LOGITS), -1, LOGITS),
            (OUTPUT, ("pred", 0), LOGITS),
            (OUTPUT, ["pred", 1, 0], DEEP),
            (OUTPUT, lambda output: output["pred"][1][0] * 2, DEEP * 2),
        ],
    )
    def test_parts(self, output: Any, path: Any, expected: torch.Tensor) -> None:
        assert_same_bits(read(output, path), expected)

    @pytest.mark.parametrize("path", ["aux", ("pred", 2), ("pred", "x"), 0, ("pred", 0, 0)])
    def test_a_missing_part_lists_those_that_there_are(self, path: Any) -> None:
        known = "output=('pred', 0) reads (B, 3), output=('pred', 1, 0) reads (B, 2, 2), output=('pred', 1, 1) reads"
        with pytest.raises(ValueError, match=re.escape(f"has no part {path!r}: {known}")):
            read(self.OUTPUT, path)

    def test_an_index_into_a_tensor_reads_no_image_of_the_batch(self) -> None:
        with pytest.raises(ValueError, match="no part 0: it is one Tensor, so leave `output` out"):
            read(LOGITS, 0)


class TestRows:
    def test_tensors_in_structures(self) -> None:
        """Deep supervision, dictionaries, a vision transformer's (output, hidden states)."""
        cut = rows({"pred": LOGITS, "deep": [DEEP, DEEP + 1], "name": "x", "none": None}, 1, 3, 4)
        assert_same_bits(cut["pred"], LOGITS[1:3])
        assert_same_bits(cut["deep"][1], DEEP[1:3] + 1)
        assert (cut["name"], cut["none"]) == ("x", None)
        logits, hidden = rows((LOGITS, [DEEP] * 4), 3, 4, 4)
        assert_same_bits(logits, LOGITS[3:])
        assert [state.shape for state in hidden] == [(1, 2, 2)] * 4

    def test_a_list_with_one_entry_an_image(self) -> None:
        """Also where the numbers of boxes happen to be the number of images."""
        images = [{"boxes": torch.full((2, 4), float(i))} for i in range(2)]
        assert rows(images, 1, 2, 2) == images[1:]
        points = [torch.zeros(n, 2) for n in (0, 5, 2)]
        assert [len(part) for part in rows(points, 1, 3, 3)] == [5, 2]

    @pytest.mark.parametrize(
        ("output", "match"),
        [
            (LOGITS[:3], r"an output of shape \(3, 3\) for a batch of 4 images; its first axis must be the batch$"),
            (
                {"x": LOGITS, "loss": torch.tensor(0.0)},
                r"shape \(\) at output='loss' .*choose another part by `output`",
            ),
            ({"x": [LOGITS, LOGITS[:2]]}, r"shape \(2, 3\) at output=\('x', 1\)"),
            ({"a": None}, "the network gave a dict without tensors"),
            ([{}] * 3, "a list of 3 dictionaries for a batch of 4 images; it must have one entry per image"),
        ],
    )
    def test_check_refuses(self, output: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            check_rows(output, 4)


class TestInTheInferer:
    """Structured outputs of batches that hold rows of several cases."""

    IMAGES = torch.rand(3, 1, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    @staticmethod
    def logits(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0, :4].mean((1, 2)), x[:, 0, 4:].mean((1, 2)) ** 2], dim=1)

    @classmethod
    def structured(cls, x: torch.Tensor) -> dict[str, Any]:
        """As HoVerNet and deep supervision do, with parts that are not for us."""
        return {"pred": [cls.logits(x), cls.logits(x) + 1], "maps": (x, None), "loss": torch.tensor(0.0)}

    @pytest.mark.parametrize("output", [("pred", 0), lambda output: output["pred"][1] - 1])
    @pytest.mark.parametrize("mask_batch_size", [1, 4])
    def test_same_map_as_from_the_tensor(self, output: Any, mask_batch_size: int) -> None:
        settings = {"target": ms.ClassScore("all", "none"), "mask_batch_size": mask_batch_size}
        expected = ms.rise(7, 3, **settings)(self.IMAGES, self.logits)
        maps = ms.rise(7, 3, output=output, **settings)(self.IMAGES, self.structured)
        assert_close(maps, expected)

    def test_errors_name_the_case_and_the_choices(self) -> None:
        def explain(network: Any, **settings: Any) -> list:
            inferer: ms.PerturbationInferer = ms.rise(4, 2, target=ms.ClassScore([0], "none"), **settings)
            return inferer.explain(self.IMAGES, network, cases=[ms.Case("ct_1"), ms.Case("ct_2"), ms.Case("ct_3")])

        # Of a setting that fits no case, no case is named.
        with pytest.raises(SettingError, match=r"^the .* has no part 'seg': output=\('pred', 0\) reads \(B, 2\)"):
            explain(self.structured, output="seg")
        with pytest.raises(SettingError, match=r"^ClassScore reads a tensor, .* a list;.*output=0 reads \(B, 2\)"):
            explain(self.structured, output="pred")
        with pytest.raises(CaseError, match=r"case ct_1: .*shape \(\) at output='loss'"):
            explain(self.structured)
