"""A run whose images changed: its state carried over to the new set of images, without losing the old at any instant.

Everything that is indexed by image is carried by one function, `rows_of`, from the ids that images had to those they
have. What stayed keeps its row and label to the bit; what is gone takes its part out of sums and counts; what is new
has label -1 until its first visit. The steps of a run go on counting: `Schedule.anchor` says where epochs of the new
length begin.

On disk a change is RUN/changes/step-00001234/, with the manifest and configuration before and after, and the checkpoint
of that step. As long as the checkpoint is not there, nothing has happened; from the instant it is, the change holds,
and `settle` only moves files to where they are looked for. A kill in between is put right by the next resume.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from odcluster.clustering.kmeans import cluster_sums
from odcluster.clustering.memory import UNSEEN
from odcluster.config import Config
from odcluster.config_file import decisive, fingerprint, from_json, to_json
from odcluster.data.changes import Changes
from odcluster.data.order import num_steps
from odcluster.data.sources import Manifest
from odcluster.errors import DataError
from odcluster.methods.odc import fine_epochs, warm_epochs
from odcluster.training import checkpoint
from odcluster.training.checkpoint import Checkpoint
from odcluster.training.run import Run
from odcluster.training.schedule import lay_out

LEAST_SHARE = 0.1
"""New images are worth at least this share of a run's epochs, however few they are."""

Tensors = dict[str, dict[str, Tensor]]


# --- Tensors ----------------------------------------------------------------------------------------


def rows_of(values: Tensor, origin: Tensor, fill: float) -> Tensor:
    """One row per image, from the ids they had: row i is the old row `origin[i]`, or `fill` where that is -1."""
    carried = torch.full((len(origin), *values.shape[1:]), fill, dtype=values.dtype)
    kept = origin >= 0
    carried[kept] = values[origin[kept]]
    return carried


def carried_tensors(tensors: Tensors, origin: Tensor) -> Tensors:
    """The tensors of a checkpoint for other images. Weights and optimiser stay as they are."""
    memory, model = dict(tensors["memory"]), dict(tensors["model"])
    for name, fill in (("samples.rows", 0.0), ("samples.labels", UNSEEN), ("samples.similarities", 0.0)):
        if name in memory:
            memory[name] = rows_of(memory[name], origin, fill)
    labels = memory.get("samples.labels")
    if "centroids.counts" in memory:
        assert labels is not None
        before = memory["centroids.counts"]
        sums, counts = cluster_sums(memory["samples.rows"], labels, len(before))
        memory["centroids.sums"], memory["centroids.counts"] = sums.to(memory["centroids.sums"]), counts
        memory["centroids.recorded"] = memory["centroids.recorded"] | (counts != before)
    if "samples.counts" in memory:
        assert labels is not None
        memory["samples.counts"] = torch.bincount(labels[labels >= 0], minlength=len(memory["samples.counts"]))
    if "neighbours" in model:  # each its own, until the method has looked at all of them
        model["neighbours"] = torch.arange(len(origin))[:, None].expand(-1, model["neighbours"].shape[1]).contiguous()
    return {**tensors, "memory": memory, "model": model}


