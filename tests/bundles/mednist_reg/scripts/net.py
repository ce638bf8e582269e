"""A registration of pairs: the moving image, moved by a displacement that both give."""

import torch


class Register(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.displacement = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3, padding=1), torch.nn.Tanh()
        )

    def forward(self, pair):
        moving = pair[:, :1]
        identity = torch.eye(2, 3, device=pair.device).expand(len(pair), -1, -1)
        grid = torch.nn.functional.affine_grid(identity, moving.shape, align_corners=False)
        grid = grid + 0.2 * self.displacement(pair).movedim(1, -1)
        return torch.nn.functional.grid_sample(moving, grid, align_corners=False)
