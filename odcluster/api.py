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
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from odcluster import renew
from odcluster.config import Config, changed, features_fingerprint, from_json, to_json
from odcluster.data.loading import Batches, Cache, Loader, RawBatch
from odcluster.data.order import num_steps
from odcluster.data.randomness import Purpose, permutation
from odcluster.data.sources import FileSource, Manifest, PackedSource, Source, open_source
from odcluster.data.subsets import Subset
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation.knn import neighbours_kept
from odcluster.explore.deliver import deliver, similarities_of
from odcluster.methods.colorization import Colorization
from odcluster.methods.deepcluster import DeepCluster
from odcluster.methods.interface import Batch, Method
from odcluster.methods.jigsaw import Jigsaw
from odcluster.methods.labels import Labels
from odcluster.methods.odc import ODC
from odcluster.methods.rotation import Rotation
from odcluster.models.backbones import Backbone, check_takes, create_backbone, freeze_stages
from odcluster.models.sobel import represent
from odcluster.models.weights import describe_weights, load_backbone_weights
from odcluster.ranks import SINGLE, Ranks, joined, local_ranks
from odcluster.recipes import default_recipe
from odcluster.recipes import recipe as recipe_of
from odcluster.training import checkpoint, shards
from odcluster.training.carry import as_of, forget_old_changes
from odcluster.training.console import Console, duration
from odcluster.training.devices import StopFlag, choose_device, seed_torch
from odcluster.training.frozen import FrozenViews, frozen_views
from odcluster.training.parallel import synchronise_norms
from odcluster.training.resolve import describe, describe_warm_start, resolve, without_effect
from odcluster.training.run import Run, RunLock, check_free, create_run, last_launch, open_run
from odcluster.training.survey import extract, to_network
from odcluster.training.trainer import Trainer

METHODS: dict[str, type[ODC | DeepCluster | Rotation | Jigsaw | Colorization | Labels]] = {
    "odc": ODC,
    "deepcluster": DeepCluster,
    "rotation": Rotation,
    "jigsaw": Jigsaw,
    "colorization": Colorization,
    "labels": Labels,
}
SAMPLE = 2000
"""Images among which neighbours are compared before and after fine-tuning."""
FEW_KEPT = 0.1
"""Below this share of kept neighbours, a warning."""


def train(
    data: str | os.PathLike[str] | np.ndarray,
    *,
    out: str | os.PathLike[str] | None = None,
    recipe: str | None = None,
    quiet: bool = False,
    **options: Any,
) -> Path:
    """Train on images; returns the run directory. Options are those of `odcluster train --help-all`."""
    named = recipe or default_recipe(options.get("method", "odc"), weights=bool(options.get("weights")))
    return start(changed(recipe_of(named), **options), data, out, Console(quiet=quiet))


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
        run = Run(Path(ranks.first(lambda: str(create_run(path, config, manifest).path))))
        with locked(run, ranks):
            return execute(run, config, source, method, device, None, console, ranks)


@contextmanager
def locked(run: Run, ranks: Ranks) -> Iterator[None]:
    """Rank 0 holds the lock of the run for all."""
    lock = RunLock(run)
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


def frozen_features(
    run: Run,
    config: Config,
    loader: Loader,
    method: Method,
    manifest: Manifest,
    device: torch.device,
    console: Console,
    stop: StopFlag,
    ranks: Ranks = SINGLE,
) -> FrozenViews:
    """What the frozen backbone makes of all images and views of them: in the run directory, or made now."""
    backbone, views = cast(Backbone, method.backbone), config.fine_tuning.cached_views

    def notice(done: int, total: int) -> None:
        stop.wanted = ranks.any(stop.wanted)
        stop.poll()
        if done:
            console.progress("features of the frozen backbone", done, total)

    try:
        return frozen_views(
            run.path / "features",
            loader,
            backbone,
            manifest=manifest,
            num_features=backbone.num_features,
            num_cached=views,
            num_views=config.augmentation.num_views,
            seed=config.seed,
            device=device,
            identity=features_fingerprint(config),
            progress=notice,
            ranks=ranks,
            bfloat16=config.running.precision == "bfloat16",
        )
    except Interrupted as stopped:
        raise Interrupted(
            f"stopped, the features made so far are kept: `odcluster resume {run.path}` goes on"
        ) from stopped


