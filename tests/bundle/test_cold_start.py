"""From the README alone: the first command that somebody with a bundle and a scan tries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from helpers.files import rows_of
from helpers.layouts import Bundle
from helpers.paths import ROOT
from helpers.scans import AFFINES, volume


def clone(folder: Path) -> Path:
    """What a fresh clone of the repository holds, uncommitted changes included."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"needs a git checkout: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # it may be deleted and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def first_command(readme: str, heading: str) -> str:
    """The first command below a heading, as a shell takes it."""
    section = readme.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert found, f"no command below {heading!r}"
    return found[1]


@pytest.mark.slow
def test_the_first_command_gives_a_map_and_its_price_before(make: Callable[[str], Bundle], tmp_path: Path) -> None:
    """On an oblique scan of an odd shape, which is no multiple of a patch."""
    repository = clone(tmp_path / "clone")
    bundle = make("spleen_ct_segmentation")
    shutil.rmtree(tmp_path / "data")
    scan = volume(tmp_path / "data" / "imagesTs" / "patient 7.nii.gz", (23, 17, 11), AFFINES[1], 3)
    command = first_command((repository / "README.md").read_text(), "Explain a bundle that you have")
    assert command.count("/data/Task09_Spleen") == 1
    command = command.replace("/data/Task09_Spleen", str(tmp_path / "data"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    saved = bundle.root / "eval" / "saliency"
    image, saliency = nib.load(scan), nib.load(saved / "patient 7_saliency.nii.gz")
    assert saliency.shape == image.shape
    np.testing.assert_allclose(saliency.affine, image.affine, atol=1e-5)
    assert np.ptp(saliency.get_fdata()) > 0
    (row,) = rows_of(saved / "summary.csv")
    price = f"patient 7: at least {row['forwards']} patch forwards"
    number = float(row["predictions"])
    predictions = f"that is {number:.{0 if number >= 10 else 1}f} predictions"  # as many digits as are told
    assert re.search(rf"{price}[^\r\n]*; {predictions}", done.stderr)
    bar = re.search(r"patient 7: +\d+%", done.stderr)
    assert bar
    assert done.stderr.index(price) < bar.start()
    assert re.search(r"patient 7: it takes about \d+ (second|minute)", done.stderr)
