"""Training on features that are computed once, because the backbone they come from is not trained.

RUN/features/ holds float16 features of every image and of a few random views of it. Promises: killed at any instant and
started again, the extraction goes on where it was and ends with the same bytes; a damaged file is made anew; features
that are not finite are refused like unreadable images; which view a step sees is a function of (seed, epoch, image),
as everywhere. When the images of the run change, those that stayed keep their features and only the new ones are looked
at. Several ranks each make the features of the images they own, in a folder of their own, and read all of them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from odcluster.ranks import SINGLE, Ranks
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

    def __init__(
        self, parts: Sequence[NDArray[np.float16]], refused: dict[int, str], num_views: int, seed: int
    ) -> None:
        self.parts, self.refused, self.num_views, self.seed = parts, refused, num_views, seed  # each [1 + V, n, F]
        self._ends = np.cumsum([part.shape[1] for part in parts])

    def normalisation_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, device=device), torch.ones(1, device=device)

    def training(self, epoch: int, batches: Iterable[Ids]) -> Iterator[RawBatch]:
        """`num_views` features of each image, each drawn from all that are there, the image itself among them."""
        for ids in batches:
            kept, refused = self._usable(ids)
            drawn = [
                (uniforms(self.seed, Purpose.VIEW, epoch, kept, view, 1)[:, 0] * len(self.parts[0])).astype(np.int64)
                for view in range(self.num_views)
            ]
            yield RawBatch(torch.from_numpy(kept), self.rows(np.stack(drawn), kept), refused)

    def evaluation(self, ids: Ids, batch_size: int, whole: bool = False) -> Iterator[RawBatch]:
        """The feature of each image's evaluation view."""
        for start in range(0, len(ids), batch_size):
            kept, refused = self._usable(ids[start : start + batch_size])
            yield RawBatch(torch.from_numpy(kept), self.rows(np.zeros((1, len(kept)), np.int64), kept), refused)

    def _usable(self, ids: Ids) -> tuple[Ids, list[tuple[int, str]]]:
        refused = [(int(i), self.refused[int(i)]) for i in ids if int(i) in self.refused]
        return ids[[int(i) not in self.refused for i in ids]] if refused else ids, refused

    def rows(self, views: NDArray[np.int64], ids: Ids) -> Tensor:
        """The features of views [V, n] of images [n]: [V, n, F]."""
        if len(self.parts) == 1:
            return torch.from_numpy(self.parts[0][views, ids].astype(np.float32))
        found = np.empty((*views.shape, self.parts[0].shape[2]), np.float32)
        owners = np.searchsorted(self._ends, ids, side="right")
        for owner in np.unique(owners):
            here, part = owners == owner, self.parts[owner]
            found[:, here] = part[views[:, here], ids[here] - (self._ends[owner] - part.shape[1])]
        return torch.from_numpy(found)


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
    ranks: Ranks = SINGLE,
) -> FrozenViews:
    """Features of all images and of `num_cached` views of each, from the folder or made now. `progress` may raise, on
    all ranks alike.
    """
    try:
        makers = ranks.first(lambda: _made_before(folder, identity, manifest))
        if makers is None:
            own = ranks.own(len(manifest))
            shape = (1 + num_cached, own.stop - own.start, num_features)
            with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                part = part_folder(folder, ranks)
                rounds = _make(part, loader, backbone, own.start, shape, device, identity, manifest, progress)
            for _ in range(int(ranks.max(torch.tensor(rounds))) - rounds if ranks.world_size > 1 else 0):
                progress(0, 1)
            ranks.meet()
            makers = ranks.world_size
    except OSError as error:
        raise DataError(f"features cannot be kept in {folder} ({error.strerror}); free some space there") from error
    parts, states = _opened(folder, identity, makers)
    refused = {int(i): reason for state in states for i, reason in state["refused"].items()}
    return FrozenViews(parts, refused, num_views, seed)


def part_folder(folder: Path, ranks: Ranks) -> Path:
    """Where a rank keeps the features it has made; alone, in the folder itself."""
    return folder if ranks.world_size == 1 else folder / f"{ranks.rank:04d}-of-{ranks.world_size:04d}"


def _parts(folder: Path, makers: int) -> list[Path]:
    return [part_folder(folder, Ranks(maker, makers)) for maker in range(makers)]


def _opened(folder: Path, identity: str, makers: int) -> tuple[list[Any], list[dict[str, Any]]]:
    states = [_state(path / "state.json", identity) for path in _parts(folder, makers)]
    parts = [np.lib.format.open_memmap(path / "features.npy", mode="r") for path in _parts(folder, makers)]
    return parts, [state for state in states if state is not None]


def _made_before(folder: Path, identity: str, manifest: Manifest) -> int | None:
    """By how many ranks all features have been made; None: they have not. Those of other images are carried over."""
    recover(folder)
    found = {int(path.name[-4:]) for path in folder.glob("*-of-*") if path.name[-4:].isdigit()} | {1}
    for makers in sorted(found):
        states = [_state(path / "state.json", identity) for path in _parts(folder, makers)]
        complete = [state for state in states if state is not None and "sha256" in state]
        files = [path / "features.npy" for path in _parts(folder, makers)]
        if len(complete) < makers or not all(map(_undamaged, files, complete)):
            continue
        if all(state["images"] == manifest.fingerprint() for state in complete):
            return makers
        if len({state["images"] for state in complete}) == 1:
            grow(folder, identity, makers, manifest)
            return None
    return None


