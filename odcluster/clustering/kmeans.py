"""k-means on tensors: pure functions (compare, average, repair) and the loop around them.

Promises: the same bits for the same seed, device and number of threads; no cluster is ever empty, whatever the rows;
centroids are the means of their members on return; beside the rows, memory for a few numbers per row and one block.
The labels are those of Lloyd's plain iterations: a row is not compared with a centroid only where the triangle
inequality, with every rounding error counted at its worst, proves that the comparison would change nothing.
Across ranks each clusters its own rows: sums and counts are added up once per iteration, and all ranks get the same
centroids. Leaves to others: the normalisation of the rows, and what the clusters are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from odcluster.data.randomness import Purpose, permutation
from odcluster.ranks import SINGLE, Ranks

# A block of scores of this many numbers (8 MB) stays in the caches and is not paged in anew for each product: faster
# than all scores of 512 rows and 10,000 centroids at once, and it bounds memory at any N and C.
BLOCK = 1 << 21
CHUNK = 1024
"""Rows of a block: as many as the product needs to run at full speed."""
# Where there is no product, 1 MB is best: 40 % faster than 4 MB.
SMALL_BLOCK = 1 << 18
GROUP = 64
"""The largest of the scores is sought in groups of this many: 5 times faster than one search with an index."""
WORK_PER_POLL = 1 << 33
"""Multiplications between two polls: about 0.1 s on two cores."""


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Sums over many rows are kept in float64; only Apple's GPUs do not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


@torch.no_grad()
def nearest_centroids(
    rows: Tensor, centroids: Tensor, *, ids: Tensor | None = None, poll: Callable[[], None] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """For each row (or those of the given ids): the nearest centroid, lowest index on ties, and the squared distances
    to it and to the second nearest. `poll` is called every 0.1 s or so, and may raise.
    """
    num_rows, num_clusters = len(rows) if ids is None else len(ids), len(centroids)
    half_norms = squared_norms(centroids) / 2  # [C]
    chunk = max(1, min(num_rows, CHUNK, BLOCK // GROUP))
    width = min(BLOCK // chunk // GROUP, -(-num_clusters // GROUP)) * GROUP
    scores = rows.new_empty(chunk * width)
    labels = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    distances = rows.new_empty((2, num_rows))
    work = 0
    for start in range(0, num_rows, chunk):
        here = slice(start, start + chunk)
        part = rows[here] if ids is None else rows[ids[here]]
        label, best = labels[here].zero_(), distances[:, here].fill_(-torch.inf)
        for at in range(0, num_clusters, width):
            few = slice(at, at + width)
            found, (first, second) = two_largest(block_scores(part, centroids[few], half_norms[few], scores))
            label.copy_(torch.where(first > best[0], found + at, label))  # a tie stays with the lower index
            best[1] = torch.maximum(torch.minimum(first, best[0]), torch.maximum(second, best[1]))
            best[0] = torch.maximum(first, best[0])
        best.mul_(-2).add_(torch.linalg.vecdot(part, part)).clamp_(min=0)
        work += part.numel() * num_clusters
        if poll is not None and work >= WORK_PER_POLL:
            poll()
            work = 0
    return labels, distances[0], distances[1]


def block_scores(rows: Tensor, centroids: Tensor, half_norms: Tensor, memory: Tensor) -> Tensor:
    """row . c - |c|^2 / 2 of each row with each centroid, [n, groups, GROUP] in the given memory, filled up with -inf.

    |row - c|^2 = |row|^2 - 2 (row . c - |c|^2 / 2): the largest of these belongs to the nearest centroid.
    """
    groups = -(-len(centroids) // GROUP)
    scores = memory[: len(rows) * groups * GROUP].view(len(rows), groups * GROUP)
    scores[:, len(centroids) :] = -torch.inf
    torch.addmm(half_norms, rows, centroids.T, beta=-1, out=scores[:, : len(centroids)])
    return scores.view(len(rows), groups, GROUP)


def two_largest(scores: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Of scores [n, groups, size]: the position of the largest of each row (the first on ties), it, and the second."""
    tops = scores.amax(dim=2)  # [n, groups]
    group = tops.argmax(dim=1, keepdim=True)  # [n, 1]
    starts = torch.arange(0, tops.numel(), scores.shape[1], device=scores.device)
    members = scores.flatten(0, 1).index_select(0, starts + group.squeeze(1))  # [n, size]
    first, within = members.max(dim=1, keepdim=True)
    in_group = members.scatter_(1, within, -torch.inf).amax(dim=1)
    elsewhere = tops.scatter_(1, group, -torch.inf).amax(dim=1)
    place = group * scores.shape[2] + within
    return place.squeeze(1), (first.squeeze(1), torch.maximum(in_group, elsewhere))


