"""Where the features of a run come from: its memory (ODC), or its backbone, once for all images.

Promises: only verified checkpoints are used, and mapped rather than loaded; a checkpoint that vanishes is followed by
the next; computed features are kept, go on where they were stopped, and are those of the weights they name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from odcluster.clustering.kmeans import kmeans, nearest_centroids
from odcluster.config import Augmentation, Config
from odcluster.data.loading import Request, Views
from odcluster.data.randomness import permutation
from odcluster.data.sources import Manifest, Source
from odcluster.errors import DataError, ImageRefused
from odcluster.evaluation.features import VECTOR, extract_features, weights_fingerprint
from odcluster.explore.export import replacing
from odcluster.explore.snapshot import Floats, Rows, measure
from odcluster.models.backbones import Backbone, create_backbone
from odcluster.models.heads import Neck
from odcluster.models.sobel import represent
from odcluster.models.weights import load_backbone
from odcluster.training import checkpoint
from odcluster.training.devices import choose_device
from odcluster.training.run import Run
from odcluster.training.shards import load_memory
from odcluster.training.survey import to_network

MOST_CLUSTERS = 1000
"""Where a method makes no clusters and k-means has to."""
MOST_CLUSTERED = 100_000
"""Images that k-means looks at; the others get the nearest centre."""
ITERATIONS = 20

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Memory:
    """What a checkpoint says about the images; None where its method does not."""

    name: str
    step: int
    manifest: str
    """Fingerprint of the images that it is about."""
    total_steps: int
    """Of the training as it was planned then; 0 where that is not on record."""
    labels: NDArray[np.int64] | None = None
    rows: Floats | None = None
    centroids: Floats | None = None
    similarities: Floats | None = None


@dataclass(frozen=True)
class Features:
    """Features that were computed for a run whose memory has none."""

    rows: Rows
    network: Network
    identity: str


# --- From checkpoints -------------------------------------------------------------------------------


def read_memory(run: Run) -> Memory | None:
    """What the newest valid checkpoint says about the images, mapped; None where there is no checkpoint.

    A checkpoint that was removed between being listed and being opened is followed by the next; one that is removed
    later stays readable as long as it is mapped.
    """
    for _ in range(3):  # all those listed may be gone when a run trains fast
        paths = checkpoint.candidates(run.checkpoints)
        for path in paths:
            try:
                state = checkpoint.read_state(path)
                check_file(path, state, "memory.safetensors")
                tensors = mapped_memory(path, state)
            except (DataError, OSError, SafetensorError):
                continue
            return memory_of(path.name, state, tensors)
        if not paths:
            return None
    return None


def mapped_memory(path: Path, state: dict[str, Any]) -> dict[str, Tensor]:
    """The memories of a checkpoint: mapped, or, where several ranks wrote them, read and put together."""
    shards = [name for name in state["files"] if name.startswith("memory-")]
    if shards:
        for name in shards:
            check_file(path, state, name)
        return load_memory(path, state)
    with safe_open(path / "memory.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def memory_of(name: str, state: dict[str, Any], tensors: dict[str, Tensor]) -> Memory:
    def array(key: str) -> Any:
        if key not in tensors:
            return None
        values = tensors[key].numpy()
        values.flags.writeable = False
        return values

    return Memory(
        name,
        int(state["step"]),
        state["manifest"],
        state.get("total_steps", 0),
        array("samples.labels"),
        array("samples.rows"),
        array("centroids.centroids"),
        array("samples.similarities"),
    )


def check_file(path: Path, state: dict[str, Any], name: str) -> None:
    """Raise DataError unless this file of a checkpoint is the one that was written."""
    expected = state["files"].get(name)
    if expected is None or checkpoint.file_hash(path / name) != expected["sha256"]:
        raise DataError(f"{path / name} is damaged")


# --- Networks and features --------------------------------------------------------------------------


class Network:
    """What turns an image into the kind of row that a run has: its backbone, for ODC with the neck."""

    def __init__(self, backbone: Backbone, neck: nn.Module | None) -> None:
        self.backbone, self.neck = backbone.eval(), neck.eval() if neck is not None else None

    @torch.no_grad()
    def embed(self, image: bytes) -> Floats:
        """The row of one image file, at length 1, from the view that evaluation uses."""
        manifest = Manifest("list", "", ["image"], np.array([len(image)]))
        views = Views(OneImage(manifest, image), Augmentation(), self.backbone.image_size, 0, None)
        raw = views[Request(np.array([0]), None)]
        if raw.refused:
            raise ImageRefused(raw.refused[0][1])
        device = next(self.backbone.parameters()).device
        mean, std = (torch.tensor(values, device=device) for values in (self.backbone.mean, self.backbone.std))
        features = represent(self.backbone)(to_network(raw.images[0], mean, std))
        row = (self.neck(features) if self.neck is not None else features)[0].float().cpu().numpy()
        length = float(np.linalg.norm(row))
        if not np.isfinite(length) or length == 0:
            raise ImageRefused("the network has no feature for it")
        return (row / length).astype(np.float32)


class OneImage(Source):
    """A file in memory."""

    def __init__(self, manifest: Manifest, data: bytes) -> None:
        self.manifest, self._data = manifest, data

    def stored(self, id: int) -> bytes:
        return self._data


def load_network(run: Run, config: Config, *, with_neck: bool) -> Network | None:
    """The network of the newest valid checkpoint; without the neck also that of a finished run. None: there is none."""
    for path in checkpoint.candidates(run.checkpoints):
        try:
            state = checkpoint.read_state(path)
            check_file(path, state, "model.safetensors")
            tensors = load_file(path / "model.safetensors")
        except (DataError, OSError, SafetensorError):
            continue
        return build_network(config, state, tensors, with_neck=with_neck)
    if not with_neck and run.backbone.is_dir():
        return Network(load_backbone(run.path), None)
    return None


def build_network(config: Config, state: dict[str, Any], tensors: dict[str, Tensor], *, with_neck: bool) -> Network:
    assert config.backbone is not None
    assert config.image_size is not None
    channels = 2 if config.method == "deepcluster" and config.deepcluster.sobel else 3
    backbone = create_backbone(config.backbone, image_size=config.image_size, in_channels=channels, stem=state["stem"])
    mean, std = map(tuple, state["normalisation"])
    backbone.set_normalisation(mean, std)
    backbone.load_state_dict(part(tensors, "backbone."))
    neck = None
    if with_neck:
        assert config.dim is not None
        neck = Neck(backbone.num_features, config.head, config.dim, input_norm=bool(config.fine_tuning.frozen))
        neck.load_state_dict(part(tensors, "neck."))
    return Network(backbone, neck)


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def compute_features(run: Run, config: Config, source: Source, directory: Path, progress: Progress) -> Features | None:
    """The backbone's features of all images, in `directory`; goes on with what is there. None without weights."""
    network = load_network(run, config, with_neck=False)
    if network is None:
        return None
    identity = f"{weights_fingerprint(network.backbone)} {source.manifest.fingerprint()}"
    store = extract_features(
        network.backbone,
        source,
        directory,
        layers=[VECTOR],
        whole=False,
        key=identity,
        workers=config.workers or 0,
        device=choose_device("auto"),
        progress=progress,
    )
    return Features(measure(store.rows(VECTOR), store.usable), network, identity)


