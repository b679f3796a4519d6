"""Training on features that are computed once, because the backbone they come from is not trained.

RUN/features/ holds float16 features of every image and of a few random views of it. Promises: killed at any instant and
started again, the extraction goes on where it was and ends with the same bytes; features that are not finite are
refused like unreadable images; which view a step sees is a function of (seed, epoch, image), as everywhere. Several
ranks each make the features of the images they own, in a folder of their own, and read all of them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from odcluster.data.loading import Ids, Loader, RawBatch
from odcluster.data.randomness import Purpose, uniforms
from odcluster.errors import DataError
from odcluster.ranks import SINGLE, Ranks
from odcluster.training.run import write_atomically
from odcluster.training.survey import to_network

CHUNK = 64
"""Images per forward pass, times the views of each."""
SAVE_SECONDS = 20.0
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
    num_samples: int,
    num_features: int,
    num_cached: int,
    num_views: int,
    seed: int,
    device: torch.device,
    identity: str,
    progress: Callable[[int], None],
    bfloat16: bool = False,
    ranks: Ranks = SINGLE,
) -> FrozenViews:
    """Features of all images and of `num_cached` views of each, from the folder or made now. `progress` may raise, on
    all ranks alike.
    """
    makers = ranks.first(lambda: _complete(folder, identity, num_samples))
    if makers is None:
        own = ranks.own(num_samples)
        shape = (1 + num_cached, own.stop - own.start, num_features)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            rounds = _make(part_folder(folder, ranks), loader, backbone, own.start, shape, device, identity, progress)
        for _ in range(int(ranks.max(torch.tensor(rounds))) - rounds if ranks.world_size > 1 else 0):
            progress(0)
        ranks.meet()
        makers = ranks.world_size
    folders = [part_folder(folder, Ranks(maker, makers)) for maker in range(makers)]
    states = [_state(path / "state.json", identity) or {"refused": {}} for path in folders]
    refused = {int(i): reason for state in states for i, reason in state["refused"].items()}
    parts = [np.lib.format.open_memmap(path / "features.npy", mode="r") for path in folders]
    return FrozenViews(parts, refused, num_views, seed)


def part_folder(folder: Path, ranks: Ranks) -> Path:
    """Where a rank keeps the features it has made; alone, in the folder itself."""
    return folder if ranks.world_size == 1 else folder / f"{ranks.rank:04d}-of-{ranks.world_size:04d}"


def _complete(folder: Path, identity: str, num_samples: int) -> int | None:
    """By how many ranks all features have been made; None: they have not."""
    found = {int(path.name[-4:]) for path in folder.glob("*-of-*") if path.name[-4:].isdigit()} | {1}
    for makers in sorted(found):
        everyone = [Ranks(maker, makers) for maker in range(makers)]
        states = [_state(part_folder(folder, maker) / "state.json", identity) for maker in everyone]
        sizes = everyone[0].sizes(num_samples)
        if all(state and state["done"] == 2 * size for state, size in zip(states, sizes, strict=True)):
            return makers
    return None


def _make(
    folder: Path,
    loader: Loader,
    backbone: nn.Module,
    first: int,
    shape: tuple[int, int, int],
    device: torch.device,
    identity: str,
    progress: Callable[[int], None],
) -> int:
    """The features of `shape`, of the images from `first` on; returns how often there was progress."""
    file, state_file = folder / "features.npy", folder / "state.json"
    try:
        state = _state(state_file, identity)
        if state is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            state = {"identity": identity, "done": 0, "refused": {}}
            features = np.lib.format.open_memmap(file, mode="w+", dtype=np.float16, shape=shape)
            write_atomically(state_file, json.dumps(state))
        else:
            features = np.lib.format.open_memmap(file, mode="r+")
        assert features.shape == shape, "the identity does not tell features of other sizes apart"
        return _extract(features, state, state_file, loader, backbone, first, device, progress)
    except OSError as error:
        raise DataError(f"features cannot be kept in {folder} ({error.strerror}); free some space there") from error


@torch.no_grad()
def _extract(
    features: NDArray[np.float16],
    state: dict[str, Any],
    state_file: Path,
    loader: Loader,
    backbone: nn.Module,
    first: int,
    device: torch.device,
    progress: Callable[[int], None],
) -> int:
    backbone.eval()
    num_samples, saved, rounds = features.shape[1], time.monotonic(), 0
    mean, std = loader.normalisation_on(device)
    for at, rows in enumerate((features[:1], features[1:])):  # first the images themselves, then their views
        begun = max(0, state["done"] - at * num_samples)
        everything = np.arange(first + begun, first + num_samples)
        parts = [everything[start : start + CHUNK] for start in range(0, len(everything), CHUNK)]
        for raw in loader.training(0, parts) if at else loader.evaluation(everything, CHUNK):
            _keep(raw, backbone(to_network(raw.images, mean, std).flatten(0, 1)).float().cpu(), rows, first, state)
            state["done"] += len(raw.ids) + len(raw.refused)
            if time.monotonic() - saved > SAVE_SECONDS or state["done"] == 2 * num_samples:
                features.flush()  # type: ignore[attr-defined]
                write_atomically(state_file, json.dumps(state))
                saved = time.monotonic()
            rounds += 1
            progress(forwarded(state["done"], features))
    return rounds


def forwarded(done: int, features: NDArray[np.float16]) -> int:
    """Forward passes behind us: one for each image, then one for each view of each."""
    num_samples = features.shape[1]
    return min(done, num_samples) + max(0, done - num_samples) * (len(features) - 1)


def _keep(raw: RawBatch, found: Tensor, rows: NDArray[np.float16], first: int, state: dict[str, Any]) -> None:
    found = found.unflatten(0, (len(rows), -1))  # [V, B, F]
    finite = found.isfinite().all(dim=2).all(dim=0)
    rows[:, raw.ids.numpy() - first] = found.nan_to_num().clamp(-MOST, MOST).numpy().astype(np.float16)
    state["refused"].update({str(i): reason for i, reason in raw.refused})
    state["refused"].update({str(i): "its features are not finite" for i in raw.ids[~finite].tolist()})


def _state(state_file: Path, identity: str) -> dict[str, Any] | None:
    """Where an extraction of the same features stands; None where there is none."""
    try:
        state = json.loads(state_file.read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and state.get("identity") == identity else None
