"""A transform that is called with a key but is not what MONAI expects of one: it has no ``allow_missing_keys``."""

import torch
from monai.transforms import MapTransform


class AddClicksd(MapTransform):
    def __init__(self, image, foreground):
        self.keys = (image,)
        self.foreground = foreground

    def __call__(self, data):
        d = dict(data)
        image = d[self.keys[0]]
        clicks = torch.zeros_like(image[:1])
        for x, y in d[self.foreground]:
            clicks[0, x, y] = 1
        d[self.keys[0]] = torch.cat([image, clicks])[None]  # one patch: its own axis comes first
        return d
