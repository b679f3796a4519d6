"""Every option of training once: the command line, the Python functions and config.json are made from these.

The options of the other verbs are in verbs.py; config.json itself is written and read by config_file.py.

A field that is None means "choose for me": `training.resolve` fills it in from the data and the device, prints the
choice with its reason, and config.json then holds the whole answer, so that resuming needs nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from odcluster.errors import UserError

Method = Literal["odc", "deepcluster", "rotation", "jigsaw", "colorization", "labels"]


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How an image is altered before the network sees it. The defaults are the paper's."""

    num_views: int = 1
    """Views of each image per step; the memory receives their average."""
    crop_size: int | None = None
    """Side in pixels of training crops; smaller than the image size is faster. Not given: chosen by the recipe."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image's area that a crop covers."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of a crop."""
    flip: float = 0.5
    """Probability of a left-right flip; 0 where left and right differ in meaning (digits, text)."""
    rotation: float = 2.0
    """Largest rotation in degrees, either way."""
    brightness: float = 0.4
    """Brightness factor is drawn from 1 +- this."""
    contrast: float = 0.4
    """Contrast factor is drawn from 1 +- this."""
    saturation: float = 1.0
    """Saturation factor is drawn from 1 +- this."""
    hue: float = 0.5
    """Hue shift is drawn from +- this (0.5 is half the colour wheel)."""
    jitter: float = 1.0
    """Probability that brightness, contrast, saturation and hue are altered at all."""
    grey: float = 0.2
    """Probability of conversion to grey."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Neck and classifier on top of the backbone; removed after training. The defaults are the paper's."""

    hidden: int = 512
    """Width of the neck's hidden layer."""
    dropout: float = 0.5
    """Dropout inside the neck."""
    final_relu: bool = True
    """Whether the neck ends with a ReLU."""
    neck_norm: Literal["paper", "standard", "none"] = "paper"
    """Batch norm of the neck. paper: no affine part, momentum 0.001 (authors' code). standard: affine, 0.1. none."""
    classifier: Literal["linear", "prototypes"] = "linear"
    """linear: a trained layer, as in the paper. prototypes: cosine to the centroids memory, nothing to train."""
    temperature: float = 0.1
    """Divides the cosine of the prototypes classifier."""


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """The two memories. The defaults are the paper's."""

    memory_momentum: float = 0.5
    """m: weight of the new feature when a row of the samples memory is updated."""
    update_interval: int = 10
    """k: recorded centroids are refreshed every k iterations."""
    small_cluster: int | None = 20
    """A cluster with at most this many members is small: it is dissolved and the largest cluster is split."""
    one_pass: bool = False
    """Handle each small cluster once per iteration, and leave what is small after that; not until none is small. So
    --small-cluster may be any size, as the paper's sweep has it; clusters may then stay small."""
    kmeans_iterations: int = 20
    """Lloyd iterations of the initial clustering."""
    kmeans_restarts: int = 1
    """The best of this many initial clusterings is taken."""
    calibration_batches: int = 0
    """Training-mode batches that settle the batch-norm statistics before the initial clustering."""
    neighbours: int = 0
    """Learn the label of one of this many nearest neighbours, drawn anew each time, instead of the own; 0: the own.
    Only with --frozen, where it is known from the start who is near whom."""
    final_pass: bool = False
    """At the end, label every image by its evaluation view, so that `odcluster assign` gives it the same cluster."""


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A pretext task that runs before the first clusters are made, so that they mean something."""

    warm_share: float = 0.0
    """Share of all epochs spent on rotation prediction before clustering begins; 0 is none."""
    warm_lr: float = 0.015
    """Learning rate of that phase (cosine to 0)."""
    warm_weight_decay: float = 5e-4
    """Weight decay of that phase."""
    fine_share: float = 0.0
    """Share of all epochs in which features are learned with many fine clusters, before the final ones are made; 0 is
    none."""
    fine_clusters: int | None = None
    """How many fine clusters."""


@dataclass(frozen=True, kw_only=True)
class Companions:
    """Losses beside the clusters', for data that is seen few times; all off in the paper. Only for --method odc."""

    instance_weight: float = 0.0
    """Weight of telling images apart: a view must be nearer to another view of its image than to the other images of
    the batch. Needs two views."""
    instance_temperature: float = 0.2
    """Divides the cosines of that loss."""
    rotation_weight: float = 0.0
    """Weight of predicting quarter turns of one more view of each image, while clustering."""


@dataclass(frozen=True, kw_only=True)
class DeepClusterOptions:
    """Only for --method deepcluster."""

    sobel: bool = True
    """The network sees the two Sobel gradients of the grey image instead of colours, as published."""
    balance: Literal["sampling", "weights"] = "sampling"
    """sampling: each cluster is drawn equally often, as published. weights: the loss is weighted by 1/sqrt(size)."""


