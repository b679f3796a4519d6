"""Results as pictures: bars per layer, curves over shots, each as PNG and as SVG.

Promises: files appear only in the given directory, whole or not at all (what matplotlib keeps for itself goes to a
temporary directory that is removed at exit, unless MPLCONFIGDIR is set); the same result gives the same bytes; names
are drawn as they are, never read as formulas or markup; the paper's numbers appear only beside comparable ones. SVG
text stays text: it can be searched, and a browser draws letters that the PNG's font lacks.
"""

from __future__ import annotations

import atexit
import dataclasses
import io
import math
import os
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odcluster.data.readers import shown
from odcluster.errors import UserError
from odcluster.evaluation.paper import PaperRow, paper_rows
from odcluster.evaluation.results import TASKS, Result
from odcluster.evaluation.tables import (
    Line,
    data_sentence,
    deviations_sentence,
    lines_of,
    paper_line,
    side_by_side,
    weights_sentence,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE, GREY = "#1f2430", "#666c78", "#e3e5ea", "#9aa0aa"
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a6a00", "#5b5b5b")
"""Okabe and Ito's colours for all kinds of colour vision, blue first; the yellow darkened, for white paper."""
MARKERS, HATCHES = ("o", "s", "^"), ("", "///", "...")
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a name with two dollar signs is not a formula
    "axes.edgecolor": GREY,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": RULE,
    "hatch.color": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "odcluster",
}
REFERENCES = ("ImageNet labels", "ODC", "DeepCluster", "Random")
"""Of the paper's rows, those worth a line in a picture."""
MAX_CLASSES = 40
X_LABELS = {"knn": "neighbours that vote", "lowshot": "positive images per class", "semi": "share of the labels"}
Y_LABELS = {"lowshot": "mAP, %", "clusters": "%", "semi": "top-1, %", "knn": "top-1, %"}
RULES = {"": "", "published": "chosen by test score (published)", "honest": "chosen without test labels"}
WIDTH, PANEL = 7.6, 3.1  # inches: of a picture, and the height of its first panel
LEFT, CLASS_LEFT, RIGHT = 0.7, 1.5, 0.35


def draw_result(result: Result, directory: Path) -> list[Path]:
    """Draw TASK.png and TASK.svg."""
    classes = result.details.get("average_precision", {}).get(result.best.layer) if result.task == "svm" else None
    notes = [data_sentence(result.data), weights_sentence(result.weights), deviations_sentence(result)]
    with house_style():
        figure = _picture(result, lines_of("", result), paper_rows(result).rows, notes, classes or {})
        return save_figure(figure, directory, result.task)


def draw_comparison(results_by_run: dict[str, list[Result]], directory: Path) -> list[Path]:
    """Draw comparison-TASK.png and .svg, with -2, -3 ... for results of a task that cannot stand side by side."""
    written: list[Path] = []
    numbers = dict.fromkeys(TASKS, 0)
    with house_style():
        for group in side_by_side(results_by_run):
            first = group.first
            numbers[first.task] += 1
            number = f"-{numbers[first.task]}" if numbers[first.task] > 1 else ""
            deviating = [f"{shown(name)}: {deviations_sentence(one)}" for name, one in group.results if one.deviations]
            notes = [data_sentence(first.data), *deviating, group.apart]
            figure = _picture(first, group.lines(), group.paper_rows(), notes, {})
            written += save_figure(figure, directory, f"comparison-{first.task}{number}")
    return written


