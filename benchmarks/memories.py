"""The two memories: a step beside the bare product it cannot do without, beside the literal algorithm, and its growth.

    python benchmarks/memories.py --json memories.json

A step is all that ODC does beside learning: update of the rows of the batch, their labels, sums and counts, centroids
every 10th step, loss weights, the check for small clusters. The bare product is `(rows @ centroids.T).argmax(1)`. The
literal algorithm is the published one: the same product, all centroids anew every 10th step from sorted labels, and the
sizes of all clusters counted twice a step. They take turns in rounds of 10 steps; medians are compared. Memory is that
of a process of its own which initialises ODC (features, k-means, repairs), trains and ends an epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import report
import torch
from torch import Tensor
from torch.nn import functional

from odcluster.clustering.balance import handle_small_clusters, loss_weights
from odcluster.clustering.memory import CentroidsMemory, SamplesMemory
from odcluster.config import changed
from odcluster.methods.interface import Batch, Outcome
from odcluster.methods.odc import ODC
from odcluster.models.backbones import create_backbone
from odcluster.recipes import odc_resnet50_imagenet

INTERVAL, MOMENTUM, THRESHOLD = 10, 0.5, 20
MOST, MOST_MEMORY, MOST_PASSES = 1.25, 1.15, 3
Step = Callable[[Tensor, Tensor, int], None]
"""Ids of a batch, their features, the number of the step."""


class Data:
    """Images around as many directions as there are clusters; a feature is the image's row and some noise."""

    def __init__(self, num: int, dim: int, clusters: int, batch: int) -> None:
        self.draw = torch.Generator().manual_seed(0)
        self.num, self.batch = num, batch
        self.centres = functional.normalize(torch.randn(clusters, dim, generator=self.draw), dim=1)
        self.labels = torch.arange(num) * 7919 % clusters  # equal sizes, spread over the table

    def fill(self, rows: Tensor) -> Tensor:
        size = 1 << 14
        for part, label in zip(rows.split(size), self.labels.split(size), strict=True):
            part.normal_(generator=self.draw).mul_(0.7 / rows.shape[1] ** 0.5).add_(self.centres[label])
            part.div_(part.norm(dim=1, keepdim=True))
        return rows

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, self.num, (self.batch,), generator=self.draw)
        noise = torch.randn(self.batch, rows.shape[1], generator=self.draw) / rows.shape[1] ** 0.5
        return ids, rows[ids] + 0.7 * noise


class Ours:
    def __init__(self, data: Data, threshold: int = THRESHOLD) -> None:
        clusters, dim = data.centres.shape
        self.samples, self.memory = SamplesMemory(data.num, dim, MOMENTUM), CentroidsMemory(clusters, dim)
        data.fill(self.samples.rows)
        self.samples.labels.copy_(data.labels)
        self.memory.fill(self.samples)
        self.threshold = threshold
        self.handled = 0

    def step(self, ids: Tensor, features: Tensor, step: int) -> None:
        loss_weights(self.memory.counts)
        self.memory.move(self.samples.update(ids, features, self.memory.centroids))
        if (step + 1) % INTERVAL == 0:
            self.memory.refresh()
        self.handled += handle_small_clusters(self.samples, self.memory, self.threshold, seed=0, step=step + 1)


class Literal:
    """Straight from the description; its small clusters are only looked for, as nearly every step finds none."""

    def __init__(self, ours: Ours) -> None:
        self.rows, self.labels = ours.samples.rows.clone(), ours.samples.labels.clone()
        self.centroids = ours.memory.centroids.clone()

    def step(self, ids: Tensor, features: Tensor, step: int) -> None:
        clusters = len(self.centroids)
        torch.bincount(self.labels, minlength=clusters).clamp(min=1).float().rsqrt()  # loss weights
        self.rows[ids] = MOMENTUM * functional.normalize(features, dim=1) + (1 - MOMENTUM) * self.rows[ids]
        self.labels[ids] = (self.rows[ids] @ self.centroids.T - self.centroids.square().sum(dim=1) / 2).argmax(dim=1)
        if (step + 1) % INTERVAL == 0:
            order = torch.argsort(self.labels)
            sizes = torch.bincount(self.labels, minlength=clusters).tolist()
            for cluster, members in enumerate(order.split(sizes)):
                if len(members) > 0:
                    self.centroids[cluster] = self.rows[members].mean(dim=0)
        (torch.bincount(self.labels, minlength=clusters) <= THRESHOLD).any()


