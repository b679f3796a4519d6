"""Features of images as one Parquet file that Embedding Atlas opens, or as a NumPy array beside a CSV of the images.

The columns of the Parquet file, and what `embedding-atlas FILE` is told of them:
  id, path          the image; its row in the manifest
  vector            the feature                                               --vector vector
  projection_x, _y  its first two principal components                        --x projection_x --y projection_y
  image             a small JPEG, as {bytes, path}                            --image image
Memory stays flat: rows are read from a mapped file and pictures made a block at a time. An image that could not be
read has no row here; in the CSV it has its reason, and zeros in the array.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from odcluster.clustering.pca import mean_and_covariance, principal_components
from odcluster.data.sources import Source
from odcluster.errors import ImageRefused
from odcluster.evaluation.store import FeatureStore
from odcluster.explore.folders import Progress, in_threads
from odcluster.explore.tables import Kind, open_table

SIDE = 96
"""Longest side in pixels of a picture: about 2 KB each."""
SAMPLE = 20_000
"""Rows that principal components are computed from."""
MOST_DIMENSIONS = 4096
"""Beyond this, principal components would take gigabytes."""
BLOCK = 1024

Floats = NDArray[np.float32]


def write_atlas(path: Path, source: Source, store: FeatureStore, layer: str, progress: Progress) -> None:
    """The Parquet file of the images of a store that could be read."""
    rows, usable = store.rows(layer), np.flatnonzero(store.usable)
    points = plane(np.array(rows[usable[:: spread(len(usable))]]))
    kinds: dict[str, Kind] = {"id": "int", "path": "text", "image": "image", "vector": "vector"}
    if points is not None:
        kinds |= {"projection_x": "float", "projection_y": "float"}
    pictures: list[bytes | None] = []
    start = 0
    with open_table(path, kinds) as table:
        for _, picture in in_threads(
            lambda at: thumbnail(source, at), store.ids[usable].tolist(), "pictures", progress
        ):
            pictures.append(None if isinstance(picture, ImageRefused) else picture)
            if len(pictures) == BLOCK or start + len(pictures) == len(usable):
                here = usable[start : start + len(pictures)]
                ids, vectors = store.ids[here], rows[here]
                columns: dict[str, Any] = {
                    "id": ids,
                    "path": [source.manifest.paths[i] for i in ids],
                    "image": pictures,
                    "vector": vectors,
                }
                if points is not None:
                    columns["projection_x"], columns["projection_y"] = points(vectors).T
                table.write(**columns)
                start, pictures = start + len(pictures), []


def write_image_list(path: Path, source: Source, store: FeatureStore) -> None:
    """Which image each row of the array is, and why where there is none."""
    reasons = dict(store.refused)
    paths = source.manifest.paths
    with open_table(path, {"row": "int", "path": "text", "reason": "text"}) as table:
        for start in range(0, len(store.ids), BLOCK):
            names = [paths[i] for i in store.ids[start : start + BLOCK]]
            rows = np.arange(start, start + len(names))
            table.write(row=rows, path=names, reason=[reasons.get(name, "") for name in names])


def spread(count: int) -> int:
    """The step that takes about SAMPLE of so many rows, evenly."""
    return max(1, count // SAMPLE)


def plane(sample: Floats) -> Callable[[Floats], Floats] | None:
    """What maps rows [n, D] to the first two principal components [n, 2] of a sample; None for very wide rows."""
    if not 2 <= sample.shape[1] <= MOST_DIMENSIONS or len(sample) < 3:
        return None
    mean, covariance = mean_and_covariance(torch.from_numpy(sample).split(1024))
    components, _ = principal_components(covariance, 2)
    centre, axes = mean.float().numpy(), components.float().numpy()
    return lambda rows: (rows - centre) @ axes


def thumbnail(source: Source, image: int) -> bytes:
    """A small JPEG; ImageRefused where the image cannot be read."""
    picture = Image.fromarray(source.image(image, SIDE))
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return file.getvalue()
