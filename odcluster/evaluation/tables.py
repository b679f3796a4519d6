"""Results as tables for people: one result by its layers, or several runs side by side.

Promises: numbers are percent; runs share a table only when task, protocol variant, data and splits are the same, and
each table says which others it must not be read against, and why; the paper's numbers appear only beside comparable
ones. Names and free text are shown as they are, never read as markup or as terminal commands. Printing is left to
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

from odcluster.data.readers import shown
from odcluster.evaluation.paper import PaperComparison, PaperRow, paper_rows
from odcluster.evaluation.results import TASKS, Data, Result, Scores, Weights

LAYERED = ("linear", "svm")
"""Tasks with one number per layer. The others have several numbers, mostly of one layer."""
RULES_SENTENCE = "published: settings chosen by test score, as in the published numbers; honest: without test labels"


@dataclass(frozen=True)
class Line:
    """Numbers of one run that belong in one row of a table, or in one series of a picture. Shares."""

    name: str
    values: dict[str, float]
    std: dict[str, float] = field(default_factory=dict)
    layer: str = ""
    rule: str = ""


@dataclass(frozen=True)
class Group:
    """Results that may stand side by side, each with the name of its run."""

    results: list[tuple[str, Result]]
    apart: str
    """Which results of the same task stand elsewhere, and why; "" when there are none."""

    @property
    def first(self) -> Result:
        return self.results[0][1]

    def lines(self) -> list[Line]:
        return [line for name, result in self.results for line in lines_of(name, result)]

    def paper_rows(self) -> tuple[PaperRow, ...]:
        """The paper's rows, if they may stand beside every one of the results."""
        found = [paper_rows(result).rows for _, result in self.results]
        return found[0] if all(rows == found[0] for rows in found) else ()


def result_table(result: Result) -> Table:
    """Layers as rows, metrics as columns, the best in bold; the paper's numbers dim, where they are comparable."""
    comparison = paper_rows(result)
    has_rules = any(row.rule for row in result.scores)
    metrics = list(dict.fromkeys(name for row in result.scores for name in row.metrics))
    own = _row_of("ODC", comparison) if result.task == "linear" else None  # the one task with numbers of every layer
    table = _table(result, ["layer", *(["chosen"] if has_rules else [])], [*metrics, *(["ODC, paper"] if own else [])])
    for row in result.scores:
        cells = [
            _cell(row.metrics.get(name), row.std.get(name), "bold" if _is_best(result, row, name) else "")
            for name in metrics
        ]
        beside = [_cell(_share(own.cells.get((row.layer, result.headline))), style="dim")] if own else []
        table.add_row(_text(row.layer), *([Text(row.rule)] if has_rules else []), *cells, *beside)
    table.add_section()
    for paper in comparison.rows:
        best = {metric: paper.best(metric) for metric in metrics}
        layer = (best[result.headline] or ("",))[0]
        labels = [paper.method, paper.source] if has_rules else [", ".join(filter(None, (paper_name(paper), layer)))]
        table.add_row(*map(Text, labels), *(_cell(_share(x[1])) if x else Text("") for x in best.values()), style="dim")
    table.caption = _lines(
        f"data: {data_sentence(result.data)}",
        f"weights: {weights_sentence(result.weights)}",
        left_out_sentence(result.data),
        deviations_sentence(result),
        RULES_SENTENCE if has_rules else "",
        comparison.sentence,
    )
    return table


def comparison_tables(results_by_run: dict[str, list[Result]]) -> list[Table]:
    """Runs as rows. Results that cannot stand side by side come in tables of their own, which say so."""
    return [_comparison_table(group) for group in side_by_side(results_by_run)]


