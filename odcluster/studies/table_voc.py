"""Table 3 and figure 4: VOC07 SVMs, on all labels and on few, of every system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from odcluster.studies.drawing import bars, draw_page, of_seeds, profiles
from odcluster.studies.plan import Found, Plan, Scale, Study
from odcluster.studies.settings import judge_voc
from odcluster.studies.systems import NAMES, describe_budget, system_of, system_trainings
from odcluster.verbs import Task

TASKS: tuple[Task, ...] = ("svm", "lowshot")
SMALL_VOC = {"split": "train/val", "image_size": 64}
"""The official test images are not part of the small data: trained on train, tested on val."""
PAPER_VOC = {"split": "trainval/test", "image_size": 224}
LOWSHOT_LAYERS = {"small": ("conv3", "conv4", "conv5"), "paper": ("res4", "res5")}


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    trainings = [t for t in system_trainings(scale, seeds) if t.config.backbone != "alexnet"]
    options: dict[str, Any] = {**(SMALL_VOC if scale == "small" else PAPER_VOC), "tasks": TASKS}
    options["per_task"] = {"lowshot": {"layers": LOWSHOT_LAYERS[scale]}}
    judgements = [part for training in trainings for part in judge_voc(training.name, **options)]
    backbone = "smallconv" if scale == "small" else "resnet50"
    for seed in seeds:
        judgements += judge_voc(backbone, untrained=True, seed=seed, **options)
    return Plan(trainings, judgements, describe_budget(scale))


def summarise(found: Found) -> dict[str, Any]:
    """mAP of the best layer, per system, of all seeds; low-shot with the published choice of the cost."""
    rows: dict[str, dict[str, Any]] = {}
    for judgement in found.plan.judgements:
        row = f"untrained {judgement.subject}" if judgement.untrained else NAMES[system_of(judgement.subject)]
        result = found.results[judgement.name]
        cells = rows.setdefault(row, {})
        cells.setdefault(judgement.task, []).append(round(100 * result.best.value, 2))
        cells.setdefault(f"{judgement.task}, best layer", []).append(result.best.layer)
        if judgement.task == "lowshot":
            best = next(s for s in result.scores if s.layer == result.best.layer and s.rule != "honest")
            shots = {k[2:]: round(100 * v, 2) for k, v in best.metrics.items() if k.startswith("k=")}
            cells.setdefault("per shot", []).append(shots)
    return {"budget": found.plan.budget, "mAP": rows}


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    found_rows = summary["mAP"]
    order = sorted(found_rows, key=lambda row: (row == "labels", not row.startswith("untrained")))  # these two outside
    rows = {row: found_rows[row] for row in order}
    names = {"svm": "all labels", "lowshot": "few labels"}
    series = {row: {names[task]: float(np.mean(cells[task])) for task in TASKS} for row, cells in rows.items()}
    shots = {row: cells["per shot"][0] for row, cells in rows.items()}
    sizes = list(dict.fromkeys(size for cells in shots.values() for size in cells))
    notes = [
        f"paper: {study.paper}",
        summary["budget"],
        f"best layer of each; {of_seeds(found.seeds)}; curves of the first",
    ]
    panels = [lambda axes: bars(axes, list(names.values()), series, "mAP, %")]
    panels.append(lambda axes: profiles(axes, sizes, shots, "mAP with so many positive images per class, %"))
    return draw_page(directory, study.name, "VOC07 SVMs", notes, panels)


STUDY = Study(
    name="table-voc",
    shows="VOC07 SVMs on all labels and on 1 to 96 images per class, of the same systems",
    paper="ODC 78.2 mAP, DeepCluster 69.1, Rotation 67.4, Jigsaw 64.5, Colorization 55.6, untrained 9.6, labels 88.0",
    seeds=(0,),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
