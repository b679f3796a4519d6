"""The same images get the same ids, in whatever form they come; nothing given is executed or changed."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import socket
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from odcluster.data import arrays
from odcluster.data.sources import Manifest, Source, open_source
from odcluster.errors import DataError, ImageRefused, UserError


def png(number: int, height: int = 4, width: int = 5) -> bytes:
    """Make a PNG all of whose pixels are (number, 2 * number, 255 - number)."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (number, 2 * number, 255 - number)).save(buffer, "PNG")
    return buffer.getvalue()


def fill(root: Path, *names: str) -> Path:
    """Write one small image per name; its colour is its place in the list."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return root


def number_of(source: Source, id: int) -> int:
    return int(source.image(id)[0, 0, 0])


def message(data: object, split: str | None = None, error: type[UserError] = DataError) -> str:
    """Return the one sentence that opening this data ends with."""
    with pytest.raises(error) as caught:
        open_source(data, split)  # type: ignore[arg-type]
    text = str(caught.value)
    assert type(caught.value) is error
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


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


# --- Arrays -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["memory", "npy", "npz", "fortran"])
@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 5, 7, 1), (6, 5, 7, 3), (6, 1, 5, 7), (6, 3, 5, 7)])
def test_every_layout_gives_the_same_pictures(tmp_path: Path, stored: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    expected = array.reshape(6, *([5, 7, 1] if array.size == 6 * 35 else shape[1:]))
    if shape[1] == 3:
        expected = expected.transpose(0, 2, 3, 1)
    expected = np.broadcast_to(expected, (6, 5, 7, 3))
    if stored == "memory":
        source = open_source(array)
    elif stored == "npz":
        np.savez(tmp_path / "a.npz", images=array, labels=np.arange(6))
        source = open_source(tmp_path / "a.npz")
    else:
        np.save(tmp_path / "a.npy", np.asfortranarray(array) if stored == "fortran" else array)
        source = open_source(tmp_path / "a.npy")
    assert source.manifest.kind == "arrays"
    assert len(source) == 6
    for id in range(6):
        image = source.image(id)
        np.testing.assert_array_equal(image, expected[id])
        assert image.flags.c_contiguous
        image[:] = 0  # a copy: the next reader sees the original
        np.testing.assert_array_equal(source.image(id), expected[id])
    assert source.manifest.paths[3].endswith("#00000003")


def test_four_channels_are_laid_over_white() -> None:
    array = np.zeros((1, 2, 2, 4), np.uint8)
    array[0, 0, 0] = 10, 20, 30, 255
    image = open_source(array).image(0)
    assert image[0, 0].tolist() == [10, 20, 30]
    assert (image[1] == 255).all()


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.zeros((2, 3, 3), np.float32), ".astype(numpy.uint8)"),
        (np.zeros((2, 3, 3), np.int64), ".astype(numpy.uint8)"),
        (np.array([None, 1], dtype=object), ".astype(numpy.uint8)"),
        (np.zeros((8, 9), np.uint8), "reshape"),
        (np.zeros((8, 9, 3), np.uint8), "reshape"),  # one image, not eight
        (np.zeros((2, 8, 9, 5), np.uint8), "reshape"),
        (np.zeros((0, 8, 9), np.uint8), "at least one"),
    ],
)
def test_wrong_arrays_name_the_remedy(tmp_path: Path, array: np.ndarray, word: str) -> None:
    assert word in message(array)
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    np.savez(tmp_path / "a.npz", images=array)
    assert word in message(tmp_path / "a.npy")
    assert word in message(tmp_path / "a.npz")


def test_npz_keys_labels_and_splits(tmp_path: Path) -> None:
    images = np.zeros((4, 8, 9), np.uint8)
    np.savez(tmp_path / "a.npz", pictures=images, y=np.array(["b", "a", "b", "c"]), other=np.zeros(3))
    manifest = open_source(tmp_path / "a.npz").manifest
    assert manifest.labels is not None
    assert (manifest.labels.tolist(), manifest.class_names) == ([1, 0, 1, 2], ["a", "b", "c"])
    parts = {
        "x_train": images,
        "y_train": np.ones((4, 1), np.uint8),
        "x_test": images[:2],
        "y_test": np.arange(2),
    }
    np.savez(tmp_path / "b.npz", **parts)
    assert [len(open_source(tmp_path / "b.npz", split)) for split in (None, "train", "test")] == [4, 4, 2]
    assert open_source(tmp_path / "b.npz", "test").manifest.labels.tolist() == [0, 1]  # type: ignore[union-attr]
    assert "x_val" in message(tmp_path / "b.npz", "val")
    np.savez(tmp_path / "c.npz", one=images, two=images)
    assert "one, two" in message(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", images=images, labels=np.arange(3))
    with pytest.warns(UserWarning, match="do not fit 4 images"):
        assert open_source(tmp_path / "d.npz").manifest.labels is None


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_damaged_array_files_are_data_errors(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    (np.save if name == "a.npy" else np.savez)(path, np.zeros((50, 9, 9), np.uint8))
    whole = path.read_bytes()
    for data in (b"", b"text", whole[:60], whole[: len(whole) // 2], pickle.dumps({"a": 1})):
        path.write_bytes(data)
        message(path)


def pack(path: Path, **changes: np.ndarray) -> Path:
    files = [png(number) for number in range(5)]
    arrays = {
        "data": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.array([1, 0, 1, 0, -1]),
        "class_names": np.array(["cat", "dog"]),
    }
    np.savez(path, **(arrays | changes))
    return path


def test_the_packed_format(tmp_path: Path) -> None:
    source = open_source(pack(tmp_path / "p.npz"))
    assert source.manifest.kind == "packed"
    assert [number_of(source, id) for id in range(5)] == list(range(5))
    assert source.manifest.paths[2] == "p.npz#00000002"
    assert source.manifest.sizes.tolist() == [len(png(number)) for number in range(5)]
    assert source.manifest.class_names == ["cat", "dog"]
    assert source.manifest.labels is not None
    assert source.manifest.labels.tolist() == [1, 0, 1, 0, -1]


def test_a_damaged_image_of_a_pack_is_refused_alone(tmp_path: Path) -> None:
    files = [png(0), b"broken", png(2)]
    data = np.frombuffer(b"".join(files), np.uint8)
    offsets = np.cumsum([0, *map(len, files)])
    source = open_source(pack(tmp_path / "p.npz", data=data, offsets=offsets, labels=np.zeros(3, np.int64)))
    with pytest.raises(ImageRefused):
        source.image(1)
    assert (number_of(source, 0), number_of(source, 2)) == (0, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": np.array([0, 50, 20, 90])},
        {"offsets": np.array([-5, 20])},
        {"offsets": np.array([0, 10**12])},
        {"offsets": np.array([0])},
        {"offsets": np.array([0.0, 20.0])},
        {"data": np.zeros((9, 9, 9), np.uint8)},
        {"class_names": np.array(["cat"])},
    ],
)
def test_a_wrong_pack_is_a_data_error(tmp_path: Path, changes: dict[str, np.ndarray]) -> None:
    message(pack(tmp_path / "p.npz", **changes))


# --- CIFAR-10 ---------------------------------------------------------------------------------------


class OldString:
    """A Python 2 `str` in a protocol-2 pickle."""

    def __init__(self, text: bytes) -> None:
        self.text = text


class Python2Pickler(pickle._Pickler):  # type: ignore[misc, name-defined]
    """Write strings as Python 2 did, by the opcodes SHORT_BINSTRING and BINSTRING."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_old(self, value: OldString) -> None:
        size = len(value.text)
        head = b"U" + bytes([size]) if size < 256 else b"T" + size.to_bytes(4, "little")
        self.write(head + value.text)
        self.memoize(value)

    dispatch[OldString] = save_old


