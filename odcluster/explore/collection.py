"""Everything one looks at when exploring a run: labels, features, clusters, what people decided, how training went.

Promises: nothing is locked, so a run may be explored while it trains; the newest valid checkpoint counts, and a newer
one is taken over by `refresh`; one that is removed meanwhile does no harm; its memory is mapped, not loaded. Features
of a run that has none in its memory are computed once, into RUN/explore/. Only RUN/explore/ and the edits are written.
Pictures are left to `thumbnails.py`, maps to `maps.py`, the web to `server.py`.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from odcluster.config import Config
from odcluster.data.order import num_steps
from odcluster.data.readers import shown
from odcluster.data.sources import FILES, FileSource, Manifest, Source, open_source
from odcluster.errors import DataError, ImageRefused, Interrupted, UserError
from odcluster.explore.curation import Curated, Curation, open_curation
from odcluster.explore.export import read_clusters_csv
from odcluster.explore.features import (
    Features,
    Network,
    Progress,
    cluster_features,
    compute_features,
    load_network,
    read_memory,
)
from odcluster.explore.history import History
from odcluster.explore.snapshot import Clusters, Floats, Ids, Rows, group, measure, regroup
from odcluster.training import checkpoint
from odcluster.training.run import Run, open_run


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A run as of one checkpoint."""

    version: str
    step: int
    clusters: Clusters
    rows: Rows | None
    features: str
    """Which features these are: changes when they do; "" where there are none."""


@dataclass(frozen=True, eq=False)
class View:
    """A snapshot with what people decided."""

    version: str
    """Another one whenever labels or edits are others."""
    snapshot: Snapshot
    state: Curated
    clusters: Clusters
    listed: Ids
    """The clusters there are: with members, or with a name."""
    merged: dict[int, list[int]]
    left_out: dict[int, list[int]]
    """Cluster -> images that people left out of it."""

    def name(self, cluster: int) -> str:
        return self.state.names.get(cluster, "")


@dataclass(frozen=True)
class Status:
    """Where a run stands."""

    state: str
    """training, finished or stopped."""
    step: int
    total_steps: int
    eta_seconds: float | None


def open_collection(
    run: str | os.PathLike[str],
    *,
    compute_features: bool = True,
    say: Callable[[str], None] = lambda sentence: None,
    progress: Progress = lambda doing, done, total: None,
) -> Collection:
    """Open a run, finished or not. Features that are missing are computed first, unless `compute_features` is False;
    `progress` hears about it and may stop it by raising: the next time goes on from there.
    """
    collection = Collection(open_run(Path(run)), say)
    if compute_features:
        collection.compute_missing(progress)
    collection.refresh()
    return collection


