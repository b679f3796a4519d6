"""Tables say what must be said, set side by side only what may be, and show any name as it is."""

from __future__ import annotations

import dataclasses
import io
import math
import re

import pytest
from rich.console import Console
from rich.table import Table
from test_results import VOC, WEIGHTS, example

from odcluster.evaluation.results import TASKS, Scores
from odcluster.evaluation.tables import comparison_tables, result_table

OTHER = dataclasses.replace(VOC, name="photos", train_split="train", num_train=2500, train_fingerprint="zz")


def rendered(table: Table, width: int = 160, colour: bool = False) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(table)
    return console.export_text(styles=colour)


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("task", TASKS)
def test_every_layer_metric_and_number_is_there(task: str) -> None:
    result = example(task)
    text = rendered(result_table(result))
    assert text.startswith(f"the {task} protocol, percent")
    assert f"trained on {result.data.train_split} ({result.data.num_train:,} images)" in text
    assert "resnet50 at 224 px; odc, 440 epochs" in text
    for row in result.scores:
        for name, value in row.metrics.items():
            assert name in text
            assert re.search(rf"\b{row.layer}\b.*{100 * value:.1f}", text)
        for value in row.std.values():
            assert f"±{100 * value:.1f}" in text
        assert row.rule in text


def test_the_best_is_bold_and_nothing_else() -> None:
    lines = rendered(result_table(example("svm")), colour=True).splitlines()
    bold = [line for line in lines if "\x1b[1m" in line]
    assert [re.findall(r"\x1b\[1m([^\x1b]*)\x1b", line)[-1].strip() for line in bold[-1:]] == ["65.4"]
    assert not any("\x1b[1m20.0" in line or "\x1b[1m50.0" in line for line in lines)


def test_the_papers_rows_only_when_comparable() -> None:
    text = rendered(result_table(example("svm")))
    assert re.search(r"ODC, paper, res5 +78\.2", text)
    assert re.search(r"ODC, released code +78\.4", text)
    assert "not comparable" not in text
    text = rendered(result_table(example("svm", deviations=["general pooling"])))
    assert "78.2" not in text
    assert "deviations: general pooling" in text
    assert "not comparable with the paper: the deviations named above" in text
    assert re.search(r"res4 +40\.0 +55\.7", rendered(result_table(example("linear"))))
    assert re.search(r"ODC +released code +58\.4 +32\.4", rendered(result_table(example("lowshot"))))


def test_what_could_not_be_measured_is_a_dash() -> None:
    scores = [Scores(layer="a", metrics={"mAP": math.nan}), Scores(layer="b", metrics={"mAP": 0.5})]
    assert re.search(r"a +-", rendered(result_table(example("svm", scores=scores))))


def test_names_are_shown_as_they_are() -> None:
    evil = "[bold red]x[/] [/nothing] :smile: [link=file:///]"
    data = dataclasses.replace(VOC, name=evil, left_out=["a\x1b[2Jb\udcff.jpg"])
    weights = dataclasses.replace(WEIGHTS, origin=evil, pretraining=evil)
    scores = [Scores(layer="[blink]l", metrics={"[red]m": 0.5})]
    result = example(
        "svm", protocol=evil, deviations=[evil], data=data, weights=weights, scores=scores, headline="[red]m"
    )
    for table in (result_table(result), *comparison_tables({evil: [result]})):
        text = flat(rendered(table, 400))
        assert text.count(evil) >= 4
        assert "[blink]l" in text
        assert "\x1b" not in text
        assert "\\x1b[2Jb\\udcff.jpg" in text


@pytest.mark.parametrize("task", TASKS)
def test_runs_stand_side_by_side(task: str) -> None:
    tables = comparison_tables({"run one": [example(task)], "run two": [example(task)]})
    assert len(tables) == 1
    text = rendered(tables[0])
    result = example(task)
    for run in ("run one", "run two"):
        for row in result.scores:
            if task in ("linear", "svm"):
                assert re.search(rf"{run}.*{100 * row.metrics[result.headline]:.1f}", text)
            else:
                numbers = " +".join(f"{100 * value:.1f}" for value in row.metrics.values())
                assert re.search(rf"{run} +{row.rule} +{numbers}", text)
    assert "not side by side" not in text


def test_a_column_of_the_best_layer_and_the_papers_rows() -> None:
    text = rendered(comparison_tables({"a": [example("svm")], "b": [example("svm")]})[0])
    assert re.search(r"\ba .*20\.0 +30\.0 +40\.0 +65\.4 +50\.0 +65\.4", text)
    assert re.search(r"ODC, paper +- +- +- +- +78\.2 +78\.2", text)
    assert re.search(r"ODC, released code +- +- +- +- +- +78\.4", text)
    mixed = rendered(comparison_tables({"a": [example("svm")], "b": [example("svm", deviations=["odd"])]})[0])
    assert "78.2" not in mixed
    assert "b: not comparable with the paper: the deviations named above" in mixed
    assert "b: run; resnet50 at 224 px; odc, 440 epochs; deviations: odd" in mixed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"variant": "fast", "protocol": "quick one"}, "another protocol (quick one)"),
        ({"data": OTHER}, "other images (photos, trained on train (2,500 images)"),
        ({"data": dataclasses.replace(VOC, test_fingerprint="zz")}, "other images"),
        ({"data": dataclasses.replace(VOC, test_split="val")}, "tested on val"),
    ],
)
def test_what_differs_stands_apart_and_says_so(change: dict, said: str) -> None:
    tables = comparison_tables({"a": [example("svm")], "b": [example("svm", **change)], "c": [example("svm")]})
    assert len(tables) == 2
    together, apart = (flat(rendered(table)) for table in tables)
    assert "not side by side with b: " in together
    assert said in together
    assert "not side by side with a, c: " in apart
    assert " b conv1" not in together


def test_several_results_of_one_run_have_names_of_their_own() -> None:
    text = rendered(comparison_tables({"a": [example("svm", seed=3), example("svm", seed=4)]})[0])
    assert "a, seed 3" in text
    assert "a, seed 4" in text
    text = rendered(comparison_tables({"a": [example("svm"), example("svm", deviations=["x"])]})[0])
    assert "a, 1 of 2" in text
    assert "a, 2 of 2" in text


def test_no_results_no_tables() -> None:
    assert comparison_tables({}) == []
    assert comparison_tables({"a": []}) == []


@pytest.mark.parametrize("task", TASKS)
def test_numbers_are_whole_on_a_narrow_terminal(task: str) -> None:
    text = rendered(result_table(example(task)), 80)
    for row in example(task).scores:
        assert all(f"{100 * value:.1f}" in text for value in row.metrics.values())
