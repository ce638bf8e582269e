"""``--tracking mlflow`` on tiny cohorts, read back through MLflow's own client."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from helpers.own_bundle import SMALL_NET, run
from helpers.paths import BUNDLE
from helpers.scans import LPS, write_scan
from mlflow import MlflowClient
from mlflow.entities import Run
from monai.bundle import ConfigParser
from monai.networks.nets import DenseNet

from monai_saliency.errors import root_cause
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.visualize.legend import is_noise


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder, with no word about MLflow from outside; whatever connects to another machine fails."""
    asked = []

    def refuse(*address: Any, **_: Any) -> None:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a run does to it
        monkeypatch.delenv(name)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert asked == []
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    """A Decathlon folder of three scans, two of them labelled: all of the one, and nothing of the other."""
    folder = tmp_path / "cohort"
    listing = {"modality": {"0": "T1"}, "test": []}
    for seed, name in enumerate(("a", "b", "c")):
        path = write_scan(folder / "imagesTs" / f"{name}.nii.gz", (12, 13, 14), LPS, seed=seed)
        listing["test"].append(f"./imagesTs/{path.name}")
        if name != "c":
            label = np.zeros((12, 13, 14), np.uint8)
            label[0, 0, 0] = 1
            (folder / "labelsTs").mkdir(exist_ok=True)
            nib.save(nib.Nifti1Image(label + (name == "a"), LPS), folder / "labelsTs" / path.name)
    (folder / "dataset.json").write_text(json.dumps(listing))
    return folder


