"""The verb `evaluate`: open weights and data, run one task, write its record and pictures, show its table."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
import typing
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console as Terminal
from rich.table import Table

from odcluster.data.added import open_with_added
from odcluster.data.readers import shown
from odcluster.data.sources import open_source
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.evaluation import tasks
from odcluster.evaluation.parts import open_parts
from odcluster.evaluation.plots import draw_comparison, draw_result
from odcluster.evaluation.results import Data, Result, Weights, library_versions, read_results, write_result
from odcluster.evaluation.subject import Subject, open_subject
from odcluster.evaluation.tables import comparison_tables, result_table
from odcluster.evaluation.workshop import Helped, Outcome, Progress, Workshop
from odcluster.explore.export import read_clusters_csv
from odcluster.explore.folders import check_outside
from odcluster.ranks import Ranks, joined
from odcluster.training.console import Console, duration
from odcluster.training.devices import StopFlag, choose_device
from odcluster.training.run import open_run
from odcluster.verbs import Evaluation, Task

USE_FEATURES = ("linear", "svm", "lowshot", "knn")
"""Tasks whose features several ranks compute together."""


def evaluate(
    weights: str | os.PathLike[str],
    *,
    quiet: bool = False,
    command: str = "",
    console: Console | None = None,
    **options: Any,
) -> Result | None:
    """Evaluate features by one protocol; options are those of `odcluster evaluate --help`. Returns the record.

    Under torchrun all ranks compute features, and rank 0 does the rest; the others return None.

    `quiet` shows no table; a console of the caller's is told of progress all the same.
    """
    given = Evaluation(**options)
    check_options(given)
    console = console or Console(quiet=quiet)
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    device = choose_device(given.device)
    with joined(device) as ranks, StopFlag() as stop, console if ranks.is_first else Console(quiet=True) as console:
        if not ranks.is_first and (given.task not in USE_FEATURES or given.variant == "published"):
            return None

        def progress(activity: str, done: int, total: int) -> None:
            stop.poll()
            console.progress(activity, done, total)

        try:
            if given.task == "clusters":
                subject, data, outcome = judge_clusters(os.fspath(weights), given, device, progress)
            else:
                subject, data, outcome = judge_features(os.fspath(weights), given, device, progress, console, ranks)
        except Helped:
            return None
        except Interrupted as stopped:
            raise Interrupted("stopped as asked: the same command goes on from here") from stopped
        except ArithmeticError as error:
            raise DataError(f"{error}; use other weights, or leave this layer out with --layers") from error
        result = Result(
            task=given.task,
            protocol=outcome.protocol,
            variant=outcome.variant,
            deviations=outcome.deviations,
            data=data,
            weights=Weights(**subject.record()),
            seed=given.seed,
            scores=outcome.scores,
            headline=outcome.headline,
            details=outcome.details,
            versions=library_versions(),
            device=str(device),
            seconds=round(time.monotonic() - clock, 1),
            started=started,
            command=command,
        )
        path = write_result(result, subject.directory)
        pictures = draw_result(result, subject.directory)
        if outcome.unfinished is not None:
            shutil.rmtree(outcome.unfinished, ignore_errors=True)
        if not quiet:
            print_table(result_table(result))
        console.say(f"{duration(result.seconds)} · {path} · {', '.join(picture.name for picture in pictures)}")
    return result


def print_table(table: Table) -> None:
    """The table, and its notes as paragraphs of their own: as a caption they would be cut to the table's width."""
    terminal = Terminal(file=sys.stdout)
    notes, table.caption = table.caption, None
    terminal.print(table)
    if notes:
        terminal.print(notes, style="dim", highlight=False)


