"""Whole trainings beside what one would run instead: images per second from the first line to the last.

    python benchmarks/training.py --data train_webp.npz --json training.json
    python benchmarks/training.py                      # on made images

The same ResNet-18 (small stem) on the same images of 32 px, batches of 128, as many epochs and workers: ODC and
DeepCluster by `odcluster.train` with their recipes for small data, and SwAV as lightly's tutorial writes it (its
transform, head, prototypes and loss, Adam, a DataLoader), with its 2 + 6 crops and with 2 crops alone. Time is that of
the whole: ODC's first look at all images, k-means, checkpoints and cluster pictures are in it, and so is the start of
the workers. ODC's views are as large as SwAV's, where odcluster would choose smaller crops; one more row shows its own
choice. The methods are compared by speed alone: nothing here says which features are better.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import report
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import odcluster
from odcluster.data.sources import open_source
from odcluster.models.backbones import create_backbone

SIZE = 32
BATCH = 128
SMALL_CROP = 14
"""SwAV's small crops are 96 of 224 px; the same share of 32."""
LIGHTLY = "pip install lightly"
Contender = Callable[[np.ndarray, int], None]
"""Trains on images for a number of epochs."""


def load_images(data: str | None, num: int) -> np.ndarray:
    """The first images of the data, or made ones, uint8 [num, 32, 32, 3]."""
    if data is None:
        coarse = np.random.default_rng(0).integers(0, 256, (num, 6, 6, 3), dtype=np.uint8)
        return np.stack([cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_CUBIC) for image in coarse])
    source = open_source(data)
    images = [source.image(i) for i in range(min(num, len(source)))]
    return np.stack([image if image.shape[0] == SIZE else cv2.resize(image, (SIZE, SIZE)) for image in images])


# Ours ------------------------------------------------------------


def train_ours(images: np.ndarray, epochs: int, *, backbone: str, workers: int, **options: Any) -> None:
    """A run as a user starts it, thrown away afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        odcluster.train(
            images, out=Path(folder) / "run", quiet=True, backbone=backbone, image_size=SIZE, batch_size=BATCH,
            epochs=epochs, workers=workers, **options,
        )  # fmt: skip


# SwAV by lightly ------------------------------------------------------------


class Pictures(Dataset[list[Tensor]]):
    """PIL images through a transform, as torchvision's CIFAR10 serves them."""

    def __init__(self, images: np.ndarray, transform: Callable[[Image.Image], list[Tensor]]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: int) -> list[Tensor]:
        return self.transform(Image.fromarray(self.images[at]))


class SwaV(nn.Module):
    """Backbone, projection head and prototypes, with the widths of lightly's example."""

    def __init__(self, backbone: str) -> None:
        super().__init__()
        from lightly.models.modules import SwaVProjectionHead, SwaVPrototypes

        self.backbone = create_backbone(backbone, image_size=SIZE)
        self.head = SwaVProjectionHead(self.backbone.num_features, 512, 128)
        self.prototypes = SwaVPrototypes(128, n_prototypes=512)

    def forward(self, images: Tensor) -> Tensor:
        return self.prototypes(nn.functional.normalize(self.head(self.backbone(images)), dim=1))


def train_swav(images: np.ndarray, epochs: int, *, backbone: str, workers: int, small_crops: int) -> None:
    """The loop of lightly's example."""
    from lightly.loss import SwaVLoss
    from lightly.transforms.swav_transform import SwaVTransform

    model, criterion = SwaV(backbone), SwaVLoss()
    transform = SwaVTransform(crop_sizes=(SIZE, SMALL_CROP), crop_counts=(2, small_crops))
    loader = DataLoader(
        Pictures(images, transform), batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    model.train()
    for _ in range(epochs):
        for crops in loader:
            model.prototypes.normalize()
            outputs = [model(crop) for crop in crops]
            loss = criterion(outputs[:2], outputs[2:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


# Side by side ------------------------------------------------------------


def measure(contenders: dict[str, Contender], images: np.ndarray, epochs: int, repeats: int) -> dict[str, float]:
    """Median images per second; one training of each in turn, then again."""
    for name, train in contenders.items():  # the first of all would pay for what is imported and made once
        print(f"  {name}: warming up", flush=True)
        train(images[: 2 * BATCH], 1)
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for at in range(repeats):
        for name, train in contenders.items():
            began = time.monotonic()
            train(images, epochs)
            seconds = time.monotonic() - began
            speeds[name].append(epochs * len(images) / seconds)
            print(f"  {name}, {at + 1} of {repeats}: {seconds:.1f} s, {speeds[name][-1]:.0f} images/s", flush=True)
    return {name: statistics.median(found) for name, found in speeds.items()}


def rows_of(speed: dict[str, float], about: str) -> list[report.Row]:
    ours, missing = "ODC", importlib.util.find_spec("lightly") is None
    rows = []
    for name in ("SwAV, 2 crops", "SwAV, 2 + 6 crops", "DeepCluster"):
        what = f"whole training, ODC beside {name}, {about}"
        if name.startswith("SwAV") and missing:
            rows.append(report.not_run(what, f"lightly is not installed: {LIGHTLY}"))
            continue
        note = "DeepCluster is odcluster's own, one view per image" if name == "DeepCluster" else ""
        rows.append(report.Row(what, speed[ours], speed[name], "images/s", speed[ours] / speed[name], "", None, note))
    smaller = speed["ODC, its own crops"]
    what = f"whole training, ODC with the crops it chooses (24 px) beside 32 px, {about}"
    rows.append(report.Row(what, smaller, speed[ours], "images/s", smaller / speed[ours], "", None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="images of 32 px: anything `odcluster train` takes; not given: made ones")
    parser.add_argument("--images", type=int, default=768, help="how many of them")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="of every contender")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a small network, seconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.images, given.epochs, given.repeats = 256, 1, 1
    backbone = "smallconv" if given.quick else "resnet18"
    images = load_images(given.data, given.images)
    common: dict[str, Any] = {"backbone": backbone, "workers": given.workers}
    contenders: dict[str, Contender] = {"ODC": partial(train_ours, method="odc", crop_size=SIZE, **common)}
    if importlib.util.find_spec("lightly") is None:
        print(f"  without SwAV: lightly is not installed ({LIGHTLY})", flush=True)
    else:
        for name, small_crops in (("SwAV, 2 crops", 0), ("SwAV, 2 + 6 crops", 6)):
            contenders[name] = partial(train_swav, small_crops=small_crops, **common)
    contenders["DeepCluster"] = partial(train_ours, method="deepcluster", crop_size=SIZE, **common)
    contenders["ODC, its own crops"] = partial(train_ours, method="odc", **common)
    speed = measure(contenders, images, given.epochs, given.repeats)
    kind = "made images" if given.data is None else "images"
    about = f"{backbone}, {len(images):,} {kind} of {SIZE} px, {given.epochs} epochs, {given.workers} worker"
    rows = rows_of(speed, about)
    report.show(rows)
    if given.json:
        report.write(given.json, "training", rows)


if __name__ == "__main__":
    main()