def batch(first: int, count: int) -> tuple[np.ndarray, list[int]]:
    """Make images whose red channel is their number and whose rows are brighter downwards."""
    images = np.zeros((count, 3, 32, 32), np.uint8)
    images[:, 0] = np.arange(first, first + count, dtype=np.uint8)[:, None, None]
    images[:, 1] = np.arange(32)[:, None]
    return images, [(first + number) % 10 for number in range(count)]


def write_batch(path: Path, images: np.ndarray, labels: list[int], version: str) -> None:
    flat = np.ascontiguousarray(images.reshape(len(images), 3072))
    names = [f"image_{number}.png".encode() for number in range(len(images))]
    if version == "bin":
        path.with_suffix(".bin").write_bytes(np.insert(flat, 0, labels, axis=1).tobytes())
    elif version == "python2":
        old = {OldString(b"batch_label"): OldString(b"training batch 1 of 5"), OldString(b"labels"): labels}
        state = (1, flat.shape, np.dtype("uint8"), False, OldString(flat.tobytes()))
        old |= {OldString(b"data"): state, OldString(b"filenames"): [OldString(name) for name in names]}
        buffer = io.BytesIO()
        Python2Pickler(buffer, protocol=2).dump(old)
        path.write_bytes(buffer.getvalue())
    else:
        content = {b"labels": labels, b"batch_label": b"x", b"data": flat, b"filenames": names}
        path.write_bytes(pickle.dumps(content, protocol=int(version)))


