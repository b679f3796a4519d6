import pytest
import torch
from sklearn.cluster import KMeans

from odcluster.clustering import kmeans as module
from odcluster.clustering.kmeans import (
    best_kmeans,
    cluster_sums,
    kmeans,
    nearest_centroids,
    own_distances,
    repair_empty,
)


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


def small_blocks(monkeypatch):
    """Several blocks of rows, several of centroids, and groups that do not come out even, for 9 centroids and more."""
    for name, value in {"GROUP": 2, "CHUNK": 10, "BLOCK": 40, "SMALL_BLOCK": 35}.items():
        monkeypatch.setattr(module, name, value)


def test_blocks_do_not_change_the_result(monkeypatch):
    rows, _ = blobs(257, 6, 5, 3)
    whole = nearest_centroids(rows, rows[:9])
    sums = cluster_sums(rows, whole[0], 9)
    own = own_distances(rows, rows[:9], whole[0])
    small_blocks(monkeypatch)
    for found, expected in zip(nearest_centroids(rows, rows[:9]), whole, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cluster_sums(rows, whole[0], 9), sums)
    torch.testing.assert_close(own_distances(rows, rows[:9], whole[0]), own)
    torch.testing.assert_close(own, whole[1], atol=1e-4, rtol=1e-4)


def plain_lloyd(rows, start, iterations):
    """Every row against every centroid, every time."""
    centroids, labels = rows[start].clone(), None
    for _ in range(iterations):
        new_labels, distances, _ = nearest_centroids(rows, centroids)
        new_labels = repair_empty(new_labels, distances, len(start))
        if labels is not None and torch.equal(labels, new_labels):
            break
        labels = new_labels
        sums, counts = cluster_sums(rows, labels, len(start))
        centroids = (sums / counts[:, None]).float()
    return labels, centroids


@pytest.mark.parametrize(
    ("spread", "dim", "clusters"), [(0.3, 16, 40), (1.5, 16, 40), (4.0, 48, 25), (3.0, 2, 60), (0.01, 5, 90)]
)
def test_comparisons_left_out_change_no_label(spread, dim, clusters, monkeypatch):
    rows, _ = blobs(3000, 30, dim, 1, spread)
    rows[100:200] = rows[100]  # equal rows, so that clusters get empty
    start = torch.cat([torch.arange(100, 103), torch.arange(500, 500 + clusters - 3)])
    expected = plain_lloyd(rows, start, 20)
    compared = []
    original = nearest_centroids

    def counting(rows, centroids, *, ids=None, poll=None):
        compared.append((len(rows) if ids is None else len(ids)) * len(centroids))
        return original(rows, centroids, ids=ids, poll=poll)

    monkeypatch.setattr(module, "nearest_centroids", counting)
    labels, centroids = kmeans(rows, clusters, iterations=20, start=start)
    assert torch.equal(labels, expected[0])
    torch.testing.assert_close(centroids, expected[1], atol=1e-6, rtol=1e-6)
    assert compared[0] == 3000 * clusters
    assert compared[-1] < 0.9 * compared[0], "no comparison was left out"


def test_rows_that_are_not_usable_have_no_label_and_no_part():
    rows, _ = blobs(400, 6, 5, 3, spread=1.0)
    usable = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.7
    rows[~usable] = 50.0  # would be a cluster of its own, or the farthest rows for an empty one
    rows[usable.nonzero().flatten()[:60]] = rows[usable][0]
    labels, centroids = kmeans(rows, 80, seed=2, usable=usable)
    expected = kmeans(rows[usable], 80, seed=2)
    assert torch.equal(labels[usable], expected[0])
    assert torch.equal(labels == -1, ~usable)
    torch.testing.assert_close(centroids, expected[1])


def test_progress_is_told_within_an_iteration_and_may_stop_it(monkeypatch):
    rows, _ = blobs(300, 6, 5, 3, spread=2.0)
    told = []
    kmeans(rows, 20, iterations=4, poll=told.append)
    assert told == [0, 1, 2, 3], "a short iteration asks once"
    told.clear()
    small_blocks(monkeypatch)
    monkeypatch.setattr(module, "WORK_PER_POLL", 20 * 20 * 5)
    kmeans(rows, 20, iterations=4, poll=told.append)
    assert told.count(0) >= 15
    assert told == sorted(told)

    def stop(iteration):
        if len(told) == 3:
            raise KeyboardInterrupt
        told.append(iteration)

    told.clear()
    with pytest.raises(KeyboardInterrupt):
        kmeans(rows, 20, poll=stop)
    assert told == [0, 0, 0]


def test_nearest_is_nearest_and_ties_go_to_the_lowest_index():
    rows, centroids = torch.randn(100, 7), torch.randn(13, 7)
    labels, distances, second = nearest_centroids(rows, centroids)
    exact = torch.cdist(rows.double(), centroids.double()) ** 2
    assert torch.equal(labels, exact.argmin(dim=1))
    expected = exact.sort(dim=1).values.float()
    torch.testing.assert_close(distances, expected[:, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second, expected[:, 1], atol=1e-4, rtol=1e-4)
    doubled = centroids.repeat(2, 1)
    assert int(nearest_centroids(rows, doubled)[0].max()) < 13


def test_repair_takes_the_farthest_rows_and_empties_no_other_cluster():
    labels = torch.tensor([0, 0, 0, 2, 2])
    distances = torch.tensor([0.1, 5.0, 0.2, 0.3, 4.0])
    assert repair_empty(labels, distances, 4).tolist() == [0, 1, 0, 2, 3]
    assert repair_empty(torch.tensor([-1, 0, 0, -1]), torch.tensor([9.0, 1.0, 2.0, 9.0]), 2).tolist() == [-1, 0, 1, -1]
    assert repair_empty(torch.tensor([0, 1]), torch.tensor([9.0, 9.0]), 2).tolist() == [0, 1]


@pytest.mark.parametrize("clusters", [0, 11])
def test_more_clusters_than_rows_are_refused(clusters):
    with pytest.raises(ValueError, match="at most 10"):
        kmeans(torch.randn(10, 2), clusters)


def test_the_best_of_several_starts_is_taken():
    rows = torch.randn(300, 4, generator=torch.Generator().manual_seed(1))
    once = kmeans(rows, 12, iterations=5, seed=3)
    same = best_kmeans(rows, 12, iterations=5, seed=3, restarts=1)
    assert torch.equal(once[0], same[0])
    assert torch.equal(once[1], same[1])

    def cost(found):
        return float(own_distances(rows, found[1], found[0]).sum())

    heard: list[int] = []
    costs = [cost(best_kmeans(rows, 12, iterations=5, seed=3, restarts=n, poll=heard.append)) for n in range(1, 7)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]
    assert max(heard) >= 5 * 5
