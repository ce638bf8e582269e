"""The tasks of ``generalise.py``: XAI-TRIS (arXiv 2306.12816), stripes, texture, counting, an asymmetry, a broken
mirror symmetry, a thin rod, a ring, a segmentation under a sliding window, three patients with multiple sclerosis,
each left out of the training once: how large are the lesions, is there one, and the segmentation; and further scans of
the demo's kind for the demo's network, on which defaults were tuned.

Images are made in batches on the device, 2D of 64 and 3D of 32 voxels along each axis. A maker returns images
``(n, 1, *spatial)``, the voxels of the evidence ``(n, *spatial)``, and the class, number or label map of each image.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from monai.transforms import NormalizeIntensity, ResampleToMatch
from record import trained
from scipy import ndimage
from torch import Tensor, nn

import monai_saliency as ms
from monai_saliency.data.demo import make_scan
from monai_saliency.networks.checkpoints import load_checkpoint

EDGE = {2: 64, 3: 32}
#: seeds: of the images that are explained, of those on which a network's accuracy is measured, and of the training
HALVES, HELD_OUT, FIRST_TRAINING = {"choose": 1, "final": 2}, 3, 10_000_000
LEAST_DICE = 0.5  # of a crop that is explained
FEW, MANY = 3, 10  # lesions in a crop: at most, at least

Random = np.random.Generator
Made = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Question:
    """A network, an image that it gets right, and what it looks at there."""

    task: str
    number: int
    image: Tensor  # (1, C, *spatial)
    truth: Tensor  # bool (*spatial)
    network: nn.Module
    untrained: nn.Module  # the same at random weights
    target: ms.Target
    accuracy: float  # of the network, on images that it has not seen; Dice of a segmentation
    settings: dict[str, Any]  # what all methods are given besides the target
    cohort: Tensor | None = None  # unlabelled images (n, C, *spatial) of the task


def noise(random: Random, count: int, widths: Sequence[float], device: str) -> Tensor:
    """Correlated noise ``(count, *spatial)`` of mean 0 and standard deviation 1; a width along each axis."""
    white = random.standard_normal((count, *[EDGE[len(widths)]] * len(widths)), dtype=np.float32)
    found = smooth(torch.from_numpy(white).to(device), widths)
    return nn.functional.instance_norm(found[:, None])[:, 0]


def smooth(images: Tensor, widths: Sequence[float]) -> Tensor:
    """Images ``(n, *spatial)`` convolved with a Gaussian, as if they were periodic."""
    for axis, width in enumerate(widths, start=1):
        spectrum = torch.fft.fft(images.movedim(axis, -1))
        falls = torch.exp(-2 * (torch.pi * width * torch.fft.fftfreq(images.shape[axis], device=images.device)) ** 2)
        images = torch.fft.ifft(spectrum * falls).real.movedim(-1, axis)
    return images


def places(random: Random, count: int, each: int, apart: float, low: Any, high: Any) -> np.ndarray:
    """For ``count`` images, the places ``(count, each, dims)`` of things that lie so far apart."""
    low, high = (np.asarray(side, float) for side in (low, high))
    found = np.empty((count, each, len(low)))
    wrong = np.ones(count, bool)
    while wrong.any():
        found[wrong] = random.uniform(low, high, (wrong.sum(), each, len(low)))
        gaps = np.linalg.norm(found[:, :, None] - found[:, None], axis=-1) + 1e9 * np.eye(each)
        wrong = (gaps <= apart).any(axis=(1, 2))
    return found


def offsets(centres: np.ndarray, device: str) -> Tensor:
    """From centres ``(..., dims)`` to each voxel: ``(..., *spatial, dims)``."""
    dims = centres.shape[-1]
    axis = torch.arange(EDGE[dims], device=device, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(*[axis] * dims, indexing="ij"), dim=-1)
    centre = torch.from_numpy(centres).to(device, torch.float32)
    return grid - centre.reshape(*centres.shape[:-1], *[1] * dims, dims)


def balls(random: Random, centres: np.ndarray, low: float, high: float, device: str) -> Tensor:
    """Discs or balls ``(n, each, *spatial)`` of random radii around centres ``(n, each, dims)``."""
    radii = torch.from_numpy(random.uniform(low, high, centres.shape[:2])).to(device, torch.float32)
    far = offsets(centres, device).norm(dim=-1)
    return far < radii.reshape(*radii.shape, *[1] * centres.shape[-1])


def where(chosen: np.ndarray, values: Tensor) -> Tensor:
    """Values ``(n, ...)`` of the chosen images ``(n,)``, and zeros."""
    return values * torch.from_numpy(chosen).to(values.device).reshape(-1, *[1] * (values.ndim - 1))


def made(images: Tensor, truth: Tensor, wanted: Any) -> Made:
    return images[:, None], truth.bool(), torch.as_tensor(wanted).to(images.device)


# XAI-TRIS: which tetromino is it, T or L? In 3D their four cells are cubes.
T, L = (np.array(cells) for cells in ([[1, 0], [1, 1], [1, 0]], [[1, 0], [1, 0], [1, 1]]))


def tetromino(cells: np.ndarray, size: int, dims: int, corner: Any = None, random: Random | None = None) -> np.ndarray:
    """At a corner, or at random: turned, and anywhere. In 3D its mirror image is a turned one too."""
    cells = np.rot90(cells, 0 if random is None else random.integers(4))
    cells = cells.reshape(cells.shape + (1,) * (dims - 2))
    if random is not None:
        cells = cells.transpose(random.permutation(3)) if dims == 3 else cells
        corner = random.integers([EDGE[dims] - size * n + 1 for n in cells.shape])
    block, found = np.kron(cells, np.ones([size] * dims)), np.zeros([EDGE[dims]] * dims)
    found[tuple(slice(at, at + n) for at, n in zip(corner, block.shape, strict=True))] = block
    return found


def tris(random: Random, count: int, device: str, kind: str, width: float, strength: float, dims: int) -> Made:
    """T and L at places of their own (linear, multiplicative), anywhere and turned (rotated), or both of them, with
    equal or unequal signs (xor).
    """
    corners, size = {2: (((8, 8), (32, 40)), 8), 3: (((3, 4, 5), (14, 19, 20)), 5)}[dims]
    fixed = np.stack([tetromino(cells, size, dims, corner) for cells, corner in zip((T, L), corners, strict=True)])
    labels, signs = random.integers(2, size=count), random.choice([-1, 1], size=(count, 1))
    stamps = fixed[labels]
    if kind == "rotated":
        stamps = np.stack([tetromino((T, L)[label], 4, dims, random=random) for label in labels])
    elif kind == "xor":
        stamps = np.tensordot(signs * np.stack([np.ones(count), 2 * labels - 1], axis=1), fixed, 1)
    truth = torch.from_numpy(stamps).float().to(device)
    back, shape = noise(random, count, [width] * dims, device), smooth(truth, [1.5 if dims == 2 else 0.7] * dims)
    image = back * (1 - strength * shape) if kind == "multiplicative" else back + strength * shape
    return made(image, truth != 0, labels)


def stripes(random: Random, count: int, device: str) -> Made:
    """A patch of vertical stripes, or none, beside patches of horizontal ones."""
    has = random.integers(2, size=count).astype(bool)
    to = offsets(places(random, count, 3, 16, [9, 9], [54, 54]), device)
    waves = torch.stack([torch.cos(2 * torch.pi * to[..., axis] / 5) for axis in (0, 1)])
    is_vertical = where(has, torch.tensor([True, False, False], device=device).expand(count, 3))[:, :, None, None]
    far = to.norm(dim=-1)
    image = noise(random, count, [1.5, 1.5], device)
    image = image + (2 * torch.where(is_vertical, waves[1], waves[0]) * torch.exp(-(far**2) / 18)).sum(1)
    return made(image, ((far < 5.5) & is_vertical).any(1), has.astype(int))


def texture(random: Random, count: int, device: str) -> Made:
    """An ellipse of noise that is drawn out along one axis, or none."""
    has = random.integers(2, size=count).astype(bool)
    radii = torch.from_numpy(random.uniform(11, 18, (count, 1, 1, 2))).to(device, torch.float32)
    inside = (offsets(random.uniform(20, 43, (count, 2)), device) / radii).norm(dim=-1) < 1
    truth = where(has, inside)
    image = torch.where(truth, noise(random, count, [0.4, 1.6], device), noise(random, count, [0.7, 0.7], device))
    return made(image, truth, has.astype(int))


def ring(random: Random, count: int, device: str, dims: int) -> Made:
    """A ring (in 3D a shell), or none, beside discs as bright and as large."""
    has = random.integers(2, size=count).astype(bool)
    radius, thick, each = {2: (7, 1.3, 4), 3: (5, 1.0, 3)}[dims]
    margin = [radius + 2.0] * dims
    centres = places(random, count, each, 2 * radius + 3, margin, [EDGE[dims] - 1 - side for side in margin])
    far = offsets(centres, device).norm(dim=-1)
    truth = where(has, far[:, 0] < radius + thick)
    rings = where(has, (far[:, 0] - radius).abs() < thick)
    bright = rings | (far[:, 1:] < radius * 0.8).any(1)
    return made(noise(random, count, [2.0] * dims, device) + 2.5 * bright, truth, has.astype(int))


def counting(random: Random, count: int, device: str) -> Made:
    """One to six bright discs."""
    wanted = random.integers(1, 7, size=count)
    discs = balls(random, places(random, count, 6, 10, [5, 5], [58, 58]), 2.5, 4, device)
    truth = (discs & torch.from_numpy(np.arange(6) < wanted[:, None]).to(device)[:, :, None, None]).any(1)
    return made(noise(random, count, [2.0, 2.0], device) + 3 * truth, truth, wanted)


def asymmetry(random: Random, count: int, device: str) -> Made:
    """Discs on both sides, more of them on the right one, or on the left one."""
    fewer, is_right = random.integers(0, 3, size=count), random.integers(2, size=count)
    sides = []
    for side in (0, 1):
        low = np.array([5, 5 + 32 * side])
        discs = balls(random, places(random, count, 3, 10, low, (58, 26 + 32 * side)), 2.5, 4, device)
        has = np.arange(3) < (fewer + (is_right == side))[:, None]
        sides.append((discs & torch.from_numpy(has).to(device)[:, :, None, None]).any(1))
    image = noise(random, count, [2.0, 2.0], device) + 3 * (sides[0] | sides[1])
    return made(image, where(is_right == 1, sides[1]), is_right)


def mirror(random: Random, count: int, device: str) -> Made:
    """Discs on both sides, and one that its own side alone has, or none."""
    has = random.integers(2, size=count).astype(bool)
    discs = balls(random, places(random, count, 4, 11, [5, 5], [58, 26]), 2.5, 4, device)
    image, both = noise(random, count, [2.0, 2.0], device), discs[:, 1:].any(1)
    image = (image + image.flip(-1)) / 2**0.5 + 2 * (both | both.flip(-1))
    truth = where(has, discs[:, 0])
    image = image + 2 * truth + 0.2 * noise(random, count, [0, 0], device)
    other = torch.from_numpy(random.integers(2, size=count) == 1).to(device)[:, None, None]
    return made(torch.where(other, image.flip(-1), image), torch.where(other, truth.flip(-1), truth), has.astype(int))


def dark_rods(random: Random, count: int, each: int, thick: float, device: str) -> Tensor:
    """Thin rods ``(count, each, *spatial)`` in 3D."""
    along = random.normal(size=(count, each, 3))
    along = torch.from_numpy(along / np.linalg.norm(along, axis=-1, keepdims=True)).to(device, torch.float32)
    to = offsets(random.uniform(10, 21, (count, each, 3)), device)
    reach = torch.einsum("nexyzd,ned->nexyz", to, along)
    length = torch.from_numpy(random.uniform(7, 10, (count, each))).to(device, torch.float32)[..., None, None, None]
    across = (to - reach[..., None] * along[:, :, None, None, None]).norm(dim=-1)
    return (across < thick) & (reach.abs() < length)


def rod(random: Random, count: int, device: str) -> Made:
    """A thin dark rod, or none, beside dark balls."""
    has = random.integers(2, size=count).astype(bool)
    dark = balls(random, places(random, count, 3, 9, [4] * 3, [27] * 3), 2, 3, device).any(1)
    truth = where(has, dark_rods(random, count, 1, 1.3, device)[:, 0])
    return made(noise(random, count, [1.0] * 3, device) - 3 * (dark | truth), truth, has.astype(int))


def lump(random: Random, count: int, device: str) -> Made:
    """A segmentation: balls are lesions, rods as bright are not."""
    truth = balls(random, places(random, count, 2, 12, [5] * 3, [26] * 3), 3, 4.5, device).any(1)
    bright = smooth((truth | dark_rods(random, count, 2, 1.3, device).any(1)).float(), [0.5] * 3)
    image = noise(random, count, [3.0] * 3, device) + 3 * bright + 0.2 * noise(random, count, [0] * 3, device)
    return made(image, truth, truth.long())


def several(random: Random, count: int, device: str, dims: int) -> Made:
    """One to eight small lesions, unequally large and bright, or none: any of them is enough."""
    many = np.where(random.integers(2, size=count), random.integers(1, 9, size=count), 0)
    edge, apart, low, high = EDGE[dims], *{2: (8, 1.5, 3), 3: (6, 1.3, 2.2)}[dims]
    discs = balls(random, places(random, count, 8, apart, [4] * dims, [edge - 5] * dims), low, high, device)
    bright = torch.from_numpy(random.uniform(2.5, 4, (count, 8))).to(device, torch.float32)
    shown = torch.from_numpy(np.arange(8) < many[:, None]).to(device) * bright
    discs = discs * shown.reshape(count, 8, *[1] * dims)
    return made(noise(random, count, [2.0] * dims, device) + discs.sum(1), discs.any(1), (many > 0).astype(int))


def largest(random: Random, count: int, device: str) -> Made:
    """Two to six bright discs; wanted is the radius of the largest one."""
    many, radii = random.integers(1, 6, size=count), random.uniform(4, 7, count)
    others = random.uniform(1.5, radii[:, None] - 1.5, (count, 5))
    radii = np.concatenate([radii[:, None], np.where(np.arange(5) < many[:, None], others, 0)], axis=1)
    far = offsets(places(random, count, 6, 15, [8, 8], [55, 55]), device).norm(dim=-1)
    discs = far < torch.from_numpy(radii).to(device, torch.float32)[..., None, None]
    return made(noise(random, count, [2.0, 2.0], device) + 3 * discs.any(1), discs[:, 0], radii[:, 0])


def lesions_and_rods(random: Random, count: int, device: str) -> Made:
    """A segmentation of one to six discs, beside thin lines as bright."""
    many = random.integers(1, 7, size=count)
    discs = balls(random, places(random, count, 6, 10, [5, 5], [58, 58]), 2.5, 4, device)
    truth = (discs & torch.from_numpy(np.arange(6) < many[:, None]).to(device)[:, :, None, None]).any(1)
    to, turned = offsets(random.uniform(8, 55, (count, 3, 2)), device), random.uniform(0, np.pi, (count, 3))
    along = torch.from_numpy(np.stack([np.cos(turned), np.sin(turned)], -1)).to(device, torch.float32)
    reach = torch.einsum("nexyd,ned->nexy", to, along)
    lines = ((to - reach[..., None] * along[:, :, None, None]).norm(dim=-1) < 0.8) & (reach.abs() < 8)
    return made(noise(random, count, [2.0, 2.0], device) + 3 * (truth | lines.any(1)), truth, truth.long())


def known(random: Random, count: int, device: str, many: int, kind: str) -> Made:
    """So many discs, unequally large and bright, on faint noise: the evidence is those that :class:`Known` answers
    "yes" to alone.
    """
    discs = balls(random, places(random, count, many, 9, [5, 5], [58, 58]), 2, 4.5, device)
    bright = torch.from_numpy(random.uniform(1.5, 4, (count, many, 1, 1))).to(device, torch.float32)
    seen = torch.stack([Known(kind)(each[:, None])[:, 1] > 0 for each in (bright * discs).unbind(1)], dim=1)
    truth = (discs & seen[..., None, None]).any(1)
    return made(0.2 * noise(random, count, [2.0, 2.0], device) + (bright * discs).sum(1), truth, np.ones(count, int))


class Known(nn.Module):
    """Two classes by the bright voxels, with nothing to train: any of them ("or"), all together ("sum"), or the
    brightest one of them ("max").
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.bias = nn.Parameter(torch.zeros(1))  # an optimiser needs one; its gradient is 0

    def forward(self, images: Tensor) -> Tensor:
        bright = nn.functional.avg_pool2d(images, 3, 1, 1)
        if self.kind == "max":
            logit = 4 * (bright.flatten(1).amax(1) - 1.5)
        elif self.kind == "or":  # each square says no by itself: the probability that all of them do
            yes = (4 * (nn.functional.max_pool2d(bright, 8) - 1.5)).sigmoid().flatten(1)
            no = torch.log1p(-0.95 * yes).sum(1)
            logit = (-torch.expm1(no)).log() - no
        else:
            logit = ((4 * (bright - 1.5)).sigmoid() - torch.tensor(-6.0).sigmoid()).flatten(1).sum(1) / 4 - 2
        return torch.stack([-logit / 2, logit / 2], dim=1) + 0 * self.bias


