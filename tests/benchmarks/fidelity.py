"""Which method finds what the network saw, and at what price? On held-out scans of the demo with a lesion.

    python tests/benchmarks/fidelity.py [--num_scans 40] [--seed 0] [--methods focused_rise rise ...]

Scans are those of ``localization.py``: seen in no training, validation or demo, and the network finds the lesion. Each
method explains the class "lesion" on the network's input, with the bundle's preprocessing and fill. Printed are means
over the scans:

- inside: the share of peaks strictly inside the lesion, on the network's grid;
- AUPRC: the average precision of the map's values as a detector of the lesion's voxels (its share of the brain is what
  a random map gets);
- the forwards that a case took.

Controls stand beside: the same method on the same network at random weights, the scan's own intensity, and a random
map. On today's demo the lesion is the brightest part of the brain, so that intensity alone does well: what a map shows
there must be compared with that.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from localization import BUNDLE, FIRST_SCAN, LESION, read_bundle
from monai.data import MetaTensor
from monai.transforms import ResampleToMatch
from sklearn.metrics import average_precision_score

import monai_saliency as ms
from monai_saliency.data.demo import make_scan
from monai_saliency.metrics.peak import peak_voxel
from monai_saliency.networks.checkpoints import load_checkpoint

TARGET = ms.ClassScore([LESION], "softmax")

#: name: the method
METHODS: dict[str, Callable[[], ms.PerturbationInferer]] = {
    "sliding_window": lambda: ms.sliding_window(target=TARGET),
    "hierarchical_occlusion": lambda: ms.hierarchical_occlusion(16, 4, target=TARGET),
    "rise 350": lambda: ms.rise(350, target=TARGET),
    "rise 1000": lambda: ms.rise(1000, target=TARGET),
    "rise 4000": lambda: ms.rise(4000, target=TARGET),
    "focused_rise": lambda: ms.focused_rise(target=TARGET),
    "focused_rise 300": lambda: ms.focused_rise(300, target=TARGET),
}


class Scores:
    """What the maps of one row of the table reach."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[tuple[bool, float, int]] = []
        self.seconds = 0.0

    def add(self, saliency: torch.Tensor, lesion: np.ndarray, forwards: int = 0) -> None:
        """Note a map ``(*spatial)``."""
        found = saliency.numpy().astype(np.float64)
        precision = average_precision_score(lesion.ravel(), found.ravel())
        self.rows.append((bool(lesion[peak_voxel(found)]), float(precision), forwards))

    def __str__(self) -> str:
        inside, precision, forwards = np.mean(np.array(self.rows, dtype=float), axis=0)
        lowest = min(row[1] for row in self.rows)
        hits = sum(row[0] for row in self.rows)
        return (
            f"{self.name:34s} inside {inside:6.1%} ({hits} of {len(self.rows)})  AUPRC {precision:.3f} "
            f"(lowest {lowest:.2f})  forwards {forwards:6.1f}  seconds {self.seconds / len(self.rows):6.1f}"
        )


def held_out(count: int, seed: int, config: Any, network: torch.nn.Module) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """Scans ``(1, *spatial)`` as the network gets them, in which it finds the lesion, and the lesion ``(*spatial)``."""
    preprocessing, found = config.get_parsed_content("preprocessing"), 0
    with tempfile.TemporaryDirectory() as folder:
        while found < count:
            scan, label = make_scan(seed, lesion=True)
            seed += 1
            path = Path(folder) / "scan.nii.gz"
            nib.save(scan, path)
            image = preprocessing({"image": str(path), "case": str(seed), "channels": 1})["image"]
            with torch.no_grad():
                if int(network(image[None].as_tensor()).argmax()) != LESION:
                    continue
            voxels = torch.as_tensor(np.asanyarray(label.dataobj), dtype=torch.float32)[None]
            lesion = ResampleToMatch(mode="nearest")(MetaTensor(voxels, torch.as_tensor(label.affine)), image)
            found += 1
            yield image.as_tensor(), lesion[0].numpy() > 0.5


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_scans", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    config = read_bundle()
    network = load_checkpoint(config.get_parsed_content("network"), BUNDLE / "models" / "model.pt").eval()
    tables = {name: (Scores(name), Scores(f"{name}, random weights")) for name in args.methods}
    intensity, noise = Scores("the scan's own intensity"), Scores("a random map")
    for number, (image, lesion) in enumerate(held_out(args.num_scans, FIRST_SCAN + args.seed, config, network)):
        torch.manual_seed(number)
        untrained = read_bundle().get_parsed_content("network_def").eval()
        intensity.add(image[0], lesion)
        noise.add(torch.rand(image.shape[1:]), lesion)
        for name, rows in tables.items():
            for scores, explained in zip(rows, (network, untrained), strict=True):
                begun = time.perf_counter()
                (found,) = METHODS[name]().explain(image[None], explained)
                scores.seconds += time.perf_counter() - begun
                scores.add(found.saliency[0], lesion, found.num_forwards)
        print(f"{number + 1} of {args.num_scans} scans", flush=True)
    for scores in [*(row for rows in tables.values() for row in rows), intensity, noise]:
        print(scores)


if __name__ == "__main__":
    main()
