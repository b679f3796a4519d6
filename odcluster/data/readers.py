"""How each storage lists its images: folders, lists, PASCAL VOC, CIFAR-10; npy and npz files are in `arrays.py`.

Promises: names come sorted by their bytes, so ids do not depend on the file system's order; nothing that is
read executes code (the pickled version of CIFAR-10 is read as a list of opcodes, never unpickled); what
cannot be listed is an error or a warning, never silence. Turning listings into manifests and sources is left
to `sources.py`.
"""

from __future__ import annotations

import csv
import os
import pickletools
import posixpath
import re
import stat
import warnings
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from odcluster.data.names import shown as shown
from odcluster.errors import DataError

EXTENSIONS = (
    ".bmp",
    ".gif",
    ".jfif",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class Listing(NamedTuple):
    """Names relative to a root, sorted by their bytes, with what is known about each."""

    paths: list[str]
    sizes: np.ndarray  # [N] int64, bytes
    labels: np.ndarray | None = None  # [N] int64, -1 unknown
    class_names: list[str] | None = None
    modified: np.ndarray | None = None  # [N] int64, when each was written, in ns


def warn_skipped(names: list[str], why: str) -> None:
    """Say once how many were skipped, and name the first."""
    if names:
        warnings.warn(f"{len(names)} {why}, first: {shown(names[0])}", stacklevel=4)


def is_image_name(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


# --- Folders ----------------------------------------------------------------------------------------


def scan_folder(root: str) -> Listing:
    """List all images under a folder; hidden names are skipped, linked folders followed.

    Each folder is visited once, which breaks loops of links; linked ones after all real ones and in sorted
    order, so that which of two names a folder goes by does not depend on the file system.
    """
    found = Found([], array("q"), array("q"))
    skipped: list[str] = []
    waiting, linked = [""], list[str]()  # folders relative to the root, each with its final slash
    visited: set[tuple[int, int]] = set()
    while waiting or linked:
        if not waiting:
            linked.sort(key=os.fsencode, reverse=True)
            waiting.append(linked.pop())
        folder = waiting.pop()
        try:
            status = os.stat(os.path.join(root, folder))
            if (status.st_dev, status.st_ino) not in visited:
                visited.add((status.st_dev, status.st_ino))
                with os.scandir(os.path.join(root, folder)) as entries:
                    _sort_out(entries, folder, found, waiting, linked, skipped)
        except OSError as error:
            if not folder:
                raise DataError(f"{shown(root)} cannot be read ({error.strerror}); check its rights.") from error
            skipped.append(folder)
    warn_skipped(skipped, f"files or folders under {shown(root)} could not be read and were left out")
    order = np.array(sorted(range(len(found.names)), key=lambda row: os.fsencode(found.names[row])), np.int64)
    sizes, modified = (np.frombuffer(column, np.int64)[order] for column in (found.sizes, found.modified))
    return Listing([found.names[row] for row in order], sizes, modified=modified)


class Found(NamedTuple):
    """Images in the order of the file system; plain columns, because there may be millions."""

    names: list[str]
    sizes: array[int]
    modified: array[int]


def _sort_out(
    entries: Iterable[os.DirEntry[str]],
    folder: str,
    found: Found,
    waiting: list[str],
    linked: list[str],
    skipped: list[str],
) -> None:
    """Add each entry of a folder to what it belongs to. This loop is what a scan of a million names costs."""
    for entry in entries:
        name = entry.name
        if name.startswith("."):
            continue
        try:
            if entry.is_dir():
                (linked if entry.is_symlink() else waiting).append(f"{folder}{name}/")
            elif name.lower().endswith(EXTENSIONS):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    found.names.append(folder + name)
                    found.sizes.append(status.st_size)
                    found.modified.append(status.st_mtime_ns)
        except OSError:  # a link that leads nowhere, or a file that has gone already
            skipped.append(folder + name)


def class_tree_labels(paths: list[str]) -> tuple[np.ndarray, list[str]] | None:
    """Take the first folder of each path as its class; None unless every path has one and there are two."""
    tops = [path.partition("/")[0] if "/" in path else "" for path in paths]
    class_names = sorted(set(tops), key=os.fsencode)
    if "" in class_names or len(class_names) < 2:
        return None
    numbers = {name: number for number, name in enumerate(class_names)}
    return np.array([numbers[top] for top in tops], dtype=np.int64), class_names


# --- Lists ------------------------------------------------------------------------------------------


def read_list(path: str) -> Listing:
    """Read a .txt, .lst or .csv list of image files, relative to the list's folder, with optional labels."""
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            rows = list(_csv_rows(path, file) if path.lower().endswith(".csv") else _text_rows(file))
    except (OSError, csv.Error) as error:
        raise DataError(f"The list {shown(path)} cannot be read: {error}; give a readable text file.") from error
    if not rows:
        raise DataError(f"The list {shown(path)} is empty; write one image path per line.")
    folder = os.path.dirname(path)
    chosen: dict[str, tuple[int, int, str]] = {}
    repeated, missing = [], []
    for name, label in rows:
        name = posixpath.normpath(name)
        if name in chosen:
            repeated.append(name)
            continue
        try:
            status = os.stat(os.path.join(folder, name))
        except (OSError, ValueError):
            missing.append(name)
            continue
        if stat.S_ISREG(status.st_mode):
            chosen[name] = status.st_size, status.st_mtime_ns, label
        else:
            missing.append(name)
    if not chosen:
        raise DataError(
            f"None of the {len(rows)} files in the list {shown(path)} exists; write paths relative to the "
            f"list's folder (the first one was looked for at {shown(os.path.join(folder, rows[0][0]))})."
        )
    warn_skipped(missing, f"files of the list {shown(path)} do not exist and were left out")
    warn_skipped(repeated, f"lines of the list {shown(path)} repeat an earlier file and were left out")
    paths = sorted(chosen, key=os.fsencode)
    sizes, modified = (np.array([chosen[name][column] for name in paths], dtype=np.int64) for column in (0, 1))
    return Listing(paths, sizes, *encode_labels([chosen[name][2] for name in paths]), modified)


def _text_rows(file: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (path, label): the label follows a tab, or is an integer after the last blank."""
    for line in file:
        line = line.strip("\r\n")
        path, tab, label = line.rpartition("\t")
        if not tab:
            match = None if is_image_name(line.rstrip()) else re.fullmatch(r"(.*\S)\s+(-?\d+)\s*", line)
            path, label = (match[1], match[2]) if match else (line, "")
        if path.strip():
            yield path.strip(), label.strip()


def _csv_rows(path: str, file: Iterable[str]) -> Iterator[tuple[str, str]]:
    reader = csv.reader(file)
    header = [column.strip().lower() for column in next(reader, [])]
    of_path = next((header.index(name) for name in ("path", "file", "filename", "image") if name in header), None)
    of_label = next((header.index(name) for name in ("label", "class") if name in header), None)
    if of_path is None:
        raise DataError(f"The list {shown(path)} names no column for the images; call one `path` in its first line.")
    for row in reader:
        if len(row) > of_path and row[of_path].strip():
            label = row[of_label].strip() if of_label is not None and len(row) > of_label else ""
            yield row[of_path].strip(), label


def encode_labels(texts: list[str]) -> tuple[np.ndarray | None, list[str] | None]:
    """Turn labels as written into numbers: integers stay, names are numbered as sorted, "" is unknown."""
    known = sorted(set(texts) - {""})
    if not known:
        return None, None
    if all(re.fullmatch(r"-?\d{1,18}", text) for text in known):
        return np.array([max(int(text or -1), -1) for text in texts], dtype=np.int64), None
    numbers = {"": -1} | {name: number for number, name in enumerate(known)}
    return np.array([numbers[text] for text in texts], dtype=np.int64), known


# --- PASCAL VOC -------------------------------------------------------------------------------------


def find_voc(root: str) -> str | None:
    """Return the folder with JPEGImages and ImageSets/Main: the given one, or one below a VOCdevkit."""
    for devkit in (root, os.path.join(root, "VOCdevkit")):
        years = sorted(glob_names(devkit, r"VOC\d{4}"))
        for folder in (devkit, *(os.path.join(devkit, year) for year in years)):
            if all(os.path.isdir(os.path.join(folder, part)) for part in ("JPEGImages", "ImageSets/Main")):
                return folder
    return None


def read_voc(root: str, split: str | None) -> Listing:
    """List the images of a VOC split; an image's label is its class where exactly one class is positive."""
    sets = os.path.join(root, "ImageSets", "Main")
    images = scan_folder(os.path.join(root, "JPEGImages"))
    at = {posixpath.splitext(path)[0]: row for row, path in enumerate(images.paths)}
    ids = list(at)
    if split is not None or os.path.isfile(os.path.join(sets, "trainval.txt")):
        ids = [line[0] for line in _voc_lines(os.path.join(sets, f"{split or 'trainval'}.txt"))]
    missing = [image for image in ids if image not in at]
    warn_skipped(missing, f"images of the split have no file in {shown(root)}/JPEGImages and were left out")
    rows = np.array(sorted({at[image] for image in ids if image in at}), dtype=np.int64)  # keeps sorted names
    ending = f"_{split or 'trainval'}.txt"
    class_names = sorted(name.removesuffix(ending) for name in glob_names(sets, ".*" + re.escape(ending)))
    labels = np.full(len(at), -1, dtype=np.int64)
    num_positive = np.zeros(len(at), dtype=np.int64)
    for number, name in enumerate(class_names):
        for line in _voc_lines(os.path.join(sets, name + ending)):
            if line[0] in at and line[1:] == ["1"]:
                labels[at[line[0]]] = number
                num_positive[at[line[0]]] += 1
    labels[num_positive != 1] = -1
    paths = [f"JPEGImages/{images.paths[row]}" for row in rows]
    assert images.modified is not None
    known = labels[rows] if class_names else None
    return Listing(paths, images.sizes[rows], known, class_names or None, images.modified[rows])


def _voc_lines(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8") as file:
            return [line.split() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        splits = [name[:-4] for name in glob_names(os.path.dirname(path), r"(train|val|trainval|test)\.txt")]
        have = f"use one of the splits it has ({', '.join(splits)})" if splits else "leave the split out"
        raise DataError(f"{shown(path)} cannot be read, so this VOC folder lacks that split; {have}.") from error


def glob_names(folder: str, pattern: str) -> list[str]:
    """Return the names in a folder that match a regular expression, sorted; none without such a folder."""
    try:
        return sorted(name for name in os.listdir(folder) if re.fullmatch(pattern, name))
    except OSError:
        return []


# --- CIFAR-10's own files ---------------------------------------------------------------------------


def find_cifar(root: str) -> str | None:
    """Return the folder with CIFAR-10's batches: the given one, or the one its archive unpacks to."""
    for folder in (root, *(os.path.join(root, name) for name in glob_names(root, "cifar-10-batches-.*"))):
        if cifar_batches(folder, None) or cifar_batches(folder, "test"):
            return folder
    return None


def cifar_batches(folder: str, split: str | None) -> list[str]:
    """Return the names of the batches of a split, of the binary version if both are there."""
    name = r"test_batch" if split == "test" else r"data_batch_[1-5]"
    return glob_names(folder, name + r"\.bin") or glob_names(folder, name)


def read_cifar_batch(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [N, 3, 32, 32] and labels int64 [N] of one batch, binary or pickled."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        if path.endswith(".bin"):
            records = np.frombuffer(data, dtype=np.uint8).reshape(-1, 1 + 3072)
            images, labels = records[:, 1:], records[:, 0].astype(np.int64)
        else:
            pixels, numbers = _read_pickled_batch(data)
            images, labels = np.frombuffer(pixels, dtype=np.uint8).reshape(-1, 3072), np.array(numbers)
        if len(images) == 0 or len(images) != len(labels) or labels.min() < 0 or labels.max() > 9:
            raise ValueError("images and labels do not belong together")
    except (OSError, ValueError, OverflowError, IndexError) as error:
        raise DataError(f"{shown(path)} is not a whole CIFAR-10 batch ({error}); download it again.") from error
    return images.reshape(-1, 3, 32, 32), labels


def _read_pickled_batch(data: bytes) -> tuple[bytes, list[int]]:
    """Find the pixels and the list of labels among the opcodes of a pickle, of which none is executed.

    Pixels are the one string of whole images; Python 2 wrote it as a string, Python 3 as bytes or, in old
    protocols, as text of Latin-1. Labels are the integers between the key `labels` and the next string.
    """
    pixels, labels, key = b"", list[int](), ""
    column_order = False
    for opcode, value, _ in pickletools.genops(data):
        if isinstance(value, str | bytes | bytearray) and opcode.name not in ("GLOBAL", "PUT", "GET"):
            text = value.encode("latin-1", "replace") if isinstance(value, str) else bytes(value)
            if text != b"latin1":  # the codec's name, which old protocols write after text that was bytes
                key = text.decode("latin-1") if len(text) < 32 else ""
            if len(text) > len(pixels) and len(text) >= 3072 and len(text) % 3072 == 0:
                if column_order:
                    raise ValueError("pixels stored column by column")
                pixels = text
        elif opcode.name in ("NEWTRUE", "NEWFALSE"):  # numpy's "Fortran order" comes just before the pixels
            column_order = opcode.name == "NEWTRUE"
        elif key == "labels" and isinstance(value, int) and "INT" in opcode.name:  # BININT, BININT1, BININT2
            labels.append(value)
    return pixels, labels
