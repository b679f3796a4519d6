"""Average precision: the literal definition, ties as one point, and scikit-learn's for the raw one."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from odcluster.evaluation.average_precision import average_precision, raw_average_precision


def literal(scores: np.ndarray, positive: np.ndarray, *, monotone: bool) -> float:
    """Threshold by threshold, from the highest score down."""
    points = []
    for threshold in sorted(set(scores.tolist()), reverse=True):
        retrieved = scores >= threshold
        points.append((positive[retrieved].mean(), positive[retrieved].sum() / positive.sum()))
    area, last_recall = 0.0, 0.0
    for at, (precision, recall) in enumerate(points):
        height = max(p for p, _ in points[at:]) if monotone else precision
        area += height * (recall - last_recall)
        last_recall = recall
    return area


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_definition_with_and_without_ties(seed: int) -> None:
    generator = np.random.default_rng(seed)
    num = int(generator.integers(1, 80))
    positive = generator.random(num) < 0.3
    positive[generator.integers(num)] = True
    for scores in (generator.normal(size=num), generator.integers(0, 6, num).astype(float)):
        assert average_precision(scores, positive) == pytest.approx(literal(scores, positive, monotone=True))
        raw = raw_average_precision(scores, positive)
        assert raw == pytest.approx(literal(scores, positive, monotone=False))
        assert raw == pytest.approx(average_precision_score(positive, scores))


def test_where_the_two_differ_and_where_not() -> None:
    # Found at ranks 2 and 3: precision 1/2 then 2/3; made monotone, 2/3 at both.
    scores, positive = np.array([4.0, 3.0, 2.0, 1.0]), np.array([False, True, True, False])
    assert average_precision_score(positive, scores) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert average_precision(scores, positive) == pytest.approx(2 / 3)
    # Found at ranks 1 and 3: precision 1 then 2/3, monotone as it is.
    positive = np.array([True, False, True, False])
    assert average_precision(scores, positive) == pytest.approx(average_precision_score(positive, scores))


def test_all_points_count_not_eleven() -> None:
    scores, positive = -np.arange(40.0), np.arange(40) % 2 == 1
    # Found at every even rank: precision 1/2 throughout. One positive at the top lifts one of 21 recall steps.
    positive[0] = True
    precision = np.maximum.accumulate([(i + 2) / (2 * i + 2) for i in range(20)][::-1])[::-1]
    assert average_precision(scores, positive) == pytest.approx((1 + precision.sum()) / 21)


@pytest.mark.parametrize("measure", [average_precision, raw_average_precision])
def test_order_of_tied_images_does_not_matter(measure) -> None:
    generator = np.random.default_rng(0)
    scores, positive = generator.integers(0, 4, 50), generator.random(50) < 0.4
    shuffled = generator.permutation(50)
    assert measure(scores, positive) == pytest.approx(measure(scores[shuffled], positive[shuffled]))
    assert measure(np.zeros(50), positive) == pytest.approx(positive.mean())
    assert measure(positive.astype(float), positive) == 1.0


@pytest.mark.parametrize(
    ("scores", "positive", "words"),
    [
        ([1.0, 2.0], [True], "one of each"),
        ([[1.0]], [[True]], "one of each"),
        ([1.0, 2.0], [False, False], "leave this class out"),
        ([1.0, np.nan], [True, False], "not finite"),
        ([1.0, 2.0], [1, -1], "pass booleans"),
    ],
)
def test_what_cannot_be_measured_is_refused(scores, positive, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        average_precision(scores, np.array(positive))
