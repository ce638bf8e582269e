"""The runs that ``unchanged.py`` compares. It starts this script, once for each side, with that side's package.

    PYTHONPATH=CODE python tests/benchmarks/unchanged_runs.py PART --code CODE --out FOLDER --inputs FOLDER

Nothing here depends on where a module lies: a run uses config ids, public names and the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import runpy
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import monai.bundle
import nibabel as nib
import numpy as np
import torch
from monai.bundle import ConfigParser
from PIL import Image

OBLIQUE = np.array([[1.9, 0.3, -0.2, -20.0], [-0.25, 2.1, 0.4, 10.0], [0.2, -0.35, 2.6, 5.0], [0, 0, 0, 1]])
LPS = np.diag([-1.5, -1.5, 3.0, 1.0])


class Side:
    """The code of one revision, and the folder that its runs write to.

    Args:
        code: the revision's checkout.
        out: the folder.
        inputs: where bundles, weights and scans go.
        renames: other names of config ids, by the name that is used here.
    """

    def __init__(self, code: Path, out: Path, inputs: Path, renames: Mapping[str, Sequence[str]]) -> None:
        self.code = code
        self.out = out
        self.inputs = inputs
        self.renames = renames
        self.bundle = code / "bundle"

    def overlay(self, name: str) -> str:
        """The path of an overlay, as ``python -m monai_saliency overlay NAME`` prints it."""
        before, printed = sys.argv, io.StringIO()
        sys.argv = ["monai_saliency", "overlay", name]
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_module("monai_saliency", run_name="__main__")
        finally:
            sys.argv = before
        return printed.getvalue().strip()

    def layout(self, name: str) -> Path:
        """The folder of a bundle that the tests have."""
        return next((self.code / "tests").rglob(f"bundles/{name}"))

    def run(
        self,
        name: str,
        files: Sequence[str],
        maps: int | None,
        ends: str = "done",
        run_id: str = "run",
        **settings: Any,
    ) -> None:
        """Run a bundle, and check that it ends as expected, so that two empty runs are not taken for equal ones.

        Args:
            name: the run's folder below ``out``; the settings must name it too.
            files: the config files.
            maps: how many maps the folder must hold afterwards; None where other processes must add theirs.
            ends: ``"done"``, or the root cause's class where the first process must raise.
            run_id: the config's id to run.
            settings: config ids and their values.

        Raises:
            RuntimeError: when the run ends in another way, or leaves another number of maps.
        """
        settings = self._spelled(files, settings)
        _seed()
        start = time.perf_counter()
        try:
            monai.bundle.run(run_id=run_id, config_file=list(files), **settings)
            ended = "done"
        except (Exception, SystemExit) as raised:
            error: BaseException = raised
            traceback.print_exc()
            while error.__cause__ is not None:
                error = error.__cause__
            ended = type(error).__name__
        print(f"unchanged: {name} took {time.perf_counter() - start:.1f} s, {ended}", flush=True)
        first = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
        # Only the first process reports cases that failed.
        if ended not in ([ends] if first else ["done", ends]):
            raise RuntimeError(f"{name} must end with {ends!r}, got {ended!r}")
        if not first or maps is None:
            return
        folder = self.out / name
        found = len(list(folder.rglob("*_saliency.nii.gz")))
        if found != maps:
            raise RuntimeError(f"{name} must leave {maps} maps, got {found}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ended.txt").write_text(ended)

    def _spelled(self, files: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings under the names that this side's config files know."""
        known = {*ConfigParser.load_config_files(list(files)), *_settings_of_methods()}
        text = "".join(Path(file).read_text(encoding="utf-8") for file in files)
        spelled = {}
        for name, value in settings.items():
            names = [name, *self.renames.get(name, ())]
            # Bundles also refer to ids that only the command line gives.
            found = [each for each in names if each in known or f"@{each}" in text]
            if not found:
                raise ValueError(f"no id {' or '.join(names)} in {', '.join(files)}: add its new name to RENAMES")
            spelled[found[0]] = value
        return spelled


