"""The cluster of any image, how surely, and how far from the cluster's centre, by a run's own network.

The evaluation view of an image goes through the network of the newest checkpoint. Its feature, at length 1, gets the
label that training would give it: that of the nearest centroid. With its cosines c_1 .. c_C to all centroids and the
run's temperature t (`head.temperature`):

    confidence = softmax(c / t)[cluster]      distance = 1 - c[cluster]

- ODC compares backbone + neck with the centroids memory. With the `prototypes` classifier that confidence is the
  probability the network was trained to give. A `linear` classifier is not asked: what it learned were labels of the
  nearest centroid, and centroids do not lag behind when labels move.
- DeepCluster keeps no centroids, and its classifier is never older than an epoch (on the digits it finds 2 % of the
  clusters again). Its centroids are made as in training: means of whitened features of the run's own images (99 %).
- The pretext tasks have no clusters of their own; theirs are the k-means clusters that `odcluster explore` shows.

Training decides by the running average of an image's features, so an image of the run itself may get another cluster
here than in clusters.csv (one in ten on the digits), unless the run ended with a final pass. Clusters that people
merged count as one: their probabilities are added. A cluster that people made by moving images has no centroid, hence
no new images.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from odcluster.clustering.kmeans import cluster_sums, nearest_centroids
from odcluster.clustering.pca import whitening
from odcluster.data.sources import Source
from odcluster.errors import DataError
from odcluster.evaluation.features import evaluation_loader
from odcluster.explore.collection import open_collection
from odcluster.explore.curation import open_curation
from odcluster.explore.features import Network, Progress, load_network, read_memory
from odcluster.models.backbones import Backbone
from odcluster.models.heads import l2_normalise
from odcluster.models.sobel import represent
from odcluster.ranks import SINGLE, Ranks
from odcluster.training.devices import has_bfloat16
from odcluster.training.run import Run
from odcluster.training.survey import to_network


@dataclass(frozen=True)
class Assigner:
    """A run's network and centroids, in evaluation mode on one device."""

    backbone: Backbone
    embed: Callable[[Tensor], Tensor]
    """Normalised images [B, 3, H, W] to what is compared [B, D]."""
    centroids: Tensor
    """[C, D], means of features of length 1."""
    temperature: float
    roots: Tensor
    """[C], the cluster that each is part of: itself, unless people merged it."""
    names: dict[int, str]
    """Names that people gave."""

    bfloat16: bool = False
    """Whether the network computes in bfloat16, as in training."""

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cluster, confidence and distance [B] each, of normalised images."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bfloat16):
            features = self.embed(images)
        features = l2_normalise(features)
        nearest, _, _ = nearest_centroids(features, self.centroids)
        cosines = features @ l2_normalise(self.centroids).T  # [B, C]
        probabilities = (cosines / self.temperature).softmax(dim=1)
        clusters = self.roots[nearest]
        together = self.roots == clusters[:, None]  # [B, C], the parts of a merged cluster
        distances = 1 - cosines.gather(1, nearest[:, None])[:, 0]
        return clusters, (probabilities * together).sum(dim=1), distances.clamp(min=0)


@dataclass(frozen=True)
class Assigned:
    """A batch of images and their clusters."""

    ids: NDArray[np.int64]
    clusters: NDArray[np.int64]
    """-1 where the image cannot be read."""
    confidences: NDArray[np.float32]
    distances: NDArray[np.float32]
    """nan where the image cannot be read, like the confidence."""
    refused: list[tuple[int, str]]
    """Id and reason of those."""


def assign_images(
    assigner: Assigner,
    source: Source,
    *,
    batch_size: int,
    workers: int,
    device: torch.device,
    progress: Progress,
    ranks: Ranks = SINGLE,
) -> Generator[Assigned, None, None]:
    """All images in the order of their ids, a batch at a time; with several ranks, on rank 0 and once all are done."""
    own = ranks.own_batches(len(source), batch_size)
    ids = np.arange(own.start, own.stop, dtype=np.int64)
    batches = assign_ids(assigner, source, ids, batch_size, workers, device, progress)
    if ranks.world_size == 1:
        yield from batches
        return
    found = list(batches)
    ranks.meet()
    blocks = [ranks.own_batches(len(source), batch_size, rank) for rank in range(ranks.world_size)]
    sizes = [block.stop - block.start for block in blocks]

    def gathered(parts: list[NDArray[Any]], kind: type) -> NDArray[Any]:
        return ranks.gather(torch.from_numpy(np.concatenate([np.empty(0, kind), *parts])), sizes).numpy()

    clusters = gathered([batch.clusters for batch in found], np.int64)
    confidences = gathered([batch.confidences for batch in found], np.float32)
    distances = gathered([batch.distances for batch in found], np.float32)
    refused = [(i, why) for told in ranks.share([batch.refused for batch in found]) for some in told for i, why in some]
    if ranks.is_first:
        everyone = np.arange(len(source), dtype=np.int64)
        yield Assigned(everyone, clusters, confidences, distances, refused)


