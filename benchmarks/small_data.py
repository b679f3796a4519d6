"""ODC on a small labelled set, judged before and after training: linear probes per layer and nearest neighbours.

    python benchmarks/small_data.py TRAIN TEST --images 10000 --minutes 10 --seeds 0 1 --out results/small_data.json

TRAIN and TEST are anything `odcluster train` takes that has labels (CIFAR-10's files, class trees, packed files). The
labels are used for the verdict only. One run per seed; every run is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from pathlib import Path
from typing import cast

import numpy as np
import torch

import odcluster
from odcluster import api
from odcluster.build import build_loader, build_method
from odcluster.clustering.agreement import nmi
from odcluster.data.loading import Loader
from odcluster.data.sources import Source, open_source
from odcluster.demonstrate import settle_batch_norm
from odcluster.evaluation.knn import knn_accuracy
from odcluster.evaluation.linear import linear_probe, pool_stage
from odcluster.explore.export import read_clusters_csv
from odcluster.models.backbones import Backbone
from odcluster.models.sobel import Sobel
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag
from odcluster.training.metrics import read_metrics
from odcluster.training.run import open_run
from odcluster.training.survey import to_network

MAX_DIMS = 2048


def subset(data: str, images: int | None) -> np.ndarray | str:
    """The first images as an array, or the path itself."""
    if images is None:
        return data
    source = open_source(data)
    return np.stack([source.image(i) for i in range(images)])


@torch.no_grad()
def stage_features(backbone: Backbone, loader: Loader, num: int) -> dict[str, torch.Tensor]:
    """Pooled maps of every stage, and the output feature, of the evaluation views."""
    mean, std = loader.normalisation_on(torch.device("cpu"))
    parts: dict[str, list[torch.Tensor]] = {}
    backbone.eval()
    for raw in loader.evaluation(np.arange(num), 256):
        images = to_network(raw.images[0], mean, std)
        if backbone.in_channels == 2:
            images = Sobel()(images)
        for name, stage in zip(backbone.stage_names, backbone.stages(images), strict=True):
            parts.setdefault(name, []).append(pool_stage(stage, MAX_DIMS))
        parts.setdefault("output", []).append(backbone(images))
    return {name: torch.cat(rows) for name, rows in parts.items()}


def judge(
    backbone: Backbone, train: Loader, test: Loader, labels: list[torch.Tensor], layers: list[str]
) -> dict[str, float]:
    """Accuracy in percent of a linear probe per layer, and of 20 nearest neighbours on the output."""
    train_features, test_features = (
        stage_features(backbone, loader, len(truth)) for loader, truth in zip((train, test), labels, strict=True)
    )
    result = {}
    for layer in layers:
        probe = linear_probe(train_features[layer], labels[0], test_features[layer], labels[1])
        result[f"linear {layer}"] = 100 * probe.accuracy
    knn = knn_accuracy(train_features["output"], labels[0], test_features["output"], labels[1], ks=[20])
    result["knn-20"] = 100 * knn[20]
    return result


def evaluate(
    run: Path, sources: list[Source], labels: list[torch.Tensor], layers: list[str], skip_untrained: bool
) -> dict[str, dict[str, float]]:
    config = open_run(run).config()
    cpu, quiet = torch.device("cpu"), Console(quiet=True)
    method = build_method(dataclasses.replace(config, weights=None), len(sources[0]), cpu, quiet)
    untrained, trained = cast(Backbone, method.backbone), odcluster.load_backbone(run)
    with (
        build_loader(config, sources[0], method, cpu, quiet, StopFlag()) as train,
        build_loader(config, sources[1], method, cpu, quiet, StopFlag()) as test,
    ):
        verdicts = {"trained": judge(trained, train, test, labels, layers)}
        if not skip_untrained:
            settle_batch_norm(untrained, train, np.arange(2048), cpu, lambda doing, done, total: None)
            verdicts["untrained"] = judge(untrained, train, test, labels, layers)
        return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--images", type=int)
    parser.add_argument("--test-images", type=int)
    parser.add_argument("--probe-images", type=int, default=10_000, help="labelled images a probe is trained on")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--recipe")
    parser.add_argument("--method", default="odc")
    parser.add_argument("--weights", help="start from this run or file")
    parser.add_argument("--layers", nargs="+", default=["conv3", "conv4", "conv5"])
    parser.add_argument("--skip-untrained", action="store_true", help="the same seed's was judged in another run")
    parser.add_argument("--runs", type=Path, default=Path("runs/small_data"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    data, test_data = subset(given.train, given.images), subset(given.test, given.test_images)
    truth = [open_source(path).manifest.labels for path in (given.train, given.test)]
    sources = [open_source(data), open_source(test_data)]
    labels = [torch.from_numpy(t[: len(s)]) for t, s in zip(truth, sources, strict=True) if t is not None]
    probe_labels = [labels[0][: given.probe_images], labels[1]]
    results = []
    weights = {"weights": given.weights} if given.weights else {}
    for seed in given.seeds:
        began = time.monotonic()
        out = api.numbered(str(given.runs / f"{given.recipe or given.method}-{seed}"))
        budget = {"minutes": given.minutes, "epochs": given.epochs}
        run = odcluster.train(data, out=out, recipe=given.recipe, method=given.method, seed=seed, **budget, **weights)
        minutes = (time.monotonic() - began) / 60
        lines = [line for line in read_metrics(run / "metrics.jsonl") if "event" not in line]
        result = {"seed": seed, "minutes": round(minutes, 2), "epochs": open_run(run).config().epochs}
        if (run / "clusters.csv").exists():
            clusters = read_clusters_csv(run / "clusters.csv").labels
            result["nmi"] = nmi(clusters, labels[0].numpy())
        if "change" in lines[-1]:
            result["change ratio (last line)"] = lines[-1]["change"]
        result["images per second"] = float(np.median([line["timing"]["images_per_second"] for line in lines]))
        result |= evaluate(run, sources, probe_labels, given.layers, given.skip_untrained)
        print(json.dumps(result, indent=1))
        results.append(result)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        places = ("train", "test", "weights", "runs", "out")  # where they lie on this machine is nobody's business
        command = {key: Path(value).name if key in places and value else value for key, value in vars(given).items()}
        machine = {"cores": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine()}
        given.out.write_text(json.dumps({"arguments": command, "machine": machine, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
