"""Ray: a cohort shared by a pool of actors."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from monai_saliency.distributed.base import Cohort, Engine
from monai_saliency.errors import root_cause
from monai_saliency.sharding import Unit, units
from monai_saliency.utils.arguments import require, whole_number

# Bytes. Units are a few bytes and replies a few lines: no scan goes through Ray's own memory.
_OBJECT_STORE = 100 * 2**20
# How often a call is done again whose actor is lost. It resumes each time, so nodes may come and go; but a case that
# ends its process, as a crash in a network's own code does, must not be tried for ever.
_RETRIES = 10


class RayEngine(Engine):
    """Explains the cohort in a pool of Ray actors; each actor holds the network once.

    The driver holds no scan and no map: it hands out units, a few in each call, and reads back which cases are done. A
    call whose actor or node is lost is done again by another actor. Scores that were computed by then are not computed
    again, since the store keeps them.

    Args:
        max_workers: the number of actors; by default as many as the cluster has room for. More wait for an elastic
            cluster to grow.
        num_gpus: GPUs of each actor, which may be a fraction; by default 1 where the cluster has any, else 0.
        num_cpus: CPUs of each actor, and so the threads that it computes with.
        split: what actors share: ``"auto"``, ``"cases"`` or ``"masks"`` (:func:`monai_saliency.sharding.units`).
        cases_per_call: the largest number of cases in one call, so that the loader's threads work ahead; fewer where an
            actor would have nothing to do.
        address: the address of a running cluster, ``"auto"`` to look for one. By default the one that ``RAY_ADDRESS``
            names, or a new Ray on this machine for as long as the run takes. A program that is already connected to a
            cluster uses that one.

    Attributes:
        device: the device of the driver's network, which runs nothing.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        num_gpus: float | None = None,
        num_cpus: float = 1,
        split: str = "auto",
        cases_per_call: int = 4,
        address: str | None = None,
    ) -> None:
        require("ray", extra="ray")
        self.max_workers = None if max_workers is None else whole_number("max_workers", max_workers, 1)
        self.num_gpus = num_gpus
        self.num_cpus = num_cpus
        self.split = split
        self.cases_per_call = whole_number("cases_per_call", cases_per_call, 1)
        self.address = address
        self.device = torch.device("cpu")

    def run(self, cohort: Cohort) -> None:
        """Explain the cohort in a pool of actors."""
        if cohort.recipe is None:
            raise ValueError(
                "each Ray actor makes the cohort anew: run a MONAI bundle, as monai_saliency.bundle.config does, or "
                "give `Cohort` a `recipe`"
            )
        tqdm = require("tqdm", extra="bundle").tqdm
        with _connected(self.address) as ray:
            num_workers, num_gpus = self._pool(ray.cluster_resources())
            todo = units(len(cohort), num_workers, self.split)
            # Parts of a case go to different actors.
            shared = any(unit.part.count > 1 for unit in todo)
            size = 1 if shared else max(1, min(self.cases_per_call, len(todo) // (2 * num_workers)))
            calls = [todo[start : start + size] for start in range(0, len(todo), size)]
            actor = ray.remote(_Actor).options(
                num_cpus=self.num_cpus, num_gpus=num_gpus, max_restarts=-1, max_task_retries=_RETRIES
            )
            actors = [actor.remote(cohort.recipe) for _ in range(min(num_workers, len(calls)))]
            cohort.expect()
            with tqdm(total=len(todo), desc=f"{num_workers} workers", unit="unit") as bar:
                for reply in _replies(actors, calls):
                    cohort.explainer.take_over(reply.explained, reply.waiting)
                    bar.update(reply.num_units)
                    if reply.error:
                        raise RuntimeError(f"an actor has failed: {reply.error}")

    def _pool(self, resources: dict[str, float]) -> tuple[int, float]:
        """How many actors there are, and the GPUs of each."""
        gpus, num_gpus = resources.get("GPU", 0.0), self.num_gpus
        if num_gpus is None:
            num_gpus = 1.0 if gpus > 0 else 0.0
        room = resources.get("CPU", 0.0) / self.num_cpus
        if num_gpus:
            room = min(room, gpus / num_gpus)
        return self.max_workers or max(1, int(room)), num_gpus


def _replies(actors: Sequence[Any], calls: Sequence[Sequence[Unit]]) -> Iterator[Reply]:
    """Give each actor a call whenever it is free; the replies as they come."""
    todo, done = iter(calls), 0
    # An actor that the cluster has no room for yet is not ready, and gets no call.
    busy = {actor.ready.remote().future(): actor for actor in actors}
    while done < len(calls):
        # Not `ray.wait`: a signal there ends the process.
        future = next(iter(wait(busy, return_when=FIRST_COMPLETED).done))
        actor = busy.pop(future)
        if (reply := future.result()) is not None:
            done += 1
            yield reply
        if (call := next(todo, None)) is not None:
            busy[actor.explain.remote(call).future()] = actor


@dataclass
class Reply:
    """The result of a call."""

    num_units: int
    explained: Sequence[str] = ()
    waiting: Sequence[str] = ()
    error: str = ""


class _Actor:
    """One actor of the pool. Errors go into its replies: Ray would wrap them in pages of its own traceback."""

    def __init__(self, recipe: Callable[[], Cohort]) -> None:
        self.recipe = recipe
        self.cohort: Cohort | None = None

    def ready(self) -> None:
        """Return once the actor runs."""

    def explain(self, todo: Sequence[Unit]) -> Reply:
        """Explain the units of one call."""
        try:
            return self._explain(todo)
        except Exception as error:
            traceback.print_exc()
            cause = root_cause(error)
            return Reply(len(todo), error=f"{type(cause).__name__}: {cause}")

    def _explain(self, todo: Sequence[Unit]) -> Reply:
        if self.cohort is None:
            self.cohort = self.recipe()
        explainer = self.cohort.explainer
        before = len(explainer.explained)
        self.cohort.explain(todo, quiet=True)  # the driver shows the progress of all
        return Reply(len(todo), explainer.explained[before:], explainer.take_waiting())


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster; afterwards it is as it was."""
    ray: Any = require("ray", extra="ray")
    if ray.is_initialized():
        yield ray
        return
    settings: dict[str, Any] = {"logging_level": "ERROR"}
    if address is None and os.environ.get("RAY_ADDRESS"):
        address = "auto"
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        settings |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    ours = signal.getsignal(signal.SIGTERM)
    ray.init(address=address or "local", **settings)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ours)  # Ray replaces it
    try:
        yield ray
    finally:
        ray.shutdown()
