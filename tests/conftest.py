from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

# A shell starts what it runs in the background with Ctrl-C ignored, and processes pass that on to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors on one thread: faster, and no test leaves another count behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
