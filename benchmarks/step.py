"""One step of ODC beside a supervised step, and how long real training waits for images.

    python benchmarks/step.py --json step.json
    python benchmarks/step.py --profile            # also where the difference goes

The ODC step is the trainer's own (`Trainer._train_step`): normalisation, forward, backward, finite check, SGD,
memories, centroids, small clusters; the paper's recipe with 1,000 clusters of 50,000 images and 256 dimensions. The
supervised one is the same backbone with a linear layer for 1,000 classes on its pooled features, cross-entropy and SGD,
and no check of any kind. Both take the same uint8 views from memory. They alternate; medians are compared.

Waiting for data is read from metrics.jsonl of a real `odcluster train` on JPEG files that the script makes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import report
import torch
from torch import Tensor, nn
from torch.nn import functional

from odcluster import api
from odcluster.build import build_backbone, build_loader, build_method
from odcluster.clustering.kmeans import kmeans
from odcluster.config import Config, changed
from odcluster.data.loading import RawBatch
from odcluster.data.order import batch_ids, epoch_order
from odcluster.data.sources import open_source
from odcluster.methods import odc as odc_module
from odcluster.methods.odc import ODC
from odcluster.models.heads import l2_normalise
from odcluster.recipes import recipe
from odcluster.training import trainer as trainer_module
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag
from odcluster.training.metrics import read_metrics
from odcluster.training.resolve import resolve
from odcluster.training.survey import to_network
from odcluster.training.trainer import MEMORY_PREFIXES, Trainer

CPU = torch.device("cpu")
CLASSES = 1000
POOL = 8
"""Batches of views that are kept in memory and taken in turn; image i is always seen in the same ones."""
MOST = 1.03
"""The target: a step of ODC costs at most 3 % more than a supervised one."""
MOST_WAITING = 0.05
ROOM = 1.3
"""The loader alone must be this many times as fast as training before the wait is judged: else it is input-bound."""


def made_images(num: int, size: int, seed: int = 0) -> np.ndarray:
    """Patches of colour with some noise, uint8 [num, size, size, 3]: unlike pure noise, they differ in feature."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (num, 4, 4, 3), dtype=np.uint8)
    images = np.stack([cv2.resize(image, (size, size), interpolation=cv2.INTER_CUBIC) for image in coarse])
    noise = draw.integers(-16, 17, (size, size, 3))
    return np.clip(images.astype(np.int16) + noise, 0, 255).astype(np.uint8)


