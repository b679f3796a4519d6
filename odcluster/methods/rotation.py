"""Rotation prediction (Gidaris et al. 2018): turn an image by 0, 90, 180 or 270 degrees, predict which."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from odcluster.config import Config
from odcluster.methods.interface import Batch, Outcome
from odcluster.methods.pretext import Pretext
from odcluster.models.backbones import Backbone
from odcluster.models.heads import RotationHead
from odcluster.ranks import SINGLE, Ranks

TURNS = 4


def turn(images: Tensor, quarters: Tensor) -> Tensor:
    """Rotate each square image [B, C, S, S] counter-clockwise by its number of quarter turns."""
    turned = images.clone()
    for quarter in range(1, TURNS):
        chosen = quarters == quarter
        turned[chosen] = torch.rot90(images[chosen], quarter, dims=(2, 3))
    return turned


def one_turn_each(images: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """One rotation per image, by its place in the batch, all four equally often: one forward pass per image."""
    quarters = places % TURNS
    return turn(images, quarters), quarters


def all_turns(images: Tensor) -> tuple[Tensor, Tensor]:
    """All four rotations of every image in one batch, as published."""
    quarters = torch.arange(TURNS, device=images.device).repeat_interleave(len(images))
    return turn(images.repeat(TURNS, 1, 1, 1), quarters), quarters


class Rotation(Pretext):
    """The pretext task as a method of its own."""

    def __init__(self, backbone: Backbone, num_samples: int, config: Config, ranks: Ranks = SINGLE) -> None:
        super().__init__(backbone, config, ranks)
        self.head = RotationHead(backbone.num_features)

    def forward(self, batch: Batch) -> Outcome:
        images, quarters = all_turns(batch.images.flatten(0, 1))
        logits = self.head(self.backbone(images)).float()
        self.accuracy = (logits.detach().argmax(dim=1) == quarters).float().mean()
        return Outcome(batch.fair(functional.cross_entropy(logits, quarters)))
