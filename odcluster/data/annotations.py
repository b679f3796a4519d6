"""Which classes each image shows, where it may show several: the truth that multi-label protocols test against.

Promises: row i is image i of the source's manifest; every value is 1, -1 or 0 and means the same wherever it came
from; what is contradictory or incomplete is an error that says where. Labels are for evaluation and never used to
learn. What to do with difficult and with unlabelled images is left to the protocols.
"""

from __future__ import annotations

import csv
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odcluster.data import readers
from odcluster.data.readers import shown
from odcluster.data.sources import Manifest, Source
from odcluster.errors import DataError

PATH_COLUMNS = ("path", "file", "filename", "image")
"""Names of a CSV's column of images, as `readers.read_list` takes them; the first that is there counts."""
LABEL_COLUMN = re.compile(r"(label|class)[ _]?\d*|labels|classes")
INDICATORS = {"1": 1, "0": -1, "": -1, "?": 0}


@dataclass(frozen=True, eq=False)
class Annotations:
    """Presence of every class in every image."""

    class_names: list[str]
    values: NDArray[np.int8]
    """[N, K]: 1 present, -1 absent, 0 there but difficult to see."""
    known: NDArray[np.bool_]
    """[N]: False where nothing is known about an image; its values are then all -1."""

    def __post_init__(self) -> None:
        assert self.values.shape == (len(self.known), len(self.class_names))


def annotations_of(source: Source, split: str | None, data: str | os.PathLike[str] | np.ndarray) -> Annotations:
    """The classes of the images of `source`, which is `open_source(data, split)`.

    VOC has lists per class; a CSV list is read anew, for all its labels; elsewhere an image has one class and all
    others are absent. Classes without names are called by their numbers.
    """
    manifest = source.manifest
    if manifest.kind == "voc":
        return _voc_annotations(manifest, split or "trainval")
    if manifest.kind == "list" and not isinstance(data, np.ndarray) and os.fsdecode(data).lower().endswith(".csv"):
        return _csv_annotations(manifest, os.path.abspath(os.path.expanduser(os.fsdecode(data))))
    if manifest.labels is None or not (manifest.labels >= 0).any():
        raise DataError(
            f"The {len(manifest)} images of {shown(manifest.root) or 'the array'} have no labels; give a folder per "
            "class, a list or CSV with labels, or arrays with them."
        )
    return _one_against_rest(manifest.labels, manifest.class_names)


def _one_against_rest(labels: NDArray[np.int64], class_names: list[str] | None) -> Annotations:
    known = labels >= 0
    numbers = np.unique(labels[known]) if class_names is None else np.arange(len(class_names))
    values = np.where(labels[:, None] == numbers, np.int8(1), np.int8(-1))
    return Annotations(class_names or [str(number) for number in numbers], values, known)


# --- PASCAL VOC -------------------------------------------------------------------------------------


def _voc_annotations(manifest: Manifest, split: str) -> Annotations:
    """From ImageSets/Main/<class>_<split>.txt, in which every image of the split has to be."""
    lists = os.path.join(manifest.root, "ImageSets", "Main")
    ending = f"_{split}.txt"
    class_names = [name.removesuffix(ending) for name in readers.glob_names(lists, ".+" + re.escape(ending))]
    if not class_names:
        raise DataError(
            f"{shown(lists)} has no lists of classes for {split} (such as cat{ending}); unpack the annotations there, "
            "or use a split that has them."
        )
    images = [posixpath.splitext(path.removeprefix("JPEGImages/"))[0] for path in manifest.paths]
    values = np.empty((len(images), len(class_names)), np.int8)
    for column, name in enumerate(class_names):
        listed = _voc_list(os.path.join(lists, name + ending))
        if missing := [image for image in images if image not in listed]:
            raise DataError(
                f"{len(missing)} of the {len(images)} images of {split} are not in {shown(name + ending)} "
                f"({', '.join(map(shown, missing[:3]))}); unpack the annotations of {shown(manifest.root)} again."
            )
        values[:, column] = [listed[image] for image in images]
    return Annotations(class_names, values, np.ones(len(images), np.bool_))


def _voc_list(path: str) -> dict[str, int]:
    """What a class list says of each image: 1, -1 or 0."""
    listed: dict[str, int] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                words = line.split()
                if not words:
                    continue
                if len(words) != 2 or words[1] not in ("1", "-1", "0"):
                    raise ValueError(f"line {number} is not an image and 1, -1 or 0")
                if listed.setdefault(words[0], int(words[1])) != int(words[1]):
                    raise ValueError(f"line {number} contradicts an earlier one")
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(f"{shown(path)} is not a VOC class list ({error}); unpack the annotations again.") from error
    return listed


# --- CSV --------------------------------------------------------------------------------------------


