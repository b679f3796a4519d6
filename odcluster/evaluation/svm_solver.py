"""Linear SVMs with squared hinge, solved exactly and many at a time.

One problem is the one that liblinear solves: the weights w and the intercept b that minimise

    (|w|^2 + b^2) / 2  +  sum_i C_i max(0, 1 - y_i (w x_i + b))^2

Promises: the minimum, to a stated tolerance, whatever the start. The intercept is a dimension in which every row is 1;
below, w and x include it. All vectors are combinations of the training rows, w = sum_i beta_i x_i, so that a problem
is its Gram matrix K = X X^T + 1 and n coefficients: with 9,000 dimensions and 5,000 rows that is less to carry, and
hundreds of problems (classes x folds x costs) share one K, in whose product with all of them at once a core computes
several times faster than in that with one. A row that takes no part has C_i = 0; its decision value comes for free,
which is what cross-validation needs. Which problems to solve, and on how many cores, is left to others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Array = NDArray[np.float64]
Features = NDArray[np.floating]

TOLERANCE = 1e-5
"""A problem is solved when |gradient| <= TOLERANCE |w|. The objective is 1-strongly convex, hence |gradient| bounds
the distance to the minimum: w is right to five digits. (liblinear stops at 1e-4 in its own, looser measure.)"""
MAX_STEPS = 100
"""Newton steps; fewer than 10 is usual, so this many means that the costs are beyond what float64 resolves."""
DIMENSIONS_AT_ONCE = 1024


@dataclass(frozen=True)
class Solution:
    """The solved problems, one per row."""

    coefficients: Array
    """beta [problems, n]; 0 outside the support vectors."""
    decisions: Array
    """w x of every row of K, of those that took no part too [problems, n]."""


def solve(
    gram: Array,
    signs: Array,
    costs: Array,
    start: Solution | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Solution:
    """Minimise all problems: y [problems, n] of 1 and -1, and C_i [problems, n], 0 for rows that take no part.

    `start` only saves time: the solution at a lower cost, say. `poll` is called often and may raise to stop.

    Newton's method: with the rows of positive hinge loss held fixed, the objective is a quadratic. A step goes to that
    quadratic's minimum, by conjugate gradients or a factorisation (whichever is cheaper), and then exactly as far along
    that line as the true objective falls, so that it always converges.
    """
    _check(gram, signs, costs)
    weights = 2 * costs
    beta = np.zeros_like(signs) if start is None else start.coefficients.copy()
    decisions = np.zeros_like(signs) if start is None else start.decisions.copy()
    left = np.arange(len(signs))
    for _ in range(MAX_STEPS):
        poll()
        y, c, b, f = signs[left], weights[left], beta[left], decisions[left]
        margin = 1 - y * f
        downhill = c * y * np.maximum(margin, 0) - b  # minus the gradient, as coefficients
        reach = downhill @ gram
        gradient, size = _norm(downhill, reach), _norm(b, f)
        on = gradient > TOLERANCE * size
        if not on.all():  # the decisions are sums of many steps: what rounding added is measured, and removed
            exact = b[~on] @ gram
            drift = _drift(gram, c[~on] * (exact - f[~on])) > 0.1 * TOLERANCE * size[~on]
            decisions[left[~on]] = exact
            stale, left = left[~on][drift], left[on]
            y, c, b, f = y[on], c[on], b[on], f[on]
        else:
            stale = left[:0]
        if len(left):
            curvature, goal = c * (margin[on] > 0), _forcing(gradient[on], size[on])
            step, along = _newton_step(gram, y, curvature, b, downhill[on], reach[on], goal, poll)
            length = _line_search(y, c, b, f, step, along)
            beta[left] += length * step
            decisions[left] += length * along
        left = np.concatenate([left, stale])
        if not len(left):
            return Solution(beta, decisions)
    raise ArithmeticError(f"{len(left)} SVMs did not converge; lower the largest cost, {costs.max():g}.")


def row_scales(rows: Features) -> Array:
    """What each row is multiplied with: 1 / (|x| + 1e-5) [n]."""
    squares = [np.square(np.asarray(part, dtype=np.float64)).sum(axis=1) for part in _row_parts(rows)]
    return 1 / (np.sqrt(np.concatenate(squares)) + 1e-5)


def gram_matrix(rows: Features, scales: Array, poll: Callable[[], None] = lambda: None) -> Array:
    """K = X X^T + 1 in float64, where X has the scaled rows; float64 copies are made of a tenth of them at a time."""
    gram = np.ones((len(rows), len(rows)))
    for part in _dimension_parts(rows):
        poll()
        block = _scaled(rows, scales, part)
        gram += block @ block.T  # numpy computes a matrix with its own transpose at half the price
    return gram


def decision_values(rows: Features, scales: Array, test: Features, test_scales: Array, coefficients: Array) -> Array:
    """w x of test rows for each problem's coefficients on the training rows [problems, len(test)]."""
    values = np.repeat(coefficients.sum(axis=1, keepdims=True), len(test), axis=1)  # the intercepts
    for part in _dimension_parts(rows):
        values += (coefficients @ _scaled(rows, scales, part)) @ _scaled(test, test_scales, part).T
    return values