def average_steps(contestants: dict[str, Step], ours: Ours, data: Data, rounds: int) -> dict[str, float]:
    """Seconds of a step: the median over rounds of the mean over INTERVAL steps, in turn, always of new images."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        batches = [data.batch_of(ours.samples.rows) for _ in range(INTERVAL)]
        for name, step in contestants.items():
            began = time.perf_counter()
            for at, (ids, features) in enumerate(batches):
                step(ids, features, turn * INTERVAL + at)
            if turn > 0:  # the first round touches memory for the first time
                seconds[name].append((time.perf_counter() - began) / INTERVAL)
    return {name: statistics.median(times) for name, times in seconds.items()}


def one_step(given: argparse.Namespace) -> list[report.Row]:
    data = Data(given.images, given.dim, given.clusters, given.batch)
    ours = Ours(data)
    literal = Literal(ours)

    def bare(ids: Tensor, features: Tensor, step: int) -> None:
        (features @ ours.memory.centroids.T).argmax(dim=1)

    times = average_steps({"bare": bare, "ours": ours.step, "literal": literal.step}, ours, data, given.rounds)
    what = f"memories, N = {given.images:,}, C = {given.clusters:,}, D = {given.dim}, B = {given.batch}: a step"
    ratio = times["ours"] / times["bare"]
    note = f"small clusters handled on the way: {ours.handled}"
    rows = [
        report.Row(f"{what}, beside the bare product", 1e3 * times["ours"], 1e3 * times["bare"], "ms", ratio,
                   f"<= {MOST}x", ratio <= MOST, note),
        report.Row(f"{what}, beside the literal algorithm", 1e3 * times["ours"], 1e3 * times["literal"], "ms",
                   times["ours"] / times["literal"], "", None),
    ]  # fmt: skip
    del literal
    return [*rows, small_cluster(ours, what.split(":")[0])]


def small_cluster(ours: Ours, what: str) -> report.Row:
    """Again and again, all but a few members of a cluster are given to another one."""
    passes, seconds, one_pass = [], [], []
    members = SamplesMemory.members
    for turn in range(5):
        ours.samples.labels[ours.samples.members(turn)[THRESHOLD // 2 :]] = turn + 5
        ours.memory.fill(ours.samples)
        scans: list[int] = []
        SamplesMemory.members = lambda self, cluster, scans=scans: (scans.append(cluster), members(self, cluster))[1]  # type: ignore[method-assign, misc, assignment]
        began = time.perf_counter()
        handled = handle_small_clusters(ours.samples, ours.memory, THRESHOLD, seed=0, step=turn)
        seconds.append((time.perf_counter() - began) / handled)
        SamplesMemory.members = members  # type: ignore[method-assign]
        passes.append(len(scans) / handled)
        began = time.perf_counter()
        ours.samples.members(0)
        one_pass.append(time.perf_counter() - began)
    return report.Row(
        f"{what}: one small cluster handled",
        1e3 * statistics.median(seconds),
        1e3 * statistics.median(one_pass),
        "ms",
        statistics.median(seconds) / statistics.median(one_pass),
        f"<= {MOST_PASSES} passes over the labels",
        max(passes) <= MOST_PASSES,
        f"{max(passes):.0f} passes over the labels; the alternative is one such pass",
    )


def growth(given: argparse.Namespace) -> list[report.Row]:
    """Flat in N, linear in C."""
    scale = 10 if given.quick else 1
    images = {num: step_time(num, 64, 1000, given) for num in (100_000, 1_000_000 // scale, 10_000_000 // scale)}
    clusters = {num: step_time(1_000_000 // scale, 64, num, given) for num in (1000, 10_000, 100_000 // scale)}
    return [grown("images", images, 1.2), grown("clusters", clusters, max(clusters) / min(clusters))]


def grown(what: str, seconds: dict[int, float], most: float) -> report.Row:
    """The most of it beside the fewest."""
    few, many = seconds[min(seconds)], seconds[max(seconds)]
    listed = ", ".join(f"{num:,}: {1e3 * value:.2f} ms" for num, value in seconds.items())
    factor = f"{max(seconds) // min(seconds)} times as many {what}"
    return report.Row(
        f"memories, {factor}: a step", 1e3 * many, 1e3 * few, "ms", many / few, f"<= {most:g}x", many / few <= most,
        f"D = 64; {what}: {listed}",
    )  # fmt: skip


def step_time(num: int, dim: int, clusters: int, given: argparse.Namespace) -> float:
    data = Data(num, dim, clusters, given.batch)
    ours = Ours(data, threshold=0)
    return average_steps({"ours": ours.step}, ours, data, given.rounds)["ours"]


class MadeSurvey:
    """In place of images: features that come in batches, as those of a network would."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def features(self, embed: object, out: Tensor) -> tuple[Tensor, Tensor]:
        return self.data.fill(out).mul_(3.0), torch.ones(self.data.num, dtype=torch.bool)

    def calibrate(self, network: object, embed: object, num_batches: int) -> None:
        return None

    def poll(self, doing: str, done: int, total: int) -> None:
        return None


