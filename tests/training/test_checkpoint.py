"""A checkpoint is complete and verified, or ignored."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from forking import finish
from tiny_runs import TINY, metrics_without_timings, state_hash

import odcluster
from odcluster.errors import DataError
from odcluster.training import checkpoint
from odcluster.training.checkpoint import NotSaved

TENSORS = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "memory": {"labels": torch.arange(5)}, "optimizer": {}}


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(folder, step, TENSORS, {"note": f"at {step}"})


def test_what_was_saved_is_found_again(tmp_path):
    save(tmp_path, 3, 20, 100)
    found = checkpoint.find(tmp_path, pytest.fail)
    assert found is not None
    assert found.state["step"] == 100
    assert found.state["note"] == "at 100"
    assert torch.equal(found.tensors["model"]["w"], TENSORS["model"]["w"])
    assert torch.equal(found.tensors["memory"]["labels"], TENSORS["memory"]["labels"])
    assert found.tensors["optimizer"] == {}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.safetensors", "memory.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit, Path.unlink])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(name, damage, tmp_path):
    save(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    warnings: list[str] = []
    found = checkpoint.find(tmp_path, warnings.append)
    assert found is not None
    assert found.state["step"] == 1
    assert len(warnings) == 1
    assert name in warnings[0]
    assert (tmp_path / "step-00000002").exists(), "nothing is deleted"


def test_foreign_names_are_ignored_and_leftovers_swept(tmp_path):
    save(tmp_path, 5)
    for name in ("step-abc", "step-", "notes", ".tmp-00000007-123", "step-00000009.bak"):
        (tmp_path / name).mkdir()
    found = checkpoint.find(tmp_path, pytest.fail)
    assert found is not None
    assert found.state["step"] == 5
    checkpoint.sweep(tmp_path)
    assert not (tmp_path / ".tmp-00000007-123").exists()
    assert (tmp_path / "notes").exists()


def test_no_checkpoint_at_all(tmp_path):
    assert checkpoint.find(tmp_path / "missing", pytest.fail) is None
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(DataError, match=r"no checkpoint in .* is valid .*state.json"):
        checkpoint.find(tmp_path, pytest.fail)


def test_another_format_says_what_to_do(tmp_path):
    save(tmp_path, 1)
    state = tmp_path / "step-00000001" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    save(tmp_path, 0)
    with pytest.raises(DataError, match=r"format 99.*version of odcluster that wrote it"):
        checkpoint.find(tmp_path, pytest.fail)  # not even when an older one could be read: nothing is trained over it


def test_a_changed_state_is_noticed(tmp_path):
    save(tmp_path, 10, 20)
    state = tmp_path / "step-00000020" / "state.json"
    state.write_text(state.read_text().replace('"step": 20', '"step": 10'))
    warnings: list[str] = []
    found = checkpoint.find(tmp_path, warnings.append)
    assert found is not None
    assert found.state["step"] == 10
    assert "state.json is damaged" in warnings[0]


def test_a_valid_checkpoint_of_the_same_step_is_left_alone(tmp_path):
    """A finished run has often just one: a kill while it is replaced would lose everything."""
    save(tmp_path, 1)
    before = (tmp_path / "step-00000001" / "state.json").stat().st_mtime_ns
    save(tmp_path, 1)
    assert (tmp_path / "step-00000001" / "state.json").stat().st_mtime_ns == before
    empty(tmp_path / "step-00000001" / "model.safetensors")
    save(tmp_path, 1)
    assert checkpoint.is_valid(tmp_path / "step-00000001")


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
@pytest.mark.parametrize("damaged", [[], [5], [5, 4], [2]])
def test_pruning_never_leaves_fewer_than_two_valid_ones(keep, damaged, tmp_path):
    """Damaged ones do not count, however new they are; those that are newer than the oldest kept one are left alone."""
    save(tmp_path, 1, 2, 3, 4, 5)
    for step in damaged:
        flip_a_bit(tmp_path / f"step-{step:08d}" / "model.safetensors")
    checkpoint.prune(tmp_path, keep, known_valid={tmp_path / "step-00000003"})
    left = [int(path.name[5:]) for path in checkpoint.candidates(tmp_path)]
    valid = [step for step in (5, 4, 3, 2, 1) if step not in damaged][: max(keep, 2)]
    assert left == [step for step in (5, 4, 3, 2, 1) if step >= valid[-1]]


@pytest.mark.parametrize("finished", [False, True])
def test_a_checkpoint_of_the_same_step_is_kept_until_the_new_one_is_in_its_place(finished, tmp_path, monkeypatch):
    """Of a short run it may be the only one: stopped while the end is worked out, resumed, killed while it is saved."""
    checkpoint.save(tmp_path, 7, TENSORS, {"finished": False})

    class Killed(BaseException):
        pass

    def reached(point: str) -> None:
        if point == "between renames":
            raise Killed

    monkeypatch.setattr(checkpoint, "reached", reached)
    if not finished:
        empty(tmp_path / "step-00000007" / "model.safetensors")
    with pytest.raises(Killed):
        checkpoint.save(tmp_path, 7, TENSORS, {"finished": finished})
    monkeypatch.undo()
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]
    assert checkpoint.is_valid(tmp_path / "step-00000007") == finished
    checkpoint.save(tmp_path, 7, TENSORS, {"finished": finished})
    assert checkpoint.load(tmp_path / "step-00000007").state["finished"] == finished
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


@pytest.mark.parametrize("at", range(8))
def test_a_full_disk_at_any_write_leaves_the_older_ones_intact(at, tmp_path, monkeypatch):
    save(tmp_path, 1)
    count = [0]

    def reached(point: str) -> None:
        count[0] += 1
        if count[0] == at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "reached", reached)
    with pytest.raises(NotSaved, match="No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".tmp-*"))
    found = checkpoint.find(tmp_path, pytest.fail)
    assert found is not None
    assert found.state["step"] == 1


def test_a_real_write_error_is_reported_not_raised(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, 1)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(NotSaved, match="step 2 could not be written"):
            checkpoint.save(folder, 2, {"model": {"w": torch.zeros(100_000)}}, {})

    finish(limited, tmp_path / "said.txt")
    found = checkpoint.find(folder, pytest.fail)
    assert found is not None
    assert found.state["step"] == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_training_goes_on_when_a_save_fails_and_fails_at_the_end_only(image_folder, tmp_path, monkeypatch, capsys):
    def full(directory, step, tensors, state):
        raise NotSaved("the checkpoint could not be written (No space left on device)")

    reference = odcluster.train(image_folder, out=tmp_path / "reference", quiet=True, **TINY)
    original = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(DataError, match="free some space, then `odcluster resume"):
        odcluster.train(image_folder, out=tmp_path / "run", **TINY, checkpoint_minutes=0)
    assert "earlier checkpoints are intact" in capsys.readouterr().err
    monkeypatch.setattr(checkpoint, "save", original)
    odcluster.resume(tmp_path / "run", quiet=True)
    assert state_hash(tmp_path / "run") == state_hash(reference)
    assert metrics_without_timings(tmp_path / "run") == metrics_without_timings(reference)


def test_resume_falls_back_when_the_newest_checkpoint_is_damaged(image_folder, tmp_path, capsys):
    run = odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **TINY, checkpoint_minutes=0)
    expected = state_hash(run)
    newest = max((run / "checkpoints").glob("step-*"))
    truncate(newest / "memory.safetensors")
    shutil.rmtree(run / "backbone")
    odcluster.resume(run)
    assert "memory.safetensors has" in capsys.readouterr().err
    assert state_hash(run) == expected
    assert (run / "backbone" / "model.safetensors").exists()