def _picture(
    result: Result, lines: list[Line], paper: Sequence[PaperRow], notes: list[str], classes: Mapping[str, float]
) -> Figure:
    """Title, notes, legend, the panel with the lines and, if there are classes, a panel with a bar for each."""
    from matplotlib.figure import Figure

    references = _references(result, paper)
    notes = [*notes, _paper_note(result, paper)]
    num_bars = sum(len(line.values) for line in lines) if result.task != "lowshot" else 0
    width = max(WIDTH, min(20.0, 1.5 + 0.4 * num_bars))
    text = [line for note in notes if note for line in textwrap.wrap(note, int(14.5 * (width - 0.7)))]
    columns, rows = _legend_shape(lines, width)
    above, between = 0.87 + 0.175 * len(text) + 0.22 * rows, 0.6 if result.task in X_LABELS else 0.4
    listed = _extremes(classes)
    below = 0.22 * len(listed) + 0.8 if listed else 0.0
    height = above + PANEL + between + below
    right = 1.6 if references else RIGHT

    figure = Figure((width, height), dpi=160)
    figure.text(0.3 / width, 1 - 0.28 / height, _short(result.protocol, 80), fontsize=13, weight="bold", va="top")
    body = "\n".join(text)
    figure.text(0.3 / width, 1 - 0.58 / height, body, fontsize=8.5, color=MUTED, va="top", linespacing=1.45)
    panel = (LEFT / width, (between + below) / height, 1 - (LEFT + right) / width, PANEL / height)
    axes = figure.add_axes(panel)
    (_curves if result.task == "lowshot" else _bars)(axes, lines, references)
    axes.set_ylabel(Y_LABELS.get(result.task, f"{_short(result.headline, 20)}, %"))
    axes.set_xlabel(X_LABELS.get(result.task, ""))
    if rows:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.01, 1.03), borderpad=0, borderaxespad=0, ncols=columns, frameon=False,
            fontsize=9,
        )  # fmt: skip
    if listed:
        size = (CLASS_LEFT / width, 0.25 / height, 1 - (CLASS_LEFT + 0.6) / width, (below - 0.8) / height)
        _class_bars(figure.add_axes(size), listed, len(classes), result.best.layer)
    return figure


def _references(result: Result, paper: Sequence[PaperRow]) -> list[Line]:
    """The paper's rows that become grey lines; of low-shot results only the released code gives numbers per shot."""
    source = "released code" if result.task == "lowshot" else "paper"
    chosen = [row for row in paper if row.method in REFERENCES and row.source == source]
    lines = [dataclasses.replace(paper_line(row, result), name=row.method) for row in chosen]
    return [line for line in lines if set(line.values) - {"mean"}]


def _paper_note(result: Result, paper: Sequence[PaperRow]) -> str:
    """What the grey lines are; of low-shot results, also the means, which are all that the paper prints."""
    if not paper:
        return ""
    if result.task != "lowshot":
        return "grey lines: the paper's numbers"
    means = {row.method: row.best("mean") for row in paper if row.source == "paper"}
    return f"means in the paper: {', '.join(f'{name} {best[1]:.1f}' for name, best in means.items() if best)}"


def _legend_shape(lines: Sequence[Line], width: float) -> tuple[int, int]:
    """Columns and rows; no rows when a single line needs no name."""
    labels = [_series(line, lines) for line in lines]
    if len(labels) == 1 and not labels[0]:
        return 1, 0
    columns = 2 if len(labels) > 1 and max(map(len, labels)) <= 6.2 * (width - 0.5) else 1
    return columns, math.ceil(len(labels) / columns)


