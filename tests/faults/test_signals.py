"""SIGTERM, SIGINT, SIGUSR1 in every phase: saved, exit code 75, soon; a second Ctrl-C at once; handlers given back."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from figures import record
from forking import Child, finish, survivors
from harness import at_poll, at_step, at_write, compare, save_seldom

import odcluster
from odcluster.errors import Interrupted
from odcluster.gallery_report import report
from odcluster.judge import evaluate
from odcluster.training import checkpoint
from odcluster.training.devices import StopFlag

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
BEFORE_IT_LISTENS = (130, -signal.SIGTERM, -signal.SIGUSR1)
"""Before the training listens, signals end it as they end any program: SIGINT with 130."""
SOON = 20.0
"""Seconds; a step and a checkpoint take milliseconds here, but the machine may be busy with other tests."""


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def stopped(work: Callable[[], object], fault: Callable[[], object], output: Path) -> int:
    def faulty() -> object:
        save_seldom()
        fault()
        return work()

    return Child(faulty, output).wait(SOON + 60)


@pytest.fixture
def training(images, options, references, tmp_path):
    """Train with a fault in a new run directory, expect 75, resume, compare; returns the names of the checkpoints there
    were, newest first, or None where the run just ended.
    """

    def go(method: str, fault: Callable[[], object], kind: str) -> list[str] | None:
        run, output = tmp_path / "run", tmp_path / "said.txt"
        shutil.rmtree(run, ignore_errors=True)
        output.unlink(missing_ok=True)
        code = stopped(partial(odcluster.train, images, out=run, quiet=True, **options(method)), fault, output)
        if code == 0:
            return None
        if code in BEFORE_IT_LISTENS and not (run / "checkpoints").exists():
            return None
        said = output.read_text()
        assert code == 75, f"code {code}: {said}"
        assert "odcluster resume" in said
        assert "Traceback" not in said
        names = [path.name for path in checkpoint.candidates(run / "checkpoints")]
        finish(partial(odcluster.resume, run, quiet=True), output)
        wrong = compare(run, references(method))
        record(kind, not wrong)
        assert not wrong
        return names

    return go


@pytest.mark.parametrize("number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.faults) for n in STOPS[1:])])
def test_a_signal_in_a_step_lets_it_end_and_saves(number, training):
    """The handler only sets a flag: the step in which the signal comes is done, saved, and not done again."""
    assert training("odc", partial(at_step, 4, send(number)), "signal in a step")[0] == "step-00000005"


@pytest.mark.parametrize("poll", [4, *(pytest.param(n, marks=pytest.mark.faults) for n in (1, 9))])
def test_a_signal_before_the_first_step(poll, training):
    """Reading images, calibration, extraction, k-means: what was before them is saved, or nothing is needed."""
    names = training("odc", partial(at_poll, poll, send(signal.SIGTERM)), "signal in extraction or k-means")
    assert names in ([], ["step-00000000"])


@pytest.mark.faults
@pytest.mark.parametrize("method", ["odc", "odc on a frozen backbone", "deepcluster", "rotation"])
def test_wherever_a_stop_can_be_heard(method, training):
    poll = 1
    kind = "signal in every phase of training"
    while training(method, partial(at_poll, poll, send(STOPS[poll % 3])), kind) is not None:
        poll += 1
    assert poll > 12


@pytest.mark.faults
def test_in_the_middle_of_writing(training):
    """A signal before each operation on the file system; after the last poll the run just ends."""
    met = [training("odc", partial(at_write, n, send(STOPS[n % 3])), "signal while writing") for n in range(4, 60, 2)]
    assert sum(names is not None for names in met) > 15


@pytest.mark.faults
def test_at_random_times_and_how_soon(images, options, references, tmp_path):
    """Thirty signals from outside, to the process or to its whole group, with loader processes."""
    chance, run, output = random.Random(1), tmp_path / "run", tmp_path / "said.txt"
    train = partial(odcluster.train, images, out=run, quiet=True, **{**options("odc"), "workers": 2})
    tried, slowest = 0, 0.0
    while tried < 30:
        child = Child(partial(odcluster.resume, run, quiet=True) if run.exists() else train, output)
        time.sleep(chance.uniform(0.0, 2.0))
        asked, number = time.monotonic(), chance.choice(STOPS)
        if child.poll() is None:
            os.killpg(child.pid, number) if chance.random() < 0.5 else child.send(number)
        code = child.wait(SOON)
        slowest = max(slowest, time.monotonic() - asked)
        assert survivors(child.pid) == 0
        tried += 1
        if code == 0:
            wrong = compare(run, references("odc"))
            record("signal at a random time", not wrong)
            assert not wrong
            shutil.rmtree(run)
        else:
            assert code in (75, *BEFORE_IT_LISTENS), child.said()
            record("signal at a random time", True)
    assert slowest < SOON


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.faults), 2])
def test_a_second_interrupt_is_immediate(workers, images, options, references, tmp_path):
    """Even in a step that takes for ever; what was saved before is intact."""
    run, output, reached = tmp_path / "run", tmp_path / "said.txt", tmp_path / "reached"

    def stuck() -> None:
        reached.write_text("here")
        time.sleep(60)

    def faulty() -> object:
        at_step(7, stuck)
        return odcluster.train(images, out=run, quiet=True, **{**options("odc"), "workers": workers})

    child = Child(faulty, output)
    child.wait_until(reached.exists)
    child.send(signal.SIGINT)
    time.sleep(0.3)
    assert child.poll() is None, "the first one waits for the end of the step"
    began = time.monotonic()
    child.send(signal.SIGINT)
    assert child.wait(SOON) == 130
    assert time.monotonic() - began < 5
    assert survivors(child.pid) == 0
    finish(partial(odcluster.resume, run, quiet=True), output)
    wrong = compare(run, references("odc"))
    record("second interrupt", not wrong)
    assert not wrong


@pytest.mark.parametrize("number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.faults) for n in STOPS[1:])])
def test_evaluation_and_report_stop_too(number, images, references, tmp_path):
    output, run = tmp_path / "said.txt", tmp_path / "run"
    shutil.copytree(references("odc"), run)
    folder = tmp_path / "data"
    for label in ("a", "b"):
        shutil.copytree(images, folder / label)
    judge = partial(
        evaluate, run, task="linear", data=str(folder), out=str(tmp_path / "out"), workers=0, quiet=True
    )  # fmt: skip
    for name, work, polls in (("evaluation", judge, (1, 3, 5)), ("report", partial(report, run, quiet=True), (1, 2))):
        for poll in polls:
            assert stopped(work, partial(at_poll, poll, send(number)), output) == 75, output.read_text()
            record(f"signal in {name}", True)
        finish(work, output)
    assert (run / "report.html").exists()
    assert not compare(run, references("odc"))


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOPS]


def test_handlers_are_given_back_after_a_run_and_after_a_stop(images, options, tmp_path, monkeypatch):
    before = handlers()
    odcluster.train(images, out=tmp_path / "run", quiet=True, **options("rotation"))
    assert handlers() == before
    polls = StopFlag.poll

    def stop(self):
        self.wanted = True
        polls(self)

    monkeypatch.setattr(StopFlag, "poll", stop)
    with pytest.raises(Interrupted):
        odcluster.train(images, out=tmp_path / "other", quiet=True, **options("rotation"))
    assert handlers() == before


def test_a_thread_can_train(images, options, references, tmp_path):
    """Where signals cannot be handled they are left alone, and the result is the same."""
    before, failed = handlers(), []

    def work() -> None:
        try:
            odcluster.train(images, out=tmp_path / "run", quiet=True, **{**options("odc"), "workers": 1})
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert handlers() == before
    assert not compare(tmp_path / "run", references("odc"))
