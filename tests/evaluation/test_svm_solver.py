"""The solver: liblinear's minimum for every cost, from any start, for any rows."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.svm import LinearSVC

from odcluster.evaluation import svm_solver
from odcluster.evaluation.svm_solver import (
    Solution,
    cross_products,
    decision_values,
    gram_matrix,
    objective,
    row_scales,
    solve,
)

COSTS = (1e-7, 1e-4, 1e-2, 0.1, 1.0, 10.0, 100.0)


def problem(seed: int = 0, num: int = 120, dims: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Rows as they come out of a network, positive with a large mean, and signs that they do not separate."""
    generator = np.random.default_rng(seed)
    rows = np.maximum(generator.normal(0.5, 1, (num, dims)), 0).astype(np.float32)
    signs = np.where(rows[:, 0] + generator.normal(size=num) > 1.3, 1.0, -1.0)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), signs


def gram_of(rows: np.ndarray) -> np.ndarray:
    return gram_matrix(rows, np.ones(len(rows)))


def weighted(signs: np.ndarray) -> np.ndarray:
    return np.where(signs > 0, 2.0, 1.0)


def gradient_norm(rows: np.ndarray, signs: np.ndarray, costs: np.ndarray, beta: np.ndarray) -> tuple[float, float]:
    """Of the objective in w itself, and |w|."""
    extended = np.column_stack([rows.astype(np.float64), np.ones(len(rows))])
    w = extended.T @ beta
    hinge = np.maximum(1 - signs * (extended @ w), 0)
    return float(np.linalg.norm(w - extended.T @ (2 * costs * signs * hinge))), float(np.linalg.norm(w))


