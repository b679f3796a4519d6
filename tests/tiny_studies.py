"""Studies on a few synthetic images, with settings that take a second; everything else about them is real."""

from __future__ import annotations

import dataclasses
import functools
import io
from pathlib import Path

import numpy as np
from PIL import Image

from odcluster.config import Config, changed
from odcluster.studies.plan import Images, Judgement, Plan, Scale, Study, Training

NUM_CLASSES = 5


def make_study_data(root: Path) -> Path:
    """A folder as `--data` wants it: CIFAR-10 and Tiny-ImageNet as packed files, VOC as a folder."""
    for name, parts in {
        "cifar10": {"train_png": 130, "test_png": 30},
        "tiny_imagenet": {"train_png": 120, "val_png": 30},
    }.items():
        (root / name).mkdir(parents=True)
        for seed, (part, count) in enumerate(parts.items()):
            pack_images(root / name / f"{part}.npz", count, seed)
    make_small_voc(root / "voc2007" / "VOC2007")
    return root


def pack_images(path: Path, count: int, seed: int, side: int = 16) -> None:
    """Stripes whose direction is their class."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side]
    files = []
    for i in range(count):
        kind = i % NUM_CLASSES
        wave = np.sin((x * np.cos(kind) + y * np.sin(kind)) * (0.6 + 0.2 * kind) + random.uniform(0, 6))
        pixels = random.uniform(60, 190, 3) + 50 * wave[..., None] + random.normal(0, 8, (side, side, 3))
        buffer = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
        files.append(buffer.getvalue())
    np.savez(
        path,
        data=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        labels=np.arange(count) % NUM_CLASSES,
        class_names=np.array([f"stripe {i}" for i in range(NUM_CLASSES)]),
    )


def make_small_voc(root: Path) -> None:
    sets = root / "ImageSets" / "Main"
    sets.mkdir(parents=True)
    (root / "JPEGImages").mkdir()
    random = np.random.default_rng(1)
    lines: dict[str, list[str]] = {}
    for i in range(40):
        has = {"cat": i % 2 == 0, "dog": i % 3 == 0}
        pixels = random.integers(0, 60, (18, 20, 3))
        pixels[..., 0] += 150 * has["cat"]
        pixels[..., 1] += 150 * has["dog"]
        Image.fromarray(pixels.astype(np.uint8)).save(root / "JPEGImages" / f"{i:06d}.jpg")
        for name in ("train" if i < 24 else "val", "trainval"):
            lines.setdefault(name, []).append(f"{i:06d}")
            for label, present in has.items():
                lines.setdefault(f"{label}_{name}", []).append(f"{i:06d} {1 if present else -1:2d}")
    for name, text in lines.items():
        (sets / f"{name}.txt").write_text("\n".join(text) + "\n")


def shrunk(study: Study) -> Study:
    """The study with the same parts under the same names, each on few images with few steps."""

    def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
        made = study.plan(scale, seeds)
        if scale == "paper":  # to look at only
            return made
        return dataclasses.replace(
            made,
            trainings=[dataclasses.replace(t, images=few(t.images), config=tiny(t)) for t in made.trainings],
            judgements=[small_judgement(j) for j in made.judgements],
        )

    return dataclasses.replace(study, plan=plan)


def tiny(training: Training) -> Config:
    config = training.config
    threshold = config.clustering.small_cluster
    return changed(
        config,
        image_size=16,
        crop_size=16,
        clusters=4,
        small_cluster=None if threshold is None else min(threshold // 10, 4),
        fine_share=0.0,
        batch_size=16,
        epochs=2,
        dim=8,
        hidden=16,
        calibration_batches=1,
        kmeans_iterations=3,
        log_interval=2,
        **({"permutations": 10} if config.method == "jigsaw" else {}),
    )  # fmt: skip


def few(images: Images) -> Images:
    if images.part.startswith("cifar10-tail"):
        wanted = images.choose.keywords  # type: ignore[union-attr]
        keywords = {**wanted, "classes": NUM_CLASSES, "count": 44, "ratio": min(wanted["ratio"], 4)}  # type: ignore[union-attr]
        return dataclasses.replace(images, choose=functools.partial(images.choose.func, **keywords))  # type: ignore
    return images


def small_judgement(judgement: Judgement) -> Judgement:
    if judgement.images is None:
        return judgement
    options = {**judgement.options, "image_size": 16}
    if judgement.task in ("linear", "svm", "lowshot"):
        options["layers"] = tuple(judgement.options.get("layers") or ("conv4", "conv5"))[-2:]
    return dataclasses.replace(judgement, images=few(judgement.images), options=options)
