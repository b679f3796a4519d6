"""The two memories of ODC (section 3.1 of the paper).

The samples memory holds a feature and a pseudo-label for every image; the centroids memory holds the mean feature of
every cluster. Both are buffers of a module, so a checkpoint holds them without further ado.

Promises: a step costs O(B C D) for the products and O(B D + C) for the rest (O(C D) where centroids are refreshed),
never O(N): each cluster's *sum* and *count* follow its members as they come, go and move, so that its mean is one
division away. Rounding of those sums is removed by `rebuild`. A non-finite feature never enters. The host never waits
for the device in a step: what does not count is weighted with 0 or masked, not left out. Leaves to others: small
clusters and loss weights (balance.py), learning (methods/).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from odcluster.clustering.kmeans import accumulator_dtype, add_rows, blocks, cluster_sums, nearest_centroids
from odcluster.models.heads import l2_normalise

UNSEEN = -1
"""Label of an image whose feature has not entered the memory yet: it belongs to no cluster and has no loss."""


class Moves(NamedTuple):
    """What one update did to the samples memory, per place in the batch; all but the last place of an image, and those
    whose feature is not finite, have both labels UNSEEN: they do not count.
    """

    old_labels: Tensor
    new_labels: Tensor
    old_rows: Tensor
    new_rows: Tensor

    def change_ratio(self) -> Tensor:
        """Share of the images of the batch whose label changed (the paper's measure of stability)."""
        counted = (self.new_labels != UNSEEN).sum()
        return (self.old_labels != self.new_labels).sum() / counted.clamp(min=1)


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
    def normalise(self, seen: Tensor) -> Tensor:
        """Scale all rows to length 1, in place; returns which are usable [N]: seen and finite. The others become 0."""
        usable = seen.clone()
        for part, good in blocks(self.rows, usable):
            scaled = l2_normalise(part)
            good &= scaled.sum(dim=1).isfinite()  # a sum is finite only if all its terms are
            part.copy_(torch.where(good[:, None], scaled, 0.0))
        return usable

    @torch.no_grad()
    def update(self, ids: Tensor, features: Tensor, centroids: Tensor) -> Moves:
        """row <- m F/|F| + (1-m) row; label <- nearest centroid. Of an image twice in a batch the last counts."""
        last = last_occurrences(ids)  # earlier ones get its values: writing them twice is then in any order the same
        features = nn.functional.normalize(features.detach()[last].float(), dim=1)
        finite = features.sum(dim=1).isfinite()  # only if all terms are
        old_rows, old_labels = self.rows[ids], self.labels[ids]
        new_rows = self.momentum * features + (1 - self.momentum) * old_rows
        new_rows = torch.where((old_labels == UNSEEN)[:, None], features, new_rows)  # first visit: nothing to mix with
        new_rows = torch.where(finite[:, None], new_rows, old_rows)
        nearest, _, _ = nearest_centroids(new_rows, centroids)
        new_labels = torch.where(finite, nearest[last], old_labels)
        self.rows[ids] = new_rows
        self.labels[ids] = new_labels
        counts = finite & (last == torch.arange(len(ids), device=ids.device))
        return Moves(
            torch.where(counts, old_labels, UNSEEN), torch.where(counts, new_labels, UNSEEN), old_rows, new_rows
        )

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
        old, new = moves.old_labels, moves.new_labels
        add_rows(self.sums, moves.old_rows, old, sign=-1)
        add_rows(self.sums, moves.new_rows, new)
        one, changed = torch.ones_like(old)[:, None], (old != new)[:, None]
        add_rows(self.counts[:, None], one, old, sign=-1)
        add_rows(self.counts[:, None], one, new)
        touched = torch.zeros_like(self.counts)
        add_rows(touched[:, None], changed, old)
        add_rows(touched[:, None], changed, new)
        self.recorded |= touched > 0

    @torch.no_grad()
    def refresh(self) -> None:
        """Every recorded centroid becomes the mean of all its members' rows."""
        due = (self.recorded & (self.counts > 0))[:, None]
        for sums, counts, centroids, here in blocks(self.sums, self.counts[:, None], self.centroids, due):
            centroids.copy_(torch.where(here, (sums / counts).to(centroids.dtype), centroids))
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

    def resize(self, num_clusters: int) -> None:
        """Room for another number of clusters; all of it empty."""
        for name, buffer in list(self.named_buffers()):
            setattr(self, name, buffer.new_zeros((num_clusters, *buffer.shape[1:])))

    @torch.no_grad()
    def relabel(self, samples: SamplesMemory, seen: Tensor) -> None:
        """Label all seen rows by the centroids as they are; sums and counts follow, a cluster may end up empty."""
        nearest, _, _ = nearest_centroids(samples.rows, self.centroids)
        samples.labels.copy_(torch.where(seen, nearest, samples.labels))
        sums, counts = cluster_sums(samples.rows, samples.labels, len(self.counts))
        self.sums.copy_(sums)
        self.counts.copy_(counts)

    def _load_from_state_dict(self, state_dict, prefix, *rest):  # type: ignore[no-untyped-def]
        # A run that makes fine clusters first has another number of them than its configuration says.
        stored = state_dict.get(f"{prefix}counts")
        if stored is not None and len(stored) != len(self.counts):
            self.resize(len(stored))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # Devices without float64 keep their sums in float32: convert before the move, which would fail.
        device = fn(torch.empty(0)).device
        self.sums = self.sums.to(accumulator_dtype(device))
        return super()._apply(fn, recurse)


def last_occurrences(ids: Tensor) -> Tensor:
    """For each place in ids the last place of the same id: on a GPU duplicate indexed writes have no order."""
    ordered, order = torch.sort(ids, stable=True)
    return order[torch.searchsorted(ordered, ids, right=True) - 1]
