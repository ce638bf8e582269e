import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Before anything imports NumPy: its threads, one for each core in each worker, wait for each other for minutes.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
import torch
import torch.distributed as dist
from helpers import nnunet
from helpers.layouts import LAYOUTS, Bundle
from helpers.scans import write_scans

# A shell starts what it runs in the background with Ctrl-C ignored, and processes pass that on to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays, and need not be looked through again and again


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors on one thread: faster, and no test leaves another count behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle's logging.conf would take the place of pytest's handlers, by which tests read the log."""
    monkeypatch.setattr("monai.bundle.workflows._apply_logging_file", lambda path: None)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    """No test leaves a process group behind, or its variables, as Lightning does in the process that calls it.

    A command that finds the rank of such a group in its environment waits for the other ranks for ever.
    """
    group = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in group}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def left() -> Callable[[], list[str]]:
    """Names the background threads that began in this test and still run.

    The thread of an earlier test's run ends only with that run's error, which may still be held.
    """
    earlier = set(threading.enumerate())
    return lambda: [
        each.name for each in threading.enumerate() if each.name.startswith("Background") and each not in earlier
    ]


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    """Three small scans in ``cohort`` below a folder; the folder."""
    return write_scans(tmp_path, 3)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for the tests that are not about how it is started."""
    ray = pytest.importorskip("ray", reason='needs pip install "monai-saliency[ray]"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_worker_niceness", "0")  # or whatever else the machine does comes first
        patch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def nnunet_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small nnU-Net models that nnU-Net has trained on scans: the folder of the dataset's models."""
    pytest.importorskip("nnunetv2", reason='needs pip install "monai-saliency[nnunet]"')
    return nnunet.train_on_scans(tmp_path_factory.mktemp("nnunet"))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Bundle]:
    """Sets up a layout and makes its folder the working directory, as its ``scripts`` need."""

    def made(name: str) -> Bundle:
        layout = next(layout for layout in LAYOUTS if layout.name == name)
        bundle = Bundle(layout, tmp_path)
        for module in [m for m in sys.modules if m == "scripts" or m.startswith(("scripts.", "valve_landmarks"))]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setattr(sys, "path", [str(bundle.root), *sys.path])
        monkeypatch.chdir(bundle.root)
        bundle.write_weights()
        return bundle

    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Reports without surrogates, as in names of files that are not UTF-8: pytest-xdist cannot send them."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report
