"""Figure 8: clusters to look at, chosen by rule and not by hand.

Pure clusters: the largest share of one known class. Clusters across classes: as close together as the closer half of
all clusters, and of as many classes as can be; where the network sees a likeness that the labels do not name. Clusters
of fewer than 20 images are left out: they are pure by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from odcluster.studies.plan import Found, Ids, Judgement, Plan, Scale, Study
from odcluster.studies.systems import describe_budget, system_trainings

if TYPE_CHECKING:
    from odcluster.data.sources import Source

SMALLEST = 20
SHOWN = 6
PER_ROW = 11
MOST_LETTERS = 24


@dataclass(frozen=True)
class Chosen:
    """One cluster for the picture."""

    cluster: int
    size: int
    closeness: float
    """Mean cosine of its images to its centre."""
    classes: dict[str, float]
    """Share of each of its three largest classes."""
    nearest: list[int]
    """Its most central images."""


def plan(scale: Scale, seeds: tuple[int, ...]) -> Plan:
    wanted = ("odc-default",) if scale == "small" else ("odc",)
    trainings = system_trainings(scale, seeds, wanted)
    judgements = [Judgement(f"{training.name}-clusters", training.name, "clusters") for training in trainings]
    return Plan(trainings, judgements, describe_budget(scale))


def summarise(found: Found) -> dict[str, Any]:
    from odcluster.explore.export import read_clusters_csv

    summary: dict[str, Any] = {"budget": found.plan.budget, "rule": " ".join((__doc__ or "").split()[:]), "runs": {}}
    for name, trained in found.trained.items():
        table, truth = read_clusters_csv(trained.path / "clusters.csv"), trained.source.manifest.labels
        assert truth is not None
        names = trained.source.manifest.class_names or [str(number) for number in range(int(truth.max()) + 1)]
        pure, across = choose(table.labels, table.similarities, truth, names)
        metrics = found.results[f"{name}-clusters"].scores[0].metrics
        summary["runs"][name] = {
            "pure": [vars(c) for c in pure],
            "across classes": [vars(c) for c in across],
            "agreement with the classes": {key: round(value, 4) for key, value in metrics.items()},
        }
    return summary


def choose(
    labels: Ids, similarities: np.ndarray[Any, Any], truth: Ids, class_names: Sequence[str]
) -> tuple[list[Chosen], list[Chosen]]:
    """The purest clusters, and close ones that cut across the classes."""
    candidates = [
        describe(c, labels, similarities, truth, class_names) for c in np.unique(labels[labels >= 0]).tolist()
    ]
    candidates = [c for c in candidates if c.size >= SMALLEST and c.classes]
    pure = sorted(candidates, key=lambda c: (-max(c.classes.values()), -c.closeness, c.cluster))[:SHOWN]
    close = sorted(candidates, key=lambda c: -c.closeness)[: (len(candidates) + 1) // 2]
    others = [c for c in close if c not in pure]
    return pure, sorted(others, key=lambda c: (max(c.classes.values()), -c.closeness, c.cluster))[:SHOWN]


def describe(
    cluster: int, labels: Ids, similarities: np.ndarray[Any, Any], truth: Ids, class_names: Sequence[str]
) -> Chosen:
    members = np.flatnonzero(labels == cluster)
    known = truth[members][truth[members] >= 0]
    counts = np.bincount(known, minlength=1)
    largest = [int(c) for c in np.argsort(-counts, kind="stable")[:3] if counts[c] > 0]
    shares = {class_names[c]: round(float(counts[c] / len(known)), 4) for c in largest}
    nearest = members[np.argsort(-similarities[members], kind="stable")][:PER_ROW]
    return Chosen(cluster, len(members), round(float(similarities[members].mean()), 4), shares, nearest.tolist())


def draw(study: Study, summary: dict[str, Any], found: Found, directory: Path) -> list[Path]:
    """The clusters of the first seed, one row each: pure ones above, those across classes below."""
    name, run = next(iter(summary["runs"].items()))
    source = found.trained[name].source
    rows = [(c, "pure") for c in run["pure"]] + [(c, "across classes") for c in run["across classes"]]
    nmi = run["agreement with the classes"]["NMI"]
    notes = [f"paper: {study.paper}", summary["budget"], f"all clusters against the classes: NMI {nmi:.3f}"]
    return draw_rows(directory, study.name, notes, rows, source)


def draw_rows(
    directory: Path, name: str, notes: Sequence[str], rows: Sequence[tuple[dict[str, Any], str]], source: Source
) -> list[Path]:
    """A page with a line of thumbnails per cluster."""
    import textwrap

    from odcluster.errors import ImageRefused
    from odcluster.evaluation.plots import MUTED, house_style, save_figure
    from odcluster.explore.mosaic import square_thumbnail

    side, gap, left, width = 0.5, 0.05, 2.0, 8.4
    text = [line for note in notes for line in textwrap.wrap(note, 112)]
    above = 0.85 + 0.175 * len(text)
    kinds = list(dict.fromkeys(kind for _, kind in rows))
    height = above + len(rows) * (side + gap) + len(kinds) * 0.4 + 0.2
    with house_style():
        from matplotlib.figure import Figure

        figure = Figure((width, height), dpi=160)
        figure.text(0.3 / width, 1 - 0.28 / height, "Clusters, chosen by rule", fontsize=13, weight="bold", va="top")
        figure.text(
            0.3 / width, 1 - 0.58 / height, "\n".join(text), fontsize=8.5, color=MUTED, va="top", linespacing=1.45
        )
        y, last = height - above, ""
        for cluster, kind in rows:
            if kind != last:
                y, last = y - 0.4, kind
                figure.text(0.3 / width, (y + 0.12) / height, kind, weight="bold", fontsize=10)
            y -= side + gap
            about = "\n".join(f"{share:.0%} {short(label)}" for label, share in list(cluster["classes"].items())[:2])
            figure.text(0.3 / width, (y + side / 2) / height, about, fontsize=7.5, va="center", linespacing=1.4)
            for at, id in enumerate(cluster["nearest"]):
                try:
                    image = square_thumbnail(source.image(id), 96)
                except ImageRefused:
                    continue
                axes = figure.add_axes(((left + at * (side + gap)) / width, y / height, side / width, side / height))
                axes.imshow(np.asarray(image))
                axes.set_axis_off()
        return save_figure(figure, directory, name)


def short(label: str) -> str:
    """The first of the names that ImageNet has for a class, cut to the room there is."""
    first = label.split(",")[0]
    return first if len(first) <= MOST_LETTERS else first[: MOST_LETTERS - 1].rstrip() + "…"


STUDY = Study(
    name="clusters",
    shows="pictures of clusters, chosen by rule: pure ones, and close ones that cut across the known classes",
    paper="clusters of known classes, of new ones (hand, feet) and of relations (animal in cage, person holds dog)",
    seeds=(0,),
    plan=plan,
    summarise=summarise,
    draw=draw,
)
