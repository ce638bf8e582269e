import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import monai.transforms as mt
import pytest
import torch
from helpers.tolerances import SINGLE, assert_close
from monai.apps.pathology.transforms import HoVerNetInstanceMapPostProcessingd, HoVerNetNuclearTypePostProcessingd
from monai.apps.vista3d.transforms import VistaPostTransformd

import monai_saliency as ms
from monai_saliency.errors import CaseError, NothingToExplain, SettingError
from monai_saliency.targets import auto
from monai_saliency.targets.auto import finds_nothing
from monai_saliency.targets.postprocessing import Reading, read_postprocessing

FLAT, SOLID = ms.Case("flat", torch.zeros(1, 4, 4)), ms.Case("solid", torch.zeros(1, 4, 4, 4))


def readings(**reading: Any) -> dict[Any, Reading]:
    return {"pred": Reading(**reading)}


def denormalize(values: torch.Tensor) -> torch.Tensor:
    return values * 100


@pytest.mark.parametrize(
    "transform",
    [mt.AsDiscreted("pred", rounding="torchrounding"), mt.AsDiscreted("pred", to_onehot=2), mt.Activationsd("pred"),
     mt.Activationsd("pred", other=denormalize), mt.Lambdad("pred", func=denormalize), denormalize],
)  # fmt: skip
@pytest.mark.parametrize("output", [torch.tensor([[4.2]]), torch.tensor([[0.4]]), torch.full((1, 1, 4, 4), 4.2)])
def test_a_number_that_is_no_class_is_explained_as_the_network_gives_it(transform: Any, output: torch.Tensor) -> None:
    """An image of numbers only where that is given, or known."""
    found = read_postprocessing(transform)
    if output.ndim > 2:
        with pytest.raises(SettingError, match=r'(?s)"sigmoid".*RegionScore\(0, "none", "all"\) .*activation none\)$'):
            ms.AutoTarget(found).bind(output, FLAT)
    target = ms.AutoTarget(found, activation="none" if output.ndim > 2 else None)
    bound = target.bind(output, FLAT)
    assert bound(output).flatten().tolist() == [pytest.approx(output.flatten()[0].item())]
    assert bound.quantity().unit == "network output"


def test_an_image_that_the_bundle_saves_as_it_is_is_explained_as_it_is() -> None:
    """Unless a function that cannot be read comes before."""
    saved = mt.SaveImaged("pred")
    assert ms.AutoTarget(read_postprocessing(saved)).choose(ONE, FLAT).source == auto.PIPELINE
    with pytest.raises(SettingError, match="postprocessing applies denormalize to it"):
        ms.AutoTarget(read_postprocessing(mt.Compose([denormalize, saved]))).choose(ONE, FLAT)
    with pytest.raises(SettingError, match="channel 1 is out of range"):
        ms.AutoTarget(classes=[1], activation="none").choose(ONE, FLAT)


@pytest.mark.parametrize(
    "transforms",
    [
        [mt.Activations(other=denormalize)],
        [
            mt.Activationsd("pred", sigmoid=True),
            mt.Lambdad("pred", func=denormalize),
            mt.AsDiscreted("pred", threshold=0.5),
        ],
        [mt.AsDiscrete(threshold=torch.tensor([0.5, 0.6, 0.5]))],
    ],
)
def test_a_function_that_cannot_be_read_is_not_guessed(transforms: list[Any]) -> None:
    found = read_postprocessing(mt.Compose(transforms))
    with pytest.raises(SettingError, match=r"(?s).*postprocessing (applies|rounds|compares).*saliency_activa"):
        ms.AutoTarget(found).bind(LOGITS, FLAT)
    assert ms.AutoTarget(found, activation="sigmoid").bind(LOGITS, FLAT).quantity().unit == "log-odds"
    assert ms.AutoTarget(found, activation="none").bind(LOGITS, FLAT).quantity().unit == "network output"


LOGITS = torch.tensor([[1.0, 3.0, -2.0]])


