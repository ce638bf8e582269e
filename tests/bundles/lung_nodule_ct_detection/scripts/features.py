"""A small feature pyramid with two levels."""

from torch import nn


class Pyramid(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.out_channels = channels
        self.fine = nn.Conv3d(1, channels, 3, stride=4, padding=1)
        self.coarse = nn.Conv3d(channels, channels, 3, stride=2, padding=1)

    def forward(self, images):
        fine = self.fine(images).relu()
        return [fine, self.coarse(fine).relu()]
