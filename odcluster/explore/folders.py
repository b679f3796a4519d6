"""A folder of images per cluster, for people and for programs that read class folders.

Promises: every path made lies in the target, whatever clusters or files are called; originals are only read (a hard
link is the very file, which is why copies are the default); the target appears when it is whole, and a folder that has
something in it is never touched. Images that are no files of their own are written as PNG.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import cv2
import numpy as np

from odcluster.data.readers import shown
from odcluster.data.sources import FileSource, Manifest, Source
from odcluster.errors import DataError, ImageRefused, UserError

Mode = Literal["copy", "hardlink", "symlink"]
Progress = Callable[[str, int, int], None]
Value = TypeVar("Value")

MOST_BYTES = 120
"""Of a folder's name. File systems allow 255; the rest is for a number, and for the path before it."""
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
"""Names that Windows keeps for devices, with any ending."""
CHUNK = 256


# --- Names ------------------------------------------------------------------------------------------


def safe_name(text: str) -> str:
    """The text as the name of one folder on any system; "" where nothing of it is left."""
    name = unicodedata.normalize("NFC", text)
    name = "".join(c if c.isprintable() and c not in '<>:"/\\|?*' else "-" for c in name)
    name = re.sub(r"\s+", " ", name).lstrip(" .-~").rstrip(" .-")
    name = name.encode("utf-8", "ignore")[:MOST_BYTES].decode("utf-8", "ignore").rstrip(" .-")
    return f"_{name}" if name.partition(".")[0].strip().casefold() in RESERVED else name


def unique_titles(clusters: Iterable[int], name_of: Callable[[int], str], unnamed: str) -> dict[int, str]:
    """A title for each cluster, no two alike even where case does not count; `unnamed` is formatted with the number."""
    titles: dict[int, str] = {}
    taken: set[str] = set()
    for cluster in clusters:
        title = name_of(cluster) or unnamed.format(cluster)
        if title.casefold() in taken:
            title = f"{title} ({cluster})"
        while title.casefold() in taken:  # somebody has called another cluster just so
            title += "-"
        taken.add(title.casefold())
        titles[cluster] = title
    return titles


def folder_names(clusters: Sequence[int], name_of: Callable[[int], str]) -> dict[int, str]:
    """The folder of each cluster: its name where it has one, else cluster-0012."""
    width = max(4, len(str(max(clusters, default=0))))
    return unique_titles(clusters, lambda cluster: safe_name(name_of(cluster)), f"cluster-{{:0{width}d}}")


def file_name(manifest: Manifest, image: int, taken: set[str], *, is_file: bool) -> str:
    """The name of an image in its folder: its own, with its number where another one there is called so."""
    base = posixpath.basename(manifest.paths[image])
    if not is_file:
        base = (safe_name(base.replace("#", "-")) or f"{image:08d}") + ".png"
    stem, ending = os.path.splitext(base)
    while base.casefold() in taken:
        stem = f"{os.fsdecode(os.fsencode(stem)[:200])}-{image:08d}"
        base = stem + ending
    taken.add(base.casefold())
    return base


# --- Places -----------------------------------------------------------------------------------------


def check_outside(place: Path, manifest: Manifest) -> None:
    """Nothing is written among the images."""
    for folder in manifest.folders():
        root = Path(os.path.realpath(folder))
        if Path(os.path.realpath(place)).is_relative_to(root):
            raise UserError(
                f"{place} lies among the images in {shown(os.fspath(root))}; choose another place with --out"
            )


@contextmanager
def new_folder(place: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill; in the end it is `place`, after an error it is gone.

    `place` must not hold anything, unless it may be replaced.
    """
    place = Path(os.path.abspath(place))
    if place.exists() and not place.is_dir():
        raise UserError(f"{place} is a file; choose a folder with --out")
    if place.is_dir() and any(place.iterdir()) and not replace:
        raise UserError(f"{place} exists and is not empty; choose another folder with --out")
    partial = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    try:
        partial.mkdir(parents=True)
        yield partial
        if place.exists():
            os.rename(place, old)
        os.rename(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


# --- Images -----------------------------------------------------------------------------------------


def in_threads(
    work: Callable[[int], Value], images: Sequence[int], activity: str, progress: Progress
) -> Iterator[tuple[int, Value | ImageRefused]]:
    """`work` of each image, several at a time, in order; an image that is refused gives its refusal."""

    def attempt(image: int) -> Value | ImageRefused:
        try:
            return work(image)
        except ImageRefused as refusal:
            return refusal

    with ThreadPoolExecutor() as pool:  # decoding and copying release the interpreter lock
        for start in range(0, len(images), CHUNK):
            part = images[start : start + CHUNK]
            yield from zip(part, pool.map(attempt, part), strict=True)
            progress(activity, start + len(part), len(images))


def place_images(source: Source, places: dict[int, Path], mode: Mode, progress: Progress) -> list[tuple[int, str]]:
    """Put every image at its place; returns those that are not there, with the reason."""
    place = _link(source, places, mode) if isinstance(source, FileSource) else _write(source, places)
    done = in_threads(place, list(places), "images", progress)
    return [(image, str(outcome)) for image, outcome in done if isinstance(outcome, ImageRefused)]


def _link(source: FileSource, places: dict[int, Path], mode: Mode) -> Callable[[int], None]:
    def place(image: int) -> None:
        original = os.path.join(source.manifest.root, source.manifest.paths[image])
        try:
            if not os.path.isfile(original):
                raise ImageRefused("no such file (deleted since the scan), or not a regular one")
            if mode == "symlink":
                os.symlink(os.path.abspath(original), places[image])
            elif mode == "hardlink":
                os.link(os.path.realpath(original), places[image])
            else:
                shutil.copyfile(original, places[image])
                shutil.copystat(original, places[image])
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise UserError(
                    f"{shown(original)} cannot be linked from {places[image].parent.parent.parent} "
                    f"({error.strerror}); use --mode copy"
                ) from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise DataError(f"the images cannot be written ({error.strerror}); free some space") from error
            raise ImageRefused(error.strerror or str(error)) from error

    return place


def _write(source: Source, places: dict[int, Path]) -> Callable[[int], None]:
    def place(image: int) -> None:
        places[image].write_bytes(png(source.image(image)))

    return place


def png(pixels: np.ndarray) -> bytes:
    """RGB pixels as a PNG file."""
    encoded, data = cv2.imencode(".png", np.ascontiguousarray(pixels[:, :, ::-1]))
    assert encoded
    return data.tobytes()
