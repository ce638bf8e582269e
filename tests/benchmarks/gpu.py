"""Are the speed, memory and precision that the pages promise there on this GPU? One table, in less than nine minutes.

    python tests/benchmarks/gpu.py [--output FILE] [--keep [LABEL]] [--only overhead peers ...]
    python tests/benchmarks/gpu.py --device cpu --quick

Each row is a figure beside its bar. The exit status is 1 where a figure misses its bar, or a group of rows fails. What
is not installed (captum, xaitk-saliency) leaves out its rows. ``--quick`` takes fewer masks and smaller volumes, two
minutes on two cores; bars of what only a GPU can do are then lower, or none.

- overhead: seconds over those of bare forwards of the same batches.
- cohort: the default on eight images, with maps, errors and a table: seconds over seconds of bare forwards, and over
  those of RISE with 1000 masks; seconds a case of its stages, in the thread that runs the network and meanwhile.
- peers: our seconds over another tool's, same network, windows and batch size.
- xaitk: how many times faster than xaitk-saliency's RISE with the same masks, and the difference of the maps.
- precision: bf16, channels last and compiling (``precision.py``).
- batch size: seconds with ``mask_batch_size="auto"`` over those of the best number.
- memory: the peak with 2000 masks over that with 200, of what torch allocates on a GPU (``memory.py``: on a CPU).
- waits: how often the host waits for the device in each further batch, by torch's profiler.
- agreement: the largest difference to the CPU's scores, and to its map, in shares of the largest value, without TF32.
- tests: those that need a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import asleep
import overhead
import precision
import torch
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import DenseNet121, SwinUNETR, UNet, resnet18
from record import add_options, keep, light, markdown, now
from torch.profiler import ProfilerActivity, profile

import monai_saliency as ms

Row = dict[str, Any]
Rows = Iterator[Row]

TESTS = Path(__file__).resolve().parents[1]
#: seconds over bare forwards, and of a batch size over the best one, by spatial axes
BARS = {3: 1.05, 2: 1.15}
#: the same of the default in a cohort, and its seconds over those of RISE with 1000 masks
COHORT_BARS, OVER_RISE = {3: 1.15, 2: 1.6}, 0.45
#: networks that run on patches
PATCHED: dict[str, Callable[[], torch.nn.Module]] = {
    "SwinUNETR": lambda: SwinUNETR(in_channels=1, out_channels=2, feature_size=24),
    "UNet": lambda: UNet(3, 1, 2, channels=(32, 64, 128), strides=(2, 2)),
}
#: what waits for the device: calls of CUDA, and where there is none the operations that would
WAITS = {
    True: ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    False: ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"),
}


@dataclass(frozen=True)
class Setting:
    """Where it runs, and how much."""

    device: str
    quick: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def __getitem__(self, pair: tuple[Any, Any]) -> Any:
        """The first of two values, or the second one where it is to be quick."""
        return pair[self.quick]


def row(what: str, figure: float, at_most: float | None = None, at_least: float | None = None) -> Row:
    """A figure and its bar; without one it is only told."""
    passes = (at_most is None or figure <= at_most) and (at_least is None or figure >= at_least)
    bar = f"<= {at_most:g}" if at_most is not None else f">= {at_least:g}" if at_least is not None else None
    return {"row": what, "figure": figure, "bar": bar, "passes": passes}


def alternated(calls: Mapping[str, Callable[[], Any]], device: str, rounds: int, warm_up: bool = True) -> Any:
    """The median of the seconds of each call, by its name; rounds of all alternate. On a CPU they are the
    process's own, which other programs do not disturb.
    """

    def clock() -> float:
        return now(device) if device.startswith("cuda") else time.process_time()

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number, name in itertools.product(range(0 if warm_up else 1, rounds + 1), calls):
        begun = clock()
        calls[name]()
        if number:
            seconds[name].append(clock() - begun)
    return {name: statistics.median(each) for name, each in seconds.items()}


@contextmanager
def float32_in(arithmetic: str, s: Setting) -> Iterator[None]:
    """Convolutions and products of float32 on a GPU in ``"ieee"`` or ``"tf32"``."""
    owners: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv] if s.on_gpu else []
    before = [owner.fp32_precision for owner in owners]
    try:
        for owner in owners:
            owner.fp32_precision = arithmetic
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            owner.fp32_precision = value


def made(kind: str, dims: int, size: int, s: Setting) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network with random weights, and a random image, on the device."""
    if kind in PATCHED:
        torch.manual_seed(0)
        network = PATCHED[kind]()
        image = torch.rand(1, 1, *[size] * dims)
    else:
        network, image = overhead.made(kind, dims, size)
    return network.eval().to(s.device), image.to(s.device)


