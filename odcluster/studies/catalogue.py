"""All studies by name, in the paper's order, and what `odcluster reproduce --list` says of them."""

from __future__ import annotations

from odcluster.studies import (
    clusters,
    fine_tuning,
    long_tail,
    reweighting,
    small_clusters,
    stability,
    table_linear,
    table_voc,
    update_interval,
)
from odcluster.studies.plan import Plan, Study

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY
    for module in (
        table_linear,
        table_voc,
        fine_tuning,
        stability,
        update_interval,
        small_clusters,
        long_tail,
        reweighting,
        clusters,
    )
}


def listing() -> str:
    """What each study shows, what it takes, and how long on two cores."""
    lines = [
        "Studies of the paper. --scale small, with the seeds it takes by default:",
        "",
    ]
    for study in STUDIES.values():
        plan = study.plan("small", study.seeds)
        lines += [
            f"  {study.name:16} {study.shows}",
            f"  {'':16} the paper: {study.paper}",
            f"  {'':16} {effort(plan)}; {', '.join(plan.needs())}",
            "",
        ]
    lines += [
        "Studies in one --out share their trainings; those of table-linear, table-voc and clusters are the same.",
        "The same command in a second terminal shares the work: each process takes parts that no other is at.",
        "--scale paper wants --imagenet, --places or --voc and GPUs (the authors used 8).",
        "odcluster reproduce NAME --dry-run prints every part with its settings.",
    ]
    return "\n".join(lines)


def effort(plan: Plan) -> str:
    """How many trainings, and about how long with their judgements, in words."""
    count, minutes = len(plan.trainings), plan.minutes()
    trainings = f"{count} training{'s' if count > 1 else ''}"
    if minutes is None:
        return f"{trainings}, days on several GPUs"
    time = f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
    return f"{trainings}, about {time} on two idle cores"
