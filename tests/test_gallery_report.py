"""`odcluster report`: one file that needs nothing else, for a run in any state, with any names, never half written."""

import base64
import csv
import io
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_runs import TINY, make_images

import odcluster.gallery_report
from odcluster import train
from odcluster.errors import DataError, UserError
from odcluster.explore.collection import open_collection
from odcluster.explore.curation import open_curation
from odcluster.explore.report import render
from odcluster.gallery_report import find_oddities, report

NASTY = ["<script>alert(1)<\"x'>&.png", "new\nline\x1b[31m.png", os.fsdecode(b"caf\xe9.png"), "=1+1.png"]


class Page(HTMLParser):
    """Tags that are opened are closed; what it loads and what it shows are kept."""

    VOID = ("meta", "img", "br", "input", "line", "polyline", "polygon", "circle", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & {*self.open}:
            self.text += data

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and all(a.get(key) == value for key, value in wanted.items())]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 images: stripes, four of their own kind, and copies of these under nasty names."""
    folder = make_images(tmp_path_factory.mktemp("data") / "photos", 82, side=24)
    random = np.random.default_rng(0)
    for at, name in enumerate(NASTY):
        blobs = Image.fromarray(random.integers(0, 255, (7, 7, 3)).astype(np.uint8)).resize((40, 40))
        blobs.save(folder / f"blobs{at}.png")
        shutil.copy(folder / f"blobs{at}.png", folder / name)
    return folder


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    return train(images, out=path, quiet=True, **{**TINY, "epochs": 2})


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of one's own."""
    return Path(shutil.copytree(finished, tmp_path / "tiny"))


def test_the_report_needs_nothing_but_itself(run: Path, images: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in images.iterdir()}
    open_curation(run).add(
        "name", {"cluster": 2, "name": "<b>\"stripes'</b>", "expected": ""}, num_images=90, num_clusters=6
    )
    path = report(run, quiet=True)
    assert path == run / "report.html"
    text = path.read_text()
    page = Page(text)
    assert len(page.all("article", **{"class": "card"})) == 6
    assert len(page.all("script")) == 1
    assert [a for _, a in page.tags if any(key.startswith("on") for key in a)] == []
    addresses = [value for _, a in page.tags for key, value in a.items() if key in ("src", "href")]
    assert addresses
    assert all(value.startswith(("data:image/", "#")) for value in addresses)
    targets = {a.get("id") for _, a in page.tags}
    assert {value[1:] for value in addresses if value.startswith("#")} <= targets
    assert not re.search(r"https?://|@import|url\(", text)
    for picture in page.all("img")[:20]:
        Image.open(io.BytesIO(base64.b64decode(picture["src"].split("base64,")[1]))).load()
    assert "<b>\"stripes'</b>" in page.text
    assert len(page.all("svg")) >= 4
    for secret in (str(images.parent), str(run.parent), os.path.expanduser("~")):
        assert secret not in text
    assert {path.name: path.stat().st_mtime_ns for path in images.iterdir()} == before
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_duplicates_and_outliers_are_in_tables_with_the_very_names(run: Path) -> None:
    text = report(run, run.parent / "other.html", quiet=True).read_text()
    assert not (run / "report.html").exists()
    with open(run / "duplicates.csv", encoding="utf-8", errors="surrogateescape", newline="") as file:
        lines = list(csv.DictReader(file))
    groups: dict[str, set[str]] = {}
    for line in lines:
        groups.setdefault(line["group"], set()).add(line["path"].removeprefix("'"))
    for at, name in enumerate(NASTY):
        assert any({f"blobs{at}.png", name} == group for group in groups.values())
    assert "new\ufffdline\ufffd[31m.png" in Page(text).text
    assert (run / "outliers.csv").read_text().startswith("path,cluster,score\n")


def test_a_small_limit_is_kept_and_what_is_left_out_is_said(run: Path) -> None:
    collection = open_collection(run)
    oddities = find_oddities(collection, lambda *progress: None)
    full = render(collection, oddities)
    small = render(collection, oddities, most_bytes=480_000)
    assert len(small) < 480_000
    assert len(full) < 15_000_000
    Page(small)
    tiny = Page(render(collection, oddities, most_bytes=410_000))
    assert "grey squares stand for them" in tiny.text


def test_images_that_are_gone_are_grey_squares(run: Path, images: Path) -> None:
    manifest = (run / "manifest.csv").read_bytes().decode("utf-8", "surrogateescape")
    moved = manifest.replace(str(images), str(images.parent / "nowhere"))
    (run / "manifest.csv").write_bytes(moved.encode("utf-8", "surrogateescape"))
    page = Page(report(run, quiet=True).read_text())
    assert page.all("img") == []
    assert len(page.all("article", **{"class": "card"})) == 6
    assert "could not be read" in page.text
    assert "Not looked for" in page.text
    assert str(images.parent) not in (run / "report.html").read_text()


def test_a_run_that_has_only_begun_has_a_report(run: Path) -> None:
    for name in ("checkpoints", "backbone"):
        shutil.rmtree(run / name)
    for name in ("clusters.csv", "metrics.jsonl"):
        (run / name).unlink()
    page = Page(report(run, quiet=True).read_text())
    assert "The run has no clusters yet." in page.text
    assert "No step has been recorded yet." in page.text


def test_a_run_in_the_middle_of_training_has_a_report(images: Path, tmp_path: Path) -> None:
    """Only a checkpoint: no clusters.csv, no backbone."""
    options = {key: TINY[key] for key in ("backbone", "image_size", "crop_size", "batch_size", "workers")}
    path = train(images, out=tmp_path / "rotation", method="rotation", quiet=True, epochs=1, **options)
    shutil.rmtree(path / "backbone")
    page = Page(report(path, quiet=True).read_text())
    assert "k-means of its features" in page.text
    assert "Rotation:" in page.text


def test_a_report_that_fails_leaves_the_old_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "report.html").write_text("old")

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full_disk)
        with pytest.raises(UserError, match="No space left"):
            report(run, quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr(odcluster.gallery_report, "render", full_disk)
        with pytest.raises(OSError, match="No space"):
            report(run, quiet=True)
    assert (run / "report.html").read_text() == "old"
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_places_that_cannot_be_are_refused_before_the_work(finished: Path, images: Path, tmp_path: Path) -> None:
    for out, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x.html", "no folder"),
        (images / "x.html", "among the images"),
    ):
        with pytest.raises(UserError, match=words):
            report(finished, out, quiet=True)
    with pytest.raises(DataError, match="no run directory"):
        report(tmp_path / "nothing", quiet=True)
    assert not (finished / "duplicates.csv").exists()
