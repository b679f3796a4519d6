"""Exports hold the curated clusters, can be read by those they are for, and never leave their place."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import TINY, make_images

import odcluster
from odcluster.errors import DataError, UserError
from odcluster.explore.collection import open_collection
from odcluster.explore.curation import open_curation
from odcluster.explore.export import unguard
from odcluster.explore.exporters import EXPORTERS, Job
from odcluster.explore.folders import MOST_BYTES, file_name, folder_names, new_folder, safe_name, unique_titles
from odcluster.explore.network_export import export_onnx, export_timm
from odcluster.explore.tables import open_table
from odcluster.models.backbones import create_backbone
from odcluster.models.weights import export_backbone, load_backbone

NASTY = ["=1+1.png", "<script>alert(1)<.png", "a\nb.png", "\x1b[31mred.png", 'say "hi", you.png', "caf\udce9.png"]
SHORT = {**TINY, "epochs": 2, "warm_share": 0.5}


def no_progress(activity: str, done: int, total: int) -> None:
    return None


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """60 images, some in a folder below with the same names, some with names that want to do harm."""
    root = tmp_path_factory.mktemp("photos")
    make_images(root / "a", 30)
    make_images(root / "b" / "deep", 24, seed=1)
    for name, original in zip(NASTY, sorted((root / "a").iterdir()), strict=False):
        shutil.copy(original, root / name)
    return root


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory) -> Path:
    return odcluster.train(photos, out=tmp_path_factory.mktemp("runs") / "run", quiet=True, **SHORT)


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A run of one's own, to edit."""
    return shutil.copytree(trained, tmp_path / "run")


def edit(run: Path, action: str, **given: object) -> None:
    open_curation(run).add(action, given, num_images=60, num_clusters=6)


def export(run: Path, to: str, out: Path, mode: str = "copy", replace: bool = False) -> list[str]:
    collection = open_collection(run, compute_features=False)
    return EXPORTERS[to](Job(collection, out, mode, no_progress, replace=replace))


def snapshot(folder: Path) -> dict[str, str]:
    """Every file with its content and its inode."""
    return {
        os.fsencode(path).decode(
            "latin-1"
        ): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


# --- Names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cats", "cats"),
        ("../../etc", "etc"),
        ("/etc/passwd", "etc-passwd"),
        ("C:\\Windows", "C--Windows"),
        ("..", ""),
        (". . .", ""),
        ("con", "_con"),
        ("NUL.txt", "_NUL.txt"),
        ("Com7", "_Com7"),
        ("-rf", "rf"),
        ("a\x00b\x1b[31m", "a-b-[31m"),
        ("dots...", "dots"),
        ("Kätzchen 猫", "Kätzchen 猫"),
        ("lone \udce9", "lone"),
    ],
)
def test_a_cluster_may_be_called_anything(text, name):
    assert safe_name(text) == name


def test_long_names_are_cut_between_letters():
    name = safe_name("猫" * 500)
    assert len(name.encode()) <= MOST_BYTES
    assert set(name) == {"猫"}


def test_no_two_folders_are_alike_even_where_case_does_not_count():
    called = {0: "cats", 1: "Cats", 2: "cluster-0003", 3: "", 4: "cats (1)", 5: "a/b", 6: "a:b"}
    names = folder_names(sorted(called), called.__getitem__)
    assert len({name.casefold() for name in names.values()}) == len(called)
    assert names[0] == "cats"
    assert names[3].startswith("cluster-0003")
    assert unique_titles([0, 1], lambda cluster: "", "cluster {}") == {0: "cluster 0", 1: "cluster 1"}


def test_files_of_the_same_name_are_told_apart(photos):
    manifest = odcluster.data.sources.open_source(photos).manifest
    taken: set[str] = set()
    names = [file_name(manifest, image, taken, is_file=True) for image in range(len(manifest))]
    assert len({name.casefold() for name in names}) == len(manifest)
    assert all("/" not in name and name not in ("", ".", "..") for name in names)


# --- Tables -----------------------------------------------------------------------------------------


def test_csv_has_the_curated_clusters_and_every_name_as_it_is(run, photos, tmp_path):
    export(run, "csv", tmp_path / "before.csv")
    before = rows_of(tmp_path / "before.csv")
    labels = [int(row["cluster"]) for row in before]
    first, second = sorted(set(labels))[:2]
    edit(run, "merge", clusters=[first, second])
    edit(run, "name", cluster=first, name="=HYPERLINK(1)", expected="")
    edit(run, "exclude", images=[5])
    edit(run, "move", images=[7, 8], to="new")
    export(run, "csv", tmp_path / "after.csv")
    after = rows_of(tmp_path / "after.csv")
    expected = [first if label == second else label for label in labels]
    expected[5], expected[7], expected[8] = -1, 6, 6
    assert [int(row["cluster"]) for row in after] == expected
    assert {row["name"] for row in after if int(row["cluster"]) == first} == {"'=HYPERLINK(1)"}
    assert (after[5]["similarity"], after[5]["rank"]) == ("", "")
    manifest = odcluster.data.sources.open_source(photos).manifest
    assert [unguard(row["path"]) for row in after] == manifest.paths
    assert sorted(int(row["rank"]) for row in after if int(row["cluster"]) == 6) == [1, 2]


