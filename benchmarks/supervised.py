"""A small network trained with labels: the ceiling that features learned without them are measured against.

    python benchmarks/supervised.py cifar10/train_webp.npz --epochs 8 --out runs/supervised

Same network, views and optimiser as the recipes for small data; only the loss knows the labels. Writes a backbone that
`odcluster evaluate` and `--weights` take.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from odcluster.config import Augmentation
from odcluster.data.loading import Loader
from odcluster.data.order import batch_ids, epoch_order, num_steps
from odcluster.data.sources import open_source
from odcluster.models.backbones import create_backbone
from odcluster.models.weights import export_backbone
from odcluster.training.survey import to_network

AUGMENTATION = Augmentation(
    crop_scale=(0.2, 1.0), brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, jitter=0.8, grey=0.2
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--backbone", default="smallconv")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=None, help="only the first so many")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()

    source = open_source(options.data)
    labels = torch.from_numpy(np.asarray(source.manifest.labels))
    count = min(options.images or len(source), len(source))
    torch.manual_seed(options.seed)
    backbone = create_backbone(options.backbone, image_size=options.image_size)
    network = nn.Sequential(backbone, nn.Linear(backbone.num_features, int(labels.max()) + 1))
    network.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = num_steps(count, options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.lr, total_steps=options.epochs * steps)
    normalisation = (backbone.mean, backbone.std)
    began = time.monotonic()
    with Loader(source, AUGMENTATION, image_size=options.image_size, seed=options.seed, workers=1,
                normalisation=normalisation) as loader:  # fmt: skip
        mean, std = loader.normalisation_on(torch.device("cpu"))
        for epoch in range(options.epochs):
            order = epoch_order(options.seed, epoch, count)
            batches = [batch_ids(order, at, options.batch_size) for at in range(steps)]
            right = seen = 0
            for raw in loader.training(epoch, batches):
                logits = network(to_network(raw.images[0], mean, std))
                loss = F.cross_entropy(logits, labels[raw.ids])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                right += int((logits.argmax(dim=1) == labels[raw.ids]).sum())
                seen += len(raw.ids)
            print(f"epoch {epoch + 1}: {right / seen:.1%} of augmented images right, {time.monotonic() - began:.0f} s")
    provenance = {"method": "supervised", "images": count, "epochs": options.epochs, "seed": options.seed}
    export_backbone(backbone.eval(), options.out, provenance=provenance)


if __name__ == "__main__":
    main()
