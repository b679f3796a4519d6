"""The tasks: from a backbone and labelled images to scores, by the protocol of each.

Every task returns an `Outcome`, which says what was done, in what it departs from the protocol it names, and what was
left out. Opening weights and data, writing results and showing them is left to `odcluster/judge.py`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from odcluster.clustering import agreement
from odcluster.errors import DataError, UserError
from odcluster.evaluation import parts as parts_module
from odcluster.evaluation.features import MAX_DIMS, VECTOR, FeatureStore, extract_features, pooling
from odcluster.evaluation.knn import KS, knn_accuracy
from odcluster.evaluation.linear import linear_probe
from odcluster.evaluation.linear_sgd import LabelledImages, SgdSettings, published_linear_probe
from odcluster.evaluation.lowshot import LowshotResult, draw_samples, lowshot_map
from odcluster.evaluation.parts import Part, Parts
from odcluster.evaluation.results import Rule, Scores
from odcluster.evaluation.semi import EPOCHS as SEMI_EPOCHS
from odcluster.evaluation.semi import SemiResult, semi_supervised
from odcluster.evaluation.subject import Subject
from odcluster.evaluation.svm import SvmResult, check_folds, read_stored, svm_map, write_stored
from odcluster.models.backbones import Backbone
from odcluster.ranks import SINGLE, Ranks
from odcluster.verbs import Evaluation

NUM_DRAWS = 5
FEWER = "use --task linear, or fewer training images"
SHARES = {"1 %": 0.01, "10 %": 0.1}
FAST_NUMBERS = 2 * 10**8
"""Numbers per layer that the fast linear probe may hold: 5,011 images of 9,600 dimensions, or 50,000 of 4,000."""

Progress = Callable[[str, int, int], None]


class Helped(Exception):
    """This rank has computed its share of the features; rank 0 does the rest."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a task found."""

    protocol: str
    variant: str
    scores: list[Scores]
    headline: str
    num_train: int
    num_test: int
    num_classes: int
    deviations: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unfinished: Path | None = None
    """Where work was kept while it was unfinished; of no use any more."""


@dataclass(frozen=True)
class Workshop:
    """What every task works with."""

    subject: Subject
    parts: Parts
    options: Evaluation
    device: torch.device
    progress: Progress
    say: Callable[[str], None]
    ranks: Ranks = SINGLE

    def key(self) -> str:
        """Stands for weights, size, images and labels; work under another key is never taken up."""
        names = [self.subject.identity(), self.parts.train.fingerprint(), self.parts.test.fingerprint()]
        return hashlib.sha256(" ".join(names).encode()).hexdigest()

    def stages(self) -> list[str]:
        """The layers asked for, else all stages."""
        known = self.subject.backbone.stage_names
        if wrong := [name for name in self.options.layers or () if name not in known]:
            raise UserError(f"{self.subject.backbone.name} has no layer {wrong[0]}; its layers are {', '.join(known)}")
        return [name for name in known if not self.options.layers or name in self.options.layers]

    def place(self) -> Path:
        """A folder for the unfinished work of this very task."""
        return self.subject.directory / f".unfinished-{self.options.task}-{self.key()[:16]}"

    def jobs(self) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.options.jobs or cores


# --- Features ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """Rows of one side, and which images of the part they are."""

    store: FeatureStore
    usable: NDArray[np.bool_]

    def rows(self, layer: str) -> NDArray[np.float32]:
        rows = self.store.rows(layer)
        return rows if self.usable.all() else rows[self.usable]

    def tensor(self, layer: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self.rows(layer)))


def both_sides(workshop: Workshop, layers: list[str], *, whole: bool, max_dims: int) -> tuple[Side, Side]:
    """Features of both sides on disk; said where they are and how large."""
    sides = []
    for name, part in (("training", workshop.parts.train), ("test", workshop.parts.test)):
        key = f"{workshop.subject.identity()} {part.images()}"
        view = "whole" if whole else "centre"
        folder = hashlib.sha256(f"{key} {view} {max_dims} {' '.join(layers)}".encode()).hexdigest()[:16]

        def progress(activity: str, done: int, total: int, name: str = name) -> None:
            workshop.progress(f"{activity} of the {name} images", done, total)

        store = extract_features(
            workshop.subject.backbone,
            part.source,
            workshop.subject.directory / "features" / folder,
            layers=layers,
            whole=whole,
            key=key,
            workers=workshop.options.workers,
            device=workshop.device,
            progress=progress,
            ids=part.ids,
            max_dims=max_dims,
            ranks=workshop.ranks,
        )
        sides.append(Side(store, store.usable))
    if not workshop.ranks.is_first:
        raise Helped
    size = sum(side.store.num_bytes for side in sides)
    workshop.say(f"features: {size / 1e9:.2f} GB in {workshop.subject.directory / 'features'}, kept for other tasks")
    return sides[0], sides[1]