def side_by_side(results_by_run: dict[str, list[Result]]) -> list[Group]:
    """Groups of the same task, variant, data and splits; task by task, and then in the order in which they come."""
    found: dict[tuple[str, ...], list[tuple[str, Result]]] = {}
    for run, results in results_by_run.items():
        for result in results:
            data = result.data
            fingerprints = (data.train_fingerprint, data.test_fingerprint)
            key = (result.task, result.variant, *fingerprints, data.train_split, data.test_split)
            found.setdefault(key, []).append((run, result))
    members = sorted(found.values(), key=lambda group: TASKS.index(group[0][1].task))
    return [Group(_told_apart(group), _apart(group, members)) for group in members]


def lines_of(name: str, result: Result) -> list[Line]:
    """The headline of every layer in one line; for tasks with several numbers, a line per layer and rule."""
    if result.task in LAYERED:
        return [Line(name, {row.layer: row.metrics.get(result.headline, math.nan) for row in result.scores})]
    return [Line(name, row.metrics, row.std, row.layer, row.rule) for row in result.scores]


def paper_line(row: PaperRow, result: Result) -> Line:
    """A row of the paper as a line beside those of `lines_of`."""
    if result.task in LAYERED:
        return Line(paper_name(row), {layer: percent / 100 for (layer, _), percent in row.cells.items()})
    return Line(row.method, {metric: percent / 100 for (_, metric), percent in row.cells.items()}, rule=row.source)


def paper_name(row: PaperRow) -> str:
    return f"{row.method}, {row.source}"


def data_sentence(data: Data) -> str:
    parts = [f"trained on {_split(data.train_split, data.num_train)}"] if data.num_train else []
    parts += [f"tested on {_split(data.test_split, data.num_test)}"] if data.num_test else []
    return ", ".join([shown(data.name), *parts, f"{data.num_classes:,} classes"])


def weights_sentence(weights: Weights) -> str:
    origin = f"{shown(weights.origin)}; " if weights.origin else ""
    return f"{origin}{shown(weights.backbone)} at {weights.image_size} px; {shown(weights.pretraining)}"


def left_out_sentence(data: Data) -> str:
    if not data.left_out:
        return ""
    more = f"; and {len(data.left_out) - 1:,} more" if len(data.left_out) > 1 else ""
    return f"left out: {shown(data.left_out[0])}{more}"


def deviations_sentence(result: Result) -> str:
    return f"deviations: {'; '.join(map(shown, result.deviations))}" if result.deviations else ""


def _comparison_table(group: Group) -> Table:
    first, lines = group.first, group.lines()
    comparisons = [paper_rows(result) for _, result in group.results]
    num_own = len(lines)
    lines += [paper_line(row, first) for row in group.paper_rows()]
    columns = list(dict.fromkeys(name for line in lines[:num_own] for name in line.values))
    has_layers, has_rules = len({line.layer for line in lines[:num_own]}) > 1, any(line.rule for line in lines)
    labels = ["run", *(["layer"] if has_layers else []), *(["chosen"] if has_rules else [])]
    table = _table(first, labels, [*columns, *(["best"] if first.task in LAYERED else [])])
    highest = {column: _highest(line.values.get(column) for line in lines[:num_own]) for column in columns}
    for i, line in enumerate(lines):
        if i == num_own:
            table.add_section()
        values = [line.values.get(column) for column in columns]
        cells = [
            _cell(value, line.std.get(column), "bold" if i < num_own and value == highest[column] else "")
            for column, value in zip(columns, values, strict=True)
        ]
        if first.task in LAYERED:
            cells.append(_cell(_highest(line.values.values())))
        own = [*([line.layer] if has_layers else []), *([line.rule] if has_rules else [])]
        table.add_row(_text(line.name), *map(_text, own), *cells, style="dim" if i >= num_own else "")
    table.caption = _lines(
        f"data: {data_sentence(first.data)}",
        *_run_notes(group),
        RULES_SENTENCE if has_rules else "",
        *_paper_notes(group, comparisons),
        group.apart,
    )
    return table


def _run_notes(group: Group) -> list[str]:
    """What a reader must know of single runs: their weights, and how they deviate."""
    notes = []
    for name, result in group.results:
        said = (weights_sentence(result.weights), left_out_sentence(result.data), deviations_sentence(result))
        notes.append(f"{shown(name)}: {'; '.join(filter(None, said))}")
    return notes


