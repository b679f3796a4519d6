"""What a page says of a run: names, figures, and the command that made it. No folder of this machine is named."""

from __future__ import annotations

import os
import shlex
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from odcluster.config import Config, flat
from odcluster.errors import UserError
from odcluster.explore.collection import Collection, View
from odcluster.recipes import recipe
from odcluster.training.metrics import read_metrics

METHODS = {
    "odc": "Online Deep Clustering: network, features and clusters are learned together, each step a little.",
    "deepcluster": "DeepCluster: before every epoch all images are clustered anew, and the network learns to tell the "
    "clusters apart.",
    "rotation": "Rotation: the network learned to tell by how much an image was turned.",
    "jigsaw": "Jigsaw: the network learned to put the tiles of an image in order.",
    "colorization": "Colorization: the network learned to guess the colours of grey images.",
    "labels": "With labels: the network learned the classes that came with the images.",
}


def shown_name(text: str) -> str:
    """Other people's text as a page can show it: one line, no control characters, no broken bytes."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def cluster_name(view: View, cluster: int) -> str:
    name = shown_name(view.name(cluster))
    return f"{name} ({cluster})" if name else f"cluster {cluster}"


def data_name(collection: Collection) -> str:
    """The data's own name, without the folders it lies in."""
    given = collection.manifest.root or collection.config.data
    return shown_name(os.path.basename(given.rstrip("/\\"))) or "an array"


def number(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else ""


def figure(title: str, chart: str) -> str:
    return f"<figure>{chart}<figcaption>{escape(title)}</figcaption></figure>"


def trained_seconds(collection: Collection) -> float:
    """Of all intervals on record."""
    try:
        lines = read_metrics(collection.run.metrics_file)
    except (OSError, ValueError):
        return 0.0
    return sum(float(line.get("timing", {}).get("seconds", 0.0)) for line in lines)


def command(collection: Collection) -> str:
    """The options in which the run differs from its recipe, as one would type them."""
    config = collection.config
    words = ["odcluster", "train", data_name(collection), "--recipe", config.recipe]
    try:
        usual = flat(recipe(config.recipe))
    except UserError:  # a recipe of another version
        usual = {}
    for name, value in shown_options(config).items():
        if value != usual.get(name) and value is not None and name not in ("data", "recipe", "workers", "device"):
            words.append(f"--{name.replace('_', '-')}")
            words += map(plain, value) if isinstance(value, tuple) else [plain(value)]
    return shown_name(shlex.join(words))


def options_of(config: Config, collection: Collection) -> list[tuple[str, str]]:
    own = {"data": data_name(collection)}
    return [
        (name, own.get(name, "" if value is None else plain(value))) for name, value in shown_options(config).items()
    ]


def shown_options(config: Config) -> dict[str, Any]:
    """All options by their own names; a path by its last part."""
    return {**flat(config), "weights": config.weights and Path(config.weights).name}


def plain(value: object) -> str:
    if isinstance(value, tuple | list):
        return " ".join(map(plain, value))
    return shown_name(f"{value:g}" if isinstance(value, float) else str(value))