@pytest.mark.parametrize(
    ("output", "reading", "labels", "score"),
    [
        # Single-label: the predicted class, by softmax.
        (LOGITS, {"activation": "softmax"}, [1], LOGITS.softmax(1)[0, 1].logit()),
        (LOGITS, {"discrete": "argmax"}, [1], LOGITS.softmax(1)[0, 1].logit()),
        # Several labels: all above one half, else the likeliest.
        (LOGITS, {"activation": "sigmoid"}, [0, 1], torch.tensor([1.0, 3.0])),
        (LOGITS, {"discrete": "threshold"}, [0, 1], torch.tensor([1.0, 3.0])),
        (LOGITS - 9, {"activation": "sigmoid"}, [1], torch.tensor(-6.0)),
        (LOGITS * 20, {"activation": "softmax"}, [1], torch.tensor(40.0)),
    ],
)
def test_classification(output: torch.Tensor, reading: dict[str, Any], labels: list[int], score: torch.Tensor) -> None:
    bound = ms.AutoTarget(readings(**reading) if reading else None).bind(output, FLAT)
    assert list(bound.labels) == labels
    assert_close(bound(output)[0], torch.atleast_1d(score), within=SINGLE)
    plain = ms.AutoTarget(readings(**reading) if reading else None, scale="probability").bind(output, FLAT)
    assert_close(plain(output)[0], torch.atleast_1d(score).sigmoid(), within=SINGLE)


PROBABILITIES = torch.tensor([[0.9, 0.8, 0.1]])
ONE = torch.tensor([[[[0.2, 0.9, 0.7, 0.1]]]]).expand(1, 1, 4, 4)


@pytest.mark.parametrize("reading", [{}, {"discrete": "argmax"}, {"discrete": "threshold"}])
@pytest.mark.parametrize("output", [PROBABILITIES, torch.rand(1, 2, 4, 4)])
def test_what_may_be_probabilities_or_logits_is_asked_for(output: torch.Tensor, reading: dict[str, Any]) -> None:
    """Nothing but this case's numbers could say which, and the next case's might say another."""
    with pytest.raises(SettingError, match=r"(?s).* may hold probabilities or logits.*--saliency_activation none"):
        ms.AutoTarget(readings(**reading) if reading else None).bind(output, FLAT)


#: outputs of one network for several cases, as different as they can be
CASES = {
    "several channels": [LOGITS, LOGITS * 20, LOGITS / 100 + 0.3, LOGITS - 9, PROBABILITIES],
    "ends in a softmax": [each.softmax(1) for each in (LOGITS, LOGITS * 20, LOGITS * 200, LOGITS / 100)],
    "one number": [torch.tensor([[each]]) for each in (61.5, 0.7, -3.0, 0.0, 1.0)],
    "an image": [ONE, ONE * 90, ONE - 5, torch.zeros(1, 1, 4, 4)],
    "a volume of classes": [torch.randn(1, 3, 4, 4) * scale for scale in (0.01, 1, 50)] + [torch.rand(1, 3, 4, 4)],
    "a volume of probabilities": [(torch.randn(1, 3, 4, 4) * scale).softmax(1) for scale in (0.01, 1, 50)],
}


@pytest.mark.parametrize("reading", [None, *({"activation": a, "discrete": d} for a in (None, "softmax", "sigmoid")
                                            for d in (None, "argmax", "threshold"))])  # fmt: skip
@pytest.mark.parametrize("activation", [None, "none"])
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.filterwarnings("ignore:.*already looks like probabilities")
def test_one_meaning_a_cohort(kind: str, reading: dict[str, Any] | None, activation: str | None) -> None:
    """Whatever the first case is, and whoever explains it: a case means the same as all others, or is refused."""
    meanings = set()
    for output in CASES[kind]:
        # Each as by a worker that met no other case.
        target = ms.AutoTarget(None if reading is None else readings(**reading), activation=activation)
        try:
            found = target.bind(output, FLAT).quantity()
        except ValueError:
            continue
        # Where no voxel is predicted the mean is that of the image.
        meanings.add((found.words.removesuffix("in the image").removesuffix("in the predicted region"), found.unit))
    assert len(meanings) <= 1


