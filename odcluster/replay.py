"""The batch at which a training gave up, made again from its record, to look into what went wrong.

The weights of that moment need no record of their own: the last checkpoint is intact, and a resumed run comes to the
same step with the same bits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from odcluster.build import build_loader, build_method, frozen_features
from odcluster.config import changed
from odcluster.data.added import open_with_added
from odcluster.data.loading import Batches
from odcluster.errors import DataError
from odcluster.methods.interface import Batch
from odcluster.ranks import SINGLE
from odcluster.training import shards
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag, choose_device
from odcluster.training.run import open_run
from odcluster.training.survey import to_network


def diverged_batch(run_path: str | os.PathLike[str], *, data: np.ndarray | None = None, device: str = "cpu") -> Batch:
    """Exactly what the network was given in the step that RUN/diverged describes (the last one, if there are several).

    `data` only for a run that was given an array in memory.
    """
    run, console, where = open_run(Path(run_path)), Console(quiet=True), choose_device(device)
    records = sorted((run.path / "diverged").glob("step-*.json"))
    if not records:
        raise DataError(f"{run.path} has no record of a step that was not finite; there is nothing to replay")
    record = json.loads(records[-1].read_text())
    config = changed(run.config(), workers=0, cache_gb=0.0)
    source = open_with_added(data if data is not None else config.data, run.manifest().added)
    if difference := run.manifest().difference(source.manifest):
        raise DataError(f"the images are not those of {run.path}. {difference} Restore them to replay the batch")
    found = shards.find(run.checkpoints, console.warn, SINGLE)
    method = build_method(config, len(source), where, console, found)
    with StopFlag() as stop, build_loader(config, source, method, where, console, stop) as loader:
        batches: Batches = loader
        if config.fine_tuning.frozen:
            batches = frozen_features(run, config, loader, method, source.manifest, where, console, stop)
        (raw,) = batches.training(record["epoch"], [np.array(record["ids"], np.int64)])
        images = to_network(raw.images, *batches.normalisation_on(where))
    return Batch(raw.ids.to(where), images, epoch=record["epoch"], step=record["step"])
