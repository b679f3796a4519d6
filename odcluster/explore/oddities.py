"""Near-duplicates and outliers: what falls out of the features besides clusters.

Near-duplicates are images whose rows are close and, where the pixels can be looked at, whose pictures agree. Rows alone
mean as much as the network that made them: the samples memory of a short training puts an image's copies no nearer
than its neighbours. So the rows propose and `Pixels` decides. A group never chains: each member is a near-duplicate of
the group's first image.

Outliers are images far from the centre of their cluster, measured in the spread of that cluster.

Promises: same rows, same answer; memory that does not grow with the number of pairs; exact up to `EXACT_ROWS` rows,
beyond that only rows that share a neighbourhood are compared, and of poor features one pair in twenty may be missed.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from odcluster.data.sources import Source
from odcluster.errors import ImageRefused
from odcluster.explore.export import guard, replacing

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]
Mask = NDArray[np.bool_]
Progress = Callable[[int, int], None]

THRESHOLD = 0.95
"""Cosine of two rows from which on they are near-duplicates where nobody looks at pixels."""
CANDIDATES = 0.6
"""Cosine from which on pixels are compared. In the memory of a small network, copies of an image had cosines from 0.6
to 0.95, no more than any neighbours; pretrained features put them at 0.7 to 1, and neighbours at 0.65."""
ALIKE = 0.75
"""Correlation of two small pictures from which on they are the same: copies (of half the size, as JPEG of quality 30,
brighter, grey) have 0.95 and more, those cut by 5 % mostly 0.75 and more; of 15 million other pairs of photos fewer
than 20 had that much, most of them shots of the same thing."""
EXACT_ROWS = 200_000
"""Up to this many rows, every pair is compared."""
MOST_PICTURES = 50_000
"""Images that are opened to compare pixels."""
FAR = 3.5
"""An image farther below the median of its cluster than this many robust standard deviations is an outlier."""

LEADERS = 1024
OTHERS = 8192
SIDE, EDGE = 16, 3
WHOLE, CENTRE = slice(0, SIDE**2), slice(SIDE**2, SIDE**2 + (SIDE - 2 * EDGE) ** 2)
THREADS = 4
CELL_ROWS, CELLS = 1000, 8


class Table(Protocol):
    """Rows of length 1 by their numbers: an array, a mapped file, or what makes them when they are looked at."""

    def __len__(self) -> int: ...

    def __getitem__(self, which: slice | Ids, /) -> Rows: ...


class DuplicateGroup(NamedTuple):
    """Images that show nearly the same."""

    ids: list[int]
    """The group's first, to which all others are close, then the others in order."""
    similarity: float
    """Cosine of the first and the member farthest from it."""


class Outliers(NamedTuple):
    """Images that do not fit."""

    ids: Ids
    """Farthest first."""
    scores: NDArray[np.float64]
    """How many robust standard deviations below the median similarity of its cluster."""
    unseen: Ids
    """Images without a cluster or without a feature."""


# --- Near-duplicates --------------------------------------------------------------------------------


def near_duplicates(
    rows: Table,
    threshold: float | None = None,
    *,
    pixels: Pixels | None = None,
    progress: Progress | None = None,
    exact_rows: int = EXACT_ROWS,
) -> list[DuplicateGroup]:
    """Groups of rows [N, D] with cosines of at least `threshold`; largest first.

    With `pixels`, only those whose pictures agree, and the threshold is low by itself. An image belongs to one group
    at most.
    """
    if threshold is None:
        threshold = THRESHOLD if pixels is None else CANDIDATES
    search = _Search(rows, threshold, pixels)
    work = _all_pairs(len(rows)) if len(rows) <= exact_rows else _pairs_by_cell(rows)
    for leaders, others, done in work:
        search.compare(leaders, others)
        if progress is not None:
            progress(done, len(rows))
    return search.groups()


