"""The options of evaluate, assign, embed, export and reproduce, each once: command line and Python come from these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["linear", "svm", "lowshot", "knn", "clusters", "semi"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good features are, by a protocol of the field. Labels are used here and nowhere in training."""

    task: Task
    """linear: a linear probe on every layer. svm: VOC07 linear SVMs on every layer. lowshot: SVMs on few images per
    class. knn: nearest neighbours. clusters: a run's clusters against known classes. semi: fine-tuning with few labels
    (1 %, 10 %)."""
    data: str | None = None
    """Labelled images: a VOC folder, a folder per class, CIFAR-10's files, arrays with labels, a list or a CSV with
    labels. Not given: with clusters, the run's own images."""
    test: str | None = None
    """Images to test on. Not given: the test (or val) part of the data if it has one, else a fifth, set aside."""
    split: str | None = None
    """Parts of the data to train and test on, such as train/val. VOC's usual parts are trainval/test."""
    untrained: bool = False
    """Evaluate a backbone with random weights: WEIGHTS is then its name."""
    backbone: str | None = None
    """The architecture of a weights file that does not say it. Not given: as the weights say."""
    image_size: int | None = None
    """Side in pixels at which images are seen. Not given: as the backbone was trained, else 224, less for small
    images."""
    layers: tuple[str, ...] | None = None
    """Only these layers. Not given: all of them; of lowshot, the last."""
    variant: Literal["fast", "published"] = "fast"
    """Of the linear probe. fast: logistic regression by L-BFGS on cached features, minutes. published: SGD over
    augmented images as in the paper, hours."""
    epochs: int | None = None
    """Epochs of the published linear probe (100) and of semi (20); any other number is named in the result."""
    seed: int = 0
    """Of everything random: draws of images, initial weights of probes, untrained weights."""
    out: str | None = None
    """Where the results go. Not given: RUN/evaluation of a run, else evaluations/NAME."""
    jobs: int | None = None
    """SVMs trained side by side. Not given: one per core."""
    workers: int = 1
    """Processes that prepare images. 0: none besides the main one."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps ..."""


@dataclass(frozen=True, kw_only=True)
class Assigning:
    """Clusters of new images, by a trained run."""

    out: str | None = None
    """The table to write, .csv or .parquet: path, cluster, name, confidence, distance. Not given:
    RUN/assigned/NAME.csv."""
    batch_size: int = 64
    """Images per forward pass."""
    workers: int | None = None
    """Processes that read images. Not given: chosen for the device. 0: none besides the main one."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps ..."""


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Features of images, without any training."""

    out: str | None = None
    """A folder or a .npy file (features as a NumPy array, and a CSV of the images beside it), or a .parquet file that
    Embedding Atlas opens. Not given: a folder in RUN/embeddings, or in embeddings/ here."""
    weights: str | None = None
    """Where X is a backbone's name: its weights, as a file, a run, or `timm` / `timm:TAG` (downloads). Not given: none,
    X brings them."""
    untrained: bool = False
    """X is a backbone's name and its weights are random."""
    backbone: str | None = None
    """The architecture of a weights file that does not say it. Not given: as the weights say."""
    image_size: int | None = None
    """Side in pixels at which images are seen. Not given: as the backbone was trained, else 224, less for small
    images."""
    layer: str = "features"
    """features: the backbone's vector. Else the name of a stage (res4, conv5, stage2 ...), pooled."""
    seed: int = 0
    """Of random weights."""
    batch_size: int = 64
    """Images per forward pass."""
    workers: int | None = None
    """Processes that read images. Not given: chosen for the device. 0: none besides the main one."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps ..."""


Format = Literal["csv", "parquet", "folders", "timm", "onnx", "projector", "coco", "fiftyone"]


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """Clusters, as people corrected them, and weights, for other programs."""

    to: Format
    """csv, parquet: which image is where. folders: a folder of images per cluster. timm: weights that plain timm loads.
    onnx: the backbone for any runtime. projector: TensorBoard's embedding projector. coco, fiftyone: labels as JSON."""
    out: str | None = None
    """Where it goes: a file or a folder that does not exist yet. Not given: RUN/export/..."""
    mode: Literal["copy", "hardlink", "symlink"] = "copy"
    """How images get into folders. Hard links take no space, but are the very files: do not edit them."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table or figure of the paper: its trainings, judgements, numbers and picture."""

    scale: Literal["small", "paper"] = "small"
    """small: CIFAR-10, Tiny-ImageNet and VOC, hours on two CPU cores. paper: the paper's settings, days on GPUs."""
    data: str | None = None
    """A folder with cifar10/, tiny_imagenet/ and voc2007/ in it. Not given: each by its own option."""
    cifar10: str | None = None
    """CIFAR-10: its own files, or a folder with train*.npz and test*.npz. Not given: --data DIR/cifar10."""
    tiny_imagenet: str | None = None
    """Tiny-ImageNet: train/ and val/ with a folder per class, or train*.npz and val*.npz. Not given: --data
    DIR/tiny_imagenet."""
    voc: str | None = None
    """VOC 2007: the folder, or its .tar. Not given: --data DIR/voc2007."""
    imagenet: str | None = None
    """ImageNet: train/ and val/ with a folder per class. Not given: none, --scale paper wants it."""
    places: str | None = None
    """Places205: train/ and val/ with a folder per class. Not given: none, --scale paper may want it."""
    seeds: tuple[int, ...] | None = None
    """A training per seed. Not given: those of the study."""
    out: str | None = None
    """Where parts and results go; several studies may share one and with it their trainings. Not given:
    reproductions/SCALE."""
    workers: int | None = None
    """Processes that read images; never changes the result. Not given: chosen for the device."""
    dry_run: bool = False
    """Only print the parts with their settings and about how long they take."""
