"""The verb `reproduce`: every study from images to its picture, resumed after a kill without doing anything twice."""

from __future__ import annotations

import json
import os
import re
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from forking import Child
from PIL import Image
from tiny_studies import make_study_data, shrunk

from odcluster import api, cli
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation import svm_tasks
from odcluster.reproduce import Turn, Worker, reproduce
from odcluster.studies.catalogue import STUDIES
from odcluster.studies.places import find_places
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag
from odcluster.training.run import FileLock
from odcluster.training.trainer import Trainer
from odcluster.verbs import Reproduction


@pytest.fixture(scope="session")
def study_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study_data(tmp_path_factory.mktemp("studies") / "data")


@pytest.fixture(scope="session")
def shared_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all studies, as a user would have it: they share trainings."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(autouse=True)
def small_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, study in STUDIES.items():
        monkeypatch.setitem(STUDIES, name, shrunk(study))
    monkeypatch.setattr(svm_tasks, "NUM_DRAWS", 1)  # of a few images per class; five are in tests/test_evaluate.py


def run(name: str, data: Path, out: Path, **options: object) -> dict:
    folder = reproduce(name, data=str(data), out=str(out), workers=0, quiet=True, **{"seeds": (0,), **options})
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_goes_from_images_to_its_picture(name, study_data, shared_out):
    record = run(name, study_data, shared_out)
    study = STUDIES[name]
    assert (record["study"], record["scale"], record["seeds"]) == (name, "small", [0])
    assert record["paper"] == study.paper
    assert record["minutes"] > 0
    assert record["versions"]["torch"]
    assert all(len(entry["fingerprint"]) == 64 for entry in record["data"].values())
    plan = study.plan("small", (0,))
    assert set(record["settings"]) == {training.name for training in plan.trainings}
    assert set(record["minutes of the parts"]) == {part.name for part in plan.parts()}
    for number in numbers(record["findings"]):
        assert np.isfinite(number)
    picture = Image.open(shared_out / name / f"{name}.png")
    assert picture.size[0] > 1000
    assert picture.size[1] > 400
    assert len(np.unique(np.asarray(picture.convert("L")))) > 20, "an empty picture"
    drawn = (shared_out / name / f"{name}.svg").read_text()
    assert drawn.count("<path") + drawn.count("<image") > 10
    assert "paper:" in drawn
    assert not list((shared_out / "parts").glob("*/features")), "gigabytes are not left behind"


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def test_findings_say_what_they_are_about(study_data, shared_out):
    stability = run("stability", study_data, shared_out)["findings"]
    odc, deepcluster = stability["runs"]["small-odc-base-s0"], stability["runs"]["small-deepcluster-base-s0"]
    assert all(0 <= value <= 1 for value in odc["change"]["value"])
    assert len(deepcluster["nmi with the epoch before"]) == 1  # two epochs have one before
    assert set(odc["scores"]) == {"linear, conv5", "20 neighbours"}
    sweep = run("small-clusters", study_data, shared_out)["findings"]
    assert sweep["values"] == [0, 5, 10, 20, 35, 49, 100, 160]
    assert all(len(per_seed) == 1 for per_seed in sweep["scores"]["linear, conv5"])
    assert sweep["in one pass"] == [100, 160]


def test_what_is_done_is_never_done_again(study_data, shared_out, monkeypatch):
    first = run("stability", study_data, shared_out)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a part that is done was begun again")

    monkeypatch.setattr(api, "start", refuse)
    monkeypatch.setattr(api, "resume", refuse)
    monkeypatch.setattr("odcluster.reproduce.evaluate", refuse)
    assert run("stability", study_data, shared_out) == first


def test_another_seed_adds_only_its_own_parts(study_data, tmp_path):
    run("reweighting", study_data, tmp_path)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("*.json")}
    both = run("reweighting", study_data, tmp_path, seeds=(0, 1))
    assert both["seeds"] == [0, 1]
    assert all((tmp_path / "parts" / name).stat().st_mtime_ns == time for name, time in times.items())
    assert {len(values) for row in both["findings"]["scores"].values() for values in row.values()} == {2}


def in_a_process(data: Path, out: Path, where: str) -> int:
    """`where` says what happens: "end PART", killed behind a part; "step PART", killed in its tenth step; "log", steps
    are written down.
    """
    kind, _, name = where.partition(" ")
    inside = [""]

    def wrapped(original):
        def work(self, part, path):
            inside[0] = part.name
            original(self, part, path)
            if kind == "end" and part.name == name:
                os.kill(os.getpid(), signal.SIGKILL)

        return work

    step = Trainer._train_step

    def killing(self, raw, epoch):
        if kind == "step" and inside[0] == name and self.step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "log":
            with (out / "steps.txt").open("a") as file:
                file.write(f"{inside[0]} {self.step}\n")
        step(self, raw, epoch)

    def work() -> None:
        Worker.train, Worker.judge = wrapped(Worker.train), wrapped(Worker.judge)
        Trainer._train_step = killing
        run("reweighting", data, out)

    child = Child(work, out.parent / "said.txt")
    assert child.wait() in (0, -signal.SIGKILL), child.said()
    return child.code


