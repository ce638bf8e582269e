"""Peak memory against the number of masks, and of cases, each in a process of its own.

    python tests/benchmarks/memory.py [--num_masks 200 2000] [--size 64]
    python tests/benchmarks/memory.py --cases 20 200 [--caches disk lmdb window memory]

A cohort goes twice, with a cold and a warm cache, through all that a run has. The cache "memory", which holds every
scan, shows what growth looks like. The peak is of resident memory, mapped file pages of LMDB included.
"""

import argparse
import ctypes
import platform
import tempfile
from pathlib import Path
from typing import Any

from record import add_inside, apart, resident_peak
from torch import nn


def masks(num_masks: int, size: int) -> None:
    """Explain one volume with a small network."""
    import torch

    import monai_saliency as ms

    torch.set_num_threads(1)
    target = ms.ClassScore("all", activation="none")
    ms.rise(num_masks, target=target, mask_batch_size=16)(torch.rand(1, 1, size, size, size), _network())


def cases(count: int, cache: str, size: int) -> None:
    """Explain a cohort of scans with a small network, a few masks each, twice."""
    import nibabel as nib
    import numpy as np
    import torch
    from monai.transforms import Compose, EnsureChannelFirstd, Invertd, LoadImaged, NormalizeIntensityd, Orientationd

    import monai_saliency as ms
    from monai_saliency.data.cached_dataset import CachedDataset
    from monai_saliency.data.loader import CohortLoader
    from monai_saliency.engines.evaluator import CohortEvaluator
    from monai_saliency.engines.run import run
    from monai_saliency.handlers.saliency_handler import SaliencyHandler
    from monai_saliency.storage.score_store import ScoreStore
    from monai_saliency.storage.tables import CaseTable, Failures
    from monai_saliency.transforms import SaveSaliencyd

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = []
        for index in range(count):
            path = folder / f"scan_{index:03d}.nii"
            # Made one after another from little: nothing of it stays.
            voxels = np.random.default_rng(index).integers(0, 255, (size, size, size), np.uint8)
            nib.save(nib.Nifti1Image(voxels, np.diag([-1.0, -1.0, 2.0, 1.0])), path)
            data.append({"case": path.stem, "image": str(path)})
        for _ in range(2):
            preprocessing = Compose(
                [
                    LoadImaged(keys="image", dtype=np.float32),
                    EnsureChannelFirstd(keys="image"),
                    Orientationd(keys="image", axcodes="RAS", labels=None),
                    NormalizeIntensityd(keys="image"),
                ]
            )
            dataset = CachedDataset(data, preprocessing, cache=cache, cache_dir=folder / "cache", window=8)
            failures, network = Failures(folder / "out" / "failures.csv"), _network().eval()
            inferer = ms.rise(7, 4, target=ms.ClassScore([0], activation="none"), mask_batch_size=8)
            postprocessing = Compose(
                [
                    Invertd(keys="saliency", transform=preprocessing, orig_keys="image", nearest_interp=False),
                    SaveSaliencyd(keys="saliency", output_dir=folder / "out", picture=False),
                ]
            )
            kept = CaseTable(folder / "out" / "summary.csv"), failures, ScoreStore(folder / "out" / "scores")
            handler = SaliencyHandler(inferer, network, postprocessing, *kept)
            loader = CohortLoader(dataset, failures, num_workers=2)
            evaluator = CohortEvaluator(torch.device("cpu"), loader, network, val_handlers=[handler], failures=failures)
            run(evaluator, handler)
        if len(list((folder / "out").glob("*.nii.gz"))) != count:
            raise RuntimeError("not every case has a map")


def _give_back_at_once() -> None:
    """Let glibc take blocks of 64 KiB and more from the system, and give them back when they are freed.

    Left alone, it raises that size to what was freed last, up to 32 MiB, and keeps what is smaller for each thread.
    Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        m_mmap_threshold = -3  # of <malloc.h>
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**16)


def _network() -> Any:

    return nn.Sequential(nn.Conv3d(1, 4, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten())


def main() -> None:
    """Print the peaks and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_masks", type=int, nargs=2, default=[200, 2000])
    parser.add_argument("--cases", type=int, nargs=2, help="cohorts instead of masks")
    parser.add_argument("--caches", nargs="+", default=["disk", "lmdb", "window", "memory"])
    parser.add_argument("--size", type=int, default=64, help="of an image, along each axis")
    add_inside(parser)
    args = parser.parse_args()
    if args.inside:
        what, *arguments = args.inside
        _give_back_at_once()
        {"masks": masks, "cases": cases}[what](*arguments)
        print(resident_peak())
        return
    if args.cases:
        asked = {cache: [("cases", count, cache, args.size) for count in args.cases] for cache in args.caches}
    else:
        asked = {"masks": [("masks", count, args.size) for count in args.num_masks]}
    for name, pair in asked.items():
        few, many = (apart(__file__, *each) for each in pair)
        print(f"{name}: {pair[0][1]} {few:.0f} MiB, {pair[1][1]} {many:.0f} MiB, ratio {many / few:.3f}", flush=True)


if __name__ == "__main__":
    main()
