"""Options that were not given are chosen from the data and the device, each with a reason that is printed."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from odcluster.clustering.balance import check_room
from odcluster.config import Config, changed, flat
from odcluster.data.order import num_steps
from odcluster.data.sources import Source
from odcluster.errors import DataError, ImageRefused, UserError
from odcluster.methods.odc import warm_epochs
from odcluster.models.backbones import fixed_size_step, usual_image_size
from odcluster.models.weights import describe_weights
from odcluster.ranks import local_ranks
from odcluster.recipes import recipe
from odcluster.training.devices import has_bfloat16

SMALL_IMAGE = 64
"""Images up to this side are used as they are; larger ones are photos."""
IMAGES_TO_SEE = 400_000
"""Without --epochs or --minutes, small data is seen until about this many images have passed."""
FROZEN_IMAGES = 150_000
"""The same where only the neck is trained."""
FEW_IMAGES = 50_000
"""Below this, a backbone with weights stays as it is."""
FEW_FOR_FINE = 20_000
"""Below this, fine clusters have 10 images each."""


LIGHT_PRETRAINED, PRETRAINED = "tf_efficientnet_lite0", "resnet50"
"""What `--weights timm` alone means on a CPU (0.4 GMACs: the one that docs/recipe.md measures) and elsewhere."""


class Choices:
    """A configuration that is being completed, and what was chosen for it: (option, value, reason)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.made: list[tuple[str, Any, str]] = []

    def choose(self, option: str, value: Any, reason: str) -> None:
        self.set(option, value)
        self.tell(option, value, reason)

    def tell(self, option: str, value: Any, reason: str) -> None:
        """What stays as it is, but should be known of."""
        self.made.append((option, value, reason))

    def set(self, option: str, value: Any) -> None:
        """A choice that nobody needs to be told of."""
        self.config = changed(self.config, **{option: value})


def resolve(config: Config, source: Source, device: torch.device) -> tuple[Config, list[tuple[str, Any, str]]]:
    """The complete configuration, and (option, value, reason) of everything that was chosen here."""
    if len(source) < 2:
        raise UserError("there is only one image; at least two are needed to learn from")
    choices = Choices(config)
    resolve_start(choices, len(source), device)
    resolve_sizes(choices, source, device)
    resolve_clusters(choices, source)
    resolve_optimiser(choices, len(source))
    resolve_length(choices, len(source), device)
    resolve_machine(choices, source, device)
    return choices.config, choices.made


def resolve_start(choices: Choices, count: int, device: torch.device) -> None:
    """With weights: whose backbone, and whether it is trained."""
    config = choices.config
    if config.backbone is None and config.weights == "timm":
        light = device.type == "cpu"
        reason = "timm has weights for it" + (", and it is quick on a CPU" if light else "")
        choices.choose("backbone", LIGHT_PRETRAINED if light else PRETRAINED, reason)
    elif config.backbone is None and config.weights and (described := describe_weights(config.weights)):
        choices.choose("backbone", described["architecture"], "that of the weights")
    if config.fine_tuning.frozen and (config.weights is None or config.method != "odc"):
        raise UserError("--frozen True is for ODC from weights that know something: give --weights, or leave it out")
    if config.fine_tuning.frozen is None:
        if config.weights and config.method == "odc":
            choices.choose("frozen", *choose_frozen(config, count, device))
        else:
            choices.set("frozen", False)