class Attention(nn.Module):
    """The mean of features ``(n, channels, *cells)``, weighted by what they are (Ilse et al., 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Sequential(nn.Linear(channels, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, features: Tensor) -> Tensor:
        cells = features.flatten(2).mT
        return (cells * self.weight(cells).softmax(1)).sum(1)


class Counted(UNet):
    """A segmentation in training; afterwards the number of connected regions that it finds, ``(n, 1)``."""

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images)
        return logits if self.training else regions(logits.argmax(1)).to(logits)


def regions(labels: Tensor) -> Tensor:
    """The number of connected regions of at least four voxels in each label map ``(n, *spatial)``, as ``(n, 1)``."""
    counts = []
    for each in labels.cpu().numpy():
        numbers, _ = ndimage.label(each, np.ones([3] * each.ndim))
        counts.append([int((np.bincount(numbers.ravel())[1:] >= 4).sum())])
    return torch.tensor(counts)


def convolutions(dims: int, pool: str = "max", channels: int = 1, classes: int = 2) -> nn.Sequential:
    """Convolutions with batch norm, and the largest or the mean answer of each of the last ones, or all of them."""
    conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
    layers: list[nn.Module] = []
    for before, width, edge, stride in ((channels, 12, 5, 2), (12, 24, 3, 2), (24, 24, 3, 1)):
        layers += [conv(before, width, edge, stride, padding=edge // 2), norm(width), nn.ReLU()]
    if pool == "none":  # as in XAI-TRIS: what is where matters
        head = nn.Linear(4 * (EDGE[dims] // 4) ** dims, 32), nn.ReLU(), nn.Linear(32, classes)
        return nn.Sequential(*layers, conv(24, 4, 1), nn.Flatten(), *head)
    if pool == "attention":
        return nn.Sequential(*layers, Attention(24), nn.Linear(24, classes))
    kind = getattr(nn, f"Adaptive{'Max' if pool == 'max' else 'Avg'}Pool{dims}d")
    return nn.Sequential(*layers, kind(1), nn.Flatten(), nn.Linear(24, classes))


class Transformer(nn.Module):
    """A small vision transformer on patches of 8 voxels along each axis."""

    def __init__(self, dims: int, width: int = 64) -> None:
        super().__init__()
        self.patches = (nn.Conv2d if dims == 2 else nn.Conv3d)(1, width, 8, 8)
        self.places = nn.Parameter(0.1 * torch.randn((EDGE[dims] // 8) ** dims, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(images).flatten(2).mT + self.places).mean(1))


class Mirrored(nn.Sequential):
    """Gets an image, and what it is in a mirror, as channels."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(torch.cat([images, images.flip(-1)], dim=1))


