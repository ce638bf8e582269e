"""Masks of a scan's channels, so that a map says which modality mattered, and where.

A multi-modal scan holds its modalities (T1, T1c, T2, FLAIR) as channels. Here a mask is ``(C, *spatial)``, and every
channel gets a map of its own. Maps of channels add up to the map of all channels hidden together only where the score
is a sum over the channels; a network that needs two modalities at once falls for either, and their maps overlap.

MC-RISE (Hatakeyama et al., ACCV 2020), which tells colours apart too, is another method: all its masks hide all
channels, and its maps say which of several *fills* a score is sensitive to.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from monai_saliency.masks.base import BoundMasks, Masks, Regions

__all__ = ["ChannelMasks", "IndependentChannelMasks"]


class ChannelMasks(Masks):
    """Every mask of another family, on one channel at a time: C times as many, the others kept whole.

    For windows, and for regions hidden in turn, with :class:`~monai_saliency.OcclusionScoring`. Mask i is the other
    family's mask ``i // C`` on channel ``i % C``.

    Args:
        masks: the other family.
    """

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self.by_region, self.needs_labels = masks.by_region, masks.needs_labels

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        return _BoundChannelMasks(self.masks.bind(image, labels, spacing), image)


class IndependentChannelMasks(Masks):
    """Random masks drawn for each channel on its own: one forward tells of all channels.

    For :class:`~monai_saliency.RISEMasks` and random coalitions of regions, with
    :class:`~monai_saliency.RISEScoring`. Mask i has the other family's mask ``i * C + c`` on channel c, so there are as
    many masks as the other family names, and more of one seed continue the fewer.

    Args:
        masks: the other family.

    Raises:
        ValueError: when its masks are not drawn at random.
    """

    def __init__(self, masks: Any) -> None:
        if getattr(masks, "num_masks", None) is None:
            raise ValueError(
                f"channels have independent masks only where masks are drawn at random, and {type(masks).__name__} has "
                "no `num_masks`: use ChannelMasks"
            )
        self.masks = masks
        self.by_region, self.needs_labels = masks.by_region, masks.needs_labels

    def bind(
        self, image: torch.Tensor, labels: torch.Tensor | None = None, spacing: Sequence[float] | None = None
    ) -> BoundMasks:
        enough = copy.copy(self.masks)
        enough.num_masks = self.masks.num_masks * len(image)
        return _BoundIndependentChannelMasks(enough.bind(image, labels, spacing), image)


class _BoundMasksOfChannels(BoundMasks):
    """Masks ``(C, *spatial)`` made of another family's ``(1, *spatial)``."""

    def __init__(self, base: BoundMasks, image: torch.Tensor) -> None:
        super().__init__(image)
        if base.channels is not None:
            raise ValueError("the masks hide channels one by one already: give the masks of whole images")
        if base.in_rounds:
            raise ValueError("masks that depend on earlier scores cannot be made channel by channel")
        self.base = base
        self.channels: int = len(image)
        self.key = (type(self).__name__, self.channels, *base.key)

    @property
    def regions(self) -> Regions | None:
        return self.base.regions


class _BoundChannelMasks(_BoundMasksOfChannels):
    def __len__(self) -> int:
        return len(self.base) * self.channels

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Those of the other family's masks, and ``channel`` int ``(n,)``."""
        which, channel = np.divmod(np.asarray(indices, dtype=int), self.channels)
        return {**self.base.codes(which.tolist()), "channel": channel}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        channel = torch.from_numpy(codes["channel"]).to(device)
        hidden = self.base._render({name: code for name, code in codes.items() if name != "channel"}, device)
        masks = hidden.new_ones(len(hidden), self.channels, *self.spatial_shape)
        masks[torch.arange(len(hidden), device=device), channel] = hidden[:, 0]
        return masks


class _BoundIndependentChannelMasks(_BoundMasksOfChannels):
    def __len__(self) -> int:
        return len(self.base) // self.channels

    def codes(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Those of the other family's masks, each ``(n, C, ...)``."""
        if isinstance(indices, range) and indices.step == 1:
            rows: Sequence[int] = range(indices.start * self.channels, indices.stop * self.channels)
        else:
            rows = (np.asarray(indices, dtype=int)[:, None] * self.channels + np.arange(self.channels)).ravel().tolist()
        codes = self.base.codes(rows)
        return {name: code.reshape(-1, self.channels, *code.shape[1:]) for name, code in codes.items()}

    def _render(self, codes: dict[str, np.ndarray], device: torch.device) -> torch.Tensor:
        flat = {name: code.reshape(-1, *code.shape[2:]) for name, code in codes.items()}
        return self.base._render(flat, device).reshape(-1, self.channels, *self.spatial_shape)