def _settings_of_methods() -> set[str]:
    """The ids that no config lists, since they are read from the methods' signatures; none in earlier revisions."""
    with contextlib.suppress(ModuleNotFoundError):
        settings = importlib.import_module("monai_saliency.bundle.chosen_method").all_settings()
        return {*settings, *(f"saliency_{name}" for name in settings)}
    return set()


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


# Data -----------------------------------------------------------------------------------------------------------------


def volume(
    path: Path, shape: tuple[int, ...], affine: np.ndarray, seed: int, low: float = -50, high: float = 150
) -> Path:
    """Write a scan of uniform noise."""
    image = nib.Nifti1Image(np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32), affine)
    image.set_sform(affine, code=2)
    image.set_qform(affine, code=1, strip_shears=True)
    image.header.set_xyzt_units("mm", "sec")
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(image, path)
    return path


def photograph(path: Path, width: int, height: int, seed: int) -> Path:
    """Write an RGB image of uniform noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


# The demo -------------------------------------------------------------------------------------------------------------


def demo(side: Side) -> None:
    """Our own bundle on three scans of the demo cohort, with every method."""
    cohort = side.out / "demo" / "cohort"
    _make_cohort()(cohort, 3)
    methods: dict[str, dict[str, Any]] = {
        "sliding_window": {"window_size": 24, "stride": 20},
        "rise": {"method": "rise", "num_masks": 60},
        "supervoxels": {"method": "region_occlusion", "num_supervoxels": 40},
        "channels": {"method": "channel_occlusion"},
    }
    coarse = {"pixdim": [6.0, 6.0, 6.0], "spatial_size": [32, 36, 32]}
    methods |= {
        # The first and the last scan have no lesion, and so no region to hide.
        "labels": coarse | {"method": "region_occlusion", "region_names": {1: "lesion"}},
        "coalitions": coarse | {"method": "region_occlusion", "num_supervoxels": 20, "num_coalitions": 30},
        "mm": coarse | {"window_size": 60, "stride": 40, "window_unit": "mm", "fill": 50, "fill_unit": "scan"},
        "per_channel": coarse | {"method": "rise", "num_masks": 30, "per_channel": True, "classes": "all"},
        "batched": coarse | {"method": "rise", "num_masks": 30, "batch_size": 3, "cache": "memory", "p1": 0.3},
    }
    for name, settings in methods.items():
        ends = {"maps": 1, "ends": "SystemExit"} if name == "labels" else {"maps": 3}
        _own_bundle(side, f"demo/{name}", cohort, **settings, **ends)
    # Once more on the same folder: the stored scores are used.
    _own_bundle(side, "demo/batched", cohort, maps=3, **methods["batched"])


def _make_cohort() -> Callable[..., Any]:
    """The function that makes the demo cohort, which has moved."""
    for name in ("monai_saliency.data.demo", "monai_saliency.demo"):
        with contextlib.suppress(ModuleNotFoundError):
            function: Callable[..., Any] = importlib.import_module(name).make_cohort
            return function
    raise RuntimeError("make_cohort is in none of the modules known here: add its new one")


def _own_bundle(side: Side, name: str, cohort: Path, overlay: str = "", **settings: Any) -> None:
    """Run our own bundle, with an engine's overlay or without."""
    files = [str(side.bundle / "configs" / "inference.yaml"), *([side.overlay(overlay)] if overlay else [])]
    fixed = {"bundle_root": str(side.bundle), "dataset_dir": str(cohort), "output_dir": str(side.out / name)}
    side.run(name, files, **fixed, **settings)


# Overlay layouts ------------------------------------------------------------------------------------------------------


def spleen(bundle: Path, data: Path) -> dict[str, Any]:
    for i, affine in enumerate((OBLIQUE, LPS)):
        volume(data / "imagesTs" / f"spleen_{i}.nii.gz", (20, 17 + i, 9), affine, i)
    return {"dataset_dir": str(data)}


def brats(bundle: Path, data: Path) -> dict[str, Any]:
    modalities = ("t1ce", "t1", "t2", "flair")
    listing = [{"image": [f"Brats18_{i}/Brats18_{i}_{m}.nii.gz" for m in modalities]} for i in range(2)]
    for i, entry in enumerate(listing):
        for j, file in enumerate(entry["image"]):
            volume(data / file, (24, 24, 16), LPS, 10 * i + j, low=0)
    (bundle / "configs" / "datalist.json").write_text(json.dumps({"testing": listing}))
    return {"dataset_dir": str(data)}


