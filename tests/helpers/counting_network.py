"""A small network that notes each forward in a file, and takes its time, so that it can be killed in the middle."""

import os
import time

import torch
from torch import nn


class CountingNetwork(nn.Module):
    """Two logits of a 3D image. ``log`` gets one line a forward: the batch size."""

    def __init__(self, log: str, seconds: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.log = log
        self.seconds = seconds
        self.body = nn.Sequential(
            nn.Conv3d(1, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(32, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(self.log, "a") as file:
            file.write(f"{len(x)}\n")
            file.flush()
            os.fsync(file.fileno())
        time.sleep(self.seconds)
        return self.body(x)