class Pixels:
    """Small grey pictures of images, made when asked for. At most `most` images are opened.

    `opened`, `unreadable` and `left_out` count what became of those asked for.
    """

    def __init__(self, source: Source, *, alike: float = ALIKE, most: int = MOST_PICTURES) -> None:
        self.source, self.alike, self.most = source, alike, most
        self.opened = self.unreadable = self.left_out = 0
        self._slot = np.full(len(source), -1, np.int64)  # -1 not asked for yet, -2 no picture
        self._pictures = np.zeros((1024, CENTRE.stop), np.float32)

    def comparable(self, ids: Ids) -> Mask:
        """Whether these have a picture, or may have one."""
        return self._slot[ids] != -2

    def agree(self, first: Ids, second: Ids, asked: Mask) -> Mask:
        """Which of the pairs asked for [first, second] show the same picture, as a whole and in the centre: there is no
        frame and no caption.
        """
        self._open(np.union1d(first[asked.any(axis=1)], second[asked.any(axis=0)]))
        a, b = self._slot[first], self._slot[second]
        asked = asked & (a >= 0)[:, None] & (b >= 0)
        if asked.mean() > 0.02:  # then all pairs as one product are quicker
            whole, centre = (self._pictures[a, part] @ self._pictures[b, part].T for part in (WHOLE, CENTRE))
            return asked & (whole >= self.alike) & (centre >= self.alike)
        row, column = np.nonzero(asked)
        agreed = np.zeros_like(asked)
        for at in _in_parts(np.arange(len(row)), OTHERS):
            products = self._pictures[a[row[at]]] * self._pictures[b[column[at]]]
            least = np.minimum(products[:, WHOLE].sum(axis=1), products[:, CENTRE].sum(axis=1))
            agreed[row[at], column[at]] = least >= self.alike
        return agreed

    def _open(self, ids: Ids) -> None:
        wanted = ids[self._slot[ids] == -1]
        opened = wanted[: max(0, self.most - self.opened)]
        self.left_out += len(wanted) - len(opened)
        self._slot[wanted] = -2
        if not len(opened):
            return
        pictures = [small_picture(self.source, int(opened[0]))]  # alone: a source may load its data now
        with ThreadPoolExecutor(THREADS) as threads:
            pictures += threads.map(lambda id: small_picture(self.source, id), opened[1:].tolist())
        for id, picture in zip(opened, pictures, strict=True):
            if picture is None:
                self.unreadable += 1
                continue
            if self.opened == len(self._pictures):
                self._pictures = np.concatenate([self._pictures, np.zeros_like(self._pictures)])
            self._pictures[self.opened] = picture
            self._slot[id] = self.opened
            self.opened += 1


