"""Explaining inside a MONAI evaluator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from monai.data import MetaTensor, decollate_batch
from monai.engines import IterationEvents
from monai.transforms import Invertd
from monai.utils import CommonKeys

from monai_saliency.cases import Case, image_file
from monai_saliency.errors import CaseError
from monai_saliency.handlers.background import Background
from monai_saliency.handlers.run_settings import described, note_settings, scan_mark
from monai_saliency.handlers.summary import case_title, figures, summarize
from monai_saliency.handlers.trust import Trust, Trusted, label_on_grid
from monai_saliency.handlers.trust_page import write_trust_page
from monai_saliency.inferers.cohort_explainer import CohortExplainer, ScoredCase
from monai_saliency.inferers.explanation import Explanation
from monai_saliency.inferers.fill_choice import choose_fill
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.inferers.progress import Progress
from monai_saliency.metrics.truth import Scan
from monai_saliency.networks.identity import network_fingerprint, same_network
from monai_saliency.networks.outputs import check_rows, rows
from monai_saliency.storage.key import fingerprint
from monai_saliency.storage.scans import scan_name
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import CaseTable, Failures
from monai_saliency.utils.affines import affine_in_mm, check_inversion, image_affine, image_spacing, steps_of
from monai_saliency.utils.arguments import instance, require
from monai_saliency.utils.precision import is_shared
from monai_saliency.utils.tensors import plain
from monai_saliency.utils.timing import stage

if TYPE_CHECKING:
    from ignite.engine import Engine

#: a case as transforms take it: values by key
Item = dict[Any, Any]

Events = require("ignite.engine", extra="bundle").Events
logger = logging.getLogger(__name__)

#: the most cases to try, to choose the fill of a cohort
_FIRST = 10


@dataclass(frozen=True)
class Batch:
    """Images that are explained together."""

    inputs: torch.Tensor
    items: Sequence[Item]
    inferer: PerturbationInferer | None = None
    predictions: Sequence[Any] | None = None
    held: Mapping[Any, torch.Tensor] = field(default_factory=dict)


class SaliencyHandler:
    """Explains every batch right after the evaluator's own forward, and leaves its predictions untouched.

    What is explained must be what was predicted, or the case fails (:mod:`monai_saliency.inferers.preflight`).

    A background thread makes the map of each case, and takes it through the postprocessing (``Invertd``,
    ``SaveSaliencyd``, ...) and into the summary, while the network explains the next case. At most two cases wait for
    it. Errors outside of cases are raised with a later case, or at the end.

    Args:
        inferer: explains images.
        network: the network.
        postprocessing: transforms of one case's dictionary: the batch's own keys, the map, ``explanation`` and
            ``title``.
        summary: the cohort's table.
        failures: the list of cases that cannot be explained.
        store: keeps scores, so that a stopped run resumes; nothing is kept when None.
        network_id: a name for the network in the store, needed where it is not a module.
        saliency_key: the key of the map.
        label_key: the key of a case's label map ``(1, *spatial)`` on the network's grid, for regions.
        within_key: the key of the part of a case that is perturbed, a mask ``(1, *spatial)`` on the network's grid.
        standard_error_key: the key of the map's standard error, of the map's shape, where it has one; None for none. It
            costs about as much time as making the perturbed images again.
        trust: measures how far to trust each map, for the summary and ``trust.md``; it multiplies the forwards.
        method: the name of the method, for the line that is printed before the first case and for what is written.

    Attributes:
        explainer: explains the cases; it has the claims, the stored scores and the cases that wait.
        inferer: explains images, unless a batch brings its own.
        image_key: the key of the network's input in a case.

    Example::

        >>> import torch
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import monai_saliency as ms
        >>> from monai_saliency.storage.tables import CaseTable, Failures
        >>> network = torch.nn.Flatten()
        >>> evaluator = ms.engines.CohortEvaluator(torch.device("cpu"), [{"image": torch.ones(1, 1, 1, 2)}], network)
        >>> explain = ms.sliding_window(1, target=ms.ClassScore([0], "none"))
        >>> with TemporaryDirectory() as folder:
        ...     tables = CaseTable(Path(folder) / "summary.csv"), Failures(Path(folder) / "failures.csv")
        ...     handler = SaliencyHandler(explain, network, lambda item: item, *tables)
        ...     handler.attach(evaluator)
        ...     evaluator.run()
        >>> handler.explained
        ['image 0 of the batch']
    """

    def __init__(
        self,
        inferer: PerturbationInferer,
        network: Callable[..., torch.Tensor],
        postprocessing: Callable[[dict[str, Any]], dict[str, Any]],
        summary: CaseTable,
        failures: Failures,
        store: ScoreStore | None = None,
        network_id: str | None = None,
        saliency_key: str = "saliency",
        label_key: str | None = None,
        standard_error_key: str | None = None,
        trust: Trust | None = None,
        method: str | None = None,
        within_key: str | None = None,
    ) -> None:
        self.explainer = CohortExplainer(inferer, network, store, failures, network_id)
        self.inferer = self.explainer.inferer
        self.postprocessing = instance("postprocessing", postprocessing, (), "a transform of a case", function=True)
        self.summary = summary
        self.failures = failures
        self.image_key: Any = CommonKeys.IMAGE
        self.saliency_key = saliency_key
        self.label_key, self.within_key = label_key, within_key
        self.standard_error_key = standard_error_key
        self.trust = trust
        self.method = method
        #: compares methods on the cohort's first cases, instead of explaining it
        self.compare: Callable[..., Any] | None = None
        self._background = Background()
        self._marks: dict[str, str] = {}  # of the rows of this run, by the network that made them
        self._loader: Any = None
        self._is_opened = False
        self.failures.withdraw_by(self.withdraw)

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
        engine.add_event_handler(Events.COMPLETED, self.report_cohort)
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

    # What is explained. -----------------------------------------------------------------------------------------------

    def __call__(self, engine: Engine) -> None:
        self._loader = getattr(engine, "data_loader", None)
        for batch in self.batches(engine):
            predictions = batch.predictions or [None] * len(batch.items)
            cases = [self._case_of(item, known) for item, known in zip(batch.items, predictions, strict=True)]
            self._open(engine, batch)
            write = partial(self._write_later, batch, cases)
            self.explainer.explain(batch.inputs, cases, write, batch.inferer, batch.held)

    def _open(self, engine: Any, batch: Batch) -> None:
        """Print what is explained and how, once."""
        is_opened, self._is_opened = self._is_opened, True
        if is_opened or not self._is_shown:
            return
        network, shape = type(engine.network).__name__, tuple(batch.inputs.shape[1:])
        fill = getattr(self.inferer.fill, "__name__", self.inferer.fill)
        how = f"by {self.method or self.inferer.masks}, hidden by {fill}"
        print(
            f"monai_saliency: {network} on images {shape}; {self.inferer.target}, {how}; results go to "
            f"{self.summary.path.parent}",
            flush=True,
        )

    @property
    def _is_shown(self) -> bool:
        """Whether this process reports its progress."""
        return bool(self.inferer.progress) and not self.explainer.assignment.quiet

    def batches(self, engine: Engine) -> Iterator[Batch]:
        """The batches to explain after one iteration of the evaluator."""
        output: Any = engine.state.output
        images = output[self.image_key]
        items = decollate_batch(engine.state.batch)
        if self.is_compared(engine, self.inferer, images):
            return
        self.inferer = choose_fill(self.inferer, self.explainer.network, self.first_cases(images))
        self.explainer.inferer = self.inferer
        for i, item in enumerate(items):
            item.setdefault("case", scan_name(images, i))
        yield Batch(images, items, predictions=self._predictions(engine, len(items)))

    def first_cases(self, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, Case]]:
        """The cohort's first loadable cases, each an image ``(1, C, *spatial)`` of the type of ``like``."""
        for scan in self._first_scans(like, _FIRST):
            yield scan.image[None], scan.case

    def _first_scans(self, like: torch.Tensor, most: int | None = None) -> Iterator[Scan]:
        dataset: Any = getattr(self._loader, "cohort", getattr(self._loader, "dataset", None))
        count = len(dataset) if isinstance(dataset, Sized) else 0
        for index in range(min(most or count, count)):
            try:
                item = {"case": str(index), **dataset[index]}
                image = plain(item[self.image_key]).to(plain(like))
                read = None if most else self.label_of(item)
                label = None if read is None else plain(read())[0].to(image.device) != 0
                yield Scan(image, self._case_of(item), label)
            except Exception as error:
                logger.warning("case %d of the cohort is left out of the first cases: %s", index, error)

    def is_compared(self, engine: Any, inferer: PerturbationInferer, like: torch.Tensor) -> bool:
        """Whether this run compares methods on the first cases, which is done here, and explains none."""
        if self.compare is not None:
            explainer = self.explainer
            self.compare(inferer, explainer.network, self._first_scans(like), explainer.network_id)
            engine.terminate()
        return self.compare is not None

    def _predictions(self, engine: Engine, count: int) -> Sequence[Any] | None:
        """The evaluator's output for each image; None if its network is a different one or unknown."""
        if not same_network(getattr(engine, "network", None), self.explainer.network):
            return None
        output: Any = engine.state.output
        return predictions_of(output.get(CommonKeys.PRED), count)

    def _case_of(self, item: Item, prediction: Any = None) -> Case:
        image = item[self.image_key]
        return Case(
            str(item["case"]),
            labels=None if self.label_key is None else item.get(self.label_key),
            within=None if self.within_key is None else item[self.within_key],
            spacing=image_spacing(image[None]),
            file=image_file(image),
            prediction=prediction,
            affine=image_affine(image[None]),
        )

    # What is written of a case. ---------------------------------------------------------------------------------------

    def _write_later(self, batch: Batch, cases: Sequence[Case], explained: ScoredCase) -> None:
        """Have the map of a case made and written in the background."""
        mark, case, write = self._mark(), cases[explained.index], None
        with self._listing(case.name):
            if self.trust is not None or is_shared(batch.inputs.device):
                _ = explained.explanation  # made here, where the network does not run meanwhile
            trust = self._trust_rows(batch, case, explained)
            write = partial(self._write, case.name, batch.items[explained.index], explained, mark, trust)
        if write is not None:
            self._background.submit(write, explained.claim)

    def _trust_rows(self, batch: Batch, case: Case, explained: ScoredCase) -> list[dict[str, Any]]:
        """How far to trust each map of a case; empty if this is not measured."""
        if self.trust is None:
            return []
        measured = Trusted(
            explained.explanation,
            batch.inferer or self.inferer,
            self.explainer.network,
            plain(batch.inputs)[explained.index],
            case,
            self.label_of(batch.items[explained.index]),
            self.explainer.network_id,
        )
        return self.trust.rows(measured, self.summary)

    def _mark(self) -> str:
        """The mark of the rows that are made now: a handler may give the network other weights between two cases."""
        network, network_id = self.explainer.network, self.explainer.network_id
        known = network_fingerprint(network, network_id, kept=True) or "unknown"
        if known not in self._marks:
            description = described(self.inferer, network, network_id, self._loader)
            description |= {} if self.within_key is None else {"within": str(self.within_key)}
            self._marks[known] = note_settings(self.summary, description)
        return self._marks[known]

    def label_of(self, item: Item) -> Callable[[], torch.Tensor] | None:
        """A function that reads the label map ``(1, *spatial)`` of a case on the image's grid; None without one."""
        return label_on_grid(item, self.image_key)

    @contextmanager
    def _listing(self, case: str) -> Iterator[None]:
        """List a case that fails."""
        try:
            yield
        except Exception as error:
            self.failures.add(case, "explain", error)

    def _write(self, case: str, item: Item, explained: ScoredCase, mark: str, trust: Sequence[Any]) -> None:
        """Make and write the map of a case, in the background."""
        # This thread has its own mode, and never needs gradients.
        with self._listing(case), torch.no_grad(), stage("save"):
            seconds, begun = explained.seconds, time.perf_counter()
            item, explanation = _on_host(item, explained.explanation, self.saliency_key, self.standard_error_key)
            seconds += time.perf_counter() - begun
            for key in {self.saliency_key, self.standard_error_key, "disagreement"} & item.keys():
                item[key] = MetaTensor(item[key]).copy_meta_from(item[self.image_key])
            title = case_title(explanation)
            item |= {"explanation": explanation, "title": title, "settings": mark, "method": self.method}
            self._check_inversion(explanation.name)
            rows = self._rows(item, self.postprocessing(item), explanation, seconds, mark)
            if trust:
                rows = [row | measured for row, measured in zip(rows, trust, strict=True)]
            self.summary.add(rows)
            self.failures.remove(explanation.name)
            self.explainer.explained.append(explanation.name)
            verdicts = dict.fromkeys(row["verdict"] for row in rows if row["verdict"])
            self._report_case("\n".join([title, *verdicts]), explanation, seconds)

    def _check_inversion(self, case: str) -> None:
        """Refuse a preprocessing that the map's way back does not lead through."""
        for step in steps_of(self.postprocessing):
            if isinstance(step, Invertd) and self.saliency_key in step.keys:
                check_inversion(case, step.transform)

    def _rows(
        self, item: Item, done: Mapping[Any, Any], explanation: Explanation, seconds: float, mark: str
    ) -> list[dict[str, Any]]:
        """The rows of the summary, of a case before and after its postprocessing."""
        image, maps = item[self.image_key], done[self.saliency_key]
        rows = summarize(
            explanation.name,
            explanation,
            maps.numpy(force=True),
            affine_in_mm(maps),
            item.get("label"),
            image,
            done.get(self.standard_error_key),
        )
        # Images without a file are identified by their voxels.
        scan = scan_mark(image_file(image)) or fingerprint(plain(image))[:8]
        return [row | {"seconds": round(seconds, 3), "settings": mark, "scan": scan} for row in rows]

    def _report_case(self, title: str, explanation: Explanation, seconds: float) -> None:
        """Print one line of a case that is done."""
        if not self._is_shown:
            return
        progress = self.explainer.progress
        number = f"case {len(self.explained) + len(self.failures.rows) + len(self.failures.nothing)}"
        if progress.cases is not None:
            number = f"{number} of {progress.cases}"
        words = title.replace("\n", ": ", 1).replace("\n", ", ")
        progress.say(f"{number}, {words}; {explanation.num_forwards} forwards, {seconds:.1f} s")

    def withdraw(self, case: str) -> None:
        """Remove the row of a case, its map and its picture, which an earlier run may have written of another scan."""
        self.summary.replace({case})
        for step in steps_of(self.postprocessing):
            if hasattr(step, "withdraw"):
                with suppress(CaseError):  # of a name that leads out of the folder, so that nothing was written
                    step.withdraw(case)

    # The cohort. ------------------------------------------------------------------------------------------------------

    def report_cohort(self, engine: Engine) -> None:
        """Give an evaluator the cohort's figures, and write the page ``trust.md``, from the present summary."""
        self.explainer.progress.close()
        engine.state.metrics.update(self.figures())
        # Rows of this run may have taken the place of rows with figures.
        if self.trust is not None or self.summary.path.with_name("trust.md").exists():
            write_trust_page(self.summary)

    def incomplete(self, alike: bool = False) -> list[str]:
        """The waiting cases that have neither a map nor a row in a list of :class:`Failures` by now; with ``alike``, a
        map of the settings and weights of this run.
        """
        rows, marks = self.summary.read(), set(self._marks.values())
        if alike and marks:
            rows = [row for row in rows if row["settings"] in marks]
        ended = {row["case"] for row in [*rows, *self.failures.since()]}
        ended.update(self.explained)
        return [case for case in dict.fromkeys(self.explainer.waiting) if case not in ended]

    def figures(self) -> dict[str, float]:
        """The cohort's figures, over all runs on the folder so far."""
        failures = self.failures
        return figures(self.summary.read(), len(failures.read()), len(failures.nothing_table.read()))


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


def _on_host(item: Item, explanation: Explanation, saliency_key: Any, error_key: Any) -> tuple[Item, Explanation]:
    """An explained case in the host's memory."""
    whole = dict(item)
    whole.pop(error_key, None)
    whole |= explanation.maps_beside(error_key)
    whole[saliency_key] = explanation.saliency
    copied = {}
    for key, value in whole.items():
        copied[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    changes: dict[str, Any] = {"maps": copied[saliency_key]}
    for name in ("scores", "reference_scores", "hidden_scores"):
        value = getattr(explanation, name)
        changes[name] = None if value is None else value.detach().cpu()
    on_host = replace(explanation, **changes)
    # What is computed when it is first read has been computed, of scores on the device.
    noise = None if explanation.noise is None else explanation.noise.detach().cpu()
    vars(on_host).update(noise=noise, disagreement=copied.get("disagreement"))
    return copied, on_host
