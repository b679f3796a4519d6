"""The tasks: from a backbone and labelled images to scores, by the protocol of each.

Every task returns an `Outcome`, which says what was done, in what it departs from the protocol it names, and what was
left out. Opening weights and data, writing results and showing them is left to `odcluster/judge.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from odcluster.clustering import agreement
from odcluster.errors import DataError
from odcluster.evaluation.features import MAX_DIMS, VECTOR, pooling
from odcluster.evaluation.knn import KS, knn_accuracy
from odcluster.evaluation.linear import linear_probe
from odcluster.evaluation.linear_sgd import LabelledImages, SgdSettings, published_linear_probe
from odcluster.evaluation.parts import Part, Parts, class_labels
from odcluster.evaluation.results import Scores
from odcluster.evaluation.semi import EPOCHS as SEMI_EPOCHS
from odcluster.evaluation.semi import SemiResult, semi_supervised
from odcluster.evaluation.svm import read_stored, write_stored
from odcluster.evaluation.svm_tasks import lowshot, svm
from odcluster.evaluation.workshop import Outcome, Workshop, both_sides, check_memory, refusals, size_and_pooling
from odcluster.models.backbones import Backbone

SHARES = {"1 %": 0.01, "10 %": 0.1}
FAST_NUMBERS = 2 * 10**8
"""Numbers per layer that the fast linear probe may hold: 5,011 images of 9,600 dimensions, or 50,000 of 4,000."""
FAST_PRODUCTS = 4 * 10**9
"""Products of a look at all training images: 40,000 of ten classes and 9,600 dimensions, or 15,000 of 100 and 2,600."""


def linear(workshop: Workshop) -> Outcome:
    return linear_published(workshop) if workshop.options.variant == "published" else linear_fast(workshop)


def linear_fast(workshop: Workshop) -> Outcome:
    """Logistic regression on cached features, layer by layer."""
    train_labels, test_labels, names = class_labels(workshop.parts)
    layers = workshop.stages()
    count = len(train_labels) + len(test_labels)
    max_dims = fast_dims(len(train_labels), len(test_labels), len(names))
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


def fast_dims(num_train: int, num_test: int, num_classes: int) -> int:
    """Dimensions up to which the fast linear probe stays fast and fits into memory."""
    by_memory = FAST_NUMBERS // (num_train + num_test)
    return max(256, min(MAX_DIMS, by_memory, FAST_PRODUCTS // (num_train * num_classes)))


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


def knn(workshop: Workshop) -> Outcome:
    """A vote of the nearest training images, on the backbone's one vector per image."""
    train_labels, test_labels, names = class_labels(workshop.parts)
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


def labelled_images(parts: Parts) -> tuple[LabelledImages, LabelledImages, list[str]]:
    train_labels, test_labels, names = class_labels(parts)

    def of(part: Part, labels: NDArray[np.int64]) -> LabelledImages:
        return LabelledImages(part.source, part.ids, labels)

    return of(parts.train, train_labels), of(parts.test, test_labels), names


@torch.no_grad()
def is_average_pooled(backbone: Backbone) -> bool:
    """Whether the backbone's vector is the mean of its last map: not so for AlexNet's fc7 or a class token."""
    blank = backbone.blank_image()
    image = torch.rand(blank.shape, generator=torch.Generator().manual_seed(0)).to(blank)
    pooled = backbone.stages(image)[-1].mean(dim=(2, 3))
    vector = backbone(image)
    return pooled.shape == vector.shape and torch.allclose(pooled, vector, rtol=1e-3, atol=1e-5)