def over_bare_forwards(s: Setting) -> Rows:
    """Windows, RISE, and the default; under a sliding window a cheaper method."""
    questions = {
        "DenseNet121": (3, s[96, 32], s[16, 8], s[511, 15]),
        "ResNet18": (2, s[224, 64], s[64, 8], s[1023, 15]),
        s["SwinUNETR", "UNet"]: (3, s[128, 48], 4, s[15, 3]),
    }
    for kind, (dims, size, batch_size, num_masks) in questions.items():
        network, image = made(kind, dims, size, s)
        given, name = {}, f"{kind}, {dims}D {size}^{dims}"
        last, chosen = "default", ms.focused_rise(s[340, 15], target=ms.ClassScore([1], "softmax"))
        if kind in PATCHED:
            patch = s[96, 32]
            inner = SlidingWindowInferer([patch] * 3, sw_batch_size=batch_size, overlap=0.25)
            given = {"target": ms.RegionScore(1, "softmax", region="all"), "inferer": inner}
            name = f"{name} in patches of {patch}^3"
            last, chosen = "hierarchical_occlusion", ms.hierarchical_occlusion(levels=s[4, 1], **given)
        found = overhead.methods(size, dims, batch_size, num_masks, **given)
        methods = {
            "windows": found["windows"],
            "RISE": found["rise"],
            last: chosen.replace(mask_batch_size=batch_size),
        }
        for method, explain in methods.items():
            ratios, forwards = overhead.measure(network, image, explain, s[3, 5])
            at_most = s[BARS[dims], 1.5]  # of so few small images, what a case costs once is a larger share
            yield row(f"{name}: {method}, {forwards} forwards", statistics.median(ratios), at_most=at_most)


class Noted(torch.nn.Module):
    """A network whose calls are noted: the images of each, and on a CPU the seconds of the same once more."""

    #: not the network's own, whose attributes identify it
    calls: ClassVar[list[tuple[int, float]]] = []

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(images)
        begun = time.perf_counter()
        if not images.is_cuda:
            self.network(images)
        self.calls.append((len(images), time.perf_counter() - begun))
        return found

    def bare(self, image: torch.Tensor) -> float:
        """Seconds of the same forwards alone."""
        if not image.is_cuda:
            return sum(seconds for _, seconds in self.calls)
        batch = image.repeat(max(count for count, _ in self.calls), *[1] * (image.ndim - 1))
        with torch.no_grad():
            self.network(batch)
            begun = now(str(image.device))
            for count, _ in self.calls:
                self.network(batch[:count])
        return now(str(image.device)) - begun


