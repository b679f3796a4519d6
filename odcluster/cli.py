"""The command line: its verbs. What options they have is in options.py.

Exit codes: 0 done, 2 usage, 3 data, 4 diverged, 5 a rank was lost, 75 interrupted but saved, 130 second Ctrl-C. torch
is imported only when a verb needs it, so that help is immediate.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

from odcluster import __version__, verbs
from odcluster.config import GROUPS, changed
from odcluster.errors import UserError
from odcluster.options import (
    chosen_recipe,
    doc,
    flag,
    given_value,
    optional,
    options_of,
    parse,
    parse_options,
    required,
)

HELP = """\
odcluster {version}: from a folder of images to clusters, by Online Deep Clustering.

  odcluster demo                    see it work: digits, about a minute, no download
  odcluster train PHOTOS            learn features and clusters from a folder of images
  odcluster resume RUN              go on with an interrupted training, exactly
  odcluster evaluate RUN --task knn --data LABELLED
                                    judge features by the field's protocols: linear, svm, lowshot, knn, semi
  odcluster explore RUN             look at the clusters in the browser: name, merge, correct, find similar images
  odcluster report RUN              the same overview as one HTML file to pass on
  odcluster assign RUN PHOTOS       the cluster of new images, and how surely
  odcluster embed X PHOTOS          features without training: X is a run, weights, or a backbone's name
  odcluster export RUN --to folders curated clusters or weights for others: csv, parquet, folders, timm, onnx, ...
  odcluster reproduce stability     the paper's tables and figures, at small or at full scale; --list names them
  odcluster info                    versions, devices, recipes, what is optional and missing

`odcluster VERB --help` explains a verb; `--debug` shows where an error came from.
"""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one verb and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [word for word in given if word != "--debug"]
    if not given or given[0] in ("-h", "--help", "help"):
        print(HELP.format(version=__version__), end="")
        sys.exit(0 if given else 2)
    if given[0] == "--version":
        print(__version__)
        sys.exit(0)
    if given[0] not in VERBS:
        fail(f"there is no verb {given[0]!r}{nearest(given[0], list(VERBS))}; `odcluster --help` lists them", 2)
    choose_ranks(given[0])
    wait_asleep()
    try:
        VERBS[given[0]](given[1:])
    except UserError as error:
        if debug:
            raise
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        if debug:
            raise
        fail("stopped at once; what was saved before is intact", 130)
    except OSError as error:  # a full disk, lost permissions: nothing that a traceback would explain better
        if debug:
            raise
        where = f" ({error.filename})" if error.filename else ""
        fail(f"{error.strerror or error}{where}; free some space or check the permissions, then resume", 3)
    sys.exit(0)


def choose_ranks(verb: str) -> None:
    """Under torchrun, verbs with nothing to share out are done by rank 0 alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported; we say what matters
    if verb not in SPREAD:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(0)
        os.environ["WORLD_SIZE"] = "1"


def wait_asleep() -> None:
    """Threads of torch that wait for others sleep after a moment, where they would spin for milliseconds.

    As soon as other programs run too, spinning threads take the cores from those that are waited for: a training step
    took half as long again, at times five times as long. On an idle machine spinning gains nothing: benchmarks/busy.py.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported


def fail(sentence: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK", "0") if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "0"
    print("odcluster" + (f" (rank {rank})" if rank != "0" else "") + f": {sentence}", file=sys.stderr, flush=True)
    sys.exit(code)


def nearest(word: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


# Verbs ------------------------------------------------------------


def train_verb(given: list[str]) -> None:
    """Learn features and clusters from images, without labels."""
    from odcluster.recipes import recipe

    default = recipe(given_value("recipe", given) or chosen_recipe(given))
    extra = {
        "data": required("DATA", doc("data")),
        "dry_run": flag("Only say what would be done, and why; nothing is written."),
    }
    values = parse_options("train", train_verb, given, default, extra)
    data, out, dry_run = (values.pop(name) for name in ("data", "out", "dry_run"))
    chosen = changed(default, **values)
    from odcluster import api
    from odcluster.training.console import Console

    (api.rehearse if dry_run else api.start)(chosen, data, out, Console())


def demo_verb(given: list[str]) -> None:
    """See it work: train on handwritten digits and compare features before and after, by labels never used to learn.

    --data takes labelled images instead: CIFAR-10's files, a class tree, arrays with labels.
    """
    from odcluster.recipes import recipe

    data = {"data": optional("DATA", "labelled images to use instead of the digits; `cifar10` finds your copy", None)}
    usual = "odc_digits" if given_value("data", given) is None else chosen_recipe(given)
    default = recipe(given_value("recipe", given) or usual)
    values = parse_options("demo", demo_verb, given, default, data)
    given_values = {name: value for name, value in values.items() if name not in ("data", "out")}
    from odcluster.demonstrate import demo

    demo(values["data"], out=values["out"], config=changed(default, **given_values))


def resume_verb(given: list[str]) -> None:
    """Go on with an interrupted run, to the same end as if never stopped. Or train longer, or with more images."""
    extra = {
        "run": required("RUN", "The run directory."),
        "remap": flag("The images changed: keep what is known of those that stayed, forget those that are gone."),
        "add": optional("FOLDER", "Add the images of this folder, also to a finished run, and go on training.", None),
        "epochs": optional(
            "INT", "Train this many epochs more than planned. Not given: as new images need.", None, int
        ),
        "workers": optional("INT", doc("workers"), None, int),
        "device": optional("STR", doc("device"), None),
        "max_refused": optional("FLOAT", doc("max_refused", GROUPS["running"]), None, float),
    }
    values = parse("resume", resume_verb, given, extra)
    from odcluster import api

    api.resume(values.pop("run"), **values)


def evaluate_verb(given: list[str]) -> None:
    """Judge features with labels: a run, an exported backbone, any weights file, or a bare backbone with --untrained.

    `odcluster evaluate --compare RUN1 RUN2 ...` puts the results of several runs side by side.
    """
    if "--compare" in given:
        return compare_verb(given)
    weights = {"weights": required("WEIGHTS", "A run, an exported backbone, a weights file, or a backbone's name.")}
    defaults = verbs.Evaluation(task="linear")
    options = options_of(verbs.Evaluation, defaults)
    options["task"] = (options["task"][0], dataclasses.MISSING)
    values = parse("evaluate", evaluate_verb, given, {**weights, **options})
    from odcluster.judge import evaluate

    evaluate(values.pop("weights"), command=recorded("evaluate", given), **values)
    return None


def recorded(verb: str, given: list[str]) -> str:
    """A command as it goes into a record: where things lie on this machine is nobody's business."""
    return shlex.join(["odcluster", verb, *map(without_folder, given)])


