"""Masks for each channel, so that maps show which modality mattered, and where.

If a network needs two modalities at once, hiding either lowers the score, and both maps show it.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monai_saliency.masks.base import BoundMasks, Ids, Masks, Regions, Spacing
from monai_saliency.utils.arguments import instance
from monai_saliency.utils.tensors import Box, to_device


class ChannelMasks(Masks):
    """Masks that hide one channel at a time. Each mask of another family is applied to every channel in turn.

    Mask i applies the other family's mask ``i // C`` to channel ``i % C`` and keeps the other channels, so there are C
    times as many masks. Use with windows, or with regions hidden in turn, and
    :class:`~monai_saliency.estimators.OcclusionScoring`.

    Args:
        masks: the other family, such as ``SlidingWindowMasks``. Its masks must serve all channels.

    Example::

        >>> import torch
        >>> from monai_saliency.masks import ChannelMasks, SlidingWindowMasks
        >>> bound = ChannelMasks(SlidingWindowMasks((1, 2), (1, 2))).bind(torch.zeros(2, 1, 4))
        >>> bound.render(range(4)).shape  # 2 windows on each of 2 channels
        torch.Size([4, 2, 1, 4])
        >>> bound.render([1])[0, :, 0].tolist()  # the first window, on the second channel
        [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    """

    def __init__(self, masks: Masks) -> None:
        self.masks = instance("masks", masks, Masks, "masks such as SlidingWindowMasks(8)")
        self.by_region, self.needs_labels = masks.by_region, masks.needs_labels

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        return _BoundChannelMasks(self.masks.bind(image, labels, spacing), image)


class IndependentChannelMasks(Masks):
    """Random masks drawn independently for each channel, so that one forward gives information on all channels.

    Mask i has the other family's mask ``i * C + c`` on channel c, so there are as many masks as ``masks.num_masks``.
    Use with ``RISEMasks`` or random sets of regions, and :class:`~monai_saliency.estimators.RISEScoring`.

    Args:
        masks: the other family. It must have ``num_masks`` random masks.

    Raises:
        ValueError: when the other family's masks are not drawn at random.

    Example::

        >>> import torch
        >>> from monai_saliency.masks import IndependentChannelMasks, RISEMasks
        >>> IndependentChannelMasks(RISEMasks(5, grid_size=3)).bind(torch.zeros(4, 9, 8)).render(range(5)).shape
        torch.Size([5, 4, 9, 8])
    """

    def __init__(self, masks: Any) -> None:
        self.masks = instance("masks", masks, Masks, "masks such as RISEMasks(1000)")
        if getattr(masks, "num_masks", None) is None:
            raise ValueError(
                f"channels have independent masks only where masks are drawn at random, and {type(masks).__name__} has "
                "no `num_masks`: use ChannelMasks"
            )
        self.by_region, self.needs_labels = masks.by_region, masks.needs_labels

    def bind(self, image: Tensor, labels: Tensor | None = None, spacing: Spacing = None) -> BoundMasks:
        enough = copy.copy(self.masks)
        enough.num_masks = self.masks.num_masks * len(image)
        return _BoundIndependentChannelMasks(enough.bind(image, labels, spacing), image)


class _BoundMasksOfChannels(BoundMasks):
    """Masks ``(C, *spatial)`` made from masks ``(1, *spatial)`` of another family."""

    def __init__(self, base: BoundMasks, image: Tensor) -> None:
        super().__init__(image)
        if base.channels is not None or base.adaptive:
            raise ValueError(
                f"{base.key[0]} cannot be made channel by channel: they depend on earlier scores, or have masks for "
                "each channel or fill already: leave out `per_channel`"
            )
        self.base = base
        self.channels: int = len(image)
        self.key = (type(self).__name__, self.channels, *base.key)

    @property
    def regions(self) -> Regions | None:
        return self.base.regions

    @property
    def drawn(self) -> bool:
        return self.base.drawn


class _BoundChannelMasks(_BoundMasksOfChannels):
    def __len__(self) -> int:
        return len(self.base) * self.channels

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """The other family's codes, and ``channel``, int ``(n,)``: the channel that each mask hides a part of."""
        which, channel = np.divmod(np.asarray(ids, dtype=int), self.channels)
        return {**self.base.codes(which.tolist()), "channel": channel}

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        channel = to_device(codes["channel"], device)
        hidden = self.base._render_box({name: code for name, code in codes.items() if name != "channel"}, box, device)
        masks = hidden.new_ones(len(hidden), self.channels, *hidden.shape[2:])
        masks[torch.arange(len(hidden), device=device), channel] = hidden[:, 0]
        return masks


class _BoundIndependentChannelMasks(_BoundMasksOfChannels):
    def __len__(self) -> int:
        return len(self.base) // self.channels

    def codes(self, ids: Ids) -> dict[str, np.ndarray]:
        """The other family's codes, with an axis for the channels: ``(n, C, ...)``."""
        rows = np.asarray(ids, dtype=int)[:, None] * self.channels + np.arange(self.channels)
        codes = self.base.codes(rows.ravel().tolist())
        return {name: code.reshape(-1, self.channels, *code.shape[1:]) for name, code in codes.items()}

    def _render_box(self, codes: dict[str, np.ndarray], box: Box, device: torch.device) -> Tensor:
        flat = {name: code.reshape(-1, *code.shape[2:]) for name, code in codes.items()}
        return self.base._render_box(flat, box, device).unflatten(0, (-1, self.channels))[:, :, 0]
