"""What remembered patches save, and what a map of a CT costs.

    python tests/benchmarks/patches.py [--size 128] [--patch 48] [--window 24] [--device cpu]

**Saved**: wall time against patch forwards, both paths in one run, of a 3D UNet with half overlap, a target that reads
the whole volume, and occlusion windows. **Cost**: in predictions of a CT with bright balls, by a network that is light.
"""

import argparse
from itertools import pairwise

import torch
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import UNet
from record import markdown, now
from torch.nn.functional import avg_pool3d

import monai_saliency as ms
from monai_saliency.metrics import AUPRC

CT = (270, 270, 225)
#: centre and radius of balls
LESIONS, ORGAN = (((100, 150, 100), 12), ((200, 100, 60), 10), ((60, 60, 180), 8)), (((100, 150, 100), 45),)
EVIDENCE = {"one lesion": LESIONS[:1], "three lesions": LESIONS, "an organ": ORGAN}


def saved(size: int, patch: int, window: int, device: str) -> str:
    """Patch forwards and time of whole images over those of remembered patches."""
    torch.manual_seed(0)
    network = UNet(3, 1, 2, channels=(16, 32, 64, 128), strides=(2, 2, 2), norm="instance").eval().to(device)
    image = torch.rand(1, 1, *[size] * 3).to(device)
    inner = SlidingWindowInferer([patch] * 3, sw_batch_size=4, overlap=0.5, mode="gaussian")
    settings = {"target": ms.RegionScore(1, "softmax", region="all"), "mask_batch_size": 4, "inferer": inner}
    windows = ms.sliding_window(window, window, **settings)
    whole = ms.sliding_window(window, window, patch_memory=False, **settings)
    windows(image[..., :patch, :patch, :patch], network)  # warms up
    # Before and after the long one, so that a machine's moods hit both.
    times, found = [now(device)], []
    for explain in (windows, whole, windows):
        found += explain.explain(image, network)
        times.append(now(device))
    first, long, second = (after - before for before, after in pairwise(times))
    plain = found[0].per_prediction * (len(found[0].scores) + 1)
    gain, faster = plain / found[0].num_forwards, long / (first + second) * 2
    difference = (found[0].scores - found[1].scores).abs().max() / found[1].scores.abs().max()
    return (
        f"windows of {window}: {found[0].num_forwards} patch forwards for {plain}, {gain:.2f} times fewer; "
        f"{faster:.2f} times faster; largest difference of a score: {float(difference):.1e} of the largest score"
    )


def cost(method: str, evidence: str, device: str) -> dict[str, object]:
    """What a method's map of a CT costs, and how well it shows the evidence."""
    grid = torch.meshgrid(*map(torch.arange, CT), indexing="ij")
    balls = [sum((a - b) ** 2 for a, b in zip(grid, at, strict=True)) < r * r for at, r in EVIDENCE[evidence]]
    truth = torch.stack(balls).any(0)[None, None]
    image = torch.where(truth, 1, 0.3 * torch.rand(truth.shape, generator=torch.Generator().manual_seed(0))).to(device)

    def network(x: torch.Tensor) -> torch.Tensor:
        bright = 8 * (avg_pool3d(x, 3, 1, 1) - 0.8)
        return torch.cat([-bright, bright], dim=1)

    settings = {"target": ms.RegionScore(1, "softmax"), "inferer": SlidingWindowInferer([96] * 3, 4, 0.5)}
    (found,) = getattr(ms, method)(**settings).explain(image, network)
    shown = float(AUPRC().compute(found.saliency[None].cpu(), truth.float()))
    predictions = found.num_forwards / found.per_prediction
    return {"method": method, "evidence": evidence, "predictions": predictions, "AUPRC": shown}


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--patch", type=int, default=48)
    parser.add_argument("--window", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(saved(args.size, args.patch, args.window, args.device))
    methods = ("focused_rise", "hierarchical_occlusion")
    print(markdown([cost(method, evidence, args.device) for method in methods for evidence in EVIDENCE]))


if __name__ == "__main__":
    main()
