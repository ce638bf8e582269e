"""Ensembles: the mean of separate runs and the standard deviation between them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from helpers.files import rows_of
from helpers.own_bundle import SMALL_NET, settings
from helpers.scans import write_scans
from helpers.tolerances import assert_close, assert_same_bits
from monai.inferers import Inferer, SlidingWindowInferer
from monai.networks.nets import DenseNet, UNet

import monai_saliency as ms
from monai_saliency.errors import SettingError
from monai_saliency.networks import Ensemble, accelerated, load_checkpoint, network_fingerprint, unloaded_network


def networks(make: Callable[[], torch.nn.Module], count: int = 3) -> list[torch.nn.Module]:
    torch.manual_seed(1)
    return [make().eval() for _ in range(count)]


def classifiers(count: int = 3, channels: int = 1) -> list[torch.nn.Module]:
    made: dict[str, Any] = {"init_features": 4, "growth_rate": 4, "block_config": (2, 2), "bn_size": 2}
    return networks(lambda: DenseNet(2, channels, 2, **made), count)


def segmenters() -> list[torch.nn.Module]:
    return networks(lambda: UNet(3, 1, 2, (4, 8), (2,), norm="instance"))


def image(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


CASES: list[tuple[Callable[..., ms.PerturbationInferer], Any, Any, Inferer | None, tuple[int, ...]]] = [
    (ms.rise, {"num_masks": 60}, ms.ClassScore([0, 1], "softmax"), None, (2, 1, 24, 20)),
    (ms.sliding_window, {"window_size": 8, "stride": 4}, ms.ClassScore([1], "none"), None, (1, 1, 24, 20)),
    (
        *(ms.sliding_window, {"window_size": 6}, ms.RegionScore(1, "none", "all")),
        *(SlidingWindowInferer((8, 8, 8), 2, 0.5), (1, 1, 12, 8, 10)),
    ),
    (
        *(ms.sliding_window, {"window_size": 6, "patch_memory": False}, ms.RegionScore(1, "softmax", "all")),
        *(SlidingWindowInferer((8, 8, 8), 2, 0.5, mode="gaussian"), (1, 1, 12, 8, 10)),
    ),
    (ms.integrated_gradients, {"steps": 6}, ms.ClassScore([0, 1], "softmax"), None, (1, 1, 24, 20)),
    # Each member asks for masks of its own.
    *(
        (method, given, ms.ClassScore([0, 1], "softmax"), None, (1, 1, 24, 20))
        for method, given in (
            (ms.rise, {"until": 0.9, "budget": 200}),
            (ms.focused_rise, {"num_masks": 40}),
            (ms.hierarchical_occlusion, {"window_size": 8, "levels": 3}),
            (ms.minimal_region, {"window_size": 8, "levels": 2}),
        )
    ),
]


@pytest.mark.parametrize(("method", "given", "target", "inferer", "shape"), CASES)
def test_it_is_the_mean_of_separate_runs(method: Any, given: Any, target: Any, inferer: Any, shape: Any) -> None:
    members = classifiers(channels=shape[1]) if len(shape) == 4 else segmenters()
    members, x = [each.double() for each in members], image(*shape).double()
    explain = method(**given, target=target, inferer=inferer, mask_batch_size=8)
    found = explain.explain(x, Ensemble(members))
    each = torch.stack([explain(x, member) for member in members])  # (k, B, K, *spatial)
    largest = each.abs().max()
    assert float(largest) > 0
    for i, explanation in enumerate(found):
        # Scores cancel in a map.
        scale = max(largest, explanation.reference_scores.abs().max())
        assert_close(explanation.saliency, each[:, i].mean(0), scale=scale)
        assert_close(explanation.disagreement, each[:, i].std(0), scale=scale)
        assert float(explanation.disagreement.max()) > 1e-3 * float(largest)
        alone, *others = (explain.explain(x, member)[i] for member in members)
        if method is ms.minimal_region:
            regions = [observed.finding for observed in explanation.observed]
            assert [region.voxels for region in regions] == each[:, i].flatten(2).sum(2).flatten().tolist()
        if explanation.masks is not None and explanation.masks.adaptive:
            for name in ("noise", "standard_error"):
                of_members = [getattr(one, name) for one in (alone, *others) if getattr(one, name) is not None]
                if of_members:
                    assert_close(getattr(explanation, name), torch.stack(of_members).mean(0))
        assert explanation.scores.shape == (len(explanation.ids), alone.scores.shape[1])
        assert explanation.num_forwards == sum(one.num_forwards for one in (alone, *others))
        assert explanation.target.labels == alone.target.labels
        assert [label for label, *_ in explanation.explained] == [label for label, *_ in alone.explained]
        assert (explanation.noise is None) == (alone.noise is None)
        assert alone.disagreement is None


class Member(torch.nn.Module):
    """A network that users change in every way that torch allows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.activation, self.head = torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Linear(4, 2)
        self.temperature = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.activation(self.layer(x)).mean((2, 3))) / self.temperature


