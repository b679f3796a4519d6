"""Views per second and core: ours beside torchvision's two pipelines and beside decoding alone.

    python benchmarks/views.py --json views.json
    python benchmarks/views.py --images photos/        # your own JPEG files instead of made ones

The paper's augmentation (random resized crop, flip, rotation, colour jitter, grey) from the bytes of 500 x 375 JPEG
files to uint8 of 224 x 224. Every contender runs in a process of its own with one thread, in turns; the median counts;
ours is the loader's own code. Also: the evaluation view, and 32 x 32 images from memory.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import report

COUNT = 128
SIZE = 224


def photos(folder: str | None) -> list[bytes]:
    """JPEG files of 500 x 375: the user's, resized, or made ones with as many bytes as photos have."""
    from PIL import Image

    found = sorted(Path(folder).rglob("*.jpg"))[:COUNT] if folder else []
    random = np.random.default_rng(0)
    files = []
    for number in range(COUNT):
        if found:
            image = Image.open(found[number % len(found)]).convert("RGB").resize((500, 375), Image.Resampling.BICUBIC)
        else:  # noise at all scales, falling off as in photos
            pixels = sum(
                np.asarray(
                    Image.fromarray(random.integers(0, 256, (375 // s + 2, 500 // s + 2, 3), dtype=np.uint8)).resize(
                        (500, 375), Image.Resampling.BICUBIC
                    ),
                    np.float32,
                )
                * weight
                for s, weight in ((3, 0.08), (6, 0.12), (20, 0.2), (90, 0.6))
            )
            image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


# --- Contenders: each returns a function that makes COUNT views --------------------------------------


def torchvision_pil(files: list[bytes]) -> Callable[[], object]:
    from PIL import Image

    from odcluster.models.compat import torchvision

    t = torchvision.transforms
    pipeline = t.Compose(
        [
            t.RandomResizedCrop(SIZE),
            t.RandomHorizontalFlip(),
            t.RandomRotation(2, t.InterpolationMode.BILINEAR),
            t.ColorJitter(0.4, 0.4, 1.0, 0.5),
            t.RandomGrayscale(0.2),
            t.PILToTensor(),
        ]
    )
    return lambda: [pipeline(Image.open(io.BytesIO(data)).convert("RGB")) for data in files]


def torchvision_v2(files: list[bytes]) -> Callable[[], object]:
    import simplejpeg
    import torch

    from odcluster.models.compat import torchvision

    t = importlib.import_module(f"{torchvision.__name__}.transforms.v2")
    pipeline = t.Compose(
        [
            t.RandomResizedCrop(SIZE, antialias=True),
            t.RandomHorizontalFlip(),
            t.RandomRotation(2, t.InterpolationMode.BILINEAR),
            t.ColorJitter(0.4, 0.4, 1.0, 0.5),
            t.RandomGrayscale(0.2),
        ]
    )
    return lambda: [pipeline(torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)) for data in files]


def decoding(files: list[bytes]) -> Callable[[], object]:
    import simplejpeg

    return lambda: [simplejpeg.decode_jpeg(data) for data in files]


def ours(files: list[bytes]) -> Callable[[], object]:
    return loader_of(files, SIZE, epoch=0)


def torchvision_evaluation(files: list[bytes]) -> Callable[[], object]:
    from PIL import Image

    from odcluster.models.compat import torchvision

    t = torchvision.transforms
    pipeline = t.Compose([t.Resize(256), t.CenterCrop(SIZE), t.PILToTensor()])
    return lambda: [pipeline(Image.open(io.BytesIO(data)).convert("RGB")) for data in files]


def our_evaluation(files: list[bytes]) -> Callable[[], object]:
    return loader_of(files, SIZE, epoch=None)


def ours_from_memory(files: list[bytes]) -> Callable[[], object]:
    """The recipe for small images: 32 x 32 pixels in an array."""
    from odcluster.data.sources import open_source

    array = np.random.default_rng(0).integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)
    return batch_maker(open_source(array), 32, epoch=0)


def loader_of(files: list[bytes], size: int, epoch: int | None) -> Callable[[], object]:
    from odcluster.data.sources import Manifest, PackedSource

    offsets = np.cumsum([0, *map(len, files)])
    data = np.frombuffer(b"".join(files), np.uint8)
    names = [f"{i}" for i in range(len(files))]
    source = PackedSource(Manifest("packed", "", names, np.diff(offsets)), lambda: (data, offsets))
    return batch_maker(source, size, epoch)


def batch_maker(source: object, size: int, epoch: int | None) -> Callable[[], object]:
    """What one process of the loader does with a batch."""
    from odcluster.config import Augmentation
    from odcluster.data.loading import Loader, Request

    loader = Loader(source, Augmentation(), image_size=size, seed=0, workers=0, normalisation=((0,) * 3, (1,) * 3))  # type: ignore[arg-type]
    views = loader._loader.dataset
    request = Request(np.arange(COUNT), epoch)
    return lambda: views[request]


CONTENDERS = {
    f.__name__: f
    for f in (torchvision_pil, torchvision_v2, decoding, ours, torchvision_evaluation, our_evaluation, ours_from_memory)
}


def measure(name: str, folder: str | None, seconds: float) -> float:
    """Views per second of one contender, in this process."""
    import cv2
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    make = CONTENDERS[name](photos(folder))
    make()
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < 3:
        start = time.perf_counter()
        make()
        times.append(time.perf_counter() - start)
    return COUNT / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="a folder of JPEG files")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = 0.5 if options.quick else 4.0
    if options.contender:
        print(measure(options.contender, options.images, seconds))
        return
    speeds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(1 if options.quick else 3):
        for name, measured in speeds.items():
            command = [sys.executable, __file__, "--contender", name]
            command += ["--images", options.images] if options.images else []
            command += ["--quick"] if options.quick else []
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            measured.append(float(done.stdout))
    speed = {name: statistics.median(measured) for name, measured in speeds.items()}

    def row(what: str, name: str, other: str, target: float) -> report.Row:
        ratio = speed[name] / speed[other]
        return report.Row(
            what, round(speed[name]), round(speed[other]), "views/s/core", ratio, f">= {target:g}x", ratio >= target
        )

    small = speed["ours_from_memory"]
    rows = [
        row("training view 224 px, beside torchvision on PIL", "ours", "torchvision_pil", 4.0),
        row("training view 224 px, beside torchvision v2 on tensors", "ours", "torchvision_v2", 4.0),
        row("training view 224 px, beside decoding alone", "ours", "decoding", 0.6),
        row("evaluation view 224 px, beside torchvision on PIL", "our_evaluation", "torchvision_evaluation", 2.0),
        report.Row(
            "training view 32 px from memory", round(small), None, "views/s/core", None, ">= 5000", small >= 5000
        ),
    ]
    report.show(rows)
    if options.json:
        report.write(options.json, "views", rows)


if __name__ == "__main__":
    main()
