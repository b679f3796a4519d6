"""Features of all layers of a frozen backbone, from one pass over the images.

Promises: at most a batch of each layer in memory, whatever the number of images; killed at any instant and started
again, it goes on where it was and ends with the same bytes, because batches have fixed bounds; features that are not
finite are never stored. The files are the business of `store.py`; what is done with them is left to the protocols.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from odcluster.config import Augmentation
from odcluster.data.loading import Loader, RawBatch
from odcluster.data.readers import shown
from odcluster.data.sources import Source
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation.linear import pool_stage
from odcluster.evaluation.store import FeatureStore, Ids, Progress
from odcluster.models.backbones import Backbone
from odcluster.models.sobel import Sobel
from odcluster.ranks import SINGLE, Ranks
from odcluster.training.run import Run, run_lock
from odcluster.training.survey import to_network

VECTOR = "features"
"""The layer behind all stages: the backbone's one vector per image."""
BATCH_SIZE = 32
"""Images per forward pass. The five maps of ResNet-50 at 224 px, all held at once, are 9 MB per image."""
SAVE_IMAGES = 1000
SAVE_SECONDS = 30.0
MAX_DIMS = 9600
"""Of a pooled stage, where the paper has no pooling of its own for it."""
FORMAT = 1
"""Of what the numbers mean; raised when the same weights and images would give others."""


# --- Which numbers a layer gives --------------------------------------------------------------------

# (kernel, stride, padding) of average pooling at 224 px, from Goyal et al. 2019; about 9,000 dimensions each.
PUBLISHED_POOLING = {
    "resnet50": {
        "conv1": (10, 10, 4),
        "res2": (16, 8, 0),
        "res3": (13, 5, 0),
        "res4": (8, 3, 0),
        "res5": (6, 1, 0),
    },
    "alexnet": {
        "conv1": (19, 4, 0),
        "conv2": (12, 3, 0),
        "conv3": (9, 1, 0),
        "conv4": (9, 1, 0),
        "conv5": (8, 1, 0),
    },
}


@dataclass(frozen=True)
class Pooling:
    """How the map of a stage becomes one row per image."""

    window: tuple[int, int, int] | None
    """Kernel, stride and padding as published; None where the general rule of `linear.pool_stage` has to do."""
    max_dims: int = MAX_DIMS
    """Of the general rule."""

    @property
    def published(self) -> bool:
        return self.window is not None

    @property
    def description(self) -> str:
        if self.window is None:
            return f"average pooling to the largest square grid of at most {self.max_dims:,} dimensions"
        kernel, stride, padding = self.window
        return f"average pooling, kernel {kernel}, stride {stride}, padding {padding}"

    def __call__(self, feature_map: Tensor) -> Tensor:
        if self.window is None:
            return pool_stage(feature_map, self.max_dims)
        # The padding's zeros count in the mean, as they did in the published code.
        return F.avg_pool2d(feature_map, *self.window, count_include_pad=True).flatten(1)


def pooling(backbone: Backbone, image_size: int, max_dims: int = MAX_DIMS) -> dict[str, Pooling]:
    """For every stage, the paper's pooling where it has one for this network at this size, else the general rule.

    Fewer than the usual dimensions are the general rule too.
    """
    architecture = backbone.name.partition(".")[0]
    fits = image_size == 224 and backbone.stem == "standard" and max_dims == MAX_DIMS
    windows: dict[str, tuple[int, int, int]] = PUBLISHED_POOLING.get(architecture, {}) if fits else {}
    return {name: Pooling(windows.get(name), max_dims) for name in backbone.stage_names}


def layer_outputs(
    backbone: Backbone, layers: Sequence[str], max_dims: int = MAX_DIMS
) -> Callable[[Tensor], dict[str, Tensor]]:
    """What maps normalised RGB images to one float32 row per image and layer; Sobel filtered for 2-channel networks."""
    pools = pooling(backbone, backbone.image_size, max_dims)
    sobel = Sobel().to(next(backbone.parameters()).device) if backbone.in_channels == 2 else None
    needs_stages = any(layer != VECTOR for layer in layers)
    at_once = needs_stages and VECTOR in layers and _head_takes_the_last_map(backbone)
    network: Any = backbone.network

    def outputs(images: Tensor) -> dict[str, Tensor]:
        x = images if sobel is None else sobel(images)
        found: dict[str, Tensor] = {}
        if at_once:
            last, maps = network.forward_intermediates(x, output_fmt="NCHW")
            found[VECTOR] = network.forward_head(last)
        else:
            maps = backbone.stages(x) if needs_stages else []
            if VECTOR in layers:
                found[VECTOR] = backbone(x)
        for name, feature_map in zip(backbone.stage_names, maps, strict=needs_stages):
            if name in layers:
                found[name] = pools[name](feature_map)
        return {layer: found[layer].float() for layer in layers}

    return outputs


