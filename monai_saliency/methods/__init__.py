"""The methods, each named by its four parts: masks, fill, target and estimator. Read them beside the papers.

Each is a function whose own settings come first, then ``*, target, estimator=None, **settings``. Its signature is the
one place where a method is written: configs, the overlay, the SLURM job and the tracker read its ids, defaults and help
from there (:mod:`monai_saliency.bundle.chosen_method`). A function of your own with such a signature works wherever
these do, by its dotted path.

``settings`` are the arguments that all methods share. They are passed on to
:class:`~monai_saliency.inferers.inferer.PerturbationInferer`:

- ``fill``: what replaces hidden voxels (:mod:`monai_saliency.fills`), zeros by default;
- ``inferer``: the MONAI inferer that runs the network on a batch, ``SimpleInferer`` by default;
- ``mask_batch_size``: perturbed images in one network batch, at most; ``"auto"`` decides it by the image;
- ``inputs``: how the network takes several inputs, and which are perturbed (:mod:`monai_saliency.networks.inputs`);
- ``output``: which part of a structured output is read (:mod:`monai_saliency.networks.outputs`);
- ``progress``: whether to show a progress bar;
- ``patch_memory``: under a ``SlidingWindowInferer``, what is remembered of its patches
  (:mod:`monai_saliency.inferers.patches`); False runs whole images for every mask.

Example::

    def my_method(size: int = 5, *, target, estimator=None, **settings):
        '''Windows beside each other.'''
        return PerturbationInferer(SlidingWindowMasks(size, size), target, estimator or OcclusionScoring(), **settings)

    # python -m monai.bundle run ... --method my_package.my_method --size 7
"""

from __future__ import annotations

from monai_saliency.methods.dependence import hsic, sobol
from monai_saliency.methods.detection import drise
from monai_saliency.methods.fills import mc_rise
from monai_saliency.methods.gradients import grad_cam, integrated_gradients, smoothgrad
from monai_saliency.methods.random_masks import focused_rise, random_grid, rise
from monai_saliency.methods.regions import channel_occlusion, region_occlusion, shapley
from monai_saliency.methods.windows import (
    hierarchical_occlusion,
    minimal_region,
    multi_scale_window,
    patch_windows,
    sbsm,
    sliding_radial,
    sliding_window,
    squared_difference,
)

__all__ = [
    "rise",
    "sliding_window",
    "patch_windows",
    "hierarchical_occlusion",
    "focused_rise",
    "region_occlusion",
    "channel_occlusion",
    "shapley",
    "hsic",
    "sobol",
    "minimal_region",
    "mc_rise",
    "random_grid",
    "multi_scale_window",
    "sliding_radial",
    "squared_difference",
    "sbsm",
    "drise",
    "integrated_gradients",
    "smoothgrad",
    "grad_cam",
]
