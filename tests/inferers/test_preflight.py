"""What must hold of a network: rows that do not depend on each other, and a fixed output, which was predicted."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dependent import COUPLINGS, Coupled, Takes, WithDropout, classify, segment
from helpers.forked_ranks import on_ranks
from helpers.tolerances import assert_close
from helpers.warned import logged_warnings
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.distributed.process_group import MasksOverRanks
from monai_saliency.errors import CaseError
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.utils.precision import rounding_of

BATCH = 4
TARGET = ms.ClassScore([0, 2], "softmax")
REGION = ms.RegionScore(1, "softmax", region="all")


def images(count: int = 1) -> torch.Tensor:
    return torch.rand(count, 1, 12, 10, generator=torch.Generator().manual_seed(1))


def windows(batch: int = BATCH, target: ms.targets.Target = TARGET, **settings: Any) -> ms.PerturbationInferer:
    return ms.sliding_window(4, 3, target=target, mask_batch_size=batch, **settings)


def patches(batch: int = BATCH, sw_batch_size: int = 3, memory: bool = True) -> ms.PerturbationInferer:
    inner = SlidingWindowInferer((6, 6), sw_batch_size, overlap=0.5)
    return windows(batch, REGION, inferer=inner, patch_memory=memory)


# Rows that depend on each other.
@pytest.mark.parametrize(("coupling", "count"), [*((each, 1) for each in COUPLINGS), ("one answer for the batch", 3)])
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
    (line,) = logged_warnings(caplog)
    assert "image 0 of the batch" in line
    assert "one at a time" in line
    if coupling != "normalised over the batch":  # there the image with everything hidden shows it first
        scores = expected[0].reference_scores.tolist()
        assert f"class 0 {scores[0]:.6g}, class 2 {scores[1]:.6g} alone" in line
    assert "in a batch with another one" in line


@pytest.mark.parametrize("size", [1, BATCH])
def test_rows_that_are_independent_cost_a_few_images_once(size: int) -> None:
    """The image and the one with everything hidden alone, side by side, and the first again; then nothing more."""
    calls: list[int] = []

    def network(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return classify(x)

    (found,) = windows(size).explain(images(), network)
    count = len(found.scores) + 2
    full = [size] * -(-count // size)
    assert calls == [1, 1, *([2] if size > 1 else []), 1, *full]
    assert found.num_forwards == count - 1
    calls.clear()
    windows(size)(images(), network)
    assert calls == full
    calls.clear()
    windows(size, ms.ClassScore([1], "softmax"))(images(), network)  # a target of one's own may mix rows
    assert len(calls) > len(full)


def test_everything_hidden_scores_the_same_in_a_free_row_and_alone() -> None:
    rows = len(windows().masks.bind(images()[0])) + 1
    alone = windows(1).explain(images(3), classify)
    for size in (BATCH, rows, rows + 1, 3 * rows, 3 * rows + 3):
        for found, expected in zip(windows(size).explain(images(3), classify), alone, strict=True):
            assert_close(found.hidden_scores, expected.hidden_scores)


def by_batch_maximum(x: torch.Tensor) -> torch.Tensor:
    """Right for the unperturbed image, which has the batch's maximum, and for whatever stands next to it alone."""
    return classify(x / x.amax())


def test_a_perturbed_row_is_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    def rise(batch: int = BATCH) -> ms.PerturbationInferer:
        return ms.rise(30, 3, target=TARGET, mask_batch_size=batch, fill=ms.ConstantFill(0.2))

    with caplog.at_level(logging.WARNING):
        found = rise()(images(3), lambda x: by_batch_maximum(x))
    assert torch.equal(found, rise(1)(images(3), by_batch_maximum))
    assert "the image with everything hidden gives" in caplog.text
    prediction = by_batch_maximum(images())
    (found,) = rise().explain(images(), by_batch_maximum, cases=[ms.Case("ct", prediction=prediction)])
    assert torch.equal(found.saliency, rise(1)(images(), by_batch_maximum)[0])


