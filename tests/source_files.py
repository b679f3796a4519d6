"""Small images as files, packs and CIFAR-10 batches, and what opening them as data leads to."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from odcluster.data.sources import Source, open_source
from odcluster.errors import DataError, UserError


def png(number: int, height: int = 4, width: int = 5) -> bytes:
    """Make a PNG all of whose pixels are (number, 2 * number, 255 - number)."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (number, 2 * number, 255 - number)).save(buffer, "PNG")
    return buffer.getvalue()


def fill(root: Path, *names: str) -> Path:
    """Write one small image per name; its colour is its place in the list."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return root


def number_of(source: Source, id: int) -> int:
    return int(source.image(id)[0, 0, 0])


def message(data: object, split: str | None = None, error: type[UserError] = DataError) -> str:
    """Return the one sentence that opening this data ends with."""
    with pytest.raises(error) as caught:
        open_source(data, split)  # type: ignore[arg-type]
    text = str(caught.value)
    assert type(caught.value) is error
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


def pack(path: Path, **changes: np.ndarray) -> Path:
    files = [png(number) for number in range(5)]
    arrays = {
        "data": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.array([1, 0, 1, 0, -1]),
        "class_names": np.array(["cat", "dog"]),
    }
    np.savez(path, **(arrays | changes))
    return path


class OldString:
    """A Python 2 `str` in a protocol-2 pickle."""

    def __init__(self, text: bytes) -> None:
        self.text = text


class Python2Pickler(pickle._Pickler):  # type: ignore[misc, name-defined]
    """Write strings as Python 2 did, by the opcodes SHORT_BINSTRING and BINSTRING."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_old(self, value: OldString) -> None:
        size = len(value.text)
        head = b"U" + bytes([size]) if size < 256 else b"T" + size.to_bytes(4, "little")
        self.write(head + value.text)
        self.memoize(value)

    dispatch[OldString] = save_old


def batch(first: int, count: int) -> tuple[np.ndarray, list[int]]:
    """Make images whose red channel is their number and whose rows are brighter downwards."""
    images = np.zeros((count, 3, 32, 32), np.uint8)
    images[:, 0] = np.arange(first, first + count, dtype=np.uint8)[:, None, None]
    images[:, 1] = np.arange(32)[:, None]
    return images, [(first + number) % 10 for number in range(count)]


def write_batch(path: Path, images: np.ndarray, labels: list[int], version: str) -> None:
    flat = np.ascontiguousarray(images.reshape(len(images), 3072))
    names = [f"image_{number}.png".encode() for number in range(len(images))]
    if version == "bin":
        path.with_suffix(".bin").write_bytes(np.insert(flat, 0, labels, axis=1).tobytes())
    elif version == "python2":
        old = {OldString(b"batch_label"): OldString(b"training batch 1 of 5"), OldString(b"labels"): labels}
        state = (1, flat.shape, np.dtype("uint8"), False, OldString(flat.tobytes()))
        old |= {OldString(b"data"): state, OldString(b"filenames"): [OldString(name) for name in names]}
        buffer = io.BytesIO()
        Python2Pickler(buffer, protocol=2).dump(old)
        path.write_bytes(buffer.getvalue())
    else:
        content = {b"labels": labels, b"batch_label": b"x", b"data": flat, b"filenames": names}
        path.write_bytes(pickle.dumps(content, protocol=int(version)))
