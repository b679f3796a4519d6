"""The verbs `assign`, `embed` and `export`: a run at work, on new images and in other programs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import numpy as np
import torch

from odcluster.data.readers import shown
from odcluster.data.sources import Source, open_source
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation.features import extract_features
from odcluster.evaluation.store import FeatureStore
from odcluster.evaluation.subject import Subject, open_subject
from odcluster.explore.assign import assign_images, open_assigner
from odcluster.explore.atlas import write_atlas, write_image_list
from odcluster.explore.collection import Collection, open_collection
from odcluster.explore.exporters import EXPORTERS, NEED_FEATURES, Job
from odcluster.explore.folders import check_outside, safe_name
from odcluster.explore.network_export import export_onnx, export_timm
from odcluster.explore.tables import Kind, check_ending, open_table
from odcluster.models.backbones import create_backbone
from odcluster.models.checkpoints import printable
from odcluster.ranks import Ranks, joined
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag, choose_device
from odcluster.training.resolve import choose_workers
from odcluster.training.run import open_run
from odcluster.verbs import Assigning, Embedding, Evaluation, Exporting, Format

Data = str | os.PathLike[str] | np.ndarray
Progress = Callable[[str, int, int], None]
T = TypeVar("T")

PLACES = {
    "csv": "clusters.csv",
    "parquet": "clusters.parquet",
    "folders": "folders",
    "timm": "timm",
    "onnx": "backbone.onnx",
    "projector": "projector",
    "coco": "coco",
    "fiftyone": "fiftyone",
}
"""What each format is called in RUN/export."""
SHOWN = 5
"""Unreadable images that are named one by one."""


@contextmanager
def working(console: Console) -> Iterator[Progress]:
    """Progress for people that also polls for Ctrl-C."""
    with StopFlag() as stop, console:

        def progress(activity: str, done: int, total: int) -> None:
            stop.poll()
            console.progress(activity, done, total)

        yield progress


# --- assign -----------------------------------------------------------------------------------------


def assign(run: str | os.PathLike[str], data: Data, *, quiet: bool = False, **options: Any) -> Path:
    """Cluster, confidence and distance of every image of `data`; returns the table. Options as in `odcluster assign`.

    See explore/assign.py for what the numbers mean.
    """
    given = Assigning(**options)
    check_counts(given.batch_size, given.workers)
    console = Console(quiet=quiet)
    opened = open_run(Path(run))
    device = choose_device(given.device)
    source = open_source(data)
    out = Path(given.out) if given.out else opened.path / "assigned" / f"{data_name(data)}.csv"
    check_ending(out)
    check_place(out, data, source)
    workers = given.workers if given.workers is not None else choose_workers(source, device)[0]
    columns: dict[str, Kind] = {
        "path": "text",
        "cluster": "int",
        "name": "text",
        "confidence": "float",
        "distance": "float",
    }
    refused: list[tuple[int, str]] = []
    used: set[int] = set()
    try:
        with joined(device) as ranks, working(console if ranks.is_first else Console(quiet=True)) as progress:
            assigner = in_turn(ranks, lambda: open_assigner(opened, device, progress))
            batches = assign_images(
                assigner,
                source,
                batch_size=given.batch_size,
                workers=workers,
                device=device,
                progress=progress,
                ranks=ranks,
            )
            if not ranks.is_first:
                for _ in batches:  # its share has gone to rank 0
                    pass
                return out
            with open_table(out, columns) as table, closing(batches):
                for batch in batches:
                    clusters = batch.clusters.tolist()
                    table.write(
                        path=[source.manifest.paths[i] for i in batch.ids],
                        cluster=clusters,
                        name=[assigner.names.get(cluster, "") for cluster in clusters],
                        confidence=batch.confidences,
                        distance=batch.distances,
                    )
                    refused += batch.refused
                    used.update(clusters)
    except Interrupted as stopped:
        raise KeyboardInterrupt from stopped  # nothing has been written
    tell_refused(console, refused, source, "have cluster -1")
    console.say(f"{len(source) - len(refused):,} images in {len(used - {-1}):,} clusters: {out}")
    return out


def in_turn(ranks: Ranks, act: Callable[[], T]) -> T:
    """Rank 0 first, then the others, which find what it may have stored."""
    if ranks.is_first:
        done = act()
        ranks.meet()
        return done
    ranks.meet()
    return act()


def tell_refused(console: Console, refused: list[tuple[int, str]], source: Source, what: str) -> None:
    for image, why in refused[:SHOWN]:
        console.warn(f"{shown(source.manifest.paths[image])}: {why}")
    if refused:
        console.warn(f"{len(refused):,} of {len(source):,} images could not be read and {what}")


def check_counts(batch_size: int, workers: int | None) -> None:
    if batch_size < 1 or (workers is not None and workers < 0):
        raise UserError("--batch-size must be 1 or more and --workers 0 or more")


def check_place(out: Path, data: Data, source: Source) -> None:
    """Nothing is written among the images, nor over the list or array that names them."""
    check_outside(out, source.manifest)
    if not isinstance(data, np.ndarray) and out.exists() and os.path.exists(data) and os.path.samefile(out, data):
        raise UserError(f"{out} is the data itself; choose another --out")


def data_name(data: Data) -> str:
    """A name after the data, fit for a file."""
    if isinstance(data, np.ndarray):
        return "array"
    return safe_name(Path(os.path.abspath(os.fsdecode(data))).stem) or "images"


# --- embed ------------------------------------------------------------------------------------------


def embed(subject: str | os.PathLike[str], data: Data, *, quiet: bool = False, **options: Any) -> Path:
    """Features of every image of `data`, without training; returns the file or folder. Options as in `odcluster embed`.

    `subject` is a run, an exported backbone, a weights file, or a backbone's name with `weights` or `untrained`.
    A pass that was stopped goes on where it was.
    """
    given = Embedding(**options)
    check_counts(given.batch_size, given.workers)
    console = Console(quiet=quiet)
    device = choose_device(given.device)
    source = open_source(data)
    workers = given.workers if given.workers is not None else choose_workers(source, device)[0]
    if given.out and Path(given.out).suffix.lower() == ".parquet":
        check_ending(Path(given.out))
    with joined(device) as ranks, working(console if ranks.is_first else Console(quiet=True)) as progress:
        try:
            opened = open_embedder(os.fspath(subject), given, source, workers, device, progress)
            key = f"{opened.fingerprint} {source.manifest.fingerprint()}"
            out = Path(given.out) if given.out else embedding_place(subject, opened, given, data, key)
            check_place(out, data, source)
            folder = Path(ranks.first(lambda: str(work_folder(out))))
            backbone = opened.backbone
            if ranks.is_first:
                console.say(f"{backbone.name} at {backbone.image_size} px: {opened.pretraining}")
            store = extract_features(
                cast(Any, backbone).to(memory_format=torch.channels_last),  # a fifth faster, on CPUs too
                source,
                folder,
                layers=[given.layer],
                whole=False,
                key=key,
                workers=workers,
                device=device,
                progress=progress,
                batch_size=given.batch_size,
                ranks=ranks,
            )
            if not ranks.is_first:
                return out
            deliver_features(store, source, given.layer, out, folder, progress)
        except Interrupted as stopped:
            raise Interrupted("stopped as asked: the same command goes on from here") from stopped
    ids = {path: image for image, path in enumerate(source.manifest.paths)}
    tell_refused(console, [(ids[path], why) for path, why in store.refused], source, "have no feature")
    count, width = int(store.usable.sum()), store.dimensions[given.layer]
    console.say(f"{count:,} images, {width:,} features each: {out}")
    if out.suffix.lower() == ".parquet":
        console.say(f"`embedding-atlas {out} --vector vector --image image` shows them")
    return out


def open_embedder(
    subject: str, given: Embedding, source: Source, workers: int, device: torch.device, progress: Progress
) -> Subject:
    """The backbone that makes the features."""
    backbone, weights = given.backbone, subject
    if not given.untrained and not os.path.exists(os.path.expanduser(subject)):
        if given.weights is None and (subject != "timm" and not subject.startswith("timm:")):
            if os.path.basename(subject) != subject:
                raise DataError(f"there is no run, backbone or weights file {printable(subject)}; check the spelling")
            create_backbone(subject)  # refuses a name that does not exist, with the nearest ones
            raise UserError(
                f"{subject} is the name of a backbone; give its weights with --weights (a file, or `timm` to download "
                "them), or take random ones with --untrained"
            )
        if given.weights is not None:
            backbone, weights = subject, given.weights
    elif given.weights is not None:
        raise UserError("--weights is for a backbone's name; X brings its own weights, so leave it out")
    options = Evaluation(
        task="knn",
        untrained=given.untrained,
        backbone=backbone,
        image_size=given.image_size,
        seed=given.seed,
        workers=workers,
    )
    return open_subject(weights, options, source, np.arange(len(source)), device, progress)


def embedding_place(subject: str | os.PathLike[str], opened: Subject, given: Embedding, data: Data, key: str) -> Path:
    """A folder of its own for every question, so that none overwrites another and a stopped one finds its rows."""
    question = f"{key} {opened.backbone.image_size} {given.layer} {given.batch_size}"
    mark = hashlib.sha256(question.encode()).hexdigest()[:8]
    path = Path(os.path.expanduser(os.fspath(subject)))
    for run in (path, path.parent):
        if (run / "manifest.csv").is_file() and (run / "config.json").is_file():
            return run / "embeddings" / f"{data_name(data)}-{mark}"
    return Path("embeddings") / f"{safe_name(opened.origin) or opened.backbone.name}-{data_name(data)}-{mark}"


def work_folder(out: Path) -> Path:
    """Where rows are collected: the folder itself, or a hidden one beside the file to be."""
    if out.suffix.lower() in (".npy", ".parquet"):
        if out.is_dir():
            raise UserError(f"{out} is a folder; give the name of a file with --out")
        return out.with_name(f".{out.name}.features")
    if out.is_file():
        raise UserError(f"{out} is a file that ends neither in .npy nor in .parquet; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / "progress.json").is_file():
        raise UserError(f"{out} exists and is not empty; choose another folder with --out")
    return out


def deliver_features(
    store: FeatureStore, source: Source, layer: str, out: Path, folder: Path, progress: Progress
) -> None:
    """From the rows to what was asked for."""
    ending = out.suffix.lower()
    if ending == ".parquet":
        write_atlas(out, source, store, layer, progress)
    elif ending == ".npy":
        write_image_list(out.with_name(f"{out.stem}.images.csv"), source, store)
        os.replace(folder / f"{layer}.npy", out)
    else:
        write_image_list(folder / "images.csv", source, store)
    if folder != out:
        shutil.rmtree(folder, ignore_errors=True)


# --- export -----------------------------------------------------------------------------------------


def export(run: str | os.PathLike[str], *, data: np.ndarray | None = None, quiet: bool = False, **options: Any) -> Path:
    """Clusters or weights of a run for other programs; returns where they are. Options as in `odcluster export`.

    `data` only for a run that was given an array in memory, where images are wanted.
    """
    given = Exporting(**options)
    if given.to not in get_args(Format):
        raise UserError(f"there is no format {given.to!r}; use one of {', '.join(get_args(Format))}")
    if given.mode != "copy" and given.to != "folders":
        raise UserError(f"--mode is for --to folders and has no meaning for --to {given.to}; leave it out")
    console = Console(quiet=quiet)
    opened = open_run(Path(run))
    out = Path(given.out) if given.out else opened.path / "export" / PLACES[given.to]
    check_outside(out, opened.manifest())
    if given.to == "timm":
        said = export_timm(opened.path, out, replace=given.out is None)
    elif given.to == "onnx":
        said = export_onnx(opened.path, out)
    else:
        if given.to in ("csv", "parquet"):
            if out.suffix.lower() != f".{given.to}":
                raise UserError(f"--to {given.to} writes a file ending in .{given.to}, and {out} does not")
            check_ending(out)
        try:
            with working(console) as progress:
                collection = open_clusters(opened.path, given.to, data, console, progress)
                job = Job(collection, out, given.mode, progress, replace=given.out is None)
                with closing(collection.curation):
                    said = EXPORTERS[given.to](job)
        except Interrupted as stopped:
            raise KeyboardInterrupt from stopped  # nothing has been put in place
    for sentence in said:
        console.say(sentence)
    return out


def open_clusters(run: Path, to: str, data: np.ndarray | None, console: Console, progress: Progress) -> Collection:
    """The run with its clusters as people corrected them; features are computed only where the format has them."""
    method = open_run(run).config().method
    wanted = to in NEED_FEATURES or method not in ("odc", "deepcluster")
    collection = open_collection(run, compute_features=wanted, say=console.say, progress=progress)
    if data is not None:
        source = open_source(data)
        if difference := collection.manifest.difference(source.manifest):
            raise DataError(f"the array is not the one of {run}. {difference} Give the one that it was trained on")
        collection.source = source
    return collection