def without_folder(word: str) -> str:
    """A word of a command, a path by its name alone."""
    option, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    if os.path.isabs(value) or (os.sep in value and os.path.exists(value)):
        return f"{option}{equals}{os.path.basename(os.path.normpath(value))}"
    return word


def compare_verb(given: list[str]) -> None:
    """Results of several runs side by side."""
    import tyro

    about = "Runs, or folders with results, two or more."
    several = tyro.conf.Positional[tuple[str, ...]]
    extra = {
        "runs": (Annotated[several, tyro.conf.arg(metavar="RUN [RUN ...]", help=about)], ()),
        "out": optional("DIR", "Also draw pictures, in this folder.", None),
    }
    values = parse("evaluate --compare", compare_verb, [word for word in given if word != "--compare"], extra)
    from odcluster.judge import compare

    compare(values["runs"], out=values["out"])


def explore_verb(given: list[str]) -> None:
    """Look at the clusters of a run in the browser: name, merge and correct them, find similar images, see a map."""
    extra = {
        "run": required("RUN", "The run directory; it may be training."),
        "port": optional("INT", "Port on this machine. Not given: a free one.", None, int),
        "no_browser": flag("Only print the address."),
    }
    values = parse("explore", explore_verb, given, extra)
    from odcluster.gallery import explore

    explore(values["run"], port=values["port"], open_browser=not values["no_browser"])


def report_verb(given: list[str]) -> None:
    """The clusters of a run and how training went, as one HTML file that opens anywhere."""
    extra = {
        "run": required("RUN", "The run directory; it may be training."),
        "out": optional("FILE", "The file to write (default: RUN/report.html).", None),
    }
    values = parse("report", report_verb, given, extra)
    from odcluster.gallery_report import report

    report(values["run"], out=values["out"])


def assign_verb(given: list[str]) -> None:
    """The cluster of every image of DATA, how sure that is, and the distance to the cluster's centre, as a table."""
    extra = {"run": required("RUN", "The run directory."), "data": required("DATA", doc("data"))}
    options = options_of(verbs.Assigning, verbs.Assigning())
    values = parse("assign", assign_verb, given, {**extra, **options})
    from odcluster.deploy import assign

    assign(values.pop("run"), values.pop("data"), **values)


def embed_verb(given: list[str]) -> None:
    """Features of the images of DATA, without training anything.

    `odcluster embed resnet50 photos/ --weights timm --out photos.parquet` is the quickest way to a map of a folder.
    """
    about = "A run, an exported backbone, a weights file, or a backbone's name with --weights or --untrained."
    extra = {"subject": required("X", about), "data": required("DATA", doc("data"))}
    options = options_of(verbs.Embedding, verbs.Embedding())
    values = parse("embed", embed_verb, given, {**extra, **options})
    from odcluster.deploy import embed

    embed(values.pop("subject"), values.pop("data"), **values)


def export_verb(given: list[str]) -> None:
    """The clusters of a run, as people corrected them in `odcluster explore`, or its weights, for other programs."""
    options = options_of(verbs.Exporting, verbs.Exporting(to="csv"))
    options["to"] = (options["to"][0], dataclasses.MISSING)
    values = parse("export", export_verb, given, {"run": required("RUN", "The run directory."), **options})
    from odcluster.deploy import export

    export(values.pop("run"), **values)


def reproduce_verb(given: list[str]) -> None:
    """A table or figure of the paper: runs or resumes the trainings it needs, judges them, draws it.

    `odcluster reproduce --list` says what there is, what each needs and how long it takes.

    The same command in a second terminal shares the work, on a GPU of its own or on another machine that sees --out:
    each process takes parts that no other is at.
    """
    if "--list" in given or not given:
        from odcluster.studies.catalogue import listing

        print(listing())
        return
    name = {"name": required("NAME", "The study; --list names them.")}
    options = options_of(verbs.Reproduction, verbs.Reproduction())
    values = parse("reproduce", reproduce_verb, given, {**name, **options})
    from odcluster.reproduce import reproduce

    reproduce(values.pop("name"), command=recorded("reproduce", given), **values)


def info_verb(given: list[str]) -> None:
    """Versions, devices, recipes, and what is optional and missing."""
    parse("info", info_verb, given, {})
    from odcluster.info import info

    print(info())


VERBS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo_verb,
    "train": train_verb,
    "resume": resume_verb,
    "evaluate": evaluate_verb,
    "explore": explore_verb,
    "report": report_verb,
    "assign": assign_verb,
    "embed": embed_verb,
    "export": export_verb,
    "reproduce": reproduce_verb,
    "info": info_verb,
}
SPREAD = {"train", "resume", "evaluate", "embed", "assign"}
"""Verbs that several ranks work on together."""
