import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.estimators import slow_rise
from helpers.own_pipeline import Network
from helpers.patches import images
from helpers.tolerances import assert_close
from monai.data import MetaTensor, decollate_batch, list_data_collate
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import UNet
from monai.transforms import Compose, Orientation, Spacing
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import monai_saliency as ms
from monai_saliency.cases import Case
from monai_saliency.errors import CaseError
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.fills.simple import BlurFill, ConstantFill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.masks.rise import RISEMasks
from monai_saliency.masks.sliding_window import SlidingWindowMasks
from monai_saliency.methods import region_occlusion, rise, sliding_window
from monai_saliency.targets import BoundTarget, ClassScore, RegionScore, Target

LOGIT = ClassScore([1], "none")


class Recorder:
    """A callable that keeps a copy of what the network sees, but for the images that it is looked at with before."""

    def __init__(self, network: Callable[..., torch.Tensor], looks: int = 4) -> None:
        self.network, self.looks = network, looks
        self.batches: list[torch.Tensor] = []
        self.looked = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(x.clone())
        if not self.looked and len(self.batches) == self.looks:
            self.batches.clear()
            self.looked = True
        return self.network(x)

    def rows(self, count: int) -> torch.Tensor:
        """The unperturbed image, and those that are perturbed; between them is the one with everything hidden."""
        rows = torch.cat(self.batches)
        return torch.cat([rows[:1], rows[2:]])[:count]


