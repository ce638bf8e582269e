"""Rows of the first batch, against their images alone and against what an evaluator predicted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dependent import COUPLINGS, Coupled, Takes, WithDropout, classify, segment
from helpers.forked_ranks import on_ranks
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.distributed import MasksOverDevices
from monai_saliency.distributed.process_group import MasksOverRanks
from monai_saliency.errors import CaseError
from monai_saliency.inferers.case_state import merged
from monai_saliency.networks.comparison import difference, excerpt
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.utils.precision import rounding_of

BATCH = 4
TARGET = ms.ClassScore([0, 2], "softmax")
REGION = ms.RegionScore(1, "softmax", region="all")


def images(count: int = 1) -> torch.Tensor:
    return torch.rand(count, 1, 12, 10, generator=torch.Generator().manual_seed(1))


def windows(batch: int = BATCH, target: ms.Target = TARGET, **settings: Any) -> ms.PerturbationInferer:
    return ms.sliding_window(4, 3, target=target, mask_batch_size=batch, **settings)


def patches(batch: int = BATCH, sw_batch_size: int = 3, memory: bool = True) -> ms.PerturbationInferer:
    inner = SlidingWindowInferer((6, 6), sw_batch_size, overlap=0.5)
    return windows(batch, REGION, inferer=inner, patch_memory=memory)


# Rows that depend on each other. --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_images_go_through_one_at_a_time(coupling: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """The map is that of images which go through alone, to the bit, and the log shows both figures, once."""
    expected = windows(1).explain(images(count), Coupled(classify, coupling))
    network = Coupled(classify, coupling)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = windows().explain(images(count), network)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.saliency, other.saliency)
        assert torch.equal(one.scores, other.scores)
        assert one.num_forwards == other.num_forwards
    (line,) = [record.getMessage() for record in caplog.records]
    assert "image 0 of the batch" in line
    assert "one at a time" in line
    scores = expected[0].reference_scores.tolist()
    assert f"class 0 {scores[0]:.6g}, class 2 {scores[1]:.6g} alone" in line
    assert f"in a batch of {BATCH}" in line


@pytest.mark.parametrize("mask_batch_size", [1, BATCH])
def test_rows_that_are_independent_cost_two_images_more(mask_batch_size: int) -> None:
    """The unperturbed image, and the perturbed image of the first batch whose scores changed most; once a network two
    batches of the faded image, and the faded image alone. At the end the unperturbed image once more, where no row of
    the last batch is left over for it.
    """
    calls: list[int] = []

    def network(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return classify(x)

    for faded in ([BATCH, BATCH, 1], []):
        calls.clear()
        (found,) = windows(mask_batch_size).explain(images(), network)
        count = len(found.scores) + 1
        full = [mask_batch_size] * -(-count // mask_batch_size)
        last = [1] if count % mask_batch_size == 0 else []
        assert calls == [*([1, full[0], 1, *faded, *full[1:]] if mask_batch_size > 1 else full), *last]
        assert found.num_forwards == count


#: what a batch of images has in common but where a window hides the right voxel
HIDDEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "maximum": lambda x: x / x.amax(),
    "range": lambda x: (x - x.amin()) / (x.amax() - x.amin()),
    "quantile": lambda x: x / x.quantile(0.999),
    "maximum of each voxel": lambda x: x / (1 + x.amax(dim=0)),
    "maximum of the batch so far": lambda x: x / x.flatten(1).amax(1).cummax(0).values[:, None, None, None],
    "maximum from here on": lambda x: x / x.flatten(1).amax(1).flip(0).cummax(0).values.flip(0)[:, None, None, None],
}


def _of_dark(x: torch.Tensor) -> torch.Tensor:
    """What only a batch that is darker than the image shows."""
    return 2 * x if x.mean() < 0.4 else x


def _of_equal(x: torch.Tensor) -> torch.Tensor:
    """What only a batch shows in which two images are equal."""
    count = (torch.cdist(x.flatten(1), x.flatten(1)) < 1e-9).sum(1)
    return x * count.reshape(-1, *[1] * (x.ndim - 1))


def _same_twice(x: torch.Tensor) -> torch.Tensor:
    return x[: len(x) // 2].repeat(2, *[1] * (x.ndim - 1)) if len(x) % 2 == 0 else x


#: how a few rows of a batch come to hold what belongs to others
MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the second half is the first again": _same_twice,
    "the last is the third last": lambda x: torch.cat([x[:-1], x[-3:-2]]) if len(x) > 2 else x,
    "two rows are exchanged": lambda x: x[[0, 1, 4, 3, 2, *range(5, len(x))]] if len(x) > 4 else x,
    "no row is above the first": lambda x: torch.minimum(x, x[:1]),
    "each is the lowest so far": lambda x: x.cummin(dim=0).values,
}


@pytest.mark.parametrize("size", [6, 8])
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("network", [classify, segment])
def test_rows_that_hold_what_belongs_to_others(
    network: Callable[[torch.Tensor], torch.Tensor], mixed: str, size: int
) -> None:
    target = TARGET if network is classify else REGION
    found, alone = (windows(batch, target)(images(), lambda x: MIXED[mixed](network(x))) for batch in (size, 1))
    assert torch.equal(found, alone)


@pytest.mark.parametrize("fill", [0.0, 0.5])
@pytest.mark.parametrize("size", [BATCH, 7])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rows_that_hide_that_they_depend(hidden: str, size: int, fill: float) -> None:
    """Small windows hide it from the first batch of most images."""

    def network(x: torch.Tensor) -> torch.Tensor:
        return classify(HIDDEN[hidden](x))

    for seed in range(3):
        image = torch.rand(1, 1, 12, 10, generator=torch.Generator().manual_seed(seed))
        found, alone = (
            ms.sliding_window(2, 2, target=TARGET, mask_batch_size=batch, fill=ms.ConstantFill(fill))(image, network)
            for batch in (size, 1)
        )
        assert torch.equal(found, alone)


@pytest.mark.parametrize("coupling", [each for each in COUPLINGS if each != "rows in another order"])
@pytest.mark.parametrize("masked", [-1e9, -1e4])
@pytest.mark.parametrize("network", [classify, segment])
def test_a_large_value_hides_nothing(
    network: Callable[[torch.Tensor], torch.Tensor], masked: float, coupling: str
) -> None:
    """A class that is left out by a large negative logit says nothing of how the others differ."""

    def masks(x: torch.Tensor) -> torch.Tensor:
        output = network(COUPLINGS[coupling](x)).clone()
        output[:, 1] = masked
        return output

    target = TARGET if network is classify else ms.RegionScore(2, "softmax", region="all")
    found, alone = (windows(batch, target)(images(), masks) for batch in (BATCH, 1))
    assert torch.equal(found, alone)


def test_a_large_value_beside_a_score_hides_nothing() -> None:
    """A volume in voxels beside a number between 0 and 1, which is made to sum to 1 over the batch."""

    def network(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([1e4 * x.flatten(1).sum(1), x.flatten(1).mean(1).softmax(0)], dim=1)

    assert not windows(target=ms.RegressionScore(1))(images(), network).any()


@pytest.mark.parametrize("batch", [1, BATCH])
def test_another_prediction_is_refused_beside_a_large_value(batch: int) -> None:
    def network(x: torch.Tensor) -> torch.Tensor:
        output = classify(x)
        output[:, 1] = -1e9
        return output

    predicted = network(images())
    windows(batch).explain(images(), network, cases=[Case("a", prediction=predicted)])
    predicted[:, 0] += 0.5
    with pytest.raises(CaseError, match="not what was predicted: the unperturbed image gives class 0"):
        windows(batch).explain(images(), network, cases=[Case("a", prediction=predicted)])


def test_a_network_is_looked_at_again_after_a_change() -> None:
    """Whether rows depend on each other is found out once a network, and again when one of its flags has changed."""

    class Switched(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over_batch = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return classify(x / x.max() if self.over_batch else x)

    network = Switched()
    explainer = ms.sliding_window(2, 2, target=TARGET, mask_batch_size=BATCH)
    explainer(images(), network)
    network.over_batch = True
    alone = ms.sliding_window(2, 2, target=TARGET, mask_batch_size=1)(images(), network)
    assert torch.equal(explainer(images(), network), alone)


@pytest.mark.parametrize("change", ["a buffer", "a function", "a hook", "the fill"])
def test_what_a_network_was_seen_to_do_holds_while_it_stays(change: str) -> None:
    class Held(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("over_batch", torch.tensor(change == "the fill"))
            self.before = torch.nn.Identity.__call__

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x / x.max() if self.over_batch or self.before is brightest else x
            return classify(x)

    def brightest(x: torch.Tensor) -> torch.Tensor:
        return x

    network = Held()
    fill = ms.ConstantFill(2.0 if change == "the fill" else 0.0)
    ms.sliding_window(2, 2, target=TARGET, mask_batch_size=BATCH, fill=fill)(images(), network)
    if change == "a buffer":
        network.over_batch.fill_(True)
    elif change == "a function":
        network.before = brightest
    elif change == "a hook":
        network.register_forward_pre_hook(lambda module, inputs: (inputs[0] / inputs[0].max(),))
    found, alone = (
        ms.sliding_window(2, 2, target=TARGET, mask_batch_size=size)(images(), network) for size in (BATCH, 1)
    )
    assert torch.equal(found, alone)


@pytest.mark.parametrize("method", ["windows", "rise", "full batches", "one by one"])
def test_a_network_that_changes_later_is_refused(method: str) -> None:
    """An unperturbed image in a row that is left over in the last batch shows it, at no cost, or one more alone."""
    calls: list[int] = []

    def network(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        output = classify(x)
        return output.flip(1) if len(calls) > 6 else output

    num_masks, size = {"one by one": (25, 1), "full batches": (6 * BATCH - 1, BATCH)}.get(method, (25, BATCH))
    explain = windows() if method == "windows" else ms.rise(num_masks, 3, target=TARGET, mask_batch_size=size)
    with pytest.raises(
        CaseError, match=r"no fixed output: the unperturbed image gives .* after other images and .* before"
    ):
        explain(images(), network)


def test_a_detector_that_changes_later_is_refused() -> None:
    """Its boxes are compared by their scores."""
    calls: list[int] = []

    def network(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        calls.append(len(x))
        boxes = torch.tensor([[0.0, 0, 6, 6], [4, 4, 10, 12]])
        scores = classify(x).sigmoid()[:, :2] * (0.5 if len(calls) > 13 else 1.0)
        return [{"boxes": boxes, "labels": torch.arange(2), "scores": each} for each in scores]

    with pytest.raises(CaseError, match=r"no fixed output: the unperturbed image gives box 1 .* after other images"):
        windows(target=ms.DetectionScore(0.0)).explain(images(), network)


class TwoHeads(torch.nn.Module):
    """One head looks at each image, the other one at the maximum of the batch."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"good": classify(x), "bad": classify(HIDDEN["maximum"](x))}

    def bad(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)["bad"]

    def good(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)["good"]


