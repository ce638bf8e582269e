"""nnU-Net's sliding window: its own predictor's logits, and remembered patches of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.nnunet import own_predictor

from monai_saliency import PerturbationInferer
from monai_saliency.estimators import OcclusionScoring
from monai_saliency.inferers.nnunet import NNUNetInferer
from monai_saliency.masks import SlidingWindowMasks
from monai_saliency.networks.nnunet import NNUNetModel
from monai_saliency.targets import RegionScore

SHAPES = {"3d_fullres": ((11, 30, 24), (5, 19, 13)), "2d": ((3, 30, 24), (2, 19, 13))}


@contextmanager
def counted(network: torch.nn.Module) -> Iterator[list[int]]:
    """Patches that the folds' networks are given, mirrored ones too."""
    seen: list[int] = []
    hooks = [
        member.network.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
        for member in getattr(network, "members", ())
    ] or [network.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("configuration", "folds", "mirroring"),
    [("3d_fullres", [0, 1], True), ("3d_fullres", [0], False), ("2d", [0], True)],
)
def test_predicts_what_nnunet_predicts(
    nnunet_models: Path, configuration: str, folds: list[int], mirroring: bool
) -> None:
    """And with as many forwards; also where patches are larger than the image."""
    model = NNUNetModel(nnunet_models, folds, configuration)
    predictor = own_predictor(model.folder, folds, mirroring)
    network, inferer = model.network(mirroring), NNUNetInferer(model.patch_size)
    for shape in SHAPES[configuration]:
        image = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), counted(network) as ours:
            found = inferer(image[None], network)[0]
        with counted(predictor.network) as theirs:
            expected = predictor.predict_logits_from_preprocessed_data(image)
        assert expected.std() > 0.1
        gap = (found.softmax(0) - expected.float().softmax(0)).abs().max()
        assert gap < 1e-6, f"{shape}: {gap}"
        assert sum(ours) == sum(theirs)


@pytest.mark.parametrize(
    ("configuration", "shape", "edges"),
    [("3d_fullres", (7, 20, 18), [4, 10, 9]), ("2d", (3, 30, 24), [1, 15, 12])],
)
def test_remembers_patches(
    nnunet_models: Path,
    configuration: str,
    shape: tuple[int, ...],
    edges: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scores of whole images, from fewer forwards. nnU-Net adds up in float16, so they are compared without."""
    model = NNUNetModel(nnunet_models, configuration=configuration)
    network = model.network()
    for member in network.members:
        member.flips = member.flips[1:2]
    image = torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(NNUNetInferer, "blended_in", torch.float32)
    inferer = NNUNetInferer(model.patch_size)
    masks = SlidingWindowMasks(edges, edges)
    explain = PerturbationInferer(masks, RegionScore(1, "softmax"), OcclusionScoring(), inferer=inferer)
    with counted(network) as few:
        (remembered,) = explain.explain(image, network)
    with counted(network) as many:
        (whole,) = explain.replace(patch_memory=False).explain(image, network)
    assert "no patches are remembered" not in caplog.text
    assert sum(few) < sum(many)
    assert whole.scores.std() > 1e-4
    torch.testing.assert_close(remembered.scores, whole.scores, rtol=0, atol=1e-5)
    torch.testing.assert_close(remembered.reference_scores, whole.reference_scores, rtol=0, atol=1e-5)
