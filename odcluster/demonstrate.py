"""The demonstration: ODC on the digits that scikit-learn ships, judged before and after by labels it never saw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor, nn

from odcluster import api
from odcluster.build import build_loader, build_method
from odcluster.clustering.agreement import nmi
from odcluster.config import Config, changed
from odcluster.data.loading import Loader
from odcluster.data.sources import Source, open_source
from odcluster.errors import DataError
from odcluster.evaluation.knn import leave_one_out_knn_accuracy
from odcluster.evaluation.subject import settle_batch_norm
from odcluster.models.backbones import Backbone
from odcluster.models.sobel import represent
from odcluster.models.weights import load_backbone
from odcluster.recipes import recipe
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag, choose_device
from odcluster.training.run import open_run
from odcluster.training.survey import extract

NEIGHBOURS = 20
CIFAR10_PLACES = (
    "cifar10",
    "cifar-10-batches-py",
    "cifar-10-batches-bin",
    "data/cifar10",
    "data/cifar-10-batches-py",
)


def demo(
    data: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    **options: Any,
) -> Path:
    """Train on the digits, or on labelled `data`, and compare features before and after with the known labels."""
    console = Console()
    given = find_data(data) if data is not None else "digits"
    config = changed(config or recipe("odc_small" if data is not None else "odc_digits"), **options)
    truth = open_source(given).manifest.labels
    if truth is None:
        raise DataError(f"{given} has no labels to judge by: use `odcluster train {given}`, or give a folder per class")
    console.say("labels are used for the verdict only")
    place = api.numbered("runs/demo") if out is None and data is None else out
    run_path = api.start(config, given, place, console)
    before, after = judge(run_path, open_source(given), truth, console)
    console.say("judged by the labels, which training never saw (before: the untrained network)", style="bold")
    for name in before:
        console.say(f"  {name:42} {before[name]:.3f} -> {after[name]:.3f}")
    if (run_path / "clusters.png").exists():
        console.say(f"look at {run_path / 'clusters.png'}")
    return run_path


def find_data(data: str | os.PathLike[str]) -> str:
    """The path as given; the name `cifar10` stands for your copy of it in one of the usual places."""
    path = os.fspath(data)
    if path != "cifar10" or os.path.exists(path):
        return path
    for place in CIFAR10_PLACES:
        if os.path.isdir(place):
            return place
    raise DataError(
        "CIFAR-10 is not in any of the usual places (./cifar10, ./cifar-10-batches-py, ./data/cifar10): unpack "
        "cifar-10-binary.tar.gz from its home page, www.cs.toronto.edu/~kriz/cifar.html, and give the folder"
    )


def judge(
    run_path: Path, source: Source, truth: np.ndarray, console: Console
) -> tuple[dict[str, float], dict[str, float]]:
    """Features of the untrained and of the trained backbone, measured by the labels."""
    config = open_run(run_path).config()
    device = choose_device(config.device)
    quiet = Console(quiet=True)
    untrained = build_method(config, len(source), device, quiet)
    backbone = cast(Backbone, untrained.backbone)
    trained = load_backbone(run_path).to(device)
    with build_loader(config, source, untrained, device, quiet, StopFlag()) as loader:
        settle_batch_norm(backbone, loader, np.arange(min(len(source), 5000)), device, lambda *_: None)
        before = measure(backbone, loader, truth, device, "before", console)
        return before, measure(trained, loader, truth, device, "after", console)


def measure(
    backbone: Backbone, loader: Loader, truth: np.ndarray, device: torch.device, name: str, console: Console
) -> dict[str, float]:
    """NMI of k-means with as many clusters as classes, and kNN accuracy, both on the pooled features."""
    backbone.eval()
    total = len(truth)
    rows, seen = extract(
        represent(backbone),
        loader,
        np.arange(total),
        device,
        lambda raw, done: console.progress(f"features {name} training", done, total),
    )
    known = seen.cpu() & torch.from_numpy(truth >= 0)
    features: Tensor = nn.functional.normalize(rows.cpu()[known], dim=1)
    labels = torch.from_numpy(truth)[known]
    classes = len(labels.unique())
    clusters = KMeans(classes, n_init=10, random_state=0).fit_predict(features.numpy())
    knn = leave_one_out_knn_accuracy(features, labels, ks=[NEIGHBOURS])
    return {
        f"NMI of k-means({classes}) on the features": nmi(clusters, labels.numpy()),
        f"accuracy of {NEIGHBOURS} nearest neighbours": next(iter(knn.values())),
    }
