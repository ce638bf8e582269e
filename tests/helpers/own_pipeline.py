"""A small pipeline of one's own, and what explains it, for tests that run it in several processes."""

import re
from typing import Any

import torch
from monai.data import DataLoader, Dataset, MetaTensor
from monai.networks.layers import Conv, Norm, Pool

import monai_saliency as ms
from helpers.paths import ROOT

MASKS, BATCH = 21, 4


class Network(torch.nn.Module):
    """Three logits of an image, with batch normalisation and dropout, so that its mode shows."""

    def __init__(self, dims: int = 2, channels: int = 1) -> None:
        super().__init__()
        norm, pool = Norm["batch", dims](4), Pool["adaptiveavg", dims](2)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = torch.nn.Sequential(Conv["conv", dims](channels, 4, 3), norm, torch.nn.ReLU(), pool)
            self.head = torch.nn.Linear(4 * 2**dims, 3)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.body(x).flatten(1)))


def inferer() -> ms.PerturbationInferer:
    return ms.rise(MASKS, 3, target=ms.ClassScore("all", "softmax"), mask_batch_size=BATCH)


def scans(count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Images of one shape, each with an affine of its own."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "image": MetaTensor(
                torch.rand(1, 13, 11, generator=generator).to(dtype), affine=torch.eye(4).double() * (i + 1)
            ),
            "case": f"case{i}",
        }
        for i in range(count)
    ]


def loader(count: int, **settings: Any) -> DataLoader:
    return DataLoader(Dataset(scans(count)), **settings)


def plain_maps(count: int, batch_size: int = 1, network: Any = None) -> dict[str, torch.Tensor]:
    """The maps of the plain inferer, by case."""
    found: dict[str, torch.Tensor] = {}
    for batch in loader(count, batch_size=batch_size):
        maps = inferer()(batch["image"], network or Network())
        found |= dict(zip(batch["case"], maps.as_tensor(), strict=True))
    return found


def run_page(name: str) -> dict[str, Any]:
    """Run the Python code of an engine's page, from top to bottom; the names that it leaves."""
    page = ROOT / "tutorials" / "engines" / f"{name}.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    found: dict[str, Any] = {"__name__": name}
    exec(compile(code, str(page), "exec"), found)
    return found
