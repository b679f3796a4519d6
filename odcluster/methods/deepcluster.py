"""DeepCluster (Caron et al., ECCV 2018), as the ODC paper re-implements it for comparison, on one screen.

One epoch: evaluation-mode features of all images -> PCA with whitening -> L2 -> k-means -> the clusters are the labels
of this epoch, for a new classifier -> training on images drawn uniformly over the clusters, or with the loss weighted
by w_c ~ 1/sqrt(N_c), which the ODC paper (section 3.2) finds equivalent.

The classifier sits directly on the backbone's pooled features, and the same features are clustered: so does the ODC
authors' ResNet-50. Of Caron's AlexNet the backbone `alexnet` holds all layers up to fc7; he clusters fc7 before its
ReLU, here it is after it, as for every other backbone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from odcluster.clustering.agreement import nmi
from odcluster.clustering.balance import check_room, loss_weights
from odcluster.clustering.kmeans import kmeans
from odcluster.clustering.memory import UNSEEN
from odcluster.clustering.pca import pca_whiten
from odcluster.config import Config
from odcluster.data.order import uniform_over_clusters
from odcluster.errors import DataError
from odcluster.methods.interface import Batch, Outcome, Phase, Survey
from odcluster.methods.odc import used_weights, weighted_cross_entropy
from odcluster.methods.pretext import whole_run
from odcluster.models.backbones import Backbone
from odcluster.models.heads import LinearClassifier, l2_normalise
from odcluster.models.sobel import Sobel
from odcluster.ranks import SINGLE, Ranks


class DeepCluster(nn.Module):
    """Sobel filter, backbone and classifier; the labels of the epoch."""

    def __init__(self, backbone: Backbone, num_samples: int, config: Config, ranks: Ranks = SINGLE) -> None:
        super().__init__()
        assert config.clusters is not None, "the configuration is not resolved"
        self.config, self.ranks = config, ranks
        self.sobel = Sobel() if config.deepcluster.sobel else nn.Identity()
        self.backbone = backbone
        assert backbone.in_channels == (2 if config.deepcluster.sobel else 3), "Sobel gives the backbone two channels"
        self.classifier = LinearClassifier(backbone.num_features, config.clusters)
        self.samples = PseudoLabels(num_samples, config.clusters)

    def phases(self) -> list[Phase]:
        return [whole_run(self.config)]

    def begin_epoch(self, epoch: int, survey: Survey) -> Mapping[str, float]:
        """New labels for all images and a new classifier; nothing changes before the last chance to stop."""
        rows, seen = survey.features(self.features)
        seen = seen & rows.sum(dim=1).isfinite()  # a sum is finite only if all its terms are
        labels = torch.full_like(seen, UNSEEN, dtype=torch.int64)
        similarities = torch.zeros_like(seen, dtype=torch.float32)
        labels[seen], similarities[seen] = self.cluster(rows if bool(seen.all()) else rows[seen], epoch, survey)
        labels, similarities = (
            self.ranks.gather_blocks(own, len(self.samples.labels)) for own in (labels, similarities)
        )
        comparable = bool(((labels != UNSEEN) & (self.samples.labels != UNSEEN)).any())
        stability = {"nmi_previous": nmi(labels, self.samples.labels)} if comparable else {}
        self.samples.assign(labels, similarities)
        self.renew_classifier(epoch)
        return {**stability, **self.health()}

    def cluster(self, rows: Tensor, epoch: int, survey: Survey) -> tuple[Tensor, Tensor]:
        """k-means of the whitened, normalised features [n, D]: labels and cosines to the centroid, both [n]."""
        num_clusters, iterations = len(self.samples.counts), self.config.clustering.kmeans_iterations
        assert self.config.dim is not None, "the configuration is not resolved"
        check_room(self.ranks.total(len(rows)), num_clusters, 0)
        if num_clusters > 1 and all_alike(rows, self.ranks):
            raise DataError("all images give the same feature, so there is nothing to cluster; are they all identical?")
        survey.poll("PCA", 0, 1)
        whitened = l2_normalise(pca_whiten(rows, self.config.dim, self.ranks))
        labels, centroids = kmeans(
            whitened,
            num_clusters,
            iterations=iterations,
            seed=epoch_seed(self.config.seed, epoch),
            poll=lambda iteration: survey.poll("k-means", iteration, iterations),
            ranks=self.ranks,
        )
        survey.poll("k-means", iterations, iterations)
        return labels, (whitened * l2_normalise(centroids)[labels]).sum(dim=1)

    def renew_classifier(self, epoch: int) -> None:
        """Cluster 7 of this epoch is not that of the last one: start again from random weights, given (seed, epoch)."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(epoch_seed(self.config.seed, epoch))
            fresh = LinearClassifier(self.classifier.in_features, self.classifier.out_features)
        self.classifier.load_state_dict(fresh.state_dict())  # the same parameters for the optimiser, new values

    def epoch_order(self, epoch: int) -> NDArray[np.int64] | None:
        """The images of this epoch, drawn uniformly over its clusters; None where the loss weights balance them."""
        if self.config.deepcluster.balance == "weights":
            return None
        labels = self.samples.labels.cpu().numpy()
        return uniform_over_clusters(self.config.seed, epoch, labels, len(labels))

    def renewed(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())

    def features(self, images: Tensor) -> Tensor:
        """Pooled features of the backbone behind the Sobel filter: what is clustered and classified."""
        return self.backbone(self.sobel(images))

    def forward(self, batch: Batch) -> Outcome:
        logits = self.classifier(self.features(batch.images.flatten(0, 1))).float()  # [V B, C]
        labels, all_labels = (
            self.samples.labels[ids].repeat(len(batch.images)) for ids in (batch.ids, batch.whole_ids)
        )
        counts = self.samples.counts
        weighted = self.config.deepcluster.balance == "weights"
        weights = loss_weights(counts) if weighted else torch.ones_like(counts, dtype=logits.dtype)
        self.accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        used = used_weights(all_labels, weights) / self.ranks.world_size
        return Outcome(weighted_cross_entropy(logits, labels, weights, used))

    def after_step(self, batch: Batch, outcome: Outcome) -> Mapping[str, Tensor | float]:
        return {"accuracy": batch.mean_of_all(self.accuracy)}

    def end_epoch(self, epoch: int) -> None:
        return None

    def finish(self, survey: Survey) -> None:
        return None

    def complete(self, survey: Survey) -> Mapping[str, float]:
        return {}

    def health(self) -> Mapping[str, float]:
        counts = self.samples.counts
        return {"smallest": float(counts.min()), "largest": float(counts.max())}


