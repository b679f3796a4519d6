"""clusters.csv: which image is in which cluster, how close to its centre, and how central among its fellows.

Columns: path, cluster, similarity, rank (1 is the most central image of its cluster). An image without a
cluster has -1 and two empty cells. File names are other people's text; two rules keep the file harmless and
exact:
- A name that a spreadsheet would run as a formula (first visible character = + - @, or a leading tab or line
  break) gets a single quote in front, and so does a name that starts with a single quote. A leading quote is
  therefore always ours, and `read_clusters_csv`, or dropping it by hand, gives back every name as it was.
- Bytes that are not UTF-8 in a name are written as those bytes (surrogateescape), as on disk.
"""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from odcluster.data.names import guard as guard
from odcluster.data.names import unguard as unguard
from odcluster.errors import DataError

COLUMNS = ("path", "cluster", "similarity", "rank")


@dataclass(frozen=True)
class ClusterTable:
    """What clusters.csv holds, row by row."""

    names: list[str]
    labels: NDArray[np.int64]
    """-1 where the image has no cluster."""
    similarities: NDArray[np.float64]
    """nan where the image has no cluster."""
    ranks: NDArray[np.int64]
    """0 where the image has no cluster."""


def rank_within_cluster(labels: NDArray[np.integer], similarities: NDArray[np.floating]) -> NDArray[np.int64]:
    """Rank of each image in its cluster, 1 for the highest similarity, the earlier row first among equals.

    An image without a cluster (negative label) has rank 0; an unknown similarity (nan) ranks last.
    """
    labels, similarities = np.asarray(labels), np.asarray(similarities, np.float64)
    if labels.shape != similarities.shape or labels.ndim != 1:
        raise ValueError(f"Labels of shape {labels.shape}, similarities {similarities.shape}; pass one of each.")
    order = np.lexsort((-similarities, labels))  # stable, nan last
    grouped = labels[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]]) if len(grouped) else np.empty(0, np.int64)
    sizes = np.diff(np.r_[starts, len(grouped)])
    ranks = np.empty(len(labels), np.int64)
    ranks[order] = np.arange(len(labels)) - np.repeat(starts, sizes) + 1
    ranks[labels < 0] = 0
    return ranks


def write_clusters_csv(
    path: str | os.PathLike[str],
    names: Sequence[str],
    labels: NDArray[np.integer],
    similarities: NDArray[np.floating],
    ranks: NDArray[np.integer],
) -> None:
    """Write the table in one go: a reader sees the old file or the whole new one, never a part."""
    lengths = {len(names), len(labels), len(similarities), len(ranks)}
    if len(lengths) > 1:
        raise ValueError(f"The columns have {sorted(lengths)} rows; pass one value per image in each.")
    rows = zip(names, labels.tolist(), similarities.tolist(), ranks.tolist(), strict=True)
    with (
        replacing(path) as partial,
        partial.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        file.write(",".join(COLUMNS) + "\n")
        file.writelines(
            f"{_cell(name)},{label},{similarity:.6f},{rank}\n" if label >= 0 else f"{_cell(name)},-1,,\n"
            for name, label, similarity, rank in rows
        )


def read_clusters_csv(path: str | os.PathLike[str]) -> ClusterTable:
    """Read what `write_clusters_csv` wrote; DataError names the first line that is something else."""
    names, labels, similarities, ranks = [], [], [], []
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            if tuple(next(reader, ())) != COLUMNS:
                raise ValueError("the header is missing")
            for name, label, similarity, rank in reader:
                names.append(unguard(name))
                labels.append(int(label))
                similarities.append(float(similarity or "nan"))
                ranks.append(int(rank or 0))
        except (ValueError, csv.Error) as error:
            raise DataError(
                f"{os.fspath(path)!r} is not a table of clusters (line {reader.line_num}: {error}); "
                "pass the clusters.csv of a run."
            ) from error
    return ClusterTable(names, np.array(labels, np.int64), np.array(similarities), np.array(ranks, np.int64))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to; in the end it replaces `path`, after an error it is gone."""
    final = Path(path)
    partial = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    for left in final.parent.glob(f".{glob.escape(final.name)}.*.tmp"):
        if not is_alive(left.name.split(".")[-2]):  # its writer was killed
            left.unlink(missing_ok=True)
    try:
        yield partial
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)


def is_alive(pid: str) -> bool:
    """Whether a process of that number runs; where that cannot be known it is taken for one that does."""
    if os.name != "posix":  # elsewhere the question itself may end it
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OSError, OverflowError):
        return True
    return True


def _cell(name: str) -> str:
    # Quoted by hand: csv.writer of Python 3.11 leaves a lone carriage return bare when lines end in "\n".
    cell = guard(name)
    return '"' + cell.replace('"', '""') + '"' if any(c in cell for c in ',"\r\n') else cell
