"""Nearest neighbours against a plain sort of all products."""

from __future__ import annotations

import pytest
import torch

from odcluster.clustering import neighbours
from odcluster.clustering.neighbours import agreement_of_neighbours, nearest_neighbours
from odcluster.models.heads import l2_normalise


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return l2_normalise(torch.randn(200, 6, generator=torch.Generator().manual_seed(0)))


def by_sorting(rows: torch.Tensor, k: int) -> torch.Tensor:
    products = (rows @ rows.T).fill_diagonal_(-2)
    return products.argsort(dim=1, descending=True)[:, :k]


@pytest.mark.parametrize("block", [1 << 21, 1000])
def test_neighbours_are_those_of_a_plain_sort(rows, block, monkeypatch):
    monkeypatch.setattr(neighbours, "BLOCK", block)
    done: list[int] = []
    assert torch.equal(nearest_neighbours(rows, 5, poll=done.append), by_sorting(rows, 5))
    assert done[-1] == 200


def test_rows_that_are_not_usable_are_nobodys_neighbour(rows):
    usable = torch.ones(200, dtype=torch.bool)
    usable[::3] = False
    found = nearest_neighbours(rows, 5, usable=usable)
    assert bool(usable[found].all())
    kept = usable.nonzero().flatten()
    assert torch.equal(found[kept], kept[by_sorting(rows[kept], 5)])


def test_with_few_rows_the_nearest_is_repeated(rows):
    found = nearest_neighbours(rows[:3], 5)
    assert torch.equal(found[:, 2:], found[:, :1].expand(-1, 3))


def test_past_the_limit_neighbours_come_from_a_part_of_the_rows(rows, monkeypatch):
    monkeypatch.setattr(neighbours, "MOST_CANDIDATES", 50)
    found = nearest_neighbours(rows, 5)
    assert set((found % 4).flatten().tolist()) == {0}
    assert bool((found != torch.arange(200)[:, None]).all())


def test_agreement_is_the_share_of_neighbours_with_the_same_label():
    found = torch.tensor([[1, 2], [0, 2], [0, 1], [0, 1]])
    assert agreement_of_neighbours(found, torch.tensor([0, 0, 1, -1])) == pytest.approx((0.5 + 0.5 + 0) / 3)
