"""Keeping clusters useful: small clusters are dissolved before they vanish, and the loss is weighted by cluster size
(section 3.2 of the paper).

Promises: every repair ends, because each one leaves one small cluster fewer: a split never makes a half that is small.
That needs room, N >= 2 (threshold + 1) C, which `check_room` asks for before any training. With `one_pass` the
threshold may be any size: each cluster is repaired at most once per iteration, and halves may be small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from odcluster.clustering.kmeans import nearest_centroids
from odcluster.clustering.memory import CentroidsMemory, Part, SamplesMemory
from odcluster.data.randomness import Purpose, uniforms
from odcluster.errors import UserError

SPLIT_ITERATIONS = 20


def loss_weights(counts: Tensor) -> Tensor:
    """w_c proportional to 1/sqrt(N_c); an empty cluster, which no label names, counts as one member."""
    return counts.clamp(min=1).float().rsqrt()


def check_room(num_samples: int, num_clusters: int, threshold: int) -> None:
    """Refuse a number of clusters that leaves no room between the small-cluster threshold and the average size."""
    needed = 2 * (threshold + 1)
    if num_samples >= needed * num_clusters:
        return
    most = num_samples // needed
    remedy = f"use --clusters {most} or fewer" if most >= 1 else f"at least {needed} images are needed"
    if (lower := num_samples // (2 * num_clusters) - 1) >= 0:
        remedy += f", or --small-cluster {lower} or lower"
    raise UserError(
        f"{num_samples} images in {num_clusters} clusters leave {num_samples / num_clusters:.1f} images per cluster, "
        f"but dissolving clusters of at most {threshold} needs {needed}: {remedy}"
    )


@torch.no_grad()
def handle_small_clusters(
    samples: SamplesMemory,
    memory: CentroidsMemory,
    threshold: int,
    *,
    seed: int,
    step: int,
    one_pass: bool = False,
) -> int:
    """Dissolve each cluster of at most `threshold` members, give its index to half of the largest; returns how many."""
    handled: list[int] = []
    while bool((small := memory.counts <= threshold).any()):  # the one question to the device in an ordinary step
        normal = ~small
        if one_pass:
            small[handled] = False
            if not (bool(small.any()) and bool(normal.any())):
                break
        cluster = int(small.nonzero()[0])
        dissolve(cluster, samples, memory, normal)
        largest = int(memory.counts.argmax())
        draws = uniforms(seed, Purpose.SPLIT, step, torch.tensor([cluster]).numpy(), 0, 2)[0]
        smallest_half = 1 if one_pass else threshold + 1
        split(largest, cluster, samples, memory, smallest_half=smallest_half, draws=(draws[0], draws[1]))
        handled.append(cluster)
        assert len(handled) <= len(memory.counts), "repairs of small clusters did not end"
    return len(handled)


def dissolve(cluster: int, samples: SamplesMemory, memory: CentroidsMemory, normal: Tensor) -> None:
    """The members go to the nearest centroid among the normal clusters; receivers' centroids are recomputed at once."""
    members = samples.members(cluster)
    if len(members) > 0:
        candidates = normal.nonzero().flatten()
        part = samples.part(members)
        nearest, _, _ = nearest_centroids(part.rows, memory.centroids[candidates])
        receivers = candidates[part.told(nearest)]
        samples.labels[members] = receivers
        memory.sums.index_add_(0, receivers[part.places], part.rows.to(memory.sums.dtype))
        memory.counts.index_add_(0, receivers, torch.ones_like(receivers))
        memory.refresh_clusters(receivers.unique())
    memory.sums[cluster] = 0
    memory.counts[cluster] = 0


def split(
    largest: int,
    empty: int,
    samples: SamplesMemory,
    memory: CentroidsMemory,
    *,
    smallest_half: int,
    draws: tuple[float, float],
) -> None:
    """2-means on the largest cluster; a randomly chosen half takes the empty index; both centroids are recomputed."""
    members = samples.members(largest)
    part = samples.part(members)
    half = halve(part, smallest_half, draw=draws[0])
    leaving = half if draws[1] < 0.5 else ~half
    samples.labels[members[leaving]] = empty
    memory.counts[empty] = leaving.sum()
    memory.counts[largest] = (~leaving).sum()
    for cluster, mask in ((empty, leaving), (largest, ~leaving)):
        memory.sums[cluster] = part.rows[mask[part.places]].to(memory.sums.dtype).sum(dim=0)
    memory.refresh_clusters(torch.tensor([largest, empty], device=members.device))


def halve(part: Part, smallest_half: int, draw: float) -> Tensor:
    """Two halves of n rows by 2-means, as a mask [n]; neither is smaller than `smallest_half` where n allows it.

    Starts from a drawn row and the row farthest from it. Identical rows have no direction to be cut along: they are
    cut in the order of their ids. Across ranks, an iteration tells all of them n numbers and the two means.
    """
    rows, count = part.rows, part.count
    first = part.row(min(int(draw * count), count - 1))
    second = part.row(part.told((rows - first).square().sum(dim=1)).argmax())
    side = torch.zeros(count, dtype=torch.bool, device=rows.device)
    margin = torch.arange(count, device=rows.device, dtype=rows.dtype)
    for _ in range(SPLIT_ITERATIONS):
        if torch.equal(first, second):
            break
        margin = part.told(rows @ (second - first) - (second.square().sum() - first.square().sum()) / 2)
        if torch.equal(new_side := margin > 0, side):  # > 0: nearer to second
            break
        side = new_side
        if side.all() or not side.any():
            break
        first, second = part.mean(~side), part.mean(side)
    least = min(smallest_half, count // 2)
    size = int(side.sum())
    if not least <= size <= count - least:
        size = count // 2 if size in (0, count) else min(max(size, least), count - least)
        side = torch.zeros_like(side)
        side[torch.argsort(margin, descending=True, stable=True)[:size]] = True
    return side
