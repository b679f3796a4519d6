"""Features on disk: arrays that grow row by row, and a word about which rows are valid.

Promises: a process killed at any instant, or a machine that loses its power, leaves a store that says truthfully how
far it is; what was made of something else, or is damaged, is begun anew; nothing of the arrays is held in memory.
Which features these are is left to `features.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from odcluster.data.arrays import map_npy
from odcluster.errors import DataError, UserError
from odcluster.training.checkpoint import content_hash, flush, reason
from odcluster.training.run import write_atomically

READ_BYTES = 1 << 24
ABSORB_ROWS = 1024

Ids = NDArray[np.int64]
Progress = Callable[[str, int, int], None]


class FeatureStore:
    """A folder of one `<layer>.npy` per layer, float32 [N, D], and progress.json.

    Row r is image `ids[r]` of the source it was made from. As a context manager it is open for writing, for one
    process at a time; the caller sees to that.
    """

    def __init__(self, directory: Path, ids: Ids, dimensions: Mapping[str, int], identity: Mapping[str, Any]) -> None:
        self.directory = directory
        self.ids = ids
        self.dimensions = dict(dimensions)
        self.layers = list(dimensions)
        self.done = 0
        self.origin = dict(identity)
        self._identity = {
            **identity,
            "layers": self.dimensions,
            "num_images": len(ids),
            "ids": hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(),
        }
        self._checksums = dict.fromkeys(self.layers, 0)  # crc32 of the rows done
        self._refused: list[tuple[int, str, str]] = []  # row, path, reason
        self._files: dict[str, BinaryIO] = {}

    @property
    def usable(self) -> NDArray[np.bool_]:
        """[N]: False for an image that could not be read; its rows are zeros."""
        usable = np.arange(len(self.ids)) < self.done
        for row, _, _ in self._refused:
            usable[row] = False
        return usable

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Path and reason of each image that could not be read."""
        return [(path, why) for _, path, why in self._refused]

    @property
    def num_bytes(self) -> int:
        return sum(self._length(layer, len(self.ids)) for layer in self.layers)

    def rows(self, layer: str) -> NDArray[np.float32]:
        """All rows of a layer [N, D], mapped read-only: what is not looked at takes no memory."""
        return map_npy(os.fspath(self._path(layer)))

    # --- Writing ------------------------------------------------------------------------------------

    def open(self, progress: Progress) -> None:
        """Go on with what an earlier process has stored of the same features, or begin anew."""
        if not self._resume(progress):
            self._start()
        needed = sum(self._length(layer, len(self.ids) - self.done) for layer in self.layers)
        free = shutil.disk_usage(self.directory).free
        if self.done < len(self.ids) and needed + (1 << 20) > free:
            raise UserError(
                f"The features of {len(self.ids) - self.done:,} images take {needed:,} bytes and {free:,} are free in "
                f"{self.directory}; free some, choose a folder on another disk, or ask for fewer layers."
            )
        with self._writing():
            self._files = {layer: open(self._path(layer), "r+b") for layer in self.layers}  # noqa: SIM115

    def append(self, blocks: Mapping[str, NDArray[np.float32]], refused: Sequence[tuple[int, str, str]]) -> None:
        """Write the next rows of every layer; `refused` numbers its rows within them."""
        first = self.done
        with self._writing():
            for layer, block in blocks.items():
                self._files[layer].seek(len(self._header(layer)) + self._length(layer, first))
                self._files[layer].write(block.data)
                self._checksums[layer] = zlib.crc32(block.data, self._checksums[layer])
                self.done = first + len(block)
        self._refused += [(first + row, path, why) for row, path, why in refused]

    def absorb(self, part: FeatureStore) -> None:
        """Append all rows of another store, which holds those that come next."""
        rows = {layer: part.rows(layer) for layer in self.layers}
        for start in range(0, len(part.ids), ABSORB_ROWS):
            stop = min(start + ABSORB_ROWS, len(part.ids))
            refused = [(row - start, path, why) for row, path, why in part._refused if start <= row < stop]
            self.append({layer: np.ascontiguousarray(rows[layer][start:stop]) for layer in self.layers}, refused)

    def save(self) -> None:
        """Make what is done durable: rows first, then the word that they are there."""
        with self._writing():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            state = {
                "identity": self._identity,
                "done": self.done,
                "checksums": self._checksums,
                "refused": [list(entry) for entry in self._refused],
            }
            write_atomically(self._progress_file, json.dumps({**state, "sha256": content_hash(state)}))
            flush(self.directory)

    def __enter__(self) -> FeatureStore:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _resume(self, progress: Progress) -> bool:
        """Take over what is stored, if it is the same features and undamaged."""
        state = self._stored_state()
        if state is None:
            return False
        for number, layer in enumerate(self.layers):
            progress("checking stored features", number, len(self.layers))
            if self._checksum(layer, state["done"]) != state["checksums"][layer]:
                return False
        progress("checking stored features", len(self.layers), len(self.layers))
        self.done, self._checksums = state["done"], state["checksums"]
        self._refused = [(row, path, why) for row, path, why in state["refused"]]
        return True

    def _stored_state(self) -> dict[str, Any] | None:
        try:
            state = json.loads(self._progress_file.read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(state, dict) or state.pop("sha256", "") != content_hash(state):
            return None
        return state if state["identity"] == self._identity else None

    def _start(self) -> None:
        """Begin anew. progress.json comes first: arrays beside one are a store's and may go, others are not."""
        foreign = [self._path(layer).name for layer in self.layers if self._path(layer).exists()]
        if foreign and not self._progress_file.exists():
            raise UserError(f"{self.directory} holds a file {foreign[0]} of another origin; choose another folder.")
        self.save()
        with self._writing():
            for old in self.directory.glob("*.npy"):
                old.unlink()
            for layer in self.layers:
                header = self._header(layer)
                with open(self._path(layer), "wb") as file:
                    file.write(header)
                    file.truncate(len(header) + self._length(layer, len(self.ids)))  # takes space only when filled

    def _checksum(self, layer: str, num_rows: int) -> int | None:
        """crc32 of the first rows; None for a file that cannot be read or is not this array."""
        header, left = self._header(layer), self._length(layer, num_rows)
        found = 0
        try:
            with open(self._path(layer), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if file.read(len(header)) != header or size != len(header) + self._length(layer, len(self.ids)):
                    return None
                while left:
                    part = file.read(min(left, READ_BYTES))
                    if not part:
                        return None
                    found = zlib.crc32(part, found)
                    left -= len(part)
        except OSError:
            return None
        return found

    @property
    def _progress_file(self) -> Path:
        return self.directory / "progress.json"

    def _path(self, layer: str) -> Path:
        return self.directory / f"{layer}.npy"

    def _length(self, layer: str, num_rows: int) -> int:
        return 4 * num_rows * self.dimensions[layer]

    def _header(self, layer: str) -> bytes:
        head = io.BytesIO()
        shape = (len(self.ids), self.dimensions[layer])
        np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
        return head.getvalue()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"Features cannot be written to {self.directory} ({reason(error)}); correct that and repeat the "
                "command, which goes on from here."
            ) from error
