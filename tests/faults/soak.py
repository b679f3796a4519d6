"""Hours of training under random SIGKILL and SIGTERM: what a cluster does to a job in a bad week.

    python tests/faults/soak.py --minutes 120

Two trainings of the same configuration run side by side through the command line (in processes that are forked from
this one, which has imported torch): one is left alone, the other is killed or stopped every 30 to 120 seconds and
resumed. When it is done and the time is not up, the next two begin, with another seed. Checked: the newest checkpoint
never goes backwards; both end with the same bits and the same metrics; SIGTERM ends with code 75; no process, no
temporary file stays behind; memory and open files do not grow. Prints the figures and writes them as JSON; exit code 1
if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "faults")]

from forking import Child, command, members, survivors  # noqa: E402
from tiny_runs import make_images, metrics_without_timings, state_hash  # noqa: E402

OPTIONS = {
    "backbone": "smallconv",
    "image_size": 32,
    "crop_size": 24,
    "batch_size": 64,
    "clusters": 20,
    "small_cluster": 5,
    "workers": 1,
    "cache_gb": 0.0,  # the worker opens files all the time
    "checkpoint_minutes": 0.1,
    "log_interval": 20,
    "device": "cpu",
}
NUM_IMAGES = 640
PROBE_STEPS = 200
ROUND_MINUTES = 30
GROWTH = 1.1
"""Memory and open files at the end of the undisturbed run, over those after a fifth of it, at most."""


@dataclass
class Figures:
    """What happened in all rounds; written as JSON."""

    minutes_asked: float
    steps: int = 0
    minutes: float = 0.0
    rounds: int = 0
    sittings: int = 0
    killed: int = 0
    terminated: int = 0
    stopped_before_it_listened: int = 0
    seconds_to_stop: list[float] = field(default_factory=list)
    newest_step_at_each_fault: list[list[int]] = field(default_factory=list)
    steps_went_backwards: int = 0
    unexpected_exit_codes: list[int] = field(default_factory=list)
    surviving_processes: int = 0
    stray_files: list[str] = field(default_factory=list)
    rss_mb_after_a_fifth_and_at_the_end: list[tuple[float, float]] = field(default_factory=list)
    open_files_after_a_fifth_and_at_the_end: list[tuple[float, float]] = field(default_factory=list)
    largest_rss_mb_of_sittings: list[int] = field(default_factory=list)
    same_state: list[bool] = field(default_factory=list)
    same_metrics: list[bool] = field(default_factory=list)

    def failures(self) -> list[str]:
        """What was not kept of the promises."""
        checks = {
            "the final state differs": not all(self.same_state),
            "metrics.jsonl differs": not all(self.same_metrics),
            "the time was not up": self.minutes < self.minutes_asked,
            "a newest checkpoint went backwards": self.steps_went_backwards > 0,
            "an exit code was not expected": bool(self.unexpected_exit_codes),
            "a process survived": self.surviving_processes > 0,
            "temporary files stayed behind": bool(self.stray_files),
            "memory grew": any(end > GROWTH * early for early, end in self.rss_mb_after_a_fifth_and_at_the_end),
            "open files grew": any(end > early + 2 for early, end in self.open_files_after_a_fifth_and_at_the_end),
        }
        return [sentence for sentence, failed in checks.items() if failed]


class Usage:
    """Memory and open files of a process and its children over time."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []  # MB, files

    def sample(self, group: int) -> None:
        megabytes, files = 0.0, 0
        for pid in members(group):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                megabytes += int(status.split("VmRSS:")[1].split()[0]) / 1024
                files += len(os.listdir(f"/proc/{pid}/fd"))
            except (OSError, IndexError):
                continue  # gone meanwhile
        if files:
            self.samples.append((megabytes, files))

    def around(self, share: float) -> tuple[float, float]:
        """Median of a twentieth of the samples (five at least), from that share of the time on."""
        count = len(self.samples)
        part = self.samples[int(count * share) : int(count * share) + max(5, count // 20)]
        return statistics.median(s[0] for s in part), statistics.median(s[1] for s in part)


def start(folder: Path, *arguments: str) -> Child:
    """An `odcluster` command as a process of its own, with its own place for temporary files."""
    return Child(command(*arguments), folder / "output.txt", temporary=folder / "tmp")


def train_arguments(images: Path, run: Path, steps: int, seed: int) -> list[str]:
    options = {**OPTIONS, "max_steps": steps, "seed": seed}
    return ["train", str(images), "--out", str(run), *(f"--{k.replace('_', '-')}={v}" for k, v in options.items())]


def fitting_steps(images: Path, folder: Path, minutes: float) -> int:
    """Steps that about fit into that time while two trainings run side by side."""
    runs = [folder / f"probe{number}" for number in range(2)]
    for run in runs:
        run.mkdir(parents=True)
    processes = [start(run, *train_arguments(images, run / "run", PROBE_STEPS, 0)) for run in runs]
    assert [process.wait(3600) for process in processes] == [0, 0], (folder / "probe0" / "output.txt").read_text()
    seconds = []
    for run in runs:
        lines = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
        seconds.append(sum(line["timing"]["seconds"] for line in lines if "timing" in line))
    return int(PROBE_STEPS / max(seconds) * minutes * 60 * 0.6)  # starting again and again takes time


def newest_step(run: Path) -> int:
    return max((int(path.name[5:]) for path in run.glob("checkpoints/step-*")), default=0)


def disturb(figures: Figures, images: Path, folder: Path, options: argparse.Namespace, watch: Any) -> None:
    """Start, strike, resume, until the training is done. `watch` is called about every second."""
    run, chance = folder / "run", random.Random(options.seed + figures.rounds)
    steps: list[int] = []
    figures.newest_step_at_each_fault.append(steps)
    while True:
        first = train_arguments(images, run, figures.steps, figures.rounds)
        process, usage = start(folder, *(["resume", str(run)] if run.exists() else first)), Usage()
        figures.sittings += 1
        struck = time.monotonic() + chance.uniform(options.shortest, options.longest)
        while process.poll() is None and time.monotonic() < struck:
            usage.sample(process.pid)
            watch()
            time.sleep(1)
        if process.poll() is None:
            strike(figures, process, kill=chance.random() < 0.5)
        elif process.code != 0:
            figures.unexpected_exit_codes.append(process.code)
        figures.largest_rss_mb_of_sittings.append(round(max((sample[0] for sample in usage.samples), default=0.0)))
        figures.surviving_processes += survivors(process.pid)
        step = newest_step(run)
        figures.steps_went_backwards += step < max(steps, default=0)
        steps.append(step)
        print(f"{time.strftime('%H:%M:%S')} round {figures.rounds}, sitting {figures.sittings}: code {process.code}, "
              f"step {step} of {figures.steps}", flush=True)  # fmt: skip
        if process.code == 0 or len(figures.unexpected_exit_codes) > 3:
            break


def strike(figures: Figures, process: Child, kill: bool) -> None:
    if kill:
        figures.killed += 1
        process.send(signal.SIGKILL)
        process.wait()
        return
    figures.terminated += 1
    asked = time.monotonic()
    process.send(signal.SIGTERM)
    code = process.wait()
    if code == -signal.SIGTERM:  # still importing: nothing to save
        figures.stopped_before_it_listened += 1
        return
    figures.seconds_to_stop.append(round(time.monotonic() - asked, 2))
    if code not in (0, 75):
        figures.unexpected_exit_codes.append(code)


def stray_files(folder: Path) -> list[str]:
    """What should not be there after a run has ended: hidden names, and anything in the place for temporary files."""
    hidden = [path for path in folder.rglob("*") if path.name.startswith(".")]
    temporary = [path for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]  # torch's
    return sorted(str(path.relative_to(folder)) for path in {*hidden, *temporary})


def soak(options: argparse.Namespace, folder: Path) -> Figures:
    images = make_images(folder / "images", NUM_IMAGES, side=40)
    figures = Figures(options.minutes)
    figures.steps = options.steps or fitting_steps(images, folder, min(options.minutes, ROUND_MINUTES))
    print(f"{figures.steps} steps", flush=True)
    began = time.monotonic()
    while figures.minutes < options.minutes and not figures.unexpected_exit_codes:
        figures.rounds += 1
        play(figures, images, folder / f"round{figures.rounds}", options)
        figures.minutes = round((time.monotonic() - began) / 60, 1)
    return figures


def play(figures: Figures, images: Path, folder: Path, options: argparse.Namespace) -> None:
    """A round: both trainings from the first step to the last."""
    alone, disturbed = folder / "alone", folder / "disturbed"
    for place in (alone, disturbed):
        place.mkdir(parents=True)
    arguments = train_arguments(images, alone / "run", figures.steps, figures.rounds)
    reference, usage = start(alone, *arguments), Usage()

    def watch() -> None:
        if reference.poll() is None:
            usage.sample(reference.pid)

    disturb(figures, images, disturbed, options, watch)
    while reference.poll() is None:
        watch()
        time.sleep(1)
    assert reference.code == 0, (alone / "output.txt").read_text()
    (early_mb, early_files), (end_mb, end_files) = usage.around(0.2), usage.around(0.9)
    figures.rss_mb_after_a_fifth_and_at_the_end.append((round(early_mb), round(end_mb)))
    figures.open_files_after_a_fifth_and_at_the_end.append((early_files, end_files))
    figures.same_state.append(state_hash(alone / "run") == state_hash(disturbed / "run"))
    figures.same_metrics.append(metrics_without_timings(alone / "run") == metrics_without_timings(disturbed / "run"))
    figures.stray_files += stray_files(disturbed) + stray_files(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="begin new rounds until then")
    parser.add_argument("--steps", type=int, help="of a round (default: what takes about half an hour)")
    parser.add_argument("--shortest", type=float, default=30.0, help="seconds between faults, at least")
    parser.add_argument("--longest", type=float, default=120.0, help="seconds between faults, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        figures = soak(options, Path(folder))
    failures = figures.failures()
    text = json.dumps({**asdict(figures), "options": OPTIONS, "failures": failures}, indent=1)
    options.out.write_text(text + "\n")
    print(text)
    print("; ".join(failures) or "nothing was lost")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
