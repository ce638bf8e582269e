"""Ours against its peers and against bare forwards: same network, same masks, same batch size, interleaved in one run.

    python tests/benchmarks/peers.py [--network light] [--dims 2 3] [--tiles 4 8] [--sizes 32 64] [--rounds 3]
        [--device cpu] [--batch_size 16] [--json FILE] [--keep [LABEL]]

- ``occlusion``: windows side by side, ``tiles`` along each axis. Ours (``sliding_window``), captum's ``Occlusion`` and
  ``FeatureAblation``, MONAI's ``OcclusionSensitivity``, and in 2D xaitk-saliency's ``SlidingWindowStack``.
- ``rise``: as many random masks. Ours and in 2D xaitk-saliency's ``RISEStack``, whose masks are the same.
- ``shapley``: Shapley values of 4 windows along each axis (2 in 3D), from as many coalitions but at least ten a window.
  Ours and captum's ``KernelShap``; each draws its own coalitions, so that here maps differ by chance.

Each tool's call is followed by as many bare forwards of the same batch sizes, and rounds of all tools alternate, so
that a machine's moods hit all. Printed are, of each tool: wall time over that of its bare forwards (of sums over the
rounds), forwards (ours pads its last batch and checks rows), milliseconds a forward, and the largest difference to our
map in shares of its largest value (xaitk-saliency scales its maps to [-1, 1], so ours is scaled alike).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import captum.attr
import torch
from monai.networks.nets import DenseNet121, resnet18
from monai.visualize import OcclusionSensitivity
from record import add_options, keep, light, markdown, now
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.slidingwindow import SlidingWindowStack

import monai_saliency as ms

P1, SEED, GRID = 0.5, 3, 4


@dataclass(frozen=True)
class Setting:
    """What all tools explain: the logit of class 1 of a 3-channel image, under a light or a real network."""

    network: str
    dims: int
    size: int
    tiles: int
    batch_size: int
    device: str

    @property
    def window(self) -> int:
        return self.size // self.tiles

    @property
    def num_masks(self) -> int:
        return self.tiles**self.dims

    @property
    def players(self) -> int:
        """Windows along each axis of which Shapley values are estimated."""
        return 4 if self.dims == 2 else 2

    @property
    def num_coalitions(self) -> int:
        return max(self.num_masks, 10 * self.players**self.dims + 1)

    def image(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.rand(1, 3, *[self.size] * self.dims, generator=generator).to(self.device)

    def made(self) -> torch.nn.Module:
        """The network."""
        torch.manual_seed(0)
        if self.network == "light":
            made = light(self.dims)
        elif self.dims == 2:
            made = resnet18(spatial_dims=2, n_input_channels=3, num_classes=3)
        else:
            made = DenseNet121(spatial_dims=3, in_channels=3, out_channels=3)
        return made.eval().to(self.device)

    def regions(self, tiles: int) -> torch.Tensor:
        """The window of each voxel, counted from 1: ``(1, *spatial)``."""
        places = torch.arange(self.size) * tiles // self.size
        index = torch.zeros([self.size] * self.dims, dtype=torch.long)
        for axis in range(self.dims):
            index = index * tiles + places.reshape([-1 if each == axis else 1 for each in range(self.dims)])
        return index[None] + 1


class Counted(torch.nn.Module):
    """A network that notes the sizes of its batches."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self.sizes: list[int] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(batch))
        return self.network(batch)


Tool = Callable[[Setting, torch.nn.Module, torch.Tensor], torch.Tensor]