class Collection:
    """One run. Safe with several threads."""

    def __init__(self, run: Run, say: Callable[[str], None] = lambda sentence: None) -> None:
        self.run, self.config, self.manifest = run, run.config(), run.manifest()
        self.directory = run.path / "explore"
        self.notes: list[str] = []
        self._say = say
        self.source = self._open_source()
        self.history = History(run.metrics_file)
        self.curation: Curation = open_curation(run.path, self.manifest)
        self._images = self.manifest.fingerprint()
        self.total_steps = total_steps(self.config, len(self.manifest))
        self._features: Features | None = None
        self._own_labels: NDArray[np.int64] | None = None  # of k-means, where the method makes no clusters
        self._found: tuple[str, int] | None = None
        self._snapshot = Snapshot("", 0, group(self._no_labels(), self.config.clusters or 0, None), None, "")
        self._view: View | None = None
        self._network: tuple[str, Network] | None = None
        self._refreshing, self._viewing, self._embedding = threading.Lock(), threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        return len(self.manifest)

    @property
    def num_clusters(self) -> int:
        """Of training, or of the k-means in its place; those that people made come on top."""
        return len(self._snapshot.clusters)

    def note(self, sentence: str) -> None:
        """Something that people should know, on the console and in the app."""
        if sentence not in self.notes:
            self.notes.append(sentence)
            self._say(sentence)

    # --- What is there ------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take over a newer checkpoint and new lines of metrics. While one thread does, others do not wait for it."""
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            self.history.refresh()
            found = self._newest()
            if found != self._found:
                self._snapshot = self._take_snapshot()
                self._found = found
        finally:
            self._refreshing.release()

    def view(self) -> View:
        """What one sees now."""
        revision, state = self.curation.state()
        snapshot = self._snapshot
        version = f"{snapshot.version}.{revision}"
        view = self._view
        if view is not None and view.version == version:
            return view
        with self._viewing:
            if self._view is None or self._view.version != version:
                self._view = look(snapshot, state, version)
            return self._view

    def status(self) -> Status:
        """Whether it trains, and how far it is."""
        step = max(self._snapshot.step, self.history.step)
        ended = self._snapshot.step >= self.total_steps or (self.run.backbone.is_dir() and not self._newest()[0])
        if is_locked(self.run) and not ended:
            speed = self.history.images_per_second()
            batch = min(self.config.batch_size or 1, len(self))
            eta = (self.total_steps - step) * batch / speed if speed else None
            return Status("training", step, self.total_steps, eta)
        return Status("finished" if ended else "stopped", step, self.total_steps, None)

    def name(self, image: int) -> str:
        """The image's name as it can be shown: bytes that are no text become U+FFFD."""
        return self.manifest.paths[image].encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def sizes(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Step and cluster sizes [C] over the training, the last as they are now."""
        records, snapshot = self.history.sizes(), self._snapshot
        if snapshot.clusters.sizes.any():
            records = [record for record in records if record[0] != snapshot.step]
            if not records or records[-1][0] < snapshot.step:
                records.append((snapshot.step, snapshot.clusters.sizes))
        return records

    def comparable_sizes(self, view: View) -> list[tuple[int, NDArray[np.int64]]]:
        """Those in which a number means the same cluster as in this view; none where there is no such memory."""
        num_clusters = len(view.snapshot.clusters)
        records = self.sizes() if self.config.method == "odc" else []  # DeepCluster begins anew in every epoch
        return [record for record in records if len(record[1]) == num_clusters]  # fine clusters come first, and go

    def sizes_of(self, view: View, cluster: int) -> list[tuple[int, int]]:
        """Step and size of one cluster over the training, with those merged into it."""
        num_clusters = len(view.snapshot.clusters)
        parts = [part for part in (cluster, *view.merged.get(cluster, [])) if part < num_clusters]
        return [(step, int(sizes[parts].sum())) for step, sizes in self.comparable_sizes(view) if parts]

    def changes(self, view: View) -> Floats:
        """How much training made each cluster grow since the first record of sizes [C]; nan where that is unknown."""
        found = np.full(len(view.clusters), np.nan, np.float32)
        records = self.comparable_sizes(view)
        if len(records) > 1:
            grown = view.snapshot.clusters.sizes - records[0][1]
            found[: len(grown)] = grown
            for cluster, parts in view.merged.items():
                if cluster < len(grown):
                    found[cluster] += grown[[part for part in parts if part < len(grown)]].sum()
        return found

    # --- Like what ----------------------------------------------------------------------------------

    def similar_to(self, image: int, count: int) -> tuple[Ids, Floats]:
        """The images most similar to one of the collection, without itself."""
        rows = self._snapshot.rows
        if rows is None or not rows.scale[image] > 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return rows.nearest(rows.unit(np.array([image]))[0], count, without=image)

    def similar(self, row: Floats, count: int) -> tuple[Ids, Floats]:
        """The images most similar to a feature, as `embed` gives it."""
        rows = self._snapshot.rows
        if rows is None:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        return rows.nearest(row, count)

    def assign(self, view: View, row: Floats) -> tuple[int, float]:
        """The cluster whose centre is nearest to a feature, and how sure that is: the softmax of the cosines, with the
        run's temperature. -1 where there are no clusters.
        """
        if view.clusters.centroids is None or len(view.listed) == 0:
            return -1, 0.0
        scores = view.clusters.centroids[view.listed] @ row / self.config.head.temperature
        best = int(scores.argmax())
        return int(view.listed[best]), float(1 / np.exp(scores - scores[best]).sum())

    def embed(self, image: bytes) -> Floats:
        """The feature of an image that is not in the collection, at length 1; ImageRefused says why there is none."""
        with self._embedding:
            network = self._current_network()
            if network is None:
                raise UserError("this run has no weights to look at an image with yet; wait for its first checkpoint")
            return network.embed(image)

    def _current_network(self) -> Network | None:
        """The network that made the rows, as far as it is still there."""
        if self._snapshot.features.startswith("memory"):
            if self._network is None or self._network[0] != self._snapshot.version:
                network = load_network(self.run, self.config, with_neck=True)
                self._network = (self._snapshot.version, network) if network is not None else self._network
            return self._network[1] if self._network is not None else None
        return self._features.network if self._features is not None else None

    # --- Reading the run ----------------------------------------------------------------------------

    def compute_missing(self, progress: Progress) -> None:
        """Features, and clusters, of a run whose own state has none."""
        memory = read_memory(self.run)
        if self.config.method == "odc" and (memory is not None or not self.run.backbone.is_dir()):
            return  # they are in the memory, or will be
        try:
            self._features = compute_features(self.run, self.config, self.source, self.directory, progress)
        except Interrupted:
            raise
        except UserError as error:
            self.note(f"without features there is no map and nothing is similar to anything: {error}")
            return
        if self._features is None:
            self.note(
                "the run has no weights yet; start this again after its first checkpoint for maps and comparisons"
            )
            return
        if (memory is None or memory.labels is None) and not self.run.clusters_file.is_file():
            self._own_labels = cluster_features(self._features, self.config.seed, self.directory, progress)
            self.note(
                f"{self.config.method} makes no clusters; these {int(self._own_labels.max()) + 1:,} are k-means of its "
                "features, made to look at them"
            )

    def _take_snapshot(self) -> Snapshot:
        memory = read_memory(self.run)
        if memory is not None and memory.manifest != self._images:
            self.note("images were added to this run or removed meanwhile; start `odcluster explore` again to see them")
            return self._snapshot
        if memory is not None and memory.total_steps:
            self.total_steps = memory.total_steps
        version, step = ("", 0) if memory is None else (memory.name, memory.step)
        rows, features = None, ""
        if memory is not None and memory.rows is not None and memory.labels is not None and (memory.labels >= 0).any():
            rows, features = measure(memory.rows), f"memory {memory.name}"
        elif self._features is not None:
            rows, features = self._features.rows, self._features.identity
        labels = similarities = centroids = None
        if memory is not None and memory.labels is not None:
            labels, similarities, centroids = memory.labels, memory.similarities, memory.centroids
        elif (table := self._read_table()) is not None:
            labels, similarities = table
            version = f"{version}csv{self._newest()[1]}"
        elif self._own_labels is not None:
            labels, version = self._own_labels, f"{version}kmeans"
        if labels is None:
            labels = self._no_labels()
        centroids = centroids if features.startswith("memory") else None
        planned = len(centroids) if centroids is not None else self.config.clusters or 0
        num_clusters = max(planned, int(labels.max(initial=-1)) + 1)
        clusters = group(labels, num_clusters, rows, centroids=centroids, similarities=similarities)
        return Snapshot(version, step, clusters, rows, features)

    def _newest(self) -> tuple[str, int]:
        """What tells that there is something new, without opening it."""
        checkpoints = checkpoint.candidates(self.run.checkpoints)
        try:
            written = self.run.clusters_file.stat().st_mtime_ns
        except OSError:
            written = 0
        return (checkpoints[0].name if checkpoints else "", written)

    def _read_table(self) -> tuple[NDArray[np.int64], Floats] | None:
        """Labels and similarities of clusters.csv, if it is about these very images."""
        try:
            table = read_clusters_csv(self.run.clusters_file)
        except (DataError, OSError):
            return None
        if table.names != self.manifest.paths:
            self.note("clusters.csv is about other images than manifest.csv and is not used")
            return None
        return table.labels, table.similarities.astype(np.float32)

    def _no_labels(self) -> NDArray[np.int64]:
        return np.full(len(self), -1, np.int64)

    def _open_source(self) -> Source:
        """Where the pictures are. A run can be looked at without them."""
        manifest, given = self.manifest, self.config.data
        if manifest.kind in FILES:
            if not os.path.isdir(manifest.root):
                self.note(f"the images are no longer in {shown(manifest.root)}: only their names can be shown")
            return FileSource(manifest)
        if not given:
            self.note("the run was trained on an array in memory: its images cannot be shown")
            return NoImages(manifest)
        try:
            source = open_source(given)
            same = manifest.fingerprint() == source.manifest.fingerprint()
            difference = "" if same else manifest.difference(source.manifest)
        except UserError as error:
            difference = str(error)
        if difference:
            self.note(f"the images are not those of the run and are not shown. {difference}")
            return NoImages(manifest)
        return source


class NoImages(Source):
    """Names without pictures."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def stored(self, id: int) -> bytes:
        raise ImageRefused("the images of this run are not there")


def look(snapshot: Snapshot, state: Curated, version: str) -> View:
    """A snapshot as people changed it."""
    clusters = regroup(snapshot.clusters, snapshot.rows, state)
    wanted = clusters.sizes > 0
    named = [cluster for cluster in (*state.names, *state.created) if cluster < len(clusters)]
    wanted[named] = True
    wanted[[cluster for cluster in state.merged_into if cluster < len(clusters)]] = False
    left_out: dict[int, list[int]] = {}
    if state.excluded:
        homes = state.homes(snapshot.clusters.labels)
        for image in sorted(state.excluded):
            left_out.setdefault(int(homes[image]), []).append(image)
    return View(version, snapshot, state, clusters, np.flatnonzero(wanted), state.merged(), left_out)


def total_steps(config: Config, num_images: int) -> int:
    """Of the whole training."""
    steps = num_steps(num_images, min(config.batch_size or 1, num_images)) * (config.epochs or 0)
    return min(steps, config.max_steps or steps)


def is_locked(run: Run) -> bool:
    """Whether another process trains this run. Only asks: the lock is not taken, not even for an instant.

    Not for the process that trains: closing the file, as is done here, would drop its own lock.
    """
    if sys.platform != "linux":
        return False  # other systems lay out the question in other ways
    import fcntl

    try:
        with open(run.path / "lock", "rb") as file:
            question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            return struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, question))[0] != fcntl.F_UNLCK
    except (OSError, struct.error):
        return False
