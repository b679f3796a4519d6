"""Nothing that is read runs, nothing is asked of the network, nothing is written among the images, nothing is told."""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from every_verb import RESOLVING
from tiny_runs import TINY, make_images

import odcluster
from odcluster.data import readers
from odcluster.data.sources import open_source
from odcluster.errors import DataError, UserError
from odcluster.models.weights import load_backbone
from odcluster.training.run import open_run

PACKAGE = Path(odcluster.__file__).parent
HOME, SECRET = "home-of-anna-b7c1", "token-93cf5b1e"
NASTY = '=cmd|\' &<script>alert(1)<-script>\x1b[31m\n"quoted".png'


# --- The source -------------------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "telnetlib"}
FORBIDDEN_MODULES |= {"requests", "urllib.request", "http.client", "ftplib", "smtplib", "aiohttp", "httpx"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "commands.getoutput"}


def called(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{called(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(source: str) -> list[str]:
    """What in a source file could run what is read, or go to the network."""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [name for name in modules if name in FORBIDDEN_MODULES or name.partition(".")[0] in FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        name, given = called(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        values = {key: getattr(value, "value", None) for key, value in given.items()}
        if name in FORBIDDEN_CALLS or name.startswith(("os.exec", "os.spawn")):
            found.append(name)
        if name.endswith("load") and name.startswith("torch.") and values.get("weights_only") is not True:
            found.append(f"{name} without weights_only")
        if name in ("np.load", "numpy.load") and values.get("allow_pickle") is not False:
            found.append(f"{name} without allow_pickle=False")
        found += [key for key in ("shell", "allow_pickle", "trust_remote_code") if values.get(key) is True]
        if name.endswith("import_module") and not isinstance(node.args[0], ast.Constant):
            found.append(name)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from yaml import load",
        "import urllib.request as u",
        "eval('1')",
        "os.system('x')",
        "subprocess.run('x', shell=True)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "importlib.import_module(config['_target_'])",
    ],
)
def test_the_search_finds_what_it_looks_for(source):
    assert faults(source)


def test_no_source_file_can_run_what_it_reads_or_call_out():
    found = {
        os.fspath(path.relative_to(PACKAGE)): problems
        for path in sorted(PACKAGE.rglob("*.py"))
        if (problems := faults(path.read_text()))
    }
    # The names of the package's own functions, from a table in the same file, so that `import odcluster` is quick.
    assert found == {"__init__.py": ["importlib.import_module"]}


# --- Every verb, watched ----------------------------------------------------------------------------


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything about a folder but when it was last read."""
    return {
        os.fspath(path): (path.lstat().st_mtime_ns, path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """All verbs have run in a child whose home, temporary folder and secrets are known; returns its world."""
    world = tmp_path_factory.mktemp("world")
    home = world / HOME
    for number, name in enumerate(("stripes", "others")):
        make_images(home / "photos" / name, 40, seed=number)
    make_images(home / "more", 12, seed=7)
    (home / "photos" / "stripes" / "image0000.png").rename(home / "photos" / "stripes" / NASTY)
    (home / "photos" / "others" / "broken.jpg").write_bytes(b"<html>not a picture</html>")
    weights = odcluster.train(home / "more", out=world / "weights", quiet=True, **{**TINY, "clusters": 1, "epochs": 1})
    before = {name: state_of(home / name) for name in ("photos", "more")}
    for name in ("work", "temporary"):
        (world / name).mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": str(world / "temporary"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "MPLCONFIGDIR": str(world / "temporary" / "matplotlib"),
        "WANDB_API_KEY": SECRET,
        "HF_TOKEN": SECRET,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("every_verb.py")
    arguments = [str(world / "record"), str(home / "photos"), str(home / "more"), str(weights)]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=world / "work",
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("done\n")
    assert "\x1b[31m" not in done.stdout + done.stderr
    return world, before


def test_no_verb_opens_a_connection(watched):
    assert (watched[0] / "record").read_text() == ""


@pytest.mark.parametrize("attempt", ["socket.socket()", "socket.create_connection(('localhost', 9))"])
def test_the_watch_sees_connections(attempt, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import every_verb, socket\n"
    code += f"every_verb.watch({str(tmp_path / 'record')!r})\nsocket.socketpair()\n{attempt}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PermissionError" in done.stderr
    event = json.loads((tmp_path / "record").read_text())[0]
    assert event == "socket.__new__" or event in RESOLVING


def test_every_verb_leaves_the_images_as_they_were(watched):
    world, before = watched
    assert {name: state_of(world / HOME / name) for name in before} == before


def test_every_verb_writes_only_where_it_was_told(watched):
    world = watched[0]
    outputs = {"run", "frozen", "deepcluster", "rotation", "assigned.csv", "assigned.parquet", "embedded.npy"}
    outputs |= {"embedded.images.csv", "embedded.parquet", "folders-hardlink", "folders-symlink"}
    assert set(os.listdir(world / "work")) == outputs
    assert set(os.listdir(world / HOME)) <= {"photos", "more"}
    left = [path for path in (world / "temporary").rglob("*") if path.is_file() and "matplotlib" not in str(path)]
    assert left == []
    hidden = [path for path in (world / "work").rglob(".*") if path.is_file()]
    assert hidden == []


def passed_on(world: Path) -> list[Path]:
    """The files that people give to others. fiftyone's data.json must say where the images are, links must too."""
    run = world / "work" / "run"
    folders = [run / name for name in ("backbone", "evaluation", "export")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [path for path in run.iterdir() if path.suffix in (".html", ".png") or path.name in TABLES]
    files += [path for path in (world / "work").iterdir() if path.is_file()]
    return [path for path in files if path.name != "data.json"]


TABLES = {"clusters.csv", "duplicates.csv", "outliers.csv", "bad_images.csv"}


def test_what_is_passed_on_tells_nothing_of_the_machine(watched):
    """No part of the environment, no folder of the user, no name of the machine."""
    files = passed_on(watched[0])
    assert {"report.html", "model.safetensors", "README.md", "backbone.onnx", "clusters.csv"} <= {
        path.name for path in files
    }
    words = [HOME, SECRET, "site-packages", os.fspath(PACKAGE), os.fspath(Path(sys.prefix))]
    if len(socket.gethostname()) > 6:
        words.append(socket.gethostname())
    found = [(path.name, word) for path in files for word in words if word.encode() in path.read_bytes()]
    assert found == []


def test_checkpoints_hold_no_secret_and_no_path(watched):
    for path in (watched[0] / "work").glob("*/checkpoints/*/*"):
        content = path.read_bytes()
        assert SECRET.encode() not in content
        assert HOME.encode() not in content
    for path in (watched[0] / "work").glob("*/*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def test_names_cannot_do_harm_wherever_they_are_written(watched):
    run = watched[0] / "work" / "run"
    assert "<script>alert" not in (run / "report.html").read_text()
    assert "\x1b" not in (run / "report.html").read_text()
    for path in [*(run / name for name in TABLES), run / "export" / "clusters.csv"]:
        with open(path, newline="", errors="surrogateescape") as file:
            for row in csv.reader(file):
                assert not any(cell.lstrip().startswith(("=", "@")) for cell in row), path
    exported = run / "export" / "folders"
    assert all(path.resolve().is_relative_to(exported.resolve()) for path in exported.rglob("*"))
    assert "\x1b" not in (run / "train.log").read_text()


# --- What others may hand over ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {"_target_": "os.system", "_args_": ["touch ran"]},
        {"__class__": "subprocess.Popen"},
        {"backbone": "hf-hub:somebody/something"},
        {"backbone": "local-dir:/tmp"},
        {"backbone": {"_target_": "os.system"}},
        {"recipe": ["import os"]},
        {"clusters": "__import__('os').system('touch ran')"},
        {"augmentation": "!!python/object/apply:os.system ['touch ran']"},
    ],
)
def test_a_configuration_is_data(extra, image_folder, tmp_path, monkeypatch):
    run = tmp_path / "run"
    if not (cache := image_folder.parent / "harmless").exists():
        odcluster.train(image_folder, out=cache, quiet=True, **{**TINY, "epochs": 1})
    shutil.copytree(cache, run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **extra}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        odcluster.resume(run, quiet=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("architecture", ["hf-hub:a/b", "local-dir:/tmp", "../../x", "os.system"])
def test_a_backbone_of_others_names_a_known_network(architecture, tmp_path):
    folder = tmp_path / "backbone"
    folder.mkdir()
    described = {"architecture": architecture, "image_size": 32, "in_channels": 3, "stem": "standard"}
    (folder / "config.json").write_text(json.dumps({**described, "mean": [0.0] * 3, "std": [1.0] * 3}))
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match="no backbone named"):
        load_backbone(folder)


def test_archives_are_not_unpacked(tmp_path):
    """Whatever their members are called: ../x, /x, links and devices."""
    archive = tmp_path / "photos.tar"
    with tarfile.open(archive, "w") as tar:
        for name, kind in (("../evil.png", tarfile.REGTYPE), ("/evil.png", tarfile.REGTYPE), ("l", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member, io.BytesIO())
    for name in ("photos.tar", "photos.npz", "photos.npy", "photos.png"):
        (tmp_path / name).write_bytes(archive.read_bytes())
        with pytest.raises(DataError):
            open_source(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["photos.npy", "photos.npz", "photos.png", "photos.tar"]


def test_members_of_an_npz_are_names_not_paths(tmp_path):
    array = io.BytesIO()
    np.save(array, np.zeros((2, 8, 9), np.uint8))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("../../images.npy", array.getvalue())
        archive.writestr("/tmp/evil.npy", array.getvalue())
    with pytest.raises(DataError):
        open_source(tmp_path / "x.npz")
    assert os.listdir(tmp_path) == ["x.npz"]


def test_a_packed_array_that_has_no_room_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "bomb.npz", images=np.zeros((500, 100, 100), np.uint8))
    assert (tmp_path / "bomb.npz").stat().st_size < 50_000
    monkeypatch.setattr(readers, "physical_memory", lambda: 1_000_000)
    with pytest.raises(DataError, match="memory"):
        open_source(tmp_path / "bomb.npz")


def test_edits_of_others_that_make_no_sense_are_one_sentence(image_folder, tmp_path):
    """A run directory may come from anywhere, curation.sqlite with it."""
    from odcluster.explore.curation import open_curation

    (tmp_path / "curation.sqlite").write_bytes(b"SQLite format 3\0" + bytes(200))
    with pytest.raises(DataError, match="cannot be read"):
        open_curation(tmp_path).state()


def test_a_manifest_of_others_leads_to_images_only(tmp_path):
    """A run may list any file; only what is an image is ever shown."""
    run = odcluster.train(make_images(tmp_path / "i", 40), out=tmp_path / "run", quiet=True, **{**TINY, "clusters": 2})
    manifest = (run / "manifest.csv").read_text()
    (run / "manifest.csv").write_text(manifest.replace("image0003.png", "../../../../../../../../etc/passwd"))
    from odcluster.explore.collection import open_collection
    from odcluster.explore.thumbnails import Thumbnails

    collection = open_collection(open_run(run).path, compute_features=False)
    picture = Thumbnails(collection.source, tmp_path / "thumbnails.sqlite").full(3)
    assert picture.refused
    assert b"root:" not in picture.data
