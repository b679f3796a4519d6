"""Who is near whom: the exact nearest neighbours of every row, by products of blocks.

Promises: the same bits for the same rows on one machine; beside the result, memory for one block of products. Past
`MOST_CANDIDATES` rows neighbours are sought among that many, evenly spread: cost then grows with N, not its square.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from odcluster.clustering.kmeans import BLOCK

MOST_CANDIDATES = 200_000


@torch.no_grad()
def nearest_neighbours(
    rows: Tensor, k: int, *, usable: Tensor | None = None, poll: Callable[[int], None] = lambda done: None
) -> Tensor:
    """The k nearest other usable rows [N, k] of each row by inner product, nearest first; rows have length 1.

    Where there are fewer than k others, the nearest is repeated. `poll` hears how many rows are done, and may raise.
    """
    num_rows = len(rows)
    ids = torch.arange(num_rows, device=rows.device) if usable is None else usable.nonzero().flatten()
    candidates = ids[:: -(-len(ids) // MOST_CANDIDATES)].contiguous()
    found = torch.empty((num_rows, k), dtype=torch.int64, device=rows.device)
    some = min(k, len(candidates) - 1)
    assert some > 0, "a neighbour needs two rows"
    others = rows[candidates]
    chunk = max(1, BLOCK // len(candidates))
    own = torch.searchsorted(candidates, torch.arange(num_rows, device=rows.device)).clamp(max=len(candidates) - 1)
    for start in range(0, num_rows, chunk):
        here = slice(start, min(start + chunk, num_rows))
        scores = rows[here] @ others.T
        at = torch.arange(here.stop - here.start, device=rows.device)
        is_self = candidates[own[here]] == at + start
        scores[at, own[here]] = torch.where(is_self, -torch.inf, scores[at, own[here]])
        nearest = candidates[scores.topk(some, dim=1).indices]
        found[here] = torch.cat([nearest, nearest[:, :1].expand(-1, k - some)], dim=1)
        poll(here.stop)
    return found


def agreement_of_neighbours(neighbours: Tensor, labels: Tensor) -> float:
    """Share of neighbours with the same label, over all images that have one."""
    known = labels >= 0
    same = (labels[neighbours] == labels[:, None]).float().mean(dim=1)
    return float(same[known].mean())