def averaged_weights(member: Member) -> None:
    for each in member.parameters():
        each.data = 0.5 * each.data + 0.1


CHANGES: dict[str, Callable[[Member], Any]] = {
    "random weights": lambda member: member.head.weight.data.normal_(),
    "averaged weights": averaged_weights,
    "replaced activation": lambda member: setattr(member, "activation", torch.nn.Softplus()),
    "temperature": lambda member: setattr(member, "temperature", 0.5),
    "hook of a layer": lambda member: member.layer.register_forward_hook(lambda module, given, out: out.flip(1)),
    "hook of the network": lambda member: member.register_forward_hook(lambda module, given, out: out.square()),
    "added in place": lambda member: member.head.weight.data[1].add_(0.3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compile", [False, {"backend": "eager"}])
def test_a_member_that_is_changed_after_the_first_map(change: str, compile: Any) -> None:
    """The map is of the members as they are now: by a loop over windows and members."""
    torch._dynamo.reset()
    members = [Member(seed).eval() for seed in range(3)]
    ensemble, x = Ensemble(members).eval(), image(1, 1, 12, 12)
    network = accelerated(ensemble, compile=compile)
    explain = ms.sliding_window(4, 4, target=ms.ClassScore([1], "softmax"))

    def log_odds(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([member(x)[0].double().softmax(0)[1].logit().float() for member in members])

    found, before = explain.explain(x, network)[0].saliency, network_fingerprint(ensemble)
    for is_changed in (False, True):
        if is_changed:
            CHANGES[change](members[1])
        drops = torch.zeros(3, 12, 12)
        for y, z in np.ndindex(3, 3):
            here = (..., slice(4 * y, 4 * y + 4), slice(4 * z, 4 * z + 4))
            hidden = x.clone()
            hidden[here] = 0
            drops[here] = (log_odds(x) - log_odds(hidden))[:, None, None]
        (explanation,) = explain.explain(x, network)
        assert_close(explanation.saliency[0], drops.mean(0), scale=1)  # of log-odds near 0
        assert_close(explanation.disagreement, drops.std(0)[None], scale=1)
    assert float((explanation.saliency - found).abs().max()) > 1e-4
    assert network_fingerprint(ensemble) != before is not None


def test_the_class_is_that_of_the_mean_prediction() -> None:
    """And every member is asked about it, whatever it would have said itself."""

    class Says(torch.nn.Module):
        def __init__(self, logits: list[float]) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor(logits))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits * x.flatten(1).mean(1, keepdim=True)

    ensemble, x = Ensemble([Says([3.0, 0.0]), Says([0.0, 2.0]), Says([0.0, 2.5])]), torch.ones(1, 1, 4, 4)
    assert_close(ensemble(x), torch.tensor([[1.0, 1.5]]))
    (found,) = ms.sliding_window(2, 2, target=ms.ClassScore("predicted", "none")).explain(x, ensemble)
    assert found.target.labels == [1]
    assert_close(found.reference_scores, torch.tensor([1.5]))
    assert_close(found.saliency, torch.full((1, 4, 4), 1.5 / 4))  # a quarter of the image is hidden
    assert_close(found.disagreement, torch.full((1, 4, 4), torch.tensor([0, 2, 2.5]).std().item() / 4))


def test_what_is_refused(tmp_path: Path) -> None:
    (one,) = classifiers(1)
    with pytest.raises(ValueError, match="`networks` must hold at least two networks, got 1"):
        Ensemble([one])
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    with pytest.raises(ValueError, match="checkpoint lists 2 files, and the network is of 1: give one each"):
        load_checkpoint(one, files)
    for given in ("a.pt", None, "none", "None"):
        assert unloaded_network(one, given) is one
    assert load_checkpoint(one, "none") is load_checkpoint(one, None) is one
    for take in (unloaded_network, load_checkpoint):
        for empty in ("", [], ["a.pt", ""]):
            with pytest.raises(SettingError, match=r"checkpoint is empty, got .* --checkpoint none"):
                take(one, empty)
        with pytest.raises(ValueError, match=r"got the number 2024.* such as --checkpoint ./2024"):
            take(one, 2024)  # type: ignore[arg-type]
    assert len(unloaded_network(one, files).networks) == 2  # type: ignore[arg-type]


def test_the_bundle_explains_folds_and_saves_their_disagreement(tmp_path: Path) -> None:
    """On the scan's own grid; a second run goes on with the stored scores, and one network leaves no such file."""
    write_scans(tmp_path, 2)
    files = []
    for fold in range(3):
        torch.manual_seed(fold)
        files.append(str(tmp_path / f"fold{fold}.pt"))
        torch.save(DenseNet(**SMALL_NET).state_dict(), files[-1])  # type: ignore[arg-type]
    given = {"network_def": {"_target_": "DenseNet", **SMALL_NET}, "spatial_size": [16, 16, 16], "classes": [1]}
    given |= {"method": "sliding_window", "window_size": 8, "stride": 8}

    def run(out: str, checkpoint: Any) -> list[dict[str, str]]:
        fixed = settings(tmp_path, out)
        for name in ("num_masks", "grid_size"):
            del fixed[name]
        monai.bundle.run(**fixed | given | {"checkpoint": checkpoint})
        return rows_of(tmp_path / out / "summary.csv")

    rows = run("folds", files)
    each = [run(f"fold{i}", file) for i, file in enumerate(files)]
    for i, row in enumerate(rows):
        name = f"s{i}_saliency.nii.gz"
        maps = np.stack([nib.load(tmp_path / f"fold{k}" / name).get_fdata() for k in range(3)])
        mean, disagreement = (
            nib.load(tmp_path / "folds" / file) for file in (name, name.replace("saliency", "disagreement"))
        )
        assert np.abs(mean.get_fdata() - maps.mean(0)).max() < 1e-5 * np.abs(maps).max()
        assert_same_bits(mean.affine, disagreement.affine)
        assert disagreement.shape == mean.shape
        # Inverted linearly, so that it is that of the maps only inside the voxels of the network's grid.
        assert 0.5 < disagreement.get_fdata().max() / maps.std(0, ddof=1).max() < 2
        # Of two classes, the mean of their log-odds is what the mean of their outputs says.
        log_odds = [torch.tensor(float(found[i]["score"])).logit().item() for found in each]
        assert abs(float(row["score"]) - torch.tensor(np.mean(log_odds)).sigmoid().item()) < 1e-5
        if row["prediction"] == row["class"]:
            assert abs(float(row["score"]) - float(row["probability"])) < 1e-5
        assert not (tmp_path / "fold0" / f"s{i}_disagreement.nii.gz").exists()
    assert int(rows[0]["forwards"]) == sum(int(found[0]["forwards"]) for found in each)
