"""One image file in, uint8 RGB pixels out, or a refusal with its reason.

Promises: the content decides what a file is, never its name; the number of pixels is checked before any pixel
is decoded; a truncated or damaged file is refused, never half shown; whatever a decoder raises becomes
`ImageRefused`; no file is ever written. Conventions: EXIF orientation is applied; transparency is laid over
white; an animation is its first frame; colour profiles are ignored. What happens to a run when images are
refused is left to `loading.py`.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
import threading
import warnings
from typing import cast

import numpy as np
import simplejpeg
from PIL import Image, ImageFile, UnidentifiedImageError

from odcluster.errors import ImageRefused

MAX_PIXELS = 100_000_000
"""A larger image is refused; this one is 300 MB of RGB."""
MAX_FILE_BYTES = 500_000_000
"""A larger file is refused before it is read."""
BLOCK = 1 << 20
"""Pixels of a large image that are converted at a time."""
MAX_SCANS = 64
"""A progressive JPEG has about 10 scans. Each is a pass over all pixels: thousands of them are an attack."""


def decode(data: bytes, min_size: int = 0) -> np.ndarray:
    """Decode one image file to uint8 RGB [height, width, 3], C-contiguous and writable.

    With `min_size` > 0 a JPEG may come back at 1/2, 1/4 or 1/8 of its size (the decoder then does that much
    less work), as long as both sides keep at least `min_size` pixels. The factor is exact, sides are rounded
    up: what was at (y, x) is at (y / factor, x / factor). Other formats ignore `min_size`.
    """
    kind = sniff(data)
    pixels = _decode_jpeg(data, min_size) if kind == "JPEG" else None
    if pixels is None:
        return _decode_pillow(data, kind)
    return _turn(pixels, _jpeg_orientation(data))


def image_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) as `decode` would give them, from the header alone."""
    kind = sniff(data)
    header = _jpeg_header(data) if kind == "JPEG" else None
    if header is not None:
        height, width, _ = header
        orientation = _jpeg_orientation(data)
    else:
        with _PILLOW_OUR_WAY:
            image, orientation = _open_pillow(data, kind)
            width, height = image.size
    return (width, height) if orientation >= 5 else (height, width)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read one regular file. A pipe, socket or device is refused without waiting for it, however named."""
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # not every system has each of them
        flags |= getattr(os, name, 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageRefused("not a regular file (a pipe, socket, device or folder)")
            if status.st_size > MAX_FILE_BYTES:
                raise ImageRefused(f"file too large: {status.st_size} bytes (limit {MAX_FILE_BYTES})")
            return file.read(status.st_size)
    except (OSError, ValueError, MemoryError) as error:  # ValueError: a null character in the path
        raise ImageRefused(_why_unreadable(error)) from error


def _why_unreadable(error: Exception) -> str:
    reasons = {
        errno.ENOENT: "no such file (deleted since the scan)",
        errno.ENOTDIR: "no such file (its folder was replaced since the scan)",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.ELOOP: "symbolic link that leads back to itself",
        errno.EISDIR: "not a regular file (a pipe, socket, device or folder)",
        errno.ENXIO: "not a regular file (a pipe, socket, device or folder)",
    }
    number = getattr(error, "errno", None)
    if number is None:
        return "not enough memory to read it" if isinstance(error, MemoryError) else "not a usable file name"
    return reasons.get(number, os.strerror(number).lower())


# --- What a file is, by its first bytes -----------------------------------------------------------

_ACCEPTED = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)
_REFUSED = (
    (b"%PDF", "PDF document"),
    (b"%!", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"<svg", "SVG/XML"),
    (b"<?xml", "SVG/XML"),
    (b"<!doctype svg", "SVG/XML"),
    (b"<!doctype html", "HTML page"),
    (b"<html", "HTML page"),
    (b"<head", "HTML page"),
    (b"<body", "HTML page"),
    (b"<!--", "HTML page"),
    (b"version https://git-lfs", "Git LFS pointer (fetch the file with `git lfs pull`)"),
    (b"PK\x03\x04", "ZIP archive"),
    (b"\x1f\x8b", "gzip archive"),
    (b"8BPS", "Photoshop document"),
    (b"\0\0\x01\0", "icon"),
    (b"\0\0\0\x0cJXL ", "JPEG XL image"),
    (b"\xff\x0a", "JPEG XL image"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000 image"),
    (b"\xff\x4f\xff\x51", "JPEG 2000 image"),
)
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)  # lengths of the header that follows the 14 bytes of every BMP


def sniff(data: bytes) -> str:
    """Return Pillow's name of the format, or refuse with what the content looks like."""
    head = bytes(data[:512])
    for magic, kind in _ACCEPTED:
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return "BMP"
    if len(head) > 2 and head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace():
        return "PPM"
    raise ImageRefused(_looks_like(head))


