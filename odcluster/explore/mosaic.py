"""Two pictures of a run, drawn with Pillow alone: the clusters as rows of thumbnails, the metrics as curves.

Both are PNG files on a light background, written whole or not at all. Text uses the scalable font that Pillow
brings along; it has ASCII and little more, so other letters appear as their base letter or a question mark.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from odcluster.errors import ImageRefused
from odcluster.explore.export import rank_within_cluster, replacing

Pixels = NDArray[np.uint8]
Colour = tuple[int, int, int]
Values = Sequence[float] | NDArray[np.number]

PAPER: Colour = (252, 252, 250)
CARD: Colour = (255, 255, 255)
INK: Colour = (32, 36, 44)
MUTED: Colour = (112, 118, 130)
RULE: Colour = (226, 228, 233)
LINE: Colour = (36, 99, 180)
BAND: Colour = (205, 221, 242)
MARGIN = 36


@dataclass(frozen=True)
class MosaicRow:
    """One cluster: what stands at its left, and its images, most central first."""

    title: str
    subtitle: str
    images: list[Pixels]
    """uint8, height x width x 3."""


def cluster_mosaic(
    image_of: Callable[[int], Pixels],
    labels: NDArray[np.integer],
    similarities: NDArray[np.floating],
    path: str | os.PathLike[str],
    *,
    name: str,
    num_clusters: int | None = None,
    max_rows: int = 24,
    per_row: int = 10,
    thumb: int = 64,
) -> list[int]:
    """Draw up to `max_rows` clusters with their most central images; returns the clusters shown, as drawn.

    `image_of(i)` is image i as uint8 [H, W, 3]; one it refuses is left out and the next most central takes
    its place. `num_clusters` is C for the title when some clusters may be empty.
    """
    labels = np.asarray(labels)
    counts = np.bincount(labels[labels >= 0], minlength=1)
    ranks = rank_within_cluster(labels, similarities)
    shown = choose_clusters(counts, max_rows)
    rows = []
    for cluster in shown:
        members = np.flatnonzero(labels == cluster)
        nearest = members[np.argsort(ranks[members])]
        images = _first_readable(image_of, nearest, per_row)
        rows.append(MosaicRow(f"Cluster {cluster}", f"{counts[cluster]:,} images", images))
    total = num_clusters if num_clusters is not None else int((counts > 0).sum())
    choice = "" if len(shown) == total else f" · {len(shown)} shown, from the largest to the smallest"
    subtitle = f"{int(counts.sum()):,} images in {total:,} clusters{choice} · most central images first"
    draw_mosaic(rows=rows, title=name, subtitle=subtitle, thumb=thumb, path=path)
    return shown


def choose_clusters(counts: NDArray[np.integer], limit: int) -> list[int]:
    """At most `limit` clusters, none empty, evenly spread from the largest to the smallest."""
    order = np.argsort(-np.asarray(counts, np.int64), kind="stable")
    order = order[counts[order] > 0]
    if len(order) > limit:
        order = order[np.linspace(0, len(order) - 1, limit).round().astype(int)]
    return [int(cluster) for cluster in order]


def draw_mosaic(
    *, rows: Sequence[MosaicRow], title: str, subtitle: str, thumb: int, path: str | os.PathLike[str]
) -> None:
    """Draw one row per cluster, in two columns when there are more than eight."""
    gap, label_width, gutter = 4, 118, 44
    per_row = max((len(row.images) for row in rows), default=1)
    num_columns = 2 if len(rows) > 8 else 1
    height = max(thumb, 44) + 12
    width = label_width + per_row * (thumb + gap) - gap
    depth = math.ceil(len(rows) / num_columns)
    inner = max(num_columns * (width + gutter) - gutter, 420)
    canvas, draw, top = _page(inner + 2 * MARGIN, depth * height - 12, title, subtitle)
    for i, row in enumerate(rows):
        column, line = divmod(i, depth)
        x, y = MARGIN + column * (width + gutter), top + line * height
        middle = y + max(thumb, 44) // 2
        _write(draw, (x, middle - 2), row.title, 17, INK, anchor="ls", room=label_width - 10)
        _write(draw, (x, middle + 18), row.subtitle, 13, MUTED, anchor="ls", room=label_width - 10)
        for j, image in enumerate(row.images):
            at = (x + label_width + j * (thumb + gap), middle - thumb // 2)
            canvas.paste(square_thumbnail(image, thumb), at)
            draw.rectangle((*at, at[0] + thumb - 1, at[1] + thumb - 1), outline=RULE)
    _save(canvas, path)


def square_thumbnail(image: Pixels, side: int) -> Image.Image:
    """The central square at the given side: smooth, but as plain blocks where pixels at least double."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"An image is {image.dtype} {image.shape}; pass uint8 of shape [height, width, 3].")
    height, width = image.shape[:2]
    size = min(height, width)
    top, left = (height - size) // 2, (width - size) // 2
    square = Image.fromarray(np.ascontiguousarray(image[top : top + size, left : left + size]))
    if 2 * size > side:
        return square.resize((side, side), Image.Resampling.LANCZOS)
    whole = size * -(-side // size)  # every pixel becomes an equal block, whatever the side
    return square.resize((whole, whole), Image.Resampling.NEAREST).resize((side, side), Image.Resampling.BOX)


def draw_curves(
    path: str | os.PathLike[str],
    series: Mapping[str, tuple[Values, Values]],
    *,
    title: str,
    subtitle: str = "",
    x_label: str = "step",
    columns: int = 3,
) -> None:
    """Draw each (x values, y values) in a panel of its own. Values that are not finite are left out.

    Where several values fall on one pixel column, the line is their mean and the band reaches from the least
    to the greatest, so that a spike never disappears.
    """
    panel_width, panel_height, gap = 372, 238, 20
    columns = max(1, min(columns, len(series)))
    lines = max(1, math.ceil(len(series) / columns))
    width = 2 * MARGIN + columns * (panel_width + gap) - gap
    canvas, draw, top = _page(width, lines * (panel_height + gap) - gap, title, subtitle)
    for i, (name, (xs, ys)) in enumerate(series.items()):
        line, column = divmod(i, columns)
        x, y = MARGIN + column * (panel_width + gap), top + line * (panel_height + gap)
        box = (x, y, x + panel_width, y + panel_height)
        draw.rounded_rectangle(box, radius=8, fill=CARD, outline=RULE)
        _draw_panel(canvas, box, name, xs, ys, x_label)
    _save(canvas, path)


def _draw_panel(
    canvas: Image.Image,
    box: tuple[int, int, int, int],
    name: str,
    xs: Values,
    ys: Values,
    x_label: str,
) -> None:
    draw = ImageDraw.Draw(canvas)
    left, top, right, bottom = box[0] + 58, box[1] + 48, box[2] - 20, box[3] - 44
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    if x.shape != y.shape:
        raise ValueError(f"The curve {name!r} has {len(x)} steps and {len(y)} values; pass one value per step.")
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    last = (f"{y[-1]:,.0f}" if 1e3 <= abs(y[-1]) < 1e9 else f"{y[-1]:.4g}") if len(y) else ""
    _write(draw, (box[2] - 20, box[1] + 27), last, 14, LINE, anchor="rs")
    room = box[2] - 36 - box[0] - 16 - _font(14).getlength(last)
    _write(draw, (box[0] + 16, box[1] + 27), name, 16, INK, anchor="ls", room=int(room))
    if not len(x):
        _write(draw, ((left + right) // 2, (top + bottom) // 2), "no values yet", 14, MUTED, anchor="mm")
        return
    y_ticks = nice_ticks(float(y.min()), float(y.max()), 4)
    low, high = min(y_ticks[0], float(y.min())), max(y_ticks[-1], float(y.max()))
    start, end = float(x.min()), float(x.max())
    if start == end:
        start, end = start - 1, end + 1
    x_ticks = nice_ticks(start, end, 6, least=1.0)
    x_scale = (right - left) / (end - start)
    y_scale = (bottom - top) / (high - low)
    for value, text in zip(y_ticks, tick_texts(y_ticks), strict=True):
        at = round(bottom - (value - low) * y_scale)
        draw.line((left, at, right, at), fill=RULE)
        _write(draw, (left - 8, at), text, 12, MUTED, anchor="rm")
    for value, text in zip(x_ticks, tick_texts(x_ticks), strict=True):
        if start <= value <= end:
            at = round(left + (value - start) * x_scale)
            draw.line((at, bottom, at, bottom + 4), fill=MUTED)
            _write(draw, (at, bottom + 8), text, 12, MUTED, anchor="ma")
    draw.line((left, bottom, right, bottom), fill=MUTED)
    _write(draw, ((left + right) // 2, box[3] - 8), x_label, 12, MUTED, anchor="ms")
    _draw_line(canvas, (left, top, right, bottom), (x - start) * x_scale, (y - low) * y_scale)


def _draw_line(
    canvas: Image.Image, area: tuple[int, int, int, int], x: NDArray[np.float64], y: NDArray[np.float64]
) -> None:
    """Draw the curve, given in pixels from the lower left corner: four times as large, then shrunk."""
    zoom, pad = 4, 4
    left, top, right, bottom = area
    order = np.argsort(x, kind="stable")
    pixel = np.round(x[order]).astype(int)
    columns, starts, counts = np.unique(pixel, return_index=True, return_counts=True)
    y = y[order]
    mean = np.add.reduceat(y, starts) / counts
    across = columns if counts.max() > 1 else x[order]
    size = ((right - left + 2 * pad) * zoom, (bottom - top + 2 * pad) * zoom)

    def points(heights: NDArray[np.float64]) -> list[tuple[float, float]]:
        return [((a + pad) * zoom, (bottom - top - h + pad) * zoom) for a, h in zip(across, heights, strict=True)]

    for colour, is_band in ((BAND, True), (LINE, False)):
        mask = Image.new("L", size)
        pen = ImageDraw.Draw(mask)
        if is_band and counts.max() > 1:
            outline = points(np.maximum.reduceat(y, starts)) + points(np.minimum.reduceat(y, starts))[::-1]
            pen.polygon(outline, fill=255, outline=255)
        elif not is_band and len(mean) > 1:
            pen.line(points(mean), fill=255, width=2 * zoom, joint="curve")
        elif not is_band:
            (a, h), r = points(mean)[0], 3 * zoom
            pen.ellipse((a - r, h - r, a + r, h + r), fill=255)
        smooth = mask.resize((size[0] // zoom, size[1] // zoom), Image.Resampling.BOX)
        canvas.paste(colour, (left - pad, top - pad), smooth)


def nice_ticks(low: float, high: float, most: int, *, least: float = 0.0) -> list[float]:
    """About `most` round numbers around low..high: 1, 2 or 5 times a power of ten, and `least`, apart."""
    if high <= low:
        spread = abs(low) * 0.5 or 1.0
        low, high = low - spread, high + spread
    raw = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """The ticks as short numbers, all in the same form: 0.2, 3, 40k, 20M, 1e-05."""
    largest, step = max(abs(t) for t in ticks), ticks[1] - ticks[0]
    if largest < 1e-3 or largest >= 1e9:
        digits = math.ceil(math.log10(largest / step)) + 1
        return [f"{t:.{digits}g}" for t in ticks]
    unit, suffix = next((u, s) for u, s in ((1e6, "M"), (1e3, "k"), (1.0, "")) if largest >= 10 * u or u == 1.0)
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return [f"{t / unit:.{decimals}f}{suffix}" if t else "0" for t in ticks]


def _first_readable(image_of: Callable[[int], Pixels], candidates: NDArray[np.integer], wanted: int) -> list[Pixels]:
    images: list[Pixels] = []
    for index in candidates[: 2 * wanted + 10]:  # a folder that has vanished must not be tried image by image
        if len(images) == wanted:
            break
        try:
            images.append(image_of(int(index)))
        except ImageRefused:
            continue
    return images


def _page(width: int, body: int, title: str, subtitle: str) -> tuple[Image.Image, ImageDraw.ImageDraw, int]:
    """An empty page with its heading; returns where the body begins."""
    top = MARGIN + (62 if subtitle else 38)
    canvas = Image.new("RGB", (width, top + max(body, 1) + MARGIN), PAPER)
    draw = ImageDraw.Draw(canvas)
    _write(draw, (MARGIN, MARGIN + 18), title, 24, INK, anchor="ls", room=width - 2 * MARGIN)
    _write(draw, (MARGIN, MARGIN + 42), subtitle, 14, MUTED, anchor="ls", room=width - 2 * MARGIN)
    return canvas, draw, top


def _write(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    size: int,
    colour: Colour,
    *,
    anchor: str,
    room: int | None = None,
) -> None:
    """Write one line; what does not fit into `room` pixels is cut off and ends in an ellipsis."""
    font, text = _font(size), printable(text)
    if room is not None and font.getlength(text) > room:
        while text and font.getlength(text + "…") > room:
            text = text[:-1]
        text = text.rstrip() + "…"
    draw.text(at, text, fill=colour, font=font, anchor=anchor)


def printable(text: str) -> str:
    """The text in characters the font has: no accents, line breaks as spaces, the rest as question marks."""
    letters = (c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return "".join(" " if c.isspace() else c if " " <= c <= "~" or c in "·…" else "?" for c in letters)


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size=size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


def _save(canvas: Image.Image, path: str | os.PathLike[str]) -> None:
    with replacing(path) as partial:
        canvas.save(partial, format="PNG")
