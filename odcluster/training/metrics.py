"""metrics.jsonl: one line per interval, the source of truth for curves.

Timings live under their own key, so that two runs with the same seed differ nowhere else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from odcluster.clustering.kmeans import accumulator_dtype


class Window:
    """Means over the steps since the last line. Tensors stay on their device until the line is written."""

    def __init__(self, state: Mapping[str, tuple[float, int]] | None = None) -> None:
        self._sums: dict[str, Tensor | float] = {key: total for key, (total, _) in (state or {}).items()}
        self._counts: dict[str, int] = {key: count for key, (_, count) in (state or {}).items()}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for key, value in values.items():
            if isinstance(value, Tensor):
                value = value.detach().to(accumulator_dtype(value.device))
            self._sums[key] = self._sums.get(key, 0.0) + value
            self._counts[key] = self._counts.get(key, 0) + 1

    def state(self) -> dict[str, tuple[float, int]]:
        """What a checkpoint needs to go on in the middle of an interval."""
        return {key: (float(total), self._counts[key]) for key, total in self._sums.items()}

    def means(self) -> dict[str, float]:
        """The means, and start again."""
        means = {key: total / count for key, (total, count) in self.state().items()}
        self._sums, self._counts = {}, {}
        return means


class MetricsFile:
    """Append-only; on resume cut back to the size it had at the checkpoint, so that no step stands twice."""

    def __init__(self, path: Path, size: int) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        if self._file.tell() > size:
            os.truncate(path, size)
            self._file.seek(0, os.SEEK_END)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; on a full disk nothing of it stays behind, and OSError is raised."""
        before = os.fstat(self._file.fileno()).st_size
        try:
            self._file.write((json.dumps(line) + "\n").encode())
        except OSError:
            with suppress(OSError):  # the first failure is the one to tell
                os.ftruncate(self._file.fileno(), before)
            raise

    def size(self) -> int:
        """Bytes so far, safely on disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines (a last one that is still being written is left out)."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
