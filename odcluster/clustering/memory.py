"""The two memories of ODC (section 3.1 of the paper).

The samples memory holds a feature and a pseudo-label for every image; the centroids memory holds the mean feature of
every cluster. Both are buffers of a module, so a checkpoint holds them without further ado.

Promises: a step costs O(B C D) for the products and O(B D) for the rest, never O(N): each cluster's *sum* and *count*
follow its members as they come, go and move, so that its mean is one division away. Rounding of those sums is removed
by `rebuild`. A non-finite feature never enters. Leaves to others: small clusters and loss weights (balance.py),
learning (methods/).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from odcluster.clustering.kmeans import accumulator_dtype, cluster_sums, nearest_centroids

UNSEEN = -1
"""Label of an image whose feature has not entered the memory yet: it belongs to no cluster and has no loss."""


class Moves(NamedTuple):
    """What one update did to the samples memory: one entry per distinct image of the batch."""

    old_labels: Tensor
    new_labels: Tensor
    old_rows: Tensor
    new_rows: Tensor

    def change_ratio(self) -> Tensor:
        """Share of the batch whose label changed (the paper's measure of stability)."""
        return (self.old_labels != self.new_labels).float().mean()


class SamplesMemory(nn.Module):
    """A feature row and a label for each of N images."""

    rows: Tensor
    labels: Tensor

    def __init__(self, num_samples: int, dim: int, momentum: float) -> None:
        super().__init__()
        if not 0 < momentum <= 1:
            raise ValueError(f"the memory momentum must lie in (0, 1], not {momentum}; the paper uses 0.5")
        self.momentum = momentum
        self.register_buffer("rows", torch.zeros(num_samples, dim))
        self.register_buffer("labels", torch.full((num_samples,), UNSEEN, dtype=torch.int64))

    @torch.no_grad()
    def update(self, ids: Tensor, features: Tensor, centroids: Tensor) -> Moves:
        """row <- m F/|F| + (1-m) row; label <- nearest centroid. Of an image twice in a batch the last counts."""
        keep = last_occurrences(ids)
        features = nn.functional.normalize(features.detach()[keep].float(), dim=1)
        keep, features = keep[finite := features.isfinite().all(dim=1)], features[finite]
        ids = ids[keep]
        old_rows, old_labels = self.rows[ids], self.labels[ids]
        new_rows = self.momentum * features + (1 - self.momentum) * old_rows
        new_rows = torch.where((old_labels == UNSEEN)[:, None], features, new_rows)  # first visit: nothing to mix with
        new_labels, _ = nearest_centroids(new_rows, centroids)
        self.rows[ids] = new_rows
        self.labels[ids] = new_labels
        return Moves(old_labels, new_labels, old_rows, new_rows)

    def members(self, cluster: int) -> Tensor:
        """Ids of a cluster's members, by one scan of the labels."""
        return (self.labels == cluster).nonzero().flatten()


class CentroidsMemory(nn.Module):
    """The mean feature of each of C clusters, as of its last refresh, and the sums and counts it is made from."""

    centroids: Tensor
    sums: Tensor
    counts: Tensor
    recorded: Tensor

    def __init__(self, num_clusters: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("centroids", torch.zeros(num_clusters, dim))
        self.register_buffer("sums", torch.zeros(num_clusters, dim, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(num_clusters, dtype=torch.int64))
        self.register_buffer("recorded", torch.zeros(num_clusters, dtype=torch.bool))

    @torch.no_grad()
    def move(self, moves: Moves) -> None:
        """Let sums and counts follow the members, and record the clusters that gained or lost one."""
        seen = moves.old_labels != UNSEEN
        left, joined = moves.old_labels[seen], moves.new_labels
        self.sums.index_add_(0, left, -moves.old_rows[seen].to(self.sums.dtype))
        self.sums.index_add_(0, joined, moves.new_rows.to(self.sums.dtype))
        self.counts.index_add_(0, left, -torch.ones_like(left))
        self.counts.index_add_(0, joined, torch.ones_like(joined))
        changed = moves.old_labels != moves.new_labels
        self.recorded[moves.old_labels[changed & seen]] = True
        self.recorded[moves.new_labels[changed]] = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Every recorded centroid becomes the mean of all its members' rows."""
        self.refresh_clusters((self.recorded & (self.counts > 0)).nonzero().flatten())
        self.recorded.zero_()

    @torch.no_grad()
    def refresh_clusters(self, clusters: Tensor) -> None:
        """The given (non-empty) clusters' centroids become their members' means, and are recorded no more."""
        means = self.sums[clusters] / self.counts[clusters, None]
        self.centroids[clusters] = means.to(self.centroids.dtype)
        self.recorded[clusters] = False

    @torch.no_grad()
    def rebuild(self, samples: SamplesMemory) -> None:
        """Sums and counts anew from the rows: removes the rounding that additions and subtractions leave behind."""
        sums, counts = cluster_sums(samples.rows, samples.labels, len(self.counts))
        assert torch.equal(counts, self.counts), "the counts no longer agree with the labels"
        self.sums.copy_(sums)

    @torch.no_grad()
    def fill(self, samples: SamplesMemory) -> None:
        """All of this memory from the samples memory: used once, after the initial clustering."""
        sums, counts = cluster_sums(samples.rows, samples.labels, len(self.counts))
        assert int(counts.min()) > 0, "an initial cluster is empty"
        self.sums.copy_(sums)
        self.counts.copy_(counts)
        self.centroids.copy_(sums / counts[:, None])
        self.recorded.zero_()

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # Devices without float64 keep their sums in float32: convert before the move, which would fail.
        device = fn(torch.empty(0)).device
        self.sums = self.sums.to(accumulator_dtype(device))
        return super()._apply(fn, recurse)


def last_occurrences(ids: Tensor) -> Tensor:
    """Positions of the last occurrence of each distinct id, by id: on a GPU duplicate indexed writes have no order."""
    order = torch.argsort(ids, stable=True)
    ordered = ids[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]