@pytest.mark.parametrize("version", ["bin", "python2", "2", "3", "4", "5"])
@pytest.mark.parametrize("parent", [False, True])
def test_cifar_in_both_versions(tmp_path: Path, version: str, parent: bool) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number in range(1, 4):
        write_batch(folder / f"data_batch_{number}", *batch(20 * number, 7), version)
    write_batch(folder / "test_batch", *batch(200, 3), version)
    (folder / "readme.html").write_text("<html>")
    given = tmp_path if parent else folder
    source = open_source(given)
    assert (len(source), source.manifest.kind, source.manifest.root) == (21, "cifar10", str(folder))
    numbers = [20 * part + number for part in (1, 2, 3) for number in range(7)]
    assert [number_of(source, id) for id in range(21)] == numbers
    assert source.image(0)[:, 5, 1].tolist() == list(range(32))
    assert source.manifest.labels is not None
    assert source.manifest.labels.tolist() == [number % 10 for number in numbers]
    assert source.manifest.class_names is not None
    assert source.manifest.class_names[3] == "cat"
    assert source.manifest.paths == sorted(source.manifest.paths)
    assert [number_of(open_source(given, "test"), id) for id in range(3)] == [200, 201, 202]
    assert "train or test" in message(given, "val")


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o777)


def test_a_pickled_batch_is_never_executed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    images, labels = batch(0, 5)
    content = {b"labels": labels, b"evil": Attack(tmp_path / "executed"), b"data": images.reshape(5, 3072)}
    (folder / "data_batch_1").write_bytes(pickle.dumps(content, protocol=4))
    assert len(open_source(folder)) == 5
    assert not (tmp_path / "executed").exists()
    pickle.loads((folder / "data_batch_1").read_bytes())
    assert (tmp_path / "executed").exists(), "the attack was none, so the test proved nothing"


