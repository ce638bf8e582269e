"""The command of the job script: what becomes of its environment."""

import ast
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import monai.bundle
import pytest
import yaml
from helpers.files import voxels
from helpers.layouts import LAYOUTS, Bundle
from helpers.own_bundle import BATCHES, forwards, settings
from helpers.paths import BUNDLE

from monai_saliency.__main__ import main
from monai_saliency.bundle.command import HOW, MACHINERY, WHAT, from_environment, settings_of
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.overlay import Overlay
from monai_saliency.distributed import Cohort, Engine, local_device
from monai_saliency.errors import root_cause
from monai_saliency.methods.settings import all_settings
from monai_saliency.sharding import Part, Unit, units

ROOT = {"BUNDLE_ROOT": str(BUNDLE)}
SCRIPT = BUNDLE / "slurm" / "explain.sbatch"


def flags(*words: str, **environment: str) -> dict[str, str]:
    """What the bundle is given, by its ids, and the ``run``."""
    python, *command, run = from_environment({**ROOT, **environment}, words)[:5]
    assert [python, *command] == ["python", "-m", "monai.bundle", "run"]
    left, found = from_environment({**ROOT, **environment}, words)[5:], {"run": run}
    while left:
        name, equals, value = left.pop(0).removeprefix("--").partition("=")
        found[name] = value if equals else left.pop(0)
    return found


def test_variables_are_ids_of_the_configs() -> None:
    ids = set(yaml.safe_load((BUNDLE / "configs" / "inference.yaml").read_text()))
    assert {*HOW, *WHAT, *MACHINERY} <= ids
    assert set(HOW) <= set(Overlay.ids())
    listed = set(re.findall(r"[A-Z_]{3,}", SCRIPT.read_text().partition("\n# And: OUTPUT_DIR")[0]))
    assert {name.upper() for name in (*HOW, *WHAT, *MACHINERY)} <= listed


def test_the_bundle_as_it_is() -> None:
    found = flags(HOME="/home/user", SLURM_JOB_ID="12")
    assert ast.literal_eval(found.pop("config_file")) == [
        f"{BUNDLE}/configs/inference.yaml",
        str(overlay_path("slurm")),
    ]
    assert found == {
        "run": "run",
        "bundle_root": str(BUNDLE),
        "output_dir": f"{BUNDLE}/sweep/default",
        "cache_dir": f"{BUNDLE}/sweep/cache",
    }


def test_variables_become_ids() -> None:
    given = {"METHOD": "rise", "NUM_MASKS": "4000", "FILL": "-1000", "CLASSES": "[1, 2]", "DATASET_DIR": "/my scans"}
    given |= {"CACHE": "lmdb", "CHECKPOINT": "", "SPLIT": "masks", "TMPDIR": "/scratch/12", "OUTPUT_DIR": "/out/maps"}
    found = flags("--pixdim", "[1, 1, 1]", **given)
    assert found.pop("cache_dir").startswith("/scratch/12/monai_saliency-")
    assert found.pop("config_file")
    assert found == {
        "run": "run",
        "bundle_root": str(BUNDLE),
        "method": "rise",
        "num_masks": "4000",
        "fill": "-1000",
        "classes": "[1, 2]",
        "dataset_dir": "/my scans",
        "cache": "lmdb",
        "checkpoint": "",
        "saliency_split": "masks",
        "output_dir": "/out/maps",
        "pixdim": "[1, 1, 1]",
    }
    assert flags(CACHE="lmdb", CACHE_DIR="/mine")["cache_dir"] == "/mine"
    assert "cache_dir" not in flags(CACHE="none")


def test_every_setting_of_every_method_is_a_variable() -> None:
    given = {name.upper(): "1" for name in all_settings()}
    assert {"num_masks", "divide", "num_supervoxels"} < set(all_settings())
    assert set(all_settings()) <= set(flags(**given, OUTPUT_DIR="/out"))


def test_settings_of_ones_own_method_stand_behind_the_script() -> None:
    found = flags("--width", "5", METHOD="own_rings.rings")
    assert (found["method"], found["width"]) == ("own_rings.rings", "5")
    assert Path(found["output_dir"]).name == "method=own_rings.rings,width=5"


def test_settings_name_the_folder() -> None:
    """Others another one, and the same ones the same one, whatever their order and the machine's part in it."""

    def folder(*words: str, **given: str) -> str:
        path = Path(flags(*words, SWEEP_DIR="/out", **given)["output_dir"])
        assert path.parent == Path("/out")
        return path.name

    assert folder(NUM_MASKS="4000", METHOD="rise", NUM_WORKERS="3") == "method=rise,num_masks=4000"
    assert folder(METHOD="rise", NUM_MASKS="4000", SLURM_RESTART_COUNT="1") == "method=rise,num_masks=4000"
    assert folder("--pixdim", "[1, 1, 2]", "--section=test", CLASSES="[1]") == "classes=[1],pixdim=[1,1,2],section=test"
    given = {"PER_CHANNEL": "true", "P1": "0.3", "SEED": "1"}
    assert folder(METHOD="rise", GRID_SIZE="5", **given) == "method=rise,grid_size=5,p1=0.3,seed=1,per_channel=true"
    # In the order of the config's own method.
    assert folder(SEED="1", P1="0.3", NUM_MASKS="300") == "num_masks=300,p1=0.3,seed=1"
    odd = ["/data/a", "/data-a", "/data a", "/data/" + 300 * "a", "/data/" + 301 * "a"]
    folders = [folder(DATASET_DIR=each) for each in odd]
    assert len({*folders}) == len(odd)
    assert all(re.fullmatch(r"dataset_dir=-data[a-]+-[0-9a-f]{8}", each) and len(each) < 160 for each in folders)
    assert folder(DATASET_DIR="/data/a") == folders[0]


