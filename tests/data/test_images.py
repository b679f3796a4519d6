"""Bad files are refused by content with a reason, good ones give exactly their pixels."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
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
from PIL import Image, ImageFile, ImageOps

from odcluster.data import images
from odcluster.data.images import decode, image_size, read_file
from odcluster.errors import ImageRefused

LOSSLESS = [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("PPM", {})]
LOSSLESS.append(("WEBP", {"lossless": True}))
EVERY_FORMAT = [*LOSSLESS, ("GIF", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {})]


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Make an image that JPEG changes little: random colours on a coarse grid, interpolated."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encode(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, pixels: bytes, depth: int = 8, colour: int = 2) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def refusal(data: bytes) -> str:
    """Return the reason for which both decoding and measuring refuse."""
    with pytest.raises(ImageRefused) as caught:
        decode(data)
    assert "\n" not in str(caught.value)
    assert "0x" not in str(caught.value), "an address in memory makes two lists of refusals differ"
    return str(caught.value)


# --- Good files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), LOSSLESS)
def test_lossless_formats_give_their_pixels(kind: str, options: dict) -> None:
    pixels = smooth(23, 31)
    data = encode(pixels, kind, **options)
    result = decode(data)
    np.testing.assert_array_equal(result, pixels)
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous
    assert result.flags.writeable
    assert image_size(data) == (23, 31)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}])
def test_jpeg_equals_what_pillow_decodes(options: dict) -> None:
    data = encode(smooth(57, 91), "JPEG", **options)
    np.testing.assert_array_equal(decode(data), np.array(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize(("kind", "options"), EVERY_FORMAT)
@pytest.mark.parametrize("shape", [(1, 1), (1, 20000), (20000, 1), (3, 2)])
def test_extreme_shapes(kind: str, options: dict, shape: tuple[int, int]) -> None:
    if kind == "WEBP" and max(shape) > 16383:
        shape = (min(shape[0], 16383), min(shape[1], 16383))  # the format's own limit
    data = encode(np.full((*shape, 3), 255, np.uint8), kind, **options)
    assert decode(data, min_size=1).shape[2] == 3
    np.testing.assert_array_equal(decode(data), np.full((*shape, 3), 255))
    assert image_size(data) == shape


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(smooth(24, 40), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    np.testing.assert_array_equal(decode(data), expected)
    assert image_size(data) == expected.shape[:2] == ((40, 24) if orientation >= 5 else (24, 40))


def test_malformed_exif_counts_as_upright() -> None:
    pixels = smooth(24, 40)
    upright = decode(encode(pixels, "JPEG"))
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = exif.tobytes()
    seed = np.random.default_rng(0)
    assert decode(encode(pixels, "JPEG", exif=whole)).shape == (40, 24, 3)
    for cut in range(6, 26):  # the value ends at byte 26
        np.testing.assert_array_equal(decode(encode(pixels, "JPEG", exif=whole[:cut])), upright)
    for _ in range(50):
        noise = whole[:8] + seed.bytes(60)
        assert decode(encode(pixels, "JPEG", exif=noise)).size == pixels.size


def test_transparency_is_laid_over_white() -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = 200, 100, 0, 255
    rgba[0, 1] = 200, 100, 0, 0
    rgba[1, 0] = 0, 0, 0, 51  # a fifth of black
    expected = np.full((2, 2, 3), 255)
    expected[0, 0] = 200, 100, 0
    expected[1, 0] = 204
    for kind, options in (("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True, "exact": True})):
        np.testing.assert_allclose(decode(encode(rgba, kind, **options)), expected, atol=1)
    np.testing.assert_array_equal(images.rgba_over_white(rgba), expected)


def test_palette_and_grey_with_transparency() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        np.testing.assert_array_equal(decode(encode(palette, kind)), [[[255, 0, 0], [0, 0, 255]]])
        clear = encode(palette, kind, transparency=1)
        np.testing.assert_array_equal(decode(clear), [[[255, 0, 0], [255, 255, 255]]])
    half = encode(palette, "PNG", transparency=bytes([255, 0]))
    np.testing.assert_array_equal(decode(half), [[[255, 0, 0], [255, 255, 255]]])
    grey = Image.fromarray(np.array([[[90, 255], [90, 0]]], np.uint8), "LA")
    np.testing.assert_array_equal(decode(encode(grey, "PNG")), [[[90] * 3, [255] * 3]])


def test_16_bit_grey_keeps_its_upper_byte() -> None:
    values = np.array([[0, 255, 256, 0x7FFF, 0xFFFF]], np.uint16)
    expected = np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(decode(encode(Image.fromarray(values), kind)), expected)
    plain = b"P5 5 1 65535\n" + values.astype(">u2").tobytes()
    np.testing.assert_array_equal(decode(plain), expected)
    colour = png(1, 1, b"\0" + struct.pack(">HHH", 0x1234, 0xABCD, 0xFFFF), depth=16)
    np.testing.assert_array_equal(decode(colour), [[[0x12, 0xAB, 0xFF]]])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 100.0, 255.0]], np.float32), [0, 100, 255]),
        (np.array([[-10.0, 0.0, 10.0]], np.float32), [0, 128, 255]),
        (np.array([[np.nan, np.inf, 1.0]], np.float32), [0, 0, 255]),
        (np.array([[0, 0x8000, 0xFFFF]], np.int32), [0, 128, 255]),
        (np.array([[-(2**31), 0, 2**31 - 1]], np.int32), [0, 128, 255]),
    ],
)
def test_32_bit_greys_become_8_bit(values: np.ndarray, expected: list[int]) -> None:
    np.testing.assert_array_equal(decode(encode(Image.fromarray(values), "TIFF"))[0, :, 0], expected)


def test_large_greys_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)
    whole = decode(encode(Image.fromarray(values), "TIFF"))
    monkeypatch.setattr(images, "BLOCK", 7)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(values), "TIFF")), whole)
    assert whole.min() == 0
    assert whole.max() == 255


def test_large_images_are_converted_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 40, 4), dtype=np.uint8)
    opaque = Image.fromarray(pixels[:, :, :3])
    files = [
        encode(Image.fromarray(pixels), "PNG"),
        *(encode(opaque.convert(mode), "TIFF") for mode in ("L", "LA", "1", "CMYK")),
        *(encode(opaque.quantize(16), kind) for kind in ("GIF", "PNG")),
        encode(opaque.quantize(16), "PNG", transparency=3),
        encode(opaque.quantize(4), "PNG", transparency=bytes([0, 80, 160, 255])),
        encode(opaque, "PNG", transparency=tuple(pixels[0, 0, :3].tolist())),
    ]
    whole = [decode(file) for file in files]
    monkeypatch.setattr(images, "BLOCK", 7 * 40)
    for file, expected in zip(files, whole, strict=True):
        np.testing.assert_array_equal(decode(file), expected)


@pytest.mark.parametrize("mode", ["RGB", "L", "F"])
def test_a_tiff_that_claims_more_than_it_has_is_refused(mode: str) -> None:
    """Found by flipping bytes: Pillow made room for a hundred million pixels and left them black."""
    data = encode(Image.fromarray(smooth(24, 33)).convert(mode), "TIFF")
    height = data.index(struct.pack("<HHI", 257, 4, 1) if struct.pack("<HHI", 257, 4, 1) in data else b"\x01\x01\x03\0")
    taller = bytearray(data)
    taller[height + 8 : height + 12] = struct.pack("<I", 60_000)
    assert "only 33 x 24" in refusal(bytes(taller))
    with pytest.raises(ImageRefused, match="only 33 x 24"):
        image_size(bytes(taller))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb(kind: str) -> None:
    pixels = smooth(32, 32)
    options = {"quality": 95} if kind == "JPEG" else {}
    data = encode(Image.fromarray(pixels).convert("CMYK"), kind, **options)
    assert np.abs(decode(data).astype(int) - pixels).mean() < 3
    np.testing.assert_array_equal(decode(data), np.array(Image.open(io.BytesIO(data)).convert("RGB")))


def test_grey_jpeg_has_three_equal_channels() -> None:
    result = decode(encode(Image.fromarray(smooth(20, 30)).convert("L"), "JPEG"))
    assert result.shape == (20, 30, 3)
    assert (result == result[:, :, :1]).all()


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})])
def test_an_animation_is_its_first_frame(kind: str, options: dict) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "lime")]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    np.testing.assert_array_equal(decode(data), np.array(frames[0]))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_corrupt_colour_profile_changes_nothing(kind: str) -> None:
    pixels = smooth(16, 16)
    data = encode(pixels, kind, icc_profile=b"no profile at all" * 9)
    np.testing.assert_array_equal(decode(data), decode(encode(pixels, kind)))


@pytest.mark.parametrize("shape", [(803, 1001), (403, 201), (64, 640), (5, 5), (1, 300), (129, 257)])
@pytest.mark.parametrize("min_size", [1, 2, 16, 32, 33, 100, 101, 102, 500, 2000])
def test_scaled_jpeg_keeps_both_sides_and_is_the_same_picture(shape: tuple[int, int], min_size: int) -> None:
    data = encode(smooth(*shape), "JPEG", quality=95)
    whole, scaled = decode(data), decode(data, min_size)
    factors = [f for f in (1, 2, 4, 8) if f == 1 or min(-(-side // f) for side in shape) >= min_size]
    assert scaled.shape == (*(-(-side // factors[-1]) for side in shape), 3)
    # Pixel i of the scaled image is the mean of pixels i * factor to (i + 1) * factor, edges repeated.
    factor = factors[-1]
    whole = np.pad(whole, [(0, -shape[0] % factor), (0, -shape[1] % factor), (0, 0)], mode="edge")
    blocks = whole.reshape(whole.shape[0] // factor, factor, whole.shape[1] // factor, factor, 3)
    if min(scaled.shape[:2]) > 4:  # of a few pixels, the colour's own coarser grid is most of the picture
        assert np.abs(scaled - blocks.mean((1, 3))).mean() < 3


def test_other_formats_ignore_min_size() -> None:
    assert decode(encode(smooth(64, 64), "PNG"), min_size=8).shape == (64, 64, 3)


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


# --- Reading ----------------------------------------------------------------------------------------


def test_read_file_returns_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"abc")
    (tmp_path / "link.jpg").symlink_to("a.jpg")
    assert read_file(tmp_path / "a.jpg") == read_file(str(tmp_path / "link.jpg")) == b"abc"


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "file.jpg").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe.jpg")
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        for name, reason in {
            "gone.jpg": "no such file",
            "file.jpg/x.jpg": "no such file",
            "folder.jpg": "not a regular file",
            "pipe.jpg": "not a regular file",
            "socket.jpg": "not a regular file",
            "/dev/zero": "not a regular file",
            "loop.jpg": "symbolic link",
            "null\0.jpg": "file name",
            "x" * 5000: "name too long",
        }.items():
            with pytest.raises(ImageRefused, match=reason):
                read_file(name)
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 4)
    with pytest.raises(ImageRefused, match="too large"):
        read_file("file.jpg")


def test_missing_permission_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"abc")
    path.chmod(0)
    if os.access(path, os.R_OK):  # root may read everything: let the system call say no

        def deny(*arguments: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", deny)
    with pytest.raises(ImageRefused, match="permission denied"):
        read_file(path)
