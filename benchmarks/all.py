"""Every benchmark, one after the other, into results.json and the table of docs/performance.md.

    python benchmarks/all.py                                            # or: make bench
    python benchmarks/all.py --images train_webp.npz --voc VOC2007      # with data that is not made by the scripts
    python benchmarks/all.py --only step kmeans                         # these anew, the others as they were
    python benchmarks/all.py --quick                                    # does everything run? shows, writes nothing

Two are never run at once: they would measure each other. What cannot be run stands in the table with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).resolve().parent
ROOT = report.ROOT


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder."""

    name: str
    arguments: list[str] = field(default_factory=list)
    packages: tuple[str, ...] = ()
    """Packages that only this script wants; it says itself in a row what it left out without them."""
    missing: str = ""
    """Why it cannot be run with the options given; empty: it can."""

    def command(self) -> str:
        """What a reader types; files by their name, wherever they lie here."""
        words = [Path(word).name if os.path.isabs(word) else word for word in self.arguments]
        return shlex.join(["python", f"benchmarks/{self.name}.py", *words])


def benchmarks(given: argparse.Namespace) -> list[Benchmark]:
    """All of them, in the order of the table."""
    images = ["--data", os.path.abspath(given.images)] if given.images else []
    voc = ["--data", os.path.abspath(given.voc)] if given.voc else []
    return [
        Benchmark("memories"),
        Benchmark("views"),
        Benchmark("kmeans", packages=("faiss",)),
        Benchmark("step"),
        Benchmark("training", images, packages=("lightly",)),
        Benchmark("busy"),
        Benchmark("startup"),
        Benchmark("explore"),
        Benchmark(
            "svm",
            [*voc, "--untrained", "resnet18", "--layer", "res4", "--classes", "4"],
            missing="" if voc else "it needs PASCAL VOC 2007; give its folder with --voc",
        ),
    ]


def run(benchmark: Benchmark, quick: bool) -> dict[str, Any]:
    """The entry of results.json: what the script wrote, or why there is nothing."""
    reason = benchmark.missing
    if not reason and not (HERE / f"{benchmark.name}.py").is_file():
        reason = f"benchmarks/{benchmark.name}.py is not there"
    if reason:
        print(f"  not run: {reason}", flush=True)
        return entry_without(benchmark, reason)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / f"{benchmark.name}.py"), *benchmark.arguments, "--json", str(file)]
        if quick:
            command += ["--classes", "1", "--costs", "8"] if benchmark.name == "svm" else ["--quick"]
        done = subprocess.run(command, cwd=ROOT, env=environment())
        if done.returncode != 0 or not file.is_file():
            return entry_without(benchmark, f"it failed with exit code {done.returncode}", failed=True)
        result = json.loads(file.read_text())
    if benchmark.name == "svm":
        result = from_svm(result)
    return {**result, "command": benchmark.command()}


def environment() -> dict[str, str]:
    """That of this process, with this checkout's package before any installed one."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def entry_without(benchmark: Benchmark, reason: str, failed: bool = False) -> dict[str, Any]:
    row = asdict(report.not_run(benchmark.name, reason))
    return {"name": benchmark.name, "rows": [row], "command": benchmark.command(), "failed": failed}


def from_svm(result: dict[str, Any]) -> dict[str, Any]:
    """svm.py keeps a record of its own, with more in it than a row has room for."""
    images, dims = result["train"]
    what = f"VOC07 SVM protocol, {images} x {dims}, {len(result['classes'])} classes, {result['costs']} costs"
    row = report.Row(
        what,
        result["seconds"],
        result.get("loop seconds"),
        "s",
        result.get("ratio"),
        "",
        None,
        f"beside a loop over scikit-learn's LinearSVC; the ratio is how many times longer that takes; mAP "
        f"{result['mAP']:.2f} against {result.get('loop mAP', float('nan')):.2f}",
    )
    return {"name": "svm", "date": time.strftime("%Y-%m-%d"), "machine": report.machine(), "rows": [asdict(row)]}


def earlier(path: Path) -> dict[str, dict[str, Any]]:
    """Entries of a former run by name."""
    if not path.is_file():
        return {}
    return {entry["name"]: entry for entry in json.loads(path.read_text())["benchmarks"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", metavar="FILE", help="packed images for training.py (made by itself if not given)")
    parser.add_argument("--voc", metavar="FOLDER", help="PASCAL VOC 2007, for svm.py")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these, keep the others' results")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="leave these out")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="PACKAGE", help="leave out what needs faiss, lightly"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; shows the figures and writes no file")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    given = parser.parse_args()
    chosen = benchmarks(given)
    names = {benchmark.name for benchmark in chosen}
    if unknown := {*given.only, *given.skip} - names:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(sorted(names))}")
    results = {} if given.quick else earlier(given.results)
    run_now = [b for b in chosen if not given.only or b.name in given.only]
    for at, benchmark in enumerate(run_now, 1):
        print(f"[{at}/{len(run_now)}] {benchmark.command()}", flush=True)
        began = time.monotonic()
        wanted = sorted({*benchmark.packages} & {*given.without})
        if benchmark.name in given.skip or wanted:
            reason = f"left out by --without {' '.join(wanted)}" if wanted else "left out by --skip"
            print(f"  not run: {reason}", flush=True)
            results[benchmark.name] = entry_without(benchmark, reason)
        else:
            results[benchmark.name] = run(benchmark, given.quick)
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
        if not given.quick:  # after each: an interruption costs one benchmark, not all
            entries = [results[b.name] for b in chosen if b.name in results]
            report.write_json(given.results, {"benchmarks": entries})
            report.put_table(given.page, entries)
    report.show([report.Row(**fields) for b in run_now for fields in results[b.name]["rows"]])
    if failed := [b.name for b in run_now if results[b.name].get("failed")]:
        sys.exit(f"failed: {', '.join(failed)}; run them by themselves to see why")


if __name__ == "__main__":
    main()
