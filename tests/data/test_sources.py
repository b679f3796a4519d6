"""The same images get the same ids, in whatever form they come; nothing given is changed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from source_files import batch, fill, message, number_of, pack, png, write_batch

from odcluster.data.sources import Source, open_source
from odcluster.errors import ImageRefused, UserError

# --- Folders ----------------------------------------------------------------------------------------


def test_ids_follow_the_bytes_of_the_names(tmp_path: Path) -> None:
    names = ["b.jpg", "a/z.PNG", "a-b.jpeg", "Z.webp", "é.gif", "a/b/c.TIFF", "10.bmp", "9.ppm"]
    source = open_source(fill(tmp_path, *names))
    assert source.manifest.paths == sorted(names, key=os.fsencode)
    assert source.manifest.kind == "folder"
    assert source.manifest.root == str(tmp_path)
    assert source.manifest.labels is None
    assert source.manifest.sizes.tolist() == [(tmp_path / name).stat().st_size for name in source.manifest.paths]
    for id, name in enumerate(source.manifest.paths):
        assert number_of(source, id) == names.index(name)


def test_other_files_and_hidden_ones_are_skipped(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg", ".hidden.jpg", ".cache/b.jpg", "notes.txt", "jpg", "x.jpg.part", "d/.git/c.png")
    assert open_source(str(tmp_path)).manifest.paths == ["a.jpg"]


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    try:
        fill(tmp_path, name, 'a\nb,"c".png')
    except OSError:
        pytest.skip("this file system has no such names")
    source = open_source(tmp_path)
    assert sorted(number_of(source, id) for id in range(2)) == [0, 1]
    (tmp_path / 'a\nb,"c".png').unlink()
    difference = source.manifest.difference(open_source(tmp_path).manifest)
    difference.encode()  # fit to be printed
    assert "\n" not in difference


def test_what_is_no_regular_file_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "a.jpg", "folder.jpg/inside.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        assert open_source(tmp_path).manifest.paths == ["a.jpg", "folder.jpg/inside.jpg"]


def test_links_are_followed_and_loops_broken(tmp_path: Path) -> None:
    root = fill(tmp_path / "root", "real/a.jpg", "b.jpg")
    fill(tmp_path / "outside", "c.jpg", "deep/d.jpg")
    (root / "real" / "loop").symlink_to("..")
    (root / "self").symlink_to("self")
    (root / "away").symlink_to(tmp_path / "outside")
    (root / "again").symlink_to("real")  # the same folder by another name
    (tmp_path / "outside" / "home").symlink_to(root)
    (root / "file.jpg").symlink_to(tmp_path / "outside" / "c.jpg")
    os.link(root / "b.jpg", root / "hard.jpg")
    expected = ["away/c.jpg", "away/deep/d.jpg", "b.jpg", "file.jpg", "hard.jpg", "real/a.jpg"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `self` leads nowhere
        source = open_source(root)
    assert source.manifest.paths == expected
    assert all(source.image(id).shape == (4, 5, 3) for id in range(6))


def test_a_link_that_leads_nowhere_is_counted(tmp_path: Path) -> None:
    fill(tmp_path, "a.jpg")
    (tmp_path / "broken.jpg").symlink_to("gone")
    with pytest.warns(UserWarning, match=r"1 files or folders .*broken\.jpg"):
        assert len(open_source(tmp_path)) == 1


def test_changes_between_scan_and_read_are_refusals(tmp_path: Path) -> None:
    source = open_source(fill(tmp_path, "0.png", "1.png", "2.png", "3.png", "4.png"))
    (tmp_path / "0.png").unlink()
    (tmp_path / "1.png").write_bytes(b"replaced by a note")
    (tmp_path / "2.png").unlink()
    os.mkfifo(tmp_path / "2.png")
    (tmp_path / "3.png").write_bytes(png(77))
    for id, reason in enumerate(["deleted", "text", "not a regular file"]):
        with pytest.raises(ImageRefused, match=reason):
            source.image(id)
    assert number_of(source, 3) == 77
    assert number_of(source, 4) == 4


def test_empty_and_missing_folders_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "photos" / "empty").mkdir(parents=True)
    (tmp_path / "photos" / "notes.md").write_text("x")
    assert "jpg" in message(tmp_path / "photos")
    assert str(tmp_path / "photos") in message(tmp_path / "photos")
    assert f"did you mean {tmp_path / 'photos'}?" in message(tmp_path / "fotos")
    assert f"did you mean {tmp_path / 'photos'}?" in message(tmp_path / "fotos" / "2020")
    assert "is a file" in message(tmp_path / "photos" / "notes.md" / "x")
    assert "not a known kind" in message(tmp_path / "photos" / "notes.md")
    for name, word in {"a.zip": "unpack", "b.jpg": "folder that holds it"}.items():
        (tmp_path / name).write_bytes(b"x")
        assert word in message(tmp_path / name)
    os.mkfifo(tmp_path / "list.txt")
    assert "neither a file nor a folder" in message(tmp_path / "list.txt")
    np.save(tmp_path / "photos" / "x.npy", np.zeros((2, 3, 3), np.uint8))
    assert "give the file x.npy" in message(tmp_path / "photos")


@pytest.mark.parametrize("data", [None, 5, "", b"photos", ["a.jpg"], "https://example.com/photos"])
def test_what_is_no_path_is_a_usage_error(data: object) -> None:
    message(data, error=UserError)


def test_one_image_is_enough(tmp_path: Path) -> None:
    assert len(open_source(fill(tmp_path, "a.png"))) == 1


def test_a_hundred_thousand_names_are_listed_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The budget is 10 s for a million; three times that is allowed here for a busy machine."""
    status = os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, 123, 0, 0, 0), {"st_mtime_ns": 1})

    class Entry:
        def __init__(self, number: int) -> None:
            self.name = f"{number * 7919 % 100_003:06d}.jpg"

        def is_dir(self) -> bool:
            return False

        def stat(self) -> os.stat_result:
            return status

    class Entries:
        def __enter__(self) -> Iterator[Entry]:
            return map(Entry, range(100_000))

        def __exit__(self, *exception: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", lambda path: Entries())
    started = time.process_time()
    manifest = open_source(tmp_path).manifest
    manifest.fingerprint()
    assert time.process_time() - started < 3
    assert len(manifest) == 100_000
    assert manifest.paths == sorted(manifest.paths)


def test_the_users_folder_is_left_as_it_was(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b/c.png", "bad.jpg")
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 8, 9), np.uint8))

    def state() -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in [tmp_path, *tmp_path.rglob("*")]
        }

    before = state()
    for source in (open_source(tmp_path), open_source(tmp_path / "x.npz")):
        source.manifest.fingerprint()
        for id in range(len(source)):
            try:
                source.image(id)[:] = 0
            except ImageRefused:
                assert source.manifest.paths[id] == "bad.jpg"
    assert state() == before


