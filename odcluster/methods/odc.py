"""Online Deep Clustering (Zhan et al., CVPR 2020), section 3 on one screen.

One iteration: forward -> loss with the labels as they are -> (the trainer: backward, finite check, SGD step) ->
samples memory and new labels -> every k-th: recorded centroids -> small clusters. Loss weights follow the cluster
sizes at all times.

Beyond the paper, each off in its recipes: a rotation warm start before the first clusters, several views of an image
whose average enters the memory, and the centroids memory itself as the classifier (`prototypes`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from odcluster.clustering.balance import check_room, handle_small_clusters, loss_weights
from odcluster.clustering.kmeans import kmeans, own_distances
from odcluster.clustering.memory import UNSEEN, CentroidsMemory, SamplesMemory
from odcluster.config import Config
from odcluster.errors import DataError
from odcluster.methods.interface import Batch, Outcome, Phase, Survey
from odcluster.methods.rotation import one_turn_each
from odcluster.models.backbones import Backbone
from odcluster.models.heads import LinearClassifier, Neck, RotationHead, l2_normalise, prototype_logits


class ODC(nn.Module):
    """Backbone, neck and classifier; samples memory and centroids memory."""

    def __init__(self, backbone: Backbone, num_samples: int, config: Config) -> None:
        super().__init__()
        assert config.clusters is not None, "the configuration is not resolved"
        assert config.dim is not None, "the configuration is not resolved"
        self.config = config
        self.backbone = backbone
        self.neck = Neck(backbone.num_features, config.head, config.dim)
        linear = config.head.classifier == "linear"
        self.classifier = LinearClassifier(config.dim, config.clusters) if linear else None
        self.warm_epochs = warm_epochs(config)
        self.rotation_head = RotationHead(backbone.num_features) if self.warm_epochs else None
        self.samples = SamplesMemory(num_samples, config.dim, config.clustering.memory_momentum)
        self.centroids = CentroidsMemory(config.clusters, config.dim)

    def phases(self) -> list[Phase]:
        config, warm, optimiser = self.config, self.config.warm_start, self.config.optimiser
        assert config.epochs is not None
        assert config.lr is not None
        phases = [
            Phase(
                "odc",
                config.epochs - self.warm_epochs,
                config.lr,
                optimiser.weight_decay,
                optimiser.schedule,
                optimiser.warmup_epochs,
            )
        ]
        if self.warm_epochs:
            phases.insert(0, Phase("rotation", self.warm_epochs, warm.warm_lr, warm.warm_weight_decay, "cosine"))
        return phases

    def begin_epoch(self, epoch: int, survey: Survey) -> Mapping[str, float]:
        """Step 0: both memories from k-means on the features of all images, once."""
        if epoch != self.warm_epochs:
            return {}
        new = self if self.config.weights is None else self.neck  # statistics that came with weights are good ones
        survey.calibrate(new, self.embed, self.config.clustering.calibration_batches)
        try:
            _, seen = survey.features(self.embed, out=self.samples.rows)
            self.samples.labels.copy_(self.first_labels(self.samples.normalise(seen), survey))
        except BaseException:
            self.samples.rows.zero_()  # stopped or refused: as if it had not begun
            raise
        self.centroids.fill(self.samples)
        handled = self.handle_small_clusters(step=-1)
        return {"initial_small_clusters": handled, **self.health()}

    def first_labels(self, usable: Tensor, survey: Survey) -> Tensor:
        """k-means on the rows of the samples memory where they lie; images that are not usable have no label."""
        rows, settings = self.samples.rows, self.config.clustering
        num_clusters, iterations = len(self.centroids.counts), settings.kmeans_iterations
        if num_clusters > 1 and all_alike(rows, usable):
            raise DataError("all images give the same feature, so there is nothing to cluster; are they all identical?")
        check_room(int(usable.sum()), num_clusters, settings.small_cluster or 0)
        labels, _ = kmeans(
            rows,
            num_clusters,
            iterations=iterations,
            seed=self.config.seed,
            usable=None if bool(usable.all()) else usable,
            poll=lambda iteration: survey.poll("k-means", iteration, iterations),
        )
        survey.poll("k-means", iterations, iterations)
        return labels

    def epoch_order(self, epoch: int) -> None:
        return None

    def renewed(self) -> list[nn.Parameter]:
        return []

    def embed(self, images: Tensor) -> Tensor:
        """F = neck(backbone(x)), the feature that is clustered."""
        return self.neck(self.backbone(images))

    def forward(self, batch: Batch) -> Outcome:
        views = batch.images.flatten(0, 1)  # [V B, 3, H, W]
        if batch.epoch < self.warm_epochs:
            assert self.rotation_head is not None
            turned, quarters = one_turn_each(views)
            return Outcome(functional.cross_entropy(self.rotation_head(self.backbone(turned)).float(), quarters))
        features = self.embed(views).float()  # [V B, D]
        labels = self.samples.labels[batch.ids].repeat(len(batch.images))  # as they stood before this step
        weights = loss_weights(self.centroids.counts)
        loss = weighted_cross_entropy(self.logits(features), labels, weights)
        averaged = l2_normalise(features.detach()).unflatten(0, batch.images.shape[:2]).mean(dim=0)  # [B, D]
        return Outcome(loss, averaged)

    def logits(self, features: Tensor) -> Tensor:
        if self.classifier is not None:
            return self.classifier(features).float()
        return prototype_logits(features, self.centroids.centroids, self.config.head.temperature)

    def after_step(self, batch: Batch, outcome: Outcome) -> Mapping[str, Tensor | float]:
        if outcome.features is None:
            return {}
        moves = self.samples.update(batch.ids, outcome.features, self.centroids.centroids)
        self.centroids.move(moves)
        if (batch.step + 1) % self.config.clustering.update_interval == 0:
            self.centroids.refresh()
        handled = self.handle_small_clusters(batch.step)
        return {"change": moves.change_ratio(), "small_clusters": float(handled)}

    def handle_small_clusters(self, step: int) -> int:
        threshold = self.config.clustering.small_cluster
        assert threshold is not None, "the configuration is not resolved"
        return handle_small_clusters(self.samples, self.centroids, threshold, seed=self.config.seed, step=step + 1)

    def end_epoch(self, epoch: int) -> None:
        if epoch >= self.warm_epochs:
            self.centroids.rebuild(self.samples)

    def health(self) -> Mapping[str, float]:
        counts = self.centroids.counts
        if not bool(counts.any()):  # before the first clusters
            return {}
        return {"smallest": float(counts.min()), "largest": float(counts.max())}


def warm_epochs(config: Config) -> int:
    """Epochs of the rotation warm start; clustering always has at least one epoch."""
    assert config.epochs is not None
    return min(round(config.warm_start.warm_share * config.epochs), config.epochs - 1)


def all_alike(rows: Tensor, usable: Tensor) -> bool:
    """Whether no usable row (they have length 1) lies farther than rounding from the first of them."""
    first = rows[usable.int().argmax()][None]
    return bool((own_distances(rows, first, torch.zeros_like(usable, dtype=torch.int64)) < 1e-10)[usable].all())


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy weighted per class, over the sum of the weights used; images without a label have no part."""
    known = labels != UNSEEN
    losses = functional.cross_entropy(logits, labels, weight=weights, ignore_index=UNSEEN, reduction="sum")
    used = torch.where(known, weights[labels.clamp(min=0)], 0.0).sum()
    return losses / used.clamp(min=torch.finfo(used.dtype).tiny)
