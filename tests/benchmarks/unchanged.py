"""Does this checkout make the same maps as another revision?

    python tests/benchmarks/unchanged.py BEFORE_REV [--only rise patches ...]

Every method explains the same images and small networks with the code of BEFORE_REV (in a temporary git worktree) and
with this checkout, uncommitted changes included; the bundle explains two demo scans. It prints the largest difference
of each map relative to the largest value of the earlier map, and ends with status 1 where one exceeds 1e-5.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import DenseNet, UNet

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1e-5


class Bright(torch.nn.Module):
    """One class, whose logit follows the brightness of a box."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return 30 * images[:, :, 8:16, 12:20].mean((1, 2, 3))[:, None] - 5


class Detector(torch.nn.Module):
    """Two boxes whose scores follow the brightness inside."""

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        boxes, labels = torch.tensor([[2.0, 3.0, 12.0, 14.0], [15.0, 10.0, 28.0, 30.0]]), torch.tensor([0, 1])
        inside = [images[:, 0, 2:12, 3:14].mean((1, 2)), images[:, 0, 15:28, 10:30].mean((1, 2))]
        scores = torch.stack(inside, dim=1).sigmoid()
        return [{"boxes": boxes, "labels": labels, "scores": each} for each in scores]


def image(*shape: int) -> torch.Tensor:
    """A smooth random image ``(1, *shape)``."""
    noise = torch.rand(1, *shape, generator=torch.Generator().manual_seed(1))
    pool = torch.nn.functional.avg_pool2d if len(shape) == 3 else torch.nn.functional.avg_pool3d
    return pool(noise, 3, 1, 1).double()


def organs(*spatial: int) -> torch.Tensor:
    """A label map ``(1, *spatial)`` of four organs and background."""
    labels = torch.zeros(1, *spatial, dtype=torch.int64)
    for number, start in enumerate((2, 8, 14, 20), 1):
        labels[(0, slice(start, start + 5), *[slice(number, number + 9)] * (len(spatial) - 1))] = number
    return labels


def classifier(dims: int, channels: int = 1) -> torch.nn.Module:
    """A small DenseNet of three classes."""
    torch.manual_seed(0)
    return DenseNet(dims, channels, 3, init_features=8, growth_rate=4, block_config=(2, 2), bn_size=2).double().eval()


def maps() -> dict[str, Callable[[], Any]]:
    """A function for each question, which gives the maps ``(K, *spatial)`` of one image."""
    import monai_saliency as ms
    from monai_saliency.cases import Case

    two, three = (classifier(2), image(1, 32, 32)), (classifier(3), image(1, 24, 20, 22))
    score: dict[str, Any] = {"target": ms.ClassScore([0, 2], "softmax", "probability"), "mask_batch_size": 8}
    torch.manual_seed(0)
    segments = UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2), norm="instance").double().eval()
    inner = SlidingWindowInferer((16, 16, 16), sw_batch_size=4, overlap=0.5, mode="gaussian")
    region: dict[str, Any] = {"target": ms.RegionScore(1, "softmax", region="all"), "mask_batch_size": 4}

    def plain(explain: Any, question: tuple[torch.nn.Module, torch.Tensor], labels: bool = False) -> torch.Tensor:
        network, batch = question
        cases = [Case("scan", labels=organs(*batch.shape[2:]))] if labels else None
        return explain(batch, network, cases=cases)[0]

    def patches(method: Callable[..., Any], *arguments: Any, labels: bool = False, **settings: Any) -> torch.Tensor:
        explain = method(*arguments, inferer=inner, **region, **settings)
        return plain(explain, (segments, image(1, 32, 24, 24)), labels)

    colours = classifier(2, 3), image(3, 32, 32)
    return {
        "rise 2D": lambda: plain(ms.rise(200, 6, **score), two),
        "rise 3D": lambda: plain(ms.rise(100, 5, seed=3, p1=0.4, **score), three),
        "rise per channel": lambda: plain(ms.rise(100, 5, per_channel=True, **score), colours),
        "rise debiased": lambda: plain(ms.rise(100, 5, form="debiased", **score), two),
        "rise until": lambda: plain(ms.rise(100, 5, until=0.8, budget=300, **score), two),
        "rise regression": lambda: plain(ms.rise(300, 5, form="regression", **score), three),
        "focused_rise 2D": lambda: plain(ms.focused_rise(120, **score), two),
        "focused_rise 3D": lambda: plain(ms.focused_rise(**score), three),
        "focused_rise until": lambda: plain(ms.focused_rise(60, until=0.8, budget=300, **score), two),
        "focused_rise, one place": lambda: plain(
            ms.focused_rise(target=ms.ClassScore([0], "sigmoid", "probability")), (Bright(), image(1, 32, 32))
        ),
        "random_grid": lambda: plain(ms.random_grid(60, 6, **score), three),
        "sliding_window 2D": lambda: plain(ms.sliding_window(6, 4, **score), two),
        "sliding_window 3D": lambda: plain(ms.sliding_window((8, 6, 7), (5, 6, 4), **score), three),
        "multi_scale_window": lambda: plain(ms.multi_scale_window((4, 8), **score), two),
        "hierarchical_occlusion": lambda: plain(
            ms.hierarchical_occlusion(**(score | {"target": ms.ClassScore([2], "softmax", "probability")})), three
        ),
        "region_occlusion": lambda: plain(ms.region_occlusion(**score), three, labels=True),
        "channel_occlusion": lambda: plain(ms.channel_occlusion(**score), colours),
        "shapley": lambda: plain(ms.shapley(**score), three, labels=True),
        "shapley sampled": lambda: plain(ms.shapley(24, **score), two, labels=True),
        "hsic": lambda: plain(ms.hsic(100, 5, **score), two),
        "sobol": lambda: plain(ms.sobol(8, 4, **score), two),
        "minimal_region": lambda: plain(
            ms.minimal_region(target=ms.ClassScore([0], "sigmoid", "probability")), (Bright(), image(1, 32, 32))
        ),
        "mc_rise": lambda: plain(ms.mc_rise(100, 5, **score), two),
        "sliding_radial": lambda: plain(ms.sliding_radial(4, **score), two),
        "squared_difference": lambda: plain(ms.squared_difference(4, **score), two),
        "sbsm": lambda: plain(ms.sbsm(6, 4, target=ms.EmbeddingSimilarity(), mask_batch_size=8), two),
        "drise": lambda: plain(
            ms.drise(100, 5, target=ms.DetectionScore(0.5), mask_batch_size=8), (Detector(), image(1, 32, 32))
        ),
        "smoothgrad": lambda: plain(ms.smoothgrad(8, **score), two),
        "integrated_gradients": lambda: plain(ms.integrated_gradients(10, **score), three),
        "grad_cam": lambda: plain(ms.grad_cam(**score), two),
        "patches: rise": lambda: patches(ms.rise, 20, 4),
        "patches: sliding_window": lambda: patches(ms.sliding_window, 10, 9),
        "patches: patch_windows": lambda: plain(ms.patch_windows(inner, **region), (segments, image(1, 32, 24, 24))),
        "patches: region_occlusion": lambda: patches(ms.region_occlusion, labels=True),
        "patches: focused_rise": lambda: patches(ms.focused_rise, 60),
        "patches: shapley": lambda: patches(ms.shapley, labels=True),
        "bundle: rise": lambda: bundle(method="rise", num_masks=60),
        "bundle: sliding_window": lambda: bundle(method="sliding_window", window_size=24, stride=24),
    }


