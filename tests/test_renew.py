"""Runs whose images change: told precisely, rows of what stayed kept to the bit, new images taken in, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import TINY, make_images, metrics_without_timings, state_hash

import odcluster
from odcluster.data.sources import Manifest
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.explore.collection import open_collection
from odcluster.explore.curation import open_curation
from odcluster.explore.export import read_clusters_csv
from odcluster.training import checkpoint
from odcluster.training.devices import StopFlag
from odcluster.training.run import open_run

METHODS = {
    "odc": {"warm_share": 0.25, "final_pass": False},
    "fine": {"fine_share": 0.5, "fine_clusters": 12, "final_pass": True, "algorithm": "adamw", "warm_share": 0.0},
    "deepcluster": {"method": "deepcluster"},
    "rotation": {"method": "rotation"},
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A hundred images, forty more, and one finished run per method; tests work on copies."""
    folder = tmp_path_factory.mktemp("originals")
    make_images(folder / "photos", 100)
    more = make_images(folder / "more", 40, seed=1)
    for path in sorted(more.iterdir()):
        path.rename(more / f"new{path.name}")
    for name, options in METHODS.items():
        odcluster.train(folder / "photos", out=folder / name, quiet=True, **{**TINY, **options})
    return folder


@pytest.fixture
def place(originals, tmp_path):
    """Copies in which a run finds its images."""
    shutil.copytree(originals / "photos", tmp_path / "photos")
    shutil.copytree(originals / "more", tmp_path / "more")
    return tmp_path


def copied(originals: Path, name: str, place: Path, to: str = "") -> Path:
    run = place / (to or name)
    shutil.copytree(originals / name, run)
    for file in (run / "config.json", run / "manifest.csv"):
        file.write_text(file.read_text().replace(str(originals), str(place)))
    return run


def newest(run: Path) -> checkpoint.Checkpoint:
    found = checkpoint.find(run / "checkpoints", lambda warning: None)
    assert found is not None
    return found


def stopped_at_once(run: Path, monkeypatch, **options) -> checkpoint.Checkpoint:
    """The state as it is carried over, before anything is trained on it."""

    def poll(self):
        raise Interrupted("stopped as asked")

    with monkeypatch.context() as patched:
        patched.setattr(StopFlag, "poll", poll)
        with pytest.raises(Interrupted):
            odcluster.resume(run, quiet=True, **options)
    for path in checkpoint.candidates(run / "checkpoints"):
        if checkpoint.read_state(path)["manifest"] == open_run(run).manifest().fingerprint():
            return checkpoint.load(path)
    raise AssertionError("there is no checkpoint of the new images")


def by_name(run: Path, manifest: Manifest, values) -> dict[str, tuple]:
    return {name: tuple(np.atleast_1d(value).tolist()) for name, value in zip(manifest.paths, values, strict=True)}


# --- What is carried over ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["odc", "deepcluster"])
def test_rows_and_labels_of_what_stayed_are_kept_to_the_bit(name, originals, place, monkeypatch):
    run = copied(originals, name, place)
    before, old_manifest = newest(run), open_run(run).manifest()
    (place / "photos" / "image0003.png").unlink()
    (place / "photos" / "image0050.png").rename(place / "photos" / "zzz.png")
    shutil.copy(place / "more" / "newimage0001.png", place / "photos" / "image0007.png")  # replaced
    after = stopped_at_once(run, monkeypatch, remap=True, add=place / "more")
    manifest = open_run(run).manifest()
    assert len(manifest) == 99 + 40
    keys = [
        key for key in ("samples.rows", "samples.labels", "samples.similarities") if key in before.tensors["memory"]
    ]
    assert keys
    for key in keys:
        old = by_name(run, old_manifest, before.tensors["memory"][key].numpy())
        new = by_name(run, manifest, after.tensors["memory"][key].numpy())
        old["zzz.png"] = old.pop("image0050.png")
        gone = old.pop("image0003.png"), old.pop("image0007.png")
        assert len(gone) == 2
        assert {path: new[path] for path in old} == old
        fresh = set(new) - set(old)
        assert fresh == {"image0007.png", *(f"../more/newimage{i:04d}.png" for i in range(40))}
        empty = -1 if key == "samples.labels" else 0
        assert all(set(new[path]) == {empty} for path in fresh)
    memory = after.tensors["memory"]
    counts = memory["centroids.counts"] if name == "odc" else memory["samples.counts"]
    labels = memory["samples.labels"]
    torch.testing.assert_close(counts, torch.bincount(labels[labels >= 0], minlength=len(counts)))
    if name == "odc":
        for cluster in range(len(counts)):
            expected = memory["samples.rows"][labels == cluster].double().sum(dim=0)
            torch.testing.assert_close(memory["centroids.sums"][cluster], expected)
        assert torch.equal(memory["centroids.centroids"], before.tensors["memory"]["centroids.centroids"])
    for part in ("model", "optimizer"):
        assert all(torch.equal(value, after.tensors[part][key]) for key, value in before.tensors[part].items())


