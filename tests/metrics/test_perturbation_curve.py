"""Insertion and deletion against plain loops, Quantus, hand-made answers and laws."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tolerances import SINGLE, assert_close
from ignite.engine import Engine
from monai.data import MetaTensor
from monai.handlers import IgniteMetricHandler
from monai.inferers import SlidingWindowInferer

import monai_saliency as ms
from monai_saliency.metrics import Deletion, Infidelity, Insertion

TARGET = ms.ClassScore([0, 1], "none")
SHAPES = {2: (9, 8), 3: (6, 5, 7), 1: (1, 5, 7)}  # the last: a slice, saved as a volume


def network_of(dims: int, channels: int = 2, seed: int = 0) -> torch.nn.Module:
    draw = torch.Generator().manual_seed(dims + 10 * seed)
    first, second = torch.nn.Linear(channels * int(np.prod(SHAPES[dims])), 6), torch.nn.Linear(6, 2)
    for layer in (first, second):
        layer.weight.data = torch.randn(layer.weight.shape, generator=draw) / 3
        layer.bias.data = torch.randn(layer.bias.shape, generator=draw)
    return torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.Tanh(), second).double().eval()


def case_of(dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two maps of each of two images with two channels; the maps hold ties."""
    draw = torch.Generator().manual_seed(7)
    images = torch.rand(2, 2, *SHAPES[dims], generator=draw, dtype=torch.float64)
    return (torch.randn(2, 2, *SHAPES[dims], generator=draw) * 4).round(), images


def slow_curve(
    network: Callable[..., Any], saliency: np.ndarray, image: np.ndarray, fill: np.ndarray, steps: int, insert: bool
) -> tuple[list[float], list[list[float]]]:
    """Each point of the curve by itself."""
    ordered = sorted(saliency.ravel(), reverse=True)
    fractions, scores = [], []
    for step in range(steps + 1):
        wanted = max(1, round(step * len(ordered) / steps)) if step else 0
        level = ordered[wanted - 1] if step else np.inf
        # Equal values go at once: first what lies above them, where a share ends among them.
        for taken in (saliency > level, saliency >= level):
            among = (saliency >= level).sum() > wanted
            if (among or taken.sum() == wanted) and float(taken.mean()) not in fractions:
                shown = np.where(taken, image, fill) if insert else np.where(taken, fill, image)
                fractions.append(float(taken.mean()))
                scores.append(network(torch.from_numpy(shown)[None])[0].tolist())
    return fractions, scores


@pytest.mark.parametrize("fill", [None, ms.MeanFill(), ms.BlurFill(1.0)])
@pytest.mark.parametrize("metric", [Deletion, Insertion])
@pytest.mark.parametrize(
    ("dims", "steps", "count"), [(2, 6, 1), (3, 6, 1), (1, 6, 1), (2, 1, 1), (2, 1000, 1), (2, 6, 3)]
)
def test_equals_plain_loops(metric: type, dims: int, steps: int, count: int, fill: Any) -> None:
    """Of a network, and of an ensemble."""
    members, (maps, images) = [network_of(dims, seed=seed) for seed in range(count)], case_of(dims)
    network = members[0] if count == 1 else ms.Ensemble(members)
    mean = lambda x: torch.stack([member(x) for member in members]).mean(0)  # noqa: E731
    inferer = ms.rise(5, 3, target=TARGET, fill=ms.ConstantFill(0.2), mask_batch_size=3)
    measured = metric(inferer.replace(fill=fill) if fill else inferer, network, steps=steps)
    curves = measured.curves(maps, images)
    found = measured([*maps], [*images]) if dims == 1 else measured(maps, images)  # channel-first items, or a batch
    assert found.shape == (2, 2)
    filled = (fill or ms.ConstantFill(0.2))(images)
    for image, k in np.ndindex(2, 2):
        fractions, both_scores = slow_curve(
            mean, maps[image, k].numpy(), images[image].numpy(), filled[image].numpy(), steps, metric is Insertion
        )
        scores = [both[k] for both in both_scores]
        assert_close(curves[image][k].fractions, fractions)
        assert_close(curves[image][k].scores, scores)
        assert_close(found[image, k], torch.trapezoid(*torch.tensor([scores, fractions], dtype=torch.float64)))
    # MONAI keeps it in single precision.
    assert_close(float(measured.aggregate()), float(found.mean()), scale=found.abs().max(), within=SINGLE)


