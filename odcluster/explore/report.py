"""A run as one HTML file: clusters to look at, sizes, curves, near-duplicates, outliers, and how it was made.

Promises: the file needs nothing but itself (pictures are inside, nothing is loaded from anywhere, without scripts it
shows the same); it stays below about `MOST_BYTES`, and says what was left out for that; names of files and clusters are
text in it, whatever they contain; no folder of this machine is named, only the data's own name.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

import odcluster
from odcluster.config import Config
from odcluster.data.order import num_steps
from odcluster.explore.charts import bar_chart, line_chart
from odcluster.explore.collection import Collection, Status, View
from odcluster.explore.history import spread
from odcluster.explore.mosaic import choose_clusters
from odcluster.explore.oddities import DuplicateGroup, Outliers
from odcluster.explore.report_pictures import Pictures
from odcluster.explore.report_style import SCRIPT, STYLE
from odcluster.explore.report_words import (
    METHODS,
    cluster_name,
    command,
    data_name,
    figure,
    number,
    options_of,
    shown_name,
    trained_seconds,
)
from odcluster.methods.odc import warm_epochs
from odcluster.training.console import duration

MOST_BYTES = 15_000_000
"""Of the whole file; pictures get what the rest leaves."""
ODD_BYTES = 2_500_000
"""Of the pictures of near-duplicates and outliers."""
LAYOUTS = ((120, 9), (96, 9), (72, 9), (72, 6), (56, 6), (56, 4))
"""Side in pixels and number of a cluster's pictures: the first that has room for all clusters."""
FALLBACK = (72, 6)
"""Where none has: better some clusters well than all of them badly."""
MOST_CARDS = 1200
MOST_LINES = 2000
"""Clusters without pictures that are listed by name."""
MOST_GROUPS, MOST_OF_GROUP, MOST_OUTLIERS = 40, 6, 60


@dataclass(frozen=True)
class Oddities:
    """What `oddities.py` found in a run."""

    duplicates: list[DuplicateGroup] | None
    """None: there are no features or no images to compare."""
    outliers: Outliers
    unchecked: int
    """Images whose pixels were not compared, because there were too many."""


# --- The page ---------------------------------------------------------------------------------------


