"""Pictures of studies, in the style of the evaluation's: a title, what the paper says, panels below one another."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LEFT, RIGHT, BELOW = 7.6, 0.75, 0.35, 0.62  # inches
PANEL, LEGEND_ROW = 2.9, 0.19
MOST_NUMBERS = 16
"""Bars of a panel that have their number written above them."""
CLOSE = 0.08
"""Share of a panel's height within which the numbers of two dots above one another would meet."""

ROW = 0.055
"""Share of a panel's height that a name at the end of a line takes."""

Panel = Callable[["Axes"], None]
Values = Sequence[float]


def draw_page(directory: Path, name: str, title: str, notes: Sequence[str], panels: Sequence[Panel]) -> list[Path]:
    """NAME.png and NAME.svg with the panels below one another."""
    from odcluster.evaluation.plots import MUTED, house_style, save_figure

    with house_style():
        from matplotlib.figure import Figure

        figure = Figure((WIDTH, 4.0), dpi=160)
        drawn: list[tuple[Axes, float]] = []
        for panel in panels:
            axes = figure.add_axes((0.1, 0.1, 0.8, 0.8), label=f"panel {len(drawn)}")
            axes.grid(axis="y", linewidth=0.8)
            panel(axes)
            drawn.append((axes, 0.35 + LEGEND_ROW * legend(axes)))  # a panel, and the room above it
        text = [line for note in notes if note for line in textwrap.wrap(note, 112)]
        top = 0.6 + 0.175 * len(text)
        height = top + sum(above + PANEL + BELOW for _, above in drawn)
        figure.set_size_inches(WIDTH, height)
        figure.text(0.3 / WIDTH, 1 - 0.28 / height, title, fontsize=13, weight="bold", va="top")
        body = "\n".join(text)
        figure.text(0.3 / WIDTH, 1 - 0.58 / height, body, fontsize=8.5, color=MUTED, va="top", linespacing=1.45)
        bottom = height - top
        for axes, above in drawn:
            bottom -= above + PANEL
            axes.set_position((LEFT / WIDTH, bottom / height, 1 - (LEFT + RIGHT) / WIDTH, PANEL / height))
            bottom -= BELOW
        return save_figure(figure, directory, name)


