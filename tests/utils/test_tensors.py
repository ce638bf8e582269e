from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest
import torch
from monai.data import MetaTensor

from monai_saliency.utils.tensors import blend, finite_between, keep_freed_memory, plain


class TestPlain:
    def test_a_meta_tensors_own_memory(self) -> None:
        image = MetaTensor(torch.zeros(2, 3))
        tensor = plain(image)
        assert type(tensor) is torch.Tensor
        tensor[1, 2] = 7
        assert image[1, 2] == 7

    def test_anything_else_as_it_is(self) -> None:
        for value in (torch.ones(3), [MetaTensor(torch.ones(1))], None):
            assert plain(value) is value


class TestBlend:
    def test_finite_values_as_lerp_gives_them(self) -> None:
        fill, image = torch.randn(2, 3, 5, 4)
        share = torch.rand(6, 1, 5, 4).round(decimals=1)
        assert finite_between(fill, image)
        expected = torch.lerp(fill, image, share)
        for is_finite in (True, False):  # to the bit
            assert torch.equal(blend(fill, image, share, is_finite), expected)

    def test_what_is_not_finite_counts_where_it_is_kept(self) -> None:
        nan, inf = float("nan"), float("inf")
        image = torch.tensor([[nan, inf, -inf, 5.0]])
        fill, share = torch.ones(1, 4), torch.tensor([0.0, 0.25, 0.75, 1.0])[:, None, None]
        assert not finite_between(fill, image)
        out = torch.zeros(4, 2, 4)[:, :1]
        blend(fill, image, share, False, out=out)
        expected = torch.tensor([[1.0, 1, 1, 1], [nan, inf, -inf, 2], [nan, inf, -inf, 4], [nan, inf, -inf, 5]])
        assert torch.equal(out[:, 0].nan_to_num(77), expected.nan_to_num(77))

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
    for count in (10, 30):  # the first ones take the blocks
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
