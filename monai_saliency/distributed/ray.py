"""Ray: a cohort as a Ray Data pipeline with a pool of actors, and units of work for tasks and actors of one's own."""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch

from monai_saliency.bundle.worker import Worker
from monai_saliency.distributed.base import Cohort, Engine, local_device
from monai_saliency.errors import root_cause
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.sharding import Part, Unit, units
from monai_saliency.utils.arguments import positive_numbers, whole_numbers
from monai_saliency.utils.optional_imports import require

__all__ = ["RayEngine", "Scorer", "score"]

logger = logging.getLogger(__name__)

# Units are a few bytes and replies a few lines: nothing of a scan goes through Ray's own memory.
_OBJECT_STORE = 100 * 2**20
# How often one call is begun whose actors are lost. Each time it goes on where it was, so nodes may come and go; but a
# case that ends its process, as a crash in a network's own code does, must not go on for ever.
_ATTEMPTS = 10
# Share of a pool's actors that are busy while it still grows, where it may.
_BUSY = 0.6


class RayEngine(Engine):
    """Has a pool of Ray actors explain the cohort, each of which holds the network once.

    The driver holds no scan and no map: it hands out units, a call of a few at a time, and reads back which cases are
    done. A call whose actor or node is lost is done again by another one. What had its scores then is not computed
    again, since scores meet in the store.

    Args:
        min_workers: actors at the least; as many as ``max_workers`` by default. With fewer the pool grows and shrinks
            with the work and with an elastic cluster.
        max_workers: actors at the most; what the cluster has room for by default.
        num_gpus: of each actor, a part of one too; 1 by default where the cluster has any, else 0.
        num_cpus: of each actor, and so the threads that it computes with.
        split: what they share: ``"auto"``, ``"cases"`` or ``"masks"`` (:func:`monai_saliency.sharding.units`).
        cases_per_call: cases in one call, at the most, so that the loader's threads work ahead; fewer where some actor
            would have nothing to do.
        address: of a running cluster, ``"auto"`` to look for one. By default the one that ``RAY_ADDRESS`` names, or a
            Ray of its own on this machine, for as long as the run takes. A program that is connected already stays so.

    Attributes:
        device: where the driver's network is, which runs nothing.

    Raises:
        OptionalImportError: with the pip command, when Ray is not installed.
    """

    def __init__(
        self,
        min_workers: int | None = None,
        max_workers: int | None = None,
        num_gpus: float | None = None,
        num_cpus: float = 1,
        split: str = "auto",
        cases_per_call: int = 4,
        address: str | None = None,
    ) -> None:
        require("ray.data", extra="ray")
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # of what it says about itself
        for name, value in (("min_workers", min_workers), ("max_workers", max_workers)):
            if value is not None:
                whole_numbers(name, value, 1)
        whole_numbers("cases_per_call", cases_per_call, 1)
        positive_numbers("num_cpus", num_cpus)
        if num_gpus:
            positive_numbers("num_gpus", num_gpus)
        if min_workers is not None and max_workers is not None and min_workers > max_workers:
            raise ValueError(f"`min_workers` must be at most `max_workers`, {max_workers}, got {min_workers}")
        units(0, 1, split)
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.num_gpus = num_gpus
        self.num_cpus = num_cpus
        self.split = split
        self.cases_per_call = cases_per_call
        self.address = address
        self.device = torch.device("cpu")

    def run(self, cohort: Cohort) -> None:
        """Have the cohort explained.

        Raises:
            Exception: what stops the plain run, from whichever actor meets it.
        """
        tqdm = require("tqdm", extra="bundle").tqdm
        with _connected(self.address) as ray:
            num_workers, num_gpus = self._pool(ray.cluster_resources())
            todo = units(len(cohort), num_workers, self.split)
            size = max(1, min(self.cases_per_call, len(todo) // (2 * num_workers)))
            calls = _calls(todo, size)
            if not calls:
                return
            cohort.expect()
            said, explained = {""}, dict.fromkeys(cohort.handler.explained)
            with tqdm(total=len(todo), desc=f"{num_workers} workers", unit="unit") as bar:
                for reply in self._replies(ray, calls, cohort, num_workers, num_gpus):
                    for line in reply.printed.splitlines():
                        if line not in said:
                            tqdm.write(line, file=sys.stdout)
                            said.add(line)
                    if reply.logged not in said:
                        tqdm.write(reply.logged, file=sys.stderr, end="")
                        said.add(reply.logged)
                    explained |= dict.fromkeys(row["case"] for row in reply.rows if not row["error"])
                    cohort.handler.explained = list(explained)
                    cohort.handler.waiting += reply.waiting
                    bar.update(reply.num_units)
                    if reply.error is not None:
                        raise reply.error

    def _pool(self, resources: dict[str, float]) -> tuple[int, float]:
        """How many actors there may be, and the GPUs of each."""
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        num_gpus = self.num_gpus if self.num_gpus is not None else float(gpus > 0)
        room = int(min(cpus / self.num_cpus, gpus / num_gpus if num_gpus else math.inf))
        most = self.max_workers if self.max_workers is not None else max(1, self.min_workers or 1, room)
        if room < (self.min_workers or most):
            logger.warning(
                "Ray has room for %d of the %d actors now, %g CPUs and %g GPUs where each takes %g and %g: the others "
                "wait until there is more",
                *(room, self.min_workers or most, cpus, gpus, self.num_cpus, num_gpus),
            )
        return most, num_gpus

    def _replies(
        self, ray: Any, calls: Sequence[Sequence[Unit]], cohort: Cohort, num_workers: int, num_gpus: float
    ) -> Iterator[_Reply]:
        """The pipeline: calls in, replies out, as they come."""
        most = min(num_workers, len(calls))
        attempts = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Attempts).remote(_ATTEMPTS)
        dataset = ray.data.from_items(
            [{"call": number, "units": pickle.dumps(call)} for number, call in enumerate(calls)],
            override_num_blocks=len(calls),
        )
        dataset.context.enable_progress_bars = False
        dataset.context.print_on_execution_start = False
        dataset.context.autoscaling_config.actor_pool_util_upscaling_threshold = _BUSY
        dataset = dataset.map(
            _Actor,
            fn_constructor_args=[cohort.config, cohort.run_id, list(sys.path), os.getcwd(), attempts],
            # One call at a time, so that none waits behind a long one while another actor is free.
            compute=ray.data.ActorPoolStrategy(
                min_size=min(self.min_workers or most, most), max_size=most, max_tasks_in_flight_per_actor=1
            ),
            num_cpus=self.num_cpus,
            num_gpus=num_gpus,
        )
        for row in dataset.iter_rows():
            yield pickle.loads(row["reply"])


def score(
    inferer: PerturbationInferer,
    make_network: Callable[[], Callable[..., Any]],
    images: Any,
    part: Part | None = None,
    **settings: Any,
) -> list[CaseState]:
    """Score images, or a part of their masks, in a task of one's own: on its GPU, where it was given one.

    :func:`~monai_saliency.inferers.merged` makes explanations of all parts, anywhere, without the network. Only what
    that needs travels: the scores, and what was found on the unperturbed image.

    Args:
        inferer: what explains.
        make_network: makes the network, as networks are not all whole after a journey: those of ``transformers`` work
            in the process that made them. Others may travel, in ``lambda: network``.
        images: as for :meth:`PerturbationInferer.score <monai_saliency.inferers.inferer.PerturbationInferer.score>`.
        part: of the masks; all by default.
        settings: further arguments of that method, such as ``cases``.

    Example::

        task, make_network = ray.remote(num_gpus=1)(score), ray.put(lambda: network)
        parts = [task.remote(inferer, make_network, images, Part(i, 4)) for i in range(4)]
        explanations = merged(ray.get(parts))
    """
    return Scorer(inferer, make_network).score(images, part, **settings)


class Scorer:
    """The same for an actor, which holds the network once.

    Args:
        inferer: what explains.
        make_network: see :func:`score`.

    Example::

        actor = ray.remote(num_gpus=0.5)(Scorer)
        pool = ray.util.ActorPool([actor.remote(inferer, make_network) for _ in range(2)])
        parts = pool.map(lambda actor, part: actor.score.remote(images, part), [Part(i, 8) for i in range(8)])
        explanations = merged(parts)
    """

    def __init__(self, inferer: PerturbationInferer, make_network: Callable[[], Callable[..., Any]]) -> None:
        self.inferer = inferer
        self.device = local_device()
        network = make_network()
        self.network = network.to(self.device) if isinstance(network, torch.nn.Module) else network

    def score(self, images: Any, part: Part | None = None, **settings: Any) -> list[CaseState]:
        """See :func:`score`."""
        images = require("ignite.utils", extra="bundle").convert_tensor(images, self.device)
        runs = self.inferer.score(images, self.network, part=part, **settings)
        for run in runs:
            run.forget_images()
        return runs if self.device.type == "cpu" else _on_host(runs)


def _on_host(runs: list[CaseState]) -> list[CaseState]:
    """Copies whose tensors are in the host's memory: whoever gets them may have no GPU."""
    cloudpickle = require("ray.cloudpickle", extra="ray")

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
                return torch.Tensor.cpu, (thing.cpu(),)
            if isinstance(thing, torch.device) and thing.type != "cpu":
                return torch.device, ("cpu",)
            return super().reducer_override(thing)

    buffer = io.BytesIO()
    Pickler(buffer).dump(runs)
    return pickle.loads(buffer.getbuffer())


def _calls(todo: Sequence[Unit], size: int) -> list[list[Unit]]:
    """Units, ``size`` to a call. Those of a call are of one part, for their cases to be loaded in one go."""
    parts: dict[Any, list[Unit]] = {}
    for unit in todo:
        parts.setdefault(unit.part, []).append(unit)
    chunks = [part[start : start + size] for part in parts.values() for start in range(0, len(part), size)]
    return sorted(chunks, key=lambda chunk: chunk[0].index)


@dataclass
class _Reply:
    """What came of a call.

    Attributes:
        num_units: how many are done.
        rows: as :meth:`~monai_saliency.distributed.base.Cohort.explain` gives them.
        waiting: see :attr:`Worker.waiting <monai_saliency.bundle.worker.Worker.waiting>`.
        printed: what the bundle wrote to its output.
        logged: likewise to its errors: warnings, and the tracebacks of failed cases.
        error: what stops the run.
    """

    num_units: int = 0
    rows: list[dict[str, str]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    printed: str = ""
    logged: str = ""
    error: BaseException | None = None


class _Actor:
    """What each actor of the pool holds. Nothing is raised here: Ray would wrap it in pages of its own traceback."""

    def __init__(self, config: dict[str, Any], run_id: str, path: Sequence[str], folder: str, attempts: Any) -> None:
        self.attempts = attempts
        self.made = _Reply()
        with _overheard(self.made):
            self.worker = Worker(config, run_id, path, folder)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        reply, self.made = self.made, _Reply(error=self.made.error)
        if reply.error is None:
            units: list[Unit] = pickle.loads(row["units"])
            with _overheard(reply):
                self._begin(row["call"], units)
                reply.rows = self.worker.explain(units)
                reply.waiting = self.worker.waiting()
                reply.num_units = len(units)
        return {"reply": pickle.dumps(reply)}

    def _begin(self, call: int, units: Sequence[Unit]) -> None:
        ray: Any = require("ray", extra="ray")
        attempts, most = ray.get(self.attempts.begin.remote(call))
        if attempts > most:
            places = ", ".join(str(unit.index) for unit in units)
            raise RuntimeError(
                f"{most} actors were lost one after the other while they explained one of the cases {places} "
                "(counted from 0 in the cohort): its network or its loader ends the process, or it needs more memory "
                "than there is. Explain it alone and without Ray to see the error"
            )


class _Attempts:
    """Counts, in an actor of its own, how often each call was begun, and knows how often it may be."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[int] = Counter()

    def begin(self, call: int) -> tuple[int, int]:
        self._counts[call] += 1
        return self._counts[call], self._most


@contextmanager
def _overheard(reply: _Reply) -> Iterator[None]:
    """Note in a reply what is printed, logged and raised."""
    printed, logged = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(logged):
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            # Causes get lost when an error is pickled; the traceback has them all.
            reply.error = _sendable(root_cause(error))
    reply.printed += printed.getvalue()
    reply.logged += logged.getvalue()


def _sendable(error: BaseException) -> BaseException:
    """An error that can be pickled: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster, and afterwards as it was."""
    ray: Any = require("ray", extra="ray")
    require("ray.data", extra="ray")
    # Ray Data's own telemetry: an actor that collects it, and a thread that asks for Prometheus on this machine.
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    # Of Ray Data's actors its core says, as an error, that they need their arguments when they are started again.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    if address is None and os.environ.get("RAY_ADDRESS"):
        address = "auto"
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    with _signals_kept():
        ray.init(address=address or "local", **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep what SIGTERM does: Ray takes it for itself when it connects."""
    ours = threading.current_thread() is threading.main_thread()
    before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if ours and before is not None:
            signal.signal(signal.SIGTERM, before)
