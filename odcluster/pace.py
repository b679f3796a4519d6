"""--minutes: how many epochs fit into them on this machine."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch

from odcluster.build import build_loader, build_method
from odcluster.config import Config
from odcluster.data.order import num_steps
from odcluster.data.sources import Source
from odcluster.errors import Interrupted
from odcluster.methods.interface import Batch
from odcluster.ranks import Ranks
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag
from odcluster.training.survey import to_network
from odcluster.training.trainer import Trainer

FEWEST_STEPS, MOST_STEPS, SECONDS = 8, 200, 8.0
"""How long is measured."""


def fit_epochs(config: Config, source: Source, device: torch.device, console: Console, ranks: Ranks) -> Config:
    """--minutes: a few real steps on a throw-away network tell the speed; the epochs that fit are then fixed.

    Across ranks, each measures its share of a batch at the same time; what they say to each other is not in it.
    """
    assert config.minutes is not None
    assert config.batch_size is not None
    trial = dataclasses.replace(config, minutes=None, epochs=2, batch_size=config.batch_size // ranks.world_size)
    ranks.meet()
    method = build_method(trial, len(source), device, Console(quiet=True))
    try:
        with StopFlag() as stop, build_loader(trial, source, method, device, console, stop) as loader:
            per_step, per_image = measure(Trainer(method, loader, source.manifest, trial, device, console, stop))
    except Interrupted as stopped:
        raise KeyboardInterrupt from stopped  # nothing has been written yet
    steps = num_steps(len(source), config.batch_size)
    survey = per_image * len(source)
    if config.method == "deepcluster":  # looks at all images, and clusters them, before every epoch
        per_step += 1.5 * survey / steps
    fitting = (config.minutes * 60 * 0.95 - survey) / per_step  # 5 % for checkpoints and the end
    total = max(1, int(fitting))
    fixed = dataclasses.replace(config, minutes=None, epochs=-(-total // steps), max_steps=total)
    speed = f"{per_step * 1000:.0f} ms per step of {config.batch_size} images"
    console.say(
        f"  {'steps':14} {total:,}, or {total / steps:.1f} epochs, fit into {config.minutes:g} minutes  ({speed})"
    )
    return fixed


def measure(trainer: Trainer) -> tuple[float, float]:
    """Seconds of a training step, and of one image's evaluation view and forward pass; nothing is learned.

    All of a step but the memories, which know nothing yet and take little of it.
    """
    device, num_samples, batch_size = trainer.device, len(trainer.manifest), trainer.batch_size
    last = (trainer.config.epochs or 1) - 1  # past a warm start: what most steps will be like
    order = np.arange(num_samples, dtype=np.int64)
    batches = [np.resize(np.roll(order, -at * 7), batch_size) for at in range(MOST_STEPS)]
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    times = []
    began = time.monotonic()
    for raw in trainer.loader.training(0, batches):
        trainer.stop.poll()
        views = to_network(raw.images, trainer.mean, trainer.std)
        with trainer.autocast:
            loss = trainer.module(Batch(raw.ids.to(device), views, epoch=last, step=0)).loss
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
        float(loss.detach())  # waits for the device
        times.append(time.monotonic())
        if len(times) >= FEWEST_STEPS and times[-1] - began > SECONDS:
            break
    per_step = float(np.median(np.diff(times)[len(times) // 2 :]))  # the first steps warm up
    return per_step, per_step / batch_size / 2
