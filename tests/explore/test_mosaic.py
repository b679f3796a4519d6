"""The pictures: right images at right places, readable text, and nothing half written."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odcluster.errors import ImageRefused
from odcluster.explore import mosaic
from odcluster.explore.mosaic import (
    MosaicRow,
    choose_clusters,
    cluster_mosaic,
    draw_curves,
    draw_mosaic,
    nice_ticks,
    printable,
    square_thumbnail,
    tick_texts,
)


def flat(red: int, green: int = 7, blue: int = 9, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    return np.full((*size, 3), (red, green, blue), np.uint8)


def colours(path: Path) -> set[tuple[int, ...]]:
    return {tuple(int(v) for v in c) for c in np.unique(np.asarray(Image.open(path)).reshape(-1, 3), axis=0)}


def test_most_central_images_of_each_cluster_are_drawn(tmp_path: Path) -> None:
    labels = np.repeat([0, 1, 2], [30, 0, 20])
    labels[:3] = -1
    similarities = np.linspace(0, 1, 50)  # the last images are the most central
    shown = cluster_mosaic(lambda i: flat(i), labels, similarities, tmp_path / "m.png", name="run", per_row=4, thumb=20)
    assert shown == [0, 2]
    reds = {c[0] for c in colours(tmp_path / "m.png") if c[1:] == (7, 9)}
    assert reds == {26, 27, 28, 29, 46, 47, 48, 49}


def test_an_image_that_cannot_be_read_gives_way_to_the_next(tmp_path: Path) -> None:
    def image_of(i: int) -> np.ndarray:
        if i in (0, 2):
            raise ImageRefused("gone")
        return flat(i)

    cluster_mosaic(image_of, np.zeros(9, int), -np.arange(9.0), tmp_path / "m.png", name="r", per_row=3, thumb=16)
    assert {c[0] for c in colours(tmp_path / "m.png") if c[1:] == (7, 9)} == {1, 3, 4}


def test_every_image_stands_where_its_row_and_rank_say(tmp_path: Path) -> None:
    rows = [MosaicRow(f"c{r}", "", [flat(10 * r + j, size=(30, 30)) for j in range(3)]) for r in range(10)]
    draw_mosaic(rows=rows, title="t", subtitle="s", thumb=48, path=tmp_path / "m.png")
    pixels = np.asarray(Image.open(tmp_path / "m.png"))
    ours = (pixels[..., 1] == 7) & (pixels[..., 2] == 9)

    def centre(red: int) -> np.ndarray:
        return np.argwhere(ours & (pixels[..., 0] == red)).mean(axis=0)

    assert centre(1)[1] - centre(0)[1] == centre(2)[1] - centre(1)[1] > 48  # to the right, not overlapping
    assert centre(10)[0] - centre(0)[0] > 48  # next cluster below
    assert centre(50)[0] == centre(0)[0]  # ten clusters: the sixth heads the second column
    assert centre(50)[1] > centre(2)[1] + 48
    for red in [10 * r + j for r in range(10) for j in range(3)]:
        assert (ours & (pixels[..., 0] == red)).sum() == 46 * 46  # whole, within its one-pixel frame


def test_clusters_are_chosen_from_the_largest_to_the_smallest() -> None:
    counts = np.array([5, 0, 9, 1, 7, 3])
    assert choose_clusters(counts, 24) == [2, 4, 0, 5, 3]
    assert choose_clusters(counts, 3) == [2, 0, 3]
    many = choose_clusters(np.arange(1000), 24)
    assert len(set(many)) == 24
    assert (many[0], many[-1]) == (999, 1)
    assert choose_clusters(np.zeros(3, int), 24) == []


def test_thumbnails_are_the_central_square() -> None:
    image = np.zeros((40, 100, 3), np.uint8)
    image[:, 30:70] = 200
    for side in (20, 40, 64, 160):
        thumbnail = np.asarray(square_thumbnail(image, side))
        assert thumbnail.shape == (side, side, 3)
        assert (thumbnail == 200).all()


def test_small_images_are_enlarged_as_blocks_and_large_ones_shrunk_smoothly() -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert (np.asarray(square_thumbnail(small, 64)) == small.repeat(8, 0).repeat(8, 1)).all()
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[::2] = 255
    assert abs(np.asarray(square_thumbnail(stripes, 32)).astype(int) - 127).max() < 20  # no aliasing
    with pytest.raises(ValueError, match="pass uint8"):
        square_thumbnail(small.astype(np.float32), 64)


def test_odd_names_and_empty_runs_are_drawn_all_the_same(tmp_path: Path) -> None:
    assert printable("Zoë\n\x1b[31m·中") == "Zoe ?[31m·?"
    title = "<script>\udcff\x00 " * 30
    draw_mosaic(rows=[MosaicRow(title, title, [])], title=title, subtitle=title, thumb=64, path=tmp_path / "a.png")
    draw_mosaic(rows=[], title="", subtitle="", thumb=64, path=tmp_path / "b.png")
    assert Image.open(tmp_path / "a.png").width < 700  # cut off, not spread out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_a_failed_drawing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.png"
    path.write_bytes(b"old")

    def fail(self: Image.Image, fp: Path, format: str) -> None:
        Path(fp).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(mosaic.Image.Image, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_mosaic(rows=[], title="", subtitle="", thumb=64, path=path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def line_pixels(path: Path) -> np.ndarray:
    """Rows and columns of the pixels in the curve's colour within the only panel, its heading apart."""
    pixels = np.asarray(Image.open(path)).astype(int)
    found = np.argwhere(abs(pixels - np.array(mosaic.LINE)).sum(axis=2) < 40)
    return found[found[:, 0] > 110]


