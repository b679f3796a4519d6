"""The memories on 1, 2 and 4 ranks of this machine (gloo): memory per rank, cost of a step, bytes on the wire.

    python benchmarks/scale.py --json scale.json        # N = 1.28 million, C = 10,000: a few minutes, 3 GB

Each rank computes with one thread, as torchrun sets it. A step is all that ODC does beside learning: features gathered
(each rank has its share of the batch), rows moved, labels by the nearest centroid, sums and counts, centroids every
10th step, the check for small clusters. Wall time needs cores that are free; processor time of a rank (all its threads,
gloo's among them) does not, and says what the rank would take on a core of its own. Of both, the median over rounds of
10 steps. Memory is what the process grew by when the memories were made and filled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from odcluster.clustering.balance import handle_small_clusters
from odcluster.clustering.memory import CentroidsMemory, SamplesMemory
from odcluster.ranks import Ranks, joined

INTERVAL, THRESHOLD, ROUNDS = 10, 20, 7


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(ranks: Ranks, num: int, dim: int, clusters: int, batch: int) -> dict[str, Any]:
    before = resident()
    samples, centroids = memories(ranks, num, dim, clusters)
    table = resident() - before
    generator = torch.Generator().manual_seed(0)
    walls, works, wire = [], [], []
    step = 0
    for _ in range(ROUNDS):
        batches = [torch.randint(0, num, (batch,), generator=generator) for _ in range(INTERVAL)]
        features = [torch.randn(batch, dim, generator=generator) for _ in range(INTERVAL)]
        ranks.meet()
        wall, work, sent = time.perf_counter(), time.process_time(), ranks.sent
        for ids, feature in zip(batches, features, strict=True):
            whole = ranks.gather(feature[ranks.own(batch)], ranks.sizes(batch))
            centroids.move(samples.update(ids, whole, centroids.centroids))
            step += 1
            if step % INTERVAL == 0:
                centroids.refresh()
            handle_small_clusters(samples, centroids, THRESHOLD, seed=0, step=step)
        walls.append((time.perf_counter() - wall) / INTERVAL)
        works.append((time.process_time() - work) / INTERVAL)
        wire.append((ranks.sent - sent) / INTERVAL)
    return {
        "table_bytes": table,
        "wall_ms": statistics.median(walls) * 1e3,
        "processor_ms": statistics.median(works) * 1e3,
        "bytes_per_step": statistics.median(wire),
        "exchange_ms": latency(ranks),
    }


def memories(ranks: Ranks, num: int, dim: int, clusters: int) -> tuple[SamplesMemory, CentroidsMemory]:
    samples, centroids = SamplesMemory(num, dim, 0.5, ranks), CentroidsMemory(clusters, dim, ranks)
    generator = torch.Generator().manual_seed(ranks.rank)
    for part in samples.rows.split(1 << 14):
        part.normal_(generator=generator)
        part.div_(part.norm(dim=1, keepdim=True))
    samples.labels.copy_(torch.arange(num) * 7919 % clusters)
    centroids.fill(samples)
    return samples, centroids


def latency(ranks: Ranks) -> float:
    """Milliseconds of the smallest exchange."""
    times = []
    for _ in range(50):
        began = time.perf_counter()
        ranks.any(False)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def launch(num_ranks: int, words: list[str], folder: Path) -> list[dict[str, Any]]:
    """What each rank measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ODCLUSTER_TIMEOUT": "600"}
    subprocess.run([*command, __file__, "--worker", str(folder), *words], env=environment, check=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("images", 1_280_000), ("dim", 256), ("clusters", 10_000), ("batch", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = (given.images, given.dim, given.clusters, given.batch)
    if given.worker:
        torch.set_num_threads(1)
        with joined(torch.device("cpu")) as ranks:
            found = measure(ranks, *sizes)
            (given.worker / f"{ranks.rank}.json").write_text(json.dumps(found))
        return
    import tempfile

    words = [f"--{name}={getattr(given, name)}" for name in ("images", "dim", "clusters", "batch")]
    results: dict[str, Any] = {"sizes": sizes, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    for count in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            each = launch(count, words, Path(folder))
        results[str(count)] = {key: max(found[key] for found in each) for key in each[0]}
        print(count, "ranks:", {key: round(value, 2) for key, value in results[str(count)].items()}, flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
