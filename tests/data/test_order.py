"""The order of samples is a function of (seed, epoch), whoever asks and however many ranks share it."""

from __future__ import annotations

import numpy as np
import pytest

from odcluster.data.order import batch_ids, epoch_order, num_steps, rank_slice, uniform_over_clusters


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_an_epoch_visits_every_sample_once(seed: int) -> None:
    order = epoch_order(seed, 0, 103)
    np.testing.assert_array_equal(np.sort(order), np.arange(103))
    np.testing.assert_array_equal(order, epoch_order(seed, 0, 103))
    assert not np.array_equal(order, epoch_order(seed, 1, 103))
    assert not np.array_equal(order, epoch_order(seed + 1, 0, 103))


def test_with_replacement_a_share_of_one_over_e_is_left_out() -> None:
    num = 20_000
    order = epoch_order(0, 0, num, replacement=True)
    assert len(order) == num
    assert order.min() >= 0
    assert order.max() < num
    left_out = 1 - len(np.unique(order)) / num
    # The number left out has standard deviation sqrt(n (1/e - 2/e^2)) = 44; allow 5 of them.
    assert abs(left_out - np.exp(-1)) < 5 * 44 / num


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "expected"), [(100, 10, 10), (109, 10, 10), (9, 10, 1), (1, 1, 1)]
)
def test_num_steps_counts_full_batches(num_samples: int, batch_size: int, expected: int) -> None:
    assert num_steps(num_samples, batch_size) == expected


def test_batches_do_not_overlap_and_the_remainder_differs_between_epochs() -> None:
    dropped = []
    for epoch in range(20):
        order = epoch_order(0, epoch, 103)
        batches = [batch_ids(order, step, 10) for step in range(num_steps(103, 10))]
        assert all(len(batch) == 10 for batch in batches)
        visited = np.concatenate(batches)
        assert len(np.unique(visited)) == 100
        dropped.append(frozenset(range(103)) - set(visited.tolist()))
    assert len(set(dropped)) > 15


def test_fewer_samples_than_a_batch_make_one_smaller_batch() -> None:
    order = epoch_order(0, 0, 7)
    np.testing.assert_array_equal(batch_ids(order, 0, 10), order)


def test_a_step_beyond_the_epoch_is_an_error() -> None:
    with pytest.raises(AssertionError):
        batch_ids(epoch_order(0, 0, 103), 10, 10)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 20])
def test_ranks_share_a_batch_without_gap_or_overlap(world_size: int) -> None:
    batch = batch_ids(epoch_order(0, 0, 100), 2, 17)
    parts = [rank_slice(batch, rank, world_size) for rank in range(world_size)]
    np.testing.assert_array_equal(np.concatenate(parts), batch)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_sampling_over_clusters_is_uniform_over_clusters_and_their_members() -> None:
    labels = np.array([5] * 90 + [-1] * 30 + [2] * 10 + [7])  # clusters 2, 5, 7; the others are empty
    num = 30_000
    ids = uniform_over_clusters(0, 0, labels, num)
    assert ids.dtype == np.int64
    assert len(ids) == num
    assert (labels[ids] >= 0).all()
    for cluster in (2, 5, 7):
        drawn = np.bincount(ids[labels[ids] == cluster], minlength=len(labels))[labels == cluster]
        assert abs(drawn.sum() - num / 3) < 5 * np.sqrt(num * 2 / 9)  # 5 standard errors
        assert np.abs(drawn - drawn.mean()).max() < 5 * np.sqrt(drawn.mean()) + 1


def test_sampling_over_clusters_is_a_function_of_seed_and_epoch() -> None:
    labels = np.random.default_rng(0).integers(0, 9, 500)
    ids = uniform_over_clusters(1, 2, labels, 300)
    np.testing.assert_array_equal(ids, uniform_over_clusters(1, 2, labels, 300))
    np.testing.assert_array_equal(ids[:100], uniform_over_clusters(1, 2, labels, 100))
    assert not np.array_equal(ids, uniform_over_clusters(1, 3, labels, 300))
    assert not np.array_equal(ids, uniform_over_clusters(2, 2, labels, 300))


def test_sampling_without_any_cluster_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="assign labels"):
        uniform_over_clusters(0, 0, np.full(10, -1), 5)
