"""The package on systems without what only POSIX systems have: Windows is one of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import monai.bundle
from helpers import fork_server
from helpers.own_bundle import settings
from helpers.scans import LPS, write_scan

CODE = """
import importlib, json, os, pkgutil, signal, sys
# Other packages, and Python itself, look at the system's name for what there is, so they are imported before.
import ignite, monai.bundle, nibabel, random, torch
for name in [name for name in sys.modules if name.partition(".")[0] == "monai_saliency"]:
    del sys.modules[name]
sys.modules["fcntl"] = None
del signal.pthread_sigmask, os.register_at_fork, os.getuid

import monai_saliency
rooms = [room.name for room in pkgutil.iter_modules(monai_saliency.__path__, "monai_saliency.")]
assert len(rooms) > 15
for room in rooms:
    importlib.import_module(room)
for settings in json.loads(sys.argv[1]):
    monai.bundle.run(**settings)
"""


def test_import_of_all_rooms_and_a_run_in_one_process(tmp_path: Path) -> None:
    """With a thread that loads and with a process that does: the maps are those of this system. One warning."""
    for seed in range(2):
        write_scan(tmp_path / "cohort" / f"s{seed}.nii.gz", (13, 12, 14), LPS, seed=seed)
    runs = {"threads": {"num_workers": 1}, "processes": {"num_workers": 1, "processes": True}}
    elsewhere = json.dumps([settings(tmp_path, out, **loading) for out, loading in runs.items()])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = fork_server.run(["-c", CODE, elsewhere], env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("this file system has no locks") == 1
    monai.bundle.run(**settings(tmp_path, "here"))
    names = ["s0_saliency.nii.gz", "s1_saliency.nii.gz"]
    for out in ("here", *runs):
        assert sorted(path.name for path in (tmp_path / out).glob("*.nii.gz")) == names
        for name in names:
            assert (tmp_path / out / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
