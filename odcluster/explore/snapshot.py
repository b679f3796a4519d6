"""The clusters of all images at one instant, as arrays: members from most to least central, tightness, outliers.

Promises: everything that costs O(N) happens once, in `group`; what people change (`regroup`) costs the clusters it
touches. Nothing here changes after it was made, so any number of threads may look. Files are left to `collection.py`,
what people decided to `curation.py`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from odcluster.clustering.kmeans import add_rows
from odcluster.explore.curation import Curated
from odcluster.explore.oddities import FAR, medians

BLOCK_NUMBERS = 1 << 22
"""Of a block of rows: 16 MB."""
LARGE_BYTES = 1 << 30
"""A copy of rows from this size on lies in a file instead of in memory."""

Ids = NDArray[np.int64]
Labels = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Rows:
    """A feature per image, as it is stored (usually a mapped file), and what scales it to length 1."""

    stored: Floats  # [N, D]
    scale: Floats
    """[N]: 1 / length; 0 for an image without a feature."""

    def __len__(self) -> int:
        return len(self.stored)

    def blocks(self) -> Iterator[slice]:
        yield from (here for here, _ in parts(self, None))

    def unit(self, which: slice | Ids) -> Floats:
        """The rows of these images, of length 1 (or 0)."""
        scaled = self.stored[which] * self.scale[which][:, None]
        return scaled if np.isfinite(scaled).all() else np.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0)

    def similarities(self, query: Floats) -> Floats:
        """Cosine of every row with one [D], block by block."""
        found = np.zeros(len(self), np.float32)
        length = float(np.linalg.norm(query))
        if length > 0:
            query = (query / length).astype(np.float32)
            for block in self.blocks():
                np.matmul(self.stored[block], query, out=found[block])
            with np.errstate(invalid="ignore"):
                found *= self.scale
            np.nan_to_num(found, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        return found

    def nearest(self, query: Floats, count: int, without: int | None = None) -> tuple[Ids, Floats]:
        """The `count` images most similar to a row, exactly, and their cosines; the earlier one first among equals."""
        scores = self.similarities(query)
        allowed = self.scale > 0
        if without is not None:
            allowed[without] = False
        scores[~allowed] = -np.inf
        count = min(count, int(allowed.sum()))
        if count == 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        ids = np.flatnonzero(scores >= least)
        ids = ids[np.lexsort((ids, -scores[ids]))][:count]
        return ids, scores[ids].clip(-1, 1)

    def normalised(self, directory: Path) -> Floats:
        """All rows at length 1. A large table lies in a file without a name, in `directory`."""
        if self.stored.nbytes >= LARGE_BYTES:
            with tempfile.TemporaryFile(dir=directory) as file:
                copy: Floats = np.memmap(file, np.float32, "w+", shape=self.stored.shape)
        else:
            copy = np.empty(self.stored.shape, np.float32)
        for block in self.blocks():
            copy[block] = self.unit(block)
        return copy


def measure(stored: Floats, usable: NDArray[np.bool_] | None = None) -> Rows:
    """Rows with their lengths; one that is not usable, not finite or of length 0 is no feature."""
    rows = Rows(stored, np.zeros(len(stored), np.float32))
    for block in rows.blocks():
        part = stored[block]
        lengths = np.sqrt(np.einsum("ij,ij->i", part, part))
        good = np.isfinite(lengths) & (lengths > 1e-12)
        if usable is not None:
            good &= usable[block]
        np.divide(1.0, lengths, out=rows.scale[block], where=good)
    rows.scale.flags.writeable = False
    return rows


@dataclass(frozen=True, eq=False)
class Clusters:
    """Which image is where, and how central."""

    labels: Labels  # [N], -1: none
    similarities: Floats
    """[N]: cosine to the centre of the own cluster; nan where it is not known."""
    outliers: NDArray[np.bool_]  # [N]
    centroids: Floats | None
    """[C, D], length 1; None where there are no features."""
    sizes: NDArray[np.int64]  # [C]
    tightness: Floats
    """[C]: mean similarity of the members; nan where it is not known."""
    order: Ids
    """All images, cluster after cluster, the most central first; those without a cluster at the front."""
    starts: NDArray[np.int64]  # [C + 1], places in `order`
    typical: float
    """Median over all images of how far a similarity lies from the median of its cluster."""
    changed: dict[int, Ids] = field(default_factory=dict)
    """Members of the clusters that people changed: these count, not `order`."""

    def __len__(self) -> int:
        return len(self.sizes)

    def members(self, cluster: int) -> Ids:
        """The images of a cluster, the most central first."""
        if (members := self.changed.get(cluster)) is not None:
            return members
        if cluster + 1 >= len(self.starts):
            return np.empty(0, np.int64)
        return self.order[self.starts[cluster] : self.starts[cluster + 1]]

    def nearest(self, query: Floats, count: int, among: Ids) -> tuple[Ids, Floats]:
        """The clusters whose centres have the highest cosine with a row of length 1, among the given ones."""
        if self.centroids is None:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        scores = self.centroids[among] @ query
        best = np.lexsort((among, -scores))[:count]
        return among[best], scores[best]


def group(
    given: NDArray[np.integer],
    num_clusters: int,
    rows: Rows | None,
    *,
    centroids: Floats | None = None,
    similarities: Floats | None = None,
) -> Clusters:
    """The clusters of all images, given their labels [N].

    With rows, similarities are cosines to the centroids, or else to the members' means.
    """
    labels: Labels = np.asarray(given, np.int64)
    if rows is not None:
        centres = normalise(centroids) if centroids is not None else means(rows, labels, num_clusters)
        found = own_similarities(rows, labels, centres)
    else:
        centres = None
        found = np.full(len(labels), np.nan, np.float32) if similarities is None else similarities.astype(np.float32)
        found[labels < 0] = np.nan
    order = np.lexsort((-found, labels))  # stable, nan last
    starts = np.searchsorted(labels, np.arange(num_clusters + 1), sorter=order)
    sizes = np.diff(starts)
    ordered = found[order]
    tightness = segment_means(ordered[starts[0] :], starts - starts[0])
    limits, typical = outlier_limits(found, labels, num_clusters)
    outliers = found < np.r_[limits, -np.inf][labels]  # the last is that of -1
    return Clusters(labels, found, outliers, centres, sizes, tightness, order, starts, typical)


def regroup(base: Clusters, rows: Rows | None, state: Curated) -> Clusters:
    """The clusters as people changed them. One that gained images gets a new centre; one that only lost some keeps it,
    and with it the order of those that stayed.
    """
    labels = state.labels(base.labels)
    changed = np.flatnonzero(labels != base.labels)
    total = max(len(base), int(labels.max(initial=-1)) + 1, *(cluster + 1 for cluster in state.created))
    if len(changed) == 0 and total == len(base):
        return base
    more = total - len(base)
    sizes = np.r_[base.sizes, np.zeros(more, np.int64)]
    tightness = np.r_[base.tightness, np.full(more, np.nan, np.float32)]
    similarities, outliers, centroids = base.similarities.copy(), base.outliers.copy(), base.centroids
    outliers[changed] = False
    gained, lost = (found[found >= 0] for found in (np.unique(labels[changed]), np.unique(base.labels[changed])))

    ids = _members(labels, gained, total)
    own = np.searchsorted(gained, labels[ids])  # 0, 1, 2, ... for the clusters that gained
    if rows is not None and centroids is not None:
        centroids = np.concatenate((centroids, np.zeros((more, centroids.shape[1]), np.float32)))
        centroids[gained] = means(rows, own, len(gained), ids)
        similarities[ids] = own_similarities(rows, own, centroids[gained], ids)
    limits, _ = outlier_limits(similarities[ids], own, len(gained), base.typical)
    outliers[ids] = similarities[ids] < limits[own]

    touched = np.union1d(gained, lost)
    ids = _members(labels, touched, total)
    own = np.searchsorted(touched, labels[ids])
    ids = ids[np.lexsort((-similarities[ids], own))]
    starts = np.searchsorted(np.sort(own), np.arange(len(touched) + 1))
    sizes[touched] = np.diff(starts)
    tightness[touched] = segment_means(similarities[ids], starts)
    return dataclasses.replace(
        base,
        labels=labels,
        similarities=similarities,
        outliers=outliers,
        centroids=centroids,
        sizes=sizes,
        tightness=tightness,
        changed=dict(zip(touched.tolist(), np.split(ids, starts[1:-1]), strict=True)),
    )


def _members(labels: Labels, clusters: Ids, total: int) -> Ids:
    """All images of these clusters, by number."""
    wanted = np.zeros(total + 1, bool)  # the last is that of -1
    wanted[clusters] = True
    return np.flatnonzero(wanted[labels])


def segment_means(ordered: Floats, starts: NDArray[np.int64]) -> Floats:
    """Mean of the known values of each part [C]; nan where none is known."""
    known = np.isfinite(ordered)
    at = np.minimum(starts[:-1], len(ordered))  # of an empty part at the end: the 0 behind the last value
    sums = np.add.reduceat(np.r_[np.where(known, ordered, 0.0).astype(np.float64), 0.0], at)
    counts = np.add.reduceat(np.r_[known.astype(np.int64), 0], at)
    some = (np.diff(starts) > 0) & (counts > 0)
    return np.where(some, sums / np.maximum(counts, 1), np.nan).astype(np.float32)


def outlier_limits(
    similarities: Floats, labels: Labels, num_clusters: int, typical: float | None = None
) -> tuple[NDArray[np.float64], float]:
    """Below which similarity an image of each cluster is an outlier [C], by the rule of
    `oddities.far_from_their_cluster`; and the deviation that is typical over all images, unless it is given.
    """
    known = np.flatnonzero((labels >= 0) & np.isfinite(similarities))
    limits = np.full(num_clusters, -np.inf)
    if len(known) == 0:
        return limits, 0.0
    own, values = labels[known], similarities[known].astype(np.float64)
    centres = medians(values, own)
    deviations = np.abs(centres[own] - values)
    if typical is None:
        typical = float(np.median(deviations))
    spreads = 1.4826 * np.maximum(medians(deviations, own), max(typical / 2, 1e-4))
    limits[: len(centres)] = np.where(np.isnan(centres), -np.inf, centres - FAR * spreads)
    return limits, typical


def own_similarities(rows: Rows, labels: Labels, centroids: Floats, ids: Ids | None = None) -> Floats:
    """Cosine of each row (or of those of `ids`) with the centre of its label; nan where there is no row or no label."""
    found = np.full(len(labels), np.nan, np.float32)
    for here, which in parts(rows, ids):
        known = (labels[here] >= 0) & (rows.scale[which] > 0)
        products = np.einsum("ij,ij->i", rows.unit(which), centroids[labels[here].clip(min=0)])
        found[here] = np.where(known, products.clip(-1, 1), np.nan)
    return found


def means(rows: Rows, labels: Labels, num_clusters: int, ids: Ids | None = None) -> Floats:
    """Mean of the unit rows (or of those of `ids`) of each label, at length 1: [C, D]; zeros where there are none."""
    sums = torch.zeros((num_clusters, rows.stored.shape[1]), dtype=torch.float64)
    for here, which in parts(rows, ids):
        add_rows(sums, torch.from_numpy(rows.unit(which)), torch.from_numpy(labels[here].copy()))
    return normalise(sums.numpy())


def parts(rows: Rows, ids: Ids | None) -> Iterator[tuple[slice, slice | Ids]]:
    """Blocks of all rows, or of those of `ids`: their places, and the rows there."""
    size = max(1, BLOCK_NUMBERS // max(1, rows.stored.shape[1]))
    for start in range(0, len(rows) if ids is None else len(ids), size):
        here = slice(start, start + size)
        yield here, here if ids is None else ids[here]


def normalise(vectors: NDArray[np.floating]) -> Floats:
    """Rows at length 1, float32; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
