"""The record of an evaluation: nothing is lost on the way to disk and back, nor on a second write."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odcluster.errors import DataError, UserError
from odcluster.evaluation.paper import SHOTS
from odcluster.evaluation.results import (
    TASKS,
    Best,
    Data,
    Result,
    Scores,
    Weights,
    from_json,
    library_versions,
    read_results,
    to_json,
    write_result,
)

VOC = Data(
    name="VOC2007", kind="voc", train_split="trainval", test_split="test", num_train=5011, num_test=4952,
    num_classes=20, train_fingerprint="aa", test_fingerprint="bb", left_out=[],
)  # fmt: skip
IMAGENET = dataclasses.replace(
    VOC, name="ImageNet", kind="class tree", train_split="train", test_split="val", num_train=1_281_167,
    num_test=50_000, num_classes=1000,
)  # fmt: skip
WEIGHTS = Weights(origin="run", backbone="resnet50", image_size=224, fingerprint="ww", pretraining="odc, 440 epochs")
STAGES = ("conv1", "res2", "res3", "res4", "res5")


def example(task: str = "svm", **changes: Any) -> Result:
    """A result that is comparable with the paper, where the paper has the task."""
    shots = {f"k={k}": 0.3 + 0.05 * i for i, k in enumerate(SHOTS)}
    std = dict.fromkeys(shots, 0.012)
    layers = dict(zip(STAGES, (0.2, 0.3, 0.4, 0.6543, 0.5), strict=True))
    tasks: dict[str, dict[str, Any]] = {
        "linear": {
            "headline": "top-1", "data": IMAGENET, "details": {"epochs": 100},
            "scores": [Scores(layer=layer, metrics={"top-1": 0.1 + 0.1 * i}) for i, layer in enumerate(STAGES)],
        },
        "svm": {
            "headline": "mAP", "details": {"average_precision": {"res4": {"cat": 0.5, "dog": None}}},
            "scores": [Scores(layer=layer, metrics={"mAP": x}) for layer, x in layers.items()],
        },
        "lowshot": {
            "headline": "mean",
            "scores": [
                Scores(layer="res5", rule="published", metrics={"mean": 0.475, **shots}, std=std),
                Scores(layer="res5", rule="honest", metrics={"mean": 0.481, **shots}, std=std),
            ],
        },
        "knn": {"headline": "k=20", "scores": [Scores(layer="features", metrics={"k=10": 0.51, "k=20": 0.523})]},
        "clusters": {
            "headline": "NMI",
            "scores": [Scores(layer="clusters", metrics={"NMI": 0.41, "ARI": -0.02, "purity": 0.5, "Hungarian": 0.3})],
        },
        "semi": {
            "headline": "10 %",
            "scores": [
                Scores(layer="all", rule="published", metrics={"1 %": 0.31, "10 %": 0.62}),
                Scores(layer="all", rule="honest", metrics={"1 %": 0.28, "10 %": 0.61}),
            ],
        },
    }  # fmt: skip
    values = {
        "task": task, "protocol": f"the {task} protocol", "variant": "published", "deviations": [], "data": VOC,
        "weights": WEIGHTS, "seed": 0, "details": {}, "versions": library_versions(), "device": "cpu", "seconds": 1.5,
        "started": "2026-01-02T03:04:05+00:00", "command": "odcluster evaluate run",
    }  # fmt: skip
    return Result(**(values | tasks[task] | changes))


@pytest.mark.parametrize("task", TASKS)
def test_what_is_written_is_read(task: str, tmp_path: Path) -> None:
    result = example(task, details={"epochs": 100, "costs": [0.5, 1.0], "deep": {"a": None}})
    assert from_json(to_json(result)) == result
    path = write_result(result, tmp_path / "new" / "place")
    assert path == tmp_path / "new" / "place" / f"{task}.json"
    assert read_results(path.parent) == [result]
    assert os.listdir(path.parent) == [path.name]


def test_best_is_of_the_published_rule_and_never_nan() -> None:
    assert example("svm").best == Best("res4", 0.6543)
    assert example("lowshot").best == Best("res5", 0.475)  # not the honest rule's 0.481
    scores = [Scores(layer="a", metrics={"mAP": math.nan}), Scores(layer="b", metrics={"mAP": 0.0})]
    assert example("svm", scores=scores).best == Best("b", 0.0)
    assert json.loads(to_json(example("svm")))["best"] == {"layer": "res4", "value": 0.6543}


def test_json_is_strict_ascii_and_takes_odd_values() -> None:
    scores = [Scores(layer="a", metrics={"mAP": math.nan}), Scores(layer="b", metrics={"mAP": 0.25})]
    details = {"x": np.float32(0.5), "ids": np.arange(3), 7: math.inf, "path": Path("p\udcff")}
    data = dataclasses.replace(VOC, name="im\udc80age \u56fe", left_out=["\udcff.jpg: broken"])
    text = to_json(example("svm", scores=scores, details=details, data=data))
    text.encode("ascii")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    values = json.loads(text, parse_constant=refuse)
    assert values["data"]["name"] == "im\\udc80age \u56fe"
    assert values["details"] == {"x": 0.5, "ids": [0, 1, 2], "7": None, "path": "p\\udcff"}
    read = from_json(text)
    assert math.isnan(read.scores[0].metrics["mAP"])
    assert to_json(read) == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.pop("seed"), "lacks the keys: seed"),
        (lambda v: v.update(extra=1), "unknown keys: extra"),
        (lambda v: v["data"].pop("num_test"), "lacks the keys: num_test"),
        (lambda v: v["scores"][0].update(more=1), "unknown keys: more"),
        (lambda v: v.update(seed="0"), "seed"),
        (lambda v: v.update(seed=True), "seed"),
        (lambda v: v.update(task="golf"), "task"),
        (lambda v: v.update(scores=[]), "headline"),
        (lambda v: v["scores"][0]["metrics"].update(mAP=78.2), "shares"),
        (lambda v: v["best"].update(value=0.99), "best"),
        (lambda v: v.pop("best"), "best"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_by_name(change: Any, said: str) -> None:
    values = json.loads(to_json(example()))
    change(values)
    with pytest.raises(DataError, match=said) as caught:
        from_json(json.dumps(values), "x/svm.json")
    assert "x/svm.json" in str(caught.value)
    assert "evaluate again" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "null", "[" * 100_000])
def test_no_text_breaks_the_reader(text: str) -> None:
    with pytest.raises(DataError, match="not a result"):
        from_json(text)


OTHER_QUESTIONS: list[dict[str, Any]] = [
    {"variant": "fast"},
    {"deviations": ["10 epochs"]},
    {"seed": 1},
    {"data": dataclasses.replace(VOC, train_fingerprint="cc")},
    {"data": dataclasses.replace(VOC, test_fingerprint="cc")},
    {"data": dataclasses.replace(VOC, train_split="train")},
    {"weights": dataclasses.replace(WEIGHTS, fingerprint="vv")},
    {"weights": dataclasses.replace(WEIGHTS, image_size=96)},
]


@pytest.mark.parametrize("change", OTHER_QUESTIONS)
def test_another_question_never_overwrites(change: dict[str, Any], tmp_path: Path) -> None:
    first, second = example(), example(**change)
    write_result(first, tmp_path)
    assert write_result(second, tmp_path).name == "svm.json"
    assert read_results(tmp_path) == [second, first]
    assert sorted(os.listdir(tmp_path)) == ["svm-1.json", "svm.json"]


def test_the_same_question_is_answered_once(tmp_path: Path) -> None:
    a, b = example(), example(seed=1)
    later = example(seconds=99.0, started="2027-01-01T00:00:00+00:00")
    for result in (a, a, b, later, example("knn")):
        write_result(result, tmp_path)
    assert read_results(tmp_path) == [later, b, example("knn")]
    for seed in range(2, 14):
        write_result(example(seed=seed), tmp_path)
    assert [r.seed for r in read_results(tmp_path) if r.task == "svm"] == [*range(13, 1, -1), 0, 1]


def test_a_damaged_file_is_kept_and_named(tmp_path: Path) -> None:
    (tmp_path / "svm.json").write_text("half")
    (tmp_path / "svm-notes.json").write_text("the user's own")
    write_result(example(), tmp_path)
    assert (tmp_path / "svm-1.json").read_text() == "half"
    with pytest.raises(DataError, match=r"svm-1\.json"):
        read_results(tmp_path)


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        write_result(example(), tmp_path / "file")
    with pytest.raises(DataError, match="no directory"):
        read_results(tmp_path / "none")


def test_a_write_that_fails_leaves_the_old(tmp_path: Path) -> None:
    write_result(example(), tmp_path)
    with pytest.raises(TypeError):
        write_result(example(details={"x": object()}), tmp_path)
    assert read_results(tmp_path) == [example()]
