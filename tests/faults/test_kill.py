"""kill -9 at every place one can name, then resume: the same bits and the same metrics as never having been killed.

Steps, instants of a save, everything that reports progress (extraction, k-means, calibration, training, evaluation,
report), and every single operation on the file system.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from figures import record
from forking import Child, finish, survivors
from harness import METHODS, at_point, at_poll, at_step, at_write, compare, save_seldom

import odcluster
from odcluster.gallery_report import report
from odcluster.judge import evaluate

POINTS = [
    "before mkdir",
    *(f"{when} {name}" for name in ("model", "memory", "optimizer") for when in ("before fsync of", "after")),
    "before state.json",
    "before rename",
    "between renames",
    "after rename",
    "during prune",
]
Fault = Callable[[], object]


def strike(work: Callable[[], object], faults: Iterable[Fault], output: Path) -> int:
    """Do the work in a child with these faults in it; returns its exit code."""

    def faulty() -> object:
        for fault in faults:
            fault()
        return work()

    return Child(faulty, output).wait()


class Sweep:
    """One fault after the other, each on a new run that is then resumed; what was lost is collected."""

    def __init__(self, kind: str, images: Path, options: dict, reference: Path, folder: Path) -> None:
        self.kind, self.images, self.options, self.reference, self.folder = kind, images, options, reference, folder
        self.tried = 0
        self.lost: list[str] = []

    def kill(self, name: str, *faults: Fault, again: Iterable[Fault] = ()) -> bool:
        """Train with the faults, then resume with each of `again`, then undisturbed. False: no fault was met."""
        run, output = self.folder / f"run{self.tried}", self.folder / "said.txt"
        train = partial(odcluster.train, self.images, out=run, quiet=True, **self.options)
        code = strike(train, [save_seldom, *faults], output)
        for fault in again:
            code = min(code, strike(partial(odcluster.resume, run, quiet=True), [save_seldom, fault], output))
        if code == 0:
            shutil.rmtree(run)
            return False
        self.tried += 1
        try:
            assert code == -signal.SIGKILL, f"it ended with code {code}"
            # Killed before there was a run directory: the same command again.
            finish(partial(odcluster.resume, run, quiet=True) if run.exists() else train, output)
            wrong = compare(run, self.reference)
        except AssertionError as error:
            wrong = str(error)
        if wrong:
            self.lost.append(f"{name}: {wrong}")
        record(self.kind, not wrong)
        shutil.rmtree(run, ignore_errors=True)
        output.unlink()
        return True

    def check(self, least: int) -> None:
        assert self.tried >= least
        assert self.lost == []


@pytest.fixture
def sweep(images, options, references, tmp_path):
    return lambda kind, method: Sweep(kind, images, options(method), references(method), tmp_path)


# A part for every day ------------------------------------------------------------


@pytest.mark.parametrize("method", ["odc", pytest.param("odc on a frozen backbone", marks=pytest.mark.faults)])
def test_killed_here_and_there(method, sweep):
    """First batch, middle and end of an epoch, last batch; in a save; twice; while resuming; before any step."""
    kills = sweep("some of all", method)
    for number in (0, 5, 6, 11):
        kills.kill(f"step {number}", partial(at_step, number))
    for point, number in (("after model", 1), ("before rename", 2), ("during prune", 1)):
        kills.kill(point, partial(at_point, point, number))
    kills.kill(
        "twice, and in a save", partial(at_step, 4), again=[partial(at_step, 7), partial(at_point, POINTS[9], 1)]
    )
    kills.kill("in an extraction", partial(at_poll, 3))
    kills.check(least=9)


# Sweeps ------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("method", METHODS)
def test_every_step(method, sweep):
    kills = sweep(f"kill before every step: {method}", method)
    for number in range(12):
        kills.kill(f"step {number}", partial(at_step, number))
    kills.check(least=12)


@pytest.mark.faults
@pytest.mark.parametrize("method", ["odc", "deepcluster"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_every_point_of_a_save(method, number, sweep):
    """The first save, one in the middle, and the last one, which says that the run is complete."""
    kills = sweep("kill inside a save", method)
    for point in POINTS:
        kills.kill(f"{point}, save {number}", partial(at_point, point, number))
    kills.check(least=9)


@pytest.mark.faults
@pytest.mark.parametrize("method", ["odc", "odc on a frozen backbone", "deepcluster"])
def test_everything_that_takes_long(method, sweep):
    """Calibration, extraction, k-means, each step and the last look at all images: wherever a stop could be heard."""
    kills = sweep("kill during extraction, k-means, calibration, final pass", method)
    number = 1
    while kills.kill(f"poll {number}", partial(at_poll, number)):
        number += 1
    kills.check(least=20)


@pytest.mark.faults
def test_every_operation_on_the_file_system(sweep):
    """From the making of the run directory to the last picture."""
    kills = sweep("kill before every operation on the file system", "odc")
    number = 1
    while kills.kill(f"operation {number}", partial(at_write, number)):
        number += 1
    kills.check(least=40)


@pytest.mark.faults
@pytest.mark.parametrize("method", METHODS)
def test_killed_while_resuming_and_again(method, sweep):
    kills = sweep("kill twice or more, also while resuming", method)
    for first, second in ((2, 2), (5, 6), (6, 11), (0, 1)):
        kills.kill(f"{first}, {second}", partial(at_step, first), again=[partial(at_step, second)])
    resuming = [partial(at_write, number) for number in (1, 2, 4, 7)]
    kills.kill("at its first operations", partial(at_step, 7), again=resuming)
    kills.kill("in its looks at all images", partial(at_poll, 4), again=[partial(at_poll, 2), partial(at_poll, 7)])
    kills.check(least=6)


@pytest.mark.faults
def test_at_random_times(sweep, images, options, references, tmp_path):
    """Fifty kills at times that nobody chose, with loader processes, which must end by themselves."""
    chance, output = random.Random(0), tmp_path / "said.txt"
    reference = references("odc")
    tried, lost, run = 0, [], tmp_path / "run"
    began = time.monotonic()
    finish(
        partial(odcluster.train, images, out=tmp_path / "timed", quiet=True, **{**options("odc"), "workers": 2}), output
    )
    usual = time.monotonic() - began
    while tried < 50:
        train = partial(odcluster.train, images, out=run, quiet=True, **{**options("odc"), "workers": 2})
        child = Child(partial(odcluster.resume, run, quiet=True) if run.exists() else train, output)
        time.sleep(chance.uniform(0, usual))
        child.send(signal.SIGKILL)
        code = child.wait()
        stayed = survivors(child.pid)
        tried += 1
        wrong = f"{stayed} processes stayed" if stayed else "" if code in (0, -9) else f"code {code}: {child.said()}"
        if code == 0 and not wrong:
            wrong = compare(run, reference)
            shutil.rmtree(run)
        lost += [wrong] if wrong else []
        record("kill at a random time", not wrong)
    assert lost == []


# Evaluation and report ------------------------------------------------------------


def scores(folder: Path) -> object:
    """A record without its times."""
    (file,) = folder.glob("*.json")
    found = json.loads(file.read_text())
    return [found[key] for key in ("scores", "details", "data", "weights")]


EVALUATIONS = {
    "knn": {"task": "knn"},
    "fast linear probe": {"task": "linear"},
    "published linear probe": {"task": "linear", "variant": "published", "epochs": 3},
}


@pytest.mark.faults
@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation(name, tmp_path):
    """Killed where something long looks up (less and less often), before every operation on the file system; again."""
    from tiny_runs import make_images

    data = tmp_path / "data"
    for number, label in enumerate(("a", "b", "c")):
        make_images(data / label, 20, seed=number)

    def judge(out: Path) -> Callable[[], object]:
        options = {**EVALUATIONS[name], "untrained": True, "data": str(data), "out": str(out), "workers": 0}
        return partial(evaluate, "smallconv", quiet=True, **options)

    output = tmp_path / "said.txt"
    finish(judge(tmp_path / "reference"), output)
    expected, lost, tried = scores(tmp_path / "reference"), [], 0
    for fault in (at_poll, at_write):
        number = 1
        while strike(judge(tmp_path / f"{fault.__name__}{number}"), [partial(fault, number)], output) != 0:
            out = tmp_path / f"{fault.__name__}{number}"
            finish(judge(out), output)
            hidden = [path.name for path in out.rglob(".*") if path.name.endswith(".tmp") or "unfinished" in path.name]
            wrong = scores(out) != expected or hidden
            lost += [f"{fault.__name__} {number}: {hidden}"] if wrong else []
            record("kill during evaluation", not wrong)
            tried, number = tried + 1, number + (1 if fault is at_write else 1 + number // 6)  # hundreds of polls
    assert tried >= 10
    assert lost == []


@pytest.mark.faults
def test_report(images, references, tmp_path):
    """The report is there whole or not at all, the run's checkpoint is untouched, and the same command completes it."""
    run, output = tmp_path / "run", tmp_path / "said.txt"
    shutil.copytree(references("odc"), run)
    before = compare(run, references("odc"))
    lost, tried = [], 0
    for fault in (at_poll, at_write):
        number = 1
        while strike(partial(report, run, quiet=True), [partial(fault, number)], output) != 0:
            assert not (run / "report.html").exists() or (run / "report.html").read_text().rstrip().endswith("</html>")
            tried, number = tried + 1, number + 1
            finish(partial(report, run, quiet=True), output)
            whole = (run / "report.html").read_text().rstrip().endswith("</html>")
            well = whole and compare(run, references("odc")) == before
            lost += [] if well else [f"{fault.__name__} {number}"]
            record("kill during report", well)
            (run / "report.html").unlink()
    assert tried >= 4
    assert lost == []
