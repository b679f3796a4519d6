"""Tables 1 and 2: a linear probe on every layer of every system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from odcluster.studies.drawing import draw_page, of_seeds, profiles
from odcluster.studies.plan import Found, Images, Judgement, Plan, Scale, Study
from odcluster.studies.settings import SMALL_IMAGES, chosen, judge_features
from odcluster.studies.systems import NAMES, TINY, describe_budget, system_of, system_trainings

PLACES, IMAGENET = Images("places", 2_448_873), Images("imagenet", 1_281_167)


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    trainings = system_trainings(scale, seeds)
    judgements = [part for training in trainings for part in judge(training.name, scale)]
    for seed in seeds:
        for backbone in ("smallconv",) if scale == "small" else ("resnet50", "alexnet"):
            judgements += judge(backbone, scale, untrained=True, seed=seed)
    return Plan(trainings, judgements, describe_budget(scale))


def judge(subject: str, scale: Scale, **options: Any) -> list[Judgement]:
    """The data of pre-training and another one: Tiny-ImageNet and CIFAR-10, or ImageNet and Places205."""
    if scale == "small":
        own = judge_features(subject, TINY, ("linear",), image_size=64, **options)
        return own + judge_features(subject, chosen("cifar10", SMALL_IMAGES), ("linear",), image_size=32, **options)
    kinds = {"variant": "published", "image_size": 224, **options}
    return [part for data in (IMAGENET, PLACES) for part in judge_features(subject, data, ("linear",), **kinds)]


def summarise(found: Found) -> dict[str, Any]:
    """Per data set, system and layer, the percentages of all seeds."""
    tables: dict[str, dict[str, dict[str, list[float]]]] = {}
    for judgement in found.plan.judgements:
        assert judgement.images is not None
        row = f"untrained {judgement.subject}" if judgement.untrained else NAMES[system_of(judgement.subject)]
        cells = tables.setdefault(judgement.images.of, {}).setdefault(row, {})
        for scores in found.results[judgement.name].scores:
            cells.setdefault(scores.layer, []).append(round(100 * scores.metrics["top-1"], 2))
    epochs = {system_of(training.name): training.config.epochs for training in found.plan.trainings}
    return {"budget": found.plan.budget, "epochs": epochs, "top-1": tables}


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    panels = []
    for data, rows in summary["top-1"].items():
        means = {row: {layer: float(np.mean(v)) for layer, v in cells.items()} for row, cells in rows.items()}
        layers = list(dict.fromkeys(layer for cells in means.values() for layer in cells))
        panels.append(lambda axes, m=means, l=layers, d=data: profiles(axes, l, m, f"top-1 on {d}, %"))
    notes = [f"paper: {study.paper}", summary["budget"], of_seeds(found.seeds)]
    return draw_page(directory, study.name, "Linear probes on every layer", notes, panels)


STUDY = Study(
    name="table-linear",
    shows="linear probes on every layer: untrained, Rotation, Jigsaw, Colorization, DeepCluster, ODC, labels",
    paper="ODC is above DeepCluster in every layer, and above Rotation, Jigsaw and Colorization in its best one",
    seeds=(0,),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
