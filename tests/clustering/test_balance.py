import pytest
import torch
from torch.nn import functional

from odcluster.clustering.balance import check_room, halve, handle_small_clusters, loss_weights
from odcluster.clustering.memory import CentroidsMemory, Part, SamplesMemory
from odcluster.errors import UserError
from odcluster.methods.odc import weighted_cross_entropy


def memories(rows, labels, num_clusters):
    samples, centroids = SamplesMemory(*rows.shape, 0.5), CentroidsMemory(num_clusters, rows.shape[1])
    samples.rows.copy_(rows)
    samples.labels.copy_(labels)
    centroids.fill(samples)
    return samples, centroids


@pytest.mark.parametrize("seed", range(5))
def test_every_repair_ends_with_no_small_cluster_however_skewed_the_start(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(200, 5, generator=generator)
    labels = torch.zeros(200, dtype=torch.int64)
    labels[:19] = torch.arange(1, 20)  # one giant and nineteen clusters of a single image
    samples, centroids = memories(rows, labels, 20)
    handled = handle_small_clusters(samples, centroids, 4, seed=seed, step=3)
    assert handled >= 19
    assert int(centroids.counts.min()) > 4
    assert torch.equal(torch.bincount(samples.labels, minlength=20), centroids.counts)
    centroids.rebuild(samples)  # asserts the counts


@pytest.mark.parametrize("threshold", [6, 10, 16, 199])
def test_one_pass_ends_with_thresholds_that_have_no_room_and_empties_no_cluster(threshold):
    samples, centroids = memories(torch.randn(200, 5), torch.arange(200) ** 2 % 199 % 20, 20)
    sizes = torch.bincount(samples.labels, minlength=20)
    handled = handle_small_clusters(samples, centroids, threshold, seed=0, step=3, one_pass=True)
    if int(sizes.max()) > threshold:
        assert int((sizes <= threshold).sum()) <= handled <= 20
        assert not torch.equal(torch.bincount(samples.labels, minlength=20), sizes)
    else:
        assert handled == 0, "without a normal cluster there is nowhere to go"
    assert int(centroids.counts.min()) > 0
    assert torch.equal(torch.bincount(samples.labels, minlength=20), centroids.counts)
    sums = centroids.sums.clone()
    centroids.rebuild(samples)
    torch.testing.assert_close(sums, centroids.sums)


def test_one_pass_repairs_a_lone_small_cluster_and_leaves_nothing_else_to_do():
    rows = torch.cat([torch.randn(40, 3) * 0.1, torch.randn(40, 3) * 0.1 + 9, torch.randn(40, 3) * 0.1 - 9])
    labels = torch.tensor([0] * 80 + [1] * 37 + [2] * 3)
    samples, centroids = memories(rows, labels, 3)
    assert handle_small_clusters(samples, centroids, 5, seed=0, step=0, one_pass=True) == 1
    assert centroids.counts.tolist() == [40, 40, 40]


def test_identical_rows_can_be_split_and_repairs_end():
    samples, centroids = memories(torch.ones(64, 3), torch.tensor([0] * 61 + [1, 2, 3]), 4)
    handle_small_clusters(samples, centroids, 7, seed=0, step=0)
    assert int(centroids.counts.min()) > 7
    torch.testing.assert_close(centroids.centroids, torch.ones(4, 3))


@pytest.mark.parametrize(
    "rows", [torch.ones(10, 3), torch.cat([torch.zeros(9, 3), torch.ones(1, 3)]), torch.randn(11, 3)]
)
def test_no_half_is_smaller_than_asked(rows):
    for draw in (0.0, 0.5, 0.999999):
        side = halve(Part(rows, len(rows), torch.arange(len(rows))), 4, draw)
        assert 4 <= int(side.sum()) <= len(rows) - 4


def test_two_separate_groups_are_split_where_they_part():
    rows = torch.cat([torch.randn(30, 4) * 0.1, torch.randn(50, 4) * 0.1 + 5])
    side = halve(Part(rows, len(rows), torch.arange(len(rows))), 1, 0.3)
    assert len(side[:30].unique()) == 1
    assert len(side[30:].unique()) == 1
    assert side[0] != side[-1]


def test_a_repair_depends_only_on_seed_and_step():
    rows, labels = torch.randn(100, 4), torch.tensor([0] * 98 + [1, 2])
    results = []
    for seed, step in [(0, 5), (0, 5), (1, 5), (0, 6)]:
        samples, centroids = memories(rows, labels, 3)
        handle_small_clusters(samples, centroids, 10, seed=seed, step=step)
        results.append(samples.labels.clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2]) or not torch.equal(results[0], results[3])


def test_loss_weights_follow_one_over_square_root():
    weights = loss_weights(torch.tensor([1, 4, 100]))
    torch.testing.assert_close(weights / weights[0], torch.tensor([1.0, 0.5, 0.1]))
    assert bool(loss_weights(torch.tensor([0, 3])).isfinite().all())


def test_the_loss_is_cross_entropy_with_class_weights_and_its_scale_does_not_matter():
    logits, labels = torch.randn(50, 7), torch.randint(0, 7, (50,))
    weights = loss_weights(torch.randint(1, 400, (7,)))
    expected = functional.cross_entropy(logits, labels, weight=weights)
    torch.testing.assert_close(weighted_cross_entropy(logits, labels, weights), expected)
    torch.testing.assert_close(weighted_cross_entropy(logits, labels, weights * 1000), expected)


def test_images_without_a_label_have_no_part_in_the_loss():
    logits, labels = torch.randn(20, 5), torch.randint(0, 5, (20,))
    weights = torch.rand(5) + 0.1
    with_unseen = torch.cat([labels, torch.full((4,), -1)])
    loss = weighted_cross_entropy(torch.cat([logits, torch.randn(4, 5)]), with_unseen, weights)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, labels, weight=weights))
    assert float(weighted_cross_entropy(logits, torch.full((20,), -1), weights)) == 0.0


@pytest.mark.parametrize(
    ("images", "clusters", "threshold"), [(100, 200, 0), (100, 40, 2), (5, 1, 20), (1000, 100, 20)]
)
def test_too_little_room_is_refused_with_a_remedy(images, clusters, threshold):
    with pytest.raises(UserError, match="per cluster") as refusal:
        check_room(images, clusters, threshold)
    assert "--clusters" in str(refusal.value) or "at least" in str(refusal.value)


def test_the_remedies_of_a_refusal_work():
    with pytest.raises(UserError, match="use --clusters 16 or fewer, or --small-cluster 1 or lower"):
        check_room(100, 25, 2)
    check_room(100, 16, 2)
    check_room(100, 25, 1)
