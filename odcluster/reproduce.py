"""The verb `reproduce`: carry out the plan of a study, part by part, then write its numbers and its picture.

    OUT/parts/NAME/       a run, or the results of one judgement;  OUT/parts/NAME.json  whether it is done, and how long
    OUT/subsets/          which images were chosen, where not all are used
    OUT/STUDY/            results.json and the picture

Promises: a part that is done is never done again, also not by another study in the same OUT; a study that was stopped
or killed goes on with the same command, inside the part where it was; a part made with other settings is refused, not
mixed in.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from odcluster import api
from odcluster.config import Config, changed, fingerprint
from odcluster.data.sources import Source, open_source
from odcluster.data.subsets import write_subset
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation.results import Result, json_text, library_versions, read_results
from odcluster.judge import evaluate
from odcluster.recipes import recipe
from odcluster.studies.catalogue import STUDIES, hours
from odcluster.studies.places import Place, find_places
from odcluster.studies.plan import DataName, Found, Images, Judgement, Plan, Study, Trained, Training
from odcluster.training.console import Console, duration
from odcluster.training.metrics import read_metrics
from odcluster.training.resolve import flat
from odcluster.training.run import RunLock, write_atomically
from odcluster.verbs import Reproduction

GUESSED_MINUTES = 60.0
"""Of a part that no estimate is known of, to weigh it against the others."""


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
    for folder in ("parts", "subsets"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    with StudyLock(out):
        places = find_places(plan.needs(), given, out)
        worker = Worker(out, places, given, Overview(plan, quiet))
        found = worker.carry_out(study, plan, seeds)
        return write_up(study, found, worker, given, command)


def find_study(name: str) -> Study:
    if name not in STUDIES:
        near = difflib.get_close_matches(name, STUDIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"there is no study {name!r}; {hint}there are: {', '.join(STUDIES)}")
    return STUDIES[name]


class StudyLock(RunLock):
    """One process at a time works on a folder of studies."""

    def __init__(self, out: Path) -> None:
        self._path = out / "lock"
        self._descriptor = None


class Overview(Console):
    """Progress over the whole study: every line says which part of how many, and how much of all is done."""

    def __init__(self, plan: Plan, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self._weights = {part.name: part.minutes() or GUESSED_MINUTES for part in plan.parts()}
        self._done = 0.0  # weight of the parts that are behind us
        self._number = 0
        self._began: float | None = None  # when the first part that was not done yet began
        self._worked = 0.0  # weight of the parts that were done since then

    def begin(self, name: str) -> None:
        self._number += 1
        self._log_path, self._early = None, []  # what is said from here on belongs to this part's log
        self._began = self._began or time.monotonic()
        total, left = sum(self._weights.values()), ""
        if self._worked:
            seconds = (time.monotonic() - self._began) / self._worked * (total - self._done)
            left = f", about {duration(seconds)} left"
        share = f"{self._done / total:.0%} of the study done{left}"
        self.say(f"part {self._number} of {len(self._weights)}: {name} ({share})", style="bold")

    def end(self, name: str, *, worked: bool) -> None:
        """A part is behind us; one that had been done before says nothing about the speed."""
        self._number += not worked
        self._done += self._weights[name]
        self._worked += self._weights[name] if worked else 0

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
        self.keys: dict[str, str] = {}  # of trainings: hash of everything that decides about them

    def carry_out(self, study: Study, plan: Plan, seeds: tuple[int, ...]) -> Found:
        self.console.say(f"{study.name}: {study.shows}", style="bold")
        self.console.say(f"{plan.budget}; {len(plan.trainings)} trainings, {hours(plan)} on two idle cores")
        trained, results = {}, {}
        for training in plan.trainings:
            self.part(training.name, self.training_key(training), partial(self.train, training))
            path, (_, source) = self.path(training.name), self.images(training.images)
            trained[training.name] = Trained(path, read_metrics(path / "metrics.jsonl"), source)
        for judgement in plan.judgements:
            key = self.judgement_key(judgement)
            self.part(judgement.name, key, partial(self.judge, judgement))
            results[judgement.name] = self.result(judgement)
        return Found(plan, self.given.scale, seeds, trained, results)

    def path(self, name: str) -> Path:
        return self.out / "parts" / name

    def part(self, name: str, key: str, work: Callable[[Path], object]) -> None:
        """Do it unless it is done; keep account of the time, also over stops."""
        record, path = self.path(f"{name}.json"), self.path(name)
        state: dict[str, Any] = {"key": key, "seconds": 0.0, "done": False}
        if record.exists():
            state = json.loads(record.read_text())
        if state["key"] != key:
            raise DataError(
                f"{path} was made with other settings or images than this study has now; choose another --out, or "
                f"remove it and {record.name}"
            )
        if not state["done"]:
            self.console.begin(name)
            write_atomically(record, json.dumps(state))
            began = time.monotonic()
            try:
                work(path)
                state["done"] = True
            except Interrupted as stopped:
                raise Interrupted(
                    f"stopped in {name}, everything saved: the same command goes on from here"
                ) from stopped
            except UserError as error:
                again = "what is done is kept: mend that and repeat the command"
                raise type(error)(f"part {name} failed: {error} ({again})") from error
            finally:
                state["seconds"] += time.monotonic() - began
                write_atomically(record, json.dumps(state))
            self.console.end(name, worked=True)
        else:
            self.console.end(name, worked=False)

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
        self.keys[training.name] = hashlib.sha256(" ".join(parts).encode()).hexdigest()
        return self.keys[training.name]

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
        f"{plan.budget}; seeds {', '.join(map(str, seeds))}; {hours(plan)} on two idle cores",
        f"images: {', '.join(plan.needs())}",
        "",
        f"{len(plan.trainings)} trainings:",
    ]
    for training in plan.trainings:
        chosen = {key: value for key, value in settings(training.config).items() if key != "seed"}
        start = f" from {training.start}" if training.start else ""
        minutes = training.minutes()
        time = "" if minutes is None else f", about {minutes:.0f} minutes"
        lines.append(f"  {training.name}{start}: {training.images.part or training.images.of}{time}")
        lines.append("    " + ", ".join(f"{key} {value}" for key, value in chosen.items()))
    lines.append(f"{len(plan.judgements)} judgements:")
    for judgement in plan.judgements:
        options = ", ".join(f"{key} {value}" for key, value in judgement.options.items())
        lines.append(f"  {judgement.name}: {judgement.task}{f' ({options})' if options else ''}")
    return "\n".join(lines)
