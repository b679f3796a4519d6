"""Numbers that are not finite: they change neither weights nor statistics, optimiser or memories; the third in a row
stops the run with code 4 and a record from which the batch can be made again. Also: odd sizes, uninitialised memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from figures import record
from forking import Child, finish
from harness import METHODS, SHORT, at_step, compare, save_seldom
from safetensors.torch import load_file

import odcluster
from odcluster import build
from odcluster.cli import main
from odcluster.errors import DataError, Diverged, UserError
from odcluster.methods.interface import Outcome
from odcluster.replay import diverged_batch
from odcluster.training import checkpoint
from odcluster.training.trainer import Trainer

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def state_of(trainer: Trainer) -> str:
    digest = hashlib.sha256()
    for group in trainer.tensors().values():
        for name, tensor in sorted(group.items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def poison(outcome: Outcome, where: str, bad: float, module: torch.nn.Module) -> Outcome:
    """An outcome with one number in it, or behind it, that is not finite."""
    if where == "loss":
        return Outcome(outcome.loss * bad, outcome.features)
    if where == "gradient":  # the loss stays what it is
        weight = next(p for p in module.parameters() if p.requires_grad)
        return Outcome(outcome.loss + Spoiled.apply(weight.sum(), bad), outcome.features)
    assert outcome.features is not None
    features = outcome.features.clone()
    features[3, 2] = bad
    return Outcome(outcome.loss, features)


class Spoiled(torch.autograd.Function):
    """0 forwards, a bad gradient backwards."""

    @staticmethod
    def forward(context, value, bad):
        context.bad = bad
        return value * 0

    @staticmethod
    def backward(context, gradient):
        return gradient * context.bad, None


def poisoned_steps(method: str, where: str, bad: float, steps: set[int]) -> None:
    """In this process: these steps of the method give numbers that are not finite."""
    kind = build.METHODS[METHODS[method].get("method", "odc")]
    original = kind.forward

    def forward(self, batch):
        outcome = original(self, batch)
        return poison(outcome, where, bad, self) if batch.step in steps else outcome

    kind.forward = forward


CASES = [(method, where) for method in METHODS for where in ("loss", "gradient")]
CASES += [(method, "one feature") for method in METHODS if method.startswith("odc")]


def check_unchanged(method: str, where: str, bad: float, images: Path, options: dict, folder: Path) -> None:
    """Two bad steps with a good one between them: the state is the same before and after each, and training goes on."""

    def work() -> None:
        poisoned_steps(method, where, bad, {7, 9})
        original, seen = Trainer._train_step, {}

        def step(self, raw, epoch):
            before = state_of(self)
            original(self, raw, epoch)
            seen[self.step] = state_of(self) == before

        Trainer._train_step = step
        odcluster.train(images, out=folder / "run", quiet=True, **options)
        assert [number for number, same in seen.items() if same] == [7, 9]

    finish(work, folder / "said.txt")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("skipped", 0) > 0 for line in lines) == 2
    record("not finite: left out", True)


@pytest.mark.parametrize(("method", "where"), [("odc", "loss"), ("odc", "gradient"), ("odc", "one feature")])
def test_a_bad_step_changes_nothing(method, where, images, options, tmp_path):
    check_unchanged(method, where, BAD["nan"], images, options(method), tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("method", "where"), CASES)
def test_a_bad_step_changes_nothing_whatever_the_method(method, where, bad, images, options, tmp_path):
    check_unchanged(method, where, BAD[bad], images, options(method), tmp_path)


@pytest.mark.parametrize("method", ["odc", *(pytest.param(m, marks=pytest.mark.faults) for m in METHODS if m != "odc")])
def test_the_third_in_a_row_stops_and_its_batch_can_be_made_again(method, images, options, tmp_path):
    """Code 4; the record gives back the very pixels; also when killed between the second and the third."""
    run, seen, output = tmp_path / "run", tmp_path / "seen.pt", tmp_path / "said.txt"
    settings = options(method)

    def poisoned(strike: bool) -> None:
        poisoned_steps(method, "loss", BAD["nan"], set(range(6, 12)))
        original = Trainer._train_step

        def step(self, raw, epoch):
            if self.step == 8:
                kind = type(self.module)
                forward = kind.forward

                def kept(module, batch):
                    torch.save({"ids": batch.ids, "images": batch.images, "where": [batch.epoch, batch.step]}, seen)
                    return forward(module, batch)

                kind.forward = kept
            original(self, raw, epoch)

        Trainer._train_step = step
        if strike:
            at_step(8, lambda: os.kill(os.getpid(), 9))

    def train() -> object:
        poisoned(strike=True)
        return odcluster.train(images, out=run, quiet=True, **settings)

    def resume() -> object:
        poisoned(strike=False)
        return main(["resume", str(run)])

    assert Child(train, output).wait() == -9
    stopped = Child(resume, output)
    assert stopped.wait() == 4, stopped.said()
    assert "3 steps in a row" in stopped.said()
    found = checkpoint.find(run / "checkpoints", pytest.fail)
    assert found is not None, "the last good checkpoint is intact"
    assert all(t.isfinite().all() for group in found.tensors.values() for t in group.values() if t.is_floating_point())
    expected, batch = torch.load(seen), diverged_batch(run)
    assert torch.equal(batch.ids, expected["ids"])
    assert torch.equal(batch.images, expected["images"])
    assert [batch.epoch, batch.step] == expected["where"] == [1, 8]
    record("not finite: three in a row, replayed", True)


def test_nothing_to_replay(references):
    with pytest.raises(DataError, match="no record of a step"):
        diverged_batch(references("odc"))


def test_a_real_divergence(images, tmp_path):
    """A learning rate that no network survives: stopped, and no checkpoint holds a number that is not finite."""
    options = {**METHODS["rotation"], "lr": 1e6, "epochs": 10, "max_steps": 60, "keep_checkpoints": 100}
    with pytest.raises(Diverged, match="lower --lr"):
        odcluster.train(images, out=tmp_path / "run", quiet=True, **options)
    for path in checkpoint.candidates(tmp_path / "run" / "checkpoints"):
        for group in checkpoint.load(path).tensors.values():
            assert all(t.isfinite().all() for t in group.values() if t.is_floating_point()), path


# Memory that nobody wrote to ------------------------------------------------------------


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m == "odc" else pytest.mark.faults) for m in METHODS])
def test_nothing_uninitialised_is_ever_read(method, images, options, references, tmp_path):
    """torch fills memory that it hands out with NaN: a parameter or buffer that nobody sets would show."""
    settings = options(method)

    def work() -> object:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        assert torch.empty(3).isnan().all()
        return odcluster.train(images, out=tmp_path / "run", quiet=True, **settings)

    finish(work, tmp_path / "said.txt")
    model = load_file(checkpoint.candidates(tmp_path / "run" / "checkpoints")[0] / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in model.values() if tensor.is_floating_point())
    wrong = compare(tmp_path / "run", references(method))
    record("uninitialised memory", not wrong)
    assert not wrong


# Odd sizes ------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 33},
        {"batch_size": 500, "epochs": 12},
        {"clusters": 1, "small_cluster": 0, "fine_share": 0.0},
        {"sampling": "replacement"},
        {"small_cluster": 12, "clusters": 7, "fine_share": 0.0},
    ],
    ids=lambda changes: ", ".join(f"{k} {v}" for k, v in changes.items()),
)
def test_odd_sizes_are_killed_and_resumed_like_others(changes, images, tmp_path):
    """A batch that does not divide the images or is larger than they are; one cluster; an image twice in a batch."""
    options = {**SHORT, **changes}
    reference, run = tmp_path / "reference", tmp_path / "run"
    finish(partial(odcluster.train, images, out=reference, quiet=True, **options), tmp_path / "said.txt")

    def struck() -> object:
        save_seldom()
        at_step(7, lambda: os.kill(os.getpid(), 9))
        return odcluster.train(images, out=run, quiet=True, **options)

    assert Child(struck, tmp_path / "said.txt").wait() == -9
    finish(partial(odcluster.resume, run, quiet=True), tmp_path / "said.txt")
    wrong = compare(run, reference)
    record("kill in runs of odd sizes", not wrong)
    assert not wrong


def test_what_cannot_be_clustered_is_refused_in_a_sentence(tmp_path):
    alike = np.zeros((40, 20, 20, 3), np.uint8)
    with pytest.raises(UserError, match="all identical"):
        odcluster.train(alike, out=tmp_path / "alike", quiet=True, **{**SHORT, "clusters": 3})
    few = np.random.default_rng(0).integers(0, 255, (5, 20, 20, 3)).astype(np.uint8)
    with pytest.raises(UserError, match="at least 8 images are needed"):
        odcluster.train(few, out=tmp_path / "few", quiet=True, **{**SHORT, "clusters": 6})
    assert not (tmp_path / "few").exists()