def cluster_features(features: Features, seed: int, directory: Path, progress: Progress) -> NDArray[np.int64]:
    """k-means of all images with a feature, about sqrt(N / 2) clusters; kept in `directory`."""
    rows, file = features.rows, directory / "kmeans.safetensors"
    usable = np.flatnonzero(rows.scale > 0)
    num_clusters = max(1, min(round((len(usable) / 2) ** 0.5), MOST_CLUSTERS))
    key = f"{features.identity} {num_clusters} {seed}"
    try:
        with safe_open(file, "pt") as stored:
            if (stored.metadata() or {}).get("key") == key:
                return stored.get_tensor("labels").numpy()
    except (OSError, SafetensorError):
        pass
    sample = np.sort(usable[permutation(seed, 0, len(usable))[:MOST_CLUSTERED]])
    _, centroids = kmeans(
        torch.from_numpy(rows.unit(sample)),
        num_clusters,
        iterations=ITERATIONS,
        seed=seed,
        poll=lambda iteration: progress("k-means", iteration, ITERATIONS),
    )
    progress("k-means", ITERATIONS, ITERATIONS)
    labels = np.full(len(rows), -1, np.int64)
    for block in rows.blocks():
        labels[block] = nearest_centroids(torch.from_numpy(rows.unit(block)), centroids)[0].numpy()
    labels[rows.scale <= 0] = -1
    with replacing(file) as prepared:
        save_file({"labels": torch.from_numpy(labels)}, prepared, metadata={"key": key})
    return labels
