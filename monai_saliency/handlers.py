"""Explaining inside a MONAI evaluator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from monai.data import MetaTensor, decollate_batch
from monai.engines import IterationEvents
from monai.utils import CommonKeys

from monai_saliency.errors import CaseError, root_cause
from monai_saliency.inferers import Explanation, PerturbationInferer, case_name
from monai_saliency.summary import Summary, summarize
from monai_saliency.utils import require

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["SaliencyHandler", "run"]

require("ignite", extra="bundle")


class SaliencyHandler:
    """Explains every batch right after the evaluator's own forward, whose predictions it leaves untouched.

    For each case of the batch the map goes into the case's dictionary, through the postprocessing (``Invertd``,
    ``SaveSaliencyd``, ...) and into the summary.

    Args:
        inferer: what explains.
        network: the network.
        postprocessing: transforms of one case's dictionary: the batch's own keys, the map, ``explanation`` and
            ``title``.
        summary: the cohort's table.
        image_key: the network's input.
        saliency_key: where the map goes.
    """

    def __init__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., torch.Tensor],
        postprocessing: Callable[[dict[str, Any]], dict[str, Any]],
        summary: Summary | None = None,
        image_key: str = CommonKeys.IMAGE,
        saliency_key: str = "saliency",
    ) -> None:
        self.inferer = inferer
        self.network = network
        self.postprocessing = postprocessing
        self.summary = summary
        self.image_key = image_key
        self.saliency_key = saliency_key

    def attach(self, engine: Engine) -> None:
        """Register with an evaluator."""
        engine.add_event_handler(IterationEvents.FORWARD_COMPLETED, self)

    def __call__(self, engine: Engine) -> None:
        images = engine.state.output[self.image_key]  # type: ignore[index]
        cases = decollate_batch(engine.state.batch)
        names = [str(case.get("case", case_name(images, i))) for i, case in enumerate(cases)]
        start = time.perf_counter()
        explanations = self.inferer.explain(images, self.network, names=names)
        if images.is_cuda:
            torch.cuda.synchronize(images.device)
        seconds = (time.perf_counter() - start) / len(cases)
        for name, case, explanation in zip(names, cases, explanations, strict=True):
            case[self.saliency_key] = MetaTensor(explanation.saliency).copy_meta_from(case[self.image_key])
            case["explanation"] = explanation
            case["title"] = _title(name, explanation)
            done = self.postprocessing(case)
            if self.summary is not None:
                maps = done[self.saliency_key]
                self.summary.add(
                    summarize(
                        name, explanation, maps.numpy(force=True), maps.affine.numpy(), case.get("label"), seconds
                    )
                )


def _title(name: str, explanation: Explanation) -> str:
    scores = zip(explanation.target.labels, explanation.reference_scores.tolist(), strict=True)
    explained = ", ".join(f"class {label} scores {score:.3f}" for label, score in scores)
    return f"{name}\npredicted {{prediction}} ({{probability:.3f}}), explained: {explained}".format(
        **{"prediction": "-", "probability": float("nan")} | explanation.target.describe()
    )


def run(evaluator: Any) -> None:
    """Run an evaluator over its cohort, so that an error names the case it stopped at.

    Raises:
        CaseError: for anything that goes wrong with a case.
    """
    try:
        evaluator.run()
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, CaseError):
            raise
        batch = evaluator.state.batch
        names = batch.get("case") if isinstance(batch, dict) else None
        if not names:
            raise
        raise CaseError(", ".join(names), f"{type(cause).__name__}: {cause}") from error
