"""What changed between two listings: every image is the same one, another one, or gone; renames only where certain."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odcluster.data.added import open_with_added, with_added
from odcluster.data.changes import compare
from odcluster.data.sources import Manifest, open_source
from odcluster.errors import DataError


def manifest(images: dict[str, tuple[int, int]], content: str = "") -> Manifest:
    """Names with size and time."""
    names = sorted(images, key=os.fsencode)
    sizes, times = (np.array([images[name][column] for name in names], np.int64) for column in (0, 1))
    return Manifest("folder", "/photos", names, sizes, content=content, modified=times)


BASE = {f"{name}.jpg": (100 + number, 1_000_000_001 + number) for number, name in enumerate("abcdefgh")}


def test_nothing_changed():
    changes = compare(manifest(BASE), manifest(BASE))
    assert not changes
    assert changes.sentence() == ""
    np.testing.assert_array_equal(changes.origin, np.arange(8))
    np.testing.assert_array_equal(changes.new_ids(), np.arange(8))


def test_added_and_removed_images_move_the_ids_of_the_others():
    now = {name: entry for name, entry in BASE.items() if name != "b.jpg"} | {"aa.jpg": (7, 7), "z.jpg": (8, 8)}
    changes = compare(manifest(BASE), manifest(now))
    assert changes
    assert (changes.added, changes.removed) == (["aa.jpg", "z.jpg"], ["b.jpg"])
    names = sorted(now)
    assert [names[new] if new >= 0 else None for new in changes.new_ids()] == [
        name if name != "b.jpg" else None for name in sorted(BASE)
    ]
    assert changes.sentence() == "Of 8 images: 2 added (aa.jpg, z.jpg), 1 removed (b.jpg)."


def test_a_renamed_file_keeps_size_and_time():
    now = {("new name.jpg" if name == "c.jpg" else name): entry for name, entry in BASE.items()}
    changes = compare(manifest(BASE), manifest(now))
    assert changes.renamed == [("c.jpg", "new name.jpg")]
    assert not changes.added
    assert not changes.removed
    assert changes.origin[sorted(now).index("new name.jpg")] == 2
    assert "1 renamed (c.jpg to new name.jpg)" in changes.sentence()


def test_a_moved_file_keeps_size_and_name():
    now = {("below/c.jpg" if name == "c.jpg" else name): entry for name, entry in BASE.items()}
    now["below/c.jpg"] = (now["below/c.jpg"][0], 5_000_000_000)  # copied: another time
    assert compare(manifest(BASE), manifest(now)).renamed == [("c.jpg", "below/c.jpg")]


@pytest.mark.parametrize(
    "now",
    [
        {"x.jpg": (102, 77)},  # same size, another time: may be anything
        {"x.jpg": (103, 1_000_000_003)},  # same time, another size
        {"x/c.jpg": (102, 5), "y/c.jpg": (102, 6)},  # two that it could be
        {"x.jpg": (102, 1_000_000_003), "y.jpg": (102, 1_000_000_003)},
    ],
)
def test_what_is_not_certain_is_one_that_went_and_one_that_came(now):
    rest = {name: entry for name, entry in BASE.items() if name != "c.jpg"}
    changes = compare(manifest(BASE), manifest(rest | now))
    assert not changes.renamed
    assert changes.removed == ["c.jpg"]
    assert changes.added == sorted(now)
    assert all(changes.origin[sorted(rest | now).index(name)] == -1 for name in now)


def test_times_in_whole_seconds_prove_nothing():
    """An archive gives many files the same second; bitmaps have the same size."""
    before = {"a.bmp": (500, 3_000_000_000), "b.bmp": (500, 4_000_000_000)}
    now = {"a.bmp": (500, 3_000_000_000), "c.bmp": (500, 4_000_000_000)}
    changes = compare(manifest(before), manifest(now))
    assert (changes.added, changes.removed, changes.renamed) == (["c.bmp"], ["b.bmp"], [])


def test_replaced_files():
    now = BASE | {"d.jpg": (9999, 5)}
    changes = compare(manifest(BASE), manifest(now))
    assert changes.replaced == ["d.jpg"]
    assert changes.origin.tolist() == [0, 1, 2, -1, 4, 5, 6, 7]


def test_written_with_the_same_size_is_a_doubt_and_a_copied_folder_is_none():
    now = BASE | {"d.jpg": (BASE["d.jpg"][0], 5)}
    changes = compare(manifest(BASE), manifest(now))
    assert not changes  # not certain
    assert changes.touched == ["d.jpg"]
    assert changes.origin[3] == -1
    copied = {name: (size, time + 10**12) for name, (size, time) in BASE.items()}
    changes = compare(manifest(BASE), manifest(copied))
    assert not changes.touched
    assert (changes.origin >= 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_every_image_is_accounted_for_once(seed):
    random = np.random.default_rng(seed)
    before, now = (
        {
            f"{folder}/{number}.png": (int(random.integers(100, 110)), int(random.integers(1, 60)))
            for folder in "pq"
            for number in random.choice(30, 20, replace=False).tolist()
        }
        for _ in range(2)
    )
    changes = compare(manifest(before), manifest(now))
    kept = changes.origin[changes.origin >= 0]
    assert len(set(kept.tolist())) == len(kept)
    anew = len(changes.added) + len(changes.replaced) + len(changes.touched)
    assert len(kept) + anew == len(now)
    assert len(kept) + len(changes.removed) + len(changes.replaced) + len(changes.touched) == len(before)
    np.testing.assert_array_equal(changes.new_ids()[kept], np.flatnonzero(changes.origin >= 0))


# --- Further folders --------------------------------------------------------------------------------


def picture(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(path)


@pytest.fixture
def folders(tmp_path):
    for number in range(4):
        picture(tmp_path / "first" / f"{number}.png", number)
        picture(tmp_path / "elsewhere" / "more" / f"{number}.png", 100 + number)
    return tmp_path


def test_added_images_are_found_under_their_names(folders):
    source = with_added(open_source(folders / "first"), folders / "elsewhere" / "more")
    assert source.manifest.paths == sorted(source.manifest.paths, key=os.fsencode)
    assert len(source) == 8
    for id, name in enumerate(source.manifest.paths):
        expected = int(name[-5]) + (100 if name.startswith("../elsewhere/more/") else 0)
        assert source.image(id)[0, 0, 0] == expected
    source.manifest.write(folders / "m.csv")
    again = Manifest.read(folders / "m.csv")
    assert again.added == (str(folders / "elsewhere" / "more"),)
    np.testing.assert_array_equal(again.modified, source.manifest.modified)
    reopened = open_with_added(folders / "first", again.added).manifest
    assert reopened.fingerprint() == again.fingerprint()
    assert sorted(reopened.folders()) == sorted(map(str, (folders / "first", folders / "elsewhere" / "more")))


def test_a_root_behind_a_link_is_no_hindrance(folders):
    (folders / "deep" / "down").mkdir(parents=True)
    (folders / "deep" / "down" / "link").symlink_to(folders / "first")
    source = with_added(open_source(folders / "deep" / "down" / "link"), folders / "elsewhere" / "more")
    assert sorted(source.image(id)[0, 0, 0] for id in range(8)) == [0, 1, 2, 3, 100, 101, 102, 103]


def test_images_that_are_there_already_are_not_added_twice(folders):
    first = open_source(folders / "first")
    picture(folders / "other.png", 50)
    source = with_added(first, folders)  # the folder around both
    assert len(source) == 9
    assert {name for name in source.manifest.paths if not name.startswith("..")} == set(first.manifest.paths)
    assert len(with_added(first, folders / "first")) == 4
    assert len(with_added(source, folders / "elsewhere")) == 9


def test_classes_of_the_same_name_are_the_same(tmp_path):
    for number, name in enumerate(("cat/0", "dog/1", "dog/2")):
        picture(tmp_path / "a" / f"{name}.png", number)
    for number, name in enumerate(("dog/5", "eel/6")):
        picture(tmp_path / "b" / f"{name}.png", number)
    joined = with_added(open_source(tmp_path / "a"), tmp_path / "b").manifest
    assert joined.class_names == ["cat", "dog", "eel"]
    named = {path: joined.class_names[label] for path, label in zip(joined.paths, joined.labels, strict=True)}
    assert named == {"../b/dog/5.png": "dog", "../b/eel/6.png": "eel", "cat/0.png": "cat"} | {
        f"dog/{number}.png": "dog" for number in (1, 2)
    }
    shutil.rmtree(tmp_path / "b" / "eel")  # one folder is no class tree any more
    assert with_added(open_source(tmp_path / "a"), tmp_path / "b").manifest.labels.tolist().count(-1) == 1


def test_only_files_can_be_added_to_files(folders):
    np.save(folders / "images.npy", np.zeros((3, 8, 9), np.uint8))
    with pytest.raises(DataError, match="no image files"):
        with_added(open_source(folders / "first"), folders / "images.npy")
    with pytest.raises(DataError, match="can only be added"):
        with_added(open_source(folders / "images.npy"), folders / "first")
    with pytest.raises(DataError):
        open_with_added(folders / "first", [str(folders / "gone")])
    assert len(open_with_added(folders / "first", [str(folders / "gone")], skip_missing=True)) == 4
