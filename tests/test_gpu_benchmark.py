"""``tests/benchmarks/gpu.py``: a figure that misses its bar, or a group that fails, makes the exit status 1."""

import argparse
import json
import platform
import runpy
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import ROOT, TESTS

import monai_saliency as ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TESTS / "benchmarks"))
    import gpu

    return gpu


def run(gpu: Any, tmp_path: Path, *groups: str) -> tuple[int, list[dict[str, Any]]]:
    output = tmp_path / "gpu.json"
    status = gpu.main(["--device", "cpu", "--quick", "--output", str(output), "--only", *groups])
    found = json.loads(output.read_text())
    assert found["machine"]["device"]
    assert "/" not in "".join(map(str, found["settings"].values()))
    return status, found["rows"]


def test_another_map_than_the_cpus_fails(gpu: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A made-up device on which one weight of a network is larger by a thousandth."""

    def placed(network: Any, image: Any, s: Any) -> Any:
        with torch.no_grad():
            next(network.parameters()).mul_(1.001)
        return network, image

    monkeypatch.setattr(gpu, "placed", placed)
    status, rows = run(gpu, tmp_path, "agreement")
    assert status == 1
    assert rows
    assert not any(each["passes"] for each in rows)
    assert "FAIL" in capsys.readouterr().out


def test_rows_pass_or_fail_by_their_bars(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(s: Any) -> Any:
        yield gpu.row("a", 1.05, at_most=1.05)
        yield gpu.row("b", 2.0, at_least=2)
        yield gpu.row("told", 3.0)

    groups = {"memory": rows, "waits": lambda s: [gpu.row("a", float("nan"), at_most=1.0), gpu.row("b", 1.9, None, 2)]}
    for name, measure in groups.items():
        monkeypatch.setitem(gpu.GROUPS, name, (measure, "monai", False))
    monkeypatch.setitem(gpu.GROUPS, "overhead", (lambda s: 1 / 0, "monai", False))
    monkeypatch.setitem(gpu.GROUPS, "xaitk", (rows, "no_such_peer", False))
    status, found = run(gpu, tmp_path, "memory", "xaitk", "tests")  # a missing peer and a missing GPU leave rows out
    assert (status, [each["bar"] for each in found]) == (0, ["<= 1.05", ">= 2", None])
    status, found = run(gpu, tmp_path, "memory", "waits", "overhead")
    assert (status, [each["passes"] for each in found]) == (1, [True] * 3 + [False] * 3)
    assert found[-1]["row"] == "failed: ZeroDivisionError"


@pytest.mark.slow
def test_waiting_in_each_batch_fails(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ms.FunctionScore(lambda output: output[:, :1] * output.max().item())
    monkeypatch.setattr(gpu.ms, "ClassScore", lambda *_: slow)
    status, rows = run(gpu, tmp_path, "waits")
    assert [each["passes"] for each in rows] == [False, False, True]
    assert status == 1


def test_time_beside_the_network_fails(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    network, image = gpu.overhead.made("light", 2, 16)

    def seconds(batch: torch.Tensor) -> None:
        time.sleep(0.05)

    slow = ms.FunctionScore(lambda output: (seconds(output), output[:, :1])[1])
    ratios, _ = gpu.overhead.measure(network, image, ms.rise(7, target=slow, mask_batch_size=8), 1)
    assert not gpu.row("slow", ratios[0], at_most=gpu.BARS[2])["passes"]


# Figures that benchmarks measured, kept with the machine's description, and what keeps them.
BENCHMARKS = TESTS / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "record.py"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_kept_results_say_what_they_were_measured_on(path: Path) -> None:
    found = json.loads(path.read_text())
    assert (BENCHMARKS / f"{found['benchmark']}.py").is_file()
    assert path.stem == found["benchmark"] or path.stem.startswith(found["benchmark"] + "_")
    assert found["rows"]
    assert {"device", "cpu", "cores", "threads", "python", "torch", "monai", "numpy"} <= set(found["machine"])
    assert not {"host", "hostname", "node", "user"} & set(found["machine"])
    assert "/" not in "".join(str(value) for value in found["settings"].values())


def test_there_are_results_and_a_page_names_them() -> None:
    assert {"localization", "overhead"} <= {path.stem for path in RESULTS}
    assert "tests/benchmarks/results/" in (ROOT / "tutorials" / "pages" / "measured.md").read_text()


def test_what_is_kept(record: dict[str, Any], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    record["add_options"](parser)
    rows = [{"case": "a", "ratio": 1.23456}, {"case": "b", "ratio": None, "setting": {"size": 4}}]
    assert record["keep"](parser.parse_args([]), "overhead", rows) == []
    given = parser.parse_args(["--json", str(tmp_path / "further" / "some.json"), "--csv", str(tmp_path / "some.csv")])
    (path,) = record["keep"](given, "overhead", rows, ["captum"])
    found = json.loads(path.read_text())
    assert (found["benchmark"], found["settings"], found["rows"]) == ("overhead", {"rounds": 3}, rows)
    assert found["machine"]["captum"]
    for name in (socket.gethostname(), platform.node()):
        assert f'"{name}"' not in path.read_text()
    lines = record["tables"](folder=path.parent).splitlines()
    assert lines[0] == "## some"
    assert lines[2] == "rounds 3"
    assert lines[-4:] == ["| case | ratio | setting |", "|---|---|---|", "| a | 1.235 | - |", "| b | - | size 4 |"]
    assert record["tables"](["some"], folder=path.parent).splitlines() == lines
