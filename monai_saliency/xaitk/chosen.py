"""xaitk-saliency's classes and objects as methods of this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from xaitk_saliency import PerturbImage

from monai_saliency.estimators.base import Estimator
from monai_saliency.estimators.occlusion import OcclusionScoring
from monai_saliency.inferers.inferer import PerturbationInferer
from monai_saliency.targets.base import Target
from monai_saliency.xaitk.black_box import WHOLE_METHODS, BlackBoxInferer
from monai_saliency.xaitk.masks import PerturbImageMasks

__all__ = ["as_method"]


def as_method(found: Any) -> Callable[..., PerturbationInferer] | None:
    """A function like those of :mod:`monai_saliency.methods`, of a class or an object of xaitk-saliency.

    - A ``GenerateImageClassifierBlackboxSaliency`` or ``GenerateObjectDetectorBlackboxSaliency`` is a whole method
      (:class:`BlackBoxInferer`).
    - A ``PerturbImage`` makes the masks (:class:`PerturbImageMasks`); ``OcclusionScoring()`` makes the map, unless an
      estimator is given. ``slices`` is the axis of volumes that is cut into slices.

    The settings of a class are its constructor's arguments; an object has none. The fill, the target and the other
    settings are those of all methods of this package, also where the constructor has arguments of these names.

    Args:
        found: the class or object.

    Returns:
        the method; None for anything else.

    Example::

        >>> from xaitk_saliency.impls.gen_image_classifier_blackbox_sal.rise import RISEStack
        >>> from monai_saliency import ClassScore
        >>> from monai_saliency.xaitk import as_method
        >>> as_method(RISEStack)(n=50, s=4, p1=0.5, seed=0, target=ClassScore([1], "softmax")).method.get_config()["n"]
        50
    """
    cls = found if inspect.isclass(found) else type(found)
    if not issubclass(cls, (*WHOLE_METHODS, PerturbImage)) or inspect.isabstract(cls):
        return None
    is_whole = issubclass(cls, WHOLE_METHODS)
    shared = {*inspect.signature(PerturbationInferer).parameters}
    own = list(inspect.signature(cls).parameters.values()) if found is cls else []
    own = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each.name not in shared]
    if not is_whole:
        own.append(inspect.Parameter("slices", inspect.Parameter.KEYWORD_ONLY, default=None))

    def method(*, target: Target, estimator: Estimator | None = None, **settings: Any) -> PerturbationInferer:
        given = {each.name: settings.pop(each.name) for each in own if each.name in settings}
        slices = given.pop("slices", None)
        try:
            made = cls(**given) if found is cls else found
        except (TypeError, ValueError) as error:
            raise ValueError(f"{cls.__name__} cannot be made of {given}: {error}") from error
        if is_whole:
            return BlackBoxInferer(made, target, estimator=estimator, **settings)
        return PerturbationInferer(PerturbImageMasks(made, slices), target, estimator or OcclusionScoring(), **settings)

    signature = inspect.signature(method)
    method.__signature__ = signature.replace(parameters=[*own, *signature.parameters.values()])  # type: ignore[attr-defined]
    method.__name__ = cls.__name__
    method.__doc__ = f"{cls.__name__} of xaitk-saliency."
    return method
