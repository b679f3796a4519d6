"""Some images of other data, as a file that names them: nothing is copied, and it trains like a folder.

    {"of": "/data/cifar10/train.npz", "split": null, "fingerprint": "...", "ids": [0, 3, 17, ...]}

Promises: an image keeps its name, label and pixels; ids count through the chosen images in the order they had; data
that has changed since the choice was made is refused, because the ids would then mean other images.
"""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
from numpy.typing import NDArray

from odcluster.data.readers import shown
from odcluster.data.sources import FileSource, Manifest, Source, open_source
from odcluster.errors import DataError

ENDING = ".subset"


class Subset(Source):
    """Some images of a source that is loaded as a whole."""

    def __init__(self, source: Source, ids: NDArray[np.int64]) -> None:
        self.source, self.ids = source, ids
        self.manifest = chosen(source.manifest, ids)

    def stored(self, id: int) -> bytes | np.ndarray:
        return self.source.stored(int(self.ids[id]))


def chosen(manifest: Manifest, ids: NDArray[np.int64]) -> Manifest:
    """The manifest of these images alone; `ids` are sorted, so that names stay sorted."""
    return dataclasses.replace(
        manifest,
        paths=[manifest.paths[id] for id in ids.tolist()],
        sizes=manifest.sizes[ids],
        labels=None if manifest.labels is None else manifest.labels[ids],
        modified=manifest.modified[ids],
    )


def write_subset(path: str | os.PathLike[str], of: str, ids: NDArray[np.int64], split: str | None = None) -> None:
    """Note which images of `of` are meant."""
    of = os.path.abspath(os.path.expanduser(of))
    ids = np.unique(ids)
    values = {"of": of, "split": split, "fingerprint": open_source(of, split).manifest.fingerprint()}
    prepared = f"{os.fspath(path)}.{os.getpid()}"
    with open(prepared, "w") as file:
        json.dump({**values, "ids": ids.tolist()}, file)
    os.replace(prepared, path)


def open_subset(path: str) -> Source:
    """The images that a .subset file names."""
    try:
        with open(path) as file:
            values = json.load(file)
        of, split, fingerprint = values["of"], values["split"], values["fingerprint"]
        ids = np.array(values["ids"], dtype=np.int64)
        if ids.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0:
            raise ValueError("its ids are not a rising list")
        if not isinstance(of, str) or of.endswith(ENDING):
            raise ValueError("it must name images, not another subset")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{shown(path)} is not a list of chosen images ({error}); make it again.") from error
    source = open_source(of, split)
    if source.manifest.fingerprint() != fingerprint or ids[-1] >= len(source):
        raise DataError(f"{shown(of)} has changed since images of it were chosen; restore it, or choose again.")
    if isinstance(source, FileSource):  # its manifest is all it needs
        return FileSource(chosen(source.manifest, ids))
    return Subset(source, ids)
