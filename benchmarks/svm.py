"""The VOC07 SVM protocol: ours beside the same protocol as a loop over scikit-learn, on the same features and cores.

    python benchmarks/svm.py --data VOC2007 --untrained resnet18 --layer res4 --classes 4 --json results/svm.json
    python benchmarks/svm.py --data VOC2007 --weights FILE --backbone tf_efficientnet_lite0 --layer stage4
    python benchmarks/svm.py --features train.npy test.npy labels_train.npy labels_test.npy

The loop is LinearSVC for each class, cost and fold, with joblib over the classes. `--classes N` takes N classes spread
over all, for the loop needs minutes for each; `--costs K` every K-th cost. `--splits trainval val` trains on as many
images as the paper does; its mAP then means nothing, since the test images are trained on.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import cv2
import joblib
import numpy as np
import sklearn
import torch
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC

from odcluster.data.sources import Source, open_source
from odcluster.evaluation import svm
from odcluster.evaluation.average_precision import average_precision
from odcluster.evaluation.linear import pool_stage
from odcluster.models.backbones import Backbone, create_backbone
from odcluster.models.weights import load_backbone_weights

IMAGE_SIZE = 128


@torch.no_grad()
def layer_features(backbone: Backbone, layer: str, source: Source) -> np.ndarray:
    """Pooled maps of one stage, of the images resized without keeping the aspect."""
    mean, std = torch.tensor(backbone.mean), torch.tensor(backbone.std)
    parts = []
    for at in range(0, len(source), 64):
        ids = range(at, min(at + 64, len(source)))
        images = np.stack([cv2.resize(source.image(i), (IMAGE_SIZE, IMAGE_SIZE)) for i in ids])
        normalised = ((torch.from_numpy(images).float() / 255 - mean) / std).permute(0, 3, 1, 2)
        stages = dict(zip(backbone.stage_names, backbone.stages(normalised), strict=True))
        parts.append(pool_stage(stages[layer]).numpy())
    return np.concatenate(parts)


def voc_labels(source: Source, split: str) -> np.ndarray:
    """1, -1 or 0 for each image and class, from ImageSets/Main."""
    sets = Path(source.manifest.root) / "ImageSets" / "Main"
    names = [Path(path).stem for path in source.manifest.paths]
    columns = []
    for class_name in source.manifest.class_names or []:
        lines = (sets / f"{class_name}_{split}.txt").read_text().splitlines()
        truth = dict(line.split() for line in lines if line.strip())
        columns.append([int(truth[name]) for name in names])
    return np.array(columns, dtype=np.int8).T


def load(given: argparse.Namespace) -> tuple[list[np.ndarray], list[str]]:
    """Training and test features, training and test labels; class names."""
    if given.features:
        arrays = [np.load(path) for path in given.features]
        return arrays, [str(number) for number in range(arrays[2].shape[1])]
    torch.manual_seed(0)
    backbone = create_backbone(given.untrained or given.backbone, image_size=IMAGE_SIZE)
    if given.weights:
        load_backbone_weights(backbone, given.weights)
    backbone.eval()
    sources = [open_source(given.data, split=split) for split in given.splits]
    features = [layer_features(backbone, given.layer, source) for source in sources]
    labels = [voc_labels(source, split) for source, split in zip(sources, given.splits, strict=True)]
    return [*features, *labels], list(sources[0].manifest.class_names or [])


def loop_over_costs(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray
) -> tuple[float, float, list[float]]:
    """One class the obvious way: test average precision, chosen cost, cross-validated scores."""
    target = np.where(labels == 1, 1, -1)

    def classifier(cost: float) -> LinearSVC:
        return LinearSVC(C=cost, class_weight={1: 2, -1: 1}, dual=True, tol=1e-4, max_iter=2000, intercept_scaling=1.0)

    scores = [
        float(cross_val_score(classifier(cost), train, target, cv=3, scoring="average_precision").mean())
        for cost in svm.COSTS
    ]
    cost = svm.COSTS[int(np.argmax(scores))]
    decisions = classifier(cost).fit(train, target).decision_function(test)
    return average_precision(decisions[truth != 0], truth[truth != 0] == 1), cost, scores


def scikit_learn_loop(arrays: list[np.ndarray], jobs: int) -> list[tuple[float, float, list[float]]]:
    train, test, labels, truth = arrays
    train, test = (
        x / (np.linalg.norm(x, axis=1, keepdims=True) + 1e-5)
        for x in (train.astype(np.float64), test.astype(np.float64))
    )
    columns = range(labels.shape[1])
    return joblib.Parallel(n_jobs=jobs)(
        joblib.delayed(loop_over_costs)(train, labels[:, c], test, truth[:, c]) for c in columns
    )


def compare(arrays: list[np.ndarray], names: list[str], jobs: int, skip_loop: bool) -> dict[str, object]:
    train, test, labels, truth = arrays
    began = time.perf_counter()
    ours = svm.svm_map(train, labels, test, truth, names, jobs=jobs)
    seconds = time.perf_counter() - began
    result: dict[str, object] = {
        "train": list(train.shape),
        "test": list(test.shape),
        "classes": names,
        "costs": len(svm.COSTS),
        "jobs": jobs,
        "seconds": round(seconds, 1),
        "mAP": 100 * ours.mean_average_precision,
        "chosen costs": [c.cost for c in ours.classes],
    }
    print(f"ours: {seconds:.1f} s, mAP {100 * ours.mean_average_precision:.3f}", flush=True)
    if not skip_loop:
        began = time.perf_counter()
        theirs = scikit_learn_loop(arrays, jobs)
        loop_seconds = time.perf_counter() - began
        loop_map = float(np.mean([row[0] for row in theirs]))
        largest = max(abs(row[0] - c.average_precision) for row, c in zip(theirs, ours.classes, strict=True))
        cv = max(
            np.abs(np.subtract(row[2], c.cross_validation)).max() for row, c in zip(theirs, ours.classes, strict=True)
        )
        same = sum(row[1] == c.cost for row, c in zip(theirs, ours.classes, strict=True))
        result |= {
            "loop seconds": round(loop_seconds, 1),
            "ratio": loop_seconds / seconds,
            "loop mAP": 100 * loop_map,
            "largest AP difference": 100 * largest,
            "largest cross-validated AP difference": 100 * float(cv),
            "classes with the same cost": same,
        }
        print(
            f"scikit-learn: {loop_seconds:.1f} s, mAP {100 * loop_map:.3f}; {loop_seconds / seconds:.1f} times as long"
        )
        print(f"largest AP difference {100 * largest:.3f}, in cross-validation {100 * cv:.3f}, same cost {same} times")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", nargs=4, metavar="NPY", help="train, test, labels of train, labels of test")
    parser.add_argument("--data", help="VOC folder")
    parser.add_argument("--splits", nargs=2, default=["train", "val"])
    parser.add_argument("--weights")
    parser.add_argument("--backbone", default="resnet18", help="of --weights")
    parser.add_argument("--untrained", metavar="NAME", help="a backbone with random weights")
    parser.add_argument("--layer", default="res4")
    parser.add_argument("--classes", type=int)
    parser.add_argument("--costs", type=int, default=1, help="every K-th cost")
    parser.add_argument("--jobs", type=int, default=joblib.cpu_count())
    parser.add_argument("--skip-loop", action="store_true", help="ours only")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.features and not (given.data and (given.weights or given.untrained)):
        parser.error("give --features, or --data with --weights or --untrained")
    arrays, names = load(given)
    svm.COSTS = svm.COSTS[:: given.costs]
    if given.classes:
        columns = np.linspace(0, len(names) - 1, given.classes).astype(int)
        arrays[2:], names = [labels[:, columns] for labels in arrays[2:]], [names[c] for c in columns]
    result = compare(arrays, names, given.jobs, given.skip_loop)
    result["versions"] = {"python": platform.python_version(), "numpy": np.__version__, "sklearn": sklearn.__version__}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
