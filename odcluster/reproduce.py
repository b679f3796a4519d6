"""The verb `reproduce`: carry out the plan of a study, part by part, then write its numbers and its picture.

    OUT/parts/NAME/       a run, or the results of one judgement;  OUT/parts/NAME.json  whether it is done, and how long
    OUT/subsets/          which images were chosen, where not all are used
    OUT/locks/            held by the processes that work here; may be deleted when none does
    OUT/STUDY/            results.json and the picture

Promises: a part that is done is never done again, also not by another study in the same OUT; a study that was stopped
or killed goes on with the same command, inside the part where it was; a part made with other settings is refused before
anything is done, not mixed in. Several processes may be given the same command, or other studies in the same OUT: each
takes parts that none of the others is at, and what a killed one leaves behind is taken over.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from odcluster import api
from odcluster.config import Config, changed, flat
from odcluster.config_file import fingerprint
from odcluster.data.sources import Source, open_source
from odcluster.data.subsets import write_subset
from odcluster.errors import DataError, Interrupted, InUse, UserError
from odcluster.evaluation.results import Result, json_text, library_versions, read_results
from odcluster.judge import evaluate
from odcluster.recipes import recipe
from odcluster.studies.catalogue import STUDIES, effort
from odcluster.studies.places import Place, find_places
from odcluster.studies.plan import DataName, Found, Images, Judgement, Plan, Study, Trained, Training
from odcluster.training.console import Console, duration
from odcluster.training.devices import StopFlag
from odcluster.training.metrics import read_metrics
from odcluster.training.run import FileLock, write_atomically
from odcluster.verbs import Reproduction

GUESSED_MINUTES = 60.0
"""Of a part that no estimate is known of, to weigh it against the others."""
LOOK_SECONDS = 2.0
"""How often a process that waits for others looks what they have done."""


def reproduce(name: str, *, command: str = "", quiet: bool = False, **options: Any) -> Path:
    """Run or resume a study of the paper; options are those of `odcluster reproduce --help`. Returns its folder."""
    given = Reproduction(**options)
    study = find_study(name)
    if given.scale not in ("small", "paper"):
        raise UserError(f"there is no scale {given.scale!r}; it is small or paper")
    seeds = tuple(dict.fromkeys(study.seeds if given.seeds is None else given.seeds))
    if not seeds or min(seeds) < 0:
        raise UserError("--seeds takes whole numbers from 0: one or more")
    plan = study.plan(given.scale, seeds)
    if given.dry_run:
        print(describe(study, plan, given, seeds))
        return Path(given.out or f"reproductions/{given.scale}")
    out = Path(given.out or f"reproductions/{given.scale}")
    for folder in ("parts", "subsets", "locks"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    console = Overview(plan, quiet)
    with Turn(out, console):
        worker = Worker(out, find_places(plan.needs(), given, out), given, console)
        worker.prepare(plan)
    found = worker.carry_out(study, plan, seeds)
    with Turn(out, console):
        return write_up(study, found, worker, given, command)


def find_study(name: str) -> Study:
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"there is no study {name!r}; {hint}there are: {', '.join(STUDIES)}")
    return STUDIES[name]


class Turn(FileLock):
    """Unpacking, choosing images and writing up are done by one process at a time; the others wait for their turn."""

    def __init__(self, out: Path, console: Console) -> None:
        super().__init__(out / "locks" / "turn")
        self._console = console

    def __enter__(self) -> FileLock:
        told = False
        with StopFlag() as stop:
            while True:
                try:
                    return super().__enter__()
                except InUse as error:
                    if not told:
                        self._console.say(f"waiting for another process ({error.holder})")
                    told = True
                    time.sleep(LOOK_SECONDS)
                    stop.poll()


class Overview(Console):
    """Progress over the whole study: every line says which part of how many, and how much of all is done."""

    def __init__(self, plan: Plan, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._weights = {part.name: part.minutes() or GUESSED_MINUTES for part in plan.parts()}
        self._numbers = {name: number for number, name in enumerate(self._weights, 1)}
        self._number = 0
        self._done = 0.0  # weight of the parts that are done, by whomever
        self._began: float | None = None  # when this process began its first part
        self._found = 0.0  # weight of the parts that had been done by then
        self._awaited = 0  # parts that other processes were last said to have in hand

    def begin(self, name: str) -> None:
        self._number = self._numbers[name]
        self._log_path, self._early = None, []  # what is said from here on belongs to this part's log
        if self._began is None:
            self._began, self._found = time.monotonic(), self._done
        total, left = sum(self._weights.values()), ""
        if self._done > self._found:
            seconds = (time.monotonic() - self._began) / (self._done - self._found) * (total - self._done)
            left = f", about {duration(seconds)} left"
        share = f"{self._done / total:.0%} of the study done{left}"
        self.say(f"part {self._number} of {len(self._weights)}: {name} ({share})", style="bold")

    def await_others(self, name: str, count: int) -> None:
        if count != self._awaited:
            self.say(f"waiting for other processes; parts left: {count}, the first is {name}")
        self._awaited = count

    def end(self, name: str) -> None:
        """A part is done, by this process or by another."""
        self._done += self._weights[name]

    def progress(self, activity: str, done: int, total: int, detail: str = "") -> None:
        super().progress(f"part {self._number}/{len(self._weights)} · {activity}", done, total, detail)


@dataclass
class Worker:
    """Carries out the parts of a plan in one folder."""

    out: Path
    places: Mapping[DataName, Place]
    given: Reproduction
    console: Overview

    def __post_init__(self) -> None:
        self.sources: dict[str, tuple[str, Source]] = {}
        self.keys: dict[str, str] = {}  # of parts: hash of everything that decides about them

    def prepare(self, plan: Plan) -> None:
        """Choose the images, and see that what is there from before is what the study wants."""
        for training in plan.trainings:
            self.keys[training.name] = self.training_key(training)
        for judgement in plan.judgements:
            self.keys[judgement.name] = self.judgement_key(judgement)
        for part in plan.parts():
            self.state(part.name)

    def carry_out(self, study: Study, plan: Plan, seeds: tuple[int, ...]) -> Found:
        """Do every part, or see it done by other processes."""
        self.console.say(f"{study.name}: {study.shows}", style="bold")
        self.console.say(f"{plan.budget}; {effort(plan)}")
        left = plan.parts()
        with StopFlag() as stop:
            while left:
                before = left
                left = [part for part in before if not self.settle(part, stop)]
                stop.poll()
                if len(left) == len(before):  # all are others' work, or need what others are at
                    self.console.await_others(left[0].name, len(left))
                    time.sleep(LOOK_SECONDS)
        trained = {}
        for training in plan.trainings:
            path, (_, source) = self.path(training.name), self.images(training.images)
            trained[training.name] = Trained(path, read_metrics(path / "metrics.jsonl"), source)
        results = {judgement.name: self.result(judgement) for judgement in plan.judgements}
        return Found(plan, self.given.scale, seeds, trained, results)

    def path(self, name: str) -> Path:
        return self.out / "parts" / name

    def state(self, name: str) -> dict[str, Any]:
        """What is known of a part."""
        record = self.path(f"{name}.json")
        if not record.exists():
            return {"key": self.keys[name], "seconds": 0.0, "done": False}
        state: dict[str, Any] = json.loads(record.read_text())
        if state["key"] != self.keys[name]:
            raise DataError(
                f"{self.path(name)} was made with other settings or images than this study has now; choose another "
                f"--out, or remove it and {record.name}"
            )
        return state

    def done(self, name: str) -> bool:
        return bool(self.state(name)["done"])

    def settle(self, part: Training | Judgement, stop: StopFlag) -> bool:
        """Whether a part is done, if need be by doing it; not if another process is at it or at what it needs."""
        stop.poll()
        if not self.done(part.name):
            needed = part.start if isinstance(part, Training) else None if part.untrained else part.subject
            if needed is not None and not self.done(needed):
                return False
            with ExitStack() as held:
                try:
                    held.enter_context(FileLock(self.out / "locks" / part.name))
                except InUse:
                    return False
                if not self.done(part.name):  # another process may have ended it a moment ago
                    self.do(part)
        self.console.end(part.name)
        return True

    def do(self, part: Training | Judgement) -> None:
        """Do it, or go on with it; keep account of the time, also over stops."""
        name, path = part.name, self.path(part.name)
        record, state = self.path(f"{name}.json"), self.state(name)
        self.console.begin(name)
        write_atomically(record, json.dumps(state))
        began = time.monotonic()
        try:
            self.train(part, path) if isinstance(part, Training) else self.judge(part, path)
            state["done"] = True
        except Interrupted as stopped:
            raise Interrupted(f"stopped in {name}, everything saved: the same command goes on from here") from stopped
        except UserError as error:
            again = "what is done is kept: mend that and repeat the command"
            raise type(error)(f"part {name} failed: {error} ({again})") from error
        finally:
            state["seconds"] += time.monotonic() - began
            write_atomically(record, json.dumps(state))

    def minutes(self, name: str) -> float:
        return float(json.loads(self.path(f"{name}.json").read_text())["seconds"]) / 60

    # Images ------------------------------------------------------------

    def images(self, images: Images) -> tuple[str, Source]:
        """A path that training and evaluation take, and what it leads to; a choice is written down once."""
        name = images.part or images.of
        if name not in self.sources:
            path = self.places[images.of].train
            if images.choose is not None:
                base, path = path, os.fspath(self.out / "subsets" / f"{images.part}.subset")
                if not os.path.exists(path):
                    write_subset(path, base, images.choose(open_source(base).manifest))
            self.sources[name] = path, open_source(path)
        return self.sources[name]

    def test_side(self, images: Images) -> dict[str, str]:
        """Where the images to test on are, unless the data itself is divided."""
        test = self.places[images.of].test
        return {} if test is None or test == self.images(images)[0] else {"test": test}

    # Trainings ------------------------------------------------------------

    def training_key(self, training: Training) -> str:
        start = self.keys[training.start] if training.start else ""
        source = self.images(training.images)[1]
        parts = [fingerprint(training.config), source.manifest.fingerprint(), start]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def train(self, training: Training, path: Path) -> None:
        if (path / "config.json").exists():
            api.resume(path, workers=self.given.workers, console=self.console)
            return
        config = changed(training.config, workers=self.given.workers)
        if training.start is not None:
            config = changed(config, weights=os.fspath(self.path(training.start).absolute()))
        api.start(config, self.images(training.images)[0], path, self.console)

    # Judgements ------------------------------------------------------------

    def judgement_key(self, judgement: Judgement) -> str:
        fingerprints = []
        if (images := judgement.images) is not None:
            files = [path for path in self.test_side(images).values() if os.path.isfile(path)]
            sources = [self.images(images)[1], *map(open_source, files)]
            fingerprints = [source.manifest.fingerprint() for source in sources]
        subject = judgement.subject if judgement.untrained else self.keys[judgement.subject]
        options = json.dumps(dict(judgement.options), sort_keys=True)
        text = f"{judgement.task} {subject} {fingerprints} {options}"
        return hashlib.sha256(text.encode()).hexdigest()

    def judge(self, judgement: Judgement, path: Path) -> None:
        subject = judgement.subject if judgement.untrained else os.fspath(self.path(judgement.subject))
        options: dict[str, Any] = dict(judgement.options)
        if judgement.images is not None:
            options |= {"data": self.images(judgement.images)[0], "untrained": judgement.untrained}
            if "split" not in options:
                options |= self.test_side(judgement.images)
        if self.given.workers is not None:
            options["workers"] = self.given.workers
        evaluate(subject, task=judgement.task, out=os.fspath(path), quiet=True, console=self.console, **options)
        shutil.rmtree(path / "features", ignore_errors=True)  # gigabytes that nobody needs again

    def result(self, judgement: Judgement) -> Result:
        found = read_results(self.path(judgement.name))
        if not found:
            raise DataError(f"{self.path(judgement.name)} lost its result; remove {judgement.name}.json beside it")
        return found[0]


# Writing up ------------------------------------------------------------


def write_up(study: Study, found: Found, worker: Worker, given: Reproduction, command: str) -> Path:
    """OUT/STUDY/results.json and the picture; what is there from before is replaced."""
    folder = worker.out / study.name
    folder.mkdir(exist_ok=True)
    summary = study.summarise(found)
    plan = found.plan
    minutes = {part.name: round(worker.minutes(part.name), 4) for part in plan.parts()}
    used = {images.part or images.of: worker.images(images)[1].manifest for images in all_images(plan)}
    record = {
        "study": study.name,
        "scale": given.scale,
        "shows": study.shows,
        "paper": study.paper,
        "command": command or f"odcluster.reproduce({study.name!r}, scale={given.scale!r})",
        "seeds": list(found.seeds),
        "minutes": round(sum(minutes.values()), 4),
        "versions": library_versions(),
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "processor": platform.machine()},
        "data": {name: {"images": len(m), "fingerprint": m.fingerprint()} for name, m in used.items()},
        "findings": summary,
        "settings": {training.name: settings(training.config) for training in plan.trainings},
        "minutes of the parts": minutes,
    }
    write_atomically(folder / "results.json", json_text(record))
    pictures = study.draw(study, summary, found, folder)
    worker.console.say(
        f"done: {folder / 'results.json'}, {', '.join(picture.name for picture in pictures)} "
        f"({record['minutes']:.0f} minutes of work)",
        style="bold",
    )
    return folder


def all_images(plan: Plan) -> list[Images]:
    used = [part.images for part in plan.parts()]
    return list({images.part or images.of: images for images in used if images is not None}.values())


def settings(config: Config) -> dict[str, Any]:
    """The recipe, and what differs from it."""
    usual = flat(recipe(config.recipe))
    return {"recipe": config.recipe, **{key: value for key, value in flat(config).items() if value != usual[key]}}


def describe(study: Study, plan: Plan, given: Reproduction, seeds: tuple[int, ...]) -> str:
    """The plan for people."""
    lines = [
        f"{study.name} at {given.scale} scale: {study.shows}",
        f"the paper: {study.paper}",
        f"{plan.budget}; seeds {', '.join(map(str, seeds))}; {effort(plan)}",
        f"images: {', '.join(plan.needs())}",
        "",
        "trainings:",
    ]
    for training in plan.trainings:
        chosen = {key: value for key, value in settings(training.config).items() if key != "seed"}
        start = f" from {training.start}" if training.start else ""
        minutes = training.minutes()
        time = "" if minutes is None else f", about {minutes:.0f} minutes"
        lines.append(f"  {training.name}{start}: {training.images.part or training.images.of}{time}")
        lines.append("    " + ", ".join(f"{key} {value}" for key, value in chosen.items()))
    lines.append("judgements:")
    for judgement in plan.judgements:
        options = ", ".join(f"{key} {value}" for key, value in judgement.options.items())
        lines.append(f"  {judgement.name}: {judgement.task}{f' ({options})' if options else ''}")
    return "\n".join(lines)