def _bars(axes: Axes, lines: Sequence[Line], references: Sequence[Line]) -> None:
    """A group of bars per column, a bar per line, each with its number."""
    columns = list(dict.fromkeys(name for line in lines for name in line.values))
    step = 0.82 / len(lines) if len(lines) > 1 else 0.6
    for i, line in enumerate(lines):
        values = {x: 100 * line.values.get(column, math.nan) for x, column in enumerate(columns)}
        known = {x + (i - (len(lines) - 1) / 2) * step: y for x, y in values.items() if math.isfinite(y)}
        colour, look = _look(line, lines)
        axes.bar(
            list(known), list(known.values()), step * 0.92, color=_paler(colour) if line.rule == "honest" else colour,
            hatch=HATCHES[look], linewidth=0, label=_series(line, lines), zorder=3,
        )  # fmt: skip
        for x, y in known.items():
            axes.annotate(
                f"{y:.1f}", (x, max(y, 0)), (0, 4), textcoords="offset points", ha="center", zorder=4,
                fontsize=9.5 if len(lines) <= 2 else 7.5, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.2},
            )  # fmt: skip
    ends = []
    for line in references:
        found = {x: 100 * line.values[column] for x, column in enumerate(columns) if column in line.values}
        across = 0.46 if len(found) > 1 else len(columns)  # the best layer's number holds for the whole picture
        for x, y in found.items():
            axes.plot([x - across, x + across], [y, y], color=GREY, linewidth=0.9, zorder=2.5)
        ends += [(found[max(found)], line.name)] if found else []
    axes.set_xticks(range(len(columns)), [_short(column, 14) for column in columns])
    axes.set_xlim(-0.6, len(columns) - 0.4)
    _scale(axes, [*lines, *references])
    _name_references(axes, ends)


