"""How soon it starts: `odcluster --help`, and the scan of a folder of a million names.

    python benchmarks/startup.py --json startup.json
    python benchmarks/startup.py --profile             # also what the scan spends its time on

Help is timed as a new process, beside one that does nothing but start Python. The scan is `open_source`, names and
sizes of all files, beside the list torchvision's ImageFolder makes, which does without the sizes. Each scan has a
process of its own and they take turns; the folder has just been written, so the file system has it in memory: a disk
that has not will be slower, for both. Growth is that of the process's largest resident memory.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

FOLDERS = 1000
HELP_SECONDS = 0.5
SCAN_SECONDS = 10.0
TARGET_FILES = 1_000_000
CONTENDERS = ("ours", "ImageFolder")


def make_folder(root: Path, num_files: int) -> None:
    """Files of one byte, spread over 1,000 folders like ImageNet's classes."""
    for at in range(FOLDERS):
        folder = root / f"n{at:08d}"
        folder.mkdir()
        for number in range(num_files * at // FOLDERS, num_files * (at + 1) // FOLDERS):
            (folder / f"n{at:08d}_{number}.JPEG").touch()
        if (at + 1) % 200 == 0:
            print(f"  making files: {at + 1} of {FOLDERS} folders", flush=True)


def scan(contender: str, folder: str) -> dict[str, float]:
    """Seconds, growth of memory in MB and files found, of one scan in this process."""
    if contender == "ours":
        from odcluster.data.sources import open_source as look
    else:
        from odcluster.models.compat import torchvision

        look = importlib.import_module(f"{torchvision.__name__}.datasets").ImageFolder
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    found = len(look(folder))
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "MB": (after - before) / 1024, "files": found}


def scan_rows(num_files: int, repeats: int, show_profile: bool) -> list[report.Row]:
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), num_files)
        for at in range(repeats):
            for name in CONTENDERS:
                done = subprocess.run(
                    [sys.executable, __file__, "--scan", name, folder], check=True, capture_output=True, text=True
                )
                measured[name].append(json.loads(done.stdout))
                assert measured[name][-1]["files"] == num_files, f"{name} did not find all files"
                print(f"  scan by {name}, {at + 1} of {repeats}: {measured[name][-1]['seconds']:.2f} s", flush=True)
        if show_profile:
            profile(folder)
        print("  removing the files", flush=True)
    seconds, growth = (
        {name: statistics.median(scan[key] for scan in scans) for name, scans in measured.items()}
        for key in ("seconds", "MB")
    )
    # The target is for a million names: with fewer, what happens once per folder weighs more.
    met = seconds["ours"] < SCAN_SECONDS if num_files == TARGET_FILES else None
    ratio = seconds["ours"] / seconds["ImageFolder"]
    target = f"< {SCAN_SECONDS:g} s for {TARGET_FILES:,}"
    return [
        report.Row(f"scan of {num_files:,} names, beside ImageFolder", seconds["ours"], seconds["ImageFolder"], "s",
                   ratio, target, met, "files on a file system that has them in memory"),
        report.Row("memory that the scan takes, beside ImageFolder", growth["ours"], growth["ImageFolder"], "MB",
                   growth["ours"] / growth["ImageFolder"] if growth["ImageFolder"] else None, "", None),
    ]  # fmt: skip


def profile(folder: str) -> None:
    """The functions of a scan by their own time; the profiler makes all of it slower."""
    from odcluster.data.sources import open_source

    profiler = cProfile.Profile()
    profiler.runcall(open_source, folder)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


def help_row(repeats: int) -> report.Row:
    commands = {
        "ours": [sys.executable, "-m", "odcluster", "--help"],
        "python": [sys.executable, "-c", "pass"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats + 1):  # the first ones read the files from the disk
        for name, command in commands.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times[name].append(time.perf_counter() - began)
    ours, bare = (statistics.median(times[name][1:]) for name in commands)
    note = f"median of {repeats}; the alternative is Python doing nothing"
    return report.Row(
        "`odcluster --help`", ours, bare, "s", ours / bare, f"< {HELP_SECONDS} s", ours < HELP_SECONDS, note
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=TARGET_FILES)
    parser.add_argument("--repeats", type=int, default=3, help="scans of each")
    parser.add_argument("--quick", action="store_true", help="20,000 files")
    parser.add_argument("--profile", action="store_true", help="print what the scan spends its time on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scan", nargs=2, metavar=("CONTENDER", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.scan:
        print(json.dumps(scan(*given.scan)))
        return
    files, repeats = (20_000, 2) if given.quick else (given.files, given.repeats)
    rows = [help_row(5), *scan_rows(files, repeats, given.profile)]
    report.show(rows)
    if given.json:
        report.write(given.json, "startup", rows)


if __name__ == "__main__":
    main()
