"""The figures of trust of one case, beside the metrics called by hand."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import SINGLE, assert_close

import monai_saliency as ms
from monai_saliency import metrics
from monai_saliency.handlers.trust import Trust, Trusted
from monai_saliency.handlers.trust_page import trust_page, verdict, write_trust_page
from monai_saliency.storage.tables import SUMMARY_COLUMNS, TRUST_COLUMNS, CaseTable
from monai_saliency.visualize.legend import CHANCE

STEPS = 4
CONTROLS = ("random", "intensity", "edges", "blurred")


def a_network() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3 * 6 * 6, 2)]
        return torch.nn.Sequential(*layers).eval()


def an_image() -> torch.Tensor:
    return torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))


def a_label() -> torch.Tensor:
    label = torch.zeros(1, 8, 8)
    label[0, 2:5, 2:5] = 3
    return label


def explained(inferer: Any, network: Any, image: torch.Tensor, label: Any = None, **given: Any) -> Trusted:
    case = ms.Case("ct_1")
    (explanation,) = inferer.explain(image[None], network, cases=[case])
    return Trusted(explanation, inferer, network, image, case, None if label is None else (lambda: label), **given)


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[f"trust_{name}"] for row in rows]


def test_figures_are_those_of_the_metrics() -> None:
    """Two maps of one case, by RISE, which has a seed and a standard error."""
    network, image, label = a_network(), an_image(), a_label()
    inferer = ms.rise(40, 3, target=ms.ClassScore([0, 1], "none"), mask_batch_size=8)
    case = explained(inferer, network, image, label)
    rows = Trust(STEPS).figures(case, "m")
    maps, images, labels = case.explanation.saliency[None], image[None], label[None]
    expected: dict[str, Any] = {
        "repeatability": metrics.Repeatability(inferer, network, seed=1).compute(maps, images),
        "fill_agreement": metrics.FillAgreement(inferer, network, [ms.BlurFill()]).compute(maps, images),
        "randomised": metrics.ParameterRandomisation(inferer, network, seed=1).compute(maps, images),
    }
    beside = {"": maps, **{f"_{name}": each for name, each in metrics.controls(images, maps, seed=1).items()}}
    assert list(beside) == ["", *(f"_{name}" for name in CONTROLS)]
    share = 3**2 / 8**2
    for name, each in beside.items():
        expected |= {
            f"pointing{name}": metrics.Pointing().compute(each, labels),
            f"mass{name}": metrics.MassInLabel().compute(each, labels),
            f"leakage{name}": metrics.Leakage(top=share).compute(each, labels),
            f"auprc{name}": metrics.AUPRC().compute(each, labels),
            f"insertion{name}": metrics.Insertion(inferer, network, STEPS).compute(each, images),
            f"deletion{name}": metrics.Deletion(inferer, network, STEPS).compute(each, images),
        }
    for name, values in expected.items():
        np.testing.assert_allclose(column(rows, name), values[0], rtol=0, atol=SINGLE, err_msg=name)
    error = case.explanation.standard_error
    span = maps[0].flatten(1).amax(1) - maps[0].flatten(1).amin(1)
    np.testing.assert_allclose(column(rows, "relative_error"), error.flatten(1).amax(1) / span, rtol=1e-4)  # of a root
    tops = [each.flatten().argmax() for each in maps[0]]
    ratios = [each.flatten()[top] / wrong.flatten()[top] for each, wrong, top in zip(maps[0], error, tops, strict=True)]
    np.testing.assert_allclose(column(rows, "peak_to_error"), ratios, rtol=1e-4)
    assert column(rows, "labelled") == [True, True]
    assert column(rows, "problem") == ["", ""]
    assert column(rows, "of") == ["m", "m"]
    for row in rows:
        curves = json.loads(row["trust_curves"])
        assert {kind: {*lines} for kind, lines in curves.items()} == {key: {"", *CONTROLS} for key in curves}
        for kind in ("insertion", "deletion"):
            for name, (shares, scores) in curves[kind].items():
                area = row[f"trust_{kind}_{name}".rstrip("_")]
                assert float(torch.trapezoid(torch.tensor(scores), torch.tensor(shares))) == pytest.approx(
                    area, abs=2e-3
                )
        assert set(row) == set(TRUST_COLUMNS)
    assert rows[0] != rows[1]


def test_what_it_costs_is_what_the_docs_say() -> None:
    """N for another seed, N for another fill, N for the randomised network, 10 * (steps + 1) for each map."""
    target = ms.ClassScore([0, 1], "none")
    random = explained(ms.rise(40, 3, target=target), a_network(), an_image())
    assert column(Trust(STEPS).figures(random), "forwards") == [3 * 41 + 2 * 10 * (STEPS + 1)] * 2
    windows = explained(ms.sliding_window(4, 2, target=target), a_network(), an_image())
    found = Trust(STEPS).figures(windows)
    curves = column(found, "forwards")[0] - 2 * windows.explanation.num_forwards
    assert 2 * 10 * STEPS < curves <= 2 * 10 * (STEPS + 2)  # voxels of equal value go at once, which moves the steps
    # Nothing is left to chance, and no label is known.
    assert not {"trust_repeatability", "trust_relative_error", "trust_labelled", "trust_auprc"} & found[0].keys()


def test_the_randomised_network_is_asked_the_same_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would predict another class, and its map of that class says nothing."""
    network, image = a_network(), an_image()
    other = metrics.ParameterRandomisation(ms.sliding_window(4, 2, target=ms.ClassScore([0], "none")), network, seed=1)
    predicted = int(network(image[None]).argmax())
    with torch.no_grad():
        other.randomised[-1].bias[1 - predicted] += 100
    monkeypatch.setattr("monai_saliency.metrics.map_figures.randomised", lambda *_: other.randomised)
    assert int(other.randomised(image[None]).argmax()) != predicted
    inferer = ms.sliding_window(4, 2, target=ms.ClassScore("predicted", "none"))
    (row,) = Trust(STEPS).figures(explained(inferer, network, image))
    same = inferer.replace(target=ms.ClassScore([predicted], "none"))
    maps = [same(image[None], each)[0].flatten(1) for each in (network, other.randomised)]
    assert_close(row["trust_randomised"], float(metrics.rank_correlation(*maps)), scale=1, within=SINGLE)