def in_a_cohort(s: Setting) -> Rows:
    """The default and RISE on a cohort, each after a case that warms up."""
    networks = {
        "DenseNet121": (DenseNet121(3, in_channels=1, out_channels=2), 3, s[96, 32], s[16, 8]),
        "ResNet18": (resnet18(spatial_dims=2, n_input_channels=1, num_classes=2), 2, s[224, 64], s[64, 8]),
    }
    for kind, (network, dims, size, batch_size) in networks.items():
        noted, name = Noted(network).eval().to(s.device), f"{kind}, {dims}D {size}^{dims}"
        image = torch.rand(1, 1, *[size] * dims, device=s.device)
        images = [image * (0.5 + number / 16) for number in range(s[8, 2])]
        given = {"target": ms.ClassScore([1], "softmax"), "mask_batch_size": batch_size, "progress": False}
        methods = {"default": ms.focused_rise(s[340, 15], **given), "RISE": ms.rise(s[1000, 44], **given)}
        seconds = {}
        for method, explain in methods.items():
            asleep.cohort(noted, images[:1], explain, False, s.device)
            Noted.calls.clear()
            spent, stages = asleep.cohort(noted, images, explain, False, s.device)
            bare = noted.bare(image)
            seconds[method] = spent if s.on_gpu else spent - bare
            bar = COHORT_BARS[dims] if s.on_gpu and method == "default" else None
            yield row(f"{name}: {method} in a cohort of {len(images)}", seconds[method] / bare, at_most=bar)
            for (in_loop, stage), (wall, _) in sorted(stages.seconds.items()):
                where = "in the loop" if in_loop else "meanwhile"
                yield row(f"{name}: {method}: {stage}, {where}, seconds a case", wall / len(images))
        bar, ratio = OVER_RISE if s.on_gpu else None, seconds["default"] / seconds["RISE"]
        yield row(f"{name}: the default's seconds over RISE-{s[1000, 44]}'s", ratio, at_most=bar)


def against_peers(s: Setting) -> Rows:
    """Of one question each, our seconds over each other tool's. Windows and the image fill the last batch."""
    import peers

    warnings.filterwarnings("ignore", "Using a non-tuple sequence", module="monai.visualize")
    networks: dict[str, Callable[[int], torch.nn.Module]] = {
        "ResNet18": lambda dims: resnet18(spatial_dims=dims, n_input_channels=3, num_classes=3).eval(),
        "DenseNet121": lambda dims: DenseNet121(dims, 3, 3).eval(),
        "light": light,
    }
    full = {"ResNet18": peers.Setting(2, 224, 32, 41, s.device), "DenseNet121": peers.Setting(3, 96, 8, 19, s.device)}
    for kind, setting in s[full, {"light": peers.Setting(3, 32, 4, 13, s.device)}].items():
        image, name = setting.image(), f"{kind}, {setting.dims}D {setting.size}^{setting.dims}"
        for question, tools in peers.TOOLS.items():
            maps: dict[str, torch.Tensor] = {}
            torch.manual_seed(0)
            # One for each tool, since some leave a network otherwise than they found it.
            first = networks[kind](setting.dims).to(s.device)
            each = {tool: deepcopy(first) for tool in tools}

            def call(tool: str) -> None:
                maps[tool] = tools[tool](setting, each[tool], image).detach()  # noqa: B023

            with float32_in("ieee", s):  # in TF32 maps differ by what perturbing changes of random weights
                for tool in tools:
                    call(tool)
            gaps = {tool: _gap(maps[tool], maps["ours"]) for tool in tools}
            seconds = alternated({tool: partial(call, tool) for tool in tools}, s.device, 3)
            for tool in list(tools)[1:]:
                yield row(f"{name}: over {tool}", seconds["ours"] / seconds[tool], at_most=s[1.02, 1.5])
                if question == "occlusion":  # Shapley values differ by chance
                    yield row(f"{name}: difference to {tool}", gaps[tool], at_most=0.01)


