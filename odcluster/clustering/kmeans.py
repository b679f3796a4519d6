"""k-means on tensors: three pure functions (assign, average, repair) and the loop around them.

Promises: the same bits for the same seed and device; no cluster is ever empty, whatever the rows; centroids are the
means of their members on return. Leaves to others: the normalisation of the rows, and what the clusters are for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from odcluster.data.randomness import Purpose, permutation

# A block of distances of this many numbers (64 MB) stays near the caches and bounds memory at any N.
BLOCK = 1 << 24


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Sums over many rows are kept in float64; only Apple's GPUs do not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def nearest_centroids(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the nearest centroid (lowest index on ties) and the squared distance to it."""
    half_norms = centroids.square().sum(dim=1) / 2  # [C]
    labels = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    distances = torch.empty(len(rows), dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), chunk := max(1, BLOCK // len(centroids))):
        part = rows[start : start + chunk]
        # |row - c|^2 = |row|^2 - 2 (row . c - |c|^2 / 2): one product finds the argmin.
        score, label = torch.addmm(half_norms, part, centroids.T, beta=-1).max(dim=1)  # [chunk]
        labels[start : start + chunk] = label
        distances[start : start + chunk] = (part.square().sum(dim=1) - 2 * score).clamp_(min=0)
    return labels, distances


def cluster_sums(rows: Tensor, labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Sum [C, D] (float64) and count [C] of each cluster's rows; rows labelled -1 belong to none."""
    sums = rows.new_zeros((num_clusters, rows.shape[1]), dtype=accumulator_dtype(rows.device))
    counts = torch.zeros(num_clusters, dtype=torch.int64, device=rows.device)
    for start in range(0, len(rows), chunk := max(1, BLOCK // rows.shape[1])):
        part, label = rows[start : start + chunk], labels[start : start + chunk]
        member = label >= 0
        if not bool(member.all()):
            part, label = part[member], label[member]
        sums.index_add_(0, label, part.to(sums.dtype))
        counts += torch.bincount(label, minlength=num_clusters)
    return sums, counts


def repair_empty(labels: Tensor, distances: Tensor, num_clusters: int) -> Tensor:
    """Give every empty cluster the row that is farthest from its own centroid, without emptying another cluster."""
    counts = torch.bincount(labels, minlength=num_clusters)
    empty = (counts == 0).nonzero().flatten()
    if len(empty) == 0:
        return labels
    labels = labels.clone()
    # In each cluster the row nearest to the centroid stays; all others may move, the farthest first.
    by_distance = torch.argsort(distances, stable=True)
    by_cluster = by_distance[torch.argsort(labels[by_distance], stable=True)]
    grouped = labels[by_cluster]
    movable = torch.ones_like(grouped, dtype=torch.bool)
    movable[0] = False
    movable[1:] = grouped[1:] == grouped[:-1]
    candidates = by_cluster[movable]
    farthest = candidates[torch.argsort(distances[candidates], descending=True, stable=True)]
    labels[farthest[: len(empty)]] = empty
    return labels


def kmeans(
    rows: Tensor,
    num_clusters: int,
    *,
    iterations: int = 20,
    seed: int = 0,
    poll: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cluster rows [N, D] into num_clusters; returns labels [N] and centroids [C, D].

    Starts from distinct rows drawn by the seed, runs Lloyd's iterations until nothing changes or the given number is
    reached. `poll` is called with the iteration before each one: for progress, and to stop by raising.
    """
    if not 1 <= num_clusters <= len(rows):
        raise ValueError(f"{len(rows)} rows cannot fill {num_clusters} clusters; use at most {len(rows)} clusters")
    assert bool(torch.isfinite(rows).all()), "k-means needs finite rows"
    start = torch.from_numpy(permutation(seed, 0, len(rows), Purpose.KMEANS)[:num_clusters]).to(rows.device)
    centroids = rows[start].clone()
    labels = torch.full((len(rows),), -1, dtype=torch.int64, device=rows.device)
    for iteration in range(max(1, iterations)):
        if poll is not None:
            poll(iteration)
        new_labels, distances = nearest_centroids(rows, centroids)
        new_labels = repair_empty(new_labels, distances, num_clusters)
        if torch.equal(new_labels, labels):
            break
        labels = new_labels
        sums, counts = cluster_sums(rows, labels, num_clusters)
        centroids = (sums / counts[:, None]).to(rows.dtype)
    return labels, centroids
