"""Explaining inside a MONAI evaluator."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from monai.data import MetaTensor, decollate_batch
from monai.engines import IterationEvents
from monai.utils import CommonKeys

from monai_saliency.cases import Case, case_name, image_file, image_spacing
from monai_saliency.errors import OutputError, as_case_error, root_cause
from monai_saliency.fills.base import CaseFill
from monai_saliency.handlers.background import Background
from monai_saliency.handlers.summary import Summary, figures, summarize
from monai_saliency.inferers.case_state import CaseState, Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.sharding import Part
from monai_saliency.storage.failures import Failures
from monai_saliency.storage.fingerprint import Unfingerprintable, fingerprint, input_files, library_versions
from monai_saliency.storage.score_store import CaseScores, ScoreStore
from monai_saliency.targets.base import label_name
from monai_saliency.utils.optional_imports import require
from monai_saliency.utils.profiling import stage
from monai_saliency.utils.tensors import plain, to_host
from monai_saliency.utils.timing import Timestamp

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["SaliencyHandler"]

Events = require("ignite.engine", extra="bundle").Events
logger = logging.getLogger(__name__)


class SaliencyHandler:
    """Explains every batch right after the evaluator's own forward, whose predictions it leaves untouched.

    For each case of the batch the map goes into the case's dictionary, through the postprocessing (``Invertd``,
    ``SaveSaliencyd``, ...) and into the summary. That happens in the host's memory and in a thread of its own, in
    order, while the network explains the next case: two cases wait for it at the most. What goes wrong there and is no
    matter for ``failures`` is raised before the next batch, or at the end, and cases behind it are not written.

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

    Attributes:
        part: of the masks, that is done here. What is less than all needs a store, where the parts come together:
            whoever completes a case makes its map.
        explained: the cases whose maps are written, in order.
        waiting: cases that somebody else is to finish: of which a part was done here, before all others were, or which
            another process held.
        places: which of the loader's batches are gone through, in their order, where not all are.
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
        self.part = Part()
        self.explained: list[str] = []
        self.waiting: list[str] = []
        self.places: Sequence[int] | None = None
        self._settings: list[str] | None = None
        self._background = Background(limit=2)

    def attach(self, engine: Engine) -> None:
        """Register with an evaluator."""
        # Outside of the iteration, whose errors an evaluator may hold against the iteration's own cases.
        engine.add_event_handler(Events.ITERATION_STARTED, self._background.check)
        engine.add_event_handler(IterationEvents.FORWARD_COMPLETED, self)
        # Figures of the cohort are read at either, and an epoch that is terminated has no end.
        for event in (Events.EPOCH_COMPLETED, Events.COMPLETED):
            engine.add_event_handler(event, self.finish)
        engine.add_event_handler(Events.COMPLETED, self._report)
        engine.add_event_handler(Events.EXCEPTION_RAISED, self._stop)

    def finish(self) -> None:
        """Wait until what was explained is written. An evaluator that this is attached to does so at its end.

        Raises:
            CaseError, OutputError: what was met on the way and stops a run.
        """
        self._background.finish()

    def _stop(self, engine: Engine, error: BaseException) -> None:
        """Leave nothing behind: finish cases that were explained, or on Ctrl-C the one that is being written."""
        try:
            if isinstance(error, Exception):
                self.finish()
            else:
                self._background.cancel()
        except Exception as other:
            logger.error("%s, while the run was stopping", other, exc_info=other)
        raise error

    def __call__(self, engine: Engine) -> None:
        for images, cases in self.batches(engine):
            with ExitStack() as held:
                claims = [held.enter_context(ExitStack()) for _ in cases]
                free = [i for i, case in enumerate(cases) if self._claim(str(case["case"]), self.part, claims[i])]
                if free:
                    # Plain from here on: the cases' dictionaries hold the meta data.
                    self._explain(plain(images)[free], [cases[i] for i in free], [claims[i] for i in free])

    def batches(self, engine: Engine) -> Iterator[tuple[torch.Tensor, list[dict[str, Any]]]]:
        """What is explained together after one iteration: images ``(B, C, *spatial)`` and their dictionaries."""
        images = engine.state.output[self.image_key]  # type: ignore[index]
        cases = decollate_batch(engine.state.batch)
        for i, case in enumerate(cases):
            case.setdefault("case", case_name(images, i))
        yield images, cases

    def _claim(self, case: str, part: Part, held: ExitStack) -> bool:
        holder = held.enter_context(self.store.claim(case, part)) if self.store is not None else None
        if holder:
            logger.warning("case %s is being explained by %s: left to it", case, holder)
            self.waiting.append(case)
        return holder is None

    def _explain(self, images: torch.Tensor, cases: Sequence[dict[str, Any]], claims: Sequence[ExitStack]) -> None:
        """Explain a batch; where that fails and there is a list of failures, each case alone, so that one fails."""
        known = [
            Case(
                str(case["case"]),
                labels=None if self.label_key is None else plain(case.get(self.label_key)),
                spacing=image_spacing(case[self.image_key][None]),
                file=image_file(case[self.image_key]),
            )
            for case in cases
        ]
        names = [case.name for case in known]
        stored = self._stored(images, known)
        if stored is None and self.part.count > 1:
            raise ValueError(
                f"part {self.part.index + 1} of {self.part.count} of {', '.join(names)} is to be done here, but its "
                "scores cannot be kept, so parts cannot come together: let workers share cases (--saliency_split cases)"
            )
        start = Timestamp(images.device)
        try:
            runs = self.inferer.score(images, self.network, cases=known, stored=stored, part=self.part)
            # Cases that are whole now are held only where all of the batch can be explained, else each is done alone.
            with ExitStack() as held:
                wholes = [held.enter_context(ExitStack()) for _ in runs]
                explanations = [self._explanation(run, whole) for run, whole in zip(runs, wholes, strict=True)]
                for claim, whole in zip(claims, wholes, strict=True):
                    claim.push(whole.pop_all())
        except Exception as error:
            if self.failures is None:
                raise
            if len(cases) == 1:
                self.failures.add(names[0], "explain", error)
                return
            for i, case in enumerate(cases):
                self._explain(images[i : i + 1], [case], claims[i : i + 1])
            return
        for case, explanation, claim in zip(cases, explanations, claims, strict=True):
            if explanation is None:
                claim.close()
                continue
            self._background.submit(partial(self._finish, _Explained(case, explanation, start, len(cases))), claim)

    @torch.no_grad()
    def _explanation(self, run: CaseState, held: ExitStack) -> Explanation | None:
        """A scored case's explanation; None where other parts are missing, or somebody else makes it."""
        if self.part.count > 1:
            run.check()
            run.take_stored()
            if not run.complete:
                self.waiting.append(run.case.name)
            if not run.complete or not self._claim(run.case.name, Part(), held):
                return None
        return run.explanation()

    def _report(self, engine: Engine) -> None:
        """Put the cohort's figures among the engine's metrics."""
        if self.summary is not None:
            if self.failures is not None:
                # What an earlier run made of a scan that is broken now; but not what a run beside this one made of it.
                failed = {row["case"] for row in self.failures.rows}
                self.summary.replace(failed & {row["case"] for row in self.failures.read()})
            engine.state.metrics.update(self.figures())

    def incomplete(self) -> list[str]:
        """The waiting cases that have neither a map nor a failure by now."""
        ended = set() if self.summary is None else {row["case"] for row in self.summary.read()}
        ended |= set() if self.failures is None else {row["case"] for row in self.failures.read()}
        return [case for case in dict.fromkeys(self.waiting) if case not in ended and case not in self.explained]

    def figures(self) -> dict[str, float]:
        """The cohort's figures, of what all runs on the folder have done so far; none without a summary."""
        failed = [] if self.failures is None else self.failures.read()
        return {} if self.summary is None else figures(self.summary.read(), len(failed))

    def _stored(self, images: torch.Tensor, cases: Sequence[Case]) -> list[CaseScores] | None:
        if self.store is None:
            return None
        # Taken anew for each batch: weights may change in place between them.
        network = network_fingerprint(self.network, self.network_id)
        if network is None:
            warnings.warn("scores are not kept: the network is no module, so give it a network_id", stacklevel=2)
            return None
        try:
            if self._settings is None:
                self._settings = [fingerprint(part) for part in self.inferer.deciding]
            in_scan_unit = isinstance(self.inferer.fill, CaseFill)
            keys = [
                fingerprint(
                    [
                        library_versions(),
                        network,
                        self._settings,
                        image,
                        input_files(case.file) if in_scan_unit else [],
                        case.labels,
                        case.spacing,
                    ]
                )
                for image, case in zip(images, cases, strict=True)
            ]
        except Unfingerprintable as error:
            warnings.warn(f"scores are not kept: {error}", stacklevel=2)
            return None
        return [self.store.open(name, key[:32]) for name, key in zip([case.name for case in cases], keys, strict=True)]

    def _finish(self, explained: _Explained) -> None:
        """Write what is known of a case, in the background."""
        try:
            # Each thread has its own mode, and this one never needs gradients.
            with torch.no_grad(), stage("save"):
                self._save(*explained.read())
        except Exception as error:
            if self.failures is not None:
                self.failures.add(explained.name, "explain", error)
                return
            if isinstance(root_cause(error), OutputError):
                raise
            raise as_case_error(error, explained.name) from error

    def _save(self, case: dict[str, Any], explanation: Explanation, seconds: float) -> None:
        case[self.saliency_key] = MetaTensor(explanation.saliency).copy_meta_from(case[self.image_key])
        case["explanation"] = explanation
        case["title"] = _title(explanation)
        done = self.postprocessing(case)
        if self.summary is not None:
            maps = done[self.saliency_key]
            arrays = maps.numpy(force=True), maps.affine.numpy()
            self.summary.add(summarize(explanation.name, explanation, *arrays, case.get("label"), seconds))
        if self.failures is not None:
            self.failures.remove(explanation.name)
        self.explained.append(explanation.name)


