"""The methods, each named by its four parts: masks, fill, target and estimator. Read them with the papers.

Each is a function whose own settings come first, then ``*, target, estimator=None, **settings``. Configs, the overlay,
the SLURM job and the tracker read its ids, defaults and help from its signature; a function of your own with such a
signature works wherever these do, by its dotted path, as in ``--method my_package.my_method --size 7``.

``target`` is which number is explained; ``settings`` are the arguments that all methods share, the arguments of
:class:`~monai_saliency.inferers.inferer.PerturbationInferer`: ``fill``, ``inferer``, ``mask_batch_size``, ``inputs``,
``output``, ``progress`` and ``patch_memory``.
"""

from __future__ import annotations

from monai_saliency.methods import gradients, random_masks, regions, windows
from monai_saliency.methods.gradients import *  # noqa: F403
from monai_saliency.methods.random_masks import *  # noqa: F403
from monai_saliency.methods.regions import *  # noqa: F403
from monai_saliency.methods.windows import *  # noqa: F403

__all__ = [*random_masks.__all__, *windows.__all__, *regions.__all__, *gradients.__all__]