def check_enough(memory: Mapping[str, Tensor], config: Config) -> None:
    """Refuse to go on with fewer images than the clusters of a run need (see `balance.check_room`)."""
    labels, counts = memory.get("samples.labels"), memory.get("centroids.counts")
    if labels is None or counts is None or not bool(counts.any()):
        return
    num_images, fine = int((labels >= 0).sum()), len(counts) != config.clusters
    threshold = 0 if config.clustering.one_pass else config.clustering.small_cluster or 0
    threshold = min(threshold, len(labels) // len(counts) // 4) if fine else threshold
    if num_images < 2 * (threshold + 1) * len(counts):
        raise DataError(
            f"only {num_images} images stay, too few for the {len(counts)} clusters of this run; start a new run with "
            "fewer, or restore the images"
        )


# --- The plan ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a run stands, and how it goes on."""

    config: Config
    step: int
    epoch: int
    begun: bool
    more_epochs: int
    why: str


def plan(config: Config, state: Mapping[str, Any], before: int, now: int, num_new: int, epochs: int | None) -> Plan:
    """How a run goes on with `now` images instead of `before`, `num_new` of them new, for `epochs` more than planned.

    The epoch that was interrupted begins again. Not given, `epochs` follows from how much is new.
    """
    assert config.epochs is not None
    assert config.batch_size is not None
    old, new = (num_steps(count, min(config.batch_size, count)) for count in (before, now))
    schedule = lay_out([], old, config.epochs, config.max_steps, tuple(state.get("anchor", (0, 0))))
    epoch, position = schedule.place(state["step"])
    finished = state.get("finished", False)
    if finished and position:  # --minutes and --max-steps end within an epoch
        epoch, position = epoch + 1, 0
    left = 0.0 if finished else (schedule.total_steps - schedule.first_step(epoch)) / old
    share = num_new / now
    wanted = math.ceil(config.epochs * max(share, LEAST_SHARE)) if num_new else 0
    more = max(0, math.ceil(wanted - left)) if epochs is None else epochs
    why = f"{share:.1%} of the images are new, and the run was planned for {config.epochs} epochs"
    step = state["step"] + 1  # a number of its own, after all that were written
    end = step + round((left + more) * new)
    longer = extended(config, max(config.epochs, math.ceil(epoch + left + more)), end if config.max_steps else None)
    begun = state["begun"] and not finished
    return Plan(longer, step, epoch, begun, more, why if epochs is None else "as asked for")


def extended(config: Config, epochs: int, max_steps: int | None) -> Config:
    """The same run with more epochs: phases that lie behind it stay as long as they were."""
    if epochs == config.epochs:
        return dataclasses.replace(config, max_steps=max_steps)
    warm, fine = warm_epochs(config) / epochs, fine_epochs(config) / epochs
    warm_start = dataclasses.replace(config.warm_start, warm_share=warm, fine_share=fine)
    return dataclasses.replace(config, epochs=epochs, max_steps=max_steps, warm_start=warm_start)


# --- On disk ----------------------------------------------------------------------------------------


def commit(
    run: Run, found: Checkpoint, before: Manifest, now: Manifest, changes: Changes, old: Config, planned: Plan
) -> None:
    """Write the state for the new images. A kill in here leaves the run as it was, or so that `settle` ends it."""
    tensors = found.tensors
    if changes or changes.touched:
        tensors = carried_tensors(tensors, torch.from_numpy(changes.origin))
        check_enough(tensors["memory"], planned.config)
    folder = change_folder(run, planned.step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before.write(folder / "before.csv")
    now.write(folder / "manifest.csv")
    checkpoint.write_flushed(folder / "before.json", to_json(old))
    checkpoint.write_flushed(folder / "config.json", to_json(planned.config))
    checkpoint.flush(folder)
    new_ids = changes.new_ids()
    refused = {int(id): reason for id, reason in found.state["refused"].items()}
    state = {key: value for key, value in found.state.items() if key not in ("files", "format", "step")}
    state |= {
        "refused": {int(new_ids[id]): reason for id, reason in refused.items() if new_ids[id] >= 0},
        "manifest": now.fingerprint(),
        "config": fingerprint(planned.config),
        "options": decisive(planned.config),
        "anchor": (planned.step, planned.epoch),
        "begun": planned.begun,
        "finished": False,
        "changed": None,
    }
    if changes or changes.touched:
        num_new, num_gone = int((changes.origin < 0).sum()), int((new_ids < 0).sum())
        state["changed"] = {"images": len(now), "images_new": num_new, "images_gone": num_gone}
    try:
        checkpoint.save(run.checkpoints, planned.step, tensors, state)
    except checkpoint.NotSaved as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise DataError(f"{error}; the run is as it was: free some space and repeat the command") from error


def change_folder(run: Run, step: int) -> Path:
    return run.changes / f"step-{step:08d}"


def settle(run: Run, carry_edits: Callable[[Manifest, Manifest], None]) -> None:
    """Complete a change that was interrupted after its checkpoint was written, and forget one from before that.

    `carry_edits(before, now)` does the same to what people decided in the explorer; it may be called twice.
    """
    for folder in sorted(run.changes.glob("step-*")) if run.changes.is_dir() else []:
        if not (folder / "manifest.csv").is_file():
            continue
        if not (run.checkpoints / folder.name / "state.json").is_file():
            shutil.rmtree(folder)
            continue
        carry_edits(Manifest.read(folder / "before.csv"), Manifest.read(folder / "manifest.csv"))
        checkpoint.reached("before the new configuration")
        if (folder / "config.json").is_file():
            os.replace(folder / "config.json", run.config_file)
        checkpoint.reached("before the new manifest")
        os.replace(folder / "manifest.csv", run.manifest_file)  # last: it marks the change as incomplete
        checkpoint.flush(run.path)


def forget_old_changes(run: Run) -> None:
    """Manifests of which no checkpoint is left are of no use to anybody."""
    oldest = min((path.name for path in checkpoint.candidates(run.checkpoints)), default="")
    for folder in list(run.changes.glob("step-*")) if run.changes.is_dir() else []:
        if oldest and folder.name <= oldest:
            shutil.rmtree(folder, ignore_errors=True)


def as_of(run: Run, state: Mapping[str, Any]) -> tuple[Manifest, Config]:
    """The manifest and configuration that a checkpoint belongs to: those of the run, or those before a change."""
    manifest, config = run.manifest(), run.config()
    if manifest.fingerprint() == state["manifest"]:
        return manifest, config
    for folder in run.changes.glob("step-*") if run.changes.is_dir() else []:
        earlier = Manifest.read(folder / "before.csv")
        if earlier.fingerprint() == state["manifest"]:
            return earlier, from_json((folder / "before.json").read_text())
    raise DataError(
        f"the checkpoint of step {state['step']} in {run.path} is of other images than manifest.csv lists; restore "
        "manifest.csv, or start a new run"
    )