@pytest.mark.parametrize("discrete", [None, "argmax", "threshold"])
def test_the_end_of_a_softmax_is_seen(discrete: str | None) -> None:
    """Its numbers are explained as they are, and the words say how they were read."""
    target = ms.AutoTarget(readings(discrete=discrete))
    output = LOGITS.softmax(1)
    bound = target.bind(output, FLAT)
    assert "known by the output, which lies in [0, 1] and sums to 1" in bound.words()
    assert list(bound.labels) == [1]
    assert_close(bound(output)[0], output[0, 1:2].logit(), within=SINGLE)
    # As segmentations: in the predicted region, the mean.
    volume = segmentation().softmax(1) * (1 + 9e-5)  # patches are averaged with rounding
    regions = ms.AutoTarget(readings(discrete=discrete)).bind(volume, FLAT)
    assert set(regions.labels) >= ({2} if discrete == "threshold" else {1, 2})
    assert bool(regions(volume).isfinite().all())


@pytest.mark.parametrize("other", [LOGITS, LOGITS.softmax(1) * 1.001, torch.tensor([[1.2, -0.1, -0.1]])])
def test_rows_that_do_not_sum_to_one_are_refused(other: torch.Tensor) -> None:
    """Then the unperturbed image's row summed to 1 by chance."""
    output = LOGITS.softmax(1)
    scores = ms.AutoTarget().bind(output, FLAT)(torch.cat([output, other, output]))
    assert scores.isnan().flatten().tolist() == [False, True, False]

    def network(images: torch.Tensor) -> torch.Tensor:
        whole = images.flatten(1).amin(dim=1, keepdim=True) > 0
        return torch.where(whole, output, other)

    with pytest.raises(CaseError, match=r"was read as probabilities.*give activation='softmax'.*--saliency_activation"):
        ms.explain(network, torch.ones(1, 1, 8, 8), method="rise", num_masks=10)


def segmentation() -> torch.Tensor:
    """Class 2 in four voxels, class 1 in two, background elsewhere."""
    logits = torch.zeros(1, 4, 4, 4)
    logits[0, 0] = 1
    logits[0, 2, 0, :] = 3
    logits[0, 1, 1, :2] = 2
    return logits


def test_segmentation_explains_each_predicted_channel_in_its_region() -> None:
    output = segmentation()
    bound = ms.AutoTarget(readings(activation="softmax")).bind(output, FLAT)
    assert list(bound.labels) == [1, 2]
    expected = [output.softmax(1)[0, 1, 1, 0], output.softmax(1)[0, 2, 0, 0]]
    assert_close(bound(output)[0], torch.stack(expected))


def test_empty_segmentation_is_explained_by_its_likeliest_channel() -> None:
    output = torch.zeros(1, 3, 4, 4)
    output[:, 0], output[:, 2] = 5, 1
    choice = ms.AutoTarget(readings(activation="softmax")).choose(output, FLAT)
    assert "no voxel is predicted" in choice.words
    assert list(choice.target.bind(output, FLAT).labels) == [2]


def test_chosen_channels_are_explained_where_they_are_predicted() -> None:
    """As predicted ones are; where none of them is, there is nothing to explain."""
    output = torch.zeros(1, 3, 4, 4)
    output[:, 0], output[:, 2], output[0, 1, 0, :2] = 5, 1, 9
    expected = output.softmax(1)[0, 1, 0, :2].mean()
    for classes in ("predicted", [2, 1], [1]):
        bound = ms.AutoTarget(readings(activation="softmax"), classes).bind(output, FLAT)
        assert (list(bound.labels), bound.words().count("channel 1 in its predicted region")) == ([1], 1)
        assert_close(bound(output)[0, 0], expected)
    assert list(ms.AutoTarget(classes="all", activation="softmax").bind(output, FLAT).labels) == [0, 1]
    with pytest.raises(NothingToExplain, match=r"case flat: no voxel is predicted as channel 2"):
        ms.AutoTarget(classes=[2], activation="softmax").bind(output, FLAT)
    with pytest.raises(SettingError, match="channel 3 is out of range"):
        ms.AutoTarget(classes=[3], activation="softmax").bind(output, FLAT)


