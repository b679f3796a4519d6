"""The default recipe against everything else, from scratch (A) and from weights (B); see docs/recipe.md.

    python benchmarks/recipe.py speed cifar10/train_webp.npz
    python benchmarks/recipe.py tune cifar10/train_webp.npz cifar10/test_webp.npz --methods byol simsiam --minutes 2
    python benchmarks/recipe.py scratch cifar10/train_webp.npz cifar10/test_webp.npz --minutes 20 --seeds 0 1
    python benchmarks/recipe.py weights VOC2007 --weights tf_efficientnet_lite0.safetensors --seeds 0 1
    python benchmarks/recipe.py weights tiny_imagenet/val_jpeg.npz --weights tf_efficientnet_lite0.safetensors \
        --clusters 100 --image-size 128 --cached-views 2
    python benchmarks/recipe.py photos VOC2007 --minutes 10 --seeds 0

A: one small backbone, the same minutes on the same cores for all, no labels in training; judged by linear probes per
layer (10,000 labelled images, all test images), 20 nearest neighbours, and NMI of the clusters and of k-means(10).
B: photos with several classes each, or any images with known classes; NMI of the clusters on the images with one class,
the share of the 10 nearest neighbours with a common class, and SVMs by `odcluster evaluate --task svm`.
C: the same photos without weights, the same minutes for several networks and sizes; judged by neighbours.
`speed` measures every method for half a minute and writes results/recipe/speed.json: leave the machine alone meanwhile.
The minutes of `scratch` are then a number of steps per method, the same whatever else the machine does, so a run may
take longer than its minutes. `tune` trains a peer for a short time with every optimiser of `TUNED`, which is how those
of `PEERS` were chosen. Every run is written to results/recipe/ as soon as it is judged, with its command; a run whose
file exists is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from small_data import judge, stage_features

import odcluster
from odcluster import api
from odcluster.build import build_loader, build_method
from odcluster.clustering.agreement import nmi
from odcluster.clustering.kmeans import kmeans
from odcluster.data.annotations import annotations_of
from odcluster.data.loading import Loader
from odcluster.data.sources import Source, open_source
from odcluster.demonstrate import settle_batch_norm
from odcluster.evaluation.knn import nearest_neighbours
from odcluster.explore.export import read_clusters_csv
from odcluster.methods.interface import Method
from odcluster.models.backbones import Backbone
from odcluster.models.heads import l2_normalise
from odcluster.training import checkpoint
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag, has_bfloat16
from odcluster.training.metrics import read_metrics
from odcluster.training.run import open_run
from odcluster.training.survey import extract

CPU = torch.device("cpu")
LAYERS = ["conv1", "conv2", "conv3", "conv4", "conv5"]
OURS: dict[str, dict[str, Any]] = {
    "odc": {},
    "rotation": {"method": "rotation"},
    "deepcluster": {"method": "deepcluster"},
    "odc, the paper's recipe": {"recipe": "odc_resnet50_imagenet", "backbone": "smallconv", "clusters": 100,
                                "batch_size": 128, "epochs": None, "image_size": 32, "crop_size": 24},
}  # fmt: skip
PHOTOS: dict[str, dict[str, Any]] = {
    "smallconv, 64 px": {"backbone": "smallconv", "image_size": 64},
    "smallconv, 96 px": {"backbone": "smallconv", "image_size": 96},
    "resnet18, 128 px": {"backbone": "resnet18", "image_size": 128},
}
MUON: dict[str, Any] = {"algorithm": "muon", "lr": 0.05, "weight_decay": 0.01}
"""As odc has it."""
PEERS: dict[str, dict[str, Any]] = {
    "swav": {"method": "swav", "lr": 0.001, "algorithm": "adamw"},
    "swav, the optimiser of odc": {"method": "swav", **MUON},
    "simsiam": {"method": "simsiam", **MUON},
    "byol": {"method": "byol", **MUON},
    "simclr": {"method": "simclr", **MUON},
    "supervised": {"method": "supervised", **MUON},
}
TUNED: dict[str, dict[str, Any]] = {
    "SGD 0.05": {"algorithm": "sgd", "lr": 0.05, "weight_decay": 5e-4},
    "AdamW 0.001": {"algorithm": "adamw", "lr": 0.001, "weight_decay": 5e-4},
    "AdamW 0.003": {"algorithm": "adamw", "lr": 0.003, "weight_decay": 5e-4},
    "Muon 0.05": MUON,
}


def record(out: Path, command: str, **result: Any) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": command, "machine": machine(), **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1), flush=True)


def machine() -> dict[str, Any]:
    bfloat16 = has_bfloat16(CPU)
    return {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "bfloat16": bfloat16,
            "torch": torch.__version__, "machine": platform.machine()}  # fmt: skip


def verdict(backbone: Backbone, train: Any, test: Any, labels: list[torch.Tensor]) -> dict[str, float]:
    """Probes per layer, neighbours, and NMI of k-means(10) on the test images' features."""
    result = judge(backbone, train, test, labels, LAYERS)
    features = stage_features(backbone, test, len(labels[1]))["output"]
    classes = int(labels[1].max()) + 1
    found, _ = kmeans(l2_normalise(features - features.mean(dim=0)), classes, seed=0)
    return result | {f"NMI of k-means({classes})": nmi(found.numpy(), labels[1].numpy())}