def endoscopy(bundle: Path, data: Path) -> dict[str, Any]:
    images = [photograph(data / f"frame_{i}.jpg", 61, 40 + i, i) for i in range(2)]
    (data / "test.json").write_text(json.dumps([{"image": str(path), "label": 0} for path in images]))
    return {"dataset_dir": str(data)}


def breast(bundle: Path, data: Path) -> dict[str, Any]:
    images = [photograph(data / side / "view.png", 50, 37 + i, i) for i, side in enumerate("lr")]
    listing = {"Test": [[str(path), [1, 0, 0, 0]] for path in images]}
    (bundle / "configs" / "sample_image_data.json").write_text(json.dumps(listing))
    return {}


def ventricle(bundle: Path, data: Path) -> dict[str, Any]:
    volume(data / "heart.nii.gz", (24, 24, 3), OBLIQUE, 0)
    return {"dataset_dir": str(data)}


def lung(bundle: Path, data: Path) -> dict[str, Any]:
    for i in range(2):
        volume(data / str(i) / "scan.nii.gz", (32, 24 + 8 * i, 16), LPS, i)
    (bundle / "LUNA16_datasplit").mkdir()
    listing = [{"image": f"{i}/scan.nii.gz", "box": [], "label": []} for i in range(2)]
    (bundle / "LUNA16_datasplit" / "dataset_fold0.json").write_text(json.dumps({"validation": listing}))
    return {"data_file_base_dir": str(data)}


def valve(bundle: Path, data: Path) -> dict[str, Any]:
    volume(data / "cine.nii.gz", (24, 24, 1, 2), LPS, 0)
    return {"dataset_dir": str(data)}


def pathology(bundle: Path, data: Path) -> dict[str, Any]:
    photograph(data / "tile.png", 48, 40, 0)
    return {"dataset_dir": str(data)}


def renamed(bundle: Path, data: Path) -> dict[str, Any]:
    for i, (folder, affine) in enumerate({"a": OBLIQUE, "b": LPS}.items()):
        volume(data / folder / "t1.nii.gz", (14, 11, 8), affine, i)
    return {"dataset_dir": str(data)}


class Layout(NamedTuple):
    """A bundle of ``tests/bundles``.

    Attributes:
        data: writes its data below a folder; gives settings.
        maps: how many images it has.
        methods: what it is explained with beside RISE.
        network: the id of its network.
        output: the id of its output folder.
    """

    data: Callable[[Path, Path], dict[str, Any]]
    maps: int
    methods: Mapping[str, Mapping[str, Any]] = {}
    network: str = "network"
    output: str = "output_dir"


DICE = {"_target_": "monai_saliency.DiceScore", "channel": 1, "activation": "softmax"}
WINDOWS = {"saliency_method": "sliding_window", "saliency_window_size": 8, "saliency_stride": 8}
REGIONS = {"saliency_method": "region_occlusion", "saliency_num_supervoxels": 60}
LAYOUTS = {
    "spleen_ct_segmentation": Layout(
        spleen,
        2,
        {
            "supervoxels": REGIONS,
            "windows": WINDOWS,
            "coalitions": REGIONS | {"saliency_num_coalitions": 20},
            "mm": WINDOWS | {"saliency_window_size": 12, "saliency_stride": None, "saliency_window_unit": "mm"},
            "air": {"saliency_fill": -1000, "saliency_fill_unit": "scan"},
            "black": {"saliency_fill": 0},
            "dice": {"saliency_target": DICE},
            "named": {"saliency_image_key": "image", "saliency_evaluator": "evaluator"},
        },
    ),
    "brats_mri_segmentation": Layout(
        brats,
        2,
        {"channels": {"saliency_method": "channel_occlusion"}, "per_channel": {"saliency_per_channel": True}},
    ),
    "endoscopic_inbody_classification": Layout(endoscopy, 2, {"windows": WINDOWS}),
    "breast_density_classification": Layout(breast, 2),
    "ventricular_short_axis_3label": Layout(ventricle, 1),
    "lung_nodule_ct_detection": Layout(lung, 2, {"windows": WINDOWS}),
    "valve_landmarks": Layout(valve, 1),
    "pathology_nuclei_segmentation_classification": Layout(
        pathology,
        1,
        {
            "types": {
                "saliency_output": "type_prediction",
                "saliency_classes": [1, 4],
                "saliency_method": "sliding_window",
            }
        },
    ),
    "renamed_ids": Layout(renamed, 2, network="model", output="results"),
}
REFUSED = "brain_image_synthesis_latent_diffusion_model"


