"""What people take away from a finished run: clusters.csv, clusters.png, curves.png, backbone/ and a summary."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from odcluster.clustering.agreement import nmi, summarise_sizes
from odcluster.clustering.neighbours import agreement_of_neighbours
from odcluster.config import Config
from odcluster.data.sources import Source
from odcluster.explore.export import rank_within_cluster, write_clusters_csv
from odcluster.explore.mosaic import cluster_mosaic, draw_curves
from odcluster.methods.deepcluster import DeepCluster
from odcluster.methods.interface import Method
from odcluster.methods.odc import ODC, PLAIN_AGREEMENT
from odcluster.models.backbones import Backbone
from odcluster.models.weights import export_backbone
from odcluster.training.metrics import read_metrics
from odcluster.training.run import Run

Labels = NDArray[np.int64]
Similarities = NDArray[np.float32]

CURVES = {
    "loss": "loss",
    "change": "share of labels changed per step",
    "largest": "largest cluster",
    "smallest": "smallest cluster",
    "small_clusters": "small clusters dissolved per step",
    "accuracy": "share of right answers",
    "nmi_previous": "NMI with the labels of the epoch before",
}


def deliver(run: Run, config: Config, source: Source, method: Method, similarities: Similarities | None) -> list[str]:
    """Write the files of a finished run; returns sentences for people. For `similarities` see `similarities_of`."""
    provenance = {
        "method": config.method,
        "recipe": config.recipe,
        "seed": config.seed,
        "epochs": config.epochs,
    }
    export_backbone(cast(Backbone, method.backbone), run.backbone, provenance=provenance)
    sentences = []
    if isinstance(method, ODC | DeepCluster):
        assert similarities is not None
        counts = method.centroids.counts if isinstance(method, ODC) else method.samples.counts
        labels = method.samples.labels.cpu().numpy()
        sentences += deliver_clusters(run, source, labels, similarities, counts.cpu())
    if isinstance(method, ODC):
        sentences += compare_with_kmeans(run, method)
    draw_training(run)
    sentences.append(f"curves: {run.path / 'curves.png'}")
    sentences.append(f"backbone: {run.backbone}")
    return sentences


def deliver_clusters(run: Run, source: Source, labels: Labels, similarities: Similarities, counts: Tensor) -> list[str]:
    """clusters.csv and clusters.png, and what to say about them."""
    ranks = rank_within_cluster(labels, similarities)
    write_clusters_csv(run.clusters_file, source.manifest.paths, labels, similarities, ranks)
    picture = run.path / "clusters.png"
    cluster_mosaic(source.image, labels, similarities, picture, name=run.path.name, num_clusters=len(counts))
    sizes = summarise_sizes(counts)
    sentences = [
        f"{len(counts):,} clusters of {sizes.smallest:,} to {sizes.largest:,} images (median {sizes.median:,.0f}); "
        f"the largest holds {sizes.largest_share:.1%} of all"
    ]
    last = next((line for line in reversed(read_metrics(run.metrics_file)) if "change" in line), None)
    if last is not None:
        verdict = "settled" if last["change"] < 0.1 else "still moving: more epochs would settle them"
        sentences.append(f"{last['change']:.1%} of the labels changed per step at the end ({verdict})")
    if unseen := int((labels < 0).sum()):
        left_out = "1 image could not be used and belongs"
        if unseen > 1:
            left_out = f"{unseen:,} images could not be used and belong"
        sentences.append(f"{left_out} to no cluster (bad_images.csv)")
    truth = source.manifest.labels
    if truth is not None and np.any((truth >= 0) & (labels >= 0)):
        sentences.append(f"agreement with the labels that came with the images: NMI {nmi(labels, truth):.3f}")
    return [*sentences, f"which image is where: {run.clusters_file}", f"picture: {picture}"]


def compare_with_kmeans(run: Run, method: ODC) -> list[str]:
    """With a frozen backbone: whether ODC did better than k-means alone, judged without labels."""
    if not method.frozen or not method.config.clustering.neighbours:
        return []
    ours = agreement_of_neighbours(method.neighbours, method.samples.labels)
    plain = [line[PLAIN_AGREEMENT] for line in read_metrics(run.metrics_file) if PLAIN_AGREEMENT in line][-1]
    verdict = (
        "" if ours >= plain else ": no gain here, plain k-means may serve as well; try other --clusters or a lower --lr"
    )
    return [f"{ours:.0%} of neighbouring images share a cluster; k-means alone has {plain:.0%}{verdict}"]


def similarities_of(method: Method) -> Similarities | None:
    """Cosine of every image's row to the centroid of its cluster, from all ranks; None where there are no clusters."""
    if isinstance(method, DeepCluster):
        return method.samples.similarities.cpu().numpy()
    if not isinstance(method, ODC):
        return None
    rows = torch.nn.functional.normalize(method.samples.rows.cpu(), dim=1)
    centroids = torch.nn.functional.normalize(method.centroids.centroids.cpu(), dim=1)
    own = (rows * centroids[method.samples.own_labels.cpu().clamp(min=0)]).sum(dim=1)
    return method.ranks.gather_blocks(own, len(method.samples.labels)).numpy()


def draw_training(run: Run) -> None:
    """curves.png from metrics.jsonl."""
    lines = read_metrics(run.metrics_file)
    series = {}
    for key, name in CURVES.items():
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            steps, values = zip(*points, strict=True)
            series[name] = (list(steps), list(values))
    if series:
        draw_curves(run.path / "curves.png", series, title=run.path.name)
