"""Arrays, packed images and CIFAR-10: every layout gives the same pictures; nothing given is executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from source_files import batch, message, number_of, pack, png, write_batch

from odcluster.data.sources import open_source
from odcluster.errors import ImageRefused

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
