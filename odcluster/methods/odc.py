"""Online Deep Clustering (Zhan et al., CVPR 2020), section 3 on one screen.

One iteration: forward -> loss with the labels as they are -> (the trainer: backward, finite check, SGD step) ->
samples memory and new labels -> every k-th: recorded centroids -> small clusters. Loss weights follow the cluster
sizes at all times.

Beyond the paper, each off in its recipes: a rotation warm start before the first clusters, several views of an image
whose average enters the memory, the centroids memory itself as the classifier (`prototypes`), many fine clusters before
the final ones, losses that tell images apart and predict rotations meanwhile (`companions`), and, where the backbone is
frozen, labels learned from nearest neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from odcluster.clustering.balance import check_room, handle_small_clusters, loss_weights
from odcluster.clustering.kmeans import best_kmeans, numbered_rows, own_distances
from odcluster.clustering.memory import UNSEEN, CentroidsMemory, SamplesMemory
from odcluster.clustering.neighbours import agreement_of_neighbours, nearest_neighbours
from odcluster.clustering.pca import pca
from odcluster.config import Config
from odcluster.data.randomness import Purpose, uniforms
from odcluster.errors import DataError
from odcluster.methods.interface import Batch, Outcome, Phase, Survey
from odcluster.methods.rotation import one_turn_each
from odcluster.models.backbones import Backbone
from odcluster.models.heads import LinearClassifier, Neck, RotationHead, l2_normalise, prototype_logits
from odcluster.ranks import SINGLE, Ranks

PLAIN_AGREEMENT = "neighbours_agree_kmeans"
"""Share of neighbours in one cluster when k-means alone makes as many clusters of the frozen features."""
FROZEN_DIM = 128
"""Features of a frozen backbone are compared in this many principal components."""


class ODC(nn.Module):
    """Backbone, neck and classifier; samples memory and centroids memory."""

    neighbours: Tensor

    def __init__(self, backbone: Backbone, num_samples: int, config: Config, ranks: Ranks = SINGLE) -> None:
        super().__init__()
        assert config.clusters is not None, "the configuration is not resolved"
        assert config.dim is not None, "the configuration is not resolved"
        self.config, self.ranks = config, ranks
        self.backbone = backbone
        self.frozen = bool(config.fine_tuning.frozen)
        self.neck = Neck(backbone.num_features, config.head, config.dim, input_norm=self.frozen)
        linear = config.head.classifier == "linear"
        self.classifier = LinearClassifier(config.dim, config.clusters) if linear else None
        self.warm_epochs, self.fine_epochs = warm_epochs(config), fine_epochs(config)
        turns = self.warm_epochs or (config.companions.rotation_weight and not self.frozen)
        self.rotation_head = RotationHead(backbone.num_features) if turns else None
        self.samples = SamplesMemory(num_samples, config.dim, config.clustering.memory_momentum, ranks)
        self.centroids = CentroidsMemory(config.clusters, config.dim, ranks)
        if self.frozen and config.clustering.neighbours:
            self.register_buffer(
                "neighbours", torch.zeros(num_samples, config.clustering.neighbours, dtype=torch.int64)
            )

    def phases(self) -> list[Phase]:
        config, warm, optimiser = self.config, self.config.warm_start, self.config.optimiser
        assert config.epochs is not None
        assert config.lr is not None
        common = (config.lr, optimiser.weight_decay, optimiser.schedule, optimiser.warmup_epochs)
        # A backbone has learned what it could with fine clusters: the final ones come where the rate is low.
        continues = self.fine_epochs > 0 and not self.frozen
        phases = [
            Phase("rotation", self.warm_epochs, warm.warm_lr, warm.warm_weight_decay, "cosine"),
            Phase("fine clusters", self.fine_epochs, *common),
            Phase("odc", config.epochs - self.warm_epochs - self.fine_epochs, *common, continues),
        ]
        return [phase for phase in phases if phase.epochs]

    def begin_epoch(self, epoch: int, survey: Survey) -> Mapping[str, float]:
        """Step 0: both memories from k-means on the features of all images; once more after fine clusters."""
        first, settings = epoch == self.warm_epochs, self.config.clustering
        if not first and epoch != self.warm_epochs + self.fine_epochs:
            return {}
        if first:
            new = self if self.config.weights is None else self.neck  # statistics that came with weights are good ones
            survey.calibrate(new, self.embed, settings.calibration_batches)
        assert self.config.clusters is not None
        num_clusters = (
            self.config.clusters
            if epoch >= self.warm_epochs + self.fine_epochs
            else self.config.warm_start.fine_clusters
        )
        assert num_clusters is not None, "the configuration is not resolved"
        try:
            _, seen = survey.features(self.embed, out=self.samples.rows)
            usable = self.samples.normalise(seen)
            rows = self.samples.rows
            if first and self.frozen:
                rows = self.frozen_rows(survey.features(lambda features: features)[0], survey, usable)
            labels = self.first_labels(rows, usable, num_clusters, survey)
        except BaseException:
            self.samples.rows.zero_()  # stopped or refused: all of this is done again
            raise
        self.samples.replace_labels(labels)
        self.centroids.resize(num_clusters)
        self.centroids.fill(self.samples)
        handled = self.handle_small_clusters(step=-1)
        told = {"initial_small_clusters": float(handled), **self.health()}
        if first and self.frozen and self.config.clustering.neighbours:
            plain = labels if not self.fine_epochs else self.first_labels(rows, usable, self.config.clusters, survey)
            plain = self.ranks.gather_blocks(plain, len(self.samples.labels))
            told[PLAIN_AGREEMENT] = agreement_of_neighbours(self.neighbours, plain)
        return told

    def frozen_rows(self, features: Tensor, survey: Survey, usable: Tensor) -> Tensor:
        """What the frozen backbone itself says of all images: better first clusters than a random neck's, and who is
        near whom.
        """
        rows = l2_normalise(pca(features, FROZEN_DIM, self.ranks))
        rows[~usable] = 0
        if (k := self.config.clustering.neighbours) and self.ranks.total(int(usable.sum())) > 1:
            poll = partial(survey.poll, "nearest neighbours", total=len(rows))
            found = nearest_neighbours(rows, k, usable=usable, poll=poll, ranks=self.ranks)
            self.neighbours.copy_(self.ranks.gather_blocks(found, len(self.neighbours)))
        return rows

    def first_labels(self, rows: Tensor, usable: Tensor, num_clusters: int, survey: Survey) -> Tensor:
        """k-means on the rows where they lie; images that are not usable have no label."""
        settings = self.config.clustering
        iterations = settings.kmeans_iterations
        if num_clusters > 1 and all_alike(rows, usable, self.ranks):
            raise DataError("all images give the same feature, so there is nothing to cluster; are they all identical?")
        threshold = 0 if settings.one_pass else self.small(num_clusters)
        check_room(self.ranks.total(int(usable.sum())), num_clusters, threshold)
        labels, _ = best_kmeans(
            rows,
            num_clusters,
            iterations=iterations,
            seed=self.config.seed,
            restarts=settings.kmeans_restarts,
            usable=None if bool(usable.all()) else usable,
            poll=partial(survey.poll, "k-means", total=iterations * settings.kmeans_restarts),
            ranks=self.ranks,
        )
        survey.poll("k-means", iterations * settings.kmeans_restarts, iterations * settings.kmeans_restarts)
        return labels

    def epoch_order(self, epoch: int) -> None:
        return None

    def renewed(self) -> list[nn.Parameter]:
        return []

    def embed(self, images: Tensor) -> Tensor:
        """F = neck(backbone(x)), the feature that is clustered; of a frozen backbone, x is its feature already."""
        return self.neck(images if self.frozen else self.backbone(images))

    def embed_images(self, images: Tensor) -> Tensor:
        """F of images, frozen backbone or not."""
        return self.neck(self.backbone(images))

    def forward(self, batch: Batch) -> Outcome:
        views = batch.images.flatten(0, 1)  # [V B, 3, H, W]
        if batch.epoch < self.warm_epochs:
            return Outcome(self.rotation_loss(views, batch))
        features = self.embed(views).float()  # [V B, D]
        weights = loss_weights(self.centroids.counts)
        loss = self.cluster_loss(features, batch, weights)
        if (weight := self.config.companions.instance_weight) and len(batch.images) > 1:
            loss = loss + weight * self.instance_loss(features, batch)
        if (weight := self.config.companions.rotation_weight) and not self.frozen:
            loss = loss + weight * self.rotation_loss(batch.images[batch.step % len(batch.images)], batch)
        averaged = l2_normalise(features.detach()).unflatten(0, batch.images.shape[:2]).mean(dim=0)  # [B, D]
        return Outcome(loss, averaged)

    def cluster_loss(self, features: Tensor, batch: Batch, weights: Tensor) -> Tensor:
        """Weighted cross-entropy of all views; the weights used are those of the whole batch."""
        labels = self.labels_to_learn(batch, batch.ids)
        used = None
        if batch.everyone is not None:
            used = used_weights(self.labels_to_learn(batch, batch.everyone), weights) / self.ranks.world_size
        return weighted_cross_entropy(self.logits(features), labels, weights, used)

    def rotation_loss(self, views: Tensor, batch: Batch) -> Tensor:
        """By how many quarter turns each view was turned."""
        assert self.rotation_head is not None
        turned, quarters = one_turn_each(views, batch.places(len(views) // len(batch.ids)))
        return batch.fair(functional.cross_entropy(self.rotation_head(self.backbone(turned)).float(), quarters))

    def instance_loss(self, features: Tensor, batch: Batch) -> Tensor:
        """Whose view it is: the next view of the same image against all other views of the whole batch."""
        temperature, own = self.config.companions.instance_temperature, batch.places(len(batch.images))
        everyone = gather_with_gradient(features, batch)  # [V B of all ranks, D]
        logits = prototype_logits(features, everyone, temperature)
        itself = own[:, None] == torch.arange(len(everyone), device=own.device)
        logits = logits.masked_fill(itself, -torch.inf)
        targets = (own + len(batch.whole_ids)) % len(everyone)
        return batch.fair(functional.cross_entropy(logits, targets))

    def labels_to_learn(self, batch: Batch, ids: Tensor) -> Tensor:
        """Labels [V B] as they stood before this step, for each view: the images' own, or those of a neighbour."""
        if not self.frozen or not (k := self.config.clustering.neighbours):
            return self.samples.labels[ids].repeat(len(batch.images))
        views = []
        for view in range(len(batch.images)):
            draws = uniforms(self.config.seed, Purpose.NEIGHBOUR, batch.epoch, ids.cpu().numpy(), view, 1)[:, 0]
            views.append(self.neighbours[ids, torch.from_numpy((draws * k).astype(np.int64)).to(ids.device)])
        return self.samples.labels[torch.cat(views)]

    def logits(self, features: Tensor) -> Tensor:
        if self.classifier is not None:
            return self.classifier(features).float()
        return prototype_logits(features, self.centroids.centroids, self.config.head.temperature)

    def after_step(self, batch: Batch, outcome: Outcome) -> Mapping[str, Tensor | float]:
        if outcome.features is None:
            return {}
        self.samples.momentum = self.memory_momentum(batch.epoch)
        features = self.ranks.gather(outcome.features, batch.sizes)
        moves = self.samples.update(batch.whole_ids, features, self.centroids.centroids)
        self.centroids.move(moves)
        if (batch.step + 1) % self.config.clustering.update_interval == 0:
            self.centroids.refresh()
        handled = self.handle_small_clusters(batch.step)
        return {"change": moves.change_ratio(), "small_clusters": float(handled)}

    def memory_momentum(self, epoch: int) -> float:
        """m; after fine clusters a row becomes the average of its visits (1/2, 1/3, ...), so that labels settle."""
        visits = epoch - self.warm_epochs - self.fine_epochs
        m = self.config.clustering.memory_momentum
        return m if self.fine_epochs == 0 or visits < 0 else min(m, 1 / (visits + 2))

    def handle_small_clusters(self, step: int) -> int:
        threshold, one_pass = self.small(len(self.centroids.counts)), self.config.clustering.one_pass
        return handle_small_clusters(
            self.samples, self.centroids, threshold, seed=self.config.seed, step=step + 1, one_pass=one_pass
        )

    def small(self, num_clusters: int) -> int:
        """At most this many members make a cluster small; fine clusters are smaller to begin with."""
        threshold = self.config.clustering.small_cluster
        assert threshold is not None, "the configuration is not resolved"
        fine = num_clusters != self.config.clusters
        return min(threshold, len(self.samples.labels) // num_clusters // 4) if fine else threshold

    def end_epoch(self, epoch: int) -> None:
        if epoch >= self.warm_epochs:
            self.centroids.rebuild(self.samples)

    def finish(self, survey: Survey) -> None:
        """Every image's row and label from its evaluation view, as `odcluster assign` sees it; without a final pass
        only those of images that no step has visited.
        """
        if not bool(self.centroids.counts.any()):
            return
        if self.config.clustering.final_pass:
            _, seen = survey.features(self.embed, out=self.samples.rows)
            self.centroids.relabel(self.samples, self.samples.normalise(seen))
        elif bool((self.samples.labels == UNSEEN).any()):  # added late, or unreadable
            features, seen = survey.features(self.embed)
            new = seen & (self.samples.own_labels == UNSEEN) & features.isfinite().all(dim=1)
            self.samples.rows[new] = l2_normalise(features[new])
            self.centroids.relabel(self.samples, new)

    def complete(self, survey: Survey) -> Mapping[str, float]:
        """With a frozen backbone: who is near whom, the new images among them."""
        if not self.frozen or not self.config.clustering.neighbours or not bool(self.centroids.counts.any()):
            return {}
        features, seen = survey.features(lambda features: features)
        usable = seen & features.isfinite().all(dim=1)
        rows = self.frozen_rows(features, survey, usable)
        plain = self.first_labels(rows, usable, self.config.clusters or 1, survey)
        plain = self.ranks.gather_blocks(plain, len(self.samples.labels))
        return {PLAIN_AGREEMENT: agreement_of_neighbours(self.neighbours, plain)}

    def health(self) -> Mapping[str, float]:
        counts = self.centroids.counts
        if not bool(counts.any()):  # before the first clusters
            return {}
        return {"smallest": float(counts.min()), "largest": float(counts.max())}


def warm_epochs(config: Config) -> int:
    """Epochs of the rotation warm start; clustering always has at least one epoch."""
    assert config.epochs is not None
    return min(round(config.warm_start.warm_share * config.epochs), config.epochs - 1)


def fine_epochs(config: Config) -> int:
    """Epochs with fine clusters; the final ones always have at least one epoch."""
    assert config.epochs is not None
    return min(round(config.warm_start.fine_share * config.epochs), config.epochs - 1 - warm_epochs(config))


def all_alike(rows: Tensor, usable: Tensor, ranks: Ranks = SINGLE) -> bool:
    """Whether no usable row (they have length 1) lies farther than rounding from the first of them."""
    if ranks.total(int(usable.sum())) == 0:
        return True
    first = numbered_rows(rows, usable, torch.zeros(1, dtype=torch.int64, device=rows.device), ranks)
    alike = own_distances(rows, first, torch.zeros_like(usable, dtype=torch.int64)) < 1e-10
    return not ranks.any(not bool(alike[usable].all()))


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor, used: Tensor | None = None) -> Tensor:
    """Cross-entropy weighted per class, over the sum of the weights used (these, if not given); images without a
    label have no part.
    """
    losses = functional.cross_entropy(logits, labels, weight=weights, ignore_index=UNSEEN, reduction="sum")
    used = used_weights(labels, weights) if used is None else used
    return losses / used.clamp(min=torch.finfo(used.dtype).tiny)


def used_weights(labels: Tensor, weights: Tensor) -> Tensor:
    """The sum of the weights of these labels."""
    return torch.where(labels != UNSEEN, weights[labels.clamp(min=0)], 0.0).sum()


def gather_with_gradient(features: Tensor, batch: Batch) -> Tensor:
    """Features [V B, D] of all ranks, view by view and in the order of the batch; gradients flow back to their rank."""
    if batch.everyone is None:
        return features
    views = features.unflatten(0, batch.images.shape[:2]).transpose(0, 1)  # [B, V, D]: a rank's images stay together
    return cast(Tensor, GatherWithGradient.apply(views, batch)).transpose(0, 1).flatten(0, 1)


class GatherWithGradient(torch.autograd.Function):
    """Tensors of all ranks; each gets back the sum of what the losses of all ranks say about its own."""

    @staticmethod
    def forward(context: Any, own: Tensor, batch: Batch) -> Tensor:
        context.batch = batch
        return batch.ranks.gather(own, batch.sizes)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks, sizes = context.batch.ranks, context.batch.sizes
        first = sum(sizes[: ranks.rank])
        return ranks.sum(gradient.contiguous())[first : first + sizes[ranks.rank]], None