def cross_products(
    rows: Features, scales: Array, test: Features, test_scales: Array, poll: Callable[[], None] = lambda: None
) -> Array:
    """x x' + 1 of training rows with test rows [n, len(test)]: for more problems than there are dimensions."""
    products = np.ones((len(rows), len(test)))
    for part in _dimension_parts(rows):
        poll()
        products += _scaled(rows, scales, part) @ _scaled(test, test_scales, part).T
    return products


def objective(solution: Solution, signs: Array, costs: Array) -> Array:
    """What `solve` minimises, per problem."""
    hinge = np.maximum(1 - signs * solution.decisions, 0)
    return _dot(solution.coefficients, solution.decisions) / 2 + _dot(costs, hinge**2)


# --- The parts of a Newton step ---------------------------------------------------------------------


def _newton_step(
    gram: Array,
    signs: Array,
    curvature: Array,
    beta: Array,
    downhill: Array,
    reach: Array,
    goal: Array,
    poll: Callable[[], None],
) -> tuple[Array, Array]:
    """The step towards each quadratic's minimum, and its product with K; each problem takes the cheaper way."""
    factorise = _factorisation_is_cheaper(curvature, len(gram))
    iterate = ~factorise
    step, along = np.empty_like(beta), np.empty_like(beta)
    if iterate.any():
        step[iterate], along[iterate] = _conjugate_gradients(
            gram, curvature[iterate], downhill[iterate], reach[iterate], goal[iterate], poll
        )
    if factorise.any():
        pairs = zip(curvature[factorise], signs[factorise], strict=True)
        ends = np.stack([_minimum_by_cholesky(gram, s, y, poll) for s, y in pairs])
        step[factorise] = ends - beta[factorise]
        along[factorise] = step[factorise] @ gram
    return step, along


def _conjugate_gradients(
    gram: Array, curvature: Array, downhill: Array, reach: Array, goal: Array, poll: Callable[[], None]
) -> tuple[Array, Array]:
    """Newton steps until their residuals are below `goal`: coefficients and their products with K.

    Solves (1 + X^T S X) d = -gradient in the space of w, where inner products are u K v. Every vector is carried along
    with its product with K, so that an iteration costs one product. It falls along d from the first iteration on.
    """
    step, along = np.zeros_like(downhill), np.zeros_like(downhill)
    left = np.arange(len(downhill))
    residual, residual_k, path, path_k, s = downhill, reach, downhill, reach, curvature
    squared = _dot(residual, residual_k)
    while True:
        poll()
        bent = s * path_k
        bent_k = path_k + bent @ gram  # the Hessian times the path, times K
        bent += path
        bend = _dot(path, bent_k)
        length = _quotient(squared, bend)[:, None]
        step[left] += length * path
        along[left] += length * path_k
        residual = residual - length * bent
        residual_k = residual_k - length * bent_k
        previous, squared = squared, _dot(residual, residual_k)
        on = (squared > goal[left] ** 2) & (bend > 0)  # 0: nothing that float64 resolves is left to do
        if not on.any():
            return step, along
        turn = (squared / previous)[:, None]
        path, path_k = residual + turn * path, residual_k + turn * path_k
        if not on.all():
            left, squared, s = left[on], squared[on], s[on]
            residual, residual_k, path, path_k = residual[on], residual_k[on], path[on], path_k[on]


