"""An inferer that runs a detector rather than its network."""

import numpy as np
from monai.inferers import Inferer


class RetinaNetInferer(Inferer):
    def __init__(self, detector):
        super().__init__()
        self.detector = detector
        self.window = np.prod(detector.inferer.roi_size) if detector.inferer is not None else None

    def __call__(self, inputs, network, *args, **kwargs):
        self.detector.network = network
        self.detector.training = network.training
        large = self.window is not None and any(image[0].numel() >= self.window for image in inputs)
        return self.detector(inputs, *args, use_inferer=large, **kwargs)
