"""Peak memory against the number of masks, each in a process of its own.

python tests/benchmarks/memory.py [--num_masks 200 2000] [--size 64]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys


def peak(num_masks: int, size: int) -> float:
    """The largest resident memory, in MiB, of a process that explains one volume."""
    output = subprocess.run(
        [sys.executable, __file__, "--inside", str(num_masks), "--size", str(size)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return float(output.split()[-1])


def explain(num_masks: int, size: int) -> None:
    """Explain one volume with a small network, and print this process's peak."""
    import torch

    import monai_saliency as ms

    torch.set_num_threads(1)
    network = torch.nn.Sequential(
        torch.nn.Conv3d(1, 4, 3, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool3d(1), torch.nn.Flatten()
    )
    target = ms.ClassScore("all", activation="none")
    ms.rise(num_masks, target=target, mask_batch_size=16)(torch.rand(1, 1, size, size, size), network)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Print the peaks and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_masks", type=int, nargs=2, default=[200, 2000])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        explain(args.inside, args.size)
        return
    few, many = (peak(count, args.size) for count in args.num_masks)
    print(
        f"{args.num_masks[0]} masks: {few:.0f} MiB, {args.num_masks[1]} masks: {many:.0f} MiB, ratio {many / few:.3f}"
    )


if __name__ == "__main__":
    main()
