"""What the plug-ins have in common: configuration, checks, and the contracts by which the engine reads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np
from smqtk_core.configuration import Configurable, from_config_dict, make_default_config, to_config_dict
from typing_extensions import Self
from xaitk_saliency import GenerateClassifierConfidenceSaliency, PerturbImage

if TYPE_CHECKING:
    from monai_saliency.estimators.base import Estimator
    from monai_saliency.masks.base import Masks

__all__ = [
    "Configured",
    "EnginePerturber",
    "EngineScoring",
    "Fill",
    "Parts",
    "Stack",
    "check_counts",
    "check_k",
    "check_p1",
    "pair",
    "scaled",
]

#: what replaces hidden pixels, in the image's own unit: nothing (zeros), a number, one a channel, or an image
Fill: TypeAlias = "int | Sequence[int] | np.ndarray | None"

_Number = TypeVar("_Number", int, float)


class Configured(Configurable):
    """An object whose configuration is its constructor's arguments, each held as an attribute of the same name."""

    @classmethod
    def get_default_config(cls) -> dict[str, Any]:
        """The constructor's defaults, as JSON has them."""
        return {name: _as_json(value) for name, value in super().get_default_config().items()}

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON has them."""
        return {name: _as_json(getattr(self, name)) for name in self.get_default_config()}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class EnginePerturber(Configured, PerturbImage):
    """A perturber whose masks the engine renders a few at a time, so that no black box needs all of them at once.

    Attributes:
        device: where masks are made, such as ``"cuda"``; None for a GPU where there is one. To be set at run time.
        mask_type: NumPy's type of the masks.
    """

    device: str | None = None
    mask_type: type[np.generic] = np.float32

    @abstractmethod
    def masks(self, shape: Sequence[int]) -> Masks:
        """The engine's masks.

        Args:
            shape: the image's height and width.
        """

    def perturb(self, ref_image: np.ndarray) -> np.ndarray:
        """All masks at once, as the interface asks for them.

        Args:
            ref_image: ``(H, W)`` or ``(H, W, C)``.

        Returns:
            ``(masks, H, W)`` in [0, 1]: 1 keeps a pixel, 0 hides it.
        """
        from monai_saliency.xaitk.arrays import rendered

        return rendered(self.masks(ref_image.shape[:2]), ref_image, self.mask_type, self.device)


class EngineScoring(Configured, GenerateClassifierConfidenceSaliency):
    """A scoring that is an estimator of the engine, which reads masks a few at a time.

    Attributes:
        device: where maps are made, such as ``"cuda"``; None for a GPU where there is one. To be set at run time.
    """

    device: str | None = None

    @abstractmethod
    def estimator(self) -> Estimator:
        """The engine's estimator."""

    def scores(self, reference: np.ndarray, perturbed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the estimator reads of the black box's confidences: these, by default.

        Args:
            reference: ``(K,)``, of the image.
            perturbed: ``(masks, K)``.

        Returns:
            scores of the image and of the masks, of these shapes, with their own K.

        Raises:
            ValueError: when they do not fit each other.
        """
        return reference, perturbed

    def finished(self, maps: np.ndarray) -> np.ndarray:
        """Scale maps ``(K, H, W)`` to [-1, 1], as the interface asks for."""
        return scaled(maps)

    def generate(self, reference: np.ndarray, perturbed: np.ndarray, perturbed_masks: np.ndarray) -> np.ndarray:
        """Maps from confidences and masks.

        Args:
            reference: ``(K,)``, the confidences of the image.
            perturbed: ``(masks, K)``, the confidences of the perturbed images.
            perturbed_masks: ``(masks, H, W)`` in [0, 1].

        Returns:
            ``(K, H, W)`` in [-1, 1].

        Raises:
            ValueError: when the numbers of masks or classes do not agree.
        """
        from monai_saliency.xaitk.arrays import maps_of

        reference, scores = self.scores(reference, perturbed)
        check_counts(scores, perturbed_masks)
        return self.finished(maps_of(self.estimator(), reference, scores, perturbed_masks, self.device))


class Parts(Configurable):
    """A method that is made of a perturber and a scoring.

    Where both are of this package, no more than a few masks exist at a time.

    Attributes:
        interface: the scoring's interface.
        fill: what replaces hidden pixels, in the image's unit: a number, one per channel, or an image; None for zeros.
            May be set at run time.
        device: where masks and maps are made, such as ``"cuda"``; None for a GPU where there is one. To be set at run
            time.
    """

    interface: ClassVar[type[Any]]
    device: str | None = None

    def __init__(self, perturber: PerturbImage, generator: Any, fill: Fill = None, threads: int | None = None) -> None:
        self._perturber = perturber
        self._generator = generator
        self._threads = threads
        self.fill: Any = fill

    @classmethod
    def get_default_config(cls) -> dict[str, Any]:
        """The constructor's defaults, with those of all perturbers and scorings there are."""
        return {
            **super().get_default_config(),
            "perturber": make_default_config(PerturbImage.get_impls()),
            "generator": make_default_config(cls.interface.get_impls()),
        }

    @classmethod
    def from_config(cls, config_dict: dict[str, Any], merge_default: bool = True) -> Self:
        """The object with a configuration as :meth:`get_config` gives it."""
        made = {
            "perturber": from_config_dict(config_dict["perturber"], PerturbImage.get_impls()),
            "generator": from_config_dict(config_dict["generator"], cls.interface.get_impls()),
        }
        return super().from_config({**config_dict, **made}, merge_default=merge_default)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON has them."""
        return {
            "perturber": to_config_dict(self._perturber),
            "generator": to_config_dict(self._generator),
            "fill": self.fill,
            "threads": self._threads,
        }


class Stack(Configured):
    """A method whose perturber and scoring belong together, in :attr:`_po`."""

    _po: Any

    @abstractmethod
    def __init__(self) -> None: ...

    @property
    def fill(self) -> Any:
        """What replaces hidden pixels, see :class:`Parts`."""
        return self._po.fill

    @fill.setter
    def fill(self, value: Fill) -> None:
        self._po.fill = value

    @property
    def device(self) -> str | None:
        """Where masks and maps are made, see :class:`Parts`."""
        return self._po.device

    @device.setter
    def device(self, value: str | None) -> None:
        self._po.device = value


def scaled(maps: np.ndarray) -> np.ndarray:
    """Each map ``(H, W)`` of several divided by its largest magnitude; a map of zeros stays."""
    largest = np.abs(maps).max(axis=(-2, -1), keepdims=True)
    return maps / np.where(largest > 0, largest, 1.0)


def check_counts(perturbed: np.ndarray, masks: np.ndarray, what: str = "confidence lengths") -> None:
    """Refuse another number of rows than masks."""
    if len(perturbed) != len(masks):
        raise ValueError(
            f"Number of perturbation masks and respective {what} do not match. Got {len(masks)} masks and "
            f"{len(perturbed)} rows"
        )


def check_p1(p1: float) -> float:
    """Refuse a probability outside [0, 1]."""
    if not 0 <= p1 <= 1:
        raise ValueError(f"Input p1 value of {p1} is not within the expected [0,1] range.")
    return p1


def check_k(k: int) -> int:
    """Refuse a number of fills below 1."""
    if k < 1:
        raise ValueError(f"Input k value of {k} is not within the expected >0 range.")
    return k


def pair(name: str, value: Sequence[Any], kind: Callable[[Any], _Number]) -> tuple[_Number, _Number]:
    """Two numbers, for rows and for columns."""
    if len(value) != 2:
        raise ValueError(f"`{name}` must be two numbers, for height and width, got {value!r}")
    return kind(value[0]), kind(value[1])