def test_killed_in_and_between_parts_it_goes_on_and_ends_the_same(study_data, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    first, second = "small-deepcluster-base-s0", "small-deepcluster-weights-s0"
    for where in (f"end {first}", f"step {second}", f"end {second}-linear-cifar10-conv5"):
        assert in_a_process(study_data, broken, where) == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in (broken / "parts" / first).rglob("*")}
    assert in_a_process(study_data, broken, "log") == 0
    assert {path.name: path.stat().st_mtime_ns for path in (broken / "parts" / first).rglob("*")} == before
    assert not (broken / "steps.txt").exists(), "both trainings were done: no step is left"
    assert in_a_process(study_data, whole, "log") == 0
    assert (whole / "steps.txt").read_text().count("\n") == 2 * 2 * (120 // 16 + 1)
    results = [json.loads((out / "reweighting" / "results.json").read_text()) for out in (whole, broken)]
    assert results[0]["findings"] == results[1]["findings"]


def test_a_wish_to_stop_is_obeyed_and_says_how_to_go_on(study_data, tmp_path, monkeypatch):
    polls = [20]

    def poll(self: StopFlag) -> None:
        polls[0] -= 1
        if polls[0] < 0:
            raise Interrupted("stopped as asked")

    monkeypatch.setattr(StopFlag, "poll", poll)
    with pytest.raises(Interrupted, match="the same command goes on") as caught:
        run("reweighting", study_data, tmp_path)
    assert caught.value.exit_code == 75
    polls[0] = 10**9
    assert run("reweighting", study_data, tmp_path)["findings"]["scores"]


def test_a_part_of_other_settings_is_refused(study_data, tmp_path):
    run("reweighting", study_data, tmp_path)
    record = tmp_path / "parts" / "small-deepcluster-base-s0.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "key": "0" * 64}))
    with pytest.raises(DataError, match=r"other settings or images.*--out"):
        run("reweighting", study_data, tmp_path)


def test_a_failing_part_is_named_with_what_to_do(study_data, tmp_path, monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise DataError("the disk is on fire")

    monkeypatch.setattr(api, "start", fail)
    with pytest.raises(DataError, match=r"part small-deepcluster-base-s0 failed: the disk is on fire .*repeat"):
        run("reweighting", study_data, tmp_path)


@pytest.mark.parametrize(
    ("code", "words", "says"),
    [
        (2, ["stabilty"], "did you mean 'stability'"),
        (2, ["stability"], "--cifar10 FOLDER"),
        (2, ["table-voc", "--scale", "paper", "--imagenet", "{data}"], "--voc FOLDER"),
        (2, ["table-linear", "--scale", "paper"], "--imagenet FOLDER and --places FOLDER"),
        (3, ["stability", "--data", "{tmp}"], "has no cifar10/"),
        (3, ["stability", "--cifar10", "{tmp}/nowhere"], "there is nothing at"),
        (2, ["stability", "--seeds", "-1", "--data", "{data}"], "whole numbers from 0"),
        (3, ["clusters", "--tiny-imagenet", "{tmp}"], "has no images"),
    ],
)
def test_mistakes_get_one_sentence(code, words, says, capsys, study_data, tmp_path):
    filled = [word.format(tmp=tmp_path, data=study_data) for word in words]
    with pytest.raises(SystemExit) as ended:
        cli.main(["reproduce", *filled, "--out", str(tmp_path / "out")])
    errors = capsys.readouterr().err
    assert ended.value.code == code, errors
    assert says in errors.strip().splitlines()[-1]
    assert "Traceback" not in errors


def test_several_processes_share_the_work_and_do_nothing_twice(study_data, tmp_path):
    """Three beside each other, one of them killed in the middle of a part, which another takes over."""
    out = tmp_path / "shared"

    def work() -> None:
        train, judge = Worker.train, Worker.judge

        def noted(original):
            def do(self, part, path):
                (tmp_path / f"begun-{os.getpid()}").touch()
                until = time.monotonic() + 60  # each holds a part until the other has one too
                while len(list(tmp_path.glob("begun-*"))) < 2 and time.monotonic() < until:
                    time.sleep(0.05)
                original(self, part, path)
                with (tmp_path / "done.txt").open("a") as file:  # one write, so lines stay whole
                    file.write(f"{os.getpid()} {part.name}\n")

            return do

        Worker.train, Worker.judge = noted(train), noted(judge)
        run("reweighting", study_data, out, seeds=(0, 1))

    def die() -> None:
        def kill(self, raw, epoch):
            os.kill(os.getpid(), signal.SIGKILL)

        Trainer._train_step = kill
        run("reweighting", study_data, out, seeds=(0, 1))

    dying = Child(die, tmp_path / "dying.txt")
    both = [Child(work, tmp_path / f"said{i}.txt") for i in range(2)]
    assert dying.wait() == -signal.SIGKILL
    for child in both:
        assert child.wait() == 0, child.said()
    lines = [line.split() for line in (tmp_path / "done.txt").read_text().splitlines()]
    parts = [part.name for part in STUDIES["reweighting"].plan("small", (0, 1)).parts()]
    assert sorted(name for _, name in lines) == sorted(parts)
    assert len({pid for pid, _ in lines}) == 2, "one process did it all"
    shared = json.loads((out / "reweighting" / "results.json").read_text())
    alone = run("reweighting", study_data, tmp_path / "alone", seeds=(0, 1))
    assert shared["findings"] == alone["findings"]


def test_a_part_that_another_process_is_at_is_waited_for(study_data, tmp_path):
    """Also at the end, when nothing else is left; a wish to stop is heard meanwhile."""
    part = "small-deepcluster-base-s0"

    def hold() -> None:
        with FileLock(tmp_path / "locks" / part):
            print("held", flush=True)
            time.sleep(60)

    (tmp_path / "locks").mkdir()
    holding = Child(hold, tmp_path / "holding.txt")
    try:
        holding.wait_until(lambda: "held" in holding.said())
        waiting = Child(lambda: reproduce_loudly(study_data, tmp_path), tmp_path / "said.txt")
        waiting.wait_until(lambda: "waiting for other processes; parts left: 3," in waiting.said())
        assert part in waiting.said()
        waiting.send(signal.SIGTERM)
        assert waiting.wait() == 75
    finally:
        holding.end()


def reproduce_loudly(data: Path, out: Path) -> None:
    reproduce("reweighting", data=str(data), out=str(out), workers=0, seeds=(0,))


def test_a_run_that_is_trained_by_something_else_is_no_reason_to_wait(study_data, tmp_path):
    """Processes of the study are waited for; a stranger in the folder of a part may never end."""
    out, part = tmp_path / "out", "small-deepcluster-base-s0"
    assert in_a_process(study_data, out, f"step {part}") == -signal.SIGKILL

    def hold() -> None:
        with FileLock(out / "parts" / part / "lock"):
            print("held", flush=True)
            time.sleep(60)

    holding = Child(hold, tmp_path / "holding.txt")
    try:
        holding.wait_until(lambda: "held" in holding.said())
        with pytest.raises(DataError, match=rf"part {part} failed: .* in use by another process .*{holding.pid}"):
            run("reweighting", study_data, out)
    finally:
        holding.end()


def test_turns_are_taken(tmp_path):
    (tmp_path / "locks").mkdir()

    def hold() -> None:
        with FileLock(tmp_path / "locks" / "turn"):
            print("held", flush=True)
            time.sleep(1)

    def wait() -> None:
        with Turn(tmp_path, Console()):
            print("my turn", flush=True)

    holding = Child(hold, tmp_path / "holding.txt")
    holding.wait_until(lambda: "held" in holding.said())
    waiting = Child(wait, tmp_path / "said.txt")
    waiting.wait_until(lambda: "waiting for another process" in waiting.said())
    assert "my turn" not in waiting.said()
    assert (holding.wait(), waiting.wait()) == (0, 0)
    assert "my turn" in waiting.said()


def test_list_and_dry_run_teach_without_any_data(capsys):
    for words in (["--list"], ["update-interval", "--dry-run"], ["table-linear", "--scale", "paper", "--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["reproduce", *words])
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in STUDIES)
    assert "update_interval 100" in said
    assert "days on several GPUs" in said
    assert not Path("reproductions").exists()


def test_places_are_found_in_every_form(study_data, tmp_path):
    found = find_places(["cifar10", "tiny-imagenet", "voc"], Reproduction(data=str(study_data)), tmp_path)
    assert os.path.basename(found["cifar10"].train) == "train_png.npz"
    assert os.path.basename(found["tiny-imagenet"].test or "") == "val_png.npz"
    folder = tmp_path / "archived"
    folder.mkdir()
    with tarfile.open(folder / "VOC2007.tar.gz", "w:gz") as archive:
        archive.add(study_data / "voc2007" / "VOC2007", "VOC2007")
    for given in (folder, folder / "VOC2007.tar.gz"):
        place = find_places(["voc"], Reproduction(voc=str(given)), tmp_path / "out")["voc"]
        assert (Path(place.train) / "VOC2007" / "JPEGImages").is_dir()
    (tmp_path / "broken.tar").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be unpacked"):
        find_places(["voc"], Reproduction(voc=str(tmp_path / "broken.tar")), tmp_path / "other")


def test_where_folders_lie_is_nobodys_business(study_data, shared_out, monkeypatch):
    words = ["reproduce", "stability", "--data", str(study_data), "--out", str(shared_out), "--seeds", "0"]
    with pytest.raises(SystemExit):
        cli.main([*words, "--workers", "0"])
    text = (shared_out / "stability" / "results.json").read_text()
    names = f"--data {study_data.name} --out {shared_out.name}"
    assert json.loads(text)["command"] == f"odcluster reproduce stability {names} --seeds 0 --workers 0"
    assert not re.search(re.escape(str(study_data)), text)


def test_scale_is_checked_from_python_too():
    with pytest.raises(UserError, match="small or paper"):
        reproduce("stability", scale="tiny")
