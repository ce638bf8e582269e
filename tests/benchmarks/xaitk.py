"""Each method that xaitk-saliency has, ours against theirs: the same masks, the same network, on the CPU.

    python tests/benchmarks/xaitk.py [--num_masks 2000] [--size 224] [--methods rise windows] [--json FILE]
    python tests/benchmarks/xaitk.py --volume 128 [--num_masks 2000]

Both get one light network as their black box, in batches of one size. Every run is a process of its own, ours and
theirs in turn, and each figure is the best of ``--repeats``. Printed for each method:

- the largest difference of the two maps, as xaitk-saliency normalises them;
- time, end to end, and without the network: its calls are timed inside the run and subtracted. It is processor time of
  one thread, which is wall time on a machine with nothing else to do, and less noisy on others;
- peak of resident memory beyond what the process had after one call of the network.

xaitk-saliency runs without threads: with threads its masks depend on them. ``--volume`` explains a cube with RISE,
which xaitk-saliency cannot, and prints time and memory alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 16
METHODS = ["rise", "windows", "mc_rise", "radial", "squared_difference", "drise", "random_grid", "sbsm"]


def light(dims: int, channels: int) -> Any:
    """A network of three thin layers, timed: ``network.seconds`` is what its calls have taken."""
    import torch
    from monai.networks.layers import Conv

    class Light(torch.nn.Module):
        seconds = 0.0

        def __init__(self) -> None:
            super().__init__()
            conv = Conv[Conv.CONV, dims]
            self.layers = torch.nn.Sequential(
                conv(channels, 8, 3, stride=4), torch.nn.ReLU(), conv(8, 16, 3, stride=4), torch.nn.ReLU()
            )
            self.head = torch.nn.Linear(16, 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            start = time.process_time()
            batch = batch / 255
            found = self.head(self.layers(batch).flatten(2).amax(2))
            self.seconds += time.process_time() - start
            return found

    torch.manual_seed(0)
    return Light().eval()


class Boxes:
    """The light network as a detector: two boxes, whose scores are its classes'."""

    def __init__(self, network: Any) -> None:
        self.network = network

    def __call__(self, batch: Any) -> list[dict[str, Any]]:
        import torch

        size = batch.shape[-1]
        boxes = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.4, 0.5, 0.9, 0.8]]) * size
        return [
            {"boxes": boxes, "labels": torch.tensor([0, 1]), "scores": row[:2]} for row in self.network(batch).sigmoid()
        ]


