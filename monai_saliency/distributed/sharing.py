"""What inferers that share another one's masks have in common: its settings."""

from __future__ import annotations

from typing import Any

from monai_saliency.inferers.inferer import PerturbationInferer

__all__ = ["SharingInferer"]


class SharingInferer(PerturbationInferer):
    """Explains as another inferer does, sharing its masks out. Who reads or sets one of its settings does so there.

    Args:
        inferer: what explains, kept as ``whole``.
    """

    whole: PerturbationInferer

    def __init__(self, inferer: PerturbationInferer) -> None:
        # Without the settings of `PerturbationInferer`, which would hide those of the one inside.
        self.__dict__["whole"] = inferer

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # not there yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self.whole):
            setattr(self.whole, name, value)
        else:
            super().__setattr__(name, value)
