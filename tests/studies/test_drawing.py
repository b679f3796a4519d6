"""Names at the ends of lines: readable whatever the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from odcluster.studies.drawing import apart, bars, of_seeds, profiles


def test_names_far_enough_from_one_another_stay_where_they_are() -> None:
    assert apart([1.0, 3.0, 7.0], 2.0) == [1.0, 3.0, 7.0]


@pytest.mark.parametrize("heights", [[5.0, 5.0], [1.0, 1.2, 1.3, 9.0], [0.0, 1.9, 2.0, 2.0, 2.1, 4.0]])
def test_names_that_would_meet_move_apart_around_their_middle(heights: list[float]) -> None:
    moved = np.array(apart(heights, 1.0))
    assert np.all(np.diff(moved) >= 1.0 - 1e-9)
    assert moved.mean() == pytest.approx(np.mean(heights))


def test_no_arrangement_with_that_distance_moves_names_less() -> None:
    from scipy.optimize import minimize

    heights, gap = np.array([0.1, 0.3, 0.35, 2.0, 2.1, 5.0]), 0.5
    room = [{"type": "ineq", "fun": lambda y, i=i: y[i + 1] - y[i] - gap} for i in range(len(heights) - 1)]
    start = np.arange(len(heights), dtype=float)
    best = minimize(lambda y: np.sum((y - heights) ** 2), start, constraints=room, method="SLSQP", tol=1e-12)
    assert apart(list(heights), gap) == pytest.approx(best.x, abs=1e-4)


def test_every_line_has_its_name_and_last_number_and_references_are_dashed() -> None:
    axes = Figure().add_subplot()
    lines = {"ODC": {"conv1": 10.0, "conv2": 30.0}, "Jigsaw": {"conv1": 9.0}, "labels": {"conv1": 11.0, "conv2": 30.1}}
    profiles(axes, ["conv1", "conv2"], lines, "top-1, %")
    assert {text.get_text() for text in axes.texts} == {"ODC 30.0", "Jigsaw 9.0", "labels 30.1"}
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "--"]


def test_a_picture_of_one_seed_speaks_of_no_mean() -> None:
    assert (of_seeds((3,)), of_seeds((0, 1))) == ("seed 3", "means over 2 seeds")


def test_a_system_has_one_colour_in_bars_and_lines_and_references_have_none() -> None:
    rows = {"untrained": {"a": 1.0}, "Rotation": {"a": 2.0}, "labels": {"a": 4.0}, "ODC": {"a": 3.0}}
    above, below = (Figure().add_subplot() for _ in range(2))
    bars(above, ["a"], rows, "mAP, %")
    profiles(below, ["a"], rows, "mAP, %")
    filled = dict(zip(rows, [container.patches[0].get_facecolor() for container in above.containers], strict=True))
    drawn = dict(zip(rows, [to_rgba(line.get_color()) for line in below.lines], strict=True))
    assert filled == drawn
    assert len(set(filled.values())) == len(rows)
    for name in ("untrained", "labels"):
        red, _, blue, _ = filled[name]
        assert abs(red - blue) < 0.1  # a grey