@torch.no_grad()
def _head_takes_the_last_map(backbone: Backbone) -> bool:
    """Whether stages and vector can be had from one forward pass, with the very numbers of two. Halves the time."""
    network: Any = backbone.network
    if not (hasattr(network, "forward_intermediates") and hasattr(network, "forward_head")):
        return False
    image = torch.rand(backbone.blank_image().shape, generator=torch.Generator().manual_seed(0))
    image = image.to(backbone.blank_image())
    last, _ = network.forward_intermediates(image, output_fmt="NCHW")
    return torch.equal(network.forward_head(last), backbone(image))


def weights_fingerprint(backbone: Backbone) -> str:
    """sha256 of the names, types, shapes and values of the state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(backbone.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


# --- One pass over the images -----------------------------------------------------------------------


@torch.no_grad()
def extract_features(
    backbone: Backbone,
    source: Source,
    directory: Path,
    *,
    layers: Sequence[str],
    whole: bool,
    key: str,
    workers: int,
    device: torch.device,
    progress: Progress,
    batch_size: int = BATCH_SIZE,
    ids: Ids | None = None,
    max_dims: int = MAX_DIMS,
    ranks: Ranks = SINGLE,
) -> FeatureStore:
    """Features of the evaluation view, or of the `whole` image, of all images or of those of `ids`, in `directory`.

    `key` stands for weights and data: features stored under another one are not used. `layers` are stage names, and
    "features" for the backbone's vector. Goes on with what is stored, and may be stopped by `progress` raising.
    """
    ids = np.arange(len(source), dtype=np.int64) if ids is None else np.asarray(ids, np.int64)
    layers = list(dict.fromkeys(layers))
    _check_request(backbone, layers, len(ids))
    training = backbone.training
    backbone.to(device).eval()
    try:
        outputs = layer_outputs(backbone, layers, max_dims)
        blank = torch.zeros(1, 3, backbone.image_size, backbone.image_size, device=device)
        dimensions = {layer: rows.shape[1] for layer, rows in outputs(blank).items()}
        identity = _identity(backbone, layers, whole, key, batch_size, max_dims)
        store = FeatureStore(directory, ids, dimensions, identity)
        _make_folder(directory)

        def fill(part: FeatureStore) -> None:
            with run_lock(Run(part.directory)), part:
                part.open(progress)
                if part.done < len(part.ids):
                    with evaluation_loader(source, backbone, workers, device) as loader:
                        _fill(part, outputs, source.manifest.paths, loader, batch_size, whole, device, progress)

        if ranks.world_size == 1:
            fill(store)
        else:
            _fill_together(store, batch_size, ranks, fill, progress)
    finally:
        backbone.train(training)
    if ranks.is_first and not store.usable.any():
        path, why = store.refused[0]
        raise DataError(
            f"None of the {len(ids):,} images can be used (the first, {shown(path)}: {why}); are these images?"
        )
    return store


def _fill_together(
    store: FeatureStore, batch_size: int, ranks: Ranks, fill: Callable[[FeatureStore], None], progress: Progress
) -> None:
    """Each rank makes a part of what is missing, in a folder of its own that can be gone on with; rank 0 joins them.

    The bytes are those that one process would have written. Other ranks' `store` stays empty.
    """

    def stored() -> int:
        with run_lock(Run(store.directory)), store:
            store.open(progress)
        return store.done

    done = ranks.first(stored)
    missing = store.ids[done:]
    parts = []
    for rank in range(ranks.world_size):
        ids = missing[ranks.own_batches(len(missing), batch_size, rank)]
        folder = store.directory / f".part-{rank:04d}-of-{ranks.world_size:04d}"
        parts.append(FeatureStore(folder, ids, store.dimensions, store.origin))
    if len(parts[ranks.rank].ids):
        _make_folder(parts[ranks.rank].directory)
        fill(parts[ranks.rank])
    ranks.meet()
    if ranks.is_first and len(missing):
        with run_lock(Run(store.directory)), store:
            store.open(progress)
            for part in parts:
                if len(part.ids):
                    with part:
                        part.open(progress)
                    assert part.done == len(part.ids), "a part that was complete a moment ago is damaged"
                    store.absorb(part)
            store.save()
        for part in parts:
            shutil.rmtree(part.directory, ignore_errors=True)
    ranks.meet()


def _check_request(backbone: Backbone, layers: Sequence[str], num_images: int) -> None:
    known = [*backbone.stage_names, VECTOR]
    if not layers or not set(layers) <= set(known):
        wrong = next((layer for layer in layers if layer not in known), "none")
        raise UserError(f"{backbone.name} has no layer {wrong}; choose from {', '.join(known)}.")
    if num_images == 0:
        raise DataError("There is no image to compute features of; give a part of the data that has images.")


def _identity(
    backbone: Backbone, layers: Sequence[str], whole: bool, key: str, batch_size: int, max_dims: int
) -> dict[str, Any]:
    """What the numbers depend on, beside the ids and the dimensions that the store itself knows."""
    pools = pooling(backbone, backbone.image_size, max_dims)
    return {
        "format": FORMAT,
        "key": key,
        "pooling": {layer: pools[layer].description for layer in layers if layer in pools},
        "view": "whole" if whole else "evaluation",
        "image_size": backbone.image_size,
        "normalisation": [list(backbone.mean), list(backbone.std)],
        "batch_size": batch_size,
    }


def _make_folder(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{directory} cannot be made ({error.strerror}); choose another folder for features."
        ) from error


def evaluation_loader(source: Source, backbone: Backbone, workers: int, device: torch.device) -> Loader:
    """Evaluation views of the size and normalisation of a backbone."""
    return Loader(
        source,
        Augmentation(),  # evaluation views use nothing of it
        image_size=backbone.image_size,
        seed=0,
        workers=workers,
        normalisation=(backbone.mean, backbone.std),
        pin_memory=device.type == "cuda",
    )


def _fill(
    store: FeatureStore,
    outputs: Callable[[Tensor], dict[str, Tensor]],
    paths: list[str],
    loader: Loader,
    batch_size: int,
    whole: bool,
    device: torch.device,
    progress: Progress,
) -> None:
    """Compute and store all rows that are still to be done."""
    mean, std = loader.normalisation_on(device)
    saved, saved_at = store.done, time.monotonic()
    progress("features", store.done, len(store.ids))
    for raw in loader.evaluation(store.ids[store.done :], batch_size, whole):
        batch = store.ids[store.done : store.done + batch_size]
        blocks = _rows(raw, batch, store.dimensions, outputs, mean, std, paths)
        reasons = dict(raw.refused)
        store.append(blocks, [(at, paths[i], reasons[i]) for at, i in enumerate(batch.tolist()) if i in reasons])
        late = store.done - saved >= SAVE_IMAGES or time.monotonic() - saved_at >= SAVE_SECONDS
        if late or store.done == len(store.ids):
            store.save()
            saved, saved_at = store.done, time.monotonic()
        try:
            progress("features", store.done, len(store.ids))
        except (Interrupted, KeyboardInterrupt):
            store.save()
            raise


def _rows(
    raw: RawBatch,
    batch: Ids,
    dimensions: dict[str, int],
    outputs: Callable[[Tensor], dict[str, Tensor]],
    mean: Tensor,
    std: Tensor,
    paths: list[str],
) -> dict[str, NDArray[np.float32]]:
    """The rows [B, D] of one batch, per layer; zeros for refused images."""
    blocks = {layer: np.zeros((len(batch), width), np.float32) for layer, width in dimensions.items()}
    if len(raw.ids) == 0:
        return blocks
    kept = np.isin(batch, raw.ids.numpy())
    for layer, rows in outputs(to_network(raw.images[0], mean, std)).items():
        block = blocks[layer]
        block[kept] = rows.cpu().numpy()
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            first = shown(paths[batch[np.flatnonzero(~finite)[0]]])
            raise DataError(
                f"The features of layer {layer} are not finite for {(~finite).sum()} of {kept.sum()} images (the "
                f"first: {first}); use other weights, or these in float32."
            )
    return blocks
