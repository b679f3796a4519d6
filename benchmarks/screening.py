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
import copy
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.train import make_optimiser
from torch import Tensor
from torch.nn import functional as F
from trials import CPU, SIDE, TRIALS, Memories, Network, Trial, losses

from odcluster.config import Augmentation
from odcluster.data.order import batch_ids, epoch_order
from odcluster.data.sources import open_source
from odcluster.data.views import apply_view, draw_views
from odcluster.evaluation.knn import knn_accuracy
from odcluster.evaluation.linear import pool_stage
from odcluster.models.backbones import Backbone
from odcluster.recipes import odc_small
from odcluster.training import checkpoint, optimisers
from odcluster.training.devices import has_bfloat16

PROBE_IMAGES, MAX_DIMS = 10_000, 2048
WARM = 0.03
FURTHER = 1000
"""Epochs of a trial that goes on are numbered from here, so that it sees other views than the run did."""


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
    network = Network(trial)
    memories = Memories(len(images), trial.swapped_clusters or trial.masked_clusters)
    if start is not None:
        go_on(network, memories, start)
    optimiser = make_optimiser(network, trial.algorithm, trial.lr, trial.weight_decay)
    teacher = copy.deepcopy(network).requires_grad_(False) if trial.teacher else None
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
        if trial.mixed:
            share, partner = float(np.random.default_rng((trial.seed, step)).uniform()), torch.randperm(len(chosen))
            one = groups[0][: len(chosen)]
            groups[0] = torch.cat([share * one + (1 - share) * one[partner], groups[0][len(chosen) :]])
            memories.mixture = share * torch.eye(len(chosen)) + (1 - share) * torch.eye(len(chosen))[partner]
        features = network(*groups)
        with torch.no_grad():
            taught = None if teacher is None else teacher(*groups)
        loss = losses(network, features, len(chosen), ids, memories, trial, taught)
        if trial.rotations:
            plain = seen(chosen, epoch, trial.views, 16, whole)
            quarters = torch.randint(4, (len(chosen),))
            turned = torch.stack([torch.rot90(v, int(q), (1, 2)) for v, q in zip(plain, quarters, strict=True)])
            with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16(CPU)):
                said = network.turns(network.backbone(turned.contiguous(memory_format=torch.channels_last)))
            loss = loss + trial.rotations * F.cross_entropy(said.float(), quarters)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            views = features[: trial.views * len(chosen)].unflatten(0, (trial.views, -1))
            memories.update(ids, views.mean(dim=0), step)
            if teacher is not None:
                momentum = min(trial.teacher, (1 + step) / (10 + step))
                for followed, own in zip(network.parameters(), teacher.parameters(), strict=True):
                    own.lerp_(followed, 1 - momentum)
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
