"""Disks that are full, small or read-only, files that are damaged, names that are odd, and two processes on one run.

The newest valid checkpoint is used, what is wrong is named, nothing valid is ever deleted, and when the cause is gone
the run resumes to the same bits.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from figures import record
from forking import Child, finish
from harness import SHORT, at_step, compare, save_seldom

import odcluster
from odcluster.cli import main
from odcluster.judge import evaluate
from odcluster.training import checkpoint

BALLAST = "ballast"


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """A file system of its own in that folder; skips where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=40m", "tmpfs") as folder:
        yield folder


def fill(disk: Path, leave: int = 0) -> None:
    """Take all of the free space but so many bytes."""
    left = shutil.disk_usage(disk).free - leave
    with open(disk / BALLAST, "wb", buffering=0) as file:
        try:
            while left > 0:
                left -= file.write(bytes(min(left, 1 << 16)))
        except OSError:
            pass  # full to the last page


def child(work: Callable[[], object], output: Path, *faults: Callable[[], object]) -> Child:
    def faulty() -> object:
        for fault in faults:
            fault()
        return work()

    started = Child(faulty, output)
    started.wait()
    return started


def valid(run: Path) -> set[str]:
    return {path.name for path in checkpoint.candidates(run / "checkpoints") if checkpoint.is_valid(path)}


# Full disks ------------------------------------------------------------


@pytest.mark.parametrize(("step", "leave"), [(5, 0), pytest.param(1, 100_000, marks=pytest.mark.faults),
                                             pytest.param(11, 20_000, marks=pytest.mark.faults),
                                             pytest.param(5, 4096, marks=pytest.mark.faults)])  # fmt: skip
def test_a_disk_that_fills_up_in_the_middle(step, leave, small_disk, images, options, references, tmp_path):
    """Training goes on to the end, says so, keeps what was saved, exits with 3; with room again it resumes exactly."""
    run = small_disk / "run"
    train = partial(odcluster.train, images, out=run, **options("odc"))
    done = child(train, tmp_path / "said.txt", save_seldom, partial(at_step, step, lambda: fill(small_disk, leave)))
    assert done.code == 3, done.said()
    assert "training goes on and tries again later" in done.said() or step == 11
    assert "free some space, then `odcluster resume" in done.said()
    assert len(valid(run)) >= (step > 3)
    (small_disk / BALLAST).unlink()
    finish(partial(odcluster.resume, run, quiet=True), tmp_path / "said.txt")
    wrong = compare(run, references("odc"))
    record("disk full while training", not wrong)
    assert not wrong


def test_a_full_disk_from_the_start(small_disk, images, options, tmp_path):
    fill(small_disk)
    done = child(partial(odcluster.train, images, out=small_disk / "run", **options("odc")), tmp_path / "said.txt")
    assert done.code in (2, 3), done.said()
    assert "No space left" in done.said()
    assert "Traceback" not in done.said()
    assert [path.name for path in small_disk.iterdir()] == [BALLAST]
    record("disk full before training", True)


@pytest.mark.parametrize("leave", [600_000, *(pytest.param(n, marks=pytest.mark.faults) for n in (3_000_000, 200_000))])
def test_features_of_a_frozen_backbone_do_not_fit(leave, small_disk, images, options, references, tmp_path):
    """A mapped file on a full disk would kill the process without a word: its space is taken before."""
    run = small_disk / "run"
    fill(small_disk, leave)
    train = partial(odcluster.train, images, out=run, **options("odc on a frozen backbone"))
    done = child(train, tmp_path / "said.txt", save_seldom)
    assert done.code == 3, done.said()
    assert "free some space" in done.said()
    (small_disk / BALLAST).unlink()
    finish(partial(odcluster.resume, run, quiet=True), tmp_path / "said.txt")
    wrong = compare(run, references("odc on a frozen backbone"))
    record("disk full while features are made", not wrong)
    assert not wrong


def test_results_do_not_fit(small_disk, images, options, references, tmp_path):
    """The training is saved; what people take away is written by a resume."""
    run = small_disk / "run"
    shutil.copytree(references("odc"), run)
    for name in ("clusters.csv", "clusters.png", "curves.png"):
        (run / name).unlink()
    shutil.rmtree(run / "backbone")
    fill(small_disk)
    done = child(partial(main, ["resume", str(run)]), tmp_path / "said.txt")
    assert done.code not in (0, 1), done.said()
    assert "Traceback" not in done.said()
    (small_disk / BALLAST).unlink()
    finish(partial(odcluster.resume, run, quiet=True), tmp_path / "said.txt")
    wrong = compare(run, references("odc"))
    record("disk full while results are written", not wrong)
    assert not wrong