@pytest.mark.parametrize("path", [lambda name: name, lambda name: [name]])
def test_each_part_of_the_output_is_looked_at(path: Callable[[str], Any]) -> None:
    """And each method: that the rows of one are independent says nothing about another."""

    def maps(batch: int, image: torch.Tensor, output: Any) -> torch.Tensor:
        return ms.sliding_window(2, 2, target=TARGET, mask_batch_size=batch, output=output)(image, network)

    network: Any = TwoHeads()
    for seed in range(3):
        image = torch.rand(1, 1, 12, 10, generator=torch.Generator().manual_seed(seed))
        maps(BATCH, image, path("good"))
        assert torch.equal(maps(BATCH, image, path("bad")), maps(1, image, path("bad")))
    heads = TwoHeads()
    for seed in range(3):
        image = torch.rand(1, 1, 12, 10, generator=torch.Generator().manual_seed(seed))
        network = heads.good
        maps(BATCH, image, None)
        network = heads.bad
        assert torch.equal(maps(BATCH, image, None), maps(1, image, None))


def test_scores_on_disk_need_no_faded_image(tmp_path: Path) -> None:
    """Of a case that is complete one batch is run, which vouches for its scores; of one that is not, all is as new."""
    calls: list[int] = []

    def counted() -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (calls.append(len(x)), classify(x))[1]

    store = ScoreStore(tmp_path)
    for expected in ([1, BATCH, 1, BATCH, BATCH, 1], [1, BATCH, 1]):
        calls.clear()
        windows().explain(images(), counted(), stored=[store.open("ct", "key")])
        assert calls[: len(expected)] == expected
    assert calls == expected


