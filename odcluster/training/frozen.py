"""Training on features that are computed once, because the backbone they come from is not trained.

RUN/features/ holds float16 features of every image and of a few random views of it. Promises: killed at any instant and
started again, the extraction goes on where it was and ends with the same bytes; a damaged file is made anew; features
that are not finite are refused like unreadable images; which view a step sees is a function of (seed, epoch, image),
as everywhere. When the images of the run change, those that stayed keep their features and only the new ones are looked
at.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from odcluster.data.changes import compare
from odcluster.data.loading import Ids, Loader, RawBatch
from odcluster.data.randomness import Purpose, uniforms
from odcluster.data.sources import Manifest
from odcluster.errors import DataError
from odcluster.training.checkpoint import file_hash
from odcluster.training.run import write_atomically
from odcluster.training.survey import to_network

CHUNK = 64
"""Images per forward pass, times the views of each."""
SAVE_SECONDS = 20.0
BLOCK = 8192
"""Images whose features are copied at a time."""
MOST = float(np.finfo(np.float16).max)


class FrozenViews:
    """Batches of features where a `Loader` has batches of images."""

    def __init__(self, features: NDArray[np.float16], refused: dict[int, str], num_views: int, seed: int) -> None:
        self.features, self.refused, self.num_views, self.seed = features, refused, num_views, seed  # [1 + V, N, F]

    def normalisation_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, device=device), torch.ones(1, device=device)

    def training(self, epoch: int, batches: Iterable[Ids]) -> Iterator[RawBatch]:
        """`num_views` features of each image, each drawn from all that are there, the image itself among them."""
        for ids in batches:
            kept, refused = self._usable(ids)
            drawn = [
                (uniforms(self.seed, Purpose.VIEW, epoch, kept, view, 1)[:, 0] * len(self.features)).astype(np.int64)
                for view in range(self.num_views)
            ]
            yield RawBatch(torch.from_numpy(kept), self._rows(np.stack(drawn), kept), refused)

    def evaluation(self, ids: Ids, batch_size: int, whole: bool = False) -> Iterator[RawBatch]:
        """The feature of each image's evaluation view."""
        for start in range(0, len(ids), batch_size):
            kept, refused = self._usable(ids[start : start + batch_size])
            yield RawBatch(torch.from_numpy(kept), self._rows(np.zeros((1, len(kept)), np.int64), kept), refused)

    def _usable(self, ids: Ids) -> tuple[Ids, list[tuple[int, str]]]:
        refused = [(int(i), self.refused[int(i)]) for i in ids if int(i) in self.refused]
        return ids[[int(i) not in self.refused for i in ids]] if refused else ids, refused

    def _rows(self, views: NDArray[np.int64], ids: Ids) -> Tensor:
        return torch.from_numpy(self.features[views, ids].astype(np.float32))


def frozen_views(
    folder: Path,
    loader: Loader,
    backbone: nn.Module,
    *,
    manifest: Manifest,
    num_features: int,
    num_cached: int,
    num_views: int,
    seed: int,
    device: torch.device,
    identity: str,
    progress: Callable[[int, int], None],
    bfloat16: bool = False,
) -> FrozenViews:
    """Features of all images and of `num_cached` views of each, from the folder or made now. `progress` may raise."""
    shape = (1 + num_cached, len(manifest), num_features)
    file, state_file = folder / "features.npy", folder / "state.json"
    try:
        recover(folder)
        state = _state(state_file, identity)
        if state is not None and state["images"] != manifest.fingerprint():
            state = grow(folder, state, manifest)
        if state is None or not _undamaged(file, state, shape):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            manifest.write(folder / "manifest.csv")
            state = {"identity": identity, "images": manifest.fingerprint(), "missing": None, "done": 0, "refused": {}}
            features = _new_file(file, shape)
            write_atomically(state_file, json.dumps(state))
        else:
            features = np.lib.format.open_memmap(file, mode="r+")
        assert features.shape == shape, "the identity does not tell features of other sizes apart"
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            _extract(features, state, state_file, loader, backbone, device, progress)
        if "sha256" not in state:
            state["sha256"] = file_hash(file)
            write_atomically(state_file, json.dumps(state))
    except OSError as error:
        raise DataError(f"features cannot be kept in {folder} ({error.strerror}); free some space there") from error
    refused = {int(i): reason for i, reason in state["refused"].items()}
    return FrozenViews(features, refused, num_views, seed)


