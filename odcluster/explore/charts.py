"""Curves and bars as SVG text that stands inside a page: colours come from the page's style, light or dark.

Classes the page gives colours to: chart, axis, grid, line, band, bar, mark. No text of others enters a chart except
through `escape`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from odcluster.explore.mosaic import nice_ticks, tick_texts

Values = Sequence[float] | NDArray[np.number]

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 36
MOST_POINTS = 240
"""Of a curve: more than one per pixel or two only make the file larger."""


def line_chart(
    title: str,
    curves: Sequence[tuple[str, Values, Values]],
    *,
    x_label: str = "step",
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Curves (name, steps, values) over the same axes; where many values are drawn as one, a band shows their range.

    Each of `marks` is a step with a word, drawn as an upright line. Values that are not finite are left out.
    """
    drawn = [(name, *_thinned(*_finite(steps, values))) for name, steps, values in curves]
    drawn = [curve for curve in drawn if len(curve[1])]
    if not drawn:
        return ""
    start, end = (float(edge(edge(curve[1]) for curve in drawn)) for edge in (min, max))
    low, high = float(min(curve[3].min() for curve in drawn)), float(max(curve[4].max() for curve in drawn))
    axes = _Axes(start, end, low, high)
    parts = [axes.grid(x_label)]
    parts += [axes.mark(at, word) for at, word in marks if start < at < end]
    for number, (name, steps, means, least, most) in enumerate(drawn):
        if not np.array_equal(least, most):
            there, back = axes.points(steps, most), axes.points(steps[::-1], least[::-1])
            parts.append(f'<polygon class="band c{number}" points="{there} {back}"/>')
        if len(steps) == 1:
            x, y = axes.x(float(steps[0])), axes.y(float(means[0]))
            parts.append(f'<circle class="dot c{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        else:
            parts.append(f'<polyline class="line c{number}" points="{axes.points(steps, means)}"/>')
        if len(drawn) > 1:
            y = axes.y(float(means[-1])) - 5
            y = min(max(y, TOP + 10), HEIGHT - BOTTOM - 4)
            place = f'x="{WIDTH - RIGHT - 2}" y="{y:.1f}" text-anchor="end"'
            parts.append(f'<text class="c{number}" {place}>{escape(name)}</text>')
    return _svg(title, parts)


def bar_chart(title: str, heights: Values, *, x_label: str) -> str:
    """Values from left to right as bars without gaps, so that thousands of them make an area."""
    values = np.asarray(heights, np.float64)
    if not len(values):
        return ""
    axes = _Axes(0, len(values), 0, float(values.max()))
    columns = np.unique(np.linspace(0, len(values), min(len(values), WIDTH) + 1).astype(int))
    path = [f"M{axes.x(0):.1f} {axes.y(0):.1f}"]
    for first, last in itertools.pairwise(columns):
        y = axes.y(float(values[first:last].mean()))
        path.append(f"L{axes.x(float(first)):.1f} {y:.1f}L{axes.x(float(last)):.1f} {y:.1f}")
    path.append(f"L{axes.x(len(values)):.1f} {axes.y(0):.1f}Z")
    return _svg(title, [axes.grid(x_label), f'<path class="bar" d="{"".join(path)}"/>'])


class _Axes:
    """From values to places on the chart."""

    def __init__(self, start: float, end: float, low: float, high: float) -> None:
        if start == end:
            start, end = start - 1, end + 1
        if low == high == 0:
            high = 1
        self.y_ticks = nice_ticks(low, high, 4)
        self.x_ticks = nice_ticks(start, end, 5, least=1.0)
        self.start, self.end = start, end
        self.low, self.high = min(self.y_ticks[0], low), max(self.y_ticks[-1], high)

    def x(self, value: float) -> float:
        return LEFT + (value - self.start) / (self.end - self.start) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def points(self, xs: NDArray[np.float64], ys: NDArray[np.float64]) -> str:
        return " ".join(f"{self.x(float(x)):.1f},{self.y(float(y)):.1f}" for x, y in zip(xs, ys, strict=True))

    def grid(self, x_label: str) -> str:
        parts = []
        for value, text in zip(self.y_ticks, tick_texts(self.y_ticks), strict=True):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="axis" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for value, text in zip(self.x_ticks, tick_texts(self.x_ticks), strict=True):
            if self.start <= value <= self.end:
                x, y = self.x(value), HEIGHT - BOTTOM + 15
                parts.append(f'<text class="axis" x="{x:.1f}" y="{y}" text-anchor="middle">{text}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(
            f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>'
        )
        return "".join(parts)

    def mark(self, at: float, word: str) -> str:
        x = self.x(at)
        anchor, shift = ("start", 4) if x < WIDTH / 2 else ("end", -4)
        return (
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="axis" x="{x + shift:.1f}" y="{TOP + 8}" text-anchor="{anchor}">{escape(word)}</text>'
        )


def _svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _finite(steps: Values, values: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    good = np.isfinite(x) & np.isfinite(y)
    return x[good], y[good]


def _thinned(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """At most MOST_POINTS of x, with mean, least and greatest of the values that each stands for."""
    if len(x) <= MOST_POINTS:
        return x, y, y, y
    starts = np.linspace(0, len(x), MOST_POINTS, endpoint=False).astype(int)
    counts = np.diff(np.r_[starts, len(x)])
    steps, means = (np.add.reduceat(values, starts) / counts for values in (x, y))
    return steps, means, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
