"""A cohort on a pool of Ray actors: the plain run's maps, whoever explains what, and whoever is lost on the way."""

import importlib
import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import monai.bundle
import pytest
from helpers.files import cases, rows_of, voxels
from helpers.marker import auto, check_auto, write_cohort
from helpers.own_bundle import BATCH, BATCHES, forwards, launch, settings
from helpers.scans import write_scans
from monai.utils import OptionalImportError

from monai_saliency.bundle.configs import overlay_path
from monai_saliency.errors import root_cause
from monai_saliency.sharding import units

ray = pytest.importorskip("ray", reason='needs pip install "monai-saliency[ray]"')
OVERLAY = str(overlay_path("ray"))


def shared(tmp_path: Path, out: str, seconds: float = 0.0, **overrides: object) -> dict[str, object]:
    """Settings of a run on Ray."""
    fixed = settings(tmp_path, out, seconds, **overrides)
    return fixed | {"config_file": [fixed["config_file"], OVERLAY]}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("workers", "split"), [(2, "cases"), (3, "masks")])
def test_maps_of_the_plain_run(workers: int, split: str, tmp_path: Path, capfd: Any) -> None:
    """To the bit, however uneven the shares; and what cannot be explained is listed as in the plain run."""
    count, bad = 5, split == "cases"
    write_scans(tmp_path, count)
    if bad:
        (tmp_path / "cohort" / "broken.nii.gz").write_bytes(b"no scan")
    said = []
    on_ray = shared(tmp_path, "out", saliency_max_workers=workers, saliency_split=split)
    ends = pytest.raises(SystemExit, match=r"1 case without a map, .*; the first is case broken")
    for run in (settings(tmp_path, "plain"), on_ray):
        with ends if bad else nullcontext():
            monai.bundle.run(**run)
        said.append(capfd.readouterr())
    assert len(voxels(tmp_path / "plain")) == count
    assert voxels(tmp_path / "out") == voxels(tmp_path / "plain")
    assert cases(tmp_path / "out") == cases(tmp_path / "plain")
    failed = [tmp_path / out / "failures.csv" for out in ("out", "plain")]
    assert [path.exists() for path in failed] == [bad, bad]
    if bad:
        assert rows_of(failed[0]) == rows_of(failed[1])
    # The cohort's figures, told once; the driver's own network has met nothing.
    (figures,) = [line for line in said[1].out.splitlines() if line.startswith("cohort: ")]
    assert figures.startswith(f"cohort: cases {count}, failures {int(bad)}, forwards ")
    # The batch with the unperturbed image is in each part, and no other one is run twice.
    parts = sum(unit.part.count == workers for unit in units(count, workers, split)) if split == "masks" else count
    assert forwards(tmp_path, "out") == count * BATCHES + parts - count


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_method_auto(tmp_path: Path) -> None:
    given = auto(write_cohort(tmp_path), "out")
    given["config_file"] = [given["config_file"], OVERLAY]
    monai.bundle.run(**given, saliency_max_workers=2)
    check_auto(tmp_path, "out")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_actor_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """Every case is done once; at most two batches are lost besides those that vouch for stored scores."""
    write_scans(tmp_path, 5)
    monai.bundle.run(**settings(tmp_path, "plain", fill=0.0))
    killed = []

    def kill() -> None:
        """An actor that is in the middle of its second case."""
        locks: Counter[str] = Counter()
        seen: set[Path] = set()
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            for path in (tmp_path / "out" / "scores").glob("*/.lock"):
                match = re.match(r"process (\d+) on ", path.read_text())
                if match and path not in seen:
                    seen.add(path)
                    locks[match[1]] += 1
                    if locks[match[1]] == 2:
                        time.sleep(0.3)
                        os.kill(int(match[1]), signal.SIGKILL)
                        killed.append(match[1])
                        return
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    monai.bundle.run(**shared(tmp_path, "out", 0.1, saliency_max_workers=2, fill=0.0))
    killer.join()
    assert len(killed) == 1
    assert voxels(tmp_path / "out") == voxels(tmp_path / "plain")
    assert cases(tmp_path / "out") == cases(tmp_path / "plain")
    assert not list((tmp_path / "out").rglob(".tmp*"))
    # Two batches are lost, and at most two more visits to a case have a batch that vouches for its scores.
    sizes = (tmp_path / "out.log").read_text().split()
    assert sizes.count(str(BATCH)) <= 5 * BATCHES + 2 + 2


@pytest.mark.slow
@pytest.mark.parametrize("sign", [None, pytest.param("SIGTERM", marks=pytest.mark.timing)])
def test_a_ray_of_its_own_ends_with_the_run(sign: str | None, tmp_path: Path) -> None:
    """Also when it is stopped, with the plain run's exit code and last line."""
    write_scans(tmp_path, 4)
    slow = 0.5 if sign else 0.0  # seconds a batch: two cases take four seconds, and so do the other two
    process = launch(
        tmp_path, "out", slow, config_file=shared(tmp_path, "out")["config_file"], saliency_num_cpus=0.5,
        saliency_max_workers=2 if sign else 1,
    )  # fmt: skip
    if sign:
        while not list((tmp_path / "out").glob("*.nii.gz")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        time.sleep(2)  # the driver hears of it
        process.send_signal(getattr(signal, sign))
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == (143 if sign else 0), errors
    assert not sign or re.search(r"stopped by SIGTERM\. What was written is whole", errors)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_an_error_in_an_actor_reaches_the_driver(tmp_path: Path) -> None:
    """Here one that the driver itself does not meet."""
    write_scans(tmp_path, 3)
    only_there = "$'nowhere.pt' if @saliency_engine.speaks is False else 'none'"
    with pytest.raises(RuntimeError) as caught:
        monai.bundle.run(**shared(tmp_path, "out", saliency_max_workers=1, checkpoint=only_there))
    assert "an actor has failed: FileNotFoundError: checkpoint nowhere.pt does not" in str(root_cause(caught.value))
    assert voxels(tmp_path / "out") == {}


def test_without_ray_there_is_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name)

    found = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    write_scans(tmp_path, 1)
    with pytest.raises(RuntimeError) as caught:
        monai.bundle.run(**shared(tmp_path, "out"))
    cause = root_cause(caught.value)
    assert isinstance(cause, OptionalImportError)
    assert 'ray is not installed: pip install "monai-saliency[ray]"' in str(cause)
