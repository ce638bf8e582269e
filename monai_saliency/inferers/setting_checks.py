"""What the settings of an inferer may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monai.inferers import Inferer

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.fills.base import CaseFill
from monai_saliency.inferers.patch_memory import PatchMemory
from monai_saliency.masks.base import Masks
from monai_saliency.masks.rise import MCRISEMasks
from monai_saliency.networks.inputs import TensorInput
from monai_saliency.targets.base import Target
from monai_saliency.utils.arguments import instance


def check_settings(settings: Mapping[str, Any], needs_masks: bool) -> None:
    """Refuse settings that are not what they are taken for."""
    kinds: dict[str, tuple[Any, str]] = {
        "masks": (Masks, "masks such as RISEMasks(1000)"),
        "target": (
            Target,
            "a target such as ClassScore([1], 'softmax') (FunctionScore(function) makes one of a function)",
        ),
        "estimator": (Estimator, "an estimator such as OcclusionScoring()"),
        "fill": (CaseFill, "a fill such as ConstantFill(0.0) or MeanFill(), or a function of images (B, C, *spatial)"),
        "inferer": (Inferer, "a MONAI inferer such as SimpleInferer()"),
        "inputs": (TensorInput, "an adapter such as DictInput('image')"),
        "patch_memory": ((bool, PatchMemory), "True, False or PatchMemory(device_bytes=..., host_bytes=...)"),
        "autocast": (Mapping, "the arguments of torch.autocast, such as {'dtype': torch.float16}"),
    }
    for name, (kind, words) in kinds.items():
        needed = name == "target" or (needs_masks and name in ("masks", "estimator"))
        instance(name, settings[name], kind, words, function=name in ("fill", "inferer"), none=not needed)
    words = "a key, an index, several such as ('pred', 0), or a function of the network's output"
    output = settings["output"]
    for step in output if isinstance(output, (list, tuple)) and output else [output]:
        instance("output", step, (str, int), words, function=True, none=True)
    _check_pair(settings["masks"], settings["estimator"])


def _check_pair(masks: Any, estimator: Any) -> None:
    """RISE must know the masks' `p1`, and that they have one fill: else a map would hold their coverage."""
    while hasattr(masks, "masks"):  # masks of channels, or in rounds, are made of others
        masks = masks.masks
    name, several = type(estimator).__name__, isinstance(masks, MCRISEMasks)
    if several and isinstance(estimator, RISEScoring):
        raise ValueError(
            f"`estimator` is {name}, which knows one fill, and MCRISEMasks have several: use "
            f"MCRISEScoring({masks.p1}), or OcclusionScoring() for the drop while a fill replaces the voxel"
        )
    drawn, taken = getattr(masks, "p1", None), getattr(estimator, "p1", None)
    reads = getattr(estimator, "form", None) != "plain" and getattr(masks, "num_masks", None) is not None
    if reads and drawn is not None and taken and taken != drawn:
        raise ValueError(
            f"`estimator` is {name}(p1={taken}), but the masks keep a cell with `p1` {drawn}: write {name}({drawn})"
        )
