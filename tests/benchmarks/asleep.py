"""Does a cohort keep a GPU busy? Measured without one: the network sleeps as long as a GPU would compute.

    python tests/benchmarks/asleep.py [--busy] [--rounds 3] [--at_most 3D=1.2 2D=1.35] [--json FILE] [--keep [LABEL]]

Eight small images go through ``CohortEvaluator`` and ``SaliencyHandler`` by the bundle's method, with a score store, a
standard error, maps, pictures and a table. An image takes 0.3 ms in 2D and 1.2 ms in 3D. Printed is the smallest ratio
of the rounds: seconds of the run over seconds asleep; and the seconds of each stage in that run, in the thread that
runs the network and in the others. With ``--busy`` another process keeps one core busy meanwhile. The exit status is 1
where that ratio, if the loop never waited for a core, is above its bar: on a machine with other work the plain one
measures the others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import nibabel as nib
import numpy as np
import torch
from monai.data import list_data_collate
from monai.transforms import LoadImage
from record import add_options, keep, markdown, now

import monai_saliency as ms
from monai_saliency.engines.evaluator import CohortEvaluator
from monai_saliency.handlers.saliency_handler import SaliencyHandler
from monai_saliency.storage.score_store import ScoreStore
from monai_saliency.storage.tables import CaseTable, Failures
from monai_saliency.transforms import SaveSaliencyd
from monai_saliency.utils import timing

#: by name: the spatial shape, and seconds of an image
QUESTIONS = {"2D 64^2": ((64, 64), 0.3e-3), "3D 32^3": ((32, 32, 32), 1.2e-3)}
CASES = 8


class Asleep(torch.nn.Module):
    """A network that sleeps for each image, and whose two scores follow the brightness of a box."""

    #: the images of each call, and the seconds asleep: not the network's own, whose attributes identify it
    calls: ClassVar[list[tuple[int, float]]] = []

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        spatial = [slice(size // 4, size // 2) for size in images.shape[2:]]
        logit = 10 * images[(slice(None), 0, *spatial)].flatten(1).mean(dim=1) - 5
        start = time.perf_counter()
        time.sleep(self.seconds * len(images))
        self.calls.append((len(images), time.perf_counter() - start))
        return torch.stack([-logit, logit], dim=1)


class Stages:
    """Seconds of the package's stages, and the processor's in their thread, without those of the stages inside."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[bool, str], np.ndarray] = defaultdict(lambda: np.zeros(2))
        self._running = threading.local()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Takes the place of torch's ``record_function``."""
        outside, self._running.inside = getattr(self._running, "inside", 0.0), 0.0
        start = _clocks()
        try:
            yield
        finally:
            spent = _clocks() - start
            in_loop = threading.current_thread() is threading.main_thread()
            self.seconds[in_loop, name.removeprefix("saliency: ")] += spent - self._running.inside
            self._running.inside = outside + spent

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the stages of the block."""
        before, timing.record_function = timing.record_function, self  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            timing.record_function = before  # type: ignore[misc]


def _clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.thread_time()])


def cohort(
    network: torch.nn.Module,
    images: list[torch.Tensor],
    explain: ms.PerturbationInferer,
    pictures: bool,
    device: str = "cpu",
) -> tuple[float, Stages]:
    """The seconds in which images ``(1, C, *spatial)`` are predicted, explained and written, and their stages."""
    stages = Stages()
    with tempfile.TemporaryDirectory() as folder, stages.noted():
        out = Path(folder)
        loader = [list_data_collate([_loaded(image, out / f"case_{i}.nii")]) for i, image in enumerate(images)]
        save = SaveSaliencyd(keys="saliency", output_dir=out, picture=pictures)
        failures = Failures(out / "failures.csv")
        kept = CaseTable(out / "summary.csv"), failures, ScoreStore(out / "scores")
        handler = SaliencyHandler(explain, network, save, *kept, standard_error_key="standard_error")
        evaluator = CohortEvaluator(torch.device(device), loader, network, val_handlers=[handler], failures=failures)
        start = now(device)
        evaluator.run()
        spent = now(device) - start
        if len(handler.explained) != len(images):
            raise RuntimeError(f"of {len(images)} cases {len(handler.explained)} have maps: {failures.read()}")
    return spent, stages


def _loaded(image: torch.Tensor, path: Path) -> dict[str, Any]:
    """A case of the loader, whose image ``(1, C, *spatial)`` lies in a file."""
    nib.save(nib.Nifti1Image(image[0, 0].numpy(force=True), np.eye(4)), path)
    return {"image": LoadImage(ensure_channel_first=True)(path).to(image.device), "case": path.stem}


def measure(name: str, rounds: int, pictures: bool) -> list[dict[str, Any]]:
    """The ratio of a question, and its stages."""
    shape, seconds = QUESTIONS[name]
    torch.manual_seed(0)
    images = [torch.rand(1, 1, *shape) for _ in range(CASES)]
    explain = ms.focused_rise(target=ms.ClassScore([1], "softmax"), progress=False)
    found = []
    cohort(Asleep(0), images[:1], explain, pictures)  # warms up
    for _ in range(rounds):
        Asleep.calls.clear()
        begun = time.thread_time()
        spent, stages = cohort(Asleep(seconds).eval(), images, explain, pictures)
        computed = time.thread_time() - begun
        asleep = sum(slept for _, slept in Asleep.calls)
        found.append((spent / asleep, 1 + computed / asleep, spent, stages))
    ratio, computing, spent, stages = min(found, key=lambda each: each[0])
    alone = sum(count == 1 for count, _ in Asleep.calls)
    figures = {
        "seconds over seconds asleep": ratio,
        "the same, largest of the rounds": max(each[0] for each in found),
        "the same, if the loop never waited": computing,
        "forwards of one image, a case": alone / CASES,
        "seconds a case": spent / CASES,
    }
    rows = [{"question": name, "what": what, "figure": figure} for what, figure in figures.items()]
    for (in_loop, stage), spent in sorted(stages.seconds.items(), key=lambda each: -each[1][0]):
        what = f"{stage}, {'in the loop' if in_loop else 'meanwhile'}: seconds a case"
        rows.append({"question": name, "what": what, "figure": spent[0] / CASES, "processor": spent[1] / CASES})
    return rows


def spin() -> None:
    """Keep a core busy."""
    while True:
        pass


def main() -> int:
    """Print the table; 1 where a ratio is above its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--pictures", action="store_true", help="draw a picture of each case")
    parser.add_argument("--threads", type=int, help="of torch; its own number by default")
    parser.add_argument(
        "--at_most", nargs="*", default=[], help="bars of the ratios if the loop never waited, such as 3D=1.2"
    )
    add_options(parser)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    other = multiprocessing.Process(target=spin, daemon=True)
    if args.busy:
        other.start()
    bars = dict(each.split("=") for each in args.at_most)
    rows, failed = [], False
    for name in QUESTIONS:
        found = measure(name, args.rounds, args.pictures)
        failed |= found[2]["figure"] > float(bars.get(name[:2], "inf"))
        rows += found
    if args.busy:
        other.kill()
    print(markdown(rows))
    keep(args, "asleep", rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
