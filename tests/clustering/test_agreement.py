"""Agreement between labellings: scikit-learn's values, and properties that hold for any labels."""

import time
from itertools import permutations

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from odcluster.clustering.agreement import (
    ari,
    change_ratio,
    hungarian_accuracy,
    nmi,
    purity,
    summarise_sizes,
)


def random_labels(seed: int, num: int, a: int, b: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Two labellings that agree more the smaller the noise."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, a, num)
    other = np.where(rng.random(num) < noise, rng.integers(0, b, num), truth % b)
    return truth, other


DEGENERATE = [
    ([0, 0, 0, 0], [0, 0, 0, 0]),
    ([0, 0, 0, 0], [5, 5, 5, 5]),
    ([0, 0, 0, 0], [0, 1, 2, 3]),
    ([0, 1, 2, 3], [3, 1, 0, 2]),
    ([0, 0, 1, 1], [0, 1, 0, 1]),
    ([0, 0, 1, 1], [0, 0, 0, 0]),
    ([0], [7]),
    ([0, 1], [0, 0]),
]


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("a", "b"), [(5, 5), (3, 40), (200, 2)])
def test_scores_are_those_of_scikit_learn(a: int, b: int, noise: float) -> None:
    truth, other = random_labels(a * b, 700, a, b, noise)
    assert nmi(truth, other) == pytest.approx(normalized_mutual_info_score(truth, other), abs=1e-12)
    assert ari(truth, other) == pytest.approx(adjusted_rand_score(truth, other), abs=1e-12)


@pytest.mark.parametrize(("a", "b"), DEGENERATE)
def test_degenerate_labellings_score_as_in_scikit_learn(a: list[int], b: list[int]) -> None:
    assert nmi(a, b) == pytest.approx(normalized_mutual_info_score(a, b), abs=1e-12)
    assert ari(a, b) == pytest.approx(adjusted_rand_score(a, b), abs=1e-12)


def test_purity_and_hungarian_accuracy_are_what_loops_give() -> None:
    truth, other = random_labels(3, 300, 4, 4, 0.5)
    most_frequent = sum(max(np.sum(truth[other == c] == t) for t in range(4)) for c in range(4))
    assert purity(other, truth) == pytest.approx(most_frequent / 300)
    best = max(np.mean(np.array(names)[other] == truth) for names in permutations(range(4)))
    assert hungarian_accuracy(other, truth) == pytest.approx(best)


@pytest.mark.parametrize("score", [nmi, ari, purity, hungarian_accuracy])
def test_names_of_labels_and_order_of_images_do_not_matter(score) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    truth, other = random_labels(2, 500, 6, 6, 0.4)
    expected = score(other, truth)
    assert 0.1 < expected < 0.9
    names, order = rng.permutation(10**12 // np.arange(1, 7)), rng.permutation(500)
    assert score(names[other][order], truth[order]) == pytest.approx(expected)
    assert score(other, names[truth]) == pytest.approx(expected)


def test_symmetric_scores_do_not_care_which_side_is_the_truth() -> None:
    truth, other = random_labels(4, 400, 7, 11, 0.5)
    assert nmi(truth, other) == pytest.approx(nmi(other, truth))
    assert ari(truth, other) == pytest.approx(ari(other, truth))


@pytest.mark.parametrize("score", [nmi, ari, purity, hungarian_accuracy, change_ratio])
def test_images_without_a_label_on_either_side_are_left_out(score) -> None:  # type: ignore[no-untyped-def]
    truth, other = random_labels(5, 600, 5, 5, 0.5)
    expected = score(other[100:500], truth[100:500])
    assert score(other, truth) != expected
    other[:100], truth[500:] = -1, -1
    assert score(other, truth) == expected
    assert score(torch.tensor(other, dtype=torch.int32), torch.tensor(truth)) == expected


def test_hungarian_accuracy_needs_as_many_clusters_as_classes() -> None:
    with pytest.raises(ValueError, match=r"there are 3 and 2; use NMI or purity"):
        hungarian_accuracy([0, 1, 2], [0, 1, 1])
    assert hungarian_accuracy([0, 0, 2, 2], [0, 0, 1, 2], num_classes=3) == 0.75  # one of three is empty
    with pytest.raises(ValueError, match="asked for 2 classes"):
        hungarian_accuracy([0, 1, 2], [0, 1, 1], num_classes=2)


def test_change_ratio_counts_images_with_another_label() -> None:
    assert change_ratio([0, 1, 2, 3], [0, 1, 3, 2]) == 0.5
    assert change_ratio([0, 1, -1], [0, 1, 5]) == 0.0
    assert change_ratio([-1, -1], [0, 1]) == 0.0


def test_labels_that_cannot_be_compared_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="same images"):
        nmi([0, 1], [0, 1, 2])
    with pytest.raises(ValueError, match="row of integers"):
        ari(np.array([0.5, 1.0]), [0, 1])
    with pytest.raises(ValueError, match="No image has a label on both sides"):
        purity([-1, 0], [0, -1])


def test_a_million_images_take_seconds_and_do_not_overflow() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10_000, 10**6)
    begun = time.perf_counter()
    assert nmi(labels, labels) == pytest.approx(1.0)
    assert ari(labels, labels // 2 * 2 + labels % 2) == 1.0
    assert ari(labels % 2, rng.permutation(labels) % 2) == pytest.approx(0.0, abs=1e-4)
    assert time.perf_counter() - begun < 10


def test_sizes_are_summarised() -> None:
    summary = summarise_sizes(torch.tensor([10, 0, 30, 60]))
    assert (summary.smallest, summary.largest, summary.median, summary.num_empty) == (0, 60, 20.0, 1)
    assert summary.largest_share == 0.6
    share = np.array([0.1, 0.3, 0.6])
    assert summary.evenness == pytest.approx(-(share * np.log(share)).sum() / np.log(4))


def test_evenness_runs_from_collapse_to_equal_sizes() -> None:
    assert summarise_sizes([9, 0, 0]).evenness == 0.0
    assert summarise_sizes([3, 3, 3]).evenness == pytest.approx(1.0)
    assert summarise_sizes([5]).evenness == 1.0
    assert summarise_sizes([0, 0]).largest_share == 0.0
    with pytest.raises(ValueError, match="every cluster"):
        summarise_sizes([3, -1])