def _paper_notes(group: Group, comparisons: Sequence[PaperComparison]) -> list[str]:
    """Each reason once, with the runs it holds for unless it holds for all."""
    runs: dict[str, list[str]] = {}
    for (name, _), comparison in zip(group.results, comparisons, strict=True):
        runs.setdefault(comparison.sentence, []).append(shown(name))
    if len(runs) == 1:
        return list(runs)
    return [f"{', '.join(names)}: {sentence}" for sentence, names in runs.items() if sentence]


def _told_apart(group: list[tuple[str, Result]]) -> list[tuple[str, Result]]:
    """Names made different where one run has several results in a group: by the seed, or else by a number."""
    named = []
    for at, (run, result) in enumerate(group):
        same = [other for name, other in group if name == run]
        if len(same) == 1:
            named.append((run, result))
        elif len({other.seed for other in same}) == len(same):
            named.append((f"{run}, seed {result.seed}", result))
        else:
            number = 1 + sum(name == run for name, _ in group[:at])
            named.append((f"{run}, {number} of {len(same)}", result))
    return named


def _apart(group: list[tuple[str, Result]], members: list[list[tuple[str, Result]]]) -> str:
    mine = group[0][1]
    notes = []
    for other in members:
        theirs = other[0][1]
        if other is group or theirs.task != mine.task:
            continue
        differs = [f"another protocol ({shown(theirs.protocol)})"] if theirs.variant != mine.variant else []
        if _fingerprints(theirs.data) != _fingerprints(mine.data) or _splits(theirs.data) != _splits(mine.data):
            differs.append(f"other images ({data_sentence(theirs.data)})")
        notes.append(f"{', '.join(dict.fromkeys(shown(run) for run, _ in other))}: {' and '.join(differs)}")
    return f"not side by side with {'; '.join(notes)}" if notes else ""


def _fingerprints(data: Data) -> tuple[str, str]:
    return data.train_fingerprint, data.test_fingerprint


def _splits(data: Data) -> tuple[str, str]:
    return data.train_split, data.test_split


def _split(split: str, num: int) -> str:
    return f"{shown(split)} ({num:,} images)" if split else f"{num:,} images"


def _row_of(method: str, comparison: PaperComparison) -> PaperRow | None:
    return next((row for row in comparison.rows if (row.method, row.source) == (method, "paper")), None)


def _is_best(result: Result, row: Scores, metric: str) -> bool:
    best = result.best
    same = (row.layer, row.metrics.get(metric)) == (best.layer, best.value)
    return metric == result.headline and same


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None and not math.isnan(value)), default=None)


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _table(result: Result, labels: Sequence[str], columns: Sequence[str]) -> Table:
    """Full width, because a caption is as wide as its table; an empty last column takes what is left."""
    table = Table(
        title=_text(f"{shown(result.protocol)}, percent"), title_style="bold", title_justify="left",
        caption_style="", caption_justify="left", box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0), pad_edge=False, expand=True,
    )  # fmt: skip
    for label in labels:
        table.add_column(Text(label), overflow="fold", min_width=len("published") if label == "chosen" else None)
    for column in columns:
        table.add_column(_text(column), justify="right", no_wrap=True)
    table.add_column(ratio=1)
    return table


def _cell(value: float | None, std: float | None = None, style: str = "") -> Text:
    """78.2, with ± 0.4 beneath: eight numbers of shots then fit into 80 columns."""
    if value is None or math.isnan(value):
        return Text("-", style)
    spread = "" if std is None or math.isnan(std) else f"\n±{100 * std:.1f}"
    return Text(f"{100 * value:.1f}{spread}", style=style)


def _text(text: str) -> Text:
    return Text(shown(text))


def _lines(*sentences: str) -> Text:
    return Text("\n".join(filter(None, sentences)))
