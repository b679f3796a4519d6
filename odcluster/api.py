"""The verbs as Python functions, with the same options as the command line."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from odcluster import renew
from odcluster.build import build_backbone, build_loader, build_method, frozen_features
from odcluster.config import Config, changed
from odcluster.config_file import from_json, to_json
from odcluster.data.loading import Batches, Loader, RawBatch
from odcluster.data.order import num_steps
from odcluster.data.randomness import permutation
from odcluster.data.sources import Manifest, Source, open_source
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation.knn import neighbours_kept
from odcluster.explore.deliver import deliver, similarities_of
from odcluster.methods.interface import Method
from odcluster.methods.labels import Labels
from odcluster.methods.odc import ODC
from odcluster.models.backbones import Backbone
from odcluster.models.sobel import represent
from odcluster.pace import fit_epochs
from odcluster.ranks import SINGLE, Ranks, joined
from odcluster.recipes import default_recipe
from odcluster.recipes import recipe as recipe_of
from odcluster.training import checkpoint, shards
from odcluster.training.carry import as_of, forget_old_changes
from odcluster.training.console import Console, duration
from odcluster.training.devices import StopFlag, choose_device
from odcluster.training.resolve import describe, describe_warm_start, resolve, without_effect
from odcluster.training.run import Run, check_free, create_run, last_launch, open_run, run_lock
from odcluster.training.survey import extract
from odcluster.training.trainer import Trainer

SAMPLE = 2000
"""Images among which neighbours are compared before and after fine-tuning."""
FEW_KEPT = 0.1
"""Below this share of kept neighbours, a warning."""


def train(
    data: str | os.PathLike[str] | np.ndarray,
    *,
    out: str | os.PathLike[str] | None = None,
    recipe: str | None = None,
    dry_run: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Path:
    """Train on images; returns the run directory. Options are those of `odcluster train --help-all`."""
    named = recipe or default_recipe(options.get("method", "odc"), weights=bool(options.get("weights")))
    begin = rehearse if dry_run else start
    return begin(changed(recipe_of(named), **options), data, out, Console(quiet=quiet))


def speaking(console: Console, ranks: Ranks) -> Console:
    """One rank speaks to people."""
    return console if ranks.is_first else Console(quiet=True)


def start(
    config: Config,
    data: str | os.PathLike[str] | np.ndarray,
    out: str | os.PathLike[str] | None,
    console: Console,
) -> Path:
    """A new run with this configuration. Nothing is written before everything that can be checked has been.

    When torchrun starts its processes again after a failure, the run that they had begun goes on.
    """
    if (begun := begun_before(data, out)) is not None:
        return resume(begun, data=data if isinstance(data, np.ndarray) else None, console=console)
    device = choose_device(config.device)
    with joined(device) as ranks:
        console = speaking(console, ranks)
        config, source, method, path = prepare(config, data, out, device, console, ranks)
        run = Run(Path(ranks.first(lambda: str(create_run(path, config, source.manifest).path))))
        with locked(run, ranks):
            return execute(run, config, source, method, device, None, console, ranks)


def rehearse(
    config: Config,
    data: str | os.PathLike[str] | np.ndarray,
    out: str | os.PathLike[str] | None,
    console: Console,
) -> Path:
    """All that comes before the first step of a new run, and what it would come to; nothing is written. Returns where
    the run would be.
    """
    device = choose_device(config.device)
    with joined(device) as ranks:
        console = speaking(console, ranks)
        config, source, method, path = prepare(config, data, out, device, console, ranks)
    for line in describe_plan(config, method, len(source), path):
        console.say(line)
    return path


def prepare(
    config: Config,
    data: str | os.PathLike[str] | np.ndarray,
    out: str | os.PathLike[str] | None,
    device: torch.device,
    console: Console,
    ranks: Ranks,
) -> tuple[Config, Source, Method, Path]:
    """Everything about a new run that can be checked, chosen and told before anything is written."""
    path = Path(ranks.first(lambda: str(free_place(data, out))))
    source = open_source(data)
    manifest = source.manifest
    if manifest.kind in ("folder", "class tree"):
        ranks.first(lambda: check_free(path, manifest.root))
    check_same_images(ranks, manifest)
    config = with_absolute_paths(config, data)
    for sentence in without_effect(config):
        console.warn(sentence)
    config, chosen = resolve(config, source, device)
    config = agreed(config, ranks)
    about = [f"{len(source):,} images ({manifest.kind}) in {manifest.root or 'memory'}", *describe(chosen)]
    if config.minutes is not None:
        console.say("\n".join(about))
        about = []
        config = agreed(fit_epochs(config, source, device, console, ranks), ranks)
    method = build_method(config, len(source), device, console, ranks=ranks)
    for line in [*about, *describe_ranks(ranks), *describe_warm_start(config)]:
        console.say(line)
    return config, source, method, path


def describe_plan(config: Config, method: Method, num_samples: int, path: Path) -> list[str]:
    """How long a run would be, and what it would take on the disk."""
    assert config.epochs is not None
    assert config.batch_size is not None
    steps = config.epochs * num_steps(num_samples, config.batch_size)
    steps = steps if config.max_steps is None else min(steps, config.max_steps)
    module = cast(nn.Module, method)
    learned = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    kept = sum(t.nbytes for t in module.state_dict().values())
    copies = 2 if config.optimiser.algorithm == "adamw" else 1  # of what is learned, in the optimiser
    memory = method.samples.rows.nbytes if isinstance(method, ODC) else 0
    samples = f", {memory / 1e6:,.1f} of them the samples memory" if memory else ""
    return [
        f"  {'to be done':14} {steps:,} steps of {config.batch_size} images",
        f"  {'checkpoints':14} about {(kept + copies * learned) / 1e6:,.1f} MB each{samples}",
        f"nothing was written: without --dry-run the run would be {path}",
    ]


@contextmanager
def locked(run: Run, ranks: Ranks) -> Iterator[None]:
    """Rank 0 holds the lock of the run for all."""
    lock = run_lock(run)
    ranks.first(lambda: lock.__enter__() is lock)
    try:
        yield
    finally:
        lock.__exit__()


def begun_before(data: str | os.PathLike[str] | np.ndarray, out: str | os.PathLike[str] | None) -> Path | None:
    """The run that this very launch has begun, when torchrun restarts it after a failure."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if not launch or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    paths = [Path(out)] if out is not None else taken_names(data)
    return next((path for path in reversed(paths) if last_launch(path) == launch), None)


