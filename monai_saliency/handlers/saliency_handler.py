"""Explaining inside a MONAI evaluator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from monai.data import MetaTensor, decollate_batch
from monai.engines import IterationEvents
from monai.utils import CommonKeys

from monai_saliency.cases import Case, case_name, image_file, image_spacing
from monai_saliency.errors import OutputError, as_case_error, root_cause
from monai_saliency.handlers.background import Background
from monai_saliency.handlers.made_by import MadeBy, described, scan_mark, warn_of_another_scan
from monai_saliency.handlers.summary import Summary, figures, summarize, warn_of_noise
from monai_saliency.handlers.trust import Trust, Trusted, label_on_grid
from monai_saliency.handlers.trust_page import write_trust_page
from monai_saliency.inferers.case_explainer import CaseExplainer, Explained
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.networks.identity import network_fingerprint
from monai_saliency.networks.outputs import check_rows, rows
from monai_saliency.networks.runtime import same_network
from monai_saliency.storage.key import fingerprint
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import TRUST_COLUMNS, Failures
from monai_saliency.targets.base import label_name
from monai_saliency.utils.arguments import instance, require
from monai_saliency.utils.tensors import plain, to_host
from monai_saliency.utils.timing import Timestamp, stage

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["Batch", "SaliencyHandler", "predictions_of"]

Events = require("ignite.engine", extra="bundle").Events
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Images that are explained together."""

    inputs: torch.Tensor
    items: Sequence[dict[Any, Any]]
    inferer: PerturbationInferer | None = None
    predictions: Sequence[Any] | None = None