def peak_memory(given: argparse.Namespace) -> None:
    """The child: initialise, train, end the epoch; print the growth of the largest resident size in bytes."""
    config = changed(
        odc_resnet50_imagenet(), backbone="smallconv", clusters=given.clusters, dim=given.dim, small_cluster=THRESHOLD,
        image_size=16, batch_size=given.batch, epochs=1, lr=0.1, kmeans_iterations=given.iterations,
    )  # fmt: skip
    backbone = create_backbone("smallconv", image_size=16)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far is forgotten
    method = ODC(backbone, given.images, config)
    data = Data(given.images, given.dim, given.clusters, given.batch)
    began = time.perf_counter()
    method.begin_epoch(0, MadeSurvey(data))  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    for step in range(INTERVAL):
        ids, features = data.batch_of(method.samples.rows)
        method.after_step(Batch(ids, torch.empty(0), epoch=0, step=step), Outcome(torch.zeros(()), features))
    method.end_epoch(0)
    table = method.samples.rows.nbytes
    print(json.dumps({"peak": status("VmHWM") - before, "table": table, "seconds": seconds}))


def status(entry: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(entry))


def memory(given: argparse.Namespace) -> report.Row:
    what = f"memories, N = {given.images:,}, D = {given.dim}: peak from initialisation to the end of an epoch"
    target = f"<= {MOST_MEMORY}x the table"
    if not Path("/proc/self/clear_refs").exists():
        return report.not_run(what, "the peak is read from /proc, which only Linux has", target)
    sizes = [f"--{name}={getattr(given, name)}" for name in ("images", "dim", "clusters", "batch", "iterations")]
    done = subprocess.run([sys.executable, __file__, "--child", *sizes], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the measurement of memory failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    ratio = found["peak"] / found["table"]
    return report.Row(
        what, found["peak"] / 2**20, found["table"] / 2**20, "MB", ratio, target, ratio <= MOST_MEMORY,
        f"initialising with {given.iterations} iterations of k-means took {found['seconds']:.0f} s; the alternative is "
        "the table of features alone",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--clusters", type=int, default=10_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=3, help="of k-means where memory is measured")
    parser.add_argument("--quick", action="store_true", help="a 20th of the images and clusters, and smaller growth")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        peak_memory(given)
        return
    if given.quick:
        given.images, given.clusters, given.rounds = given.images // 20, given.clusters // 20, 2
    rows = [memory(given), *one_step(given), *growth(given)]
    report.show(rows)
    if given.json:
        report.write(given.json, "memories", rows)


if __name__ == "__main__":
    main()