class LaidOut:
    """A layout with data and random weights below a side's inputs, made by the first process that asks.

    Args:
        side: the side.
        name: the layout's.
    """

    def __init__(self, side: Side, name: str) -> None:
        self.side = side
        self.layout = LAYOUTS[name]
        self.root = side.inputs / "bundles" / name
        stored = side.inputs / "bundles" / f"{name}.json"
        made = stored.exists()
        if not made:
            shutil.copytree(side.layout(name), self.root, ignore=shutil.ignore_patterns("__pycache__"))
        self.config = str(next((self.root / "configs").glob("inference.*")))
        # The bundles' own modules are all called `scripts`.
        for module in [m for m in sys.modules if m == "scripts" or m.startswith(("scripts.", "valve_landmarks"))]:
            del sys.modules[module]
        sys.path[:] = [str(self.root), *(p for p in sys.path if not p.startswith(str(side.inputs)))]
        os.chdir(self.root)
        if not made:
            settings = self.layout.data(self.root, side.inputs / "data" / name)
            self._write_weights(settings)
            stored.write_text(json.dumps(settings))
        self.settings = json.loads(stored.read_text()) | {"bundle_root": str(self.root)}

    def explain(self, name: str, maps: int | None, overlay: str = "", **settings: Any) -> None:
        """Run the bundle with the overlay ``explain``, and with an engine's or without."""
        files = [self.config, self.side.overlay("explain"), *([self.side.overlay(overlay)] if overlay else [])]
        folder = self.side.out / name
        few = {"saliency_num_masks": 12, "saliency_grid_size": 4, "saliency_dir": str(folder / "saliency")}
        asked = self.settings | few | {self.layout.output: str(folder / "own")} | settings
        self.side.run(name, files, maps, run_id="explain", **asked)

    def _write_weights(self, settings: Mapping[str, Any]) -> None:
        _seed()
        parser = ConfigParser()
        parser.read_config(self.config)
        parser.update({**settings, "bundle_root": str(self.root), "device": "cpu"})
        (self.root / "models").mkdir(exist_ok=True)
        torch.save(parser.get_parsed_content(self.layout.network).state_dict(), self.root / "models" / "model.pt")


def overlay(side: Side) -> None:
    """Every layout with RISE, and with what else the tests ask of it; one layout is refused."""
    for name, layout in LAYOUTS.items():
        bundle = LaidOut(side, name)
        for method, settings in {"rise": {}, **layout.methods}.items():
            bundle.explain(f"overlay/{name}.{method}", layout.maps, **settings)
    config = side.layout(REFUSED) / "configs" / "inference.json"
    folder = side.out / "overlay" / f"{REFUSED}.rise"
    files = [str(config), side.overlay("explain")]
    refused = {"bundle_root": str(folder), "saliency_dir": str(folder)}
    side.run(f"overlay/{REFUSED}.rise", files, 0, "ValueError", "explain", **refused)


# Engines --------------------------------------------------------------------------------------------------------------