def test_at_most_ten_channels_are_explained_and_the_words_say_so() -> None:
    output = torch.zeros(1, 17, 4, 4)
    output[0, 1:].view(16, 16).fill_diagonal_(5.0)
    output[0, 12, 0, 0] = 9  # two voxels
    choice = ms.AutoTarget(readings(activation="softmax")).choose(output, FLAT)
    labels = choice.target.bind(output, FLAT).labels
    assert len(labels) == 10
    assert 12 in labels
    assert "the largest of 15" in choice.words
    assert len(ms.AutoTarget(classes="all", activation="softmax").bind(output, FLAT).labels) == 15


def test_a_part_is_the_only_one_or_named_by_the_postprocessing_or_asked_for() -> None:
    output = {"edges": torch.randn(1, 2, 4, 4), "class_map": segmentation(), "features": [torch.rand(1, 8, 2, 2)]}
    choice = ms.AutoTarget({"class_map": Reading("sigmoid")}).choose(output, FLAT)
    assert choice.path == ("class_map",)
    assert choice.target.activation == "sigmoid"  # type: ignore[attr-defined]
    assert ms.AutoTarget(output="edges", activation="softmax").choose(output, FLAT).path == ("edges",)
    for found in ({}, {"class_map": Reading("sigmoid"), "edges": Reading("softmax")}):
        with pytest.raises(
            SettingError, match=r"output=\('features', 0\) reads \(B, 8, 2, 2\).*--saliency_output edges"
        ):
            ms.AutoTarget(found).choose(output, FLAT)
    for one in ([segmentation(), None], (segmentation(), torch.tensor(0.3)), {"a": [segmentation()], "b": "text"}):
        bound = ms.AutoTarget(activation="softmax").bind(one, FLAT)
        assert_close(bound(one), ms.AutoTarget(activation="softmax").bind(segmentation(), FLAT)(segmentation()))
    ages = {"embedding": torch.rand(1, 8), "age": torch.tensor([61.0]), "sex": torch.tensor([0.2])}
    for several in ([segmentation(), torch.rand(1, 4, 2, 2)], ages):
        for target in (ms.AutoTarget(activation="softmax"), ms.ClassScore(1, "softmax"), ms.RegressionScore(0)):
            with pytest.raises(
                SettingError, match=r"output=.* reads \(B, 8\), output='age' reads \(B\)|output=0 reads"
            ):
                target.bind(several, FLAT)


def test_hovernets_nuclei_are_named_by_its_postprocessing() -> None:
    steps = mt.Compose([HoVerNetInstanceMapPostProcessingd(), HoVerNetNuclearTypePostProcessingd()])
    assert read_postprocessing(steps) == {"nucleus_prediction": Reading("softmax", "argmax")}
    sigmoid = HoVerNetInstanceMapPostProcessingd("nuclei", activation="sigmoid", mask_threshold=0.3)
    assert read_postprocessing(sigmoid) == {"nuclei": Reading("sigmoid", "threshold", threshold=0.3)}


