"""Landmarks by regression, on the slices of a volume."""

from pathlib import Path

import numpy as np
import torch
from monai.inferers import Inferer
from monai.networks.nets import Regressor
from monai.transforms import MapTransform


class PointRegressor(Regressor):
    """A ``Regressor`` of points."""


class LandmarkInferer(Inferer):
    def __init__(self, spatial_dim=0, stack_dim=-1):
        self.spatial_dim = spatial_dim
        self.stack_dim = stack_dim

    def __call__(self, inputs, network, *args, **kwargs):
        if inputs.ndim != 5:
            raise ValueError(f"a volume (B, C, D, H, W) is expected, got {inputs.shape}")
        slices = inputs.unbind(self.spatial_dim + 2)
        return torch.stack([network(each, *args, **kwargs) for each in slices], self.stack_dim)


class NpySaverd(MapTransform):
    def __init__(self, keys, output_dir):
        super().__init__(keys)
        self.output_dir = Path(output_dir)

    def __call__(self, data):
        self.output_dir.mkdir(parents=True, exist_ok=True)
        for key in self.key_iterator(data):
            name = data[key].meta["filename_or_obj"]
            name = name[0] if isinstance(name, (list, tuple)) else name
            np.save(self.output_dir / Path(name).name.replace(".nii.gz", ".npy"), data[key].cpu().numpy())
        return data