class Contest:
    """An ODC trainer with full memories and a supervised network, fed with the same batches."""

    def __init__(self, backbone: str, size: int, batch_size: int, num_samples: int, clusters: int) -> None:
        pool = made_images(POOL * batch_size, size)
        self.views = torch.from_numpy(pool).unflatten(0, (POOL, 1, batch_size))  # [POOL, V=1, B, H, W, 3]
        source = open_source(np.broadcast_to(pool[0], (num_samples, size, size, 3)))  # only its length matters
        config = changed(
            recipe("odc_resnet50_imagenet"),
            backbone=backbone, image_size=size, batch_size=batch_size, clusters=clusters, epochs=1, workers=0,
            device="cpu",
        )  # fmt: skip
        self.config, _ = resolve(config, source, CPU)
        quiet, stop = Console(quiet=True), StopFlag()
        method = build_method(self.config, num_samples, CPU, quiet)
        loader = build_loader(self.config, source, method, CPU, quiet, stop)
        self.trainer = Trainer(method, loader, source.manifest, self.config, CPU, quiet, stop)
        self.odc = cast(ODC, method)
        self.fill_memories()
        self.supervised = self.supervised_network()
        self.optimizer = torch.optim.SGD(self.supervised.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
        self.order = epoch_order(0, 0, num_samples)

    @torch.no_grad()
    def fill_memories(self) -> None:
        """As after some training: every image has a feature in its cluster, with the spread that dropout gives.

        Image i is the view i modulo the pool; the backbone sees each view once, the neck as often as it takes.
        """
        odc, trainer = self.odc, self.trainer
        odc.train()
        seen = torch.cat([odc.backbone(to_network(batch[0], trainer.mean, trainer.std)) for batch in self.views])
        rows, chunk = odc.samples.rows, len(seen)
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            part.copy_(l2_normalise(odc.neck(seen))[: len(part)])
        odc.samples.labels.copy_(kmeans(rows, len(odc.centroids.counts), iterations=5, seed=0)[0])
        odc.centroids.fill(odc.samples)
        odc.handle_small_clusters(step=-1)

    def supervised_network(self) -> nn.Sequential:
        backbone = build_backbone(self.config, Console(quiet=True))
        network = nn.Sequential(backbone, nn.Linear(backbone.num_features, CLASSES))
        return cast(Any, network).to(memory_format=torch.channels_last)

    def batch(self, step: int) -> RawBatch:
        """Ids whose views these are: id modulo the pool is the view, as in `fill_memories`."""
        at = step % POOL
        size = self.views.shape[2]
        wanted = batch_ids(self.order, step % (len(self.order) // size), size)
        rounds = len(self.order) // (POOL * size)
        ids = (wanted % rounds) * (POOL * size) + at * size + np.arange(size)
        return RawBatch(torch.from_numpy(ids), self.views[at], [])

    def odc_step(self, step: int) -> None:
        self.trainer.step = step
        self.trainer._train_step(self.batch(step), epoch=0)

    def supervised_step(self, step: int) -> None:
        raw, trainer = self.batch(step), self.trainer
        labels = raw.ids % CLASSES
        self.supervised.train()
        with trainer.autocast:
            logits = self.supervised(to_network(raw.images[0], trainer.mean, trainer.std))
        loss = functional.cross_entropy(logits.float(), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def seconds_of(step: Callable[[int], None], at: int) -> float:
    began = time.perf_counter()
    step(at)
    return time.perf_counter() - began


def compare(contest: Contest, what: str, steps: int) -> report.Row:
    """Medians of alternating steps, and of the ratio of neighbours, which a slow minute of the machine hits alike."""
    for warm in range(3):
        contest.odc_step(warm)
        contest.supervised_step(warm)
    contest.trainer.window.means()
    ours, theirs = [], []
    for at in range(3, steps + 3):
        order = [(ours, contest.odc_step), (theirs, contest.supervised_step)]
        for times, step in order if at % 2 else order[::-1]:
            times.append(seconds_of(step, at))
        if at % 10 == 0:
            print(f"  {what}: {at} of {steps + 3}", flush=True)
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    means = contest.trainer.window.means()
    note = (
        f"{steps} steps of each; the ratio is the median over neighbouring steps; of ODC's labels "
        f"{means['change']:.0%} changed per step, {means['small_clusters']:.2g} small clusters were handled"
    )
    ms = [1000 * statistics.median(times) for times in (ours, theirs)]
    return report.Row(what, ms[0], ms[1], "ms", ratio, f"<= {MOST}x", ratio <= MOST, note)


# Where the time goes ------------------------------------------------------------


@contextmanager
def timed(parts: dict[str, tuple[object, str]]) -> Iterator[dict[str, float]]:
    """Seconds spent in each of the named functions while the block runs; they are put back afterwards."""
    spent = dict.fromkeys(parts, 0.0)
    originals = {label: getattr(owner, name) for label, (owner, name) in parts.items()}

    def wrapped(label: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return originals[label](*arguments, **keywords)
            finally:
                spent[label] += time.perf_counter() - began

        return call

    own = {label: name in vars(owner) for label, (owner, name) in parts.items()}
    for label, (owner, name) in parts.items():
        setattr(owner, name, wrapped(label))
    try:
        yield spent
    finally:
        for label, (owner, name) in parts.items():
            if own[label]:
                setattr(owner, name, originals[label])
            else:
                delattr(owner, name)


def profile(contest: Contest, steps: int) -> None:
    """Milliseconds of the parts of an ODC step, and of what the trainer adds to a bare one."""
    odc, trainer = contest.odc, contest.trainer
    assert odc.classifier is not None
    parts: dict[str, tuple[object, str]] = {
        "seed of the step": (trainer_module, "seed_torch"),
        "normalisation": (trainer_module, "to_network"),
        "backbone, forward": (odc.backbone, "forward"),
        "neck, forward": (odc.neck, "forward"),
        "classifier, forward": (odc.classifier, "forward"),
        "loss weights": (odc_module, "loss_weights"),
        "weighted cross-entropy": (odc_module, "weighted_cross_entropy"),
        "backward": (Tensor, "backward"),
        "gradient norm": (nn.utils, "get_total_norm"),
        "optimiser": (trainer.optimizer, "step"),
        "samples memory": (odc.samples, "update"),
        "sums and counts": (odc.centroids, "move"),
        "centroids (every 10th step)": (odc.centroids, "refresh"),
        "small clusters": (odc, "handle_small_clusters"),
        "window of metrics": (trainer.window, "add"),
    }
    with timed(parts) as spent:
        whole = sum(seconds_of(contest.odc_step, at) for at in range(steps))
    spent["copies of batch-norm statistics"] = sum(seconds_of(lambda _: copies(trainer), at) for at in range(steps))
    spent["walks over the modules"] = sum(seconds_of(lambda _: walks(trainer), at) for at in range(steps))
    rest = whole - sum(spent.values())
    print(f"\n{1000 * whole / steps:9.3f} ms  100.0 %  a step of ODC, mean of {steps}")
    for label, seconds in [*sorted(spent.items(), key=lambda item: -item[1]), ("the rest", rest)]:
        print(f"{1000 * seconds / steps:9.3f} ms  {seconds / whole:6.1%}  {label}", flush=True)


def copies(trainer: Trainer) -> None:
    """What `_train_step` keeps so that a non-finite step can be undone."""
    running = [buffer for name, buffer in trainer.module.named_buffers() if not name.startswith(MEMORY_PREFIXES)]
    [buffer.clone() for buffer in running]


def walks(trainer: Trainer) -> None:
    trainer.module.train()
    [parameter.grad for parameter in trainer.module.parameters() if parameter.grad is not None]


# Waiting for data ------------------------------------------------------------


def write_photos(folder: Path, num: int, kinds: int) -> None:
    """JPEG files of 500 x 375, the size of ImageNet's photos; `kinds` different ones, over and over."""
    folder.mkdir()
    different = [
        cv2.imencode(".jpg", image[:375], [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
        for image in made_images(kinds, 500)
    ]
    for at in range(num):
        (folder / f"{at:05d}.jpg").write_bytes(different[at % kinds])


def loader_speed(config: Config, photos: Path, seconds: float) -> float:
    """Images per second of the loader by itself, with the workers of the run."""
    source = open_source(photos)
    quiet, stop = Console(quiet=True), StopFlag()
    method = build_method(config, len(source), CPU, quiet)
    order = epoch_order(0, 0, len(source))
    batches = [np.resize(np.roll(order, -at * 7), config.batch_size or 1) for at in range(10_000)]
    with build_loader(config, source, method, CPU, quiet, stop) as loader:
        images, began = 0, 0.0
        for at, raw in enumerate(loader.training(0, batches)):
            if at == 4:  # the workers have started and filled their queue
                images, began = 0, time.monotonic()
            images += len(raw.ids)
            if at > 4 and time.monotonic() - began > seconds:
                break
    return images / (time.monotonic() - began)


def waiting_row(quick: bool) -> report.Row:
    """The share of time that a real run of about a minute waits for its loader."""
    num, size, backbone = (96, 32, "smallconv") if quick else (1000, 224, "resnet18")
    length = ["--max-steps", "6", "--log-interval", "2"] if quick else ["--max-steps", "16", "--log-interval", "4"]
    what = f"share of training that waits for {num} JPEG files of 500 x 375, {backbone} at {size} px"
    with tempfile.TemporaryDirectory() as folder:
        photos, run = Path(folder) / "photos", Path(folder) / "run"
        print(f"  {what}: making the files", flush=True)
        write_photos(photos, num, kinds=8 if quick else 100)
        options = (
            f"--recipe odc_resnet50_imagenet --backbone {backbone} --clusters 2 --image-size {size} --batch-size 32"
        )
        # Without the cache, so that files are read and decoded in every epoch, as with a million of them.
        command = [sys.executable, "-m", "odcluster", "train", str(photos), "--out", str(run), *options.split()]
        command += ["--cache-gb", "0", "--workers", "1", *length]
        subprocess.run(command, check=True)
        lines = [line["timing"] for line in read_metrics(run / "metrics.jsonl") if "timing" in line]
        config = api.open_run(run).config()
        alone = loader_speed(config, photos, 1.0 if quick else 5.0)
    seconds = sum(timing["seconds"] for timing in lines)
    share = sum(timing["waiting"] * timing["seconds"] for timing in lines) / seconds
    speed = sum(timing["images_per_second"] * timing["seconds"] for timing in lines) / seconds
    can = alone >= ROOM * speed
    note = f"{speed:.0f} images/s trained; the loader alone makes {alone:.0f}/s with {config.workers} worker"
    note += "" if can else "; input-bound, so the target cannot be judged"
    return report.Row(what, 100 * share, None, "%", None, "< 5 %", share < MOST_WAITING if can else None, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="print the parts of a step")
    parser.add_argument("--steps", type=int, help="steps of each; not given: 10")
    parser.add_argument("--skip-waiting", action="store_true", help="no training on files")
    given = parser.parse_args()
    cases = [("resnet18", 64, 64, 10), ("resnet50", 224, 8, 10)]
    if given.quick:
        cases = [("smallconv", 32, 16, 12)]
    num_samples, clusters = (5_000, 100) if given.quick else (50_000, 1_000)
    rows = []
    for backbone, size, batch_size, steps in cases:
        what = f"training step, {backbone} at {size} px, batch {batch_size}, beside a supervised one"
        print(f"  {what}: filling the memories", flush=True)
        contest = Contest(backbone, size, batch_size, num_samples, clusters)
        rows.append(compare(contest, what, given.steps or steps))
        if given.profile:
            profile(contest, given.steps or steps)
        del contest
    if not given.skip_waiting:
        rows.append(waiting_row(given.quick))
    report.show(rows)
    if given.json:
        report.write(given.json, "step", rows)


if __name__ == "__main__":
    main()