@pytest.mark.parametrize("version", ["bin", "4"])
def test_a_damaged_batch_is_a_data_error(tmp_path: Path, version: str) -> None:
    write_batch(tmp_path / "data_batch_1", *batch(0, 5), version)
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    for data in (b"", b"text", whole[:-100], whole[: len(whole) // 2]):
        path.write_bytes(data)
        assert "download it again" in message(tmp_path)
    write_batch(tmp_path / "data_batch_1", batch(0, 5)[0], [0, 1, 2, 3, 44], version)
    assert "download it again" in message(tmp_path)


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


# --- Manifests --------------------------------------------------------------------------------------


def manifest(*names: str, size: int = 10, content: str = "") -> Manifest:
    return Manifest("folder", "/photos", list(names), np.full(len(names), size, np.int64), content=content)


@pytest.mark.parametrize("labels", [None, np.array([0, -1, 2**40, 1, 0])])
@pytest.mark.parametrize("class_names", [None, ["a,b", 'qu"ote', "new\nline"]])
def test_a_written_manifest_reads_back(
    tmp_path: Path, labels: np.ndarray | None, class_names: list[str] | None
) -> None:
    names = ["#a,b.jpg", 'c"d".jpg', "e\nf\r\ng.jpg", os.fsdecode(b"\xff\xfe.jpg"), "日本 é.jpg"]
    sizes = np.array([0, 1, 2**40, 3, 4])
    before = Manifest("class tree", "/a b/\n,c", names, sizes, labels, class_names, "uint8 (2, 3) abc")
    before.write(tmp_path / "manifest.csv")
    after = Manifest.read(tmp_path / "manifest.csv")
    assert os.listdir(tmp_path) == ["manifest.csv"]
    assert (after.kind, after.root, after.paths) == (before.kind, before.root, before.paths)
    assert (after.class_names, after.content) == (before.class_names, before.content)
    np.testing.assert_array_equal(after.sizes, sizes)
    assert (after.labels is None) == (labels is None)
    if labels is not None:
        np.testing.assert_array_equal(after.labels, labels)
    assert after.fingerprint() == before.fingerprint()
    assert before.difference(after) == ""


def test_a_damaged_manifest_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "manifest.csv"
    manifest("a.jpg", "b.jpg").write(path)
    lines = path.read_text().splitlines()
    for text in (
        "",
        "id,path\n",
        "\n".join(lines[:4]),
        "\n".join(lines[:-1]) + "\n1,b",
        "\n".join(lines[:6] + lines[7:]),
    ):
        path.write_text(text)
        with pytest.raises(DataError):
            Manifest.read(path)
    with pytest.raises(DataError):
        Manifest.read(tmp_path / "gone.csv")


def test_the_fingerprint_sees_names_sizes_and_content_but_not_the_place() -> None:
    first = manifest("a", "b")
    moved = Manifest("list", "/elsewhere", ["a", "b"], first.sizes, np.zeros(2, np.int64), ["x"])
    assert first.fingerprint() == moved.fingerprint()
    others = [
        manifest("a", "c"),
        manifest("ab"),
        manifest("a", "b", size=11),
        manifest("a", "b", content="x"),
    ]
    others += [manifest("a"), manifest("a", "b", "c"), manifest()]
    assert len({first.fingerprint(), *(other.fingerprint() for other in others)}) == 8


def test_differences_are_counted_and_named() -> None:
    before = manifest("a", "b", "c", "d", "e")
    sizes = np.array([10, 11, 10, 10, 10, 10])
    now = Manifest("folder", "/x", ["a", "b", "v", "w", "x", "y"], sizes)
    text = before.difference(now)
    assert text == "Of 5 images: 4 added (v, w, x, ...), 3 removed (c, d, e), 1 changed in size (b)."
    assert before.difference(before) == ""
    assert "content" in before.difference(manifest("a", "b", "c", "d", "e", content="other"))


def test_changed_content_of_arrays_is_noticed(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (40, 30, 30), dtype=np.uint8)
    changed = array.copy()
    changed[0, 0, 0] ^= 1
    first, second = open_source(array).manifest, open_source(changed).manifest
    assert first.fingerprint() != second.fingerprint()
    assert first.fingerprint() == open_source(array.copy()).manifest.fingerprint()
    assert "content" in first.difference(second)
    np.save(tmp_path / "a.npy", array)
    first = open_source(tmp_path / "a.npy").manifest
    np.save(tmp_path / "a.npy", changed)
    assert first.fingerprint() != open_source(tmp_path / "a.npy").manifest.fingerprint()


def test_hashing_a_file_samples_its_whole_length(tmp_path: Path) -> None:
    path = tmp_path / "a"
    data = bytearray(200_000)
    seen = set()
    for position in (None, 0, 100_000, 199_999):
        changed = data.copy()
        if position is not None:
            changed[position] = 1
        path.write_bytes(changed)
        seen.add(arrays.sampled_hash(str(path), num_blocks=5, block=1001))
    path.write_bytes(data + b"\0")
    seen.add(arrays.sampled_hash(str(path), num_blocks=5, block=1001))
    assert len(seen) == 5


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
