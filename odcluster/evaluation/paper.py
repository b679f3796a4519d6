"""The paper's own numbers, and whether a result may stand beside them.

Numbers are percent, as printed in Zhan, Xie, Liu, Ong, Loy: Online Deep Clustering for Unsupervised Representation
Learning, CVPR 2020, or, marked so, as published with the authors' released code, which differ a little from the
paper's. A result is comparable only when data, protocol and backbone are all the paper's; otherwise every reason why
not is said. Left out: the released code's kNN number, of which neither the data nor the temperature is stated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from odcluster.data.readers import shown
from odcluster.evaluation.results import Result

Source = Literal["paper", "released code"]
STAGES = {
    "alexnet": ("conv1", "conv2", "conv3", "conv4", "conv5"),
    "resnet50": ("conv1", "res2", "res3", "res4", "res5"),
}
SHOTS = (1, 2, 4, 8, 16, 32, 64, 96)
LINEAR_EPOCHS = 100
IMAGE_SIZE = 224


@dataclass(frozen=True)
class PaperRow:
    """One method's numbers."""

    method: str
    source: Source
    cells: dict[tuple[str, str], float]
    """Percent by (layer, metric). The layer is "" where only the best layer's number is reported, without its name."""

    def best(self, metric: str) -> tuple[str, float] | None:
        """The layer with the highest number, and the number; None if this metric is not reported."""
        found = [(percent, layer) for (layer, name), percent in self.cells.items() if name == metric]
        return (max(found)[1], max(found)[0]) if found else None


@dataclass(frozen=True)
class PaperComparison:
    """The paper's rows for a result, or the reasons why none may stand beside it."""

    rows: tuple[PaperRow, ...]
    reasons: tuple[str, ...]

    @property
    def comparable(self) -> bool:
        return not self.reasons

    @property
    def sentence(self) -> str:
        """One line; "" when the result is comparable."""
        return "" if self.comparable else f"not comparable with the paper: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class PaperData:
    """A data set as the paper used it."""

    name: str
    kind: str
    """Kind of manifest that guarantees the labels; "" where any will do."""
    train_split: str
    test_split: str
    num_train: int
    num_test: int
    num_classes: int


VOC07 = PaperData("VOC2007", "voc", "trainval", "test", 5_011, 4_952, 20)
IMAGENET = PaperData("ImageNet", "", "train", "val", 1_281_167, 50_000, 1_000)
PLACES205 = PaperData("Places205", "", "train", "val", 2_448_873, 20_500, 205)

Layers = tuple[float, ...] | float | None
"""One number per stage, or the best layer's alone, or not reported."""