def read_multilabel_csv(path: str) -> tuple[list[str], Annotations]:
    """Images of a CSV, in the order of their first rows, and their classes. The first line names the columns.

    One column (`path`, `file`, `filename` or `image`) holds the image, relative to the CSV's folder. Classes are
    written in one of two ways:

    - columns `label`, `label2`, ... or `labels` (or `class`, ...) hold names, several in one cell separated by ; or |.
      Rows of the same image add up. An image without any is unknown. Where all names are numbers, a negative one
      stands for no label, as in lists of single labels. Further columns are ignored.
    - otherwise every further column is a class, and its cells are 1 present, 0 or empty absent, ? difficult. VOC's -1
      is refused, because beside it 0 would mean difficult.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            rows = list(_checked_rows(path, header, reader))
    except (OSError, csv.Error) as error:
        raise DataError(f"The list {shown(path)} cannot be read ({error}); give a readable CSV file.") from error
    lowered = [name.lower() for name in header]
    of_path = next((lowered.index(name) for name in PATH_COLUMNS if name in lowered), None)
    if of_path is None:
        raise DataError(f"The list {shown(path)} names no column for the images; call one `path` in its first line.")
    of_labels = [at for at, name in enumerate(lowered) if at != of_path and LABEL_COLUMN.fullmatch(name)]
    images = [(posixpath.normpath(row[of_path].strip()), row, line) for line, row in rows if row[of_path].strip()]
    if not images:
        raise DataError(f"The list {shown(path)} has no images; write one path per line below the first.")
    if of_labels:
        return _named(path, [(image, [row[at] for at in of_labels]) for image, row, _ in images])
    return _indicated(path, header, of_path, images)


def _checked_rows(path: str, header: Sequence[str], reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Rows with their numbers; empty ones do not count."""
    for number, row in enumerate(reader, 2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise DataError(
                f"Row {number} of {shown(path)} has {len(row)} cells and the first line has {len(header)}; "
                "make them equal (a name with a comma needs quotes)."
            )
        yield number, row


def _named(path: str, rows: Sequence[tuple[str, list[str]]]) -> tuple[list[str], Annotations]:
    names_of: dict[str, set[str]] = {}
    for image, cells in rows:
        written = [name.strip() for cell in cells for name in re.split(r"[;|]", cell)]
        names_of.setdefault(image, set()).update(name for name in written if name)
    every = set().union(*names_of.values())
    if all(re.fullmatch(r"-?\d{1,18}", name) for name in every):
        names_of = {image: {str(int(n)) for n in names if int(n) >= 0} for image, names in names_of.items()}
        class_names = sorted(set().union(*names_of.values()), key=int)
    else:
        class_names = sorted(every)
    if not class_names:
        raise DataError(f"No image of {shown(path)} has a label; fill in its column of labels.")
    column = {name: number for number, name in enumerate(class_names)}
    values = np.full((len(names_of), len(class_names)), -1, np.int8)
    for row, names in enumerate(names_of.values()):
        values[row, [column[name] for name in names]] = 1
    return list(names_of), Annotations(class_names, values, (values == 1).any(axis=1))


def _indicated(
    path: str, header: Sequence[str], of_path: int, rows: Sequence[tuple[str, list[str], int]]
) -> tuple[list[str], Annotations]:
    columns = [at for at in range(len(header)) if at != of_path]
    class_names = [header[at] for at in columns]
    if not class_names or "" in class_names or len(set(class_names)) < len(class_names):
        raise DataError(
            f"The first line of {shown(path)} must name a column `labels`, or one column per class, each with a name "
            "of its own; correct it."
        )
    values_of: dict[str, list[int]] = {}
    for image, row, number in rows:
        cells = [row[at].strip() for at in columns]
        if wrong := [at for at, cell in enumerate(cells) if cell not in INDICATORS]:
            cell, name = cells[wrong[0]], class_names[wrong[0]]
            raise DataError(
                f"Row {number} of {shown(path)} has {shown(cell)} under {shown(name)}; write "
                "1 where the class is present, 0 or nothing where it is absent, ? where it is difficult to see."
            )
        values = [INDICATORS[cell] for cell in cells]
        if values_of.setdefault(image, values) != values:
            raise DataError(
                f"Row {number} of {shown(path)} contradicts an earlier one of {shown(image)}; keep one of them."
            )
    known = np.ones(len(values_of), np.bool_)
    return list(values_of), Annotations(class_names, np.array(list(values_of.values()), np.int8), known)


def _csv_annotations(manifest: Manifest, path: str) -> Annotations:
    """The rows of a CSV in the order of the manifest, which leaves out files that do not exist."""
    images, all_of_them = read_multilabel_csv(path)
    row_of = {image: row for row, image in enumerate(images)}
    if missing := [image for image in manifest.paths if image not in row_of]:
        raise DataError(
            f"{shown(path)} no longer lists {len(missing)} of {len(manifest)} images ({shown(missing[0])}); "
            "let it be while it is used, and start again."
        )
    rows = [row_of[image] for image in manifest.paths]
    known = all_of_them.known[rows]
    if not known.any():
        raise DataError(f"No image of {shown(path)} that exists has a label; correct its paths or its labels.")
    return Annotations(all_of_them.class_names, all_of_them.values[rows], known)
