"""Low-shot VOC07: the SVM protocol with k positive and 19 k negative images per class, over five draws.

The published numbers choose the cost, one per k and draw, by its mean average precision on the *test* images. That
number is computed because it is the comparable one; beside it stands that of costs chosen by cross-validation of the
drawn images alone, which is the honest one. Draws are lists of image ids, to be stored and run again. Draws that are
finished survive a stop.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from odcluster.errors import DataError
from odcluster.evaluation.svm import (
    COSTS,
    NUM_FOLDS,
    Labels,
    Progress,
    check_inputs,
    class_weights,
    gram_with_test,
    held_out_folds,
    held_out_score,
    precision_on_test,
    read_stored,
    run_threads,
    training_gram,
    write_stored,
)
from odcluster.evaluation.svm_solver import Array, Features, Solution, row_scales, solve

SHOTS = (1, 2, 4, 8, 16, 32, 64, 96)
NUM_DRAWS = 5
NEGATIVES_PER_SHOT = 19
ONE_SHOT_COST = 1.0
"""The honest cost where a single positive leaves nothing to hold out."""
HIGH_COST = 10.0
"""From here on costs are solved one after the other, each from the solution before it; all lower ones at once."""


@dataclass(frozen=True)
class Draw:
    """The training images of one k and one repetition."""

    shots: int
    number: int
    positives: tuple[tuple[int, ...], ...]
    """Ids per class, sorted; fewer than `shots` where the class has no more."""
    negatives: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ShotsResult:
    """One k. Lists have one entry per draw; deviations are the population's, over the draws."""

    shots: int
    published: tuple[float, ...]
    """Mean average precision at the cost that is best on the test images."""
    published_costs: tuple[float, ...]
    published_mean: float
    published_std: float
    cross_validated: tuple[float, ...]
    """Mean average precision at each class's cross-validated cost."""
    cross_validated_mean: float
    cross_validated_std: float
    num_folds: int
    """Folds of the cross-validation; 0 where the cost was ONE_SHOT_COST for want of positives (for k = 1)."""
    short_classes: tuple[str, ...]
    """Names of the classes that had fewer positives or negatives to draw from, and used all of them."""


@dataclass(frozen=True, kw_only=True)
class LowshotResult:
    """One layer; the table's number is the mean over the k."""

    published_mean: float
    cross_validated_mean: float
    shots: tuple[ShotsResult, ...]
    without_test_positives: tuple[str, ...]
    """Names of the classes left out of every mean."""


@dataclass(frozen=True)
class _Scores:
    """What a draw leaves on disk."""

    average_precision: list[list[float | None]]
    """On the test images, [classes][costs]; None without a positive one."""
    chosen: list[int]
    """Which cost cross-validation chose for each class."""


def draw_samples(
    labels: Labels, shots: Sequence[int] = SHOTS, num_draws: int = NUM_DRAWS, seed: int = 0
) -> tuple[Draw, ...]:
    """Independent draws, for every k and repetition, without replacement; difficult images are never drawn.

    Each is a function of (seed, k, repetition, class) alone: asking for fewer k changes none of the others.
    """
    if not shots or min(shots) < 1 or num_draws < 1:
        raise ValueError(f"{num_draws} draws of {tuple(shots)} images; ask for at least one of both, such as {SHOTS}.")
    draws = []
    for k in shots:
        for number in range(num_draws):
            chosen = []
            for column, present in enumerate(labels.T):
                generator = np.random.Generator(np.random.PCG64([seed, k, number, column]))
                for value, count in ((1, k), (-1, NEGATIVES_PER_SHOT * k)):
                    ids = np.flatnonzero(present == value)
                    chosen.append(np.sort(generator.permutation(ids)[:count]).tolist())
            draws.append(Draw(k, number, tuple(map(tuple, chosen[::2])), tuple(map(tuple, chosen[1::2]))))
    return tuple(draws)


