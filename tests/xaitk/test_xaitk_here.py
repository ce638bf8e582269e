"""xaitk-saliency's objects used here: perturbers, scorings and whole methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from xaitk_saliency import GenerateClassifierConfidenceSaliency, GenerateImageClassifierBlackboxSaliency, PerturbImage
from xaitk_saliency.impls.gen_classifier_conf_sal.occlusion_scoring import OcclusionScoring
from xaitk_saliency.impls.gen_classifier_conf_sal.rise_scoring import RISEScoring
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.slidingwindow import SlidingWindowStack
from xaitk_saliency.impls.perturb_image.mc_rise import MCRISEGrid
from xaitk_saliency.impls.perturb_image.rise import RISEGrid
from xaitk_saliency.impls.perturb_image.sliding_window import SlidingWindow

import monai_saliency as ms
from monai_saliency.bundle.chosen_method import ChosenMethod, describe, find_method, own_settings
from monai_saliency.errors import CaseError
from monai_saliency.sharding import Part
from monai_saliency.xaitk import BlackBoxInferer, ConfidenceScoring, PerturbImageMasks, as_method

TARGET = ms.ClassScore("all", "softmax")
IMAGES = torch.rand(2, 3, 18, 22, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Three classes of an image or volume."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return 3 * self.layers(batch)


NET = Net(3, 18, 22)


def scaled(maps: torch.Tensor) -> torch.Tensor:
    return maps / maps.abs().amax(dim=(2, 3), keepdim=True)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(expected.abs().max()) > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# Perturbers. ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (RISEGrid(40, 4, 0.5, 3, threads=0), ms.RISEMasks(40, 4, 0.5, 3)),
        (SlidingWindow((5, 6), (3, 4)), ms.SlidingWindowMasks((5, 6), (3, 4))),
    ],
)
def test_masks_equal_those_of_a_perturber(theirs: PerturbImage, ours: ms.masks.base.Masks) -> None:
    found, expected = (each.bind(IMAGES[0]) for each in (PerturbImageMasks(theirs), ours))
    assert len(found) == len(expected)
    for indices in (range(3, 9), [7, 0, 7]):
        torch.testing.assert_close(found.render(indices), expected.render(indices), rtol=0, atol=1e-6)
    weights = torch.rand(len(found), 2)
    sums = [each.weighted_sum(range(len(each)), weights) for each in (found, expected)]
    torch.testing.assert_close(*sums, rtol=0, atol=1e-4)


def test_perturbers_that_do_not_fit_are_refused() -> None:
    class Odd(PerturbImage):
        def __init__(self, array: Any) -> None:
            self.array = array

        def perturb(self, ref_image: np.ndarray) -> np.ndarray:
            return self.array

        def get_config(self) -> dict[str, Any]:
            return {}

    cases = [
        (np.ones((4, 5, 5)), r"Odd must make masks \(masks, 18, 22\), at least one .* got float64 \(4, 5, 5\)"),
        (np.full((4, 18, 22), 1.5), r"in \[0, 1\], 1 where the image is kept, got \[1.5, 1.5\]"),
    ]
    for array, message in cases:
        with pytest.raises(ValueError, match=message):
            PerturbImageMasks(Odd(array)).bind(IMAGES[0])
    with pytest.raises(ValueError, match=r"at least one and the same for all channels"):
        PerturbImageMasks(MCRISEGrid(4, 4, 0.5, 3)).bind(IMAGES[0])
    with pytest.raises(ValueError, match=r"explains 2D images, got one of shape \(1, 6, 7, 5\)"):
        PerturbImageMasks(SlidingWindow((2, 2), (2, 2))).bind(torch.rand(1, 6, 7, 5))
    with pytest.raises(ValueError, match="`perturber` must be a PerturbImage of xaitk-saliency"):
        PerturbImageMasks(RISEScoring())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"keep a cell with `p1` 0.3"):
        ms.PerturbationInferer(PerturbImageMasks(RISEGrid(5, 3, 0.3)), TARGET, ms.RISEScoring(0.5))


# Scorings. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (RISEScoring(0.4), ms.RISEScoring(0.4, "debiased")),
        (RISEScoring(), ms.RISEScoring(form="plain")),
        (OcclusionScoring(), ms.OcclusionScoring()),
    ],
)
def test_any_scoring_is_an_estimator(theirs: GenerateClassifierConfidenceSaliency, ours: Any) -> None:
    masks = ms.RISEMasks(40, 4, 0.4, 3)
    found = ms.PerturbationInferer(masks, TARGET, ConfidenceScoring(theirs))(IMAGES, NET)
    close(found, scaled(ms.PerturbationInferer(masks, TARGET, ours)(IMAGES, NET)))


def test_scorings_that_do_not_fit_are_refused() -> None:
    class Odd(GenerateClassifierConfidenceSaliency):
        def generate(self, *args: Any) -> np.ndarray:
            return np.full((3, 18, 22), np.nan) if len(args[1]) == 7 else np.zeros((2, 18, 22))

        def get_config(self) -> dict[str, Any]:
            return {}

    def explain(masks: Any, estimator: Any) -> Any:
        return ms.PerturbationInferer(masks, TARGET, estimator)(IMAGES[:1], NET)

    with pytest.raises(ValueError, match=r"Odd must make maps \(3, 18, 22\) \(scores, \*spatial\), got \(2, 18, 22\)"):
        explain(ms.RISEMasks(5), ConfidenceScoring(Odd()))
    with pytest.raises(ValueError, match="Odd made a map with NaN"):
        explain(ms.RISEMasks(7), ConfidenceScoring(Odd()))
    with pytest.raises(ValueError, match="reads one mask for all channels"):
        explain(ms.ChannelMasks(ms.SlidingWindowMasks(6)), ConfidenceScoring(OcclusionScoring()))
    with pytest.raises(ValueError, match=r"keep a cell with `p1` 0\.5"):
        explain(ms.RISEMasks(5), ConfidenceScoring(RISEScoring(0.4)))


# Whole methods. -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "fill"), [(1, None), (7, ms.ConstantFill([0.2, 0.9, 0.5])), (7, ms.BlurFill(2.0))])
def test_a_whole_method(batch: int, fill: Any) -> None:
    settings: dict[str, Any] = {"target": TARGET, "mask_batch_size": batch, "fill": fill}
    found = BlackBoxInferer(RISEStack(40, 4, 0.4, 3), **settings)(IMAGES, NET)
    close(found, scaled(ms.rise(40, 4, 0.4, 3, form="debiased", **settings)(IMAGES, NET)))
    found = BlackBoxInferer(SlidingWindowStack((5, 6), (3, 4)), **settings)(IMAGES, NET)
    close(found, scaled(ms.sliding_window((5, 6), (3, 4), **settings)(IMAGES, NET)))


def test_whole_methods_that_do_not_fit_are_refused() -> None:
    method = RISEStack(20, 4, 0.4, 3)
    explain = BlackBoxInferer(method, TARGET)
    with pytest.raises(CaseError, match=r"explains 2D images, got one of shape \(1, 6, 7, 5\)"):
        explain(torch.rand(1, 1, 6, 7, 5), Net(1, 6, 7, 5))
    with pytest.raises(ValueError, match="RISEStack makes its own maps: leave out `estimator` OcclusionScoring"):
        BlackBoxInferer(method, TARGET, estimator=ms.OcclusionScoring())
    with pytest.raises(ValueError, match="`method` must be a GenerateImageClassifierBlackboxSaliency"):
        BlackBoxInferer(RISEScoring(), TARGET)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be shared between workers: let these share cases"):
        explain.score(IMAGES, NET, part=Part(0, 2))


# By name. -------------------------------------------------------------------------------------------------------------

STACK = "xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise.RISEStack"


def test_a_class_is_a_method_by_its_dotted_path() -> None:
    assert list(own_settings(find_method(STACK))) == ["n", "s", "p1", "seed", "threads", "debiased"]
    assert describe(STACK).splitlines()[1] == "  --n (needed)"
    explain = ChosenMethod(STACK, {"n": 20, "s": 4, "p1": 0.4, "seed": 3})(target=TARGET)
    assert torch.equal(explain(IMAGES, NET), BlackBoxInferer(RISEStack(20, 4, 0.4, 3), TARGET)(IMAGES, NET))
    with pytest.raises(ValueError, match=r"needs --n, --s, --p1"):
        ChosenMethod(STACK)
    with pytest.raises(ValueError, match=r"RISEStack cannot be made of .*p1"):
        ChosenMethod(STACK, {"n": 20, "s": 4, "p1": 7})(target=TARGET)


def test_other_classes_are_no_methods() -> None:
    assert as_method(RISEScoring) is None
    assert as_method(GenerateImageClassifierBlackboxSaliency) is None
    with pytest.raises(ValueError, match=r"must be a function as in monai_saliency\.methods"):
        find_method("xaitk_saliency.impls.gen_classifier_conf_sal.rise_scoring.RISEScoring")
