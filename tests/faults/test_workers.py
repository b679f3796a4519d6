"""Processes that read images are killed or hang: others take their place, once, at the exact batch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from figures import record
from tiny_runs import TINY, make_images, metrics_without_timings, state_hash

import odcluster
from odcluster.data import loading
from odcluster.data.sources import FileSource
from odcluster.errors import DataError, Interrupted
from odcluster.training.devices import StopFlag
from odcluster.training.trainer import Trainer


@pytest.fixture(scope="module")
def reference(image_folder, tmp_path_factory):
    return odcluster.train(image_folder, out=tmp_path_factory.mktemp("reference") / "run", quiet=True, **TINY)


def stop_workers(number: signal.Signals) -> None:
    for child in multiprocessing.active_children():
        os.kill(child.pid, number)


@pytest.mark.parametrize(
    ("number", "at"),
    [
        (signal.SIGKILL, 14),
        (signal.SIGSTOP, 14),
        *(pytest.param(number, 0, marks=pytest.mark.faults) for number in (signal.SIGKILL, signal.SIGSTOP)),
        *(pytest.param(number, 14, marks=pytest.mark.faults) for number in (signal.SIGSEGV, signal.SIGBUS)),
    ],
)
def test_lost_workers_are_replaced_and_nothing_changes(
    number, at, reference, image_folder, tmp_path, monkeypatch, capsys
):
    """Between two steps, at the beginning of an epoch and in the middle of one. SIGSTOP is a worker that hangs."""
    original, monotonic = Trainer._train_step, time.monotonic
    lost = []

    def step(self, raw, epoch):
        if self.step == at and not lost:
            lost.append(monotonic())
            stop_workers(number)
            time.sleep(0.3)
        original(self, raw, epoch)

    monkeypatch.setattr(Trainer, "_train_step", step)
    monkeypatch.setattr(loading, "TIMEOUT_SECONDS", 2.0)
    run = odcluster.train(image_folder, out=tmp_path / "run", **{**TINY, "workers": 2})
    assert state_hash(run) == state_hash(reference)
    assert metrics_without_timings(run) == metrics_without_timings(reference)
    said = capsys.readouterr().err
    why = {
        signal.SIGKILL: "were killed",
        signal.SIGSTOP: "delivered nothing for 2 seconds",
        signal.SIGSEGV: "ended with code -11",
        signal.SIGBUS: "ran out of shared memory",
    }[number]
    assert f"the processes that read images {why}" in said
    record("loader processes lost or hung", True)
    assert "others take their place" in said
    assert not multiprocessing.active_children()


def deadly(path: str, number: signal.Signals):
    """Reading this image ends the process that does it (as a decoder's bug or its memory would)."""
    original = FileSource.stored

    def stored(self, i):
        if self.manifest.paths[i] == path and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), number)
        return original(self, i)

    return stored


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_image_that_always_ends_its_reader_is_pinned_down(number, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "TIMEOUT_SECONDS", 2.0)
    monkeypatch.setattr(FileSource, "stored", deadly("image0050.png", number))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"twice at the same batch of \d+ images \('image") as caught:
        odcluster.train(
            image_folder, out=tmp_path / "run", **{**TINY, "workers": 2, "cache_gb": 0.0, "checkpoint_minutes": 0}
        )
    assert "odcluster resume" in str(caught.value)
    assert "others take their place" in capsys.readouterr().err
    assert time.monotonic() - began < 60
    assert not multiprocessing.active_children()


def batches(source, **options) -> loading.Loader:
    augmentation = odcluster.config.Augmentation()
    one = ((0.0,) * 3, (1.0,) * 3)
    return loading.Loader(source, augmentation, image_size=16, seed=0, workers=2, normalisation=one, **options)


def test_the_batch_that_fails_twice_is_the_one_with_the_image(tmp_path, monkeypatch):
    folder = make_images(tmp_path / "images", 64)
    source = odcluster.data.sources.open_source(folder)
    monkeypatch.setattr(FileSource, "stored", deadly("image0037.png", signal.SIGKILL))
    warned: list[str] = []
    served = []

    def serve(loader):
        for raw in loader.training(0, [np.arange(start, start + 8) for start in range(0, 64, 8)]):
            served.append(raw.ids.tolist())

    with batches(source, warn=warned.append) as loader, pytest.raises(DataError) as caught:
        serve(loader)
    assert served == [list(range(start, start + 8)) for start in range(0, 32, 8)], "those before it are all served"
    assert "'image0032.png', 'image0033.png'" in str(caught.value)
    assert warned


def test_a_stop_is_heard_while_workers_hang(image_folder, monkeypatch):
    """A read that does not come back, as from a lost network drive."""
    monkeypatch.setattr(FileSource, "stored", lambda self, i: time.sleep(60))
    source = odcluster.data.sources.open_source(image_folder)
    stop = StopFlag()
    with batches(source, poll=stop.poll) as loader:
        stop.wanted = True
        began = time.monotonic()
        with pytest.raises(Interrupted):
            next(loader.training(0, [np.arange(8)]))
        assert time.monotonic() - began < 5
        loader._kill_workers()


def test_a_failure_of_the_code_is_not_taken_for_a_lost_worker(image_folder, monkeypatch):
    def broken(self, i):
        raise RuntimeError("a bug")

    monkeypatch.setattr(FileSource, "stored", broken)
    source = odcluster.data.sources.open_source(image_folder)
    with batches(source) as loader, pytest.raises(RuntimeError, match="a bug"):
        next(loader.training(0, [np.arange(4)]))


def test_the_users_own_workers_are_not_disturbed(image_folder, tmp_path):
    """torch's handler for lost workers stays as it was for data loaders of the program that uses us."""
    before = signal.getsignal(signal.SIGCHLD)
    odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **{**TINY, "workers": 1, "epochs": 1})
    after = signal.getsignal(signal.SIGCHLD)
    odcluster.train(image_folder, out=tmp_path / "other", quiet=True, **{**TINY, "workers": 1, "epochs": 1})
    assert signal.getsignal(signal.SIGCHLD) is after
    assert before is after or "torch" in getattr(after, "__module__", "")
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