def squared_norms(rows: Tensor) -> Tensor:
    """|row|^2 of each row."""
    norms = rows.new_empty(len(rows))
    for part, target in blocks(rows, norms):
        target.copy_(torch.linalg.vecdot(part, part))
    return norms


def own_distances(rows: Tensor, centroids: Tensor, labels: Tensor) -> Tensor:
    """Squared distance of each row to the centroid of its label; of no meaning for a row labelled -1."""
    distances = rows.new_empty(len(rows))
    for part, label, target in blocks(rows, labels, distances):
        away = part - centroids[label.clamp(min=0)]
        target.copy_(torch.linalg.vecdot(away, away))
    return distances


def blocks(rows: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of all tensors, block by block. Results are best written to such a block: small ones that are
    collected lie between the large ones that are freed, and the process grows by a second table.
    """
    chunk = max(1, SMALL_BLOCK // max(1, rows[:1].numel()))
    yield from zip(*(tensor.split(chunk) for tensor in (rows, *others)), strict=True)


def cluster_sums(rows: Tensor, labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Sum [C, D] (float64) and count [C] of each cluster's rows; rows labelled -1 belong to none."""
    sums = rows.new_zeros((num_clusters, rows.shape[1]), dtype=accumulator_dtype(rows.device))
    for part, label in blocks(rows, labels):
        add_rows(sums, part, label)
    return sums, cluster_sizes(labels, num_clusters)


def cluster_sizes(labels: Tensor, num_clusters: int) -> Tensor:
    """Number of rows of each label from 0, [C]; -1 is not counted."""
    return torch.bincount(labels + 1, minlength=num_clusters + 1)[1:]


def add_rows(sums: Tensor, rows: Tensor, labels: Tensor, sign: int = 1) -> None:
    """Add rows [n, D] to (or, with sign -1, take them from) the sums of their labels; -1 belongs to none."""
    weights = (labels >= 0).to(sums.dtype) * sign  # rather than leaving rows out, for whose number a GPU would be asked
    sums.index_add_(0, labels.clamp(min=0), rows * weights[:, None])


def move_rows(sums: Tensor, rows: Tensor, old_labels: Tensor, new_labels: Tensor) -> None:
    """Let the sums follow the rows whose label is another than before."""
    for ids in (old_labels != new_labels).nonzero().flatten().split(max(1, SMALL_BLOCK // rows.shape[1])):
        add_rows(sums, rows[ids], old_labels[ids], sign=-1)
        add_rows(sums, rows[ids], new_labels[ids])


def repair_empty(labels: Tensor, distances: Tensor, num_clusters: int) -> Tensor:
    """Give every empty cluster the row that is farthest from its own centroid, without emptying another cluster."""
    empty = (cluster_sizes(labels, num_clusters) == 0).nonzero().flatten()
    if len(empty) == 0:
        return labels
    labels = labels.clone()
    # In each cluster the row nearest to the centroid stays; all others may move, the farthest first.
    by_distance = torch.argsort(distances, stable=True)
    by_cluster = by_distance[torch.argsort(labels[by_distance], stable=True)]
    grouped = labels[by_cluster]
    movable = grouped >= 0
    movable[0] = False
    movable[1:] &= grouped[1:] == grouped[:-1]
    candidates = by_cluster[movable]
    farthest = candidates[torch.argsort(distances[candidates], descending=True, stable=True)]
    labels[farthest[: len(empty)]] = empty
    return labels


class Assignment:
    """The labels of all rows, and for each row a distance that no centroid but its own comes nearer than.

    With these bounds most rows need not be compared with most centroids once the centroids have nearly settled
    (Hamerly 2010, "Making k-means even faster", who has no second look at the few that still move far).
    """

    def __init__(self, rows: Tensor, usable: Tensor | None, ranks: Ranks) -> None:
        self.rows, self.usable, self.ranks = rows, usable, ranks
        self.labels = torch.full((len(rows),), -1, dtype=torch.int64, device=rows.device)
        self.distances = rows.new_zeros(len(rows))
        """Squared, to the own centroid."""
        self.others = rows.new_zeros(len(rows))
        self.longest = float(squared_norms(rows).max()) ** 0.5
        assert self.longest < torch.inf, "k-means needs finite rows"

    def compare(self, centroids: Tensor, drift: Tensor | None, poll: Callable[[], None] | None) -> None:
        """Labels for these centroids, each of which has moved by its drift since the last time (None: the first)."""
        if drift is None:
            doubtful = torch.ones_like(self.labels, dtype=torch.bool)
        else:
            doubtful = ~self.provably_kept(centroids, drift, poll)
        if self.usable is not None:
            doubtful &= self.usable
        # All of them in place; where some are left out, blocks of the others are copied.
        ids = None if bool(doubtful.all()) else doubtful.nonzero().flatten()
        where = slice(None) if ids is None else ids
        labels, nearest, second = nearest_centroids(self.rows, centroids, ids=ids, poll=poll)
        self.labels[where], self.distances[where] = labels, nearest
        self.others[where] = (second - self.error(centroids)).clamp_(min=0).sqrt_()

    def provably_kept(self, centroids: Tensor, drift: Tensor, poll: Callable[[], None] | None) -> Tensor:
        """Rows [N] whose own centroid still is the nearest: those with more room than the centroids moved, where
        the few centroids that moved farther than `most` are looked at one by one.
        """
        self.distances = own_distances(self.rows, centroids, self.labels)
        error = self.error(centroids)
        farthest_own = (self.distances + error).sqrt_()
        most = cheapest_bound(self.others - farthest_own, drift)
        self.others -= most
        kept = self.others > farthest_own
        movers = (drift > most).nonzero().flatten()
        if len(movers) > 0:
            ids = kept.nonzero().flatten()
            label, nearest, second = nearest_centroids(self.rows, centroids[movers], ids=ids, poll=poll)
            other = torch.where(movers[label] == self.labels[ids], second, nearest)
            other = (other - error).clamp_(min=0).sqrt_()
            self.others[ids] = torch.minimum(self.others[ids], other)
            kept[ids] = other > farthest_own[ids]
        return kept

    def error(self, centroids: Tensor) -> float:
        """More than rounding can do to a squared distance: products of length D err by at most
        D eps / 2 (|row| + |c|)^2; here four times that, because the comparison that is left out and the drifts that
        were subtracted err too.
        """
        reach = self.longest + float(squared_norms(centroids).max()) ** 0.5
        return (2 * self.rows.shape[1] + 32) * torch.finfo(self.rows.dtype).eps * reach**2

    def fill_empty_clusters(self, num_clusters: int) -> Tensor:
        """Returns the sizes of all clusters [C]; none is empty afterwards."""
        sizes = self.ranks.sum(cluster_sizes(self.labels, num_clusters))
        if bool((sizes > 0).all()):
            return sizes
        repaired = self.repaired(num_clusters)
        self.others[repaired != self.labels] = 0  # their old centroid is nearer than the new one
        self.labels = repaired
        return self.ranks.sum(cluster_sizes(self.labels, num_clusters))

    def repaired(self, num_clusters: int) -> Tensor:
        """Which rows fill empty clusters depends on all ranks: they tell each other two numbers per row, this once."""
        lengths = [int(length) for length in self.ranks.share(len(self.rows))]
        labels, distances = (self.ranks.gather(values, lengths) for values in (self.labels, self.distances))
        before = sum(lengths[: self.ranks.rank])
        return repair_empty(labels, distances, num_clusters)[before : before + len(self.rows)]


def cheapest_bound(room: Tensor, drift: Tensor) -> float:
    """The drift up to which centroids are covered by the bound, so that the fewest comparisons are left to do."""
    ordered = drift.sort().values
    places = [len(ordered) - 1 - len(ordered) * share // 64 for share in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)]
    best, fewest = torch.inf, torch.inf
    for bound in sorted({float(ordered[place]) for place in places}):
        kept, movers = int((room > bound).sum()), int((drift > bound).sum())
        # Copying a row and finding its two best costs as much as about 32 comparisons.
        comparisons = kept * (movers + 32 * (movers > 0)) + (len(room) - kept) * len(drift)
        if comparisons < fewest:
            best, fewest = bound, comparisons
    return best


def kmeans(
    rows: Tensor,
    num_clusters: int,
    *,
    iterations: int = 20,
    seed: int = 0,
    attempt: int = 0,
    start: Tensor | None = None,
    usable: Tensor | None = None,
    poll: Callable[[int], None] | None = None,
    ranks: Ranks = SINGLE,
) -> tuple[Tensor, Tensor]:
    """Cluster rows [N, D] into num_clusters; returns labels [N] and centroids [C, D].

    Starts from the given rows (ids [C]), else from distinct ones drawn by the seed, other ones at each attempt; runs
    Lloyd's iterations until nothing changes or the given number is reached. Rows that are not usable [N] keep the label
    -1. `poll` is called with the iteration before each one and, with one rank, several times a second: for progress,
    and to stop by raising, which all ranks must do alike. With several ranks, rows and labels are those of this one.
    """
    num_usable = ranks.total(len(rows) if usable is None else int(usable.sum()))
    if not 1 <= num_clusters <= num_usable:
        raise ValueError(f"{num_usable} rows cannot fill {num_clusters} clusters; use at most {num_usable} clusters")
    if start is None:
        drawn = torch.from_numpy(permutation(seed, attempt, num_usable, Purpose.KMEANS)[:num_clusters])
        centroids = numbered_rows(rows, usable, drawn.to(rows.device), ranks)
    else:
        centroids = rows[start].clone()
    sums = rows.new_zeros((num_clusters, rows.shape[1]), dtype=accumulator_dtype(rows.device))
    assignment = Assignment(rows, usable, ranks)
    drift = None
    for iteration in range(max(1, iterations)):
        if poll is not None:
            poll(iteration)
        before = assignment.labels.clone()
        within = None if poll is None or ranks.world_size > 1 else partial(poll, iteration)
        assignment.compare(centroids, drift, within)
        sizes = assignment.fill_empty_clusters(num_clusters)
        if not ranks.any(not torch.equal(assignment.labels, before)):
            break
        move_rows(sums, rows, before, assignment.labels)
        totals = sums if ranks.world_size == 1 else ranks.sum(sums.clone())
        means = (totals / sizes[:, None]).to(rows.dtype)
        drift = (means - centroids).norm(dim=1)
        centroids = means
    return assignment.labels, centroids


def numbered_rows(rows: Tensor, usable: Tensor | None, numbers: Tensor, ranks: Ranks) -> Tensor:
    """The rows of the given numbers, counted over the usable ones of all ranks."""
    ids = torch.arange(len(rows), device=rows.device) if usable is None else usable.nonzero().flatten()
    if ranks.world_size == 1:
        return rows[ids[numbers]].clone()
    first = sum(ranks.share(len(ids))[: ranks.rank])
    places = ((numbers >= first) & (numbers < first + len(ids))).nonzero().flatten()
    chosen = rows.new_zeros((len(numbers), rows.shape[1]))
    chosen[places] = rows[ids[numbers[places] - first]]
    return ranks.sum(chosen)


def best_kmeans(
    rows: Tensor,
    num_clusters: int,
    *,
    restarts: int,
    iterations: int = 20,
    seed: int = 0,
    usable: Tensor | None = None,
    poll: Callable[[int], None] = lambda iteration: None,
    ranks: Ranks = SINGLE,
) -> tuple[Tensor, Tensor]:
    """The clustering with the smallest squared distances of several, each from another start; the first is k-means'.

    `poll` hears the iteration, counted over all of them.
    """
    best, found = torch.inf, None
    for attempt in range(restarts):
        before = attempt * iterations
        labels, centroids = kmeans(
            rows,
            num_clusters,
            iterations=iterations,
            seed=seed,
            attempt=attempt,
            usable=usable,
            poll=lambda iteration, before=before: poll(before + iteration),  # type: ignore[misc]
            ranks=ranks,
        )
        if restarts == 1:
            return labels, centroids
        cost = float(ranks.sum(own_distances(rows, centroids, labels).where(labels >= 0, 0.0).sum()))
        if cost < best:
            best, found = cost, (labels, centroids)
    assert found is not None, "k-means needs finite rows, and at least one start"
    return found