@pytest.mark.parametrize("steps", [72, 18])
def test_deletion_equals_quantus(steps: int) -> None:
    """Quantus is GPL: an oracle of tests, no more. It leaves the unperturbed image out."""
    quantus = pytest.importorskip("quantus", reason="needs Quantus, of the test extra")
    network, images = network_of(2, channels=1).float(), case_of(2)[1][:, :1].float()
    maps = torch.rand(images.shape, generator=torch.Generator().manual_seed(5))
    settings = {"disable_warnings": True, "display_progressbar": False, "normalise": False, "abs": False}
    flipping = quantus.PixelFlipping(features_in_step=72 // steps, perturb_baseline=0.25, **settings)
    cases = {"x_batch": images.numpy(), "y_batch": np.full(2, 1), "a_batch": maps.numpy()}
    expected = flipping(model=network, channel_first=True, softmax=False, **cases)
    inferer = ms.rise(target=ms.ClassScore([1], "none"), fill=ms.ConstantFill(0.25))
    found = [curve.scores[1:].numpy() for (curve,) in Deletion(inferer, network, steps).curves(maps, images)]
    assert_close(found, np.array(expected, dtype=float), within=SINGLE)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_network_that_sums_a_box(dims: int) -> None:
    """With the right map, the score falls in a line while the box goes, and is 0 from there on."""
    shape, box = (8,) * dims, (..., *[slice(2, 6)] * dims)
    network = lambda x: x[box].flatten(1).sum(1, keepdim=True)  # noqa: E731
    image = torch.ones(1, 1, *shape, dtype=torch.float64)
    saliency = torch.rand(1, 1, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    saliency[box] += 1
    size, share = 4**dims, 0.5**dims
    inferer = ms.rise(target=ms.ClassScore([0], "none"))
    deletion, insertion = (each(inferer, network, steps=2 ** (dims + 1)) for each in (Deletion, Insertion))
    ((curve,),) = deletion.curves(saliency, image)
    expected = [size * max(0.0, 1 - fraction / share) for fraction in curve.fractions.tolist()]
    assert_close(curve.scores, expected)
    assert_close(deletion(saliency, image), size * share / 2)
    assert_close(insertion(saliency, image), size * (1 - share / 2))
    # The other way round it is the worst map.
    assert_close(deletion(-saliency, image), size * (1 - share / 2))
    # A flat map is a straight line between the ends.
    assert float(deletion(torch.zeros_like(image), image)) == float(insertion(torch.zeros_like(image), image))
    assert float(deletion(torch.zeros_like(image), image)) == size / 2


@pytest.mark.parametrize("metric", [Deletion, Insertion])
def test_batches_and_remembered_patches_change_nothing(metric: type) -> None:
    conv = torch.nn.Conv2d(1, 2, 3, padding=1).double().eval()
    image = torch.rand(1, 1, 20, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    saliency = torch.zeros(1, 1, 20, 18)
    saliency[..., 3:7, 4:9] = torch.rand(4, 5, generator=torch.Generator().manual_seed(1))
    sliding = SlidingWindowInferer((8, 8), 2, overlap=0.5)
    found = []
    for batch, memory in ((1, False), (7, False), (7, True)):
        inferer = ms.sliding_window(
            target=ms.RegionScore(1, "softmax", "all"), inferer=sliding, mask_batch_size=batch, patch_memory=memory
        )
        found.append(metric(inferer, conv, steps=60).curves(saliency, image)[0][0].scores)
    for other in found[1:]:
        assert_close(other, found[0])


def test_in_an_evaluator() -> None:
    """As a handler of MONAI, fed with lists of items with meta data, which name the case in errors."""
    network, (maps, images) = network_of(2), case_of(2)
    evaluator = Engine(lambda engine, batch: batch)
    metric = Deletion(ms.rise(target=TARGET), network, steps=5)
    handler = IgniteMetricHandler(
        metric, output_transform=lambda items: ([i["map"] for i in items], [i["image"] for i in items])
    )
    handler.attach(evaluator, "deletion")
    named = [MetaTensor(image, meta={"filename_or_obj": f"ct_{i}.nii.gz"}) for i, image in enumerate(images)]
    evaluator.run([[{"map": maps[0], "image": named[0]}], [{"map": maps[1], "image": named[1]}]])
    expected = Deletion(ms.rise(target=TARGET), network, steps=5).compute(maps, images)
    assert_close(float(evaluator.state.metrics["deletion"]), float(expected.mean()), within=SINGLE)
    one = Deletion(ms.rise(target=TARGET), network)
    with pytest.raises(ValueError, match=r"case ct_1\.nii\.gz has 1 maps"):
        one([maps[1][:1]], [named[1]])


def test_mistakes() -> None:
    network, (maps, images) = network_of(2), case_of(2)
    inferer = ms.rise(target=TARGET)
    with pytest.raises(ValueError, match="`inferer` must be an inferer made by a method"):
        Deletion(network, network)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`steps` must be a whole number"):
        Insertion(inferer, network, steps=0)
    with pytest.raises(ValueError, match=r"`y` must be the images .*, got a NoneType"):
        Deletion(inferer, network)(maps)
    with pytest.raises(ValueError, match="are not of one batch and one grid"):
        Deletion(inferer, network)(maps, images[..., :-1])


# Infidelity against plain loops, hand-made answers and captum.
MASKS = ms.masks.RISEMasks(30, 3, seed=4)


def slow_pairs(masks: Any, network: Any, saliency: torch.Tensor, image: torch.Tensor, k: int) -> Any:
    """For each mask, the map's sum over what it hides, and the fall of the score."""
    bound = masks.bind(image)
    sums, drops = [], []
    for index in range(len(bound)):
        mask = bound.render([index])[0, 0]
        total = 0.0
        for at in np.ndindex(*saliency.shape):
            total += (1 - float(mask[at])) * float(saliency[at])
        sums.append(total)
        drops.append(float(network(image[None])[0, k] - network((mask * image + (1 - mask) * 0.3)[None])[0, k]))
    return sums, drops


def slow_infidelity(sums: list[float], drops: list[float], normalize: bool) -> float:
    """The mean square of what the map's sums miss of the falls of the score; ``normalize`` scales them to fit best."""
    factor = 1.0
    if normalize:
        products, squares = 0.0, 0.0
        for hidden, fall in zip(sums, drops, strict=True):
            products += hidden * fall
            squares += hidden**2
        factor = products / squares
    missed = [(factor * hidden - fall) ** 2 for hidden, fall in zip(sums, drops, strict=True)]
    return sum(missed) / len(missed)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_infidelity_equals_plain_loops(dims: int, normalize: bool) -> None:
    network, (maps, images) = network_of(dims), case_of(dims)
    inferer = ms.rise(target=ms.ClassScore([0, 1], "none"), mask_batch_size=7)
    found = Infidelity(inferer.replace(fill=ms.ConstantFill(0.3)), network, MASKS, normalize).compute(maps, images)
    for image, k in np.ndindex(2, 2):
        sums, drops = slow_pairs(MASKS, network, maps[image, k], images[image], k)
        assert_close(found[image, k], slow_infidelity(sums, drops, normalize))


@pytest.mark.parametrize("normalize", [False, True])
def test_infidelity_equals_captum(normalize: bool) -> None:
    infidelity = pytest.importorskip("captum.metrics", reason="needs captum").infidelity
    network, (maps, images) = network_of(2), case_of(2)
    image, saliency = images[:1], maps[:1, :1]
    bound = MASKS.bind(image[0])
    rendered = bound.render(range(len(bound)))

    def perturb(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # captum's attributions have the image's channels: the map's sum is spread over two.
        return (1 - rendered).expand_as(inputs), rendered * inputs

    expected = infidelity(
        lambda x: network(x)[:, 1],
        perturb,
        image,
        (saliency / 2).expand_as(image),
        n_perturb_samples=len(bound),
        max_examples_per_batch=len(bound),
        normalize=normalize,
    )
    inferer = ms.rise(target=ms.ClassScore([1], "none"))
    found = Infidelity(inferer, network, MASKS, normalize).compute(saliency, image)
    assert_close(float(found), float(expected), within=SINGLE)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_linear_network_and_its_exact_map(dims: int) -> None:
    """Occlusion of single voxels is exact for a sum: nothing is left of infidelity."""
    weight = torch.randn(SHAPES[dims], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    network = lambda x: (x[:, 0] * weight).flatten(1).sum(1, keepdim=True)  # noqa: E731
    image = torch.rand(1, 1, *SHAPES[dims], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inferer = ms.sliding_window(1, 1, target=ms.ClassScore([0], "none"))
    saliency = inferer(image, network)
    exact, shape_only = (Infidelity(inferer, network, normalize=each) for each in (False, True))
    assert float(exact.compute(saliency, image)) < 1e-20
    assert float(exact.compute(3 * saliency, image)) > 1e-3
    assert float(shape_only.compute(3 * saliency, image)) < 1e-20
    assert float(shape_only.compute(saliency.flip(2), image)) > 1e-3
    # A map of zeros explains nothing: what is left is the mean square of the falls.
    zero = float(shape_only.compute(torch.zeros_like(saliency), image))
    assert zero == float(exact.compute(torch.zeros_like(saliency), image)) > 1e-3