def check_options(options: Evaluation) -> None:
    """Refuse options that the task would not look at."""
    if options.task not in typing.get_args(Task):
        raise UserError(f"there is no task {options.task!r}; use one of {', '.join(typing.get_args(Task))}")
    if options.jobs is not None and options.task not in ("svm", "lowshot"):
        raise UserError(f"--jobs has no meaning for --task {options.task}; leave it out")
    if options.image_size is not None and options.task == "clusters":
        raise UserError("--image-size has no meaning for --task clusters; leave it out")
    if options.epochs is not None and not (options.task == "semi" or options.variant == "published"):
        raise UserError("--epochs is for --task semi and for --task linear --variant published; leave it out")
    if options.variant == "published" and options.task != "linear":
        raise UserError("--variant is for --task linear; the other tasks have one form, the published one")
    if options.layers and options.task not in ("linear", "svm", "lowshot"):
        raise UserError(f"--layers has no meaning for --task {options.task}; leave it out")
    for name in ("epochs", "image_size", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if options.workers < 0 or options.seed < 0:
        raise UserError("--workers and --seed must be 0 or more")


def judge_features(
    weights: str, options: Evaluation, device: torch.device, progress: Progress, console: Console, ranks: Ranks
) -> tuple[Subject, Data, Outcome]:
    parts = open_parts(options)
    for sentence in [*parts.notes, *parts.deviations]:
        console.say(sentence)
    subject = open_subject(weights, options, parts.train.source, parts.train.ids, device, progress)
    for part in (parts.train, parts.test):
        check_outside(subject.directory, part.source.manifest)
    backbone = subject.backbone
    console.say(f"{backbone.name} at {backbone.image_size} px: {subject.pretraining}")
    workshop = Workshop(subject, parts, options, device, progress, console.say, ranks)
    outcome = tasks.TASKS[options.task](workshop)
    outcome.deviations.extend(parts.deviations)
    data = Data(
        name=" and ".join(dict.fromkeys(base_name(part.given) for part in (parts.train, parts.test))),
        kind=parts.train.source.manifest.kind,
        train_split=parts.train.split,
        test_split=parts.test.split,
        num_train=outcome.num_train,
        num_test=outcome.num_test,
        num_classes=outcome.num_classes,
        train_fingerprint=parts.train.fingerprint(),
        test_fingerprint=parts.test.fingerprint(),
        left_out=[*parts.notes, *outcome.left_out],
    )
    return subject, data, outcome


def base_name(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def judge_clusters(
    weights: str, options: Evaluation, device: torch.device, progress: Progress
) -> tuple[Subject, Data, Outcome]:
    """A run's labels against the classes that came with its images, or that --data knows, matched by name."""
    if options.untrained or options.test or options.split:
        raise UserError("--task clusters compares a run's own clusters: leave --untrained, --test and --split out")
    run = open_run(Path(weights))
    if not run.clusters_file.is_file():
        raise DataError(f"{run.path} has no clusters.csv: a method without clusters, or a run that is not finished")
    table = read_clusters_csv(run.clusters_file)
    source = open_source(options.data) if options.data else open_with_added(run.config().data, run.manifest().added)
    manifest = source.manifest
    if manifest.labels is None:
        raise DataError(
            f"the images in {shown(manifest.root)} have no known classes; give --data with a folder per class"
        )
    truth_of = dict(zip(manifest.paths, manifest.labels.tolist(), strict=True))
    truth = np.array([truth_of.get(name, -1) for name in table.names], np.int64)
    outcome = tasks.clusters(table.labels, truth, run.config().clusters or int(table.labels.max()) + 1)
    subject = open_subject(weights, options, source, np.arange(len(source)), device, progress)
    check_outside(subject.directory, manifest)
    fingerprint = hashlib.sha256(manifest.fingerprint().encode() + truth.tobytes()).hexdigest()
    data = Data(
        name=base_name(options.data or run.config().data),
        kind=manifest.kind,
        train_split="",
        test_split="",
        num_train=outcome.num_train,
        num_test=outcome.num_test,
        num_classes=outcome.num_classes,
        train_fingerprint=fingerprint,
        test_fingerprint=fingerprint,
        left_out=outcome.left_out,
    )
    return subject, data, outcome


def compare(runs: Sequence[str | os.PathLike[str]], *, out: str | os.PathLike[str] | None = None) -> None:
    """Results of several runs side by side, as tables and, with `out`, as pictures."""
    if len(runs) < 2:
        raise UserError("--compare needs at least two runs or folders with results")
    if len(set(map(os.path.realpath, runs))) < len(runs):
        raise UserError("--compare was given the same folder twice; name each once")
    results: dict[str, list[Result]] = {}
    for run in map(Path, runs):
        folder = run / "evaluation" if (run / "evaluation").is_dir() else run
        found = read_results(folder) if folder.is_dir() else []
        if not found:
            raise DataError(f"{run} has no results; make some with `odcluster evaluate {run} --task knn --data DATA`")
        results[os.fspath(run)] = found
    for table in comparison_tables(results):
        print_table(table)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        for path in draw_comparison(results, Path(out)):
            print(path)
