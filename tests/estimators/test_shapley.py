"""Shapley values against their definition in plain loops, their laws, and what sampling may miss."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.estimators import by_coalitions, by_permutations, table_game
from helpers.files import rows_of
from helpers.patches import blocks, images
from helpers.searches import observed_of
from helpers.tolerances import DOUBLE, SOLVED, assert_close
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.estimators import shapley_values
from monai_saliency.estimators.base import score_rounding
from monai_saliency.masks.coalition import inclusion
from monai_saliency.masks.supervoxels import whole_image
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.transforms.regions import SaveRegionsd
from monai_saliency.visualize.report.cases import read_cohort

LOGIT = ms.RegressionScore("all")
Game = Callable[[frozenset[int]], float]


def values_of(game: Game, players: int, num_coalitions: Any = None, seed: int = 0) -> ms.estimators.ShapleyValues:
    """The values of a game that is given by its coalitions, without a network."""
    bound: Any = ms.masks.CoalitionMasks(
        num_coalitions, seed, lambda image, _: torch.arange(1, players + 1)[None, None]
    )
    bound = bound.bind(torch.zeros(1, 1, players, dtype=torch.float64))
    kept = [frozenset(row.nonzero()[0].tolist()) for row in bound.coalitions]
    scores = torch.tensor([[game(each)] for each in kept], dtype=torch.float64)
    reference = torch.tensor([game(frozenset(range(players)))], dtype=torch.float64)
    return ms.estimators.ShapleyScoring().values(observed_of(bound, scores, reference))


def check_values(found: ms.estimators.ShapleyValues, expected: Any) -> None:
    """Of one score; they are solved for."""
    assert_close(found.values[:, 0].numpy(), expected, within=SOLVED)


@pytest.mark.parametrize("players", [1, 2, 3, 5, 8])
def test_the_definition_over_all_orders(players: int) -> None:
    game = table_game(players, players)
    found = values_of(game, players)
    assert found.standard_error is None
    check_values(found, by_permutations(game, players))


class Mixed(torch.nn.Module):
    """Two scores in which all voxels interact."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = images(2, *shape, dtype=torch.float64, seed=7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.stack([(x * each).flatten(1).sum(dim=1) for each in self.weight.to(x.dtype)], dim=1)
        return torch.stack([torch.sigmoid(sums[:, 0]) * sums[:, 1], torch.tanh(sums[:, 0] - sums[:, 1])], dim=1)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("shape", [(9, 8), (6, 5, 7)])
def test_a_network_by_hand(shape: tuple[int, ...], background: bool) -> None:
    """Images made in plain loops, another fill than zeros, two scores, any batch size."""
    labels, image, network = blocks(shape, 3, 5, seed=3), images(1, 1, *shape, dtype=torch.float64), Mixed(shape)
    found = labels.unique().tolist()
    players = found if background else found[1:]
    fill = ms.MeanFill()(image)

    def game(k: int) -> Game:
        def score(kept: frozenset[int]) -> float:
            hidden = torch.zeros(shape, dtype=torch.bool)
            for label in players:
                hidden |= (labels[0] == label) & (label not in kept)
            return float(network(torch.where(hidden, fill, image))[0, k])

        return score

    explain = ms.shapley(background=background, target=LOGIT, fill=ms.MeanFill(), mask_batch_size=5)
    (explanation,) = explain.explain(image, network, cases=[ms.Case("a", labels=labels)])
    values = ms.estimators.shapley_values(explanation)
    assert values.players == players
    assert explanation.num_forwards == 2 ** len(players)
    for k in range(2):
        expected = by_coalitions(game(k), players)
        assert_close(values.table(k), expected, within=SOLVED)
        drawn = torch.zeros(shape, dtype=torch.float64)
        for voxel in itertools.product(*map(range, shape)):
            drawn[voxel] = expected.get(int(labels[(0, *voxel)]), 0)
        assert_close(explanation.saliency[k], drawn, within=SOLVED)
        whole, nobody = float(network(image)[0, k]), game(k)(frozenset())
        assert_close(sum(values.table(k).values()), whole - nobody, scale=1, within=SOLVED)
    filled = network(fill)[0]
    assert torch.allclose(values.values.sum(dim=0), network(image)[0] - filled) == background
    other = explain.replace(mask_batch_size=16).explain(image, network, cases=[ms.Case("a", labels=labels)])[0]
    assert_close(other.saliency, explanation.saliency)


