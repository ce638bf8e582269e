"""A user's own method: ten lines in a file of its own."""

from monai_saliency import PerturbationInferer
from monai_saliency.estimators import OcclusionScoring
from monai_saliency.masks import SlidingWindowMasks


def tiles(edge: int = 4, *, target, estimator=None, **settings):
    """Windows beside each other.

    Args:
        edge: of a tile, in voxels.
        target: which number is explained.
        estimator: makes the map.
        settings: shared by all methods.
    """
    return PerturbationInferer(SlidingWindowMasks(edge, edge), target, estimator or OcclusionScoring(), **settings)