@pytest.mark.parametrize("name", METHODS)
def test_a_finished_run_takes_more_images_in(name, originals, place, capsys):
    run = copied(originals, name, place)
    steps = newest(run).state["step"]
    odcluster.resume(run, add=place / "more")
    said = capsys.readouterr().err
    assert "Of 100 images: 40 added (../more/newimage0000.png" in said
    assert "2 more  (28.6% of the images are new, and the run was planned for 4 epochs" in said
    state = newest(run).state
    assert state["finished"]
    assert state["step"] == steps + 1 + 2 * (140 // TINY["batch_size"])
    assert open_run(run).config().epochs == 6
    if name != "rotation":
        table = read_clusters_csv(run / "clusters.csv")
        assert table.names == open_run(run).manifest().paths
        assert len(table.names) == 140
        assert (table.labels >= 0).all()
    if name == "fine":
        assert len(newest(run).tensors["memory"]["centroids.counts"]) == TINY["clusters"]
    assert [line["images_new"] for line in metrics_without_timings(run) if line.get("event") == "images"] == [40]
    lines = [line["step"] for line in metrics_without_timings(run)]
    assert lines == sorted(lines)
    assert (run / "clusters.png").is_file() or name == "rotation"
    odcluster.resume(run, quiet=True)  # finds the images of both folders, and nothing to do
    assert newest(run).state == state


def test_the_grown_run_works_everywhere(originals, place, tmp_path):
    run = copied(originals, "odc", place)
    odcluster.resume(run, add=place / "more", quiet=True)
    collection = open_collection(run)
    names = collection.manifest.paths
    added = [id for id, name in enumerate(names) if name.startswith("../more/")]
    assert len(added) == 40
    assert collection.source.image(added[0]).shape == (20, 20, 3)
    assert collection.status().state == "finished"
    collection.curation.close()
    folders = odcluster.export(run, to="folders", out=tmp_path / "folders", quiet=True)
    labelled = (read_clusters_csv(run / "clusters.csv").labels >= 0).sum()
    assert len(list(folders.glob("*/*.png"))) == labelled
    assert odcluster.report(run, quiet=True).is_file()
    odcluster.assign(run, place / "more", quiet=True)
    with pytest.raises(UserError, match="among the images"):
        odcluster.export(run, to="folders", out=place / "more" / "folders", quiet=True)


def test_adding_to_an_unfinished_run_and_again_later(originals, place, monkeypatch):
    run = place / "run"
    polls = {"left": 14}

    def poll(self):
        polls["left"] -= 1
        if polls["left"] == 0:
            raise Interrupted("stopped as asked")

    monkeypatch.setattr(StopFlag, "poll", poll)
    with pytest.raises(Interrupted):
        odcluster.train(place / "photos", out=run, quiet=True, **TINY)
    assert not newest(run).state["finished"]
    monkeypatch.undo()
    odcluster.resume(run, add=place / "more", quiet=True)
    assert open_run(run).config().epochs == TINY["epochs"]  # the epochs that are left suffice
    assert len(read_clusters_csv(run / "clusters.csv").names) == 140
    make_images(place / "third", 10, seed=2)
    odcluster.resume(run, add=place / "third", epochs=1, quiet=True)
    assert open_run(run).config().epochs == TINY["epochs"] + 1
    table = read_clusters_csv(run / "clusters.csv")
    assert len(table.names) == 150
    assert sum(name.startswith("../third/") for name in table.names) == 10


def test_a_folder_that_is_gone_again_is_dropped_by_remap(originals, place):
    run = copied(originals, "odc", place)
    odcluster.resume(run, add=place / "more", quiet=True)
    shutil.rmtree(place / "more")
    with pytest.raises(DataError):
        odcluster.resume(run, quiet=True)
    epochs = open_run(run).config().epochs
    odcluster.resume(run, remap=True, quiet=True)
    assert open_run(run).config().epochs == epochs  # nothing is new
    assert len(read_clusters_csv(run / "clusters.csv").names) == 100


def test_more_epochs_alone(originals, place):
    run = copied(originals, "odc", place)
    before = newest(run)
    odcluster.resume(run, epochs=2, quiet=True)
    state = newest(run).state
    assert state["step"] == before.state["step"] + 1 + 2 * (100 // TINY["batch_size"])
    assert state["finished"]
    assert open_run(run).config().epochs == 6


def test_refused_images_go_by_their_new_ids(originals, place):
    run = place / "run"
    (place / "photos" / "broken.png").write_bytes(b"no image")
    odcluster.train(place / "photos", out=run, quiet=True, **TINY)
    odcluster.resume(run, add=place / "more", quiet=True, max_refused=0.5)
    manifest = open_run(run).manifest()
    assert newest(run).state["refused"] == {str(manifest.paths.index("broken.png")): "not an image: text"}
    assert f"{manifest.paths.index('broken.png')},broken.png," in (run / "bad_images.csv").read_text()
    (place / "photos" / "broken.png").unlink()
    odcluster.resume(run, remap=True, quiet=True)
    assert newest(run).state["refused"] == {}
    assert "broken" not in (run / "bad_images.csv").read_text()


def test_edits_of_people_follow_their_images(originals, place):
    run = copied(originals, "odc", place)
    manifest = open_run(run).manifest()
    chosen = [manifest.paths.index(name) for name in ("image0003.png", "image0010.png", "image0099.png")]
    curation = open_curation(run)
    counts = {"num_images": 100, "num_clusters": TINY["clusters"]}
    curation.add("exclude", {"images": chosen}, **counts)
    curation.add("name", {"cluster": 1, "name": "stripes", "expected": ""}, **counts)
    watching = open_collection(run)  # an explorer that stays open meanwhile
    (place / "photos" / "image0003.png").unlink()
    odcluster.resume(run, remap=True, add=place / "more", quiet=True)
    curation.close()
    again = open_curation(run)
    assert sorted(open_run(run).manifest().paths[id] for id in again.state()[1].excluded) == [
        "image0010.png",
        "image0099.png",
    ]
    assert again.names() == {1: "stripes"}
    again.close()
    watching.refresh()
    assert any("added to this run or removed" in note for note in watching.notes)
    with pytest.raises(UserError, match="start `odcluster explore` again"):
        watching.curation.add("exclude", {"images": [0]}, **counts)
    watching.curation.close()


# --- What is refused, and how it is said ------------------------------------------------------------


def test_changes_are_told_and_nothing_is_written(originals, place):
    run = copied(originals, "odc", place)
    (place / "photos" / "image0001.png").unlink()
    (place / "photos" / "image0002.png").rename(place / "photos" / "other.png")
    make_images(place / "photos" / "sub", 1, seed=3)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(DataError) as error:
        odcluster.resume(run, quiet=True)
    assert "Of 100 images: 1 added (sub/image0000.png), 1 removed (image0001.png), 1 renamed (image0002.png to " in str(
        error.value
    )
    assert f"odcluster resume {run} --remap" in str(error.value)
    assert before == {
        path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "lock" and path.is_file()
    }


def test_a_file_of_the_same_size_that_was_written_to_is_named(originals, place, capsys):
    run = copied(originals, "odc", place)
    path = place / "photos" / "image0042.png"
    path.write_bytes(path.read_bytes())
    odcluster.resume(run, add=place / "more")
    assert "1 written to since, with the same size (image0042.png)" in " ".join(capsys.readouterr().err.split())
    assert [line["images_new"] for line in metrics_without_timings(run) if line.get("event") == "images"] == [40]
    path.write_bytes(path.read_bytes())
    odcluster.resume(run, remap=True, quiet=True)
    assert 1 in [line.get("images_new") for line in metrics_without_timings(run)]
    assert "images" in [line.get("event") for line in metrics_without_timings(run)]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"add": "photos"}, "are in .* already"),
        ({"add": "gone"}, "no file or folder named"),
        ({"add": "."}, "lies among the images"),
        ({"epochs": 0}, "only be trained longer"),
    ],
)
def test_what_cannot_be_added_changes_nothing(options, sentence, originals, place):
    run = copied(originals, "odc", place)
    state = newest(run).state
    if "add" in options:
        options = {"add": place / options["add"]}
    with pytest.raises(UserError, match=sentence):
        odcluster.resume(run, quiet=True, **options)
    assert newest(run).state == state
    assert not (run / "changes").exists()


