"""Low-shot VOC07: what is drawn, the two rules for the cost, the literal loop, and going on after a stop."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC

from odcluster.errors import DataError, Interrupted
from odcluster.evaluation import lowshot, svm
from odcluster.evaluation.average_precision import average_precision
from odcluster.evaluation.lowshot import SHOTS, Draw, draw_samples, lowshot_map

COSTS = (*svm.COSTS[2::3], *svm.COSTS[-2:])  # of 26, for the loop's sake; 1 and the highest are among them
NAMES = ["cat", "dog"]


def make(seed: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    features = np.maximum(generator.normal(0.4, 1, (num, 10)), 0).astype(np.float32)
    scores = features[:, :2] / (np.linalg.norm(features, axis=1, keepdims=True) + 1) + generator.normal(
        0, 0.1, (num, 2)
    )
    labels = np.where(scores > 0.45, 1, -1)
    labels[generator.random(labels.shape) < 0.1] = 0
    return features, labels.astype(np.int8)


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return *make(0, 300), *make(1, 120)


def test_draws_are_k_positives_and_19_k_negatives_of_their_class() -> None:
    labels = np.random.default_rng(0).choice(np.array([-1, 0, 1], np.int8), (4000, 2), p=[0.7, 0.1, 0.2])
    draws = draw_samples(labels, num_draws=2, seed=3)
    assert [(draw.shots, draw.number) for draw in draws] == [(k, n) for k in SHOTS for n in range(2)]
    assert SHOTS == (1, 2, 4, 8, 16, 32, 64, 96)
    for draw in draws:
        for column in range(2):
            for ids, value, count in ((draw.positives, 1, draw.shots), (draw.negatives, -1, 19 * draw.shots)):
                assert len(set(ids[column])) == len(ids[column]) == count
                assert (labels[list(ids[column]), column] == value).all()
                assert list(ids[column]) == sorted(ids[column])


def test_draws_are_independent_and_repeatable() -> None:
    labels = np.tile(np.array([[1], [-1], [-1], [-1]], np.int8), (500, 2))
    draws = draw_samples(labels, (4, 8), 5, seed=0)
    assert len(set(draws)) == len({draw.positives for draw in draws}) == len({draw.negatives for draw in draws}) == 10
    assert draws[0].positives[0] != draws[0].positives[1]  # classes with the same images draw their own
    assert draw_samples(labels, (4, 8), 5, seed=0) == draws
    assert draw_samples(labels, (8,), 5, seed=0) == draws[5:]
    assert not set(draw_samples(labels, (4, 8), 5, seed=1)) & set(draws)


def test_draws_can_be_stored() -> None:
    labels = np.tile(np.array([[1], [-1]], np.int8), (50, 1))
    draws = draw_samples(labels, (1, 2), 2)
    stored = json.loads(json.dumps([asdict(draw) for draw in draws]))
    for draw, found in zip(draws, stored, strict=True):
        sets = [tuple(map(tuple, found[name])) for name in ("positives", "negatives")]
        assert Draw(found["shots"], found["number"], *sets) == draw


def literal(draw: Draw, train: np.ndarray, test: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Test average precision [classes, costs], and the average precision at each class's cross-validated cost."""
    x, z = ((f / (np.linalg.norm(f, axis=1, keepdims=True) + 1e-5)) for f in (train.astype(float), test.astype(float)))
    table, honest = [], []
    for c, (positives, negatives) in enumerate(zip(draw.positives, draw.negatives, strict=True)):
        ids = sorted(positives + negatives)
        y = np.array([1 if i in positives else -1 for i in ids])
        row, scores, kept = [], [], truth[:, c] != 0
        for cost in COSTS:
            model = LinearSVC(C=cost, class_weight={1: 2, -1: 1}, dual=True, tol=1e-7, max_iter=100_000)
            if draw.shots > 1:
                folds = min(draw.shots, 3)
                scores.append(cross_val_score(model, x[ids], y, cv=folds, scoring="average_precision").mean())
            decisions = model.fit(x[ids], y).decision_function(z[kept])
            row.append(average_precision(decisions, truth[kept, c] == 1))
        table.append(row)
        honest.append(row[int(np.argmax(scores)) if scores else COSTS.index(1.0)])
    return np.array(table), honest


