"""The tasks of VOC 2007: SVMs on all labels, and on a few images per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from odcluster.evaluation.features import MAX_DIMS
from odcluster.evaluation.lowshot import LowshotResult, draw_samples, lowshot_map
from odcluster.evaluation.parts import Parts, class_annotations
from odcluster.evaluation.results import Rule, Scores
from odcluster.evaluation.svm import SvmResult, check_folds, svm_map
from odcluster.evaluation.workshop import Outcome, Workshop, both_sides, check_memory, refusals, size_and_pooling

NUM_DRAWS = 5
FEWER = "use --task linear, or fewer training images"


def svm(workshop: Workshop) -> Outcome:
    """One-vs-rest SVMs on every layer."""
    train_truth, test_truth, notes = class_annotations(workshop.parts)
    layers = workshop.stages()
    check_folds(train_truth.values, train_truth.class_names)
    check_memory(8 * len(train_truth.values) ** 2, "the products of the training images", FEWER)
    train, test = both_sides(workshop, layers, whole=True, max_dims=MAX_DIMS)
    found: dict[str, SvmResult] = {}
    for layer in layers:
        workshop.say(f"{layer}: {train.store.dimensions[layer]:,} dimensions")
        found[layer] = svm_map(
            train.rows(layer),
            train_truth.values[train.usable],
            test.rows(layer),
            test_truth.values[test.usable],
            train_truth.class_names,
            jobs=workshop.jobs(),
            store=workshop.place() / layer,
            key=workshop.key(),
            progress=workshop.progress,
        )
        workshop.say(f"  {layer}: mAP {found[layer].mean_average_precision:.1%}")
    absent = found[layers[0]].without_test_positives
    return Outcome(
        protocol="VOC07 linear SVM (Goyal et al. 2019)",
        variant="published",
        scores=[Scores(layer=name, metrics={"mAP": result.mean_average_precision}) for name, result in found.items()],
        headline="mAP",
        num_train=int(train.usable.sum()),
        num_test=int(test.usable.sum()),
        num_classes=len(train_truth.class_names),
        deviations=[*size_and_pooling(workshop), *voc_parts(workshop.parts)],
        details={
            "average_precision": {
                name: {entry.name: entry.average_precision for entry in result.classes}
                for name, result in found.items()
            },
            "classes": {name: [asdict(entry) for entry in result.classes] for name, result in found.items()},
            "without_test_positives": list(absent),
        },
        left_out=[*notes, *refusals(train, test), *without_positives(absent)],
        unfinished=workshop.place(),
    )


def lowshot(workshop: Workshop) -> Outcome:
    """SVMs on a few images per class; both ways to choose the cost."""
    train_truth, test_truth, notes = class_annotations(workshop.parts)
    layers = workshop.stages()
    count = len(train_truth.values)
    check_memory(8 * count * (count + len(test_truth.values)), "the products of the images", FEWER)
    train, test = both_sides(workshop, layers, whole=True, max_dims=MAX_DIMS)
    if not workshop.options.layers:
        layers = layers[-1:]
        workshop.say(f"layer {layers[0]}, the last one; others with --layers")
    labels = train_truth.values[train.usable]
    draws = draw_samples(labels, num_draws=NUM_DRAWS, seed=workshop.options.seed)
    found: dict[str, LowshotResult] = {}
    for layer in layers:
        found[layer] = lowshot_map(
            train.rows(layer),
            labels,
            test.rows(layer),
            test_truth.values[test.usable],
            train_truth.class_names,
            draws=draws,
            jobs=workshop.jobs(),
            store=workshop.place() / layer,
            key=workshop.key(),
            progress=workshop.progress,
        )
    used = workshop.parts.train.ids[train.usable]
    paths = workshop.parts.train.source.manifest.paths
    scores = [row for layer, result in found.items() for row in lowshot_scores(layer, result)]
    first = next(iter(found.values()))
    short = [str(entry.shots) for entry in first.shots if entry.short_classes]
    return Outcome(
        protocol="Low-shot VOC07 SVM (Goyal et al. 2019)",
        variant="published",
        scores=scores,
        headline="mean",
        num_train=int(train.usable.sum()),
        num_test=int(test.usable.sum()),
        num_classes=len(train_truth.class_names),
        deviations=[
            *size_and_pooling(workshop),
            *voc_parts(workshop.parts),
            *([f"some classes have too few images for k={', '.join(short)} and use all they have"] if short else []),
        ],
        details={
            "layers": {layer: asdict(result) for layer, result in found.items()},
            "draws": [
                {
                    "k": draw.shots,
                    "draw": draw.number,
                    "positives": [used[list(ids)].tolist() for ids in draw.positives],
                    "negatives": [used[list(ids)].tolist() for ids in draw.negatives],
                }
                for draw in draws
            ],
            "classes": train_truth.class_names,
            "ids_are_positions_in": f"the sorted names of {len(paths):,} images, manifest "
            + workshop.parts.train.source.manifest.fingerprint()[:16],
        },
        left_out=[*notes, *refusals(train, test), *without_positives(first.without_test_positives)],
        unfinished=workshop.place(),
    )


def lowshot_scores(layer: str, result: LowshotResult) -> list[Scores]:
    rows = []
    rules: tuple[tuple[Rule, float], ...] = (
        ("published", result.published_mean),
        ("honest", result.cross_validated_mean),
    )
    for rule, mean in rules:
        published = rule == "published"
        metrics, std = {"mean": mean}, {}
        for entry in result.shots:
            name = f"k={entry.shots}"
            metrics[name] = entry.published_mean if published else entry.cross_validated_mean
            std[name] = entry.published_std if published else entry.cross_validated_std
        rows.append(Scores(layer=layer, metrics=metrics, std=std, rule=rule))
    return rows


def voc_parts(parts: Parts) -> list[str]:
    """In what the images depart from VOC07's."""
    manifest = parts.train.source.manifest
    if manifest.kind != "voc":
        return ["not VOC 2007"]
    if (parts.train.split, parts.test.split) != ("trainval", "test"):
        return [f"trained on {parts.train.split} and tested on {parts.test.split} instead of trainval and test"]
    return []


def without_positives(names: Sequence[str]) -> list[str]:
    return [f"class {name}: no positive test image" for name in names]
