"""Images as the bytes of files, and how they are refused."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from odcluster.data.images import decode
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
