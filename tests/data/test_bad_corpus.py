"""A folder of everything that is wrong with image folders: a run goes through, and names each with its reason."""

from __future__ import annotations

import csv
import io
import os
import socket
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_runs import TINY, make_images

import odcluster
from odcluster.errors import DataError
from odcluster.explore.export import read_clusters_csv
from odcluster.training.trainer import Trainer


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(mode: str = "RGB", size: tuple[int, int] = (24, 20)) -> Image.Image:
    noise = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def huge_png() -> bytes:
    whole = bytearray(encode(picture(), "PNG"))
    whole[16:24] = struct.pack(">II", 50_000, 50_000)
    whole[29:33] = struct.pack(">I", zlib.crc32(whole[12:29]))
    return bytes(whole)


def refused_files() -> dict[str, tuple[bytes, str]]:
    """Name, content, and what bad_images.csv says of it."""
    jpeg, png = encode(picture(size=(64, 64)), "JPEG"), encode(picture(size=(64, 64)), "PNG")
    gif = bytearray(encode(picture("P"), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    return {
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated or damaged JPEG"),
        "truncated.png": (png[: len(png) // 2], "truncated or damaged PNG"),
        "empty.jpg": (b"", "empty file"),
        "zeros.jpg": (bytes(1000), "only zero bytes"),
        "note.jpg": (b"this is a note\n", "not an image: text"),
        "page.png": (b"<!DOCTYPE html><html></html>", "not an image: HTML page"),
        "drawing.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image: PostScript"),
        "binary eps.png": (b"\xc5\xd0\xd3\xc6" + bytes(40), "not an image: PostScript"),
        "document.jpg": (b"%PDF-1.7\n", "not an image: PDF"),
        "vector.png": (b"<?xml version='1.0'?><svg/>", "not an image: SVG/XML"),
        "plain vector.jpg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image: SVG/XML"),
        "pointer.jpg": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        "archive.png": (b"PK\x03\x04" + bytes(60), "ZIP archive"),
        "bomb.png": (huge_png(), "too large"),
        "bomb.gif": (bytes(gif), "too large"),
        "=HYPERLINK(1).jpg": (b"formula", "not an image: text"),
    }


def accepted_files() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture("P"), picture("L").convert("P")]
    return {
        "cmyk.jpg": encode(picture("CMYK"), "JPEG"),
        "16 bit.png": encode(picture("L").convert("I").convert("I;16"), "PNG"),
        "palette and alpha.png": encode(picture("P"), "PNG", transparency=1),
        "turned.jpg": encode(picture(), "JPEG", exif=exif),
        "animated.gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated.webp": encode(picture(), "WEBP", save_all=True, append_images=[picture("L").convert("RGB")]),
        "one pixel.png": encode(picture(size=(1, 1)), "PNG"),
        "thin.png": encode(picture(size=(1, 20_000)), "PNG"),
        "flat.png": encode(picture(size=(20_000, 1)), "PNG"),
        "grey.jpg": encode(picture("L"), "JPEG"),
        "broken profile.png": encode(picture(), "PNG", icc_profile=b"no profile at all"),
        "a png in fact.jpg": encode(picture(), "PNG"),
        "line\nbreak.png": encode(picture(), "PNG"),
        "\x1b[31mred.png": encode(picture(), "PNG"),
        os.fsdecode(b"caf\xe9.png"): encode(picture(), "PNG"),
    }


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = make_images(tmp_path / "photos", 80)
    for name, (content, _) in refused_files().items():
        (folder / name).write_bytes(content)
    for name, content in accepted_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_through_and_names_each(workers, corpus, tmp_path, monkeypatch):
    os.mkfifo(corpus / "pipe.jpg")
    os.mkdir(corpus / "folder.jpg")
    (corpus / "loop").symlink_to(corpus)
    (corpus / "device.jpg").symlink_to("/dev/zero")
    (corpus / "own tail.jpg").symlink_to("own tail.jpg")
    monkeypatch.chdir(corpus)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
    monkeypatch.chdir(tmp_path)
    begin = Trainer._begin_epoch

    def begin_epoch(self, epoch):
        """What happens while a run is under way."""
        if epoch == 1:
            (corpus / "image0000.png").unlink()
            (corpus / "image0001.png").unlink()
            os.mkfifo(corpus / "image0001.png")
            (corpus / "image0002.png").write_bytes(b"overwritten by a note")
        begin(self, epoch)

    monkeypatch.setattr(Trainer, "_begin_epoch", begin_epoch)
    # With the fine clusters off every epoch reads every image that it visits anew.
    options = {**TINY, "workers": workers, "max_refused": 0.5, "cache_gb": 0.0, "warm_share": 0.0, "final_pass": True}
    with pytest.warns(UserWarning, match="own tail"):
        run = odcluster.train(corpus, out=tmp_path / "run", quiet=True, **options)
    with open(run / "bad_images.csv", newline="", errors="surrogateescape") as file:
        named = {row["path"].removeprefix("'"): row["reason"] for row in csv.DictReader(file)}
    expected = {name: reason for name, (_, reason) in refused_files().items()}
    expected |= {
        "image0000.png": "no such file",
        "image0001.png": "not a regular file",
        "image0002.png": "not an image: text",
    }
    assert set(named) == set(expected)
    for name, reason in expected.items():
        assert reason in named[name], name
    table = read_clusters_csv(run / "clusters.csv")
    assert set(table.names) == {f"image{i:04d}.png" for i in range(80)} | set(refused_files()) | set(accepted_files())
    without = {name for name, label in zip(table.names, table.labels, strict=True) if label < 0}
    assert without <= set(expected)
    assert set(refused_files()) <= without


def test_only_bad_images_are_one_sentence(tmp_path):
    (tmp_path / "photos").mkdir()
    for name, (content, _) in refused_files().items():
        (tmp_path / "photos" / name).write_bytes(content)
    with pytest.raises(DataError, match="16 of 16 images cannot be used"):
        odcluster.train(tmp_path / "photos", out=tmp_path / "run", quiet=True, **{**TINY, "clusters": 2})