def render(collection: Collection, oddities: Oddities, *, most_bytes: int = MOST_BYTES) -> str:
    """The whole page as text."""
    view, status = collection.view(), collection.status()
    pictures = Pictures(collection.source, min(ODD_BYTES, most_bytes // 5))
    duplicates = duplicates_section(collection, oddities, pictures)
    outliers = outliers_section(collection, view, oddities, pictures)
    rest = [sizes_section(view), training_section(collection), duplicates, outliers]
    made = how_section(collection, status)
    pictures.room = most_bytes - sum(map(len, (*rest, made))) - len(STYLE) - len(SCRIPT) - 400_000  # lines and heads
    clusters = clusters_section(collection, view, pictures)
    title = shown_name(collection.run.path.absolute().name)
    sections = [
        summary_section(collection, view, status, title),
        clusters,
        *rest,
        notes_section(collection, view, pictures),
        made,
    ]
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} · clusters</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def summary_section(collection: Collection, view: View, status: Status, title: str) -> str:
    clusters, config = view.clusters, collection.config
    sizes = clusters.sizes[view.listed]
    data = data_name(collection)
    about = f"{len(collection):,} images of {data}"
    if len(sizes):
        about += f" in {len(sizes):,} clusters of {sizes.min():,} to {sizes.max():,} images"
    facts = [("images", f"{len(collection):,}")]
    if len(sizes):
        facts += [("clusters", f"{len(sizes):,}"), ("median size", f"{np.median(sizes):,.0f}")]
        if np.isfinite(clusters.similarities).any():
            facts.append(("mean similarity to the centre", f"{np.nanmean(clusters.similarities):.2f}"))
    series = collection.history.series()
    if changes := series.get("change"):
        facts.append(("labels changed per step of late", f"{changes[-1][1]:.1%}"))
    if seconds := trained_seconds(collection):
        facts.append(("trained for", duration(seconds)))
    state = {"finished": "finished", "training": "training", "stopped": "stopped"}[status.state]
    facts.append((f"step {status.step:,} of {status.total_steps:,}", state))
    if named := sum(bool(view.name(int(cluster))) for cluster in view.listed):
        facts.append(("clusters with a name", f"{named:,}"))
    if edits := collection.curation.count():
        facts.append(("edits by people", f"{edits:,}"))
    tiles = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    links = (("clusters", "Clusters"), ("sizes", "Sizes"), ("training", "Training"), ("duplicates", "Near-duplicates"),
             ("outliers", "Outliers"), ("how", "How it was made"))  # fmt: skip
    nav = "".join(f'<a href="#{target}">{name}</a>' for target, name in links)
    return (
        f"<header>\n<h1>{escape(title)}</h1>\n<p>{escape(shown_name(about))} · {escape(METHODS[config.method])}</p>\n"
        f'<dl class="facts">{tiles}</dl>\n<nav aria-label="Sections">{nav}</nav>\n</header>'
    )


def clusters_section(collection: Collection, view: View, pictures: Pictures) -> str:
    """Cards with pictures, as many as there is room for; the other clusters as lines of a table."""
    clusters, listed = view.clusters, view.listed
    if not len(listed):
        text = "The run has no clusters yet." if len(collection) else "There are no images."
        return f'<section id="clusters">\n<h2>Clusters</h2>\n<p>{text}</p>\n</section>'
    by_size = listed[np.argsort(-clusters.sizes[listed], kind="stable")]
    examples = [int(members[0]) for c in by_size[:24] if len(members := clusters.members(int(c)))]
    side, per_card, num_cards = layout(pictures, examples, len(listed))
    extremes = extreme_clusters(view)
    chosen = set(map(int, listed))
    if num_cards < len(listed):
        chosen = {cluster for _, found in extremes for cluster in found}
        places = choose_clusters(clusters.sizes[by_size], max(1, num_cards - len(chosen)))
        chosen |= {int(by_size[place]) for place in places}
    cards = [card(collection, view, int(c), side, per_card, pictures) for c in by_size if int(c) in chosen]
    others = [int(c) for c in by_size if int(c) not in chosen]
    head = f"<p>{len(cards):,} of {len(listed):,} clusters, largest first; the most central images of each.</p>"
    if not others:
        head = f"<p>All {len(listed):,}, largest first; the most central images of each.</p>"
    controls = (
        '<form class="controls" hidden><label>Sort by <select id="sort"><option value="size">size</option>'
        '<option value="tightness">tightness</option><option value="name">name</option>'
        '<option value="id">number</option></select></label> '
        '<label>Find <input id="find" type="search" placeholder="name or number"></label> '
        '<output id="found"></output></form>'
    )
    return (
        f'<section id="clusters">\n<h2>Clusters</h2>\n{extremes_list(view, extremes)}\n{head}\n{controls}\n'
        f'<div class="cards" id="cards">\n{"".join(cards)}</div>\n{lines_of(view, others)}</section>'
    )


def layout(pictures: Pictures, examples: Sequence[int], num_clusters: int) -> tuple[int, int, int]:
    """Side and number of pictures per cluster, and the number of clusters that have room for them."""
    fitting: dict[tuple[int, int], int] = {}
    for side, per_card in LAYOUTS:
        card_bytes = per_card * pictures.size(examples, side) + 400
        fitting[side, per_card] = max(1, min(int(pictures.room / card_bytes), MOST_CARDS))
        if fitting[side, per_card] >= num_clusters:
            return side, per_card, num_clusters
    return *FALLBACK, fitting[FALLBACK]


def card(collection: Collection, view: View, cluster: int, side: int, per_card: int, pictures: Pictures) -> str:
    members = view.clusters.members(cluster)[:per_card].tolist()
    tiles = "".join(pictures.tile(image, side, shown_name(collection.manifest.paths[image])) for image in members)
    name, size = view.name(cluster), int(view.clusters.sizes[cluster])
    tightness = float(view.clusters.tightness[cluster])
    title = f"<h3>{escape(shown_name(name))} <small>{cluster}</small></h3>" if name else f"<h3>Cluster {cluster}</h3>"
    merged = view.merged.get(cluster, [])
    more = f" · with {', '.join(map(str, merged[:5]))}{' …' if len(merged) > 5 else ''}" if merged else ""
    known = np.isfinite(tightness)
    bar = f'<meter min="0" max="1" value="{max(0.0, tightness):.3f}" title="tightness">{tightness:.2f}</meter>'
    return (
        f'<article class="card" id="c{cluster}" data-id="{cluster}" data-size="{size}" '
        f'data-tightness="{tightness if known else -1:.4f}" data-name="{escape(shown_name(name))}">'
        f'<div class="mosaic">{tiles}</div>{title}<p>{size:,} image{"" if size == 1 else "s"}{more}</p>'
        f'<p class="tight">{f"{bar} {tightness:.2f}" if known else ""}</p></article>\n'
    )


def extreme_clusters(view: View) -> list[tuple[str, list[int]]]:
    """The five largest, tightest and loosest clusters."""
    sizes, tightness = view.clusters.sizes, view.clusters.tightness
    filled = view.listed[sizes[view.listed] > 0]
    known = filled[np.isfinite(tightness[filled])]
    order = known[np.argsort(-tightness[known], kind="stable")]
    largest = filled[np.argsort(-sizes[filled], kind="stable")][:5]
    found = [("Largest", largest), ("Tightest", order[:5]), ("Loosest", order[::-1][:5])]
    return [(title, ids.tolist()) for title, ids in found if len(ids)]


def extremes_list(view: View, extremes: Sequence[tuple[str, Sequence[int]]]) -> str:
    parts = []
    for title, clusters in extremes:
        lines = []
        for cluster in clusters:
            value = (
                f"{view.clusters.sizes[cluster]:,} images"
                if title == "Largest"
                else f"{view.clusters.tightness[cluster]:.2f}"
            )
            lines.append(
                f'<li><a href="#c{cluster}">{escape(cluster_name(view, cluster))}</a> <span>{value}</span></li>'
            )
        parts.append(f"<div><h3>{title}</h3><ol>{''.join(lines)}</ol></div>")
    return f'<div class="extremes">{"".join(parts)}</div>'


def lines_of(view: View, clusters: Sequence[int]) -> str:
    """Clusters without pictures, as a table that is closed at first."""
    if not clusters:
        return ""
    lines = "".join(
        f"<tr><td>{escape(cluster_name(view, cluster))}</td><td>{view.clusters.sizes[cluster]:,}</td>"
        f"<td>{number(float(view.clusters.tightness[cluster]))}</td></tr>"
        for cluster in clusters[:MOST_LINES]
    )
    more = len(clusters) - MOST_LINES
    note = f"<p>{more:,} more are in clusters.csv only.</p>" if more > 0 else ""
    return (
        f"<details><summary>{len(clusters):,} clusters without pictures, to keep this file small</summary>"
        f"<table><thead><tr><th>cluster</th><th>images</th><th>tightness</th></tr></thead><tbody>{lines}</tbody></table>"
        f"{note}</details>\n"
    )


def sizes_section(view: View) -> str:
    sizes = np.sort(view.clusters.sizes[view.listed])[::-1]
    if not len(sizes):
        return ""
    smallest, low, median, high, largest = np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1])
    text = (
        f"From {smallest:,.0f} to {largest:,.0f} images; half of the clusters have {low:,.0f} to {high:,.0f}, the "
        f"median is {median:,.0f}. The largest holds {largest / max(1, sizes.sum()):.1%} of all images in clusters."
    )
    chart = bar_chart("Cluster sizes, largest first", sizes, x_label="clusters, largest first")
    loose = view.clusters.tightness[view.listed]
    loose = np.sort(loose[np.isfinite(loose)])[::-1]
    charts = figure("images per cluster", chart)
    if len(loose):
        ranked = [("tightness", np.arange(1, len(loose) + 1), loose)]
        chart = line_chart("Tightness, highest first", ranked, x_label="clusters, tightest first")
        charts += figure("tightness: mean cosine of the members to the centre", chart)
    return f'<section id="sizes">\n<h2>Sizes</h2>\n<p>{text}</p>\n<div class="charts">{charts}</div>\n</section>'


