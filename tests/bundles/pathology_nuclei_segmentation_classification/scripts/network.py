"""A network with HoVerNet's three outputs, on the middle of its input."""

from torch import nn


class SmallHoVerNet(nn.Module):
    def __init__(self, mode, in_channels, out_classes):
        super().__init__()
        self.margin = {"fast": 8, "original": 12}[mode]
        self.features = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.branches = nn.ModuleDict(
            {
                "nucleus_prediction": nn.Conv2d(8, 2, 3, padding=1),
                "horizontal_vertical": nn.Conv2d(8, 2, 3, padding=1),
                "type_prediction": nn.Conv2d(8, out_classes, 3, padding=1),
            }
        )

    def forward(self, images):
        features = self.features(images).relu()
        middle = slice(self.margin, -self.margin)
        return {name: branch(features)[..., middle, middle] for name, branch in self.branches.items()}
