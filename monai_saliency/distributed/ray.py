"""Ray: a cohort as a Ray Data pipeline with a pool of actors, and parts of images in your own tasks and actors."""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from monai_saliency.distributed.base import Cohort, Engine, local_device
from monai_saliency.distributed.ray_actor import Actor, Attempts, Reply
from monai_saliency.inferers.case_state import CaseState
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.sharding import Part, Unit, units
from monai_saliency.utils.arguments import positive_numbers, require, whole_numbers

__all__ = ["RayEngine", "Scorer", "score"]

logger = logging.getLogger(__name__)

# Bytes. Units are a few bytes and replies a few lines: no scan goes through Ray's own memory.
_OBJECT_STORE = 100 * 2**20
# How often a call is begun whose actors are lost. It resumes each time, so nodes may come and go; but a case that ends
# its process, as a crash in a network's own code does, must not be tried for ever.
_ATTEMPTS = 10
# A pool that may grow does so while more than this share of its actors is busy.
_BUSY = 0.6


class RayEngine(Engine):
    """Explains the cohort in a pool of Ray actors, each of which holds the network once.

    The driver holds no scan and no map: it hands out units, a few in each call, and reads back which cases are done. A
    call whose actor or node is lost is done again by another actor. Scores that were computed by then are not computed
    again, since the store keeps them.

    Args:
        min_workers: the least number of actors; ``max_workers`` by default. With fewer, the pool grows and shrinks with
            the work and with an elastic cluster.
        max_workers: the largest number of actors; by default as many as the cluster has room for.
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

    Raises:
        OptionalImportError: with the pip command, when Ray is not installed.

    Example::

        >>> RayEngine(max_workers=4, num_gpus=0.5).max_workers
        4
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
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # not its reports about itself
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
        """Explain the cohort in a pool of actors."""
        if cohort.recipe is None:
            raise ValueError(
                "each Ray actor makes the cohort anew: run a MONAI bundle, as monai_saliency.bundle.worker does, or "
                "give `Cohort` a `recipe`"
            )
        tqdm = require("tqdm", extra="bundle").tqdm
        with _connected(self.address) as ray:
            num_workers, num_gpus = self._pool(ray.cluster_resources())
            todo = units(len(cohort), num_workers, self.split)
            size = max(1, min(self.cases_per_call, len(todo) // (2 * num_workers)))
            calls = _calls(todo, size)
            if not calls:
                return
            cohort.expect()
            screen = _Screen(tqdm.write)
            with tqdm(total=len(todo), desc=f"{num_workers} workers", unit="unit") as bar:
                for reply in self._replies(ray, calls, cohort, num_workers, num_gpus):
                    screen.show(reply)
                    cohort.take_over([row["case"] for row in reply.rows if not row["error"]], reply.waiting)
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
    ) -> Iterator[Reply]:
        """The pipeline: calls in, replies out, as they come."""
        most = min(num_workers, len(calls))
        attempts = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Attempts).remote(_ATTEMPTS)
        dataset = ray.data.from_items(
            [{"call": number, "units": pickle.dumps(call)} for number, call in enumerate(calls)],
            override_num_blocks=len(calls),
        )
        dataset.context.enable_progress_bars = False
        dataset.context.print_on_execution_start = False
        dataset.context.autoscaling_config.actor_pool_util_upscaling_threshold = _BUSY
        dataset = dataset.map(
            Actor,
            fn_constructor_args=[cohort.recipe, attempts],
            # One call at a time, so that none waits behind a long one while another actor is free.
            compute=ray.data.ActorPoolStrategy(
                min_size=min(self.min_workers or most, most), max_size=most, max_tasks_in_flight_per_actor=1
            ),
            num_cpus=self.num_cpus,
            num_gpus=num_gpus,
        )
        for row in dataset.iter_rows():
            yield pickle.loads(row["reply"])


class _Screen:
    """Shows what actors print, each line once: they all print the same while they make the cohort."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._shown = {""}

    def show(self, reply: Reply) -> None:
        for line in reply.printed.splitlines():
            if line not in self._shown:
                self._write(line, file=sys.stdout)
                self._shown.add(line)
        if reply.logged not in self._shown:
            self._write(reply.logged, file=sys.stderr, end="")
            self._shown.add(reply.logged)


def score(
    inferer: PerturbationInferer,
    make_network: Callable[[], Callable[..., Any]],
    images: Any,
    part: Part | None = None,
    **settings: Any,
) -> list[CaseState]:
    """Score images, or a part of their masks, in your own Ray task: on its GPU, if it was given one."""
    return Scorer(inferer, make_network).score(images, part, **settings)


class Scorer:
    """:func:`score` for an actor, which holds the network once."""

    def __init__(self, inferer: PerturbationInferer, make_network: Callable[[], Callable[..., Any]]) -> None:
        self.inferer = inferer
        self.device = local_device()
        network = make_network()
        self.network = network.to(self.device) if isinstance(network, torch.nn.Module) else network

    def score(self, images: Any, part: Part | None = None, **settings: Any) -> list[CaseState]:
        """Score images, or a part of their masks; see :func:`score`."""
        images = require("ignite.utils", extra="bundle").convert_tensor(images, self.device)
        states = self.inferer.score(images, self.network, part=part, **settings)
        for state in states:
            state.forget_images()
        return states if self.device.type == "cpu" else _on_host(states)


def _on_host(states: list[CaseState]) -> list[CaseState]:
    """Copies whose tensors are in the host's memory: whoever gets them may have no GPU."""
    cloudpickle = require("ray.cloudpickle", extra="ray")

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return torch.Tensor.cpu, (value.cpu(),)
            if isinstance(value, torch.device) and value.type != "cpu":
                return torch.device, ("cpu",)
            return super().reducer_override(value)

    buffer = io.BytesIO()
    Pickler(buffer).dump(states)
    return pickle.loads(buffer.getbuffer())


def _calls(todo: Sequence[Unit], size: int) -> list[list[Unit]]:
    """Units, ``size`` to a call. The units of a call have the same part, so that their cases are loaded in one go."""
    parts: dict[Any, list[Unit]] = {}
    for unit in todo:
        parts.setdefault(unit.part, []).append(unit)
    chunks = [part[start : start + size] for part in parts.values() for start in range(0, len(part), size)]
    return sorted(chunks, key=lambda chunk: chunk[0].index)


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster; afterwards it is as it was."""
    ray: Any = require("ray", extra="ray")
    require("ray.data", extra="ray")
    # Ray Data's own telemetry: an actor that collects it, and a thread that asks for Prometheus on this machine.
    os.environ.setdefault("RAY_DATA_USAGE_DISABLED", "1")
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    # Ray's core reports as an error that Ray Data's actors need their arguments when they are started again.
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
    """Keep the handler of SIGTERM, which Ray replaces when it connects."""
    ours = threading.current_thread() is threading.main_thread()
    before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if ours and before is not None:
            signal.signal(signal.SIGTERM, before)
