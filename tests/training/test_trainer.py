"""The loop: non-finite numbers, bad images, signals, metrics."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from forking import Child, command
from safetensors.torch import load_file
from tiny_runs import TINY, make_images, state_hash

import odcluster
from odcluster.errors import DataError, Diverged, UserError
from odcluster.methods.odc import ODC
from odcluster.training.devices import StopFlag
from odcluster.training.metrics import MetricsFile, Window, read_metrics
from odcluster.training.trainer import Trainer


def model_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for group in trainer.tensors().values() for name, tensor in group.items()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient", "activations"])
def test_a_non_finite_step_changes_nothing(bad, where, image_folder, tmp_path, monkeypatch):
    """Weights, batch-norm statistics, optimiser and both memories: the same bits before and after."""
    checked = []
    original_step, original_forward = Trainer._train_step, ODC.forward

    def poisoned(self, batch):
        outcome = original_forward(self, batch)
        if batch.step != 20:
            return outcome
        if where == "loss":
            return type(outcome)(outcome.loss * bad, outcome.features)
        if where == "activations":  # what an overflow leaves behind in batch norm
            self.backbone.network.layers[0][1].running_mean.data.fill_(bad)
            return type(outcome)(outcome.loss * bad, outcome.features)
        weight = next(self.backbone.parameters())
        weight.register_hook(lambda gradient: gradient * bad)
        return outcome

    def step(self, raw, epoch):
        before = model_state(self)
        original_step(self, raw, epoch)
        if self.step == 20:
            after = model_state(self)
            checked.append([name for name in before if not torch.equal(before[name], after[name])])

    monkeypatch.setattr(ODC, "forward", poisoned)
    monkeypatch.setattr(Trainer, "_train_step", step)
    if where == "gradient":  # the hook stays: every later step is poisoned too, and the third stops the run
        with pytest.raises(Diverged, match="lower --lr"):
            odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **{**TINY, "warm_share": 0.0, "epochs": 6})
        record = json.loads(next((tmp_path / "run" / "diverged").iterdir()).read_text())
        assert record["step"] == 22
        assert len(record["ids"]) == len(record["paths"]) == TINY["batch_size"]
    else:
        run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **{**TINY, "epochs": 6})
        assert sum(line.get("skipped", 0) for line in read_metrics(run / "metrics.jsonl")) > 0
    assert checked == [[]]


def test_bad_images_are_left_out_by_id_and_named(tmp_path):
    folder = make_images(tmp_path / "images", 120)
    (folder / "image0007.png").write_bytes(b"")
    reference = odcluster.train(folder, out=tmp_path / "run", quiet=True, **TINY)
    rows = list(csv.DictReader((reference / "bad_images.csv").open()))
    assert [(row["id"], row["path"]) for row in rows] == [("7", "image0007.png")]
    assert rows[0]["reason"] == "empty file"
    clusters = list(csv.DictReader((reference / "clusters.csv").open()))
    assert clusters[7] == {"path": "image0007.png", "cluster": "-1", "similarity": "", "rank": ""}
    assert all(row["cluster"] != "-1" for row in clusters if row["path"] != "image0007.png")


def test_too_many_bad_images_stop_the_run_with_the_list(tmp_path):
    folder = make_images(tmp_path / "images", 100)
    for i in (3, 50):
        (folder / f"image{i:04d}.png").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"2 of 100 images cannot be used.*bad_images.csv"):
        odcluster.train(folder, out=tmp_path / "run", quiet=True, **TINY)
    assert len((tmp_path / "run" / "bad_images.csv").read_text().splitlines()) == 3
    odcluster.train(folder, out=tmp_path / "other", quiet=True, **TINY, max_refused=0.05)


def test_an_image_deleted_while_training_is_left_out_and_its_row_kept(tmp_path, monkeypatch):
    folder = make_images(tmp_path / "images", 110)
    original = Trainer._train_step

    def step(self, raw, epoch):
        if self.step == 16:
            (folder / "image0011.png").unlink(missing_ok=True)
        original(self, raw, epoch)

    monkeypatch.setattr(Trainer, "_train_step", step)
    run = odcluster.train(folder, out=tmp_path / "run", quiet=True, **TINY, cache_gb=0.0)
    assert "image0011.png,no such file" in (run / "bad_images.csv").read_text()
    assert list(csv.DictReader((run / "clusters.csv").open()))[11]["cluster"] != "-1"


def endless(run: Path, workers: int) -> list[str]:
    """Words for a training that goes on until it is stopped."""
    options = {**TINY, "epochs": 3000, "workers": workers}
    return ["--out", str(run), *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


def has_begun(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def is_saved_and_says_so(run: Path, said: str) -> None:
    assert "odcluster resume" in said
    assert "Traceback" not in said
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("number", "whole_group"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGUSR1, True)]
)
def test_a_signal_saves_and_exits_75(number, whole_group, image_folder, tmp_path):
    run = tmp_path / "run"
    words = ["train", str(image_folder), *endless(run, workers=2 if whole_group else 0)]
    child = Child(command(*words), tmp_path / "said.txt")
    try:
        child.wait_until(lambda: has_begun(run))
        os.killpg(child.pid, number) if whole_group else child.send(number)
        assert child.wait(60) == 75, child.said()
    finally:
        child.end()
    is_saved_and_says_so(run, child.said())


def test_ctrl_c_saves_and_exits_75(image_folder, tmp_path):
    """As a terminal sends it: to the command, in an interpreter of its own, and to the processes that read images."""
    run = tmp_path / "run"
    words = ["train", str(image_folder), *endless(run, workers=2)]
    process = subprocess.Popen(
        [sys.executable, "-m", "odcluster", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not has_begun(run):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    is_saved_and_says_so(run, errors)


def test_handlers_are_restored_and_other_threads_may_train():
    before = signal.getsignal(signal.SIGINT)
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wanted
    assert signal.getsignal(signal.SIGINT) is before
    entered = []

    def elsewhere() -> None:
        with StopFlag():
            entered.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert entered


def test_a_second_process_is_refused(image_folder, tmp_path):
    from odcluster.training.run import open_run, run_lock

    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **TINY)

    def hold() -> None:
        with run_lock(open_run(run)):
            print("held", flush=True)
            time.sleep(60)

    child = Child(hold, tmp_path / "said.txt")
    try:
        child.wait_until(lambda: "held" in child.said())
        with pytest.raises(DataError, match=rf"in use by another process.*{child.pid}"), run_lock(open_run(run)):
            pass
    finally:
        child.end()
    with run_lock(open_run(run)):  # dropped with its process
        pass


def test_the_users_images_are_not_touched(tmp_path):
    folder = make_images(tmp_path / "images", 60)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    odcluster.train(folder, out=tmp_path / "run", quiet=True, **{**TINY, "clusters": 4})
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_a_changed_folder_is_noticed_and_explained(tmp_path):
    folder = make_images(tmp_path / "images", 60)
    run = odcluster.train(folder, out=tmp_path / "run", quiet=True, **{**TINY, "clusters": 4})
    (folder / "image0001.png").rename(folder / "renamed.png")
    with pytest.raises(DataError, match=r"1 renamed \(image0001.png to renamed.png\)"):
        odcluster.resume(run, quiet=True)


def test_a_changed_configuration_is_refused(image_folder, tmp_path):
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **TINY)
    config = json.loads((run / "config.json").read_text())
    views = {**config["augmentation"], "crop_scale": [0.5, 1.0]}
    (run / "config.json").write_text(json.dumps({**config, "lr": 0.5, "augmentation": views}))
    changes = (
        f"(crop_scale was {config['augmentation']['crop_scale']} and is [0.5, 1.0]; lr was {config['lr']} and is 0.5)"
    )
    with pytest.raises(DataError, match=f"was changed since .*{re.escape(changes)}"):
        odcluster.resume(run, quiet=True)
    running = {**config["running"], "log_interval": 7, "checkpoint_minutes": 3.0}
    (run / "config.json").write_text(json.dumps({**config, "workers": 1, "running": running}))
    odcluster.resume(run, quiet=True)  # how the machine is used may change
    (run / "config.json").write_text(json.dumps({**config, "hook": "os.system"}))
    with pytest.raises(UserError, match="unknown keys: hook"):
        odcluster.resume(run, quiet=True)


def test_everything_the_run_promises_is_there(image_folder, tmp_path):
    run = odcluster.train(image_folder, out=tmp_path / "a run with spaces ü", quiet=True, **TINY)
    names = {path.name for path in run.iterdir()}
    promised = {"config.json", "manifest.csv", "metrics.jsonl", "train.log", "checkpoints", "clusters.csv", "backbone"}
    assert promised | {"clusters.png", "curves.png"} <= names
    lines = read_metrics(run / "metrics.jsonl")
    steps = [line["step"] for line in lines if "event" not in line]
    assert steps == sorted(set(steps))
    assert {"loss", "change", "smallest", "largest", "timing", "lr"} <= set(lines[-1])
    home = str(Path.home())
    for file in [*run.glob("checkpoints/*/state.json"), *run.glob("backbone/*.md"), *run.glob("backbone/*.json")]:
        assert home not in file.read_text()


def test_a_window_restored_in_the_middle_gives_the_same_mean():
    whole, first = Window(), Window()
    values = torch.rand(7)
    for value in values:
        whole.add({"loss": value, "n": 1.0})
    for value in values[:3]:
        first.add({"loss": value, "n": 1.0})
    second = Window(json.loads(json.dumps(first.state())))
    for value in values[3:]:
        second.add({"loss": value, "n": 1.0})
    assert second.means() == whole.means()
    assert whole.means() == {}


def test_half_precision_keeps_the_memories_in_float32(image_folder, tmp_path):
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **TINY, precision="bfloat16")
    memory = load_file(max((run / "checkpoints").glob("step-*")) / "memory.safetensors")
    assert memory["samples.rows"].dtype == memory["centroids.centroids"].dtype == torch.float32
    assert bool(memory["samples.rows"].isfinite().all())
    assert int(memory["centroids.counts"].sum()) == 97


@pytest.mark.slow
def test_a_compiled_backbone_trains_and_exports_the_same_names(image_folder, tmp_path):
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **TINY, compile=True)
    plain = odcluster.train(image_folder, out=tmp_path / "plain", quiet=True, **TINY)
    assert set(load_file(run / "backbone" / "model.safetensors")) == set(
        load_file(plain / "backbone" / "model.safetensors")
    )


def test_the_normalisation_that_came_with_weights_survives_a_resume(image_folder, tmp_path):
    """Weights of another run bring the mean and std they were trained with; a resumed run must go on with them."""
    start = odcluster.train(image_folder, out=tmp_path / "start", quiet=True, **TINY)
    description = start / "backbone" / "config.json"
    settings = json.loads(description.read_text())
    description.write_text(json.dumps({**settings, "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}))
    options = {**TINY, "weights": str(start), "checkpoint_minutes": 0}
    reference = odcluster.train(image_folder, out=tmp_path / "reference", quiet=True, **options)
    shutil.copytree(reference, tmp_path / "copy")
    newest = max((tmp_path / "copy" / "checkpoints").glob("step-*"))
    shutil.rmtree(newest)
    shutil.rmtree(start)  # the weights are not needed any more
    odcluster.resume(tmp_path / "copy", quiet=True)
    assert state_hash(tmp_path / "copy") == state_hash(reference)
    exported = json.loads((tmp_path / "copy" / "backbone" / "config.json").read_text())
    assert (exported["mean"], exported["std"]) == ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])


def test_frozen_stages_keep_weights_and_statistics(image_folder, tmp_path):
    start = odcluster.train(image_folder, out=tmp_path / "start", quiet=True, **TINY)
    tuned = odcluster.train(
        image_folder, out=tmp_path / "tuned", quiet=True, **{**TINY, "weights": str(start), "freeze_stages": 2}
    )
    before, after = (load_file(run / "backbone" / "model.safetensors") for run in (start, tuned))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith(("layers.0.", "layers.1.")), name


def test_statistics_that_came_with_weights_are_not_calibrated_away(image_folder, tmp_path, monkeypatch):
    start = odcluster.train(image_folder, out=tmp_path / "start", quiet=True, **TINY)
    seen = []
    original = Trainer._train_step

    def step(self, raw, epoch):
        if self.step == 0:
            seen.append({name: b.clone() for name, b in self.method.backbone.network.named_buffers()})
            seen.append(self.method.neck.bn.running_mean.clone())
        original(self, raw, epoch)

    monkeypatch.setattr(Trainer, "_train_step", step)
    odcluster.train(image_folder, out=tmp_path / "tuned", quiet=True, **{**TINY, "weights": str(start)})
    given = load_file(start / "backbone" / "model.safetensors")
    for name, buffer in seen[0].items():
        if "running_" in name:
            assert torch.equal(buffer, given[name]), name
    assert bool(seen[1].any()), "the new neck was not calibrated"


def test_a_resume_needs_neither_the_weights_nor_the_folder_it_was_started_from(image_folder, tmp_path, monkeypatch):
    """A small stem is decided by the weights; the run remembers it."""
    options = {**TINY, "backbone": "resnet10t", "max_steps": 4}
    monkeypatch.chdir(tmp_path)
    odcluster.train(image_folder, out="start", quiet=True, **options)
    odcluster.train(image_folder, out="tuned", quiet=True, **{**options, "weights": "start", "checkpoint_minutes": 0})
    expected = state_hash(tmp_path / "tuned")
    shutil.rmtree(max((tmp_path / "tuned" / "checkpoints").glob("step-*")))
    shutil.rmtree(tmp_path / "start")
    monkeypatch.chdir("/")
    odcluster.resume(tmp_path / "tuned", quiet=True)
    assert state_hash(tmp_path / "tuned") == expected


def test_colorization_resumes_with_the_normalisation_of_its_weights(image_folder, tmp_path):
    options = {**TINY, "method": "colorization"}
    start = odcluster.train(image_folder, out=tmp_path / "start", quiet=True, **options)
    settings = json.loads((start / "backbone" / "config.json").read_text())
    (start / "backbone" / "config.json").write_text(json.dumps({**settings, "mean": [0.5] * 3, "std": [0.5] * 3}))
    options |= {"weights": str(start), "checkpoint_minutes": 0}
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **options)
    expected = state_hash(run)
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    odcluster.resume(run, quiet=True)
    assert state_hash(run) == expected


def test_a_full_disk_while_writing_metrics_or_the_log_does_not_end_the_run(image_folder, tmp_path, monkeypatch, capsys):
    class Full:
        def __init__(self, file):
            self.file, self.writes = file, 0

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            self.writes += 1
            if self.writes == 3:
                self.file.write(data[:5])
                raise OSError(28, "No space left on device")
            return self.file.write(data)

    original = MetricsFile.__init__

    def start(self, path, size):
        original(self, path, size)
        self._file = Full(self._file)

    monkeypatch.setattr(MetricsFile, "__init__", start)
    run = odcluster.train(image_folder, out=tmp_path / "run", **TINY)
    assert "could not be written (No space left on device)" in capsys.readouterr().err
    assert len(read_metrics(run / "metrics.jsonl")) > 3  # every line that is there is whole
