"""Checks of the settings of an inferer: what each must be, and what to write where it is something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monai.inferers import Inferer

from monai_saliency.cases import Case
from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.mc_rise import MCRISEScoring
from monai_saliency.estimators.rise import RISEScoring
from monai_saliency.fills.base import CaseFill
from monai_saliency.inferers.patch_memory import PatchMemory
from monai_saliency.masks.base import Masks
from monai_saliency.masks.mc_rise import MCRISEMasks
from monai_saliency.networks.inputs import InputAdapter
from monai_saliency.targets.base import Target
from monai_saliency.utils.arguments import instance
from monai_saliency.utils.timing import BusyMeter

__all__ = ["check_cases", "check_settings"]


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of an inferer that are not what they are taken for."""
    instance("masks", settings["masks"], Masks, "masks such as RISEMasks(1000)")
    words = "a target such as ClassScore([1], 'softmax') (FunctionScore(function) makes one of a function)"
    instance("target", settings["target"], Target, words)
    instance("estimator", settings["estimator"], Estimator, "an estimator such as OcclusionScoring()")
    words = "a fill such as ConstantFill(0.0), or a function of images (B, C, *spatial)"
    instance("fill", settings["fill"], CaseFill, words, function=True, none=True)
    words = "a MONAI inferer such as SimpleInferer()"
    instance("inferer", settings["inferer"], Inferer, words, function=True, none=True)
    instance("inputs", settings["inputs"], InputAdapter, "an adapter such as DictInput('image')", none=True)
    instance("meter", settings["meter"], BusyMeter, "a BusyMeter()", none=True)
    words = "True, False or PatchMemory(device_bytes=..., host_bytes=...)"
    instance("patch_memory", settings["patch_memory"], (bool, PatchMemory), words, none=True)
    words = "the arguments of torch.autocast, such as {'dtype': torch.float16}"
    instance("autocast", settings["autocast"], Mapping, words, none=True)
    _check_output(settings["output"])
    _check_p1(settings["masks"], settings["estimator"])
    _check_fills(settings["masks"], settings["estimator"])


def _check_output(output: Any) -> None:
    words = "a key, an index, several such as ('pred', 0), or a function of the network's output"
    if isinstance(output, (list, tuple)):
        if not output or not all(isinstance(step, (str, int)) and not isinstance(step, bool) for step in output):
            raise ValueError(f"`output` must be {words}, got {output!r}")
    elif isinstance(output, (bool, float)):
        raise ValueError(f"`output` must be {words}, got {output!r}")
    else:
        instance("output", output, (str, int), words, function=True, none=True)


def _check_p1(masks: Any, estimator: Any) -> None:
    """The estimator's `p1` is the masks': of another one, the map would hold the masks' coverage."""
    inner = masks
    while hasattr(inner, "masks"):  # masks of channels, or in rounds, are made of others
        inner = inner.masks
    drawn, taken = getattr(inner, "p1", None), getattr(estimator, "p1", None)
    if getattr(estimator, "form", None) == "plain":  # which does not read it
        return
    if getattr(inner, "num_masks", None) is None or drawn is None or not taken or taken == drawn:
        return
    raise ValueError(
        f"`estimator` is {type(estimator).__name__}(p1={taken}), but the masks keep a cell with `p1` {drawn}: write "
        f"{type(estimator).__name__}({drawn})"
    )


def _check_fills(masks: Any, estimator: Any) -> None:
    """Maps of several fills need masks with several, and RISE's formula is of one."""
    inner = masks
    while hasattr(inner, "masks"):
        inner = inner.masks
    several = isinstance(inner, MCRISEMasks)
    if isinstance(estimator, MCRISEScoring) and not several:
        raise ValueError(
            f"`estimator` is MCRISEScoring, which compares several fills, and {type(inner).__name__} have one: use "
            "mc_rise(...) or MCRISEMasks(...)"
        )
    if several and isinstance(estimator, RISEScoring):
        raise ValueError(
            "`estimator` is RISEScoring, which knows one fill, and MCRISEMasks have several: use "
            f"MCRISEScoring({inner.p1}), or OcclusionScoring() for the drop while a fill replaces the voxel"
        )


def check_cases(cases: Any, stored: Any, count: int) -> None:
    """Refuse `cases` and `stored` that do not say something of each image."""
    for name, given in (("cases", cases), ("stored", stored)):
        if given is None:
            continue
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise ValueError(f"`{name}` must be a list with one entry for each image, got a {type(given).__name__}")
        if len(given) != count:
            raise ValueError(f"`{name}` must have one entry for each image, got {len(given)} for {count} images")
    for case in cases or ():
        instance("cases", case, Case, "a list of cases such as Case('patient_7', labels=organs)")
