"""The linear probe as published (Zhang et al. 2017): SGD over augmented images, a classifier on every stage at once.

Promises: the backbone stays as it is, weights and batch statistics; one forward pass of it serves all heads, and a
head trained beside others ends with the same bits as trained alone; killed and started again with the same `store`
and `key`, the probe goes on at the last full epoch and ends with the same bits as if it had never stopped. The test
images are looked at once, after the last epoch, so nothing can be chosen by them.

How a stage is pooled is the caller's business, and so is the record of what was measured. The fast probe for a
verdict in seconds is `linear.py`; its numbers and these must not be set side by side.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from odcluster.config import Augmentation
from odcluster.data.loading import Loader
from odcluster.data.order import batch_ids, epoch_order, num_steps
from odcluster.data.randomness import Purpose
from odcluster.data.sources import Source
from odcluster.errors import DataError, Diverged
from odcluster.models.backbones import Backbone
from odcluster.models.sobel import Sobel
from odcluster.training import checkpoint
from odcluster.training.checkpoint import NotSaved
from odcluster.training.devices import seed_torch
from odcluster.training.survey import CHUNK, to_network

CROP_AND_FLIP = Augmentation(crop_scale=(0.08, 1.0), flip=0.5, rotation=0.0, jitter=0.0, grey=0.0)
"""All that the published evaluations do to a training image."""

Progress = Callable[[str, int, int], None]
"""(activity, done, total); may raise to stop."""


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images of a source that have a label: labels[i], 0 or above, is that of image ids[i]."""

    source: Source
    ids: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.labels):
            raise ValueError(f"{len(self.ids)} ids have {len(self.labels)} labels; pass one label per id.")
        if len(self.labels) and self.labels.min() < 0:
            raise ValueError("A negative label stands for none; leave images without a label out of the ids.")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of which images these are, and their labels."""
        digest = hashlib.sha256(self.source.manifest.fingerprint().encode())
        digest.update(self.ids.astype("<i8").tobytes() + self.labels.astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SgdSettings:
    """How the heads are trained. The defaults are the published ones."""

    epochs: int = 100
    batch_size: int = 256
    """Images per step; all of them where there are fewer."""
    lr: float = 0.01
    momentum: float = 0.9
    """Nesterov's."""
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 2:
            raise ValueError(
                f"{self.epochs} epochs of {self.batch_size} images per step train nothing; use at least 1 and 2."
            )

    def lr_at(self, epoch: int) -> float:
        """A tenth after every 30 % of the epochs: of 100, at 30, 60 and 90."""
        return self.lr / 10 ** (10 * epoch // (3 * self.epochs))


@dataclass(frozen=True, kw_only=True)
class LayerProbe:
    """What the probe of one layer found."""

    accuracy: float
    """Top-1 on the test images after the last epoch. A class unseen in training counts as wrong."""
    train_accuracies: tuple[float, ...]
    """Top-1 on the augmented training images while they trained, per epoch."""
    losses: tuple[float, ...]
    """Mean training loss, per epoch."""
    num_dimensions: int
    num_classes: int
    num_train: int
    """Training images that could be used."""
    num_test: int
    """Test images that could be used; the accuracy is over these."""
    refused: tuple[tuple[str, str], ...]
    """Path and reason of each image that was left out, in training and in testing. The same for every layer."""


class ProbeHead(nn.Module):
    """Batch norm without affine, then a linear classifier, on a pooled map [B, channels, places].

    As published, the norm is that of the map: its statistics are per channel, over images and places. One mean and
    deviation per dimension, from 256 images, would be noisier and would take away what places have to say.
    """

    def __init__(self, channels: int, places: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels, affine=False)  # of three dimensions: what BatchNorm2d is of four
        self.linear = nn.Linear(channels * places, num_classes)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.zeros_(self.linear.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.linear(self.norm(pooled).flatten(1))


def published_linear_probe(
    backbone: Backbone,
    train: LabelledImages,
    test: LabelledImages,
    pools: Mapping[str, Callable[[Tensor], Tensor]],
    settings: SgdSettings,
    *,
    seed: int,
    device: torch.device,
    workers: int,
    store: Path | None,
    key: str,
    progress: Progress,
) -> dict[str, LayerProbe]:
    """Train one head per stage named in `pools`, each on its pooled map, then test all of them.

    A pooling turns a map [B, C, H, W] into a smaller one [B, C, h, w], which may already be flat, [B, C * h * w].
    `store` is a folder for the state after each epoch; what it holds under another `key` (the caller's name for the
    weights), or of other images or settings, is discarded. The backbone is left in evaluation mode on `device`.
    """
    classes = check_labelled(train, test)
    cast(Any, backbone).to(device=device, memory_format=torch.channels_last).eval()
    pooled = pooled_maps(backbone, pools)
    training = HeadTraining(_new_heads(backbone, pools, len(classes), seed).to(device), train, settings, seed)
    if store is not None:
        training.keep_in(store / "linear", key)
    total = settings.epochs * training.steps_per_epoch
    targets = class_numbers(train, classes)
    with open_loader(train.source, backbone, seed, device, workers) as loader:
        while training.epoch < settings.epochs:
            training.run_epoch(pooled, loader, targets, lambda done: progress("linear probe", done, total))

    training.heads.eval()
    with open_loader(test.source, backbone, seed, device, workers) as loader:
        right, num_test, refused = count_right(
            lambda images: training.logits(pooled(images)),
            loader,
            test,
            class_numbers(test, classes),
            device,
            lambda done: progress("testing the linear probe", done, len(test.ids)),
        )
    return {
        name: LayerProbe(
            accuracy=right[name] / num_test,
            train_accuracies=tuple(training.accuracies[name]),
            losses=tuple(training.losses[name]),
            num_dimensions=cast(ProbeHead, training.heads[name]).linear.in_features,
            num_classes=len(classes),
            num_train=len(train.ids) - len(training.refused),
            num_test=num_test,
            refused=(*named(training.refused, train), *named(refused, test)),
        )
        for name in pools
    }


class HeadTraining:
    """The heads, and where their training stands."""

    def __init__(self, heads: nn.ModuleDict, images: LabelledImages, settings: SgdSettings, seed: int) -> None:
        self.heads, self.images, self.settings, self.seed = heads, images, settings, seed
        self.optimizer = torch.optim.SGD(
            heads.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            nesterov=settings.momentum > 0,
        )
        self.batch_size = min(settings.batch_size, len(images.ids))
        self.steps_per_epoch = num_steps(len(images.ids), self.batch_size)
        self.epoch = 0
        self.losses: dict[str, list[float]] = {name: [] for name in heads}
        self.accuracies: dict[str, list[float]] = {name: [] for name in heads}
        self.refused: dict[int, str] = {}
        self._store: Path | None = None
        self._key = ""

    def logits(self, pooled: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: head(pooled[name]) for name, head in self.heads.items()}

    def run_epoch(
        self,
        pooled: Callable[[Tensor], dict[str, Tensor]],
        loader: Loader,
        targets: Tensor,
        notice: Callable[[int], None],
    ) -> None:
        """One pass over the training images, saved when it is done; `notice` hears how many steps of all are."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(self.epoch)
        self.heads.train()
        device = next(self.heads.parameters()).device
        mean, std = loader.normalisation_on(device)
        sums = np.zeros((2, len(self.heads)))  # loss and number right, by head
        num_seen = 0
        for done, raw in enumerate(loader.training(self.epoch, self._batches())):
            notice(self.epoch * self.steps_per_epoch + done)
            self.refused.update(raw.refused)
            if len(raw.ids) < 2:  # batch norm needs two
                continue
            maps = pooled(to_network(raw.images[0], mean, std))
            losses, num_right = self._step(maps, targets[raw.ids].to(device))
            sums += np.array([losses, num_right]) * [[len(raw.ids)], [1]]
            num_seen += len(raw.ids)
        if num_seen == 0:
            raise DataError("none of the labelled training images can be used; are these images?")
        for number, name in enumerate(self.heads):
            self.losses[name].append(float(sums[0, number]) / num_seen)
            self.accuracies[name].append(float(sums[1, number]) / num_seen)
        self.epoch += 1
        self._save()
        notice(self.epoch * self.steps_per_epoch)  # after the save: a stop here loses nothing

    def _batches(self) -> list[NDArray[np.int64]]:
        order = epoch_order(self.seed, self.epoch, len(self.images.ids))
        return [self.images.ids[batch_ids(order, at, self.batch_size)] for at in range(self.steps_per_epoch)]

    def _step(self, pooled: Mapping[str, Tensor], targets: Tensor) -> tuple[list[float], list[int]]:
        """One step of SGD of all heads: the loss, and how many images were right, of each."""
        with torch.enable_grad():
            logits = self.logits(pooled)
            losses = torch.stack([F.cross_entropy(logits[name], targets) for name in self.heads])
            self.optimizer.zero_grad()
            losses.sum().backward()  # no head sees another's loss: the gradients are those of each alone
        values = losses.detach().tolist()
        if bad := [name for name, value in zip(self.heads, values, strict=True) if not np.isfinite(value)]:
            raise Diverged(
                f"the linear probe of {', '.join(bad)} has a loss that is not finite in epoch {self.epoch + 1}; "
                "use weights of an earlier checkpoint, or a lower learning rate"
            )
        self.optimizer.step()
        return values, [int((logits[name].argmax(dim=1) == targets).sum()) for name in self.heads]

    def keep_in(self, store: Path, key: str) -> None:
        """Save to that folder from now on, after going to where a training of the same identity stood there."""
        identity = {
            "key": key,
            "settings": asdict(self.settings),
            "seed": self.seed,
            "shapes": {name: list(parameter.shape) for name, parameter in self.heads.named_parameters()},
            "images": self.images.fingerprint,
        }
        self._store, self._key = store, hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        checkpoint.sweep(store)
        for path in checkpoint.candidates(store):
            try:
                found = checkpoint.load(path)
            except DataError:  # damaged: the one before counts, or a new start
                found = None
            if found is not None and found.state.get("key") == self._key:
                self._restore(found)
                return
            shutil.rmtree(path)  # a save would take it for this training's own of the same epoch

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        self.heads.load_state_dict(found.tensors["heads"])
        parameters = dict(self.heads.named_parameters())
        for name, momentum in found.tensors["momentum"].items():
            self.optimizer.state[parameters[name]]["momentum_buffer"] = momentum.to(parameters[name].device)
        self.epoch = found.state["step"]
        self.losses, self.accuracies = found.state["losses"], found.state["accuracies"]
        self.refused = {int(id): reason for id, reason in found.state["refused"].items()}

    def _save(self) -> None:
        if self._store is None:
            return
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.heads.named_parameters()}
        momentum = {
            names[parameter]: entries["momentum_buffer"]
            for parameter, entries in self.optimizer.state.items()
            if entries.get("momentum_buffer") is not None
        }
        state = {"key": self._key, "losses": self.losses, "accuracies": self.accuracies, "refused": self.refused}
        try:
            tensors = {"heads": self.heads.state_dict(), "momentum": momentum}
            checkpoint.save(self._store, self.epoch, tensors, state)
            checkpoint.prune(self._store, keep=2)
        except NotSaved as error:
            raise DataError(f"{error}; make room there, then the same command goes on from the epoch before") from error


# What other evaluations on labelled images need as well ---------------------------------------------


def check_labelled(train: LabelledImages, test: LabelledImages) -> NDArray[np.int64]:
    """The classes of the training images in ascending order, once there is something to learn and to test."""
    classes = np.unique(train.labels)
    if len(classes) == 0:
        raise DataError("there are no labelled training images; give a split that has labels")
    if len(classes) == 1:
        raise DataError("all labelled training images are of one class; give images of at least two")
    if len(test.ids) == 0:
        raise DataError("there are no labelled test images; give a split that has labels")
    return classes


def class_numbers(images: LabelledImages, classes: NDArray[np.int64]) -> Tensor:
    """The position among `classes` of the label of each id [len(source)]; -1 for other classes and other images."""
    numbers = torch.full((len(images.source),), -1)
    known = np.isin(images.labels, classes)
    numbers[torch.from_numpy(images.ids[known])] = torch.from_numpy(np.searchsorted(classes, images.labels[known]))
    return numbers


def open_loader(source: Source, backbone: Backbone, seed: int, device: torch.device, workers: int) -> Loader:
    """Random crops and flips for training, centre crops for testing, of the size the backbone was made for."""
    return Loader(
        source,
        CROP_AND_FLIP,
        image_size=backbone.image_size,
        seed=seed,
        workers=workers,
        normalisation=(backbone.mean, backbone.std),
        pin_memory=device.type == "cuda",
    )


def pooled_maps(
    backbone: Backbone, pools: Mapping[str, Callable[[Tensor], Tensor]]
) -> Callable[[Tensor], dict[str, Tensor]]:
    """From normalised RGB images to the pooled map [B, channels, places] of each layer in `pools`, no gradients."""
    if not pools or not pools.keys() <= set(backbone.stage_names):
        raise ValueError(f"Layers {list(pools)} cannot be probed; name some of {backbone.stage_names}.")
    sobel = Sobel().to(next(backbone.parameters()).device) if backbone.in_channels == 2 else None

    @torch.no_grad()
    def pooled(images: Tensor) -> dict[str, Tensor]:
        maps = dict(zip(backbone.stage_names, backbone.stages(sobel(images) if sobel else images), strict=True))
        return {name: _by_channel(pool, maps[name]) for name, pool in pools.items()}

    return pooled


@torch.no_grad()
def count_right(
    logits: Callable[[Tensor], dict[str, Tensor]],
    loader: Loader,
    images: LabelledImages,
    targets: Tensor,
    device: torch.device,
    notice: Callable[[int], None],
) -> tuple[dict[str, int], int, dict[int, str]]:
    """Of each classifier how many images it gets right, of how many that can be used, and why the others cannot."""
    mean, std = loader.normalisation_on(device)
    right: dict[str, int] = {}
    refused: dict[int, str] = {}
    done = 0
    for raw in loader.evaluation(images.ids, CHUNK):
        refused.update(raw.refused)
        if len(raw.ids):
            truth = targets[raw.ids].to(device)
            for name, rows in logits(to_network(raw.images[0], mean, std)).items():
                right[name] = right.get(name, 0) + int((rows.argmax(dim=1) == truth).sum())
        done += len(raw.ids) + len(raw.refused)
        notice(done)
    if not right:
        raise DataError("none of the labelled test images can be used; are these images?")
    return right, len(images.ids) - len(refused), refused


def named(refused: Mapping[int, str], images: LabelledImages) -> list[tuple[str, str]]:
    """Path and reason of refused images, in the order of their ids."""
    return [(images.source.manifest.paths[id], reason) for id, reason in sorted(refused.items())]


def _new_heads(
    backbone: Backbone, pools: Mapping[str, Callable[[Tensor], Tensor]], num_classes: int, seed: int
) -> nn.ModuleDict:
    """A head per layer, whose initial weights depend on the seed and the layer, not on the other layers."""
    with torch.no_grad():
        maps = dict(zip(backbone.stage_names, backbone.stages(backbone.blank_image()), strict=True))
        shapes = {name: _by_channel(pool, maps[name]).shape[1:] for name, pool in pools.items()}
    heads = nn.ModuleDict()
    for name, (channels, places) in shapes.items():
        seed_torch(seed, Purpose.WEIGHTS, 1 + backbone.stage_names.index(name))  # 0 is the backbone's
        heads[name] = ProbeHead(channels, places, num_classes)
    return heads


def _by_channel(pool: Callable[[Tensor], Tensor], feature_map: Tensor) -> Tensor:
    """The pooled map as [B, channels, places], always laid out alike: rounding depends on it."""
    return pool(feature_map).reshape(*feature_map.shape[:2], -1).contiguous()
