"""Short runs of every method, and where they are struck."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_runs import TINY, metrics_without_timings, state_hash

from odcluster.training import checkpoint
from odcluster.training.devices import StopFlag
from odcluster.training.trainer import Trainer

SHORT = {
    **TINY,
    "batch_size": 32,
    "epochs": 2,
    "max_steps": 12,
    "fine_share": 0.5,
    "fine_clusters": 12,
    "final_pass": True,
    "kmeans_iterations": 6,
    "calibration_batches": 2,
    "log_interval": 3,
    "checkpoint_minutes": 0.0,
}
PLAIN = {name: value for name, value in SHORT.items() if name not in ("fine_share", "fine_clusters", "final_pass")}
METHODS: dict[str, dict[str, Any]] = {
    "odc": SHORT,
    "odc of the paper": {**PLAIN, "recipe": "odc_resnet50_imagenet", "lr": 0.01},
    "odc on a frozen backbone": {
        **{name: value for name, value in SHORT.items() if name not in ("backbone", "image_size", "crop_size")},
        "weights": "trained first",
        "neighbours": 3,
        "cached_views": 2,
        "kmeans_restarts": 1,
    },
    "deepcluster": {**PLAIN, "method": "deepcluster"},
    "rotation": {**PLAIN, "method": "rotation"},
    "jigsaw": {**PLAIN, "method": "jigsaw", "permutations": 10},
    "colorization": {**PLAIN, "method": "colorization"},
}
"""Twelve steps of every method, two epochs of six: every phase there is, in about a second."""
EVERY = 3
"""A checkpoint is saved after every third step, so that a kill costs up to two steps that are done again."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def save_seldom() -> None:
    """In a child: checkpoints at every third step only, and at the end."""
    save = Trainer.save

    def seldom(self: Trainer, last: bool = False) -> None:
        if last or self.step % EVERY == 0:
            save(self, last)

    Trainer.save = seldom  # type: ignore[method-assign]


def at_step(number: int, strike: Callable[[], object] = die) -> None:
    """In a child: strike before the step of that number."""
    original = Trainer._train_step

    def step(self: Trainer, raw: Any, epoch: int) -> None:
        if self.step == number:
            strike()
        original(self, raw, epoch)

    Trainer._train_step = step  # type: ignore[method-assign]


def at_point(name: str, number: int, strike: Callable[[], object] = die) -> None:
    """In a child: strike when a save reaches the point of that name for the n-th time."""
    left = [number]

    def reached(point: str) -> None:
        left[0] -= point == name
        if point == name and left[0] == 0:
            strike()

    checkpoint.reached = reached


def at_poll(number: int, strike: Callable[[], object] = die) -> None:
    """In a child: strike at the n-th time that anything long says how far it is (and hears a wish to stop)."""
    left, poll = [number], StopFlag.poll

    def counted(self: StopFlag) -> None:
        left[0] -= 1
        if left[0] == 0:
            strike()
        poll(self)

    StopFlag.poll = counted  # type: ignore[method-assign]


WRITES = ("replace", "rename", "fsync", "unlink", "mkdir", "truncate", "ftruncate")


def at_write(number: int, strike: Callable[[], object] = die) -> None:
    """In a child: strike before the n-th operation on the file system."""
    left = [number]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                strike()
            return function(*arguments, **named)

        return wrapper

    for name in WRITES:
        setattr(os, name, counted(getattr(os, name)))


def compare(run: Path, reference: Path) -> str:
    """What differs from the undisturbed run, in words; empty if nothing does."""
    left = [path.name for path in run.rglob("*") if path.name.startswith(".")]
    checks = {
        "the state differs": state_hash(run) != state_hash(reference),
        "the metrics differ": metrics_without_timings(run) != metrics_without_timings(reference),
        f"{left} stayed behind": bool(left),
        "fewer than two checkpoints": len(checkpoint.candidates(run / "checkpoints")) < 2,
        "clusters.csv differs": contents(run / "clusters.csv") != contents(reference / "clusters.csv"),
        "the exported weights differ": contents(run / "backbone" / "model.safetensors")
        != contents(reference / "backbone" / "model.safetensors"),
    }
    return "; ".join(sentence for sentence, wrong in checks.items() if wrong)


def contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
