"""How far two labellings of the same images agree: NMI, ARI, purity, Hungarian accuracy, share that changed.

Everything but the share is computed from one table of joint counts, held sparse, in float64: a million images
in 10,000 clusters take well under a second. A negative label means "none" (an image that was refused, a class
nobody knows); such an image is left out, on both sides. Where scikit-learn has a measure, the values are its.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Labels = NDArray[np.integer] | torch.Tensor | Sequence[int]


@dataclass(frozen=True)
class JointCounts:
    """How many images carry both labels, for every pair of labels that occurs; pairs are sorted by row."""

    rows: NDArray[np.int64]
    """Position of the first label among those that occur, per pair."""
    columns: NDArray[np.int64]
    """Position of the second label, per pair."""
    counts: NDArray[np.int64]
    """Images with that pair."""
    row_totals: NDArray[np.int64]
    column_totals: NDArray[np.int64]

    @property
    def num_images(self) -> int:
        return int(self.counts.sum())


def joint_counts(a: Labels, b: Labels) -> JointCounts:
    """Count the pairs of labels; ValueError if no image has both."""
    a, b = _both_present(a, b)
    if not len(a):
        raise ValueError("No image has a label on both sides; pass labels of the same images, -1 only where unknown.")
    _, a = np.unique(a, return_inverse=True)
    _, b = np.unique(b, return_inverse=True)
    num_columns = int(b.max()) + 1
    codes, counts = np.unique(a.astype(np.int64) * num_columns + b, return_counts=True)
    rows, columns = np.divmod(codes, num_columns)
    return JointCounts(rows, columns, counts, np.bincount(a), np.bincount(b))


def nmi(a: Labels, b: Labels) -> float:
    """Mutual information over the mean of both entropies: 1 for the same partition, 0 if independent."""
    table = joint_counts(a, b)
    if len(table.row_totals) == len(table.column_totals) == 1:
        return 1.0  # the same trivial partition twice; the quotient would be 0 / 0
    n = table.num_images
    expected = np.log(table.row_totals[table.rows]) + np.log(table.column_totals[table.columns]) - np.log(n)
    information = float((table.counts / n * (np.log(table.counts) - expected)).sum())
    if information <= np.finfo(np.float64).eps:
        return 0.0
    return information / (0.5 * (_entropy(table.row_totals) + _entropy(table.column_totals)))


def ari(a: Labels, b: Labels) -> float:
    """Adjusted Rand index: agreement on pairs of images, 1 for the same partition, about 0 if random."""
    table = joint_counts(a, b)
    # Python integers below: for a million images the products exceed 64 bits.
    together = _num_pairs(table.counts)
    in_a, in_b = _num_pairs(table.row_totals), _num_pairs(table.column_totals)
    if in_a == in_b == together:
        return 1.0
    pairs = table.num_images * (table.num_images - 1) // 2
    return 2 * (together * pairs - in_a * in_b) / ((in_a + in_b) * pairs - 2 * in_a * in_b)


def purity(labels: Labels, truth: Labels) -> float:
    """Share of images whose class is the most frequent one of their cluster. Splitting never lowers it."""
    table = joint_counts(labels, truth)
    starts = np.flatnonzero(np.diff(table.rows, prepend=-1))
    return float(np.maximum.reduceat(table.counts, starts).sum() / table.num_images)


def hungarian_accuracy(labels: Labels, truth: Labels, *, num_classes: int | None = None) -> float:
    """Accuracy under the best one-to-one naming of clusters by classes; defined for equally many of both.

    Without `num_classes` the labels that occur are counted; give it when a cluster or class may be empty.
    """
    table = joint_counts(labels, truth)
    shape = (len(table.row_totals), len(table.column_totals))
    if num_classes is None and shape[0] != shape[1]:
        raise ValueError(
            f"Hungarian accuracy needs as many clusters as classes, but there are {shape[0]} and {shape[1]}; "
            "use NMI or purity, or cluster again with as many clusters as classes."
        )
    if num_classes is not None and max(shape) > num_classes:
        raise ValueError(
            f"Hungarian accuracy was asked for {num_classes} classes, but {shape[0]} clusters and {shape[1]} "
            "classes occur; use NMI or purity instead."
        )
    dense = np.zeros(shape, np.int64)
    dense[table.rows, table.columns] = table.counts
    best = linear_sum_assignment(dense, maximize=True)
    return float(dense[best].sum() / table.num_images)


def change_ratio(old: Labels, new: Labels) -> float:
    """Share of images whose label differs from before, names taken literally; 0 if none can be compared."""
    old, new = _both_present(old, new)
    return float(np.mean(old != new)) if len(old) else 0.0


@dataclass(frozen=True, kw_only=True)
class SizeSummary:
    """How the images are spread over the clusters."""

    smallest: int
    largest: int
    median: float
    num_empty: int
    largest_share: float
    """Share of all images that the largest cluster holds; 1 is collapse."""
    evenness: float
    """Entropy of the sizes over its maximum: 1 for equal sizes, 0 when one cluster holds everything."""


def summarise_sizes(counts: Labels) -> SizeSummary:
    """Summarise the number of members of every cluster, the empty ones included."""
    sizes = _as_integers(counts)
    if not len(sizes) or sizes.min() < 0:
        raise ValueError("Cluster sizes are empty or below 0; pass the number of members of every cluster.")
    total = int(sizes.sum())
    even = _entropy(sizes[sizes > 0]) / np.log(len(sizes)) if len(sizes) > 1 and total else float(total > 0)
    return SizeSummary(
        smallest=int(sizes.min()),
        largest=int(sizes.max()),
        median=float(np.median(sizes)),
        num_empty=int((sizes == 0).sum()),
        largest_share=int(sizes.max()) / total if total else 0.0,
        evenness=float(even),
    )


def _both_present(a: Labels, b: Labels) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The two labellings without the images that lack a label on either side."""
    x, y = _as_integers(a), _as_integers(b)
    if len(x) != len(y):
        raise ValueError(f"These are labels of {len(x)} and of {len(y)} images; pass labels of the same images.")
    keep = (x >= 0) & (y >= 0)
    return x[keep], y[keep]


def _as_integers(values: Labels) -> NDArray[np.int64]:
    array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"Labels are {array.dtype} of shape {array.shape}; pass one row of integers.")
    return array.astype(np.int64, copy=False)


def _entropy(totals: NDArray[np.int64]) -> float:
    share = totals / totals.sum()
    return float(-(share * np.log(share)).sum())


def _num_pairs(counts: NDArray[np.int64]) -> int:
    return int((counts * (counts - 1) // 2).sum())
