"""What people decided about the clusters of a run: names, merges, moves, images left out, clusters reviewed.

RUN/curation.sqlite is a log of edits to which lines are only ever added; undo and redo mark a line. What holds now is
the replay of the log (`replay`), so nothing can be half changed, and several browsers or processes may edit at once:
an edit that was made for a state which is no longer there is refused (`Conflict`), never lost and never overwritten.
Images and training state are not touched.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odcluster.data.changes import compare
from odcluster.data.sources import Manifest
from odcluster.errors import DataError, UserError

FILE = "curation.sqlite"
MOST_LETTERS = 200
"""Of a cluster's name."""
WAIT_SECONDS = 10.0
"""For another process that is just writing."""


class Conflict(UserError):
    """The edit was made for a state that somebody else has changed meanwhile; `current` is what holds now."""

    def __init__(self, sentence: str, current: Any) -> None:
        super().__init__(sentence)
        self.current = current


@dataclass(frozen=True)
class Edit:
    """One line of the log."""

    id: int
    time: str
    action: str
    details: dict[str, Any]
    undone: bool

    def sentence(self) -> str:
        """What it did, for people."""
        given = self.details
        if self.action == "name":
            called = f'is called "{given["name"]}"' if given["name"] else "has no name any more"
            return f"cluster {given['cluster']} {called}"
        if self.action == "review":
            return f"cluster {given['cluster']} is {'' if given['reviewed'] else 'not '}reviewed"
        if self.action == "merge":
            first, *others = given["clusters"]
            many = f"clusters {', '.join(map(str, others[:-1]))} and {others[-1]} are" if others[1:] else ""
            return f"{many or f'cluster {others[0]} is'} merged into cluster {first}"
        num = len(given["images"])
        images = f"{num:,} images are" if num > 1 else "1 image is"
        if self.action == "move":
            return f"{images} moved to {'the new ' if given['new'] else ''}cluster {given['to']}"
        return f"{images} {'left out' if self.action == 'exclude' else 'taken in again'}"


@dataclass
class Curated:
    """What holds after a number of edits."""

    names: dict[int, str] = field(default_factory=dict)
    """Of the clusters that have one."""
    reviewed: set[int] = field(default_factory=set)
    merged_into: dict[int, int] = field(default_factory=dict)
    """A cluster that is no more -> the one it was merged into."""
    created: list[int] = field(default_factory=list)
    """New clusters; their ids follow those of training."""
    placed: dict[int, int] = field(default_factory=dict)
    """Image -> the cluster it was moved to (which may be merged by now: see `resolve`)."""
    excluded: set[int] = field(default_factory=set)

    def resolve(self, cluster: int) -> int:
        """The cluster that a cluster is part of now: itself, unless it was merged."""
        while cluster in self.merged_into:
            cluster = self.merged_into[cluster]
        return cluster

    def merged(self) -> dict[int, list[int]]:
        """Cluster -> those merged into it, directly or by way of others."""
        parts: dict[int, list[int]] = {}
        for cluster in sorted(self.merged_into):
            parts.setdefault(self.resolve(cluster), []).append(cluster)
        return parts

    def homes(self, labels: NDArray[np.integer]) -> NDArray[np.int64]:
        """The cluster of each image, given those of training; of images left out the one that they would be in."""
        highest = max([int(labels.max(initial=-1)), *self.created, *self.merged_into, *self.placed.values()])
        roots = np.arange(-1, highest + 1)  # of -1, 0, 1, ...
        for cluster in self.merged_into:
            roots[cluster + 1] = self.resolve(cluster)
        homes = np.array(labels, np.int64)
        if self.placed:
            homes[np.fromiter(self.placed, np.int64)] = np.fromiter(self.placed.values(), np.int64)
        return roots[homes + 1]

    def labels(self, labels: NDArray[np.integer]) -> NDArray[np.int64]:
        """The cluster of each image; -1 for those left out and those that never had one."""
        curated = self.homes(labels)
        curated[np.fromiter(self.excluded, np.int64, len(self.excluded))] = -1
        return curated

    def apply(self, edit: Edit) -> None:
        given = edit.details
        if edit.action == "name":
            self._call(given["cluster"], given["name"])
        elif edit.action == "review":
            (self.reviewed.add if given["reviewed"] else self.reviewed.discard)(given["cluster"])
        elif edit.action == "merge":
            self._merge(given["clusters"])
        elif edit.action == "move":
            if given["new"]:
                self.created.append(given["to"])
            self.placed.update(dict.fromkeys(given["images"], given["to"]))
            self.excluded.difference_update(given["images"])
        elif edit.action == "exclude":
            self.excluded.update(given["images"])
        elif edit.action == "include":
            self.excluded.difference_update(given["images"])

    def _call(self, cluster: int, name: str) -> None:
        if name:
            self.names[cluster] = name
        else:
            self.names.pop(cluster, None)

    def _merge(self, clusters: list[int]) -> None:
        """The first takes the others in; it keeps its name, or gets the first that one of them has."""
        first = clusters[0]
        self._call(first, next((self.names[c] for c in clusters if c in self.names), ""))
        if not self.reviewed.issuperset(clusters):
            self.reviewed.discard(first)
        for other in clusters[1:]:
            self.merged_into[other] = first
            self.names.pop(other, None)
            self.reviewed.discard(other)


