"""Features that were stopped, killed, damaged or asked for differently are those of one undisturbed extraction."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_features import ALL, Stopper, extract, hashes, small
from tiny_runs import make_images

from odcluster.data.sources import Source, open_source
from odcluster.errors import Interrupted
from odcluster.evaluation import features


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(make_images(tmp_path_factory.mktemp("features") / "images", 43))


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_stopped_and_resumed_is_the_same_bytes_and_nothing_is_done_twice(
    after: int, source: Source, tmp_path: Path
) -> None:
    extract(small(), source, tmp_path / "whole")
    with pytest.raises(Interrupted):
        extract(small(), source, tmp_path / "parts", progress=Stopper(after))
    stopper = Stopper(1000)
    found = extract(small(), source, tmp_path / "parts", progress=stopper)
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "whole")
    assert found.usable.all()
    computed = [done for activity, done, total in stopper.told if activity == "features"]
    assert computed == [*range(8 * after, 43, 8), 43], "goes on where it was stopped"
    assert all(total == 43 for activity, _, total in stopper.told if activity == "features")


def test_what_progress_raises_is_never_swallowed(source: Source, tmp_path: Path) -> None:
    for error in (ValueError("a"), OSError("b"), KeyError("c")):
        for after in (0, 1, 3):
            with pytest.raises(type(error)) as caught:
                extract(small(), source, tmp_path / "store", progress=Stopper(after, error))
            assert caught.value is error


def test_a_finished_store_is_opened_without_reading_an_image(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = extract(small(), source, tmp_path / "store")
    monkeypatch.setattr(features, "_fill", lambda *_: pytest.fail("computed again"))
    again = extract(small(), source, tmp_path / "store")
    assert np.array_equal(again.rows("conv5"), first.rows("conv5"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process to kill")
def test_killed_at_random_points_and_resumed_is_the_same_bytes(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL, six times, wherever it happens to be; then to the end."""
    monkeypatch.setattr(features, "SAVE_IMAGES", 6)
    backbone = small()
    extract(backbone, source, tmp_path / "whole", batch_size=2)
    stored = []
    for pause in np.random.default_rng().uniform(0.001, 0.06, 6):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:

            def begun(activity: str, done: int, total: int, writing: int = writing) -> None:
                os.write(writing, b".")
                time.sleep(0.002)

            try:
                extract(backbone, source, tmp_path / "parts", batch_size=2, progress=begun)
            finally:
                os._exit(0)
        os.close(writing)
        os.read(reading, 1)
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        stored.append(json.loads((tmp_path / "parts" / "progress.json").read_text())["done"])
    assert stored == sorted(stored), "never back to an earlier state"
    extract(backbone, source, tmp_path / "parts", batch_size=2)
    assert len(hashes(tmp_path / "whole")) == len(ALL)
    assert hashes(tmp_path / "parts") == hashes(tmp_path / "whole")


def damage_end(directory: Path) -> None:
    with open(directory / "conv2.npy", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")


def damage_size(directory: Path) -> None:
    os.truncate(directory / "conv2.npy", 1000)


def damage_header(directory: Path) -> None:
    with open(directory / "conv1.npy", "r+b") as file:
        file.write(b"nothing")


def damage_progress(directory: Path) -> None:
    file = directory / "progress.json"
    file.write_text(file.read_text().replace('"done": 43', '"done": 42'))


@pytest.mark.parametrize(
    "damage",
    [
        damage_end,
        damage_size,
        damage_header,
        damage_progress,
        lambda directory: (directory / "conv3.npy").unlink(),
        lambda directory: (directory / "progress.json").write_text("{"),
        lambda directory: (directory / "progress.json").write_text("[]"),
        lambda directory: (directory / "progress.json").write_bytes(b"\xff"),
    ],
)
def test_a_damaged_store_is_made_anew(damage: Any, source: Source, tmp_path: Path) -> None:
    extract(small(), source, tmp_path / "store")
    right = hashes(tmp_path / "store")
    damage(tmp_path / "store")
    stopper = Stopper(1000)
    extract(small(), source, tmp_path / "store", progress=stopper)
    assert hashes(tmp_path / "store") == right
    assert ("features", 0, 43) in stopper.told


@pytest.mark.parametrize(
    "changed",
    [
        {"key": "another"},
        {"whole": True},
        {"batch_size": 9},
        {"layers": ("conv1", "conv2")},
        {"ids": np.arange(1, 43)},
        {"ids": np.arange(43)[::-1]},
        {"mean": (0.0, 0.0, 0.0)},
    ],
)
def test_another_request_starts_anew_and_leaves_nothing_old(
    changed: dict[str, Any], source: Source, tmp_path: Path
) -> None:
    extract(small(), source, tmp_path / "store")
    backbone = small()
    options = dict(changed)
    if "mean" in options:
        backbone.set_normalisation(options.pop("mean"), backbone.std)
    stopper = Stopper(1000)
    found = extract(backbone, source, tmp_path / "store", progress=stopper, **options)
    assert stopper.told[0][:2] == ("features", 0)
    extract(backbone, source, tmp_path / "fresh", **options)
    assert hashes(tmp_path / "store") == hashes(tmp_path / "fresh")
    assert sorted(hashes(tmp_path / "store")) == sorted(f"{layer}.npy" for layer in found.layers)


def test_progress_is_saved_as_it_goes(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SAVE_IMAGES", 16)
    stored, copies = [], []

    def look(activity: str, done: int, total: int) -> None:
        stored.append(json.loads((tmp_path / "store" / "progress.json").read_text())["done"])
        copies.append(np.load(tmp_path / "store" / "features.npy"))

    found = extract(small(), source, tmp_path / "store", progress=look)
    assert stored == [0, 0, 16, 16, 32, 32, 43]
    for done, copy in zip(stored, copies, strict=True):
        assert np.array_equal(copy[:done], found.rows("features")[:done]), "what is said to be there is in the file"
    monkeypatch.setattr(features, "SAVE_SECONDS", 0.0)
    stored.clear()
    extract(small(), source, tmp_path / "store", progress=look, key="another")
    assert stored == [0, 8, 16, 24, 32, 40, 43]