class Sides(nn.Sequential):
    """Reads each half; the two numbers are two classes."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([super(Sides, self).forward(half) for half in images.chunk(2, dim=-1)], dim=1)


@dataclass(frozen=True)
class Task:
    """Images and a network for them."""

    make: Callable[[Random, int, str], Made]
    network: Callable[[], nn.Module]  # at random weights
    kind: str = "class"  # or "count", "segmentation", or "regions", whose number a segmentation is read as
    steps: int = 300
    rate: float = 5e-3
    settings: dict[str, Any] = field(default_factory=lambda: {"mask_batch_size": 128})

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        if self.kind in ("segmentation", "regions"):
            return DiceCELoss(to_onehot_y=True, softmax=True)(found, wanted[:, None].float())
        if self.kind == "count":
            return nn.functional.mse_loss(found[:, 0], wanted.float())
        return nn.functional.cross_entropy(found, wanted)

    def right(self, found: Tensor, wanted: Tensor) -> Tensor:
        """How right each answer is, 0 to 1: of a segmentation its Dice."""
        if self.kind == "segmentation":
            return torch.stack([dice(a, b) for a, b in zip(found.argmax(1) == 1, wanted == 1, strict=True)])
        if self.kind in ("count", "regions"):
            wanted = wanted if self.kind == "count" else regions(wanted)[:, 0].to(found)
            return ((found[:, 0] - wanted).abs() < 0.5).float()
        return (found.argmax(1) == wanted).float()

    def target(self, found: Tensor, wanted: Tensor) -> ms.Target:
        if self.kind == "segmentation":
            return ms.RegionScore(1, "softmax", region=found.argmax(0)[None] == 1)
        if self.kind in ("count", "regions"):
            return ms.ClassScore([0], "none")
        return ms.ClassScore([int(wanted)], "softmax")


def dice(found: Tensor, truth: Tensor) -> Tensor:
    return 2 * (found & truth).sum() / (found.sum() + truth.sum()).clamp(min=1)


def of_task(name: str, half: str, count: int, device: str) -> Iterator[Question]:
    """Questions of a made task."""
    task = TASKS[name]
    torch.manual_seed(0)
    network = task.network().to(device)
    untrained = copy.deepcopy(network).eval()

    def loss(step: int) -> Tensor:
        images, _, wanted = task.make(np.random.default_rng(FIRST_TRAINING + step), 48, device)
        return task.loss(network(images), wanted)

    network = trained(network, f"generalise_{name}", loss, task.steps, task.rate)
    with torch.no_grad():
        images, _, wanted = task.make(np.random.default_rng(HELD_OUT), 256, device)
        accuracy = float(task.right(network(images), wanted).mean())
        images, truths, wanted = task.make(np.random.default_rng(HALVES[half]), 4 * count + 8, device)
        found = network(images)
        right = (task.right(found, wanted) > 0.8) & truths.flatten(1).any(1)
    for number in right.nonzero()[:count, 0].tolist():
        asked = images[[number]], truths[number], network, untrained, task.target(found[number], wanted[number])
        yield Question(name, number, *asked, accuracy, task.settings, images[:8])


TASKS: dict[str, Task] = {
    "stripes": Task(stripes, partial(convolutions, 2)),
    "texture": Task(texture, partial(convolutions, 2)),
    "counting": Task(counting, partial(convolutions, 2, "mean", classes=1), "count"),
    "asymmetry": Task(asymmetry, lambda: Sides(convolutions(2, "mean", classes=1))),
    "mirror": Task(mirror, lambda: Mirrored(convolutions(2, "max", 2))),
    "rod_3d": Task(rod, partial(convolutions, 3)),
    "ring": Task(partial(ring, dims=2), partial(convolutions, 2, "mean")),
    "ring_3d": Task(partial(ring, dims=3), partial(convolutions, 3, "mean")),
    "lump_3d": Task(
        lump,
        lambda: UNet(3, 1, 2, (8, 16, 24), (2, 2), norm="batch"),
        "segmentation",
        settings={"mask_batch_size": 32, "inferer": SlidingWindowInferer((24,) * 3, 32, 0.5)},
    ),
}
for _kind, _pool in (("linear", "vit"), ("multiplicative", "mean"), ("rotated", "max"), ("xor", "none")):
    for _dims, _correlated in itertools.product((2, 3), (False, True)):
        _width = {2: 10.0, 3: 5.0}[_dims] if _correlated else 0.0
        _strength = {"linear": 0.5, "multiplicative": 0.9, "rotated": 3.0, "xor": 1.0}[_kind]
        _made = partial(tris, kind=_kind, width=_width, strength=_strength, dims=_dims)
        _network = partial(Transformer, _dims) if _pool == "vit" else partial(convolutions, _dims, _pool)
        _name = f"{_kind}_{'correlated' if _correlated else 'white'}{'_3d' if _dims == 3 else ''}"
        TASKS[_name] = Task(_made, _network, steps=800, rate=5e-3 if _pool in ("max", "mean") else 1e-3)

# The everyday question, whose evidence is there more than once.
for _pool, _dims in itertools.product(("max", "attention"), (2, 3)):
    _name = f"any_{_pool}{'_3d' if _dims == 3 else ''}"
    TASKS[_name] = Task(partial(several, dims=_dims), partial(convolutions, _dims, _pool))
TASKS["largest"] = Task(largest, partial(convolutions, 2, "max", classes=1), "count", steps=800)
TASKS["regions"] = Task(lesions_and_rods, lambda: Counted(2, 1, 2, (8, 16, 24), (2, 2), norm="batch"), "regions")
for _kind, _many in itertools.product(("or", "sum", "max"), (3, 6, 12)):
    TASKS[f"known_{_kind}_{_many}"] = Task(partial(known, many=_many, kind=_kind), partial(Known, _kind), steps=1)


DEMO = "demo"
#: from the name of a unit of work to the patient's
PATIENTS = {f"lesions{name}": name for name in ("07", "19", "26")}
LESION_NETWORK = partial(UNet, 3, 2, 2, (12, 24, 48), (2, 2), num_res_units=1, norm="batch")


class Lesions(nn.Module):
    """A segmentation, read as a number: lesion volume in ml ("load"), or as two classes: is there a lesion ("any")?"""

    def __init__(self, network: nn.Module, question: str) -> None:
        super().__init__()
        self.network, self.question = network, question

    def forward(self, images: Tensor) -> Tensor:
        logits = self.network(images)
        if self.question == "load":
            return logits.softmax(1)[:, 1].flatten(1).sum(1, keepdim=True) / 1000
        highest = (logits[:, 1] - logits[:, 0]).flatten(1).amax(1) / 2
        return torch.stack([-highest, highest], dim=1)


def patient(folder: Path, name: str, device: str) -> tuple[Tensor, Tensor]:
    """FLAIR and T1 ``(2, *spatial)`` and the lesions ``(*spatial)``."""
    read = [nib.load(folder / f"patient{name}_{kind}.nii.gz").get_fdata() for kind in ("FLAIR", "T1", "lesions")]
    images = torch.from_numpy(np.stack(read[:2])).float()
    images = NormalizeIntensity(nonzero=True, channel_wise=True)(images).clamp(-4, 6)
    return images.to(device), torch.from_numpy(read[2] > 0.5).to(device)


def crop(volume: Tensor, centre: Sequence[int], edge: int) -> Tensor:
    """A cube around a voxel, or as near to it as fits."""
    shape = volume.shape[-3:]
    starts = [min(max(0, int(at) - edge // 2), n - edge) for at, n in zip(centre, shape, strict=True)]
    return volume[(..., *(slice(start, start + edge) for start in starts))]


def batch_of_crops(random: Random, patients: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Four crops of 48 voxels, 7 of 10 around lesions, flipped and changed in intensity."""
    crops = []
    for _ in range(4):
        images, lesions = patients[random.integers(len(patients))]
        voxels = (lesions if random.random() < 0.7 else images[0] != 0).nonzero()
        centre = voxels[random.integers(len(voxels))].tolist()
        flips = [axis for axis in (1, 2, 3) if random.random() < 0.5]
        both = torch.cat([crop(images, centre, 48), crop(lesions, centre, 48)[None]]).flip(flips)
        crops.append(torch.cat([both[:2] * random.uniform(0.9, 1.1) + random.uniform(-0.1, 0.1), both[2:]]))
    found = torch.stack(crops)
    return found[:, :2], found[:, 2:]


