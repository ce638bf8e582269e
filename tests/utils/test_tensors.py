import gzip
import json
import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import monai.bundle
import pytest
import torch
from helpers.own_bundle import BATCHES, settings
from helpers.scans import write_scans

import monai_saliency as ms
from monai_saliency.utils.arguments import flag, voxels_of_mm
from monai_saliency.utils.tensors import blend, finite_between, keep_freed_memory


class TestBlend:
    def test_what_overflows_on_the_way_is_exact(self) -> None:
        fill, image = torch.tensor([[-3e38]]), torch.tensor([[3e38]])
        share = torch.tensor([0.0, 1.0])[:, None, None]
        assert blend(fill, image, share, finite_between(fill, image)).flatten().tolist() == [*fill[0], *image[0]]


class TestKeepFreedMemory:
    #: new pages of a network's later calls in parts of its output, which is larger than all that glibc keeps
    SCRIPT = """
import json, resource, sys, torch
from monai_saliency.utils.tensors import keep_freed_memory

torch.set_num_threads(1)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Conv3d(1, 8, 1), torch.nn.ReLU(), torch.nn.Conv3d(8, 8, 1)).eval()
image = torch.rand(1, 1, 110, 110, 110)
kept = keep_freed_memory(sys.argv[1])
with torch.no_grad():
    for count in (5, 12):  # the first ones take the blocks
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            output = network(image)
pages = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / count
print(json.dumps([kept, pages * resource.getpagesize() / output.nbytes, float(output.double().sum())]))
"""

    @pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
    @pytest.mark.slow
    def test_few_new_pages_for_later_forwards(self) -> None:
        def calls(device: str) -> list[float]:
            done = subprocess.run([sys.executable, "-c", self.SCRIPT, device], check=True, stdout=subprocess.PIPE)
            return json.loads(done.stdout)

        (left, plain, expected), (kept, new, output) = calls("cuda"), calls("cpu")
        assert (left, kept, output) == (False, True, expected)
        assert plain > 1.9  # each of two convolutions has an output of its own
        assert new < plain / 4  # now and then a block does not fit where one was

    def test_another_c_library_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
        assert keep_freed_memory() is False


def test_mm_do_not_depend_on_an_affines_rounding() -> None:
    for edge in (2.0, 2.00000002, 1.99999998):
        assert voxels_of_mm((15.0, 20.0), (edge, edge)) == (8, 10)


def test_sizes_in_mm_name_the_setting_that_gives_voxel_sizes() -> None:
    target = ms.ClassScore([0], "none")
    explain, images = ms.sliding_window(4, window_unit="mm", target=target), torch.rand(1, 1, 8, 8)
    network = lambda images: 9 * images.flatten(1)  # noqa: E731
    with pytest.raises(ValueError, match="sizes in mm need") as error:
        explain(images, network)
    named = re.findall("or `([a-z]+)` in mm", str(error.value))
    given = dict.fromkeys(named, (2.0, 2.0))
    assert torch.equal(explain(images, network, **given), ms.sliding_window(2, target=target)(images, network))


def test_a_command_lines_words_are_truth_values() -> None:
    assert [flag("strict", word) for word in ("true", "False", True, False)] == [True, False, True, False]
    with pytest.raises(ValueError, match="`strict` must be True or False, got 'no'"):
        flag("strict", "no")


# The trace that a flag gives.
STAGES = ["perturb", "forward", "read scores", "map", "save"]


def events(folder: Path) -> list[list[dict]]:
    """The finished operations of each trace file, oldest file first."""
    files = sorted(folder.glob("*.pt.trace.json.gz"), key=lambda path: path.stat().st_mtime_ns)
    traces = [json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in files]
    return [[event for event in trace if event["ph"] == "X"] for trace in traces]


def test_stages_and_operators_are_in_the_trace(tmp_path: Path) -> None:
    """Four cases of 8 batches each: with their maps and with their saving, which other threads do."""
    write_scans(tmp_path, 4)
    monai.bundle.run(**settings(tmp_path, "out", profile=str(tmp_path / "trace")))
    (trace,) = events(tmp_path / "trace")
    counts = Counter(event["name"] for event in trace)
    assert counts["saliency: forward"] == 4 * BATCHES < 50
    assert counts["aten::conv3d"] >= 4 * BATCHES
    assert set(counts) >= {f"saliency: {stage}" for stage in STAGES}
    threads = {name: {event["tid"] for event in trace if event["name"] == f"saliency: {name}"} for name in STAGES}
    assert threads["perturb"] == threads["forward"]
    assert not (threads["map"] | threads["save"]) & threads["forward"]


def test_a_trace_ends_after_50_batches(tmp_path: Path) -> None:
    """So that it stays small, whatever the number of masks."""
    write_scans(tmp_path, 2)
    monai.bundle.run(**settings(tmp_path, "out", num_masks=120, profile=str(tmp_path / "trace")))
    (trace,) = events(tmp_path / "trace")
    counts = Counter(event["name"] for event in trace)
    assert counts["saliency: forward"] == 50
    assert counts["saliency: map"] == 1
