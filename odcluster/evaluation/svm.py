"""The VOC07 linear SVM protocol: one-vs-rest SVMs on frozen features, and their mean average precision.

Promises the published protocol (Goyal et al. 2019) to the letter: rows x / (|x| + 1e-5); images on which a class is
only difficult are negatives in training and left out in testing; positives weigh twice; the cost of each class is
chosen from 26 by 3-fold stratified unshuffled cross-validation; average precision over all points. What is replaced is
the solver: same problem, same minimum, a fraction of the time. Classes that are finished survive a stop. Extracting
features, reading labels and telling people are left to others.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from odcluster.errors import DataError, UserError
from odcluster.evaluation.average_precision import average_precision, raw_average_precision
from odcluster.evaluation.svm_solver import (
    Array,
    Features,
    Solution,
    cross_products,
    decision_values,
    gram_matrix,
    row_scales,
    solve,
)
from odcluster.training.run import write_atomically

COSTS = tuple(sorted([10.0**power for power in range(-7, 3)] + [0.5**power for power in range(4, 20)]))
NUM_FOLDS = 3
POSITIVE_WEIGHT = 2.0
CLASSES_AT_ONCE = 5
"""Classes that share each product with K: 15 problems, each about three times as fast as alone; a stop loses them."""

Labels = NDArray[np.int8]
Progress = Callable[[str, int, int], None]
Task = TypeVar("Task")


@dataclass(frozen=True, kw_only=True)
class ClassResult:
    """One class of a layer."""

    name: str
    average_precision: float
    """On the test images; nan where none of them is positive."""
    cost: float
    cross_validation: tuple[float, ...]
    """Mean average precision of the held-out folds for every cost of COSTS."""
    num_positives: int
    num_negatives: int
    """Training images, the difficult ones included."""
    num_difficult: int
    num_test_positives: int
    num_test_negatives: int
    num_test_difficult: int
    """Test images left out for this class."""


@dataclass(frozen=True, kw_only=True)
class SvmResult:
    """One layer."""

    mean_average_precision: float
    """Over the classes that have a positive test image."""
    classes: tuple[ClassResult, ...]
    without_test_positives: tuple[str, ...]
    """Names of the classes left out of the mean."""


def svm_map(
    train: Features,
    train_labels: Labels,
    test: Features,
    test_labels: Labels,
    class_names: Sequence[str],
    *,
    jobs: int,
    store: Path | None = None,
    key: str = "",
    progress: Progress = lambda activity, done, total: None,
) -> SvmResult:
    """Mean average precision of the features of one layer, [images, D], for labels [images, classes].

    A label is 1 where the class is present, -1 where it is absent and 0 where it is only difficult. `store` is a folder
    for finished classes: a later call with the same `key`, which stands for the features and labels, goes on from
    there. `progress` may raise to stop.
    """
    check_inputs(train, train_labels, test, test_labels, class_names, jobs)
    check_folds(train_labels, class_names)
    finished = {number: _read_class(store, number, name, key) for number, name in enumerate(class_names)}
    left = [number for number, result in finished.items() if result is None]
    if left:
        _run_classes(
            left, finished, train, train_labels, test, test_labels, class_names, jobs=jobs, store=store, key=key,
            progress=progress,
        )  # fmt: skip
    classes = tuple(result for result in finished.values() if result is not None)
    return SvmResult(
        mean_average_precision=float(np.nanmean([result.average_precision for result in classes])),
        classes=classes,
        without_test_positives=tuple(r.name for r in classes if math.isnan(r.average_precision)),
    )


def _run_classes(
    left: list[int],
    finished: dict[int, ClassResult | None],
    train: Features,
    train_labels: Labels,
    test: Features,
    test_labels: Labels,
    class_names: Sequence[str],
    *,
    jobs: int,
    store: Path | None,
    key: str,
    progress: Progress,
) -> None:
    """Fill in the classes that are left, on `jobs` threads, and store each."""
    scales, test_scales = row_scales(train), row_scales(test)
    gram = training_gram(train, scales, jobs, progress)
    size = min(CLASSES_AT_ONCE, -(-len(left) // jobs))
    groups = [left[at : at + size] for at in range(0, len(left), size)]

    def work(group: list[int], advance: Callable[[int], None]) -> None:
        signs = np.where(train_labels[:, group] == 1, 1.0, -1.0).T
        scores = cross_validate(gram, signs, advance)
        chosen = scores.argmax(axis=1)  # of equals the first, hence the lowest
        costs = np.array(COSTS)[chosen, None] * class_weights(signs)
        solution = solve(gram, signs, costs, poll=partial(advance, 0))
        decisions = decision_values(train, scales, test, test_scales, solution.coefficients)
        for row, number in enumerate(group):
            result = ClassResult(
                name=class_names[number],
                average_precision=precision_on_test(decisions[row], test_labels[:, number]),
                cost=COSTS[chosen[row]],
                cross_validation=tuple(scores[row].tolist()),
                **_counts(train_labels[:, number], test_labels[:, number]),
            )
            _write_class(store, number, key, result)
            finished[number] = result

    num_done = len(class_names) - len(left)
    run_threads(
        work, groups, jobs=jobs, progress=progress, activity="SVMs, classes x costs",
        done=num_done * len(COSTS), total=len(class_names) * len(COSTS),
    )  # fmt: skip


def cross_validate(gram: Array, signs: Array, advance: Callable[[int], None]) -> Array:
    """Mean over the folds of the held-out average precision of each class and cost [classes, costs].

    From cost to cost the solver starts where it was. The score is scikit-learn's, as in the published code.
    """
    held_out = np.stack([held_out_folds(y, NUM_FOLDS) for y in signs])  # [classes, folds, n]
    num_classes, num_folds, n = held_out.shape
    problem_signs = signs.repeat(num_folds, axis=0)
    weights = class_weights(problem_signs) * ~held_out.reshape(-1, n)
    scores = np.empty((num_classes, len(COSTS)))
    solution: Solution | None = None
    for column, cost in enumerate(COSTS):
        solution = solve(gram, problem_signs, cost * weights, solution, partial(advance, 0))
        decisions = solution.decisions.reshape(held_out.shape)
        for row in range(num_classes):
            scores[row, column] = held_out_score(decisions[row], signs[row], held_out[row])
        advance(num_classes)
    return scores


def held_out_folds(signs: Array, num_folds: int) -> NDArray[np.bool_]:
    """Which rows each fold holds out [folds, n]: stratified, in the order of the images."""
    folds = np.zeros((num_folds, len(signs)), dtype=bool)
    for fold, (_, held_out) in enumerate(StratifiedKFold(num_folds).split(np.zeros(len(signs)), signs)):
        folds[fold, held_out] = True
    return folds


def held_out_score(decisions: Array, signs: Array, held_out: NDArray[np.bool_]) -> float:
    scores = [raw_average_precision(d[out], signs[out] > 0) for d, out in zip(decisions, held_out, strict=True)]
    return float(np.mean(scores))


def class_weights(signs: Array) -> Array:
    return np.where(signs > 0, POSITIVE_WEIGHT, 1.0)


def precision_on_test(decisions: Array, labels: Labels) -> float:
    """Of the test images that are not difficult for this class; nan without a positive one."""
    if not (labels == 1).any():
        return math.nan
    return average_precision(decisions[labels != 0], labels[labels != 0] == 1)


def training_gram(train: Features, scales: Array, jobs: int, progress: Progress) -> Array:
    with threadpool_limits(jobs, user_api="blas"):
        return gram_matrix(train, scales, partial(progress, "products of the training images", 0, 1))


def gram_with_test(train: Features, scales: Array, test: Features, jobs: int, progress: Progress) -> Array:
    """Products of the training with the test images [n, len(test)]."""
    with threadpool_limits(jobs, user_api="blas"):
        poll = partial(progress, "products of the test images", 0, 1)
        return cross_products(train, scales, test, row_scales(test), poll)


# --- Threads ----------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Ends a thread whose result nobody waits for."""


