"""Our own bundle as the Model Zoo wants it: ids, metadata, pins and pages. ``test_own_bundle.py`` runs it."""

import json
import re
from importlib.metadata import metadata, requires, version
from pathlib import Path

import pytest
import torch
from helpers import commands
from helpers.paths import BUNDLE, ROOT
from huggingface_hub import ModelCard
from monai.bundle import ConfigParser, ConfigWorkflow
from monai.bundle.properties import TrainProperties
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from monai_saliency.networks import load_checkpoint
from monai_saliency.version import __version__

CONFIGS, DOCS = BUNDLE / "configs", BUNDLE / "docs"
META = json.loads((CONFIGS / "metadata.json").read_text())
PINS = META["required_packages_version"] | {
    "torch": META["pytorch_version"],
    "numpy": META["numpy_version"],
    "monai": META["monai_version"],
}


def test_training_has_the_properties_of_a_train_workflow(tmp_path: Path) -> None:
    settings: dict[str, object] = {"train#dataloader#drop_last": False}
    settings |= {"bundle_root": str(BUNDLE), "dataset_dir": str(tmp_path), "num_training": 2, "num_validation": 2}
    workflow = ConfigWorkflow(
        str(CONFIGS / "train.yaml"), str(CONFIGS / "metadata.json"), workflow_type="train", **settings
    )
    workflow.initialize()
    assert workflow.check_properties() == []
    absent = {name for name, each in TrainProperties.items() if each["id"] not in workflow.parser}
    # Nothing is done to predictions, and nothing but the loss is measured while it trains.
    assert absent == {"train_postprocessing", "train_key_metric", "val_postprocessing"}


@pytest.mark.slow
def test_training_runs_by_its_command(tmp_path: Path) -> None:
    """A few iterations of the demo's network, whose weights the inference's network takes."""
    (line,) = re.findall(r"^python (-m monai\.bundle run .*train\.yaml)$", (DOCS / "README.md").read_text(), re.M)
    few = {"dataset_dir": tmp_path / "data", "ckpt_path": tmp_path / "model.pt", "num_training": 8, "num_validation": 2}
    few |= {"epochs": 2, "val_interval": 1, "device": "cpu"}
    command = [*line.split(), *(word for name, value in few.items() for word in (f"--{name}", str(value)))]
    done = commands.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"epoch 2: loss \d", done.stdout)
    assert re.search(r"held-out accuracy: \d\.\d+ of 2 scans", done.stdout)
    assert "logging.conf does not exist" not in done.stdout + done.stderr
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    parser = ConfigParser()
    parser.read_config(CONFIGS / "inference.yaml")
    network = load_checkpoint(parser.get_parsed_content("network_def"), tmp_path / "model.pt")
    torch.testing.assert_close(dict(network.state_dict()), dict(weights))


@pytest.mark.parametrize("name", PINS)
def test_pinned_packages_are_those_that_we_need_and_install_on_python_3_10(name: str) -> None:
    """As far as that is known offline, of the installed release: a newer one than the pin may appear at any time."""
    pin = Version(PINS[name])
    needed = [Requirement(each) for each in requires("monai-saliency") or []]
    assert all(pin in each.specifier for each in needed if each.name.lower() == name)
    # Of our own package, the release that it says it is: an editable install may be of an earlier one.
    installed = Version((__version__ if name == "monai-saliency" else version(name)).partition("+")[0])
    assert pin <= installed
    python = SpecifierSet(metadata(name).get("Requires-Python") or "")
    assert pin < installed or python.contains("3.10")


def test_what_a_bundle_of_the_model_zoo_has() -> None:
    assert list(META["eval_metrics"]) == ["accuracy"]
    assert 0.95 <= META["eval_metrics"]["accuracy"] <= 1
    assert "MNI152" in (DOCS / "data_license.txt").read_text()
    assert (BUNDLE / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    page = (DOCS / "README.md").read_text()
    headings = ["Model Overview", "Data", "Training configuration", "Performance", "MONAI Bundle Commands"]
    assert re.findall(r"^# (.*)$", page, re.MULTILINE)[1:] == [*headings, "References", "License"]
    assert f"| {META['eval_metrics']['accuracy']:.3f} |" in page
    named = {re.split(r"[^\w-]", each)[0].lower() for each in META["required_packages_version"]}
    extras = {
        Requirement(each).name.lower()
        for each in requires("monai-saliency") or []
        if re.search("'demo'|'bundle'|\"demo\"|\"bundle\"", each)
    }
    assert extras - {"monai-saliency"} <= named


def test_card_on_hugging_face_says_what_the_metadata_says() -> None:
    """As far as its library checks a card offline: ``ModelCard.validate`` asks the hub."""
    card = ModelCard.load(BUNDLE / "README.md")
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "monai")
    (result,) = card.data.eval_results
    assert {result.metric_type: result.metric_value} == META["eval_metrics"]
    assert list(META["eval_metrics"]) == card.data.metrics
    assert f"| {result.metric_value:.3f} |" in card.text
