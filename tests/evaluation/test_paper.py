"""The paper's numbers stand beside a result only when nothing at all differs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_results import IMAGENET, VOC, WEIGHTS, example

from odcluster.evaluation import paper
from odcluster.evaluation.paper import paper_rows
from odcluster.evaluation.results import Scores

PLACES = dataclasses.replace(IMAGENET, name="Places205", num_train=2_448_873, num_test=20_500, num_classes=205)
ALEXNET = dataclasses.replace(WEIGHTS, backbone="alexnet")


def found(**choice: Any) -> dict[tuple[str, str], dict[tuple[str, str], float]]:
    comparison = paper_rows(example(**choice))
    assert comparison.comparable, comparison.reasons
    assert comparison.sentence == ""
    return {(row.method, row.source): row.cells for row in comparison.rows}


def test_rows_are_those_of_the_right_table() -> None:
    assert found(task="svm")["ODC", "paper"] == {("res5", "mAP"): 78.2}
    assert found(task="svm")["Jigsaw", "paper"] == {("res4", "mAP"): 64.5}
    assert found(task="svm")["Rotation, fine-tuned with ODC", "paper"] == {("", "mAP"): 74.5}
    assert found(task="svm")["ODC", "released code"] == {("", "mAP"): 78.42}
    assert found(task="lowshot")["ODC", "paper"] == {("res5", "mean"): 57.1}
    released = found(task="lowshot")["ODC", "released code"]
    assert released["", "k=96"] == 75.13
    assert released["", "mean"] == pytest.approx(58.38, abs=0.01)
    linear = found(task="linear")
    assert list(linear["ODC", "paper"].values()) == [14.8, 31.6, 42.5, 55.7, 57.6]
    assert list(linear["DeepCluster", "released code"].values()) == [12.78, 30.81, 43.88, 57.71, 51.68]
    assert linear["Rotation", "paper"] == {("", "top-1"): 41.7}
    assert ("Places labels", "paper") not in linear
    places = found(task="linear", data=PLACES)
    assert places["ODC", "paper"]["res5", "top-1"] == 49.3
    assert ("ODC", "released code") not in places
    assert ("BigBiGAN", "paper") not in places
    assert found(task="linear", weights=ALEXNET)["ODC", "paper"]["conv4", "top-1"] == 41.4
    assert found(task="linear", weights=ALEXNET, data=PLACES)["ODC", "paper"]["conv1", "top-1"] == 24.0


def test_the_papers_best_layer() -> None:
    row = next(row for row in paper_rows(example("linear")).rows if row.method == "DeepCluster")
    assert row.best("top-1") == ("res4", 52.2)
    assert row.best("mAP") is None


def data(**changes: Any) -> dict[str, Any]:
    return {"data": dataclasses.replace(VOC, **changes)}


def weights(**changes: Any) -> dict[str, Any]:
    return {"weights": dataclasses.replace(WEIGHTS, **changes)}


VOC_CHANGES = [
    (data(kind="class tree"), "the paper's VOC2007"),
    (data(train_split="train"), "trained on train (5,011)"),
    (data(test_split="val"), "tested on val (4,952)"),
    (data(num_train=5010), "trained on trainval (5,010)"),
    (data(num_test=4951), "tested on test (4,951)"),
    (data(num_classes=19), "19 classes"),
    (data(left_out=["a.jpg"]), "left out"),
    ({"variant": "fast"}, "not the published one but"),
    ({"deviations": ["general pooling"]}, "the deviations named above"),
    (weights(backbone="resnet18"), "resnet18"),
    (weights(backbone="alexnet"), "alexnet"),
    (weights(image_size=96), "96 px"),
]


@pytest.mark.parametrize("task", ["svm", "lowshot"])
@pytest.mark.parametrize(("change", "said"), VOC_CHANGES)
def test_any_single_difference_is_enough(task: str, change: dict[str, Any], said: str) -> None:
    comparison = paper_rows(example(task, **change))
    assert not comparison.comparable
    assert comparison.rows == ()
    assert len(comparison.reasons) == 1
    assert said in comparison.sentence


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": dataclasses.replace(IMAGENET, num_train=1_000_000)}, "1,000,000"),
        ({"data": dataclasses.replace(IMAGENET, num_test=49_999)}, "49,999"),
        ({"data": dataclasses.replace(IMAGENET, num_classes=999)}, "999 classes"),
        ({"data": dataclasses.replace(IMAGENET, left_out=["x"])}, "left out"),
        ({"details": {"epochs": 28}}, "28 epochs"),
        ({"details": {}}, "unknown number of epochs"),
        ({"variant": "fast"}, "not the published one"),
        ({"deviations": ["batch 32"]}, "the deviations named above"),
        (weights(backbone="resnet18"), "resnet50"),
        (weights(image_size=192), "192 px"),
    ],
)
def test_any_single_difference_is_enough_for_a_linear_probe(change: dict[str, Any], said: str) -> None:
    comparison = paper_rows(example("linear", **change))
    assert len(comparison.reasons) == 1
    assert said in comparison.sentence


def test_all_reasons_are_said_in_one_line() -> None:
    half = data(train_split="train", test_split="val", num_train=2500, num_test=2510)
    sentence = paper_rows(example("svm", deviations=["a", "b\nc"], **half, **weights(image_size=64))).sentence
    assert sentence.startswith(
        "not comparable with the paper: trained on train (2,500) and tested on val (2,510), "
        "the paper on VOC2007's trainval (5,011) and test (4,952); the deviations named above; "
        "backbone resnet50 at 64 px"
    )
    assert "\n" not in sentence


def test_fewer_shots_are_another_mean() -> None:
    scores = [Scores(layer="res5", rule="published", metrics={"mean": 0.4, "k=1": 0.3, "k=2": 0.5})]
    assert "1, 2, 4, 8, 16, 32, 64, 96" in paper_rows(example("lowshot", scores=scores)).sentence


@pytest.mark.parametrize("task", ["knn", "clusters", "semi"])
def test_what_the_paper_does_not_report(task: str) -> None:
    assert "the paper reports no" in paper_rows(example(task)).sentence


def test_every_row_of_the_tables_is_whole() -> None:
    for table in (paper.ALEXNET_LINEAR, paper.RESNET50_LINEAR):
        numbers = [x for both in table.values() for x in both if isinstance(x, tuple)]
        assert all(len(x) == 5 and all(0 < y < 100 for y in x) for x in numbers)
    assert (len(paper.ALEXNET_LINEAR), len(paper.RESNET50_LINEAR), len(paper.RESNET50_VOC07)) == (17, 12, 7)
