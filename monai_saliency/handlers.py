"""Explaining inside a MONAI evaluator."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from monai.data import MetaTensor, decollate_batch
from monai.engines import IterationEvents
from monai.utils import CommonKeys

from monai_saliency.failures import Failures
from monai_saliency.fingerprint import Unfingerprintable, fingerprint
from monai_saliency.inferers import Explanation, PerturbationInferer, case_name, image_spacing, source_file
from monai_saliency.networks import network_fingerprint
from monai_saliency.store import CaseScores, ScoreStore
from monai_saliency.summary import Summary, figures, summarize
from monai_saliency.targets.base import label_name
from monai_saliency.utils import require

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["SaliencyHandler"]

Events = require("ignite.engine", extra="bundle").Events
logger = logging.getLogger(__name__)


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
        failures: where cases that cannot be explained go; they are raised when None.
        store: keeps scores, so that a run that was stopped goes on where it was; nothing is kept when None.
        network_id: names the network for the store, needed where it is not a module.
        image_key: the network's input.
        label_key: where a case holds its label map ``(1, *spatial)`` on the network's grid, for masks and targets that
            are made of regions.
        saliency_key: where the map goes.
    """

    def __init__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., torch.Tensor],
        postprocessing: Callable[[dict[str, Any]], dict[str, Any]],
        summary: Summary | None = None,
        failures: Failures | None = None,
        store: ScoreStore | None = None,
        network_id: str | None = None,
        image_key: str = CommonKeys.IMAGE,
        saliency_key: str = "saliency",
        label_key: str | None = None,
    ) -> None:
        self.inferer = inferer
        self.network = network
        self.postprocessing = postprocessing
        self.summary = summary
        self.failures = failures
        self.store = store
        self.network_id = network_id
        self.image_key = image_key
        self.saliency_key = saliency_key
        self.label_key = label_key
        self._settings: list[str] | None = None

    def attach(self, engine: Engine) -> None:
        """Register with an evaluator."""
        engine.add_event_handler(IterationEvents.FORWARD_COMPLETED, self)
        engine.add_event_handler(Events.COMPLETED, self._report)

    def __call__(self, engine: Engine) -> None:
        for images, cases in self.batches(engine):
            with ExitStack() as held:
                free = [i for i, case in enumerate(cases) if self._claim(str(case["case"]), held)]
                if free:
                    # Plain from here on: the cases' dictionaries hold the meta data.
                    self._explain(_plain(images)[free], [cases[i] for i in free])

    def batches(self, engine: Engine) -> Iterator[tuple[torch.Tensor, list[dict[str, Any]]]]:
        """What is explained together after one iteration: images ``(B, C, *spatial)`` and their dictionaries."""
        images = engine.state.output[self.image_key]  # type: ignore[index]
        cases = decollate_batch(engine.state.batch)
        for i, case in enumerate(cases):
            case.setdefault("case", case_name(images, i))
        yield images, cases

    def _claim(self, case: str, held: ExitStack) -> bool:
        holder = held.enter_context(self.store.claim(case)) if self.store is not None else None
        if holder:
            logger.warning("case %s is being explained by %s: left to it", case, holder)
        return holder is None

    def _explain(self, images: torch.Tensor, cases: Sequence[dict[str, Any]]) -> None:
        """Explain a batch; where that fails and there is a list of failures, each case alone, so that one fails."""
        names = [str(case["case"]) for case in cases]
        scans = [case[self.image_key] for case in cases]
        known: dict[str, list[Any]] = {
            "labels": [None if self.label_key is None else _plain(case.get(self.label_key)) for case in cases],
            "spacings": [image_spacing(scan[None]) for scan in scans],
        }
        stored = self._stored(images, names, known)
        sources = [source_file(scan) for scan in scans]
        start = time.perf_counter()
        try:
            explanations = self.inferer.explain(
                images, self.network, names=names, sources=sources, stored=stored, **known
            )
            if images.is_cuda:
                torch.cuda.synchronize(images.device)
            seconds = (time.perf_counter() - start) / len(cases)
            for case, explanation in zip(cases, explanations, strict=True):
                self._finish(case, explanation, seconds)
        except Exception as error:
            if self.failures is None:
                raise
            if len(cases) == 1:
                self.failures.add(names[0], "explain", error)
                return
            for i, case in enumerate(cases):
                self._explain(images[i : i + 1], [case])

    def _report(self, engine: Engine) -> None:
        """Put the cohort's figures among the engine's metrics."""
        if self.summary is not None:
            failed = [] if self.failures is None else [row["case"] for row in self.failures.rows]
            # What an earlier run made of a scan that is broken now.
            self.summary.replace(failed)
            engine.state.metrics.update(figures(self.summary.read(), len(failed)))

    def _stored(
        self, images: torch.Tensor, names: Sequence[str], known: dict[str, list[Any]]
    ) -> list[CaseScores] | None:
        if self.store is None:
            return None
        # Taken anew for each batch: weights may change in place between them.
        network = network_fingerprint(self.network, self.network_id)
        if network is None:
            warnings.warn("scores are not kept: the network is no module, so give it a network_id", stacklevel=2)
            return None
        try:
            if self._settings is None:
                parts = (
                    self.inferer.masks,
                    self.inferer.target,
                    self.inferer.fill,
                    self.inferer.inferer,
                    self.inferer.output,
                )
                self._settings = [fingerprint(part) for part in parts]
            each = zip(images, *known.values(), strict=True)
            keys = [fingerprint([network, self._settings, *case]) for case in each]
        except Unfingerprintable as error:
            warnings.warn(f"scores are not kept: {error}", stacklevel=2)
            return None
        return [self.store.open(name, key[:32]) for name, key in zip(names, keys, strict=True)]

    def _finish(self, case: dict[str, Any], explanation: Explanation, seconds: float) -> None:
        case[self.saliency_key] = MetaTensor(explanation.saliency).copy_meta_from(case[self.image_key])
        case["explanation"] = explanation
        case["title"] = _title(explanation)
        done = self.postprocessing(case)
        if self.summary is not None:
            maps = done[self.saliency_key]
            arrays = maps.numpy(force=True), maps.affine.numpy()
            self.summary.add(summarize(explanation.name, explanation, *arrays, case.get("label"), seconds))


def _plain(value: Any) -> Any:
    return value.as_tensor() if isinstance(value, MetaTensor) else value


def _title(explanation: Explanation) -> str:
    described = explanation.target.describe()
    predicted = f"predicted {described['prediction']}" if "prediction" in described else ""
    if "probability" in described:
        predicted += f" ({described['probability']:.3f})"
    scores = zip(explanation.target.labels, explanation.reference_scores.tolist(), strict=True)
    explained = ", ".join(f"{label_name(label)} scores {score:.3f}" for label, score in scores)
    return f"{explanation.name}\n{predicted}{', ' * bool(predicted)}explained: {explained}"