@dataclass(frozen=True, kw_only=True)
class JigsawOptions:
    """Only for --method jigsaw."""

    permutations: int = 100
    """Number of tile orders to tell apart."""


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Only with --weights: how much of what the weights know may change."""

    freeze_stages: int = 0
    """The first n stages of the backbone are not trained."""
    layer_decay: float = 1.0
    """Each stage before the last learns slower by this factor (0.7, say); 1 trains all alike."""
    frozen: bool | None = None
    """Leave the backbone as it is and train the neck alone, on features that are computed once: minutes instead of
    hours."""
    cached_views: int = 4
    """With --frozen, how many views of every image are computed, besides the image itself."""
    min_matched: float = 0.9
    """Refuse weights in which less than this share of the backbone's tensors is found."""


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """The optimiser, its schedule, and how the images of a step are drawn."""

    algorithm: Literal["sgd", "adamw", "muon"] = "sgd"
    """sgd: with momentum, as in the paper. adamw: learns faster in few steps. muon: faster still."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    classifier_momentum: float = 0.0
    """Momentum of the linear classifier: none in the authors' code."""
    weight_decay: float = 1e-5
    """Weight decay."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """step: constant, then times 0.1 for the last eleventh (the paper's 400 + 40 epochs). cosine: to 0."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises linearly from 0."""
    sampling: Literal["permutation", "replacement"] = "replacement"
    """permutation: each image once per epoch. replacement: drawn anew for every slot, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """How the run behaves on this machine; only the precision changes numbers."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 autocast where the device computes it natively."""
    compile: bool = False
    """Compile the backbone with torch.compile."""
    cache_gb: float = 2.0
    """Images that are small enough are kept decoded in memory, up to this many GB."""
    checkpoint_minutes: float = 5.0
    """A checkpoint is written about this often, and at the end."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept (at least 2)."""
    log_interval: int = 10
    """Steps between two lines of metrics.jsonl."""
    max_refused: float = 0.01
    """Share of unreadable images above which the run stops."""
    deterministic: bool = False
    """On a GPU, use only deterministic kernels (on a CPU they always are)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    data: str = ""
    """The images: a folder, a list (.txt, .csv), arrays (.npy, .npz), CIFAR-10's files or a VOC folder."""
    method: Method = "odc"
    """What is learned: odc (Online Deep Clustering), deepcluster, or a pretext task: rotation, jigsaw, colorization.
    labels: the images' known classes, only to see what features learned without them are measured against."""
    recipe: str = "odc_small"
    """Named set of defaults that all other options start from, METHOD_small if not given; see `odcluster info`."""
    backbone: str | None = None
    """`smallconv`, the paper's `alexnet`, or any timm name (resnet50, vit_small_patch16_224, ...)."""
    weights: str | None = None
    """Start from a run directory, a .safetensors or .pth file, or `timm` / `timm:TAG` (downloads), not at random."""
    clusters: int | None = None
    """C, the number of clusters."""
    epochs: int | None = None
    """Passes over the images."""
    max_steps: int | None = None
    """Stop after this many steps, whatever the epochs."""
    minutes: float | None = None
    """Instead of epochs: measure the speed for a few steps, then choose the epochs that fit."""
    batch_size: int | None = None
    """Images per step."""
    image_size: int | None = None
    """Side in pixels of the square the network sees."""
    lr: float | None = None
    """Learning rate."""
    seed: int = 0
    """Every random choice follows from this."""
    workers: int | None = None
    """Processes that read and augment images; 0 reads in the main process. Never changes the result."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto takes the best there is."""
    dim: int | None = None
    """D, the dimension of the features that are clustered."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    head: Head = field(default_factory=Head)
    clustering: Clustering = field(default_factory=Clustering)
    warm_start: WarmStart = field(default_factory=WarmStart)
    companions: Companions = field(default_factory=Companions)
    deepcluster: DeepClusterOptions = field(default_factory=DeepClusterOptions)
    jigsaw: JigsawOptions = field(default_factory=JigsawOptions)
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    optimiser: Optimiser = field(default_factory=Optimiser)
    running: Running = field(default_factory=Running)

    def __post_init__(self) -> None:
        values = dataclasses.asdict(self)
        for group in GROUPS:
            values |= values.pop(group)
        for name, (low, high) in BOUNDS.items():
            for value in values[name] if isinstance(values[name], tuple) else (values[name],):
                if value is not None and not low <= value <= high:
                    raise UserError(f"--{name.replace('_', '-')} must be {_range(low, high)}, not {value}")
        for name in ("crop_scale", "crop_ratio"):
            if values[name][0] > values[name][1]:
                raise UserError(f"--{name.replace('_', '-')} takes the smallest, then the largest")
        if self.minutes is not None and (self.epochs is not None or self.max_steps is not None):
            raise UserError("--minutes chooses the epochs: give either --minutes or --epochs / --max-steps")


LEAST = 1e-9  # stands for "above 0"
BOUNDS: dict[str, tuple[float, float]] = {
    "clusters": (1, math.inf),
    "epochs": (1, 1_000_000),
    "max_steps": (1, math.inf),
    "minutes": (LEAST, 1e6),
    "batch_size": (2, math.inf),
    "image_size": (8, 4096),
    "lr": (LEAST, 1e6),
    "workers": (0, 1024),
    "dim": (1, math.inf),
    "num_views": (1, 100),
    "crop_size": (8, 4096),
    "crop_scale": (LEAST, 1),
    "crop_ratio": (LEAST, 100),
    "flip": (0, 1),
    "rotation": (0, 180),
    "brightness": (0, 10),
    "contrast": (0, 10),
    "saturation": (0, 10),
    "hue": (0, 0.5),
    "jitter": (0, 1),
    "grey": (0, 1),
    "hidden": (1, math.inf),
    "dropout": (0, 0.99),
    "temperature": (LEAST, math.inf),
    "memory_momentum": (LEAST, 1),
    "update_interval": (1, math.inf),
    "small_cluster": (0, math.inf),
    "kmeans_iterations": (1, math.inf),
    "kmeans_restarts": (1, 1000),
    "calibration_batches": (0, math.inf),
    "neighbours": (0, 1000),
    "instance_weight": (0, 1000),
    "instance_temperature": (LEAST, math.inf),
    "rotation_weight": (0, 1000),
    "fine_share": (0, 1),
    "fine_clusters": (1, math.inf),
    "cached_views": (1, 100),
    "warm_share": (0, 1),
    "warm_lr": (LEAST, 1e6),
    "warm_weight_decay": (0, 1),
    "permutations": (2, 10_000),
    "freeze_stages": (0, math.inf),
    "layer_decay": (LEAST, 1),
    "min_matched": (0, 1),
    "sgd_momentum": (0, 0.9999),
    "classifier_momentum": (0, 0.9999),
    "weight_decay": (0, 1),
    "warmup_epochs": (0, math.inf),
    "cache_gb": (0, 1e6),
    "checkpoint_minutes": (0, 1e6),
    "keep_checkpoints": (2, math.inf),
    "log_interval": (1, math.inf),
    "max_refused": (0, 1),
}
"""Smallest and largest value that makes sense, per option."""


def _range(low: float, high: float) -> str:
    if low == LEAST:
        return "above 0" if high == math.inf else f"above 0 and at most {high:g}"
    return f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"


def changed(config: Config, **values: Any) -> Config:
    """A copy with some options changed; options of a group are given by their own name (they are all distinct)."""
    top: dict[str, Any] = {}
    groups = {name: getattr(config, name) for name in GROUPS}
    for name, value in values.items():
        owner = next((g for g, cls in GROUPS.items() if name in typing.get_type_hints(cls)), None)
        kinds = typing.get_type_hints(Config if owner is None else GROUPS[owner])
        if name in GROUPS or name not in kinds:
            raise UserError(f"there is no option {name!r}{did_you_mean(name)}")
        value = checked(_plain(value), kinds[name], f"the option {name}")
        if owner is None:
            top[name] = value
        else:
            groups[owner] = dataclasses.replace(groups[owner], **{name: value})
    return dataclasses.replace(config, **groups, **top)


def _plain(value: Any) -> Any:
    """numpy numbers as Python's, paths as text, tuples as lists: what a JSON file could hold."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value


GROUPS: dict[str, Any] = {
    "augmentation": Augmentation,
    "head": Head,
    "clustering": Clustering,
    "warm_start": WarmStart,
    "companions": Companions,
    "deepcluster": DeepClusterOptions,
    "jigsaw": JigsawOptions,
    "fine_tuning": FineTuning,
    "optimiser": Optimiser,
    "running": Running,
}


def flat(config: Config) -> dict[str, Any]:
    """All options by name, those of the groups included."""
    values: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        values |= value if isinstance(value, dict) else {name: value}
    return values


def option_names() -> list[str]:
    """All option names, those of the groups included."""
    own = [f.name for f in dataclasses.fields(Config) if f.name not in GROUPS]
    return own + [f.name for cls in GROUPS.values() for f in dataclasses.fields(cls)]


def did_you_mean(name: str) -> str:
    """`; did you mean 'x'?` for the nearest option, or nothing."""
    import difflib

    near = difflib.get_close_matches(name, option_names(), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def checked(value: Any, expected: Any, where: str) -> Any:
    """The value if it is of the annotated type (JSON lists become tuples, whole numbers pass as floats)."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, list) and len(value) == len(arguments):
            return tuple(checked(part, kind, where) for part, kind in zip(value, arguments, strict=True))
    elif arguments:  # X | None
        if value is None:
            return None
        return checked(value, next(kind for kind in arguments if kind is not type(None)), where)
    elif expected is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, expected) and (expected is bool or not isinstance(value, bool)):
        return value
    raise UserError(f"{where} has the value {value!r}, which is not what it must be ({expected})")
