"""What is freed is kept, or given back: counted by the pages that the system had to give, and by what is resident."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers import fork_server

from monai_saliency.utils import allocator
from monai_saliency.utils.allocator import glibc, keep_freed_memory

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


def calls(*arguments: str) -> tuple[bool | None, float, str]:
    """What was returned, new memory of a call in parts of an output, and the output's hash."""
    done = fork_server.run(["-c", SCRIPT, *arguments], check=True)
    return tuple(json.loads(done.stdout or ""))


@pytest.mark.skipif(glibc() is None, reason="needs glibc")
@pytest.mark.slow
def test_few_new_pages_for_later_forwards() -> None:
    (_, plain, expected), (kept, new, output) = calls(), calls("cpu")
    assert kept is True
    assert output == expected
    assert plain > 1.9  # each of two convolutions has an output of its own
    assert new < plain / 4  # now and then a block does not fit where one was


@pytest.mark.skipif(glibc() is None, reason="needs glibc")
@pytest.mark.slow
def test_on_a_gpu_nothing_is_changed() -> None:
    kept, new, _ = calls("cuda")
    assert kept is False
    assert new > 1.9


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_left_alone(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert glibc() is None
    assert keep_freed_memory() is False


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:
        def mallopt(self, *_: int) -> int:
            raise AssertionError("is not glibc's")

        malloc_trim = mallopt

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: Musl())
    assert keep_freed_memory() is False


def test_a_device_is_checked() -> None:
    with pytest.raises(RuntimeError, match="Expected one of cpu"):
        keep_freed_memory("gpu")
    assert keep_freed_memory(torch.device("cuda", 1)) is False
