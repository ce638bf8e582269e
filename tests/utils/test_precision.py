"""Full precision for the arithmetic of this package, while the network keeps what its user has chosen."""

import threading
import time
import types

import pytest
import torch

from monai_saliency.utils.precision import exact_arithmetic, is_shared


def test_tf32_is_off_while_any_thread_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is the whole process's: the last thread that leaves switches it on again. A network that runs
    meanwhile keeps its convolutions; where it would not keep its products, nothing may run beside it.
    """
    matmul, conv = (types.SimpleNamespace(fp32_precision="tf32") for _ in range(2))
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends.cudnn, "conv", conv)
    seen: list[tuple[str, str]] = []

    def compute() -> None:
        for _ in range(50):
            with exact_arithmetic(torch.device("cuda")):
                time.sleep(0.0005)
                seen.append((matmul.fp32_precision, conv.fp32_precision))

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [("ieee", "tf32")] * 200
    assert (matmul.fp32_precision, conv.fp32_precision) == ("tf32", "tf32")
    assert is_shared(torch.device("cuda"))
    assert not is_shared(torch.device("cpu"))
    matmul.fp32_precision = "none"
    assert not is_shared(torch.device("cuda"))
