"""Explaining inside a MONAI evaluator."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from monai.data import MetaTensor, decollate_batch
from monai.engines import IterationEvents
from monai.transforms import Invertd
from monai.utils import CommonKeys

from monai_saliency.cases import Case, image_file
from monai_saliency.errors import CaseError, OutputError, as_case_error, root_cause
from monai_saliency.handlers.summary import Summary, described, figures, note_settings, scan_mark, summarize
from monai_saliency.handlers.trust import Trust, Trusted, label_on_grid
from monai_saliency.handlers.trust_page import write_trust_page
from monai_saliency.inferers.case_explainer import CaseExplainer, Explained
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.fill_choice import choose_fill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.progress import Progress
from monai_saliency.networks.identity import network_fingerprint, same_network
from monai_saliency.networks.outputs import check_rows, rows
from monai_saliency.storage.key import fingerprint
from monai_saliency.storage.scans import scan_name
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import Failures
from monai_saliency.targets.base import Quantity, label_name
from monai_saliency.utils.affines import affine_in_mm, image_affine, image_spacing
from monai_saliency.utils.arguments import instance, require
from monai_saliency.utils.inversion import check_inversion, steps_of
from monai_saliency.utils.tensors import plain, to_host
from monai_saliency.utils.timing import Timestamp, stage

if TYPE_CHECKING:
    from ignite.engine import Engine

__all__ = ["Batch", "SaliencyHandler", "predictions_of"]

Events = require("ignite.engine", extra="bundle").Events
logger = logging.getLogger(__name__)

#: the most cases to try, to choose the fill of a cohort
_FIRST = 10


class _Background:
    """Runs pieces of work one after another in one thread. At most two wait or run."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pieces: deque[Future[None]] = deque()

    def submit(self, work: Callable[[], None], held: ExitStack) -> None:
        """Hand over work, and contexts to close when it has run or is skipped. Waits if the queue is full, and raises
        the error of an earlier piece.
        """
        while self._pieces and (len(self._pieces) > 1 or self._pieces[0].done()):
            self._pieces.popleft().result()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="Background")
        piece, close = self._thread.submit(work), held.pop_all().close
        piece.add_done_callback(lambda _: close())
        self._pieces.append(piece)

    def finish(self, skip: bool = False) -> None:
        """Wait until all pieces are done, or skip those that have not begun, and raise the first error."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=skip)
            self._thread = None
        pieces, self._pieces = self._pieces, deque()
        for piece in pieces:
            if not piece.cancelled():
                piece.result()


@dataclass(frozen=True)
class Batch:
    """Images that are explained together."""

    inputs: torch.Tensor
    items: Sequence[dict[Any, Any]]
    inferer: PerturbationInferer | None = None
    predictions: Sequence[Any] | None = None
    held: Mapping[Any, torch.Tensor] = field(default_factory=dict)


class SaliencyHandler:
    """Explains every batch right after the evaluator's own forward, and leaves its predictions untouched.

    What is explained must be what was predicted, or the case fails (:mod:`monai_saliency.inferers.row_check`).

    A background thread takes the map of each case through the postprocessing (``Invertd``, ``SaveSaliencyd``, ...) and
    into the summary, while the network explains the next case. At most two cases wait for it. Errors outside of cases
    are raised with a later case, or at the end.

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
        label_key: the key of a case's label map ``(1, *spatial)`` on the network's grid, for regions.
        standard_error_key: the key of the map's standard error, of the map's shape, where it has one; None for none. It
            costs about as much time as making the perturbed images again.
        trust: measures how far to trust each map, for the summary and ``trust.md``; it multiplies the forwards.
        method: the name of the method, for the line that is printed before the first case.

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
        method: str | None = None,
    ) -> None:
        self.explainer = CaseExplainer(inferer, network, store, failures, network_id)
        #: explains images, unless a batch brings its own
        self.inferer = self.explainer.inferer
        #: the scores that are kept
        self.store = store
        self.postprocessing = instance("postprocessing", postprocessing, (), "a transform of a case", function=True)
        self.summary = instance("summary", summary, Summary, "Summary(path)", none=True)
        self.failures = failures
        self.image_key = image_key
        self.saliency_key = saliency_key
        self.label_key = label_key
        self.standard_error_key = standard_error_key
        self.trust = instance("trust", trust, Trust, "Trust()", none=True)
        self._background = _Background()
        self._marks: dict[str, str] = {}  # of the rows of this run, by the network that made them
        self._loader: Any = None
        self._method = method
        self._is_opened = False
        if failures is not None:
            failures.withdraw_by(self.withdraw)

    @property
    def explained(self) -> list[str]:
        """The cases whose maps are written, in order."""
        return self.explainer.explained

    def attach(self, engine: Engine) -> None:
        """Register with an evaluator."""
        engine.add_event_handler(Events.STARTED, self._begin)
        engine.add_event_handler(IterationEvents.FORWARD_COMPLETED, self)
        # The cohort's figures are read at either event, and an epoch that is terminated has no end.
        for event in (Events.EPOCH_COMPLETED, Events.COMPLETED):
            engine.add_event_handler(event, self.finish)
        engine.add_event_handler(Events.COMPLETED, self._report)
        engine.add_event_handler(Events.EXCEPTION_RAISED, self._stop)

    def _begin(self, engine: Engine) -> None:
        self.explainer.progress = Progress(_count(getattr(engine, "data_loader", None)))

    def finish(self) -> None:
        """Wait until all explained cases are written. An evaluator that this is attached to does so at its end."""
        self._background.finish()

    def _stop(self, engine: Engine, error: BaseException) -> None:
        """Leave nothing half done: write the cases that are explained, or on Ctrl-C only the one that is under way."""
        self.explainer.progress.close()
        try:
            self._background.finish(skip=not isinstance(error, Exception))
        except Exception as other:
            logger.error("%s, while the run was stopping", other, exc_info=other)
        raise error

    def __call__(self, engine: Engine) -> None:
        self._loader = getattr(engine, "data_loader", None)
        for batch in self.batches(engine):
            predictions = batch.predictions or [None] * len(batch.items)
            cases = [self._case_of(*each) for each in zip(batch.items, predictions, strict=True)]
            self._open(engine, batch)
            write = partial(self._write_later, batch, cases)
            self.explainer.explain(batch.inputs, cases, write, batch.inferer, batch.held)

    def _open(self, engine: Any, batch: Batch) -> None:
        """Print what is explained and how, once."""
        inferer, self._is_opened, is_opened = batch.inferer or self.inferer, True, self._is_opened
        if is_opened or not inferer.progress or self.explainer.assignment.quiet:
            return
        folder = f"; results go to {self.summary.path.parent}" if self.summary is not None else ""
        network, shape = type(engine.network).__name__, tuple(batch.inputs.shape[1:])
        how = f"by {self._method or inferer.masks}, hidden by {getattr(inferer.fill, '__name__', inferer.fill)}"
        print(f"monai_saliency: {network} on images {shape}; {inferer.target}, {how}{folder}", flush=True)

    def batches(self, engine: Engine) -> Iterator[Batch]:
        """The batches to explain after one iteration of the evaluator."""
        output: Any = engine.state.output
        images, items = output[self.image_key], decollate_batch(engine.state.batch)
        chosen = choose_fill(self.inferer, self.explainer.network, self.first_cases(images))
        self.inferer = self.explainer.inferer = chosen
        for i, item in enumerate(items):
            item.setdefault("case", scan_name(images, i))
        yield Batch(images, items, predictions=self._predictions(engine, len(items)))

    def first_cases(self, like: torch.Tensor, label_key: Any = None) -> Iterator[tuple[torch.Tensor, Case]]:
        """The cohort's first loadable cases, each an image ``(1, C, *spatial)`` of the type of ``like``."""
        dataset: Any = getattr(self._loader, "cohort", getattr(self._loader, "dataset", None))
        for index in range(min(_FIRST, len(dataset)) if isinstance(dataset, Sized) else 0):
            try:
                item = {"case": str(index), **dataset[index]}
                item.setdefault(self.label_key, item.get(label_key))
                yield plain(item[self.image_key])[None].to(plain(like)), self._case_of(item, None)
            except Exception as error:
                logger.info("case %d of the cohort is left out of the first cases: %s", index, error)

    def _predictions(self, engine: Engine, count: int) -> Sequence[Any] | None:
        """The evaluator's output for each image; None if its network is a different one or unknown."""
        is_same = same_network(getattr(engine, "network", None), self.explainer.network)
        if not is_same or getattr(engine, "output_changed", False):
            return None
        output: Any = engine.state.output
        return predictions_of(output.get(CommonKeys.PRED), count)

    def _case_of(self, item: dict[Any, Any], prediction: Any) -> Case:
        image = item[self.image_key]
        return Case(
            str(item["case"]),
            labels=None if self.label_key is None else item.get(self.label_key),
            spacing=image_spacing(image[None]),
            file=image_file(image),
            affine=image_affine(image[None]),
            prediction=prediction,
        )

    def _write_later(self, batch: Batch, cases: Sequence[Case], explained: Explained) -> None:
        """Copy a case to the host, so that the device's memory is free for the next case, and have it written."""
        item, case, mark = batch.items[explained.index], cases[explained.index], self._mark()
        work = None
        with self._listing(case.name):  # such as too little memory for the standard error
            copied, explanation = _on_host(item, explained.explanation, self.saliency_key, self.standard_error_key)
            took = _seconds(explained.start, Timestamp(explained.explanation.saliency.device), explained.count)
            trust: list[dict[str, Any]] = []
            if self.trust is not None and self.summary is not None:
                image, label = plain(batch.inputs)[explained.index], self.label_of(item)
                how = batch.inferer or self.inferer, self.explainer.network
                measured = Trusted(explained.explanation, *how, image, case, label, self.explainer.network_id)
                trust = self.trust.rows(measured, self.summary)
            work = partial(self._write, copied, explanation, took, mark, trust)
        if work is not None:
            self._background.submit(work, explained.claim)

    def _mark(self) -> str:
        """The mark of the rows that are made now: a handler may give the network other weights between two cases."""
        if self.summary is None:
            return ""
        network = self.explainer.network, self.explainer.network_id
        known = network_fingerprint(*network) or "unknown"
        if known not in self._marks:
            self._marks[known] = note_settings(self.summary, described(self.inferer, *network, self._loader))
        return self._marks[known]

    def label_of(self, item: dict[Any, Any]) -> Callable[[], torch.Tensor] | None:
        """A function that reads the label map ``(1, *spatial)`` of a case on the image's grid; None without one."""
        return label_on_grid(item, self.image_key)

    @contextmanager
    def _listing(self, case: str) -> Iterator[None]:
        """List a case that fails; without a list, raise the error with its name."""
        try:
            yield
        except Exception as error:
            if self.failures is not None:
                self.failures.add(case, "explain", error)
            elif isinstance(root_cause(error), OutputError):
                raise
            else:
                raise as_case_error(error, case) from error

    def _write(
        self, item: dict[Any, Any], explanation: Explanation, took: Callable[[], float], mark: str, trust: Sequence[Any]
    ) -> None:
        """Write a case, in the background."""
        # This thread has its own mode, and never needs gradients.
        with self._listing(explanation.name), torch.no_grad(), stage("save"):
            seconds = took()  # and the copies are there
            for key in {self.saliency_key, self.standard_error_key, "disagreement"} & item.keys():
                item[key] = MetaTensor(item[key]).copy_meta_from(item[self.image_key])
            item |= {"explanation": explanation, "title": _title(explanation), "settings": mark, "method": self._method}
            for step in steps_of(self.postprocessing):
                if isinstance(step, Invertd) and self.saliency_key in step.keys:
                    check_inversion(explanation.name, steps_of(step.transform))
            done = self.postprocessing(item)
            maps, errors = done[self.saliency_key], done.get(self.standard_error_key)
            if self.summary is not None:
                image = item[self.image_key]
                # Images without a file are identified by their voxels.
                scan = scan_mark(image_file(image)) or fingerprint(plain(image))[:8]
                arrays = maps.numpy(force=True), affine_in_mm(maps), item.get("label")
                found = summarize(explanation.name, explanation, *arrays, seconds, mark, scan, image, errors)
                item["title"] += "".join(f"\n{verdict}" for verdict in {row["verdict"]: 0 for row in found} if verdict)
                self.summary.add([row | more for row, more in zip(found, trust or [{}] * len(found), strict=True)])
            if self.failures is not None:
                self.failures.remove(explanation.name)
            self.explainer.explained.append(explanation.name)
            self._report_case(item["title"], explanation, seconds)

    def _report_case(self, title: str, explanation: Explanation, seconds: float) -> None:
        """Print one line of a case that is done."""
        if not self.inferer.progress or self.explainer.assignment.quiet:
            return
        progress, failed = self.explainer.progress, [] if self.failures is None else self.failures.rows
        number, of = len(self.explained) + len(failed), "" if progress.cases is None else f" of {progress.cases}"
        words = title.replace("\n", ": ", 1).replace("\n", ", ")
        progress.say(f"case {number}{of}, {words}; {explanation.num_forwards} forwards, {seconds:.1f} s")

    def withdraw(self, case: str) -> None:
        """Remove the row of a case, its map and its picture, which an earlier run may have written of another scan."""
        if self.summary is not None:
            self.summary.replace({case})
        for step in steps_of(self.postprocessing):
            if hasattr(step, "withdraw"):
                with suppress(CaseError):  # of a name that leads out of the folder, so that nothing was written
                    step.withdraw(case)

    def _report(self, engine: Engine) -> None:
        self.explainer.progress.close()
        engine.state.metrics.update(self.figures())
        self.write_trust()

    def write_trust(self) -> None:
        """Write the cohort's page ``trust.md`` from the present summary."""
        # Rows of this run may have taken the place of rows with figures.
        if self.summary is not None and (self.trust is not None or self.summary.path.with_name("trust.md").exists()):
            write_trust_page(self.summary)

    def incomplete(self, alike: bool = False) -> list[str]:
        """The waiting cases that have neither a map nor a failure by now."""
        ended, marks = set(self.explained), set(self._marks.values())
        rows = [] if self.summary is None else self.summary.read()
        ended |= {row["case"] for row in rows if not (alike and marks) or row["settings"] in marks}
        ended |= set() if self.failures is None else {row["case"] for row in self.failures.since()}
        return [case for case in dict.fromkeys(self.explainer.waiting) if case not in ended]

    def figures(self) -> dict[str, float]:
        """The cohort's figures, over all runs on the folder so far; none without a summary."""
        failed = [] if self.failures is None else self.failures.read()
        return {} if self.summary is None else figures(self.summary.read(), len(failed))