def against_xaitk(s: Setting) -> Rows:
    """RISE of a photograph, all classes."""
    import xaitk

    name, setting = "RISE", xaitk.Setting(s[2000, 300], 224, s[64, 16])
    network, image = xaitk.network(), setting.image()[None]
    if s.on_gpu:
        network = resnet18(spatial_dims=2, n_input_channels=3, num_classes=10, conv1_t_stride=2)
        network = torch.nn.Sequential(network, torch.nn.Softmax(dim=1)).eval()
        network, image = network.to(s.device), torch.rand(1, 3, *[setting.size] * 2).to(s.device)
    with torch.no_grad():
        classes = network(image).shape[1]
    maps: dict[str, Any] = {}

    def ours(setting: Any) -> None:
        given = {"target": ms.ClassScore("all", "none"), "mask_batch_size": setting.batch_size}
        maps["ours"] = xaitk.METHODS[name][0](setting, **given)(image, network)[0].cpu().numpy()

    def theirs(setting: Any) -> None:
        box = ms.xaitk.Classifier(network, classes, "none", batch_size=setting.batch_size)
        maps["theirs"] = xaitk.METHODS[name][1](setting)(image[0].permute(1, 2, 0).cpu().numpy(), box)

    for masks, warm_up in ((setting.batch_size, True), (setting.num_masks, False)):
        given = replace(setting, num_masks=masks)
        seconds = alternated({"ours": lambda: ours(given), "theirs": lambda: theirs(given)}, s.device, 1, warm_up)  # noqa: B023
    words = f"{'ResNet18' if s.on_gpu else 'light'}, 2D {setting.size}^2, {setting.num_masks} masks"
    yield row(f"{words}: times faster", seconds["theirs"] / seconds["ours"], at_least=20 if s.on_gpu else 3)
    largest = abs(maps["ours"]).max(axis=(1, 2), keepdims=True)
    yield row(f"{words}: difference", float(abs(maps["ours"] / largest - maps["theirs"]).max()), at_most=0.02)


def in_other_precision(s: Setting) -> Rows:
    """Time and map of each way; float32 is without TF32."""
    compiled = {"bf16, channels_last, compile": {"amp": "bf16", "channels_last": True, "compile": True}}
    ways = {name: way for name, way in precision.WAYS.items() if not (s.quick and "compile" in way)}
    if s.quick:
        questions = {"small DenseNet, 2D 64^2": (*precision.networks(21)["2D 63^2 small DenseNet"], 31, ways, 16)}
    else:
        few = {name: ways[name] for name in ("float32", "bf16", "bf16, channels_last")}
        questions = {
            "ResNet18, 2D 224^2": (*made("ResNet18", 2, 224, s), 511, ways | compiled, 64),
            "DenseNet121, 3D 96^3": (*made("DenseNet121", 3, 96, s), 511, few | compiled, 16),
        }
    for name, (network, image, masks, chosen, batch_size) in questions.items():
        network, image = network.to(s.device), image.to(s.device)
        with float32_in("ieee", s):
            found = precision.measure(name, network, image, masks, 3, chosen, batch_size)[1:]
        for each in found:
            yield row(f"{name}: {each['way']}, times faster than float32", 1 / each["ratio"])
            yield row(f"{name}: {each['way']}, correlation of the maps", each["pearson"], at_least=0.99)
        fastest = [1 / each["ratio"] for each in found if "bf16" in each["way"] and "compile" in each["way"]]
        if fastest:
            at_least = 2.0 if s.on_gpu else None
            yield row(f"{name}: bf16 with compile at its best, times faster", max(fastest), at_least=at_least)
        if s.on_gpu:
            yield row(f"{name}: TF32, times faster than float32", _by_tf32(network, image, masks, batch_size, s))


def _by_tf32(network: torch.nn.Module, image: torch.Tensor, masks: int, batch_size: int, s: Setting) -> float:
    explain = ms.rise(masks, target=ms.ClassScore([1], "none"), mask_batch_size=batch_size)

    def call(arithmetic: str) -> None:
        with float32_in(arithmetic, s):
            explain(image, network)

    seconds = alternated({each: lambda each=each: call(each) for each in ("ieee", "tf32")}, s.device, 3)
    return seconds["ieee"] / seconds["tf32"]