def refusals(*sides: Side) -> list[str]:
    return [f"{path}: {why}" for side in sides for path, why in side.store.refused]


# --- Tasks ------------------------------------------------------------------------------------------


def linear(workshop: Workshop) -> Outcome:
    return linear_published(workshop) if workshop.options.variant == "published" else linear_fast(workshop)


def linear_fast(workshop: Workshop) -> Outcome:
    """Logistic regression on cached features, layer by layer."""
    train_labels, test_labels, names = parts_module.class_labels(workshop.parts)
    layers = workshop.stages()
    count = len(train_labels) + len(test_labels)
    max_dims = max(256, min(MAX_DIMS, FAST_NUMBERS // count))
    train, test = both_sides(workshop, layers, whole=False, max_dims=max_dims)
    widest = max(train.store.dimensions.values())
    check_memory(5 * 4 * count * widest, "the fast linear probe", "use --variant published, or fewer images")
    scores, details = [], {}
    for number, layer in enumerate(layers):
        workshop.progress("linear probes", number, len(layers))
        file = workshop.place() / f"{layer}.json"
        probe = read_stored(file, {"key": workshop.key(), "dimensions": train.store.dimensions[layer]})
        if probe is None:
            try:
                found = linear_probe(
                    train.tensor(layer),
                    torch.from_numpy(train_labels[train.usable]),
                    test.tensor(layer),
                    torch.from_numpy(test_labels[test.usable]),
                    poll=partial(workshop.progress, "linear probes", number, len(layers)),
                )
            except ValueError as error:
                raise DataError(str(error)) from error
            held_out = {str(l2): accuracy for l2, accuracy in found.held_out_accuracy.items()}
            log_loss = found.log_loss if math.isfinite(found.log_loss) else None
            probe = asdict(found) | {"held_out_accuracy": held_out, "log_loss": log_loss}
            probe |= {"key": workshop.key(), "dimensions": train.store.dimensions[layer]}
            write_stored(file, probe)
        scores.append(Scores(layer=layer, metrics={"top-1": probe["accuracy"]}))
        details[layer] = {name: value for name, value in probe.items() if name != "key"}
        workshop.say(f"  {layer}: {probe['accuracy']:.1%}")
    workshop.progress("linear probes", len(layers), len(layers))
    pools = pooling(workshop.subject.backbone, workshop.subject.backbone.image_size, max_dims)
    return Outcome(
        protocol="Fast linear probe (L-BFGS on cached features)",
        variant="fast",
        scores=scores,
        headline="top-1",
        num_train=int(train.usable.sum()),
        num_test=int(test.usable.sum()),
        num_classes=len(names),
        details={"probes": details, "pooling": {layer: pools[layer].description for layer in layers}},
        left_out=refusals(train, test),
        unfinished=workshop.place(),
    )


def linear_published(workshop: Workshop) -> Outcome:
    """SGD over augmented images, all layers in one pass."""
    train, test, names = labelled_images(workshop.parts)
    backbone, options = workshop.subject.backbone, workshop.options
    settings = SgdSettings() if options.epochs is None else SgdSettings(epochs=options.epochs)
    pools = {name: pool for name, pool in pooling(backbone, backbone.image_size).items() if name in workshop.stages()}
    probes = published_linear_probe(
        backbone,
        train,
        test,
        pools,
        settings,
        seed=options.seed,
        device=workshop.device,
        workers=options.workers,
        store=workshop.place(),
        key=f"{workshop.subject.identity()} {[pool.description for pool in pools.values()]}",
        progress=workshop.progress,
    )
    deviations = size_and_pooling(workshop)
    if settings.epochs != SgdSettings().epochs:
        deviations.append(f"{settings.epochs} epochs instead of {SgdSettings().epochs}")
    first = next(iter(probes.values()))
    return Outcome(
        protocol="Linear probes (Zhang et al. 2017)",
        variant="published",
        scores=[Scores(layer=name, metrics={"top-1": probe.accuracy}) for name, probe in probes.items()],
        headline="top-1",
        num_train=first.num_train,
        num_test=first.num_test,
        num_classes=len(names),
        deviations=deviations,
        details={
            "epochs": settings.epochs,
            "probes": {name: asdict(probe) | {"refused": None} for name, probe in probes.items()},
        },
        left_out=[f"{path}: {why}" for path, why in first.refused],
        unfinished=workshop.place(),
    )


def svm(workshop: Workshop) -> Outcome:
    """One-vs-rest SVMs on every layer."""
    train_truth, test_truth, notes = parts_module.class_annotations(workshop.parts)
    layers = workshop.stages()
    check_folds(train_truth.values, train_truth.class_names)
    check_memory(8 * len(train_truth.values) ** 2, "the products of the training images", FEWER)
    train, test = both_sides(workshop, layers, whole=True, max_dims=MAX_DIMS)
    found: dict[str, SvmResult] = {}
    for layer in layers:
        workshop.say(f"{layer}: {train.store.dimensions[layer]:,} dimensions")
        found[layer] = svm_map(
            train.rows(layer),
            train_truth.values[train.usable],
            test.rows(layer),
            test_truth.values[test.usable],
            train_truth.class_names,
            jobs=workshop.jobs(),
            store=workshop.place() / layer,
            key=workshop.key(),
            progress=workshop.progress,
        )
        workshop.say(f"  {layer}: mAP {found[layer].mean_average_precision:.1%}")
    absent = found[layers[0]].without_test_positives
    return Outcome(
        protocol="VOC07 linear SVM (Goyal et al. 2019)",
        variant="published",
        scores=[Scores(layer=name, metrics={"mAP": result.mean_average_precision}) for name, result in found.items()],
        headline="mAP",
        num_train=int(train.usable.sum()),
        num_test=int(test.usable.sum()),
        num_classes=len(train_truth.class_names),
        deviations=[*size_and_pooling(workshop), *voc_parts(workshop.parts)],
        details={
            "average_precision": {
                name: {entry.name: entry.average_precision for entry in result.classes}
                for name, result in found.items()
            },
            "classes": {name: [asdict(entry) for entry in result.classes] for name, result in found.items()},
            "without_test_positives": list(absent),
        },
        left_out=[*notes, *refusals(train, test), *without_positives(absent)],
        unfinished=workshop.place(),
    )


def lowshot(workshop: Workshop) -> Outcome:
    """SVMs on a few images per class; both ways to choose the cost."""
    train_truth, test_truth, notes = parts_module.class_annotations(workshop.parts)
    layers = workshop.stages()
    count = len(train_truth.values)
    check_memory(8 * count * (count + len(test_truth.values)), "the products of the images", FEWER)
    train, test = both_sides(workshop, layers, whole=True, max_dims=MAX_DIMS)
    if not workshop.options.layers:
        layers = layers[-1:]
        workshop.say(f"layer {layers[0]}, the last one; others with --layers")
    labels = train_truth.values[train.usable]
    draws = draw_samples(labels, num_draws=NUM_DRAWS, seed=workshop.options.seed)
    found: dict[str, LowshotResult] = {}
    for layer in layers:
        found[layer] = lowshot_map(
            train.rows(layer),
            labels,
            test.rows(layer),
            test_truth.values[test.usable],
            train_truth.class_names,
            draws=draws,
            jobs=workshop.jobs(),
            store=workshop.place() / layer,
            key=workshop.key(),
            progress=workshop.progress,
        )
    used = workshop.parts.train.ids[train.usable]
    paths = workshop.parts.train.source.manifest.paths
    scores = [row for layer, result in found.items() for row in lowshot_scores(layer, result)]
    first = next(iter(found.values()))
    short = [str(entry.shots) for entry in first.shots if entry.short_classes]
    return Outcome(
        protocol="Low-shot VOC07 SVM (Goyal et al. 2019)",
        variant="published",
        scores=scores,
        headline="mean",
        num_train=int(train.usable.sum()),
        num_test=int(test.usable.sum()),
        num_classes=len(train_truth.class_names),
        deviations=[
            *size_and_pooling(workshop),
            *voc_parts(workshop.parts),
            *([f"some classes have too few images for k={', '.join(short)} and use all they have"] if short else []),
        ],
        details={
            "layers": {layer: asdict(result) for layer, result in found.items()},
            "draws": [
                {
                    "k": draw.shots,
                    "draw": draw.number,
                    "positives": [used[list(ids)].tolist() for ids in draw.positives],
                    "negatives": [used[list(ids)].tolist() for ids in draw.negatives],
                }
                for draw in draws
            ],
            "classes": train_truth.class_names,
            "ids_are_positions_in": f"the sorted names of {len(paths):,} images, manifest "
            + workshop.parts.train.source.manifest.fingerprint()[:16],
        },
        left_out=[*notes, *refusals(train, test), *without_positives(first.without_test_positives)],
        unfinished=workshop.place(),
    )


def lowshot_scores(layer: str, result: LowshotResult) -> list[Scores]:
    rows = []
    rules: tuple[tuple[Rule, float], ...] = (
        ("published", result.published_mean),
        ("honest", result.cross_validated_mean),
    )
    for rule, mean in rules:
        published = rule == "published"
        metrics, std = {"mean": mean}, {}
        for entry in result.shots:
            name = f"k={entry.shots}"
            metrics[name] = entry.published_mean if published else entry.cross_validated_mean
            std[name] = entry.published_std if published else entry.cross_validated_std
        rows.append(Scores(layer=layer, metrics=metrics, std=std, rule=rule))
    return rows


def knn(workshop: Workshop) -> Outcome:
    """A vote of the nearest training images, on the backbone's one vector per image."""
    train_labels, test_labels, names = parts_module.class_labels(workshop.parts)
    train, test = both_sides(workshop, [VECTOR], whole=False, max_dims=MAX_DIMS)
    try:
        found = knn_accuracy(
            train.tensor(VECTOR),
            torch.from_numpy(train_labels[train.usable]),
            test.tensor(VECTOR),
            torch.from_numpy(test_labels[test.usable]),
        )
    except ValueError as error:
        raise DataError(str(error)) from error
    headline = f"k={min(found, key=lambda k: abs(k - 20))}"
    few = max(KS) not in found
    return Outcome(
        protocol="k nearest neighbours (cosine, temperature 0.07)",
        variant="published",
        scores=[Scores(layer=VECTOR, metrics={f"k={k}": accuracy for k, accuracy in found.items()})],
        headline=headline,
        num_train=int(train.usable.sum()),
        num_test=int(test.usable.sum()),
        num_classes=len(names),
        deviations=[
            *([f"at most {max(found)} neighbours: there are no more training images"] if few else []),
            *(
                []
                if is_average_pooled(workshop.subject.backbone)
                else ["the backbone's own vector, not the average-pooled last layer"]
            ),
        ],
        left_out=refusals(train, test),
    )


def semi(workshop: Workshop) -> Outcome:
    """Fine-tuning with 1 % and with 10 % of the labels."""
    train, test, names = labelled_images(workshop.parts)
    options = workshop.options
    epochs = options.epochs or SEMI_EPOCHS
    found: dict[str, SemiResult] = {}
    for name, share in SHARES.items():
        found[name] = semi_supervised(
            workshop.subject.copy,
            train,
            test,
            share,
            seed=options.seed,
            device=workshop.device,
            workers=options.workers,
            store=workshop.place() / name.replace(" %", ""),
            key=workshop.subject.identity(),
            progress=workshop.progress,
            epochs=epochs,
        )
    published = {name: result.published.accuracy or 0.0 for name, result in found.items()}
    honest = {name: r.honest.accuracy for name, r in found.items() if r.honest and r.honest.accuracy is not None}
    scores = [Scores(layer=VECTOR, metrics=published, rule="published")]
    if honest:
        scores.append(Scores(layer=VECTOR, metrics=honest, rule="honest"))
    deviations = [] if epochs == SEMI_EPOCHS else [f"{epochs} epochs instead of {SEMI_EPOCHS}"]
    small = next(iter(found.values()))
    if len(small.ids) > round(SHARES["1 %"] * len(train.ids)):
        deviations.append(f"1 % is {len(small.ids)} of {len(train.ids):,} images: as many of every class, at least one")
    return Outcome(
        protocol="Semi-supervised fine-tuning, 1 % and 10 % of labels",
        variant="published",
        scores=scores,
        headline="10 %",
        num_train=len(train.ids),
        num_test=small.num_test,
        num_classes=len(names),
        deviations=deviations,
        details={name: asdict(result) | {"refused": None} for name, result in found.items()},
        left_out=list(dict.fromkeys(f"{path}: {why}" for result in found.values() for path, why in result.refused)),
        unfinished=workshop.place(),
    )


def clusters(labels: NDArray[np.int64], truth: NDArray[np.int64], num_clusters: int) -> Outcome:
    """Clusters against classes; images without one of both (-1) are left out and said."""
    both = (labels >= 0) & (truth >= 0)
    if not both.any():
        raise DataError("no image has both a cluster and a known class; give --data with labels of the run's images")
    classes = len(np.unique(truth[both]))
    metrics = {
        "NMI": agreement.nmi(labels, truth),
        "ARI": agreement.ari(labels, truth),
        "purity": agreement.purity(labels, truth),
    }
    notes = []
    if num_clusters == classes:
        metrics["Hungarian"] = agreement.hungarian_accuracy(labels, truth, num_classes=classes)
    else:
        notes.append(f"no Hungarian accuracy: {num_clusters:,} clusters, {classes} classes")
    left_out = []
    if (missing := int((truth < 0).sum())) > 0:
        left_out.append(f"{missing:,} of {len(truth):,} images have no known class and are left out")
    if (unseen := int((labels < 0).sum())) > 0:
        left_out.append(f"{unseen:,} of {len(truth):,} images belong to no cluster and are left out")
    return Outcome(
        protocol="Clusters against known classes",
        variant="published",
        scores=[Scores(layer="labels", metrics=metrics)],
        headline="NMI",
        num_train=len(labels),
        num_test=int(both.sum()),
        num_classes=classes,
        details={"clusters": num_clusters, "notes": notes},
        left_out=left_out,
    )


TASKS: dict[str, Callable[[Workshop], Outcome]] = {
    "linear": linear,
    "svm": svm,
    "lowshot": lowshot,
    "knn": knn,
    "semi": semi,
}


# --- Shared -----------------------------------------------------------------------------------------


def labelled_images(parts: Parts) -> tuple[LabelledImages, LabelledImages, list[str]]:
    train_labels, test_labels, names = parts_module.class_labels(parts)

    def of(part: Part, labels: NDArray[np.int64]) -> LabelledImages:
        return LabelledImages(part.source, part.ids, labels)

    return of(parts.train, train_labels), of(parts.test, test_labels), names


def size_and_pooling(workshop: Workshop) -> list[str]:
    """In what the features depart from the paper's."""
    backbone = workshop.subject.backbone
    deviations = []
    if backbone.image_size != 224:
        deviations.append(f"images of {backbone.image_size} px instead of 224")
    pools = pooling(backbone, backbone.image_size)
    if other := [name for name in workshop.stages() if not pools[name].published]:
        deviations.append(pools[other[0]].description)
    return deviations


def voc_parts(parts: Parts) -> list[str]:
    """In what the images depart from VOC07's."""
    manifest = parts.train.source.manifest
    if manifest.kind != "voc":
        return ["not VOC 2007"]
    if (parts.train.split, parts.test.split) != ("trainval", "test"):
        return [f"trained on {parts.train.split} and tested on {parts.test.split} instead of trainval and test"]
    return []


def without_positives(names: Sequence[str]) -> list[str]:
    return [f"class {name}: no positive test image" for name in names]


@torch.no_grad()
def is_average_pooled(backbone: Backbone) -> bool:
    """Whether the backbone's vector is the mean of its last map: not so for AlexNet's fc7 or a class token."""
    blank = backbone.blank_image()
    image = torch.rand(blank.shape, generator=torch.Generator().manual_seed(0)).to(blank)
    pooled = backbone.stages(image)[-1].mean(dim=(2, 3))
    vector = backbone(image)
    return pooled.shape == vector.shape and torch.allclose(pooled, vector, rtol=1e-3, atol=1e-5)


def check_memory(needed: int, what: str, remedy: str) -> None:
    """Refuse now what would end in the system's out-of-memory killer after an hour of features."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # another system, which does not say
        return
    if needed > max(free, total // 2):  # free counts nothing that the system could give up
        raise DataError(f"{what} would take {needed / 1e9:.0f} GB of memory and {free / 1e9:.0f} GB are free; {remedy}")