def replay(edits: Iterable[Edit]) -> Curated:
    """What holds after these edits, oldest first; those undone have no effect."""
    state = Curated()
    for edit in edits:
        if not edit.undone:
            state.apply(edit)
    return state


def curated_labels(labels: NDArray[np.integer], edits: Iterable[Edit]) -> NDArray[np.int64]:
    """The labels of training [N] as people corrected them; -1 for images left out."""
    return replay(edits).labels(labels)


def open_curation(run: str | os.PathLike[str], manifest: Manifest | None = None) -> Curation:
    """The edits of a run directory, whose images the caller knows as `manifest`; nothing is written before the first
    edit.
    """
    return Curation(Path(run) / FILE, manifest)


def carry_edits(run: str | os.PathLike[str], before: Manifest, now: Manifest) -> None:
    """Images have other ids now: let the edits follow, in one transaction; done already, it changes nothing."""
    if not (Path(run) / FILE).is_file():
        return
    new_ids, fingerprint = compare(before, now).new_ids(), now.fingerprint()
    with closing(Curation(Path(run) / FILE)) as curation, curation._writing() as database:
        database.execute("CREATE TABLE IF NOT EXISTS images (manifest TEXT NOT NULL)")
        if database.execute("SELECT manifest FROM images").fetchall() == [(fingerprint,)]:
            return
        for edit in _all_edits(database):
            if "images" in edit.details:
                moved = [int(new_ids[id]) for id in edit.details["images"] if id < len(new_ids)]
                details = {**edit.details, "images": [id for id in moved if id >= 0]}
                database.execute("UPDATE edits SET details = ? WHERE id = ?", (json.dumps(details), edit.id))
        database.execute("DELETE FROM images")
        database.execute("INSERT INTO images VALUES (?)", (fingerprint,))


