"""The VOC07 SVM protocol: the published rules one by one, the literal loop over scikit-learn, stopping and going on."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC

from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation import svm
from odcluster.evaluation.average_precision import average_precision
from odcluster.evaluation.svm import COSTS, SvmResult, svm_map

NAMES = ["cat", "dog", "tree"]


def make(seed: int, num: int, dims: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Features that say something about three classes, of which a tenth is difficult."""
    generator = np.random.default_rng(seed)
    features = np.maximum(generator.normal(0.4, 1, (num, dims)), 0).astype(np.float32) * generator.uniform(
        1, 9, (num, 1)
    )
    scores = features[:, :3] / np.linalg.norm(features, axis=1, keepdims=True) + generator.normal(0, 0.2, (num, 3))
    labels = np.where(scores > 0.45, 1, -1)
    labels[generator.random(labels.shape) < 0.1] = 0
    return features.astype(np.float32), labels.astype(np.int8)


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return *make(0, 90), *make(1, 80)


def literal(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray
) -> list[tuple[float, float, list]]:
    """The protocol as one would write it down: average precision, cost and cross-validated scores of each class."""
    costs = sorted([1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0] + [0.5**k for k in range(4, 20)])
    x, z = ((f / (np.linalg.norm(f, axis=1, keepdims=True) + 1e-5)) for f in (train.astype(float), test.astype(float)))
    results = []
    for c in range(labels.shape[1]):
        y = np.where(labels[:, c] == 1, 1, -1)
        models = [LinearSVC(C=C, class_weight={1: 2, -1: 1}, dual=True, tol=1e-7, max_iter=100_000) for C in costs]
        scores = [cross_val_score(model, x, y, cv=3, scoring="average_precision").mean() for model in models]
        best = int(np.argmax(scores))
        decisions = models[best].fit(x, y).decision_function(z)
        kept = truth[:, c] != 0
        results.append((average_precision(decisions[kept], truth[kept, c] == 1), costs[best], scores))
    return results


@pytest.fixture(scope="module")
def expected(data) -> list[tuple[float, float, list]]:
    return literal(*data)


@pytest.fixture(scope="module")
def result(data) -> SvmResult:
    train, labels, test, truth = data
    return svm_map(train, labels, test, truth, NAMES, jobs=2)


def test_equals_the_literal_loop_over_scikit_learn(result: SvmResult, expected) -> None:
    assert result.mean_average_precision == pytest.approx(np.mean([row[0] for row in expected]), abs=1e-3)
    for ours, (precision, cost, scores) in zip(result.classes, expected, strict=True):
        assert ours.average_precision == pytest.approx(precision, abs=1e-3)
        assert ours.cross_validation == pytest.approx(scores, abs=2e-3)
        assert ours.cost == pytest.approx(cost)