def resolve_sizes(choices: Choices, source: Source, device: torch.device) -> None:
    """Image size, a backbone for it, and the crops it is trained on."""
    config = choices.config
    step = fixed_size_step(config.backbone) if config.backbone is not None else None
    if config.image_size is None:
        size, reason = choose_image_size(source, device)
        if size > SMALL_IMAGE and config.method == "odc" and config.weights is None:
            choices.tell("weights", "none", "photos profit much from some: --weights FILE, or timm to download them")
        if size > SMALL_IMAGE and device.type == "cpu" and not (config.backbone or config.weights):
            size, reason = SMALL_IMAGE, "photos on a CPU: a small network that takes many steps learns most"
        if config.fine_tuning.frozen and (expected := expected_size(config)) > size:
            size, reason = expected, "what the weights were trained at: features are best there"
        elif step is not None:
            size, reason = max(step, size // step * step), f"{reason}; a multiple of {step} for {config.backbone}"
        choices.choose("image_size", size, reason)
    size = choices.config.image_size or 0
    small = size <= SMALL_IMAGE
    if config.backbone is None:
        reason = f"images of {size} px" + ("" if small else f" on {device.type}")
        name = "smallconv" if small else "resnet50" if device.type == "cuda" else "resnet18"
        choices.choose("backbone", name, reason)
    if config.augmentation.crop_size is None:
        whole = step is not None or config.method in ("jigsaw", "colorization")  # no pixels to spare
        grid = 4 if small else 32
        crop = size if whole or recipe(config.recipe).image_size is not None else max(16, size * 3 // 4 // grid * grid)
        if crop < size:
            choices.choose("crop_size", crop, "training on smaller crops is faster")
        else:
            choices.set("crop_size", size)


def resolve_clusters(choices: Choices, source: Source) -> None:
    """How many, when one is small, and how many fine ones come before."""
    method, count = choices.config.method, len(source)
    if method in ("odc", "deepcluster") and choices.config.clusters is None:
        choices.choose("clusters", *choose_clusters(choices.config, count))
    if method == "labels":
        choices.choose("clusters", *count_classes(source))
    if method != "odc":
        return
    clusters = choices.config.clusters
    assert clusters is not None
    if choices.config.clustering.small_cluster is None:
        average = count / clusters
        reason = f"a quarter of the {average:.0f} images per cluster, at most 20"
        choices.choose("small_cluster", min(20, int(average / 4)), reason)
    assert choices.config.clustering.small_cluster is not None
    check_room(count, clusters, 0 if choices.config.clustering.one_pass else choices.config.clustering.small_cluster)
    warm_start = choices.config.warm_start
    if warm_start.fine_share > 0 and warm_start.fine_clusters is None:
        fine, reason = choose_fine_clusters(choices.config, count)
        if fine < 2 * clusters:  # not finer than the final ones
            choices.set("fine_share", 0.0)
        else:
            choices.choose("fine_clusters", fine, reason)
    if choices.config.warm_start.fine_share > 0 and choices.config.head.classifier == "linear":
        raise UserError("fine clusters need --classifier prototypes: a linear classifier has a fixed number")


def resolve_optimiser(choices: Choices, count: int) -> None:
    """Dimension of the features, learning rate, batch size."""
    config = choices.config
    if config.dim is None:
        choices.choose("dim", 256, "as in the paper")
    if config.lr is None and config.weights and config.method == "odc":
        if config.fine_tuning.frozen:
            choices.choose("lr", 0.02, "for a neck on frozen features")
        else:
            choices.choose("lr", 0.002, "low: the weights mean something")
    elif config.lr is None:
        choices.choose("lr", 0.05, "usual for SGD at this batch size")
    if config.batch_size is None:
        reason = f"at most 128, and at least 8 steps per pass over {count} images"
        choices.choose("batch_size", max(2, min(128, count // 8)), reason)
    elif config.batch_size > count:
        choices.choose("batch_size", count, "there are no more images")


def resolve_length(choices: Choices, count: int, device: torch.device) -> None:
    """Epochs, or minutes that they are chosen by."""
    config = choices.config
    assert config.batch_size is not None
    assert config.image_size is not None
    steps = num_steps(count, config.batch_size)
    if config.max_steps is not None and (config.epochs is None or config.max_steps <= config.epochs * steps):
        choices.choose("epochs", -(-config.max_steps // steps), f"{config.max_steps} steps at {steps} steps per epoch")
    elif config.epochs is None and config.fine_tuning.frozen:
        reason = "features are computed once; training on them takes little time"
        if config.minutes is not None:
            reason += ", so --minutes is not used: give --epochs"
            choices.set("minutes", None)
        choices.choose("epochs", max(10, min(60, FROZEN_IMAGES // count)), reason)
    elif config.epochs is None and config.minutes is None and config.image_size >= SMALL_IMAGE and device.type == "cpu":
        choices.choose("minutes", 30.0, "photos on a CPU take long; give --minutes or --epochs for more")
    elif config.epochs is None and config.minutes is None:
        epochs = max(10, min(200, IMAGES_TO_SEE // count))
        choices.choose("epochs", epochs, f"about {IMAGES_TO_SEE:,} images in all, between 10 and 200 epochs")


def resolve_machine(choices: Choices, source: Source, device: torch.device) -> None:
    """Processes, precision and device."""
    if choices.config.workers is None:
        choices.choose("workers", *choose_workers(source, device))
    if choices.config.running.precision == "auto":
        native = has_bfloat16(device)
        reason = f"this {device.type} {'computes' if native else 'does not compute'} bfloat16 natively"
        choices.choose("precision", "bfloat16" if native else "float32", reason)
    if choices.config.device == "auto":
        choices.choose("device", device.type, "the best there is here")


def choose_frozen(config: Config, count: int, device: torch.device) -> tuple[bool, str]:
    """Whether the backbone stays as it is: wherever weights bring good features and training them is not worth it."""
    if config.fine_tuning.freeze_stages or config.fine_tuning.layer_decay != 1:
        return False, "--freeze-stages and --layer-decay say how the backbone is trained"
    if device.type == "cpu":
        return True, "on a CPU: the features of the weights are computed once, ODC trains the neck on them"
    if count < FEW_IMAGES:
        return True, f"{count:,} images are few to train a backbone that knows something"
    return False, f"{count:,} images on {device.type}: all of the backbone is trained"


def choose_fine_clusters(config: Config, count: int) -> tuple[int, str]:
    """More cost time and taught no more; of few images they are smaller, so that they are finer than the final ones."""
    share = 50 if config.fine_tuning.frozen or count >= FEW_FOR_FINE else 10
    return max(1, min(10_000, count // share)), f"one per {share} images, at most 10,000, to learn features with"


def expected_size(config: Config) -> int:
    """The side at which the weights were trained, 0 where it is not known."""
    assert config.weights is not None
    if described := describe_weights(config.weights):
        return int(described["image_size"])
    return usual_image_size(config.backbone) if config.backbone is not None else 0


def choose_image_size(source: Source, device: torch.device) -> tuple[int, str]:
    """From the shorter sides of a sample of the images."""
    sides = []
    refusals = []
    for i in np.linspace(0, len(source) - 1, min(32, len(source))).astype(int):
        try:
            sides.append(min(source.image(int(i)).shape[:2]))
        except ImageRefused as error:
            refusals.append(str(error))
    if not sides:
        raise DataError(f"none of the first images looked at can be read (the first: {refusals[0]}); are these images?")
    side = int(np.median(sides))
    if side <= SMALL_IMAGE:
        return max(16, -(-side // 4) * 4), f"the images' shorter side is {side} px"
    if device.type == "cuda":
        return 224, f"photos (shorter side {side} px) on a GPU"
    return 128, f"photos (shorter side {side} px); 128 keeps training on a CPU bearable"


def choose_clusters(config: Config, count: int) -> tuple[int, str]:
    if config.method == "deepcluster":  # its classifier starts anew every epoch and has no time for many
        return max(1, min(10_000, count // 100)), f"one per 100 of {count} images, at most 10,000"
    if config.warm_start.fine_share > 0:  # features have been learned with many: these are for people
        return max(1, round(count**0.5)), f"the square root of {count}: few enough to look at"
    return max(1, min(10_000, count // 10)), f"one per 10 of {count} images, at most 10,000"


def count_classes(source: Source) -> tuple[int, str]:
    """As many outputs as classes, for learning with labels."""
    labels = source.manifest.labels
    if labels is None or labels.max() < 1:
        raise DataError("--method labels needs images of two or more known classes: a folder per class, say")
    return int(labels.max()) + 1, "the classes of the images"


def choose_workers(source: Source, device: torch.device) -> tuple[int, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cpu":
        return 1, "one process prepares images while the network trains"
    return max(1, min(8, cores // local_ranks() - 1)), f"{cores} cores" + (
        " for all ranks" if local_ranks() > 1 else ""
    )


EFFECTIVE: dict[str, tuple[str, ...]] = {
    "clusters": ("odc", "deepcluster", "labels"),
    "dim": ("odc", "deepcluster"),
    "hidden": ("odc", "jigsaw"),
    "dropout": ("odc",),
    "final_relu": ("odc",),
    "neck_norm": ("odc",),
    "classifier": ("odc",),
    "temperature": ("odc",),
    "memory_momentum": ("odc",),
    "update_interval": ("odc",),
    "small_cluster": ("odc",),
    "kmeans_iterations": ("odc", "deepcluster"),
    "calibration_batches": ("odc",),
    "kmeans_restarts": ("odc",),
    "neighbours": ("odc",),
    "final_pass": ("odc",),
    "instance_weight": ("odc",),
    "instance_temperature": ("odc",),
    "rotation_weight": ("odc",),
    "fine_share": ("odc",),
    "fine_clusters": ("odc",),
    "warm_share": ("odc",),
    "warm_lr": ("odc",),
    "warm_weight_decay": ("odc",),
    "sobel": ("deepcluster",),
    "balance": ("deepcluster",),
    "permutations": ("jigsaw",),
}
"""Options that only some methods look at."""


def without_effect(config: Config) -> list[str]:
    """Sentences about options that differ from the recipe's but change nothing in this run."""
    given, usual = flat(config), flat(recipe(config.recipe))
    sentences = [
        f"--{name.replace('_', '-')} has no effect with --method {config.method}"
        for name, methods in EFFECTIVE.items()
        if config.method not in methods and given[name] != usual[name]
    ]
    idle = {
        "temperature": config.head.classifier == "linear",
        "classifier_momentum": config.method == "odc" and config.head.classifier == "prototypes",
        "warm_lr": config.warm_start.warm_share == 0,
        "warm_weight_decay": config.warm_start.warm_share == 0,
        "sampling": config.method == "deepcluster" and config.deepcluster.balance == "sampling",
        **dict.fromkeys(("brightness", "contrast", "saturation", "hue"), config.augmentation.jitter == 0),
    }
    sentences += [
        f"--{name.replace('_', '-')} has no effect with the other options of this run"
        for name, is_idle in idle.items()
        if is_idle and given[name] != usual[name] and config.method in EFFECTIVE.get(name, (config.method,))
    ]
    if config.weights is None and config.fine_tuning != recipe(config.recipe).fine_tuning:
        sentences.append("--freeze-stages, --layer-decay and --min-matched are for fine-tuning: give --weights too")
    return sentences


def describe(chosen: list[tuple[str, Any, str]]) -> list[str]:
    """Lines for people: what was chosen and why."""
    return [f"  {option.replace('_', ' '):14} {value}  ({reason})" for option, value, reason in chosen]


def describe_warm_start(config: Config) -> list[str]:
    """A line about the rotation epochs, if there are any."""
    if config.method != "odc" or not (warm := warm_epochs(config)):
        return []
    return [f"  {'warm start':14} {warm} of {config.epochs} epochs of rotation prediction before the first clusters"]
