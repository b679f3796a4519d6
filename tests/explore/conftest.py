"""A trained run with nasty file names, served without any edits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explore_clients import NASTY, TOKEN, browser
from tiny_runs import TINY, make_images

import odcluster
from odcluster.explore.collection import open_collection
from odcluster.explore.server import Server


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 images with file names that people should not use; the last is damaged after training."""
    folder = make_images(tmp_path_factory.mktemp("data") / "images", 80)
    for number, name in enumerate(NASTY):
        os.rename(os.fsencode(folder / f"image{number:04d}.png"), os.path.join(os.fsencode(folder), name))
    options = {**TINY, "epochs": 2, "warm_share": 0.0, "fine_share": 0.0, "lr": 0.001}  # low: clusters stay as they are
    run = odcluster.train(folder, out=tmp_path_factory.mktemp("trained") / "<b>run", quiet=True, **options)
    names = open_collection(run).manifest.paths
    os.truncate(os.path.join(folder, names[79]), 30)
    return run


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    """A server of the run, without any edits."""
    for name in ("curation.sqlite", "curation.sqlite-wal", "curation.sqlite-shm"):
        (run / name).unlink(missing_ok=True)
    served = Server(open_collection(run), TOKEN)
    yield served
    served.stop()


@pytest.fixture
def client(server: Server) -> Any:
    return browser(server)
