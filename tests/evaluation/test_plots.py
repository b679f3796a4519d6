"""Pictures: whole files in one directory, the same bytes each time, any name drawn as text."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from test_results import VOC, WEIGHTS, example

from odcluster.errors import UserError
from odcluster.evaluation.plots import draw_comparison, draw_result
from odcluster.evaluation.results import TASKS, Result, Scores

EVIL = "<script>alert(1)</script> & $\\frac{1}$ _x \"'\x1b\udcff \u56fe --> ]]>"


def words(path: Path) -> str:
    """All text of an SVG; parsing fails unless it is XML."""
    root = ElementTree.parse(path).getroot()
    assert not [node for node in root.iter() if node.tag.endswith("script")]
    return " | ".join(node.text or "" for node in root.iter() if node.tag.endswith("}text"))


@pytest.mark.parametrize("task", TASKS)
def test_two_whole_files_and_the_same_bytes_each_time(task: str, tmp_path: Path) -> None:
    written = draw_result(example(task), tmp_path / "a" / "b")
    assert [path.name for path in written] == [f"{task}.png", f"{task}.svg"]
    assert sorted(os.listdir(tmp_path / "a" / "b")) == sorted(path.name for path in written)
    with Image.open(written[0]) as picture:
        picture.load()
        assert picture.width > 1000
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10
        assert not set(picture.info) & {"Software", "Creation Time"}
    text = words(written[1])
    assert f"the {task} protocol" in text
    result = example(task)
    for row in result.scores:
        for name, value in row.metrics.items():
            assert f"{100 * value:.1f}" in text, name
    again = draw_result(example(task), tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]
    assert b"dc:date" not in written[1].read_bytes()


def test_grey_lines_only_beside_comparable_results(tmp_path: Path) -> None:
    for task, line in (("svm", "ODC 78.2"), ("linear", "ODC 57.6"), ("lowshot", "ODC, released code, 75.1")):
        assert line in words(draw_result(example(task), tmp_path)[1])
        text = words(draw_result(example(task, deviations=["odd"]), tmp_path)[1])
        assert line not in text
        assert "ODC 57.1" not in text
        assert "deviations: odd" in text


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    data = dataclasses.replace(VOC, name=EVIL)
    weights = dataclasses.replace(WEIGHTS, origin=EVIL)
    scores = [Scores(layer="_$a$<b>", metrics={"mAP": 0.5})]
    details = {"average_precision": {"_$a$<b>": {EVIL: 0.5, "$x$": 0.25}}}
    result = example("svm", protocol=EVIL, data=data, weights=weights, scores=scores, details=details)
    assert "<script>alert(1)</script>" in words(draw_result(result, tmp_path)[1])
    assert "$x$" in words(tmp_path / "svm.svg")
    draw_comparison({EVIL: [result], "_hidden": [result]}, tmp_path)
    text = words(tmp_path / "comparison-svm.svg")
    assert "_hidden" in text
    assert "<script>" in text


def test_classes_are_sorted_and_the_unmeasured_left_out(tmp_path: Path) -> None:
    classes = {"low": 0.1, "high": 0.9, "middle": 0.5, "never": math.nan, "null": None}
    result = example("svm", details={"average_precision": {"res4": classes}})
    text = words(draw_result(result, tmp_path)[1])
    assert text.index("high") < text.index("middle") < text.index("low")
    assert "never" not in text
    assert "null" not in text
    many = {f"class {i}": i / 100 for i in range(100)}
    text = words(draw_result(example("svm", details={"average_precision": {"res4": many}}), tmp_path)[1])
    assert "the 20 best and worst of 100 classes" in text
    assert "class 99" in text
    assert "class 50" not in text


def test_comparison_draws_a_picture_per_group(tmp_path: Path) -> None:
    other = dataclasses.replace(VOC, train_fingerprint="zz")
    tasks = ("svm", "lowshot", "semi")
    runs = {"one": [example(task) for task in tasks], "two": [example(task) for task in tasks]}
    runs["two"].append(example("svm", data=other))
    names = {path.name for path in draw_comparison(runs, tmp_path)}
    expected = [f"comparison-{task}" for task in tasks] + ["comparison-svm-2"]
    assert names == {f"{name}.{kind}" for name in expected for kind in ("png", "svg")} == set(os.listdir(tmp_path))
    assert "not side by side with two" in words(tmp_path / "comparison-svm.svg")
    assert "one, chosen without test labels" in words(tmp_path / "comparison-semi.svg")
    assert draw_comparison({}, tmp_path) == []


def many(num: int) -> dict[str, list[Result]]:
    return {f"run {i}": [example("svm"), example("lowshot")] for i in range(num)}


def test_odd_scores_and_many_runs_draw_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    empty = [Scores(layer="a", metrics={"mAP": math.nan}), Scores(layer="b", metrics={"mAP": math.nan})]
    draw_result(example("svm", scores=empty), tmp_path)
    shots = [Scores(layer="a", rule="published", metrics={"mean": math.nan, "k=1": math.nan})]
    draw_result(example("lowshot", scores=shots), tmp_path)
    draw_comparison(many(10), tmp_path)
    assert not list(recwarn)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        draw_result(example(), tmp_path / "file")


DRAW = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_results import example
from odcluster.evaluation.plots import draw_result
assert "matplotlib" not in sys.modules
draw_result(example("svm"), Path(sys.argv[2]))
assert "MPLCONFIGDIR" not in os.environ
assert "matplotlib.pyplot" not in sys.modules
"""


def test_nothing_is_written_anywhere_else_and_no_setting_is_obeyed(tmp_path: Path) -> None:
    home, scratch, out, place = (tmp_path / name for name in ("home", "scratch", "out", "place"))
    for folder in (home, scratch, place):
        folder.mkdir()
    (place / "matplotlibrc").write_text("font.size: 30\ntext.color: red\nsvg.fonttype: path\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MPL", "XDG"))}
    environment |= {"HOME": str(home), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", DRAW, str(Path(__file__).parent), str(out)]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(home.rglob("*")) == []
    assert list(scratch.rglob("*")) == []
    assert os.listdir(place) == ["matplotlibrc"]
    here = draw_result(example("svm"), tmp_path / "here")
    assert [path.read_bytes() for path in here] == [(out / path.name).read_bytes() for path in here]
