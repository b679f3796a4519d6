"""Bytes of image files flipped at random: whatever comes of it, a decoder gives pixels or a refusal, and soon.

    python tests/faults/fuzz_images.py [SEEDS] [FLIPS]      (100 x 1,000; about five minutes on one core)

Every case is decoded in a child process, so that a crash in a decoder's C code is seen and the case named. A case is a
function of (seed image, number): `damaged(seed, number)` gives the bytes again.
"""

from __future__ import annotations

import io
import mmap
import os
import resource
import struct
import sys
import time
from collections import Counter

import numpy as np
from PIL import Image

from odcluster.data.images import decode, image_size
from odcluster.errors import ImageRefused

SECONDS = 2.0
"""The most that one damaged image may take, of the processor's time: other programs may be busy meanwhile."""
PATIENCE = 120.0
"""Seconds without any progress after which a child is taken for hung."""


def formats() -> list[tuple[str, str, dict[str, object]]]:
    """Pillow's name of the format, the mode, options."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True, "exif": exif}),
        ("JPEG", "L", {"quality": 30}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {"transparency": 3}),
        ("PNG", "I;16", {}),
        ("PNG", "1", {}),
        ("GIF", "P", {}),
        ("GIF", "P", {"save_all": True, "append_images": [Image.new("P", (20, 20), 5)]}),
        ("TIFF", "RGB", {}),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}),
        ("TIFF", "L", {"compression": "tiff_deflate"}),
        ("TIFF", "F", {}),
        ("BMP", "RGB", {}),
        ("BMP", "P", {}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("PPM", "RGB", {}),
    ]


def seed_image(number: int) -> bytes:
    """The seed images: every format in five sizes, then again with other pixels."""
    kinds, random = formats(), np.random.default_rng(number)
    kind, mode, options = kinds[number % len(kinds)]
    side = (8, 33, 64, 150, 257)[number // len(kinds) % 5]
    coarse = random.integers(0, 256, (5, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)
    image = image.convert("L").convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def damaged(seed: int, number: int, whole: bytes | None = None) -> bytes:
    """One to eight bytes of a seed image are others; half of the cases have them where headers are."""
    data = bytearray(whole if whole is not None else seed_image(seed))
    random = np.random.default_rng([seed, number])
    reach = len(data) if number % 2 else min(96, len(data))
    for at in random.integers(0, reach, random.integers(1, 9)):
        data[at] = random.integers(256)
    if number % 10 == 9:
        del data[int(random.integers(len(data))) :]
    return bytes(data)


def decode_all(seeds: range, num_flips: int, where: mmap.mmap, start: int) -> Counter[str]:
    """The work of the child: from case `start` on; `where` always names the case at hand, for a parent to read."""
    outcomes: Counter[str] = Counter()
    case = 0
    for seed in seeds:
        whole = seed_image(seed)
        for number in range(num_flips):
            case += 1
            if case <= start:
                continue
            where[:8] = struct.pack("<q", case)
            data = damaged(seed, number, whole)
            began = time.process_time()
            try:
                height, width = image_size(data)
                pixels = decode(data)
                assert pixels.dtype == np.uint8
                assert pixels.shape == (height, width, 3), (seed, number)
                outcomes["pixels"] += 1
            except ImageRefused as refused:
                outcomes["refused" if str(refused).isprintable() else f"unprintable: seed {seed}, number {number}"] += 1
            if time.process_time() - began > SECONDS:
                outcomes[f"slow: seed {seed}, number {number}"] += 1
    return outcomes


def fuzz(num_seeds: int, num_flips: int) -> Counter[str]:
    """All cases; a crash or a hang is an outcome with the case's name, and the next child goes on behind it."""
    outcomes: Counter[str] = Counter()
    where, start, total = mmap.mmap(-1, 8), 0, num_seeds * num_flips
    while start < total:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 2)  # libtiff prints its complaints
            code = 1
            try:
                counted = decode_all(range(num_seeds), num_flips, where, start)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                os.write(writing, repr(list({**counted, "most MB": peak}.items())).encode()[:60000])
                code = 0
            except BaseException as error:
                os.write(writing, repr([(f"{type(error).__name__}: {error}", 1)]).encode()[:60000])
            finally:
                os._exit(code)
        os.close(writing)
        status, case = wait(child, where)
        with os.fdopen(reading, "rb") as file:
            told = file.read().decode()
        if status == 0:
            import ast

            return outcomes + Counter(dict(ast.literal_eval(told)))
        seed, number = divmod(case - 1, num_flips)
        outcomes[f"{status} {told}: seed {seed}, number {number}"] += 1
        start = case
    return outcomes


def wait(child: int, where: mmap.mmap) -> tuple[int, int]:
    """Exit status and last case of a child; one that does not get on is ended."""
    last, since = -1, time.monotonic()
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        (case,) = struct.unpack("<q", where[:8])
        if pid:
            return os.waitstatus_to_exitcode(status), case
        if case != last:
            last, since = case, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            os.kill(child, 9)
        time.sleep(0.05)


if __name__ == "__main__":
    began = time.monotonic()
    given = [int(word) for word in sys.argv[1:]]
    found = fuzz(*(given or [100, 1000]))
    print(f"{time.monotonic() - began:.0f} s:", *(f"{what}: {count:,}" for what, count in found.items()), sep="\n  ")
    sys.exit(any(what not in ("pixels", "refused", "most MB") for what in found))