def _curves(axes: Axes, lines: Sequence[Line], references: Sequence[Line]) -> None:
    """mAP over the number of shots, on a logarithmic axis; a band of one standard deviation each way."""
    names = list(dict.fromkeys(name for line in lines for name in line.values if name.startswith("k=")))
    places = {name: math.log2(int(name[2:])) for name in names}
    for line in lines:
        known = [name for name in names if math.isfinite(line.values.get(name, math.nan))]
        x, y = [places[name] for name in known], [100 * line.values[name] for name in known]
        std = [100 * line.std.get(name, 0.0) for name in known]
        colour, look = _look(line, lines)
        low, high = ([a + sign * b for a, b in zip(y, std, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        dashes = "--" if line.rule == "honest" else "-"
        axes.plot(x, y, dashes, color=colour, marker=MARKERS[look], markersize=4, label=_series(line, lines))
        if len(lines) <= 2:  # more numbers than that would hide one another
            above = line.rule != "honest"
            for at, value in zip(x, y, strict=True):
                axes.annotate(
                    f"{value:.1f}", (at, value), (-3, 4) if above else (4, -4), textcoords="offset points", fontsize=8,
                    color=INK if above else MUTED, va="bottom" if above else "top", ha="right" if above else "left",
                )  # fmt: skip
    ends = []
    for line in references:
        found = {places[name]: 100 * line.values[name] for name in names if name in line.values}
        if found:
            axes.plot(list(found), list(found.values()), color=GREY, linewidth=0.9, zorder=1)
            ends.append((found[max(found)], f"{line.name}, {line.rule},"))
    axes.set_xticks(list(places.values()), [name[2:] for name in names])
    axes.set_xlim(min(places.values()) - 0.45, max(places.values()) + 0.35)
    _scale(axes, [Line("", {n: v for n, v in line.values.items() if n in places}) for line in [*lines, *references]])
    _name_references(axes, ends)


def _class_bars(axes: Axes, classes: Sequence[tuple[str, float]], num_all: int, layer: str) -> None:
    """A lying bar per class, the best on top."""
    places = range(len(classes), 0, -1)
    values = [100 * value for _, value in classes]
    axes.barh(places, values, 0.72, color=PALETTE[0])
    for y, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.1f}", (value, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, [_short(name, 22) for name, _ in classes], color=INK, fontsize=8.5)
    axes.set_ylim(0.4, len(classes) + 0.6)
    axes.set_xlim(0, 100)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    which = "" if len(classes) == num_all else f", the {len(classes) // 2} best and worst of {num_all:,} classes"
    axes.annotate(
        f"Average precision per class, layer {_short(layer, 20)}{which}", (0, 1), (72 * (0.3 - CLASS_LEFT), 8),
        xycoords="axes fraction", textcoords="offset points", weight="bold",
    )  # fmt: skip


def _extremes(classes: Mapping[str, float]) -> list[tuple[str, float]]:
    """All classes, best first; of more than 40 (a page's worth), the twenty at either end."""
    known = sorted(((name, value) for name, value in classes.items() if _is_number(value)), key=lambda pair: -pair[1])
    half = MAX_CLASSES // 2
    return known if len(known) <= MAX_CLASSES else known[:half] + known[-half:]


def _is_number(value: Any) -> bool:
    """Whether it was measured: a class without positive test images has nan, or null when read from a file."""
    return isinstance(value, int | float) and math.isfinite(value)


def _scale(axes: Axes, lines: Sequence[Line]) -> None:
    """From 0, or from below it where a score is negative, with a light grid."""
    values = [100 * value for line in lines for value in line.values.values() if math.isfinite(value)]
    axes.set_ylim(min([0.0, *values]) * 1.1, max([5.0, *values]) * 1.1)
    axes.grid(axis="y", linewidth=0.8)


def _name_references(axes: Axes, ends: Sequence[tuple[float, str]]) -> None:
    """Names at the right edge, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    at = -math.inf
    for y, name in sorted(ends):
        at = max(y, at + 0.05 * (high - low))
        place = (1.01, (at - low) / (high - low))
        axes.annotate(f"{name} {y:.1f}", place, xycoords="axes fraction", color=MUTED, fontsize=8, va="center")


def _look(line: Line, lines: Sequence[Line]) -> tuple[str, int]:
    """Colour of a run (and layer), and which marker or hatch: another one after every eight colours."""
    at = list(dict.fromkeys((other.name, other.layer) for other in lines)).index((line.name, line.layer))
    return PALETTE[at % len(PALETTE)], at // len(PALETTE) % len(HATCHES)


def _series(line: Line, lines: Sequence[Line]) -> str:
    layer = line.layer if len({other.layer for other in lines}) > 1 else ""
    mean = f"mean {100 * line.values['mean']:.1f}" if math.isfinite(line.values.get("mean", math.nan)) else ""
    parts = [_short(line.name, 40), _short(layer, 14), RULES[line.rule], mean]
    label = ", ".join(filter(None, parts))
    return f" {label}" if label.startswith("_") else label  # a legend leaves out what begins with an underscore


def _paler(colour: str) -> tuple[float, ...]:
    """The colour mixed with white: unlike a transparent one, it does not let the grid through."""
    from matplotlib.colors import to_rgb

    return tuple(0.45 * part + 0.55 for part in to_rgb(colour))


def _short(text: str, limit: int) -> str:
    text = shown(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


@contextmanager
def house_style() -> Iterator[None]:
    """Our settings alone, whatever a matplotlibrc says, and everything as it was afterwards."""
    _import_matplotlib()
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box; the SVG has the text
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def _import_matplotlib() -> None:
    """The first import writes a list of fonts to the home directory; here it goes where it is removed at exit."""
    if "matplotlib" in sys.modules or "MPLCONFIGDIR" in os.environ:
        return
    scratch = tempfile.mkdtemp(prefix="odcluster-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    os.environ["MPLCONFIGDIR"] = scratch
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.backends.backend_svg
        import matplotlib.figure

        matplotlib.get_configdir()  # asked for again by later imports, and remembered
    finally:
        del os.environ["MPLCONFIGDIR"]  # other processes must not inherit what will be gone


def save_figure(figure: Figure, directory: Path, name: str) -> list[Path]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    metadata: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    written = []
    for kind, remarks in metadata.items():
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, metadata=remarks)
        path = directory / f"{name}.{kind}"
        partial = directory / f".{path.name}.{os.getpid()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(drawn.getvalue())
            os.replace(partial, path)
        except OSError as error:
            if partial.exists():
                partial.unlink()
            raise UserError(
                f"{shown(str(path))} cannot be written ({error.strerror}); make room or choose another directory"
            ) from error
        written.append(path)
    return written