def test_parquet_has_the_same_and_the_features(run, tmp_path):
    import pyarrow.parquet

    edit(run, "name", cluster=0, name="zero", expected="")
    export(run, "parquet", tmp_path / "clusters.parquet")
    export(run, "csv", tmp_path / "clusters.csv")
    table = pyarrow.parquet.read_table(tmp_path / "clusters.parquet").to_pydict()
    rows = rows_of(tmp_path / "clusters.csv")
    assert table["cluster"] == [int(row["cluster"]) for row in rows]
    assert table["name"] == [row["name"] for row in rows]
    assert "caf\\xe9.png" in table["path"]
    vectors = np.array(table["vector"])
    assert vectors.shape == (60, TINY["dim"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.var(table["projection_x"]) >= np.var(table["projection_y"]) > 0


def test_a_table_that_fails_halfway_leaves_the_old_one(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(AttributeError), open_table(path, {"name": "text"}) as table:
        table.write(name=["new", 5])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"odcluster\[parquet\]"), open_table(tmp_path / "a.parquet", {"name": "text"}):
        pass


# --- Folders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_folders_hold_every_image_once_and_the_originals_are_untouched(run, photos, tmp_path, mode):
    labels = open_collection(run, compute_features=False).view().clusters.labels
    largest = int(np.bincount(labels).argmax())
    edit(run, "name", cluster=largest, name="../../../escape", expected="")
    edit(run, "exclude", images=[0])
    before, around = snapshot(photos), set(tmp_path.iterdir())
    said = export(run, "folders", tmp_path / "out", mode)
    assert snapshot(photos) == before
    assert set(tmp_path.iterdir()) == around | {tmp_path / "out"}
    assert (tmp_path / "out" / "escape").is_dir()
    made = [path for path in (tmp_path / "out").rglob("*") if not path.is_dir()]
    assert len(made) == 59
    assert {len(path.relative_to(tmp_path / "out").parts) for path in made} == {2}
    assert "59 images" in said[0]
    manifest = odcluster.data.sources.open_source(photos).manifest
    contents = sorted(hashlib.sha256((photos / path).read_bytes()).hexdigest() for path in manifest.paths[1:])
    assert sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in made) == contents
    assert {path.is_symlink() for path in made} == {mode == "symlink"}
    if mode == "hardlink":
        assert all(path.stat().st_nlink > 1 for path in made)


def test_missing_originals_are_counted_and_if_all_are_gone_nothing_is_made(photos, trained, tmp_path):
    moved = shutil.copytree(photos, tmp_path / "moved")
    run = odcluster.train(moved, out=tmp_path / "run", quiet=True, **{**SHORT, "max_steps": 1})
    (moved / "a" / "image0003.png").unlink()
    assert "1 images could not be read" in export(run, "folders", tmp_path / "out")[-1]
    shutil.rmtree(moved)
    with pytest.raises(DataError, match="none of the images"):
        export(run, "folders", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_with_something_in_it_is_not_touched(tmp_path):
    place = tmp_path / "mine"
    place.mkdir()
    (place / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"), new_folder(place):
        pass
    with new_folder(place, replace=True) as folder:
        (folder / "new.txt").write_text("new")
    assert [path.name for path in place.iterdir()] == ["new.txt"]
    with pytest.raises(RuntimeError), new_folder(place, replace=True):
        raise RuntimeError
    assert [path.name for path in place.iterdir()] == ["new.txt"]
    assert list(tmp_path.iterdir()) == [place]


# --- Arrays: images that are no files ---------------------------------------------------------------


@pytest.fixture(scope="module")
def array_run(photos, tmp_path_factory) -> tuple[Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("arrays")
    images = np.stack([np.asarray(Image.open(path)) for path in sorted((photos / "a").iterdir())])
    np.save(folder / "images.npy", images)
    options = {**SHORT, "clusters": 3, "max_steps": 1}
    return odcluster.train(folder / "images.npy", out=folder / "run", quiet=True, **options), images


def test_images_of_an_array_become_png_files(array_run, tmp_path):
    run, images = array_run
    export(run, "folders", tmp_path / "out")
    made = sorted((tmp_path / "out").rglob("*.png"), key=lambda path: path.name)
    assert [path.name for path in made] == [f"images.npy-{number:08d}.png" for number in range(len(images))]
    assert all(np.array_equal(np.asarray(Image.open(path)), image) for path, image in zip(made, images, strict=True))


# --- JSON and TensorBoard ---------------------------------------------------------------------------


def test_coco_json_is_consistent(run, photos, tmp_path):
    edit(run, "name", cluster=0, name="zero", expected="")
    export(run, "coco", tmp_path / "coco")
    labels = open_collection(run, compute_features=False).view().clusters.labels
    coco = json.loads((tmp_path / "coco" / "labels.json").read_text())
    categories = {entry["id"]: entry for entry in coco["categories"]}
    assert min(categories) > 0
    assert len({entry["name"] for entry in coco["categories"]}) == len(categories)
    assert [entry["id"] for entry in coco["images"]] == [entry["image_id"] for entry in coco["annotations"]]
    for image, annotation in zip(coco["images"], coco["annotations"], strict=True):
        with Image.open(os.path.join(photos, image["file_name"])) as picture:
            assert picture.size == (image["width"], image["height"])
        assert annotation["bbox"] == [0, 0, image["width"], image["height"]]
        assert categories[annotation["category_id"]]["cluster"] == labels[image["id"]]
    assert len({entry["id"] for entry in coco["annotations"]}) == 60


def test_fiftyone_finds_every_image_under_its_key(run, photos, array_run, tmp_path):
    export(run, "fiftyone", tmp_path / "files")
    content = json.loads((tmp_path / "files" / "labels.json").read_text())
    where = json.loads((tmp_path / "files" / "data.json").read_text())
    assert content["labels"].keys() == where.keys()
    assert all(os.path.isfile(path) and os.path.isabs(path) for path in where.values())
    assert all("." not in key for key in where)  # FiftyOne would cut an ending off
    assert set(content["labels"].values()) == set(range(len(content["classes"])))
    export(array_run[0], "fiftyone", tmp_path / "array")
    keys = json.loads((tmp_path / "array" / "labels.json").read_text())["labels"]
    assert {path.stem for path in (tmp_path / "array" / "data").iterdir()} == set(keys)


def test_the_projector_gets_a_vector_a_line_and_a_picture_for_every_image(run, tmp_path):
    export(run, "projector", tmp_path / "out")
    vectors = np.loadtxt(tmp_path / "out" / "vectors.tsv", delimiter="\t")
    assert vectors.shape == (60, TINY["dim"])
    lines = (tmp_path / "out" / "metadata.tsv").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 62
    assert {line.count("\t") for line in lines[:-1]} == {2}
    assert not any("\x1b" in line for line in lines)
    with Image.open(tmp_path / "out" / "sprite.png") as sprite:
        assert sprite.size == (8 * 64, 8 * 64)  # 60 in 8 rows of 8
        colours = np.asarray(sprite)
    assert (colours[-64:, -64:] == 127).all()  # no image there
    assert colours[-64:, :64].std() > 0
    config = (tmp_path / "out" / "projector_config.pbtxt").read_text()
    assert config.count("single_image_dim: 64") == 2
    assert 'tensor_path: "vectors.tsv"' in config


# --- Networks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("resnet18", 32), ("vit_tiny_patch16_224", 32)])
def test_plain_timm_loads_what_was_exported_by_the_lines_of_the_readme(name, size, tmp_path, monkeypatch):
    backbone = create_backbone(name, image_size=size).eval()
    export_backbone(backbone, tmp_path / "backbone", provenance={"seed": 1})
    export_timm(tmp_path / "backbone", tmp_path / "timm")
    code = (tmp_path / "timm" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "timm")
    made: dict[str, object] = {}
    exec(code, made)
    image = torch.rand(2, 3, size, size)
    with torch.no_grad():
        assert torch.equal(made["backbone"](image), backbone(image))
    assert made["features"].shape == (1, backbone.num_features)
    assert load_backbone(tmp_path / "timm").name == name


def test_own_networks_are_not_timms(trained, tmp_path):
    with pytest.raises(UserError, match=r"load_backbone.*--to onnx"):
        export_timm(trained, tmp_path / "timm")
    assert not (tmp_path / "timm").exists()


def test_onnx_gives_the_features_of_torch_for_any_batch(tmp_path):
    import onnxruntime

    backbone = create_backbone("smallconv", image_size=8, in_channels=2).eval()  # with a Sobel filter in front
    export_backbone(backbone, tmp_path / "backbone", provenance={})
    said = export_onnx(tmp_path / "backbone", tmp_path / "model.onnx")
    assert "differs from torch by at most" in said[-1]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_inputs()[0].shape == ["batch", 3, 8, 8]
    images = torch.rand(7, 3, 8, 8)
    (found,) = session.run(None, {"images": images.numpy()})
    mean, std = (torch.tensor(values)[:, None, None] for values in (backbone.mean, backbone.std))
    with torch.no_grad():
        expected = odcluster.models.sobel.represent(backbone)((images - mean) / std).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".onnx" or path.name.startswith(".")] == [
        "model.onnx"
    ]
