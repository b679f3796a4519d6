"""Figure 5, left: how often centroids are refreshed hardly matters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from odcluster.config import Clustering, changed
from odcluster.recipes import recipe
from odcluster.studies.plan import Found, Images, Plan, Scale, Study
from odcluster.studies.settings import SMALL_EPOCHS, SMALL_IMAGES, chosen, draw_classes, small_odc
from odcluster.studies.sweep import base_stem, draw_sweep, sweep_parts, sweep_summary

INTERVALS = (1, 5, 10, 20, 50, 100)
ODC = {"small": "odc", "paper": "odc-90k"}
IMAGENET_90K = Images("imagenet", 90_000, "imagenet-90k", partial(draw_classes, classes=300, per_class=300, seed=0))
CLUSTERS_90K = 700
"""The paper does not say how many for 90,000 images; this keeps the 128 images per cluster of its ImageNet runs."""


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    if scale == "small":
        images, base = chosen("cifar10", SMALL_IMAGES), small_odc("cifar10", epochs=SMALL_EPOCHS)
        budget = f"{SMALL_IMAGES:,} images of CIFAR-10, {SMALL_EPOCHS} epochs, 100 clusters, all else alike"
    else:
        images, base = IMAGENET_90K, changed(recipe("odc_resnet50_imagenet"), clusters=CLUSTERS_90K)
        budget = "90,000 images of 300 classes of ImageNet, ResNet-50, 440 epochs, 700 clusters, all else alike"
    configs = {stem: changed(base, update_interval=k) for k, stem in stems(scale).items()}
    return Plan(*sweep_parts(scale, seeds, images, configs), budget)


def stems(scale: Scale) -> dict[int, str]:
    """The training of each k; that of the usual one is shared with other studies."""
    usual = Clustering().update_interval
    return {k: base_stem(scale, ODC[scale]) if k == usual else f"{scale}-interval-{k}" for k in INTERVALS}


def summarise(found: Found) -> dict[str, Any]:
    return sweep_summary(found, stems(found.scale))


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    title = "Centroids refreshed every k iterations"
    return draw_sweep(study, summary, directory, title, "k, iterations between two refreshes")


STUDY = Study(
    name="update-interval",
    shows="features when centroids are refreshed every k = 1, 5, 10, 20, 50, 100 iterations",
    paper="no significant drop as the interval grows within a reasonable range",
    seeds=(0, 1),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
