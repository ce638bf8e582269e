"""What remembered patches save: wall time against patch forwards, both paths in one run, and the largest difference.

    python tests/benchmarks/patches.py [--size 128] [--patch 48] [--window 24] [--device cpu]

A 3D UNet, half overlap, a target that reads the whole volume, and occlusion windows; then the same with windows on
the patch grid.
"""

import argparse
import time

import torch
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import UNet

import monai_saliency as ms


class Clock:
    """Seconds that have gone by: on the wall, and of this process's processors, which others do not disturb."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def explain(self, explain: ms.PerturbationInferer, image: torch.Tensor, network: torch.nn.Module) -> ms.Explanation:
        """Explain one image, and add what that took."""
        if image.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter(), time.process_time()
        (explanation,) = explain.explain(image, network)
        explanation.scores.cpu()
        self.wall += time.perf_counter() - start[0]
        self.cpu += time.process_time() - start[1]
        return explanation


def main() -> None:
    """Print the gains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--patch", type=int, default=48)
    parser.add_argument("--window", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    network = UNet(3, 1, 2, channels=(16, 32, 64, 128), strides=(2, 2, 2), norm="instance").eval().to(args.device)
    image = torch.rand(1, 1, *[args.size] * 3).to(args.device)
    inner = SlidingWindowInferer([args.patch] * 3, sw_batch_size=4, overlap=0.5, mode="gaussian")
    settings = {"target": ms.RegionScore(1, "softmax", region="all"), "mask_batch_size": 4}
    print(f"{args.size}^3, patches of {args.patch}^3, {args.device}, {torch.get_num_threads()} threads")

    windows = ms.sliding_window(args.window, args.window, inferer=inner, **settings)
    whole = ms.sliding_window(args.window, args.window, inferer=inner, patch_memory=False, **settings)
    aligned = ms.patch_windows(inner, **settings)
    windows(image[..., : args.patch, : args.patch, : args.patch], network)  # warms up
    # Before and after the long one, so that a machine's moods hit both.
    ours, plain, on_grid = Clock(), Clock(), Clock()
    explanation = ours.explain(windows, image, network)
    reference = plain.explain(whole, image, network)
    ours.explain(windows, image, network)
    found = on_grid.explain(aligned, image, network)
    plain_forwards, gain = counted(explanation)
    wall, cpu = plain.wall / ours.wall * 2, plain.cpu / ours.cpu * 2
    print(
        f"windows of {args.window}: {explanation.num_forwards} patch forwards for {plain_forwards}, {gain:.2f} times "
        f"fewer;\n  wall {ours.wall / 2:.1f} s for {plain.wall:.1f} s, {wall:.2f} times faster, {wall / gain:.0%} of "
        f"the gain in forwards;\n  processor {ours.cpu / 2:.1f} s for {plain.cpu:.1f} s, {cpu:.2f} times faster, "
        f"{cpu / gain:.0%} of the gain in forwards"
    )
    difference = (explanation.scores - reference.scores).abs().max() / reference.scores.abs().max()
    print(f"largest difference of a score: {float(difference):.1e} of the largest score")
    pace = plain.cpu / plain_forwards
    plain_forwards, gain = counted(found)
    print(
        f"windows on the patch grid: {found.num_forwards} patch forwards for {plain_forwards}, {gain:.2f} times fewer; "
        f"processor {on_grid.cpu:.1f} s for {pace * plain_forwards:.1f} s at whole images' pace"
    )


def counted(explanation: ms.Explanation) -> tuple[int, float]:
    """Patch forwards of whole images, and how many times fewer remembered patches need."""
    plain = explanation.per_prediction * (len(explanation.scores) + 1)
    return plain, plain / explanation.num_forwards


if __name__ == "__main__":
    main()