def _count(loader: Any) -> int | None:
    """How many cases a loader has; None where this is unknown."""
    try:
        return len(loader.names if hasattr(loader, "names") else loader.dataset)
    except (AttributeError, TypeError):
        return None


def predictions_of(output: Any, count: int) -> Sequence[Any] | None:
    """A network's output for each of some images ``(1, ...)``; None where it has not one row an image."""
    try:
        check_rows(output, count)
    except ValueError:
        return None
    return [rows(output, index, index + 1, count) for index in range(count)]


def _on_host(
    item: dict[Any, Any], explanation: Explanation, saliency_key: Any, error_key: Any
) -> tuple[dict[Any, Any], Explanation]:
    """An explained case in the host's memory, or on its way there: on CUDA nothing waits for the copies here."""
    found = {key: value for key, value in item.items() if key != error_key} | explanation.maps_beside(error_key)
    found[saliency_key] = explanation.saliency
    found = {key: to_host(value) if isinstance(value, torch.Tensor) else value for key, value in found.items()}
    own: dict[str, Any] = {
        name: None if (value := getattr(explanation, name)) is None else to_host(value)
        for name in ("scores", "reference_scores", "hidden_scores", "noise")
    }
    return found, replace(explanation, saliency=found[saliency_key], disagreement=found.get("disagreement"), **own)


def _seconds(start: Timestamp, end: Timestamp, count: int) -> Callable[[], float]:
    """How long each of some cases took; it waits until the device has come to the end."""
    return lambda: end.seconds_since(start) / count


def _title(explanation: Explanation) -> str:
    described = explanation.target.describe()
    predicted = f"predicted {described['prediction']}" if "prediction" in described else ""
    if "probability" in described:
        predicted += f" ({described['probability']:.3f})"
    target, scores = explanation.target, explanation.reference_scores.tolist()
    each = zip(target.labels, target.quantities(), scores, strict=True)
    explained = ", ".join(f"{label_name(label)} scores {_figure(quantity, score)}" for label, quantity, score in each)
    problem = f"\n{explanation.fill_problem}" if explanation.fill_problem else ""
    return f"{explanation.name}\n{predicted}{', ' * bool(predicted)}explained: {explained}{problem}"


def _figure(quantity: Quantity, score: float) -> str:
    """The score of a title; of a saturated probability with its log-odds."""
    reported = f"{quantity.reported(score):.3f}"
    return f"{reported} (log-odds {score:.2f})" if quantity.unit == "log-odds" else reported
