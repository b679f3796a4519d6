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
PATIENCE = 20.0
"""Seconds of computing without any progress after which a child is taken for hung."""


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


class Shared:
    """Four numbers that a child writes and its parent reads, also when the child is gone."""

    NAMES = ("case", "pixels", "refused", "most MB")

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8 * len(self.NAMES))

    def __getitem__(self, name: str) -> int:
        return struct.unpack_from("<q", self.memory, 8 * self.NAMES.index(name))[0]

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("<q", self.memory, 8 * self.NAMES.index(name), value)


def decode_all(num_seeds: int, num_flips: int, shared: Shared) -> list[str]:
    """The work of a child: from the case behind the last one on; returns what took too long."""
    slow = []
    first, before = shared["case"], largest_memory()
    for seed in range(first // num_flips, num_seeds):
        whole = seed_image(seed)
        for number in range(first % num_flips if seed == first // num_flips else 0, num_flips):
            shared["case"] = seed * num_flips + number + 1
            data = damaged(seed, number, whole)
            began = time.process_time()
            try:
                height, width = image_size(data)
                pixels = decode(data)
                assert pixels.dtype == np.uint8
                assert pixels.shape == (height, width, 3)
                shared["pixels"] += 1
            except ImageRefused as refused:
                if not str(refused).isprintable():
                    raise
                shared["refused"] += 1
            if (seconds := time.process_time() - began) > SECONDS:
                slow.append(f"{seconds:.1f} s: seed {seed}, number {number}")
        shared["most MB"] = max(shared["most MB"], largest_memory() - before)
    return slow


def largest_memory() -> int:
    """MB that this process has had at most; of a forked one, what it was born with is in it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def fuzz(num_seeds: int, num_flips: int) -> Counter[str]:
    """All cases; a crash or a hang is an outcome with the case's name, and the next child goes on behind it."""
    outcomes: Counter[str] = Counter()
    shared = Shared()
    while shared["case"] < num_seeds * num_flips:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff prints its complaints
            code = 1
            try:
                told = "\n".join(decode_all(num_seeds, num_flips, shared))
                code = 0
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            finally:
                os.write(writing, told.encode()[:60_000])
                os._exit(code)
        os.close(writing)
        status = wait(child, shared)
        with os.fdopen(reading, "rb") as file:
            outcomes.update(file.read().decode().splitlines())
        if status != 0:
            seed, number = divmod(shared["case"] - 1, num_flips)
            outcomes[f"ended with {status}: seed {seed}, number {number}"] += 1
    return outcomes + Counter({name: shared[name] for name in Shared.NAMES[1:]})


def wait(child: int, shared: Shared) -> int:
    """The exit status of a child; one that computes for long without getting on is ended."""
    last, since = -1, 0.0
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if shared["case"] != last:
            last, since = shared["case"], seconds_of(child)
        elif seconds_of(child) - since > PATIENCE:
            os.kill(child, 9)
        time.sleep(0.05)


def seconds_of(process: int) -> float:
    """Time of the processor that a process has had; other programs may be busy. Elsewhere than on Linux, plain time."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.monotonic()


if __name__ == "__main__":
    began = time.monotonic()
    given = [int(word) for word in sys.argv[1:]]
    found = fuzz(*(given or [100, 1000]))
    print(f"{time.monotonic() - began:.0f} s:", *(f"{what}: {count:,}" for what, count in found.items()), sep="\n  ")
    sys.exit(any(what not in ("pixels", "refused", "most MB") for what in found))