# method: ImageNet, Places205
ALEXNET_LINEAR: dict[str, tuple[Layers, Layers]] = {
    "Places labels": (None, (22.1, 35.1, 40.2, 43.3, 44.6)),
    "ImageNet labels": ((19.3, 36.3, 44.2, 48.3, 50.5), (22.7, 34.8, 38.4, 39.4, 38.7)),
    "Random": ((11.6, 17.1, 16.9, 16.3, 14.1), (15.7, 20.3, 19.8, 19.1, 17.5)),
    "Context": ((16.2, 23.3, 30.2, 31.7, 29.6), (19.7, 26.7, 31.9, 32.7, 30.9)),
    "ContextEncoder": ((14.1, 20.7, 21.0, 19.8, 15.5), (18.2, 23.2, 23.4, 21.9, 18.4)),
    "Jigsaw": ((19.2, 30.1, 34.7, 33.9, 28.3), (23.0, 32.1, 35.5, 34.8, 31.3)),
    "Colorization": ((13.1, 24.8, 31.0, 32.6, 31.8), (22.0, 28.7, 31.8, 31.3, 29.7)),
    "SplitBrain": ((17.7, 29.3, 35.4, 35.2, 32.8), (21.3, 30.7, 34.0, 34.1, 32.5)),
    "Counting": ((18.0, 30.6, 34.3, 32.5, 25.7), (23.3, 33.9, 36.3, 34.7, 29.6)),
    "NPID": ((16.8, 26.5, 31.8, 34.1, 35.6), (18.8, 24.3, 31.9, 34.5, 33.6)),
    "Rotation": ((18.8, 31.7, 38.7, 38.2, 36.5), (21.5, 31.0, 35.1, 34.6, 33.7)),
    "DeepCluster": ((12.9, 29.2, 38.2, 39.8, 36.1), (18.6, 30.8, 37.0, 37.5, 33.1)),
    "AET": ((19.2, 32.8, 40.6, 39.7, 37.7), (22.1, 32.9, 37.1, 36.2, 34.7)),
    "Rot-Decouple": ((19.3, 33.3, 40.8, 41.8, 44.3), (22.9, 32.4, 36.6, 37.3, 38.6)),
    "LA": ((14.9, 30.1, 35.7, 39.4, 40.2), (17.1, 32.2, 36.5, 38.3, 37.8)),
    "CMC": ((18.3, 33.7, 38.3, 40.5, 42.8), None),
    "ODC": ((19.6, 32.8, 40.4, 41.4, 37.3), (24.0, 33.2, 38.3, 38.4, 35.5)),
}
RESNET50_LINEAR: dict[str, tuple[Layers, Layers]] = {
    "Places labels": (None, (16.7, 32.3, 43.2, 54.7, 62.3)),
    "ImageNet labels": ((11.6, 33.3, 48.7, 67.9, 75.5), (14.8, 32.6, 42.1, 50.8, 52.5)),
    "Random": ((9.6, 13.7, 12.0, 8.0, 5.6), (12.9, 16.6, 15.5, 11.6, 9.0)),
    "Jigsaw": ((12.4, 28.0, 39.9, 45.7, 34.2), (15.1, 28.8, 36.8, 41.2, 34.4)),
    "Colorization": ((10.2, 24.1, 31.4, 39.6, 35.2), (14.7, 27.4, 32.7, 37.5, 34.8)),
    "NPID": ((15.3, 18.8, 24.9, 40.6, 54.0), (18.1, 22.3, 29.7, 42.1, 45.5)),
    "Rotation": (41.7, 38.1),
    "BigBiGAN": (55.4, None),
    "DeepCluster": ((14.4, 29.6, 39.9, 52.2, 50.3), (19.3, 31.9, 39.0, 46.1, 43.6)),
    "LA": ((9.3, 23.2, 38.0, 48.6, 58.8), (18.3, 31.5, 39.2, 46.3, 49.1)),
    "CMC": (58.4, None),
    "ODC": ((14.8, 31.6, 42.5, 55.7, 57.6), (21.4, 35.0, 41.3, 47.4, 49.3)),
}
RESNET50_IMAGENET_RELEASED: dict[str, Layers] = {
    "ODC": (14.76, 31.82, 42.44, 55.76, 57.70),
    "DeepCluster": (12.78, 30.81, 43.88, 57.71, 51.68),
}
# method: best layer, SVM mAP, low-shot SVM mAP (the mean over the eight numbers of shots)
RESNET50_VOC07: dict[str, tuple[str, float, float]] = {
    "ImageNet labels": ("res5", 88.0, 75.4),
    "Random": ("conv1", 9.6, 12.7),
    "Jigsaw": ("res4", 64.5, 39.2),
    "Colorization": ("res4", 55.6, 33.3),
    "Rotation": ("res4", 67.4, 41.0),
    "DeepCluster": ("res5", 69.1, 46.9),
    "ODC": ("res5", 78.2, 57.1),
}
RESNET50_VOC07_SVM_RELEASED = {"ODC": 78.42, "DeepCluster": 74.26}
# ODC's mean is that of its eight numbers; of DeepCluster only the mean is published.
ODC_LOWSHOT_RELEASED = dict(zip(SHOTS, (32.42, 40.27, 49.95, 59.96, 65.71, 69.99, 73.64, 75.13), strict=True))
DEEPCLUSTER_LOWSHOT_RELEASED = 54.85
# pre-training: VOC07 SVM mAP after 120 more epochs of DeepCluster, of ODC
RESNET50_FINE_TUNED_VOC07_SVM = {
    "Colorization": (61.2, 72.3),
    "Jigsaw": (68.5, 74.4),
    "Rotation": (68.6, 74.5),
    "DeepCluster": (70.0, 77.0),
}


def paper_rows(result: Result) -> PaperComparison:
    """The paper's rows for the same task, data and backbone; or all the reasons why there are none."""
    names = {"knn": "kNN accuracy", "clusters": "agreement of clusters with labels", "semi": "semi-supervised accuracy"}
    if result.task in names:
        return PaperComparison((), (f"the paper reports no {names[result.task]}",))
    data = _paper_data(result)
    reasons = (*_data_reasons(result, data), *_protocol_reasons(result), *_backbone_reasons(result))
    if reasons:
        return PaperComparison((), reasons)
    if result.task == "svm":
        return PaperComparison(_svm_rows(), ())
    if result.task == "lowshot":
        return PaperComparison(_lowshot_rows(), ())
    return PaperComparison(_linear_rows(result.weights.backbone, data), ())


def _paper_data(result: Result) -> PaperData:
    """The data set of the paper that is meant: of the two for linear probes, the one with as many classes."""
    if result.task != "linear":
        return VOC07
    return PLACES205 if result.data.num_classes == PLACES205.num_classes else IMAGENET