class Curation:
    """The log of one run. Safe with several threads and several processes."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self._images = manifest.fingerprint() if manifest is not None else ""
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._replayed = (-1, Curated())

    @property
    def revision(self) -> int:
        """A number that grows with every edit, undo and redo."""
        with self._reading() as database:
            return 0 if database is None else int(database.execute("PRAGMA user_version").fetchone()[0])

    def edits(self) -> list[Edit]:
        """The whole log, oldest first."""
        with self._reading() as database:
            if database is None:
                return []
            return _all_edits(database)

    def newest(self, most: int) -> list[Edit]:
        """The end of the log, newest first."""
        with self._reading() as database:
            if database is None:
                return []
            wanted = "SELECT id, time, action, details, undone FROM edits ORDER BY id DESC LIMIT ?"
            return [_edit(row) for row in database.execute(wanted, (most,)).fetchall()]

    def count(self) -> int:
        """How many edits are in force."""
        with self._reading() as database:
            return (
                0 if database is None else database.execute("SELECT count(*) FROM edits WHERE undone = 0").fetchone()[0]
            )

    def state(self) -> tuple[int, Curated]:
        """The revision and what holds in it. The object is shared: not to be changed."""
        with self._lock:
            while (revision := self.revision) != self._replayed[0]:
                state = replay(self.edits())
                if revision == self.revision:  # else another process wrote in between
                    self._replayed = (revision, state)
            return self._replayed

    def names(self) -> dict[int, str]:
        """Cluster -> name, of those that have one."""
        return self.state()[1].names

    def add(self, action: str, given: Mapping[str, Any], *, num_images: int, num_clusters: int) -> Edit:
        """Check one edit against what holds now and append it. UserError: it cannot be; Conflict: not any more.

        `num_clusters` is the number that training made; a new cluster is numbered from there on.
        """
        with self._writing() as database:
            edits = _all_edits(database)
            details = checked(action, given, replay(edits), num_images, num_clusters)
            if details.get("to") == "new":  # behind the undone ones too: a redo must find its number free
                made = [edit.details["to"] for edit in edits if edit.action == "move" and edit.details["new"]]
                details["to"] = max([num_clusters - 1, *made]) + 1
            database.execute("UPDATE edits SET undone = 2 WHERE undone = 1")  # it forgets what could be redone
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            values = (now, action, json.dumps(details))
            place = database.execute("INSERT INTO edits (time, action, details) VALUES (?, ?, ?)", values).lastrowid
            assert place is not None
        return Edit(place, now, action, details, undone=False)

    def undo(self) -> Edit:
        """Take the newest edit in force back."""
        return self._mark("undone = 0 ORDER BY id DESC", undone=True, none="there is nothing to undo")

    def redo(self) -> Edit:
        """Put the edit that was undone last in force again; a new edit in between forgets it, as everywhere."""
        return self._mark("undone = 1 ORDER BY id", undone=False, none="there is nothing to redo")

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _mark(self, which: str, *, undone: bool, none: str) -> Edit:
        with self._writing() as database:
            row = database.execute(
                f"SELECT id, time, action, details, undone FROM edits WHERE {which} LIMIT 1"
            ).fetchone()
            if row is None:
                raise UserError(none)
            database.execute("UPDATE edits SET undone = ? WHERE id = ?", (undone, row[0]))
        return _edit((*row[:4], undone))

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """The database, or None where there is no edit yet."""
        with self._lock:
            try:
                if self._connection is None and self.path.is_file():
                    self._connection = self._open()
                if self._connection is not None:
                    self._check_images(self._connection)
                yield self._connection
            except sqlite3.Error as error:
                raise DataError(
                    f"{self.path} cannot be read ({error}); restore it, or move it away to begin without edits"
                ) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: what is read in it stays true until it is written, also before other processes."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._open()
                database = self._connection
                database.execute("BEGIN IMMEDIATE")
                try:
                    self._check_images(database)
                    yield database
                    revision = database.execute("PRAGMA user_version").fetchone()[0]
                    database.execute(f"PRAGMA user_version = {int(revision) + 1}")
                    database.execute("COMMIT")
                except BaseException:
                    database.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise DataError(
                    f"{self.path} cannot be written ({error}); check its permissions and the space on the disk"
                ) from error

    def _check_images(self, database: sqlite3.Connection) -> None:
        """Ids of another set of images would name the wrong ones."""
        known = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'images'").fetchone()[0]
        if known and self._images and database.execute("SELECT manifest FROM images").fetchone() != (self._images,):
            raise UserError("images were added to this run or removed meanwhile; start `odcluster explore` again")

    @staticmethod
    def _use_log(database: sqlite3.Connection) -> None:
        """Write-ahead logging. While others open the same new file, SQLite refuses this at once instead of waiting."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                database.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _open(self) -> sqlite3.Connection:
        """Make the file if need be. One that cannot be written to is only read."""
        place = self.path.absolute().as_uri()
        writable = os.access(self.path if self.path.exists() else self.path.parent, os.W_OK)
        database = sqlite3.connect(
            f"{place}?mode={'rwc' if writable else 'ro'}",
            uri=True,
            timeout=WAIT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            if writable:
                self._use_log(database)
                database.execute(
                    "CREATE TABLE IF NOT EXISTS edits (id INTEGER PRIMARY KEY, time TEXT NOT NULL, "
                    "action TEXT NOT NULL, details TEXT NOT NULL, undone INTEGER NOT NULL DEFAULT 0)"
                )
        except BaseException:
            database.close()
            raise
        return database


def _all_edits(database: sqlite3.Connection) -> list[Edit]:
    rows = database.execute("SELECT id, time, action, details, undone FROM edits ORDER BY id").fetchall()
    return [_edit(row) for row in rows]


def _edit(row: tuple[int, str, str, str, int]) -> Edit:
    try:
        return Edit(row[0], row[1], row[2], json.loads(row[3]), bool(row[4]))
    except ValueError as error:
        raise sqlite3.DatabaseError(f"edit {row[0]} is damaged") from error


# --- What an edit must be ---------------------------------------------------------------------------


def checked(
    action: str, given: Mapping[str, Any], state: Curated, num_images: int, num_clusters: int
) -> dict[str, Any]:
    """The details of an edit as they enter the log."""
    if action == "name":
        cluster = _existing(given.get("cluster"), state, num_clusters)
        current = state.names.get(cluster, "")
        expected = _text(given.get("expected"), "expected")
        name = tidy(_text(given.get("name"), "name"))
        if expected != current:
            shown = f'is called "{current}"' if current else "has no name"
            raise Conflict(f"cluster {cluster} {shown} by now; look at it again before naming it", current)
        return {"cluster": cluster, "name": name}
    if action == "review":
        if not isinstance(given.get("reviewed"), bool):
            raise UserError("`reviewed` must be true or false")
        return {"cluster": _existing(given.get("cluster"), state, num_clusters), "reviewed": given["reviewed"]}
    if action == "merge":
        clusters = given.get("clusters")
        if not isinstance(clusters, list) or len({str(c) for c in clusters}) < 2:
            raise UserError("`clusters` must list at least two different clusters; the first takes the others in")
        return {"clusters": list(dict.fromkeys(_existing(c, state, num_clusters) for c in clusters))}
    if action == "move":
        to, images = given.get("to"), _images(given.get("images"), num_images)
        new = to == "new"
        return {"images": images, "to": to if new else _existing(to, state, num_clusters), "new": new}
    if action in ("exclude", "include"):
        return {"images": _images(given.get("images"), num_images)}
    raise UserError("there is no such edit; use name, review, merge, move, exclude or include")


def tidy(name: str) -> str:
    """A name on one line, without characters that cannot be shown."""
    return "".join(c for c in " ".join(name.split()) if c.isprintable())[:MOST_LETTERS].strip()


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"`{what}` must be a text")
    return value


def _existing(cluster: Any, state: Curated, num_clusters: int) -> int:
    if type(cluster) is not int or not (0 <= cluster < num_clusters or cluster in state.created):
        raise UserError(f"there is no cluster {str(cluster)[:20]!r}")
    if cluster in state.merged_into:
        into = state.resolve(cluster)
        raise Conflict(f"cluster {cluster} was merged into cluster {into} meanwhile; use that one", into)
    return cluster


def _images(images: Any, num_images: int) -> list[int]:
    if not isinstance(images, list) or not images:
        raise UserError("`images` must list at least one image")
    if not all(type(i) is int and 0 <= i < num_images for i in images):
        raise UserError(f"`images` must hold numbers from 0 to {num_images - 1}")
    return list(dict.fromkeys(images))