def client(folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{folder / 'mlruns.db'}")


def runs(folder: Path) -> list[Run]:
    """The experiment's, the oldest first."""
    experiment = client(folder).get_experiment_by_name("monai_experiment")
    return client(folder).search_runs(experiment.experiment_id, order_by=["attributes.start_time"])


def artifacts(folder: Path, recorded: Run, below: str | None = None) -> list[str]:
    found = []
    for each in client(folder).list_artifacts(recorded.info.run_id, below):
        found += artifacts(folder, recorded, each.path) if each.is_dir else [each.path]
    return found


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def history_of(folder: Path, recorded: Run, name: str) -> dict[int, float]:
    """A figure of each row of the summary, by the row's number from 1 on."""
    history = client(folder).get_metric_history(recorded.info.run_id, f"case/{name}")
    return {metric.step: metric.value for metric in history}


def mean_of(rows: list[dict[str, str]], name: str) -> Any:
    return pytest.approx(np.mean([float(row[name]) for row in rows]))


def test_what_is_recorded(cohort: Path, tmp_path: Path) -> None:
    out = tmp_path / "my maps"
    torch.manual_seed(0)
    before = files_below(tmp_path)
    rows = run(cohort, out, "none", tracking="mlflow", classes="all", fill=0.25, seed=7, picture=True)
    assert len(rows) == 6
    (recorded,) = runs(out)
    assert recorded.info.status == "FINISHED"
    check_settings(recorded, cohort, out)
    check_figures(recorded, rows)
    check_history(recorded, rows, out)
    check_files(recorded, out)
    written = files_below(tmp_path) - before
    assert all(out in path.parents for path in written)


def check_settings(recorded: Run, cohort: Path, out: Path) -> None:
    passed = {"method": "sliding_window", "window_size": "8", "stride": "4", "fill": "0.25", "seed": "7"}
    passed |= {"dataset_dir": str(cohort), "output_dir": str(out), "classes": "all", "spatial_size": "[16, 16, 16]"}
    passed |= {"device": "cpu", "network": "DenseNet", "window_unit": "voxel", "cache_dir": f"{out}/cache"}
    assert passed.items() <= recorded.data.params.items()
    # A setting of another method is recorded where it was given (seed), and else not (num_masks).
    assert "num_masks" not in recorded.data.params


def check_figures(recorded: Run, rows: list[dict[str, str]]) -> None:
    by_case = {row["case"]: row for row in rows}
    expected = {
        "cases": 3,
        "failures": 0,
        "forwards": 3 * (1 + 4**3),
        "seconds": pytest.approx(sum(float(row["seconds"]) for row in by_case.values())),
        "mean_score": mean_of(rows, "score"),
        "mean_peak_saliency": mean_of(rows, "peak_saliency"),
        "peak_in_label": 0.5,  # of the labelled scans: in all of the one, and in nothing of the other
    }
    noisy = [row for row in rows if is_noise(row)]
    if noisy:
        expected["maps_of_noise"] = len(noisy)
    assert {name: value for name, value in recorded.data.metrics.items() if not name.startswith("case/")} == expected


def check_history(recorded: Run, rows: list[dict[str, str]], out: Path) -> None:
    for name in ("score", "peak_saliency", "forwards"):
        expected = {number: float(row[name]) for number, row in enumerate(rows, start=1)}
        assert history_of(out, recorded, name) == expected
    assert [row["peak_in_label"] for row in rows] == ["True", "True", "False", "False", "", ""]
    assert history_of(out, recorded, "peak_in_label") == {1: 1, 2: 1, 3: 0, 4: 0}


def check_files(recorded: Run, out: Path) -> None:
    """The table, the configurations and the pictures, with the bytes of those in the output folder."""
    configurations = [path.name for path in out.glob("config_*.json")]
    pictures = [f"imagesTs/{name}_saliency.png" for name in "abc"]
    copies = {name: name for name in ("summary.csv", *configurations)}
    copies |= {f"pictures/{name}": name for name in pictures}
    assert sorted(artifacts(out, recorded)) == sorted(copies)
    folder = out / "mlruns" / recorded.info.run_id / "artifacts"
    for copy, name in copies.items():
        assert (folder / copy).read_bytes() == (out / name).read_bytes()


def test_every_setting_is_recorded(tmp_path: Path) -> None:
    """What stands above the line of dashes in the config is what users change; all of it, and nothing else.

    The method's defaults are among its settings.
    """
    text = (BUNDLE / "configs" / "inference.yaml").read_text()
    changed = set(yaml.safe_load(text.partition("\n# ------")[0]))
    write_scan(tmp_path / "demo" / "a.nii.gz", (12, 13, 14), LPS)
    parser = ConfigParser(yaml.safe_load(text) | {"bundle_root": str(tmp_path), "method": "helpers.own_method.tiles"})
    recorded = parser.get_parsed_content("tracker::settings")
    assert changed - set(recorded) == {"imports", "network_def", "method_defaults"}
    assert recorded["pixdim"] == [3.0, 3.0, 3.0]
    assert set(recorded) - changed == {"edge"}
    assert (recorded["edge"], recorded["output_dir"], recorded["section"]) == (4, f"{tmp_path}/eval", None)


@pytest.mark.slow
def test_each_run_is_recorded_with_its_failures(cohort: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    weights = tmp_path / "weights.pt"
    torch.manual_seed(0)
    torch.save(DenseNet(**SMALL_NET).state_dict(), weights)
    run(cohort, out, weights, tracking="mlflow")
    (cohort / "imagesTs" / "b.nii.gz").write_bytes(b"no scan")
    with pytest.raises(SystemExit, match="1 case without a map"):
        run(cohort, out, weights, tracking="mlflow", stride=8, run_name="coarse")
    first, second = runs(out)
    assert [each.info.status for each in (first, second)] == ["FINISHED", "FINISHED"]
    assert second.info.run_name == "coarse"
    assert (first.data.params["stride"], second.data.params["stride"]) == ("4", "8")
    network = DenseNet(**SMALL_NET)
    network.load_state_dict(torch.load(weights, weights_only=True))
    for each in (first, second):
        assert each.data.params["network_fingerprint"] == network_fingerprint(network)
        assert each.data.params["checkpoint"] == str(weights)
    assert (first.data.metrics["failures"], second.data.metrics["failures"]) == (0, 1)
    # The row of b went with its scan.
    forwards = {m.step: m.value for m in client(out).get_metric_history(second.info.run_id, "case/forwards")}
    assert forwards == {1: 1 + 2**3, 2: 1 + 2**3}
    assert second.data.metrics["forwards"] == sum(forwards.values())
    assert "failures.csv" in artifacts(out, second)
    assert not [path for path in artifacts(out, second) if path.endswith(".png")]


class Interrupted(torch.nn.Module):
    """Two logits of an image, until Ctrl-C is pressed in its tenth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 10:
            raise KeyboardInterrupt
        return x.flatten(1)[:, :2]


@pytest.mark.slow
def test_an_interrupted_run_says_so(cohort: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Up to eight forwards for each case: the prediction, references, all hidden, and three batches of masks.
    settings = {"tracking": "mlflow", "method": "rise", "num_masks": 3, "mask_batch_size": 1, "store_dir": ""}
    with pytest.raises(KeyboardInterrupt):
        run(cohort, out, "none", network_def={"_target_": "test_mlflow.Interrupted"}, fill=0.0, **settings)
    (recorded,) = runs(out)
    assert recorded.info.status == "KILLED"
    assert recorded.data.metrics["cases"] == 1
    assert any(path.startswith("config_") for path in artifacts(out, recorded))


def test_without_mlflow_the_error_comes_first(cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(RuntimeError) as caught:
        run(cohort, tmp_path / "out", "none.pt", tracking="mlflow")
    assert str(root_cause(caught.value)) == 'mlflow is not installed: pip install "monai-saliency[mlflow]"'
    assert [path.name.partition("_")[0] for path in (tmp_path / "out").iterdir()] == ["config"]
    run(cohort, tmp_path / "untracked", "none")
