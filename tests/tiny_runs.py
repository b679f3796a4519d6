"""Small image folders, and runs that take a second."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from PIL import Image

TINY = {
    "backbone": "smallconv",
    "image_size": 16,
    "crop_size": 16,
    "clusters": 6,
    "small_cluster": 3,
    "batch_size": 16,
    "epochs": 4,
    "dim": 8,
    "hidden": 16,
    "workers": 0,
    "calibration_batches": 2,
    "log_interval": 3,
}
"""Options of a run that takes about a second and still has all phases: warm start, clusters, repairs."""


def make_images(folder: Path, count: int, side: int = 20, seed: int = 0) -> Path:
    """Coloured stripes in a few directions, so that there is something to cluster."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[0:side, 0:side]
    for i in range(count):
        kind = i % 5
        wave = np.sin((x * np.cos(kind) + y * np.sin(kind)) * (0.5 + 0.3 * kind) + random.uniform(0, 6))
        colour = np.eye(3)[kind % 3] * 80 + random.uniform(40, 120, 3)
        pixels = colour + 60 * wave[..., None] + random.normal(0, 10, (side, side, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"image{i:04d}.png")
    return folder


def state_hash(run: Path) -> str:
    """Hash of weights, optimiser, both memories and labels of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    hashes = {name: entry["sha256"] for name, entry in state["files"].items()}
    assert set(hashes) == {"model.safetensors", "optimizer.safetensors", "memory.safetensors"}
    return hashlib.sha256(json.dumps([newest.name, hashes], sort_keys=True).encode()).hexdigest()


def metrics_without_timings(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines]
