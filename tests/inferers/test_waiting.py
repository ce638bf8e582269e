"""Nothing waits for the device between the batches of a round, counted on a device that is made up.

A tensor of this device says that it is on another device than the CPU. Each operation on it is run on the CPU tensor
inside. What would make the host wait until the device has finished its work is noted: reading a number, operations
whose result has a shape that the values decide, comparing whole tensors, and copies between the two sides that are not
announced as ``non_blocking``. Operations that mix tensors of both sides fail, as on a GPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tolerances import assert_close
from monai.inferers import SlidingWindowInferer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import monai_saliency as ms

#: of a kind that the CPU build of torch knows by name, and autocast too
DEVICE = torch.device("lazy:0")

#: operations that return what only the device's values decide
_READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique_consecutive"}
_READS |= {"unique_dim", "_unique", "_unique2", "repeat_interleave", "bincount"}


class OnDevice(torch.Tensor):
    """A tensor that pretends to be on :data:`DEVICE`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})[0]


def on_device(tensor: torch.Tensor) -> OnDevice:
    """A copy of a tensor on the pretended device."""
    return OnDevice(tensor.detach().clone())


def off_device(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor inside, without any waiting: for the test's own use."""
    return tensor.inner if isinstance(tensor, OnDevice) else tensor


class Counted(TorchDispatchMode):
    """Notes the operations outside of the network that wait for the device.

    Attributes:
        waits: those operations, in one list for each stretch between two forwards.
        sizes: how many images each forward was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.begin()

    def __enter__(self) -> "Counted":
        # Tensors made of Python's numbers are made on the CPU and copied, where this can be seen.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    def begin(self) -> None:
        """Forget what was noted."""
        self.waits: list[list[str]] = [[]]
        self.sizes: list[int] = []

    def network(self, inner: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """A network on the pretended device, in which nothing is noted; ``inner`` runs on the CPU."""

        def forward(batch: torch.Tensor) -> Any:
            self.sizes.append(len(batch))
            self.inside = True
            try:
                return tree_map(OnDevice, inner(off_device(batch)))
            finally:
                self.inside = False
                self.waits.append([])

        return forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, waits = _run(func, args, kwargs or {})
        if waits and not self.inside and func.namespace != "profiler":
            self.waits[-1].append(str(func))
        return result


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The result of an operation, and whether it waits for the device."""
    leaves = tree_flatten((args, kwargs))[0]
    given = [each for each in leaves if isinstance(each, OnDevice)]
    hosted = [each for each in leaves if isinstance(each, torch.Tensor) and not isinstance(each, OnDevice)]
    others = [each for each in hosted if each.ndim]  # a single number on the host fits everywhere
    name = func.overloadpacket.__name__
    asked = kwargs.get("device")
    to = asked.type if isinstance(asked, torch.device) else asked
    lands = to == DEVICE.type if to is not None else bool(given)
    waits = bool(given) and _waits(name, args, leaves)
    crosses = bool(given) != lands if name == "_to_copy" else name == "copy_" and bool(given and others)
    if crosses:
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
    elif given and others and name not in ("index", "index_put_", "index_put", "_index_put_impl_"):
        raise RuntimeError(f"{func} was given tensors of two devices")
    inside = {id(each.inner): each for each in given}
    if to is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map(off_device, (args, kwargs))
    result = func(*args, **kwargs)

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not lands:
            return value
        return inside[id(value)] if id(value) in inside else OnDevice(value)

    return tree_map(back, result), waits


def _waits(name: str, args: Any, leaves: Any) -> bool:
    if name in _READS:
        return True
    if not name.startswith("index") or name in ("index_select", "index_add_", "index_add", "index_copy_"):
        return False
    # Indices: those on the host are copied, and a mask is turned into places, whose number must be known.
    indices = [each for each in tree_flatten(args[1])[0] if isinstance(each, torch.Tensor)]
    return any(not isinstance(each, OnDevice) or each.dtype == torch.bool for each in indices)


IMAGES = {"2D": torch.rand(1, 3, 32, 24), "3D": torch.rand(1, 1, 16, 12, 20)}
BATCH = 4


def classifier(image: torch.Tensor) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(image.numel(), 3)).eval()


def segmenter(image: torch.Tensor) -> torch.nn.Module:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d if image.ndim == 4 else torch.nn.Conv3d
    return conv(image.shape[1], 2, 3, padding=1).eval()


