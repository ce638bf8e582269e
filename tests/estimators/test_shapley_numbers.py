"""Shapley values of organs and of the numbers beside the image, against enumeration in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import rows_of
from helpers.patches import images
from helpers.shapley import by_coalitions
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.estimators import shapley_values
from monai_saliency.inferers.sharing import merged
from monai_saliency.sharding import Part
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.transforms.regions import SaveRegionsd
from monai_saliency.visualize.report.cases import read_cohort

SHAPE, FILL = (6, 5, 4), 0.25
BASELINES = {"age": 62.0, "sex": 0.5, "crp": 3.0}
IMAGES = images(2, 1, *SHAPE, dtype=torch.float64)
TABLE = torch.tensor([[71.0, 1.0, 9.5], [40.0, 0.0, 2.0]], dtype=torch.float64)
#: four organs that fill the image
LABELS = torch.arange(1, 5)[torch.arange(6) // 2 % 4][:, None, None].expand(SHAPE).clone()
LABELS[:, 3:] = 4
ORGANS, NAMES = [1, 2, 3, 4], ["case_a", "case_b"]
WEIGHT = images(1, *SHAPE, dtype=torch.float64, seed=3)[0]
TARGET = ms.RegressionScore("all")


def network(image: torch.Tensor, clinical: torch.Tensor) -> torch.Tensor:
    """Two scores ``(B, 2)`` in which all organs and numbers interact."""
    age, sex, crp = ((clinical - 50) / 20).T
    seen = (image[:, 0] * WEIGHT.to(image)).flatten(1).sum(1) / 9
    return torch.stack([torch.sigmoid(seen * age + sex * crp), torch.tanh(seen - crp) * (1 + age * sex)], dim=1)


def of_dict(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return network(batch["image"], batch["clinical"])


def explained(table: torch.Tensor = TABLE, baselines: Any = BASELINES, net: Any = of_dict, **settings: Any) -> Any:
    """The explanations of both cases, or of the first ones that the table has."""
    call: dict[str, Any] = {name: settings.pop(name) for name in ("stored", "part") if name in settings}
    inputs = ms.DictInput("image", numbers={"clinical": baselines})
    explain = ms.shapley(
        target=TARGET, **{"inputs": inputs, "fill": ms.ConstantFill(FILL), "mask_batch_size": 5} | settings
    )
    given = {"image": IMAGES[: len(table)], "clinical": table}
    cases = [ms.Case(name, labels=LABELS[None]) for name in NAMES[: len(table)]]
    return (explain.score if "part" in call else explain.explain)(given, net, cases=cases, **call)


def game(case: int, score: int) -> Callable[[frozenset[Any]], float]:
    """The score of a coalition of organs and numbers: made in plain loops, one image at a time."""

    def value(kept: frozenset[Any]) -> float:
        image, numbers = IMAGES[case].clone(), TABLE[case].clone()
        for organ in ORGANS:
            if organ not in kept:
                image[:, LABELS.eq(organ)] = FILL
        for place, name in enumerate(BASELINES):
            if name not in kept:
                numbers[place] = BASELINES[name]
        return float(network(image[None], numbers[None])[0, score])

    return value


@pytest.mark.parametrize("single", [False, True])
def test_enumeration(single: bool) -> None:
    """Two cases share batches, in which each row has the numbers of its own case; a table, or an input a number."""
    settings: dict[str, Any] = {}
    if single:
        settings["inputs"] = ms.ArgumentInputs("image", numbers=BASELINES)
        settings["net"] = lambda image, age, sex, crp: network(image, torch.stack([age, sex[:, 0], crp], dim=1))
        explain = ms.shapley(target=TARGET, fill=ms.ConstantFill(FILL), mask_batch_size=5, inputs=settings["inputs"])
        given = {"image": IMAGES, "age": TABLE[:, 0], "sex": TABLE[:, 1:2], "crp": TABLE[:, 2]}
        found = explain.explain(given, settings["net"], labels=LABELS.expand(2, 1, *SHAPE), names=NAMES)
    else:
        found = explained()
    players = [*ORGANS, *BASELINES]
    for case, explanation in enumerate(found):
        values = shapley_values(explanation)
        assert values.players == players
        assert explanation.num_forwards == 2**7
        for score in range(2):
            worth = game(case, score)
            expected = by_coalitions(worth, players)
            assert values.table(score) == pytest.approx(expected, abs=1e-10)
            everyone, nobody = worth(frozenset(players)), worth(frozenset())
            assert sum(values.table(score).values()) == pytest.approx(everyone - nobody, abs=1e-10)
            assert float(explanation.hidden_scores[score]) == pytest.approx(nobody, abs=1e-12)
            for organ in ORGANS:  # the map has the organs alone
                on_organ = explanation.saliency[score][LABELS.eq(organ)]
                assert on_organ.tolist() == pytest.approx([expected[organ]] * len(on_organ), abs=1e-10)


def test_an_estimate_and_parts() -> None:
    """Random coalitions are exact for a game of pairs; parts of a case merge to the bit."""

    def pairs(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        organs = [batch["image"][:, 0, LABELS.eq(organ)].sum(1) for organ in ORGANS]
        each = torch.stack([*organs, *batch["clinical"].T], dim=1)
        return ((each @ images(1, 7, 7, dtype=torch.float64, seed=5)[0]) * each).sum(1, keepdim=True) / 1000

    exact, drawn = explained(net=pairs), explained(net=pairs, num_coalitions=41)
    for one, other in zip(exact, drawn, strict=True):
        assert shapley_values(other).table() == pytest.approx(shapley_values(one).table(), abs=1e-9)
        assert shapley_values(other).standard_error is not None
    parts = [explained(net=pairs, part=Part(number, 2)) for number in range(2)]
    for one, other in zip(exact, merged(parts), strict=True):
        assert torch.equal(one.scores, other.scores)
    with pytest.raises(ValueError, match="its parts differ in masks and further inputs"):
        merged([parts[0], explained(TABLE + 1, net=pairs, part=Part(1, 2))])


def test_channels_of_organs() -> None:
    two = torch.cat([IMAGES, IMAGES.flip(2)], dim=1)[:1]
    net = lambda batch: network(batch["image"][:, :1] * batch["image"][:, 1:], batch["clinical"])  # noqa: E731
    inputs = ms.DictInput("image", numbers={"clinical": BASELINES})
    explain = ms.shapley(per_channel=True, target=TARGET, fill=ms.ConstantFill(FILL), inputs=inputs)
    (found,) = explain.explain({"image": two, "clinical": TABLE[:1]}, net, labels=LABELS[None, None])
    values = shapley_values(found)
    assert values.players == [*((organ, channel) for organ in ORGANS for channel in range(2)), *BASELINES]
    assert torch.allclose(values.values.sum(dim=0), found.reference_scores - found.hidden_scores)
    assert found.saliency[1, LABELS == 2].tolist() == pytest.approx([values.table()[2, 1]] * int((LABELS == 2).sum()))


def test_the_table_names_the_numbers(tmp_path: Path) -> None:
    """Also for the report, which shows what each number was and what stood in its place."""
    save = SaveRegionsd(tmp_path / "regions.csv", names={2: "liver"})
    (found, _) = explained()
    save({"explanation": found, "image": IMAGES[0]})
    table = rows_of(tmp_path / "regions.csv")
    for score in range(2):
        values, rows = shapley_values(found).table(score), [row for row in table if row["class"] == f"value {score}"]
        assert [(row["kind"], row["region"], row["name"]) for row in rows] == [
            *[("region", "1", ""), ("region", "2", "liver"), ("region", "3", ""), ("region", "4", "")],
            *[("number", "", "age"), ("number", "", "sex"), ("number", "", "crp")],
        ]
        assert [float(row["saliency"]) for row in rows] == pytest.approx([*values.values()], abs=1e-12)
        assert [(row["value"], row["baseline"]) for row in rows[4:]] == [
            ("71.0", "62.0"),
            ("1.0", "0.5"),
            ("9.5", "3.0"),
        ]
    (tmp_path / "failures.csv").write_text("case,stage,error\ncase_a,explain,nothing\n")
    assert [row["name"] for row in read_cohort(tmp_path).cases[0].regions[-3:]] == [*BASELINES]


def test_kept_scores_are_of_the_same_numbers(tmp_path: Path) -> None:
    """The unperturbed score is the same throughout: only what is kept with the scores tells the numbers apart."""

    def saturated(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen = (batch["image"] == FILL).double().mean((1, 2, 3, 4)) > 0
        return torch.where(seen, batch["clinical"].sum(1), 1.0)[:, None]

    stored, one = [ScoreStore(tmp_path).open("case_a", "key")], TABLE[:1]
    forwards = [
        explained(*given, net=saturated, stored=stored)[0].num_forwards
        for given in [(one,), (one,), (one + 1,), (one + 1, BASELINES | {"age": 63.0}), (one, BASELINES)]
    ]
    assert forwards == [2**7, 5, 2**7, 2**7, 2**7]  # of kept scores the first batch runs alone
    cases = [{"case": "a", "image": IMAGES[0].numpy(), "clinical": TABLE[0].numpy(), "organs": LABELS[None].numpy()}]
    inputs = ms.DictInput("image", numbers={"clinical": BASELINES})
    explain = ms.shapley(target=ms.RegressionScore(0), inputs=inputs, fill=ms.ConstantFill(FILL))
    dataset = ms.SaliencyDataset(
        cases, None, of_dict, explain, network_id="1", label_key="organs", held_keys="clinical"
    )
    first = dataset[0]["saliency"]
    cases[0]["clinical"] = TABLE[1].numpy()
    assert not torch.allclose(first, dataset[0]["saliency"])


class TestErrors:
    @pytest.mark.parametrize(
        ("numbers", "match"),
        [
            ({"clinical": BASELINES | {"crp": None}}, "`baseline of crp` must be a finite number, got None"),
            ({"clinical": ["age", "sex", "crp"]}, "`baseline of clinical` must be a finite number"),
            (["clinical"], r"`numbers` must be the baseline of each number by its input and name, such as .*'age': 62"),
            ({"clinical": BASELINES, "age": 3.0}, r"`numbers` must have different names, got .*'crp', 'age'"),
        ],
    )
    def test_of_baselines(self, numbers: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            ms.DictInput("image", numbers=numbers)

    @pytest.mark.parametrize(
        ("numbers", "table", "match"),
        [
            ({"clinic": BASELINES}, TABLE, r"`numbers` names the input 'clinic'.* held are \['clinical'\]"),
            ({"clinical": {"age": 1, "sex": 0}}, TABLE, r"shape \(B, 2\), .*\['age', 'sex'\], got \(2, 3\)"),
            ({"clinical": BASELINES}, TABLE[:1], r"one row for each of 2 cases, got \(1, 3\)"),
            ({"clinical": BASELINES}, TABLE.long(), "is of int64, and the baseline 0.5 of 'sex' is not a whole"),
            (
                {"clinical": BASELINES},
                TABLE / torch.tensor([[1, 1, 1], [1, 0, 1]]),
                "case case_b: the number 'sex' is nan",
            ),
        ],
    )
    def test_of_the_table(self, numbers: Any, table: torch.Tensor, match: str) -> None:
        explain = ms.shapley(target=TARGET, inputs=ms.DictInput("image", numbers=numbers))
        cases = [ms.Case(name, labels=LABELS[None]) for name in NAMES]
        with pytest.raises(ValueError, match=match):
            explain.explain({"image": IMAGES, "clinical": table}, of_dict, cases=cases)

    def test_of_methods(self) -> None:
        inputs = ms.DictInput("image", numbers={"clinical": BASELINES})
        given = {"image": IMAGES, "clinical": TABLE}
        with pytest.raises(
            ValueError, match=r"\['age', 'sex', 'crp'\] of `inputs` are players, and RISEMasks hide none"
        ):
            ms.rise(3, 3, target=TARGET, inputs=inputs)(given, of_dict)
        with pytest.raises(ValueError, match=r"are not on the images' grid.*: use SimpleInferer"):
            explained(inferer=SlidingWindowInferer((4, 4, 4)))
