"""A training step while other programs run: waiting threads that sleep, beside torch as it comes.

    python benchmarks/busy.py --json busy.json
    python benchmarks/busy.py --others 0                 # nothing else runs

A step of `smallconv` (256 views of 24 px, forward, loss, backward, SGD) in processes of its own, which take turns: ours
has GOMP_SPINCOUNT as `odcluster` sets it and, in bfloat16, weight gradients by shares of the batch (odcluster/models/
convolutions.py); the other has neither. Meanwhile `--others` processes keep a core busy each: none, then as many as
there are cores. Medians over rounds, because how the system hands out the cores differs from moment to moment.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time

import report
import torch
from torch.nn import functional as F

from odcluster.models.backbones import create_backbone
from odcluster.models.convolutions import share_weight_gradients
from odcluster.training.devices import has_bfloat16

BATCH, SIDE = 256, 24
SPIN = "GOMP_SPINCOUNT"
IDLE_TARGET, BUSY_TARGET = 1.05, 0.7


def measure(precision: str, ours: bool, seconds: float) -> float:
    """Milliseconds of a step, in this process."""
    backbone = create_backbone("smallconv", image_size=32)
    backbone.to(memory_format=torch.channels_last)
    if ours and precision == "bfloat16":
        share_weight_gradients(backbone)
    head = torch.nn.Linear(backbone.num_features, 10)
    optimiser = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.0)
    views = torch.randn(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(BATCH) % 10
    began, steps, warm = time.perf_counter(), 0, 3
    while steps < warm + 3 or time.perf_counter() - began < seconds:
        if steps == warm:
            began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            said = head(backbone(views))
        optimiser.zero_grad()
        F.cross_entropy(said.float(), labels).backward()
        optimiser.step()
        steps += 1
    return (time.perf_counter() - began) / (steps - warm) * 1000


def in_a_process(precision: str, ours: bool, seconds: float) -> float:
    environment = {k: v for k, v in os.environ.items() if k not in (SPIN, "OMP_WAIT_POLICY")}
    if ours:
        environment[SPIN] = "1000"
    command = [sys.executable, __file__, "--measure", precision, "--seconds", str(seconds), *["--ours"] * ours]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def spin() -> None:
    while True:
        pass


def compare(precision: str, others: int, rounds: int, seconds: float) -> report.Row:
    programs = [multiprocessing.Process(target=spin, daemon=True) for _ in range(others)]
    for program in programs:
        program.start()
    try:
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(rounds):
            for ours in (True, False) if turn % 2 == 0 else (False, True):
                times[ours].append(in_a_process(precision, ours, seconds))
            print(
                f"  {precision}, {others} others, round {turn + 1}: {times[True][-1]:.0f} / {times[False][-1]:.0f} ms"
            )
    finally:
        for program in programs:
            program.terminate()
    own, plain = statistics.median(times[True]), statistics.median(times[False])
    ratio = statistics.median(a / b for a, b in zip(times[True], times[False], strict=True))
    spread = [f"{min(values):.0f} to {max(values):.0f} ms" for values in (times[True], times[False])]
    limit = BUSY_TARGET if others else IDLE_TARGET
    return report.Row(
        f"training step, smallconv, {precision}, {others} other programs on {os.cpu_count()} cores, beside torch alone",
        own,
        plain,
        "ms",
        ratio,
        f"<= {limit:g}x",
        ratio <= limit,
        f"medians of {rounds} rounds; ours {spread[0]}, torch {spread[1]}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", type=int, nargs="+", default=[0, os.cpu_count() or 1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--measure", choices=["bfloat16", "float32"], help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(measure(given.measure, given.ours, given.seconds))
        return
    rounds, seconds = (1, 0.5) if given.quick else (given.rounds, given.seconds)
    precisions = ["float32", *["bfloat16"] * has_bfloat16(torch.device("cpu"))]
    rows = [compare(precision, others, rounds, seconds) for others in given.others for precision in precisions]
    report.show(rows)
    if given.json:
        report.write(given.json, "busy", rows)


if __name__ == "__main__":
    main()
