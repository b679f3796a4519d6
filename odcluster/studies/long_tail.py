"""Figure 7: training on long-tailed data, always with the same number of images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from odcluster.config import changed
from odcluster.recipes import recipe
from odcluster.studies.drawing import draw_page, sweep
from odcluster.studies.plan import Found, Images, Judgement, Plan, Scale, Study, Training
from odcluster.studies.settings import SMALL_EPOCHS, SMALL_IMAGES, draw_long_tail, small_deepcluster, small_odc
from odcluster.studies.sweep import judge, scores_by_stem, untrained, untrained_scores

RATIOS = {"small": (1, 4, 16, 64), "paper": (1, 2, 4, 8, 16, 32, 64)}
METHODS = {"odc": "ODC", "deepcluster": "DeepCluster"}


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    if scale == "small":
        configs = {
            "odc": small_odc("cifar10", epochs=SMALL_EPOCHS),
            "deepcluster": small_deepcluster("cifar10", epochs=SMALL_EPOCHS),
        }
        budget = (
            f"{SMALL_IMAGES:,} images of CIFAR-10's ten classes at every ratio, {SMALL_EPOCHS} epochs, 100 clusters"
        )
    else:
        clusters = {"clusters": 780}  # 128 images per cluster, as in the paper's ImageNet runs
        configs = {
            "odc": changed(recipe("odc_resnet50_imagenet"), **clusters),
            "deepcluster": changed(recipe("deepcluster_resnet50_imagenet"), **clusters),
        }
        budget = "100,000 images of 300 classes of ImageNet at every ratio, ResNet-50, 440 epochs, 780 clusters"
    trainings: list[Training] = []
    judgements: list[Judgement] = []
    for ratio in RATIOS[scale]:
        for method, config in configs.items():
            for seed in seeds:
                name = f"{scale}-tail-{method}-{ratio}-s{seed}"
                trainings.append(Training(name, images(scale, ratio), changed(config, seed=seed)))
                judgements += judge(name, scale)
                judgements.append(Judgement(f"{name}-clusters", name, "clusters"))
    return Plan(trainings, [*judgements, *untrained(scale, seeds)], budget)


def images(scale: Scale, ratio: int) -> Images:
    """Chosen once, whatever the seed of the training."""
    of, classes, count = ("cifar10", 10, SMALL_IMAGES) if scale == "small" else ("imagenet", 300, 100_000)
    choose = partial(draw_long_tail, classes=classes, count=count, ratio=ratio, seed=0)
    return Images("cifar10" if scale == "small" else "imagenet", count, f"{of}-tail-{ratio}", choose)


def summarise(found: Found) -> dict[str, Any]:
    values = list(RATIOS[found.scale])
    scores = {
        f"{METHODS[method]}: {metric}": per_value
        for method in METHODS
        for metric, per_value in scores_by_stem(found, [f"{found.scale}-tail-{method}-{r}" for r in values]).items()
    }
    means = {name: [round(sum(points) / len(points), 2) for points in per] for name, per in scores.items()}
    drop = {name: round(per[0] - per[-1], 2) for name, per in means.items()}
    return {
        "budget": found.plan.budget,
        "ratios": values,
        "scores": scores,
        "means": means,
        f"drop from ratio 1 to {values[-1]}": drop,
        "untrained": {metric: round(percent, 2) for metric, percent in untrained_scores(found).items()},
    }


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    notes = [f"paper: {study.paper}", summary["budget"], "dots: seeds; line: their mean; judged on balanced classes"]
    ratios = [str(ratio) for ratio in summary["ratios"]]
    label = "largest class : smallest class"
    features = {name: per for name, per in summary["scores"].items() if "NMI" not in name}
    clusters = {name: per for name, per in summary["scores"].items() if "NMI" in name}
    panels = [lambda axes: sweep(axes, ratios, features, {}, label)]
    panels.append(lambda axes: sweep(axes, ratios, clusters, {}, label))
    return draw_page(directory, study.name, "Training on long-tailed data", notes, panels)


STUDY = Study(
    name="long-tail",
    shows="ODC and DeepCluster trained on classes of unequal size (1:1 to 1:64), the same number of images each",
    paper="no significant drop of ODC even at high ratios",
    seeds=(0, 1),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
