"""The command that runs a bundle, and the folder that it writes to, from the environment variables of
``bundle/slurm/explain.sbatch`` (``python -m monai_saliency command``).
"""

from __future__ import annotations

import getpass
import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monai_saliency.bundle.chosen_method import AUTO
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.overlay import Overlay
from monai_saliency.methods.settings import all_settings, find_method
from monai_saliency.transforms.writers import writer_settings

_PAIR = re.compile(r"[A-Za-z_]\w*=")

# Ids that are also environment variables of the job script, in capitals, besides the settings of methods.
HOW = (
    "fill",
    "fill_unit",
    "classes",
    "activation",
    "scale",
    "against",
    "mask_batch_size",
    "amp",
    "channels_last",
    "compile",
    "network_id",
)
WHAT = (
    "dataset_dir",
    "section",
    "checkpoint",
    "pixdim",
    "spatial_dims",
    "spatial_size",
    "channels",
    "batch_size",
)
# Those that change no map, and so do not name the folder.
MACHINERY = [
    "cache",
    "cache_dir",
    "num_workers",
    "processes",
    "device",
    "keep_memory",
    "standard_error",
    "trust",
    "trust_steps",
    "strict",
    "store_dir",
    "debug",
]
MACHINERY += writer_settings()


def from_environment(environment: Mapping[str, str], words: Sequence[str] = ()) -> list[str]:
    """The command of the job script.

    Args:
        environment: the variables of the script's head, such as ``METHOD``, ``OUTPUT_DIR`` and ``RUN_ID``.
        words: flags of the bundle behind the script's name.

    Raises:
        ValueError, FileNotFoundError: when a word, the method or a config file is wrong.
    """
    if words and not words[0].startswith("--"):
        raise ValueError(f"expected --id value behind the script, got {words[0]}")
    root = environment.get("BUNDLE_ROOT") or "."
    run_id = environment.get("RUN_ID") or "run"
    explains = run_id == "explain"
    files = _config_files(environment, root)
    files += [str(overlay_path(name)) for name in (["explain", "slurm"] if explains else ["slurm"])]
    values = _given(environment, explains)
    output = environment.get("OUTPUT_DIR")
    sweep = environment.get("SWEEP_DIR") or f"{root}/sweep"
    folder = output or f"{sweep}/{_name_of_run(values, words)}"
    values["saliency_dir" if explains else "output_dir"] = folder
    if environment.get("SPLIT"):
        values["saliency_split"] = environment["SPLIT"]
    cache = values.get("cache") or "disk"
    if not values.get("cache_dir") and cache == "lmdb":
        values["cache_dir"] = _scratch(environment)
    elif not values.get("cache_dir") and cache == "disk" and not output and not explains:
        values["cache_dir"] = f"{sweep}/cache"  # scans are preprocessed once for all of a sweep
    command = [environment.get("PYTHON") or "python", "-m", "monai.bundle", "run", run_id]
    command += ["--bundle_root", root, "--config_file", repr(files)]
    command += [f"--{id}={value}" for id, value in values.items()]
    return command + list(words)


def _name_of_run(values: Mapping[str, str], words: Sequence[str]) -> str:
    """The name of a run's folder, by the variables and flags that decide its maps."""
    settings = {}
    for id, value in {**values, **_flags(words)}.items():
        name = id.removeprefix("saliency_")
        if name not in MACHINERY:
            settings[name] = value
    return folder_name(settings)


def _config_files(environment: Mapping[str, str], root: str) -> list[str]:
    """The bundle's own config files."""
    named = [file for file in environment.get("CONFIG_FILES", "").split(":") if file]
    files = named or [f"{root}/configs/inference.yaml"]
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"the config file {file} does not exist: set BUNDLE_ROOT or CONFIG_FILES")
    return files


def _given(environment: Mapping[str, str], explains: bool) -> dict[str, str]:
    """The values of ids that are variables, by id. The overlay ``explain`` has ids that begin with ``saliency_``."""
    method = environment.get("METHOD", AUTO)
    if method != AUTO and "." not in method:  # a method of one's own is found where the bundle runs
        find_method(method)
    of_overlay = [*all_settings(), *Overlay.ids()] if explains else []
    values = {}
    for name in ["method", *all_settings(), *HOW, *WHAT, *MACHINERY]:
        value = environment.get(name.upper())
        if value is not None:
            values[f"saliency_{name}" if name in of_overlay else name] = value
    return values


def _flags(words: Sequence[str]) -> dict[str, str]:
    """The ids that words of a command line set, with their values."""
    flags: dict[str, str] = {}
    id = ""
    for word in words:
        if word.startswith("--"):
            id, _, flags[id] = word.removeprefix("--").partition("=")
        else:
            flags[id] += word
    return flags


def _scratch(environment: Mapping[str, str]) -> str:
    """The folder for an LMDB database, below the job's or user's own: it must not lie on a network file system."""
    folder = environment.get("SLURM_TMPDIR") or environment.get("TMPDIR") or tempfile.gettempdir()
    return str(Path(folder) / f"monai_saliency-{getpass.getuser()}")


def folder_name(settings: Mapping[str, Any]) -> str:
    """The name of a run's output folder: ``method=rise,num_masks=4000``; ``default`` without settings."""
    pairs = ",".join(f"{id}={value}" for id, value in settings.items())
    name = (pairs.replace(", ", ",") or "default").encode()
    folder = re.sub(rb"[^][A-Za-z0-9_.,=+-]", b"-", name)[:150]
    if folder != name:
        folder += b"-" + hashlib.sha256(name + b"\n").hexdigest()[:8].encode()
    return folder.decode()


def settings_of(folder: str) -> dict[str, str]:
    """The settings that name a folder, by id, in their order; none for a folder with another kind of name."""
    settings: dict[str, str] = {}
    if _PAIR.match(folder):
        # A value may have commas of its own.
        for pair in re.split(rf",(?={_PAIR.pattern})", folder):
            id, _, settings[id] = pair.partition("=")
    return settings
