"""Recipes: functions that return a complete set of defaults.

Options given by the user are applied on top; what a recipe leaves open (None) is chosen from the data at the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from odcluster.config import (
    Augmentation,
    Clustering,
    Companions,
    Config,
    DeepClusterOptions,
    FineTuning,
    Head,
    JigsawOptions,
    Method,
    Optimiser,
    WarmStart,
)
from odcluster.errors import UserError


def odc_small() -> Config:
    """ODC for small data and small machines: the default.

    Command: odcluster train DATA
    Time: about 1,220 images of 32 px per second on two CPU cores with bfloat16: 29 epochs of 50,000 in 20 minutes.
    Expected: on CIFAR-10, 30 epochs: last-layer linear probe from 42.5 to 75.5 %, kNN-20 from 34.6 to 69 %.

    Where it leaves the paper, and why: features are compared with the centroids memory itself (no classifier to retrain
    whenever labels move); no dropout and no final ReLU; two milder views; batch-norm statistics are settled before the
    first clusters; images of a batch are also told apart by their two views, because labels alone say little while
    images have been seen few times; Muon, because steps are few. Features are learned with one cluster per 50 images,
    or per 10 of fewer than 20,000; the last fifth of the epochs makes the clusters that people get, with rows that
    average their visits.
    """
    return Config(
        recipe="odc_small",
        dim=128,
        lr=0.05,
        augmentation=Augmentation(num_views=2, crop_scale=(0.2, 1.0), saturation=0.4, hue=0.1, jitter=0.8),
        head=Head(dropout=0.0, final_relu=False, neck_norm="standard", classifier="prototypes"),
        clustering=Clustering(small_cluster=None, calibration_batches=20, final_pass=True),
        warm_start=WarmStart(fine_share=0.8),
        companions=Companions(instance_weight=1.0),
        optimiser=Optimiser(
            algorithm="muon", weight_decay=0.01, schedule="cosine", warmup_epochs=0.5, sampling="permutation"
        ),
    )


def odc_resnet50_imagenet() -> Config:
    """The paper's ODC: ResNet-50, 10,000 clusters, 440 epochs of ImageNet.

    Command: odcluster train IMAGENET/train --recipe odc_resnet50_imagenet Time: the paper used 8 GPUs; `odcluster
    train` prints the time left after the first steps. Expected (the paper): linear probe on conv5 57.6 % (ImageNet)
    and 49.3 % (Places205), VOC07 SVM 78.2 mAP, low-shot 57.1.
    """
    return Config(
        recipe="odc_resnet50_imagenet",
        backbone="resnet50",
        clusters=10_000,
        epochs=440,
        batch_size=512,
        image_size=224,
        lr=0.06,
        dim=256,
        fine_tuning=FineTuning(frozen=False),
    )


def odc_alexnet_imagenet() -> Config:
    """The paper's ODC with AlexNet (batch norm, no local response normalisation), 440 epochs of ImageNet.

    Command: odcluster train IMAGENET/train --recipe odc_alexnet_imagenet
    Time: the paper used 8 GPUs; `odcluster train` prints the time left after the first steps.
    Expected (the paper): linear probe on conv4 41.4 % (ImageNet) and 38.4 % (Places205).
    """
    return dataclasses.replace(odc_resnet50_imagenet(), recipe="odc_alexnet_imagenet", backbone="alexnet", lr=0.04)


def deepcluster_resnet50_imagenet() -> Config:
    """The paper's DeepCluster baseline: ResNet-50 on Sobel gradients, 10,000 clusters made anew every epoch.

    Command: odcluster train IMAGENET/train --recipe deepcluster_resnet50_imagenet
    Time: the paper used 8 GPUs; each epoch also extracts features of all images and clusters them.
    Expected (the paper): linear probe on conv4 52.2 % (ImageNet) and 46.1 % (Places205), VOC07 SVM 69.1 mAP.
    """
    return dataclasses.replace(
        odc_resnet50_imagenet(), recipe="deepcluster_resnet50_imagenet", method="deepcluster", lr=0.1
    )


def rotation_resnet50_imagenet() -> Config:
    """Rotation prediction with ResNet-50 on ImageNet; all four rotations of an image are in the batch.

    Command: odcluster train IMAGENET/train --recipe rotation_resnet50_imagenet
    Time: 35 epochs of four forward passes per image.
    Expected (the paper): VOC07 SVM 67.4 mAP, low-shot 41.0.
    """
    return _pretext_resnet50("rotation", batch_size=128)


def jigsaw_resnet50_imagenet() -> Config:
    """Jigsaw puzzles with ResNet-50 on ImageNet: nine tiles of an image, which of 2,000 orders were they put in?

    Command: odcluster train IMAGENET/train --recipe jigsaw_resnet50_imagenet
    Time: 90 epochs of nine tile passes per image.
    Expected (the paper): VOC07 SVM 64.5 mAP, low-shot 39.2.
    """
    config = _pretext_resnet50("jigsaw", batch_size=256, epochs=90)
    views = dataclasses.replace(config.augmentation, grey=0.3)  # published, against chromatic aberration
    return dataclasses.replace(config, jigsaw=JigsawOptions(permutations=2000), augmentation=views)


def colorization_resnet50_imagenet() -> Config:
    """Colorization with ResNet-50 on ImageNet: lightness in, quantised colour out.

    Command: odcluster train IMAGENET/train --recipe colorization_resnet50_imagenet
    Time: 28 epochs.
    Expected (the paper): VOC07 SVM 55.6 mAP, low-shot 33.3.
    """
    return _pretext_resnet50("colorization", batch_size=256, epochs=28)


def _pretext_resnet50(method: Method, *, batch_size: int, epochs: int = 35) -> Config:
    """Common values for pretext tasks; the ODC paper takes its starting weights from others and does not state them."""
    return Config(
        recipe=f"{method}_resnet50_imagenet",
        method=method,
        backbone="resnet50",
        epochs=epochs,
        batch_size=batch_size,
        image_size=224,
        lr=0.1,
        augmentation=_plain_views(),
        optimiser=Optimiser(weight_decay=1e-4, schedule="cosine", warmup_epochs=1.0, sampling="permutation"),
    )


def _plain_views(crop_scale: tuple[float, float] = (0.2, 1.0)) -> Augmentation:
    """Crop and flip only: colours are what colorization predicts, and grey images would make it pointless."""
    return Augmentation(
        crop_scale=crop_scale, rotation=0.0, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0, jitter=0.0, grey=0.0
    )


def rotation_small() -> Config:
    """Rotation prediction for small data.

    Command: odcluster train DATA --method rotation
    Time: about 300 images per second at 32 px on two CPU cores: 20,000 images take a good minute per epoch.
    Expected: on CIFAR-10 every layer's linear probe rises above the untrained network's; see docs/results.md.
    """
    return _pretext_small("rotation", augmentation=odc_small().augmentation, lr=0.015, weight_decay=5e-4)


def jigsaw_small() -> Config:
    """Jigsaw puzzles for small data.

    Command: odcluster train DATA --method jigsaw
    Time: about 180 images per second at 32 px on two busy CPU cores: 20,000 images take two minutes per epoch.
    Expected: see docs/results.md in the repository; at 32 px the tiles are 9 px, which leaves little to recognise.
    """
    views = dataclasses.replace(_plain_views((0.5, 1.0)), grey=0.3)  # published, against chromatic aberration
    return _pretext_small("jigsaw", augmentation=views, lr=0.05, weight_decay=1e-4)


def colorization_small() -> Config:
    """Colorization for small data.

    Command: odcluster train DATA --method colorization
    Time: about 400 images per second at 32 px on two CPU cores: 20,000 images take 50 seconds per epoch.
    Expected: see docs/results.md.
    """
    return _pretext_small("colorization", augmentation=_plain_views(), lr=0.05, weight_decay=1e-4)


def labels_small() -> Config:
    """Learning with labels, for small data: the ceiling under the views and network of the other small recipes.

    Command: odcluster train DATA --method labels
    Time: about 1,000 images per second at 32 px on two CPU cores.
    Expected: above every method that learns without labels, where labels are many.
    """
    return _pretext_small("labels", augmentation=odc_small().augmentation, lr=0.05, weight_decay=5e-4)


def _pretext_small(method: Method, *, augmentation: Augmentation, lr: float, weight_decay: float) -> Config:
    return Config(
        recipe=f"{method}_small",
        method=method,
        lr=lr,
        dim=128,
        augmentation=dataclasses.replace(augmentation, num_views=1),
        optimiser=Optimiser(weight_decay=weight_decay, schedule="cosine", sampling="permutation"),
    )


def deepcluster_small() -> Config:
    """DeepCluster for small data: the baseline under the same views and network as `odc_small`.

    Command: odcluster train DATA --method deepcluster
    Time: about 1,000 images per second at 32 px on two CPU cores, beside extraction and k-means before every epoch.
    Expected: see docs/results.md.
    """
    small = odc_small()
    return Config(
        recipe="deepcluster_small",
        method="deepcluster",
        lr=0.05,
        dim=128,
        augmentation=dataclasses.replace(small.augmentation, num_views=1),
        optimiser=Optimiser(
            weight_decay=1e-4,
            schedule="cosine",
            sampling="permutation",
            classifier_momentum=0.9,  # it has one epoch to learn
        ),
    )


def finetune_odc_resnet50() -> Config:
    """The paper's fine-tuning: 120 epochs of ODC from Colorization, Jigsaw, Rotation or DeepCluster weights.

    Command: odcluster train IMAGENET/train --recipe finetune_odc_resnet50 --weights FILE
    Time: a little over a quarter of training from scratch.
    Expected (the paper): VOC07 SVM from Col. 72.3, Jig. 74.4, Rot. 74.5, DC 77.0 mAP.
    """
    return dataclasses.replace(odc_resnet50_imagenet(), recipe="finetune_odc_resnet50", epochs=120)


def finetune_deepcluster_resnet50() -> Config:
    """The paper's comparison: 120 epochs of DeepCluster from the same weights.

    Command: odcluster train IMAGENET/train --recipe finetune_deepcluster_resnet50 --weights FILE
    Time: a little over a quarter of training from scratch.
    Expected (the paper): VOC07 SVM from Col. 61.2, Jig. 68.5, Rot. 68.6, DC 70.0 mAP.
    """
    return dataclasses.replace(deepcluster_resnet50_imagenet(), recipe="finetune_deepcluster_resnet50", epochs=120)


def finetune_odc() -> Config:
    """ODC from weights you have: on a CPU or with few images the backbone stays as it is and ODC trains the neck.

    Command: odcluster train DATA --backbone NAME --weights FILE
    Time: that of one forward pass per image and cached view: 5,008 photos at 224 px with EfficientNet-Lite0 and four
    views took 26 and 29 minutes with one thread on a busy machine, nearly all of it for the features.
    Expected: on those photos (VOC 2007), 20 clusters had NMI 0.67 - 0.68 with the class; k-means 0.64 - 0.67.

    The first half learns with many fine clusters and the labels of nearest neighbours, the second with the clusters
    that people get. Where all of the backbone is trained (--frozen False), its rate is low, and the report at the end
    says how many of each image's nearest neighbours stayed.
    """
    small = odc_small()
    return dataclasses.replace(
        small,
        recipe="finetune_odc",
        lr=None,
        clustering=dataclasses.replace(small.clustering, neighbours=10, kmeans_restarts=10),
        warm_start=WarmStart(fine_share=0.5),
        companions=Companions(),
        optimiser=Optimiser(weight_decay=1e-4, schedule="cosine", sampling="permutation"),
    )


def finetune_deepcluster() -> Config:
    """DeepCluster from weights you have, on small data, in colour (weights of others expect no Sobel gradients).

    Command: odcluster train DATA --recipe finetune_deepcluster --backbone NAME --weights FILE
    Time: as `deepcluster_small`.
    Expected: see docs/results.md.
    """
    return dataclasses.replace(
        deepcluster_small(), recipe="finetune_deepcluster", lr=0.02, deepcluster=DeepClusterOptions(sobel=False)
    )


def odc_digits() -> Config:
    """ODC on the 8 x 8 handwritten digits that scikit-learn ships: what `odcluster demo` runs.

    Command: odcluster demo
    Time: about a minute on two CPU cores.
    Expected: see the README; digits want no flip, no colour and no warm start by rotation (a 6 is a turned 9).
    """
    return Config(
        recipe="odc_digits",
        backbone="smallconv",
        clusters=30,
        epochs=30,
        batch_size=64,
        image_size=16,
        lr=0.05,
        dim=64,
        workers=0,
        augmentation=Augmentation(
            num_views=2,
            crop_size=16,
            crop_scale=(0.6, 1.0),
            flip=0.0,
            rotation=10.0,
            saturation=0.0,
            hue=0.0,
            grey=0.0,
        ),
        head=Head(dropout=0.0, final_relu=False, neck_norm="standard", classifier="prototypes"),
        clustering=Clustering(small_cluster=10, calibration_batches=20),
        optimiser=Optimiser(weight_decay=1e-4, schedule="cosine", sampling="permutation"),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        odc_small,
        deepcluster_small,
        rotation_small,
        jigsaw_small,
        colorization_small,
        labels_small,
        finetune_odc,
        finetune_deepcluster,
        odc_resnet50_imagenet,
        odc_alexnet_imagenet,
        deepcluster_resnet50_imagenet,
        rotation_resnet50_imagenet,
        jigsaw_resnet50_imagenet,
        colorization_resnet50_imagenet,
        finetune_odc_resnet50,
        finetune_deepcluster_resnet50,
        odc_digits,
    )
}


def recipe(name: str) -> Config:
    """The recipe of that name."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}; there are: {', '.join(RECIPES)}")
    return RECIPES[name]()


def default_recipe(method: str = "odc", *, weights: bool = False) -> str:
    """The recipe for small data of a method; with weights to start from, the fine-tuning one where there is one."""
    return f"finetune_{method}" if weights and f"finetune_{method}" in RECIPES else f"{method}_small"
