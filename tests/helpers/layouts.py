"""Other people's bundles: small copies of layouts in the Model Zoo, with random weights and made data."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import monai.bundle
import monai.networks.nets
import numpy as np
import torch
from monai.bundle import ConfigParser
from PIL import Image

from helpers.paths import BUNDLES
from helpers.scans import AFFINES, photograph, volume
from monai_saliency.bundle.configs import overlay_path
from monai_saliency.storage.scans import case_id


@dataclass(frozen=True)
class Layout:
    """A bundle under test.

    Attributes:
        name: its folder.
        data: writes its data below a folder; gives the images that get maps, and what to pass on the command line.
        run: its own run id.
        network: the id of its network.
        weights: the file of its weights, below it.
        words: what the line about the explained score holds.
        flags: what its config does not say, such as how its output is read.
    """

    name: str
    data: Callable[[Path, Path], tuple[dict[str, Path], dict[str, Any]]]
    run: str = "evaluating"
    network: str = "network"
    weights: str = "models/model.pt"
    words: str = ""
    flags: dict[str, Any] = field(default_factory=dict)


def spleen(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    scans = {
        f"spleen_{i}": volume(data / "imagesTs" / f"spleen_{i}.nii.gz", (20, 17 + i, 9), AFFINES[i], i)
        for i in range(2)
    }
    return scans, {"dataset_dir": str(data)}


def brats(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    shape = (16, 16, 8)
    names = [f"Brats18_{i}/Brats18_{i}_" for i in range(2)]
    modalities = ("t1ce", "t1", "t2", "flair")
    listing = [{"image": [f"{name}{m}.nii.gz" for m in modalities]} for name in names]
    for i, entry in enumerate(listing):
        for j, file in enumerate(entry["image"]):
            volume(data / file, shape, AFFINES[1], 10 * i + j, low=0)
    (bundle / "configs" / "datalist.json").write_text(json.dumps({"testing": listing}))
    return {f"{name}t1ce": data / f"{name}t1ce.nii.gz" for name in names}, {"dataset_dir": str(data)}


def endoscopy(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    images = {f"frame_{i}": photograph(data / f"frame_{i}.jpg", 61, 40 + i, i) for i in range(2)}
    (data / "test.json").write_text(json.dumps([{"image": str(path), "label": 0} for path in images.values()]))
    return images, {"dataset_dir": str(data)}


def breast(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    images = {f"{side}/view": photograph(data / side / "view.png", 50, 37 + i, i) for i, side in enumerate("lr")}
    listing = {"Test": [[str(path), [1, 0, 0, 0]] for path in images.values()]}
    (bundle / "configs" / "sample_image_data.json").write_text(json.dumps(listing))
    return images, {}


def ventricle(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    return {"heart": volume(data / "heart.nii.gz", (24, 24, 3), AFFINES[0], 0)}, {"dataset_dir": str(data)}


def lung(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    scans = {f"{i}/scan": volume(data / str(i) / "scan.nii.gz", (32, 24 + 8 * i, 16), AFFINES[1], i) for i in range(2)}
    (bundle / "LUNA16_datasplit").mkdir()
    listing = [{"image": f"{name}.nii.gz", "box": [], "label": []} for name in scans]
    (bundle / "LUNA16_datasplit" / "dataset_fold0.json").write_text(json.dumps({"validation": listing}))
    return scans, {"data_file_base_dir": str(data)}


def valve(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    volume(data / "cine.nii.gz", (24, 24, 1, 2), AFFINES[1], 0)
    return {"cine": data / "cine.nii.gz"}, {"dataset_dir": str(data)}


def pathology(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    return {"tile": photograph(data / "tile.png", 48, 40, 0)}, {"dataset_dir": str(data)}


def renamed(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    names = ["a/t1", "b/t1"]
    scans = {name: volume(data / f"{name}.nii.gz", (14, 11, 8), AFFINES[i], i) for i, name in enumerate(names)}
    return scans, {"dataset_dir": str(data), "results": str(bundle / "eval")}


def nuclick(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    return {"tile": photograph(data / "tile.png", 45, 38, 0)}, {"dataset_dir": str(data)}


def modalities(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """The second one lies elsewhere, on a grid of its own."""
    volume(data / "a_t2.nii.gz", (15, 14, 12), AFFINES[1], 1)
    return {"a_t1": volume(data / "a_t1.nii.gz", (20, 17, 9), AFFINES[0], 0)}, {"dataset_dir": str(data)}


def pairs(bundle: Path, data: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    data.mkdir(parents=True)
    images = {}
    for i in range(2):
        path = data / f"00{i}.jpeg"
        images[case_id(None, path)] = path  # the dataset lists no files that have a folder in common
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (33, 28), dtype=np.uint8)).save(path)
    return images, {"dataset_dir": str(data)}


LAYOUTS = [
    Layout("spleen_ct_segmentation", spleen, run="run", words="softmax"),
    Layout("brats_mri_segmentation", brats, words="sigmoid"),
    Layout("endoscopic_inbody_classification", endoscopy, words="softmax"),
    Layout("breast_density_classification", breast, words="sigmoid"),
    Layout("ventricular_short_axis_3label", ventricle, words="softmax"),
    Layout("lung_nodule_ct_detection", lung, words="detection"),
    Layout("valve_landmarks", valve, words="regression"),
    Layout("pathology_nuclei_segmentation_classification", pathology, words="nucleus_prediction"),
    Layout("vista3d", spleen, run="run", words="sigmoid"),
    Layout("pathology_nuclick_annotation", nuclick, words="sigmoid"),
    Layout("spleen_deepedit_annotation", spleen, words="softmax"),
    Layout("two_modalities_segmentation", modalities, words="softmax"),
    Layout("paired_registration", modalities, words="image regression"),
    Layout("mednist_reg", pairs, words="image regression"),
    Layout("renamed_ids", renamed, run="go", network="model", words="segmentation",
           flags={"saliency_activation": "softmax"}),
]  # fmt: skip


class Bundle:
    """A layout set up below a folder, with data and random weights."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        self.layout = layout
        self.root = folder / layout.name
        shutil.copytree(BUNDLES / layout.name, self.root)
        self.config = next((self.root / "configs").glob("inference.*"))
        self.scans, self.settings = layout.data(self.root, folder / "data")
        self.settings |= {"bundle_root": str(self.root)}

    def write_weights(self) -> None:
        torch.manual_seed(1)
        parser = ConfigParser()
        parser.read_config(self.config)
        parser.update({**self.settings, "device": "cpu"})
        network = parser.get_parsed_content(self.layout.network)
        path = self.root / self.layout.weights
        path.parent.mkdir(exist_ok=True)
        torch.save(network.state_dict(), path)

    def run(self, **settings: Any) -> None:
        """The bundle as it is."""
        monai.bundle.run(run_id=self.layout.run, config_file=str(self.config), **self.settings | settings)

    def explain(self, few_masks: bool = True, **settings: Any) -> None:
        """The bundle with the overlay, no pictures: with a few masks of RISE, or as the overlay does by default."""
        few: dict[str, Any] = {"saliency_picture": False, "saliency_report": False}
        few |= {"saliency_method": "rise", "saliency_num_masks": 12, "saliency_grid_size": 4} if few_masks else {}
        files = [str(self.config), str(overlay_path("explain"))]
        monai.bundle.run(run_id="explain", config_file=files, **self.settings | self.layout.flags | few | settings)