def ours(make: Callable[[Setting], dict[str, Any]], method: Callable[..., Any]) -> Tool:
    """One of our methods."""

    def explain(s: Setting, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
        target = ms.ClassScore([1], "none")
        return method(**make(s), target=target, mask_batch_size=s.batch_size)(image, network)[0, 0]

    return explain


def captum_occlusion(s: Setting, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    window = (3, *[s.window] * s.dims)
    found = captum.attr.Occlusion(network).attribute(
        image, window, window, target=1, perturbations_per_eval=s.batch_size
    )
    return found[0, 0]


def captum_ablation(s: Setting, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    features = (s.regions(s.tiles)[None] - 1).to(image.device)
    found = captum.attr.FeatureAblation(network).attribute(
        image, target=1, feature_mask=features, perturbations_per_eval=s.batch_size
    )
    return found[0, 0]


def monai_occlusion(s: Setting, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    explain = OcclusionSensitivity(
        network, s.window, s.batch_size, mode=0.0, overlap=0.0, activate=False, verbose=False
    )
    with torch.no_grad():
        hidden, _ = explain(image)
        return network(image)[0, 1] - hidden[0, 1].as_tensor()


def captum_shapley(s: Setting, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    features = (s.regions(s.players)[None] - 1).to(image.device)
    with torch.no_grad():
        found = captum.attr.KernelShap(network).attribute(
            image, target=1, feature_mask=features, n_samples=s.num_coalitions, perturbations_per_eval=s.batch_size
        )
    return found[0, 0]


def of_xaitk(make: Callable[[Setting], Any]) -> Tool:
    """A method of xaitk-saliency."""

    def explain(s: Setting, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
        method = make(s)
        method.fill = [0, 0, 0]
        array = image[0].movedim(0, -1).cpu().numpy()
        box = ms.xaitk.Classifier(
            lambda images: network(images)[:, 1:2], 1, "none", batch_size=s.batch_size, device=s.device
        )
        return torch.from_numpy(method.generate(array, box)[0])

    return explain


def _regions(s: Setting) -> dict[str, Any]:
    regions = s.regions(s.players)
    return {"num_coalitions": s.num_coalitions, "regions": lambda image, spacing: regions}


#: by question: each tool by its name, ours first; those of 2D alone
TOOLS: dict[str, dict[str, Tool]] = {
    "occlusion": {
        "ours": ours(lambda s: {"window_size": s.window, "stride": s.window}, ms.sliding_window),
        "captum Occlusion": captum_occlusion,
        "captum FeatureAblation": captum_ablation,
        "MONAI OcclusionSensitivity": monai_occlusion,
        "xaitk SlidingWindowStack": of_xaitk(lambda s: SlidingWindowStack((s.window,) * 2, (s.window,) * 2, threads=0)),
    },
    "rise": {
        "ours": ours(
            lambda s: {"num_masks": s.num_masks, "grid_size": GRID, "p1": P1, "seed": SEED, "form": "debiased"}, ms.rise
        ),
        "xaitk RISEStack": of_xaitk(lambda s: RISEStack(s.num_masks, GRID, P1, SEED, threads=0, debiased=True)),
    },
    "shapley": {"ours": ours(_regions, ms.shapley), "captum KernelShap": captum_shapley},
}


def tools_of(question: str, setting: Setting) -> dict[str, Tool]:
    """The tools of a question that take images of so many axes."""
    return {name: tool for name, tool in TOOLS[question].items() if setting.dims == 2 or "xaitk" not in name}


def measure(question: str, setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """The figures of all tools."""
    image, tools = setting.image(), tools_of(question, setting)
    # One each, since some leave a network otherwise than they found it.
    networks = {name: Counted(setting.made()).eval() for name in tools}
    maps, spent = {}, {name: [0.0, 0.0] for name in tools}
    for name, tool in tools.items():  # what is found out once a network is not timed
        maps[name] = tool(setting, networks[name], image).detach().cpu().double()
    bare = image.repeat(setting.batch_size, *[1] * (image.ndim - 1))
    forwards = {}
    names = list(tools)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            network = networks[name]
            network.sizes.clear()
            begun = now(setting.device)
            tools[name](setting, network, image)
            between = now(setting.device)
            with torch.no_grad():
                for size in network.sizes:
                    network.network(bare[:size])
            ended = now(setting.device)
            forwards[name] = sum(network.sizes)
            spent[name][0] += between - begun
            spent[name][1] += ended - between
    rows = []
    for name in names:
        scaled = maps["ours"], maps[name]
        if "xaitk" in name:
            scaled = scaled[0] / scaled[0].abs().max(), scaled[1] / scaled[1].abs().max()
        gap = float((scaled[0] - scaled[1]).abs().max() / scaled[0].abs().max())
        total, alone = spent[name]
        row = {"question": question, "tool": name, "setting": asdict(setting), "ratio": total / alone}
        milliseconds = 1e3 * total / rounds / forwards[name]
        rows.append({**row, "forwards": forwards[name], "milliseconds": milliseconds, "difference": gap})
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["light", "real"], default="light")
    parser.add_argument("--questions", nargs="*", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--dims", nargs="*", type=int, choices=[2, 3], default=[2, 3])
    parser.add_argument("--tiles", nargs="*", type=int, default=[4, 8], help="windows along each axis")
    parser.add_argument("--sizes", nargs="*", type=int, default=[32, 64], help="of the image, along each axis")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    add_options(parser)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Using a non-tuple sequence", module="monai.visualize")
    rows = []
    for dims in args.dims:
        for size in args.sizes:
            for tiles in args.tiles:
                setting = Setting(args.network, dims, size, tiles, args.batch_size, args.device)
                if size % tiles:
                    parser.error(f"windows must lie side by side: {size} is no multiple of {tiles}")
                for question in args.questions:
                    found = measure(question, setting, args.rounds)
                    rows += found
                    print(markdown(found), flush=True)
    keep(args, "peers", rows, ["captum", "xaitk-saliency"])


if __name__ == "__main__":
    main()
