"""Good files give exactly their pixels; what cannot be read is refused with the reason."""

from __future__ import annotations

import io
import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from encoded_images import EVERY_FORMAT, LOSSLESS, encode, png, refusal, smooth
from PIL import Image, ImageOps

from odcluster.data import images
from odcluster.data.images import decode, image_size, read_file
from odcluster.errors import ImageRefused

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