def test_a_figure_that_fails_leaves_the_others() -> None:
    """No module has no random weights; a label of another shape fails by itself."""
    network, image = a_network(), an_image()
    inferer = ms.sliding_window(4, 2, target=ms.ClassScore([1], "none"))
    case = explained(inferer, lambda x: network(x), image, torch.ones(1, 3, 3))
    (row,) = Trust(STEPS).figures(case)
    assert "the randomised network: `network` must be a module" in row["trust_problem"]
    assert "the label: `y` must be label maps" in row["trust_problem"]
    assert "trust_randomised" not in row
    assert isinstance(row["trust_insertion"], float)
    good = Trust(STEPS).figures(explained(inferer, network, image))[0]
    assert row["trust_insertion"] == good["trust_insertion"]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("focused_rise", {"num_masks": 16}),
        ("shapley", {"num_supervoxels": 4}),
        ("rise", {"num_masks": 20, "grid_size": 3, "per_channel": True}),
        ("rise", {"num_masks": 10, "grid_size": 3, "until": 0.5, "budget": 40}),
    ],
)
def test_every_method_has_figures(method: str, settings: dict[str, Any]) -> None:
    """Whatever its estimator, masks in rounds, or a map for each channel."""
    function: Callable[..., Any] = getattr(ms, method)
    known = inspect.signature(function).parameters
    given = {name: value for name, value in settings.items() if name in known}
    inferer = function(**given, target=ms.ClassScore([1], "none"))
    case = explained(inferer, a_network(), an_image(), a_label())
    rows = Trust(STEPS).figures(case)
    assert len(rows) == len(case.explanation.saliency)
    for row in rows:
        assert row["trust_problem"] == ""
        assert isinstance(row["trust_insertion"], float)
        assert isinstance(row["trust_auprc"], float)


