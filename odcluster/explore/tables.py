"""Tables on disk, written row by row and put in place when they are whole: CSV, or Parquet with pyarrow.

File names and cluster names are other people's text. In CSV they are guarded and quoted as in `export.py`, and keep
their very bytes; Parquet holds UTF-8 only, so there bytes that are not are written as `\\xNN`. Memory stays flat: a
writer holds at most `BLOCK` rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

import numpy as np

from odcluster.errors import UserError
from odcluster.explore.export import guard, replacing

Kind = Literal["text", "int", "float", "vector", "image"]
"""image: the bytes of an encoded picture."""
Columns = Mapping[str, Kind]

BLOCK = 4096
"""Rows of a Parquet row group, and of memory."""


class Writer(Protocol):
    def write(self, **columns: Sequence[Any] | np.ndarray) -> None:
        """Add rows: one value per row in each column."""


@contextmanager
def open_table(path: str | os.PathLike[str], columns: Columns) -> Iterator[Writer]:
    """A writer for `path`, by its ending .csv or .parquet. After an error the file is as it was before."""
    path = Path(path)
    check_ending(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        if path.suffix.lower() == ".csv":
            with partial.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(",".join(columns) + "\n")
                yield CsvWriter(file, columns)
        else:
            parquet = import_parquet()
            with parquet.ParquetWriter(partial, arrow_schema(columns), compression="zstd") as file:
                writer = ParquetWriter(file, columns)
                yield writer
                writer.flush()


def check_ending(path: Path) -> None:
    """Refuse, before any work is done, what could not be written in the end."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"{path} ends neither in .csv nor in .parquet; the ending of --out chooses the format")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file with --out")
    if path.suffix.lower() == ".parquet":
        import_parquet()


class CsvWriter:
    def __init__(self, file: TextIO, columns: Columns) -> None:
        self._file, self._columns = file, columns

    def write(self, **columns: Sequence[Any] | np.ndarray) -> None:
        cells = [[csv_cell(value, kind) for value in columns[name]] for name, kind in self._columns.items()]
        self._file.writelines(",".join(row) + "\n" for row in zip(*cells, strict=True))


def csv_cell(value: Any, kind: Kind) -> str:
    """A value as it stands in a CSV file; what is not known is empty."""
    if kind == "float":
        return f"{value:.6f}" if math.isfinite(value) else ""
    if kind == "int":
        return "" if value is None else str(int(value))
    assert kind == "text", f"a CSV file has no {kind}"
    cell = guard(value)
    return '"' + cell.replace('"', '""') + '"' if any(c in cell for c in ',"\r\n') else cell


class ParquetWriter:
    def __init__(self, file: Any, columns: Columns) -> None:
        self._file, self._columns = file, columns
        self._waiting: list[Any] = []
        self._num_rows = 0

    def write(self, **columns: Sequence[Any] | np.ndarray) -> None:
        import pyarrow

        schema = arrow_schema(self._columns)
        arrays = [arrow_array(columns[name], kind) for name, kind in self._columns.items()]
        self._waiting.append(pyarrow.RecordBatch.from_arrays(arrays, schema=schema))
        self._num_rows += len(arrays[0])
        if self._num_rows >= BLOCK:
            self.flush()

    def flush(self) -> None:
        import pyarrow

        if self._waiting:
            self._file.write_table(pyarrow.Table.from_batches(self._waiting))
        self._waiting, self._num_rows = [], 0


def import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            "Parquet needs pyarrow: `pip install 'odcluster[parquet]'`, or give --out a name ending in .csv"
        ) from error
    return pyarrow.parquet


def arrow_schema(columns: Columns) -> Any:
    import pyarrow

    types = {
        "text": pyarrow.string(),
        "int": pyarrow.int64(),
        "float": pyarrow.float32(),
        "vector": pyarrow.list_(pyarrow.float32()),
        "image": pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]),
    }
    return pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])


def arrow_array(values: Sequence[Any] | np.ndarray, kind: Kind) -> Any:
    import pyarrow

    if kind == "text":
        return pyarrow.array([decodable(value) for value in values], pyarrow.string())
    if kind == "vector":
        rows = np.ascontiguousarray(values, np.float32)  # [n, D]
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
        return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(rows.reshape(-1)))
    if kind == "image":
        fields = arrow_schema({"image": "image"}).field("image").type
        return pyarrow.array([None if value is None else {"bytes": value, "path": None} for value in values], fields)
    if kind == "float":  # what is not known is null
        return pyarrow.array(np.asarray(values, np.float32), from_pandas=True)
    return pyarrow.array(values, pyarrow.int64())


def decodable(name: str) -> str:
    """The name as UTF-8 can hold it: undecodable bytes of a file name become \\xNN."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