def batch_size_by_itself(s: Setting) -> Rows:
    """RISE with each batch size."""
    questions = {
        s["ResNet18", "light"]: (2, s[224, 96], s[1023, 95], s[(16, 64, 128, 256), (4, 32)]),
        "DenseNet121": (3, 96, 255, (4, 8, 16, 32)),
    }
    if s.quick:
        del questions["DenseNet121"]
    for kind, (dims, size, masks, sizes) in questions.items():
        network, image = made(kind, dims, size, s)
        explain = ms.rise(masks, target=ms.ClassScore([1], "softmax"))
        calls = {
            str(each): lambda each=each: explain.replace(mask_batch_size=each)(image, network)  # noqa: B023
            for each in ("auto", *sizes)
        }
        seconds = alternated(calls, s.device, s[3, 15])  # of calls that take hundredths of a second
        best = min(list(calls)[1:], key=seconds.__getitem__)
        name = f"{kind}, {dims}D {size}^{dims}: auto over {best} images"
        at_most = s[BARS[dims], 1.5]  # of so few small images, what a batch costs once is a larger share
        yield row(name, seconds["auto"] / seconds[best], at_most=at_most)


def peak_memory(s: Setting) -> Rows:
    """Of 200 and of 2000 masks."""
    few, many = 200, 2000
    peaks = [_peak_on_gpu(count, s) for count in (few, many)]
    yield row(f"3D, {few} masks: MiB", peaks[0])
    yield row(f"3D, {many} masks over {few}", peaks[1] / peaks[0], at_most=1.05)


def _peak_on_gpu(num_masks: int, s: Setting) -> float:
    network, image = made("light", 3, 64, s)
    explain = ms.rise(num_masks, target=ms.ClassScore("all", "none"), mask_batch_size=16)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    explain(image, network)
    return torch.cuda.max_memory_allocated() / 2**20


def waits_for_the_device(s: Setting) -> Rows:
    """Of each batch that more masks bring."""
    target, batch_size = ms.ClassScore([1], "softmax"), 8
    inner = SlidingWindowInferer([16] * 2, sw_batch_size=batch_size, overlap=0.5)
    torch.manual_seed(0)
    segmenter, classifier = torch.nn.Conv2d(3, 2, 3, padding=1).eval().to(s.device), light(2).to(s.device)
    questions: dict[str, tuple[Any, torch.nn.Module, int]] = {
        "RISE": (lambda n: ms.rise(n * batch_size - 1, target=target, mask_batch_size=batch_size), classifier, 48),
        "windows": (lambda n: ms.sliding_window(8, 64 // n, target=target, mask_batch_size=batch_size), classifier, 64),
        "remembered patches": (
            lambda n: ms.sliding_window(
                8, 64 // n, target=ms.RegionScore(1, "softmax"), inferer=inner, mask_batch_size=batch_size
            ),
            segmenter,
            64,
        ),
    }
    for name, (explain, network, size) in questions.items():
        image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(s.device)
        few, many = (_waits(explain(count), image, network, s) for count in (4, 8))
        yield row(f"{name}: waits a batch", (many[0] - few[0]) / (many[1] - few[1]), at_most=0)


def _waits(
    explain: ms.PerturbationInferer, image: torch.Tensor, network: torch.nn.Module, s: Setting
) -> tuple[int, int]:
    """How often it waits, and in how many forwards."""
    explain(image, network)  # what is found out once a network is not counted
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * s.on_gpu]
    timed = overhead.Timed(network).eval()
    with profile(activities=kinds) as profiler:
        explain(image, timed)
    return sum(event.count for event in profiler.key_averages() if event.key in WAITS[s.on_gpu]), len(timed.sizes)


def placed(network: torch.nn.Module, image: torch.Tensor, s: Setting) -> tuple[torch.nn.Module, torch.Tensor]:
    """Both on the device."""
    return network.to(s.device), image.to(s.device)


def agreement_with_the_cpu(s: Setting) -> Rows:
    """Of single precision, and of double precision, where rounding leaves more digits."""
    target, here = ms.ClassScore([1], "none"), Setting("cpu", s.quick)
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))  # the images are small
    methods = {
        "windows": ms.sliding_window(12, 12, target=target),
        "RISE": ms.rise(31, target=target),
        "focused_rise": ms.focused_rise(60, target=target),
    }
    questions = [("light", 2, 48), ("light", 3, 24), *s[[("DenseNet121", 3, 32)], []]]
    for (kind, dims, size), dtype in itertools.product(questions, (torch.float32, torch.float64)):
        network, image = (each.to(dtype) for each in made(kind, dims, size, here))
        for method, explain in methods.items():
            (expected,) = explain.explain(image, network)
            with float32_in("ieee", s):
                (found,) = explain.explain(*reversed(placed(network, image, s)))
            network = network.cpu()
            name = f"{kind}, {dims}D {size}^{dims}, {str(dtype).removeprefix('torch.')}: {method}"
            bar = 1e-5 if dtype == torch.float32 else 1e-9
            yield row(f"{name}, scores", _gap(found.scores, expected.scores), at_most=bar)
            if dtype == torch.float64:
                yield row(f"{name}, map", _gap(found.saliency, expected.saliency), at_most=bar)
    torch.set_num_threads(threads)


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu() - expected.cpu()).abs().max() / expected.abs().max())


