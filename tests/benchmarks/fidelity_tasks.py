"""What the methods of ``fidelity.py`` explain: networks, and scans of which it is known what they look at."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from localization import BUNDLE, FIRST_SCAN, LESION, read_bundle
from monai.data import MetaTensor
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.transforms import ResampleToMatch
from record import trained
from scipy import ndimage

import monai_saliency as ms
from monai_saliency.data.demo import make_scan
from monai_saliency.networks.checkpoints import load_checkpoint

__all__ = ["TASKS", "Scan", "Task"]


@dataclass(frozen=True)
class Scan:
    """A scan that the network gets right."""

    number: int  # the seed of which it is made
    image: torch.Tensor  # (1, *spatial), as the network gets it
    truth: torch.Tensor  # bool (*spatial), the lesion
    target: ms.Target


@dataclass(frozen=True)
class Task:
    """A network and its scans."""

    network: torch.nn.Module
    untrained: Callable[[int], torch.nn.Module]  # the same at random weights, of a seed
    scans: Callable[[int], Iterator[Scan]]  # of a seed: those that the network gets right
    shared: dict[str, Any] = field(default_factory=dict)  # what all methods are given besides the target


def demo() -> Task:
    """The demo's classifier, the class "lesion"; the bundle's preprocessing and fill."""
    config = read_bundle()
    network = load_checkpoint(config.get_parsed_content("network"), BUNDLE / "models" / "model.pt").eval()
    preprocessing = config.get_parsed_content("preprocessing")

    def untrained(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        made: torch.nn.Module = read_bundle().get_parsed_content("network_def").eval()
        return made

    def scans(seed: int) -> Iterator[Scan]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scan.nii.gz"
            for number in range(FIRST_SCAN + seed, FIRST_SCAN + seed + 100_000):
                scan, label = make_scan(number, lesion=True)
                nib.save(scan, path)
                image = preprocessing({"image": str(path), "case": str(number), "channels": 1})["image"]
                with torch.no_grad():
                    if int(network(image[None].as_tensor()).argmax()) != LESION:
                        continue
                voxels = torch.as_tensor(np.asanyarray(label.dataobj), dtype=torch.float32)[None]
                lesion = ResampleToMatch(mode="nearest")(MetaTensor(voxels, torch.as_tensor(label.affine)), image)
                yield Scan(number, image.as_tensor(), lesion[0].as_tensor() > 0.5, ms.ClassScore([LESION], "softmax"))

    return Task(network, untrained, scans)


# A segmentation: thick bright lumps are lesions; thin bright rods, as bright, are not. --------------------------------

_EDGE = 40
_STEPS = 400


def made_volume(number: int, edge: int = _EDGE) -> tuple[torch.Tensor, torch.Tensor]:
    """A noisy volume with a lesion (an ellipsoid of 3 to 5 voxels) and four rods of one to two voxels, as bright; and
    the lesion, each ``(1, *spatial)``.
    """
    random = np.random.default_rng(number)
    image = ndimage.gaussian_filter(random.normal(size=(edge,) * 3), 3) * 4
    image += 0.1 * random.normal(size=image.shape)
    places = np.indices(image.shape)
    radii = random.uniform(3, 5, size=3)
    centre = random.uniform(6, edge - 6, size=3)
    distance = sum(((p - c) / r) ** 2 for p, c, r in zip(places, centre, radii, strict=True))
    lesion = distance <= 1
    bright = lesion.copy()
    for _ in range(4):
        axis, width = int(random.integers(3)), int(random.integers(1, 3))
        first = random.integers(1, edge - 14, size=3)
        rod = [slice(int(at), int(at) + width) for at in first]
        rod[axis] = slice(int(first[axis]), int(first[axis]) + int(random.integers(8, 14)))
        if not ndimage.binary_dilation(lesion, iterations=2)[tuple(rod)].any():
            bright[tuple(rod)] = True
    image += 1.5 * ndimage.gaussian_filter(bright.astype(float), 0.5)
    return torch.from_numpy(image).float()[None], torch.from_numpy(lesion)[None]


def small_unet() -> torch.nn.Module:
    """The network of the segmentation."""
    return UNet(3, 1, 2, channels=(8, 16, 24), strides=(2, 2), norm="instance")


def trained_unet() -> torch.nn.Module:
    """The trained network: about two minutes of one core, the first time."""
    torch.manual_seed(0)
    network, criterion = small_unet(), DiceCELoss(to_onehot_y=True, softmax=True)

    def loss(step: int) -> torch.Tensor:
        images, labels = zip(*(made_volume(10_000 + 4 * step + i, 32) for i in range(4)), strict=True)
        return criterion(network(torch.stack(images)), torch.stack(labels).float())

    return trained(network, f"fidelity_{_EDGE}", loss, _STEPS, 4e-3)


def dice(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Dice's coefficient of two bool volumes."""
    return float(2 * (found & truth).sum() / (found.sum() + truth.sum()).clamp(min=1))


def segmentation(inferer: SlidingWindowInferer | None = None) -> Task:
    """A small UNet that segments lesions: the mean probability over the lesion that it predicts. Scans are those with a
    Dice of 0.8 or more.
    """
    network = trained_unet()

    def untrained(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return small_unet().eval()

    def scans(seed: int) -> Iterator[Scan]:
        for number in range(seed, 10_000):
            image, lesion = made_volume(number)
            with torch.no_grad():
                output = network(image[None]) if inferer is None else inferer(image[None], network)
            found = output.argmax(1) == 1
            if dice(found, lesion) >= 0.8:
                # As a tensor, so that a network at random weights, which segments nothing, is asked the same.
                yield Scan(number, image, lesion[0], ms.RegionScore(1, "softmax", region=found))

    return Task(network, untrained, scans, {} if inferer is None else {"inferer": inferer})


#: by its name what makes a task
TASKS: dict[str, Callable[[], Task]] = {
    "demo": demo,
    "segmentation": segmentation,
    "patches": lambda: segmentation(SlidingWindowInferer((24, 24, 24), 4, 0.5)),
}
