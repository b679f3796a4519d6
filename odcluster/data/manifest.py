"""Which images there are, as a list that a run keeps: the position of an image in it is its id.

Promises: the same images give the same ids and the same fingerprint on any machine; what is written reads back to the
byte, whatever files are called.
"""

from __future__ import annotations

import csv
import hashlib
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from odcluster.data.changes import compare
from odcluster.data.names import shown
from odcluster.errors import DataError


@dataclass(frozen=True, eq=False)
class Manifest:
    """Which images there are. An image's position is its id."""

    kind: str
    """folder, class tree, list, arrays, packed, cifar10 or voc."""
    root: str
    """Absolute path of the folder or file; "" for an array in memory."""
    paths: list[str]
    """Names relative to the root, with forward slashes, sorted by their bytes."""
    sizes: np.ndarray
    """[N] int64, bytes of each."""
    labels: np.ndarray | None = None
    """[N] int64, -1 unknown; for evaluation only."""
    class_names: list[str] | None = None
    """Names of the labels, if they have names."""
    content: str = ""
    """For images that are not files of their own: dtype, shape and a sampled hash of the data."""
    modified: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """[N] int64, when each file was written, in ns; 0 unknown. Never decides what an image is: see `changes.py`."""
    added: tuple[str, ...] = ()
    """Absolute paths of further folders or lists whose images were added; their names lead there from the root."""

    _ROWS: ClassVar = ("#odcluster manifest", "#kind", "#root", "#content", "#classes")

    def __post_init__(self) -> None:
        if len(self.modified) == 0:
            object.__setattr__(self, "modified", np.zeros(len(self.paths), np.int64))
        assert len(self.paths) == len(self.sizes) == len(self.modified)
        assert self.labels is None or len(self.labels) == len(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def fingerprint(self) -> str:
        """Hash what makes the ids valid: names, sizes, content. Where the folder lies does not matter."""
        digest = hashlib.sha256(b"\0".join(map(os.fsencode, self.paths)))
        digest.update(b"\0\0" + self.sizes.astype("<i8").tobytes() + self.content.encode())
        return digest.hexdigest()

    def difference(self, now: Manifest) -> str:
        """Say what has certainly changed since this manifest was made; "" if nothing has."""
        changes = compare(self, now)
        return changes.sentence() if changes else ""

    def folders(self) -> list[str]:
        """Where the images lie, in which nothing may be written; none where they are listed one by one."""
        own = [self.root] if self.kind in ("folder", "class tree", "voc") else []
        return own + [folder for folder in self.added if os.path.isdir(folder)]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a CSV: five rows that begin with #, then one per image. Names keep their very bytes."""
        labels = [""] * len(self) if self.labels is None else self.labels.tolist()
        temporary = f"{os.fspath(path)}.tmp-{os.getpid()}"
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            roots = [self.root, *self.added]
            values: list[list[Any]] = [[1], [self.kind], roots, [self.content], self.class_names or []]
            writer.writerows([name, *value] for name, value in zip(self._ROWS, values, strict=True))
            writer.writerow(["id", "path", "size", "label", "modified"])
            columns = (self.sizes.tolist(), labels, self.modified.tolist())
            writer.writerows(zip(range(len(self)), self.paths, *columns, strict=True))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read what `write` has written."""
        try:
            with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
                reader = csv.reader(file)
                head = [next(reader) for _ in range(6)]
                if [row[0] for row in head] != [*cls._ROWS, "id"]:
                    raise ValueError("its first lines are not those of a manifest")
                rows = list(reader)
            if [int(row[0]) for row in rows] != list(range(len(rows))):
                raise ValueError("its ids are not 0, 1, 2, ...")
            labels = np.array([int(row[3]) for row in rows], dtype=np.int64) if rows and rows[0][3] else None
            sizes = np.array([int(row[2]) for row in rows], dtype=np.int64)
            times = [int(row[4]) if len(row) > 4 else 0 for row in rows]  # manifests of the first version have none
            modified = np.array(times, dtype=np.int64)
        except (OSError, ValueError, IndexError, StopIteration, OverflowError, csv.Error) as error:
            raise DataError(
                f"{shown(os.fspath(path))} is not a whole manifest ({error}); restore it or start a new run."
            ) from error
        paths = [row[1] for row in rows]
        classes, added = head[4][1:] or None, tuple(head[2][2:])
        return cls(head[1][1], head[2][1], paths, sizes, labels, classes, head[3][1], modified, added)
