"""The default recipe on image sets of other sizes and kinds: does it end well everywhere? See docs/recipe.md.

    python benchmarks/any_size.py cifar10/train_webp.npz cifar10/test_webp.npz --epochs 30
    python benchmarks/any_size.py cifar10/train_webp.npz cifar10/test_webp.npz --cases "1,000 images"

Each case is `odcluster train` with nothing chosen by hand but, with --epochs, the length. Judged by what users see, the
share of labels that still change at the end and the largest cluster, and by labels that training never saw: linear
probe and 20 nearest neighbours on the last layer, before (untrained, batch norm settled) and after. A case whose file
exists in results/recipe/ is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from recipe import CPU, command_line, described, record
from small_data import judge

import odcluster
from odcluster import api
from odcluster.build import build_loader, build_method
from odcluster.data.sources import open_source
from odcluster.demonstrate import settle_batch_norm
from odcluster.models.backbones import Backbone
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag
from odcluster.training.run import open_run

Data = tuple[np.ndarray, np.ndarray]


def first(count: int) -> Callable[[np.ndarray, np.ndarray], Data]:
    return lambda images, labels: (images[:count], labels[:count])


def grey(images: np.ndarray, labels: np.ndarray) -> Data:
    """Without colour."""
    lightness = images.mean(axis=3, keepdims=True).round().astype(np.uint8)
    return lightness.repeat(3, axis=3), labels


def long_tail(images: np.ndarray, labels: np.ndarray) -> Data:
    """The largest class has 64 times as many images as the smallest; sizes fall by a constant factor."""
    classes = np.unique(labels)
    sizes = (2000 * 64 ** (-np.arange(len(classes)) / (len(classes) - 1))).round().astype(int)
    places = [np.flatnonzero(labels == c)[:size] for c, size in zip(classes, sizes, strict=True)]
    chosen = np.sort(np.concatenate(places))
    return images[chosen], labels[chosen]


def near_duplicates(images: np.ndarray, labels: np.ndarray) -> Data:
    """500 images, each ten times: shifted by a pixel or two and a little brighter or darker."""
    draws = np.random.default_rng(0)
    copies = []
    for image in images[:500]:
        for _ in range(10):
            shifted = np.roll(image, draws.integers(-2, 3, size=2), axis=(0, 1)).astype(int)
            copies.append((shifted + draws.integers(-8, 9)).clip(0, 255).astype(np.uint8))
    return np.stack(copies), labels[:500].repeat(10)


GREY = "5,000 grey images"
CASES: dict[str, Callable[[np.ndarray, np.ndarray], Data]] = {
    "1,000 images": first(1000),
    "5,000 images": first(5000),
    GREY: lambda images, labels: grey(images[:5000], labels[:5000]),
    "long tail, ratio 64": long_tail,
    "500 images, ten near-duplicates each": near_duplicates,
}


def verdicts(run: Path, data: Data, test: Data, seed: int) -> dict[str, Any]:
    """Before and after, on the last layer."""
    config = dataclasses.replace(open_run(run).config(), weights=None)
    sources, quiet = [open_source(images) for images, _ in (data, test)], Console(quiet=True)
    labels = [torch.from_numpy(labels) for _, labels in (data, test)]
    method = build_method(config, len(sources[0]), CPU, quiet)
    untrained = cast(Backbone, method.backbone)
    with (
        build_loader(config, sources[0], method, CPU, quiet, StopFlag()) as train,
        build_loader(config, sources[1], method, CPU, quiet, StopFlag()) as held_out,
    ):
        settle_batch_norm(untrained, train, np.arange(min(2048, len(sources[0]))), CPU, lambda doing, done, total: None)
        pairs = {"before": untrained, "after": odcluster.load_backbone(run)}
        last = untrained.stage_names[-1]
        return {name: judge(backbone, train, held_out, labels, [last]) for name, backbone in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--epochs", type=int, help="not given: what odcluster chooses, about 400,000 images in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/recipe"))
    parser.add_argument("--results", type=Path, default=Path("results/recipe"))
    given = parser.parse_args()
    source, held_out = open_source(given.train), open_source(given.test)
    images = np.stack([source.image(i) for i in range(len(source))])
    test = np.stack([held_out.image(i) for i in range(len(held_out))]), np.asarray(held_out.manifest.labels)
    for case in given.cases:
        out = given.results / f"any size, {case}, seed {given.seed}.json"
        if out.exists():
            continue
        data = CASES[case](images, np.asarray(source.manifest.labels))
        place = api.numbered(str(given.runs / case.replace(",", "").replace(" ", "-")))
        run = odcluster.train(data[0], out=place, seed=given.seed, epochs=given.epochs)
        about = described(run, data[1])
        about["largest cluster's share"] = about["largest cluster"] / len(data[1])
        record(out, command_line("any_size.py"), case=case, seed=given.seed, images=len(data[1]), training=about,
               result=verdicts(run, data, grey(*test) if case == GREY else test, given.seed))  # fmt: skip


if __name__ == "__main__":
    main()
