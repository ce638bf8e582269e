"""The command that runs a bundle, and the folder that it writes to, from the environment variables of
``bundle/slurm/explain.sbatch`` (``python -m monai_saliency command``).
"""

from __future__ import annotations

import getpass
import hashlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser

from monai_saliency.bundle.chosen_method import AUTO, all_settings, find_method, own_settings
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.overlay import Overlay
from monai_saliency.transforms.writers import writer_settings

__all__ = ["HOW", "MACHINERY", "WHAT", "folder_name", "from_environment", "settings_of"]

_PAIR = re.compile(r"[A-Za-z_]\w*=")

# Ids that are also environment variables of the job script, in capitals, besides the settings of methods.
HOW = (
    *("fill", "fill_unit", "classes", "activation", "scale", "against"),
    *("mask_batch_size", "amp", "channels_last", "compile", "network_id"),
)
WHAT = (*("dataset_dir", "section", "checkpoint", "pixdim", "spatial_dims", "spatial_size", "channels", "batch_size"),)
# Those that change no map, and so do not name the folder.
MACHINERY = (
    *("cache", "cache_dir", "cache_checksum", "num_workers", "processes", "device", "keep_memory"),
    *("standard_error", "trust", "trust_steps", "strict", "store_dir", "debug"),
    *writer_settings(),
)


def from_environment(environment: Mapping[str, str], words: Sequence[str] = ()) -> list[str]:
    """The command of the job script, from its environment."""
    if words and not words[0].startswith("--"):
        raise ValueError(f"expected --id value behind the script, got {words[0]}")
    root = environment.get("BUNDLE_ROOT") or "."
    files = [file for file in environment.get("CONFIG_FILES", "").split(":") if file]
    files = files or [f"{root}/configs/inference.yaml"]
    if missing := [file for file in files if not Path(file).is_file()]:
        raise FileNotFoundError(f"the config file {missing[0]} does not exist: set BUNDLE_ROOT or CONFIG_FILES")
    run_id = environment.get("RUN_ID") or "run"
    explains = run_id == "explain"
    # The overlay's ids begin with saliency_.
    of_overlay = {*all_settings(), *Overlay.ids()} if explains else set()
    given = [name for name in _names(files, environment, words) if name.upper() in environment]
    values = {f"saliency_{name}" if name in of_overlay else name: environment[name.upper()] for name in given}

    settings = {id.removeprefix("saliency_" * explains): value for id, value in {**values, **_flags(words)}.items()}
    name = folder_name({id: value for id, value in settings.items() if id not in MACHINERY})
    sweep = environment.get("SWEEP_DIR") or f"{root}/sweep"
    output = environment.get("OUTPUT_DIR")
    values["saliency_dir" if explains else "output_dir"] = output or f"{sweep}/{name}"
    if environment.get("SPLIT"):
        values["saliency_split"] = environment["SPLIT"]
    if not values.get("cache_dir"):
        cache = values.get("cache") or "disk"
        # Scans are preprocessed once for all of a sweep. LMDB must not lie on a network file system.
        values |= {"cache_dir": f"{sweep}/cache"} if cache == "disk" and not output and not explains else {}
        values |= {"cache_dir": _scratch(environment)} if cache == "lmdb" else {}
    files += [str(overlay_path(name)) for name in ["explain"] * explains + ["slurm"]]
    command = [environment.get("PYTHON") or "python", "-m", "monai.bundle", "run", run_id, "--bundle_root", root]
    return [*command, "--config_file", repr(files), *(f"--{id}={value}" for id, value in values.items()), *words]


def _names(files: Sequence[str], environment: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """The ids that may be set, first the own settings of the method that is chosen."""
    config = ConfigParser.load_config_files([*files])
    # MONAI finds modules of the bundle itself before a run.
    folder = Path(files[0]).absolute().parent
    sys.path.append(str(folder.parent if folder.name == "configs" else folder))
    flags = _flags(words)
    id = "saliency_method" if environment.get("RUN_ID") == "explain" else "method"
    chosen = [flags.get(id), environment.get("METHOD"), config.get(id)]
    name = next((each for each in chosen if each), AUTO)
    own = [] if name == AUTO or name.startswith(("$", "@", "%")) else own_settings(find_method(name))
    return list(dict.fromkeys(["method", *own, *all_settings(), *HOW, *WHAT, *MACHINERY]))


def _flags(words: Sequence[str]) -> dict[str, str]:
    """The ids that words of a command line set, with their values."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            id, _, found[id] = word.removeprefix("--").partition("=")
        else:
            found[id] += word
    return found


def _scratch(environment: Mapping[str, str]) -> str:
    """The folder for an LMDB database, below the job's or user's own."""
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
    # A value may have commas of its own.
    pairs = [pair.partition("=") for pair in re.split(rf",(?={_PAIR.pattern})", folder)]
    return {id: value for id, equals, value in pairs if equals} if _PAIR.match(folder) else {}