def free_place(data: str | os.PathLike[str] | np.ndarray, out: str | os.PathLike[str] | None) -> Path:
    path = Path(out) if out is not None else free_name(data)
    check_free(path)
    return path


def check_same_images(ranks: Ranks, manifest: Manifest) -> None:
    """All ranks must see the same images: a disk that is not mounted everywhere would mix up their ids."""
    prints = ranks.share(manifest.fingerprint())
    if len(set(prints)) > 1:
        others = [rank for rank, found in enumerate(prints) if found != prints[0]]
        raise DataError(
            f"rank {others[0]} sees other images in {manifest.root} than rank 0; use a disk that all machines share"
        )


def agreed(config: Config, ranks: Ranks) -> Config:
    """The configuration of rank 0; machines may differ in what they would have chosen."""
    config = config if ranks.world_size == 1 else from_json(ranks.share(to_json(config))[0])
    least = 2 * ranks.world_size
    if config.batch_size is not None and config.batch_size < least:
        raise UserError(
            f"a batch of {config.batch_size} cannot be shared by {ranks.world_size} ranks, which need two images each: "
            f"use --batch-size {least} or more"
        )
    return config


def describe_ranks(ranks: Ranks) -> list[str]:
    if ranks.world_size == 1:
        return []
    return [f"  {'ranks':14} {ranks.world_size}  (each has its share of every batch, and of the samples memory)"]


def with_absolute_paths(config: Config, data: str | os.PathLike[str] | np.ndarray) -> Config:
    """Images and weights as a resume from another folder finds them."""
    if not isinstance(data, np.ndarray):
        name = os.path.expanduser(os.fspath(data))
        config = dataclasses.replace(config, data=os.path.abspath(name) if os.path.exists(name) else name)
    if config.weights and os.path.exists(name := os.path.expanduser(config.weights)):
        config = dataclasses.replace(config, weights=os.path.abspath(name))
    return config


def resume(
    run_path: str | os.PathLike[str],
    *,
    data: np.ndarray | None = None,
    remap: bool = False,
    add: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    workers: int | None = None,
    device: str | None = None,
    max_refused: float | None = None,
    quiet: bool = False,
    console: Console | None = None,
) -> Path:
    """Go on with an interrupted run, exactly. `data` only for a run that was given an array in memory.

    Images that changed meanwhile are an error, unless `remap` says to keep what is known of those that stayed. `add`
    names a folder of further images, also for a finished run; `epochs` are trained more than planned. With another
    number of ranks the same images, views and decisions follow, and numbers to rounding.
    """
    console = console or Console(quiet=quiet)
    run = open_run(Path(run_path), settled=False)
    if epochs is not None and epochs < 1:
        raise UserError(f"--epochs {epochs}: a resumed run can only be trained longer, by 1 epoch or more")
    chosen_device = choose_device(device or run.config().device)
    with joined(chosen_device) as ranks, locked(run, ranks):
        console = speaking(console, ranks)
        ranks.first(lambda: tidy(run))
        found = shards.find(run.checkpoints, console.warn, ranks)
        before, stored = as_of(run, found.state) if found else (run.manifest(), run.config())
        options = {"workers": workers, "max_refused": max_refused}
        given = {name: value for name, value in options.items() if value is not None}
        config = changed(stored, **given)
        if data is None and not config.data:
            raise UserError(f"{run.path} was trained on an array in memory: resume it from Python with data=...")
        if found:
            renew.check_unchanged(run, config, found, console.warn)
        images = data if data is not None else config.data
        source, changes = renew.open_images(run, images, before, remap=remap, add=add, warn=console.warn)
        check_same_images(ranks, source.manifest)
        if epochs and not found:
            raise UserError(
                f"{run.path} has not been trained yet: `odcluster resume {run.path}` without --epochs begins"
            )
        if found and (changes or changes.touched or epochs):
            take_in = partial(renew.take_in, run, found.path, source, before, changes, stored, epochs, console.say)
            found = shards.load(run.checkpoints / ranks.first(take_in), ranks)
            config = changed(run.config(), **given)
        elif changes:
            ranks.first(partial(source.manifest.write, run.manifest_file))
        config = agreed(config, ranks)
        where = f"resuming {run.path} at step {found.state['step']}" if found else ""
        console.say(where or f"starting {run.path} from the beginning")
        method = build_method(config, len(source), chosen_device, console, found, ranks)
        return execute(run, config, source, method, chosen_device, found, console, ranks)


