"""Section 3.2: weighting the loss by 1/sqrt(size) does in DeepCluster what sampling uniformly over clusters does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from odcluster.config import changed
from odcluster.recipes import recipe
from odcluster.studies.drawing import bars, draw_page
from odcluster.studies.plan import Found, Images, Plan, Scale, Study, Training
from odcluster.studies.settings import SMALL_EPOCHS, SMALL_IMAGES, chosen, small_deepcluster
from odcluster.studies.sweep import base_stem, judge, untrained, untrained_scores

BALANCES = {"sampling": "uniform sampling", "weights": "loss weights"}


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    if scale == "small":
        images, base = chosen("cifar10", SMALL_IMAGES), small_deepcluster("cifar10", epochs=SMALL_EPOCHS)
        budget = f"DeepCluster, {SMALL_IMAGES:,} images of CIFAR-10, {SMALL_EPOCHS} epochs, 100 clusters"
    else:
        images, base = Images("imagenet", 1_281_167), recipe("deepcluster_resnet50_imagenet")
        budget = "DeepCluster, ImageNet, ResNet-50, 440 epochs, 10,000 clusters"
    trainings = [
        Training(f"{stems(scale)[balance]}-s{seed}", images, changed(base, balance=balance, seed=seed))
        for balance in BALANCES
        for seed in seeds
    ]
    judgements = [part for training in trainings for part in judge(training.name, scale)]
    return Plan(trainings, [*judgements, *untrained(scale, seeds)], budget)


def stems(scale: Scale) -> dict[str, str]:
    """The published way is shared with other studies."""
    return {"sampling": base_stem(scale, "deepcluster"), "weights": f"{scale}-deepcluster-weights"}


def summarise(found: Found) -> dict[str, Any]:
    """Percentages of all seeds, and the difference of the two ways with its standard error."""
    scores: dict[str, dict[str, list[float]]] = {name: {} for name in BALANCES.values()}
    largest: dict[str, list[float]] = {name: [] for name in BALANCES.values()}
    for training in found.plan.trainings:
        name = BALANCES[training.config.deepcluster.balance]
        for metric, percent in found.scores_of(training.name).items():
            scores[name].setdefault(metric, []).append(round(percent, 2))
        sizes = [line["largest"] for line in found.trained[training.name].metrics if "largest" in line]
        largest[name].append(sizes[-1])
    first, second = BALANCES.values()
    differences = {}
    for metric in scores[first]:
        a, b = np.array(scores[first][metric]), np.array(scores[second][metric])
        error = float(np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))) if len(a) > 1 else None
        differences[metric] = {"weights - sampling": round(float(b.mean() - a.mean()), 2), "standard error": error}
    return {
        "budget": found.plan.budget,
        "scores": scores,
        "differences": differences,
        "largest cluster at the end": largest,
        "untrained": {metric: round(percent, 2) for metric, percent in untrained_scores(found).items()},
    }


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    metrics = list(summary["differences"])
    series = {
        f"{name}, seed {seed}": {metric: values[metric][at] for metric in metrics}
        for name, values in summary["scores"].items()
        for at, seed in enumerate(found.seeds)
    }
    series |= {"untrained": summary["untrained"]} if summary["untrained"] else {}
    notes = [f"paper: {study.paper}", summary["budget"]]
    title = "Loss weights against uniform sampling in DeepCluster"
    return draw_page(directory, study.name, title, notes, [lambda axes: bars(axes, metrics, series, "%")])


STUDY = Study(
    name="reweighting",
    shows="DeepCluster with the loss weighted by cluster size against images sampled uniformly over clusters",
    paper="the two are equivalent (section 3.2)",
    seeds=(0, 1, 2),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