def small_picture(source: Source, id: int) -> NDArray[np.float32] | None:
    """Edges and textures of an image and of its centre, two vectors of length 1 as one; None where it is unreadable.

    Squeezed to a small square and without its slow changes of brightness: those make any two landscapes look alike.
    An image without any structure is the same as any other such image of about its brightness.
    """
    try:
        image = source.image(id, min_size=4 * SIDE)
    except ImageRefused:
        return None
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    square = cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float32)
    detail = square - cv2.GaussianBlur(square, (0, 0), SIDE / 8)
    spread = float(detail.std())
    if spread < 1:  # a grey level: nothing but noise
        brightness = np.zeros((SIDE, SIDE), np.float32)
        brightness[SIDE // 2, int(square.mean()) // 32 + EDGE] = 1  # one of eight places in the centre
        return np.concatenate([brightness.reshape(-1), brightness[EDGE:-EDGE, EDGE:-EDGE].reshape(-1)])
    detail = np.tanh(detail / spread)  # the strongest edges must not decide alone
    return np.concatenate([_unit(detail), _unit(detail[EDGE:-EDGE, EDGE:-EDGE])])


def _unit(values: NDArray[np.float32]) -> NDArray[np.float32]:
    centred = (values - values.mean()).reshape(-1)
    return centred / max(float(np.linalg.norm(centred)), 1e-6)


class _Search:
    """Greedy: an image that belongs to no group yet leads one, and takes all that agree with it and are still free."""

    def __init__(self, rows: Table, threshold: float, pixels: Pixels | None) -> None:
        self.rows, self.threshold, self.pixels = rows, threshold, pixels
        self.leader = np.full(len(rows), -1, np.int64)  # the first of its group; its own id for the first
        self.similarity = np.ones(len(rows), np.float32)  # to the first of its group

    def compare(self, leaders: Ids, others: Ids) -> None:
        """Group `leaders` among themselves, then `others` (none of them in `leaders`) with those that still lead."""
        leaders = leaders[self._free(leaders)]
        within = self._cosines(leaders, leaders).triu(diagonal=1)
        self._join_leaders(leaders, within)
        leaders = leaders[self._leads(leaders)]
        others = others[self._free(others)]
        for start in range(0, len(others) if len(leaders) else 0, OTHERS):
            part = others[start : start + OTHERS]
            cosines = self._cosines(leaders, part)
            close = np.flatnonzero((cosines.amax(dim=0) >= self.threshold).numpy())  # most columns end here
            for at in _in_parts(close, 512):
                self._join(leaders, part[at], cosines[:, torch.from_numpy(at)])

    def groups(self) -> list[DuplicateGroup]:
        members = np.flatnonzero((self.leader >= 0) & (self.leader != np.arange(len(self.leader))))
        members = members[np.argsort(self.leader[members], kind="stable")]
        found = []
        for part in np.split(members, np.flatnonzero(np.diff(self.leader[members])) + 1):
            if len(part):
                ids = [int(self.leader[part[0]]), *part.tolist()]
                found.append(DuplicateGroup(ids, round(float(self.similarity[part].min()), 5)))
        return sorted(found, key=lambda group: (-len(group.ids), -group.similarity, group.ids[0]))

    def _cosines(self, first: Ids, second: Ids) -> Tensor:
        return _tensor(self.rows[first]) @ _tensor(self.rows[second]).T

    def _free(self, ids: Ids) -> Mask:
        free = self.leader[ids] == -1
        return free if self.pixels is None else free & self.pixels.comparable(ids)

    def _leads(self, ids: Ids) -> Mask:
        return self._free(ids) | (self.leader[ids] == ids)

    def _join_leaders(self, leaders: Ids, cosines: Tensor) -> None:
        """One after the other: who has been taken leads nobody."""
        close = (cosines >= self.threshold).numpy()
        for at in np.flatnonzero(close.any(axis=1)):
            if not self._leads(leaders[at : at + 1])[0]:
                continue
            taken = np.flatnonzero(close[at])
            self._join(leaders[at : at + 1], leaders[taken], cosines[at : at + 1, torch.from_numpy(taken)])

    def _join(self, leaders: Ids, others: Ids, cosines: Tensor) -> None:
        """Each of the others that is free joins the first leader that it agrees with."""
        close = (cosines >= self.threshold).numpy() & self._free(others)
        if self.pixels is not None:
            close = self.pixels.agree(leaders, others, close)
        joined = np.flatnonzero(close.any(axis=0))
        row = close[:, joined].argmax(axis=0)
        self.leader[others[joined]] = leaders[row]
        self.leader[leaders[row]] = leaders[row]
        self.similarity[others[joined]] = cosines.numpy()[row, joined]


def _in_parts(ids: Ids, size: int) -> Iterator[Ids]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def _all_pairs(num_rows: int) -> Iterator[tuple[Ids, Ids, int]]:
    """Each block of rows with all later ones."""
    ids = np.arange(num_rows)
    for start in range(0, num_rows, LEADERS):
        end = min(start + LEADERS, num_rows)
        yield ids[start:end], ids[end:], end


def _pairs_by_cell(rows: Table) -> Iterator[tuple[Ids, Ids, int]]:
    """Rows lie in the cells of their nearest pivots (rows themselves: cells are small where rows are dense). Those
    whose nearest is the pivot of a cell come with all others in that cell.
    """
    num_pivots = max(CELLS, len(rows) // CELL_ROWS)
    pivots = _tensor(rows[np.linspace(0, len(rows) - 1, num_pivots).astype(np.int64)])
    cells = np.empty((len(rows), CELLS), np.int32)
    for start in range(0, len(rows), OTHERS):
        cosines = _tensor(rows[start : start + OTHERS]) @ pivots.T
        cells[start : start + OTHERS] = cosines.topk(CELLS, dim=1).indices.numpy()
    nearest, further = _members(cells[:, :1], num_pivots), _members(cells[:, 1:], num_pivots)
    done = 0
    for leaders, others in zip(nearest, further, strict=True):
        for start in range(0, len(leaders), LEADERS):
            end = start + LEADERS
            yield leaders[start:end], np.concatenate([leaders[end:], others]), done + min(end, len(leaders))
        done += len(leaders)


def _members(cells: NDArray[np.int32], num_cells: int) -> list[Ids]:
    """The rows in each cell, given the cells of each row [N, k]."""
    flat = cells.reshape(-1)
    order = np.argsort(flat, kind="stable") // cells.shape[1]
    return np.split(order, np.cumsum(np.bincount(flat, minlength=num_cells))[:-1])


def _tensor(rows: Rows) -> Tensor:
    return torch.from_numpy(np.array(rows, np.float32))  # a copy: mapped files cannot be written to


# --- Outliers ---------------------------------------------------------------------------------------


def far_from_their_cluster(
    similarities: NDArray[np.floating], labels: NDArray[np.integer], *, far: float = FAR
) -> Outliers:
    """Images whose similarity to the centre of their cluster lies far below the median of that cluster.

    The spread is the median absolute deviation, at least half of that over all images: a cluster of a few copies
    would else call everything else far away.
    """
    known = np.flatnonzero((labels >= 0) & np.isfinite(similarities))
    unseen = np.setdiff1d(np.arange(len(labels)), known)
    own, values = labels[known], similarities[known].astype(np.float64)
    below = medians(values, own)[own] - values
    spread = medians(np.abs(below), own)
    typical = float(np.median(np.abs(below))) if len(below) else 0.0
    scores = below / (1.4826 * np.maximum(spread[own], max(typical / 2, 1e-4)))
    found = np.flatnonzero(scores > far)
    found = found[np.lexsort((known[found], -scores[found]))]
    return Outliers(known[found], scores[found], unseen)


def medians(values: NDArray[np.float64], labels: NDArray[np.integer]) -> NDArray[np.float64]:
    """The median of each label's values, by label; nan where there are none."""
    counts = np.bincount(labels) if len(labels) else np.zeros(0, np.int64)
    ordered = values[np.lexsort((values, labels))]
    starts = np.cumsum(counts) - counts
    found = np.full(len(counts), np.nan)
    some = counts > 0
    low, high = (starts + (counts - 1) // 2)[some], (starts + counts // 2)[some]
    found[some] = (ordered[low] + ordered[high]) / 2
    return found


# --- Files ------------------------------------------------------------------------------------------


def write_duplicates_csv(path: str | os.PathLike[str], groups: Sequence[DuplicateGroup], names: Sequence[str]) -> None:
    """group, path, similarity: one line per image; the similarity is that of the whole group."""
    lines = ((at, guard(names[id]), g.similarity) for at, g in enumerate(groups, 1) for id in g.ids)
    _write_csv(path, ("group", "path", "similarity"), lines)


def write_outliers_csv(
    path: str | os.PathLike[str], found: Outliers, names: Sequence[str], labels: NDArray[np.integer]
) -> None:
    """path, cluster, score: farthest first; images without a cluster or a feature at the end, without a score."""
    lines: list[tuple[str, int, float | str]] = [
        (guard(names[id]), int(labels[id]), round(float(score), 3))
        for id, score in zip(found.ids, found.scores, strict=True)
    ]
    lines += [(guard(names[id]), int(labels[id]), "") for id in found.unseen]
    _write_csv(path, ("path", "cluster", "score"), lines)


def _write_csv(path: str | os.PathLike[str], head: Sequence[str], lines: Iterable[Sequence[str | int | float]]) -> None:
    """Whole or not at all. Text is always quoted: a lone carriage return in a name must not end its line."""
    with (
        replacing(path) as partial,
        partial.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        file.write(",".join(head) + "\n")
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        writer.writerows(lines)
