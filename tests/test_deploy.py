"""assign, embed and export as verbs: what they write, where, and what they say when something is wrong."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import TINY, make_images

import odcluster
from odcluster import cli
from odcluster.data.sources import open_source
from odcluster.errors import DataError, UserError
from odcluster.evaluation.features import evaluation_loader
from odcluster.explore.curation import open_curation
from odcluster.explore.export import unguard
from odcluster.models.weights import load_backbone
from odcluster.training.survey import extract

SHORT = {**TINY, "epochs": 2, "warm_share": 0.5}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(image_folder, tmp_path_factory) -> Path:
    return odcluster.train(image_folder, out=tmp_path_factory.mktemp("runs") / "run", quiet=True, **SHORT)


def verb(capsys, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return int(ended.value.code or 0), capsys.readouterr().err


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def new_images(tmp_path) -> Path:
    folder = make_images(tmp_path / "new", 9, seed=5)
    (folder / "image0002.png").write_bytes(b"broken")
    (folder / "image0004.png").rename(folder / "=cmd\x1b[31m.png")
    (folder / "image0005.png").rename(folder / "caf\udce9\n.png")
    return folder


def expected_features(run: Path, data: Path) -> np.ndarray:
    backbone, source = load_backbone(run), open_source(data)
    with evaluation_loader(source, backbone, 0, CPU) as loader:
        return extract(backbone, loader, np.arange(len(source)), CPU, lambda raw, done: None)[0].numpy()


# --- assign -----------------------------------------------------------------------------------------


def test_assign_writes_a_row_for_every_image_and_names_the_unreadable(capsys, run, new_images, tmp_path):
    code, errors = verb(capsys, "assign", str(run), str(new_images), "--out", str(tmp_path / "out.csv"))
    assert code == 0, errors
    rows = rows_of(tmp_path / "out.csv")
    assert [unguard(row["path"]) for row in rows] == open_source(new_images).manifest.paths
    assert list(rows[0]) == ["path", "cluster", "name", "confidence", "distance"]
    broken = next(row for row in rows if row["path"] == "image0002.png")
    assert list(broken.values()) == ["image0002.png", "-1", "", "", ""]
    others = [row for row in rows if row is not broken]
    assert all(0 <= int(row["cluster"]) < 6 for row in others)
    assert all(1 / 6 < float(row["confidence"]) <= 1 and 0 <= float(row["distance"]) <= 2 for row in others)
    assert "image0002.png: " in errors
    assert "1 of 9 images could not be read" in errors
    assert "\x1b" not in errors


def test_assign_writes_into_the_run_by_default_and_parquet_on_request(run, new_images, tmp_path):
    import pyarrow.parquet

    usual = odcluster.assign(run, new_images, quiet=True, workers=0)
    assert usual == run / "assigned" / "new.csv"
    other = odcluster.assign(run, new_images, quiet=True, workers=0, out=str(tmp_path / "sub" / "new.parquet"))
    table = pyarrow.parquet.read_table(other).to_pydict()
    assert table["cluster"] == [int(row["cluster"]) for row in rows_of(usual)]
    assert table["confidence"].count(None) == 1
    assert "caf\\xe9\n.png" in table["path"]


def test_names_that_people_gave_are_in_the_table(run, new_images, tmp_path):
    curation = open_curation(run)
    before = rows_of(odcluster.assign(run, new_images, quiet=True, workers=0))
    cluster = int(before[0]["cluster"])
    curation.add("name", {"cluster": cluster, "name": "stripes", "expected": ""}, num_images=97, num_clusters=6)
    try:
        after = rows_of(odcluster.assign(run, new_images, quiet=True, workers=0))
    finally:
        curation.undo()
        curation.close()
    assert {row["name"] for row in after if int(row["cluster"]) == cluster} == {"stripes"}
    assert {row["name"] for row in after if int(row["cluster"]) != cluster} <= {""}


def test_an_array_in_memory_can_be_assigned(run, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, 20, 20, 3), np.uint8)
    out = odcluster.assign(run, images, quiet=True, workers=0)
    assert out.name == "array.csv"
    assert len(rows_of(out)) == 5


def test_ctrl_c_leaves_nothing_half_written(run, tmp_path):
    folder = make_images(tmp_path / "many", 8)
    for number in range(5000):
        os.link(folder / f"image{number % 8:04d}.png", folder / f"copy{number:05d}.png")
    words = ["assign", str(run), str(folder), "--batch-size", "1", "--workers", "0", "--out", str(tmp_path / "t.csv")]
    process = subprocess.Popen([sys.executable, "-m", "odcluster", *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".t.csv.*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many"]


# --- embed ------------------------------------------------------------------------------------------


def test_embed_gives_the_backbones_features_and_the_images_they_are_of(run, new_images, tmp_path):
    out = odcluster.embed(run, new_images, quiet=True, workers=0, out=str(tmp_path / "f.npy"))
    features = np.load(out, allow_pickle=False)
    np.testing.assert_allclose(features, expected_features(run, new_images), atol=1e-4)
    listed = rows_of(tmp_path / "f.images.csv")
    assert [unguard(row["path"]) for row in listed] == open_source(new_images).manifest.paths
    broken = next(at for at, row in enumerate(listed) if row["path"] == "image0002.png")
    assert listed[broken]["reason"] != ""
    assert not features[broken].any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.images.csv", "f.npy", "new"]


def test_embed_goes_to_a_folder_of_its_own_question(run, new_images, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    one = odcluster.embed(run, new_images, quiet=True, workers=0)
    again = odcluster.embed(run, new_images, quiet=True, workers=0)
    other = odcluster.embed(run, new_images, quiet=True, workers=0, layer="conv2")
    bare = odcluster.embed("smallconv", new_images, quiet=True, workers=0, untrained=True, image_size=16)
    assert one == again != other
    assert one.parent == run / "embeddings"
    assert bare.parent == Path("embeddings")
    assert np.load(one / "features.npy", allow_pickle=False).shape[0] == 9
    assert (other / "conv2.npy").is_file()
    assert len(rows_of(bare / "images.csv")) == 9


def test_embed_of_weights_for_a_named_backbone(run, new_images, tmp_path):
    weights = str(run / "backbone" / "model.safetensors")
    one = odcluster.embed("smallconv", new_images, quiet=True, workers=0, weights=weights, out=str(tmp_path / "a.npy"))
    other = odcluster.embed(run, new_images, quiet=True, workers=0, out=str(tmp_path / "b.npy"))
    np.testing.assert_array_equal(np.load(one, allow_pickle=False), np.load(other, allow_pickle=False))


def test_parquet_has_what_embedding_atlas_reads(run, new_images, tmp_path):
    import io

    import pyarrow.parquet

    out = odcluster.embed(run, new_images, quiet=True, workers=0, out=str(tmp_path / "f.parquet"))
    table = pyarrow.parquet.read_table(out).to_pydict()
    assert len(table["id"]) == 8
    assert 2 not in [i for i, path in zip(table["id"], table["path"], strict=True) if path == "image0002.png"]
    np.testing.assert_allclose(np.array(table["vector"]), expected_features(run, new_images)[table["id"]], atol=1e-4)
    for picture in table["image"]:
        with Image.open(io.BytesIO(picture["bytes"])) as opened:
            assert (opened.format, opened.size) == ("JPEG", (20, 20))
    assert np.isfinite(table["projection_x"]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.parquet", "new"]


# --- Mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words", "says"),
    [
        (3, ["assign", "{tmp}/nowhere", "{new}"], "no run directory"),
        (2, ["assign", "{run}", "{new}", "--out", "{tmp}/table.txt"], ".parquet"),
        (2, ["assign", "{run}", "{new}", "--out", "{new}/table.csv"], "among the images"),
        (2, ["assign", "{run}", "{tmp}/list.csv", "--out", "{tmp}/list.csv"], "the data itself"),
        (2, ["assign", "{run}", "{new}", "--batch-size", "0"], "--batch-size"),
        (2, ["embed", "smallconv", "{new}"], "--untrained"),
        (2, ["embed", "smalconv", "{new}"], "smallconv"),
        (3, ["embed", "{tmp}/none.pth", "{new}"], "none.pth"),
        (2, ["embed", "{run}", "{new}", "--layer", "conv9"], "conv5"),
        (2, ["embed", "{run}", "{new}", "--weights", "timm"], "leave it out"),
        (2, ["embed", "{run}", "{new}", "--out", "{tmp}/full"], "not empty"),
        (2, ["embed", "{run}", "{new}", "--out", "{new}/f.npy"], "among the images"),
        (2, ["export", "{run}", "--to", "csv", "--out", "{tmp}/a.parquet"], ".csv"),
        (2, ["export", "{run}", "--to", "csv", "--mode", "symlink"], "--to folders"),
        (2, ["export", "{run}", "--to", "folders", "--out", "{images}/sorted"], "among the images"),
        (2, ["export", "{run}", "--to", "folders", "--out", "{tmp}/full"], "not empty"),
        (2, ["export", "{run}", "--to", "timm"], "--to onnx"),
        (2, ["export", "{run}", "--to", "onnx", "--out", "{tmp}/model"], ".onnx"),
    ],
)
def test_mistakes_get_one_sentence_and_write_nothing(
    code, words, says, capsys, run, image_folder, new_images, tmp_path
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.npy").write_text("mine")
    (tmp_path / "list.csv").write_text(f"path\n{new_images}/image0001.png\n")
    before = sorted(tmp_path.rglob("*")), sorted(run.rglob("*"))
    filled = [word.format(tmp=tmp_path, run=run, new=new_images, images=image_folder) for word in words]
    got, errors = verb(capsys, *filled)
    assert got == code, errors
    assert errors.count("odcluster: ") == 1
    assert "Traceback" not in errors
    assert says in errors
    assert (sorted(tmp_path.rglob("*")), sorted(run.rglob("*"))) == before


def test_a_run_on_an_array_in_memory_is_exported_with_the_array(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (40, 20, 20, 3), np.uint8)
    options = {**SHORT, "clusters": 3, "max_steps": 1}
    run = odcluster.train(images, out=tmp_path / "run", quiet=True, **options)
    assert len(rows_of(odcluster.export(run, to="csv", quiet=True))) == 40
    with pytest.raises(DataError, match="can be read"):
        odcluster.export(run, to="folders", quiet=True)
    with pytest.raises(DataError, match="array"):
        odcluster.export(run, to="folders", data=images[::-1], quiet=True)
    assert len(list(odcluster.export(run, to="folders", data=images, quiet=True).rglob("*.png"))) == 40
    with pytest.raises(UserError, match="no format"):
        odcluster.export(run, to="zip", quiet=True)
