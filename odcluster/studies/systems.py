"""The systems that the tables compare, each trained with the same compute on the same images.

Small scale: Tiny-ImageNet, 64 px, `smallconv`. One unit is an epoch of one 48 px view per image; a method whose epoch
costs more has fewer of them: two views count twice, four rotations about three times, the tiles of a jigsaw and the
whole images of colorization as measured (images per second in plan.py).
"""

from __future__ import annotations

from odcluster.config import Config, changed
from odcluster.recipes import recipe
from odcluster.studies.plan import IMAGES_PER_SECOND, Images, Scale, Training
from odcluster.studies.settings import SIZES, small_deepcluster, small_odc

SMALL_UNITS = 20
TINY = Images("tiny-imagenet", 15_000)
IMAGENET = Images("imagenet", 1_281_167)
SMALL_CLUSTERS = 150
"""One per 100 images."""
PRETEXTS = ("rotation", "jigsaw", "colorization")
NAMES = {
    "rotation": "Rotation",
    "jigsaw": "Jigsaw",
    "colorization": "Colorization",
    "deepcluster": "DeepCluster",
    "deepcluster-colour": "DeepCluster (colour)",
    "odc": "ODC",
    "odc-default": "ODC, default recipe",
    "odc-alexnet": "ODC, AlexNet",
    "labels": "labels",
}


def small_epochs(method: str, num_views: int = 1) -> int:
    """Epochs that cost as much as SMALL_UNITS epochs of ODC with one view."""
    return max(1, round(SMALL_UNITS * IMAGES_PER_SECOND[method] / IMAGES_PER_SECOND["odc"] / num_views))


def small_systems() -> dict[str, Config]:
    """Every system on Tiny-ImageNet."""
    size = SIZES["tiny-imagenet"]
    common = {"backbone": "smallconv", "batch_size": 128, "image_size": size["image_size"]}
    crops = {"rotation": size, "labels": size, "jigsaw": {"crop_size": 64}, "colorization": {"crop_size": 64}}
    configs = {
        method: changed(recipe(f"{method}_small"), **{**common, **crops[method]}, epochs=small_epochs(method))
        for method in (*PRETEXTS, "labels")
    }
    clusters = {"clusters": SMALL_CLUSTERS}
    configs["deepcluster"] = small_deepcluster("tiny-imagenet", epochs=small_epochs("deepcluster"), **clusters)
    configs["odc"] = small_odc("tiny-imagenet", epochs=small_epochs("odc"), **clusters)
    views = recipe("odc_small").augmentation.num_views
    configs["odc-default"] = changed(
        recipe("odc_small"), **common, crop_size=size["crop_size"], epochs=small_epochs("odc", views), **clusters
    )
    return configs


def paper_systems() -> dict[str, Config]:
    """Every system with ResNet-50 on ImageNet, and ODC with AlexNet."""
    configs = {method: recipe(f"{method}_resnet50_imagenet") for method in (*PRETEXTS, "deepcluster", "odc")}
    return configs | {"odc-alexnet": recipe("odc_alexnet_imagenet")}


def system_trainings(scale: Scale, seeds: tuple[int, ...], wanted: tuple[str, ...] | None = None) -> list[Training]:
    """A training per system and seed, under the same names in every study."""
    configs = small_systems() if scale == "small" else paper_systems()
    images = TINY if scale == "small" else IMAGENET
    return [
        Training(system_name(scale, system, seed), images, changed(config, seed=seed))
        for system, config in configs.items()
        if wanted is None or system in wanted
        for seed in seeds
    ]


def system_name(scale: Scale, system: str, seed: int) -> str:
    return f"{scale}-{system}-s{seed}"


def system_of(training: str) -> str:
    """The inverse of system_name."""
    return training.split("-", 1)[1].rsplit("-s", 1)[0]


def describe_budget(scale: Scale) -> str:
    if scale == "paper":
        return "ImageNet, ResNet-50, every method by its recipe (odcluster info names them)"
    return (
        f"15,000 images of Tiny-ImageNet, 64 px, smallconv; every method has the compute of {SMALL_UNITS} epochs of "
        "one 48 px view per image"
    )
