"""Short trials from scratch: which idea teaches most in five minutes of one core? See docs/recipe.md.

    python benchmarks/screening.py TRAIN TEST --out results/recipe/screening_muon.json
    python benchmarks/screening.py TRAIN TEST --trials "muon 0.05" "swav, muon" --out trial.json
    python benchmarks/screening.py TRAIN TEST --start RUN --lr 0.02 --seconds 600 --trials "muon 0.05" --out late.json

Every trial has the same seconds of processor time on one thread, the package's network, views and order of images, and
is judged on all test images: ridge regression on the last layer's map and 20 nearest neighbours, both with 10,000
labelled images. Time is the processor's, so that a busy machine changes little. Two trials may run side by side, no
more. A trial whose result is in the file is not repeated; one point is noise. With --start, trials go on from a
finished run of the default recipe, network and samples memory, at a peak rate of --lr: what an idea is worth late.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.train import DIM, HIDDEN, make_optimiser
from torch import Tensor, nn
from torch.nn import functional as F

from odcluster.clustering.kmeans import kmeans
from odcluster.config import Augmentation
from odcluster.data.order import batch_ids, epoch_order
from odcluster.data.sources import open_source
from odcluster.data.views import apply_view, draw_views
from odcluster.evaluation.knn import knn_accuracy
from odcluster.evaluation.linear import pool_stage
from odcluster.models.backbones import Backbone, create_backbone
from odcluster.recipes import odc_small
from odcluster.training import checkpoint, optimisers
from odcluster.training.devices import has_bfloat16

CPU = torch.device("cpu")
PROBE_IMAGES, MAX_DIMS, SIDE = 10_000, 2048, 32
MEMORY_MOMENTUM, WARM = 0.5, 0.03
STAGES = ["conv1", "conv2", "conv3", "conv4", "conv5"]
FURTHER = 1000
"""Epochs of a trial that goes on are numbered from here, so that it sees other views than the run did."""


@dataclasses.dataclass
class Trial:
    """One set of choices; the defaults are those of the first line of the table."""

    loss: str = "instances"  # or "swav": lightly's
    algorithm: str = "adamw"
    lr: float = 0.003
    weight_decay: float = 1e-3
    iterations: int = 5  # of Muon
    temperature: float = 0.2
    decoupled: bool = False  # the positive is not in the denominator
    crop: int = 24
    late: float = 0.0  # the last share of the time has crops of 24 px
    small_crops: int = 0  # further views of 16 px of a small part of the image
    swapped_clusters: int = 0  # each view learns the soft label of the other, by centroids whose sizes are balanced
    neighbours: int = 0  # one of the nearest rows of the samples memory is a positive too
    neck_layers: int = 2
    hidden: int = HIDDEN  # width of the neck
    smallest_crop: float = 0.2  # share of the image
    turned: float = 2.0  # degrees, at most
    colour: float = 1.0  # times the default's jitter
    first_colour: float = 0.0  # that of the first view, where it is another, which is then never grey
    batch: int = 128  # images
    views: int = 2  # of each; with more, each is told by the mean of the others
    straight: bool = False  # the rate falls along a line, not a cosine
    local: str = ""  # cells of this stage's map are told by the whole other view, through a neck of their own
    cells: int = 2  # so many of them per view
    seed: int = 0


MUON = {"algorithm": "muon", "lr": 0.02, "weight_decay": 0.01}
BEST = {**MUON, "lr": 0.05, "iterations": 3}
TRIALS: dict[str, Trial] = {
    "instances told apart, AdamW 0.003": Trial(),
    "swav, AdamW 0.001": Trial(loss="swav", lr=0.001),
    "swav, AdamW 0.003": Trial(loss="swav"),
    "muon 0.02": Trial(**MUON),
    "muon 0.05": Trial(**BEST),
    "muon 0.1": Trial(**{**BEST, "lr": 0.1}),
    "swav, muon": Trial(loss="swav", **BEST),
    "muon 0.02, decoupled": Trial(decoupled=True, **MUON),
    "muon 0.02, swapped labels of 500 clusters": Trial(swapped_clusters=500, **MUON),
    "muon 0.02, 16 px, the last quarter 24 px": Trial(crop=16, late=0.25, **MUON),
    "muon 0.05, 16 px, the last quarter 24 px": Trial(crop=16, late=0.25, **BEST),
    "muon 0.05, temperature 0.1": Trial(temperature=0.1, **BEST),
    "muon 0.05, neighbours": Trial(neighbours=5, **BEST),
    "muon 0.05, two more crops of 16 px": Trial(small_crops=2, **BEST),
    "muon 0.05, swapped labels of 500 clusters": Trial(swapped_clusters=500, **BEST),
    "muon 0.05, temperature 0.4": Trial(temperature=0.4, **BEST),
    "muon 0.05, decoupled": Trial(decoupled=True, **BEST),
    "muon 0.05, 32 px": Trial(crop=32, **BEST),
    "muon 0.05, neck of three layers": Trial(neck_layers=3, **BEST),
    "muon 0.05, neck of 2,048": Trial(hidden=2048, **BEST),
    "muon 0.05, crops from 8 %": Trial(smallest_crop=0.08, **BEST),
    "muon 0.05, not turned": Trial(turned=0.0, **BEST),
    "muon 0.05, stronger colours": Trial(colour=1.75, **BEST),
    "muon 0.05, weaker colours": Trial(colour=0.5, **BEST),
    "muon 0.05, one view with weaker colours": Trial(first_colour=0.25, **BEST),
    "muon 0.05, 64 images in four views": Trial(views=4, batch=64, **BEST),
    "muon 0.05, 32 images in eight views": Trial(views=8, batch=32, **BEST),
    "muon 0.05, batches of 256": Trial(batch=256, **BEST),
    "muon 0.05, batches of 64": Trial(batch=64, **BEST),
    "muon 0.05, weight decay 0.05": Trial(**{**BEST, "weight_decay": 0.05}),
    "muon 0.05, a straight fall": Trial(straight=True, **BEST),
    "muon 0.05, cells of conv4": Trial(local="conv4", **BEST),
}


class Network(nn.Module):
    """Backbone and neck; with SwAV's loss, its prototypes."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.backbone = create_backbone("smallconv", image_size=SIDE)
        self.backbone.to(memory_format=torch.channels_last)
        features = self.backbone.num_features
        widths = [features] + [trial.hidden] * (trial.neck_layers - 1)
        layers = [(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.neck = nn.Sequential(*itertools.chain(*layers), nn.Linear(widths[-1], DIM))
        self.trial, self.cells = trial, None
        if trial.local:
            wide = self.backbone.network.widths[STAGES.index(trial.local)]
            self.local_neck = nn.Sequential(
                nn.Linear(wide, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM)
            )
        if trial.loss == "swav":
            from lightly.loss import SwaVLoss
            from lightly.models.modules.heads import SwaVPrototypes

            self.prototypes, self.swav = SwaVPrototypes(DIM, 300), SwaVLoss()

    def forward(self, *groups: Tensor) -> Tensor:
        """Unit features of groups of views, each group of one size."""
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(CPU)):
            if self.trial.local:
                maps = self.backbone.stages(groups[0])
                places = maps[STAGES.index(self.trial.local)].flatten(2).transpose(1, 2)  # [V B, cells, C]
                chosen = torch.rand(places.shape[:2]).topk(self.trial.cells, dim=1).indices
                places = places.gather(1, chosen[..., None].expand(-1, -1, places.shape[2]))
                self.cells = F.normalize(self.local_neck(places.transpose(0, 1).flatten(0, 1)).float(), dim=1)
                return F.normalize(self.neck(maps[-1].mean(dim=(2, 3))).float(), dim=1)
            features = self.neck(torch.cat([self.backbone(group) for group in groups]))
        return F.normalize(features.float(), dim=1)


class Memories:
    """Rows of all images; with clusters, soft labels that keep sizes even: a full cluster asks for more similarity."""

    def __init__(self, count: int, clusters: int) -> None:
        self.rows, self.seen, self.clusters = torch.zeros(count, DIM), torch.zeros(count, dtype=torch.bool), clusters
        self.labels: Tensor | None = None

    def scores(self, features: Tensor) -> Tensor:
        return features @ self.centroids.T / 0.05 - torch.log((self.counts + 0.5) / self.counts.mean())

    def update(self, ids: Tensor, features: Tensor, step: int) -> None:
        weight = torch.where(self.seen[ids], MEMORY_MOMENTUM, 1.0)[:, None]
        new = F.normalize(self.rows[ids] * (1 - weight) + F.normalize(features, dim=1) * weight, dim=1)
        if self.labels is not None:
            ones = torch.ones(len(ids))
            self.sums.index_add_(0, self.labels[ids], -self.rows[ids])
            self.counts.index_add_(0, self.labels[ids], -ones)
            self.labels[ids] = self.scores(new).argmax(dim=1)
            self.sums.index_add_(0, self.labels[ids], new)
            self.counts.index_add_(0, self.labels[ids], ones)
            if step % 10 == 0:
                self.centroids = F.normalize(self.sums, dim=1)
        self.rows[ids], self.seen[ids] = new, True
        self.first_clusters()

    def first_clusters(self) -> None:
        if self.clusters and self.labels is None and bool(self.seen.all()):
            self.labels = kmeans(self.rows, self.clusters, iterations=10, seed=0)[0].long()
            self.sums = torch.zeros(self.clusters, DIM).index_add_(0, self.labels, self.rows)
            self.counts = torch.bincount(self.labels, minlength=self.clusters).float()
            self.centroids = F.normalize(self.sums, dim=1)


def told_apart(features: Tensor, others: Tensor, targets: Tensor, trial: Trial, hidden: Tensor | None = None) -> Tensor:
    logits = features @ others.T / trial.temperature
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    if not trial.decoupled:
        return F.cross_entropy(logits, targets)
    own = logits.gather(1, targets[:, None])
    return (logits.scatter(1, targets[:, None], -torch.inf).logsumexp(dim=1) - own[:, 0]).mean()


def told_by_the_others(views: Tensor, trial: Trial) -> Tensor:
    """Each of the views [V, B, D] of an image: the mean of its others, against the means of all other images."""
    total = views.sum(dim=0)
    others = F.normalize(total - views, dim=2)
    logits = torch.einsum("vbd,cd->vbc", views, F.normalize(total, dim=1)) / trial.temperature  # [V, B, B]
    own = (views * others).sum(dim=2) / trial.temperature
    logits = torch.diagonal_scatter(logits, own, dim1=1, dim2=2)
    return F.cross_entropy(logits.flatten(0, 1), torch.arange(len(total)).repeat(len(views)))


def losses(network: Network, features: Tensor, size: int, ids: Tensor, memories: Memories, trial: Trial) -> Tensor:
    """Of the features [V B and small crops, D] of V views and small crops of B images."""
    views, small, own = features[: trial.views * size], features[trial.views * size :], torch.arange(2 * size)
    if trial.views > 2:
        return told_by_the_others(views.unflatten(0, (trial.views, size)), trial)
    if trial.loss == "swav":
        return network.swav(list(network.prototypes(views).chunk(2)), [])
    loss = told_apart(views, views, (own + size) % (2 * size), trial, torch.eye(2 * size, dtype=torch.bool))
    if network.cells is not None:
        targets = ((own + size) % (2 * size)).repeat(trial.cells)
        itself = torch.eye(2 * size, dtype=torch.bool).repeat(trial.cells, 1)
        loss = loss + told_apart(network.cells, views, targets, trial, itself)
    for target in views.chunk(2):
        for crop in small.split(size) if len(small) else ():
            loss = loss + told_apart(crop, target, own[:size], trial) / 2
    if trial.neighbours and bool(memories.seen.all()):
        with torch.no_grad():
            near = F.normalize(sum(views.chunk(2)), dim=1) @ memories.rows.T
            near[own[:size], ids] = -1
            nearest = near.topk(trial.neighbours, dim=1).indices
            chosen = memories.rows[nearest[own[:size], torch.randint(trial.neighbours, (size,))]]
        loss = loss + sum(told_apart(view, chosen, own[:size], trial) for view in views.chunk(2)) / 2
    if memories.labels is not None:
        target = memories.scores(views.detach()).softmax(dim=1).roll(size, dims=0)
        loss = loss - (target * (views @ memories.centroids.T / 0.1).log_softmax(dim=1)).sum(dim=1).mean()
    return loss


def go_on(network: Network, memories: Memories, run: Path) -> None:
    """From the network and the samples memory of a finished run."""
    found = checkpoint.find(run / "checkpoints", print)
    assert found is not None
    state = {name: tensor for part in found.tensors.values() for name, tensor in part.items()}
    places = {"fc1": "0", "bn": "1", "fc2": "3"}  # of the parts of the default's neck
    neck = [name.split(".") for name in state if name.startswith("neck.") and name.count(".") == 2]
    network.neck.load_state_dict({f"{places[layer]}.{kind}": state[f"neck.{layer}.{kind}"] for _, layer, kind in neck})
    own = network.backbone.state_dict()
    network.backbone.load_state_dict({name: state[f"backbone.{name}"] for name in own})
    memories.rows, memories.seen = F.normalize(state["samples.rows"].float(), dim=1), torch.ones(len(memories.seen)) > 0
    memories.first_clusters()


def coloured(augmentation: Augmentation, strength: float) -> Augmentation:
    """With so many times its changes of colour."""
    names = ("brightness", "contrast", "saturation", "hue")
    return dataclasses.replace(augmentation, **{name: strength * getattr(augmentation, name) for name in names})


def train(trial: Trial, images: np.ndarray, seconds: float, start: Path | None = None) -> tuple[Backbone, int]:
    torch.manual_seed(trial.seed)
    optimisers.ITERATIONS = trial.iterations
    network, memories = Network(trial), Memories(len(images), trial.swapped_clusters)
    if start is not None:
        go_on(network, memories, start)
    optimiser = make_optimiser(network, trial.algorithm, trial.lr, trial.weight_decay)
    usual = odc_small().augmentation
    whole = coloured(
        dataclasses.replace(usual, crop_scale=(trial.smallest_crop, 1.0), rotation=trial.turned), trial.colour
    )
    wholes = [whole] * trial.views
    if trial.first_colour:
        wholes[0] = dataclasses.replace(coloured(whole, trial.first_colour), grey=0.0)
    part = dataclasses.replace(whole, crop_scale=(0.05, 0.35))
    mean, std = (255 * torch.tensor(v).view(1, 3, 1, 1) for v in (network.backbone.mean, network.backbone.std))

    def seen(chosen: np.ndarray, epoch: int, view: int, size: int, augmentation: Any) -> Tensor:
        draws = draw_views(augmentation, trial.seed, epoch, chosen, view)
        made = [apply_view(images[i], draws.parameters(row, SIDE, SIDE), size) for row, i in enumerate(chosen)]
        pixels = torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)
        return ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)

    began, step, per_epoch = time.process_time(), 0, len(images) // trial.batch
    while (progress := (time.process_time() - began) / seconds) < 1:
        epoch, position = divmod(step, per_epoch)
        epoch += FURTHER if start is not None else 0
        if position == 0:
            order = epoch_order(trial.seed, epoch, len(images))
        chosen = batch_ids(order, position, trial.batch)
        ids, size = torch.from_numpy(chosen), 24 if progress > 1 - trial.late else trial.crop
        groups = [torch.cat([seen(chosen, epoch, view, size, wholes[view]) for view in range(trial.views)])]
        if trial.small_crops:
            numbers = range(trial.views, trial.views + trial.small_crops)
            groups += [torch.cat([seen(chosen, epoch, view, 16, part) for view in numbers])]
        fall = 1 - progress if trial.straight else (1 + math.cos(math.pi * progress)) / 2
        for group in optimiser.param_groups:
            group["lr"] = trial.lr * min(1.0, progress / WARM) * fall
        if trial.loss == "swav":
            network.prototypes.normalize()
        features = network(*groups)
        loss = losses(network, features, len(chosen), ids, memories, trial)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            views = features[: trial.views * len(chosen)].unflatten(0, (trial.views, -1))
            memories.update(ids, views.mean(dim=0), step)
        step += 1
    return network.backbone.eval(), step


