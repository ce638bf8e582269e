"""The loop of white-box methods: differentiate the score at some images, and make the map of the mean.

This needs a network whose scores can be differentiated: a module, TorchScript, or any callable of torch's operations. A
remote call, an exported engine, a network under ``no_grad`` and a target that counts voxels give no derivative, and a
network that rounds gives zeros. Such a case fails, unless the score is the same for each image that was run: then the
map is zero. Under any inferer but ``SimpleInferer`` the network's calls are made again when the derivative of their
outputs is known (:class:`~monai_saliency.gradients.base.NetworkCalls`).

captum and MONAI have the same methods for one image of a classifier; tests hold that the maps are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from monai.inferers import SimpleInferer

from monai_saliency.errors import CaseError
from monai_saliency.estimators.base import Meaning
from monai_saliency.gradients.base import GradientMethod, NetworkCalls
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.forward import Forward
from monai_saliency.inferers.walk import Walk
from monai_saliency.inferers.whole_method import WholeMethodInferer, WholeMethodRun
from monai_saliency.networks.inputs import SplitInputs
from monai_saliency.networks.runtime import plain_network, runtime_settings
from monai_saliency.targets.base import BoundTarget, Target, label_name
from monai_saliency.utils.arguments import instance
from monai_saliency.utils.monai_private import tree_map
from monai_saliency.utils.precision import accumulation_dtype
from monai_saliency.utils.tensors import copied
from monai_saliency.utils.timing import stage


class GradientInferer(WholeMethodInferer):
    """Explains images by the derivative of the score, for comparison."""

    method: GradientMethod

    def __init__(self, method: GradientMethod, target: Target, *args: Any, **settings: Any) -> None:
        words = "a white-box method such as IntegratedGradients()"
        method = instance("method", method, GradientMethod, words)
        super().__init__(method, target, *args, **settings)

    @property
    def meaning(self) -> Meaning:
        return self.method.meaning

    def explain_case(self, forward: Forward, walk: Walk, split: SplitInputs, index: int) -> Explanation:
        # Where the caller infers, nothing could be differentiated.
        with torch.inference_mode(False), torch.no_grad():
            return _Run(self, forward, walk, split, index).explain()


class _Run(WholeMethodRun):
    """One case, explained by a white-box method: one image at a time, so that no row depends on another."""

    def __init__(self, inferer: GradientInferer, forward: Forward, walk: Walk, split: SplitInputs, index: int) -> None:
        super().__init__(inferer, forward, walk, split, index)
        self.method, self.target = inferer.method, inferer.target
        # Its layers are watched by their own names, uncompiled.
        self.calls = NetworkCalls(
            self.method, plain_network(forward.network), type(inferer.inferer) is not SimpleInferer
        )
        if runtime_settings(forward.network).get("amp") == "fp16":
            raise self.refused("float16 rounds small derivatives to zero, so switch `amp` off or use bf16")

        def run(inputs: Any, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return inferer.inferer(inputs, functools.partial(self.calls, network), *args, **kwargs)

        traced: Any = run
        self.tracing = replace(forward, inferer=traced)

    def explain(self) -> Explanation:
        """Differentiate, and make the map of the mean."""
        image, fill = (each.detach().clone() for each in (self.walk.case.image, self.walk.images.fill))
        output = tree_map(copied, self.run(image[None]))
        bound = self.begin(output)
        if bound.vouch is not None and torch.equal(self.method.at(len(self.method) - 1, image, fill), image):
            raise self.refused("a similarity with the image's own output is highest there, where its slope is zero")
        filled = bound(self.run(fill[None])).clone()
        sums, scores = self.mean(image, fill, bound)
        scores = torch.cat([scores, filled])
        self.refuse_flat(bound, torch.cat([bound(output), scores]))
        maps = torch.stack([self.method.map(each, image, fill) for each in sums])
        return self.explanation(maps, scores)

    def refuse_flat(self, bound: BoundTarget, scores: torch.Tensor) -> None:
        """Refuse a score without a derivative that changes from image to image, ``(images, K)``. One that is the same
        for all does not depend on the image, and has a map of zeros.
        """
        for k, label in enumerate(map(label_name, bound.labels)):
            here = scores[:, k]
            # Recording for autograd may round otherwise, which the first and the last are without.
            changed = bool(here[0] != here[-1]) or not self.rounding.same(here, here[:1].expand_as(here))
            if changed and (self.calls.broken or k not in self.calls.moved):
                why = (
                    f"for {label} it is zero at all {len(here)} images, though the score is {here[0]:.8g} and, at the "
                )
                why += f"fill, {here[-1]:.8g}: something rounds, compares with a threshold, or saturates"
                raise self.refused(self.calls.broken or why)

    def mean(self, image: torch.Tensor, fill: torch.Tensor, bound: BoundTarget) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted mean of what is read at each image, ``(K, C, *spatial)``, and the scores ``(N, K)``."""
        weights = self.method.weights().to(image.device, accumulation_dtype(image.device))
        sums, scores = weights.new_zeros(len(bound.labels), *image.shape), []
        for number, weight in enumerate(weights):
            leaf = self.method.at(number, image, fill)[None].detach().clone().requires_grad_()
            scores.append(self.add(weight, leaf, bound, sums))
        return sums, torch.cat(scores)

    def add(self, weight: torch.Tensor, leaf: torch.Tensor, bound: BoundTarget, sums: torch.Tensor) -> torch.Tensor:
        """Add what is read of each score of an image to the sums; the scores ``(1, K)``."""
        try:
            with torch.enable_grad(), stage("derivative"):
                scores = bound(self.run(leaf, self.tracing))
                for k in range(scores.shape[1]):
                    self.calls.score = k
                    sums[k] += weight * self.derivative(scores[0, k], leaf, k + 1 < scores.shape[1])[0].to(sums)
        except (CaseError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise self.refused(f"it fails under autograd ({type(error).__name__}: {error})") from error
        return scores.detach()

    def derivative(self, score: torch.Tensor, image: torch.Tensor, keep: bool) -> torch.Tensor:
        """What is read of a score."""
        found = None
        if score.requires_grad:
            (found,) = torch.autograd.grad(score, image, retain_graph=keep, allow_unused=True)
        if found is None:
            self.calls.broken = self.calls.broken or "autograd sees no way from the score back to the image"
        return torch.zeros_like(image) if found is None else found

    def refused(self, why: str) -> CaseError:
        """The error of a case whose score has no derivative."""
        kind = type(self.forward.network).__name__
        return CaseError(
            self.name,
            f"{type(self.method).__name__} needs the derivative of the score, and with the network {kind} and the "
            f"target {type(self.target).__name__} there is none: {why}. Explain by perturbation, which "
            "needs none (method focused_rise or sliding_window), or give a module and a target of probabilities",
        )