def speed(given: argparse.Namespace, command: str) -> None:
    """Seconds of a step, and of what a run does beside its steps, per method."""
    measured: dict[str, Any] = json.loads(given.speed.read_text()) if given.speed.exists() else {}
    for name in given.methods or [*OURS, *PEERS]:
        began, place = time.monotonic(), api.numbered(str(given.runs / f"speed-{name.split(',')[0]}"))
        if name in OURS:
            run = odcluster.train(given.train, out=place, quiet=True, **{**OURS[name], "max_steps": given.steps})
            lines = [line for line in read_metrics(run / "metrics.jsonl") if "event" not in line]
            training = sum(line["timing"]["seconds"] for line in lines)
            batch, beside = open_run(run).config().batch_size, time.monotonic() - began - training
        else:
            from peers.train import train as train_peer

            labels = np.asarray(open_source(given.train).manifest.labels)
            about = train_peer(given.train, labels, out=place, steps=given.steps, **PEERS[name])
            training, batch, beside = about["seconds"], 128, 0.0
        fastest = training / given.steps
        if given.again and name in measured:  # what disturbs a measurement makes it slower
            fastest = min(fastest, measured[name]["seconds per step"])
        measured[name] = {"seconds per step": fastest, "seconds beside": beside, "steps": given.steps, "batch": batch}
        print(name, measured[name], flush=True)
        given.speed.parent.mkdir(parents=True, exist_ok=True)
        given.speed.write_text(json.dumps({**measured, "machine": machine()}, indent=1) + "\n")


