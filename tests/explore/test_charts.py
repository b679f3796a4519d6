"""Charts: values stand where the axes say, spikes stay visible, text cannot break out."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np

from odcluster.explore.charts import BOTTOM, HEIGHT, LEFT, MOST_POINTS, RIGHT, TOP, WIDTH, bar_chart, line_chart


def points(svg: str, kind: str) -> list[list[tuple[float, float]]]:
    found = re.findall(rf'<{kind} class="[^"]*" points="([^"]*)"', svg)
    return [[tuple(map(float, pair.split(","))) for pair in text.split()] for text in found]


def test_a_curve_spans_the_axes() -> None:
    svg = line_chart("loss", [("loss", [0, 50, 100], [0.0, 1.0, 2.0])])
    [line] = points(svg, "polyline")
    assert line[0] == (LEFT, HEIGHT - BOTTOM)
    assert line[-1] == (WIDTH - RIGHT, TOP)
    assert "polygon" not in svg
    ElementTree.fromstring(svg)


def test_many_values_become_few_points_and_a_spike_stays() -> None:
    values = np.zeros(10_000)
    values[7777] = 5
    svg = line_chart("x", [("x", np.arange(10_000), values)])
    [line], [band] = points(svg, "polyline"), points(svg, "polygon")
    assert len(line) == MOST_POINTS
    assert min(y for _, y in band) < TOP + 35  # the axis goes on to a round number
    assert min(y for _, y in line) > HEIGHT / 2


def test_unusual_values_are_drawn_or_left_out() -> None:
    assert line_chart("x", [("x", [], [])]) == ""
    assert line_chart("x", [("x", [1, 2], [np.nan, np.inf])]) == ""
    assert bar_chart("x", [], x_label="x") == ""
    for curve in (([3], [1.0]), ([1, 2], [0, 0]), ([1, 2], [-3, -3]), ([1, 2, 3], [1, np.nan, 2])):
        svg = line_chart("x", [("x", *curve)])
        ElementTree.fromstring(svg)
        assert "nan" not in svg
    ElementTree.fromstring(bar_chart("x", [0, 0], x_label="x"))


def test_text_of_others_stays_text() -> None:
    svg = line_chart('"><script>', [("<b>", [1, 2], [1, 2]), ("&", [1, 2], [2, 1])], marks=[(1.5, "<i>")])
    assert not re.search("<(script|b|i)>", svg)
    ElementTree.fromstring(svg)


def test_bars_fall_from_left_to_right() -> None:
    svg = bar_chart("sizes", np.arange(5000, 0, -1), x_label="clusters")
    heights = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", re.search('d="([^"]*)"', svg)[1])]
    assert heights == sorted(heights)
    assert len(svg) < 20_000
