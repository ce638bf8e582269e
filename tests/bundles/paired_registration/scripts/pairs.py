"""A registration of pairs that the evaluator puts together, the fixed image first."""

import torch


def prepare_batch(batch, device=None, non_blocking=False, **kwargs):
    pair = torch.cat([batch["fixed"], batch["moving"]], dim=1)
    return pair.to(device), batch["fixed"].to(device)


class Register(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.displacement = torch.nn.Sequential(
            torch.nn.Conv3d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(4, 3, 3, padding=1), torch.nn.Tanh()
        )

    def forward(self, pair):
        moving = pair[:, 1:]
        identity = torch.eye(3, 4, device=pair.device).expand(len(pair), -1, -1)
        grid = torch.nn.functional.affine_grid(identity, moving.shape, align_corners=False)
        grid = grid + 0.2 * self.displacement(pair).movedim(1, -1)
        return torch.nn.functional.grid_sample(moving, grid, align_corners=False)
