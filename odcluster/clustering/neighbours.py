"""Who is near whom: the exact nearest neighbours of every row, by products of blocks.

Promises: the same bits for the same rows on one machine; beside the result, memory for one block of products. Past
`MOST_CANDIDATES` rows neighbours are sought among that many, evenly spread: cost then grows with N, not its square.
Across ranks, each looks for the neighbours of its own rows, and sends its candidates to the others in its turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from odcluster.clustering.kmeans import BLOCK
from odcluster.ranks import SINGLE, Ranks

MOST_CANDIDATES = 200_000


@torch.no_grad()
def nearest_neighbours(
    rows: Tensor,
    k: int,
    *,
    usable: Tensor | None = None,
    poll: Callable[[int], None] = lambda done: None,
    ranks: Ranks = SINGLE,
) -> Tensor:
    """The k nearest other usable rows [N, k] of each row by inner product, nearest first; rows have length 1.

    Where there are fewer than k others, the nearest is repeated. `poll` hears how many rows are done, and may raise.
    """
    ids = torch.arange(len(rows), device=rows.device) if usable is None else usable.nonzero().flatten()
    lengths, counts = zip(*ranks.share([len(rows), len(ids)]), strict=True)
    spacing = max(1, -(-sum(counts) // MOST_CANDIDATES))
    first, number = sum(lengths[: ranks.rank]), sum(counts[: ranks.rank])
    candidates = ids[-number % spacing :: spacing]
    sizes = ranks.share(len(candidates))
    some = min(k, sum(sizes) - 1)
    assert some > 0, "a neighbour needs two rows"
    scores = rows.new_full((len(rows), 0), -torch.inf)
    found = torch.empty((len(rows), 0), dtype=torch.int64, device=rows.device)
    alone = ranks.world_size == 1
    for source, size in enumerate(sizes):
        if size == 0:
            continue
        mine = source == ranks.rank
        others = rows[candidates] if mine else rows.new_empty((size, rows.shape[1]))
        named = candidates + first if mine else candidates.new_empty(size)
        others, named = ranks.send_from(source, others), ranks.send_from(source, named)
        scores, found = merged(rows, first, others, named, some, scores, found, poll if alone else None)
        if not alone:  # all ranks at the same time
            poll(len(rows) * (source + 1) // ranks.world_size)
    return torch.cat([found, found[:, :1].expand(-1, k - some)], dim=1)


def merged(
    rows: Tensor,
    first: int,
    others: Tensor,
    named: Tensor,
    most: int,
    scores: Tensor,
    found: Tensor,
    poll: Callable[[int], None] | None,
) -> tuple[Tensor, Tensor]:
    """The `most` nearest of those found so far and of others [M, D], with ids `named`; rows have ids from `first`."""
    kept = min(most, found.shape[1] + len(named))
    best, ids = scores.new_empty((len(rows), kept)), found.new_empty((len(rows), kept))
    own = torch.searchsorted(named, torch.arange(len(rows), device=rows.device) + first).clamp(max=len(named) - 1)
    chunk = max(1, BLOCK // len(named))
    for start in range(0, len(rows), chunk):
        here = slice(start, min(start + chunk, len(rows)))
        near = rows[here] @ others.T
        at = torch.arange(here.stop - here.start, device=rows.device)
        is_self = named[own[here]] == at + start + first
        near[at, own[here]] = torch.where(is_self, -torch.inf, near[at, own[here]])
        top = near.topk(min(most, len(named)), dim=1)
        if found.shape[1] == 0:
            best[here], ids[here] = top.values, named[top.indices]
        else:
            together = torch.cat([scores[here], top.values], dim=1)
            best[here], chosen = together.topk(kept, dim=1)
            ids[here] = torch.cat([found[here], named[top.indices]], dim=1).gather(1, chosen)
        if poll is not None:
            poll(here.stop)
    return best, ids


def agreement_of_neighbours(neighbours: Tensor, labels: Tensor) -> float:
    """Share of neighbours with the same label, over all images that have one."""
    known = labels >= 0
    same = (labels[neighbours] == labels[:, None]).float().mean(dim=1)
    return float(same[known].mean())
