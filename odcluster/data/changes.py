"""What became of a set of images since it was listed: which stayed, came, went, moved or have another content.

Promises: an image counts as the same only where that is certain. Its name and size are as they were; or one image went
and one came with the same size and either the same time of writing, to fractions of a second (a file that was renamed
or moved keeps it), or the same file name in another folder, and no other image could be meant. Everything else is one
image that went and another that came. Names and sizes decide; times are hints, because copying a folder changes them
all: where more than half of the images have other times, no conclusion is drawn from them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from odcluster.data.names import shown

if TYPE_CHECKING:
    from odcluster.data.manifest import Manifest

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Changes:
    """From one manifest to another; names are given as they are shown to people, ids are positions in the manifests."""

    num_before: int
    origin: Ids
    """[N now]: the id that each image had before; -1 for one that was not there, or is another one under that name."""
    added: list[str]
    removed: list[str]
    renamed: list[tuple[str, str]]
    replaced: list[str]
    """Same name, other size."""
    touched: list[str]
    """Same name and size, but written to since: perhaps another image."""
    elsewhere: str
    """For images that are no files of their own: whose content is another one."""

    def __bool__(self) -> bool:
        """Whether the images are certainly not the same."""
        return bool(self.added or self.removed or self.renamed or self.replaced or self.elsewhere)

    def sentence(self) -> str:
        """What has changed, with counts and the first names; "" if nothing has."""
        kinds = (
            ("added", self.added),
            ("removed", self.removed),
            ("renamed", [f"{old} to {new}" for old, new in self.renamed]),
            ("changed in size", self.replaced),
            ("written to since, with the same size", self.touched),
        )
        parts = [f"{len(names)} {what} ({first_three(names)})" for what, names in kinds if names]
        if parts:
            return f"Of {self.num_before} images: {', '.join(parts)}."
        return f"The names are the same, but the content of {self.elsewhere} has changed." if self.elsewhere else ""

    def new_ids(self) -> Ids:
        """[N before]: the id that each image has now; -1 for those that are gone."""
        moved = np.full(self.num_before, -1, np.int64)
        kept = np.flatnonzero(self.origin >= 0)
        moved[self.origin[kept]] = kept
        return moved


def compare(before: Manifest, now: Manifest) -> Changes:
    """What has changed from one manifest to the other."""
    places = {path: id for id, path in enumerate(before.paths)}
    origin = np.array([places.get(path, -1) for path in now.paths], np.int64).reshape(-1)
    stayed = np.flatnonzero(origin >= 0)
    other_size = now.sizes[stayed] != before.sizes[origin[stayed]]
    times, old_times = now.modified[stayed], before.modified[origin[stayed]]
    touched = ~other_size & (times != old_times) & (times > 0) & (old_times > 0)
    if 2 * int(touched.sum()) > len(stayed):  # a copy of the folder
        touched[:] = False
    removed = np.setdiff1d(np.arange(len(before)), origin)
    pairs = renames(before, now, removed, np.flatnonzero(origin < 0))
    renamed = [(shown(before.paths[old]), shown(now.paths[new])) for old, new in pairs]
    for old, new in pairs:
        origin[new] = old
    added = np.flatnonzero(origin < 0)
    removed = np.setdiff1d(removed, [old for old, _ in pairs])
    origin[stayed[other_size | touched]] = -1
    return Changes(
        len(before),
        origin,
        names(now, added),
        names(before, removed),
        renamed,
        names(now, stayed[other_size]),
        names(now, stayed[touched]),
        (shown(now.root) or "the array") if before.content != now.content else "",
    )


def renames(before: Manifest, now: Manifest, removed: Ids, added: Ids) -> list[tuple[int, int]]:
    """Old and new id of the images that only have another name now."""

    def written(manifest: Manifest, id: int) -> Hashable:
        time = int(manifest.modified[id])
        return (int(manifest.sizes[id]), time) if time % 1_000_000_000 else None  # whole seconds say too little

    def moved(manifest: Manifest, id: int) -> Hashable:
        return int(manifest.sizes[id]), posixpath.basename(manifest.paths[id])

    pairs: list[tuple[int, int]] = []
    for key in (written, moved):
        gone, come = (set(column) for column in zip(*pairs, strict=True)) if pairs else (set(), set())
        old = only_ones(before, [id for id in removed.tolist() if id not in gone], key)
        new = only_ones(now, [id for id in added.tolist() if id not in come], key)
        pairs += [(old[mark], new[mark]) for mark in old if mark in new]
    return sorted(pairs)


def only_ones(manifest: Manifest, ids: Sequence[int], key: Callable[[Manifest, int], Hashable]) -> dict[Hashable, int]:
    """Key -> id, for the keys that only one image has."""
    found: dict[Hashable, int] = {}
    repeated = set()
    for id in ids:
        mark = key(manifest, id)
        if mark in found:
            repeated.add(mark)
        if mark is not None:
            found[mark] = id
    return {mark: id for mark, id in found.items() if mark not in repeated}


def names(manifest: Manifest, ids: Ids) -> list[str]:
    return [shown(manifest.paths[id]) for id in ids.tolist()]


def first_three(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
