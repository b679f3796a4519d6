"""k-means: ours beside faiss and scikit-learn's Lloyd, from the same start, and the initial clustering of ImageNet.

    python benchmarks/kmeans.py --json kmeans.json
    python benchmarks/kmeans.py --imagenet --json kmeans.json    # also 1,281,167 x 256 into 10,000 clusters: a while

Rows are mixtures of Gaussians, scaled to length 1, in 256 dimensions. "Like features": the variance falls along the
dimensions, as that of a network's features does, and the noise is as long as the centres; the bounds that spare
comparisons then spare as many (about half of 20 iterations) as on the samples memory of a real run. "Shapeless": all
dimensions alike and the noise twice as long, the worst case for them. The methods take turns; the shortest time of each
counts, and the inertia is computed by one function for all. faiss is optional: `pip install faiss-cpu`.
"""

from __future__ import annotations

import argparse
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import report
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from odcluster.clustering.kmeans import kmeans, nearest_centroids
from odcluster.data.randomness import Purpose, permutation

try:
    import faiss
except ImportError:
    faiss = None

ITERATIONS = 20
CLOSE = 1.01
"""Inertia within 1 % counts as the same."""
KINDS = {"like features": (0.25, 1.0, 0.5), "shapeless": (5.0, 2.0, 0.0)}
"""Components for each cluster, length of the noise, and the power with which the scale falls along the dimensions."""
IMAGENET, IMAGENET_CLUSTERS = 1_281_167, 10_000


def mixture(num: int, dim: int, clusters: int, kind: str) -> Tensor:
    """Rows of length 1 around random centres, made block by block."""
    per_cluster, noise, falling = KINDS[kind]
    draw = torch.Generator().manual_seed(0)
    scale = torch.arange(1, dim + 1).float().pow(-falling)
    centres = torch.randn(max(2, int(per_cluster * clusters)), dim, generator=draw)
    rows = torch.empty(num, dim)
    for part in rows.split(1 << 14):
        which = torch.randint(0, len(centres), (len(part),), generator=draw)
        part.normal_(generator=draw).mul_(noise).add_(centres[which]).mul_(scale)
        part.div_(part.norm(dim=1, keepdim=True))
    return rows


def ours(rows: Tensor, start: Tensor) -> Tensor:
    return kmeans(rows, len(start), iterations=ITERATIONS, start=start)[1]


def with_faiss(rows: Tensor, start: Tensor) -> Tensor:
    """All rows are used: faiss would otherwise draw 256 for each cluster."""
    faiss.omp_set_num_threads(torch.get_num_threads())
    model = faiss.Kmeans(
        rows.shape[1], len(start), niter=ITERATIONS, min_points_per_centroid=1, max_points_per_centroid=len(rows)
    )
    model.train(rows.numpy(), init_centroids=rows[start].numpy())
    return torch.from_numpy(model.centroids)


def with_scikit_learn(rows: Tensor, start: Tensor) -> Tensor:
    model = KMeans(
        len(start), algorithm="lloyd", init=rows[start].numpy(), n_init=1, max_iter=ITERATIONS, tol=0, copy_x=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has not converged
        return torch.from_numpy(model.fit(rows.numpy()).cluster_centers_)


def compare(num: int, dim: int, clusters: int, kind: str, rounds: int) -> list[report.Row]:
    rows = mixture(num, dim, clusters, kind)
    start = torch.from_numpy(permutation(0, 0, num, Purpose.KMEANS)[:clusters].copy())
    methods: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ours": ours, "scikit-learn": with_scikit_learn}
    if faiss is not None:
        methods["faiss"] = with_faiss
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    inertia: dict[str, float] = {}
    for turn in range(rounds):
        for name, method in methods.items():
            began = time.perf_counter()
            centroids = method(rows, start)
            seconds[name].append(time.perf_counter() - began)
            inertia[name] = float(nearest_centroids(rows, centroids)[1].sum(dtype=torch.float64))
            print(
                f"{kind}, round {turn + 1}: {name} {seconds[name][-1]:.2f} s, inertia {inertia[name]:.6g}", flush=True
            )
    what = f"k-means of {num:,} x {dim} into {clusters:,}, {ITERATIONS} iterations, {kind}"
    table = []
    for other, target, most in (("faiss", "<= 1x", 1.0), ("scikit-learn", "<= 0.5x", 0.5)):
        if other not in methods:
            table.append(report.not_run(f"{what}, beside {other}", "needs `pip install faiss-cpu`", target))
            continue
        ratio = min(seconds["ours"]) / min(seconds[other])
        difference = inertia["ours"] / inertia[other]
        table.append(
            report.Row(
                f"{what}, beside {other}",
                min(seconds["ours"]),
                min(seconds[other]),
                "s",
                ratio,
                f"{target}, inertia within 1 %",
                ratio <= most and difference <= CLOSE,
                f"inertia {difference:.4f} times that of {other}",
            )
        )
    return table


class PeakMemory(threading.Thread):
    """The largest resident size while it runs, in bytes beyond that at its start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_size = self.peak = resident()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.peak = max(self.peak, resident())

    def stop(self) -> int:
        self.ended.set()
        self.join()
        return self.peak - self.start_size


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise SystemExit("the resident size is read from /proc, which this system does not have; leave out --imagenet")


def initial_clustering(num: int, dim: int, clusters: int) -> list[report.Row]:
    """As ODC begins: time, memory beside the table, and the longest time without a poll."""
    rows = mixture(num, dim, clusters, "like features")
    polls = [time.perf_counter()]
    gaps = []
    began = polls[0]

    def poll(iteration: int) -> None:
        now = time.perf_counter()
        gaps.append(now - polls[-1])
        polls.append(now)
        if gaps[-1] > 1 or len(gaps) % 100 == 0:
            print(f"iteration {iteration}, {now - began:.0f} s", end="\r", flush=True)

    memory = PeakMemory()
    memory.start()
    kmeans(rows, clusters, iterations=ITERATIONS, poll=poll)
    seconds, beside = time.perf_counter() - began, memory.stop()
    print()
    what = f"k-means of {num:,} x {dim} into {clusters:,}, {ITERATIONS} iterations"
    return [
        report.Row(f"{what}: time", seconds, None, "s", None, "stated", None),
        report.Row(
            f"{what}: memory beside the table",
            beside / 2**20,
            rows.nbytes / 2**20,
            "MB",
            beside / rows.nbytes,
            "<= 0.15x",
            beside <= 0.15 * rows.nbytes,
            "the alternative is the table itself",
        ),
        report.Row(f"{what}: longest wait for a poll", max(gaps), None, "s", None, "<= 2 s", max(gaps) <= 2),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--clusters", type=int, default=2_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--imagenet", action="store_true", help="also cluster as many rows as ImageNet has images")
    parser.add_argument("--quick", action="store_true", help="a tenth of the clusters and a twentieth of the rows")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.rows, given.clusters, given.rounds = given.rows // 20, given.clusters // 10, 1
    table = []
    for kind in KINDS:
        table += compare(given.rows, given.dim, given.clusters, kind, given.rounds)
    if given.imagenet:
        scale = 50 if given.quick else 1
        table += initial_clustering(IMAGENET // scale, given.dim, IMAGENET_CLUSTERS // scale)
    report.show(table)
    if given.json:
        report.write(given.json, "kmeans", table)


if __name__ == "__main__":
    main()
