"""Does the map explain the right thing? How often its peak lies within 10 mm of the lesion, against two controls.

    python tests/benchmarks/localization.py [--num_scans 40] [--seed 0] [--set method=rise num_masks=2000]

Scans with a lesion are made that were seen in no training, validation or demo, until the network has found the lesion
in ``--num_scans`` of them. Each is explained by the bundle as it stands (network, preprocessing, method and its
settings, all from ``bundle/configs/inference.yaml``), for the class "lesion", and the map inverted to the scan's own
grid. The controls: the same network at random weights, on the same scans and class, and a voxel drawn at random in the
brain.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
import yaml
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from monai.transforms import Invertd
from scipy import ndimage

from monai_saliency.data.demo import make_scan
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.networks.checkpoints import load_checkpoint

BUNDLE = Path(__file__).parents[2] / "bundle"
LESION = 1


def read_bundle(**overrides: object) -> ConfigParser:
    """The bundle's inference config, explaining the class "lesion"."""
    parser = ConfigParser()
    parser.read_config(BUNDLE / "configs" / "inference.yaml")
    parser.update({"bundle_root": str(BUNDLE), "classes": [LESION]} | overrides)
    return parser


def distance_to_lesion(label: nib.Nifti1Image) -> np.ndarray:
    """Millimetres from each voxel to the nearest voxel of the lesion."""
    outside = np.asanyarray(label.dataobj) == 0
    return ndimage.distance_transform_edt(outside, sampling=label.header.get_zooms()[:3])


class Rates:
    """Hits of one network, by its maps' peaks."""

    def __init__(self, parser: ConfigParser, network: torch.nn.Module) -> None:
        self.explain = parser.get_parsed_content("saliency_inferer").replace(progress=False)
        self.preprocessing = parser.get_parsed_content("preprocessing")
        self.invert = Invertd("saliency", self.preprocessing, orig_keys="image", nearest_interp=False)
        self.network = network
        self.distances: list[float] = []

    def add(self, case: dict, distance: np.ndarray) -> None:
        """Explain a preprocessed case, and note how far from the lesion the peak lies."""
        saliency = self.explain(case["image"][None].as_tensor(), self.network)[0]
        inverted = self.invert({**case, "saliency": MetaTensor(saliency).copy_meta_from(case["image"])})["saliency"]
        assert inverted.shape[1:] == distance.shape
        self.distances.append(float(distance[peak_voxel(inverted[0].numpy())]))

    def report(self, name: str) -> str:
        """One line: the share of peaks within 10 mm."""
        hits = np.asarray(self.distances) <= 10
        return f"{name:16s} {hits.mean():6.1%} ({hits.sum()} of {len(hits)})"


def main() -> None:
    """Print the three rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_scans", type=int, default=40)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first scan; random weights are drawn anew for each scan"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="ID=VALUE", help="of the bundle, such as method=rise")
    args = parser.parse_args()
    overrides = {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in args.set)}
    config = read_bundle(**overrides)

    trained = Rates(
        config, load_checkpoint(config.get_parsed_content("network"), BUNDLE / "models" / "model.pt").eval()
    )
    random = Rates(config, trained.network)
    chance, missed, seed = [], 0, FIRST_SCAN + args.seed
    with tempfile.TemporaryDirectory() as folder:
        while len(trained.distances) < args.num_scans:
            scan, label = make_scan(seed, lesion=True)
            seed += 1
            path = Path(folder) / "scan.nii.gz"
            nib.save(scan, path)
            case = trained.preprocessing({"image": str(path), "case": str(seed), "channels": 1})
            with torch.no_grad():
                if int(trained.network(case["image"][None].as_tensor()).argmax()) != LESION:
                    missed += 1
                    continue
            distance = distance_to_lesion(label)
            chance.append(float((distance[np.asanyarray(scan.dataobj) > 0] <= 10).mean()))
            trained.add(case, distance)
            # Fresh weights for each scan, so that the rate does not hang on one draw.
            torch.manual_seed(seed)
            random.network = read_bundle().get_parsed_content("network_def").eval()
            random.add(case, distance)
            print(
                f"{len(trained.distances)}: {trained.distances[-1]:.1f} mm, random {random.distances[-1]:.1f} mm",
                flush=True,
            )
    settings = " ".join(args.set) or "default settings"
    print(f"{settings}, scans {FIRST_SCAN + args.seed} to {seed - 1}, {missed} lesions not found")
    print("peaks within 10 mm of the lesion:")
    print(trained.report("trained"))
    print(random.report("random weights"))
    print(f"{'random voxel':16s} {np.mean(chance):6.1%} (expected)")


# Far from the seeds of the training, validation and demo cohorts, which are below a million.
FIRST_SCAN = 10_000_000

if __name__ == "__main__":
    main()
