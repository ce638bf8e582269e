"""Our own bundle, run with few masks and a small network."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.bundle

from helpers import commands
from helpers.files import maps, rows_of
from helpers.paths import BUNDLE, TESTS
from helpers.scans import write_scans
from monai_saliency.bundle.configs import overlay_path

SMALL_NET = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
SMALL_NET |= {"init_features": 4, "growth_rate": 2, "block_config": [1, 1], "bn_size": 1}


def run(dataset_dir: Path, output_dir: Path, checkpoint: Path | str, **overrides: object) -> list[dict[str, str]]:
    """Run the bundle with a small network and few masks; the summary's rows."""
    settings = {"method": "sliding_window", "window_size": 8, "stride": 4, "spatial_size": [16, 16, 16]}
    settings |= {"picture": False, "report": False}
    settings |= {"network_def": {"_target_": "DenseNet", **SMALL_NET}, "pixdim": [2.5, 2.5, 2.5], "device": "cpu"}
    settings |= {"dataset_dir": str(dataset_dir), "output_dir": str(output_dir), "checkpoint": str(checkpoint)}
    settings |= {"bundle_root": str(BUNDLE), "config_file": str(BUNDLE / "configs" / "inference.yaml")}
    monai.bundle.run(**settings | overrides)
    return rows_of(output_dir / "summary.csv")


NUM_MASKS, BATCH = 30, 4


BATCHES = -(-(NUM_MASKS + 1) // BATCH)


def settings(tmp_path: Path, out: str, seconds: float = 0.0, **overrides: object) -> dict[str, object]:
    network = {
        "_target_": "helpers.counting_network.CountingNetwork",
        "log": str(tmp_path / f"{out}.log"),
        "seconds": seconds,
    }
    fixed: dict[str, object] = {"bundle_root": str(BUNDLE), "config_file": str(BUNDLE / "configs" / "inference.yaml")}
    fixed |= {"dataset_dir": str(tmp_path / "cohort"), "output_dir": str(tmp_path / out), "network_def": network}
    fixed |= {"checkpoint": "none", "device": "cpu", "spatial_size": [12, 12, 12], "picture": False, "report": False}
    # One file a case, which tests of runs count; tests/bundle/test_saved_standard_errors.py has the second.
    fixed |= {"standard_error": False}
    fixed |= {"method": "rise", "num_masks": NUM_MASKS, "grid_size": 3, "mask_batch_size": BATCH, "num_workers": 0}
    return fixed | overrides


def forwards(tmp_path: Path, out: str) -> int:
    """Batches so far that hold perturbed images."""
    log = tmp_path / f"{out}.log"
    return log.read_text().split().count(str(BATCH)) if log.exists() else 0


def launch(tmp_path: Path, out: str, seconds: float = 0.0, **overrides: object) -> subprocess.Popen[str]:
    """Run the bundle from the command line, in a session of its own.

    Args:
        tmp_path: folder of the cohort and of what is written.
        out: name of the output folder there.
        seconds: what each forward of the network takes more.
        **overrides: other ids of the config.
    """
    command = bundle_command(settings(tmp_path, out, seconds, **overrides))
    return commands.start(command, cwd=tmp_path, env=environment_of(tmp_path))


def bundle_command(given: dict[str, object]) -> list[str]:
    """What stands behind ``python`` to run the bundle with these settings."""
    command = ["-m", "monai.bundle", "run"]
    for name, value in given.items():
        command += [f"--{name}", value if isinstance(value, str) else repr(value)]
    return command


def run_broken_cohort(
    folder: Path, overlay: str, run: Callable[[list[str]], subprocess.CompletedProcess[str]], **overrides: object
) -> None:
    """The command that users type, on a cohort with a broken scan: two processes have one end, reported once."""
    broken = write_scans(folder, 3) / "cohort" / "s1.nii.gz"  # of the second process
    broken.write_bytes(broken.read_bytes()[:100])
    asked = settings(folder, "out", **overrides)
    del asked["device"]
    asked["config_file"] = repr([asked["config_file"], str(overlay_path(overlay))])
    done = run(bundle_command(asked))
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("cohort: cases 2, failures 1,") == 1, done.stdout
    assert done.stderr.count("error: 1 case without a map") == 1, done.stderr
    assert len(maps(folder / "out")) == 2
    assert forwards(folder, "out") == 2 * BATCHES


def environment_of(tmp_path: Path) -> dict[str, str]:
    """The environment variables of a command that knows our modules, and leaves nothing in the user's home."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(tmp_path / "matplotlib")}


def rank(number: int, world_size: int, split: str = "auto") -> dict[str, Any]:
    engine = {"_target_": "monai_saliency.distributed.RankEngine", "rank": number, "world_size": world_size}
    return {"saliency_engine": engine | {"split": split}}


def explain_cohorts(folder: Path, engine: dict[str, Any]) -> None:
    """Explain by an engine, with a handler that waits for all processes in each run of its evaluator."""
    gathers = {"_target_": "monai.handlers.ClassificationSaver", "output_dir": str(folder / "classes")}
    gathers |= {"batch_transform": "$lambda batch: [{'filename_or_obj': 'scan'}]"}
    gathers |= {"output_transform": "$lambda output: [torch.zeros(2)]"}
    for out, cohort, split in (
        ("by_cases", "cohort", "cases"),
        ("by_masks", "cohort", "masks"),
        ("of_one", "one", "auto"),
    ):
        shared = settings(folder, out, dataset_dir=str(folder / cohort), saliency_engine=engine | {"split": split})
        monai.bundle.run(**shared, **{"evaluator::val_handlers": ["@saliency_handler", gathers]})


def check_cohorts(folder: Path, count: int) -> None:
    """What :func:`explain_cohorts` wrote by so many processes is what one process writes, with each batch once."""
    monai.bundle.run(**settings(folder, "plain"))
    plain = maps(folder / "plain")
    assert maps(folder / "by_cases") == maps(folder / "by_masks") == plain
    assert maps(folder / "of_one") == {name: plain[name] for name in plain if name.startswith("s0")}
    assert forwards(folder, "by_cases") == 5 * BATCHES
    assert forwards(folder, "by_masks") == 5 * (BATCHES + count - 1)