def test_landmarks_are_explained_by_how_near_they_stay() -> None:
    output = torch.arange(20.0).reshape(1, 2, 10)
    assert isinstance(ms.AutoTarget().choose(output, FLAT).target, ms.EmbeddingSimilarity)
    bound = ms.AutoTarget().bind(output, FLAT)
    moved = output.clone()
    moved[0, 0, 0] += 3
    moved[0, 1, 0] += 4
    assert_close(bound(torch.cat([output, moved])).flatten(), [0, -5])
    given = ms.AutoTarget(classes=[3], activation="none")
    assert isinstance(given.choose(output, FLAT).target, ms.RegressionScore)
    with pytest.raises(SettingError, match=r"target=ms\.RegressionScore\(3\)"):
        ms.AutoTarget(classes=[3]).choose(output, FLAT)


@pytest.mark.parametrize("given", [{"activation": "softmax", "classes": [1]}, {"activation": "sigmoid"},
                                   {"readings": {"pred": Reading("softmax")}},
                                   {"readings": {"pred": Reading(discrete="argmax")}}])  # fmt: skip
@pytest.mark.parametrize("size", [(1, 1, 3), (1,), (1, 2, 3, 4, 4), (1, 2, 3)], ids=str)
def test_numbers_of_another_shape_are_not_taken_for_classes(size: tuple[int, ...], given: dict[str, Any]) -> None:
    """Such as a head that keeps an axis, one logit without its axis, or the stacked outputs of deep supervision."""
    output = torch.randn(size, generator=torch.Generator().manual_seed(2))
    words = r"(softmax'?|sigmoid'|argmax)( of the postprocessing)? needs classes \(B, C\) or channels"
    with pytest.raises(ValueError, match=rf"{words}.* is \(B.*return the classes alone.*--saliency_activation none"):
        ms.AutoTarget(**given).bind(output, FLAT)
    if size == (1, 1, 3):  # what the error says
        bound = ms.AutoTarget(classes=[1], activation="softmax").bind(output[:, 0], FLAT)
        first, second, third = output.flatten().exp().tolist()
        assert_close(bound(output[:, 0]), math.log(second / (first + third)), within=SINGLE)
    raw = ms.AutoTarget(**{**given, "activation": "none", "classes": [0]}).bind(output, FLAT)
    assert raw(output).item() == output.flatten()[0].item()


SIGMOID, SOFTMAX = mt.Activationsd("pred", sigmoid=True), mt.Activationsd("pred", softmax=True)
NONE: Callable[[torch.Tensor], torch.Tensor] = torch.nn.Identity()
#: what comes before the threshold, the activation that is asked for, what the network ends in, and what is scored
THRESHOLDS: dict[str, tuple[list[Any], str | None, Callable[..., Any], Callable[..., Any]]] = {
    "sigmoid": ([SIGMOID], None, NONE, torch.sigmoid),
    "a function": ([mt.Lambdad("pred", func=torch.sigmoid)], "sigmoid", NONE, torch.sigmoid),
    "softmax": ([SOFTMAX], None, NONE, partial(torch.softmax, dim=1)),
    "logits are asked for": ([SIGMOID], "none", NONE, NONE),
    "logits": ([], None, NONE, torch.sigmoid),
    "probabilities": ([], "none", torch.sigmoid, NONE),
}


@pytest.mark.parametrize("threshold", [0.2, 0.5])
@pytest.mark.parametrize("kind", THRESHOLDS)
def test_what_is_predicted_is_what_the_bundle_predicts(kind: str, threshold: float) -> None:
    """The voxels, or the classes, where its own postprocessing writes 1."""
    steps, activation, ends_in, scored = THRESHOLDS[kind]
    transform = mt.Compose([*steps, mt.AsDiscreted("pred", threshold=threshold)])
    target = ms.AutoTarget(read_postprocessing(transform), activation=activation)
    for shape in [(1, 4, 6, 6), (1, 12)]:
        output = ends_in(2 * torch.randn(shape, generator=torch.Generator().manual_seed(1)) - 1)
        output[0, 1] = output[0, 1].round()  # a sigmoid of 0 is one half
        written = transform({"pred": output[0].clone()})["pred"] > 0
        first = 1 if kind == "softmax" and len(shape) > 2 else 0  # behind the background
        bound = target.bind(output, FLAT)
        predicted = [c for c in range(first, shape[1]) if written[c].any()]
        if not predicted:  # the highest class
            predicted, written = [int(output.argmax())], torch.ones_like(written)
        assert list(bound.labels) == predicted
        scores = [float(scored(output)[0, c][written[c]].mean()) for c in predicted]
        reported = bound.quantity().reported(bound(output)[0])
        assert reported.tolist() == pytest.approx(scores, rel=1e-4, abs=1e-6)


