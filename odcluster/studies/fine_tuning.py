"""Table 4: other systems' weights as they are, and after further training by DeepCluster or by ODC.

DeepCluster is trained on colours here, at both scales: weights of a network that sees Sobel gradients do not fit one
that sees colours, and the paper does not say how that was bridged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from odcluster.config import Config, changed
from odcluster.recipes import recipe
from odcluster.studies.drawing import bars, draw_page, of_seeds
from odcluster.studies.plan import Found, Plan, Scale, Study, Training
from odcluster.studies.settings import judge_voc, small_deepcluster, small_odc
from odcluster.studies.systems import (
    IMAGENET,
    NAMES,
    PRETEXTS,
    SMALL_CLUSTERS,
    TINY,
    describe_budget,
    small_epochs,
    system_name,
    system_of,
    system_trainings,
)
from odcluster.studies.table_voc import PAPER_VOC, SMALL_VOC

STARTS = ("colorization", "jigsaw", "rotation", "deepcluster-colour")
FURTHER = {"": "as they are", "deepcluster": "then DeepCluster", "odc": "then ODC"}


def tuning_configs(scale: Scale) -> dict[str, Config]:
    """Half the epochs of pre-training at small scale; the paper's 120 epochs at the other."""
    if scale == "paper":
        return {
            "deepcluster": changed(recipe("finetune_deepcluster_resnet50"), sobel=False),
            "odc": recipe("finetune_odc_resnet50"),
        }
    common: dict[str, Any] = {"clusters": SMALL_CLUSTERS, "frozen": False}
    return {
        "deepcluster": small_deepcluster(
            "tiny-imagenet", epochs=small_epochs("deepcluster") // 2, sobel=False, lr=0.02, **common
        ),
        "odc": small_odc("tiny-imagenet", epochs=small_epochs("odc") // 2, **common),
    }


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    images = TINY if scale == "small" else IMAGENET
    if scale == "small":
        clusters = {"clusters": SMALL_CLUSTERS, "sobel": False}
        colour = small_deepcluster("tiny-imagenet", epochs=small_epochs("deepcluster"), **clusters)
    else:
        colour = changed(recipe("deepcluster_resnet50_imagenet"), sobel=False)
    trainings = system_trainings(scale, seeds, PRETEXTS)
    trainings += [
        Training(system_name(scale, "deepcluster-colour", seed), images, changed(colour, seed=seed)) for seed in seeds
    ]
    trainings += [
        Training(
            f"{scale}-{start}-then-{further}-s{seed}", images, changed(config, seed=seed), f"{scale}-{start}-s{seed}"
        )
        for start in STARTS
        for further, config in tuning_configs(scale).items()
        for seed in seeds
    ]
    options: dict[str, Any] = SMALL_VOC if scale == "small" else PAPER_VOC
    judgements = [part for training in trainings for part in judge_voc(training.name, **options)]
    further = "half as many epochs again" if scale == "small" else "120 epochs more"
    return Plan(trainings, judgements, f"{describe_budget(scale)}; {further} of fine-tuning")


def summarise(found: Found) -> dict[str, Any]:
    """mAP of the best layer: further training -> start -> all seeds."""
    table: dict[str, dict[str, list[float]]] = {name: {} for name in FURTHER.values()}
    for judgement in found.plan.judgements:
        start, _, further = system_of(judgement.subject).partition("-then-")
        cells = table[FURTHER[further]].setdefault(NAMES[start], [])
        cells.append(round(100 * found.results[judgement.name].best.value, 2))
    return {"budget": found.plan.budget, "mAP": table}


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    series = {
        row: {start: float(np.mean(values)) for start, values in cells.items()} for row, cells in summary["mAP"].items()
    }
    groups = [NAMES[start] for start in STARTS]
    notes = [f"paper: {study.paper}", summary["budget"], f"VOC07 SVM, best layer; {of_seeds(found.seeds)}"]
    title = "Fine-tuning without labels"
    return draw_page(directory, study.name, title, notes, [lambda axes: bars(axes, groups, series, "mAP, %")])


STUDY = Study(
    name="fine-tuning",
    shows="weights of Colorization, Jigsaw, Rotation and DeepCluster as they are, + DeepCluster, + ODC: VOC07 SVMs",
    paper="ODC adds 7 to 17 mAP to each of them, DeepCluster 1 to 6",
    seeds=(0,),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
