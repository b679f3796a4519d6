import pytest
import torch
from sklearn.cluster import KMeans

from odcluster.clustering import kmeans as module
from odcluster.clustering.kmeans import cluster_sums, kmeans, nearest_centroids, repair_empty


def inertia(rows, labels, centroids):
    return float((rows - centroids[labels]).square().sum())


def blobs(count, clusters, dim, seed, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, dim, generator=generator) * 3
    which = torch.randint(0, clusters, (count,), generator=generator)
    return centres[which] + spread * torch.randn(count, dim, generator=generator), which


@pytest.mark.parametrize("seed", range(4))
def test_inertia_is_that_of_scikit_learn(seed):
    rows = torch.randn(2000, 16, generator=torch.Generator().manual_seed(seed))
    labels, centroids = kmeans(rows, 30, iterations=50, seed=seed)
    reference = KMeans(30, init="random", n_init=1, max_iter=50, random_state=seed).fit(rows.numpy())
    assert inertia(rows, labels, centroids) < 1.03 * reference.inertia_


def test_from_the_same_start_lloyd_iterations_equal_scikit_learns():
    rows, _ = blobs(500, 5, 8, 0, spread=1.5)
    labels, centroids = kmeans(rows, 5, iterations=100, seed=1)
    start = module.permutation(1, 0, 500, module.Purpose.KMEANS)[:5].copy()
    reference = KMeans(5, init=rows[start].numpy(), n_init=1, max_iter=100, tol=0).fit(rows.numpy())
    assert labels.tolist() == reference.labels_.tolist()
    torch.testing.assert_close(centroids, torch.from_numpy(reference.cluster_centers_), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_no_cluster_is_empty_and_centroids_are_means(seed):
    rows = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed)).round()  # many equal rows
    labels, centroids = kmeans(rows, 50, seed=seed)
    sums, counts = cluster_sums(rows, labels, 50)
    assert int(counts.min()) >= 1
    torch.testing.assert_close(centroids, (sums / counts[:, None]).float())


@pytest.mark.parametrize("clusters", [1, 2, 10])
def test_identical_rows_still_fill_every_cluster(clusters):
    labels, centroids = kmeans(torch.ones(10, 4), clusters)
    assert sorted(labels.unique().tolist()) == list(range(clusters))
    torch.testing.assert_close(centroids, torch.ones(clusters, 4))


def test_the_same_seed_gives_the_same_bits_and_the_input_is_left_alone():
    rows, _ = blobs(300, 6, 5, 3)
    copy = rows.clone()
    first, second = kmeans(rows, 12, seed=4), kmeans(rows, 12, seed=4)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(rows, copy)
    assert not torch.equal(first[1], kmeans(rows, 12, seed=5)[1])


def test_blocks_do_not_change_the_result(monkeypatch):
    rows, _ = blobs(257, 6, 5, 3)
    whole = nearest_centroids(rows, rows[:9])
    sums = cluster_sums(rows, whole[0], 9)
    monkeypatch.setattr(module, "BLOCK", 50)
    assert torch.equal(nearest_centroids(rows, rows[:9])[0], whole[0])
    torch.testing.assert_close(cluster_sums(rows, whole[0], 9)[0], sums[0])


def test_nearest_is_nearest_and_ties_go_to_the_lowest_index():
    rows, centroids = torch.randn(100, 7), torch.randn(13, 7)
    labels, distances = nearest_centroids(rows, centroids)
    exact = torch.cdist(rows.double(), centroids.double()) ** 2
    assert torch.equal(labels, exact.argmin(dim=1))
    torch.testing.assert_close(distances, exact.min(dim=1).values.float(), atol=1e-4, rtol=1e-4)
    doubled = centroids.repeat(2, 1)
    assert int(nearest_centroids(rows, doubled)[0].max()) < 13


def test_repair_takes_the_farthest_rows_and_empties_no_other_cluster():
    labels = torch.tensor([0, 0, 0, 2, 2])
    distances = torch.tensor([0.1, 5.0, 0.2, 0.3, 4.0])
    assert repair_empty(labels, distances, 4).tolist() == [0, 1, 0, 2, 3]
    assert repair_empty(torch.tensor([0, 1]), torch.tensor([9.0, 9.0]), 2).tolist() == [0, 1]


@pytest.mark.parametrize("clusters", [0, 11])
def test_more_clusters_than_rows_are_refused(clusters):
    with pytest.raises(ValueError, match="at most 10"):
        kmeans(torch.randn(10, 2), clusters)
