"""The command that runs a bundle, and the folder that it writes to: for ``bundle/slurm/explain.sbatch``, by environment
variables (``python -m monai_saliency command``), and for :func:`~monai_saliency.bundle.submit.submit_sweep`.
"""

from __future__ import annotations

import getpass
import hashlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monai.bundle import ConfigParser

from monai_saliency.bundle.chosen_method import AUTO, all_settings, find_method, own_settings
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.bundle.overlay import Overlay
from monai_saliency.transforms.writers import writer_settings

__all__ = ["HOW", "MACHINERY", "WHAT", "BundleRun", "folder_name", "from_environment", "scratch", "settings_of"]

_PAIR = re.compile(r"[A-Za-z_]\w*=")

# Ids that are also environment variables of the job script, in capitals, besides the settings of methods.
HOW = ("fill", "fill_unit", "classes", "activation", "mask_batch_size", "amp", "channels_last", "compile", "network_id")
WHAT = ("dataset_dir", "section", "checkpoint", "pixdim", "spatial_dims", "spatial_size", "channels", "batch_size")
# Those that change no map, and so do not name the folder.
MACHINERY = (
    *("cache", "cache_dir", "cache_checksum", "num_workers", "processes", "device", "keep_memory"),
    *("standard_error", "trust", "trust_steps", "strict", "store_dir"),
    *writer_settings(),
)


@dataclass(frozen=True)
class BundleRun:
    """A bundle that is run with the overlay ``slurm``."""

    bundle_root: Path
    config_files: Sequence[Path] = ()
    run_id: str = "run"
    sweep_dir: Path | None = None

    def __post_init__(self) -> None:
        for file in self.own_files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"there is no config file {file}: set `bundle_root` or `config_file` (BUNDLE_ROOT or CONFIG_FILES "
                    "for the job script)"
                )

    @property
    def explains(self) -> bool:
        """Whether the overlay ``explain`` is run, whose ids begin with ``saliency_``."""
        return self.run_id == "explain"

    @property
    def output_id(self) -> str:
        """The id of the output folder."""
        return "saliency_dir" if self.explains else "output_dir"

    @property
    def own_files(self) -> list[Path]:
        """The bundle's own config files."""
        return list(self.config_files) or [self.bundle_root / "configs" / "inference.yaml"]

    @property
    def sweep(self) -> Path:
        """The folder of the sweep."""
        return self.bundle_root / "sweep" if self.sweep_dir is None else self.sweep_dir

    def id(self, name: str) -> str:
        """The id of a setting."""
        return f"saliency_{name}" if self.explains and name in {*all_settings(), *Overlay.ids()} else name

    def folder(self, settings: Mapping[str, Any]) -> Path:
        """The output folder of some settings, which are ids with their values."""
        return self.sweep / folder_name(
            {id.removeprefix("saliency_" * self.explains): value for id, value in settings.items()}
        )

    def command(
        self,
        settings: Mapping[str, Any],
        common: Mapping[str, Any],
        output: str | Path | None = None,
        split: str | None = None,
        words: Sequence[str] = (),
        python: str = "python",
    ) -> list[str]:
        """The words of the command."""
        named = self.folder({**settings, **_flags(words)})
        arguments = {**settings, self.output_id: output or named}
        arguments |= {"saliency_split": split} if split else {}
        arguments |= common
        if not output and not self.explains and (arguments.get("cache") or "disk") == "disk":
            # Scans are preprocessed once for all of a sweep.
            arguments["cache_dir"] = arguments.get("cache_dir") or self.sweep / "cache"
        overlays = [overlay_path("explain")] * self.explains + [overlay_path("slurm")]
        files = repr([str(file) for file in [*self.own_files, *overlays]])
        command = [python, "-m", "monai.bundle", "run", self.run_id, "--bundle_root", str(self.bundle_root)]
        return [*command, "--config_file", files, *(f"--{id}={value}" for id, value in arguments.items()), *words]


def from_environment(environment: Mapping[str, str], words: Sequence[str] = ()) -> list[str]:
    """The command of the job script, from its environment."""
    if words and not words[0].startswith("--"):
        raise ValueError(f"expected --id value behind the script, got {words[0]}")

    def path(name: str) -> Path | None:
        return Path(environment[name]) if environment.get(name) else None

    root = path("BUNDLE_ROOT") or Path()
    files = [Path(file) for file in environment.get("CONFIG_FILES", "").split(":") if file]
    run = BundleRun(root, files, environment.get("RUN_ID") or "run", path("SWEEP_DIR"))

    def given(names: Sequence[str]) -> dict[str, str]:
        return {run.id(name): environment[name.upper()] for name in names if name.upper() in environment}

    common = given(MACHINERY)
    if common.get("cache") == "lmdb" and not common.get("cache_dir"):
        common["cache_dir"] = scratch(environment)
    return run.command(
        given(_settings(run, environment, words)),
        common,
        environment.get("OUTPUT_DIR"),
        environment.get("SPLIT"),
        words,
        environment.get("PYTHON") or "python",
    )


def _settings(run: BundleRun, environment: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """The names of all settings that name a folder, the method's own first."""
    config = ConfigParser.load_config_files([str(file) for file in run.own_files])
    # MONAI finds modules of the bundle itself before a run.
    folder = run.own_files[0].absolute().parent
    sys.path.append(str(folder.parent if folder.name == "configs" else folder))
    given = {run.id("method"): environment["METHOD"]} if "METHOD" in environment else {}
    name = {**config, **given, **_flags(words)}.get(run.id("method"))
    own = {}
    if isinstance(name, str) and name != AUTO and not name.startswith(("$", "@", "%")):
        own = own_settings(find_method(name, run.id("method")))
    return list(dict.fromkeys(["method", *own, *all_settings(), *HOW, *WHAT]))


def _flags(words: Sequence[str]) -> dict[str, str]:
    """The ids that words of a command line set, with their values."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            id, _, found[id] = word.removeprefix("--").partition("=")
        else:
            found[id] += word
    return found


def scratch(environment: Mapping[str, str]) -> str:
    """The folder for an LMDB database, which must not lie on a network file system: below the job's or user's own."""
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