@pytest.mark.parametrize("network", [classify, segment])
def test_a_large_value_hides_nothing(network: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A class that is left out by a large negative logit tells nothing of how the others differ."""

    def masks(x: torch.Tensor) -> torch.Tensor:
        output = network(COUPLINGS["normalised over the batch"](x)).clone()
        output[:, 1] = -1e9
        return output

    target = TARGET if network is classify else ms.RegionScore(2, "softmax", region="all")
    found, alone = (windows(batch, target)(images(), masks) for batch in (BATCH, 1))
    assert torch.equal(found, alone)


@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_network_that_keeps_a_state_is_refused(batch: int) -> None:
    calls: list[int] = []

    def network(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return classify(x) * len(calls)

    with pytest.raises(
        CaseError, match=r"no fixed output: the unperturbed image gives .* first call and .* second call"
    ):
        windows(batch).explain(images(), network)


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
        assert_close(found, expected, scale=1)  # of a probability
        assert not logged_warnings(caplog)
    else:
        assert torch.equal(found, expected)
        assert "the network's output of a patch has a mean" in caplog.text


def test_a_perturbed_patch_is_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    """Each patch holds the same maximum, as a scan that is clipped does, so that only perturbed patches show it."""
    network = lambda x: segment(x / x.amax())  # noqa: E731
    image = (1.6 * images()).clamp(max=1)
    inner = SlidingWindowInferer((6, 6), 2, overlap=0.5)
    with caplog.at_level(logging.WARNING):
        found, alone = (
            ms.sliding_window(
                10, 2, target=REGION, fill=ms.ConstantFill(0.3), inferer=inner, mask_batch_size=1, patch_memory=memory
            )(image, network)
            for memory in (True, False)
        )
    assert torch.equal(found, alone)
    assert "the network's output of a patch has a mean" in caplog.text


def test_patches_of_a_network_that_keeps_a_state_are_refused() -> None:
    calls: list[int] = []

    def network(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return segment(x) * len(calls)

    with pytest.raises(CaseError, match="no fixed output: a patch gives something else at its second call"):
        patches(sw_batch_size=1)(images(), network)


@pytest.mark.parametrize("coupling", ["normalised over the batch", None])
def test_patches_are_what_was_predicted(coupling: str | None) -> None:
    network = segment if coupling is None else Coupled(segment, coupling)
    prediction = patches().inferer(images(), network)
    (found,) = patches().explain(images(), network, cases=[ms.Case("ct", prediction=prediction)])
    assert_close(found.saliency, patches(1, memory=False)(images(), network)[0], scale=1)
    with pytest.raises(CaseError, match="not what was predicted"):
        patches().explain(images(), network, cases=[ms.Case("ct", prediction=1.01 * prediction)])


# What cannot be explained, and networks of one batch size.
def test_a_dropout_that_is_left_on() -> None:
    with pytest.raises(CaseError, match=r"gives no fixed output: .* first call and .* second call.*dropout") as error:
        windows()(images(), WithDropout(classify))
    assert error.value.case == "image 0 of the batch"


def test_a_network_of_one_batch_size(caplog: pytest.LogCaptureFixture) -> None:
    """It is compared with a batch of copies; where rows depend on each other nothing is left to explain it by."""
    assert torch.equal(windows()(images(), Takes(classify, BATCH)), windows()(images(), classify))
    with pytest.raises(RuntimeError, match=f"expected a batch of {BATCH}"):
        windows()(images(), Takes(Coupled(classify, "normalised over the batch"), BATCH))
    assert f"a batch of {BATCH} copies of it" in caplog.text


def test_a_program_that_takes_single_images_only() -> None:
    """As ``torch.export`` makes it of one image: it goes through alone, and of several the error says how they do."""
    layers = torch.nn.Conv2d(1, 3, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    network = torch.nn.Sequential(*layers).eval()
    program = torch.export.export(network, (images(),)).module()
    with pytest.raises(CaseError, match="set mask_batch_size=1"):
        windows()(images(2), program)
    assert_close(windows(1)(images(2), program), windows(1)(images(2), network))
    assert_close(windows()(images(), program), windows(1)(images(), network))


def flattened(x: torch.Tensor) -> torch.Tensor:
    """A network that was written for one image: of a batch it sees the first one."""
    return classify(x.reshape(1, -1)[:, :120].view(1, 1, 12, 10))


@pytest.mark.parametrize("network", [Takes(classify, 1), flattened])
def test_a_network_of_one_image(network: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The only image of a call goes through alone, with a warning; of several the error names the way out."""
    expected = windows(1).explain(images(), classify)[0]
    (found,) = windows().explain(images(), network)
    assert torch.equal(found.saliency, expected.saliency)
    assert torch.equal(found.scores, expected.scores)
    (line,) = logged_warnings(caplog)
    assert "one at a time" in line
    assert "mask_batch_size=1" in line
    with pytest.raises(CaseError, match=rf"fails on a batch of {BATCH} and runs one image alone.*mask_batch_size=1"):
        windows()(images(3), network)
    assert torch.equal(windows(1)(images(3), network), windows(1)(images(3), classify))


@pytest.mark.parametrize(("rows", "count", "batch"), [(1, 1, BATCH), (1, 2, BATCH), (2, 2, 1), (BATCH, BATCH, BATCH)])
def test_a_function_that_closes_over_another_input(rows: int, count: int, batch: int) -> None:
    """The map is that of the two inputs, or the error names ``ArgumentInputs``."""
    ages = torch.arange(1.0, 1.0 + rows)[:, None]

    def network(x: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, ages[:, :, None, None].expand(-1, 1, *x.shape[2:])], 1)
        return classify(both[:, :1] * both[:, 1:])

    if rows == count == 1:
        expected = windows(batch, inputs=ms.ArgumentInputs(0))((images(), ages), network)
        assert_close(windows(batch)(images(), lambda x: network(x, ages)), expected)
    else:
        with pytest.raises(Exception, match=r"inputs=ms\.ArgumentInputs\(perturb=0\)"):
            windows(batch)(images(count), lambda x: network(x, ages))


