"""The record of an evaluation: everything needed to judge a number, as JSON that is written whole or not at all.

A result goes to DIRECTORY/TASK.json. One that answers another question (other protocol, data, weights or seed) never
overwrites an earlier one: the earlier becomes TASK-1.json, TASK-2.json and so on. All scores are shares (0.782, not
78.2); percent is how tables and pictures show them. Computing scores, and showing them, is left to others.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from odcluster import __version__
from odcluster.data.readers import shown
from odcluster.errors import DataError, UserError
from odcluster.training.run import write_atomically

Task = Literal["linear", "svm", "lowshot", "knn", "clusters", "semi"]
TASKS: tuple[Task, ...] = typing.get_args(Task)
Rule = Literal["", "published", "honest"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What was trained and tested on."""

    name: str
    kind: str
    """The kind of its manifest: voc, class tree, cifar10 ..."""
    train_split: str
    test_split: str
    """Names of the splits; "" where there is none (one folder, images left out one at a time)."""
    num_train: int
    num_test: int
    """Images that were really used, of each split."""
    num_classes: int
    train_fingerprint: str
    test_fingerprint: str
    left_out: list[str]
    """What was left out and why: an image that could not be read, or "12 of 500 images have no label"."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What was evaluated."""

    origin: str
    """A file, a run or the name of published weights; "" for untrained ones."""
    backbone: str
    image_size: int
    fingerprint: str
    pretraining: str
    """In words: method, recipe, epochs and data, "labels of ImageNet-1k" or "untrained"."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The metrics of one layer, under one rule of choosing settings."""

    layer: str
    metrics: dict[str, float]
    """By name and in the order to be shown: top-1 | mAP | mean, k=1, k=2 ... | NMI, ARI ... | 1 %, 10 %. Shares."""
    std: dict[str, float] = dataclasses.field(default_factory=dict)
    """Standard deviation over draws, of the metrics that have one."""
    rule: Rule = ""
    """How settings were chosen, where a task reports two ways: published (by test score) or honest (without it)."""


@dataclass(frozen=True)
class Best:
    """The highest headline score; the published rule's, where there are two."""

    layer: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """One evaluation."""

    task: Task
    protocol: str
    """A name for people: "VOC07 linear SVM (Goyal et al. 2019)"."""
    variant: str
    """A name for programs: "published" when it follows the published protocol, else its own, such as "fast"."""
    deviations: list[str]
    """In what it departs from the protocol it names."""
    data: Data
    weights: Weights
    seed: int
    scores: list[Scores]
    headline: str
    """The metric that counts."""
    details: dict[str, Any]
    """What else was found: {"average_precision": {layer: {class: share}}} of an SVM, {"epochs": 100} of a linear probe,
    chosen costs, ids drawn ... Numbers that are not finite are written as null."""
    versions: dict[str, str]
    device: str
    seconds: float
    started: str
    """UTC, ISO 8601."""
    command: str

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"There is no task {self.task!r}; it is one of {', '.join(TASKS)}.")
        if not any(self.headline in row.metrics for row in self.scores):
            raise ValueError(f"No row has the headline metric {self.headline!r}; name one that is measured.")
        for row in self.scores:
            for name, value in [*row.metrics.items(), *row.std.items()]:
                if abs(value) > 1 + 1e-6:
                    raise ValueError(f"{name} of {row.layer} is {value}; scores are shares, so divide percent by 100.")

    @property
    def best(self) -> Best:
        rows = [row for row in self.scores if self.headline in row.metrics and row.rule != "honest"]
        rows = rows or [row for row in self.scores if self.headline in row.metrics]
        row = max(rows, key=lambda row: np.nan_to_num(row.metrics[self.headline], nan=-math.inf))
        return Best(row.layer, row.metrics[self.headline])

    def question(self) -> tuple[Any, ...]:
        """What the numbers answer. A later result with an equal question takes this one's place."""
        data, weights = self.data, self.weights
        return (
            self.task, self.variant, tuple(self.deviations), self.seed,
            data.train_split, data.test_split, data.train_fingerprint, data.test_fingerprint,
            weights.fingerprint, weights.image_size, tuple(row.layer for row in self.scores),
        )  # fmt: skip


def library_versions() -> dict[str, str]:
    """What a number can depend on."""
    names = ("torch", "torchvision", "timm", "scikit-learn", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"odcluster": __version__, **found, "python": platform.python_version()}


