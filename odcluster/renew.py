"""Resuming a run whose images or options are not those of before: noticed, explained, and, if wanted, taken in.

Nothing here touches an image. What is carried over, and how no kill can lose it, is said in `training/carry.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from odcluster.config import Config
from odcluster.config_file import decisive, differences, fingerprint
from odcluster.data.added import open_with_added, with_added
from odcluster.data.changes import Changes, compare
from odcluster.data.readers import shown
from odcluster.data.sources import FILES, Manifest, Source
from odcluster.errors import DataError, UserError
from odcluster.explore.curation import carry_edits
from odcluster.ranks import SINGLE
from odcluster.training import carry, checkpoint, shards
from odcluster.training.run import Run

Say = Callable[[str], None]


def settle(run: Run) -> None:
    """Complete a change of the images that was interrupted. The caller holds the run's lock."""

    def edits(before: Manifest, now: Manifest) -> None:
        carry_edits(run.path, before, now)
        for ending in ("", "-wal", "-shm"):  # thumbnails go by id, and can be made again
            (run.path / "explore" / f"thumbnails.sqlite{ending}").unlink(missing_ok=True)

    carry.settle(run, edits)


def check_unchanged(run: Run, config: Config, found: checkpoint.Checkpoint, warn: Say) -> None:
    """Refuse a changed configuration; say when another torch may give other bits."""
    if found.state["config"] != fingerprint(config):
        before = found.state.get("options")  # the first version did not keep them
        told = f" ({'; '.join(differences(before, decisive(config)))})" if before else ""
        raise DataError(
            f"{run.config_file} was changed since {found.path.name} was written{told}; restore it, or start a new run"
        )
    version = found.state["versions"]["torch"]
    if version != torch.__version__:
        warn(f"the run was started with torch {version} and goes on with {torch.__version__}: bits may differ")


def open_images(
    run: Run, data: str | np.ndarray, before: Manifest, *, remap: bool, add: str | os.PathLike[str] | None, warn: Say
) -> tuple[Source, Changes]:
    """The images as they are now, with those to be added, and how they differ from those of the checkpoint.

    Images that changed without being asked to are an error that says what to do.
    """
    source = open_with_added(data, run.manifest().added, skip_missing=remap)
    changes = compare(before, source.manifest)
    if changes and not remap:
        keep = f", or keep what stayed with `odcluster resume {run.path} --remap`"
        raise DataError(
            f"the images are not those of {run.path}. {changes.sentence()} Restore them, or start a new run"
            f"{keep if source.manifest.kind in FILES else ''}"
        )
    if changes and source.manifest.kind not in FILES:
        raise DataError(
            f"--remap tells images apart by their files, and those of {run.path} are {source.manifest.kind}; start a "
            "new run, with --weights to begin from what this one has learned"
        )
    if changes.touched and not remap:
        warn(f"{changes.sentence()} Where that gave another image, --remap looks at it anew")
        source.manifest = with_times_of(before, source.manifest)
    if add is not None:
        source = added_images(run, source, add)
    return source, compare(before, source.manifest)


def with_times_of(before: Manifest, now: Manifest) -> Manifest:
    """The manifest with the times that images of the same name and size had: they are taken for the same."""
    places = {path: id for id, path in enumerate(before.paths)}
    ids = np.array([places.get(path, -1) for path in now.paths], np.int64)
    same = (ids >= 0) & (before.sizes[ids] == now.sizes)
    return dataclasses.replace(now, modified=np.where(same, before.modified[ids], now.modified))


def added_images(run: Run, source: Source, place: str | os.PathLike[str]) -> Source:
    grown = with_added(source, place)
    if len(grown) == len(source):
        raise UserError(
            f"all images of {shown(os.fsdecode(place))} are in {run.path} already (new files in the folder of the run "
            "itself are taken in by --remap)"
        )
    for folder in grown.manifest.folders():
        if Path(os.path.realpath(run.path)).is_relative_to(os.path.realpath(folder)):
            raise UserError(
                f"the run directory {run.path} lies among the images in {shown(folder)}; add the folders beside it one "
                "by one"
            )
    return grown


def take_in(
    run: Run,
    path: Path,
    source: Source,
    before: Manifest,
    changes: Changes,
    config: Config,
    epochs: int | None,
    say: Say,
) -> str:
    """Carry the run over from a checkpoint to the images of the source; returns the name of that from which it goes on.

    For one process alone, whatever the number of ranks that wrote the checkpoint.
    """
    found = shards.load(path, SINGLE)
    if text := changes.sentence():
        say(text)
    if config.method == "labels" and before.class_names != source.manifest.class_names:
        raise DataError("the classes are not those that this run learns; start a new run, or restore the folders")
    num_new = int((changes.origin < 0).sum())
    planned = carry.plan(config, found.state, len(before), len(source), num_new, epochs)
    carry.commit(run, found, before, source.manifest, changes, config, planned)
    settle(run)
    refused = carry_refused(run, source.manifest)
    kept = len(source) - num_new
    say(f"{kept:,} images keep what is known of them, {num_new:,} enter at their first visit{refused}")
    if planned.more_epochs:
        say(f"  {'epochs':14} {planned.more_epochs} more  ({planned.why}; --epochs chooses another number)")
    return f"step-{planned.step:08d}"


def carry_refused(run: Run, manifest: Manifest) -> str:
    """bad_images.csv of the images there are now."""
    state = checkpoint.read_state(checkpoint.candidates(run.checkpoints)[0])
    refused = {int(id): reason for id, reason in state["refused"].items()}
    if refused or run.refused_file.exists():
        run.write_refused((id, manifest.paths[id], reason) for id, reason in refused.items())
    return f"; {len(refused)} could not be used before" if refused else ""