def of_patient(name: str, half: str, count: int, device: str, folder: Path) -> Iterator[Question]:
    """Questions about crops of 64 voxels of the patient that is left out."""
    patients = {each: patient(folder, each, device) for each in PATIENTS.values()}
    images, lesions = patients.pop(name)
    torch.manual_seed(0)
    network = LESION_NETWORK().to(device)
    untrained = copy.deepcopy(network).eval()

    def loss(step: int) -> Tensor:
        given, labels = batch_of_crops(np.random.default_rng(step), list(patients.values()))
        return DiceCELoss(to_onehot_y=True, softmax=True)(network(given), labels)

    network = trained(network, f"generalise_lesions{name}", loss, 500, 6e-3)
    patches = SlidingWindowInferer((48,) * 3, 16, 0.5)
    with torch.no_grad():
        whole = SlidingWindowInferer((96,) * 3, 2, 0.25)(images[None], network)[0]
        accuracy = float(dice(whole.argmax(0) == 1, lesions))
    numbers, most = ndimage.label(lesions.cpu().numpy(), np.ones((3, 3, 3)))
    random, done = np.random.default_rng(HALVES[half]), 0
    for _ in range(20 * count):
        voxels = np.argwhere(numbers == random.integers(1, most + 1))
        centre = voxels[random.integers(len(voxels))] + random.integers(-12, 13, size=3)
        image, truth = crop(images, centre, 64)[None].clone(), crop(lesions, centre, 64).clone()
        with torch.no_grad():
            found = network(image).argmax(1) == 1
        if done == count or dice(found[0], truth) < LEAST_DICE:
            continue
        done += 1
        shared = {"mask_batch_size": 64}
        for question, target in (("load", ms.ClassScore([0], "none")), ("any", ms.ClassScore([1], "softmax"))):
            both = Lesions(network, question).eval(), Lesions(untrained, question).eval()
            yield Question(f"lesions, {question}", done, image, truth, *both, target, accuracy, shared)
        target, shared = ms.RegionScore(1, "softmax", region=found), {"mask_batch_size": 8, "inferer": patches}
        yield Question("lesions, segmentation", done, image, truth, network, untrained, target, accuracy, shared)
    # "Is there one" where there are many, and where there are few.
    asked = Lesions(network, "any").eval(), Lesions(untrained, "any").eval(), ms.ClassScore([1], "softmax"), accuracy
    left = {"few": max(1, count // 2), "many": max(1, count // 2)}
    for _ in range(100 * count):
        voxels = np.argwhere(numbers == random.integers(1, most + 1))
        centre = voxels[random.integers(len(voxels))] + random.integers(-32, 33, size=3)
        image, truth = crop(images, centre, 64)[None].clone(), crop(lesions, centre, 64).clone()
        here = int(regions(truth[None])[0, 0])
        kind = "few" if 1 <= here <= FEW else "many" if here >= MANY else ""
        if left.get(kind, 0):
            with torch.no_grad():
                found = network(image).argmax(1) == 1
            if dice(found[0], truth) >= LEAST_DICE:
                left[kind] -= 1
                yield Question(f"lesions, any of {kind}", left[kind], image, truth, *asked, {"mask_batch_size": 64})


def of_demo(half: str, count: int, device: str) -> Iterator[Question]:
    """Questions about scans with a lesion that the demo's network finds, by the bundle's preprocessing."""
    config = read_bundle()
    preprocessing = config.get_parsed_content("preprocessing")
    network = load_checkpoint(config.get_parsed_content("network"), BUNDLE / "models" / "model.pt").eval().to(device)
    torch.manual_seed(0)
    untrained = read_bundle().get_parsed_content("network_def").eval().to(device)
    target, done = ms.ClassScore([LESION], "softmax"), 0
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count(FIRST_SCAN + 100_000 * HALVES[half]):
            scan, label = make_scan(number, lesion=True)
            nib.save(scan, f"{folder}/scan.nii.gz")
            image = preprocessing({"image": f"{folder}/scan.nii.gz", "case": str(number), "channels": 1})["image"]
            images = image.as_tensor()[None].to(device)
            with torch.no_grad():
                is_found = int(network(images).argmax()) == LESION
            if done == count:
                return
            if is_found:
                done += 1
                lesion = MetaTensor(np.asarray(label.dataobj, np.float32)[None], torch.as_tensor(label.affine))
                truth = ResampleToMatch(mode="nearest")(lesion, image)[0].as_tensor().to(device) > 0.5
                yield Question(DEMO, number, images, truth, network, untrained, target, 1.0, {"mask_batch_size": 16})


def questions(unit: str, half: str, count: int, device: str, folder: Path) -> Iterator[Question]:
    """Those of a task, of the demo, or of a patient such as ``"lesions26"``, of whom there are half as many."""
    if unit == DEMO:
        return of_demo(half, count, device)
    if unit in TASKS:
        return of_task(unit, half, count, device)
    return of_patient(PATIENTS[unit], half, max(1, count // 2), device, folder)
