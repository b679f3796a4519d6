"""Small pictures of images, made when they are asked for and kept in one file of limited size.

Promises: several threads may ask at once, and no more than a few images are decoded at a time, whatever they hold;
what is asked for least goes first when the file is full; an image that cannot be shown is a grey tile with the reason.
The limits on what is decoded at all are those of `data/images.py`. Originals are only read.
"""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from odcluster.data.images import image_size
from odcluster.data.sources import Source
from odcluster.errors import ImageRefused

SIZES = (96, 192, 384)
"""Longest sides there are thumbnails of."""
FULL_SIDE = 1600
"""Longest side of the picture itself, as it is shown."""
MAX_BYTES = 500_000_000
"""Of all thumbnails that are kept."""
LOSSLESS_SIDE = 64
"""So small an image is not compressed further: at 8 x 8 pixels, JPEG is all one would see."""
FRESH_SECONDS = 3600
"""A thumbnail is noted as used again after this time, not at every look."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Picture:
    """An encoded image, ready to be sent."""

    data: bytes
    media_type: str
    refused: str = ""
    """Why this is only a grey tile."""


class Thumbnails:
    """Pictures of a source's images. `file` is where they are kept; it may be deleted at any time."""

    def __init__(self, source: Source, file: Path, max_bytes: int = MAX_BYTES) -> None:
        self._source, self._file, self._max_bytes = source, file, max_bytes
        self._decoding = threading.BoundedSemaphore(min(4, os.cpu_count() or 1))  # 300 MB each, at worst
        self._lock = threading.Lock()
        self._kept = 0
        self._database = self._open()

    def thumbnail(self, id: int, size: int) -> Picture:
        """Image `id` with its longest side at most `size`, from the file if it is there."""
        if (found := self._find(id, size)) is not None:
            return found
        picture = self._make(id, size, quality=80)
        if not picture.refused:  # the reason may go away
            self._keep(id, size, picture)
        return picture

    def full(self, id: int) -> Picture:
        """Image `id` as large as a screen."""
        return self._make(id, FULL_SIDE, quality=90)

    def dimensions(self, id: int) -> tuple[int, int] | None:
        """Width and height; None where the image cannot be read."""
        try:
            stored = self._source.stored(id)
            height, width = image_size(stored) if isinstance(stored, bytes) else stored.shape[:2]
        except ImageRefused:
            return None
        return int(width), int(height)

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None

    def _make(self, id: int, size: int, quality: int) -> Picture:
        try:
            with self._decoding:
                return encode(shrink(self._source.image(id, min_size=size), size), quality)
        except ImageRefused as error:
            return Picture(grey_tile(size), "image/webp", refused=str(error))

    # --- The file: whatever goes wrong with it, pictures are still made -----------------------------

    def _open(self) -> sqlite3.Connection | None:
        for _ in range(2):
            try:
                self._file.parent.mkdir(exist_ok=True)
                database = sqlite3.connect(self._file, timeout=2, isolation_level=None, check_same_thread=False)
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = OFF")  # it can all be made again
                database.execute(
                    "CREATE TABLE IF NOT EXISTS thumbnails (id INTEGER, size INTEGER, used INTEGER, bytes INTEGER, "
                    "media_type TEXT, data BLOB, PRIMARY KEY (id, size))"
                )
                database.execute("CREATE INDEX IF NOT EXISTS by_use ON thumbnails (used, bytes)")
                self._kept = database.execute("SELECT coalesce(sum(bytes), 0) FROM thumbnails").fetchone()[0]
                return database
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # read-only, no space: not damaged
                    return None
                for ending in ("", "-wal", "-shm"):
                    with contextlib.suppress(OSError):
                        self._file.with_name(self._file.name + ending).unlink()
            except OSError:
                return None
        return None

    def _find(self, id: int, size: int) -> Picture | None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._database is not None:
                wanted = "SELECT data, media_type, used FROM thumbnails WHERE id = ? AND size = ?"
                row = self._database.execute(wanted, (id, size)).fetchone()
                if row is not None:
                    now = int(time.time())
                    if now - row[2] > FRESH_SECONDS:
                        noted = "UPDATE thumbnails SET used = ? WHERE id = ? AND size = ?"
                        self._database.execute(noted, (now, id, size))
                    return Picture(row[0], row[1])
        return None

    def _keep(self, id: int, size: int, picture: Picture) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._database is not None:
                values = (id, size, int(time.time()), len(picture.data), picture.media_type, picture.data)
                self._database.execute("INSERT OR REPLACE INTO thumbnails VALUES (?, ?, ?, ?, ?, ?)", values)
                self._kept += len(picture.data)
                if self._kept > self._max_bytes:
                    self._make_room(self._database)

    def _make_room(self, database: sqlite3.Connection) -> None:
        """Remove the least recently used until a tenth of the room is free."""
        self._kept = database.execute("SELECT coalesce(sum(bytes), 0) FROM thumbnails").fetchone()[0]
        surplus = self._kept - int(0.9 * self._max_bytes)
        going = []
        for row, length in database.execute("SELECT rowid, bytes FROM thumbnails ORDER BY used, rowid"):
            if surplus <= 0:
                break
            going.append((row,))
            surplus -= length
            self._kept -= length
        database.execute("BEGIN")
        database.executemany("DELETE FROM thumbnails WHERE rowid = ?", going)
        database.execute("COMMIT")


def shrink(pixels: Pixels, longest: int) -> Pixels:
    """The image with its longest side at most `longest`; a smaller one stays as it is."""
    height, width = pixels.shape[:2]
    if max(height, width) <= longest:
        return pixels
    scale = longest / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)


def encode(pixels: Pixels, quality: int) -> Picture:
    """JPEG, or lossless WebP for what is tiny."""
    if max(pixels.shape[:2]) > LOSSLESS_SIDE:
        return Picture(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=quality), "image/jpeg")
    return Picture(webp(pixels), "image/webp")


def webp(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", lossless=True)
    return file.getvalue()


def grey_tile(size: int) -> bytes:
    """What stands where an image should be."""
    return webp(np.full((size, size, 3), 160, np.uint8))
