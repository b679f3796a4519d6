"""The two memories of ODC (section 3.1 of the paper).

The samples memory holds a feature and a pseudo-label for every image; the centroids memory holds the mean feature of
every cluster. Both are buffers of a module, so a checkpoint holds them without further ado.

Promises: a step costs O(B C D) for the products and O(B D + C) for the rest (O(C D) where centroids are refreshed),
never O(N): each cluster's *sum* and *count* follow its members as they come, go and move, so that its mean is one
division away. Rounding of those sums is removed by `rebuild`. A non-finite feature never enters. The host never waits
for the device in a step: what does not count is weighted with 0 or masked, not left out. Leaves to others: small
clusters and loss weights (balance.py), learning (methods/).

Across ranks, rank r owns a block of ids. It alone has their rows, moves them, and compares them with the centroids;
sums are those of its own rows. Labels, counts and centroids are the same on all ranks, because all hear which labels an
update gave and add up their sums where a centroid is recomputed. A step sends O(B) numbers (features aside, which the
method gathers), a refresh O(D) for each recorded cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from odcluster.clustering.kmeans import (
    accumulator_dtype,
    add_rows,
    blocks,
    cluster_sizes,
    cluster_sums,
    nearest_centroids,
)
from odcluster.models.heads import l2_normalise
from odcluster.ranks import SINGLE, Ranks

UNSEEN = -1
"""Label of an image whose feature has not entered the memory yet: it belongs to no cluster and has no loss."""


class Moves(NamedTuple):
    """What one update did to the samples memory, per place in the batch; all but the last place of an image, and those
    whose feature is not finite, have both labels UNSEEN: they do not count.

    Labels are those of the whole batch, rows those of the places whose images this rank owns.
    """

    old_labels: Tensor
    new_labels: Tensor
    old_rows: Tensor
    new_rows: Tensor
    places: Tensor | slice = slice(None)
    """Which places of the batch the rows are of."""

    def change_ratio(self) -> Tensor:
        """Share of the images of the batch whose label changed (the paper's measure of stability)."""
        counted = (self.new_labels != UNSEEN).sum()
        return (self.old_labels != self.new_labels).sum() / counted.clamp(min=1)


@dataclass(frozen=True)
class Part:
    """Of some images, the rows that this rank owns; alone, all of them."""

    rows: Tensor
    count: int
    """Of all these images."""
    at: Tensor
    """Where the rows stand in the memory."""
    places: Tensor | slice = field(default_factory=lambda: slice(None))
    """Which of these images they are of."""
    ranks: Ranks = SINGLE

    def told(self, values: Tensor) -> Tensor:
        """Of numbers about the rows, those about all these images, on all ranks."""
        if self.ranks.world_size == 1:
            return values
        everywhere = values.new_zeros(self.count)
        everywhere[self.places] = values
        return self.ranks.sum(everywhere)

    def row(self, place: Tensor | int) -> Tensor:
        """The row of one of these images."""
        if self.ranks.world_size == 1:
            return self.rows[place]
        assert isinstance(self.places, Tensor)
        return self.ranks.sum((self.rows * (self.places == place)[:, None]).sum(dim=0))

    def mean(self, chosen: Tensor) -> Tensor:
        """The mean row of the chosen ones [count]."""
        return self.ranks.sum(self.rows[chosen[self.places]].sum(dim=0)) / chosen.sum()


class SamplesMemory(nn.Module):
    """A feature row and a label for each of N images; of the rows, only those of this rank's own ids."""

    rows: Tensor
    labels: Tensor

    def __init__(self, num_samples: int, dim: int, momentum: float, ranks: Ranks = SINGLE) -> None:
        super().__init__()
        if not 0 < momentum <= 1:
            raise ValueError(f"the memory momentum must lie in (0, 1], not {momentum}; the paper uses 0.5")
        self.momentum, self.ranks, self.own = momentum, ranks, ranks.own(num_samples)
        self.register_buffer("rows", torch.zeros(self.own.stop - self.own.start, dim))
        self.register_buffer("labels", torch.full((num_samples,), UNSEEN, dtype=torch.int64))

    @torch.no_grad()
    def normalise(self, seen: Tensor) -> Tensor:
        """Scale the rows to length 1, in place; returns which are usable: seen and finite. The others become 0."""
        usable = seen.clone()
        for part, good in blocks(self.rows, usable):
            scaled = l2_normalise(part)
            good &= scaled.sum(dim=1).isfinite()  # a sum is finite only if all its terms are
            part.copy_(torch.where(good[:, None], scaled, 0.0))
        return usable

    @property
    def own_labels(self) -> Tensor:
        """Labels of the images whose rows are here."""
        return self.labels[self.own]

    def replace_labels(self, own_labels: Tensor) -> None:
        """Labels of all images, each from the rank that owns it."""
        self.labels.copy_(self.ranks.gather_blocks(own_labels, len(self.labels)))

    @torch.no_grad()
    def update(self, ids: Tensor, features: Tensor, centroids: Tensor) -> Moves:
        """row <- m F/|F| + (1-m) row; label <- nearest centroid. Of an image twice in a batch the last counts.

        Ids and features are those of the whole batch, on every rank.
        """
        last = last_occurrences(ids)  # earlier ones get its values: writing them twice is then in any order the same
        features = nn.functional.normalize(features.detach()[last].float(), dim=1)
        finite = features.sum(dim=1).isfinite()  # only if all terms are
        old_labels = self.labels[ids]
        part = self.part(ids)
        features, old_rows = features[part.places], part.rows
        new_rows = self.momentum * features + (1 - self.momentum) * old_rows
        unseen = (old_labels == UNSEEN)[part.places]
        new_rows = torch.where(unseen[:, None], features, new_rows)  # first visit: nothing to mix with
        new_rows = torch.where(finite[part.places][:, None], new_rows, old_rows)
        nearest = part.told(nearest_centroids(new_rows, centroids)[0])
        new_labels = torch.where(finite, nearest[last], old_labels)
        self.rows[part.at] = new_rows
        self.labels[ids] = new_labels
        counts = finite & (last == torch.arange(len(ids), device=ids.device))
        old, new = (torch.where(counts, labels, UNSEEN) for labels in (old_labels, new_labels))
        return Moves(old, new, old_rows, new_rows, part.places)

    def part(self, ids: Tensor) -> Part:
        """Of these images, the rows that are here."""
        if self.ranks.world_size == 1:
            return Part(self.rows[ids], len(ids), at=ids)
        places = ((ids >= self.own.start) & (ids < self.own.stop)).nonzero().flatten()
        at = ids[places] - self.own.start
        return Part(self.rows[at], len(ids), at, places, self.ranks)

    def members(self, cluster: int) -> Tensor:
        """Ids of a cluster's members, by one scan of the labels."""
        return (self.labels == cluster).nonzero().flatten()


class CentroidsMemory(nn.Module):
    """The mean feature of each of C clusters, as of its last refresh, and the sums (of this rank's rows) and counts (of
    all rows) that it is made from.
    """

    centroids: Tensor
    sums: Tensor
    counts: Tensor
    recorded: Tensor

    def __init__(self, num_clusters: int, dim: int, ranks: Ranks = SINGLE) -> None:
        super().__init__()
        self.ranks = ranks
        self.register_buffer("centroids", torch.zeros(num_clusters, dim))
        self.register_buffer("sums", torch.zeros(num_clusters, dim, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(num_clusters, dtype=torch.int64))
        self.register_buffer("recorded", torch.zeros(num_clusters, dtype=torch.bool))

    @torch.no_grad()
    def move(self, moves: Moves) -> None:
        """Let sums and counts follow the members, and record the clusters that gained or lost one."""
        old, new = moves.old_labels, moves.new_labels
        add_rows(self.sums, moves.old_rows, old[moves.places], sign=-1)
        add_rows(self.sums, moves.new_rows, new[moves.places])
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
        if self.ranks.world_size > 1:  # only the sums of recorded clusters travel
            self.refresh_clusters((self.recorded & (self.counts > 0)).nonzero().flatten())
            self.recorded.zero_()
            return
        due = (self.recorded & (self.counts > 0))[:, None]
        for sums, counts, centroids, here in blocks(self.sums, self.counts[:, None], self.centroids, due):
            centroids.copy_(torch.where(here, (sums / counts).to(centroids.dtype), centroids))
        self.recorded.zero_()

    @torch.no_grad()
    def refresh_clusters(self, clusters: Tensor) -> None:
        """The given (non-empty) clusters' centroids become their members' means, and are recorded no more."""
        shares = self.sums[clusters].div_(self.counts[clusters, None])  # each rank's part of the mean
        self.centroids[clusters] = self.ranks.sum(shares.to(self.centroids.dtype))
        self.recorded[clusters] = False

    @torch.no_grad()
    def rebuild(self, samples: SamplesMemory) -> None:
        """Sums and counts anew from the rows: removes the rounding that additions and subtractions leave behind."""
        counts = cluster_sizes(samples.labels, len(self.counts))
        assert torch.equal(counts, self.counts), "the counts no longer agree with the labels"
        self.count_members(samples)

    @torch.no_grad()
    def count_members(self, samples: SamplesMemory) -> None:
        """Sums and counts from the rows and labels as they are."""
        sums, _ = cluster_sums(samples.rows, samples.own_labels, len(self.counts))
        self.sums.copy_(sums)
        self.counts.copy_(cluster_sizes(samples.labels, len(self.counts)))

    @torch.no_grad()
    def fill(self, samples: SamplesMemory) -> None:
        """All of this memory from the samples memory: used once, after the initial clustering."""
        self.count_members(samples)
        assert int(self.counts.min()) > 0, "an initial cluster is empty"
        for sums, counts, centroids in blocks(self.sums, self.counts[:, None], self.centroids):
            centroids.copy_(self.ranks.sum(sums.clone()) / counts)
        self.recorded.zero_()

    def resize(self, num_clusters: int) -> None:
        """Room for another number of clusters; all of it empty."""
        for name, buffer in list(self.named_buffers()):
            setattr(self, name, buffer.new_zeros((num_clusters, *buffer.shape[1:])))

    @torch.no_grad()
    def relabel(self, samples: SamplesMemory, seen: Tensor) -> None:
        """Label all seen rows by the centroids as they are; sums and counts follow, a cluster may end up empty."""
        nearest, _, _ = nearest_centroids(samples.rows, self.centroids)
        samples.replace_labels(torch.where(seen, nearest, samples.own_labels))
        self.count_members(samples)

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
