"""The seam around a network's calls."""

from __future__ import annotations

import threading

import torch

from monai_saliency.inferers.forward import evaluating


def test_threads_that_share_a_module_leave_it_in_evaluation_mode_until_the_last_is_done() -> None:
    """Or the one that ends first trains the module under the others."""
    norm = torch.nn.BatchNorm1d(2)
    frozen = torch.nn.Dropout().eval()
    network = torch.nn.Sequential(norm, frozen)
    entered, first_is_done, modes = threading.Event(), threading.Event(), []

    def other() -> None:
        with evaluating(torch.nn.Sequential(network)):  # another module around the same parts
            entered.set()
            assert first_is_done.wait(30)
            modes.append([part.training for part in (network, norm, frozen)])

    thread = threading.Thread(target=other)
    with evaluating(network):
        thread.start()
        assert entered.wait(30)
    first_is_done.set()
    thread.join(30)
    assert modes == [[False, False, False]]
    assert [part.training for part in (network, norm, frozen)] == [True, True, False]
