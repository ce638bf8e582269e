"""Does a fill show that something is hidden, and what does inpainting cost?

    python tests/benchmarks/inpainting.py [--device cuda] [--batch_sizes 64 128] [--json FILE] [--keep]

**Found**: a small classifier is trained to tell crops of FLAIR slices in which a fill hides a part from whole ones, on
two of the three patients of ``generalise_tasks.py``. Its accuracy is on crops of the third one, the mean over patients;
0.5 is chance. **Cost**: seconds that inpainting adds to a RISE map at 64^3 over those of a DenseNet121's forwards.
"""

import argparse
import statistics

import numpy as np
import torch
from generalise import FILLS, OPEN_MS
from generalise_tasks import PATIENTS, convolutions, patient
from monai.networks.nets import DenseNet121
from record import add_options, keep, markdown, now, trained
from torch.nn.functional import cross_entropy, interpolate

import monai_saliency as ms
from monai_saliency import fills

EDGE, EACH = 64, 768  # of crops of each patient


def crops_of(name: str) -> torch.Tensor:
    """Crops ``(n, 1, EDGE, EDGE)`` of axial slices, around voxels of the brain."""
    flair, random = patient(OPEN_MS, name, "cpu")[0][:1], np.random.default_rng(int(name))
    brain = (flair[0] != 0).nonzero()
    places = brain[torch.from_numpy(random.integers(0, len(brain), size=EACH))]
    places[:, :2] = (places[:, :2] - EDGE // 2).clamp(min=0).minimum(torch.tensor(flair.shape[1:3]) - EDGE)
    return torch.stack([flair[:, x : x + EDGE, y : y + EDGE, z] for x, y, z in places.tolist()])


def part_hidden(image: torch.Tensor, fill: str, shape: str, seed: int) -> torch.Tensor:
    """An image ``(1, EDGE, EDGE)`` of which a fill replaces a window around its middle, or half by a mask of RISE."""
    random, case = np.random.default_rng(seed), ms.Case("crop", image)
    bound = fills.InpaintFill(seed=seed) if fill == "inpaint" else getattr(fills, FILLS[fill])()
    bound = bound.bind(case) if hasattr(bound, "bind") else bound
    mask = interpolate(torch.from_numpy(random.random((1, 1, 8, 8))).round().float(), size=EDGE, mode="bilinear")
    if shape == "window":
        mask, (row, column) = torch.ones_like(mask), random.integers(EDGE // 4 + 1, EDGE // 2, size=2)
        mask[..., row : row + EDGE // 4, column : column + EDGE // 4] = 0
    replaced = bound.of(image[None], mask) if hasattr(bound, "of") else bound(image[None])
    return (mask * image + (1 - mask) * replaced)[0]


def accuracy(fill: str, shape: str, crops: dict[str, torch.Tensor]) -> float:
    """Of classifiers, each on the patient whom it has not seen: the mean."""
    images, found = {}, []
    for name, whole in crops.items():
        hidden = torch.stack([part_hidden(image, fill, shape, seed) for seed, image in enumerate(whole)])
        images[name] = torch.stack([whole, hidden], dim=1).flatten(0, 1)
    for held_out, unseen in images.items():
        given = torch.cat([each for name, each in images.items() if name != held_out])
        torch.manual_seed(0)
        network = convolutions(2)

        def loss(step: int) -> torch.Tensor:
            chosen = torch.from_numpy(np.random.default_rng(step).integers(0, len(given), size=64))  # noqa: B023
            return cross_entropy(network(given[chosen]), chosen % 2)  # noqa: B023

        network = trained(network, f"inpainting_{fill}_{shape}_{held_out}", loss, 400, 5e-3)
        with torch.no_grad():
            found.append(float((network(unseen).argmax(1) == torch.arange(len(unseen)) % 2).double().mean()))
    return statistics.mean(found)


def cost(batch_size: int, device: str) -> float:
    """Seconds that inpainting adds to a map over those of its forwards: the median of rounds, which alternate."""
    network, count, ratios = DenseNet121(3, 1, 2).eval().to(device), 31 if device == "cpu" else 255, []
    images = torch.rand(batch_size, 1, *[64] * 3, device=device)
    given = {"target": ms.ClassScore([1], "none"), "mask_batch_size": batch_size}
    with torch.inference_mode():
        for _ in range(6):
            times = [now(device)]
            for fill in (fills.ConstantFill(), fills.InpaintFill()):
                ms.rise(count, fill=fill, **given)(images[:1], network)
                times.append(now(device))
            for _ in range((count + 1) // batch_size):
                network(images)
            begun, without, filled, done = *times, now(device)
            ratios.append((filled - without - (without - begun)) / (done - filled))
    return statistics.median(ratios[1:])


def main() -> None:
    """Print the cost for each batch size, and the accuracies for each fill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="of the cost")
    parser.add_argument("--batch_sizes", type=int, nargs="*", default=[2, 8])
    add_options(parser)
    args = parser.parse_args()
    rows = [{"batch": size, "over a forward": cost(size, args.device)} for size in args.batch_sizes]
    crops = {name: crops_of(name) for name in PATIENTS.values()}
    for fill in ("zero", "mean", "blur", "inpaint"):
        rows.append({"fill": fill, **{shape: accuracy(fill, shape, crops) for shape in ("window", "RISE")}})
    print(markdown(rows))
    keep(args, "inpainting", rows)


if __name__ == "__main__":
    main()
