"""``tests/benchmarks/gpu.py``: a figure that misses its bar, or a group that fails, makes the exit status 1."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import TESTS

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


# Figures that benchmarks measured, kept with the machine's description.
BENCHMARKS = TESTS / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_kept_results_say_what_they_were_measured_on(path: Path) -> None:
    found = json.loads(path.read_text())
    assert (BENCHMARKS / f"{found['benchmark']}.py").is_file()
    assert path.stem == found["benchmark"] or path.stem.startswith(found["benchmark"] + "_")
    assert found["rows"]
    assert {"device", "cpu", "cores", "threads", "python", "torch", "monai", "numpy"} <= set(found["machine"])
    assert not {"host", "hostname", "node", "user"} & set(found["machine"])
    assert "/" not in "".join(str(value) for value in found["settings"].values())