def test_channels() -> None:
    """Each channel of each region; and with one region the channels themselves."""
    image = images(1, 2, 4, 6, dtype=torch.float64)
    labels = torch.ones(1, 4, 6, dtype=torch.long)
    labels[..., :3] = 2
    network = lambda x: (x[:, 0].flatten(1).sum(1) * x[:, 1, :, :3].flatten(1).sum(1))[:, None]  # noqa: E731
    explain = ms.shapley(per_channel=True, target=LOGIT)
    (found,) = explain.explain(image, network, cases=[ms.Case("a", labels=labels)])
    table = ms.estimators.shapley_values(found).table()
    first, second = image[0, 0], float(image[0, 1, :, :3].sum())
    expected = {
        (1, 0): float(first[:, 3:].sum()) * second / 2,
        (1, 1): 0.0,
        (2, 0): float(first[:, :3].sum()) * second / 2,
        (2, 1): float(first.sum()) * second / 2,
    }
    assert_close(table, expected)
    assert found.saliency.shape == (2, 4, 6)
    assert_close(found.saliency[1, 0], [expected[2, 1]] * 3 + [0] * 3)
    (whole,) = ms.shapley(regions=whole_image, per_channel=True, target=LOGIT).explain(image, network)
    assert ms.estimators.shapley_values(whole).players == [(1, 0), (1, 1)]
    half = float(network(image)) / 2
    assert_close(whole.saliency[:, 2, 2], half)


@pytest.mark.parametrize("players", [5, 9, 30, 80])
def test_games_of_pairs_are_exact_from_few(players: int) -> None:
    """Each player has its own worth, and each two a worth together, which they share."""
    rng = np.random.default_rng(players)
    own, pair = rng.normal(size=players), np.triu(rng.normal(size=(players, players)), 1)

    def game(kept: frozenset[int]) -> float:
        inside = np.isin(np.arange(players), list(kept)).astype(float)
        return float(2 + own @ inside + inside @ pair @ inside)

    found = values_of(game, players, 3 * players + 1)
    check_values(found, own + (pair.sum(axis=0) + pair.sum(axis=1)) / 2)
    assert float(found.standard_error.max()) < 1e-9