@pytest.mark.parametrize("rule", ["equal weights", "shuffled folds", "two folds", "difficult in test"])
def test_the_comparison_notices_when_a_rule_is_broken(
    rule: str, data, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the test above: each of these is a protocol that is easily taken for the published one."""
    train, labels, test, truth = data
    if rule == "equal weights":
        monkeypatch.setattr(svm, "POSITIVE_WEIGHT", 1.0)
    if rule == "two folds":
        monkeypatch.setattr(svm, "NUM_FOLDS", 2)
    if rule == "shuffled folds":
        folds = svm.StratifiedKFold
        monkeypatch.setattr(svm, "StratifiedKFold", lambda k: folds(k, shuffle=True, random_state=0))
    if rule == "difficult in test":
        truth = np.where(truth == 0, -1, truth).astype(np.int8)
    broken = svm_map(train, labels, test, truth, NAMES, jobs=1)
    precisions = np.abs([c.average_precision - row[0] for c, row in zip(broken.classes, expected, strict=True)])
    scores = np.abs([np.subtract(c.cross_validation, row[2]) for c, row in zip(broken.classes, expected, strict=True)])
    assert precisions.max() > 1e-3 or scores.max() > 2e-3


def test_the_grid_of_costs() -> None:
    assert len(COSTS) == len(set(COSTS)) == 26
    assert list(COSTS) == sorted(COSTS)
    tens, halves = {f"{10.0**p:.3g}" for p in range(-7, 3)}, {f"{0.5**p:.3g}" for p in range(4, 20)}
    assert {f"{cost:.3g}" for cost in COSTS} == tens | halves
    assert 1.0 in COSTS
    assert 0.5**19 in COSTS


def test_difficult_images_are_negatives_in_training(data, result: SvmResult) -> None:
    train, labels, test, truth = data
    negative = np.where(labels == 0, -1, labels).astype(np.int8)
    same = svm_map(train, negative, test, truth, NAMES, jobs=1)
    assert [c.cost for c in same.classes] == [c.cost for c in result.classes]
    assert same.mean_average_precision == pytest.approx(result.mean_average_precision, abs=1e-9)
    assert [c.num_difficult for c in result.classes] == (labels == 0).sum(axis=0).tolist()
    assert [c.num_negatives for c in result.classes] == (labels != 1).sum(axis=0).tolist()
    assert [c.num_positives for c in result.classes] == (labels == 1).sum(axis=0).tolist()


def test_difficult_images_are_left_out_in_testing(data, result: SvmResult) -> None:
    train, labels, test, truth = data
    for column, ours in enumerate(result.classes):
        kept = truth[:, column] != 0
        alone = svm_map(
            train, labels[:, [column]], test[kept], truth[kept][:, [column]], [NAMES[column]], jobs=1
        )  # fmt: skip
        assert alone.mean_average_precision == pytest.approx(ours.average_precision, abs=1e-9)
        assert ours.num_test_difficult == (~kept).sum()


def test_of_equal_costs_the_lowest_is_chosen() -> None:
    """Two far apart points per class: every cost separates them, so that every score is 1."""
    features = np.repeat(np.array([[1.0, 0.0], [0.0, 1.0]], np.float32), 6, axis=0)
    labels = np.repeat(np.array([[1], [-1]], np.int8), 6, axis=0)
    found = svm_map(features, labels, features, labels, ["a"], jobs=1)
    assert set(found.classes[0].cross_validation) == {1.0}
    assert found.classes[0].cost == 1e-7


def test_folds_are_stratified_and_in_order() -> None:
    signs = np.array([1, -1, -1, 1, -1, -1, 1, -1, -1.0])
    np.testing.assert_array_equal(svm.held_out_folds(signs, 3).astype(int), np.kron(np.eye(3, dtype=int), [1, 1, 1]))


def test_number_of_threads_and_of_classes_at_once_change_nothing(data, result: SvmResult, monkeypatch) -> None:
    train, labels, test, truth = data
    monkeypatch.setattr(svm, "CLASSES_AT_ONCE", 1)
    alone = svm_map(train, labels, test, truth, NAMES, jobs=3)
    for one, other in zip(alone.classes, result.classes, strict=True):
        assert one.cost == other.cost
        assert one.average_precision == pytest.approx(other.average_precision, abs=1e-9)


def test_memory_mapped_features_do(data, result: SvmResult, tmp_path: Path) -> None:
    train, labels, test, truth = data
    np.save(tmp_path / "train.npy", train)
    mapped = np.load(tmp_path / "train.npy", mmap_mode="r")
    again = svm_map(mapped, labels, test, truth, NAMES, jobs=1)
    assert again.mean_average_precision == result.mean_average_precision


def test_a_stop_ends_the_threads_and_keeps_finished_classes(
    data, result: SvmResult, tmp_path: Path, monkeypatch
) -> None:
    train, labels, test, truth = data
    monkeypatch.setattr(svm, "CLASSES_AT_ONCE", 1)
    num_threads = threading.active_count()

    def stop_after_one(activity: str, done: int, total: int) -> None:
        if list(tmp_path.glob("class_*.json")):
            raise Interrupted("stopped as asked")

    real = svm.cross_validate

    def only_first(gram: np.ndarray, signs: np.ndarray, advance) -> np.ndarray:
        while list(tmp_path.glob("class_*.json")):  # the second class would go on for ever
            advance(0)
            time.sleep(0.001)
        return real(gram, signs, advance)

    monkeypatch.setattr(svm, "cross_validate", only_first)
    with pytest.raises(Interrupted):
        svm_map(train, labels, test, truth, NAMES, jobs=1, store=tmp_path, key="k", progress=stop_after_one)
    assert threading.active_count() == num_threads
    assert [path.name for path in tmp_path.iterdir()] == ["class_000.json"]

    solved: list[int] = []
    calls: list[tuple[int, int]] = []

    def once_reported(gram: np.ndarray, signs: np.ndarray, advance) -> np.ndarray:
        deadline = time.monotonic() + 60
        while all(total != 3 * 26 for _, total in calls) and time.monotonic() < deadline:
            time.sleep(0.001)  # solving begins after the first report, so that it shows the class from disk alone
        solved.append(len(signs))
        return real(gram, signs, advance)

    monkeypatch.setattr(svm, "cross_validate", once_reported)
    arguments = {"jobs": 1, "store": tmp_path, "key": "k"}
    again = svm_map(train, labels, test, truth, NAMES, **arguments, progress=lambda a, d, t: calls.append((d, t)))
    assert sum(solved) == 2
    assert again.mean_average_precision == pytest.approx(result.mean_average_precision, abs=1e-9)
    assert calls[-1] == (3 * 26, 3 * 26)
    assert next(done for done, total in calls if total == 3 * 26) == 26

    monkeypatch.setattr(svm, "cross_validate", lambda g, s, a: (solved.append(len(s)), real(g, s, a))[1])
    solved.clear()
    assert svm_map(train, labels, test, truth, NAMES, **arguments) == again
    assert not solved  # all from disk
    svm_map(train, labels, test, truth, NAMES, jobs=1, store=tmp_path, key="other")
    assert sum(solved) == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "k"}', '{"key": "k", "name": "cat", "costs": [1.0]}'])
def test_what_is_not_a_finished_class_is_done_again(content: str, data, tmp_path: Path) -> None:
    train, labels, test, truth = data
    (tmp_path / "class_000.json").write_text(content)
    svm_map(train, labels[:, :1], test, truth[:, :1], ["cat"], jobs=1, store=tmp_path, key="k")
    assert json.loads((tmp_path / "class_000.json").read_text())["cost"] in COSTS


def test_an_error_in_a_thread_is_not_swallowed(data, monkeypatch: pytest.MonkeyPatch) -> None:
    train, labels, test, truth = data

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(svm, "decision_values", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        svm_map(train, labels, test, truth, NAMES, jobs=2)


def test_every_thread_computes_with_one_thread_of_torch_and_the_caller_keeps_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        inside: list[int] = []
        svm.run_threads(
            lambda task, advance: inside.append(torch.get_num_threads()), [0, 1], jobs=2,
            activity="", done=0, total=2, progress=lambda activity, done, total: None,
        )  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(torch.get_num_threads).result()
        assert (inside, torch.get_num_threads(), later) == ([1, 1], 3, 3)
    finally:
        torch.set_num_threads(before)


def test_a_class_without_positive_test_image_is_named_and_left_out(data, result: SvmResult, tmp_path: Path) -> None:
    train, labels, test, truth = data
    truth = truth.copy()
    truth[:, 1] = np.minimum(truth[:, 1], 0)
    arguments = {"jobs": 1, "store": tmp_path, "key": "k"}
    for _ in range(2):  # computed, then read
        found = svm_map(train, labels, test, truth, NAMES, **arguments)
        assert found.without_test_positives == ("dog",)
        assert np.isnan(found.classes[1].average_precision)
        kept = [result.classes[0].average_precision, result.classes[2].average_precision]
        assert found.mean_average_precision == pytest.approx(np.mean(kept), abs=1e-9)


def broken_inputs() -> dict[str, tuple[type[Exception], str]]:
    return {
        "few positives": (DataError, "class dog has 2 training image.s. with it and needs 3.*leave the class out"),
        "few negatives": (DataError, "class dog has 1 training image.s. without it"),
        "empty test": (DataError, "test set has no images"),
        "no test positives": (DataError, "no class has a positive test image"),
        "nan": (DataError, r"training features of 4 of 90 images \(rows 3, 5, 7, ...\)"),
        "infinite test": (DataError, r"test features of 1 of 80 images \(rows 2\)"),
        "label rows": (ValueError, "pass .images, dimensions. and .images, classes."),
        "label columns": (ValueError, "for 3 classes"),
        "label values": (ValueError, "convert them"),
        "widths": (ValueError, "same backbone and layer"),
        "jobs": (UserError, "use 1 or more"),
    }


@pytest.mark.parametrize("fault", broken_inputs())
def test_bad_input_is_refused_before_anything_is_written(fault: str, data, tmp_path: Path) -> None:
    train, labels, test, truth = (array.copy() for array in data)
    jobs = 0 if fault == "jobs" else 1
    if fault == "few positives":
        labels[:, 1] = -1
        labels[:2, 1] = 1
    if fault == "few negatives":
        labels[:, 1] = 1
        labels[0, 1] = 0
    if fault == "empty test":
        test, truth = test[:0], truth[:0]
    if fault == "no test positives":
        truth[:] = -1
    if fault == "nan":
        train[[3, 5, 7, 9], 0] = np.nan
    if fault == "infinite test":
        test[2, 1] = np.inf
    if fault == "label rows":
        labels = labels[1:]
    if fault == "label columns":
        truth = truth[:, :2]
    if fault == "label values":
        labels[0, 0] = 2
    if fault == "widths":
        test = test[:, 1:]
    kind, words = broken_inputs()[fault]
    with pytest.raises(kind, match=words) as caught:
        svm_map(train, labels, test, truth, NAMES, jobs=jobs, store=tmp_path / "store", key="k")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()
