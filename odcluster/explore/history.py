"""How a training went, from its metrics.jsonl, also while the file still grows.

Promises: only what was added is read again; a line that is half written, or damaged, is left out; a file that was cut
back by a resume is noticed.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_POINTS = 1000
"""Of a curve; more do not fit on a screen."""
NOT_CURVES = {"step", "epoch"}

Points = list[tuple[int, float]]


class History:
    """The curves of one run, and the cluster sizes on record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self._step = 0
        self._curves: dict[str, Points] = {}
        self._sizes: list[tuple[int, NDArray[np.int64]]] = []

    def refresh(self) -> None:
        """Read what was added since the last time."""
        with self._lock:
            if self._read():
                self._reset()
                self._read()

    def _read(self) -> bool:
        """Take in the lines from the offset on; True: the file is not the one that was read before, begin again."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._offset:
                    return True
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return False
        whole = content[: content.rfind(b"\n") + 1]
        for text in whole.splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                if line["step"] < self._step and self._offset > 0:
                    return True
                self._take(line)
        self._offset += len(whole)
        return False

    def _take(self, line: dict[str, Any]) -> None:
        self._step = step = max(self._step, line["step"])
        if line.get("event") == "sizes":
            sizes = np.asarray(line.get("sizes", []))
            if sizes.ndim == 1 and sizes.dtype.kind in "iu" and len(sizes):
                self._sizes.append((step, sizes.astype(np.int64)))
            return
        timing = line.get("timing")
        values = {**line, **(timing if isinstance(timing, dict) else {})}
        for name, value in values.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and name not in NOT_CURVES and math.isfinite(value):
                self._curves.setdefault(name, []).append((step, float(value)))

    @property
    def step(self) -> int:
        """The last step on record."""
        return self._step

    def series(self) -> dict[str, Points]:
        """Every curve, thinned out to at most 1,000 points; first and last stay."""
        with self._lock:
            return {name: thinned(points) for name, points in self._curves.items()}

    def sizes(self) -> list[tuple[int, NDArray[np.int64]]]:
        """Step and cluster sizes [C], as often as they were recorded."""
        with self._lock:
            return list(self._sizes)

    def images_per_second(self) -> float | None:
        """The speed of late; None where nothing is known."""
        with self._lock:
            last = [value for _, value in self._curves.get("images_per_second", [])[-5:]]
        return statistics.median(last) if last else None


def thinned(points: Points) -> Points:
    if len(points) <= MOST_POINTS:
        return list(points)
    return [points[place] for place in np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int)]


def spread(step: int, sizes: NDArray[np.int64]) -> list[float]:
    """Step, smallest, lower quartile, median, upper quartile and largest of the clusters."""
    return [step, *np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]).tolist()]