@pytest.fixture(params=["either", "conjugate gradients", "factorisation"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to a Newton step must do alone."""
    if request.param != "either":
        answer = request.param == "factorisation"
        monkeypatch.setattr(svm_solver, "_factorisation_is_cheaper", lambda s, n: np.full(len(s), answer))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("dims", [10, 300])  # not separable, and separable
def test_decisions_and_objective_are_those_of_liblinear(cost: float, dims: int) -> None:
    rows, signs = problem(dims=dims)
    theirs = LinearSVC(C=cost, class_weight={1: 2, -1: 1}, dual=True, tol=1e-9, max_iter=1_000_000)
    theirs.fit(rows.astype(np.float64), signs)
    costs = cost * weighted(signs)[None]
    ours = solve(gram_of(rows), signs[None], costs)
    expected = theirs.decision_function(rows.astype(np.float64))
    assert np.abs(ours.decisions[0] - expected).max() < 1e-4 * np.abs(expected).max()
    weights = np.append(theirs.coef_[0], theirs.intercept_)
    value = weights @ weights / 2 + costs[0] @ np.maximum(1 - signs * expected, 0) ** 2
    assert objective(ours, signs[None], costs)[0] == pytest.approx(value, rel=1e-7)
    assert objective(ours, signs[None], costs)[0] <= value * (1 + 1e-9)  # the minimum is ours


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cost", COSTS)
def test_stops_at_the_stated_tolerance(cost: float) -> None:
    rows, signs = problem(1)
    costs = cost * weighted(signs)
    beta = solve(gram_of(rows), signs[None], costs[None]).coefficients[0]
    gradient, size = gradient_norm(rows, signs, costs, beta)
    assert gradient <= 1e-5 * size * 1.01


def test_doubling_the_positives_matters() -> None:
    """Guards the comparison above: with equal weights the decisions are others by far more than its tolerance."""
    rows, signs = problem()
    gram = gram_of(rows)
    two, one = (solve(gram, signs[None], w[None]).decisions[0] for w in (weighted(signs), np.ones_like(signs)))
    assert np.abs(two - one).max() > 1e-2 * np.abs(two).max()


@pytest.mark.usefixtures("way")
def test_many_at_once_from_any_start_are_the_same_as_one_by_one() -> None:
    rows, signs = problem(2)
    gram = gram_of(rows)
    generator = np.random.default_rng(0)
    signs_of = np.stack([signs, -signs] * len(COSTS))
    costs = np.repeat(COSTS, 2)[:, None] * weighted(signs_of) * (generator.random(signs_of.shape) < 0.7)
    together = solve(gram, signs_of, costs)
    beta = generator.normal(size=signs_of.shape)
    elsewhere = solve(gram, signs_of, costs, Solution(beta, beta @ gram))
    path: Solution | None = None
    for at in range(0, len(costs), 2):
        rows_here = slice(at, at + 2)
        path = solve(gram, signs_of[:2], costs[rows_here], path)
        alone = solve(gram, signs_of[at : at + 1], costs[at : at + 1])
        scale = np.abs(alone.decisions).max()
        for other in (together.decisions[at], elsewhere.decisions[at], path.decisions[0]):
            assert np.abs(other - alone.decisions[0]).max() < 1e-4 * scale


def test_a_row_without_cost_takes_no_part_but_is_decided() -> None:
    rows, signs = problem(3)
    left_out = np.arange(len(rows)) % 3 == 0
    costs = weighted(signs) * ~left_out
    ours = solve(gram_of(rows), signs[None], costs[None])
    kept = solve(gram_of(rows[~left_out]), signs[None, ~left_out], costs[None, ~left_out])
    assert ours.coefficients[0, left_out] == pytest.approx(0)
    expected = decision_values(rows[~left_out], np.ones((~left_out).sum()), rows, np.ones(len(rows)), kept.coefficients)
    np.testing.assert_allclose(ours.decisions, expected, atol=1e-4)


@pytest.mark.usefixtures("way")
def test_a_start_far_inside_all_margins() -> None:
    """No row has a loss there, so that the first quadratic is |w|^2 / 2 alone."""
    rows, signs = problem(9, num=20, dims=300)
    gram = gram_of(rows)
    far = 100 * np.linalg.solve(gram, signs)[None]
    ones = np.ones((1, 20))
    found = solve(gram, signs[None], ones, Solution(far, far @ gram))
    np.testing.assert_allclose(found.decisions, solve(gram, signs[None], ones).decisions, atol=1e-4)


def test_the_start_is_not_changed() -> None:
    rows, signs = problem(4, num=20)
    gram = gram_of(rows)
    start = solve(gram, signs[None], 0.01 * np.ones((1, 20)))
    before = start.coefficients.copy(), start.decisions.copy()
    solve(gram, signs[None], np.ones((1, 20)), start)
    np.testing.assert_array_equal(start.coefficients, before[0])
    np.testing.assert_array_equal(start.decisions, before[1])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cost", [1e-7, 1.0, 100.0])
@pytest.mark.parametrize("kind", ["duplicates", "contradictions", "zeros", "one", "two", "four", "one sign", "none"])
def test_degenerate_rows(kind: str, cost: float) -> None:
    rows, signs = problem(5, num=30)
    if kind == "duplicates":
        rows, signs = np.repeat(rows, 3, axis=0), np.repeat(signs, 3)
    if kind == "contradictions":
        rows, signs = np.repeat(rows, 2, axis=0), np.tile([1.0, -1.0], 30)
    if kind == "zeros":
        rows[:] = 0
    if kind in ("one", "two", "four"):
        num = {"one": 1, "two": 2, "four": 4}[kind]
        rows, signs = rows[:num], np.resize([1.0, -1.0], num)
    if kind == "one sign":
        signs[:] = 1
    costs = cost * weighted(signs) * (kind != "none")
    beta = solve(gram_of(rows), signs[None], costs[None]).coefficients[0]
    gradient, size = gradient_norm(rows, signs, costs, beta)
    assert gradient <= 1.01e-5 * size


def test_blocks_of_dimensions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = problem(6, num=30, dims=50)
    test, _ = problem(7, num=20, dims=50)
    scales, test_scales = row_scales(rows), row_scales(test)
    np.testing.assert_allclose(scales, 1 / (np.linalg.norm(rows.astype(np.float64), axis=1) + 1e-5))
    assert row_scales(np.zeros((1, 3), np.float32)) == pytest.approx(1e5)
    x, z = rows.astype(np.float64) * scales[:, None], test.astype(np.float64) * test_scales[:, None]
    beta = np.random.default_rng(0).normal(size=(2, 30))
    for size in (1024, 7):
        monkeypatch.setattr(svm_solver, "DIMENSIONS_AT_ONCE", size)
        np.testing.assert_allclose(gram_matrix(rows, scales), x @ x.T + 1, rtol=1e-12)
        np.testing.assert_allclose(cross_products(rows, scales, test, test_scales), x @ z.T + 1, rtol=1e-12)
        values = decision_values(rows, scales, test, test_scales, beta)
        np.testing.assert_allclose(values, beta @ (x @ z.T + 1), rtol=1e-9)


def test_poll_can_stop_and_bad_input_is_refused() -> None:
    rows, signs = problem(8, num=10)
    gram, ones = gram_of(rows), np.ones((1, 10))

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(gram, signs[None], ones, poll=stop)
    with pytest.raises(ValueError, match="problems, n"):
        solve(gram, signs[None], np.ones((2, 10)))
    with pytest.raises(ValueError, match="negative or not finite"):
        solve(gram, signs[None], -ones)
    with pytest.raises(ValueError, match="neither 1 nor -1"):
        solve(gram, 0 * ones, ones)