def stack(method: str, is_ours: bool, num_masks: int, size: int) -> Any:
    """One of the two packages' methods; of both with the same settings."""
    if is_ours:
        import monai_saliency.xaitk as package
        from monai_saliency_xaitk.gen_image_classifier_blackbox_sal import PerturbationOcclusion as Occlusion
    else:
        import helpers.xaitk_classes as package
        from helpers.xaitk_classes import PerturbationOcclusion as Occlusion

    window, step = size // 8, max(1, round(size / num_masks**0.5))
    if method == "rise":
        return package.RISEStack(num_masks, 7, 0.5, seed=0, threads=0)
    if method == "windows":
        return package.SlidingWindowStack((window, window), (step, step), threads=0)
    if method == "mc_rise":
        return package.MCRISEStack(num_masks // 2, 7, 0.5, [[0, 0, 0], [255, 255, 255]], seed=0, threads=0)
    if method == "radial":
        return Occlusion(package.SlidingRadial((window / 2, window / 2), (step, step)), package.OcclusionScoring(), 0)
    if method == "squared_difference":
        return Occlusion(package.RISEGrid(num_masks, 7, 0.5, 0, 0), package.SquaredDifferenceScoring(), 0)
    if method == "drise":
        return package.DRISEStack(num_masks, 7, 0.5, seed=0, threads=0)
    if method == "random_grid":
        return package.RandomGridStack(num_masks, (window // 2, window // 2), 0.5, seed=0, threads=0)
    return package.SBSMStack((window, window), (step, step), threads=0)


def run(method: str, is_ours: bool, num_masks: int, size: int, out: str) -> dict[str, float]:
    """One method of one package in this process: seconds, those of the network, and MiB; its maps are saved."""
    import torch

    from monai_saliency.xaitk import Classifier, Descriptor, Detector

    torch.set_num_threads(1)
    network = light(2, 3)
    image = np.random.default_rng(0).random((size, size, 3)).astype(np.float32) * 255
    image[size // 3 : size // 2, size // 4 : size // 2] += 200
    explain = stack(method, is_ours, num_masks, size)

    inputs: tuple[Any, ...] = (image,)
    if method in ("drise", "random_grid"):
        blackbox: Any = Detector(Boxes(network), 2, batch_size=BATCH, rows_first=False)
        boxes = np.array([[0.1, 0.1, 0.5, 0.6]]) * size
        inputs = image, boxes, np.array([[1.0, 0.0]])
    elif method == "sbsm":
        blackbox = Descriptor(network, batch_size=BATCH)
        inputs = image, [np.roll(image, size // 5, 0)]
    else:
        blackbox = Classifier(network, 3, "softmax", batch_size=BATCH)
    with torch.no_grad():
        network(torch.zeros(BATCH, 3, size, size))
    before, network.seconds = peak(), 0.0
    start = time.process_time()
    maps = explain(*inputs, blackbox)
    seconds = time.process_time() - start
    np.save(out, maps)
    return {"seconds": seconds, "network": network.seconds, "MiB": peak() - before}


def volume(num_masks: int, size: int) -> dict[str, float]:
    """RISE of a cube in this process."""
    import torch

    import monai_saliency as ms

    torch.set_num_threads(1)
    network, image = light(3, 1), torch.rand(1, 1, size, size, size)
    with torch.no_grad():
        network(image.expand(BATCH, -1, -1, -1, -1).contiguous())
    before, network.seconds = peak(), 0.0
    start = time.process_time()
    ms.rise(num_masks, 7, target=ms.ClassScore([0], "none"), mask_batch_size=BATCH).explain(image, network)
    return {"seconds": time.process_time() - start, "network": network.seconds, "MiB": peak() - before}


def peak() -> float:
    """The largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def apart(*arguments: object) -> dict[str, float]:
    """What one of the functions above gives in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--inside", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def compare(method: str, num_masks: int, size: int, repeats: int) -> dict[str, Any]:
    """A row of the table."""
    best: dict[bool, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {ours: str(Path(folder) / f"{ours}.npy") for ours in (False, True)}
        for _ in range(repeats):
            for ours in (False, True):
                found = apart(method, ours, num_masks, size, files[ours])
                found["other"] = found["seconds"] - found["network"]
                best[ours] = {name: min(value, best.get(ours, found)[name]) for name, value in found.items()}
        difference = float(np.abs(np.load(files[False]) - np.load(files[True])).max())
    ratios = {name: best[False][name] / max(best[True][name], 1e-9) for name in ("seconds", "other", "MiB")}
    return {"method": method, "difference": difference, "theirs": best[False], "ours": best[True], "ratio": ratios}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_masks", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--volume", type=int, metavar="SIZE", help="a cube with RISE instead")
    parser.add_argument("--json", type=Path, help="where the rows are written too")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        arguments = json.loads(args.inside)
        print(json.dumps(volume(*arguments[1:]) if arguments[0] == "volume" else run(*arguments)))
        return
    if args.volume:
        found = apart("volume", args.num_masks, args.volume)
        print(f"RISE, {args.num_masks} masks at {args.volume}^3: {found}")
        return
    rows = []
    print("method                difference   theirs (network)   ours (network), s   ratio  without network  memory")
    for method in args.methods:
        row = compare(method, args.num_masks, args.size, args.repeats)
        rows.append(row)
        times = [f"{row[who]['seconds']:9.2f} ({row[who]['network']:5.2f})" for who in ("theirs", "ours")]
        ratio, memory = row["ratio"], [f"{row[who]['MiB']:.0f}" for who in ("theirs", "ours")]
        print(
            f"{method:20s} {row['difference']:10.1e}   {times[0]}   {times[1]}   {ratio['seconds']:8.1f}"
            f"  {ratio['other']:15.1f}  {ratio['MiB']:6.1f} ({' / '.join(memory)} MiB)",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
