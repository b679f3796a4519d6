"""Edits: replayed to what holds, undone and redone, never lost among several writers, refused when they cannot be."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odcluster.errors import DataError, UserError
from odcluster.explore.curation import FILE, Conflict, Curation, curated_labels, open_curation, replay

LABELS = np.array([0, 0, 1, 1, 2, 2, 3, -1])
SIZES = {"num_images": len(LABELS), "num_clusters": 4}


@pytest.fixture
def curation(tmp_path: Path) -> Curation:
    return open_curation(tmp_path)


def add(curation: Curation, action: str, **given: Any) -> Any:
    return curation.add(action, given, **SIZES)


def name(curation: Curation, cluster: int, text: str, expected: str = "") -> Any:
    return add(curation, "name", cluster=cluster, name=text, expected=expected)


def labels_now(curation: Curation) -> list[int]:
    return curated_labels(LABELS, curation.edits()).tolist()


def test_nothing_is_written_before_the_first_edit(curation: Curation) -> None:
    assert (curation.revision, curation.edits(), curation.count(), curation.names()) == (0, [], 0, {})
    assert curated_labels(LABELS, []).tolist() == LABELS.tolist()
    assert not curation.path.exists()


def test_each_edit_does_what_it_says(curation: Curation) -> None:
    name(curation, 1, "cats")
    add(curation, "merge", clusters=[0, 1, 3])
    add(curation, "move", images=[4], to="new")
    add(curation, "move", images=[5, 7], to=0)
    add(curation, "exclude", images=[2, 6])
    add(curation, "include", images=[6])
    add(curation, "review", cluster=2, reviewed=True)
    assert labels_now(curation) == [0, 0, -1, 0, 4, 0, 0, 0]
    revision, state = curation.state()
    assert revision == curation.count() == 7
    assert state.names == {0: "cats"}  # a cluster without a name takes over that of one merged into it
    assert state.merged() == {0: [1, 3]}
    assert (state.reviewed, state.created, state.excluded) == ({2}, [4], {2})
    assert state.homes(LABELS).tolist() == [0, 0, 0, 0, 4, 0, 0, 0]
    texts = [edit.sentence() for edit in curation.newest(3)]
    assert texts == ["cluster 2 is reviewed", "1 image is taken in again", "2 images are left out"]


def test_merges_follow_each_other_and_take_moved_images_along(curation: Curation) -> None:
    add(curation, "move", images=[0], to=3)
    add(curation, "merge", clusters=[2, 3])
    add(curation, "merge", clusters=[1, 2])
    assert labels_now(curation) == [1, 0, 1, 1, 1, 1, 1, -1]
    assert curation.state()[1].merged() == {1: [2, 3]}


def test_moving_an_image_that_was_left_out_brings_it_back(curation: Curation) -> None:
    add(curation, "exclude", images=[0, 1])
    add(curation, "move", images=[1], to=2)
    assert labels_now(curation)[:2] == [-1, 2]


def test_undo_and_redo_walk_along_the_log(curation: Curation) -> None:
    name(curation, 0, "a")
    name(curation, 0, "b", "a")
    add(curation, "move", images=[0], to="new")
    assert [curation.undo().action, curation.undo().action] == ["move", "name"]
    assert curation.names() == {0: "a"}
    assert curation.redo().details["name"] == "b"
    assert curation.redo().details["to"] == 4
    assert labels_now(curation)[0] == 4
    with pytest.raises(UserError, match="nothing to redo"):
        curation.redo()
    for _ in range(3):
        curation.undo()
    with pytest.raises(UserError, match="nothing to undo"):
        curation.undo()
    assert curation.names() == {}
    assert labels_now(curation) == LABELS.tolist()
    assert [edit.undone for edit in curation.edits()] == [True] * 3


def test_a_new_edit_forgets_what_was_undone_but_not_its_number(curation: Curation) -> None:
    add(curation, "move", images=[0], to="new")
    curation.undo()
    assert add(curation, "move", images=[1], to="new").details["to"] == 5  # 4 stays with the one undone
    with pytest.raises(UserError, match="nothing to redo"):
        curation.redo()
    assert labels_now(curation)[:2] == [0, 5]


def test_a_name_somebody_else_has_changed_is_a_conflict(tmp_path: Path) -> None:
    first, second = open_curation(tmp_path), open_curation(tmp_path)
    name(first, 2, "dogs")
    with pytest.raises(Conflict, match='is called "dogs" by now') as refused:
        name(second, 2, "wolves")
    assert refused.value.current == "dogs"
    name(second, 2, "wolves", "dogs")
    assert first.names() == {2: "wolves"}
    add(first, "merge", clusters=[0, 2])
    with pytest.raises(Conflict, match="merged into cluster 0") as refused:
        add(second, "review", cluster=2, reviewed=True)
    assert refused.value.current == 0


def test_no_edit_is_lost_when_many_write_at_once(tmp_path: Path) -> None:
    conflicts = []

    def edit(number: int) -> None:
        mine = open_curation(tmp_path)  # a connection of its own, as another process has
        for turn in range(5):
            add(mine, "exclude", images=[number])
            add(mine, "include", images=[number])
            add(mine, "move", images=[number], to="new")
            try:
                name(mine, turn % 4, f"{number} {turn}")
            except Conflict:
                conflicts.append(number)
        mine.close()

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    curation = open_curation(tmp_path)
    edits = curation.edits()
    names = [e for e in edits if e.action == "name"]
    assert len(edits) - len(names) == 4 * 5 * 3
    assert len(names) == 4  # one winner per cluster, everybody else was told
    assert len(conflicts) == 4 * 5 - 4
    made = [edit.details["to"] for edit in edits if edit.action == "move"]
    assert sorted(made) == list(range(4, 24))
    assert curation.revision == len(edits)


@pytest.mark.parametrize(
    ("action", "given", "sentence"),
    [
        ("sell", {}, "no such edit"),
        ("name", {"cluster": 0, "name": 3, "expected": ""}, "must be a text"),
        ("name", {"cluster": 0, "name": "x"}, "`expected` must be a text"),
        ("name", {"cluster": 4, "name": "x", "expected": ""}, "no cluster"),
        ("name", {"cluster": -1, "name": "x", "expected": ""}, "no cluster"),
        ("name", {"cluster": True, "name": "x", "expected": ""}, "no cluster"),
        ("name", {"cluster": "0", "name": "x", "expected": ""}, "no cluster"),
        ("review", {"cluster": 0, "reviewed": 1}, "true or false"),
        ("merge", {"clusters": [1]}, "at least two"),
        ("merge", {"clusters": [1, 1]}, "at least two"),
        ("merge", {"clusters": 1}, "at least two"),
        ("merge", {"clusters": [1, 9]}, "no cluster"),
        ("move", {"images": [], "to": 1}, "at least one image"),
        ("move", {"images": [0], "to": "old"}, "no cluster"),
        ("move", {"images": [8], "to": 1}, "from 0 to 7"),
        ("move", {"images": [0.0], "to": 1}, "from 0 to 7"),
        ("exclude", {"images": "all"}, "at least one image"),
        ("include", {"images": [None]}, "from 0 to 7"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    action: str, given: dict[str, Any], sentence: str, curation: Curation
) -> None:
    with pytest.raises(UserError, match=sentence):
        curation.add(action, given, **SIZES)
    assert curation.edits() == []
    assert curation.revision == 0


def test_names_are_one_line_of_what_can_be_shown(curation: Curation) -> None:
    for given, kept in [
        (" two\nlines\t ", "two lines"),
        ("\x1b[31mred\x07", "[31mred"),
        ("a\ud800b", "ab"),
        ("<b>&\"'", "<b>&\"'"),
        ("é中🐈", "é中🐈"),
        ("x" * 999, "x" * 200),
        ("   ", ""),
    ]:
        name(curation, 1, given, curation.names().get(1, ""))
        assert curation.names().get(1, "") == kept


def test_edits_outlive_the_process_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    first = open_curation(tmp_path)
    name(first, 3, "kept")
    first.close()
    assert open_curation(tmp_path).names() == {3: "kept"}
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute("UPDATE edits SET details = 'nonsense'")
    with pytest.raises(DataError, match=FILE):
        open_curation(tmp_path).state()
    other = tmp_path / "other"
    other.mkdir()
    (other / FILE).write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(DataError, match="move it away"):
        open_curation(other).state()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(DataError, match="cannot be written"):
            name(open_curation(tmp_path), 0, "x")
        assert open_curation(tmp_path).names() == {}
    finally:
        tmp_path.chmod(0o700)


def test_replaying_is_the_same_from_any_start(curation: Curation) -> None:
    """What holds depends on the log alone: cut anywhere, the edits before the cut are replayed as they were then."""
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(30):
        image, cluster = int(rng.integers(8)), int(rng.integers(4))
        action = rng.choice(["move", "exclude", "include", "review"])
        given = {"images": [image], "to": cluster, "cluster": cluster, "reviewed": bool(rng.integers(2))}
        curation.add(str(action), given, **SIZES)
        seen.append(labels_now(curation))
    edits = curation.edits()
    assert [replay(edits[: n + 1]).labels(LABELS).tolist() for n in range(30)] == seen