class PseudoLabels(nn.Module):
    """The cluster of each of N images during one epoch, -1 for those that could not be read, and the cluster sizes."""

    labels: Tensor
    similarities: Tensor
    counts: Tensor

    def __init__(self, num_samples: int, num_clusters: int) -> None:
        super().__init__()
        self.register_buffer("labels", torch.full((num_samples,), UNSEEN, dtype=torch.int64))
        self.register_buffer("similarities", torch.zeros(num_samples))
        self.register_buffer("counts", torch.zeros(num_clusters, dtype=torch.int64))

    def assign(self, labels: Tensor, similarities: Tensor) -> None:
        counts = torch.bincount(labels[labels != UNSEEN], minlength=len(self.counts))
        assert int(counts.min()) > 0, "a cluster is empty"
        self.labels.copy_(labels)
        self.similarities.copy_(similarities)
        self.counts.copy_(counts)


def epoch_seed(seed: int, epoch: int) -> int:
    """Another seed for every epoch, so that k-means does not start from the same images each time (as published)."""
    return seed + 1_000_003 * (epoch + 1)


def all_alike(rows: Tensor, ranks: Ranks = SINGLE) -> bool:
    """Whether no feature differs between images by more than rounding."""
    highest, lowest = ranks.max(rows.amax(dim=0)), -ranks.max(-rows.amin(dim=0))
    return bool((highest - lowest).max() <= 1e-5 * torch.maximum(highest.abs(), lowest.abs()).max())