def lowshot_map(
    train: Features,
    train_labels: Labels,
    test: Features,
    test_labels: Labels,
    class_names: Sequence[str],
    *,
    draws: Sequence[Draw],
    jobs: int,
    store: Path | None = None,
    key: str = "",
    progress: Progress = lambda activity, done, total: None,
) -> LowshotResult:
    """Low-shot mean average precision of one layer; everything but `draws` is as in `svm_map`."""
    check_inputs(train, train_labels, test, test_labels, class_names, jobs)
    _check_draws(draws, train_labels, class_names)
    keys = {draw: _draw_key(key, draw) for draw in draws}
    scores = {draw: found for draw in draws if (found := _read_scores(store, draw, keys[draw])) is not None}
    left = sorted((draw for draw in draws if draw not in scores), key=lambda draw: -draw.shots)  # the longest first
    if left:
        scales = row_scales(train)
        gram = training_gram(train, scales, jobs, progress)
        products = gram_with_test(train, scales, test, jobs, progress)

        def work(draw: Draw, advance: Callable[[int], None]) -> None:
            found = _run_draw(draw, gram, products, test_labels, advance)
            if store is not None:
                write_stored(_draw_file(store, draw), asdict(found) | {"key": keys[draw], "costs": COSTS})
            scores[draw] = found

        run_threads(
            work, left, jobs=jobs, progress=progress, activity="low-shot SVMs, classes x draws",
            done=(len(draws) - len(left)) * len(class_names), total=len(draws) * len(class_names),
        )  # fmt: skip
    return _summary(scores, train_labels, test_labels, class_names)


def _run_draw(draw: Draw, gram: Array, products: Array, test_labels: Labels, advance: Callable[[int], None]) -> _Scores:
    average_precision, chosen = [], []
    for column, (positives, negatives) in enumerate(zip(draw.positives, draw.negatives, strict=True)):
        ids = np.sort(np.array(positives + negatives))  # in the order of the images, as the folds want it
        signs = np.where(np.isin(ids, positives), 1.0, -1.0)
        coefficients, choice = _run_class(gram[np.ix_(ids, ids)], signs, partial(advance, 0))
        decisions = coefficients @ products[ids]  # [costs, test images]
        scores = [precision_on_test(row, test_labels[:, column]) for row in decisions]
        average_precision.append([None if math.isnan(score) else score for score in scores])
        chosen.append(choice)
        advance(1)
    return _Scores(average_precision, chosen)


def _run_class(gram: Array, signs: Array, poll: Callable[[], None]) -> tuple[Array, int]:
    """Coefficients at every cost [costs, n], and which cost cross-validation chooses.

    At these sizes wide products save more than a good start does, but for the highest costs: theirs are factorisations,
    which gain nothing from company and of which a good start saves half.
    """
    num_folds = _num_folds(signs)
    held_out = np.zeros((1, len(signs)), dtype=bool)  # the first problem of each cost trains on all
    if num_folds:
        held_out = np.concatenate([held_out, held_out_folds(signs, num_folds)])
    weights = class_weights(signs) * ~held_out
    costs = np.array(COSTS)[:, None, None] * weights  # [costs, 1 + folds, n]
    num_low = sum(cost < HIGH_COST for cost in COSTS)
    solutions: list[Solution] = []
    for group in np.split(costs, range(num_low, len(COSTS))):
        flat = group.reshape(-1, len(signs))
        start = _of_last_cost(solutions[-1], costs.shape[1]) if solutions else None
        solutions.append(solve(gram, np.broadcast_to(signs, flat.shape).copy(), flat, start, poll))
    coefficients = np.concatenate([solution.coefficients for solution in solutions]).reshape(costs.shape)
    if not num_folds:
        return coefficients[:, 0], COSTS.index(ONE_SHOT_COST)
    decisions = np.concatenate([solution.decisions for solution in solutions]).reshape(costs.shape)
    scores = [held_out_score(rows[1:], signs, held_out[1:]) for rows in decisions]
    return coefficients[:, 0], int(np.argmax(scores))


