"""What `screening.py` tries: the choices of each trial, its network, memories and losses."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from peers.train import DIM, HIDDEN
from torch import Tensor, nn
from torch.nn import functional as F

from odcluster.clustering.kmeans import kmeans
from odcluster.models.backbones import create_backbone
from odcluster.models.networks import SmallConv
from odcluster.training.devices import has_bfloat16

CPU = torch.device("cpu")
SIDE = 32
MEMORY_MOMENTUM = 0.5
STAGES = ["conv1", "conv2", "conv3", "conv4", "conv5"]


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
    teacher: float = 0.0  # views are told by a copy of the network that follows it with this momentum
    predictor: bool = False  # beside the teacher: a layer of the network's own behind the neck
    mixed: bool = False  # the first view of each image is mixed with that of another (i-Mix)
    rotations: float = 0.0  # weight of predicting by how many quarters a further view of 16 px is turned
    widths: tuple[int, ...] = SmallConv.widths  # of the backbone
    false_negatives: float = 0.0  # this share of the negatives is taken for hidden positives (debiased contrast)
    hardness: float = 0.0  # how much more the nearer negatives count
    masked_clusters: int = 0  # images with the same label of so many clusters are no negatives of each other
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
    "muon 0.05, mixed": Trial(mixed=True, **BEST),
    "muon 0.05, rotations": Trial(rotations=0.5, **BEST),
    "muon 0.05, last layers of 256": Trial(widths=(32, 64, 128, 256, 256), **BEST),
    "muon 0.05, debiased, hard": Trial(false_negatives=0.1, hardness=0.5, **BEST),
    "muon 0.05, no negatives of one's own cluster": Trial(masked_clusters=200, **BEST),
    "muon 0.05, teacher 0.99, predictor": Trial(teacher=0.99, predictor=True, **BEST),
}


class Network(nn.Module):
    """Backbone and neck; with SwAV's loss, its prototypes."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        SmallConv.widths = trial.widths
        self.backbone = create_backbone("smallconv", image_size=SIDE)
        self.backbone.to(memory_format=torch.channels_last)
        features = self.backbone.num_features
        widths = [features] + [trial.hidden] * (trial.neck_layers - 1)
        layers = [(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.neck = nn.Sequential(*itertools.chain(*layers), nn.Linear(widths[-1], DIM))
        self.trial, self.cells = trial, None
        if trial.predictor:
            self.predictor = nn.Sequential(
                nn.Linear(DIM, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM)
            )
        if trial.local:
            wide = self.backbone.network.widths[STAGES.index(trial.local)]
            self.local_neck = nn.Sequential(
                nn.Linear(wide, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM)
            )
        if trial.rotations:
            self.turns = nn.Linear(features, 4)
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


def debiased(views: Tensor, targets: Tensor, trial: Trial) -> Tensor:
    """Chuang et al. 2020, with the weights of Robinson et al. 2021: negatives less the positives among them."""
    logits = views @ views.T / trial.temperature
    own = logits.gather(1, targets[:, None])[:, 0]
    others = torch.ones_like(logits, dtype=torch.bool).fill_diagonal_(False).scatter(1, targets[:, None], False)
    negatives, count = logits[others].view(len(views), -1), len(views) - 2
    weights = (trial.hardness * negatives).softmax(dim=1) * count
    total = (weights * negatives.exp()).sum(dim=1) - trial.false_negatives * count * own.exp()
    total = (total / (1 - trial.false_negatives)).clamp(min=count * math.exp(-1 / trial.temperature))
    return (torch.log(own.exp() + total) - own).mean()


def told_by_the_others(views: Tensor, trial: Trial) -> Tensor:
    """Each of the views [V, B, D] of an image: the mean of its others, against the means of all other images."""
    total = views.sum(dim=0)
    others = F.normalize(total - views, dim=2)
    logits = torch.einsum("vbd,cd->vbc", views, F.normalize(total, dim=1)) / trial.temperature  # [V, B, B]
    own = (views * others).sum(dim=2) / trial.temperature
    logits = torch.diagonal_scatter(logits, own, dim1=1, dim2=2)
    return F.cross_entropy(logits.flatten(0, 1), torch.arange(len(total)).repeat(len(views)))


def losses(
    network: Network,
    features: Tensor,
    size: int,
    ids: Tensor,
    memories: Memories,
    trial: Trial,
    taught: Tensor | None = None,
) -> Tensor:
    """Of the features [V B and small crops, D] of V views and small crops of B images; `taught` are the teacher's."""
    views, small, own = features[: trial.views * size], features[trial.views * size :], torch.arange(2 * size)
    if trial.views > 2:
        return told_by_the_others(views.unflatten(0, (trial.views, size)), trial)
    if trial.loss == "swav":
        return network.swav(list(network.prototypes(views).chunk(2)), [])
    if trial.mixed:
        first, second = views.chunk(2)
        logits, targets = first @ second.T / trial.temperature, memories.mixture
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets.T)) / 2
    others = views if taught is None else taught
    if trial.predictor:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(CPU)):
            views = network.predictor(views)
        views = F.normalize(views.float(), dim=1)
    hidden = torch.eye(2 * size, dtype=torch.bool)
    if trial.masked_clusters and memories.labels is not None:
        labels = memories.labels[ids].repeat(2)
        hidden |= labels[:, None] == labels
        hidden[own, (own + size) % (2 * size)] = False
    if trial.false_negatives:
        return debiased(views, (own + size) % (2 * size), trial)
    loss = told_apart(views, others, (own + size) % (2 * size), trial, hidden)
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
    if memories.labels is not None and trial.swapped_clusters:
        target = memories.scores(views.detach()).softmax(dim=1).roll(size, dims=0)
        loss = loss - (target * (views @ memories.centroids.T / 0.1).log_softmax(dim=1)).sum(dim=1).mean()
    return loss
