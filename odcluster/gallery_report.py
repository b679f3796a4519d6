"""The verb `report`: one HTML file about a run, with duplicates.csv and outliers.csv beside the run's other files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from odcluster.data.readers import shown
from odcluster.data.sources import Manifest
from odcluster.errors import UserError
from odcluster.explore.collection import Collection, NoImages, open_collection
from odcluster.explore.export import replacing
from odcluster.explore.folders import check_outside
from odcluster.explore.oddities import (
    Outliers,
    Pixels,
    far_from_their_cluster,
    near_duplicates,
    write_duplicates_csv,
    write_outliers_csv,
)
from odcluster.explore.report import Oddities, render
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag


def report(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, quiet: bool = False) -> Path:
    """Write a report of a run, finished or not, and return its path: RUN/report.html, or `out`."""
    console = Console(quiet=quiet)
    with StopFlag() as stop, console:

        def progress(activity: str, done: int, total: int) -> None:
            stop.poll()
            console.progress(activity, done, total)

        collection = open_collection(run, say=console.say, progress=progress)
        path = collection.run.path / "report.html" if out is None else Path(out)
        check_place(path, collection.manifest)
        oddities = find_oddities(collection, progress)
        progress("pictures", 0, 1)
        page = render(collection, oddities)
        try:
            write_oddities(collection, oddities)
            with replacing(path) as prepared:
                prepared.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"the report cannot be written to {shown(os.fspath(error.filename or path))} ({error.strerror}); "
                "free some space or check the permissions"
            ) from error
        progress("pictures", 1, 1)
        console.say(f"{path} ({len(page) / 1e6:.1f} MB)")
    return path


def check_place(path: Path, manifest: Manifest) -> None:
    """Refuse a place that cannot take the file, before the work; nothing is written among the images."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}; make it, or choose another --out")
    check_outside(path, manifest)


def find_oddities(collection: Collection, progress: Callable[[str, int, int], None]) -> Oddities:
    view = collection.view()
    clusters, rows = view.clusters, view.snapshot.rows
    found = far_from_their_cluster(clusters.similarities, clusters.labels)
    unseen = np.flatnonzero(view.snapshot.clusters.labels < 0)  # not those that people left out
    pixels, groups = Pixels(collection.source), None
    if rows is not None and not isinstance(collection.source, NoImages):
        groups = near_duplicates(
            rows.normalised(collection.run.path),
            pixels=pixels,
            progress=lambda done, total: progress("near-duplicates", done, total),
        )
    if pixels.unreadable and not pixels.opened:  # the images are gone
        groups = None
    return Oddities(groups, Outliers(found.ids, found.scores, unseen), pixels.left_out)


def write_oddities(collection: Collection, oddities: Oddities) -> None:
    """duplicates.csv and outliers.csv in the run directory."""
    run, names = collection.run.path, collection.manifest.paths
    if oddities.duplicates is not None:
        write_duplicates_csv(run / "duplicates.csv", oddities.duplicates, names)
    write_outliers_csv(run / "outliers.csv", oddities.outliers, names, collection.view().clusters.labels)
