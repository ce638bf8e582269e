"""Clicks of several labels as channels of the image; in the batch they are lists without an entry for each image."""

import torch
from monai.transforms import MapTransform


class AddGuidanced(MapTransform):
    def __init__(self, keys, label_names):
        super().__init__(keys)
        self.label_names = label_names

    def __call__(self, data):
        d = dict(data)
        for key in self.keys:
            signal = torch.zeros(len(self.label_names), *d[key].shape[1:])
            for channel, label in enumerate(self.label_names):
                for point in d["guidance"][label]:
                    signal[(channel, *point)] = 1
            d[key] = torch.cat([d[key], signal])
        return d
