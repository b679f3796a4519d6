"""What a study is: trainings, judgements of them, a summary and a picture. Plain data and functions; nothing runs here.

A plan names its parts; `odcluster/reproduce.py` carries them out, one directory per part, and hands what was found to
`summarise` and `draw`. Two plans that name the same part mean the same thing by it, so that studies in one folder share
their trainings. Importing a study is quick: torch and matplotlib are left to those who run and draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from odcluster.config import Config
from odcluster.verbs import Task

if TYPE_CHECKING:
    from odcluster.data.sources import Manifest, Source
    from odcluster.evaluation.results import Result

Scale = Literal["small", "paper"]
DataName = Literal["cifar10", "tiny-imagenet", "voc", "imagenet", "places"]
Ids = NDArray[np.int64]

IMAGES_PER_SECOND = {
    "odc": 1000.0,
    "deepcluster": 700.0,
    "rotation": 300.0,
    "jigsaw": 180.0,
    "colorization": 400.0,
    "labels": 1000.0,
}
"""Of `smallconv` on images of 32 px, one view, on two idle cores without bfloat16; for estimates only."""
JUDGEMENT_MINUTES: dict[str, float] = {"linear": 1.0, "knn": 0.5, "svm": 4.0, "lowshot": 6.0, "clusters": 0.2}
MANY_CLASSES_MINUTES = 4.0
"""Linear probes of all layers with 100 classes: a good minute of one core per layer."""


@dataclass(frozen=True)
class Images:
    """Images of the user's, or a part of them that a function chooses from the list of all."""

    of: DataName
    count: int
    """How many there are; for estimates only."""
    part: str = ""
    """Name of the choice, "" for all of them."""
    choose: Callable[[Manifest], Ids] | None = None


@dataclass(frozen=True)
class Training:
    """One run: `odcluster train` on these images with this configuration."""

    name: str
    images: Images
    config: Config
    start: str | None = None
    """The training whose weights it starts from."""

    def minutes(self) -> float | None:
        """About how long it takes on two idle cores; None where that is no machine for it."""
        config = self.config
        if config.backbone != "smallconv":
            return None
        assert config.epochs is not None
        assert config.image_size is not None
        speed = IMAGES_PER_SECOND[config.method] * (32 / config.image_size) ** 2 / config.augmentation.num_views
        return config.epochs * self.images.count / speed / 60


@dataclass(frozen=True)
class Judgement:
    """One protocol applied to one backbone: `odcluster evaluate`."""

    name: str
    subject: str
    """A training, or a backbone's name where it is untrained."""
    task: Task
    images: Images | None = None
    """Labelled images that train a probe, tested on the test images of the same data; None: the run's own clusters."""
    untrained: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def minutes(self) -> float:
        many_classes = self.task == "linear" and self.images is not None and self.images.of == "tiny-imagenet"
        return MANY_CLASSES_MINUTES if many_classes else JUDGEMENT_MINUTES[self.task]


@dataclass(frozen=True)
class Plan:
    """All parts of a study at one scale, and what its trainings have in common."""

    trainings: Sequence[Training]
    judgements: Sequence[Judgement]
    budget: str
    """What every training was given, in a sentence."""

    def parts(self) -> list[Training | Judgement]:
        return [*self.trainings, *self.judgements]

    def minutes(self) -> float | None:
        """About how long all of it takes on two idle cores."""
        times = [part.minutes() for part in self.parts()]
        return None if None in times else sum(time for time in times if time is not None)

    def needs(self) -> list[DataName]:
        """Whose images it takes."""
        used = [part.images.of for part in self.parts() if part.images is not None]
        return list(dict.fromkeys(used))


@dataclass(frozen=True)
class Trained:
    """A finished training."""

    path: Path
    metrics: list[dict[str, Any]]
    """The lines of its metrics.jsonl."""
    source: Source


@dataclass(frozen=True)
class Found:
    """What the parts of a plan came to."""

    plan: Plan
    scale: Scale
    seeds: tuple[int, ...]
    trained: Mapping[str, Trained]
    results: Mapping[str, Result]

    def percent(self, name: str) -> dict[str, float]:
        """The scores of a judgement that count, in percent."""
        result = self.results[name]
        if result.task == "linear":
            last = result.scores[-1]
            best = {"linear, best layer": 100 * result.best.value} if len(result.scores) > 1 else {}
            return {f"linear, {last.layer}": 100 * last.metrics["top-1"], **best}
        names = {
            "knn": "20 neighbours",
            "svm": "VOC07 SVM, mAP",
            "lowshot": "low-shot SVM, mAP",
            "clusters": "NMI x 100",
        }
        return {names.get(result.task, result.task): 100 * result.best.value}

    def scores_of(self, subject: str) -> dict[str, float]:
        """All scores that count of one training."""
        names = [judgement.name for judgement in self.plan.judgements if judgement.subject == subject]
        return {metric: percent for name in names for metric, percent in self.percent(name).items()}


@dataclass(frozen=True)
class Study:
    """A table or a figure of the paper."""

    name: str
    shows: str
    """What it looks at, for `odcluster reproduce --list`."""
    paper: str
    """What the paper reports."""
    seeds: tuple[int, ...]
    """Where none are given."""
    plan: Callable[[Scale, tuple[int, ...]], Plan]
    summarise: Callable[[Found], dict[str, Any]]
    """The numbers of results.json."""
    draw: Callable[[Study, dict[str, Any], Found, Path], list[Path]]
    """The picture, as PNG and SVG, from the summary (and, for pictures of images, from the trainings)."""