def curves(
    axes: Axes,
    lines: Mapping[str, tuple[Values, Values]],
    x_label: str,
    y_label: str,
    *,
    limits: tuple[float, float] | None = None,
    ticks: Mapping[float, str] | None = None,
) -> None:
    """One line per name, named in a legend above."""
    from odcluster.evaluation.plots import PALETTE

    for number, (name, (x, y)) in enumerate(lines.items()):
        axes.plot(x, y, color=PALETTE[number % len(PALETTE)], linewidth=1.1, label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if limits is not None:
        axes.set_ylim(*limits)
    if ticks is not None:
        axes.set_xticks(list(ticks), list(ticks.values()))


def sweep(
    axes: Axes,
    values: Sequence[str],
    scores: Mapping[str, Sequence[Values]],
    base: Mapping[str, float],
    x_label: str,
) -> None:
    """Mean over seeds per value, a dot per seed; dashed, an untrained network's. `scores`: per value, per seed."""
    from odcluster.evaluation.plots import PALETTE

    for number, (name, per_value) in enumerate(scores.items()):
        colour = PALETTE[number % len(PALETTE)]
        known = [at for at, points in enumerate(per_value) if len(points)]
        means = [float(np.mean(per_value[at])) for at in known]
        axes.plot(known, means, color=colour, linewidth=1.4, label=name)
        for at in known:
            axes.plot([at] * len(per_value[at]), per_value[at], "o", color=colour, markersize=3.5)
        if name in base:
            axes.axhline(base[name], color=colour, linewidth=0.9, linestyle="--", label=f"{name}, untrained")
    axes.set_xticks(range(len(values)), values)
    axes.set_xlim(-0.4, len(values) - 0.6)
    axes.set_xlabel(x_label)
    axes.set_ylabel("%")
    axes.margins(y=0.15)
    write_means(axes, list(scores.values()))


def write_means(axes: Axes, scores: Sequence[Sequence[Values]]) -> None:
    """Every mean above its dot; below it where another one is so near that the numbers would meet."""
    low, high = axes.get_ylim()
    for at, column in enumerate(zip(*scores, strict=True)):
        means = sorted(float(np.mean(points)) for points in column if len(points))
        for mean, above in zip(means, [*means[1:], np.inf], strict=True):
            place, side = ((0, -6), "top") if above - mean < CLOSE * (high - low) else ((0, 6), "bottom")
            axes.annotate(
                f"{mean:.1f}", (at, mean), place, textcoords="offset points", ha="center", va=side, fontsize=8
            )


def bars(axes: Axes, groups: Sequence[str], series: Mapping[str, Mapping[str, float]], y_label: str) -> None:
    """A group of bars per name on the axis, a bar per series, each with its number where there is room."""
    step, colours = 0.84 / len(series), colours_of(series)
    written = len(groups) * len(series) <= MOST_NUMBERS
    for number, (name, values) in enumerate(series.items()):
        places = [x + (number - (len(series) - 1) / 2) * step for x, group in enumerate(groups) if group in values]
        heights = [values[group] for group in groups if group in values]
        axes.bar(places, heights, step * 0.9, color=colours[name], label=name, zorder=3)
        for x, y in zip(places, heights, strict=True):
            if written:
                axes.annotate(f"{y:.1f}", (x, y), (0, 3), textcoords="offset points", ha="center", fontsize=7.5)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(y_label)
    axes.margins(y=0.12)


def profiles(axes: Axes, places: Sequence[str], lines: Mapping[str, Mapping[str, float]], y_label: str) -> None:
    """A line per name over the places, with its name and last number at its end; untrained and labels dashed."""
    ends: list[tuple[float, str, str]] = []
    colours = colours_of(lines)
    for name, values in lines.items():
        at = [x for x, place in enumerate(places) if place in values]
        heights = [values[places[x]] for x in at]
        colour = colours[name]
        width = 2.2 if name.startswith("ODC") else 1.3
        axes.plot(
            at, heights, "--" if is_reference(name) else "-", color=colour, linewidth=width, marker="o", markersize=3
        )
        ends.append((heights[-1], f"{name} {heights[-1]:.1f}", colour))
    axes.set_xticks(range(len(places)), places)
    last, room = len(places) - 1, len(places)
    axes.set_xlim(-0.2, last + 0.3 * room)  # names stand in the room on the right
    axes.set_ylabel(y_label)
    low, high = axes.get_ylim()
    names_at = apart(sorted(height for height, _, _ in ends), ROW * (high - low))
    line = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 3}
    for y, (height, text, colour) in zip(names_at, sorted(ends), strict=True):
        place, arrow = (last + 0.04 * room, y), {**line, "color": colour}
        axes.annotate(text, (last, height), place, color=colour, fontsize=8, va="center", arrowprops=arrow)


def is_reference(name: str) -> bool:
    """Whether it is what systems are compared with rather than one of them."""
    return name == "labels" or name.startswith("untrained")


def colours_of(names: Collection[str]) -> dict[str, str]:
    """A colour per system, the same in all panels of a page that have the same ones; references are grey."""
    from odcluster.evaluation.plots import GREY, MUTED, PALETTE

    greys = {name: MUTED if name == "labels" else GREY for name in names if is_reference(name)}
    systems = [name for name in names if name not in greys]
    return greys | {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(systems)}


def apart(heights: Values, gap: float) -> list[float]:
    """Heights, ascending, moved as little as it takes for neighbours to be `gap` apart."""
    groups: list[list[float]] = []  # heights less the room below each: what would overlap gets one level
    for number, height in enumerate(heights):
        groups.append([height - number * gap])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    level = [float(np.mean(group)) for group in groups for _ in group]
    return [place + number * gap for number, place in enumerate(level)]


def of_seeds(seeds: Sequence[int]) -> str:
    """What the numbers of a picture are."""
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"means over {len(seeds)} seeds"


def legend(axes: Axes) -> int:
    """Names above the panel, in as many columns as fit; returns how many rows that takes."""
    names = axes.get_legend_handles_labels()[1]
    if not names:
        return 0
    columns = max(1, min(len(names), math.floor(88 / (max(map(len, names)) + 6))))
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.01), borderaxespad=0, ncols=columns, frameon=False, fontsize=8
    )
    return math.ceil(len(names) / columns)
