"""From a configuration to what runs: the backbone and its method, the loader, the features of a frozen backbone."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal, cast

import torch

from odcluster.config import Config
from odcluster.config_file import features_fingerprint
from odcluster.data.loading import Cache, Loader
from odcluster.data.randomness import Purpose
from odcluster.data.sources import FileSource, Manifest, PackedSource, Source
from odcluster.data.subsets import Subset
from odcluster.errors import Interrupted
from odcluster.methods.colorization import Colorization
from odcluster.methods.deepcluster import DeepCluster
from odcluster.methods.interface import Method
from odcluster.methods.jigsaw import Jigsaw
from odcluster.methods.labels import Labels
from odcluster.methods.odc import ODC
from odcluster.methods.rotation import Rotation
from odcluster.models.backbones import Backbone, check_takes, create_backbone, freeze_stages
from odcluster.models.convolutions import share_weight_gradients
from odcluster.models.weights import describe_weights, load_backbone_weights
from odcluster.ranks import SINGLE, Ranks, local_ranks
from odcluster.training import checkpoint
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag, seed_torch
from odcluster.training.frozen import FrozenViews, frozen_views
from odcluster.training.parallel import synchronise_norms
from odcluster.training.run import Run

METHODS: dict[str, type[ODC | DeepCluster | Rotation | Jigsaw | Colorization | Labels]] = {
    "odc": ODC,
    "deepcluster": DeepCluster,
    "rotation": Rotation,
    "jigsaw": Jigsaw,
    "colorization": Colorization,
    "labels": Labels,
}


def build_method(
    config: Config,
    num_samples: int,
    device: torch.device,
    console: Console,
    found: checkpoint.Checkpoint | None = None,
    ranks: Ranks = SINGLE,
) -> Method:
    """Backbone and method, as the seed has them, or ready to take the state of a checkpoint."""
    if found is None:
        backbone = build_backbone(config, console)
    else:  # the weights it started from may be gone; what they decided is in the state
        backbone = new_backbone(config, found.state["stem"])
        mean, std = map(tuple, found.state["normalisation"])
        backbone.set_normalisation(mean, std)
        stored = found.tensors["model"].items()  # features of a frozen backbone may have to be made again
        backbone.load_state_dict({k.removeprefix("backbone."): v for k, v in stored if k.startswith("backbone.")})
        freeze(backbone, config)
    method = synchronise_norms(ranks, METHODS[config.method](backbone, num_samples, config, ranks), device)
    if config.running.compile:
        backbone.compile()
    elif device.type == "cpu" and config.running.precision == "bfloat16":
        share_weight_gradients(backbone)
    if config.running.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    cast(Any, backbone).to(device=device, memory_format=torch.channels_last)  # a fifth faster, on CPUs too
    return cast(Method, method.to(device))


def build_backbone(config: Config, console: Console) -> Backbone:
    """A backbone with random weights, or with those the configuration names."""
    backbone = new_backbone(config, stem_of(config.weights))
    if backbone.stem == "small":
        console.say(f"  {'stem':14} small  (3x3, stride 1, no pooling: the images are {config.image_size} px)")
    if config.weights:
        report = load_backbone_weights(backbone, config.weights, min_matched=config.fine_tuning.min_matched)
        console.say(report.text())
    freeze(backbone, config)
    return backbone


def freeze(backbone: Backbone, config: Config) -> None:
    """The stages that are not trained: those asked for, or all of them."""
    frozen = config.fine_tuning.frozen
    freeze_stages(backbone, len(backbone.stage_names) if frozen else config.fine_tuning.freeze_stages)
    if frozen:
        backbone.requires_grad_(False)


def new_backbone(config: Config, stem: Literal["auto", "standard", "small"]) -> Backbone:
    """The backbone with the random weights of the seed; it must take training crops as well as whole images."""
    assert config.backbone is not None
    assert config.image_size is not None
    seed_torch(config.seed, Purpose.WEIGHTS)
    in_channels = 2 if config.method == "deepcluster" and config.deepcluster.sobel else 3
    backbone = create_backbone(config.backbone, image_size=config.image_size, in_channels=in_channels, stem=stem)
    if (crop := config.augmentation.crop_size) not in (None, config.image_size) and config.method != "jigsaw":
        check_takes(backbone, crop)
    return backbone


def stem_of(weights: str | None) -> Literal["auto", "standard", "small"]:
    """Weights decide about the stem: those of another run have its own, those of others the standard one."""
    if weights is None:
        return "auto"
    described = describe_weights(weights)
    return "small" if described is not None and described["stem"] == "small" else "standard"


def build_loader(
    config: Config, source: Source, method: Method, device: torch.device, console: Console, stop: StopFlag
) -> Loader:
    assert config.image_size is not None
    assert config.workers is not None
    backbone = cast(Backbone, method.backbone)
    cache, augmentation = None, config.augmentation
    if config.fine_tuning.frozen:
        augmentation = dataclasses.replace(augmentation, num_views=config.fine_tuning.cached_views)
    if isinstance(source, FileSource | PackedSource | Subset) and config.running.cache_gb > 0:
        size = min(config.image_size, config.augmentation.crop_size or config.image_size)
        cache = Cache(source, size, int(config.running.cache_gb * 1e9 / local_ranks()))

        def notice(done: int) -> None:
            stop.poll()
            console.progress("reading images into memory", done, len(source))

        cache.fill(notice)
    return Loader(
        source,
        augmentation,
        image_size=config.image_size,
        seed=config.seed,
        workers=config.workers,
        normalisation=(backbone.mean, backbone.std),
        cache=cache,
        pin_memory=device.type == "cuda",
        poll=stop.poll,
        warn=console.warn,
    )


def frozen_features(
    run: Run,
    config: Config,
    loader: Loader,
    method: Method,
    manifest: Manifest,
    device: torch.device,
    console: Console,
    stop: StopFlag,
    ranks: Ranks = SINGLE,
) -> FrozenViews:
    """What the frozen backbone makes of all images and views of them: in the run directory, or made now."""
    backbone, views = cast(Backbone, method.backbone), config.fine_tuning.cached_views

    def notice(done: int, total: int) -> None:
        stop.wanted = ranks.any(stop.wanted)
        stop.poll()
        if done:
            console.progress("features of the frozen backbone", done, total)

    try:
        return frozen_views(
            run.path / "features",
            loader,
            backbone,
            manifest=manifest,
            num_features=backbone.num_features,
            num_cached=views,
            num_views=config.augmentation.num_views,
            seed=config.seed,
            device=device,
            identity=features_fingerprint(config),
            progress=notice,
            ranks=ranks,
            bfloat16=config.running.precision == "bfloat16",
        )
    except Interrupted as stopped:
        raise Interrupted(
            f"stopped, the features made so far are kept: `odcluster resume {run.path}` goes on"
        ) from stopped