def _make(
    folder: Path,
    loader: Loader,
    backbone: nn.Module,
    first: int,
    shape: tuple[int, int, int],
    device: torch.device,
    identity: str,
    manifest: Manifest,
    progress: Callable[[int, int], None],
) -> int:
    """The features of `shape`, of the images from `first` on; returns how often there was progress."""
    file, state_file = folder / "features.npy", folder / "state.json"
    state = _state(state_file, identity)
    if state is None or state["images"] != manifest.fingerprint() or not _undamaged(file, state, shape):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        manifest.write(folder / "manifest.csv")
        state = {"identity": identity, "images": manifest.fingerprint(), "missing": None, "done": 0, "refused": {}}
        features = _new_file(file, shape)
        write_atomically(state_file, json.dumps(state))
    else:
        features = np.lib.format.open_memmap(file, mode="r+")
    rounds = _extract(features, state, state_file, loader, backbone, first, device, progress)
    if "sha256" not in state:
        state["sha256"] = file_hash(file)
        write_atomically(state_file, json.dumps(state))
    return rounds


def grow(folder: Path, identity: str, makers: int, manifest: Manifest) -> None:
    """Features for other images, in the layout of one rank: those of images that stayed are copied, others missing."""
    before = Manifest.read(_parts(folder, makers)[0] / "manifest.csv")
    parts, states = _opened(folder, identity, makers)
    changes, grown = compare(before, manifest), folder.with_name(f"{folder.name}.grown")
    shutil.rmtree(grown, ignore_errors=True)
    grown.mkdir()
    new = _new_file(grown / "features.npy", (len(parts[0]), len(manifest), parts[0].shape[2]))
    kept = np.flatnonzero(changes.origin >= 0)
    old = FrozenViews(parts, {}, 1, 0)
    views = np.arange(len(parts[0]))[:, None]
    for start in range(0, len(kept), BLOCK):
        here = kept[start : start + BLOCK]
        new[:, here] = old.rows(np.broadcast_to(views, (len(views), len(here))), changes.origin[here])
    new.flush()  # type: ignore[attr-defined]
    new_ids, refused = changes.new_ids(), {id: why for state in states for id, why in state["refused"].items()}
    state = {
        "identity": identity,
        "images": manifest.fingerprint(),
        "missing": np.flatnonzero(changes.origin < 0).tolist(),
        "done": 0,
        "refused": {str(new_ids[int(id)]): why for id, why in refused.items() if new_ids[int(id)] >= 0},
    }
    manifest.write(grown / "manifest.csv")
    write_atomically(grown / "state.json", json.dumps(state))  # last: from now on they are complete
    os.rename(folder, folder.with_name(f"{folder.name}.old"))
    recover(folder)


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
    first: int,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> int:
    backbone.eval()
    missing = state["missing"]
    wanted = np.arange(first, first + features.shape[1]) if missing is None else np.array(missing, np.int64)
    saved, rounds = time.monotonic(), 0
    mean, std = loader.normalisation_on(device)
    for at, rows in enumerate((features[:1], features[1:])):  # first the images themselves, then their views
        ids = wanted[max(0, state["done"] - at * len(wanted)) :]
        parts = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
        for raw in loader.training(0, parts) if at else loader.evaluation(ids, CHUNK):
            _keep(raw, backbone(to_network(raw.images, mean, std).flatten(0, 1)).float().cpu(), rows, first, state)
            state["done"] += len(raw.ids) + len(raw.refused)
            if time.monotonic() - saved > SAVE_SECONDS or state["done"] == 2 * len(wanted):
                features.flush()  # type: ignore[attr-defined]
                write_atomically(state_file, json.dumps(state))
                saved = time.monotonic()
            rounds += 1
            progress(forwarded(state["done"], len(wanted), len(features) - 1), len(features) * len(wanted))
    return rounds


def forwarded(done: int, num_images: int, num_views: int) -> int:
    """Forward passes behind us: one for each image, then one for each view of each."""
    return min(done, num_images) + max(0, done - num_images) * num_views


def _keep(raw: RawBatch, found: Tensor, rows: NDArray[np.float16], first: int, state: dict[str, Any]) -> None:
    found = found.unflatten(0, (len(rows), -1))  # [V, B, F]
    finite = found.isfinite().all(dim=2).all(dim=0)
    rows[:, raw.ids.numpy() - first] = found.nan_to_num().clamp(-MOST, MOST).numpy().astype(np.float16)
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


def _undamaged(file: Path, state: dict[str, Any], shape: tuple[int, ...] | None = None) -> bool:
    """Whether the file has its length and, once it is complete, its hash."""
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False).shape  # fails on a file that is too short
        return shape in (None, found) and ("sha256" not in state or file_hash(file) == state["sha256"])
    except (OSError, ValueError):
        return False


def _state(state_file: Path, identity: str) -> dict[str, Any] | None:
    """Where an extraction of the same features stands; None where there is none."""
    try:
        state = json.loads(state_file.read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and state.get("identity") == identity and "images" in state else None
