"""Figures 1 and 6: ODC's loss falls steadily where DeepCluster's jumps at every re-clustering; its labels settle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from odcluster.config import changed
from odcluster.recipes import recipe
from odcluster.studies.drawing import curves, draw_page
from odcluster.studies.plan import Found, Images, Plan, Scale, Study, Training
from odcluster.studies.settings import SMALL_EPOCHS, SMALL_IMAGES, chosen, small_deepcluster, small_odc
from odcluster.studies.sweep import base_stem, judge, lines_with, untrained, untrained_scores

METHODS = {"odc": "ODC", "deepcluster": "DeepCluster"}


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    if scale == "small":
        images = chosen("cifar10", SMALL_IMAGES)
        configs = {
            "odc": small_odc("cifar10", epochs=SMALL_EPOCHS),
            "deepcluster": small_deepcluster("cifar10", epochs=SMALL_EPOCHS),
        }
        budget = f"{SMALL_IMAGES:,} images of CIFAR-10, {SMALL_EPOCHS} epochs each, 100 clusters"
    else:
        images = Images("imagenet", 1_281_167)
        configs = {"odc": recipe("odc_resnet50_imagenet"), "deepcluster": recipe("deepcluster_resnet50_imagenet")}
        budget = "ImageNet, ResNet-50, 440 epochs each, 10,000 clusters"
    trainings, judgements = [], []
    for seed in seeds:
        for method, config in configs.items():
            name = f"{base_stem(scale, method)}-s{seed}"
            trainings.append(Training(name, images, changed(config, seed=seed)))
            judgements += judge(name, scale)
    return Plan(trainings, [*judgements, *untrained(scale, seeds)], budget)


def summarise(found: Found) -> dict[str, Any]:
    """Curves of all seeds; jumps at epoch starts against the wobble within epochs; where labels end."""
    summary: dict[str, Any] = {"budget": found.plan.budget, "untrained": untrained_scores(found), "runs": {}}
    for training in found.plan.trainings:
        trained = found.trained[training.name]
        loss, change = lines_with(trained.metrics, "loss"), lines_with(trained.metrics, "change")
        steps_per_epoch = loss[-1][0] / (training.config.epochs or 1)
        summary["runs"][training.name] = {
            "method": METHODS[training.config.method],
            "seed": training.config.seed,
            "loss": {"step": [step for step, _ in loss], "value": [round(value, 4) for _, value in loss]},
            "change": {"step": [step for step, _ in change], "value": [round(value, 4) for _, value in change]},
            "nmi with the epoch before": [round(v, 4) for _, v in lines_with(trained.metrics, "nmi_previous")],
            "rise of the loss at an epoch's start": round(rise_at_epochs(loss, steps_per_epoch), 4),
            "scores": {metric: round(value, 2) for metric, value in found.scores_of(training.name).items()},
        }
    return summary


def rise_at_epochs(loss: list[tuple[int, float]], steps_per_epoch: float) -> float:
    """Mean over epochs of (first value of the epoch - last value of the one before): the teeth of a saw."""
    epochs = np.array([int((step - 1) // steps_per_epoch) for step, _ in loss])
    values = np.array([value for _, value in loss])
    starts = np.flatnonzero(np.diff(epochs) > 0) + 1
    return float(np.mean(values[starts] - values[starts - 1])) if len(starts) else 0.0


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    runs = summary["runs"].values()
    first = min(run["seed"] for run in runs)
    losses = {run["method"]: (run["loss"]["step"], run["loss"]["value"]) for run in runs if run["seed"] == first}
    changes = {
        f"ODC, seed {run['seed']}": (run["change"]["step"], [100 * value for value in run["change"]["value"]])
        for run in runs
        if run["change"]["step"]
    }
    notes = [f"paper: {study.paper}", summary["budget"]]
    notes.append("the losses' levels are not comparable (another classifier each), their shapes are")
    return draw_page(
        directory,
        study.name,
        "Loss and changed labels over training",
        notes,
        [
            lambda axes: curves(axes, losses, "iteration", f"loss, seed {first}"),
            lambda axes: curves(axes, changes, "iteration", "labels changed per batch, %", limits=(0, 100)),
        ],
    )


STUDY = Study(
    name="stability",
    shows="the loss of ODC and DeepCluster in one picture, and how many labels change over training",
    paper="ODC's loss falls steadily, DeepCluster's jumps at every re-clustering; changed labels fall from nearly "
    "100 % to a low plateau",
    seeds=(0,),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