def detections(scores: list[float]) -> list[dict[str, torch.Tensor]]:
    boxes = torch.tensor([[0, 0, 0, 2, 2, 2], [1, 1, 1, 4, 4, 4], [2, 2, 2, 3, 3, 3]])[: len(scores)].float()
    return [{"box": boxes, "label": torch.zeros(len(scores), dtype=torch.long), "label_scores": torch.tensor(scores)}]


def test_boxes_are_explained_where_sure_else_the_surest() -> None:
    found = ms.AutoTarget().choose(detections([0.9, 0.2, 0.6]), SOLID)
    assert isinstance(found.target, ms.DetectionScore)
    assert ms.AutoTarget().bind(detections([0.9, 0.2, 0.6]), SOLID)(detections([0.9, 0.2, 0.6])).shape == (1, 2)
    unsure = ms.AutoTarget().bind(detections([0.1, 0.2]), SOLID)
    assert_close(unsure(detections([0.1, 0.2])), torch.tensor([[0.2]]))
    assert finds_nothing({key: value[:0] for key, value in detections([0.1])[0].items()})
    assert not finds_nothing(detections([0.1])[0])
    assert finds_nothing({"boxes": torch.zeros(0), "scores": torch.zeros(0)})
    assert not finds_nothing(torch.zeros(0, 4))
    with pytest.raises(ValueError, match="`classes` chooses no boxes: leave it out"):
        ms.AutoTarget(classes=[1]).choose(detections([0.9]), SOLID)
    with pytest.raises(ValueError, match="`activation` changes no boxes"):
        ms.AutoTarget(activation="sigmoid").choose(detections([0.9]), SOLID)


def test_labels_and_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="int64 labels"):
        ms.AutoTarget().bind(torch.zeros(1, 1, 4, 4, dtype=torch.long), FLAT)
    with pytest.raises(ValueError, match="no tensor that could be explained"):
        ms.AutoTarget().bind({"text": "a report"}, FLAT)
    with pytest.raises(ValueError, match="'predicted' or 'all', got 'best'"):
        ms.AutoTarget(classes="best")


# What a bundle's postprocessing makes of a prediction, as it is read from its transforms.
def twice(values: Any) -> Any:
    return 2 * values


TWICE = mt.Lambdad("pred", func=twice)


class Own(mt.MapTransform):
    """Somebody's own."""

    def __call__(self, data: Any) -> Any:
        return {**data, "pred": twice(data["pred"])}


class Saves(mt.SaveImaged):
    """Somebody's own, of a kind that leaves the numbers."""


def test_postprocessing_is_read_key_by_key() -> None:
    transform = mt.Compose(
        [
            mt.Activationsd(keys="pred", softmax=True),
            mt.Compose([mt.Invertd("pred", mt.Compose([]), orig_keys="image"), mt.SaveImaged("pred")]),
            mt.AsDiscreted(keys=["pred", "label"], argmax=[True, False], to_onehot=[2, 2]),
            mt.Activationsd(keys=["type", "edge"], sigmoid=[False, True], softmax=[True, False]),
            mt.AsDiscreted(keys="edge", threshold=0.5),
        ]
    )
    assert read_postprocessing(transform) == {
        "pred": Reading("softmax", "argmax"),
        "label": Reading(),
        "type": Reading("softmax"),
        "edge": Reading("sigmoid", "threshold"),
    }
    assert read_postprocessing(None) == {}


READ_SIGMOID, READ_SOFTMAX = Reading("sigmoid"), Reading("softmax")


