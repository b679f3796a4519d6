"""The same bits: for any number of workers, twice the same seed, stopped or killed anywhere and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, metrics_without_timings, state_hash

import odcluster
from odcluster.errors import Interrupted
from odcluster.models import convolutions
from odcluster.training import checkpoint
from odcluster.training.devices import StopFlag

METHODS = {
    "odc": {},
    "fine, adamw": {
        "fine_share": 0.5,
        "fine_clusters": 12,
        "final_pass": True,
        "algorithm": "adamw",
        "warm_share": 0.0,
        "instance_weight": 1.0,
        "rotation_weight": 0.5,
    },
    "paper": {"recipe": "odc_resnet50_imagenet", "lr": 0.01},
    "deepcluster": {"method": "deepcluster"},
    "rotation": {"method": "rotation"},
    "jigsaw": {"method": "jigsaw", "permutations": 10},
    "colorization": {"method": "colorization"},
}


@pytest.fixture(scope="session")
def references(image_folder, tmp_path_factory):
    """One undisturbed run per method."""
    folder = tmp_path_factory.mktemp("references")
    runs: dict[str, Path] = {}

    def reference(method: str) -> Path:
        if method not in runs:
            runs[method] = odcluster.train(image_folder, out=folder / method, quiet=True, **TINY, **METHODS[method])
        return runs[method]

    return reference


def same(run: Path, reference: Path) -> None:
    assert state_hash(run) == state_hash(reference)
    assert metrics_without_timings(run) == metrics_without_timings(reference)


@pytest.mark.parametrize(("method", "workers"), [("odc", 0), ("odc", 1), *((method, 3) for method in METHODS)])
def test_the_number_of_workers_changes_nothing(method, workers, references, image_folder, tmp_path):
    options = {**TINY, **METHODS[method], "workers": workers}
    same(odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **options), references(method))


def test_another_seed_gives_another_run(references, image_folder, tmp_path):
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **TINY, seed=1)
    assert state_hash(run) != state_hash(references("odc"))


@pytest.mark.parametrize("cache_gb", [0.0, 0.00005])
def test_the_cache_changes_nothing(cache_gb, references, image_folder, tmp_path):
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **TINY, cache_gb=cache_gb)
    same(run, references("odc"))


@pytest.mark.parametrize("method", METHODS)
def test_stopped_at_every_step_and_resumed(method, references, image_folder, tmp_path, monkeypatch):
    """A stop is wanted at every poll: one step (or one batch of an extraction) per sitting."""
    reference = references(method)
    polls = {"left": 0}

    def poll(self):
        polls["left"] -= 1
        if polls["left"] < 0:
            raise Interrupted("stopped as asked")

    monkeypatch.setattr(StopFlag, "poll", poll)
    run, sittings = tmp_path / "run", 0
    polls["left"] = 2
    with pytest.raises(Interrupted):
        odcluster.train(image_folder, out=run, quiet=True, **TINY, **METHODS[method])
    while True:
        polls["left"] = (4, 9, 27, 28, 6)[sittings % 5]  # 25 get through an initial clustering
        sittings += 1
        try:
            odcluster.resume(run, quiet=True)
            break
        except Interrupted:
            assert sittings < 60
    assert sittings >= 3
    same(run, reference)


def test_half_precision_on_two_threads_resumes_to_the_same_bits(image_folder, tmp_path, monkeypatch):
    """With more than one thread, convolutions compute their weight gradients by shares of the batch."""
    options = {**TINY, "precision": "bfloat16"}
    polls = {"left": 40}  # well into the training
    plain_poll = StopFlag.poll

    def poll(self):
        polls["left"] -= 1
        if polls["left"] == 0:
            raise Interrupted("stopped as asked")
        plain_poll(self)

    torch.set_num_threads(2)
    convolutions._crew.cache_clear()
    try:
        reference = odcluster.train(image_folder, out=tmp_path / "whole", quiet=True, **options)
        assert convolutions._crew.cache_info().misses == 1, "nothing was shared out"
        monkeypatch.setattr(StopFlag, "poll", poll)
        with pytest.raises(Interrupted):
            odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **options)
        same(odcluster.resume(tmp_path / "run", quiet=True), reference)
    finally:
        torch.set_num_threads(1)


KILLED = """
import os, signal, sys
import odcluster
from odcluster.training import checkpoint
from tiny_runs import TINY
count = [0]
def reached(point):
    count[0] += point == "before rename"
    if count[0] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.reached = reached
odcluster.train(sys.argv[1], out=sys.argv[2], quiet=True, **TINY, checkpoint_minutes=0)
"""


def test_killed_in_a_save_and_resumed_by_another_interpreter(references, image_folder, tmp_path):
    """tests/faults/test_kill.py kills everywhere, in processes that are forked; here nothing is shared."""
    run = tmp_path / "run"
    # Sums over threads depend on their number, which the test processes set to one.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(image_folder), str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((run / "checkpoints").glob(".tmp-*"))
    odcluster.resume(run, quiet=True)
    same(run, references("odc"))
    assert not list((run / "checkpoints").glob(".tmp-*"))
    assert len(checkpoint.candidates(run / "checkpoints")) >= 2