def test_too_few_images_left_is_said_and_changes_nothing(originals, place):
    run = copied(originals, "odc", place)
    for path in sorted((place / "photos").iterdir())[30:]:
        path.unlink()
    with pytest.raises(DataError, match="too few for the 6 clusters"):
        odcluster.resume(run, remap=True, quiet=True)
    assert len(open_run(run).manifest()) == 100
    assert not list((run / "changes").glob("*"))


# --- Killed at any instant --------------------------------------------------------------------------


def killed_at(where: str, run: Path, **options) -> None:
    """Resume in a child that kills itself at a named instant."""
    if (child := os.fork()) == 0:
        try:
            checkpoint.reached = lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == where else None
            odcluster.resume(run, quiet=True, **options)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, where


INSTANTS = ["before mkdir", "after memory", "before rename", "after rename"]
INSTANTS += ["before the new configuration", "before the new manifest"]


def test_killed_while_taking_images_in(originals, place):
    """After any kill either nothing has happened, or a plain resume completes it: the end is the same to the bit."""
    undisturbed = copied(originals, "odc", place)
    odcluster.resume(undisturbed, add=place / "more", quiet=True)
    reference = state_hash(undisturbed)
    for where in INSTANTS:
        run = copied(originals, "odc", place, f"killed {where}")
        killed_at(where, run, add=place / "more")
        committed = where in INSTANTS[3:]
        if committed:
            with pytest.raises(DataError, match="completes it"):
                open_run(run)  # nobody sees half of a change
        else:
            assert len(open_collection(run).manifest) == 100
        odcluster.resume(run, quiet=True, **({} if committed else {"add": place / "more"}))
        assert state_hash(run) == reference, where
        assert not list(run.rglob(".tmp-*"))
        assert [path.name for path in (run / "checkpoints").iterdir()] != []


