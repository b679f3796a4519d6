"""Learning with labels: the ceiling that features learned without them are measured against.

The one method that looks at the labels that came with the images, and only when it is asked for by name. Same views,
backbone and loop as all others; only the loss knows the labels.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from odcluster.clustering.memory import UNSEEN
from odcluster.config import Config
from odcluster.methods.interface import Batch, Outcome
from odcluster.methods.pretext import Pretext
from odcluster.models.backbones import Backbone
from odcluster.models.heads import LinearClassifier
from odcluster.ranks import SINGLE, Ranks


class Labels(Pretext):
    """A linear classifier of the known classes."""

    labels: Tensor

    def __init__(self, backbone: Backbone, num_samples: int, config: Config, ranks: Ranks = SINGLE) -> None:
        super().__init__(backbone, config, ranks)
        assert config.clusters is not None, "the configuration is not resolved"
        self.head = LinearClassifier(backbone.num_features, config.clusters)
        labels = torch.full((num_samples,), UNSEEN, dtype=torch.int64)
        self.register_buffer("labels", labels, persistent=False)  # they belong to the images, not to the run

    def take(self, labels: NDArray[np.int64]) -> None:
        """The classes of all images, -1 unknown."""
        self.labels.copy_(torch.from_numpy(labels))

    def forward(self, batch: Batch) -> Outcome:
        logits = self.head(self.backbone(batch.images.flatten(0, 1))).float()
        labels = self.labels[batch.ids].repeat(len(batch.images))
        self.accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        whole = self.labels[batch.whole_ids].repeat(len(batch.images))
        known = (whole != UNSEEN).sum().clamp(min=1)  # a batch without any label has nothing to teach
        losses = functional.cross_entropy(logits, labels, ignore_index=UNSEEN, reduction="sum")
        return Outcome(losses * self.ranks.world_size / known)
