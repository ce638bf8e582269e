"""Maps with a known peak, and where their voxels lie."""

import numpy as np

SHAPE = (7, 9, 6)
PEAK = (5, 2, 1)
#: x runs to the left, spacing 2, 1, 3 mm
LEFTWARD = np.array([[-2.0, 0, 0, 10], [0, 1, 0, -20], [0, 0, 3, 30], [0, 0, 0, 1]])


def volume(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def peaked() -> np.ndarray:
    saliency = volume(1).clip(-1, 1)
    saliency[PEAK] = 4
    return saliency