def _of_last_cost(solution: Solution, num_problems: int) -> Solution:
    return Solution(solution.coefficients[-num_problems:], solution.decisions[-num_problems:])


def _num_folds(signs: Array) -> int:
    """Three, or as many as there are positives (or negatives); 0 where that leaves nothing to train on."""
    num_folds = min(NUM_FOLDS, int((signs > 0).sum()), int((signs < 0).sum()))
    return num_folds if num_folds >= 2 else 0


def _summary(
    scores: dict[Draw, _Scores], train_labels: Labels, test_labels: Labels, class_names: Sequence[str]
) -> LowshotResult:
    counted = (test_labels == 1).any(axis=0)
    results = []
    for shots in sorted({draw.shots for draw in scores}):
        draws = sorted((draw for draw in scores if draw.shots == shots), key=lambda draw: draw.number)
        tables = [np.array(scores[draw].average_precision, dtype=np.float64)[counted] for draw in draws]
        best = [int(table.mean(axis=0).argmax()) for table in tables]
        published = [float(table.mean(axis=0)[choice]) for table, choice in zip(tables, best, strict=True)]
        chosen = [np.array(scores[draw].chosen)[counted] for draw in draws]
        honest = [float(table[np.arange(len(table)), c].mean()) for table, c in zip(tables, chosen, strict=True)]
        short = ((train_labels == 1).sum(axis=0) < shots) | (
            (train_labels == -1).sum(axis=0) < NEGATIVES_PER_SHOT * shots
        )
        results.append(
            ShotsResult(
                shots=shots,
                published=tuple(published),
                published_costs=tuple(COSTS[choice] for choice in best),
                published_mean=float(np.mean(published)),
                published_std=float(np.std(published)),
                cross_validated=tuple(honest),
                cross_validated_mean=float(np.mean(honest)),
                cross_validated_std=float(np.std(honest)),
                num_folds=min(NUM_FOLDS, shots) if shots > 1 else 0,
                short_classes=tuple(name for name, few in zip(class_names, short, strict=True) if few),
            )
        )
    return LowshotResult(
        published_mean=float(np.mean([result.published_mean for result in results])),
        cross_validated_mean=float(np.mean([result.cross_validated_mean for result in results])),
        shots=tuple(results),
        without_test_positives=tuple(name for name, kept in zip(class_names, counted, strict=True) if not kept),
    )


# --- Finished draws on disk, and what must hold before anything starts --------------------------------


def _draw_file(store: Path, draw: Draw) -> Path:
    return store / f"shots_{draw.shots:03d}_draw_{draw.number}.json"


def _draw_key(key: str, draw: Draw) -> str:
    return f"{key} {hashlib.sha256(json.dumps(asdict(draw)).encode()).hexdigest()}"


def _read_scores(store: Path | None, draw: Draw, key: str) -> _Scores | None:
    content = None if store is None else read_stored(_draw_file(store, draw), {"key": key, "costs": list(COSTS)})
    return None if content is None else _Scores(content["average_precision"], content["chosen"])


def _check_draws(draws: Sequence[Draw], labels: Labels, class_names: Sequence[str]) -> None:
    if not draws:
        raise ValueError("There are no draws; make some with `draw_samples`.")
    for draw in draws:
        if not len(draw.positives) == len(draw.negatives) == len(class_names):
            raise ValueError(
                f"A draw has {len(draw.positives)} classes, not {len(class_names)}; draw from these labels."
            )
        for column, name in enumerate(class_names):
            for ids, value, kind in (
                (draw.positives[column], 1, "with it"),
                (draw.negatives[column], -1, "without it"),
            ):
                if not ids:
                    raise DataError(f"the class {name} has no training image {kind}; give some or leave the class out")
                if max(ids) >= len(labels) or min(ids) < 0 or (labels[list(ids), column] != value).any():
                    raise DataError(f"the draws for {name} do not fit these labels; draw again from them")
