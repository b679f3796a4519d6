"""A small network, and its features of small images on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odcluster.data.sources import Source
from odcluster.errors import Interrupted
from odcluster.evaluation.features import extract_features
from odcluster.evaluation.store import FeatureStore
from odcluster.models.backbones import Backbone, create_backbone

CPU = torch.device("cpu")
ALL = ("conv1", "conv2", "conv3", "conv4", "conv5", "features")


def silent(activity: str, done: int, total: int) -> None:
    pass


def small(seed: int = 0, **options: Any) -> Backbone:
    """A small network whose batch norm is not the identity, so that evaluation mode matters."""
    torch.manual_seed(seed)
    backbone = create_backbone("smallconv", **{"image_size": 16, **options})
    with torch.no_grad():
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()  # type: ignore[union-attr, operator]
                module.weight.uniform_(0.5, 1.5)
    return backbone


def extract(backbone: Backbone, source: Source, directory: Path, **options: Any) -> FeatureStore:
    settings: dict[str, Any] = {
        "layers": ALL, "whole": False, "key": "k", "workers": 0, "device": CPU, "progress": silent, "batch_size": 8,
    }  # fmt: skip
    return extract_features(backbone, source, directory, **{**settings, **options})


def hashes(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.glob("*.npy"))}


class Stopper:
    """Progress that stops after a number of calls, and remembers what it was told."""

    def __init__(self, after: int, error: BaseException | None = None) -> None:
        self.left, self.told, self.error = after, list[tuple[str, int, int]](), error or Interrupted("stopped as asked")

    def __call__(self, activity: str, done: int, total: int) -> None:
        self.told.append((activity, done, total))
        self.left -= 1
        if self.left < 0:
            raise self.error