class TestMark:
    def case(self, **changes: Any) -> Trusted:
        inferer = ms.rise(20, 3, seed=changes.pop("seed", 0), target=ms.ClassScore([1], "none"))
        case = explained(inferer, changes.pop("network", a_network()), changes.pop("image", an_image()), a_label())
        return replace(case, **changes)

    def test_equal_for_the_same_question_only(self) -> None:
        mark = self.case().mark(20)
        assert len(mark) == 16
        assert mark == self.case().mark(20)
        other = a_network()
        with torch.no_grad():
            other[-1].bias[0] += 1  # type: ignore[operator]
        changed = [
            self.case().mark(10),
            self.case(seed=1).mark(20),
            self.case(network=other).mark(20),
            self.case(image=an_image() * 2).mark(20),
            self.case(label=lambda: a_label() * 0).mark(20),
            self.case(label=None).mark(20),
        ]
        assert len({mark, *changed}) == len(changed) + 1

    def test_none_where_something_is_not_known(self) -> None:
        def fail() -> torch.Tensor:
            raise ValueError("no such file")

        assert self.case(network=lambda x: a_network()(x)).mark(20) == ""
        assert self.case(label=fail).mark(20) == ""


# The page ``trust.md``, of rows that are made up, so that every figure on it can be computed by hand.
def a_row(case: str, **figures: Any) -> dict[str, Any]:
    """A lesion that is found, by a map that no control equals."""
    row: dict[str, Any] = dict.fromkeys((*SUMMARY_COLUMNS, *TRUST_COLUMNS), "")
    row |= {"case": case, "class": 1, "prediction": 1, "forwards": 100, "predictions": 100.0, "noise": 0.01}
    row |= {"peak_saliency": 0.5, "lowest_saliency": -0.1, "peak_in_label": True, "settings": "a"}
    row |= {"score": 0.9, "seconds": 1.0, "trust_forwards": 510, "trust_labelled": True}
    row |= {"trust_repeatability": 0.8, "trust_relative_error": 0.05, "trust_peak_to_error": 20.0}
    for name, own, others in (("pointing", 1, 0), ("mass", 0.6, 0.1), ("leakage", 0.2, 0.9), ("auprc", 0.8, 0.3)):
        row |= {f"trust_{name}": own} | {f"trust_{name}_{each}": others for each in (*CONTROLS, "randomised")}
    row |= {"trust_insertion": 0.9, "trust_deletion": 0.2, "trust_randomised": 0.1}
    for each in CONTROLS:
        row |= {f"trust_insertion_{each}": 0.5, f"trust_deletion_{each}": 0.5}
    return row | figures


