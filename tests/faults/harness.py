"""Real processes for real faults, quickly: a child is forked from a process that has imported torch already."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_runs import TINY, metrics_without_timings, state_hash

import odcluster.api  # everything a child needs is imported once, here
import odcluster.gallery_report
import odcluster.judge  # noqa: F401
from odcluster.errors import UserError
from odcluster.training import checkpoint
from odcluster.training.devices import StopFlag
from odcluster.training.trainer import Trainer

torch.set_num_threads(1)  # sums depend on the number of threads, and a forked child must not inherit a pool of them


class Child:
    """A forked process, in a process group of its own; what it says is in `output`."""

    def __init__(self, work: Callable[[], object], output: Path, temporary: Path | None = None) -> None:
        self.output = output
        self.code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(run(work, output, temporary))

    def poll(self) -> int | None:
        """The exit code as subprocess has it (negative: the signal), None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float = 120.0) -> int:
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise TimeoutError(f"still running after {seconds} s:\n{self.said()}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Until something has happened, while the process still runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.poll() is None, f"ended with {self.code} too early:\n{self.said()}"
            assert time.monotonic() < deadline, f"did not happen in {seconds} s:\n{self.said()}"
            time.sleep(0.002)

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def run(work: Callable[[], object], output: Path, temporary: Path | None) -> int:
    """In the child: do the work and return the code that the command line would exit with."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        if temporary is not None:
            temporary.mkdir(exist_ok=True)
            tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except UserError as error:
        print(f"odcluster: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        multiprocessing.util._exit_function()  # not atexit: the parent's temporary folders would go
        sys.stderr.flush()
    return code


def command(*arguments: str) -> Callable[[], object]:
    """The work of `odcluster ARGUMENTS`."""
    from odcluster.cli import main

    return lambda: main(list(arguments))


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                after_name = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(after_name[2]) == group and after_name[0] != "Z":
                found.append(int(entry))
    return found


def survivors(group: int, patience: float = 20.0) -> int:
    """Processes of an ended command that are still there after a while; they are ended then."""
    deadline = time.monotonic() + patience
    while (left := members(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


# Short runs, and where they are struck ------------------------------------------------------------

SHORT = {
    **TINY,
    "batch_size": 32,
    "epochs": 2,
    "max_steps": 12,
    "fine_share": 0.5,
    "fine_clusters": 12,
    "final_pass": True,
    "kmeans_iterations": 6,
    "calibration_batches": 2,
    "log_interval": 3,
    "checkpoint_minutes": 0.0,
}
PLAIN = {name: value for name, value in SHORT.items() if name not in ("fine_share", "fine_clusters", "final_pass")}
METHODS: dict[str, dict[str, Any]] = {
    "odc": SHORT,
    "odc of the paper": {**PLAIN, "recipe": "odc_resnet50_imagenet", "lr": 0.01},
    "odc on a frozen backbone": {
        **{name: value for name, value in SHORT.items() if name not in ("backbone", "image_size", "crop_size")},
        "weights": "trained first",
        "neighbours": 3,
        "cached_views": 2,
        "kmeans_restarts": 1,
    },
    "deepcluster": {**PLAIN, "method": "deepcluster"},
    "rotation": {**PLAIN, "method": "rotation"},
    "jigsaw": {**PLAIN, "method": "jigsaw", "permutations": 10},
    "colorization": {**PLAIN, "method": "colorization"},
}
"""Twelve steps of every method, two epochs of six: every phase there is, in about a second."""
EVERY = 3
"""A checkpoint is saved after every third step, so that a kill costs up to two steps that are done again."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def save_seldom() -> None:
    """In a child: checkpoints at every third step only, and at the end."""
    save = Trainer.save

    def seldom(self: Trainer, last: bool = False) -> None:
        if last or self.step % EVERY == 0:
            save(self, last)

    Trainer.save = seldom  # type: ignore[method-assign]


def at_step(number: int, strike: Callable[[], object] = die) -> None:
    """In a child: strike before the step of that number."""
    original = Trainer._train_step

    def step(self: Trainer, raw: Any, epoch: int) -> None:
        if self.step == number:
            strike()
        original(self, raw, epoch)

    Trainer._train_step = step  # type: ignore[method-assign]


def at_point(name: str, number: int, strike: Callable[[], object] = die) -> None:
    """In a child: strike when a save reaches the point of that name for the n-th time."""
    left = [number]

    def reached(point: str) -> None:
        left[0] -= point == name
        if point == name and left[0] == 0:
            strike()

    checkpoint.reached = reached


def at_poll(number: int, strike: Callable[[], object] = die) -> None:
    """In a child: strike at the n-th time that anything long says how far it is (and hears a wish to stop)."""
    left, poll = [number], StopFlag.poll

    def counted(self: StopFlag) -> None:
        left[0] -= 1
        if left[0] == 0:
            strike()
        poll(self)

    StopFlag.poll = counted  # type: ignore[method-assign]


WRITES = ("replace", "rename", "fsync", "unlink", "mkdir", "truncate", "ftruncate")


def at_write(number: int, strike: Callable[[], object] = die) -> None:
    """In a child: strike before the n-th operation on the file system."""
    left = [number]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                strike()
            return function(*arguments, **named)

        return wrapper

    for name in WRITES:
        setattr(os, name, counted(getattr(os, name)))


def finish(work: Callable[[], object], output: Path) -> str:
    """Do the work in a child, which must end well; returns what it said."""
    child = Child(work, output)
    assert child.wait() == 0, child.said()
    return child.said()


def compare(run: Path, reference: Path) -> str:
    """What differs from the undisturbed run, in words; empty if nothing does."""
    left = [path.name for path in run.rglob("*") if path.name.startswith(".")]
    checks = {
        "the state differs": state_hash(run) != state_hash(reference),
        "the metrics differ": metrics_without_timings(run) != metrics_without_timings(reference),
        f"{left} stayed behind": bool(left),
        "fewer than two checkpoints": len(checkpoint.candidates(run / "checkpoints")) < 2,
        "clusters.csv differs": contents(run / "clusters.csv") != contents(reference / "clusters.csv"),
        "the exported weights differ": contents(run / "backbone" / "model.safetensors")
        != contents(reference / "backbone" / "model.safetensors"),
    }
    return "; ".join(sentence for sentence, wrong in checks.items() if wrong)


def contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
