"""What is freed is kept, or given back: counted by the pages that the system had to give, and by what is resident."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch
from helpers import fork_server
from helpers.heap import needs_glibc

import monai_saliency as ms
from monai_saliency.utils import allocator
from monai_saliency.utils.allocator import give_back_freed_memory, glibc, keep_freed_memory

# New pages of a network's later calls, and what it gives: its outputs of 40 MiB each are above all that glibc keeps.
SCRIPT = """
import hashlib, json, resource, sys
import torch
from monai_saliency.utils.allocator import keep_freed_memory

torch.set_num_threads(1)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Conv3d(1, 8, 1), torch.nn.ReLU(), torch.nn.Conv3d(8, 8, 1)).eval()
image = torch.rand(1, 1, 110, 110, 110)
kept = keep_freed_memory(sys.argv[1]) if sys.argv[1:] else None
with torch.no_grad():
    for _ in range(10):  # until the blocks that it needs have been taken
        output = network(image)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(30):
        output = network(image)
    pages = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 30
print(json.dumps([kept, pages * resource.getpagesize() / output.nbytes, hashlib.md5(output.numpy()).hexdigest()]))
"""

# MiB in use, with a hole of 200 MiB between blocks that are too small to be mappings of their own, and without. Files
# are not counted: pages of libraries come as they are used.
HOLES = """
import json
from pathlib import Path
import torch
from helpers.heap import gives_large_blocks_back
from monai_saliency.utils.allocator import give_back_freed_memory, keep_freed_memory

def resident():
    return next(int(line.split()[1]) / 1024 for line in Path("/proc/self/status").open() if line.startswith("RssAnon"))

keep_freed_memory()
before, early = resident(), give_back_freed_memory()
blocks = [torch.ones(25_000) for _ in range(2000)]
kept, blocks = blocks[-1], None
found = [resident() - before, give_back_freed_memory(), resident() - before, gives_large_blocks_back()]
print(json.dumps([early, *found, give_back_freed_memory(), float(kept.sum())]))
"""


def calls(*arguments: str) -> tuple[bool | None, float, str]:
    """What was returned, new memory of a call in parts of an output, and the output's hash."""
    done = fork_server.run(["-c", SCRIPT, *arguments], check=True)
    return tuple(json.loads(done.stdout or ""))


@needs_glibc
def test_few_new_pages_for_later_forwards() -> None:
    (_, plain, expected), (kept, new, output) = calls(), calls("cpu")
    assert kept is True
    assert output == expected
    assert plain > 1.9  # each of two convolutions has an output of its own
    assert new < plain / 4  # now and then a block does not fit where one was


@needs_glibc
def test_on_a_gpu_nothing_is_changed() -> None:
    kept, new, _ = calls("cuda")
    assert kept is False
    assert new > 1.9


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_left_alone(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert glibc() is None
    assert keep_freed_memory() is False
    assert give_back_freed_memory() is False


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:
        def mallopt(self, *_: int) -> int:
            raise AssertionError("is not glibc's")

        malloc_trim = mallopt

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: Musl())
    assert keep_freed_memory() is False
    assert give_back_freed_memory() is False


def test_a_device_is_checked() -> None:
    with pytest.raises(RuntimeError, match="Expected one of cpu"):
        keep_freed_memory("gpu")
    assert keep_freed_memory(torch.device("cuda", 1)) is False


@needs_glibc
def test_holes_are_given_back() -> None:
    """2000 blocks of 98 KiB, 191 MiB, of which all but the last are freed; not before, and not again at once."""
    done = fork_server.run(["-c", HOLES], check=True)
    early, held, was_given, left, gives_back, again, kept = json.loads(done.stdout or "")
    assert (early, was_given, again) == (False, True, False)
    assert held > 190
    assert left < 10
    assert gives_back is False  # large blocks are kept all the same
    assert kept == 25_000


def test_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 5 % more is held than after the first batch since it was last done, and once a hundred times as long has
    passed as it took; sooner where a fifth more is held than any such first batch left.
    """
    clock, held, times = [0.0], [0], []

    class Library:
        def malloc_trim(self, pad: int) -> int:
            assert pad == 0
            times.append(clock[0])
            clock[0] += 0.5
            return 1

    library = Library()
    monkeypatch.setattr(allocator, "glibc", lambda: library)
    monkeypatch.setattr(allocator, "_resident", lambda: held[0])
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    give_back = allocator._GiveBack()
    steps = [(1.0, 100, False), (2.0, 105, False), (3.0, 106, True)]
    steps += [(4.0, 100, False), (53.4, 119, False), (53.5, 105, False), (53.6, 106, True)]
    steps += [(60.0, 300, False), (61.0, 360, False), (62.0, 361, True)]  # a fifth more than ever
    steps += [(63.0, 100, False), (64.0, 350, False), (200.0, 110, True)]
    for clock[0], held[0], expected in steps:
        assert give_back() is expected
    assert times == [3.0, 53.6, 62.0, 200.0]


def test_a_system_that_hides_its_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def resident() -> int:
        raise FileNotFoundError("/proc/self/statm")

    monkeypatch.setattr(allocator, "glibc", lambda: pytest.fail)  # has no malloc_trim
    monkeypatch.setattr(allocator, "_resident", resident)
    give_back = allocator._GiveBack()
    assert [give_back(), give_back()] == [False, False]


@pytest.mark.parametrize("kind", ["one network", "an ensemble", "white box"])
def test_each_batch_of_images_gives_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when its scores are known."""
    calls = []
    monkeypatch.setattr("monai_saliency.inferers.inferer.give_back_freed_memory", lambda: calls.append(len(seen)))
    seen = []
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2)).eval()
    network.register_forward_hook(lambda *_: seen.append(1))
    target = ms.ClassScore([1], "softmax")
    explain = ms.integrated_gradients(target=target) if kind == "white box" else ms.rise(20, target=target)
    explained = ms.networks.Ensemble([network, network]) if kind == "an ensemble" else network
    for _ in range(2):
        explain(torch.rand(2, 1, 8, 8), explained)
    assert len(calls) == 2
    assert calls[-1] == len(seen) > calls[0]