def test_equals_the_literal_loop_over_scikit_learn(data, monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels, test, truth = data
    monkeypatch.setattr(lowshot, "COSTS", COSTS)
    draws = draw_samples(labels, (1, 2, 4), 2, seed=0)
    result = lowshot_map(train, labels, test, truth, NAMES, draws=draws, jobs=2)
    for ours in result.shots:
        tables = [literal(draw, train, test, truth) for draw in draws if draw.shots == ours.shots]
        means = [table.mean(axis=0) for table, _ in tables]  # one cost for all classes of a draw
        assert ours.published == pytest.approx([mean.max() for mean in means], abs=2e-3)
        assert ours.cross_validated == pytest.approx([np.mean(honest) for _, honest in tables], abs=5e-3)
        for cost, mean in zip(ours.published_costs, means, strict=True):
            assert mean[COSTS.index(cost)] == pytest.approx(mean.max(), abs=2e-3)
        assert ours.published_mean == pytest.approx(np.mean(ours.published))
        assert ours.published_std == pytest.approx(np.std(ours.published))
        assert ours.cross_validated_std == pytest.approx(np.std(ours.cross_validated))
    assert [ours.num_folds for ours in result.shots] == [0, 2, 3]
    assert result.published_mean == pytest.approx(np.mean([ours.published_mean for ours in result.shots]))
    assert result.cross_validated_mean == pytest.approx(np.mean([ours.cross_validated_mean for ours in result.shots]))


def test_a_class_with_too_few_images_uses_all_and_is_named(data) -> None:
    train, labels, test, truth = data
    labels = labels.copy()
    present = np.flatnonzero(labels[:, 1] == 1)
    labels[present[3:], 1] = -1
    draws = draw_samples(labels, (2, 4), 1)
    assert draws[1].positives[1] == tuple(present[:3])
    assert len(draws[1].negatives[1]) == 76
    result = lowshot_map(train, labels, test, truth, NAMES, draws=draws, jobs=1)
    assert [ours.short_classes for ours in result.shots] == [(), ("dog",)]


def test_a_class_without_positive_test_image_is_left_out(data) -> None:
    train, labels, test, truth = data
    without = truth.copy()
    without[:, 1] = np.minimum(without[:, 1], 0)
    draws = draw_samples(labels, (1, 2), 1)
    result = lowshot_map(train, labels, test, without, NAMES, draws=draws, jobs=1)
    assert result.without_test_positives == ("dog",)
    cats = tuple(Draw(d.shots, d.number, d.positives[:1], d.negatives[:1]) for d in draws)
    alone = lowshot_map(train, labels[:, :1], test, truth[:, :1], NAMES[:1], draws=cats, jobs=1)
    assert result.published_mean == pytest.approx(alone.published_mean)
    assert result.cross_validated_mean == pytest.approx(alone.cross_validated_mean)


def test_goes_on_after_a_stop(data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels, test, truth = data
    draws = draw_samples(labels, (1, 2), 2, seed=0)
    whole = lowshot_map(train, labels, test, truth, NAMES, draws=draws, jobs=1)

    def stop_after_one(activity: str, done: int, total: int) -> None:
        if list(tmp_path.glob("shots_*.json")):
            raise Interrupted("stopped as asked")

    real = lowshot._run_draw

    def only_first(draw: Draw, gram: np.ndarray, products: np.ndarray, truth: np.ndarray, advance):
        while list(tmp_path.glob("shots_*.json")):  # the second draw would go on for ever
            advance(0)
            time.sleep(0.001)
        return real(draw, gram, products, truth, advance)

    monkeypatch.setattr(lowshot, "_run_draw", only_first)
    arguments = {"draws": draws, "jobs": 1, "store": tmp_path, "key": "k"}
    with pytest.raises(Interrupted):
        lowshot_map(train, labels, test, truth, NAMES, **arguments, progress=stop_after_one)
    assert [path.name for path in tmp_path.iterdir()] == ["shots_002_draw_0.json"]  # the longest are done first

    run: list[Draw] = []
    monkeypatch.setattr(lowshot, "_run_draw", lambda draw, *rest: (run.append(draw), real(draw, *rest))[1])
    calls: list[tuple[int, int]] = []
    again = lowshot_map(train, labels, test, truth, NAMES, **arguments, progress=lambda a, d, t: calls.append((d, t)))
    assert again == whole
    assert len(run) == 3
    assert calls[-1] == (8, 8)
    run.clear()
    assert lowshot_map(train, labels, test, truth, NAMES, **arguments) == whole
    assert not run
    others = draw_samples(labels, (1, 2), 2, seed=1)
    lowshot_map(train, labels, test, truth, NAMES, **arguments | {"draws": others})
    assert len(run) == 4  # other ids are other draws


@pytest.mark.parametrize("fault", ["no positives", "other labels", "none", "other classes"])
def test_bad_draws_are_refused_before_anything_is_written(fault: str, data, tmp_path: Path) -> None:
    train, labels, test, truth = data
    draws, names = draw_samples(labels, (2,), 1), NAMES
    if fault == "no positives":
        labels = labels.copy()
        labels[:, 1] = -1
        draws = draw_samples(labels, (2,), 1)
    if fault == "other labels":
        labels = -labels
    if fault == "none":
        draws = ()
    if fault == "other classes":
        labels, truth, names = labels[:, :1], truth[:, :1], NAMES[:1]
    kind, words = {
        "no positives": (DataError, "class dog has no training image with it"),
        "other labels": (DataError, "draw again"),
        "none": (ValueError, "draw_samples"),
        "other classes": (ValueError, "has 2 classes, not 1"),
    }[fault]
    with pytest.raises(kind, match=words):
        lowshot_map(train, labels, test, truth, names, draws=draws, jobs=1, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("shots", "num_draws"), [((), 5), ((0, 1), 5), ((1,), 0)])
def test_nothing_to_draw_is_refused(shots: tuple[int, ...], num_draws: int) -> None:
    with pytest.raises(ValueError, match="at least one of both"):
        draw_samples(np.ones((3, 1), np.int8), shots, num_draws)
