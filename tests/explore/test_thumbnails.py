"""Thumbnails: small, kept, limited in number and in what they may cost, and a grey tile where there is no image."""

from __future__ import annotations

import io
import sqlite3
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odcluster.data.sources import FileSource, open_source
from odcluster.errors import ImageRefused
from odcluster.explore.thumbnails import FULL_SIDE, Picture, Thumbnails


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A wide photo, a tall one, a tiny picture, an empty file and a bomb: in this order."""
    images = tmp_path / "images"
    images.mkdir()
    y, x = np.mgrid[0:300, 0:2000]
    Image.fromarray(np.stack((x % 256, y % 256, (x + y) % 256), 2).astype(np.uint8)).save(images / "a.jpg", quality=95)
    Image.new("RGB", (90, 500), (10, 200, 30)).save(images / "b.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)).save(images / "c.png")
    (images / "d.png").touch()
    (images / "e.png").write_bytes(bomb())
    return images


def bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels in a few bytes."""
    content = b"\x89PNG\r\n\x1a\n"
    header = (60000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")):
        content += len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return content


def opened(picture: Picture) -> Image.Image:
    image = Image.open(io.BytesIO(picture.data))
    assert image.format is not None
    assert picture.media_type == f"image/{image.format.lower()}"
    return image


@pytest.mark.parametrize("size", [96, 192, 384])
def test_the_longest_side_fits_and_the_shape_stays(folder: Path, size: int) -> None:
    thumbnails = Thumbnails(open_source(folder), folder.parent / "explore" / "t.sqlite")
    assert opened(thumbnails.thumbnail(0, size)).size == (size, round(size * 0.15))
    assert opened(thumbnails.thumbnail(1, size)).size == (round(90 * size / 500), size)
    assert opened(thumbnails.full(0)).size == (FULL_SIDE, FULL_SIDE * 3 // 20)
    assert thumbnails.dimensions(0) == (2000, 300)
    mean = np.asarray(opened(thumbnails.thumbnail(1, size)).convert("RGB")).mean(axis=(0, 1))
    np.testing.assert_allclose(mean, (10, 200, 30), atol=4)


def test_a_tiny_image_comes_pixel_by_pixel(folder: Path) -> None:
    thumbnails = Thumbnails(open_source(folder), folder.parent / "explore" / "t.sqlite")
    shown = np.asarray(opened(thumbnails.thumbnail(2, 96)).convert("RGB"))
    assert np.array_equal(shown, np.asarray(Image.open(folder / "c.png")))


def test_what_cannot_be_shown_is_grey_with_the_reason_and_not_kept(folder: Path) -> None:
    thumbnails = Thumbnails(open_source(folder), folder.parent / "explore" / "t.sqlite")
    for id, reason in ((3, "empty file"), (4, "too large: more than")):
        picture = thumbnails.thumbnail(id, 96)
        assert reason in picture.refused
        assert len(np.unique(np.asarray(opened(picture).convert("RGB")))) == 1
        assert thumbnails.dimensions(id) is None
    Image.new("RGB", (50, 50)).save(folder / "d.png")  # repaired
    assert not thumbnails.thumbnail(3, 96).refused


def test_a_thumbnail_is_made_once_and_outlives_the_process(folder: Path) -> None:
    file = folder.parent / "explore" / "t.sqlite"
    first = Thumbnails(open_source(folder), file)
    source = first._source
    made = first.thumbnail(0, 96)
    first.close()
    (folder / "a.jpg").unlink()
    again = Thumbnails(source, file)
    assert again.thumbnail(0, 96) == made
    assert "no such file" in again.thumbnail(0, 192).refused


def test_the_least_recently_used_go_first(folder: Path) -> None:
    file = folder.parent / "explore" / "t.sqlite"
    source = open_source(folder)
    (one := Thumbnails(source, file)).thumbnail(0, 384)
    length = len(one.thumbnail(0, 384).data)
    one.close()
    source.manifest.paths[:] = ["a.jpg"] * 5  # five images alike
    thumbnails = Thumbnails(source, file, max_bytes=3 * length + length // 2)
    for id in range(1, 3):
        thumbnails.thumbnail(id, 384)
    with sqlite3.connect(file) as database:  # 1 was looked at long ago, 0 before that
        database.execute("UPDATE thumbnails SET used = used - 9999 * (2 - id)")
    thumbnails.thumbnail(0, 384)  # and now again
    thumbnails.thumbnail(3, 384)
    kept = sorted(row[0] for row in sqlite3.connect(file).execute("SELECT id FROM thumbnails"))
    assert kept == [0, 2, 3]
    for id in range(5):
        thumbnails.thumbnail(id, 384)
        total = sqlite3.connect(file).execute("SELECT sum(length(data)) FROM thumbnails").fetchone()[0]
        assert total <= 3 * length + length // 2


def test_a_damaged_or_missing_file_costs_nothing_but_time(folder: Path) -> None:
    file = folder.parent / "explore" / "t.sqlite"
    file.parent.mkdir()
    file.write_bytes(b"no database" * 1000)
    thumbnails = Thumbnails(open_source(folder), file)
    made = thumbnails.thumbnail(0, 96)
    assert thumbnails._find(0, 96) == made  # kept in a new one
    nowhere = Thumbnails(open_source(folder), folder / "a.jpg" / "t.sqlite")
    assert nowhere.thumbnail(0, 96) == made


def test_many_threads_get_what_one_gets_and_few_decode_at_once(folder: Path) -> None:
    inside, most = [0], [0]
    lock = threading.Lock()

    class Watched(FileSource):
        def image(self, id: int, min_size: int = 0) -> np.ndarray:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            try:
                return super().image(id, min_size)
            finally:
                with lock:
                    inside[0] -= 1

    source = Watched(open_source(folder).manifest)
    alone = [Thumbnails(source, folder.parent / "one" / "t.sqlite").thumbnail(id, 96) for id in range(5)]
    shared = Thumbnails(source, folder.parent / "many" / "t.sqlite")
    found: list[tuple[int, Picture]] = []

    def look() -> None:
        found.extend((id, shared.thumbnail(id, 96)) for id in range(5))

    threads = [threading.Thread(target=look) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(picture == alone[id] for id, picture in found)
    assert most[0] <= 4


def test_images_in_arrays_have_thumbnails_too(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (3, 200, 100, 3), np.uint8)
    thumbnails = Thumbnails(open_source(pixels), tmp_path / "t.sqlite")
    assert opened(thumbnails.thumbnail(2, 96)).size == (48, 96)
    assert thumbnails.dimensions(1) == (100, 200)
    with pytest.raises((IndexError, ImageRefused)):
        thumbnails.thumbnail(3, 96)