def cells(page: str, metric: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {metric} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_means_over_cases_and_marks_by_hand() -> None:
    rows = [a_row("a", trust_auprc=0.9, trust_auprc_intensity=0.7), a_row("b", trust_auprc=0.5)]
    page = trust_page(rows)
    assert cells(page, "AUPRC") == ["AUPRC", "higher", "0.7", "0.3", "0.5", "0.3", "0.3", "0.3", ""]
    assert "What no control reaches: peak strictly inside, mass in the label, leakage, AUPRC." in page
    rows[1] |= {"trust_auprc_intensity": 0.7}  # mean 0.7, as the maps
    page = trust_page(rows)
    assert cells(page, "AUPRC")[-1] == "**intensity alone reaches this.**"
    assert "What no control reaches: peak strictly inside, mass in the label, leakage." in page


def test_usefulness_by_hand() -> None:
    rows = [
        a_row("a"),
        a_row("b", peak_in_label=False),
        a_row("c", prediction=0, peak_in_label=False, forwards=300, trust_peak_to_error=1.5),
        a_row("d", prediction=0, trust_labelled=False, peak_in_label="", verdict=CHANCE),
    ]
    page = trust_page(rows)
    assert "- 1 of 4 maps are noise" in page
    assert "- 3 of 4 maps with a standard error have a peak above 2 times" in page
    assert "- A case costs 100 forwards (100 predictions of the whole image), its figures of trust 510" in page
    assert "needs readers" in page


def test_maps_of_several_classes_are_not_mixed() -> None:
    """Deletion of one class may be praised where that of the other is not."""
    other = a_row("a", **{"class": 0, "trust_deletion_intensity": 0.1})
    page = trust_page([a_row("a"), other])
    assert "### Maps of class 0 (1)" in page
    assert "What no control reaches for maps of class 0: insertion AUC." in page
    assert "What no control reaches for maps of class 1: insertion AUC, deletion AUC." in page


@pytest.mark.parametrize(
    ("figures", "begins", "words"),
    [
        ({}, "passes", "the map depends on what was learned"),
        ({"trust_randomised": 0.5}, "fails", "the network at random weights gives much the same map"),
        ({"trust_randomised": -0.7}, "fails", "rank correlation 0.7"),  # upside down, it is the same structure
        ({"trust_auprc_randomised": 0.41}, "fails", "it finds the label without having learned anything"),
        ({"trust_auprc_randomised": 0.4}, "passes", ""),
        ({"trust_auprc": "", "trust_auprc_randomised": ""}, "passes", ""),
        ({"trust_randomised": ""}, "not known", ""),
        ({"verdict": CHANCE}, "not known", "chance alone can make each of these maps, so give more masks"),
        (
            {"trust_repeatability": 0.04, "trust_randomised": 0.05, "trust_auprc": ""},
            "not known",
            "maps of two seeds are no more alike (rank correlation 0.04, with random weights 0.05)",
        ),
        ({"trust_repeatability": 0.04, "trust_randomised": 0.05, "trust_auprc_randomised": 0.41}, "not known", "seeds"),
        ({"trust_repeatability": 0.04, "trust_randomised": 0.05}, "passes", ""),  # the labels show it
    ],
)
def test_verdict_by_its_rule(figures: dict[str, Any], begins: str, words: str) -> None:
    found = verdict([a_row("a", **figures)])
    assert found.startswith(begins)
    assert words in found
    assert f"**Randomised network: {found}.**" in trust_page([a_row("a", **figures)])


def test_problems_are_counted_with_their_reasons() -> None:
    problem = "insertion: out of memory"
    rows = [a_row("a", trust_problem=problem), a_row("b", trust_problem=problem), a_row("c"), a_row("d")]
    rows[3]["trust_problem"] = "the label: it is empty"
    page = trust_page(rows)
    assert "Figures of 3 cases of 4 could not be measured:" in page
    assert "- 2 cases (the first is a): insertion: out of memory" in page
    assert "- 1 case (the first is d): the label: it is empty" in page


class TestFile:
    def test_from_the_table_alone(self, tmp_path: Path) -> None:
        """A page of what is read back is that of the rows: text instead of numbers changes nothing."""
        table = CaseTable(tmp_path / "summary.csv")
        rows = [a_row("a"), a_row("b", trust_pointing=0, trust_problem="insertion: =1")]
        table.add(rows)
        write_trust_page(table)
        page = (tmp_path / "trust.md").read_text()
        assert page == trust_page(rows)
        assert len(page.splitlines()) > 30

    def test_it_goes_with_the_last_figures(self, tmp_path: Path) -> None:
        table = CaseTable(tmp_path / "summary.csv")
        table.add([a_row("a")])
        write_trust_page(table)
        table.add([dict.fromkeys(SUMMARY_COLUMNS, "") | {"case": "a"}])
        assert tuple(table.read()[0]) == SUMMARY_COLUMNS
        write_trust_page(table)
        assert not (tmp_path / "trust.md").exists()

    def test_a_page_of_somebody_else_stays(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        table = CaseTable(tmp_path / "summary.csv")
        (tmp_path / "trust.md").write_text("# My notes")
        for row in (a_row("a"), dict.fromkeys(SUMMARY_COLUMNS, "") | {"case": "a"}):
            table.add([row])
            write_trust_page(table)
            assert "trust.md is not a page of monai-saliency" in caplog.text
        assert (tmp_path / "trust.md").read_text() == "# My notes"