class _Explained:
    """An explained case in the host's memory, or on its way there: on CUDA nothing waits for the copies until they are
    read. The device's memory is free for the next case.

    Args:
        case: the case's dictionary, which is left alone.
        explanation: of it.
        start: when explaining its batch began.
        count: cases in that batch.
    """

    def __init__(self, case: dict[str, Any], explanation: Explanation, start: Timestamp, count: int) -> None:
        self.name = explanation.name
        self._start, self._count = start, count
        self._case = {key: to_host(value) if isinstance(value, torch.Tensor) else value for key, value in case.items()}
        self._explanation = replace(
            explanation,
            saliency=to_host(explanation.saliency),
            scores=to_host(explanation.scores),
            reference_scores=to_host(explanation.reference_scores),
        )
        self._end = Timestamp(explanation.saliency.device)

    def read(self) -> tuple[dict[str, Any], Explanation, float]:
        """The case, its explanation, and the seconds that it took."""
        self._end.wait()
        return self._case, self._explanation, self._end.seconds_since(self._start) / self._count


def _title(explanation: Explanation) -> str:
    described = explanation.target.describe()
    predicted = f"predicted {described['prediction']}" if "prediction" in described else ""
    if "probability" in described:
        predicted += f" ({described['probability']:.3f})"
    scores = zip(explanation.target.labels, explanation.reference_scores.tolist(), strict=True)
    explained = ", ".join(f"{label_name(label)} scores {score:.3f}" for label, score in scores)
    return f"{explanation.name}\n{predicted}{', ' * bool(predicted)}explained: {explained}"