def run_threads(
    work: Callable[[Task, Callable[[int], None]], None],
    tasks: Sequence[Task],
    *,
    jobs: int,
    activity: str,
    done: int,
    total: int,
    progress: Progress,
) -> None:
    """`work(task, advance)` for all tasks, `jobs` at a time; work calls `advance` often, with the units it finished.

    Threads and not processes: numpy computes without Python's lock, K is shared as it is, and to stop is to say so.
    Each computes with one BLAS thread: those of a busy machine wait for each other (a factorisation of 1,000 rows took
    0.5 s on two, 0.03 s on one). `progress` is called by the caller's thread only.
    """
    stopping, lock, finished = threading.Event(), threading.Lock(), 0

    def advance(count: int) -> None:
        nonlocal finished
        if stopping.is_set():
            raise _Stopped
        with lock:
            finished += count

    with threadpool_limits(1, user_api="blas"), _pool(jobs) as pool:
        try:
            pending = {pool.submit(work, task, advance) for task in tasks}
            while pending:
                progress(activity, min(done + finished, total - 1), total)  # the last word comes once, at the end
                ended, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
            progress(activity, total, total)
        except BaseException:
            stopping.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def _pool(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that compute with one thread of torch each; what torch then takes for the default is put back."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


# --- Finished classes on disk -----------------------------------------------------------------------


def _class_file(store: Path, number: int) -> Path:
    return store / f"class_{number:03d}.json"


def _write_class(store: Path | None, number: int, key: str, result: ClassResult) -> None:
    if store is None:
        return
    content = asdict(result) | {"key": key, "costs": COSTS}
    if math.isnan(result.average_precision):
        content["average_precision"] = None
    write_stored(_class_file(store, number), content)


def _read_class(store: Path | None, number: int, name: str, key: str) -> ClassResult | None:
    content = (
        None
        if store is None
        else read_stored(_class_file(store, number), {"key": key, "name": name, "costs": list(COSTS)})
    )
    if content is None:
        return None
    del content["key"], content["costs"]
    if content["average_precision"] is None:
        content["average_precision"] = math.nan
    return ClassResult(**content | {"cross_validation": tuple(content["cross_validation"])})


def write_stored(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=1, allow_nan=False))
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make room or choose another folder, and go on from there"
        ) from error


