"""Ours against its peers and against bare forwards: same network, same masks, same batch size, interleaved in one run.

    python tests/benchmarks/peers.py [--dims 2 3] [--tiles 4 8] [--sizes 32 64] [--rounds 3]
        [--device cpu] [--batch_size 16] [--json FILE] [--keep [LABEL]]

Windows side by side, ``tiles`` along each axis, and Shapley values of 4 windows along each axis (2 in 3D), which differ
by chance. Each tool's call is followed by as many bare forwards, and rounds of all alternate. Of each tool: wall time
over that of its bare forwards, forwards, milliseconds a forward, and the largest difference to our map in shares of its
largest value. xaitk-saliency is compared in ``xaitk.py``.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import captum.attr
import torch
from monai.visualize import OcclusionSensitivity
from record import add_options, keep, light, markdown, now

import monai_saliency as ms


@dataclass(frozen=True)
class Setting:
    """What all tools explain: the logit of class 1 of a 3-channel image, under a light network."""

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

    def regions(self, tiles: int) -> torch.Tensor:
        """The window of each voxel, counted from 1: ``(1, *spatial)``."""
        index = torch.arange(float(tiles**self.dims)).reshape(1, 1, *[tiles] * self.dims)
        return torch.nn.functional.interpolate(index, [self.size] * self.dims)[0].long() + 1


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


def of_captum(kind: Any, settings: Callable[[Setting], dict[str, Any]]) -> Tool:
    """A method of captum."""

    def explain(s: Setting, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            given = settings(s) | {"target": 1, "perturbations_per_eval": s.batch_size}
            return kind(network).attribute(image, **given)[0, 0]

    return explain


def monai_occlusion(s: Setting, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    settings: dict[str, Any] = {"mode": 0.0, "overlap": 0.0, "activate": False, "verbose": False}
    explain = OcclusionSensitivity(network, s.window, s.batch_size, **settings)
    with torch.no_grad():
        hidden, _ = explain(image)
        return network(image)[0, 1] - hidden[0, 1].as_tensor()


def _windows(s: Setting) -> dict[str, Any]:
    window = (3, *[s.window] * s.dims)
    return {"sliding_window_shapes": window, "strides": window}


def _features(s: Setting, tiles: int) -> torch.Tensor:
    return (s.regions(tiles)[None] - 1).to(s.device)


def _regions(s: Setting) -> dict[str, Any]:
    regions = s.regions(s.players)
    return {"num_coalitions": s.num_coalitions, "regions": lambda image, spacing: regions}


#: by question: each tool by its name, ours first; those of 2D alone
TOOLS: dict[str, dict[str, Tool]] = {
    "occlusion": {
        "ours": ours(lambda s: {"window_size": s.window, "stride": s.window}, ms.sliding_window),
        "captum Occlusion": of_captum(captum.attr.Occlusion, _windows),
        "captum FeatureAblation": of_captum(
            captum.attr.FeatureAblation, lambda s: {"feature_mask": _features(s, s.tiles)}
        ),
        "MONAI OcclusionSensitivity": monai_occlusion,
    },
    "shapley": {
        "ours": ours(_regions, ms.shapley),
        "captum KernelShap": of_captum(
            captum.attr.KernelShap, lambda s: {"feature_mask": _features(s, s.players), "n_samples": s.num_coalitions}
        ),
    },
}


def measure(question: str, setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """The figures of all tools."""
    image, tools = setting.image(), TOOLS[question]
    # One each, since some leave a network otherwise than they found it.
    networks = {name: Counted(light(setting.dims).to(setting.device)).eval() for name in tools}
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
        gap = float((maps["ours"] - maps[name]).abs().max() / maps["ours"].abs().max())
        total, alone = spent[name]
        row = {"question": question, "tool": name, "setting": asdict(setting), "ratio": total / alone}
        milliseconds = 1e3 * total / rounds / forwards[name]
        rows.append({**row, "forwards": forwards[name], "milliseconds": milliseconds, "difference": gap})
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
                setting = Setting(dims, size, tiles, args.batch_size, args.device)
                if size % tiles:
                    parser.error(f"windows must lie side by side: {size} is no multiple of {tiles}")
                for question in args.questions:
                    found = measure(question, setting, args.rounds)
                    rows += found
                    print(markdown(found), flush=True)
    keep(args, "peers", rows, ["captum"])


if __name__ == "__main__":
    main()