def training_section(collection: Collection) -> str:
    """Curves of what metrics.jsonl has."""
    series, marks = collection.history.series(), phase_marks(collection.config, len(collection))
    names = {
        "loss": "loss",
        "change": "share of labels changed per step",
        "small_clusters": "small clusters dissolved per step",
        "accuracy": "share of right answers",
        "nmi_previous": "agreement with the labels of the epoch before (NMI)",
        "images_per_second": "images per second",
    }
    charts = []
    for key, title in names.items():
        if points := series.get(key):
            steps, values = zip(*points, strict=True)
            charts.append(figure(title, line_chart(title, [(title, steps, values)], marks=marks)))
    if sizes := size_curves(collection):
        charts.insert(2, figure("cluster sizes", line_chart("cluster sizes", sizes, marks=marks)))
    if not charts:
        return '<section id="training">\n<h2>Training</h2>\n<p>No step has been recorded yet.</p>\n</section>'
    return (
        f'<section id="training">\n<h2>Training</h2>\n<div class="charts">{"".join(charts)}</div>\n'
        "<p>Where many steps share a point, the line is their mean and the band their range.</p>\n</section>"
    )


def size_curves(collection: Collection) -> list[tuple[str, list[float], list[float]]]:
    """Largest, median and smallest cluster over time; without a median where only the other two were recorded often."""
    series = collection.history.series()
    curves = {name: series[name] for name in ("largest", "smallest") if series.get(name)}
    records = [spread(step, sizes) for step, sizes in collection.sizes()]
    if len(records) > 4 or not curves:
        named = (("largest", 5), ("median", 3), ("smallest", 1))
        curves = {name: [(int(record[0]), record[column]) for record in records] for name, column in named}
    return [(name, [float(x) for x, _ in points], [y for _, y in points]) for name, points in curves.items() if points]