def test_a_curve_rises_where_its_values_rise(tmp_path: Path) -> None:
    draw_curves(tmp_path / "c.png", {"loss": (range(50), [float(i) for i in range(50)])}, title="t")
    found = line_pixels(tmp_path / "c.png")
    assert np.corrcoef(found[:, 0], found[:, 1])[0, 1] < -0.999  # rows count downwards
    assert np.ptp(found[:, 1]) > 280


def test_spikes_survive_when_points_outnumber_pixels(tmp_path: Path) -> None:
    values = np.zeros(100_000)
    values[50_000] = 10.0
    draw_curves(tmp_path / "c.png", {"loss": (np.arange(100_000), values)}, title="t")
    pixels = np.asarray(Image.open(tmp_path / "c.png")).astype(int)
    band = np.argwhere(abs(pixels - np.array(mosaic.BAND)).sum(axis=2) < 40)
    assert np.ptp(band[:, 0]) > 80


def test_curves_without_values_or_with_odd_ones_are_drawn(tmp_path: Path) -> None:
    series: dict[str, tuple[list[float], list[float]]] = {
        "none": ([], []),
        "nan": ([1, 2], [float("nan"), float("inf")]),
        "one": ([3], [1e-9]),
        "same step": ([3, 3], [1.0, 2.0]),
        "constant": ([1, 2, 3], [0.0, 0.0, 0.0]),
        "huge": ([1, 2], [-1e30, 1e30]),
        "gap": ([1, 2, 3], [1.0, float("nan"), 2.0]),
    }
    draw_curves(tmp_path / "c.png", series, title="t", subtitle="s")
    draw_curves(tmp_path / "empty.png", {}, title="t")
    assert Image.open(tmp_path / "c.png").size[0] > 1000
    with pytest.raises(ValueError, match="one value per step"):
        draw_curves(tmp_path / "c.png", {"loss": ([1, 2], [1.0])}, title="t")


def test_ticks_are_few_round_and_enclose_the_values() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        low = rng.normal() * 10.0 ** rng.integers(-8, 8)
        high = low + abs(rng.normal()) * 10.0 ** rng.integers(-2, 2) * abs(low)
        ticks = nice_ticks(low, high, 4)
        step = ticks[1] - ticks[0]
        assert 2 <= len(ticks) <= 6
        assert ticks[0] <= low + 1e-5 * step
        assert high <= ticks[-1] + 1e-5 * step
        texts = tick_texts(ticks)
        assert len(set(texts)) == len(texts)
    assert nice_ticks(0, 3, 6, least=1) == [0, 1, 2, 3]


def test_tick_texts_are_short() -> None:
    assert tick_texts([0.0, 0.05, 0.1]) == ["0", "0.05", "0.10"]
    assert tick_texts([0, 10_000, 20_000]) == ["0", "10k", "20k"]
    assert tick_texts([0, 20e6, 40e6]) == ["0", "20M", "40M"]
    assert tick_texts([0, 5e-6, 1e-5]) == ["0", "5e-06", "1e-05"]
