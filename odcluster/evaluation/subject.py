"""What is evaluated: a run, an exported backbone, a weights file, or a backbone with random weights."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from odcluster.data.loading import Loader
from odcluster.data.randomness import Purpose
from odcluster.data.sources import Source
from odcluster.errors import UserError
from odcluster.evaluation.features import evaluation_loader, weights_fingerprint
from odcluster.models.backbones import Backbone, create_backbone
from odcluster.models.checkpoints import printable
from odcluster.models.sobel import represent
from odcluster.models.weights import describe_weights, load_backbone_weights
from odcluster.training.devices import seed_torch
from odcluster.training.resolve import SMALL_IMAGE, choose_image_size
from odcluster.training.survey import to_network
from odcluster.verbs import Evaluation

SETTLING_IMAGES = 2048
"""Images whose statistics an untrained network's batch norm takes over."""


@dataclass(frozen=True)
class Subject:
    """A backbone in evaluation mode, and where it came from."""

    backbone: Backbone
    origin: str
    pretraining: str
    """How the weights came about, in words."""
    directory: Path
    """Where results about it go."""
    fingerprint: str
    """Hash of the weights."""

    def identity(self) -> str:
        """What features depend on beside the images: weights, size, normalisation."""
        backbone = self.backbone
        seen = [backbone.name, backbone.stem, backbone.image_size, backbone.mean, backbone.std]
        return f"{self.fingerprint} {seen}"

    def record(self) -> dict[str, Any]:
        """What a result says of it."""
        return {
            "origin": self.origin,
            "backbone": self.backbone.name,
            "image_size": self.backbone.image_size,
            "pretraining": self.pretraining,
            "fingerprint": self.fingerprint,
        }

    def copy(self) -> Backbone:
        """A backbone of its own with the same weights, to be trained further."""
        return copy.deepcopy(self.backbone)


def open_subject(
    weights: str,
    options: Evaluation,
    train: Source,
    ids: NDArray[np.int64],
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> Subject:
    """The backbone that `weights` stands for, at the size at which images are to be seen.

    The training images, `ids` of `train`, say which size is usual and settle the batch norm of an untrained network.
    """
    if options.untrained:
        return _untrained(weights, options, train, ids, device, progress)
    if options.backbone is None and not Path(weights).exists() and _is_backbone_name(weights):
        raise UserError(f"{weights} is the name of a backbone: evaluate its random weights with --untrained")
    described = describe_weights(weights)
    name = options.backbone or (described["architecture"] if described else None)
    if name is None:
        raise UserError(f"{printable(weights)} does not say which network it belongs to; name it with --backbone")
    stem: Literal["standard", "small"] = "small" if described and described["stem"] == "small" else "standard"
    size = options.image_size or (described["image_size"] if described else usual_size(train, device))
    channels = described["in_channels"] if described else 3
    backbone = create_backbone(name, image_size=size, in_channels=channels, stem=stem)
    report = load_backbone_weights(backbone, weights)
    given = (described or {}).get("provenance") or {}
    origin = os.path.basename(os.path.abspath(weights)) if Path(weights).exists() else weights
    found = report.origin.replace(weights, origin)  # a record is passed on: where the file lies is nobody's business
    story = ", ".join(f"{key} {value}" for key, value in given.items()) or f"weights from {found}"
    backbone = backbone.to(device).eval()
    return Subject(backbone, origin, story, _place(weights, options), weights_fingerprint(backbone))


def _untrained(
    name: str,
    options: Evaluation,
    train: Source,
    ids: NDArray[np.int64],
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> Subject:
    if options.backbone is not None:
        raise UserError("--untrained takes the backbone's name in place of WEIGHTS; leave --backbone out")
    seed_torch(options.seed, Purpose.WEIGHTS)
    backbone = create_backbone(name, image_size=options.image_size or usual_size(train, device)).to(device)
    with evaluation_loader(train, backbone, options.workers, device) as loader:
        chosen = ids[np.unique(np.linspace(0, len(ids) - 1, SETTLING_IMAGES).astype(np.int64))]
        count = settle_batch_norm(backbone, loader, chosen, device, progress)
    story = f"untrained, seed {options.seed}"
    if count:
        story += f", batch-norm statistics of {count:,} training images"
    place = _place(f"{name}-untrained", options)
    return Subject(backbone, f"untrained {name}", story, place, weights_fingerprint(backbone))


def _place(weights: str, options: Evaluation) -> Path:
    """RUN/evaluation of a run or of its backbone, else evaluations/ and a name that tells weights apart."""
    if options.out is not None:
        return Path(options.out)
    path = Path(os.path.abspath(os.path.expanduser(weights)))
    for run in (path, path.parent):
        if (run / "manifest.csv").is_file() and (run / "config.json").is_file():
            return run / "evaluation"
    if not path.exists():  # a name: of a backbone, or timm's weights
        name = f"{options.backbone}-{weights}" if options.backbone else weights
        return Path("evaluations") / re.sub(r"[^\w.-]", "-", name)
    return Path("evaluations") / (f"{path.parent.name}-{path.stem}" if path.is_file() else path.name)


def _is_backbone_name(name: str) -> bool:
    try:
        create_backbone(name)
    except UserError:
        return False
    return True


def usual_size(source: Source, device: torch.device) -> int:
    """224 as in the paper; the images' own side if that is small."""
    side, _ = choose_image_size(source, device)
    return side if side <= SMALL_IMAGE else 224


@torch.no_grad()
def settle_batch_norm(
    backbone: Backbone,
    loader: Loader,
    ids: NDArray[np.int64],
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> int:
    """Batch-norm statistics for random weights, so that they are not judged by their worst; images used, 0 if none.

    Statistics are the plain average over batches of what the network will see when it is evaluated.
    """
    norms = [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    if not norms:
        return 0
    mean, std = loader.normalisation_on(device)
    count = 0
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative average
        backbone.train()
        for done, raw in enumerate(loader.evaluation(ids, 256)):
            progress("batch-norm statistics", min(256 * (done + 1), len(ids)), len(ids))
            if len(raw.ids) > 1:
                represent(backbone)(to_network(raw.images[0], mean, std))
                count += len(raw.ids)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        backbone.eval()
    return count
