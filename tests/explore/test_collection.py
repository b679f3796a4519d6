"""A run as one looks at it: what its files say, finished, stopped, damaged, without images, or while it trains."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from forking import Child, command
from safetensors.torch import load_file
from tiny_runs import TINY

import odcluster
from odcluster.errors import DataError, ImageRefused, Interrupted
from odcluster.explore.collection import Collection, is_locked, open_collection
from odcluster.explore.export import read_clusters_csv
from odcluster.explore.features import read_memory
from odcluster.explore.history import MOST_POINTS, History
from odcluster.training import checkpoint, trainer
from odcluster.training.metrics import read_metrics
from odcluster.training.run import Run, open_run, run_lock


@pytest.fixture(scope="module")
def trained(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {**TINY, "warm_share": 0.25, "fine_share": 0.0, "lr": 0.001}  # low: clusters stay as they are
    return odcluster.train(image_folder, out=tmp_path_factory.mktemp("trained") / "run", quiet=True, **options)


@pytest.fixture(scope="module")
def rotated(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {**TINY, "epochs": 1, "method": "rotation"}
    return odcluster.train(image_folder, out=tmp_path_factory.mktemp("rotated") / "run", quiet=True, **options)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def rewritten(run: Path, step: int, labels: np.ndarray) -> Path:
    """Another checkpoint of the run, with other labels."""
    newest = checkpoint.load(checkpoint.candidates(run / "checkpoints")[0])
    memory = {**newest.tensors["memory"], "samples.labels": torch.from_numpy(labels)}
    state = {key: value for key, value in newest.state.items() if key not in ("files", "step", "format")}
    return checkpoint.save(run / "checkpoints", step, {**newest.tensors, "memory": memory}, state)


# --- ODC ----------------------------------------------------------------------------------------------


def test_a_finished_run_is_what_clusters_csv_says(trained: Path) -> None:
    collection = open_collection(trained)
    table = read_clusters_csv(trained / "clusters.csv")
    clusters = collection.view().clusters
    assert clusters.labels.tolist() == table.labels.tolist()
    np.testing.assert_allclose(clusters.similarities, table.similarities, atol=2e-6)
    for cluster in range(TINY["clusters"]):
        members = clusters.members(cluster)
        np.testing.assert_allclose(table.similarities[members], np.sort(table.similarities[members])[::-1], atol=2e-6)
    assert [collection.name(i) for i in range(97)] == table.names
    assert collection.notes == []
    status = collection.status()
    assert (status.state, status.step, status.total_steps, status.eta_seconds) == ("finished", 24, 24, None)
    assert not (trained / "explore").exists()  # nothing was needed, nothing written
    assert not (trained / "curation.sqlite").exists()


def test_sizes_are_recorded_and_followed(trained: Path) -> None:
    lines = [line for line in read_metrics(trained / "metrics.jsonl") if line.get("event") == "sizes"]
    assert [line["step"] for line in lines] == [12, 18, 24]  # after each epoch with clusters
    assert all(sum(line["sizes"]) == 97 and len(line["sizes"]) == TINY["clusters"] for line in lines)
    collection = open_collection(trained)
    view = collection.view()
    assert [step for step, _ in collection.sizes()] == [12, 18, 24]
    assert collection.sizes_of(view, 2) == [(line["step"], line["sizes"][2]) for line in lines[:-1]] + [
        (24, int(view.clusters.sizes[2]))
    ]
    assert collection.changes(view).tolist() == (view.clusters.sizes - lines[0]["sizes"]).tolist()
    collection.curation.add("merge", {"clusters": [2, 4]}, num_images=97, num_clusters=6)
    view = collection.view()
    assert collection.sizes_of(view, 2)[0] == (12, lines[0]["sizes"][2] + lines[0]["sizes"][4])
    collection.curation.path.unlink()


def test_fine_clusters_that_came_before_are_not_taken_for_these(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    fine = json.dumps({"step": 3, "epoch": 0, "event": "sizes", "sizes": [10] * 9})
    before = open_collection(run)
    expected = before.changes(before.view()), before.sizes_of(before.view(), 1)
    metrics.write_text(f"{fine}\n{metrics.read_text()}")
    after = open_collection(run)
    assert after.sizes()[0][0] == 3
    assert np.array_equal(after.changes(after.view()), expected[0])
    assert after.sizes_of(after.view(), 1) == expected[1]


def test_few_of_many_epochs_are_recorded(image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "SIZE_RECORDS", 2)
    options = {**TINY, "epochs": 6, "batch_size": 97, "warm_share": 0.0, "calibration_batches": 0, "max_steps": 5}
    options["fine_share"] = 0.0
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **options)
    epochs = [line["epoch"] for line in read_metrics(run / "metrics.jsonl") if line.get("event") == "sizes"]
    assert epochs == [0, 2, 4]  # the first, every third, the last


def test_edits_make_another_view_and_another_version(run: Path) -> None:
    collection = open_collection(run)
    before = collection.view()
    assert collection.view() is before
    sizes = {"num_images": len(collection), "num_clusters": collection.num_clusters}
    collection.curation.add("move", {"images": [0, 1], "to": "new"}, **sizes)
    collection.curation.add("exclude", {"images": [2]}, **sizes)
    after = collection.view()
    assert after.version != before.version
    assert after.clusters.labels[:3].tolist() == [6, 6, -1]
    assert after.listed.tolist() == sorted({*before.clusters.labels[3:].tolist(), 6})  # those with members
    assert after.left_out == {int(before.clusters.labels[2]): [2]}
    other = open_collection(run)  # another process sees the same
    assert other.view().version == after.version
    other.curation.undo()
    assert collection.view().clusters.labels[2] == before.clusters.labels[2]


def test_a_newer_checkpoint_is_taken_over_and_an_older_one_may_vanish(run: Path) -> None:
    collection = open_collection(run)
    first = collection.view()
    labels = np.roll(first.clusters.labels, 1)
    newer = rewritten(run, 25, labels)
    assert collection.view() is first
    collection.refresh()
    second = collection.view()
    assert second.version != first.version
    assert second.clusters.labels.tolist() == labels.tolist()
    for path in checkpoint.candidates(run / "checkpoints"):
        shutil.rmtree(path)
    assert not newer.exists()
    assert second.snapshot.rows is not None
    assert len(collection.similar_to(3, 10)[0]) == 10  # what is mapped stays
    shutil.rmtree(run / "backbone")
    (run / "clusters.csv").unlink()
    collection.refresh()
    assert not collection.view().clusters.sizes.any()
    assert collection.status().state == "stopped"


def test_a_damaged_checkpoint_is_passed_over(run: Path) -> None:
    good = open_collection(run).view()
    memory = rewritten(run, 30, np.zeros(97, np.int64)) / "memory.safetensors"
    memory.write_bytes(memory.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    (run / "checkpoints" / "step-00000031").mkdir()
    collection = open_collection(run)
    assert collection.view().clusters.labels.tolist() == good.clusters.labels.tolist()
    assert read_memory(open_run(run)).step == 24
    with pytest.raises(DataError, match="not a run"):
        open_collection(run / "checkpoints")


def test_a_run_before_its_clusters_and_before_its_first_step(run: Path) -> None:
    shutil.rmtree(run / "backbone")
    (run / "clusters.csv").unlink()
    rewritten(run, 99, np.full(97, -1))
    warm = open_collection(run)
    assert (len(warm.view().listed), warm.view().snapshot.rows) == (0, None)
    assert warm.assign(warm.view(), np.ones(8, np.float32)) == (-1, 0.0)
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    empty = open_collection(run)
    assert empty.status().state == "stopped"
    assert empty.status().step == 0
    assert len(empty.similar(np.ones(8, np.float32), 5)[0]) == 0


def test_without_checkpoints_the_table_and_the_backbone_do(run: Path) -> None:
    before = open_collection(run).view()
    shutil.rmtree(run / "checkpoints")
    collection = open_collection(run)
    view = collection.view()
    assert view.clusters.labels.tolist() == before.clusters.labels.tolist()
    assert view.snapshot.rows is not None
    assert view.snapshot.rows.stored.shape[1] != 8  # of the backbone, without neck
    assert collection.status().state == "finished"
    without = open_collection(run, compute_features=False)
    assert without.view().snapshot.rows is None
    table = read_clusters_csv(run / "clusters.csv")
    np.testing.assert_allclose(without.view().clusters.similarities, table.similarities, atol=1e-6)
    (run / "clusters.csv").write_text("path,cluster,similarity,rank\nother.png,0,0.5,1\n")
    assert any("other images" in note for note in open_collection(run, compute_features=False).notes)


# --- Features -------------------------------------------------------------------------------------------


def test_an_image_of_the_collection_is_most_similar_to_itself(rotated: Path, trained: Path, image_folder: Path) -> None:
    for run, exact in ((rotated, True), (trained, False)):
        collection = open_collection(run)
        row = collection.embed((image_folder / "image0011.png").read_bytes())
        assert row.shape == (collection.view().snapshot.rows.stored.shape[1],)
        assert np.linalg.norm(row) == pytest.approx(1, abs=1e-5)
        ids, scores = collection.similar(row, 97)
        assert scores[0] <= 1
        if exact:  # the very network that made the rows
            assert ids[0] == 11
            assert scores[0] == pytest.approx(1, abs=1e-4)
        cluster, confidence = collection.assign(collection.view(), row)
        assert cluster in collection.view().listed
        assert 0 < confidence <= 1
        with pytest.raises(ImageRefused, match="empty file"):
            collection.embed(b"")


def test_features_are_computed_once_and_clusters_made_where_there_are_none(rotated: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(rotated, tmp_path / "run"))
    shutil.rmtree(run / "explore", ignore_errors=True)
    doing: list[tuple[str, int, int]] = []
    collection = open_collection(run, progress=lambda *said: doing.append(said))
    assert ("features", 97, 97) in doing
    assert collection.num_clusters == 7  # about sqrt(97 / 2)
    assert (collection.view().clusters.sizes > 0).all()
    assert "rotation makes no clusters" in collection.notes[0]
    written = (run / "explore" / "features.npy").stat().st_mtime_ns
    doing.clear()
    again = open_collection(run, progress=lambda *said: doing.append(said))
    assert {name for name, *_ in doing} <= {"checking stored features"}
    assert (run / "explore" / "features.npy").stat().st_mtime_ns == written
    assert again.view().clusters.labels.tolist() == collection.view().clusters.labels.tolist()
    model = next((run / "checkpoints").iterdir()) / "model.safetensors"
    assert len(load_file(model)) > 0  # the run itself was left alone
    assert checkpoint.is_valid(model.parent)


def test_a_stop_during_the_features_goes_on_next_time(rotated: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(rotated, tmp_path / "run"))
    shutil.rmtree(run / "explore", ignore_errors=True)

    def stop(activity: str, done: int, total: int) -> None:
        if activity == "features" and done >= 64:
            raise Interrupted("stopped as asked")

    with pytest.raises(Interrupted):
        open_collection(run, progress=stop)
    first = []
    open_collection(run, progress=lambda name, done, total: first.append(done) if name == "features" else None)
    assert first[0] == 64


def test_deepcluster_numbers_are_not_followed(image_folder: Path, tmp_path: Path) -> None:
    options = {**TINY, "epochs": 1, "method": "deepcluster"}
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **options)
    collection = open_collection(run)
    view = collection.view()
    assert view.clusters.labels.tolist() == read_clusters_csv(run / "clusters.csv").labels.tolist()
    assert view.snapshot.rows is not None
    assert np.isnan(collection.changes(view)).all()
    assert collection.sizes_of(view, 0) == []
    assert len(collection.sizes()) == 1  # of all clusters together they are


# --- Images -----------------------------------------------------------------------------------------------


def test_a_run_can_be_looked_at_without_its_images(run: Path, tmp_path: Path) -> None:
    manifest = (run / "manifest.csv").read_text().splitlines()
    moved = ["#root,/nowhere/at/all" if line.startswith("#root") else line for line in manifest]
    (run / "manifest.csv").write_text("\n".join(moved) + "\n")
    collection = open_collection(run)
    assert "/nowhere/at/all" in collection.notes[0]
    with pytest.raises(ImageRefused, match="no such file"):
        collection.source.image(0)
    array = np.random.default_rng(0).integers(0, 255, (97, 16, 16, 3), np.uint8)
    np.save(tmp_path / "images.npy", array)
    from_file = odcluster.train(tmp_path / "images.npy", out=tmp_path / "file", quiet=True, **{**TINY, "epochs": 1})
    assert np.array_equal(open_collection(from_file).source.image(5), array[5])
    np.save(tmp_path / "images.npy", array[::-1])  # other images under the same name must not be shown as these
    given = (from_file / "config.json").read_text()
    in_memory = given.replace(json.dumps(str(tmp_path / "images.npy")), '""')
    for config, sentence in ((given, "not those of the run"), (in_memory, "array in memory")):
        (from_file / "config.json").write_text(config)
        collection = open_collection(from_file)
        assert sentence in collection.notes[0]
        with pytest.raises(ImageRefused):
            collection.source.image(5)


# --- While it trains ------------------------------------------------------------------------------------------


@pytest.fixture
def training(image_folder: Path, tmp_path: Path) -> Iterator[tuple[Path, Child]]:
    options = {**TINY, "epochs": 100000, "checkpoint_minutes": 0.0005, "keep_checkpoints": 2, "warm_share": 0.0}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    words = ["train", str(image_folder), "--out", str(tmp_path / "run"), *given]
    process = Child(command(*words), tmp_path / "said.txt")
    try:
        wait_until(lambda: len(list(tmp_path.glob("run/checkpoints/step-*"))) >= 2)
        yield tmp_path / "run", process
    finally:
        process.end()


def wait_until(true: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_explored_while_it_trains(training: tuple[Path, Child]) -> None:
    run, process = training
    collection = open_collection(run)
    seen: set[str] = set()

    def looked() -> bool:
        collection.refresh()
        view = collection.view()
        seen.add(view.version)
        if view.clusters.sizes.any():  # every instant is one in which all fits together
            assert view.clusters.sizes.sum() == (view.clusters.labels >= 0).sum()
            assert len(collection.similar_to(5, 5)[0]) == 5
        return len(seen) >= 5

    wait_until(looked)
    status = collection.status()
    assert status.state == "training"
    assert 0 < status.step < status.total_steps
    assert status.eta_seconds > 0
    assert collection.history.series()["loss"]
    process.send(signal.SIGINT)
    assert process.wait(60) == 75  # nothing of this disturbed it
    collection.refresh()
    assert collection.status().state == "stopped"


def test_asking_for_the_lock_does_not_take_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run")
    assert not is_locked(run)
    with run_lock(run):
        pass
    code = "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
    code += "print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(run.path / "lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert is_locked(run) == (sys.platform == "linux")
        process.stdin.close()
    assert not is_locked(run)
    with run_lock(run):
        pass


# --- The history --------------------------------------------------------------------------------------------


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = History(path)
    history.refresh()
    assert (history.step, history.series(), history.images_per_second()) == (0, {}, None)
    timing = {"seconds": 1.0, "images_per_second": 50.0}
    line = json.dumps({"step": 3, "epoch": 0, "phase": "odc", "loss": 2.0, "timing": timing}) + "\n"
    path.write_text(line + '{"step": 6, "los')
    history.refresh()
    assert history.series()["loss"] == [(3, 2.0)]
    assert history.images_per_second() == 50
    with path.open("a") as file:
        file.write('s": 1.5, "x": NaN, "flag": true}\nnonsense\n[1]\n{"step": 9, "event": "sizes", "sizes": [4, 5]}\n')
    history.refresh()
    assert history.series()["loss"] == [(3, 2.0), (6, 1.5)]
    assert set(history.series()) == {"loss", "seconds", "images_per_second"}
    assert [(step, sizes.tolist()) for step, sizes in history.sizes()] == [(9, [4, 5])]
    assert history.step == 9


def test_a_file_that_a_resume_cut_back_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    history = History(path)

    def write(steps: list[int]) -> None:
        path.write_text("".join(json.dumps({"step": step, "loss": step / 10}) + "\n" for step in steps))
        history.refresh()
        assert [step for step, _ in history.series()["loss"]] == steps

    write([1, 2, 3, 4])
    write([1, 2])
    write([1, 2, 3, 4, 5])
    path.write_text("".join(json.dumps({"step": step, "loss": 9.5}) + "\n" for step in [1, 2, 3, 3, 3, 3, 4]))
    history.refresh()
    assert history.step == 4  # longer than before, but with steps that had gone by


def test_a_long_curve_is_thinned_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(2500)))
    history = History(path)
    history.refresh()
    points = history.series()["loss"]
    assert len(points) == MOST_POINTS
    assert (points[0][0], points[-1][0]) == (0, 2499)


def test_names_that_are_no_text_can_be_shown(trained: Path) -> None:
    collection: Collection = open_collection(trained)
    collection.manifest.paths[3] = os.fsdecode(b"caf\xe9 \x1b[31m<b>.png")
    assert collection.name(3) == "caf� \x1b[31m<b>.png"
