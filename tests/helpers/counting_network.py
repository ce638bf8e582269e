"""A small network that notes each forward in a file, and takes its time, so that it can be killed in the middle."""

from __future__ import annotations

import os
import time

import torch


class CountingNetwork(torch.nn.Module):
    """Two logits of a 3D image. ``log`` gets one line a forward: the batch size."""

    def __init__(self, log: str, seconds: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.log = log
        self.seconds = seconds
        self.body = torch.nn.Sequential(
            torch.nn.Conv3d(1, 4, 3, stride=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool3d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(self.log, "a") as file:
            file.write(f"{len(x)}\n")
            file.flush()
            os.fsync(file.fileno())
        time.sleep(self.seconds)
        return self.body(x)
