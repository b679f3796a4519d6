"""What people take away from a finished run: clusters.csv, clusters.png, curves.png, backbone/ and a summary."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from odcluster.clustering.agreement import nmi, summarise_sizes
from odcluster.config import Config
from odcluster.data.sources import Source
from odcluster.explore.export import rank_within_cluster, write_clusters_csv
from odcluster.explore.mosaic import cluster_mosaic, draw_curves
from odcluster.methods.interface import Method
from odcluster.methods.odc import ODC
from odcluster.models.backbones import Backbone
from odcluster.models.weights import export_backbone
from odcluster.training.metrics import read_metrics
from odcluster.training.run import Run

CURVES = {
    "loss": "loss",
    "change": "share of labels changed per step",
    "largest": "largest cluster",
    "smallest": "smallest cluster",
    "small_clusters": "small clusters dissolved per step",
    "accuracy": "pretext accuracy",
}


def deliver(run: Run, config: Config, source: Source, method: Method) -> list[str]:
    """Write the files of a finished run; returns sentences for people."""
    provenance = {
        "method": config.method,
        "recipe": config.recipe,
        "seed": config.seed,
        "epochs": config.epochs,
    }
    export_backbone(cast(Backbone, method.backbone), run.backbone, provenance=provenance)
    sentences = []
    if isinstance(method, ODC):
        sentences += deliver_clusters(run, source, method)
    draw_training(run)
    sentences.append(f"curves: {run.path / 'curves.png'}")
    sentences.append(f"backbone: {run.backbone}")
    return sentences


def deliver_clusters(run: Run, source: Source, method: ODC) -> list[str]:
    """clusters.csv and clusters.png, from the two memories."""
    labels = method.samples.labels.cpu()
    rows = torch.nn.functional.normalize(method.samples.rows.cpu(), dim=1)
    centroids = torch.nn.functional.normalize(method.centroids.centroids.cpu(), dim=1)
    similarities = (rows * centroids[labels.clamp(min=0)]).sum(dim=1).numpy()
    ranks = rank_within_cluster(labels.numpy(), similarities)
    write_clusters_csv(run.clusters_file, source.manifest.paths, labels.numpy(), similarities, ranks)
    picture = run.path / "clusters.png"
    cluster_mosaic(source.image, labels.numpy(), similarities, picture, name=run.path.name, num_clusters=len(centroids))
    sizes = summarise_sizes(method.centroids.counts.cpu())
    sentences = [
        f"{len(centroids):,} clusters of {sizes.smallest:,} to {sizes.largest:,} images (median {sizes.median:,.0f}); "
        f"the largest holds {sizes.largest_share:.1%} of all"
    ]
    last = next((line for line in reversed(read_metrics(run.metrics_file)) if "change" in line), None)
    if last is not None:
        verdict = "settled" if last["change"] < 0.1 else "still moving: more epochs would settle them"
        sentences.append(f"{last['change']:.1%} of the labels changed per step at the end ({verdict})")
    if unseen := int((labels < 0).sum()):
        sentences.append(f"{unseen:,} images could not be used and belong to no cluster (bad_images.csv)")
    truth = source.manifest.labels
    if truth is not None and np.any((truth >= 0) & (labels.numpy() >= 0)):
        sentences.append(f"agreement with the labels that came with the images: NMI {nmi(labels.numpy(), truth):.3f}")
    return [*sentences, f"which image is where: {run.clusters_file}", f"picture: {picture}"]


def draw_training(run: Run) -> None:
    """curves.png from metrics.jsonl."""
    lines = [line for line in read_metrics(run.metrics_file) if "event" not in line]
    series = {}
    for key, name in CURVES.items():
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            steps, values = zip(*points, strict=True)
            series[name] = (list(steps), list(values))
    if series:
        draw_curves(run.path / "curves.png", series, title=run.path.name)