class SaliencyHandler:
    """Explains every batch right after the evaluator's own forward, and leaves its predictions untouched.

    What is explained must be what was predicted, or the case fails (:mod:`monai_saliency.inferers.row_check`).

    The map of each case goes into the case's dictionary, through the postprocessing (``Invertd``, ``SaveSaliencyd``,
    ...) and into the summary. A background thread does that on the host, in order, while the network explains the next
    case; at most two cases wait for it. Errors that are not case failures are re-raised before the next batch or at the
    end; later cases are not saved.

    Args:
        inferer: explains images.
        network: the network.
        postprocessing: transforms of one case's dictionary: the batch's own keys, the map, ``explanation`` and
            ``title``.
        summary: the cohort's table; none is written when None.
        failures: the list of cases that cannot be explained. The error is raised when None.
        store: keeps scores, so that a stopped run resumes; nothing is kept when None.
        network_id: a name for the network in the store, needed where it is not a module.
        image_key: the key of the network's input.
        saliency_key: the key of the map.
        label_key: the key of a case's label map ``(1, *spatial)`` on the network's grid, for masks and targets that are
            made of regions.
        standard_error_key: the key of the map's standard error, of the map's shape; None for none. Where there is none,
            as for windows, an item has no such key. It costs about as much time as making the perturbed images again.
        trust: measures how far to trust each map, for its row of the summary and the page ``trust.md`` beside it; it
            multiplies the forwards. None measures nothing.

    Attributes:
        explainer: explains the cases; it has the claims, the stored scores and the cases that wait.

    Example::

        >>> import torch
        >>> import monai_saliency as ms
        >>> network = torch.nn.Flatten()
        >>> evaluator = ms.engines.CohortEvaluator(torch.device("cpu"), [{"image": torch.ones(1, 1, 1, 2)}], network)
        >>> explain = ms.sliding_window(1, target=ms.ClassScore([0], "none"))
        >>> handler = SaliencyHandler(explain, network, lambda item: item)
        >>> handler.attach(evaluator)
        >>> evaluator.run()
        >>> handler.explained
        ['image 0 of the batch']
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
        standard_error_key: str | None = None,
        trust: Trust | None = None,
    ) -> None:
        self.explainer = CaseExplainer(inferer, network, store, failures, network_id)
        words = "a transform of one case's dictionary, such as Compose([...])"
        # A class such as `dict` is a transform too.
        self.postprocessing = (
            postprocessing if callable(postprocessing) else instance("postprocessing", postprocessing, (), words)
        )
        self.summary = instance("summary", summary, Summary, "Summary(path)", none=True)
        self.failures = failures
        self.image_key = image_key
        self.saliency_key = saliency_key
        self.label_key = label_key
        self.standard_error_key = standard_error_key
        self.trust = instance("trust", trust, Trust, "Trust()", none=True)
        self._background = Background(limit=2)
        self._made_by: MadeBy | None = None
        self._is_warned = False
        self._marked = ""  # the key of the network whose rows the mark is for
        self._marks: set[str] = set()  # of the rows of this run
        self._loader: Any = None
        if failures is not None:
            failures.withdraw_by(self.withdraw)

    @property
    def inferer(self) -> PerturbationInferer:
        """Explains images, unless a batch brings its own."""
        return self.explainer.inferer

    @property
    def whole_inferer(self) -> PerturbationInferer:
        """The inferer with all that is known only at the first case, for the description of what made the maps."""
        return self.inferer

    @property
    def store(self) -> ScoreStore | None:
        """The scores that are kept."""
        return self.explainer.store

    @property
    def explained(self) -> list[str]:
        """The cases whose maps are written, in order."""
        return self.explainer.explained

    def attach(self, engine: Engine) -> None:
        """Register with an evaluator."""
        engine.add_event_handler(Events.STARTED, self._forget)
        # Before an iteration: an evaluator may count errors inside it as failures of the iteration's own cases.
        engine.add_event_handler(Events.ITERATION_STARTED, self._background.check)
        engine.add_event_handler(IterationEvents.FORWARD_COMPLETED, self)
        # The cohort's figures are read at either event, and an epoch that is terminated has no end.
        for event in (Events.EPOCH_COMPLETED, Events.COMPLETED):
            engine.add_event_handler(event, self.finish)
        engine.add_event_handler(Events.COMPLETED, self._report)
        engine.add_event_handler(Events.EXCEPTION_RAISED, self._stop)

    def _forget(self, engine: Engine) -> None:
        """Rows of this run are marked by what the network is now, not in a run before it."""
        self._marked = ""
        self._marks.clear()

    def finish(self) -> None:
        """Wait until all explained cases are written. An evaluator that this is attached to does so at its end."""
        self._background.finish()

    def _stop(self, engine: Engine, error: BaseException) -> None:
        """Leave nothing half done: write the cases that are explained, or on Ctrl-C only the one that is under way."""
        try:
            if isinstance(error, Exception):
                self.finish()
            else:
                self._background.cancel()
        except Exception as other:
            logger.error("%s, while the run was stopping", other, exc_info=other)
        raise error

    def __call__(self, engine: Engine) -> None:
        self._loader = getattr(engine, "data_loader", None)
        for batch in self.batches(engine):
            predictions = batch.predictions or [None] * len(batch.items)
            cases = [self._case_of(*each) for each in zip(batch.items, predictions, strict=True)]
            write = partial(self._write_later, batch, cases)
            self.explainer.explain(batch.inputs, cases, write, batch.inferer)

    def batches(self, engine: Engine) -> Iterator[Batch]:
        """The batches to explain after one iteration of the evaluator."""
        output = engine.state.output
        if not isinstance(output, Mapping):
            raise ValueError(
                f"engine.state.output is a {type(output).__name__}, where the handler reads a dictionary with "
                f"{self.image_key!r}: MONAI's evaluators take it apart into a list, and postprocess it, before "
                "ITERATION_COMPLETED. Attach the handler by handler.attach(evaluator), which explains at "
                "FORWARD_COMPLETED"
            )
        images = output[self.image_key]
        items = decollate_batch(engine.state.batch)
        for i, item in enumerate(items):
            item.setdefault("case", case_name(images, i))
        yield Batch(images, items, predictions=self._predictions(engine, len(items)))

    def _predictions(self, engine: Engine, count: int) -> Sequence[Any] | None:
        """What the evaluator's network gave for each image; None where it is another network, or not known."""
        output = engine.state.output
        is_same = same_network(getattr(engine, "network", None), self.explainer.network)
        if not is_same or not isinstance(output, Mapping) or getattr(engine, "output_changed", False):
            return None
        return predictions_of(output.get(CommonKeys.PRED), count)

    def _case_of(self, item: dict[Any, Any], prediction: Any) -> Case:
        image = item[self.image_key]
        return Case(
            str(item["case"]),
            labels=None if self.label_key is None else plain(item.get(self.label_key)),
            spacing=image_spacing(image[None]),
            file=image_file(image),
            prediction=prediction,
        )

    def _write_later(self, batch: Batch, cases: Sequence[Case], explained: Explained) -> None:
        network = self.explainer.network, self.explainer.network_id
        # A handler may give the network other weights between two cases.
        if self.summary is not None and (known := network_fingerprint(*network) or "unknown") != self._marked:
            made_by = MadeBy(self.summary, described(self.whole_inferer, *network, self._loader))
            # An engine runs the evaluator for each of its units.
            if self._made_by is None or self._made_by.mark != made_by.mark:
                self._made_by = made_by
                made_by.note()
            self._marked = known
        # It is saved later, when the mark may be that of the next case.
        mark = self._made_by.mark if self._made_by is not None else ""
        self._marks.add(mark)
        try:
            case = _OnHost(batch.items[explained.index], explained, self.standard_error_key)
        except Exception as error:  # such as no memory for the standard error
            if self.failures is None:
                raise
            self.failures.add(explained.explanation.name, "explain", error)
            return
        trust = self._trust_of(batch, cases[explained.index], explained)
        self._background.submit(partial(self._write, case, mark, trust), explained.claim)

    def _trust_of(self, batch: Batch, case: Case, explained: Explained) -> list[dict[str, Any]]:
        """The figures of trust of each map of a case: those of the table where they are of the same map; none where
        nobody asked.
        """
        if self.trust is None or self.summary is None:
            return []
        trusted = Trusted(
            explained.explanation,
            batch.inferer or self.inferer,
            self.explainer.network,
            plain(batch.inputs)[explained.index],
            case,
            self.label_of(batch.items[explained.index]),
            self.explainer.network_id,
        )
        mark = self.trust.mark(trusted)
        rows = [row for row in self.summary.read() if row["case"] == case.name and row.get("trust_of", "") == mark]
        if mark and len(rows) == len(explained.explanation.saliency) and not any(row["trust_problem"] for row in rows):
            return [{name: row.get(name, "") for name in TRUST_COLUMNS} for row in rows]
        return self.trust.figures(trusted, mark)

    def label_of(self, item: dict[Any, Any]) -> Callable[[], torch.Tensor] | None:
        """What reads the label map ``(1, *spatial)`` of a case, on the image's grid; None where it has none."""
        return label_on_grid(item, self.image_key)

    def _write(self, case: _OnHost, mark: str, trust: Sequence[dict[str, Any]]) -> None:
        """Write a case, in the background."""
        try:
            # Each thread has its own mode, and this one never needs gradients.
            with torch.no_grad(), stage("save"):
                self._save(*case.read(), mark, trust)
        except (Exception, SystemExit) as error:  # in this thread no signal ends the program
            if self.failures is not None:
                self.failures.add(case.name, "explain", error)
                return
            if isinstance(root_cause(error), OutputError):
                raise
            raise as_case_error(error, case.name) from error

    def _save(
        self,
        item: dict[Any, Any],
        explanation: Explanation,
        seconds: float,
        mark: str,
        trust: Sequence[dict[str, Any]],
    ) -> None:
        item[self.saliency_key] = MetaTensor(explanation.saliency).copy_meta_from(item[self.image_key])
        for key in {self.standard_error_key, "disagreement"} & item.keys():
            item[key] = MetaTensor(item[key]).copy_meta_from(item[self.image_key])
        item["explanation"] = explanation
        item["title"] = _title(explanation)
        done = self.postprocessing(item)
        if self.summary is not None:
            maps = done[self.saliency_key]
            arrays = maps.numpy(force=True), maps.affine.numpy()
            image = item[self.image_key]
            # What came from no file is told apart by its voxels.
            scan = scan_mark(image_file(image)) or fingerprint(plain(image))[:8]
            self._is_warned = self._is_warned or warn_of_another_scan(self.summary, explanation.name, scan)
            rows = summarize(explanation.name, explanation, *arrays, item.get("label"), seconds, mark, scan)
            warn_of_noise(explanation.name, rows)
            self.summary.add([row | more for row, more in zip(rows, trust or [{}] * len(rows), strict=True)])
        if self.failures is not None:
            self.failures.remove(explanation.name)
        self.explainer.written(explanation.name)

    def withdraw(self, case: str) -> None:
        """Remove the row of a case, its map and its picture, which an earlier run may have written of another scan."""
        if self.summary is not None:
            self.summary.replace({case})
        for step in _steps(self.postprocessing):
            if hasattr(step, "withdraw"):
                step.withdraw(case)

    def _report(self, engine: Engine) -> None:
        """Put the cohort's figures among the engine's metrics, and write its page of trust."""
        if self._made_by is not None:
            self._made_by.warn("they stay, and the figures count them")
        engine.state.metrics.update(self.figures())
        self.write_trust()

    def write_trust(self) -> None:
        """Write the cohort's page ``trust.md`` from the summary as it stands."""
        if self.summary is not None:
            write_trust_page(self.summary)

    def incomplete(self, alike: bool = False) -> list[str]:
        """The waiting cases that have neither a map nor a failure by now."""
        ended = set(self.explained)
        rows = [] if self.summary is None else self.summary.read()
        ended |= {row["case"] for row in rows if not (alike and self._marks) or row["settings"] in self._marks}
        ended |= set() if self.failures is None else {row["case"] for row in self.failures.since()}
        return [case for case in dict.fromkeys(self.explainer.waiting) if case not in ended]

    def figures(self) -> dict[str, float]:
        """The cohort's figures, over all runs on the folder so far; none without a summary."""
        failed = [] if self.failures is None else self.failures.read()
        return {} if self.summary is None else figures(self.summary.read(), len(failed))