def to_json(result: Result) -> str:
    """JSON that any reader takes: ASCII, no lone surrogates, all numbers finite. `best` is there for readers."""
    return json_text(dataclasses.asdict(result) | {"best": dataclasses.asdict(result.best)})


def json_text(values: dict[str, Any]) -> str:
    """The values as JSON for people too: lists of numbers on one line."""
    text = json.dumps(_plain(values), indent=1, allow_nan=False)
    # A list of numbers goes on one line: ids drawn for low-shot SVMs would be 200,000 lines. No string can hold the
    # line breaks that are looked for, because JSON escapes them.
    return re.sub(r"\[\n\s*(-?[\d.][^\[\]{}\"]*?)\n\s*\]", _on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + " ".join(found[1].split()) + "]"


def from_json(text: str, where: str = "the result") -> Result:
    """The inverse of to_json; a key that is unknown, missing or of the wrong type is refused by name."""
    remedy = "restore the file, or evaluate again and move this one away"
    try:
        values = json.loads(text)
        best = _read(Best, values.pop("best", None) if isinstance(values, dict) else None, "best")
        result = _read(Result, values, "it")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not a result of an evaluation ({error}); {remedy}") from error
    if _plain(dataclasses.asdict(best)) != _plain(dataclasses.asdict(result.best)):
        raise DataError(f"{where} says that {best.layer} is best, which its scores do not; {remedy}")
    assert isinstance(result, Result)
    return result


def write_result(result: Result, directory: Path) -> Path:
    """Write DIRECTORY/TASK.json. What is there already stays, under a number, unless it answers the same question."""
    text = to_json(result)  # what cannot be written is found out before anything is touched
    question = from_json(text).question()
    path = directory / f"{result.task}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        same = [old for old in _files(directory, result.task) if _question(old) == question]
        if path.exists() and path not in same:
            numbers = [_number(old) for old in _files(directory, result.task)]
            path.rename(directory / f"{result.task}-{max(numbers) + 1}.json")
        write_atomically(path, text)
        for old in same:
            if old != path:
                old.unlink()
    except OSError as error:
        raise UserError(
            f"{shown(str(path))} cannot be written ({error.strerror}); make room or choose a directory you may write to"
        ) from error
    return path


def read_results(directory: Path) -> list[Result]:
    """All results of a directory, task by task, the latest of each first."""
    if not directory.is_dir():
        raise DataError(f"there is no directory {shown(str(directory))}; evaluate first, or give where results are")
    return [from_json(_text(path), shown(str(path))) for task in TASKS for path in _files(directory, task)]


def _files(directory: Path, task: str) -> list[Path]:
    """TASK.json, then TASK-3.json, TASK-2.json ...: the latest first."""
    found = [path for path in directory.iterdir() if re.fullmatch(rf"{task}(-[1-9]\d*)?\.json", path.name)]
    return sorted(found, key=lambda path: -_number(path) if _number(path) else -math.inf)


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2] or 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{shown(str(path))} cannot be read ({error}); restore it or move it away") from error


def _question(path: Path) -> tuple[Any, ...] | None:
    """None for a file that is no result (any more): it answers nothing, and is kept like any other."""
    try:
        return from_json(_text(path)).question()
    except DataError:
        return None


def _plain(value: Any) -> Any:
    """The value as JSON can hold it."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    return value


def _read(kind: Any, value: Any, where: str) -> Any:
    """The value if it is of the annotated kind; ValueError otherwise. A null number is nan."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        kinds = typing.get_type_hints(kind)
        if unknown := sorted(set(value) - set(kinds)):
            raise ValueError(f"{where} has unknown keys: {', '.join(map(shown, unknown))}")
        if missing := [name for name in kinds if name not in value]:
            raise ValueError(f"{where} lacks the keys: {', '.join(missing)}")
        made: Any = kind
        return made(**{name: _read(kinds[name], part, name) for name, part in value.items()})
    if origin is list and isinstance(value, list):
        return [_read(arguments[0], part, where) for part in value]
    if origin is dict and isinstance(value, dict):
        return {key: _read(arguments[1], part, where) for key, part in value.items()}
    if kind is float and (value is None or type(value) in (int, float)):
        return math.nan if value is None else float(value)
    if kind is Any or (origin is Literal and value in arguments) or type(value) is kind:
        return value
    raise ValueError(f"{where} is {value!r:.40}")
