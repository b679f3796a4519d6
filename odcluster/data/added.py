"""Images of further folders beside those that a run began with, as one source.

An added image goes by the way that leads to it from the root of the first source, ../more/a.jpg, so that every program
that finds the images of a run by root and name finds it too. Ids are positions in the sorted names of all.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

import numpy as np

from odcluster.data.readers import shown
from odcluster.data.sources import FILES, FileSource, Manifest, Source, open_source
from odcluster.errors import DataError


def open_with_added(
    data: str | os.PathLike[str] | np.ndarray, added: Iterable[str], *, skip_missing: bool = False
) -> Source:
    """What `open_source` gives, and with it the images of further folders or lists, without those that are gone."""
    source = open_source(data)
    for place in added:
        try:
            source = with_added(source, place)
        except DataError:
            if not skip_missing:
                raise
    return source


def with_added(source: Source, place: str | os.PathLike[str]) -> Source:
    """The images of a source and those of another folder or list."""
    first = source.manifest
    if first.kind not in FILES:
        raise DataError(
            f"images can only be added to images that are files, and these are {first.kind}; train a new run on all of "
            "them, with --weights to start from what this one has learned."
        )
    more = open_source(place).manifest
    if more.kind not in FILES:
        raise DataError(f"{shown(os.fsdecode(place))} holds no image files but {more.kind}; give a folder of images.")
    names, known = names_from(first.root, more), set(first.paths)
    new = [row for row, name in enumerate(names) if name not in known]
    merged = _merged(first, more, np.array(new, np.int64), names)
    where = os.path.abspath(os.path.expanduser(os.fsdecode(place)))
    return FileSource(dataclasses.replace(merged, added=tuple(dict.fromkeys([*first.added, where]))))


def names_from(root: str, more: Manifest) -> list[str]:
    """The ways that lead from a root to the images of another manifest."""
    here, there = os.path.realpath(root), os.path.realpath(more.root)
    try:
        way = "" if here == there else os.path.relpath(there, here).replace(os.sep, "/") + "/"
    except ValueError:  # another drive of Windows
        way = there + "/"
    if not here.startswith(there + os.sep):
        return [way + name for name in more.paths]
    detour = way + os.path.relpath(here, there).replace(os.sep, "/") + "/"  # the root lies in the other folder
    return [(way + name).removeprefix(detour) for name in more.paths]


def _merged(first: Manifest, more: Manifest, new: np.ndarray, names: list[str]) -> Manifest:
    """One manifest of all images of the first and the rows `new` of the other, which go by `names`."""
    paths = first.paths + [names[row] for row in new]
    order = np.array(sorted(range(len(paths)), key=lambda row: os.fsencode(paths[row])))
    labels, class_names = _merged_labels(first, more)
    return dataclasses.replace(
        first,
        paths=[paths[row] for row in order],
        sizes=np.concatenate([first.sizes, more.sizes[new]])[order],
        modified=np.concatenate([first.modified, more.modified[new]])[order],
        labels=None if labels is None else np.concatenate([labels[0], labels[1][new]])[order],
        class_names=class_names,
    )


def _merged_labels(first: Manifest, more: Manifest) -> tuple[tuple[np.ndarray, np.ndarray] | None, list[str] | None]:
    """Labels of both sets in one numbering; classes of the same name are the same class, numbers stay numbers."""
    if first.labels is None and more.labels is None:
        return None, None
    own, other = (
        np.full(len(manifest), -1, np.int64) if manifest.labels is None else manifest.labels
        for manifest in (first, more)
    )
    if more.class_names is None or more.labels is None:
        return (own, other if first.class_names is None else np.full_like(other, -1)), first.class_names
    names = list(first.class_names or []) if first.labels is not None else []
    if first.labels is not None and first.class_names is None:  # numbers on one side, names on the other
        return (own, np.full_like(other, -1)), None
    names += [name for name in more.class_names if name not in names]
    numbers = np.array([names.index(name) for name in more.class_names] + [-1], np.int64)  # the last is that of -1
    return (own, numbers[other]), names