def single(side: Side) -> None:
    """The plain run, and the engines that need no launcher: SLURM's tasks one after the other, devices, and Ray."""
    for seed, name in enumerate(("a", "c", "d", "e")):
        volume(side.inputs / "scans" / f"{name}.nii.gz", (13, 12, 14), LPS, seed, low=0)
    # The second scan, so that the second worker has it.
    whole = (side.inputs / "scans" / "a.nii.gz").read_bytes()
    (side.inputs / "scans" / "b.nii.gz").write_bytes(whole[:100])

    _own(side, "", "plain")
    _spleen(side, "", "plain")

    for split in ("cases", "masks"):
        for task, (maps, ends) in enumerate(((None, "done" if split == "cases" else "SystemExit"), (4, "SystemExit"))):
            with _slurm(task, 2):
                _own(side, "slurm", f"slurm-{split}", maps, ends, saliency_split=split)
    for task, maps in enumerate((None, 2)):
        with _slurm(task, 2):
            _spleen(side, "slurm", "slurm-masks", maps, saliency_split="masks")

    devices = {"saliency_devices": ["cpu", "cpu"]}
    _own(side, "devices", "devices", **devices)
    _spleen(side, "devices", "devices", **devices)

    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    # Two of the three: its actors take long to start.
    _shared(side, "ray", slice(0, None, 2), saliency_max_workers=2)
    ray.shutdown()


def torchrun(side: Side, run: int) -> None:
    """What each process does that torchrun starts.

    One run only: all process groups of a process have the same keys in torchrun's store, so that a second group may
    find the addresses of the first.
    """
    _shared(side, "torchrun", slice(run, run + 1))


def accelerate(side: Side) -> None:
    """What each process does that ``accelerate launch`` starts."""
    _shared(side, "accelerate")


def lightning(side: Side) -> None:
    """Lightning starts this script again in its second process."""
    _shared(side, "lightning", saliency_devices=2, saliency_accelerator="cpu")


def _shared(side: Side, engine: str, which: slice = slice(None), **settings: Any) -> None:
    """Share our own bundle's cohort by cases and by masks, and somebody else's by masks."""
    for run, split in [(_own, "cases"), (_own, "masks"), (_spleen, "masks")][which]:
        run(side, engine, f"{engine}-{split}", saliency_split=split, **settings)


def _own(side: Side, engine: str, name: str, maps: int | None = 4, ends: str = "SystemExit", **settings: Any) -> None:
    """Our own bundle's network on a tiny cohort, of which one scan is broken."""
    small = {"pixdim": [1.5, 1.5, 1.5], "spatial_size": [24, 24, 24], "picture": False, "num_workers": 0}
    small |= {"method": "rise", "num_masks": 30, "grid_size": 3, "mask_batch_size": 4}
    cohort = side.inputs / "scans"
    _own_bundle(side, f"engines/{name}.own", cohort, engine, maps=maps, ends=ends, **small, **settings)


def _spleen(side: Side, engine: str, name: str, maps: int | None = 2, **settings: Any) -> None:
    """A bundle of somebody else."""
    few = {"saliency_mask_batch_size": 4, "saliency_picture": False}
    bundle = LaidOut(side, "spleen_ct_segmentation")
    bundle.explain(f"engines/{name}.spleen", maps, engine, **few, **settings)


@contextlib.contextmanager
def _slurm(task: int, count: int) -> Iterator[None]:
    """The variables that SLURM gives a task of an array."""
    names = {"ID": task, "COUNT": count, "MIN": 0, "MAX": count - 1}
    ours = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


PARTS: dict[str, Callable[[Side], None]] = {
    "demo": demo,
    "overlay": overlay,
    "single": single,
    **{f"torchrun-{run}": partial(torchrun, run=run) for run in range(3)},
    "accelerate": accelerate,
    "lightning": lightning,
}


def main() -> None:
    """Make the runs of one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--code", type=Path, required=True, help="the checkout whose package is imported")
    parser.add_argument("--out", type=Path, required=True, help="where runs go")
    parser.add_argument("--inputs", type=Path, required=True, help="where bundles, weights and scans go")
    parser.add_argument("--renames", type=json.loads, default={}, help="other names of config ids")
    args = parser.parse_args()
    package = importlib.import_module("monai_saliency").__file__ or ""
    if not Path(package).is_relative_to(args.code):
        sys.exit(f"expected the package of {args.code}, got {package}: set PYTHONPATH")
    torch.set_num_threads(1)
    PARTS[args.part](Side(args.code, args.out, args.inputs, args.renames))


if __name__ == "__main__":
    main()
