"""Clusters as arrays: what loops over the members give, before and after people changed something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odcluster.explore import snapshot
from odcluster.explore.curation import Curated
from odcluster.explore.oddities import far_from_their_cluster
from odcluster.explore.snapshot import Clusters, group, measure, regroup

NUM_CLUSTERS = 6


@pytest.fixture(params=range(3))
def table(request: pytest.FixtureRequest) -> tuple[snapshot.Rows, np.ndarray]:
    """Rows of any length around a few centres; cluster 4 is empty, some images have no label and one no row."""
    rng = np.random.default_rng(request.param)
    labels = rng.choice([-1, 0, 1, 2, 3, 5], 300)
    rows = rng.normal(size=(NUM_CLUSTERS, 8))[labels] + rng.normal(size=(300, 8)) * rng.uniform(0.1, 1, (300, 1))
    rows[7] = 0
    rows[8] = np.nan
    return measure((rows * rng.uniform(0.2, 5, (300, 1))).astype(np.float32)), labels


def unit(rows: snapshot.Rows) -> np.ndarray:
    stored = np.nan_to_num(rows.stored.astype(np.float64))
    return stored / np.maximum(np.linalg.norm(stored, axis=1, keepdims=True), 1e-9)


def check(clusters: Clusters, rows: snapshot.Rows, labels: np.ndarray, num_clusters: int) -> None:
    """Everything about all clusters, by loops, where centres are means."""
    length_one = unit(rows)
    for cluster in range(num_clusters):
        ids = np.flatnonzero(labels == cluster)
        members = clusters.members(cluster)
        assert sorted(members.tolist()) == ids.tolist()
        assert clusters.sizes[cluster] == len(ids)
        if len(ids) == 0:
            assert np.isnan(clusters.tightness[cluster])
            continue
        own = clusters.similarities[members]
        known = ~np.isnan(own)
        assert np.isnan(own[~known]).all()
        assert (np.diff(own[known]) <= 0).all()  # the most central first, the unknown last
        np.testing.assert_allclose(clusters.tightness[cluster], own[known].mean(), atol=1e-5)
        expected = length_one[members[known]] @ clusters.centroids[cluster]
        np.testing.assert_allclose(own[known], expected, atol=1e-5)
    assert np.isnan(clusters.similarities[[7, 8]]).all()


def test_groups_are_what_loops_give(table: tuple[snapshot.Rows, np.ndarray]) -> None:
    rows, labels = table
    clusters = group(labels, NUM_CLUSTERS, rows)
    check(clusters, rows, labels, NUM_CLUSTERS)
    for cluster in (0, 1, 2, 3, 5):
        mean = unit(rows)[labels == cluster].sum(axis=0)
        np.testing.assert_allclose(clusters.centroids[cluster], mean / np.linalg.norm(mean), atol=1e-5)
    assert (clusters.centroids[4] == 0).all()
    listed = far_from_their_cluster(clusters.similarities, labels).ids
    assert sorted(listed.tolist()) == np.flatnonzero(clusters.outliers).tolist()


def test_given_centroids_and_similarities_are_used(table: tuple[snapshot.Rows, np.ndarray]) -> None:
    rows, labels = table
    given = np.random.default_rng(9).normal(size=(NUM_CLUSTERS, 8)).astype(np.float32)
    check(group(labels, NUM_CLUSTERS, rows, centroids=given), rows, labels, NUM_CLUSTERS)
    stored = np.linspace(-1, 1, len(labels)).astype(np.float32)
    clusters = group(labels, NUM_CLUSTERS, None, similarities=stored)
    assert clusters.centroids is None
    assert clusters.members(2).tolist() == np.flatnonzero(labels == 2)[::-1].tolist()
    nothing = group(labels, NUM_CLUSTERS, None)
    assert np.isnan(nothing.tightness).all()
    assert nothing.members(2).tolist() == np.flatnonzero(labels == 2).tolist()


def test_no_clusters_and_no_images() -> None:
    clusters = group(np.full(5, -1), 0, None)
    assert (len(clusters), clusters.members(0).tolist()) == (0, [])
    assert len(group(np.empty(0, np.int64), 3, None)) == 3


def test_changed_clusters_are_as_if_they_had_been_made_so(table: tuple[snapshot.Rows, np.ndarray]) -> None:
    rows, labels = table
    base = group(labels, NUM_CLUSTERS, rows)
    before = base.labels.copy(), base.similarities.copy(), base.sizes.copy()
    moved = np.flatnonzero(labels == 2)[:5].tolist()
    state = Curated(merged_into={1: 0}, created=[7], placed=dict.fromkeys(moved, 7), excluded={moved[0], 20, 21})
    now = regroup(base, rows, state)
    expected = state.labels(labels)
    assert now.labels.tolist() == expected.tolist()
    check(now, rows, expected, 8)
    whole = group(expected, 8, rows)
    for gained in (0, 7):
        np.testing.assert_allclose(now.centroids[gained], whole.centroids[gained], atol=1e-5)
    assert now.sizes.tolist() == whole.sizes.tolist()
    assert not now.outliers[list(state.excluded)].any()
    assert np.array_equal(base.labels, before[0])  # the snapshot itself stays as it was
    assert np.array_equal(base.similarities, before[1], equal_nan=True)
    assert np.array_equal(base.sizes, before[2])
    assert regroup(base, rows, Curated()) is base


def test_clusters_of_an_earlier_phase_that_edits_still_name_do_no_harm(
    table: tuple[snapshot.Rows, np.ndarray],
) -> None:
    rows, labels = table
    state = Curated(names={90: "gone"}, merged_into={3: 90}, placed={0: 95}, reviewed={99})
    now = regroup(group(labels, NUM_CLUSTERS, rows), rows, state)
    assert now.sizes[90] == (labels[1:] == 3).sum()
    assert now.members(95).tolist() == [0]


@pytest.mark.parametrize("count", [1, 10, 298, 1000])
def test_nearest_is_exact(table: tuple[snapshot.Rows, np.ndarray], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BLOCK_NUMBERS", 8 * 64)  # several blocks
    rows, _ = table
    query = rows.unit(np.array([3]))[0]
    ids, scores = rows.nearest(query * 5, count)
    expected = unit(rows) @ query
    usable = rows.scale > 0
    assert usable.sum() == 298
    order = np.flatnonzero(usable)[np.argsort(-expected[usable], kind="stable")][:count]
    assert ids[0] == 3
    assert len(ids) == min(count, 298)
    np.testing.assert_allclose(scores, expected[order], atol=1e-5)
    assert 3 not in rows.nearest(query, count, without=3)[0]
    assert len(rows.nearest(np.zeros(8, np.float32), 3)[0]) == 3


@pytest.mark.parametrize("large", [1, 1 << 30])
def test_rows_at_length_one(
    table: tuple[snapshot.Rows, np.ndarray], large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "LARGE_BYTES", large)
    rows, _ = table
    np.testing.assert_allclose(rows.normalised(tmp_path), unit(rows) * (rows.scale > 0)[:, None], atol=1e-5)
    assert list(tmp_path.iterdir()) == []
