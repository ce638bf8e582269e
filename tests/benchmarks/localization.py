"""Does the map explain the right thing? How often its peak lies strictly inside the lesion, against three controls.

    python tests/benchmarks/localization.py [--num_scans 40] [--num_lesions 1] [--seed 0] [--set method=rise]
        [--random_scans 40] [--json FILE] [--keep [LABEL]]

Scans with lesions that were seen in no training are made until the network has found the lesion in ``--num_scans`` of
them. Each is explained by the bundle as it stands, for the class "lesion", and the map inverted to the scan's own grid.
AUPRC is the average precision of the map as a detector of the lesions' voxels. All lesions are found where each has one
of as many strongest peaks, more than 20 mm apart, strictly inside. Of several lesions each is also put alone into the
scan: a map of what the network saw shows no lesion that the network does not find there.

The controls: random weights on the same scans, the scan's intensity, and a voxel drawn at random in the brain.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
import yaml
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from monai.transforms import Invertd
from record import add_options, keep, markdown
from scipy import ndimage
from sklearn.metrics import average_precision_score

from monai_saliency import inferers
from monai_saliency.cases import Case
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


def distance_to_lesion(label: nib.Nifti1Image) -> tuple[np.ndarray, np.ndarray]:
    """Millimetres from each voxel to the nearest voxel of a lesion, and the number of that lesion, counted from 1."""
    inside = np.asanyarray(label.dataobj) > 0
    numbers, _ = ndimage.label(inside, np.ones((3, 3, 3)))
    distance, nearest = ndimage.distance_transform_edt(
        ~inside, sampling=label.header.get_zooms()[:3], return_indices=True
    )
    return distance, numbers[tuple(nearest)]


def one_by_one(seed: int, num_lesions: int) -> Iterator[nib.Nifti1Image]:
    """The same scan with each of its lesions alone."""
    scans = [make_scan(seed, lesion=number)[0] for number in range(num_lesions + 1)]
    healthy, *more = (np.asanyarray(scan.dataobj).astype(int) for scan in scans)
    for fewer, with_it in itertools.pairwise([healthy, *more]):
        # Elsewhere a scan with one lesion more differs by rounding.
        alone = np.where(abs(with_it - fewer) > 1, with_it, healthy)
        yield nib.Nifti1Image(alone.astype(np.int16), scans[0].affine, scans[0].header)


class Rates:
    """How far from the lesion the peaks of maps lie, and how well their values detect it."""

    def __init__(self) -> None:
        self.distances: list[float] = []
        self.precisions: list[float] = []
        self.found: list[bool] = []
        self.all_seen: list[bool] = []

    def note(self, values: np.ndarray, distance: np.ndarray, lesions: np.ndarray, sizes: Sequence[float]) -> None:
        """Note a map, the millimetres from each voxel to the nearest lesion, which that is, and the voxel sizes."""
        assert values.shape == distance.shape
        self.distances.append(float(distance[peak_voxel(values)]))
        self.precisions.append(float(average_precision_score((distance == 0).ravel(), values.ravel())))
        left, found = values.astype(float), set()
        for _ in range(lesions.max()):
            peak = peak_voxel(left)
            found |= {lesions[peak]} if distance[peak] == 0 else set()
            away = np.linalg.norm((np.indices(left.shape).T - peak) * sizes, axis=-1).T
            left = np.where(away > 20, left, values.min())
        self.found.append(len(found) == lesions.max())

    def report(self, name: str) -> dict[str, Any]:
        """One row: the peaks in the lesion, and within 10 mm; the mean and the lowest precision."""
        far = np.asarray(self.distances)
        row = {"map": name, "scans": len(far), "inside": int((far == 0).sum()), "within 10 mm": int((far <= 10).sum())}
        row |= {"all lesions found": int(sum(self.found)), "AUPRC": float(np.mean(self.precisions))}
        if self.all_seen:
            both = [found for found, seen in zip(self.found, self.all_seen, strict=True) if seen]
            row |= {"the network sees each lesion alone": len(both), "and all are found": int(sum(both))}
        return {**row, "lowest AUPRC": min(self.precisions)}


class Explained(Rates):
    """The maps of one network."""

    def __init__(self, parser: ConfigParser, network: torch.nn.Module) -> None:
        super().__init__()
        self.explain = parser.get_parsed_content("saliency_inferer").replace(progress=False)
        self.preprocessing = parser.get_parsed_content("preprocessing")
        self.invert = Invertd("saliency", self.preprocessing, orig_keys="image", nearest_interp=False)
        self.network = network
        self.forwards: list[int] = []

    def says_lesion(self, scan: nib.Nifti1Image, folder: Path, name: str) -> tuple[dict, bool]:
        """A scan as a preprocessed case, and whether the network says that it has a lesion."""
        path = folder / "scan.nii.gz"
        nib.save(scan, path)
        case = self.preprocessing({"image": str(path), "case": name, "channels": 1})
        with torch.no_grad():
            return case, int(self.network(case["image"][None].as_tensor()).argmax()) == LESION

    def add(self, case: dict, *lesion: Any) -> None:
        """Explain a preprocessed case, and note its map on the scan's own grid."""
        image = case["image"][None].as_tensor()
        self.explain = inferers.choose_fill(
            self.explain, self.network, [(image, Case(case["case"]))]
        )  # once, by the first case
        (found,) = self.explain.explain(image, self.network)
        self.forwards.append(found.num_forwards)
        saliency = found.saliency
        inverted = self.invert({**case, "saliency": MetaTensor(saliency).copy_meta_from(case["image"])})["saliency"]
        self.note(inverted[0].numpy(), *lesion)


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_scans", type=int, default=40)
    parser.add_argument("--num_lesions", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first scan")
    parser.add_argument("--set", nargs="*", default=[], metavar="ID=VALUE", help="of the bundle, such as method=rise")
    parser.add_argument("--random_scans", type=int, help="for random weights; as many as there are by default")
    add_options(parser)
    args = parser.parse_args()
    overrides = {name: yaml.safe_load(value) for name, value in (pair.split("=", 1) for pair in args.set)}
    config = read_bundle(**overrides)

    network = load_checkpoint(config.get_parsed_content("network"), BUNDLE / "models" / "model.pt").eval()
    trained, random, intensity = Explained(config, network), Explained(config, network), Rates()
    chance, missed, seed = [], 0, FIRST_SCAN + args.seed
    with tempfile.TemporaryDirectory() as folder:
        while len(trained.distances) < args.num_scans:
            scan, label = make_scan(seed, lesion=args.num_lesions)
            seed += 1
            case, is_found = trained.says_lesion(scan, Path(folder), str(seed))
            if not is_found:
                missed += 1
                continue
            distance, lesions = distance_to_lesion(label)
            if lesions.max() < args.num_lesions:  # they touch
                continue
            brain = distance[np.asanyarray(scan.dataobj) > 0]
            chance.append([float((brain == 0).mean()), float((brain <= 10).mean())])
            lesion = distance, lesions, label.header.get_zooms()[:3]
            intensity.note(np.asanyarray(scan.dataobj), *lesion)
            trained.add(case, *lesion)
            if args.num_lesions > 1:
                alone = one_by_one(seed - 1, args.num_lesions)
                trained.all_seen.append(all(trained.says_lesion(each, Path(folder), "alone")[1] for each in alone))
            count = len(trained.distances)
            print(f"{count}: {trained.distances[-1]:.1f} mm, AUPRC {trained.precisions[-1]:.2f}", end="")
            if count <= (args.num_scans if args.random_scans is None else args.random_scans):
                # Fresh weights for each scan, so that the rate does not hang on one draw.
                torch.manual_seed(seed)
                random.network = read_bundle().get_parsed_content("network_def").eval()
                random.add(case, *lesion)
                print(f"; random weights {random.distances[-1]:.1f} mm, {random.precisions[-1]:.2f}", end="")
            print(flush=True)
    settings = " ".join(args.set) or "default settings"
    print(f"{settings}, scans {FIRST_SCAN + args.seed} to {seed - 1}, {missed} lesions not found")
    forwards = {"forwards": float(np.mean(trained.forwards)), "at most": max(trained.forwards)}
    rows = [trained.report("trained") | forwards]
    rows += [random.report("random weights")] if random.distances else []
    rows.append(intensity.report("intensity"))
    inside, near = np.mean(chance, axis=0)
    rows.append({"map": "random voxel (expected)", "scans": len(chance)})
    rows[-1] |= {"inside": float(inside) * len(chance), "within 10 mm": float(near) * len(chance)}
    print(markdown(rows))
    keep(args, "localization", rows)


# Far from the seeds of the training, validation and demo cohorts, which are below a million.
FIRST_SCAN = 10_000_000

if __name__ == "__main__":
    main()