def test_the_regression_by_its_normal_equations() -> None:
    """KernelSHAP as it is written: all coalitions, weighed, with the sum of the values as a constraint."""
    players, count = 7, 41
    game = table_game(players, 2)
    bound: Any = ms.masks.CoalitionMasks(count, 1, lambda image, spacing: torch.arange(1, players + 1)[None, None])
    bound = bound.bind(torch.zeros(1, 1, players))
    _, weights = inclusion(players, (count - 1) // 2)
    left, right = np.zeros((players + 1, players + 1)), np.zeros(players + 1)
    nobody, total = game(frozenset()), game(frozenset(range(players))) - game(frozenset())
    for row in bound.coalitions[1:]:
        inside, weight = row.astype(float), weights[row.sum()]
        left[:-1, :-1] += weight * np.outer(inside, inside)
        right[:-1] += weight * inside * (game(frozenset(row.nonzero()[0].tolist())) - nobody)
    left[-1, :-1] = left[:-1, -1] = 1
    right[-1] = total
    check_values(values_of(game, players, count, 1), np.linalg.solve(left, right)[:-1])


def test_noise() -> None:
    """Rounding only where all is known; the standard error else."""
    players = 6
    image, case = images(1, 1, 1, players), ms.Case("a", labels=torch.arange(players)[None, None])
    network = Mixed((1, players))
    (exact,) = ms.shapley(target=LOGIT).explain(image, network, cases=[case])
    assert_close(exact.noise, score_rounding(*exact.observed))
    (drawn,) = ms.shapley(41, target=LOGIT).explain(image, network, cases=[case])
    errors = ms.estimators.shapley_values(drawn).standard_error
    assert_close(drawn.noise.double(), errors.square().mean(dim=0).sqrt(), within=1e-3)  # of single precision, squared
    assert bool((drawn.noise > 100 * exact.noise).all())


def test_errors() -> None:
    scoring = ms.estimators.ShapleyScoring()
    with pytest.raises(ValueError, match="need the scores of coalitions: use CoalitionMasks, got RISEMasks"):
        scoring.compute(
            observed_of(ms.masks.RISEMasks(3).bind(torch.zeros(1, 9, 9)), torch.zeros(3, 1), torch.zeros(1))
        )
    with pytest.raises(ValueError, match="give `regions` or `num_supervoxels`, not both"):
        ms.shapley(regions=whole_image, num_supervoxels=4, target=LOGIT)
    many = ms.Case("ct_7", labels=torch.arange(20)[None, None])
    with pytest.raises(ValueError, match=r"case ct_7: .*at most 14 players, and there are 20"):
        ms.shapley(target=LOGIT).explain(torch.zeros(1, 1, 1, 20), lambda x: x.flatten(1), cases=[many])


# The regression of Shapley values on random sets: its normal equations, games that it solves exactly, and a peer.
PLAYERS = 10
KEPT = np.array(list(itertools.product([0, 1], repeat=PLAYERS)), dtype=bool)[:, ::-1]


def saturating() -> np.ndarray:
    """The scores of all coalitions, ordered by their bits: a sigmoid of what players add, most of them little."""
    worth = np.abs(np.random.default_rng(1).normal(size=PLAYERS)) ** 2
    return np.asarray(1 / (1 + np.exp(3 - 8 * KEPT @ worth / worth.sum())))


def few_together() -> np.ndarray:
    rng, scores = np.random.default_rng(2), np.zeros(len(KEPT))
    for _ in range(15):
        together = rng.choice(PLAYERS, rng.integers(1, 5), replace=False)
        scores += rng.normal() * KEPT[:, together].all(axis=1)
    return scores


def dense() -> np.ndarray:
    """A network with one hidden layer, in which all players interact a little."""
    rng = np.random.default_rng(3)
    return np.asarray(np.tanh(KEPT @ rng.normal(size=(PLAYERS, 16)) + rng.normal(size=16)) @ rng.normal(size=16))


def exact(scores: np.ndarray) -> np.ndarray:
    game = lambda kept: float(scores[sum(1 << player for player in kept)])  # noqa: E731
    return np.array(list(by_coalitions(game, range(PLAYERS)).values()))


def estimate(scores: np.ndarray, count: int, seed: int = 0) -> Any:
    regions = torch.arange(1, PLAYERS + 1)[None, None]
    bound: Any = ms.masks.CoalitionMasks(count, seed, lambda image, spacing: regions).bind(
        torch.zeros(1, 1, PLAYERS, dtype=torch.float64)
    )
    found = torch.from_numpy(scores[bound.coalitions @ (1 << np.arange(PLAYERS))])[:, None]
    reference = torch.tensor([scores[-1]])
    return ms.estimators.ShapleyScoring().values(observed_of(bound, found, reference)), bound


def test_kernel_shap_by_its_normal_equations() -> None:
    """The regression in the Fourier basis, with the sum of all values as a constraint."""
    scores, count = saturating(), 161
    values, bound = estimate(scores, count)
    first = bound.coalitions[1::2]
    bits, sizes = 1 << np.arange(PLAYERS), first.sum(axis=1)
    half = (scores[first @ bits] - scores[~first @ bits]) / 2
    weight = inclusion(PLAYERS, len(first))[1][sizes]
    signs = 2.0 * first - 1
    # A constraint's multiplier is one more unknown.
    left = np.zeros((PLAYERS + 1, PLAYERS + 1))
    left[:-1, :-1] = signs.T @ (weight[:, None] * signs)
    left[-1, :-1] = left[:-1, -1] = 2
    right = np.append(signs.T @ (weight * half), scores[-1] - scores[0])
    expected = 2 * np.linalg.solve(left, right)[:-1]
    check_values(values, expected)


@pytest.mark.parametrize("make", [saturating, few_together, dense])
def test_all_coalitions_are_exact(make: Any) -> None:
    scores = make()
    for count, within in ((2**PLAYERS - 1, DOUBLE), (2**PLAYERS - 3, 2e-3)):
        values, _ = estimate(scores, count)
        assert_close(values.values[:, 0].numpy(), exact(scores), scale=1, within=within)
        assert_close(values.values.sum(), scores[-1] - scores[0], scale=1)


def test_interactions_of_two_are_exact() -> None:
    """Values of players and of all pairs: exact, and known to be so."""
    rng = np.random.default_rng(4)
    scores = np.einsum("ni,ij,nj->n", KEPT, np.triu(rng.normal(size=(PLAYERS, PLAYERS))), KEPT)
    values, _ = estimate(scores, 161)
    check_values(values, exact(scores))
    assert float(values.standard_error.max()) < 1e-8


@pytest.mark.parametrize("make", [saturating, few_together, dense])
def test_against_shapiq(make: Any) -> None:
    """Its exact values, and less error than its KernelSHAP with pairs, for as many coalitions."""
    shapiq = pytest.importorskip("shapiq", reason="needs pip install shapiq")
    scores, count = make(), 401

    def game(coalitions: Any) -> np.ndarray:
        return np.asarray(scores[np.asarray(coalitions).astype(int) @ (1 << np.arange(PLAYERS))])

    list_of = lambda values: np.array([values[(player,)] for player in range(PLAYERS)])  # noqa: E731
    known = list_of(shapiq.ExactComputer(n_players=PLAYERS, game=game)("SV"))
    assert_close(known, exact(scores))
    theirs, ours = [], []
    for seed in range(15):
        kernel = shapiq.KernelSHAP(PLAYERS, pairing_trick=True, random_state=seed)
        theirs.append(list_of(kernel.approximate(count + 1, game)) - known)
        ours.append(estimate(scores, count, seed)[0].values[:, 0].numpy() - known)
    assert np.square(ours).mean() < 0.8 * np.square(theirs).mean()


# Shapley values of organs and of the numbers beside the image, against enumeration in plain loops.
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
            assert_close(values.table(score), expected, scale=1, within=SOLVED)
            everyone, nobody = worth(frozenset(players)), worth(frozenset())
            assert_close(sum(values.table(score).values()), everyone - nobody, scale=1, within=SOLVED)
            assert_close(explanation.hidden_scores[score], nobody, scale=1)
            for organ in ORGANS:  # the map has the organs alone
                on_organ = explanation.saliency[score][LABELS.eq(organ)]
                assert_close(on_organ, expected[organ], scale=1, within=SOLVED)


def test_an_estimate() -> None:
    """Random coalitions are exact for a game of pairs."""

    def pairs(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        organs = [batch["image"][:, 0, LABELS.eq(organ)].sum(1) for organ in ORGANS]
        each = torch.stack([*organs, *batch["clinical"].T], dim=1)
        return ((each @ images(1, 7, 7, dtype=torch.float64, seed=5)[0]) * each).sum(1, keepdim=True) / 1000

    exact, drawn = explained(net=pairs), explained(net=pairs, num_coalitions=41)
    for one, other in zip(exact, drawn, strict=True):
        assert_close(shapley_values(other).table(), shapley_values(one).table(), within=SOLVED)
        assert shapley_values(other).standard_error is not None


def test_channels_of_organs() -> None:
    two = torch.cat([IMAGES, IMAGES.flip(2)], dim=1)[:1]
    net = lambda batch: network(batch["image"][:, :1] * batch["image"][:, 1:], batch["clinical"])  # noqa: E731
    inputs = ms.DictInput("image", numbers={"clinical": BASELINES})
    explain = ms.shapley(per_channel=True, target=TARGET, fill=ms.ConstantFill(FILL), inputs=inputs)
    (found,) = explain.explain({"image": two, "clinical": TABLE[:1]}, net, labels=LABELS[None, None])
    values = shapley_values(found)
    assert values.players == [*((organ, channel) for organ in ORGANS for channel in range(2)), *BASELINES]
    assert_close(values.values.sum(dim=0), found.reference_scores - found.hidden_scores, within=SOLVED)
    assert_close(found.saliency[1, LABELS == 2], values.table()[2, 1])


def test_the_table_names_the_numbers(tmp_path: Path) -> None:
    """Also for the report, which shows what each number was and what stood in its place."""
    save = SaveRegionsd(tmp_path, {2: "liver"})
    (found, _) = explained()
    save({"case": found.name, "explanation": found, "image": IMAGES[0]})
    table = rows_of(tmp_path / "regions.csv")
    for score in range(2):
        values, rows = shapley_values(found).table(score), [row for row in table if row["class"] == f"value {score}"]
        assert [(row["kind"], row["region"], row["name"]) for row in rows] == [
            *[("region", "1", ""), ("region", "2", "liver"), ("region", "3", ""), ("region", "4", "")],
            *[("number", "", "age"), ("number", "", "sex"), ("number", "", "crp")],
        ]
        assert_close([float(row["saliency"]) for row in rows], [*values.values()])
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
    assert forwards == [2**7, 4, 2**7, 2**7, 2**7]  # of kept scores the first batch runs alone
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
            ({"clinical": BASELINES}, TABLE[:1], r"one row for each of 2 cases, got shape \(1, 3\)"),
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
