"""SwAV, SimSiam, BYOL (and SimCLR) with lightly's heads and losses: what one would run instead of ODC.

    python benchmarks/peers/train.py cifar10/train_webp.npz --method swav --minutes 20 --out runs/swav

The network, the views, the loader, the batch size, the precision and the minutes are those of `odcluster train`; heads
and losses are lightly's; optimiser and learning rate are options, because each method wants its own. Writes a backbone
that `odcluster evaluate` takes. `--method supervised` is the ceiling: the same with labels.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import odcluster.models.compat  # noqa: F401  before lightly, which imports torchvision
from odcluster.data.loading import Cache, Loader
from odcluster.data.order import batch_ids, epoch_order, num_steps
from odcluster.data.sources import open_source
from odcluster.models.backbones import create_backbone
from odcluster.models.weights import export_backbone
from odcluster.recipes import odc_small
from odcluster.training.devices import has_bfloat16
from odcluster.training.optimisers import Muon
from odcluster.training.survey import to_network

HIDDEN, DIM = 512, 128
"""Widths of the heads: those of ODC's neck."""


BFLOAT16 = has_bfloat16(torch.device("cpu"))


def through(views: Tensor, *modules: nn.Module) -> Tensor:
    """Network and heads in the precision that `odcluster train` would choose here; losses are computed in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
        for module in modules:
            views = module(views)
    return views.float()


class SimCLR(nn.Module):
    """In-batch contrast of two views."""

    def __init__(self, backbone: nn.Module, num_features: int) -> None:
        super().__init__()
        from lightly.loss import NTXentLoss
        from lightly.models.modules.heads import SimCLRProjectionHead

        self.backbone, self.head = backbone, SimCLRProjectionHead(num_features, HIDDEN, DIM)
        self.criterion = NTXentLoss(temperature=0.2)

    def forward(self, first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
        both = through(torch.cat([first, second]), self.backbone, self.head)
        return self.criterion(*both.chunk(2))

    def after_step(self, progress: float) -> None:
        return None


class SwAV(nn.Module):
    """Each view predicts the other's balanced assignment to prototypes."""

    def __init__(self, backbone: nn.Module, num_features: int, prototypes: int = 300) -> None:
        super().__init__()
        from lightly.loss import SwaVLoss
        from lightly.models.modules.heads import SwaVProjectionHead, SwaVPrototypes

        self.backbone, self.head = backbone, SwaVProjectionHead(num_features, HIDDEN, DIM)
        self.prototypes, self.criterion = SwaVPrototypes(DIM, prototypes), SwaVLoss()

    def forward(self, first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
        self.prototypes.normalize()
        features = F.normalize(through(torch.cat([first, second]), self.backbone, self.head), dim=1)
        return self.criterion(list(self.prototypes(features).chunk(2)), [])

    def after_step(self, progress: float) -> None:
        return None


class SimSiam(nn.Module):
    """Each view predicts the other's projection, whose gradient is stopped."""

    def __init__(self, backbone: nn.Module, num_features: int) -> None:
        super().__init__()
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules.heads import SimSiamPredictionHead, SimSiamProjectionHead

        self.backbone = backbone
        self.head, self.predictor = (
            SimSiamProjectionHead(num_features, HIDDEN, DIM),
            SimSiamPredictionHead(DIM, 64, DIM),
        )
        self.criterion = NegativeCosineSimilarity()

    def forward(self, first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
        projected = through(torch.cat([first, second]), self.backbone, self.head)
        predicted, (target_a, target_b) = through(projected, self.predictor), projected.detach().chunk(2)
        a, b = predicted.chunk(2)
        return (self.criterion(a, target_b) + self.criterion(b, target_a)) / 2

    def after_step(self, progress: float) -> None:
        return None


class BYOL(nn.Module):
    """Each view predicts the other's projection by a slowly following copy of the network."""

    def __init__(self, backbone: nn.Module, num_features: int, momentum: float = 0.99) -> None:
        super().__init__()
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules.heads import BYOLPredictionHead, BYOLProjectionHead

        self.backbone = backbone
        self.head, self.predictor = BYOLProjectionHead(num_features, HIDDEN, DIM), BYOLPredictionHead(DIM, HIDDEN, DIM)
        self.target = copy.deepcopy(nn.Sequential(self.backbone, self.head)).requires_grad_(False)
        self.criterion, self.momentum = NegativeCosineSimilarity(), momentum

    def forward(self, first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
        views = torch.cat([first, second])
        a, b = through(views, self.backbone, self.head, self.predictor).chunk(2)
        with torch.no_grad():
            target_a, target_b = through(views, self.target).chunk(2)
        return (self.criterion(a, target_b) + self.criterion(b, target_a)) / 2

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        momentum = 1 - (1 - self.momentum) * (math.cos(math.pi * progress) + 1) / 2
        followed = itertools.chain(self.backbone.parameters(), self.head.parameters())
        for own, other in zip(self.target.parameters(), followed, strict=True):
            own.lerp_(other, 1 - momentum)


class Supervised(nn.Module):
    """With labels: the ceiling."""

    def __init__(self, backbone: nn.Module, num_features: int, labels: Tensor) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(num_features, int(labels.max()) + 1)
        self.labels = labels

    def forward(self, first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(
            through(torch.cat([first, second]), self.backbone, self.head), self.labels[ids].repeat(2)
        )

    def after_step(self, progress: float) -> None:
        return None


PEERS = {"simclr": SimCLR, "swav": SwAV, "simsiam": SimSiam, "byol": BYOL}


def train(
    data: str | np.ndarray,
    labels: np.ndarray | None,
    *,
    method: str,
    out: Path,
    steps: int | None = None,
    minutes: float = 20.0,
    lr: float = 0.05,
    algorithm: str = "sgd",
    weight_decay: float = 5e-4,
    batch_size: int = 128,
    seed: int = 0,
    image_size: int = 32,
    crop_size: int = 24,
    backbone_name: str = "smallconv",
) -> dict[str, float]:
    """Train for so many steps, or as many as fit into the minutes; returns what was done. The backbone is at `out`."""
    torch.manual_seed(seed)
    backbone = create_backbone(backbone_name, image_size=image_size)
    backbone.to(memory_format=torch.channels_last)
    if method == "supervised":
        assert labels is not None, "supervised training needs labels"
        network: nn.Module = Supervised(backbone, backbone.num_features, torch.from_numpy(labels))
    else:
        network = PEERS[method](backbone, backbone.num_features)
    optimiser = make_optimiser(network, algorithm, lr, weight_decay)
    source = open_source(data)
    cache = Cache(source, min(image_size, crop_size), 10**9)
    cache.fill(lambda done: None)
    augmentation = odc_small().augmentation.__class__(
        **{**vars(odc_small().augmentation), "num_views": 2, "crop_size": crop_size}
    )
    normalisation = (backbone.mean, backbone.std)
    began, done, total, loss = time.monotonic(), 0, steps, torch.zeros(())
    with Loader(
        source, augmentation, image_size=image_size, seed=seed, workers=1, normalisation=normalisation, cache=cache
    ) as loader:
        mean, std = loader.normalisation_on(torch.device("cpu"))
        network.train()
        for raw in _batches(loader, len(source), batch_size, seed):
            if total is None and (passed := time.monotonic() - began) > 20:  # long enough to know the speed
                total = max(done + 1, int(done * minutes * 60 / passed))
            progress = done / total if total is not None else 0.0
            for group in optimiser.param_groups:  # a short rise, then a cosine to 0
                group["lr"] = lr * min(1.0, (done + 1) / 100) * (1 + math.cos(math.pi * progress)) / 2
            views = to_network(raw.images, mean, std)
            loss = network(views[0], views[1], raw.ids)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            network.after_step(progress)
            done += 1
            if done % 200 == 0:
                passed, shown = time.monotonic() - began, float(loss.detach())
                print(f"{method}: step {done} of {total}, loss {shown:.3f}, {passed:.0f} s", flush=True)
            if done == total:
                break
    passed = time.monotonic() - began
    provenance = {"method": method, "seed": seed, "steps": done, "lr": lr, "algorithm": algorithm}
    export_backbone(backbone.eval(), out, provenance=provenance)
    return {"steps": done, "seconds": round(passed, 1), "loss": float(loss.detach()), "views": done * batch_size * 2}


def make_optimiser(network: nn.Module, algorithm: str, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """With Muon, prototypes are left to Adam, as classifiers are."""
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    if algorithm == "sgd":
        return torch.optim.SGD(parameters.values(), lr=lr, momentum=0.9, weight_decay=weight_decay)
    if algorithm == "adamw":
        return torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=weight_decay)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters.items():
        groups[parameter.ndim > 1 and not name.startswith("prototypes.")].append(parameter)
    described = [{"params": parameters, "matrices": matrices} for matrices, parameters in groups.items()]
    return Muon(described, lr, weight_decay, torch.bfloat16 if BFLOAT16 else torch.float32)


def _batches(loader: Loader, count: int, batch_size: int, seed: int) -> Iterator:
    for epoch in itertools.count():
        order = epoch_order(seed, epoch, count)
        yield from loader.training(
            epoch, [batch_ids(order, at, batch_size) for at in range(num_steps(count, batch_size))]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--method", choices=[*PEERS, "supervised"], required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--steps", type=int, help="instead of minutes")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--algorithm", choices=["sgd", "adamw", "muon"], default="sgd")
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = vars(parser.parse_args())
    data = given.pop("data")
    print(train(data, open_source(data).manifest.labels, **given))


if __name__ == "__main__":
    main()
