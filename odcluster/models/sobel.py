"""The Sobel filter in front of a network: only edges pass, so that colour cannot be a shortcut (Caron et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from odcluster.models.backbones import Backbone

HORIZONTAL = ((1.0, 0.0, -1.0), (2.0, 0.0, -2.0), (1.0, 0.0, -1.0))
"""Left minus right; its transpose is top minus bottom."""


class Sobel(nn.Module):
    """Normalised images [B, 3, H, W] to the two gradients [B, 2, H, W] of their grey, the mean of the channels.

    As published: zeros around the image, hence gradients along its border. Nothing is learned and nothing is saved.
    Computed in float32 whatever the precision around it: differences of neighbours are what half precision loses.
    """

    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        horizontal = torch.tensor(HORIZONTAL)
        self.register_buffer("filters", torch.stack((horizontal, horizontal.T))[:, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            grey = images.float().mean(dim=1, keepdim=True)  # [B, 1, H, W]
            return functional.conv2d(grey, self.filters.float(), padding=1)


def represent(backbone: Backbone) -> Callable[[Tensor], Tensor]:
    """Features of normalised RGB images, whatever the backbone takes: gradients are made for one of two channels."""
    if backbone.in_channels != 2:
        return backbone
    return nn.Sequential(Sobel().to(next(backbone.parameters()).device), backbone)
