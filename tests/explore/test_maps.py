"""Maps: the principal plane, inside the square, the same every time; UMAP in a process that can be stopped."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest

from odcluster.errors import DataError
from odcluster.explore import maps
from odcluster.explore.snapshot import Rows, measure


def make_rows(num: int, dim: int, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(num, dim)) * np.linspace(3, 0.3, dim) + 2).astype(np.float32)
    rows[5] = 0
    return measure(rows)


def test_pca_is_the_principal_plane(tmp_path: Path) -> None:
    rows = make_rows(500, 12)
    found = maps.pca_map(rows, 0, tmp_path / "explore", "a")
    assert 5 not in found.ids  # no feature, no place
    assert len(found.ids) == 499
    unit = rows.unit(found.ids).astype(np.float64)
    centred = unit - unit.mean(axis=0)
    plane = np.linalg.svd(centred, full_matrices=False)[2][:2]
    expected = centred @ plane.T
    for axis in range(2):  # up to sign, place and scale, and but for the few on the border
        inner = np.abs(found.points[:, axis]) < 0.99
        assert abs(np.corrcoef(found.points[inner, axis], expected[inner, axis])[0, 1]) > 0.9999
    assert np.abs(found.points).max() <= 1
    assert np.abs(found.points[:, 0]).max() == 1


def test_a_map_is_kept_for_its_features_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(60, 6)
    first = maps.pca_map(rows, 0, tmp_path, "a")
    other = maps.pca_map(make_rows(60, 6, seed=1), 0, tmp_path, "b")
    assert not np.array_equal(first.points, other.points)
    assert maps.read_map(tmp_path, "pca", "a") is None
    kept = maps.read_map(tmp_path, "pca", "b")
    assert kept is not None
    assert np.array_equal(kept.points, other.points)
    assert np.array_equal(maps.pca_map(rows, 0, tmp_path / "x", "a").points, first.points)
    (tmp_path / "map-pca.safetensors").write_bytes(b"damaged")
    assert np.array_equal(maps.pca_map(rows, 0, tmp_path, "a").points, first.points)


def test_large_collections_are_sampled_by_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "MOST_POINTS", 50)
    monkeypatch.setattr(maps, "MOST_COVARIANCE", 40)
    rows = make_rows(300, 5)
    first = maps.pca_map(rows, 0, tmp_path / "a", "a")
    assert len(first.ids) == 50
    assert (np.diff(first.ids) > 0).all()
    assert np.array_equal(maps.pca_map(rows, 0, tmp_path / "b", "a").ids, first.ids)
    assert not np.array_equal(maps.pca_map(rows, 1, tmp_path / "c", "a").ids, first.ids)


@pytest.mark.parametrize(("num", "dim"), [(6, 4), (7, 1), (8, 2)])
def test_few_images_and_few_dimensions(tmp_path: Path, num: int, dim: int) -> None:
    points = maps.pca_map(make_rows(num, dim), 0, tmp_path, "a").points
    assert points.shape == (num - 1, 2)
    assert np.isfinite(points).all()
    assert len(maps.pca_map(measure(np.zeros((3, 4), np.float32)), 0, tmp_path, "b").ids) == 0


def test_records_are_what_the_page_reads(tmp_path: Path) -> None:
    found = maps.Map(np.array([2, 7]), np.array([[0.5, -1], [0.25, 1]], np.float32))
    content = found.records(np.array([9, 9, 3, 9, 9, 9, 9, -1]))
    assert len(content) == 2 * 16
    assert np.frombuffer(content, "<i4")[[0, 3, 4, 7]].tolist() == [2, 3, 7, -1]
    assert np.frombuffer(content, "<f4")[[1, 2, 5, 6]].tolist() == [0.5, -1, 0.25, 1]


def test_the_process_of_umap_can_be_stopped_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "COMMAND", [sys.executable, "-c", "import time; time.sleep(60)"])
    workers: list[Popen[bytes]] = []
    raised: list[Exception] = []

    def compute() -> None:
        try:
            maps.umap_map(make_rows(30, 4), 0, tmp_path, "a", workers)
        except DataError as error:
            raised.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    deadline = time.monotonic() + 20
    while not workers:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers[0].kill()
    thread.join(20)
    assert "PCA map is there" in str(raised[0])
    assert workers == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_umap_keeps_groups_apart(tmp_path: Path) -> None:
    pytest.importorskip("umap")
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 2
    rows = measure((rng.normal(size=(2, 16))[labels] * 5 + rng.normal(size=(200, 16))).astype(np.float32))
    found = maps.umap_map(rows, 0, tmp_path, "a", [])
    assert np.abs(found.points).max() <= 1
    centres = np.stack([found.points[labels == label].mean(axis=0) for label in (0, 1)])
    nearest = np.linalg.norm(found.points[:, None] - centres, axis=2).argmin(axis=1)
    assert (nearest == labels).mean() > 0.95
    kept = maps.read_map(tmp_path, "umap", "a")
    assert kept is not None
    assert np.array_equal(kept.points, found.points)