def _steps(transform: Any) -> Iterator[Any]:
    """A transform, or the steps of a ``Compose`` one by one."""
    for step in getattr(transform, "transforms", ()):
        yield from _steps(step)
    yield transform


def predictions_of(output: Any, count: int) -> Sequence[Any] | None:
    """A network's output for each of some images ``(1, ...)``; None where it has not one row an image."""
    try:
        check_rows(output, count)
    except ValueError:
        return None
    return [rows(output, index, index + 1, count) for index in range(count)]


class _OnHost:
    """An explained case in the host's memory, or on its way there: on CUDA nothing waits for the copies until they are
    read. The device's memory is free for the next case.
    """

    def __init__(self, item: dict[Any, Any], explained: Explained, standard_error_key: str | None = None) -> None:
        explanation = explained.explanation
        self.name = explanation.name
        self._start, self._count = explained.start, explained.count
        self._item = {key: to_host(value) if isinstance(value, torch.Tensor) else value for key, value in item.items()}
        self._item.pop(standard_error_key, None)
        self._item |= {key: to_host(each) for key, each in explanation.maps_beside(standard_error_key).items()}
        self._explanation = replace(
            explanation,
            saliency=to_host(explanation.saliency),
            scores=to_host(explanation.scores),
            reference_scores=to_host(explanation.reference_scores),
            noise=None if explanation.noise is None else to_host(explanation.noise),
            disagreement=self._item.get("disagreement"),
        )
        self._end = Timestamp(explanation.saliency.device)

    def read(self) -> tuple[dict[Any, Any], Explanation, float]:
        """The case's dictionary, its explanation, and the seconds that it took."""
        self._end.wait()
        return self._item, self._explanation, self._end.seconds_since(self._start) / self._count


def _title(explanation: Explanation) -> str:
    described = explanation.target.describe()
    predicted = f"predicted {described['prediction']}" if "prediction" in described else ""
    if "probability" in described:
        predicted += f" ({described['probability']:.3f})"
    scores = zip(explanation.target.labels, explanation.reference_scores.tolist(), strict=True)
    explained = ", ".join(f"{label_name(label)} scores {score:.3f}" for label, score in scores)
    return f"{explanation.name}\n{predicted}{', ' * bool(predicted)}explained: {explained}"