def bundle(**settings: Any) -> torch.Tensor:
    """The maps of two demo scans that the bundle of the code in use writes, one after the other."""
    import monai.bundle
    import nibabel as nib

    from monai_saliency.data.demo import make_cohort

    root = Path(sys.path[0]) / "bundle"
    with tempfile.TemporaryDirectory() as folder:
        make_cohort(f"{folder}/in", num_scans=2)
        config = str(root / "configs" / "inference.yaml")
        # Where they are ids: their defaults look at the cohort and at the score.
        defaults = {"fill": 0, "scale": "probability"}
        settings |= {id: value for id, value in defaults.items() if f"\n{id}:" in Path(config).read_text()}
        given: Mapping[str, Any] = {"dataset_dir": f"{folder}/in", "output_dir": f"{folder}/out"} | settings
        monai.bundle.run(bundle_root=str(root), config_file=config, **given)
        paths = sorted(Path(folder, "out").rglob("*_saliency.nii.gz"))
        return torch.cat([torch.from_numpy(np.asarray(nib.load(path).dataobj)).flatten() for path in paths])


def save(path: Path, only: list[str]) -> None:
    """Make the maps with the code that is imported, and save them."""
    found = {}
    for name, make in maps().items():
        if not only or any(name.startswith(each) for each in only):
            found[name] = torch.as_tensor(make()).double().numpy()
    np.savez(path, **found)


def run(code: Path, path: Path, only: list[str]) -> dict[str, np.ndarray]:
    """The maps that a checkout's code makes, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    inside = f"import runpy, sys; sys.path.insert(0, {str(code)!r}); runpy.run_path({__file__!r})['save_here']()"
    subprocess.run([sys.executable, "-c", inside, str(path), *only], check=True, env=environment, cwd=path.parent)
    with np.load(path) as found:
        return dict(found)


def save_here() -> None:
    """What :func:`run` calls in the other process."""
    save(Path(sys.argv[1]), sys.argv[2:])


def main() -> None:
    """Print a line for each map."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE_REV", help="a git revision")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names, such as rise or patches")
    args = parser.parse_args()
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "code")
        subprocess.run([*git, "add", "--quiet", "--detach", str(code), args.before], check=True)
        try:
            before = run(code, Path(folder, "before.npz"), args.only)
        finally:
            subprocess.run([*git, "remove", "--force", str(code)], check=True)
        after = run(ROOT, Path(folder, "after.npz"), args.only)
    worst = 0.0
    for name, earlier in before.items():
        largest = np.abs(earlier).max()
        apart = np.abs(after[name] - earlier).max() / largest if largest else np.abs(after[name]).max()
        print(f"{name:28s} {apart:.1e} of {largest:.3g}", flush=True)
        worst = max(worst, float(apart))
    sys.exit(int(not worst <= LIMIT))


if __name__ == "__main__":
    main()
