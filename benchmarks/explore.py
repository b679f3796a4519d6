"""How the explore server bears a million images and eight people at once.

    python benchmarks/explore.py --json explore.json
    python benchmarks/explore.py --images 20000 --seconds 3         # smaller
    python benchmarks/explore.py --keep /tmp/million                # keeps the run, and uses it again

The run is made up: rows around random centres, labels, a manifest and a checkpoint as training writes them. Its images
are JPEG files of 320 x 240 pixels; a thousand names each lead, by links between folders, to the same thousand files, so
that the server decodes real files without a million of them being made. The server is the real one, `odcluster explore`
in a process of its own; the clients are processes too, each asks again as soon as it has its answer. Every kind of
request is measured alone and the overview once more among all others. Thumbnails are half of the time new ones.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import report

TARGET_IMAGES = 1_000_000
TARGET_MS = 300.0
TARGET_GB = 3.0
FILES = 1000
DIM = 128
SORTS = ("size", "tightness", "change", "name", "id")
KINDS = ("overview", "cluster page", "thumbnail", "similar images")
MIXED = "mixed"


# --- The run ----------------------------------------------------------------------------------------


def make_run(folder: Path, num_images: int) -> Path:
    """Images and a run directory with one checkpoint, as `odcluster train` leaves them."""
    from odcluster.config import changed
    from odcluster.recipes import recipe
    from odcluster.training.run import create_run

    num_clusters = max(20, num_images // 100)
    manifest = make_images(folder / "images", num_images)
    config = changed(
        recipe("odc_small"),
        data=manifest.root,
        backbone="smallconv",
        clusters=num_clusters,
        small_cluster=3,
        epochs=10,
        batch_size=500,
        image_size=32,
        crop_size=32,
        workers=0,
        dim=DIM,
    )
    run = create_run(folder / "run", config, manifest)
    counts = write_checkpoint(run.checkpoints, num_images, num_clusters)
    write_metrics(run.metrics_file, num_images * 10 // 500, counts)
    return run.path


def make_images(root: Path, num_images: int) -> Any:
    import numpy as np
    from PIL import Image

    from odcluster.data.sources import Manifest

    random_numbers = np.random.default_rng(0)
    pool = root / "pool"
    pool.mkdir(parents=True)
    sizes = []
    for number in range(min(FILES, num_images)):
        blobs = random_numbers.integers(0, 255, (12, 16, 3)).astype(np.uint8)
        file = pool / f"{number:04d}.jpg"
        Image.fromarray(blobs).resize((320, 240), Image.Resampling.BICUBIC).save(file, quality=85)
        sizes.append(file.stat().st_size)
    num_folders = -(-num_images // len(sizes))
    for number in range(num_folders):
        (root / f"{number:05d}").symlink_to("pool", target_is_directory=True)
    paths = [f"{at // len(sizes):05d}/{at % len(sizes):04d}.jpg" for at in range(num_images)]
    return Manifest("folder", str(root), paths, np.resize(np.array(sizes, np.int64), num_images))


def write_checkpoint(directory: Path, num_images: int, num_clusters: int) -> list[int]:
    """Rows at different distances around the centre of their cluster; clusters of very different sizes."""
    import numpy as np
    import torch
    from torch.nn.functional import normalize

    from odcluster.training import checkpoint

    generator = torch.Generator().manual_seed(0)
    shares = np.random.default_rng(0).lognormal(0, 0.7, num_clusters)
    labels = torch.multinomial(torch.from_numpy(shares), num_images, replacement=True, generator=generator)
    labels[:num_clusters] = torch.arange(num_clusters)  # none is empty
    centroids = normalize(torch.randn(num_clusters, DIM, generator=generator), dim=1)
    rows = torch.empty(num_images, DIM)
    for start in range(0, num_images, 65536):
        own = labels[start : start + 65536]
        spread = 0.03 + 0.05 * torch.rand(len(own), 1, generator=generator)
        rows[start : start + 65536] = normalize(
            centroids[own] + spread * torch.randn(len(own), DIM, generator=generator), dim=1
        )
    memory = {"samples.rows": rows, "samples.labels": labels, "centroids.centroids": centroids}
    state = {"stem": "small", "normalisation": [[0.5] * 3, [0.25] * 3]}
    steps = num_images * 10 // 500
    checkpoint.save(directory, steps, {"memory": memory, "model": {"none": torch.zeros(1)}}, state)
    return torch.bincount(labels, minlength=num_clusters).tolist()


def write_metrics(path: Path, steps: int, counts: list[int]) -> None:
    """Four hundred lines of training and fifty records of all cluster sizes."""
    lines = []
    for at in range(1, 401):
        values = {"loss": 5 - at / 100, "change": 0.4 / at**0.3, "small_clusters": 0.1, "largest": max(counts)}
        timing = {"seconds": 10.0, "images_per_second": 500.0}
        lines.append({"step": steps * at // 400, "epoch": at // 40, **values, "timing": timing})
        if at % 8 == 0:
            lines.append({"step": steps * at // 400, "epoch": at // 40, "event": "sizes", "sizes": counts})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# --- The server -------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(run: Path) -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    """The server's process, its address and the seconds until it answered."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "odcluster", "explore", str(run), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        address = next((line.strip() for line in process.stdout if line.startswith("http")), "")
        if not address:
            sys.exit("the server did not start")
        Client(address).get("/api/run")
        yield process, address, time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment() -> dict[str, str]:
    """That of this process, with this checkout's package before any installed one."""
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def memory_gb(pid: int) -> dict[str, float]:
    """Largest and present resident memory, and the part of it that is not a mapped file; {} where it is not told."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 2**20 for name in ("VmHWM", "VmRSS", "RssAnon") if name in fields}


# --- The clients ------------------------------------------------------------------------------------


class Client:
    """One connection that stays open, with the token of the server."""

    def __init__(self, address: str) -> None:
        parts = urllib.parse.urlsplit(address)
        self.token = urllib.parse.parse_qs(parts.query)["token"][0]
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def get(self, path: str) -> bytes:
        self.connection.request("GET", path, headers={"X-Token": self.token})
        response = self.connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {content[:200]!r}")
        return content


def ask(client: Client, kind: str, draw: random.Random, num_images: int, num_clusters: int) -> float:
    """Milliseconds until the whole answer to one request was there."""
    if kind == "overview":
        page = draw.choice((0, 0, 0, draw.randrange(max(1, num_clusters // 60))))
        path = f"/api/clusters?sort={draw.choice(SORTS)}&order={draw.choice(('asc', 'desc'))}&page={page}&per_page=60"
    elif kind == "cluster page":
        path = f"/api/clusters/{draw.randrange(num_clusters)}?page=0&per_page=100"
    elif kind == "thumbnail":
        path = f"/thumb/{draw.choice((draw.randrange(num_images), draw.randrange(min(500, num_images))))}?size=192"
    else:
        path = f"/api/images/{draw.randrange(num_images)}/similar?count=40"
    began = time.perf_counter()
    client.get(path)
    return (time.perf_counter() - began) * 1000


def run_client(given: argparse.Namespace) -> None:
    """The times of one client, as JSON on its standard output."""
    client, draw = Client(given.address), random.Random(given.client)
    shown = json.loads(client.get("/api/run"))
    times: dict[str, list[float]] = {}
    time.sleep(max(0.0, given.start_at - time.time()))
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        kinds = (
            ["overview", *["thumbnail"] * 12, "cluster page", "similar images"] if given.kind == MIXED else [given.kind]
        )
        for kind in kinds:
            times.setdefault(kind, []).append(ask(client, kind, draw, shown["images"], shown["clusters"]))
    json.dump(times, sys.stdout)


def measure(address: str, kind: str, clients: int, seconds: float) -> dict[str, list[float]]:
    """The times of all clients together, by kind."""
    start_at = time.time() + 2.0
    command = [sys.executable, __file__, "--address", address, "--kind", kind, "--seconds", str(seconds)]
    processes = [
        subprocess.Popen(
            [*command, "--client", str(number), "--start-at", str(start_at)], stdout=subprocess.PIPE, text=True
        )
        for number in range(clients)
    ]
    times: dict[str, list[float]] = {}
    for process in processes:
        output, _ = process.communicate()
        if process.returncode != 0:
            sys.exit(f"a client failed while asking for: {kind}")
        for name, values in json.loads(output).items():
            times.setdefault(name, []).extend(values)
    return times


def quantile(values: list[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


# --- All of it --------------------------------------------------------------------------------------


def measure_all(run: Path, clients: int, seconds: float) -> list[report.Row]:
    import report

    rows = []
    with serving(run) as (process, address, ready):
        shown = json.loads(Client(address).get("/api/run"))
        about = f"{shown['images']:,} images, {shown['clusters']:,} clusters, {clients} clients"
        whole = shown["images"] == TARGET_IMAGES and clients == 8
        print(f"  {about}; ready after {ready:.1f} s", flush=True)
        rows.append(report.Row("explore: until the first answer", ready, None, "s", None, "", None, about))
        for phase in (*KINDS, MIXED):
            times = measure(address, phase, clients, seconds)
            for kind, values in times.items():
                p50, p95, p99 = (quantile(values, share) for share in (0.5, 0.95, 0.99))
                among = " among all others" if phase == MIXED else ""
                note = f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, {len(values):,} requests; {about}"
                print(f"  {kind + among:32} p50 {p50:7.1f}  p95 {p95:7.1f}  p99 {p99:7.1f} ms", flush=True)
                target = f"< {TARGET_MS:g} ms" if phase == "overview" else ""
                met = p95 < TARGET_MS if target and whole else None
                rows.append(report.Row(f"explore: {kind}{among}, p95", p95, None, "ms", None, target, met, note))
        memory = memory_gb(process.pid)
    if memory:
        note = f"{memory['RssAnon']:.2f} GB of it are not mapped files; {about}"
        met = memory["VmHWM"] < TARGET_GB if whole else None
        rows.append(
            report.Row(
                "explore: largest resident memory", memory["VmHWM"], None, "GB", None, f"< {TARGET_GB:g} GB", met, note
            )
        )
    else:
        rows.append(report.not_run("explore: largest resident memory", "this system does not tell it"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=TARGET_IMAGES)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="per kind of request")
    parser.add_argument("--quick", action="store_true", help="20,000 images, 3 seconds")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the run there, or use the one that is there")
    parser.add_argument("--json", "--out", dest="json", type=Path, metavar="FILE")
    for hidden in ("--address", "--kind"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start-at", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client is not None:
        run_client(given)
        return
    if given.make is not None:
        make_run(given.make, given.images)
        return
    import report

    num_images, seconds = (20_000, 3.0) if given.quick else (given.images, given.seconds)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        run = folder / "run"
        if not run.is_dir():
            print("  making the run", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            make = [sys.executable, __file__, "--make", str(folder.resolve()), "--images", str(num_images)]
            subprocess.run(make, check=True, env=environment())  # another process: its memory is free again afterwards
        rows = measure_all(run, given.clients, seconds)
    report.show(rows)
    if given.json:
        report.write(given.json, "explore", rows)


if __name__ == "__main__":
    main()