@pytest.mark.faults
def test_evaluation_on_a_full_disk(small_disk, images, tmp_path):
    folder = tmp_path / "data"
    for label in ("a", "b"):
        shutil.copytree(images, folder / label)
    out = small_disk / "out"
    judge = partial(evaluate, "smallconv", untrained=True, task="knn", data=str(folder), out=str(out), workers=0)
    fill(small_disk, leave=300_000)
    done = child(judge, tmp_path / "said.txt")
    assert done.code in (2, 3), done.said()
    assert "Traceback" not in done.said()
    (small_disk / BALLAST).unlink()
    finish(judge, tmp_path / "said.txt")
    record("disk full while evaluating", True)


@pytest.mark.parametrize("limit", [2_000, pytest.param(60_000, marks=pytest.mark.faults)])
def test_files_may_not_grow(limit, images, options, references, tmp_path):
    """RLIMIT_FSIZE, as quotas of batch systems: every larger write fails."""
    run = tmp_path / "run"
    train = partial(odcluster.train, images, out=run, **options("odc"))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = child(train, tmp_path / "said.txt", save_seldom, partial(at_step, 4, limited))
    assert done.code == 3, done.said()
    assert valid(run) == {"step-00000003"}
    finish(partial(odcluster.resume, run, quiet=True), tmp_path / "said.txt")
    wrong = compare(run, references("odc"))
    record("file size limit", not wrong)
    assert not wrong


def test_metrics_and_log_on_a_device_that_is_always_full(images, options, references, tmp_path):
    """/dev/full fails every write, and cannot be flushed either."""
    run = tmp_path / "run"
    train = partial(odcluster.train, images, out=run, **options("odc"))
    child(train, tmp_path / "said.txt", save_seldom, partial(at_step, 4, lambda: os.kill(os.getpid(), 9)))
    metrics = (run / "metrics.jsonl").read_bytes()
    for name in ("metrics.jsonl", "train.log"):
        (run / name).unlink()
        (run / name).symlink_to("/dev/full")
    done = child(partial(odcluster.resume, run), tmp_path / "said.txt")
    assert done.code == 3, done.said()
    assert "could not be written (No space left on device)" in done.said()
    assert "step-00000003" in valid(run)
    for name in ("metrics.jsonl", "train.log"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_bytes(metrics)
    finish(partial(odcluster.resume, run, quiet=True), tmp_path / "said.txt")
    wrong = compare(run, references("odc"))
    record("/dev/full", not wrong)
    assert not wrong


# Read-only ------------------------------------------------------------


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)


def test_a_disk_that_becomes_read_only(small_disk, images, options, references, tmp_path):
    """As file systems do after an error: the run ends with what it has, and goes on when the disk is well again."""
    run = small_disk / "run"
    train = partial(odcluster.train, images, out=run, **options("odc"))
    # A file system with an open file is not made read-only; its checkpoints folder is, by a mount over itself.
    checkpoints = run / "checkpoints"

    def protect() -> None:
        subprocess.run(["mount", "--bind", str(checkpoints), str(checkpoints)], check=True)
        remount(checkpoints, "ro,bind")

    try:
        done = child(train, tmp_path / "said.txt", save_seldom, partial(at_step, 5, protect))
        assert done.code == 3, done.said()
        assert "Read-only file system" in done.said()
        assert valid(run) == {"step-00000003"}
    finally:
        subprocess.run(["umount", str(checkpoints)], check=True)
    finish(partial(odcluster.resume, run, quiet=True), tmp_path / "said.txt")
    wrong = compare(run, references("odc"))
    record("read-only while training", not wrong)
    assert not wrong