TARGETS: dict[str, tuple[Callable[[torch.Tensor], torch.nn.Module], Callable[[], Any]]] = {
    "one class": (classifier, lambda: ms.ClassScore([1], "softmax")),
    "classes": (classifier, lambda: ms.ClassScore([0, 2], "softmax")),
    "values": (classifier, lambda: ms.RegressionScore([2, 0])),
    "region": (segmenter, lambda: ms.RegionScore([0, 1], "softmax")),
    "components": (segmenter, lambda: ms.RegionScore(1, "softmax", components=2)),
    "dice": (segmenter, lambda: ms.DiceScore(1, "softmax")),
}


def between(image: torch.Tensor, explain: Any, inner: Any, first: int) -> list[list[str]]:
    """The operations that wait between the forwards of full batches, from the one numbered ``first`` on.

    The map must be what it is on the CPU, so that the device that is made up computes right.
    """
    mode = Counted()
    network, placed = mode.network(inner), on_device(image)
    with mode:
        explain(placed, network)  # what is found out once a network is not counted
        mode.begin()
        found = explain(placed, network)
    assert_close(off_device(found), explain(image, inner))
    full = [number for number, size in enumerate(mode.sizes) if size == BATCH]
    assert len(full) - first >= 5
    return mode.waits[full[first] + 1 : full[-1] + 1]


def explainer(method: str, image: torch.Tensor, **settings: Any) -> Any:
    settings = {"mask_batch_size": BATCH} | settings
    if method == "rise":
        return ms.rise(9 * BATCH - 1, 4, **settings)
    return ms.sliding_window(5, 2 if image.ndim == 4 else 3, **settings)


@pytest.mark.parametrize(
    ("method", "dims", "target"), [("windows", "3D", "region"), *(("rise", "2D", target) for target in TARGETS)]
)
def test_whole_images_wait_for_nothing(method: str, dims: str, target: str) -> None:
    image = IMAGES[dims]
    network, made = TARGETS[target]
    assert_nothing_waits(between(image, explainer(method, image, target=made()), network(image), 0))


def assert_nothing_waits(waits: list[list[str]]) -> None:
    """The first output binds the target. Rows are compared in a network's first case, and this is a later one."""
    assert sum(map(bool, waits[1:])) == 0


@pytest.mark.parametrize("masks", ["supervoxels", "channels", "smooth"])
def test_other_masks_wait_for_nothing(masks: str) -> None:
    image, target = IMAGES["2D"], ms.ClassScore([1], "softmax")
    settings = {"target": target, "mask_batch_size": BATCH}
    explain = {
        "supervoxels": lambda: ms.region_occlusion(9 * BATCH - 1, regions=ms.Supervoxels(20), **settings),
        "channels": lambda: ms.sliding_window(5, 3, per_channel=True, **settings),
        "smooth": lambda: ms.sliding_window(5, 3, smooth=2, **settings),
    }[masks]
    assert_nothing_waits(between(image, explain(), classifier(image), 0))


@pytest.mark.parametrize("dims", IMAGES)
def test_focused_masks_are_rendered_without_waiting(dims: str) -> None:
    """Masks of each kind: over the whole image, in some windows, and these alone."""
    target = ms.ClassScore([1], "softmax")
    bound, on_cpu = (
        ms.focused_rise(60, target=target).masks.bind(image[0]) for image in (on_device(IMAGES[dims]), IMAGES[dims])
    )
    ids = [(0, 0, 0), (0, 0, 50), (6, 0, 0), (6, 3, 50), (6, 59, 3), (0, 5, 20)]
    with Counted() as mode:
        found = bound.render(ids)
    assert mode.waits == [[]]
    assert_close(off_device(found), on_cpu.render(ids))


@pytest.mark.parametrize("dims", IMAGES)
@pytest.mark.parametrize("kind", [ms.RegionScore, ms.DiceScore])
def test_remembered_patches_wait_for_nothing(kind: Callable[..., Any], dims: str) -> None:
    image = IMAGES[dims]
    inferer = SlidingWindowInferer(8, BATCH, overlap=0.5)
    target = kind([0, 1], "softmax")
    explain = ms.sliding_window(8 if dims == "2D" else 6, 8, target=target, inferer=inferer, mask_batch_size=BATCH)
    patches = number_of_patches(image, inferer)
    # The unperturbed patches, one with everything hidden, and the first batch of perturbed ones, of which some are
    # compared with the same alone.
    waits = between(image, explain, segmenter(image), -(-patches // BATCH) + 2)
    assert waits == [[]] * len(waits)


def number_of_patches(image: torch.Tensor, inferer: SlidingWindowInferer) -> int:
    seen = []
    inferer(image, lambda batch: seen.append(len(batch)) or batch)
    return sum(seen)