def tests_on_a_gpu(s: Setting) -> Rows:
    """How many of the tests that need a GPU fail."""
    marked = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.cuda" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "--no-header", *marked]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=TESTS.parent)
    said = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
    yield row(f"pytest -m cuda: {said.strip('= ')}; exit status", done.returncode, at_most=0)


#: by name what yields rows, the package that it needs beside the test extra's others, and whether only a GPU has it
GROUPS: dict[str, tuple[Callable[[Setting], Rows], str, bool]] = {
    "overhead": (over_bare_forwards, "monai", False),
    "cohort": (in_a_cohort, "ignite", False),
    "peers": (against_peers, "captum", False),
    "xaitk": (against_xaitk, "xaitk_saliency", False),
    "waits": (waits_for_the_device, "monai", False),
    "agreement": (agreement_with_the_cpu, "monai", False),
    "memory": (peak_memory, "monai", True),
    "tests": (tests_on_a_gpu, "pytest", True),
    "batch size": (batch_size_by_itself, "monai", False),
    "precision": (in_other_precision, "monai", False),
}


def measured(name: str, s: Setting) -> Rows:
    """The rows of a group; one that fails where the group does, which takes no others with it."""
    measure, package, needs_gpu = GROUPS[name]
    if needs_gpu and not s.on_gpu:
        return
    if importlib.util.find_spec(package) is None:
        print(f"{name}: {package} is not installed, so its rows are left out", flush=True)
        return
    begun = now(s.device)
    try:
        for each in measure(s):
            yield {"group": name, **each}
    except Exception as error:
        traceback.print_exc()
        yield {"group": name, **row(f"failed: {type(error).__name__}", float("nan"), at_most=0)}
    print(f"{name}: {now(s.device) - begun:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a row fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    add_options(parser)
    args = parser.parse_args(arguments)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: --device cpu --quick runs without one")
    peers = [name for name in ("captum", "xaitk-saliency") if importlib.util.find_spec(name.replace("-", "_"))]
    rows: list[Row] = []
    for name in args.only:
        rows += measured(name, Setting(args.device, args.quick))
        keep(args, "gpu", rows, peers)  # after each group, so that what is stopped has its figures
    print(markdown([{**each, "passes": "pass" if each["passes"] else "FAIL"} for each in rows]))
    failed = sum(not each["passes"] for each in rows)
    print(f"{len(rows) - failed} rows pass, {failed} fail")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
