"""The methods, each named by its four parts: masks, fill, target and estimator. Read them with the papers.

Each is a function whose own settings come first, then ``*, target, estimator=None, **settings``. Configs, the overlay,
the SLURM job and the tracker read its ids, defaults and help from its signature; a function of your own with such a
signature works wherever these do, by its dotted path, as in ``--method my_package.my_method --size 7``.

``settings`` are the arguments that all methods share, those of
:class:`~monai_saliency.inferers.inferer.PerturbationInferer`: ``fill``, ``inferer``, ``mask_batch_size``, ``inputs``,
``output``, ``progress`` and ``patch_memory``.
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
