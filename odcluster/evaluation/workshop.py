"""What every task works with: the subject, both sides of labelled images, features on disk; and what it returns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from odcluster.errors import DataError, UserError
from odcluster.evaluation.features import FeatureStore, extract_features, pooling
from odcluster.evaluation.parts import Parts
from odcluster.evaluation.results import Scores
from odcluster.evaluation.subject import Subject
from odcluster.ranks import SINGLE, Ranks
from odcluster.verbs import Evaluation

Progress = Callable[[str, int, int], None]


class Helped(Exception):
    """This rank has computed its share of the features; rank 0 does the rest."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a task found."""

    protocol: str
    variant: str
    scores: list[Scores]
    headline: str
    num_train: int
    num_test: int
    num_classes: int
    deviations: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unfinished: Path | None = None
    """Where work was kept while it was unfinished; of no use any more."""


@dataclass(frozen=True)
class Workshop:
    """What every task works with."""

    subject: Subject
    parts: Parts
    options: Evaluation
    device: torch.device
    progress: Progress
    say: Callable[[str], None]
    ranks: Ranks = SINGLE

    def key(self) -> str:
        """Stands for weights, size, images and labels; work under another key is never taken up."""
        names = [self.subject.identity(), self.parts.train.fingerprint(), self.parts.test.fingerprint()]
        return hashlib.sha256(" ".join(names).encode()).hexdigest()

    def stages(self) -> list[str]:
        """The layers asked for, else all stages."""
        known = self.subject.backbone.stage_names
        if wrong := [name for name in self.options.layers or () if name not in known]:
            raise UserError(f"{self.subject.backbone.name} has no layer {wrong[0]}; its layers are {', '.join(known)}")
        return [name for name in known if not self.options.layers or name in self.options.layers]

    def place(self) -> Path:
        """A folder for the unfinished work of this very task."""
        return self.subject.directory / f".unfinished-{self.options.task}-{self.key()[:16]}"

    def jobs(self) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.options.jobs or cores


@dataclass(frozen=True)
class Side:
    """Rows of one side, and which images of the part they are."""

    store: FeatureStore
    usable: NDArray[np.bool_]

    def rows(self, layer: str) -> NDArray[np.float32]:
        rows = self.store.rows(layer)
        return rows if self.usable.all() else rows[self.usable]

    def tensor(self, layer: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rows(layer)))


def both_sides(workshop: Workshop, layers: list[str], *, whole: bool, max_dims: int) -> tuple[Side, Side]:
    """Features of both sides on disk; said where they are and how large."""
    sides = []
    for name, part in (("training", workshop.parts.train), ("test", workshop.parts.test)):
        key = f"{workshop.subject.identity()} {part.images()}"
        view = "whole" if whole else "centre"
        folder = hashlib.sha256(f"{key} {view} {max_dims} {' '.join(layers)}".encode()).hexdigest()[:16]

        def progress(activity: str, done: int, total: int, name: str = name) -> None:
            workshop.progress(f"{activity} of the {name} images", done, total)

        store = extract_features(
            workshop.subject.backbone,
            part.source,
            workshop.subject.directory / "features" / folder,
            layers=layers,
            whole=whole,
            key=key,
            workers=workshop.options.workers,
            device=workshop.device,
            progress=progress,
            ids=part.ids,
            max_dims=max_dims,
            ranks=workshop.ranks,
        )
        sides.append(Side(store, store.usable))
    if not workshop.ranks.is_first:
        raise Helped
    size = sum(side.store.num_bytes for side in sides)
    workshop.say(f"features: {size / 1e9:.2f} GB in {workshop.subject.directory / 'features'}, kept for other tasks")
    return sides[0], sides[1]


def refusals(*sides: Side) -> list[str]:
    return [f"{path}: {why}" for side in sides for path, why in side.store.refused]


def size_and_pooling(workshop: Workshop) -> list[str]:
    """In what the features depart from the paper's."""
    backbone = workshop.subject.backbone
    deviations = []
    if backbone.image_size != 224:
        deviations.append(f"images of {backbone.image_size} px instead of 224")
    pools = pooling(backbone, backbone.image_size)
    if other := [name for name in workshop.stages() if not pools[name].published]:
        deviations.append(pools[other[0]].description)
    return deviations


def check_memory(needed: int, what: str, remedy: str) -> None:
    """Refuse now what would end in the system's out-of-memory killer after an hour of features."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # another system, which does not say
        return
    if needed > max(free, total // 2):  # free counts nothing that the system could give up
        raise DataError(f"{what} would take {needed / 1e9:.0f} GB of memory and {free / 1e9:.0f} GB are free; {remedy}")