def steps_of(name: str, given: argparse.Namespace, num_images: int) -> int:
    """How many steps of a method take the minutes on an idle machine."""
    if not given.speed.exists():
        raise SystemExit(f"{given.speed} is missing: run `python benchmarks/recipe.py speed TRAIN` first")
    found = json.loads(given.speed.read_text())[name]
    seconds, beside = given.minutes * 60, found["seconds beside"]
    if name != "deepcluster":
        return int((seconds - beside) / found["seconds per step"])
    per_epoch = num_images // found["batch"]  # it looks at all images before every epoch
    looks = -(-found["steps"] // per_epoch)
    return int(seconds / (found["seconds per step"] + beside / looks / per_epoch))


def scratch(given: argparse.Namespace, command: str) -> None:
    sources = [open_source(given.train), open_source(given.test)]
    truth = [torch.from_numpy(np.asarray(s.manifest.labels)) for s in sources]
    labels = [truth[0][: given.probe_images], truth[1]]
    for seed in given.seeds:
        for name in given.methods or ["untrained", *OURS, *PEERS]:
            out = given.results / f"scratch, {name}, seed {seed}.json"
            if out.exists():
                continue
            began, about = time.monotonic(), {}
            place = api.numbered(str(given.runs / f"{name.split(',')[0]}-{seed}"))
            with judging(sources, seed) as (method, train, test):
                if name == "untrained":
                    backbone = cast(Backbone, method.backbone)
                    settle_batch_norm(backbone, train, np.arange(2048), CPU, lambda doing, done, total: None)
                elif name in OURS:
                    budget = {"max_steps": steps_of(name, given, len(sources[0]))}
                    run = odcluster.train(given.train, out=place, seed=seed, **{**OURS[name], **budget})
                    about = described(run, truth[0].numpy())
                    backbone = odcluster.load_backbone(run)
                else:
                    from peers.train import train as train_peer

                    about = train_peer(given.train, truth[0].numpy(), out=place, seed=seed,
                                       steps=steps_of(name, given, len(sources[0])), **PEERS[name])  # fmt: skip
                    backbone = odcluster.load_backbone(place)
                minutes = (time.monotonic() - began) / 60
                if backbone.in_channels == 2:
                    about["input"] = "Sobel"
                result = verdict(backbone, train, test, labels)
            record(out, command, method=name, seed=seed, budget_minutes=given.minutes, wall_minutes=round(minutes, 1),
                   training=about, result=result)  # fmt: skip


def tune(given: argparse.Namespace, command: str) -> None:
    """Every optimiser for every peer named, for the same steps; judged by the last layer and by neighbours."""
    from peers.train import train as train_peer

    sources = [open_source(given.train), open_source(given.test)]
    truth = [torch.from_numpy(np.asarray(s.manifest.labels)) for s in sources]
    for name in given.methods or PEERS:
        for optimiser, options in TUNED.items():
            out = given.results / "tuning" / f"{name}, {optimiser}.json"
            if out.exists():
                continue
            place, steps = api.numbered(str(given.runs / f"tune-{name}")), steps_of(name, given, len(sources[0]))
            about = train_peer(given.train, truth[0].numpy(), out=place, steps=steps, **{**PEERS[name], **options})
            with judging(sources, 0) as (_, train, test):
                labels = [truth[0][: given.probe_images], truth[1]]
                result = judge(odcluster.load_backbone(place), train, test, labels, LAYERS[-1:])
            record(out, command, method=name, optimiser=optimiser, seed=0, training=about, result=result)


@contextmanager
def judging(sources: list[Source], seed: int) -> Iterator[tuple[Method, Loader, Loader]]:
    """An untrained network of the seed, and loaders of the images to learn from and of those to test on."""
    reference = dataclasses.replace(api.recipe_of("odc_small"), seed=seed, backbone="smallconv", epochs=1,
                                    image_size=32, clusters=10, batch_size=128, workers=1)  # fmt: skip
    quiet = Console(quiet=True)
    method = build_method(reference, len(sources[0]), CPU, quiet)
    with (
        build_loader(reference, sources[0], method, CPU, quiet, StopFlag()) as train,
        build_loader(reference, sources[1], method, CPU, quiet, StopFlag()) as test,
    ):
        yield method, train, test


def described(run: Path, truth: np.ndarray) -> dict[str, Any]:
    """What a run says of itself, and how its clusters agree with the classes."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "event" not in line]
    config = open_run(run).config()
    about: dict[str, Any] = {"epochs": config.epochs, "steps": lines[-1]["step"], "clusters": config.clusters}
    if (run / "clusters.csv").exists():
        found = read_clusters_csv(run / "clusters.csv").labels
        about["NMI of the clusters"] = nmi(found, truth)
        about["largest cluster"] = int(np.bincount(found[found >= 0]).max())
    if "change" in lines[-1]:
        about["labels changed at the end"] = lines[-1]["change"]
    return about


def weights(given: argparse.Namespace, command: str) -> None:
    source = open_source(given.data)
    present = annotations_of(source, None, given.data).values == 1  # [N, K]
    single = present.sum(axis=1) == 1
    classes = present.argmax(axis=1)[single]
    for seed in given.seeds:
        out = given.results / f"weights, {Path(given.data).stem}, {given.clusters} clusters, seed {seed}.json"
        if out.exists():
            continue
        began = time.monotonic()
        place = api.numbered(str(given.runs / f"weights-{seed}"))
        options = {"backbone": given.backbone, "weights": given.weights, "clusters": given.clusters, "seed": seed}
        options |= {k: v for k in ("cached_views", "image_size") if (v := getattr(given, k)) is not None}
        run = odcluster.train(given.data, out=place, **options)
        minutes = (time.monotonic() - began) / 60
        found = checkpoint.find(run / "checkpoints", print)
        assert found is not None
        rows = {"odc": l2_normalise(found.tensors["memory"]["samples.rows"])}
        if (kept := run / "features" / "features.npy").exists():
            rows["frozen"] = l2_normalise(torch.from_numpy(np.load(kept, mmap_mode="r")[0].astype(np.float32)))
        labels = read_clusters_csv(run / "clusters.csv").labels
        result: dict[str, Any] = {"NMI of the clusters": nmi(labels[single], classes)}
        for name, features in rows.items():
            by_kmeans = [kmeans(features, given.clusters, iterations=50, seed=s)[0].numpy() for s in range(5)]
            result[f"NMI of k-means, {name}"] = [nmi(found[single], classes) for found in by_kmeans]
            result[f"neighbours with a common class, {name}"] = common_class(features, present)
        record(out, command, method="odc", seed=seed, minutes=round(minutes, 1), single=int(single.sum()),
               training=described(run, np.where(single, present.argmax(axis=1), -1)), result=result)  # fmt: skip


def common_class(features: torch.Tensor, present: np.ndarray) -> float:
    """Share of each image's 10 nearest others that have a class in common with it; classes are [N, K], yes or no."""
    near = nearest_neighbours(features, features, 10, exclude=torch.arange(len(features)))[0].numpy()
    return float((present[:, None] & present[near]).any(-1).mean())


def photos(given: argparse.Namespace, command: str) -> None:
    source = open_source(given.data)
    present = annotations_of(source, None, given.data).values == 1  # [N, K]
    single = np.where(present.sum(axis=1) == 1, present.argmax(axis=1), -1)
    for seed in given.seeds:
        for name in given.choices or PHOTOS:
            out = given.results / f"photos, {name}, {given.minutes:g} minutes, seed {seed}.json"
            if out.exists():
                continue
            place = api.numbered(str(given.runs / f"photos-{name.replace(', ', '-').replace(' ', '-')}-{seed}"))
            began = time.monotonic()
            run = odcluster.train(given.data, out=place, seed=seed, minutes=given.minutes, **PHOTOS[name])
            minutes = (time.monotonic() - began) / 60
            record(out, command, choice=name, seed=seed, budget_minutes=given.minutes, wall_minutes=round(minutes, 1),
                   training=described(run, single), result=near_before_and_after(run, source, present))  # fmt: skip


def near_before_and_after(run: Path, source: Source, present: np.ndarray) -> dict[str, float]:
    """The share of near images with a common class: untrained with settled batch norm, trained, and by chance."""
    config, quiet, result = open_run(run).config(), Console(quiet=True), dict[str, float]()
    method = build_method(config, len(source), CPU, quiet)
    untrained, everyone = cast(Backbone, method.backbone), np.arange(len(source))
    with build_loader(config, source, method, CPU, quiet, StopFlag()) as loader:
        settle_batch_norm(untrained, loader, everyone[:2048], CPU, lambda doing, done, total: None)
        for name, backbone in {"before": untrained, "after": odcluster.load_backbone(run)}.items():
            features, _ = extract(backbone.eval(), loader, everyone, CPU, lambda raw, done: None)
            result[name] = common_class(l2_normalise(features - features.mean(dim=0)), present)
    drawn = np.random.default_rng(0).integers(len(source), size=(len(source), 10))
    return result | {"by chance": float((present[:, None] & present[drawn]).any(-1).mean())}


def command_line(script: str) -> str:
    """The command that is running, without where things lie on this machine."""
    shown = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{script}", *shown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="part", required=True)
    a, b, c, d, e = (verbs.add_parser(name) for name in ("scratch", "weights", "speed", "tune", "photos"))
    for part in (a, c, d):
        part.add_argument("train")
        part.add_argument("--methods", nargs="+", help=f"of {', '.join([*OURS, *PEERS])}; not given: all")
        part.add_argument("--speed", type=Path, default=Path("results/recipe/speed.json"))
    c.add_argument("--steps", type=int, default=400, help="more than an epoch, so that every phase is seen")
    c.add_argument("--again", action="store_true", help="keep the faster of this measurement and the last")
    c.add_argument("--runs", type=Path, default=Path("runs/recipe"))
    for part, minutes in ((a, 20.0), (d, 2.0)):
        part.add_argument("test")
        part.add_argument("--minutes", type=float, default=minutes)
        part.add_argument("--probe-images", type=int, default=10_000, help="labelled images a probe is trained on")
    b.add_argument("data")
    b.add_argument("--weights", required=True)
    b.add_argument("--backbone", default="tf_efficientnet_lite0")
    b.add_argument("--clusters", type=int, default=20)
    b.add_argument("--cached-views", type=int)
    b.add_argument("--image-size", type=int)
    e.add_argument("data")
    e.add_argument("--minutes", type=float, default=10.0)
    e.add_argument("--choices", nargs="+", choices=list(PHOTOS))
    for part in (a, b, e):
        part.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    for part in (a, b, d, e):
        part.add_argument("--runs", type=Path, default=Path("runs/recipe"))
        part.add_argument("--results", type=Path, default=Path("results/recipe"))
    given = parser.parse_args()
    parts = {"scratch": scratch, "weights": weights, "speed": speed, "tune": tune, "photos": photos}
    parts[given.part](given, command_line("recipe.py"))


if __name__ == "__main__":
    main()
