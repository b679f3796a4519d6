"""Annotations say of every image what the data set's own files say, in the order of the manifest."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odcluster.data.annotations import Annotations, annotations_of, read_multilabel_csv
from odcluster.data.sources import open_source
from odcluster.errors import DataError


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    return folder


def of(data: Path, split: str | None = None) -> Annotations:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about repeated rows of a list of single labels
        return annotations_of(open_source(data, split), split, str(data))


def message(data: Path, split: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        of(data, split)
    text = str(caught.value)
    assert "\n" not in text
    assert ";" in text, "a remedy follows the problem"
    return text


# --- VOC --------------------------------------------------------------------------------------------


def make_voc(root: Path, num: int = 30, seed: int = 0) -> tuple[Path, dict[str, dict[str, int]]]:
    """A small VOC in which every value occurs, lists in an order of their own; and what they say."""
    rng = np.random.default_rng(seed)
    voc = root / "VOC2007"
    names = [f"{number:06d}" for number in range(1, num + 1)]
    fill(voc / "JPEGImages", *(f"{name}.jpg" for name in names))
    lists = voc / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    truth: dict[str, dict[str, int]] = {}
    for split, part in (("trainval", names[: num // 2]), ("train", names[: num // 4]), ("test", names[num // 2 :])):
        (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in part))
        for kind in ("tvmonitor", "cat", "aeroplane"):
            listed = {name: int(rng.choice([1, -1, -1, 0])) for name in part}
            order = rng.permutation(part)
            (lists / f"{kind}_{split}.txt").write_text("".join(f"{name} {listed[name]:2d}\n" for name in order))
            truth[f"{kind}_{split}"] = listed
    return voc, truth


@pytest.mark.parametrize("split", [None, "trainval", "train", "test"])
def test_voc_says_what_the_lists_say(split: str | None, tmp_path: Path) -> None:
    voc, truth = make_voc(tmp_path)
    source = open_source(voc, split)
    found = annotations_of(source, split, str(voc))
    assert found.class_names == ["aeroplane", "cat", "tvmonitor"]
    assert found.values.dtype == np.int8
    assert found.known.all()
    assert set(np.unique(found.values)) == {-1, 0, 1}
    for row, path in enumerate(source.manifest.paths):
        name = Path(path).stem
        expected = [truth[f"{kind}_{split or 'trainval'}"][name] for kind in found.class_names]
        assert found.values[row].tolist() == expected


def test_a_voc_image_missing_from_a_class_list_is_counted_and_named(tmp_path: Path) -> None:
    voc, _ = make_voc(tmp_path)
    path = voc / "ImageSets" / "Main" / "cat_train.txt"
    kept = [line for line in path.read_text().splitlines() if line[:6] not in ("000002", "000005")]
    path.write_text("\n".join(kept))
    text = message(voc, "train")
    for part in ("2 of the 7 images", "cat_train.txt", "000002, 000005"):
        assert part in text
    assert of(voc, "trainval").known.all(), "other splits are not affected"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("000001 2\n", "line 1"),
        ("000001\n", "line 1"),
        ("000001 1\n\n000001 -1\n", "line 3 contradicts"),
        ("000001 1 1\n", "line 1"),
        (b"\xff\xfe 1", "decode"),
    ],
)
def test_a_voc_list_of_another_kind_is_refused(content: str | bytes, part: str, tmp_path: Path) -> None:
    voc, _ = make_voc(tmp_path)
    source = open_source(voc, "train")
    path = voc / "ImageSets" / "Main" / "cat_train.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=part) as caught:
        annotations_of(source, "train", str(voc))
    assert "cat_train.txt" in str(caught.value)


def test_voc_without_class_lists_says_so(tmp_path: Path) -> None:
    voc, _ = make_voc(tmp_path)
    for path in (voc / "ImageSets" / "Main").glob("*_test.txt"):
        path.unlink()
    assert "cat_test.txt" in message(voc, "test")


# --- One label per image ----------------------------------------------------------------------------


def test_a_class_tree_is_one_against_the_rest(tmp_path: Path) -> None:
    fill(tmp_path, "b/1.png", "a/2.png", "b/3.png", "c/4.png")
    source = open_source(tmp_path)
    found = annotations_of(source, None, str(tmp_path))
    assert found.class_names == ["a", "b", "c"]
    assert found.values.dtype == np.int8
    for row, path in enumerate(source.manifest.paths):
        assert found.values[row].tolist() == [1 if path[0] == name else -1 for name in "abc"]
    assert found.known.all()


def test_unknown_labels_are_marked_and_numbers_serve_as_names(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png", "c.png", "d.png")
    (tmp_path / "l.txt").write_text("a.png\t7\nb.png\nc.png\t-1\nd.png\t1000000000000\n")
    found = of(tmp_path / "l.txt")
    assert found.class_names == ["7", "1000000000000"]
    assert found.known.tolist() == [True, False, False, True]
    assert found.values.tolist() == [[1, -1], [-1, -1], [-1, -1], [-1, 1]]


def test_arrays_with_labels_in_memory_and_in_a_file(tmp_path: Path) -> None:
    digits = annotations_of(open_source("digits"), None, "digits")
    assert digits.class_names == [str(number) for number in range(10)]
    assert ((digits.values == 1).sum(axis=1) == 1).all()
    labels = open_source("digits").manifest.labels
    assert labels is not None
    assert np.array_equal(digits.values.argmax(axis=1), labels)
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 8, 8), np.uint8), labels=np.array([1, 0, 1]))
    assert of(tmp_path / "x.npz").values.tolist() == [[-1, 1], [1, -1], [-1, 1]]


def test_no_labels_at_all_is_one_sentence(tmp_path: Path) -> None:
    assert "no labels" in message(fill(tmp_path / "flat", "a.png", "b.png"))
    fill(tmp_path, "a.png")
    (tmp_path / "l.txt").write_text("a.png\t-1\n")
    assert "no labels" in message(tmp_path / "l.txt")
    array = np.zeros((2, 8, 8), np.uint8)
    with pytest.raises(DataError, match="the array"):
        annotations_of(open_source(array), None, array)


# --- CSV --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "path,labels\nb.png,dog;cat\n./a.png, cat \nc.png,\nd.png,fish\n",
        "File,label,label2\nb.png,cat,dog\na.png,cat,\nc.png,,\nd.png,,fish\n",
        "id,class,filename\n1,cat,b.png\n2,dog,sub/../b.png\n3,cat,a.png\n4,,c.png\n5,fish,d.png\n",
        "\ufeffimage,classes,weight\nb.png,dog|cat,3\n\na.png,cat;,2\nc.png,|,1\nd.png,fish,\n",
    ],
)
def test_all_ways_to_name_several_labels_mean_the_same(text: str, tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png", "c.png", "d.png")
    (tmp_path / "l.csv").write_text(text)
    found = of(tmp_path / "l.csv")
    assert found.class_names == ["cat", "dog", "fish"]
    assert found.values.tolist() == [[1, -1, -1], [1, 1, -1], [-1, -1, -1], [-1, -1, 1]]
    assert found.known.tolist() == [True, True, False, True]


def test_numbered_labels_are_in_the_order_of_numbers_and_negative_is_unknown(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "l.csv").write_text("path,labels\na.png,10;9\nb.png,09\nc.png,-1\n")
    found = of(tmp_path / "l.csv")
    assert found.class_names == ["9", "10"]
    assert found.values.tolist() == [[1, 1], [1, -1], [-1, -1]]
    assert found.known.tolist() == [True, True, False]


def test_a_single_label_csv_agrees_with_the_manifest(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "l.csv").write_text("path,label\nc.png,dog\nb.png,\na.png,cat\n")
    manifest = open_source(tmp_path / "l.csv").manifest
    found = of(tmp_path / "l.csv")
    assert found.class_names == manifest.class_names
    assert manifest.labels is not None
    assert np.array_equal(np.where(found.known, found.values.argmax(axis=1), -1), manifest.labels)


def test_indicator_columns(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png", "x/c.png")
    (tmp_path / "l.csv").write_text('Path,Dog,"cat, small",fish\nx//c.png,1,0,?\na.png,0,,1\nb.png,,,\na.png,0,0,1\n')
    found = of(tmp_path / "l.csv")
    assert found.class_names == ["Dog", "cat, small", "fish"]
    assert found.values.tolist() == [[-1, -1, 1], [-1, -1, -1], [1, -1, 0]]
    assert found.known.all(), "all absent is knowledge too"


def test_any_indicators_survive_a_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(-1, 2, (40, 7)).astype(np.int8)
    order = rng.permutation(40)
    with open(tmp_path / "l.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"k{k}" for k in range(7)), "path"])
        for row in order:
            writer.writerow([*({1: "1", -1: "0", 0: "?"}[int(v)] for v in values[row]), f"{row:02d}.png"])
    fill(tmp_path, *(f"{row:02d}.png" for row in range(40)))
    assert np.array_equal(of(tmp_path / "l.csv").values, values)
    paths, read = read_multilabel_csv(str(tmp_path / "l.csv"))
    assert paths == [f"{row:02d}.png" for row in order]
    assert np.array_equal(read.values, values[order])


def test_files_that_do_not_exist_are_left_out_as_in_the_manifest(tmp_path: Path) -> None:
    fill(tmp_path, "b.png", "d.png")
    (tmp_path / "l.csv").write_text("path,labels\na.png,x\nd.png,y\nb.png,x;y\n")
    assert of(tmp_path / "l.csv").values.tolist() == [[1, 1], [-1, 1]]
    (tmp_path / "l.csv").write_text("path,labels\na.png,x\nd.png,\n")
    assert "that exists" in message(tmp_path / "l.csv")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name,dog\na.png,1\n", "`path`"),
        ("", "`path`"),
        ("path\na.png\n", "`labels`"),
        ("path,dog,\na.png,1,0\n", "name of its own"),
        ("path,dog,dog\na.png,1,0\n", "name of its own"),
        ("path,dog\na.png,2\n", "Row 2"),
        ("path,dog\n\na.png,-1\n", "has -1 under dog"),
        ("path,dog\na.png,yes\n", "has yes under dog"),
        ("path,dog,cat\na.png,1\n", "has 2 cells"),
        ("path,labels\na.png,dog,cat\n", "has 3 cells"),
        ("path,dog\na.png,1\n./a.png,0\n", "Row 3 of"),
        ("path,labels\na.png,\n", "No image"),
        ("path,labels\na.png,-1\n", "No image"),
        ("path,dog\n,1\n", "no images"),
        ("path,dog\n", "no images"),
    ],
)
def test_bad_csv_files_are_one_sentence(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        read_multilabel_csv(str(tmp_path / "l.csv"))
    assert part in str(caught.value)
    assert "l.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_csv_that_changed_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    fill(tmp_path, "a.png", "b.png")
    (tmp_path / "l.csv").write_text("path,dog\na.png,1\nb.png,0\n")
    source = open_source(tmp_path / "l.csv")
    (tmp_path / "l.csv").write_text("path,dog\na.png,1\n")
    with pytest.raises(DataError, match=r"no longer lists 1 of 2 images \(b.png\)"):
        annotations_of(source, None, tmp_path / "l.csv")
    (tmp_path / "l.csv").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        annotations_of(source, None, str(tmp_path / "l.csv"))