# --- Class trees and splits -------------------------------------------------------------------------


def test_a_class_tree_has_labels(tmp_path: Path) -> None:
    manifest = open_source(fill(tmp_path, "dog/1.png", "cat/2.png", "cat/x/3.png")).manifest
    assert manifest.kind == "class tree"
    assert manifest.class_names == ["cat", "dog"]
    assert manifest.labels is not None
    assert dict(zip(manifest.paths, manifest.labels.tolist(), strict=True)) == {
        "cat/2.png": 0,
        "cat/x/3.png": 0,
        "dog/1.png": 1,
    }


@pytest.mark.parametrize("names", [["one/1.png", "one/2.png"], ["cat/1.png", "dog/2.png", "3.png"]])
def test_other_folders_have_none(tmp_path: Path, names: list[str]) -> None:
    manifest = open_source(fill(tmp_path, *names)).manifest
    assert (manifest.kind, manifest.labels, manifest.class_names) == ("folder", None, None)


def test_a_divided_folder_trains_on_train(tmp_path: Path) -> None:
    fill(tmp_path, "train/cat/1.png", "train/dog/2.png", "valid/cat/3.png", "test/4.png")
    for split in (None, "train"):
        manifest = open_source(tmp_path, split).manifest
        assert (manifest.kind, manifest.paths) == ("class tree", ["cat/1.png", "dog/2.png"])
        assert manifest.root == str(tmp_path / "train")
    assert open_source(tmp_path, "val").manifest.paths == ["cat/3.png"]
    assert open_source(tmp_path, "test").manifest.paths == ["4.png"]
    assert "train" in message(tmp_path, "trainval")
    assert "leave the split out" in message(tmp_path / "test", "test")
    message(tmp_path, "nonsense", UserError)
    message(np.zeros((2, 3, 3), np.uint8), "train", UserError)


def test_a_class_named_train_is_a_class(tmp_path: Path) -> None:
    manifest = open_source(fill(tmp_path, "bus/1.png", "train/2.png")).manifest
    assert manifest.class_names == ["bus", "train"]


# --- Lists ------------------------------------------------------------------------------------------


def test_a_text_list_with_labels(tmp_path: Path) -> None:
    fill(tmp_path, "x/a.png", "x/b 2.png", "x/c.png", "other.png", "d.png")
    lists = tmp_path / "lists"
    lists.mkdir()
    text = f"../x/c.png 7\n\n../x/b 2.png\r\n./../x/a.png\t3\n{tmp_path}/d.png   -1"
    (lists / "some.txt").write_text(text)
    source = open_source(lists / "some.txt")
    names = [f"{tmp_path}/d.png", "../x/a.png", "../x/b 2.png", "../x/c.png"]
    assert source.manifest.paths == sorted(names)
    assert source.manifest.kind == "list"
    found = {number_of(source, id): source.manifest.labels[id] for id in range(4)}  # type: ignore[index]
    assert found == {0: 3, 1: -1, 2: 7, 4: -1}
    assert source.manifest.class_names is None


