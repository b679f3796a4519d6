"""What studies of one option have in common: a training per value and seed, judged alike; a line over the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odcluster.config import Config, changed
from odcluster.studies.drawing import draw_page, sweep
from odcluster.studies.plan import Found, Images, Judgement, Scale, Study, Training
from odcluster.studies.settings import judge_cifar10, judge_voc


def sweep_parts(
    scale: Scale, seeds: tuple[int, ...], images: Images, configs: Mapping[str, Config]
) -> tuple[list[Training], list[Judgement]]:
    """STEM-sSEED for every configuration and seed, with its judgements and, at small scale, the untrained network's."""
    trainings = [
        Training(f"{stem}-s{seed}", images, changed(config, seed=seed))
        for stem, config in configs.items()
        for seed in seeds
    ]
    judgements = [part for training in trainings for part in judge(training.name, scale)]
    return trainings, [*judgements, *untrained(scale, seeds)]


def base_stem(scale: Scale, method: str) -> str:
    """The name that all studies have for a method with the common settings, so that they share it."""
    return f"{scale}-{method}-base"


def judge(name: str, scale: Scale) -> list[Judgement]:
    """CIFAR-10's own classes at small scale, the paper's VOC07 SVMs at paper scale."""
    return judge_cifar10(name) if scale == "small" else judge_voc(name)


def untrained(scale: Scale, seeds: tuple[int, ...]) -> list[Judgement]:
    if scale == "paper":
        return []  # 9.6 mAP in the paper
    return [part for seed in seeds for part in judge_cifar10("smallconv", untrained=True, seed=seed)]


def scores_by_stem(found: Found, stems: Sequence[str]) -> dict[str, list[list[float]]]:
    """Per metric: per stem, the percentages of all seeds."""
    scores: dict[str, list[list[float]]] = {}
    for at, stem in enumerate(stems):
        for seed in found.seeds:
            for metric, percent in found.scores_of(f"{stem}-s{seed}").items():
                scores.setdefault(metric, [[] for _ in stems])[at].append(round(percent, 2))
    return scores


def untrained_scores(found: Found) -> dict[str, float]:
    """Per metric, the mean over seeds."""
    points: dict[str, list[float]] = {}
    for judgement in found.plan.judgements:
        if judgement.untrained:
            for metric, percent in found.percent(judgement.name).items():
                points.setdefault(metric, []).append(percent)
    return {metric: float(np.mean(values)) for metric, values in points.items()}


def change_at_the_end(found: Found, stem: str) -> float:
    """Share of labels changed per step in the last tenth of training, mean over seeds."""
    shares = []
    for seed in found.seeds:
        values = [value for _, value in lines_with(found.trained[f"{stem}-s{seed}"].metrics, "change")]
        shares.append(np.mean(values[-max(1, len(values) // 10) :]))
    return round(float(np.mean(shares)), 4)


def lines_with(metrics: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of every line that has it."""
    return [(line["step"], line[key]) for line in metrics if key in line]


def draw_sweep(study: Study, summary: dict[str, Any], directory: Path, title: str, x_label: str) -> list[Path]:
    notes = [f"paper: {study.paper}", summary["budget"], "dots: seeds; line: their mean"]
    values, scores = [str(value) for value in summary["values"]], summary["scores"]
    return draw_page(
        directory, study.name, title, notes, [lambda axes: sweep(axes, values, scores, summary["untrained"], x_label)]
    )


def sweep_summary(found: Found, stems: Mapping[int, str]) -> dict[str, Any]:
    """Everything about a sweep; `stems` are the trainings of each value."""
    scores = scores_by_stem(found, list(stems.values()))
    means = {metric: [round(float(np.mean(points)), 2) for points in per] for metric, per in scores.items()}
    return {
        "budget": found.plan.budget,
        "values": list(stems),
        "scores": scores,
        "means": means,
        "spread of the means": {metric: round(max(per) - min(per), 2) for metric, per in means.items()},
        "largest difference between seeds": {
            metric: round(max(max(points) - min(points) for points in per), 2) for metric, per in scores.items()
        },
        "labels changed per step at the end": [change_at_the_end(found, stem) for stem in stems.values()],
        "untrained": {metric: round(percent, 2) for metric, percent in untrained_scores(found).items()},
    }
