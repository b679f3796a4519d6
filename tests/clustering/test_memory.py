import numpy as np
import pytest
import torch
from literal import LiteralMemories

from odcluster.clustering import kmeans as kmeans_module
from odcluster.clustering.balance import handle_small_clusters
from odcluster.clustering.kmeans import cluster_sums, kmeans
from odcluster.clustering.memory import UNSEEN, CentroidsMemory, SamplesMemory, last_occurrences


def unit_rows(count, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, dim, generator=generator), dim=1)


def filled(rows, labels, num_clusters, momentum=0.5):
    samples, centroids = SamplesMemory(*rows.shape, momentum), CentroidsMemory(num_clusters, rows.shape[1])
    samples.rows.copy_(rows)
    samples.labels.copy_(labels)
    centroids.fill(samples)
    return samples, centroids


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("interval", "momentum", "threshold"), [(1, 0.5, 4), (10, 0.5, 4), (10, 1.0, 3), (3, 0.2, 6)])
def test_two_hundred_steps_equal_the_literal_equations(seed, interval, momentum, threshold):
    num_samples, dim, num_clusters, batch = 160, 6, 8, 24
    rows = unit_rows(num_samples, dim, seed)
    labels, _ = kmeans(rows, num_clusters, seed=seed)
    samples, centroids = filled(rows, labels, num_clusters, momentum)
    literal = LiteralMemories(
        rows, labels, num_clusters, momentum=momentum, interval=interval, threshold=threshold, seed=seed
    )
    random = np.random.default_rng(seed)
    handled = handle_small_clusters(samples, centroids, threshold, seed=seed, step=0)
    literal.small_clusters(-1)
    for step in range(200):
        ids = random.integers(0, num_samples, batch)  # with replacement: an image may stand twice in a batch
        # Features drift towards a moving direction, so that clusters grow, shrink and get small.
        features = random.normal(size=(batch, dim)) + 1.5 * np.eye(dim)[(step // 20) % dim]
        moves = samples.update(torch.from_numpy(ids), torch.from_numpy(features).float(), centroids.centroids)
        centroids.move(moves)
        if (step + 1) % interval == 0:
            centroids.refresh()
        handled += handle_small_clusters(samples, centroids, threshold, seed=seed, step=step + 1)
        change = literal.step(ids, features, step)
        assert samples.labels.tolist() == literal.labels.tolist(), f"step {step}"
        np.testing.assert_allclose(samples.rows, literal.rows, atol=1e-5)
        np.testing.assert_allclose(centroids.centroids, literal.centroids, atol=1e-5)
        assert centroids.counts.tolist() == [literal.size(c) for c in range(num_clusters)]
        assert float(moves.change_ratio()) == pytest.approx(change)
        assert int(centroids.counts.min()) > threshold
    assert handled == literal.events > 0, "the test must have met small clusters"


def test_running_sums_stay_with_the_rows_and_rebuild_removes_rounding():
    rows = unit_rows(300, 16, 0)
    labels, _ = kmeans(rows, 10)
    samples, centroids = filled(rows, labels, 10)
    for step in range(100):
        ids = torch.randperm(300, generator=torch.Generator().manual_seed(step))[:32]
        centroids.move(samples.update(ids, unit_rows(32, 16, step), centroids.centroids))
        centroids.refresh()
    sums, counts = cluster_sums(samples.rows, samples.labels, 10)
    torch.testing.assert_close(centroids.sums, sums, atol=1e-9, rtol=0)
    assert torch.equal(centroids.counts, counts)
    centroids.rebuild(samples)
    assert torch.equal(centroids.sums, sums)


def test_only_recorded_centroids_are_refreshed():
    rows = unit_rows(60, 4, 1)
    labels, _ = kmeans(rows, 3)
    samples, centroids = filled(rows, labels, 3)
    before = centroids.centroids.clone()
    member = samples.members(0)[:1]
    moves = samples.update(member, samples.rows[member] * 3, centroids.centroids)  # same direction: no label changes
    centroids.move(moves)
    assert not bool(moves.change_ratio())
    centroids.sums[1] += 1  # would show if cluster 1 were refreshed
    centroids.refresh()
    assert torch.equal(centroids.centroids, before)
    centroids.recorded[1] = True
    centroids.refresh()
    assert not torch.equal(centroids.centroids[1], before[1])
    assert torch.equal(centroids.centroids[[0, 2]], before[[0, 2]])


def test_the_last_occurrence_of_an_image_counts():
    ids = torch.tensor([7, 3, 7, 1, 3, 7])
    assert last_occurrences(ids).tolist() == [5, 4, 5, 3, 4, 5]
    assert last_occurrences(torch.tensor([], dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_feature_never_enters(bad):
    rows = unit_rows(40, 4, 2)
    labels, _ = kmeans(rows, 3)
    samples, centroids = filled(rows, labels, 3)
    features = unit_rows(2, 4, 3)
    features[0, 1] = bad
    samples.update(torch.tensor([5, 6]), features, centroids.centroids)
    assert torch.equal(samples.rows[5], rows[5])
    assert samples.labels[5] == labels[5]
    assert not torch.equal(samples.rows[6], rows[6])
    assert bool(samples.rows.isfinite().all())


def test_an_update_counts_each_image_once_and_only_with_a_finite_feature():
    rows = unit_rows(40, 4, 2)
    labels, _ = kmeans(rows, 3)
    samples, centroids = filled(rows, labels, 3)
    samples.labels[8] = UNSEEN  # never seen, and now not finite either
    centroids.counts[labels[8]] -= 1
    centroids.sums[labels[8]] -= rows[8].double()
    features = unit_rows(6, 4, 5)
    features[3] = features[4, 1] = float("nan")
    moves = samples.update(torch.tensor([5, 6, 5, 7, 8, 6]), features, centroids.centroids)
    assert (moves.new_labels == UNSEEN).tolist() == [True, True, False, True, True, False]
    torch.testing.assert_close(samples.rows[5], 0.5 * rows[5] + 0.5 * features[2])
    torch.testing.assert_close(samples.rows[6], 0.5 * rows[6] + 0.5 * features[5])
    assert samples.labels[8] == UNSEEN
    centroids.move(moves)
    assert int(centroids.counts.sum()) == 39
    sums, counts = cluster_sums(samples.rows, samples.labels, 3)
    assert torch.equal(centroids.counts, counts)
    torch.testing.assert_close(centroids.sums, sums)
    changed = (moves.old_labels != moves.new_labels).float()
    assert float(moves.change_ratio()) == pytest.approx(float(changed.sum()) / 2)
    nothing = samples.update(torch.tensor([3]), torch.full((1, 4), float("nan")), centroids.centroids)
    assert float(nothing.change_ratio()) == 0.0


def test_rows_are_normalised_where_they_lie(monkeypatch):
    monkeypatch.setattr(kmeans_module, "SMALL_BLOCK", 40)  # blocks of 10 rows
    samples = SamplesMemory(35, 4, 0.5)
    features = 3 * unit_rows(35, 4, 1) * torch.arange(1, 36)[:, None]
    features[4, 2], features[20] = float("inf"), 0.0
    samples.rows.copy_(features)
    place = samples.rows.data_ptr()
    seen = torch.ones(35, dtype=torch.bool)
    seen[30] = False
    usable = samples.normalise(seen)
    assert usable.nonzero().flatten().tolist() == [i for i in range(35) if i not in (4, 30)]
    expected = torch.nn.functional.normalize(features, dim=1)
    expected[[4, 30]] = 0
    torch.testing.assert_close(samples.rows, expected)
    assert samples.rows.data_ptr() == place


def test_a_zero_feature_stays_finite():
    rows = unit_rows(40, 4, 2)
    labels, _ = kmeans(rows, 3)
    samples, centroids = filled(rows, labels, 3)
    samples.update(torch.tensor([5]), torch.zeros(1, 4), centroids.centroids)
    torch.testing.assert_close(samples.rows[5], rows[5] / 2)


def test_an_image_first_seen_now_enters_with_its_own_feature():
    rows = unit_rows(40, 4, 2)
    labels, _ = kmeans(rows, 3)
    samples, centroids = filled(rows, labels, 3)
    total = int(centroids.counts.sum())
    centroids.counts[samples.labels[0]] -= 1
    centroids.sums[samples.labels[0]] -= samples.rows[0].double()
    samples.labels[0] = UNSEEN
    samples.rows[0] = 0
    feature = unit_rows(1, 4, 9)
    centroids.move(samples.update(torch.tensor([0]), feature * 7, centroids.centroids))
    torch.testing.assert_close(samples.rows[0], feature[0])
    assert samples.labels[0] != UNSEEN
    assert int(centroids.counts.sum()) == total
    centroids.rebuild(samples)


def test_memories_are_whole_in_a_state_dict():
    samples, centroids = SamplesMemory(5, 3, 0.5), CentroidsMemory(2, 3)
    assert set(samples.state_dict()) == {"rows", "labels"}
    assert set(centroids.state_dict()) == {"centroids", "sums", "counts", "recorded"}


@pytest.mark.parametrize("momentum", [0.0, -1.0, 1.5])
def test_momentum_outside_its_range_is_refused(momentum):
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        SamplesMemory(5, 3, momentum)