def _looks_like(head: bytes) -> str:
    if not head:
        return "empty file"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for magic, name in _REFUSED:
        if head.startswith(magic) or start.startswith(magic.lower()):
            return f"not an image: {name}" if not name.endswith(("image", "icon")) else f"unsupported: {name}"
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand.startswith((b"avif", b"avis", b"hei", b"hev", b"mif1", b"msf1")):
            return "unsupported: HEIF/AVIF image"
        return "not an image: video"
    if not head.strip(b"\0"):
        return "not an image: only zero bytes"
    control = sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in head)
    return "not an image: text" if control == 0 else "not an image: unknown content"


# --- JPEG, by libjpeg-turbo -----------------------------------------------------------------------


def _jpeg_header(data: bytes) -> tuple[int, int, str] | None:
    """Return height, width and colour space as stored; None where simplejpeg cannot tell and Pillow may."""
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(data)
    except Exception:  # ValueError for all it knows; nothing else may escape either
        return None
    _check_pixels(height, width)
    return height, width, colour


def _decode_jpeg(data: bytes, min_size: int) -> np.ndarray | None:
    """Decode as stored, before orientation. None: left to Pillow (CMYK, rare samplings, odd markers)."""
    if data.count(b"\xff\xda") > MAX_SCANS:  # among pixels ff is followed by 00, so these are markers
        raise ImageRefused(f"JPEG with more than {MAX_SCANS} scans")
    header = _jpeg_header(data)
    if header is None or header[2] in ("CMYK", "YCCK"):
        return None
    height, width = header[:2]
    factor = 1
    shorter = min(height, width)
    while min_size > 0 and factor < 8 and -(-shorter // (2 * factor)) >= min_size:  # the decoder rounds up
        factor *= 2
    try:
        # Asked for these sizes, simplejpeg takes the smallest scale that reaches them, which is 1 / factor.
        # Left to choose for itself it would also take 3/8 or 5/8, which libjpeg-turbo computes slowly.
        return simplejpeg.decode_jpeg(data, min_height=-(-height // factor), min_width=-(-width // factor))
    except Exception as error:
        message = str(error)
        # Pillow would fill the missing part with grey in silence. Stray bytes before a marker lose no pixel.
        if "remature end" in message or ("Corrupt JPEG data" in message and "extraneous" not in message):
            raise ImageRefused(f"truncated or damaged JPEG: {_first_line(error)}") from error
        return None


def _jpeg_orientation(data: bytes) -> int:
    """Find the EXIF orientation (1 to 8; 1 is upright) by walking the header's segments."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # padding
            position += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # markers without content
            position += 2
        elif marker in (0xD9, 0xDA):  # the pixels begin, or the file ends
            break
        else:
            end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
            if marker == 0xE1 and data[position + 4 : position + 10] == b"Exif\0\0":
                return _exif_orientation(data[position + 10 : end])
            position = max(end, position + 4)
    return 1


def _exif_orientation(exif: bytes) -> int:
    """Read tag 0x0112 of the first directory; whatever is malformed counts as upright."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    try:
        if order is None:
            return 1
        (start,) = struct.unpack_from(order + "I", exif, 4)
        (num_entries,) = struct.unpack_from(order + "H", exif, start)
        for entry in range(start + 2, start + 2 + 12 * num_entries, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, entry)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


# --- All else, by Pillow --------------------------------------------------------------------------


class _PillowOurWay:
    """While any thread is inside: no warnings, our pixel limit, truncated files refused, whatever was set.

    These are switches of the whole process. They are set by the first thread to enter and restored by the
    last one to leave, because each saving and restoring for itself would leave them altered.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside > 1:
                return
            self.before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
            self.filters = warnings.catch_warnings()
            self.filters.__enter__()
            warnings.simplefilter("ignore")
            Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = MAX_PIXELS, False

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = self.before
                self.filters.__exit__(None, None, None)


_PILLOW_OUR_WAY = _PillowOurWay()
if hasattr(os, "register_at_fork"):  # a child forked while a thread was inside must not wait for that thread
    os.register_at_fork(after_in_child=_PILLOW_OUR_WAY.reset)


def _open_pillow(data: bytes, kind: str) -> tuple[Image.Image, int]:
    """Read the header; return the image, not yet decoded, and the EXIF orientation still to be applied."""
    try:
        image = Image.open(io.BytesIO(data), formats=[kind])
    except Image.DecompressionBombError as error:  # raised at twice the limit, before WebP allocates
        raise ImageRefused(f"too large: more than {MAX_PIXELS} pixels") from error
    except UnidentifiedImageError as error:
        raise ImageRefused(f"damaged {kind}: its header cannot be read") from error
    except Exception as error:
        raise ImageRefused(f"damaged {kind}: {_first_line(error)}") from error
    _check_pixels(image.height, image.width)
    if kind == "JPEG":
        return image, _jpeg_orientation(data)
    if kind == "TIFF":  # Pillow turns these itself, and gives the size after turning
        _check_strips(image)
        return image, 1
    try:
        # The base class's method: that of PNG decodes the whole image to look for EXIF behind the pixels.
        orientation = Image.Image.getexif(image).get(0x0112, 1)
    except Exception:
        return image, 1
    return image, orientation if orientation in range(1, 9) else 1


def _check_strips(image: Image.Image) -> None:
    """Refuse a TIFF whose parts do not cover it: Pillow would leave the rest black, after making room for all of it."""
    parts = [part[1] or (0, 0, 0, 0) for part in cast(ImageFile.ImageFile, image).tile]
    right, bottom = (max((part[side] for part in parts), default=0) for side in (2, 3))
    covered = sorted((right, bottom))
    if any(side < needed for side, needed in zip(covered, sorted(image.size), strict=True)):
        raise ImageRefused(f"truncated or damaged TIFF: only {right} x {bottom} of its pixels are there")


def _decode_pillow(data: bytes, kind: str) -> np.ndarray:
    with _PILLOW_OUR_WAY:
        image, orientation = _open_pillow(data, kind)
        try:
            image.load()
            return _turn(_to_rgb(image), orientation)
        except Exception as error:
            raise ImageRefused(f"truncated or damaged {kind}: {_first_line(error)}") from error


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I;16"):
        return _grey_to_rgb((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        return _grey_to_rgb(_to_8_bit(np.asarray(image)))
    rows = max(1, BLOCK // image.width)
    if image.height <= rows:
        return _strip_to_rgb(image).copy()
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, rows):  # converted whole, 100 million pixels would take four times their size
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        pixels[top : top + rows] = _strip_to_rgb(strip)
    return pixels


def _strip_to_rgb(image: Image.Image) -> np.ndarray:
    """Over white where it is transparent; may be read only."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        canvas = Image.new("RGB", image.size, "white")
        canvas.paste(image, mask=image)
        return np.asarray(canvas)
    return np.asarray(image.convert("RGB"))


def _to_8_bit(grey: np.ndarray) -> np.ndarray:
    """Scale 32-bit greys.

    Integers up to 65535 are 16-bit data, floats in 0..1 are shares of white, floats up to 255 are 8-bit data;
    any other range is stretched to 0..255, for want of a meaning.
    """
    flat = grey.reshape(-1)
    parts = [slice(start, start + BLOCK) for start in range(0, len(flat), BLOCK)]  # 100 million floats are 400 MB

    def values(part: slice) -> np.ndarray:
        return np.nan_to_num(flat[part].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)

    low = min(float(values(part).min()) for part in parts)
    high = max(float(values(part).max()) for part in parts)
    if grey.dtype.kind != "f" and low >= 0 and high <= 65535:
        return (grey >> 8).astype(np.uint8)
    scale, offset = 1.0, 0.0
    if low >= 0 and high <= 1:
        scale = 255
    elif low < 0 or high > 255:
        scale, offset = 255 / (high - low), low
    result = np.empty(flat.shape, np.uint8)
    for part in parts:
        result[part] = np.clip(np.rint((values(part) - offset) * scale), 0, 255)
    return result.reshape(grey.shape)


def _grey_to_rgb(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, :, None], 3, axis=2)


# --- Shared ---------------------------------------------------------------------------------------


def rgba_over_white(rgba: np.ndarray) -> np.ndarray:
    """Lay uint8 [height, width, 4] over white: colour * alpha + white * (1 - alpha), rounded."""
    alpha = rgba[:, :, 3:].astype(np.uint16)
    return ((rgba[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def _check_pixels(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ImageRefused("an image without pixels")
    if height * width > MAX_PIXELS:
        raise ImageRefused(f"too large: {width} x {height} pixels (limit {MAX_PIXELS})")


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an EXIF orientation: 5 to 8 exchange rows and columns, then rows and columns may run backwards."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text[:120] if text else type(error).__name__
