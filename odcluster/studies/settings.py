"""The settings that studies have in common, at both scales.

Small scale: `smallconv` on 24 px crops of CIFAR-10 or 48 px crops of Tiny-ImageNet. What the paper says is kept where
it can be: one cluster per 100 images (ImageNet: 128), small clusters of at most 20, m = 0.5, k = 10, one view, SGD, the
rate constant and a tenth of it for the last eleventh. Where the paper's settings learn nothing in minutes on so few
images, and only there, they are those of `odc_small`'s first form: the centroids memory as the classifier, no dropout
and no ReLU at the end of the neck, settled batch-norm statistics before the first clusters, milder colours, a low rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from odcluster.config import Config, changed
from odcluster.data.randomness import Purpose, permutation
from odcluster.errors import DataError
from odcluster.recipes import recipe
from odcluster.studies.plan import DataName, Ids, Images, Judgement
from odcluster.verbs import Task

if TYPE_CHECKING:
    from odcluster.data.sources import Manifest

SMALL_IMAGES = 10_000
SMALL_EPOCHS = 20
MILD_COLOURS = {"saturation": 0.4, "hue": 0.1, "jitter": 0.8}
SMALL: dict[str, Any] = {
    "backbone": "smallconv",
    "batch_size": 128,
    "weight_decay": 1e-4,
    "sampling": "permutation",
    "crop_scale": (0.2, 1.0),
    "num_views": 1,
    "dim": 128,
    **MILD_COLOURS,
}
SIZES = {"cifar10": {"image_size": 32, "crop_size": 24}, "tiny-imagenet": {"image_size": 64, "crop_size": 48}}


def small_odc(of: DataName, **options: Any) -> Config:
    """The paper's ODC at small scale."""
    head = {"dropout": 0.0, "final_relu": False, "neck_norm": "standard", "classifier": "prototypes"}
    config = changed(recipe("odc_resnet50_imagenet"), **SMALL, **SIZES[of], **head, calibration_batches=20)
    return changed(config, **{"lr": 0.005, "clusters": 100, **options})


def small_deepcluster(of: DataName, **options: Any) -> Config:
    """The paper's DeepCluster at small scale: the same views, network, clusters and schedule, a higher rate."""
    config = changed(recipe("deepcluster_small"), **SMALL, **SIZES[of], schedule="step")
    return changed(config, **{"lr": 0.05, "clusters": 100, **options})


def chosen(of: DataName, count: int, *, seed: int = 0) -> Images:
    """So many images of a data set, drawn uniformly."""
    return Images(of, count, f"{of}-{count}", partial(draw_uniformly, count=count, seed=seed))


def draw_uniformly(manifest: Manifest, *, count: int, seed: int) -> Ids:
    """`count` of all images, or all where there are not more."""
    return np.sort(permutation(seed, 0, len(manifest), Purpose.SUBSET)[:count])


def draw_classes(manifest: Manifest, *, classes: int, per_class: int, seed: int) -> Ids:
    """`per_class` images of each of so many classes, both drawn."""
    sizes = np.full(classes, per_class)
    return draw_sizes(manifest, sizes, seed)


def draw_long_tail(manifest: Manifest, *, classes: int, count: int, ratio: float, seed: int) -> Ids:
    """`count` images of so many classes whose sizes fall geometrically; the largest is `ratio` times the smallest."""
    return draw_sizes(manifest, long_tail_sizes(classes, count, ratio), seed)


def long_tail_sizes(classes: int, count: int, ratio: float) -> Ids:
    """Sizes that sum to `count`, largest first, the first `ratio` times the last.

    A little flatter at the head than a geometric fall: with that, 100,000 images of 300 classes at ratio 64 would need
    a class of 1,400, and ImageNet's have 1,300.
    """
    shape = ratio ** -(np.linspace(0, 1, classes) ** 1.2)
    sizes = np.floor(count * shape / shape.sum()).astype(np.int64)
    sizes[: count - sizes.sum()] += 1  # fewer than one per class were lost by rounding
    return sizes


def draw_sizes(manifest: Manifest, sizes: Ids, seed: int) -> Ids:
    """So many images of each class; which class is the largest is drawn, and so are the images."""
    labels = manifest.labels if manifest.labels is not None else np.full(len(manifest), -1)
    have = np.bincount(labels[labels >= 0], minlength=1)
    order = permutation(seed, 1, len(have), Purpose.SUBSET)
    order = order[have[order] >= sizes.max()][: len(sizes)]
    if len(order) < len(sizes):
        raise DataError(
            f"{len(sizes)} classes of {int(sizes.max()):,} images each are needed, and {manifest.root} has "
            f"{len(order)}: give the whole data set"
        )
    draws = permutation(seed, 2, len(manifest), Purpose.SUBSET)
    ranked = labels[draws]  # classes of the images in drawn order
    ids = [draws[np.flatnonzero(ranked == c)[:n]] for c, n in zip(order.tolist(), sizes.tolist(), strict=True)]
    return np.sort(np.concatenate(ids))


def judge_features(
    subject: str,
    images: Images,
    tasks: Sequence[Task],
    *,
    untrained: bool = False,
    per_task: Mapping[Task, Mapping[str, Any]] | None = None,
    **options: Any,
) -> list[Judgement]:
    """A judgement per task; an untrained subject is a backbone with the random weights of the seed."""
    name = f"untrained-{subject}-s{options.get('seed', 0)}" if untrained else subject
    judgements = []
    for task in tasks:
        chosen_options = {**options, **(per_task or {}).get(task, {})}
        layers = "".join(f"-{layer}" for layer in chosen_options.get("layers", ()))
        full_name = f"{name}-{task}-{images.of}{layers}"
        judgements.append(Judgement(full_name, subject, task, images, untrained, chosen_options))
    return judgements


def judge_cifar10(subject: str, *, layers: Sequence[str] = ("conv5",), **options: Any) -> list[Judgement]:
    """A linear probe and nearest neighbours with 10,000 labelled images of CIFAR-10."""
    return judge_features(
        subject,
        chosen("cifar10", SMALL_IMAGES),
        ("linear", "knn"),
        per_task={"linear": {"layers": tuple(layers)}},
        image_size=32,
        **options,
    )


def judge_voc(subject: str, *, tasks: Sequence[Task] = ("svm",), **options: Any) -> list[Judgement]:
    """VOC07 SVMs and low-shot SVMs; `split` train/val where the official test images are not at hand."""
    return judge_features(subject, Images("voc", 5_011), tasks, **options)
