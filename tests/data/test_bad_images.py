"""Bad files are refused by content with a reason; limits are ours, and the process stays as it was."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from encoded_images import EVERY_FORMAT, encode, png, refusal, smooth
from PIL import Image, ImageFile

from odcluster.data import images
from odcluster.data.images import decode, image_size
from odcluster.errors import ImageRefused

# --- Bad files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "looks_like"),
    [
        (b"", "empty"),
        (b"just some words, saved as photo.jpg", "text"),
        ("Grüße aus Köln\n".encode(), "text"),
        (b"\n <!DOCTYPE html><html><body>404</body></html>", "HTML"),
        (b"<html>", "HTML"),
        (b"%PDF-1.7\n%\xe2\xe3", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
        (b"\xc5\xd0\xd3\xc6\x1e\0\0\0", "PostScript"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?><svg/>", "SVG"),
        (b"PK\x03\x04\x14\0", "ZIP"),
        (b"\xff\x4f\xff\x51\0", "JPEG 2000"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\0\0\0\x1cftypheic\0\0\0\0", "HEIF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (bytes(1000), "zero bytes"),
        (b"\x80\x04\x95\x10\0", "unknown"),
    ],
)
def test_what_is_no_image_is_refused_by_content(data: bytes, looks_like: str) -> None:
    assert looks_like in refusal(data)
    with pytest.raises(ImageRefused, match=looks_like):
        image_size(data)


@pytest.mark.parametrize(("kind", "options"), EVERY_FORMAT)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("lenient", [False, True])
def test_truncated_files_are_refused(
    kind: str, options: dict, share: float, lenient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)  # other libraries set it for the process
    noise = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    data = encode(noise, kind, **options)
    assert refusal(data[: int(len(data) * share)])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is lenient


@pytest.mark.parametrize("progressive", [False, True])
def test_a_truncated_jpeg_with_an_end_marker_is_refused(progressive: bool) -> None:
    data = encode(smooth(200, 200), "JPEG", progressive=progressive)
    assert "JPEG" in refusal(data[: len(data) // 2] + b"\xff\xd9")
    assert "JPEG" in refusal(data[:-2] + bytes(100))  # the end lost, as after a full disk


def test_harmless_oddities_of_jpeg_are_accepted() -> None:
    data = encode(smooth(40, 40), "JPEG")
    expected = decode(data)
    np.testing.assert_array_equal(decode(data + b"something after the end"), expected)
    np.testing.assert_array_equal(decode(data[:-2] + b"stray" + data[-2:]), expected)


def test_a_jpeg_with_endless_scans_is_refused() -> None:
    data = encode(smooth(40, 40), "JPEG", progressive=True)
    last = data.rfind(b"\xff\xda")
    assert "scans" in refusal(data[:-2] + data[last:-2] * 100 + data[-2:])


def test_random_damage_gives_pixels_or_a_refusal_but_nothing_else() -> None:
    random = np.random.default_rng(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for kind, options in EVERY_FORMAT:
            if options.get("compression"):
                continue  # the C library prints its own complaints
            whole = encode(smooth(40, 30), kind, **options)
            for _ in range(60):
                data = bytearray(whole)
                reach = len(data) if random.random() < 0.5 else min(64, len(data))  # headers deserve more
                for at in random.integers(0, reach, 3):
                    data[at] = random.integers(256)
                started = time.monotonic()
                with contextlib.suppress(ImageRefused):
                    assert decode(bytes(data)).dtype == np.uint8
                assert time.monotonic() - started < 2
    assert not heard


@pytest.mark.parametrize(
    "error",
    [
        struct.error("x"),
        SyntaxError("x"),
        ValueError("x"),
        OverflowError("x"),
        zlib.error("x"),
        MemoryError(),
        KeyError(1),
    ],
)
@pytest.mark.parametrize("where", ["open", "load"])
def test_whatever_a_decoder_raises_becomes_a_refusal(
    error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(smooth(8, 8), "PNG")

    def fail(*arguments: object, **options: object) -> None:
        raise error

    if where == "open":
        monkeypatch.setattr(Image, "open", fail)
    else:
        monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    assert "PNG" in refusal(data)


# --- Limits and the process's own settings ----------------------------------------------------------


def test_the_pixel_limit_is_ours_not_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    for pillows in (1, None, 10**9):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillows)
        for kind, options in EVERY_FORMAT:
            assert decode(encode(smooth(10, 10), kind, **options)).shape == (10, 10, 3)
            for shape in ((10, 11), (90, 90)):
                too_large = encode(smooth(*shape), kind, **options)
                assert "too large" in refusal(too_large)
                with pytest.raises(ImageRefused, match="too large"):
                    image_size(too_large)
        assert pillows == Image.MAX_IMAGE_PIXELS


def bombs() -> dict[str, bytes]:
    """Make small files that ask for huge images."""
    gif = bytearray(encode(Image.new("P", (9, 9)), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    jpeg = bytearray(encode(smooth(16, 16), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    tiff = encode(Image.new("L", (12000, 12000)), "TIFF", compression="tiff_deflate")
    webp = bytes.fromhex("524946461a000000574542505650384c0e0000002fdfeeb70b071011fd0f4444ff03")  # 12000 x 12000, black
    ppm, bmp = b"P6 60000 60000 255\n" + bytes(99), bytearray(encode(smooth(4, 4), "BMP"))
    bmp[18:26] = struct.pack("<ii", 60000, 60000)
    row = b"\0" + bytes(3 * 50000)
    return {
        "png": png(50000, 50000, row * 200),
        "gif": bytes(gif),
        "jpeg": bytes(jpeg),
        "tiff": tiff,
        "webp": webp,
        "ppm": ppm,
        "bmp": bytes(bmp),
    }


def test_decompression_bombs_cost_neither_memory_nor_time(tmp_path: Path) -> None:
    for name, data in bombs().items():
        (tmp_path / name).write_bytes(data)
    script = """
import json, resource, sys, time
from odcluster.data.images import ImageRefused, decode, image_size, read_file
unit = 2**20 if sys.platform == "darwin" else 2**10
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
for path in sys.argv[1:]:
    for function in (image_size, decode):
        before, started, reason = peak(), time.monotonic(), ""
        try:
            function(read_file(path))
        except ImageRefused as error:
            reason = str(error)
        print(json.dumps([path, function.__name__, reason, peak() - before, time.monotonic() - started]))
"""
    package = Path(images.__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", script, *sorted(map(str, tmp_path.iterdir()))],
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert len(lines) == 14
    for line in lines:
        path, function, reason, megabytes, seconds = json.loads(line)
        assert "too large" in reason, (path, function, reason)
        assert megabytes < 200, (path, function)
        assert seconds < 1, (path, function)


def test_pillows_warnings_are_never_heard() -> None:
    tiff = bytearray(encode(smooth(8, 8), "TIFF"))
    start = struct.unpack_from("<I", tiff, 4)[0]
    (num_entries,) = struct.unpack_from("<H", tiff, start)
    tiff[start : start + 2] = struct.pack("<H", num_entries + 1)  # one entry more than there is
    data = bytes(tiff[: start + 2 + 12 * num_entries + 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            Image.open(io.BytesIO(data)).load()
        before = list(warnings.filters)
        with contextlib.suppress(ImageRefused):
            decode(data)
        assert warnings.filters == before


def test_threads_leave_the_process_as_it_was() -> None:
    data = encode(smooth(64, 64), "PNG")
    before = list(warnings.filters), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    threads = [threading.Thread(target=lambda: [decode(data) for _ in range(40)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (list(warnings.filters), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == before
