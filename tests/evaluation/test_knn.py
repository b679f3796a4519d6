"""Nearest neighbours: equal to loops and to scikit-learn, for any chunk size."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from odcluster.evaluation import knn
from odcluster.evaluation.knn import (
    knn_accuracy,
    leave_one_out_knn_accuracy,
    nearest_neighbours,
    neighbours_kept,
)


def blobs(seed: int, num: int, classes: int = 5, dim: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping classes, so that accuracies are neither chance nor 1."""
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (num,), generator=generator)
    return centres[labels] + 1.8 * torch.randn(num, dim, generator=generator), labels


def literal_accuracy(
    train: torch.Tensor,
    labels: torch.Tensor,
    test: torch.Tensor,
    truth: torch.Tensor,
    *,
    k: int,
    temperature: float = 0.07,
    skip_self: bool = False,
) -> float:
    rows, queries = train.double().numpy(), test.double().numpy()
    right = 0
    for i, query in enumerate(queries):
        similar = [float(row @ query / np.linalg.norm(row) / np.linalg.norm(query)) for row in rows]
        order = sorted((j for j in range(len(rows)) if not (skip_self and i == j)), key=lambda j: -similar[j])
        votes: dict[int, float] = {}
        for j in order[:k]:
            label = int(labels[j])
            votes[label] = votes.get(label, 0.0) + np.exp(similar[j] / temperature)
        right += max(votes, key=lambda c: votes[c]) == int(truth[i])
    return right / len(queries)


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_accuracy_is_what_loops_give(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (*blobs(0, 120), *blobs(1, 50))
    expected = {k: literal_accuracy(*data, k=k, temperature=temperature) for k in (1, 10, 100, 120)}
    if temperature == 1.0:
        assert len(set(expected.values())) > 2  # here k matters
    assert knn_accuracy(*data, ks=(1, 10, 100, 200), temperature=temperature) == expected  # 200 becomes 120
    monkeypatch.setattr(knn, "CHUNK", 7 * 120)
    assert knn_accuracy(*data, ks=(1, 10, 100, 200), temperature=temperature) == expected


def test_accuracy_is_that_of_scikit_learn() -> None:
    (train, labels), (test, truth) = blobs(2, 400), blobs(3, 300)
    for k, accuracy in knn_accuracy(train, labels, test, truth).items():
        reference = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
        score = reference.fit(train.numpy(), labels.numpy()).score(test.numpy(), truth.numpy())
        assert accuracy == pytest.approx(score, abs=1 / 300 + 1e-9), k  # one near-tie may fall either way


def test_leave_one_out_is_what_loops_give(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = blobs(4, 80)
    expected = literal_accuracy(features, labels, features, labels, k=10, skip_self=True)
    accuracy = leave_one_out_knn_accuracy(features, labels, ks=(10, 200))
    assert accuracy[10] == expected
    assert set(accuracy) == {10, 79}
    monkeypatch.setattr(knn, "CHUNK", 7 * 80)
    assert leave_one_out_knn_accuracy(features, labels, ks=(10, 200)) == accuracy


def test_leave_one_out_does_not_see_the_image_itself() -> None:
    features = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(300) % 2  # nothing to learn; with itself as neighbour the accuracy would be 1
    assert leave_one_out_knn_accuracy(features, labels, ks=(1,))[1] == pytest.approx(0.5, abs=0.12)


def test_images_without_label_are_left_out_on_both_sides() -> None:
    (train, labels), (test, truth) = blobs(5, 90), blobs(6, 40)
    expected = knn_accuracy(train[30:], labels[30:], test[10:], truth[10:], ks=(10,))
    labels[:30], truth[:10] = -1, -1
    assert knn_accuracy(train, labels, test, truth, ks=(10,)) == expected


def test_names_of_classes_and_lengths_of_features_do_not_matter() -> None:
    (train, labels), (test, truth) = blobs(7, 90), blobs(8, 40)
    expected = knn_accuracy(train, labels, test, truth)
    names = torch.tensor([4, 10**9, 0, 77, 5])
    scale = torch.rand(90, 1) * 8 + 0.1
    assert knn_accuracy(train * scale, names[labels], test * 3, names[truth]) == expected


def test_neighbours_come_nearest_first() -> None:
    features, _ = blobs(9, 60)
    queries, _ = blobs(10, 20)
    indices, similarities = nearest_neighbours(features, queries, 60)
    cosine = torch.nn.functional.cosine_similarity(queries[:, None], features[None], dim=2)
    torch.testing.assert_close(similarities, cosine.sort(dim=1, descending=True).values)
    torch.testing.assert_close(cosine.gather(1, indices), similarities)


def test_unchanged_neighbourhoods_are_kept_whole_and_unrelated_ones_by_chance() -> None:
    features, _ = blobs(11, 400)
    rotation = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0))).Q
    assert neighbours_kept(features, 5 * features @ rotation) > 0.999
    other = torch.randn(400, 12, generator=torch.Generator().manual_seed(1))
    assert neighbours_kept(features, other) == pytest.approx(10 / 399, abs=0.012)


def test_kept_neighbours_are_what_sets_give() -> None:
    before, _ = blobs(12, 50)
    after = before + 0.7 * torch.randn(50, 12, generator=torch.Generator().manual_seed(2))
    shares = []
    for i in range(50):
        nearest = []
        for features in (before, after):
            cosine = torch.nn.functional.cosine_similarity(features[i : i + 1], features)
            cosine[i] = -2
            nearest.append(set(cosine.argsort(descending=True)[:10].tolist()))
        shares.append(len(nearest[0] & nearest[1]) / 10)
    assert 0.2 < np.mean(shares) < 0.95
    assert neighbours_kept(before, after) == pytest.approx(np.mean(shares))


def test_a_sample_of_queries_is_fixed_and_close_to_the_whole() -> None:
    before, _ = blobs(13, 1000)
    after = before + 0.7 * torch.randn(1000, 12, generator=torch.Generator().manual_seed(3))
    whole = neighbours_kept(before, after)
    torch.manual_seed(123)
    part = neighbours_kept(before, after, max_queries=300)
    assert part == neighbours_kept(before, after, max_queries=300)
    assert part != whole
    assert part == pytest.approx(whole, abs=0.04)


def test_bad_input_is_refused_with_a_remedy() -> None:
    features, labels = blobs(14, 20)
    with pytest.raises(ValueError, match="test set has no labelled image"):
        knn_accuracy(features, labels, features, torch.full((20,), -1))
    with pytest.raises(ValueError, match="20 features but 19 labels"):
        knn_accuracy(features, labels[1:], features, labels)
    with pytest.raises(ValueError, match="same backbone"):
        knn_accuracy(features, labels, features[:, 1:], labels)
    with pytest.raises(ValueError, match="choose k from 1 to 20"):
        nearest_neighbours(features, features, 21)
    with pytest.raises(ValueError, match="at least one"):
        knn_accuracy(features, labels, features, labels, ks=())
    with pytest.raises(ValueError, match="not above 0"):
        knn_accuracy(features, labels, features, labels, temperature=0.0)
    features[3, 2] = torch.nan
    with pytest.raises(ValueError, match="1 of 20 images are not finite"):
        leave_one_out_knn_accuracy(features, labels)