def _minimum_by_cholesky(gram: Array, curvature: Array, signs: Array, poll: Callable[[], None]) -> Array:
    """The coefficients at the quadratic's minimum: (K_SS + 1 / (2 C_S)) beta_S = y_S, none elsewhere."""
    poll()
    active = np.flatnonzero(curvature)
    system = gram[np.ix_(active, active)]
    system.ravel()[:: len(active) + 1] += 1 / curvature[active]
    factor = torch.linalg.cholesky(torch.from_numpy(system)).numpy()  # scipy's holds Python's lock, numpy's is slow
    half = solve_triangular(factor, signs[active], lower=True, check_finite=False)
    beta = np.zeros_like(signs)
    beta[active] = solve_triangular(factor, half, lower=True, trans=1, check_finite=False)
    return beta


def _factorisation_is_cheaper(curvature: Array, n: int) -> NDArray[np.bool_]:
    """Whether |S|^3 / 3 operations beat the products of conjugate gradients, 2 n^2 each.

    Measured on VOC07 features: about 30 C^0.27 products a step, at two thirds of a factorisation's speed.
    """
    num_active = np.count_nonzero(curvature, axis=1)
    products = 30 * (curvature.max(axis=1) / 4) ** 0.27  # the largest is 2 C_i, with C_i = 2 C for positives
    return num_active**3 / 3 < 1.5 * products * 2 * n**2


def _line_search(y: Array, c: Array, b: Array, f: Array, step: Array, along: Array) -> Array:
    """Where on the line b + t step the objective is least: t [problems, 1], by Newton's method from t = 1.

    The derivative is increasing and piecewise linear, so that its root is found exactly once its piece is; a step that
    would leave the bracket found so far goes to its middle.
    """
    slope, bend = _dot(b, along), _dot(step, along)
    low, high = np.zeros(len(b)), np.full(len(b), np.inf)
    t = np.ones(len(b))
    for _ in range(100):
        hinge = np.maximum(1 - y * (f + t[:, None] * along), 0)
        derivative = slope + t * bend - _dot(c * y * hinge, along)
        low, high = np.where(derivative < 0, t, low), np.where(derivative > 0, t, high)
        ahead = t - _quotient(derivative, bend + _dot(c * (hinge > 0), along**2))
        outside = (ahead <= low) | (ahead >= high)
        ahead = np.where(outside & (derivative != 0), np.where(np.isinf(high), 2 * t, (low + high) / 2), ahead)
        moved = np.abs(ahead - t)
        t = ahead
        if (moved <= 1e-9 * t).all():
            break
    return t[:, None]


def _drift(gram: Array, change: Array) -> Array:
    """The most that a change of the gradient's coefficients changes its norm, K being no larger than its trace."""
    return np.sqrt(np.trace(gram)) * np.linalg.norm(change, axis=1)


def _forcing(gradient: Array, size: Array) -> Array:
    """How exactly a step's linear system is solved: loosely far from the minimum, to the tolerance near it."""
    relative = np.where(size > 0, _quotient(gradient, size), 1)
    return np.maximum(np.minimum(0.1, relative) * gradient, 0.3 * TOLERANCE * size)


def _quotient(a: Array, b: Array) -> Array:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(b), where=b != 0)


def _dot(a: Array, b: Array) -> Array:
    return np.einsum("pn,pn->p", a, b)


def _norm(coefficients: Array, product: Array) -> Array:
    return np.sqrt(np.maximum(_dot(coefficients, product), 0))


def _check(gram: Array, signs: Array, costs: Array) -> None:
    if (
        gram.ndim != 2
        or gram.shape[0] != gram.shape[1]
        or signs.shape != costs.shape
        or signs.shape[1:] != gram.shape[:1]
    ):
        raise ValueError(
            f"K is {gram.shape}, y {signs.shape} and C {costs.shape}; pass [n, n], [problems, n] and [problems, n]."
        )
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        raise ValueError("Some costs are negative or not finite; pass 0 for rows that take no part.")
    if not (np.abs(signs) == 1).all():
        raise ValueError("Some signs are neither 1 nor -1; pass 1 for positives and -1 for all others.")


# --- Blocks of features -----------------------------------------------------------------------------


def _scaled(rows: Features, scales: Array, part: slice) -> Array:
    return np.asarray(rows[:, part], dtype=np.float64) * scales[:, None]


def _dimension_parts(rows: Features) -> list[slice]:
    return [slice(at, at + DIMENSIONS_AT_ONCE) for at in range(0, rows.shape[1], DIMENSIONS_AT_ONCE)]


def _row_parts(rows: Features) -> list[Features]:
    return [rows[at : at + 512] for at in range(0, len(rows), 512)]
