"""What the fault tests share: one folder of images, and one undisturbed run of every method."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import finish
from harness import METHODS
from tiny_runs import make_images

import odcluster


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    return make_images(tmp_path_factory.mktemp("faults") / "images", 200, side=20)


@pytest.fixture(scope="session")
def options(images, tmp_path_factory):
    """Options of a method's run, complete: weights are trained first where it needs some."""
    made: dict[str, dict] = {}

    def of(method: str) -> dict:
        if method not in made:
            made[method] = dict(METHODS[method])
            if made[method].get("weights"):
                start = tmp_path_factory.mktemp("weights") / "run"
                made[method]["weights"] = str(odcluster.train(images, out=start, quiet=True, **METHODS["odc"]))
        return made[method]

    return of


@pytest.fixture(scope="session")
def references(images, options, tmp_path_factory):
    """The undisturbed run of a method."""
    folder = tmp_path_factory.mktemp("references")
    runs: dict[str, Path] = {}

    def reference(method: str) -> Path:
        if method not in runs:
            run, settings = folder / method.replace(" ", "-"), options(method)
            finish(lambda: odcluster.train(images, out=run, quiet=True, **settings), folder / "said.txt")
            runs[method] = run
        return runs[method]

    return reference
