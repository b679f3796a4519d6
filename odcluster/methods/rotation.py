"""Rotation prediction (Gidaris et al. 2018): turn an image by 0, 90, 180 or 270 degrees, predict which."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from odcluster.config import Config
from odcluster.methods.interface import Batch, Outcome, Phase, Survey
from odcluster.models.backbones import Backbone
from odcluster.models.heads import RotationHead

TURNS = 4


def turn(images: Tensor, quarters: Tensor) -> Tensor:
    """Rotate each square image [B, C, S, S] counter-clockwise by its number of quarter turns."""
    turned = images.clone()
    for quarter in range(1, TURNS):
        chosen = quarters == quarter
        turned[chosen] = torch.rot90(images[chosen], quarter, dims=(2, 3))
    return turned


def one_turn_each(images: Tensor) -> tuple[Tensor, Tensor]:
    """One rotation per image, all four equally often: as many forward passes as there are images."""
    quarters = torch.arange(len(images), device=images.device) % TURNS
    return turn(images, quarters), quarters


def all_turns(images: Tensor) -> tuple[Tensor, Tensor]:
    """All four rotations of every image in one batch, as published."""
    quarters = torch.arange(TURNS, device=images.device).repeat_interleave(len(images))
    return turn(images.repeat(TURNS, 1, 1, 1), quarters), quarters


class Rotation(nn.Module):
    """The pretext task as a method of its own."""

    def __init__(self, backbone: Backbone, num_samples: int, config: Config) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.head = RotationHead(backbone.num_features)

    def phases(self) -> list[Phase]:
        return [Phase("rotation", *whole_run(self.config))]

    def begin_epoch(self, epoch: int, survey: Survey) -> Mapping[str, float]:
        return {}

    def epoch_order(self, epoch: int) -> None:
        return None

    def forward(self, batch: Batch) -> Outcome:
        images, quarters = all_turns(batch.images.flatten(0, 1))
        logits = self.head(self.backbone(images)).float()
        self.accuracy = (logits.detach().argmax(dim=1) == quarters).float().mean()
        return Outcome(functional.cross_entropy(logits, quarters))

    def after_step(self, batch: Batch, outcome: Outcome) -> Mapping[str, Tensor | float]:
        return {"accuracy": self.accuracy}

    def end_epoch(self, epoch: int) -> None:
        return None

    def health(self) -> Mapping[str, float]:
        return {}


def whole_run(config: Config) -> tuple[int, float, float, str, float]:
    """The fields of a phase that lasts the whole run."""
    assert config.epochs is not None, "the configuration is not resolved"
    assert config.lr is not None, "the configuration is not resolved"
    optimiser = config.optimiser
    return config.epochs, config.lr, optimiser.weight_decay, optimiser.schedule, optimiser.warmup_epochs