def assign_ids(
    assigner: Assigner,
    source: Source,
    ids: NDArray[np.int64],
    batch_size: int,
    workers: int,
    device: torch.device,
    progress: Progress,
) -> Generator[Assigned, None, None]:
    """The given images, a batch at a time."""
    with evaluation_loader(source, assigner.backbone, workers, device) as loader:
        mean, std = loader.normalisation_on(device)
        progress("images", 0, len(ids))
        start = 0
        for raw in loader.evaluation(ids, batch_size):
            batch = ids[start : start + batch_size]
            start += len(batch)
            clusters = np.full(len(batch), -1, np.int64)
            confidences, distances = (np.full(len(batch), np.nan, np.float32) for _ in range(2))
            if len(raw.ids):
                kept = np.isin(batch, raw.ids.numpy())
                found = assigner(to_network(raw.images[0], mean, std))
                clusters[kept], confidences[kept], distances[kept] = (values.cpu().numpy() for values in found)
            yield Assigned(batch, clusters, confidences, distances, raw.refused)
            progress("images", start, len(ids))


# --- From a run directory ---------------------------------------------------------------------------


def open_assigner(run: Run, device: torch.device, progress: Progress) -> Assigner:
    """The network and the centroids of the newest valid checkpoint.

    Where the run keeps no centroids they are made from its own images, whose features are kept in RUN/explore.
    """
    config = run.config()
    network = load_network(run, config, with_neck=config.method == "odc")
    if network is None:
        raise DataError(f"{run.path} has no valid checkpoint yet; `odcluster resume {run.path}` trains it")
    backbone = network.backbone.to(device)
    cast(Any, backbone).to(memory_format=torch.channels_last)  # a fifth faster, on CPUs too
    if config.method == "odc":
        embed, centroids = odc_comparison(run, network, device)
    else:
        embed, centroids = feature_comparison(run, network, device, progress)
    with closing(open_curation(run.path)) as curation:
        curated = curation.state()[1]
    roots = torch.tensor([curated.resolve(cluster) for cluster in range(len(centroids))])
    return Assigner(
        backbone,
        embed,
        centroids.to(device),
        config.head.temperature,
        roots.to(device),
        dict(curated.names),
        bfloat16=config.method == "odc" and config.running.precision == "bfloat16" and has_bfloat16(device),
    )


def odc_comparison(run: Run, network: Network, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Backbone and neck, and the centroids memory."""
    assert network.neck is not None
    memory = read_memory(run)
    if memory is None or memory.centroids is None or memory.labels is None or not bool((memory.labels >= 0).any()):
        raise DataError(f"{run.path} has no clusters yet: it is still in its warm start; train it further")
    return nn.Sequential(network.backbone, network.neck.to(device)), torch.tensor(memory.centroids)


def feature_comparison(
    run: Run, network: Network, device: torch.device, progress: Progress
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Features of the backbone, whitened for DeepCluster, and the mean of each cluster's members among them."""
    collection = open_collection(run.path, progress=progress)
    with closing(collection.curation):
        snapshot = collection.view().snapshot
    rows, clusters = snapshot.rows, snapshot.clusters
    if rows is None or not bool((clusters.labels >= 0).any()):
        reason = "; ".join(collection.notes) or "it has no clusters yet"
        raise DataError(f"the clusters of {run.path} have no centres to compare with: {reason}")
    usable = np.flatnonzero((rows.scale > 0) & (clusters.labels >= 0))
    stored, labels = torch.from_numpy(np.array(rows.stored[usable])), torch.from_numpy(clusters.labels[usable])
    features = represent(network.backbone)
    if collection.config.method != "deepcluster":
        return features, cluster_means(stored, labels, len(clusters))
    assert collection.config.dim is not None
    mean, projection = (part.float() for part in whitening(stored, collection.config.dim))
    centroids = cluster_means((stored - mean) @ projection, labels, len(clusters))
    mean, projection = mean.to(device), projection.to(device)
    return lambda images: (features(images).float() - mean) @ projection, centroids


def cluster_means(rows: Tensor, labels: Tensor, num_clusters: int) -> Tensor:
    """Mean [C, D] of the rows of each cluster, each at length 1."""
    sums, counts = cluster_sums(l2_normalise(rows), labels, num_clusters)
    return (sums / counts.clamp(min=1)[:, None]).float()