def test_a_run_that_may_not_be_written_is_refused_in_a_sentence(images, options, tmp_path):
    """As another user, because root may write everywhere."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(images, Path(folder) / "images")
        train = partial(odcluster.train, Path(folder) / "images", **SHORT)
        finish(partial(train, out=Path(folder) / "run", quiet=True), tmp_path / "said.txt")

        def nobody() -> None:
            os.setgid(65534)
            os.setuid(65534)

        for work in (partial(train, out=Path(folder) / "other"), partial(odcluster.resume, Path(folder) / "run")):
            done = child(work, tmp_path / "said.txt", nobody)
            assert done.code in (2, 3), done.said()
            assert "Permission denied" in done.said()
            assert "Traceback" not in done.said()
            record("no permission", True)
        assert not (Path(folder) / "other").exists()


# Names ------------------------------------------------------------


NAMES = [
    "new\nline ünï-日本-🦊",
    "with spaces",
    "quo'te\"s",
    "-rf",
    "100%d {x} [bold]",
    "a" * 230,
    "trailing ",
    "#;&|$(x)",
]


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.faults) for name in NAMES[1:])])
def test_odd_names(name, images, tmp_path):
    """Of the run and of the images: killed, resumed, complete, nothing beside it."""
    data, run = tmp_path / f"{name[:100]} images", tmp_path / name
    data.symlink_to(images)
    options = {**SHORT, "max_steps": 6, "epochs": 1, "fine_share": 0.0}
    train = partial(odcluster.train, data, out=run, quiet=True, **options)
    child(train, tmp_path / "said.txt", save_seldom, partial(at_step, 4, lambda: os.kill(os.getpid(), 9)))
    finish(partial(odcluster.resume, run), tmp_path / "said.txt")
    assert (run / "clusters.csv").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([data.name, name, "said.txt"])
    record("odd path names", True)


def test_names_that_are_too_long_are_refused_in_a_sentence(images, tmp_path):
    for run in (tmp_path / ("a" * 300), Path(os.path.join(tmp_path, *["b" * 200] * 25))):
        done = child(partial(main, ["train", str(images), "--out", str(run)]), tmp_path / "said.txt")
        assert done.code in (2, 3), done.said()
        assert "File name too long" in done.said()


# Damage ------------------------------------------------------------


def flipped(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "truncated": lambda data, chance: data[: chance.randrange(1, len(data))],
    "empty": lambda data, chance: b"",
    "bit flipped": flipped,
    "zeros": lambda data, chance: bytes(len(data)),
    "missing": lambda data, chance: None,
}
FILES = ["model.safetensors", "memory.safetensors", "optimizer.safetensors", "state.json"]


def damage(file: Path, how: str, chance: random.Random) -> None:
    data = DAMAGES[how](file.read_bytes(), chance)
    file.unlink()
    if data is not None:
        file.write_bytes(data)


@pytest.fixture(scope="module")
def stopped_run(images, options, tmp_path_factory) -> Path:
    """A run with checkpoints of steps 3, 6 and 9, killed before its end."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    train = partial(odcluster.train, images, out=run, quiet=True, **{**options("odc"), "keep_checkpoints": 3})
    child(train, run.parent / "said.txt", save_seldom, partial(at_step, 10, lambda: os.kill(os.getpid(), 9)))
    assert valid(run) == {"step-00000003", "step-00000006", "step-00000009"}
    return run


def check_damage(files: list[tuple[str, str, str]], stopped_run: Path, reference: Path, folder: Path) -> None:
    """Damage (step, file, how) in a copy, resume, compare: the files are named, the others were not touched."""
    run, chance = folder / "run", random.Random(str(files))
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(stopped_run, run)
    for step, name, how in files:
        damage(run / "checkpoints" / step / name, how, chance)
    (folder / "said.txt").unlink(missing_ok=True)
    said = finish(partial(odcluster.resume, run), folder / "said.txt")
    for step, name, _ in files:
        assert f"{step}/{name}" in said.replace("\n", ""), (files, said)
    assert "going back to the checkpoint before it" in said
    wrong = compare(run, reference)
    record("damaged checkpoint", not wrong)
    assert not wrong, files
    assert len(valid(run)) >= 2


@pytest.mark.parametrize("how", ["truncated", "bit flipped"])
def test_a_damaged_checkpoint(how, stopped_run, references, tmp_path):
    check_damage([("step-00000009", "memory.safetensors", how)], stopped_run, references("odc"), tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("name", FILES)
def test_every_file_damaged_in_every_way(name, stopped_run, references, tmp_path):
    for how in DAMAGES:
        check_damage([("step-00000009", name, how)], stopped_run, references("odc"), tmp_path)
    both = [("step-00000009", name, "bit flipped"), ("step-00000006", name, "truncated")]
    check_damage(both, stopped_run, references("odc"), tmp_path)


def test_nothing_valid_is_left(stopped_run, tmp_path):
    """Refused in a sentence, and nothing is deleted or trained over."""
    run = tmp_path / "run"
    shutil.copytree(stopped_run, run)
    for path in checkpoint.candidates(run / "checkpoints"):
        damage(path / "model.safetensors", "bit flipped", random.Random(path.name))
    before = sorted((path, path.stat().st_size) for path in run.rglob("*.safetensors"))
    done = child(partial(odcluster.resume, run), tmp_path / "said.txt")
    assert done.code == 3, done.said()
    assert "no checkpoint in" in done.said()
    assert sorted((path, path.stat().st_size) for path in run.rglob("*.safetensors")) == before
    record("all checkpoints damaged: refused", True)


# Two processes ------------------------------------------------------------


def test_two_processes_on_one_run(images, options, references, tmp_path):
    """The second is refused while the first lives, by its number and place; killed, the first leaves no lock."""
    run = tmp_path / "run"
    waiting = tmp_path / "waiting"

    def wait() -> None:
        waiting.write_text("here")
        time.sleep(60)

    def slow() -> object:
        save_seldom()
        at_step(4, wait)
        return odcluster.train(images, out=run, quiet=True, **options("odc"))

    first = Child(slow, tmp_path / "first.txt")
    first.wait_until(waiting.exists)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    second = child(partial(odcluster.resume, run), tmp_path / "second.txt")
    assert second.code == 3
    assert f'"pid": {first.pid}' in second.said()
    assert "in use by another process" in second.said()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before
    first.send(9)
    first.wait()
    finish(partial(odcluster.resume, run, quiet=True), tmp_path / "second.txt")
    wrong = compare(run, references("odc"))
    record("two processes on one run", not wrong)
    assert not wrong