def tiny_unet_case(dims: int) -> tuple[UNet, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = UNet(dims, 1, 2, channels=(4, 8), strides=(2,)).eval()
    return network, images(1, 1, *((20, 14), (12, 14, 10))[dims - 2])


class Seen:
    """A fill that depends on the mask: how much of the image each mask keeps, plus the image's first voxel."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self.of(images, torch.zeros_like(images[:, :1]))

    def of(self, image: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        assert (len(image), *masks.shape[1:]) == (1, 1, *image.shape[2:])
        return (masks.flatten(1).mean(dim=1) + image.flatten()[0]).reshape(-1, *[1] * (image.ndim - 1)) + 0 * image


SHAPES = [(13, 10), (7, 9, 6)]
METHODS: list[Callable[..., PerturbationInferer]] = [
    lambda **settings: rise(17, 3, 0.5, seed=2, **settings),
    lambda **settings: rise(17, 3, 0.5, seed=2, form="plain", **settings),
    lambda **settings: sliding_window(4, 3, **settings),
]


class TestWhatTheNetworkSees:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_law_1_all_ones_masks_are_the_identity(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Kept voxels are the image to the bit, whatever the fill."""
        image = images(1, 2, *shape, dtype=dtype) * 1e3
        network = Recorder(Network(len(shape), 2).to(dtype).eval())
        rise(10, 3, p1=1.0, target=LOGIT, fill=ConstantFill([1e6, -3.3]), mask_batch_size=4)(image, network)
        assert torch.equal(network.rows(11), image.expand(11, *image.shape[1:]))

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("masks", [RISEMasks(11, 3, seed=5), SlidingWindowMasks(4, 3)])
    @pytest.mark.parametrize("fill", [None, ConstantFill([0.5, -2.0]), BlurFill(1.5), Seen()])
    def test_law_1_perturbed_images(self, shape: tuple[int, ...], masks: Any, fill: Any) -> None:
        image = images(1, 2, *shape, dtype=torch.float64)
        network = Recorder(Network(len(shape), 2).double().eval())
        PerturbationInferer(masks, LOGIT, RISEScoring(), fill=fill, mask_batch_size=4)(image, network)
        bound = masks.bind(image[0])
        mask = bound.render(range(len(bound)))
        filled = fill.of(image, mask) if isinstance(fill, Seen) else fill(image) if fill else 0
        expected = mask * image + (1 - mask) * filled
        seen = network.rows(len(bound) + 1)
        assert torch.equal(seen[0], image[0])
        assert_close(seen[1:], expected)

    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("mask_batch_size", [1, 7, 64, 1000])
    def test_law_7_full_batches_of_one_shape(self, count: int, mask_batch_size: int) -> None:
        network = Recorder(Network().eval(), looks=3 + (mask_batch_size > 1))
        rise(20, 3, target=LOGIT, mask_batch_size=mask_batch_size)(images(count, 1, 9, 8), network)
        assert {batch.shape for batch in network.batches} == {(min(mask_batch_size, 22 * count), 1, 9, 8)}
        assert len(network.batches) == math.ceil(22 * count / mask_batch_size)


@pytest.mark.parametrize("method", METHODS)
class TestSameMap:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_for_any_division_of_the_work(self, method: Any, shape: Any, dtype: torch.dtype) -> None:
        """Batch sizes 1, 7, 64, and images one by one or together."""
        network, inputs = Network(len(shape)).to(dtype).eval(), images(3, 1, *shape, dtype=dtype)
        target = ClassScore("all", "softmax", "probability")
        expected = method(target=target, mask_batch_size=1)(inputs, network)
        assert expected.shape == (3, 3, *shape)
        assert float(expected.std()) > 0
        for size in (7, 64):
            maps = method(target=target, mask_batch_size=size)(inputs, network)
            assert_close(maps, expected, scale=1)  # of a probability
            one_by_one = [method(target=target, mask_batch_size=size)(image[None], network) for image in inputs]
            assert_close(torch.cat(one_by_one), expected, scale=1)

    def test_law_7_twice_in_a_row(self, method: Callable[..., PerturbationInferer]) -> None:
        network, inputs = Network(), images(2, 1, 13, 10)
        explain = method(target=LOGIT, mask_batch_size=5)
        first = explain(inputs, network)
        explain(images(1, 1, 9, 9) + 4, network)
        assert torch.equal(explain(inputs, network), first)
        assert torch.equal(method(target=LOGIT, mask_batch_size=5)(inputs, network), first)

    def test_when_the_network_works_in_place(self, method: Callable[..., PerturbationInferer]) -> None:
        """As a first layer ReLU(inplace=True) does: it may spoil its batch, not the image or later batches."""
        network, inputs = Network().eval(), images(2, 1, 13, 10)
        before = inputs.clone()
        expected = method(target=LOGIT, mask_batch_size=5)(inputs, lambda x: network(x.relu()))
        spoiled = method(target=LOGIT, mask_batch_size=5)(inputs, lambda x: network(x.relu_()))
        assert torch.equal(spoiled, expected)
        assert torch.equal(inputs, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_law_9_double_end_to_end_equals_slow_loop(shape: tuple[int, ...]) -> None:
    """The paper's formulas around a plain loop, one mask at a time, in double."""
    network, image = Network(len(shape)).double().eval(), images(1, 1, *shape, dtype=torch.float64)
    masks, fill = RISEMasks(9, 3, 0.4, seed=3), BlurFill(1.0)
    rendered = masks.bind(image[0]).render(range(9))
    with torch.no_grad():
        perturbed = [network(mask * image + (1 - mask) * fill(image)).softmax(1)[0].logit() for mask in rendered]
    for form in ("centred", "debiased", "plain"):
        expected = slow_rise(rendered[:, 0].numpy(), torch.stack(perturbed).numpy(), 0.4, form)
        maps = rise(9, 3, 0.4, 3, form=form, target=ClassScore("all", "softmax"), fill=fill)(image, network)
        assert maps.dtype == torch.float64
        assert_close(maps[0], expected)


class TestNetworkIsLeftAsItWas:
    def test_modes_after_an_error(self) -> None:
        network = Network(channels=2).train()
        with pytest.raises(RuntimeError):
            rise(5, 3, target=LOGIT)(images(1, 1, 8, 8), network)
        assert all(part.training for part in network.modules())

    def test_no_gradients(self) -> None:
        network, inputs = Network().eval(), images(1, 1, 8, 8).requires_grad_()
        grad_modes = []
        network.register_forward_hook(lambda *_: grad_modes.append(torch.is_grad_enabled()))
        maps = rise(5, 3, target=LOGIT)(inputs, network)
        assert grad_modes == [False] * 5  # four looks at the network, and the batch
        assert not maps.requires_grad
        assert inputs.grad is None
        assert all(p.grad is None and p.requires_grad for p in network.parameters())
        assert torch.is_grad_enabled()


class TestMetaTensor:
    @pytest.mark.parametrize("count", [1, 3])
    def test_law_6_a_map_lies_on_its_scan(self, count: int) -> None:
        preprocessing = Compose([Orientation("RAS", labels=None), Spacing((1.5, 2.0, 1.0))])
        scans = []
        for i in range(count):
            affine = torch.diag(torch.tensor([-1.0, 1.0 + i, -2.0, 1.0], dtype=torch.float64))
            affine[:3, 3] = torch.tensor([5.0, -i, 7.0])
            scans.append(preprocessing(MetaTensor(images(1, 9, 8, 7), affine=affine)))
        size = [min(scan.shape[axis] for scan in scans) for axis in (1, 2, 3)]
        scans = [scan[:, : size[0], : size[1], : size[2]] for scan in scans]
        batch = list_data_collate(scans)
        maps = rise(4, 2, target=ClassScore([1, 0], "none"))(batch, Network(3).eval())
        assert isinstance(maps, MetaTensor)
        assert maps.shape == (count, 2, *size)
        plain = rise(4, 2, target=ClassScore([1, 0], "none"))(batch.as_tensor(), Network(3).eval())
        assert not isinstance(plain, MetaTensor)
        assert torch.equal(maps.as_tensor(), plain)
        for one, scan in zip(decollate_batch(maps), decollate_batch(batch), strict=True):
            assert torch.equal(one.affine, scan.affine)
            assert len(one.applied_operations) == 2
            assert str(one.applied_operations) == str(scan.applied_operations)


class TestInnerInferer:
    @pytest.mark.parametrize("dims", [2, 3])
    @pytest.mark.parametrize("region", ["predicted", "all"])
    def test_sliding_window_and_region_score(self, dims: int, region: str) -> None:
        """The map through an inner inferer is the map of the network that the inferer makes."""
        network, image = tiny_unet_case(dims)
        inner = SlidingWindowInferer((8,) * dims, sw_batch_size=3, overlap=0.5)
        target = RegionScore([1, 0], "softmax", region)
        explain = sliding_window(5, 4, target=target, inferer=inner, mask_batch_size=6, patch_memory=False)
        maps = explain(image, network)
        expected = sliding_window(5, 4, target=target, mask_batch_size=6)(image, lambda x: inner(x, network))
        assert torch.equal(maps, expected)
        whole = sliding_window(5, 4, target=target)(image, network)
        assert float((maps - whole).abs().max()) > 1e-4

    @pytest.mark.parametrize("inner", [None, SlidingWindowInferer((8, 8), overlap=0.5)])
    def test_arguments_reach_the_network(self, inner: SlidingWindowInferer | None) -> None:
        calls = []

        def network(x: torch.Tensor, scale: float, *, shift: torch.Tensor) -> torch.Tensor:
            calls.append((scale, shift))
            return x.expand(-1, 2, -1, -1) * scale

        shift = torch.tensor(7.0)
        target = RegionScore(1, "none", region="all")
        image = images(1, 1, 12, 10)
        scaled = sliding_window(4, target=target, inferer=inner)(image, network, 2.0, shift=shift)
        plain = sliding_window(4, target=target, inferer=inner)(image, network, 1.0, shift=shift)
        assert_close(scaled, 2 * plain)
        assert {scale for scale, _ in calls} == {1.0, 2.0}
        assert all(given is shift for _, given in calls)


class TestExplain:
    def test_explanation(self) -> None:
        network, inputs = Network().eval(), images(2, 1, 9, 8)
        target = ClassScore([2, 0], "softmax")
        explanations = rise(6, 3, target=target, mask_batch_size=4).explain(inputs, network, names=["a", "b"])
        maps = rise(6, 3, target=target, mask_batch_size=4)(inputs, network)
        with torch.no_grad():
            for i, (explanation, image) in enumerate(zip(explanations, inputs, strict=True)):
                mask = RISEMasks(6, 3).bind(image).render(range(6))
                scores = network(torch.cat([image[None], mask * image])).softmax(1)[:, [2, 0]].logit()
                assert_close(explanation.reference_scores, scores[0])
                assert_close(explanation.scores, scores[1:])
                assert torch.equal(explanation.saliency, maps[i])
                assert explanation.name == "ab"[i]
                assert list(explanation.target.labels) == [2, 0]
                assert explanation.num_forwards == 7

    def test_different_numbers_of_maps(self) -> None:
        class Growing(Target):
            def bind(self, reference_output: torch.Tensor, case: Case) -> BoundTarget:
                return ClassScore(list(range(case.index + 1)), "none").bind(reference_output, case)

        network, inputs = Network().eval(), images(2, 1, 9, 8)
        explain = sliding_window(3, target=Growing())
        assert [len(e.saliency) for e in explain.explain(inputs, network)] == [1, 2]
        with pytest.raises(ValueError, match=r"different numbers of maps \[1, 2\].*For a list of explanations write"):
            explain(inputs, network)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Views and expanded tensors share memory.
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize("method", [rise, sliding_window])
def test_law_3_memory_does_not_grow_with_the_number_of_masks(method: Callable[..., PerturbationInferer]) -> None:
    image = images(1, 1, 16, 20, 12)
    largest = []
    for settings in (
        ({"num_masks": 400}, {"num_masks": 800})
        if method is rise
        else ({"window_size": 4, "stride": (3, 3, 2)}, {"window_size": 4, "stride": (2, 3, 2)})
    ):
        explain = method(**settings, target=ClassScore([0], "none"), mask_batch_size=8)
        assert len(explain.masks.bind(image[0])) >= 200
        with LargestTensor() as mode:
            explain(image, lambda x: x[:, :, 0, 0, :2].flatten(1))
        largest.append(mode.numel)
    assert largest[0] == largest[1]
    assert largest[0] <= 64 * image.numel()


class TestErrors:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("when", ["always", "hidden"])
    def test_nan_scores_name_the_case(self, value: float, when: str) -> None:
        def network(x: torch.Tensor) -> torch.Tensor:
            bad = torch.ones(len(x), dtype=torch.bool) if when == "always" else x[:, 0, 0, 0] == 0
            return torch.where(bad[:, None], value, 1.0).expand(-1, 2)

        explain = sliding_window(3, 3, target=LOGIT, mask_batch_size=4)
        what = "the network's output of the unperturbed image is" if when == "always" else "1 of 10 network scores are"
        with pytest.raises(CaseError, match=rf"case ct_2: {what} NaN or infinite") as error:
            explain.explain(torch.ones(1, 1, 9, 9), network, cases=[Case("ct_2")])
        assert error.value.case == "ct_2"

    def test_files_name_cases(self) -> None:
        batch = list_data_collate(
            [MetaTensor(images(1, 9, 8), meta={"filename_or_obj": f"/scans/{name}.nii.gz"}) for name in "ab"]
        )
        with pytest.raises(CaseError, match=r"case /scans/b.nii.gz: 2 of 5 network scores"):
            rise(4, 2, target=ClassScore([0], "none"), mask_batch_size=10)(
                batch, lambda x: torch.where(torch.arange(10)[:, None] > 6, float("nan"), 0.0)
            )

    @pytest.mark.parametrize(
        "network", [lambda x: torch.zeros(3, 2), lambda x: torch.zeros(2, len(x)), lambda x: torch.tensor(0.0)]
    )
    def test_output_without_a_batch_axis(self, network: Callable[..., torch.Tensor]) -> None:
        with pytest.raises(CaseError, match=r"case image 0 of the batch: .*batch of 6 images; its first axis"):
            rise(4, 2, target=LOGIT)(images(1, 1, 9, 8), network)

    def test_settings_that_do_not_fit_name_the_case(self) -> None:
        with pytest.raises(CaseError, match=r"case ct_2: `window_size` .* is larger than"):
            sliding_window(10, target=LOGIT).explain(images(1, 1, 9, 8), Network(), cases=[Case("ct_2")])
        with pytest.raises(CaseError, match="case ct_2: `value` must be one number or one per channel"):
            rise(4, target=LOGIT, fill=ConstantFill([1, 2])).explain(images(1, 1, 9, 8), Network(), names=["ct_2"])
        with pytest.raises(CaseError, match=r"case ct_2: `fill` gave shape \(1, 1, 9, 4\) for images of shape"):
            rise(4, target=LOGIT, fill=lambda x: x[..., :4]).explain(images(1, 1, 9, 8), Network(), names=["ct_2"])


@pytest.mark.parametrize("kind", ["script", "frozen", "trace"])
def test_exported_networks_are_explained_like_the_original(kind: str) -> None:
    """Law 8: any callable; a frozen module has no mode."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()
    image = images(1, 12, 10)[None].float()
    batch = image.repeat(3, 1, 1, 1)
    exported: Any
    if kind == "trace":
        exported = torch.jit.trace(network, batch)
    else:
        exported = torch.jit.script(network)
        exported = torch.jit.freeze(exported) if kind == "frozen" else exported
    explain = sliding_window(4, 2, target=LOGIT)
    torch.testing.assert_close(explain(image, exported), explain(image, network), rtol=1e-4, atol=1e-6)


def test_label_maps_with_a_batch_of_images() -> None:
    """Each image has its own label map."""
    images, labels = (
        torch.rand(2, 1, 4, 4),
        torch.randint(1, 3, (2, 1, 4, 4), generator=torch.Generator().manual_seed(0)),
    )
    network = lambda x: x.sum(dim=(1, 2, 3))[:, None]  # noqa: E731
    explain = region_occlusion(target=ClassScore([0], "none"))
    cases = [Case(str(i), labels=each) for i, each in enumerate(labels)]
    together = explain.explain(images, network, cases=cases)
    for i, explanation in enumerate(together):
        (alone,) = explain.explain(images[i : i + 1], network, cases=cases[i : i + 1])
        assert_close(explanation.saliency, alone.saliency)


def test_settings_never_change() -> None:
    """A changed copy is made instead, and the inferer stays as it was."""
    explain = rise(5, target=LOGIT, mask_batch_size=3)
    for name in ("masks", "mask_batch_size", "fill", "anything"):
        with pytest.raises(
            AttributeError, match=rf"`{name}` cannot be changed: `replace\({name}=...\)` gives a changed"
        ):
            setattr(explain, name, 1)
    changed = explain.replace(mask_batch_size=4, fill=ConstantFill(2.0))
    assert (explain.mask_batch_size, explain.fill.value) == (3, 0.0)
    assert (changed.mask_batch_size, changed.fill.value) == (4, 2.0)
    assert changed.masks is explain.masks
    with pytest.raises(TypeError, match="nothing"):
        explain.replace(nothing=1)


def test_what_a_user_would_type() -> None:
    """Fills by name or number, settings of the automatic target, and its words, in one call as in the bundle."""
    layers = nn.Conv2d(1, 3, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten()
    network = nn.Sequential(*layers, nn.Linear(3, 3, bias=False), nn.LayerNorm(3)).double()
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def maps(**settings: Any) -> list[Any]:
        return ms.explain(network, image, num_masks=8, **settings).tolist()

    softmax = {"activation": "softmax"}
    mean, half = maps(fill="mean", **softmax), maps(fill=0.5, **softmax)
    assert mean == maps(fill=ms.MeanFill(), **softmax) != half == maps(fill=ConstantFill(0.5), **softmax)
    target = ms.AutoTarget(classes=[1], activation="sigmoid", scale="probability", against=2)
    assert maps(target=1, activation="sigmoid", scale="probability", against=2) == maps(target=target)
    assert (
        maps(target="all", **softmax) == maps(target=[0, 1, 2], **softmax) == maps(target=ClassScore("all", "softmax"))
    )
    with pytest.raises(TypeError, match=r"give activation to the target itself, such as ClassScore\("):
        maps(target=LOGIT, activation="sigmoid")