def test_somebody_elses_bundle(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.yaml").write_text("{}")
    files = f"{tmp_path}/a.json:{tmp_path}/b.yaml"
    given = {"BUNDLE_ROOT": str(tmp_path), "CONFIG_FILES": files, "RUN_ID": "explain"}
    given |= {"METHOD": "rise", "DATASET_DIR": "/data", "PICTURE": "false"}
    found = flags(**given)
    folder = found.pop("saliency_dir")
    assert re.fullmatch(rf"{tmp_path}/sweep/method=rise,dataset_dir=-data-[0-9a-f]{{8}}", folder)
    assert ast.literal_eval(found.pop("config_file")) == [
        *(f"{tmp_path}/{name}" for name in ("a.json", "b.yaml")),
        *(str(overlay_path(name)) for name in ("explain", "slurm")),
    ]
    assert found == {
        "run": "explain",
        "bundle_root": str(tmp_path),
        "saliency_method": "rise",
        "dataset_dir": "/data",
        "saliency_picture": "false",
    }


def test_errors_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for environment, words, message in (
        (
            {"BUNDLE_ROOT": "/nowhere"},
            [],
            "config file /nowhere/configs/inference.yaml does not exist: set BUNDLE_ROOT",
        ),
        (ROOT, ["rise"], "expected --id value behind the script, got rise"),
        (ROOT | {"METHOD": "lime"}, [], "`method` must be one of .*, got 'lime'"),
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as caught:
            main(["command", "--", *words])
        assert caught.value.code == 2
        printed = capsys.readouterr()
        assert re.search(f"^error: .*{message}", printed.err)
        assert printed.out == ""


def test_the_command_is_printed_in_words_of_a_shell(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {**ROOT, "CLASSES": "[1, 2]", "OUTPUT_DIR": "/it's"}.items():
        monkeypatch.setenv(name, value)
    main(["command", "--", "--pixdim", "[1, 1, 1]"])
    printed = capsys.readouterr().out
    assert "'--classes=[1, 2]'" in printed
    assert printed.endswith("--pixdim '[1, 1, 1]'\n")


def test_settings_of_a_name() -> None:
    assert settings_of("method=rise,num_masks=4000") == {"method": "rise", "num_masks": "4000"}
    assert settings_of("classes=[1,2],pixdim=[1,1,2]") == {"classes": "[1,2]", "pixdim": "[1,1,2]"}
    assert settings_of("checkpoint=,seed=1") == {"checkpoint": "", "seed": "1"}
    assert settings_of("cache") == {}


# A recipe makes the driver's cohort in another process, which explains whatever units it is given.
class Driver(Engine):
    """Takes the cohort, and has nothing explained."""

    def run(self, cohort: Cohort) -> None:
        assert isinstance(cohort.recipe, partial)
        self.recipe: partial[Cohort] = pickle.loads(pickle.dumps(changed(cohort.recipe, saliency_engine=None)))
        self.count = len(cohort)


def changed(recipe: partial[Cohort], run_id: str | None = None, **config: Any) -> partial[Cohort]:
    """A recipe with another run, or other values in its config."""
    given, own_run, *others = recipe.args
    return partial(recipe.func, given | config, run_id or own_run, *others)


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


def test_a_worker_explains_somebody_elses_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose scripts are found in its own folder only, and whose loader makes the batches."""
    layout = next(layout for layout in LAYOUTS if layout.name == "breast_density_classification")
    for module in [m for m in sys.modules if m == "scripts" or m.startswith("scripts.")]:
        monkeypatch.delitem(sys.modules, module)
    bundle = Bundle(layout, tmp_path)
    monkeypatch.chdir(bundle.root)
    sys.path.insert(0, "")
    bundle.write_weights()
    few = {"saliency_method": "rise", "saliency_num_masks": 12, "saliency_grid_size": 4, "saliency_mask_batch_size": 4}
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
    worker = changed(recipe, device=chosen["device"])()
    assert next(worker.evaluator.network.parameters()).device == local_device()


def test_errors_of_a_worker(cohort: Path) -> None:
    recipe = drive(**settings(cohort, "out")).recipe
    with pytest.raises(RuntimeError, match=r"'fnord' never called `saliency_engine`"):
        changed(recipe, "fnord")()
    with pytest.raises(RuntimeError) as caught:
        changed(recipe, checkpoint="nowhere.pt")()
    assert "nowhere.pt does not exist" in str(root_cause(caught.value))
    with pytest.raises(RuntimeError, match=r"ended its run before anything could be explained: enough"):
        changed(recipe, run=["$(_ for _ in ()).throw(SystemExit('enough'))"])()
