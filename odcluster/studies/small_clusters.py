"""Figure 5, right: the size up to which a cluster is small does not matter within a reasonable range; 160 hurts.

A threshold past half the average size N / C leaves no room for all clusters to be larger than it. odcluster refuses it
before training, unless each small cluster is handled once per iteration only (`--one-pass`), as in the authors' code:
so are the thresholds past it, up to past the average size, trained here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from odcluster.config import Clustering, changed
from odcluster.recipes import recipe
from odcluster.studies.plan import Found, Plan, Scale, Study
from odcluster.studies.settings import SMALL_EPOCHS, SMALL_IMAGES, chosen, small_odc
from odcluster.studies.sweep import base_stem, draw_sweep, sweep_parts, sweep_summary
from odcluster.studies.update_interval import CLUSTERS_90K, IMAGENET_90K, ODC

THRESHOLDS = {"small": (0, 5, 10, 20, 35, 49), "paper": (0, 5, 10, 20, 40, 63)}
"""To the last one with room: N >= 2 (threshold + 1) C."""
PAST = (100, 160)
"""Without room: in one pass."""


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    if scale == "small":
        images, base = chosen("cifar10", SMALL_IMAGES), small_odc("cifar10", epochs=SMALL_EPOCHS)
        budget = (
            f"{SMALL_IMAGES:,} images of CIFAR-10, {SMALL_EPOCHS} epochs, 100 clusters (100 images each on average)"
        )
    else:
        images, base = IMAGENET_90K, changed(recipe("odc_resnet50_imagenet"), clusters=CLUSTERS_90K)
        budget = "90,000 images of 300 classes of ImageNet, ResNet-50, 440 epochs, 700 clusters (129 images each)"
    configs = {
        stem: changed(base, small_cluster=threshold, one_pass=threshold in PAST)
        for threshold, stem in stems(scale).items()
    }
    return Plan(*sweep_parts(scale, seeds, images, configs), budget)


def stems(scale: Scale) -> dict[int, str]:
    """The training of each threshold; that of the usual one is shared with other studies."""
    usual, all_of_them = Clustering().small_cluster, (*THRESHOLDS[scale], *PAST)
    return {t: base_stem(scale, ODC[scale]) if t == usual else f"{scale}-threshold-{t}" for t in all_of_them}


def summarise(found: Found) -> dict[str, Any]:
    dissolved = []
    for stem in stems(found.scale).values():
        names = [f"{stem}-s{seed}" for seed in found.seeds]
        lines = [line["small_clusters"] for name in names for line in found.trained[name].metrics if "change" in line]
        dissolved.append(round(sum(lines) / len(lines), 4))
    summary = sweep_summary(found, stems(found.scale))
    return {**summary, "clusters dissolved per step": dissolved, "in one pass": list(PAST)}


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    title = "Clusters of at most so many members are dissolved"
    return draw_sweep(study, summary, directory, title, "largest size of a small cluster")


STUDY = Study(
    name="small-clusters",
    shows="features over the size up to which clusters are dissolved, to past the average size",
    paper="flat over a reasonable range; a threshold of 160 hurts",
    seeds=(0, 1),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
