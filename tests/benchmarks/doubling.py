"""Twice the masks, or twice the images: time and peak memory over those of once.

    python tests/benchmarks/doubling.py [--num_masks 255] [--size 48] [--rounds 5]

Time is of this process's processors, which others on the machine disturb less than the wall, and the median over
rounds in which both sizes alternate. The peak is of resident memory, of a process of its own for each size.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch

import monai_saliency as ms


def run(num_masks: int, images: int, size: int) -> float:
    """Explain made images in 3D by RISE; the seconds that took."""
    torch.manual_seed(0)
    batch = torch.rand(images, 1, size, size, size)
    body = torch.nn.Sequential(
        torch.nn.Conv3d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(8, 2, 3, padding=1)
    )
    network = torch.nn.Sequential(body, torch.nn.AdaptiveAvgPool3d(1), torch.nn.Flatten()).eval()
    explain = ms.rise(num_masks, target=ms.ClassScore([1], "softmax"), mask_batch_size=16)
    begun = time.process_time()
    explain(batch, network)
    return time.process_time() - begun


def peak(*arguments: object) -> float:
    """The largest resident memory, in MiB, of a process that explains once."""
    command = [sys.executable, __file__, "--inside", *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    """Print a line a doubling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_masks", type=int, default=255, help="with the unperturbed image, full batches")
    parser.add_argument("--size", type=int, default=48, help="of an image, along each axis")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.inside:
        run(*map(int, args.inside))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    run(127, 1, args.size)  # what is made once is not timed
    once = (args.num_masks, 1)
    for what, twice in (("masks", (2 * args.num_masks + 1, 1)), ("images", (args.num_masks, 2))):
        spent: dict[tuple[int, int], list[float]] = {once: [], twice: []}
        for _ in range(args.rounds):
            for key, seconds in spent.items():
                seconds.append(run(*key, args.size))
        first, second = (statistics.median(seconds) for seconds in spent.values())
        few, many = (peak(*key, args.size) for key in spent)
        print(
            f"twice the {what}: {second / first:.2f} times the time ({first:.2f} s), "
            f"{many / few:.3f} times the peak memory ({few:.0f} MiB)",
            flush=True,
        )


if __name__ == "__main__":
    main()