def grow(folder: Path, state: dict[str, Any], manifest: Manifest) -> dict[str, Any] | None:
    """Features for other images: rows of those that stayed are copied. None: they were not complete, begin again."""
    before, file = Manifest.read(folder / "manifest.csv"), folder / "features.npy"
    if "sha256" not in state or file_hash(file) != state["sha256"]:
        return None
    changes = compare(before, manifest)
    old = np.lib.format.open_memmap(file, mode="r")
    grown = folder.with_name(f"{folder.name}.grown")
    shutil.rmtree(grown, ignore_errors=True)
    grown.mkdir()
    shape = (len(old), len(manifest), old.shape[2])
    new = _new_file(grown / "features.npy", shape)
    kept = np.flatnonzero(changes.origin >= 0)
    for start in range(0, len(kept), BLOCK):
        here = kept[start : start + BLOCK]
        new[:, here] = old[:, changes.origin[here]]
    new.flush()  # type: ignore[attr-defined]
    new_ids = changes.new_ids()
    refused = {str(new_ids[int(id)]): reason for id, reason in state["refused"].items() if new_ids[int(id)] >= 0}
    missing = np.flatnonzero(changes.origin < 0).tolist()
    state = {**state, "images": manifest.fingerprint(), "missing": missing, "done": 0, "refused": refused}
    del state["sha256"]  # of the old file
    manifest.write(grown / "manifest.csv")
    write_atomically(grown / "state.json", json.dumps(state))  # last: from now on they are complete
    os.rename(folder, folder.with_name(f"{folder.name}.old"))
    recover(folder)
    return state


def recover(folder: Path) -> None:
    """Complete what `grow` began, if it was killed."""
    grown, old = (folder.with_name(f"{folder.name}.{name}") for name in ("grown", "old"))
    if not folder.exists() and (grown / "state.json").is_file():
        os.rename(grown, folder)
    for rest in (grown, old) if folder.exists() else ():
        shutil.rmtree(rest, ignore_errors=True)


@torch.no_grad()
def _extract(
    features: NDArray[np.float16],
    state: dict[str, Any],
    state_file: Path,
    loader: Loader,
    backbone: nn.Module,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> None:
    backbone.eval()
    wanted = np.arange(features.shape[1]) if state["missing"] is None else np.array(state["missing"], np.int64)
    saved = time.monotonic()
    mean, std = loader.normalisation_on(device)
    for at, rows in enumerate((features[:1], features[1:])):  # first the images themselves, then their views
        ids = wanted[max(0, state["done"] - at * len(wanted)) :]
        parts = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
        for raw in loader.training(0, parts) if at else loader.evaluation(ids, CHUNK):
            _keep(raw, backbone(to_network(raw.images, mean, std).flatten(0, 1)).float().cpu(), rows, state)
            state["done"] += len(raw.ids) + len(raw.refused)
            if time.monotonic() - saved > SAVE_SECONDS or state["done"] == 2 * len(wanted):
                features.flush()  # type: ignore[attr-defined]
                write_atomically(state_file, json.dumps(state))
                saved = time.monotonic()
            progress(forwarded(state["done"], len(wanted), len(features) - 1), len(features) * len(wanted))


def forwarded(done: int, num_images: int, num_views: int) -> int:
    """Forward passes behind us: one for each image, then one for each view of each."""
    return min(done, num_images) + max(0, done - num_images) * num_views


def _keep(raw: RawBatch, found: Tensor, rows: NDArray[np.float16], state: dict[str, Any]) -> None:
    found = found.unflatten(0, (len(rows), -1))  # [V, B, F]
    finite = found.isfinite().all(dim=2).all(dim=0)
    rows[:, raw.ids.numpy()] = found.nan_to_num().clamp(-MOST, MOST).numpy().astype(np.float16)
    state["refused"].update({str(i): reason for i, reason in raw.refused})
    state["refused"].update({str(i): "its features are not finite" for i in raw.ids[~finite].tolist()})


def _new_file(file: Path, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """An array on disk whose space is taken at once: a disk that fills up later would kill a process that maps it."""
    needed = 2 * int(np.prod(shape))
    if shutil.disk_usage(file.parent).free < needed + (1 << 20):
        raise OSError(errno.ENOSPC, f"{needed >> 20} MB are needed, which are not free")
    features = np.lib.format.open_memmap(file, mode="w+", dtype=np.float16, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with open(file, "r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, os.fstat(opened.fileno()).st_size)
    return features


def _undamaged(file: Path, state: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether the file has its length and, once it is complete, its hash."""
    try:
        whole = np.load(file, mmap_mode="r", allow_pickle=False).shape == shape  # fails on a file that is too short
        return whole and ("sha256" not in state or file_hash(file) == state["sha256"])
    except (OSError, ValueError):
        return False


def _state(state_file: Path, identity: str) -> dict[str, Any] | None:
    """Where an extraction of the same features stands; None where there is none."""
    try:
        state = json.loads(state_file.read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and state.get("identity") == identity and "images" in state else None