def test_a_network_that_refuses_the_faded_image_is_explained() -> None:
    def network(x: torch.Tensor) -> torch.Tensor:
        if bool((x.flatten(1).amax(1) < 0.6).any()):
            raise ValueError("an image without contrast")
        return classify(x)

    assert torch.equal(windows()(images(), network), windows()(images(), classify))


def by_batch_maximum(x: torch.Tensor) -> torch.Tensor:
    """Right for the unperturbed image, which has the batch's maximum, and for whatever stands beside it alone."""
    return classify(x / x.amax())


def rise(batch: int = BATCH, target: ms.Target = TARGET, **settings: Any) -> ms.PerturbationInferer:
    return ms.rise(30, 3, target=target, mask_batch_size=batch, **settings)


@pytest.mark.parametrize("count", [1, 3])
def test_a_perturbed_row_is_compared_too(count: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = rise()(images(count), lambda x: by_batch_maximum(x))
    assert torch.equal(found, rise(1)(images(count), by_batch_maximum))
    assert "a perturbed image (row " in caplog.text
    prediction = by_batch_maximum(images())
    (found,) = rise().explain(images(), by_batch_maximum, cases=[Case("ct", prediction=prediction)])
    assert torch.equal(found.saliency, rise(1)(images(), by_batch_maximum)[0])
    with pytest.raises(CaseError, match=rf"a perturbed image .* in a batch of {BATCH} copies of it.*no batch of"):
        rise()(images(), Takes(by_batch_maximum, BATCH))


def test_a_perturbed_row_of_a_detector() -> None:
    def detector(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        order = torch.arange(2) if len(x) == 1 else torch.arange(2).flip(0)
        boxes, scores = torch.tensor([[0.0, 0, 6, 6], [4, 4, 10, 12]]), classify(x).sigmoid()
        return [{"boxes": boxes[order], "labels": order, "scores": each[order]} for each in scores]

    target = ms.DetectionScore(0.0)
    calls: list[int] = []
    explain = rise(target=target)
    network = lambda x: (calls.append(len(x)), detector(x))[1]  # noqa: E731
    explain(images(), network)
    assert calls.count(1) == 2 + 7  # every perturbed row of the first batches, once
    calls.clear()
    explain(images(), network)
    assert calls.count(1) == 2
    maps = [rise(batch, target)(images(), lambda x: detector(x / x.amax())) for batch in (BATCH, 1)]
    assert torch.equal(*maps)


@pytest.mark.parametrize("coupling", ["a cap on boxes", "fewer in later rows"])
def test_a_detector_that_drops_boxes_beside_other_images(coupling: str) -> None:
    """The unperturbed row, the one that changed most and those that are faded keep their boxes."""

    def detector(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        boxes, scores = torch.tensor([[0.0, 0, 6, 6], [4, 4, 10, 12]]), classify(x).sigmoid()[:, :2]
        kept = torch.ones_like(scores, dtype=torch.bool)
        if coupling == "fewer in later rows":
            kept[2:, 1] = False
        elif len(x) > 1:
            kept = scores >= scores.flatten().sort(descending=True).values[scores.numel() - 2]
        return [
            {"boxes": boxes[keep], "labels": torch.arange(2)[keep], "scores": each[keep]}
            for each, keep in zip(scores, kept, strict=True)
        ]

    target = ms.DetectionScore(0.0)
    found, alone = (windows(batch, target).explain(images(), lambda x: detector(x))[0] for batch in (BATCH, 1))
    assert torch.equal(found.saliency, alone.saliency)


def test_an_image_of_nothing_is_not_taken_for_another() -> None:
    """What rounding leaves of a hidden image is no dependence, beside what the image itself gives."""

    def network(x: torch.Tensor) -> torch.Tensor:
        noise = 1e-6 * len(x)  # as kernels of another batch size have it
        return x.flatten(1).mean(1, keepdim=True) + noise

    calls: list[int] = []
    target, halves = ms.ClassScore([0], "none"), torch.tensor([1, 2]).repeat_interleave(5).repeat(1, 12, 1)
    image = images() * (halves == 1)
    explain = ms.region_occlusion(target=target, mask_batch_size=BATCH)
    explain.explain(image, lambda x: (calls.append(len(x)), network(x))[1], cases=[Case("ct", labels=halves)])
    assert calls == [1, 3, 1, 3, 3, 1]


def test_held_inputs_follow_their_images() -> None:
    class Weighted(torch.nn.Module):
        """Reads a held image and a held number, and normalises over the batch."""

        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            return classify(COUPLINGS["normalised over the batch"](x["image"] * x["prior"])) * x["age"]

    inputs = {"image": images(3), "prior": images(3).flip(2), "age": torch.tensor([[1.0], [2.0], [3.0]])}
    found, expected = (windows(batch, inputs=ms.DictInput("image"))(inputs, Weighted()) for batch in (BATCH, 1))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("coupling", [*COUPLINGS, None])
@pytest.mark.parametrize("sw_batch_size", [1, 3])
def test_patches(coupling: str | None, sw_batch_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """A batch of patches is checked as batches of images are; whole images go through one at a time."""
    network = segment if coupling is None else Coupled(segment, coupling)
    expected = patches(1, sw_batch_size, memory=False)(images(2), network)
    with caplog.at_level(logging.WARNING):
        found = patches(sw_batch_size=sw_batch_size)(images(2), network)
    if coupling is None or sw_batch_size == 1:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert not caplog.records
    else:
        assert torch.equal(found, expected)
        assert "a patch of the unperturbed image gives an output of shape (1, 3, 6, 6)" in caplog.text


@pytest.mark.parametrize("depends", [_of_dark, _of_equal])
@pytest.mark.parametrize("patch", [2, 4, None])
def test_a_batch_that_is_darker_or_holds_equal_images(
    patch: int | None, depends: Callable[[torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """As later batches may be, where the first ones show nothing. It costs nothing more."""
    image = 0.4 + 0.2 * images()
    with caplog.at_level(logging.WARNING):
        explain = patches(sw_batch_size=patch) if patch else windows(BATCH, REGION)
        explain(image, lambda x: segment(depends(x)))
    assert "depend" in caplog.text or "go through the network one at a time" in caplog.text
    caplog.clear()
    explain(image, lambda x: segment(x))
    assert not caplog.records


CLIPPED = [name for name in HIDDEN if name != "range"]  # a patch of equal values has none


@pytest.mark.parametrize("hidden", CLIPPED)
def test_patches_that_hide_that_they_depend(hidden: str) -> None:
    """Each patch holds the same maximum, as a scan that is clipped does, so that only perturbed patches show it."""

    def network(x: torch.Tensor) -> torch.Tensor:
        return segment(HIDDEN[hidden](x))

    image = (1.6 * images()).clamp(max=1)
    inner = SlidingWindowInferer((6, 6), 2, overlap=0.5)
    found, alone = (
        ms.sliding_window(
            10, 2, target=REGION, fill=ms.ConstantFill(0.3), inferer=inner, mask_batch_size=1, patch_memory=memory
        )(image, network)
        for memory in (True, False)
    )
    assert torch.equal(found, alone)


@pytest.mark.usefixtures("no_faded_batch")
def test_a_perturbed_patch_is_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    """The first of a case that a window changes, as for a network that refuses the faded patch."""
    with caplog.at_level(logging.WARNING):
        test_patches_that_hide_that_they_depend("maximum")
    assert "a perturbed patch gives an output of shape (1, 3, 6, 6)" in caplog.text


def test_boxes_in_another_order_are_the_same() -> None:
    """And a detector whose rows depend on each other is found out by the scores of its boxes."""

    def detector(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        boxes = torch.tensor([[0.0, 0, 6, 6], [4, 4, 10, 12]])
        order = torch.tensor([0, 1] if len(x) == 1 else [1, 0])
        scores = classify(x).sigmoid()
        return [{"boxes": boxes[order], "labels": order, "scores": each[:2][order]} for each in scores]

    calls: list[int] = []

    def counted(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        calls.append(len(x))
        return detector(x)

    target = ms.DetectionScore(0.0)
    windows(target=target).explain(images(), counted)
    assert calls.count(1) == 2 + 7
    found, expected = (
        windows(batch, target).explain(images(), Coupled(detector, "normalised over the batch"))[0]
        for batch in (BATCH, 1)
    )
    assert torch.equal(found.saliency, expected.saliency)


# What cannot be explained. --------------------------------------------------------------------------------------------


def test_a_dropout_that_is_left_on() -> None:
    with pytest.raises(CaseError, match=r"gives no fixed output: .* alone again and .* alone \(.*dropout") as caught:
        windows()(images(), WithDropout(classify))
    assert caught.value.case == "image 0 of the batch"


def test_a_network_of_one_batch_size() -> None:
    """It is compared with a batch of copies; where rows depend on each other nothing is left to explain it by."""
    found = windows()(images(), Takes(classify, BATCH))
    assert torch.equal(found, windows()(images(), classify))
    with pytest.raises(
        CaseError, match=rf"in a batch of {BATCH} and .* in a batch of {BATCH} copies of it.*no batch of"
    ):
        windows()(images(), Takes(Coupled(classify, "rows in another order"), BATCH))


def test_a_program_that_takes_single_images_only(caplog: pytest.LogCaptureFixture) -> None:
    """As ``torch.export`` makes it of one image."""
    layers = torch.nn.Conv2d(1, 3, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    network = torch.nn.Sequential(*layers).eval()
    program = torch.export.export(network, (images(),)).module()
    found = windows()(images(2), program)
    torch.testing.assert_close(found, windows(1)(images(2), network), rtol=0, atol=1e-6)
    assert "takes no batch of 4 images (AssertionError: Guard failed" in caplog.text
    assert "one at a time" in caplog.text


def test_a_compiled_network_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monai_saliency.utils.monai_private.is_compiled", lambda part: isinstance(part, Coupled))
    for coupling in ("rows in another order", "normalised over the batch"):
        network = Coupled(classify, coupling)
        found = windows()(images(), network)
        assert network.calls[:2] == [BATCH, BATCH]  # copies, and the first batch
        assert torch.equal(found, windows(1)(images(), Coupled(classify, coupling)))


def test_other_cases_go_on_where_one_is_refused() -> None:
    """A network that is wrong for dark images alone: the batch fails, and each case is then explained alone."""
    bright, dark = images(2)
    network = _RandomWhereDark()
    with pytest.raises(CaseError, match="case dark: the network gives no fixed output"):
        windows().explain(torch.stack([bright + 1, dark]), network, cases=[Case("bright"), Case("dark")])
    windows().explain(bright[None] + 1, network, cases=[Case("bright")])


class _RandomWhereDark(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dark = (x.flatten(1).amax(1) < 1.0).reshape(-1, 1)
        return classify(x) + dark * torch.rand(len(x), 3)


# What an evaluator predicted. -----------------------------------------------------------------------------------------


def explained_as(prediction: Any, network: Callable[..., Any] = classify, batch: int = BATCH) -> tuple[Any, list[int]]:
    calls: list[int] = []

    def counted(x: torch.Tensor) -> Any:
        calls.append(len(x))
        return network(x)

    cases = [Case("ct", prediction=prediction)]
    return windows(batch).explain(images(), counted, cases=cases)[0], calls


@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_prediction_costs_no_forward(batch: int) -> None:
    """Those of perturbed images remain, where there are batches, and the last one, where no row is left over."""
    found, calls = explained_as(classify(images()), batch=batch)
    count = len(found.scores) + 1
    full = [batch] * -(-count // batch)
    last = [1] if count % batch == 0 else []
    assert calls == [*(full if batch == 1 else [full[0], 1, batch, batch, 1, *full[1:]]), *last]
    assert torch.equal(found.saliency, windows(batch)(images(), classify)[0])


@pytest.mark.parametrize("batch", [1, BATCH])
def test_another_prediction_is_refused(batch: int) -> None:
    with pytest.raises(CaseError, match=r"not what was predicted: .*class 0 .* explained alone and .* predicted it"):
        explained_as(classify(images()) + torch.tensor([0.1, 0, 0]), batch=batch)


def test_a_prediction_of_another_form_is_left_out() -> None:
    found, calls = explained_as(torch.zeros(1, 7))
    assert calls.count(1) == 3
    assert torch.equal(found.saliency, windows()(images(), classify)[0])
    with pytest.raises(CaseError, match="gives no fixed output"):
        explained_as({"other": torch.zeros(1, 3)}, WithDropout(classify))


def test_one_at_a_time_must_be_what_was_predicted() -> None:
    alone = Coupled(classify, "normalised over the batch")
    found, _ = explained_as(alone(images()), alone)
    assert torch.equal(found.saliency, windows(1)(images(), alone)[0])
    beside_others = alone(torch.cat([images(), images(2) + 3]))[:1]
    with pytest.raises(CaseError, match="let it predict one image at a time"):
        explained_as(beside_others, alone)


@pytest.mark.parametrize("coupling", ["normalised over the batch", None])
def test_patches_are_what_was_predicted(coupling: str | None) -> None:
    network = segment if coupling is None else Coupled(segment, coupling)
    inner = patches().inferer
    prediction = inner(images(), network)
    (found,) = patches().explain(images(), network, cases=[Case("ct", prediction=prediction)])
    torch.testing.assert_close(found.saliency, patches(1, memory=False)(images(), network)[0], rtol=0, atol=1e-6)
    with pytest.raises(CaseError, match="not what was predicted"):
        patches().explain(images(), network, cases=[Case("ct", prediction=1.01 * prediction)])


# Parts, stores, ranks and devices. ------------------------------------------------------------------------------------


def test_a_resumed_case_goes_on_one_at_a_time(tmp_path: Path) -> None:
    """Its scores lie apart from those of batches, so that neither is taken for the other."""
    (expected,) = windows(1).explain(images(), Coupled(classify, "rows in another order"))
    count = len(expected.scores) + 1

    def explain(batch: int, coupling: str = "rows in another order") -> tuple[Any, int]:
        network = Coupled(classify, coupling)
        stored = [ScoreStore(tmp_path).open("ct", "key")]
        (found,) = windows(batch).explain(images(), network, stored=stored)
        return found, sum(network.calls)

    first, calls = explain(BATCH)
    assert calls == 1 + BATCH + count + 1  # and the unperturbed image again at the end
    again, calls = explain(BATCH)
    assert calls == 1 + BATCH + 1
    assert torch.equal(first.saliency, expected.saliency)
    assert torch.equal(again.saliency, expected.saliency)
    # And what a run of batches has left, wrong for such a network, is not looked at.
    wrong = ScoreStore(tmp_path).open("ct", "key")
    wrong.resume(expected.reference_scores)
    wrong.finish(torch.zeros_like(expected.scores))
    again, _ = explain(BATCH)
    assert torch.equal(again.saliency, expected.saliency)


def test_parts_of_such_a_case(tmp_path: Path) -> None:
    network = Coupled(classify, "statistics of the batch")
    (expected,) = windows(1).explain(images(), network)
    parts = [windows().score(images(), network, part=Part(k, 3)) for k in range(3)]
    assert torch.equal(merged(parts)[0].saliency, expected.saliency)
    for k in range(3):
        stored = [ScoreStore(tmp_path).open("ct", "key")]
        (state,) = windows().score(images(), network, stored=stored, part=Part(k, 3))
        assert state.complete == (k == 2)
    assert torch.equal(state.explanation().saliency, expected.saliency)


@pytest.mark.parametrize("coupled", [{0, 1}, {0}, {1}])
def test_all_ranks_decide_the_same(coupled: set[int]) -> None:
    """Also where rows depend on each other on some of them only, as with another version of a library."""
    (expected,) = windows(1).explain(images(), Coupled(classify, "rows in another order"))

    def rank(number: int) -> Any:
        network = Coupled(classify, "rows in another order") if number in coupled else classify
        (found,) = windows(sharing=MasksOverRanks()).explain(images(), network)
        return found.saliency

    for found in on_ranks(2, rank):
        torch.testing.assert_close(found, expected.saliency, rtol=0, atol=1e-6)


def test_a_rank_that_is_refused_ends_all() -> None:
    def rank(number: int) -> Any:
        with pytest.raises(CaseError, match="gives no fixed output"):
            windows(sharing=MasksOverRanks())(images(), WithDropout(classify))
        return windows(sharing=MasksOverRanks())(images(), classify)

    for found in on_ranks(2, rank):
        assert torch.equal(found, windows()(images(), classify))


def test_devices_decide_the_same() -> None:
    network = Coupled(classify, "a softmax over the images")
    sharing = MasksOverDevices(["cpu", "cpu", "cpu"])
    assert torch.equal(windows(sharing=sharing)(images(2), network), windows(1)(images(2), network))
    with pytest.raises(CaseError, match="gives no fixed output"):
        windows(sharing=sharing)(images(), WithDropout(classify))


# What is rounding. ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "parameters", "autocast", "expected"),
    [
        (torch.float64, torch.float64, None, 1e-8),
        (torch.float64, torch.float32, None, 1e-4),
        (torch.float32, torch.float32, None, 1e-4),
        (torch.float32, torch.float16, None, 2e-2),
        (torch.float32, torch.float32, torch.bfloat16, 5e-2),
        (torch.float16, torch.float32, None, 2e-2),
    ],
)
def test_rounding(output: torch.dtype, parameters: torch.dtype, autocast: torch.dtype | None, expected: float) -> None:
    network = torch.nn.Linear(2, 2).to(parameters)
    assert rounding_of(network, torch.device("cpu"), autocast)(output) == expected


def test_an_output_in_double_of_an_image_in_single_precision(caplog: pytest.LogCaptureFixture) -> None:
    """A factor in float64 makes float64 of what was computed in float32, rounded otherwise in each batch size."""
    factor = torch.tensor(3.0, dtype=torch.float64)

    def network(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1).sum(1, keepdim=True) * (1 + 3e-7 * (len(x) > 1)) * factor.expand(1, 1)

    explain = ms.sliding_window(4, 4, target=ms.ClassScore([0], "none"), mask_batch_size=8)
    (found,) = explain.explain(torch.ones(1, 1, 8, 8), network)
    assert not caplog.records
    assert found.noise is not None
    assert float(found.noise[0]) >= 192 * 3e-7  # the precision of a sum of 64 ones in float32, times 3
    explain.explain(torch.ones(1, 1, 8, 8).double(), network)  # in float64 that is more than rounding
    assert "rounding explains 1e-08" in caplog.text
    assert "one at a time" in caplog.text


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0001], True),
        ([1.0, 2.0], [1.0, 2.001], False),
        ([0.0, 0.0], [0.0, 1e-30], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
        ([float("nan"), 1.0], [0.0, 1.0], False),
        ([float("inf"), 1.0], [float("inf"), 1.0], True),
        ([float("inf"), 1.0], [float("-inf"), 1.0], False),
        ([7, 8], [7, 8], True),
        ([7, 8], [7, 9], False),
    ],
)
def test_difference(one: list[float], other: list[float], same: bool) -> None:
    found = difference(
        *(excerpt({"a": [torch.tensor([each])]}) for each in (one, other)), rounding_of(None, torch.device("cpu"))
    )
    assert found is not None
    assert found.beyond_rounding == (not same)


def test_channels_of_a_volume_are_measured_apart() -> None:
    """But not by less than 1 where the volume has such values: rounding of large ones shows in small ones."""
    output = torch.full((1, 3, 4, 5), 1e9)
    output[:, 1], output[:, 2] = 3.0, 0.0
    for channel, gap, same in [(0, 1e4, True), (0, 1e6, False), (1, 1e-4, True), (1, 1e-3, False), (2, 5e-5, True)]:
        other = output.clone()
        other[0, channel, 2, 3] += gap
        found = difference(excerpt(output), excerpt(other), rounding_of(None, torch.device("cpu")))
        assert found is not None
        assert found.beyond_rounding == (not same)


def test_large_outputs_are_compared_by_an_excerpt() -> None:
    output = torch.rand(1, 3, 1024, 1024)
    (values,) = [values for _, values in excerpt(output).values()]
    assert len(values) <= 2**20
    other = output.clone()
    other[:, 1] *= 1.1
    gap = difference(excerpt(output), excerpt(other), rounding_of(None, torch.device("cpu")))
    assert gap is not None
    assert gap.beyond_rounding
    assert difference(excerpt(output), excerpt(output[:, :2]), rounding_of(None, torch.device("cpu"))) is None