def _data_reasons(result: Result, paper: PaperData) -> list[str]:
    data, reasons = result.data, []
    if paper.kind and data.kind != paper.kind:
        reasons.append(f"the data are {shown(data.name)} ({shown(data.kind)}), the paper's {paper.name}")
    same_splits = not paper.kind or (data.train_split, data.test_split) == (paper.train_split, paper.test_split)
    if not same_splits or (data.num_train, data.num_test) != (paper.num_train, paper.num_test):
        tested = f"tested on {_part(data.test_split, data.num_test)}" if data.num_test else "not tested on other images"
        theirs = f"{_part(paper.train_split, paper.num_train)} and {_part(paper.test_split, paper.num_test)}"
        trained = f"trained on {_part(data.train_split, data.num_train)}"
        reasons.append(f"{trained} and {tested}, the paper on {paper.name}'s {theirs}")
    if data.num_classes != paper.num_classes:
        reasons.append(f"{data.num_classes:,} classes, in the paper {paper.num_classes:,}")
    if data.left_out:
        reasons.append("some images were left out")
    return reasons


def _part(split: str, num: int) -> str:
    return f"{shown(split)} ({num:,})" if split else f"{num:,} images"


def _protocol_reasons(result: Result) -> list[str]:
    reasons = ["the deviations named above"] if result.deviations else []
    if result.variant != "published":
        reasons.append(f"the protocol is not the published one but {shown(result.protocol)}")
    if result.task == "linear" and result.details.get("epochs") != LINEAR_EPOCHS and result.variant == "published":
        reasons.append(f"{result.details.get('epochs', 'an unknown number of')} epochs, in the paper {LINEAR_EPOCHS}")
    if result.task == "lowshot":
        measured = {name for row in result.scores if row.rule == "published" for name in row.metrics}
        if measured != {"mean", *(f"k={k}" for k in SHOTS)}:
            reasons.append(f"the mean is not over {', '.join(map(str, SHOTS))} positives chosen by the published rule")
    return reasons


def _backbone_reasons(result: Result) -> list[str]:
    weights = result.weights
    known = tuple(STAGES) if result.task == "linear" else ("resnet50",)
    if weights.backbone in known and weights.image_size == IMAGE_SIZE:
        return []
    return [
        f"backbone {shown(weights.backbone)} at {weights.image_size} px, the paper's {' or '.join(known)} "
        f"at {IMAGE_SIZE} px"
    ]


def _linear_rows(backbone: str, data: PaperData) -> tuple[PaperRow, ...]:
    table = ALEXNET_LINEAR if backbone == "alexnet" else RESNET50_LINEAR
    column = 1 if data is PLACES205 else 0
    found: list[tuple[str, Source, Layers]] = [(method, "paper", both[column]) for method, both in table.items()]
    if backbone == "resnet50" and data is IMAGENET:
        found += [(method, "released code", layers) for method, layers in RESNET50_IMAGENET_RELEASED.items()]
    rows = []
    for method, source, layers in found:
        if isinstance(layers, float):
            rows.append(PaperRow(method, source, {("", "top-1"): layers}))
        elif layers is not None:
            numbers = zip(STAGES[backbone], layers, strict=True)
            rows.append(PaperRow(method, source, {(layer, "top-1"): percent for layer, percent in numbers}))
    return tuple(rows)


def _svm_rows() -> tuple[PaperRow, ...]:
    rows = [PaperRow(method, "paper", {(layer, "mAP"): svm}) for method, (layer, svm, _) in RESNET50_VOC07.items()]
    released = RESNET50_VOC07_SVM_RELEASED
    rows += [PaperRow(method, "released code", {("", "mAP"): svm}) for method, svm in released.items()]
    for start, numbers in RESNET50_FINE_TUNED_VOC07_SVM.items():
        for method, svm in zip(("DeepCluster", "ODC"), numbers, strict=True):
            rows.append(PaperRow(f"{start}, fine-tuned with {method}", "paper", {("", "mAP"): svm}))
    return tuple(rows)


def _lowshot_rows() -> tuple[PaperRow, ...]:
    rows = [
        PaperRow(method, "paper", {(layer, "mean"): lowshot}) for method, (layer, _, lowshot) in RESNET50_VOC07.items()
    ]
    shots = {("", f"k={k}"): percent for k, percent in ODC_LOWSHOT_RELEASED.items()}
    mean = sum(shots.values()) / len(shots)
    rows.append(PaperRow("ODC", "released code", {("", "mean"): mean, **shots}))
    rows.append(PaperRow("DeepCluster", "released code", {("", "mean"): DEEPCLUSTER_LOWSHOT_RELEASED}))
    return tuple(rows)