def tidy(run: Run) -> None:
    """Put away, or complete, what a process that was killed has left behind."""
    run.sweep()
    renew.settle(run)


def execute(
    run: Run,
    config: Config,
    source: Source,
    method: Method,
    device: torch.device,
    found: checkpoint.Checkpoint | None,
    console: Console,
    ranks: Ranks = SINGLE,
) -> Path:
    """Train to the end and write what people take away."""
    if isinstance(method, Labels) and source.manifest.labels is not None:
        method.take(source.manifest.labels)
    with StopFlag() as stop, console:
        if ranks.is_first:
            console.log_to(run.log_file)
        started = time.monotonic()
        try:
            loader = build_loader(config, source, method, device, console, stop)
            ranks.meet()
        except Interrupted as stopped:
            raise Interrupted(f"stopped before the first step: `odcluster resume {run.path}` starts it") from stopped
        with loader:
            batches: Batches = loader
            if config.fine_tuning.frozen:
                batches = frozen_features(run, config, loader, method, source.manifest, device, console, stop, ranks)
            Trainer(method, batches, source.manifest, config, device, console, stop, ranks).run(run, found)
            similarities = similarities_of(method)
            if not ranks.is_first:  # what is left to do is writing
                return run.path
            trained = config.weights and not config.fine_tuning.frozen
            try:
                kept = kept_neighbours(config, method, loader, len(source), device, console, stop) if trained else None
                stop.poll()
            except Interrupted as stopped:
                raise Interrupted(
                    f"stopped, the training is complete and saved: `odcluster resume {run.path}` writes what came of it"
                ) from stopped
        forget_old_changes(run)
        console.say(f"done in {duration(time.monotonic() - started)}: {run.path}", style="bold")
        for sentence in deliver(run, config, source, method, similarities):
            console.say(f"  {sentence}")
        if kept is not None:
            console.say(
                f"  {kept:.0%} of each image's 10 nearest neighbours are those it had under the weights it started from"
            )
            if kept < FEW_KEPT:
                console.warn(
                    "training changed nearly everything these weights knew; if that was not wanted, use a lower --lr, "
                    "--freeze-stages or --layer-decay"
                )
    return run.path


def kept_neighbours(
    config: Config,
    method: Method,
    loader: Loader,
    num_samples: int,
    device: torch.device,
    console: Console,
    stop: StopFlag,
) -> float | None:
    """What fine-tuning did to the features, without labels: the share of nearest neighbours that stayed."""
    try:
        before = build_backbone(config, Console(quiet=True)).to(device)
    except DataError as error:  # training is done and saved: not a reason to fail
        console.warn(f"the features cannot be compared with those of the weights it started from: {error}")
        return None
    ids = np.sort(permutation(config.seed, 0, num_samples)[:SAMPLE])
    rows = []
    for name, backbone in (("before", before), ("after", cast(Backbone, method.backbone))):
        backbone.eval()
        notice = partial(_show, console, stop, f"features {name} training", len(ids))
        found, seen = extract(represent(backbone), loader, ids, device, notice)
        rows.append(found[seen])
    return neighbours_kept(rows[0], rows[1])


def _show(console: Console, stop: StopFlag, activity: str, total: int, raw: RawBatch, done: int) -> None:
    stop.poll()
    console.progress(activity, done, total)


def free_name(data: str | os.PathLike[str] | np.ndarray) -> Path:
    """runs/NAME after the data."""
    return numbered(data_name(data))


def data_name(data: str | os.PathLike[str] | np.ndarray) -> str:
    name = "array" if isinstance(data, np.ndarray) else Path(os.path.abspath(os.fspath(data))).stem or "images"
    return f"runs/{name}"


def numbered(name: str) -> Path:
    """The path of that name, with a number where it is taken."""
    return next(path for path in numbers(name) if not path.exists())


def numbers(name: str) -> Iterator[Path]:
    yield Path(name)
    yield from (Path(f"{name}-{number}") for number in itertools.count(2))


def taken_names(data: str | os.PathLike[str] | np.ndarray) -> list[Path]:
    """Those of the names after the data that are taken."""
    return list(itertools.takewhile(Path.exists, numbers(data_name(data))))
