"""A recipe makes the driver's cohort in another process, which explains whatever units it is given."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import monai.bundle
import pytest
from helpers.files import voxels
from helpers.layouts import LAYOUTS, Bundle
from helpers.own_bundle import BATCHES, forwards, settings

from monai_saliency.bundle.config import Recipe
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.distributed import Cohort, Engine, local_device
from monai_saliency.errors import root_cause
from monai_saliency.sharding import Part, Unit, units


class Driver(Engine):
    """Takes the cohort, and has nothing explained."""

    def run(self, cohort: Cohort) -> None:
        assert isinstance(cohort.recipe, Recipe)
        plain = replace(cohort.recipe, config=cohort.recipe.config | {"saliency_engine": None})
        self.recipe: Recipe = pickle.loads(pickle.dumps(plain))
        self.count = len(cohort)


@pytest.fixture(autouse=True)
def _folder_and_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A recipe changes both, in its process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)


def drive(run_id: str = "run", **settings: Any) -> Driver:
    driver = Driver()
    monai.bundle.run(run_id=run_id, **settings, saliency_engine=driver)
    return driver


def test_units_in_any_order_make_the_maps_of_the_plain_run(cohort: Path, capfd: pytest.CaptureFixture[str]) -> None:
    monai.bundle.run(**settings(cohort, "plain"))
    driver = drive(**settings(cohort, "out"))
    assert driver.count == 3
    capfd.readouterr()
    worker = driver.recipe()
    assert capfd.readouterr().out == ""
    assert forwards(cohort, "out") == 0
    worker.explain([Unit(2), Unit(1, Part(1, 3))])
    assert worker.explainer.explained == ["s2"]
    assert worker.explainer.take_waiting() == ["s1"]
    assert worker.explainer.take_waiting() == []
    # Another process, which finds in the store what the first one did of s1.
    other = driver.recipe()
    other.explain([Unit(1, Part(0, 3)), Unit(0), Unit(1, Part(2, 3))])
    assert other.explainer.explained == ["s0", "s1"]
    assert voxels(cohort / "out") == voxels(cohort / "plain")
    # The batch with the unperturbed image is in each of the three parts.
    assert forwards(cohort, "out") == 3 * BATCHES + 2


def test_somebody_elses_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose scripts are found in its own folder only, and whose loader makes the batches."""
    layout = next(layout for layout in LAYOUTS if layout.name == "breast_density_classification")
    for module in [m for m in sys.modules if m == "scripts" or m.startswith("scripts.")]:
        monkeypatch.delitem(sys.modules, module)
    bundle = Bundle(layout, tmp_path)
    monkeypatch.chdir(bundle.root)
    sys.path.insert(0, "")
    bundle.write_weights()
    few = {"saliency_num_masks": 12, "saliency_grid_size": 4, "saliency_mask_batch_size": 4}
    bundle.explain(saliency_dir=str(tmp_path / "plain"), **few)
    files = [str(bundle.config), str(overlay_path("explain"))]
    driver = drive("explain", config_file=files, **bundle.settings | few, saliency_dir=str(tmp_path / "out"))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    worker = driver.recipe()
    # Both images are one batch, of which a part may complete one of them, and the next part finds it complete.
    worker.explain(units(driver.count, 2, "masks"))
    assert set(worker.explainer.explained) == set(bundle.scans)
    for case in bundle.scans:
        assert voxels((tmp_path / "out" / case).parent) == voxels((tmp_path / "plain" / case).parent)


def test_its_device(cohort: Path) -> None:
    """An overlay may leave the device to the engine; what the user asks for is kept."""
    chosen = settings(cohort, "out") | {"device": "$@saliency_engine.device"}
    recipe = drive(**settings(cohort, "out")).recipe
    worker = replace(recipe, config=recipe.config | {"device": chosen["device"]})()
    assert next(worker.evaluator.network.parameters()).device == local_device()


def test_errors_say_what_is_wrong(cohort: Path) -> None:
    recipe = drive(**settings(cohort, "out")).recipe
    with pytest.raises(RuntimeError, match=r"'fnord' never called `saliency_engine`"):
        replace(recipe, run_id="fnord")()
    with pytest.raises(RuntimeError) as caught:
        replace(recipe, config=recipe.config | {"checkpoint": "nowhere.pt"})()
    assert "nowhere.pt does not exist" in str(root_cause(caught.value))
    with pytest.raises(RuntimeError, match=r"ended its run before anything could be explained: enough"):
        replace(recipe, config=recipe.config | {"run": ["$(_ for _ in ()).throw(SystemExit('enough'))"]})()
