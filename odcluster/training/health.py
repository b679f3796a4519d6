"""Is the run healthy? The line people watch, and warnings in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from odcluster.config import Config
from odcluster.training.schedule import Schedule

INPUT_BOUND = 0.1
"""Share of time spent waiting for images from which the line says so."""


def progress_line(line: Mapping[str, Any], epochs: int, frozen: bool = False) -> str:
    """epoch, loss, change ratio, cluster sizes, speed and waiting, from a line of metrics.jsonl.

    With a frozen backbone no worker reads images while the neck trains: more of them would not help.
    """
    timing = line["timing"]
    parts = [f"epoch {line['epoch'] + 1}/{epochs}"]
    if "loss" in line:
        parts.append(f"loss {line['loss']:.3f}")
    if "accuracy" in line:
        parts.append(f"accuracy {line['accuracy']:.2f}")
    if "change" in line:
        parts.append(f"labels changed {line['change']:.0%}")
    if "smallest" in line:
        parts.append(f"clusters of {line['smallest']:.0f}-{line['largest']:.0f}")
    parts.append(f"{timing['images_per_second']:,.0f} img/s")
    waiting = f"waiting for data {timing['waiting']:.0%}"
    parts.append(waiting + (" (input-bound: more --workers)" if timing["waiting"] > INPUT_BOUND and not frozen else ""))
    return " · ".join(parts)


def worries(line: Mapping[str, Any], schedule: Schedule, num_samples: int, config: Config) -> Iterator[tuple[str, str]]:
    """Kinds and sentences of what looks wrong after this line."""
    if "change" not in line or "loss" not in line:
        return
    phase, start = schedule.phase_at(line["step"] - 1)
    progress = (line["step"] - start) / max(
        1, min(phase.epochs * schedule.steps_per_epoch, schedule.total_steps - start)
    )
    clusters = config.clusters or 1
    if progress > 0.5 and line["change"] > 0.5:
        yield (
            "not settling",
            f"{line['change']:.0%} of the labels still change per step halfway through: the clusters are not settling; "
            "more epochs, a lower --lr or a pretrained backbone (--weights) help",
        )
    if clusters > 1 and line["largest"] > max(0.2 * num_samples, 3 * num_samples / clusters):
        yield (
            "swallowing",
            f"one cluster holds {line['largest'] / num_samples:.0%} of the images; if the images are not that alike, "
            "raise --small-cluster or lower --lr",
        )
    if (
        progress > 1 / 3
        and clusters > 1
        and config.head.classifier == "linear"
        and line["loss"] > 0.97 * math.log(clusters)
    ):
        yield (
            "chance",
            f"the loss {line['loss']:.2f} is that of guessing (ln {clusters} = {math.log(clusters):.2f}): nothing is "
            "learned yet; a higher --lr, fewer --clusters or more epochs help",
        )