def build_method(
    config: Config,
    num_samples: int,
    device: torch.device,
    console: Console,
    found: checkpoint.Checkpoint | None = None,
    ranks: Ranks = SINGLE,
) -> Method:
    """Backbone and method, as the seed has them, or ready to take the state of a checkpoint."""
    if found is None:
        backbone = build_backbone(config, console)
    else:  # the weights it started from may be gone; what they decided is in the state
        backbone = new_backbone(config, found.state["stem"])
        mean, std = map(tuple, found.state["normalisation"])
        backbone.set_normalisation(mean, std)
        stored = found.tensors["model"].items()  # features of a frozen backbone may have to be made again
        backbone.load_state_dict({k.removeprefix("backbone."): v for k, v in stored if k.startswith("backbone.")})
        freeze(backbone, config)
    method = synchronise_norms(ranks, METHODS[config.method](backbone, num_samples, config, ranks), device)
    if config.running.compile:
        backbone.compile()
    if config.running.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    cast(Any, backbone).to(device=device, memory_format=torch.channels_last)  # a fifth faster, on CPUs too
    return cast(Method, method.to(device))


def build_backbone(config: Config, console: Console) -> Backbone:
    """A backbone with random weights, or with those the configuration names."""
    backbone = new_backbone(config, stem_of(config.weights))
    if backbone.stem == "small":
        console.say(f"  {'stem':14} small  (3x3, stride 1, no pooling: the images are {config.image_size} px)")
    if config.weights:
        report = load_backbone_weights(backbone, config.weights, min_matched=config.fine_tuning.min_matched)
        console.say(report.text())
    freeze(backbone, config)
    return backbone


def freeze(backbone: Backbone, config: Config) -> None:
    """The stages that are not trained: those asked for, or all of them."""
    frozen = config.fine_tuning.frozen
    freeze_stages(backbone, len(backbone.stage_names) if frozen else config.fine_tuning.freeze_stages)
    if frozen:
        backbone.requires_grad_(False)


def new_backbone(config: Config, stem: Literal["auto", "standard", "small"]) -> Backbone:
    """The backbone with the random weights of the seed; it must take training crops as well as whole images."""
    assert config.backbone is not None
    assert config.image_size is not None
    seed_torch(config.seed, Purpose.WEIGHTS)
    in_channels = 2 if config.method == "deepcluster" and config.deepcluster.sobel else 3
    backbone = create_backbone(config.backbone, image_size=config.image_size, in_channels=in_channels, stem=stem)
    if (crop := config.augmentation.crop_size) not in (None, config.image_size) and config.method != "jigsaw":
        check_takes(backbone, crop)
    return backbone


def stem_of(weights: str | None) -> Literal["auto", "standard", "small"]:
    """Weights decide about the stem: those of another run have its own, those of others the standard one."""
    if weights is None:
        return "auto"
    described = describe_weights(weights)
    return "small" if described is not None and described["stem"] == "small" else "standard"


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


def build_loader(
    config: Config, source: Source, method: Method, device: torch.device, console: Console, stop: StopFlag
) -> Loader:
    assert config.image_size is not None
    assert config.workers is not None
    backbone = cast(Backbone, method.backbone)
    cache, augmentation = None, config.augmentation
    if config.fine_tuning.frozen:
        augmentation = dataclasses.replace(augmentation, num_views=config.fine_tuning.cached_views)
    if isinstance(source, FileSource | PackedSource | Subset) and config.running.cache_gb > 0:
        size = min(config.image_size, config.augmentation.crop_size or config.image_size)
        cache = Cache(source, size, int(config.running.cache_gb * 1e9 / local_ranks()))

        def notice(done: int) -> None:
            stop.poll()
            console.progress("reading images into memory", done, len(source))

        cache.fill(notice)
    return Loader(
        source,
        augmentation,
        image_size=config.image_size,
        seed=config.seed,
        workers=config.workers,
        normalisation=(backbone.mean, backbone.std),
        cache=cache,
        pin_memory=device.type == "cuda",
        poll=stop.poll,
        warn=console.warn,
    )


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
            per_step, per_image = measure(trial, method, loader, len(source), device, stop)
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


def measure(
    config: Config, method: Method, loader: Loader, num_samples: int, device: torch.device, stop: StopFlag
) -> tuple[float, float]:
    """Seconds of a training step, and of one image's evaluation view and forward pass."""
    module = cast(nn.Module, method)
    mean, std = loader.normalisation_on(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    last = (config.epochs or 1) - 1  # past a warm start: what most steps will be like
    order = np.arange(num_samples, dtype=np.int64)
    batches = [np.resize(np.roll(order, -at * 7), config.batch_size or 1) for at in range(60)]
    times = []
    began = time.monotonic()
    for raw in loader.training(0, batches):
        stop.poll()
        loss = module(Batch(raw.ids.to(device), to_network(raw.images, mean, std), epoch=last, step=0)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        float(loss.detach())  # waits for the device
        times.append(time.monotonic())
        if len(times) >= 8 and times[-1] - began > 8:
            break
    per_step = float(np.median(np.diff(times)[len(times) // 2 :]))  # the first steps warm up
    return per_step, per_step / (config.batch_size or 1) / 2


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
