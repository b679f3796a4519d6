"""Nothing that is read runs, nothing is asked of the network, nothing is written among the images, nothing is told."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import TINY, make_images

import odcluster
from odcluster.data import arrays
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
    monkeypatch.setattr(arrays, "physical_memory", lambda: 1_000_000)
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