def test_a_compiled_network_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monai_saliency.utils.monai_private.is_compiled", lambda part: isinstance(part, Coupled))
    network = Coupled(classify, "normalised over the batch")
    found = windows()(images(), network)
    assert network.calls[:4] == [BATCH] * 4
    assert torch.equal(found, windows(1)(images(), Coupled(classify, "normalised over the batch")))


# What an evaluator predicted.
def explained_as(prediction: Any, network: Callable[..., Any] = classify, batch: int = BATCH) -> tuple[Any, list[int]]:
    calls: list[int] = []

    def counted(x: torch.Tensor) -> Any:
        calls.append(len(x))
        return network(x)

    cases = [ms.Case("ct", prediction=prediction)]
    return windows(batch).explain(images(), counted, cases=cases)[0], calls


@pytest.mark.parametrize("batch", [1, BATCH])
def test_another_prediction_is_refused(batch: int) -> None:
    with pytest.raises(CaseError, match=r"not what was predicted: .*class 0 .* explained and .* predicted it"):
        explained_as(classify(images()) + torch.tensor([0.1, 0, 0]), batch=batch)


def test_a_prediction_of_another_form_is_left_out() -> None:
    found, _ = explained_as(torch.zeros(1, 7))
    assert torch.equal(found.saliency, windows()(images(), classify)[0])
    with pytest.raises(CaseError, match="gives no fixed output"):
        explained_as({"other": torch.zeros(1, 3)}, WithDropout(classify))


def test_one_at_a_time_must_be_what_was_predicted() -> None:
    alone = Coupled(classify, "normalised over the batch")
    found, _ = explained_as(alone(images()), alone)
    assert torch.equal(found.saliency, windows(1)(images(), alone)[0])
    with_others = alone(torch.cat([images(), images(2) + 3]))[:1]
    with pytest.raises(CaseError, match="let it predict one image at a time"):
        explained_as(with_others, alone)


# Parts, stores, ranks and devices.
def test_a_resumed_case_goes_on_one_at_a_time(tmp_path: Path) -> None:
    """Its scores lie apart from the scores of batches, so that neither is taken for the other."""
    coupling = "normalised over the batch"
    (expected,) = windows(1).explain(images(), Coupled(classify, coupling))
    calls = []
    for _ in range(2):
        network = Coupled(classify, coupling)
        (found,) = windows().explain(images(), network, stored=[ScoreStore(tmp_path).open("ct", "key")])
        assert torch.equal(found.saliency, expected.saliency)
        calls.append(sum(network.calls))
    assert calls[1] == calls[0] - len(expected.scores)  # no mask is run again


def test_parts_of_such_a_case(tmp_path: Path) -> None:
    network = Coupled(classify, "statistics of the batch")
    (expected,) = windows(1).explain(images(), network)
    for k in range(3):
        stored = [ScoreStore(tmp_path).open("ct", "key")]
        (found,) = windows().score(images(), network, stored=stored, part=Part(k, 3))
        assert (found is None) == (k < 2)
    assert torch.equal(found.saliency, expected.saliency)


def test_all_ranks_decide_the_same() -> None:
    """Where rows depend on each other on one of them only, as with another version of a library, all refuse."""
    (expected,) = windows(1).explain(images(), Coupled(classify, "rows in another order"))

    def rank(number: int) -> Any:
        (found,) = windows(sharing=MasksOverRanks()).explain(images(), Coupled(classify, "rows in another order"))
        with pytest.raises(ValueError, match="differ in whether images go through the network one at a time"):
            windows(sharing=MasksOverRanks()).explain(images(), [Taken(), Mixed()][number])
        return found.saliency

    for found in on_ranks(2, rank):
        assert_close(found, expected.saliency)


class Taken(torch.nn.Module):
    """Has the weights of :class:`Mixed`, none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return classify(x)


class Mixed(torch.nn.Module):
    """Mixes its rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return classify(x.flip(0))


@pytest.mark.parametrize(
    ("output", "parameters", "autocast", "expected"),
    [
        (torch.float64, torch.float64, None, 1e-8),
        (torch.float64, torch.float32, None, 1e-4),
        (torch.float32, torch.float16, None, 2e-2),
        (torch.float32, torch.float32, torch.bfloat16, 5e-2),
    ],
)
def test_rounding(output: torch.dtype, parameters: torch.dtype, autocast: torch.dtype | None, expected: float) -> None:
    network = torch.nn.Linear(2, 2).to(parameters)
    assert rounding_of(network, torch.device("cpu"), autocast)(output) == expected
