"""A network whose answer is how bright the brightest part of an image is."""

import torch


class Brightness(torch.nn.Module):
    """Two logits: 0, and the largest mean over a window of the image.

    Args:
        spatial_dims: of the images, 2 or 3.
        window: edge of the window, in voxels.
    """

    def __init__(self, spatial_dims: int = 2, window: int = 4) -> None:
        super().__init__()
        self.pool = (torch.nn.AvgPool2d if spatial_dims == 2 else torch.nn.AvgPool3d)(window, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``(B, 1, *spatial)`` -> ``(B, 2)``."""
        score = self.pool(image.mean(1, keepdim=True)).flatten(1).amax(1)
        return torch.stack([torch.zeros_like(score), score], dim=1)