def test_a_csv_list_with_named_classes(tmp_path: Path) -> None:
    fill(tmp_path, "a,1.png", "b.png", "c.png")
    (tmp_path / "l.csv").write_text('\ufeffNumber,File,Class\n1,"a,1.png",dog\n2,c.png,\n3,b.png,cat\n')
    manifest = open_source(tmp_path / "l.csv").manifest
    assert manifest.paths == ["a,1.png", "b.png", "c.png"]
    assert manifest.class_names == ["cat", "dog"]
    assert manifest.labels is not None
    assert manifest.labels.tolist() == [1, 0, -1]


def test_missing_and_repeated_files_of_a_list_are_counted(tmp_path: Path) -> None:
    fill(tmp_path, "a.png")
    (tmp_path / "l.lst").write_text("a.png\ngone.png\na.png\nlost.png\n")
    with pytest.warns(UserWarning, match=r"2 files .*gone\.png"), pytest.warns(UserWarning, match="1 lines"):
        assert open_source(tmp_path / "l.lst").manifest.paths == ["a.png"]


def test_useless_lists_say_what_to_do(tmp_path: Path) -> None:
    for name, text, word in (
        ("empty.txt", "\n\n", "one image path per line"),
        ("wrong.txt", "nowhere/a.png\n", f"{tmp_path}/nowhere/a.png"),
        ("columns.csv", "a,b\n1,2\n", "path"),
        ("empty.csv", "", "path"),
    ):
        (tmp_path / name).write_text(text)
        assert word in message(tmp_path / name)


# --- VOC --------------------------------------------------------------------------------------------


def make_voc(devkit: Path) -> Path:
    voc = devkit / "VOC2007"
    fill(voc / "JPEGImages", "000001.jpg", "000002.jpg", "000003.jpg", "000004.jpg")
    sets = voc / "ImageSets" / "Main"
    sets.mkdir(parents=True)
    (sets / "trainval.txt").write_text("000001\n000002\n000003\n")
    (sets / "train.txt").write_text("000003\n000001\n")
    (sets / "cat_trainval.txt").write_text("000001  1\n000002 -1\n000003  1\n")
    (sets / "dog_trainval.txt").write_text("000001  0\n000002 -1\n000003  1\n")
    (sets / "cat_train.txt").write_text("000001  1\n000003  1\n")
    (sets / "dog_train.txt").write_text("000001  0\n000003 -1\n")
    return voc


def test_voc_splits_and_labels(tmp_path: Path) -> None:
    voc = make_voc(tmp_path / "VOCdevkit")
    for given in (voc, tmp_path / "VOCdevkit", tmp_path):
        manifest = open_source(given).manifest
        assert (manifest.kind, manifest.root) == ("voc", str(voc))
        assert manifest.paths == [f"JPEGImages/00000{number}.jpg" for number in (1, 2, 3)]
        assert manifest.class_names == ["cat", "dog"]
        assert manifest.labels is not None
        assert manifest.labels.tolist() == [0, -1, -1]  # difficult only, none, two classes
    train = open_source(voc, "train")
    assert [number_of(train, id) for id in range(2)] == [0, 2]
    assert train.manifest.labels is not None
    assert train.manifest.labels.tolist() == [0, 0]
    assert "train, trainval" in message(voc, "test")


def test_voc_without_lists_takes_every_image(tmp_path: Path) -> None:
    voc = make_voc(tmp_path)
    for path in (voc / "ImageSets" / "Main").iterdir():
        path.unlink()
    manifest = open_source(voc).manifest
    assert len(manifest) == 4
    assert manifest.labels is None


def test_missing_voc_images_are_counted(tmp_path: Path) -> None:
    voc = make_voc(tmp_path)
    (voc / "JPEGImages" / "000002.jpg").unlink()
    with pytest.warns(UserWarning, match=r"1 images .*000002"):
        assert len(open_source(voc)) == 2


# --- Workers ----------------------------------------------------------------------------------------


def every_source(tmp_path: Path) -> list[Source]:
    array = np.random.default_rng(0).integers(0, 256, (20, 3, 40, 40), dtype=np.uint8)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", array)
    write_batch(tmp_path / "data_batch_1", *batch(0, 5), "4")
    sources = [open_source(tmp_path), open_source(tmp_path / "a.npy"), open_source(tmp_path / "a.npz")]
    folder = fill(tmp_path / "folder", *(f"{number}.png" for number in range(9)))
    return [*sources, open_source(array), open_source(folder), open_source(pack(tmp_path / "p.npz"))]


def all_pixels(source: Source) -> list[bytes]:
    return [source.image(id).tobytes() for id in range(len(source))]


def test_a_pickled_source_gives_the_same_images(tmp_path: Path) -> None:
    for source in every_source(tmp_path):
        expected = all_pixels(source)
        pickled = pickle.dumps(source)
        assert all_pixels(pickle.loads(pickled)) == expected
        if source.manifest.root.endswith((".npy", ".npz")):
            assert len(pickled) < 10_000, "the recipe is sent to a worker, not the data"


def test_forked_workers_read_side_by_side(tmp_path: Path) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    sources = every_source(tmp_path)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map(all_pixels, sources * 3, chunksize=1)
    assert results == [all_pixels(source) for source in sources] * 3