@torch.no_grad()
def judge(backbone: Backbone, data: list[np.ndarray], labels: list[Tensor]) -> dict[str, float]:
    """Accuracy in percent of ridge regression on the last map, the best of three strengths, and of 20 neighbours."""
    mean, std = (255 * torch.tensor(v).view(1, 3, 1, 1) for v in (backbone.mean, backbone.std))
    maps, outputs = [], []
    for images in data:
        parts = [(torch.from_numpy(p).permute(0, 3, 1, 2) - mean) / std for p in np.split(images, len(images) // 250)]
        last = [backbone.stages(part)[-1] for part in parts]
        maps.append(torch.cat([pool_stage(stage, MAX_DIMS) for stage in last]))
        outputs.append(torch.cat([stage.mean(dim=(2, 3)) for stage in last]))
    centre, spread = maps[0].mean(dim=0), maps[0].std(dim=0) + 1e-6
    known, asked = ((m - centre) / spread for m in maps)
    targets = F.one_hot(labels[0]).float() - 1 / (int(labels[0].max()) + 1)
    accuracies = []
    for strength in (1e3, 3e3, 1e4):
        solved = torch.linalg.solve(known.T @ known + strength * torch.eye(known.shape[1]), known.T @ targets)
        accuracies.append(((asked @ solved).argmax(dim=1) == labels[1]).float().mean().item())
    near = knn_accuracy(outputs[0], labels[0], outputs[1], labels[1], ks=[20])[20]
    return {"ridge, last layer": round(100 * max(accuracies), 2), "20 neighbours": round(100 * near, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--trials", nargs="+", choices=list(TRIALS), default=list(TRIALS))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--start", type=Path, help="a finished run of the default recipe to go on from")
    parser.add_argument("--lr", type=float, help="peak of the learning rate, instead of the trial's")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sources = [open_source(path) for path in (given.train, given.test)]
    images = [np.stack([source.image(i) for i in range(len(source))]) for source in sources]
    labels = [torch.from_numpy(np.asarray(source.manifest.labels)) for source in sources]
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.trials:
        if name in results:
            continue
        trial = dataclasses.replace(TRIALS[name], lr=given.lr or TRIALS[name].lr)
        backbone, steps = train(trial, images[0], given.seconds, given.start)
        verdict = judge(backbone, [images[0][:PROBE_IMAGES], images[1]], [labels[0][:PROBE_IMAGES], labels[1]])
        results[name] = {"seconds": given.seconds, "steps": steps, **dataclasses.asdict(trial), **verdict}
        print(name, results[name], flush=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