def test_stopped_at_every_step_after_the_change(originals, place, monkeypatch):
    reference = copied(originals, "fine", place)
    odcluster.resume(reference, add=place / "more", quiet=True)
    run = copied(originals, "fine", place, "stopped")
    polls, sittings = {"left": 0}, 0

    def poll(self):
        polls["left"] -= 1
        if polls["left"] < 0:
            raise Interrupted("stopped as asked")

    monkeypatch.setattr(StopFlag, "poll", poll)
    options = {"add": place / "more"}
    while True:
        polls["left"] = (1, 3, 2, 5)[sittings % 4]
        sittings += 1
        try:
            odcluster.resume(run, quiet=True, **options)
            break
        except Interrupted:
            assert sittings < 60
        options = {}
    assert sittings > 3
    assert state_hash(run) == state_hash(reference)
    assert metrics_without_timings(run) == metrics_without_timings(reference)


def test_a_damaged_checkpoint_after_the_change_leads_back_before_it(originals, place, monkeypatch):
    run = copied(originals, "odc", place)
    found = stopped_at_once(run, monkeypatch, add=place / "more")
    (found.path / "memory.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match="40 added"):
        odcluster.resume(run, quiet=True)
    odcluster.resume(run, remap=True, quiet=True)
    assert len(read_clusters_csv(run / "clusters.csv").names) == 140


# --- Frozen backbones -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen(originals):
    options = {name: value for name, value in TINY.items() if name not in ("backbone", "image_size", "crop_size")}
    options |= {"fine_clusters": 12, "neighbours": 3, "cached_views": 2, "kmeans_restarts": 1}
    return odcluster.train(
        originals / "photos", out=originals / "frozen", quiet=True, weights=originals / "rotation", **options
    )


def test_features_of_a_frozen_backbone_grow_by_the_new_rows_only(frozen, originals, place, monkeypatch, capsys):
    run = copied(originals, "frozen", place)
    old, old_names = np.load(run / "features" / "features.npy"), open_run(run).manifest().paths
    looked_at = []
    original = odcluster.training.frozen._keep

    def keep(raw, *rest):
        looked_at.extend(raw.ids.tolist())
        original(raw, *rest)

    monkeypatch.setattr(odcluster.training.frozen, "_keep", keep)
    (place / "photos" / "image0003.png").unlink()
    odcluster.resume(run, remap=True, add=place / "more")
    names = open_run(run).manifest().paths
    assert sorted({names[id] for id in looked_at}) == [f"../more/newimage{i:04d}.png" for i in range(40)]
    assert len(looked_at) == 80  # once as they are, once for their views
    new = np.load(run / "features" / "features.npy")
    assert new.shape == (3, 139, old.shape[2])
    for id, name in enumerate(old_names):
        if name != "image0003.png":
            np.testing.assert_array_equal(new[:, names.index(name)], old[:, id])
    assert (np.abs(new.astype(np.float32)).sum(axis=2) > 0).all()
    assert [path.name for path in run.glob("features*")] == ["features"]
    neighbours = newest(run).tensors["model"]["neighbours"]
    assert neighbours.shape == (139, 3)
    assert not (neighbours == torch.arange(139)[:, None]).any()  # of all images, the new ones among them
    assert "k-means alone has" in capsys.readouterr().err
    table = read_clusters_csv(run / "clusters.csv")
    assert (table.labels >= 0).all()
    assert len(table.names) == 139


def test_growing_features_may_be_killed(frozen, originals, place, monkeypatch):
    reference = copied(originals, "frozen", place)
    odcluster.resume(reference, add=place / "more", quiet=True)
    features = (reference / "features" / "features.npy").read_bytes()
    for number in range(1, 4):
        run = copied(originals, "frozen", place, f"killed{number}")
        calls = {"left": number}
        rename = os.rename

        def failing(source, target, calls=calls, rename=rename):
            if Path(source).name.startswith("features"):
                calls["left"] -= 1
                if calls["left"] == 0:
                    raise KeyboardInterrupt
            rename(source, target)

        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", failing)
            try:
                odcluster.resume(run, add=place / "more", quiet=True)
                assert number == 3  # there are two
            except KeyboardInterrupt:
                pass
        odcluster.resume(run, quiet=True)
        assert (run / "features" / "features.npy").read_bytes() == features
        assert state_hash(run) == state_hash(reference)
        assert json.loads((run / "features" / "state.json").read_text())["done"] == 80
