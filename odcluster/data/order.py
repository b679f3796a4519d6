"""Which sample ids at which step: pure functions of (seed, epoch), the same on every rank.

The order of an epoch belongs to the whole run, not to a rank: all ranks compute it, and each takes its slice
of a batch. Hence another number of ranks with the same global batch sees the same samples at the same step,
and a run stopped at step s goes on at step s with nothing restored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from odcluster.data.randomness import Purpose, integers, permutation, uniforms

Ids = NDArray[np.int64]


def epoch_order(seed: int, epoch: int, num_samples: int, replacement: bool = False) -> Ids:
    """The ids of one epoch in the order they are visited, as many as there are samples.

    With replacement (as the authors' code samples) an id may occur twice, even in one batch, or not at all.
    """
    if replacement:
        return integers(seed, Purpose.REPLACEMENT, epoch, num_samples, num_samples)
    return permutation(seed, epoch, num_samples)


def num_steps(num_samples: int, batch_size: int) -> int:
    """Full batches in an epoch, at least one.

    The remainder is dropped, because a small last batch disturbs batch norm; it is another one each epoch, so
    that every sample is visited in time. Fewer samples than a batch make one smaller batch.
    """
    return max(1, num_samples // batch_size)


def batch_ids(order: Ids, step: int, batch_size: int) -> Ids:
    """The ids of step 0, 1, ... of an epoch: the global batch, before ranks share it."""
    assert 0 <= step < num_steps(len(order), batch_size), (step, len(order), batch_size)
    return order[step * batch_size : (step + 1) * batch_size]


def rank_slice(ids: Ids, rank: int, world_size: int) -> Ids:
    """The part of a batch that a rank loads: contiguous, so that gathering in rank order restores the batch.

    Sizes differ by at most one. A part is empty when there are fewer ids than ranks.
    """
    assert 0 <= rank < world_size, (rank, world_size)
    return ids[len(ids) * rank // world_size : len(ids) * (rank + 1) // world_size]


def uniform_over_clusters(seed: int, epoch: int, labels: NDArray[np.integer], num: int) -> Ids:
    """num ids, each drawn from a uniformly chosen non-empty cluster, then uniformly among its members.

    DeepCluster samples so, lest large clusters drown the loss. A label of -1 (no cluster) is never drawn.
    """
    members = np.argsort(labels, kind="stable")
    members = members[labels[members] >= 0]
    if len(members) == 0:
        raise ValueError("No sample has a cluster: assign labels before sampling over clusters.")
    _, starts, sizes = np.unique(labels[members], return_index=True, return_counts=True)
    draws = uniforms(seed, Purpose.CLUSTERS, epoch, np.arange(num), 0, 2)
    cluster = np.floor(draws[:, 0] * len(sizes)).astype(np.int64)
    within = np.floor(draws[:, 1] * sizes[cluster]).astype(np.int64)
    return members[starts[cluster] + within].astype(np.int64)
