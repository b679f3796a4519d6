"""Maps: every image a point in the plane, neighbours in feature space near each other.

PCA is a second's work and always there. UMAP needs umap-learn and minutes: it runs in a process of its own, so that a
server answers meanwhile, on at most 50,000 images. Same features and seed, same map. Results are kept beside the run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from odcluster.data.randomness import permutation
from odcluster.errors import DataError
from odcluster.explore.export import replacing
from odcluster.explore.snapshot import Floats, Ids, Rows

MOST_POINTS = 200_000
"""Points of a map; more is no longer fluent in a browser, and no longer seen."""
MOST_UMAP = 50_000
MOST_COVARIANCE = 20_000
"""Images from which the directions of PCA are taken."""
COMMAND = [sys.executable, "-P", "-m", "odcluster.explore.maps"]  # -P: nothing from the folder it was started in
"""The other process: `compute_umap`."""
RECORD = np.dtype([("id", "<i4"), ("x", "<f4"), ("y", "<f4"), ("cluster", "<i4")])


@dataclass(frozen=True, eq=False)
class Map:
    """Where the images lie."""

    ids: Ids  # [n]
    points: Floats  # [n, 2], in [-1, 1]

    def records(self, labels: NDArray[np.integer]) -> bytes:
        """id, x, y and cluster of each point, as the page reads them."""
        table = np.empty(len(self.ids), RECORD)
        table["id"], table["cluster"] = self.ids, labels[self.ids]
        table["x"], table["y"] = self.points.T
        return table.tobytes()


def kinds() -> list[str]:
    """The maps that can be made here."""
    return ["pca", "umap"] if importlib.util.find_spec("umap") is not None else ["pca"]


def sample(rows: Rows, most: int, seed: int) -> Ids:
    """Images with a feature, sorted: all of them, or `most` drawn by the seed."""
    usable = np.flatnonzero(rows.scale > 0)
    return usable if len(usable) <= most else np.sort(usable[permutation(seed, 0, len(usable))[:most]])


def pca_map(rows: Rows, seed: int, directory: Path, key: str) -> Map:
    """The two directions in which the rows vary most."""
    if (kept := read_map(directory, "pca", key)) is not None:
        return kept
    ids = sample(rows, MOST_POINTS, seed)
    if len(ids) == 0:
        return Map(ids, np.empty((0, 2), np.float32))
    few = rows.unit(sample(rows, MOST_COVARIANCE, seed))
    centre = few.mean(axis=0)
    few = few - centre
    _, vectors = np.linalg.eigh((few.T @ few / len(few)).astype(np.float64))  # from small to large
    axes = np.zeros((len(centre), 2), np.float32)
    axes[:, : min(2, len(centre))] = vectors[:, ::-1][:, :2]
    largest = np.abs(axes).argmax(axis=0)
    axes *= np.where(axes[largest, [0, 1]] < 0, -1, 1)  # the sign of an axis means nothing: always the same
    points = np.empty((len(ids), 2), np.float32)
    for start in range(0, len(ids), 8192):
        points[start : start + 8192] = (rows.unit(ids[start : start + 8192]) - centre) @ axes
    found = Map(ids, to_square(points))
    write_map(found, directory, "pca", key)
    return found


def umap_map(rows: Rows, seed: int, directory: Path, key: str, workers: list[subprocess.Popen[bytes]]) -> Map:
    """UMAP, computed in another process, which is in `workers` while it runs so that it can be stopped."""
    if (kept := read_map(directory, "umap", key)) is not None:
        return kept
    ids = sample(rows, MOST_UMAP, seed)
    if len(ids) < 5:
        return Map(ids, np.zeros((len(ids), 2), np.float32))
    directory.mkdir(exist_ok=True)
    given, made = (directory / f".umap-{name}-{os.getpid()}.safetensors" for name in ("rows", "points"))
    try:
        save_file({"rows": torch.from_numpy(rows.unit(ids))}, given)
        command = [*COMMAND, os.fspath(given), os.fspath(made), str(seed)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        workers.append(process)
        _, errors = process.communicate()
        workers.remove(process)
        if process.returncode != 0:
            last = (errors.decode(errors="replace").strip().splitlines() or ["it was stopped"])[-1]
            raise DataError(f"UMAP failed ({last[:200]}); the PCA map is there")
        found = Map(ids, to_square(load_file(made)["points"].numpy()))
    finally:
        given.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
    write_map(found, directory, "umap", key)
    return found


def to_square(points: NDArray[np.floating]) -> Floats:
    """Points centred and scaled to [-1, 1], both axes alike; the farthest one in a thousand lie on the border."""
    low, high = np.quantile(points, [0.0005, 0.9995], axis=0)
    scale = max(float((high - low).max()) / 2, 1e-12)
    return ((points - (low + high) / 2) / scale).clip(-1, 1).astype(np.float32)


def read_map(directory: Path, kind: str, key: str) -> Map | None:
    """A map that was kept, if it is of these features."""
    try:
        with safe_open(directory / f"map-{kind}.safetensors", "pt") as file:
            if (file.metadata() or {}).get("key") == key:
                return Map(file.get_tensor("ids").numpy(), file.get_tensor("points").numpy())
    except (OSError, SafetensorError):
        pass
    return None


def write_map(found: Map, directory: Path, kind: str, key: str) -> None:
    """Keep a map; where nothing can be written it is made again next time."""
    tensors = {"ids": torch.from_numpy(found.ids), "points": torch.from_numpy(np.ascontiguousarray(found.points))}
    try:
        directory.mkdir(exist_ok=True)
        with replacing(directory / f"map-{kind}.safetensors") as prepared:
            save_file(tensors, prepared, metadata={"key": key})
    except (OSError, SafetensorError):
        pass


def compute_umap(given: str, made: str, seed: int) -> None:
    """The other process: rows of one file to points in another."""
    import warnings

    if hasattr(os, "nice"):
        os.nice(10)
    warnings.simplefilter("ignore")
    from umap import UMAP

    rows = load_file(given)["rows"].numpy()
    init = "spectral" if len(rows) > 50 else "random"
    points = UMAP(
        n_neighbors=min(15, len(rows) - 1), min_dist=0.1, metric="cosine", random_state=seed % 2**32, init=init
    ).fit_transform(rows)
    save_file({"points": torch.from_numpy(np.ascontiguousarray(points, np.float32))}, made)


if __name__ == "__main__":
    compute_umap(sys.argv[1], sys.argv[2], int(sys.argv[3]))