def read_stored(path: Path, expected: dict[str, Any]) -> dict[str, Any] | None:
    """The content, if it is there whole and has the expected values; it is redone if not."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    fits = isinstance(content, dict) and all(content.get(name) == value for name, value in expected.items())
    return content if fits else None


# --- What must hold before anything starts ----------------------------------------------------------


def check_inputs(
    train: Features,
    train_labels: Labels,
    test: Features,
    test_labels: Labels,
    class_names: Sequence[str],
    jobs: int,
) -> None:
    """Refuse features and labels that do not fit together, or that give no result."""
    if jobs < 1:
        raise UserError(f"{jobs} jobs cannot compute anything; use 1 or more, up to the number of cores")
    for which, features, labels in (("training", train, train_labels), ("test", test, test_labels)):
        if features.ndim != 2 or labels.shape != (len(features), len(class_names)):
            raise ValueError(
                f"The {which} features are {features.shape} and the labels {labels.shape} for {len(class_names)} "
                "classes; pass [images, dimensions] and [images, classes]."
            )
        if len(features) == 0:
            raise DataError(f"the {which} set has no images; give one that has")
        if not np.isin(labels, (-1, 0, 1)).all():
            raise ValueError(f"Some {which} labels are not 1 (present), -1 (absent) or 0 (difficult); convert them.")
        _check_finite(features, which)
    if train.shape[1] != test.shape[1]:
        raise ValueError(
            f"Training features have {train.shape[1]} dimensions and test features {test.shape[1]}; "
            "extract both with the same backbone and layer."
        )
    if not (test_labels == 1).any():
        raise DataError("no class has a positive test image, so there is nothing to measure; give other test images")


def _check_finite(features: Features, which: str) -> None:
    finite = np.concatenate([np.isfinite(features[at : at + 512]).all(axis=1) for at in range(0, len(features), 512)])
    bad = np.flatnonzero(~finite)
    if len(bad):
        rows = ", ".join(map(str, bad[:3])) + (", ..." if len(bad) > 3 else "")
        raise DataError(
            f"the {which} features of {len(bad)} of {len(features)} images (rows {rows}) are not finite; "
            "use an earlier checkpoint, or extract them in float32"
        )


def check_folds(labels: Labels, class_names: Sequence[str]) -> None:
    for name, column in zip(class_names, labels.T, strict=True):
        num_positives = int((column == 1).sum())
        for count, kind in ((num_positives, "with it"), (len(column) - num_positives, "without it")):
            if count < NUM_FOLDS:
                raise DataError(
                    f"the class {name} has {count} training image(s) {kind} and needs {NUM_FOLDS}, one for each fold; "
                    "give more images or leave the class out"
                )


def _counts(train: Labels, test: Labels) -> dict[str, int]:
    return {
        "num_positives": int((train == 1).sum()),
        "num_negatives": int((train != 1).sum()),
        "num_difficult": int((train == 0).sum()),
        "num_test_positives": int((test == 1).sum()),
        "num_test_negatives": int((test == -1).sum()),
        "num_test_difficult": int((test == 0).sum()),
    }