def phase_marks(config: Config, num_images: int) -> list[tuple[float, str]]:
    """Where clustering begins, after a warm start."""
    if config.method != "odc" or not config.epochs or not (warm := warm_epochs(config)):
        return []
    return [(warm * num_steps(num_images, min(config.batch_size or 1, num_images)), "first clusters")]


def duplicates_section(collection: Collection, oddities: Oddities, pictures: Pictures) -> str:
    groups = oddities.duplicates
    if groups is None:
        text = "Not looked for: that takes features and the images themselves, and one of them is not there."
    elif not groups:
        text = "None were found."
    else:
        extra = sum(len(group.ids) - 1 for group in groups)
        text = f"{len(groups):,} group{'s' if len(groups) > 1 else ''}; {extra:,} image{'s' if extra > 1 else ''} "
        text += f"could go without losing a picture. All of them are in duplicates.csv{shown_share(groups)}."
    if oddities.unchecked:
        text += f" The pixels of {oddities.unchecked:,} images were not compared: there were too many like them."
    parts = []
    for group in (groups or [])[:MOST_GROUPS]:
        tiles = "".join(odd_tile(collection, id, "", pictures) for id in group.ids[:MOST_OF_GROUP])
        more = len(group.ids) - MOST_OF_GROUP
        tiles += f'<p class="more">and {more:,} more</p>' if more > 0 else ""
        parts.append(f'<div class="group" title="similarity {group.similarity:.3f}">{tiles}</div>')
    return (
        f'<section id="duplicates">\n<h2>Near-duplicates</h2>\n<p>{text}</p>\n'
        f'<div class="groups">{"".join(parts)}</div>\n</section>'
    )


def shown_share(groups: Sequence[DuplicateGroup]) -> str:
    return f"; here are {MOST_GROUPS}, the largest groups first" if len(groups) > MOST_GROUPS else ""


def outliers_section(collection: Collection, view: View, oddities: Oddities, pictures: Pictures) -> str:
    found = oddities.outliers
    if not len(found.ids):
        text = "No image is far from its cluster."
    else:
        share = f"; here are the {MOST_OUTLIERS} farthest" if len(found.ids) > MOST_OUTLIERS else ""
        text = (
            f"{len(found.ids):,} image{'s are' if len(found.ids) > 1 else ' is'} unusually far from the centre of "
            f"{'their' if len(found.ids) > 1 else 'its'} cluster. The list is in outliers.csv{share}. The number is "
            "how many robust standard deviations an image lies below the median of its cluster."
        )
    if len(found.unseen):
        text += f" {len(found.unseen):,} could not be read or have no cluster."
    tiles = "".join(
        odd_tile(collection, int(id), f"{cluster_name(view, int(view.clusters.labels[id]))} · {score:.1f}", pictures)
        for id, score in zip(found.ids[:MOST_OUTLIERS], found.scores[:MOST_OUTLIERS], strict=True)
    )
    return f'<section id="outliers">\n<h2>Outliers</h2>\n<p>{text}</p>\n<div class="odd">{tiles}</div>\n</section>'


def odd_tile(collection: Collection, id: int, line: str, pictures: Pictures) -> str:
    name = shown_name(collection.manifest.paths[id])
    second = f"<br><small>{escape(line)}</small>" if line else ""
    return f"<figure>{pictures.tile(id, 96, name)}<figcaption>{escape(name)}{second}</figcaption></figure>"


def notes_section(collection: Collection, view: View, pictures: Pictures) -> str:
    """What a reader should know, and what is not shown."""
    root = collection.manifest.root
    notes = [note.replace(root, data_name(collection)) if root else note for note in collection.notes]
    if pictures.unreadable:
        notes.append(f"{pictures.unreadable:,} of the pictures could not be read: grey squares stand for them.")
    if pictures.left_out:
        notes.append(f"{pictures.left_out:,} pictures had no room in this file: grey squares stand for them.")
    if view.left_out:
        total = sum(map(len, view.left_out.values()))
        notes.append(f"People left {total:,} image{'s' if total > 1 else ''} out of the clusters.")
    if not notes:
        return ""
    items = "".join(f"<li>{escape(shown_name(note))}</li>" for note in notes)
    return f'<section id="notes">\n<h2>Notes</h2>\n<ul>{items}</ul>\n</section>'


def how_section(collection: Collection, status: Status) -> str:
    config = collection.config
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in options_of(config, collection)
    )
    written = time.strftime("%Y-%m-%d")
    return (
        f'<section id="how">\n<h2>How it was made</h2>\n<p>{METHODS[config.method]} The settings as a command:</p>\n'
        f"<pre>{escape(command(collection))}</pre>\n"
        f"<details><summary>Every option</summary><table><tbody>{rows}</tbody></table></details>\n"
        f"<p>Step {status.step:,} of {status.total_steps:,}. Written on {written} by odcluster {odcluster.__version__}."
        "</p>\n</section>"
    )
