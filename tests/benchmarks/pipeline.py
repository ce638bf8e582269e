"""Images per second that the loader gives, for each cache and number of workers, measured in one run.

    python tests/benchmarks/pipeline.py [--cases 16] [--shape 192 192 120] [--size 96] [--only disk lmdb]

Compressed NIfTI scans go through orientation, spacing, size and intensity to the network's input. Cold: the cache is
empty, though the operating system may hold the scans' files in memory. Warm: the second pass. Nothing consumes the
images but this clock, so a warm figure is what a network may ask for at the most. "memory" is each process's own, and
ends with it: for process workers a second pass is as cold as the first.
"""

import argparse
import tempfile
import time
from pathlib import Path

import monai.transforms as mt
import nibabel as nib
import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from monai_saliency.data.cached_dataset import CachedDataset
from monai_saliency.data.loader import CohortLoader

BACKENDS = ("none", "memory", "disk", "lmdb")
LOADERS = {"serial": 0, "1 thread": 1, "2 threads": 2, "3 threads": 3, "4 threads": 4, "2 processes": 2}


LPS = np.diag([-1.0, -1.0, 1.2, 1.0])


def write_scans(folder: Path, count: int, shape: tuple[int, int, int]) -> list[dict[str, str]]:
    """Smooth blobs in noise, int16, compressed as scanners' exports are; the cases."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    blobs = gaussian_filter(rng.normal(size=shape).astype(np.float32), 8)
    blobs *= 500 / np.abs(blobs).max()
    cases = []
    for index in range(count):
        voxels = 1000 + np.roll(blobs, 5 * index, 0) + rng.normal(0, 20, shape).astype(np.float32)
        path = folder / f"scan_{index:03d}.nii.gz"
        nib.save(nib.Nifti1Image(voxels.astype(np.int16), LPS), path)
        cases.append({"case": f"scan_{index:03d}", "image": str(path)})
    return cases


def preprocessing(size: int) -> mt.Compose:
    """From a file to ``(1, size, size, size)``."""
    return mt.Compose(
        [
            mt.LoadImaged(keys="image"),
            mt.EnsureChannelFirstd(keys="image"),
            mt.Orientationd(keys="image", axcodes="RAS", labels=None),
            mt.Spacingd(keys="image", pixdim=(1.5, 1.5, 1.5), mode="bilinear"),
            mt.Resized(keys="image", spatial_size=(size, size, size), mode="trilinear"),
            mt.NormalizeIntensityd(keys="image", nonzero=True, channel_wise=True),
        ]
    )


def rate(loader: CohortLoader) -> float:
    """Images per second of one pass."""
    start = time.perf_counter()
    count = sum(len(batch["image"]) for batch in loader)
    if count != len(loader.names):
        raise RuntimeError(f"{count} of {len(loader.names)} cases came through the loader")
    return count / (time.perf_counter() - start)


def main() -> None:
    """Print a table: a row a cache, a column a loader, cold and warm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--shape", type=int, nargs=3, default=[192, 192, 120], help="of a scan, in voxels")
    parser.add_argument("--size", type=int, default=96, help="of the network's input, along each axis")
    parser.add_argument("--only", nargs="+", default=BACKENDS, choices=BACKENDS, help="these caches")
    args = parser.parse_args()
    # Workers are what is compared; each is to use one core.
    torch.set_num_threads(1)
    print(f"{args.cases} scans of {args.shape} voxels to {args.size}^3; images per second, cold / warm\n")
    print(f"| cache | {' | '.join(LOADERS)} |\n|---|{'---|' * len(LOADERS)}")
    with tempfile.TemporaryDirectory() as folder:
        cases = write_scans(Path(folder) / "scans", args.cases, tuple(args.shape))
        for backend in args.only:
            cells = []
            for name, workers in LOADERS.items():
                dataset = CachedDataset(
                    cases,
                    preprocessing(args.size),
                    cache=backend,
                    cache_dir=Path(folder) / f"{backend} {name}",
                )
                loader = CohortLoader(dataset, num_workers=workers, processes="processes" in name)
                cells.append(f"{rate(loader):.1f} / {rate(loader):.1f}")
            print(f"| {backend} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