@pytest.mark.parametrize(
    ("transform", "reading"),
    [
        (mt.Activations(sigmoid=True), READ_SIGMOID),
        (mt.AsDiscrete(threshold=0.3), Reading(None, "threshold", threshold=0.3)),
        (mt.AsDiscreted(["label", "pred"], threshold=[0.3, 0.7]), Reading(None, "threshold", threshold=0.7)),
        # What leaves the prediction's numbers.
        (Saves("pred"), Reading()),
        *((each, None) for each in (mt.Lambdad("image", func=twice), Own("image"))),
        (mt.Lambdad("pred", func=twice, overwrite=False), None),
        (mt.Compose([mt.Activationsd("pred", softmax=True), Own("pred")]), READ_SOFTMAX),
        (mt.Compose([mt.AsDiscreted("pred", argmax=True), Own("pred")]), Reading(None, "argmax")),
        (mt.Compose([VistaPostTransformd("pred"), Own("pred")]), Reading("sigmoid", "highest above 0")),
    ],
)
def test_what_is_known(transform: Any, reading: Reading | None) -> None:
    assert read_postprocessing(transform).get("pred") == reading


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (mt.Activations(other=twice), "applies twice to it"),
        (TWICE, "applies twice to it"),
        (torch.sigmoid, "applies sigmoid to it"),
        (Own("pred"), "applies Own to it"),
        (mt.ScaleIntensityd("pred"), "applies ScaleIntensityd to it"),
        (mt.Compose([SIGMOID, VistaPostTransformd("pred")]), "applies a sigmoid to its sigmoid"),
        (mt.AsDiscrete(rounding="torchrounding"), "rounds it"),
        (mt.AsDiscrete(threshold=torch.tensor([0.2, 0.3])), "compares it with a Tensor"),
        (mt.Compose([TWICE, SIGMOID]), "applies twice to it"),
        (mt.Compose([SIGMOID, TWICE, mt.AsDiscreted("pred", threshold=0.5)]), "applies twice to it"),
        (mt.Compose([mt.Activations(True, True), mt.AsDiscrete(argmax=True)]), "applies a softmax to its sigmoid"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_said(transform: Any, words: str) -> None:
    assert read_postprocessing(transform)["pred"].unread == words


@pytest.mark.parametrize("classes", [1, 3])
def test_prompted_classes_are_explained_where_monai_labels_them(classes: int) -> None:
    """VISTA3D: a voxel has the highest of the logits above 0, or none. Scores are mean sigmoids over these voxels."""
    logits = torch.randn(1, classes, 4, 4, 4, generator=torch.Generator().manual_seed(classes))
    labelled = VistaPostTransformd("pred")({"pred": logits[0].clone()})["pred"][0]
    bound = ms.AutoTarget(read_postprocessing(VistaPostTransformd("pred"))).bind(logits, SOLID)
    expected = [logits[0, channel].sigmoid()[labelled == channel + 1].mean() for channel in bound.labels]
    torch.testing.assert_close(bound(logits)[0], torch.stack(expected))
    assert sorted(bound.labels) == list(range(classes))


# Outputs x settings: what is known, by whom, and that no other reading of the shape gives another map.
SHAPES: dict[str, tuple[int, ...]] = {
    "number": (1, 1),
    "classes": (1, 3),
    "image": (1, 1, 4, 4),
    "channels": (1, 3, 4, 4),
}
WRAPPED: dict[str, Callable[[torch.Tensor], Any]] = {
    "alone": lambda output: output,
    "with nothing else": lambda output: (output, None),
    "under a key": lambda output: {"logits": output},
    "second of two": lambda output: (torch.rand(1, 64), output),
    "one of two keys": lambda output: {"class_token": torch.rand(1, 8), "logits": output},
}


def numbers_of(kind: str, values: str) -> torch.Tensor:
    """Logits above 1 and below 0 in each channel, the numbers that a softmax makes of them, or others in [0, 1]."""
    logits = 6 * torch.rand(SHAPES[kind], generator=torch.Generator().manual_seed(3)) - 3
    if logits.shape[2:]:
        logits[0, :, 0, 0], logits[0, :, 3, 3] = 2, -2
        for channel in range(logits.shape[1]):
            logits[0, channel, 1, channel] = 4
    if values == "sums to 1" and logits.shape[1] > 1:
        return logits.softmax(1)
    return logits if values == "logits" else logits.sigmoid()


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.filterwarnings("ignore:.*already looks like probabilities")
def test_no_reading_is_guessed(kind: str, wrapped: str) -> None:
    """A target is refused, or its reading is known: given, seen in the output, or the only one."""
    settings = itertools.product(
        ["logits", "sums to 1", "in [0, 1]"],
        ["predicted", "all", [0], [1], [0, 2]],
        [None, "softmax", "sigmoid", "none"],
    )
    for values, classes, activation in settings:
        check_that_it_is_refused_or_known(kind, wrapped, values, classes, activation)


def check_that_it_is_refused_or_known(
    kind: str, wrapped: str, values: str, classes: Any, activation: str | None
) -> None:
    output = numbers_of(kind, values)
    whole, target = WRAPPED[wrapped](output), ms.AutoTarget(None, classes, activation)
    several, is_out = output.shape[1] > 1, not isinstance(classes, str) and max(classes) >= output.shape[1]
    ends_in_softmax = several and values == "sums to 1"
    if "two" in wrapped:
        with pytest.raises(SettingError, match=r"output=.* reads .*--saliency_output "):
            target.bind(whole, FLAT)
        part = "logits" if isinstance(whole, dict) else 1
        target = ms.AutoTarget(None, classes, activation, output=part)
    if activation is None and kind != "number" and not ends_in_softmax:
        with pytest.raises(SettingError, match=r'(?s)say what it holds.*activation="sigmoid".*numbers: target=ms\.Re'):
            target.bind(whole, FLAT)
        return
    if is_out or (activation == "softmax" and not several):
        with pytest.raises(SettingError, match=r"is out of range|the softmax of one channel is 1"):
            target.bind(whole, FLAT)
        return
    choice, bound = target.choose(whole, FLAT), target.bind(whole, FLAT)
    known = auto.SOFTMAX if activation is None and ends_in_softmax else auto.GIVEN
    assert choice.source == (auto.ANY if kind == "number" and activation in (None, "none") else known)
    assert (auto.SOFTMAX in bound.words()) == (known == auto.SOFTMAX)
    if kind == "number":  # the log-odds of the sigmoid that it may be the logit of
        assert_close(bound(whole), ms.ClassScore(0, "sigmoid").bind(output, FLAT)(output), within=SINGLE)


@pytest.mark.parametrize("given", [{}, {"classes": [0, 1]}, {"classes": [0], "scale": "probability"}])
def test_a_difference_of_two_outputs_is_the_same_in_all_readings(given: dict[str, Any]) -> None:
    """Of given classes on their own scale. Which are predicted, and differences of probabilities, depend on it."""
    batch = torch.cat([LOGITS, LOGITS.flip(1)])
    found = [ms.AutoTarget(None, activation=activation, against=2, **given).bind(LOGITS, FLAT)(batch)
             for activation in ("softmax", "sigmoid", "none")]  # fmt: skip
    if given == {"classes": [0, 1]}:
        bound = ms.AutoTarget(against=2, **given).bind(LOGITS, FLAT)
        assert all(torch.allclose(bound(batch), each) for each in found)
        assert bound.words() == "output 0, 1 less output 2 of 3: the same for logits and for numbers"
        return
    assert any(one.shape != two.shape or not torch.allclose(one, two) for one in found for two in found)
    with pytest.raises(SettingError, match="say what it holds"):
        ms.AutoTarget(against=2, **given).bind(LOGITS, FLAT)
