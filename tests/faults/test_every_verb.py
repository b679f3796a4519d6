"""Every verb in a watched process: no connection, nothing written elsewhere, no image touched, nothing told.

`make test` runs some of them, `make test-faults` all.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import TINY, make_images

import odcluster

TESTS = Path(__file__).parents[1]
PACKAGE = Path(odcluster.__file__).parent
HOME, SECRET = "home-of-anna-b7c1", "token-93cf5b1e"
NASTY = '=cmd|\' &<script>alert(1)<-script>\x1b[31m\n"quoted".png'
TABLES = {"clusters.csv", "duplicates.csv", "outliers.csv", "bad_images.csv"}
NATIVE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
int socket(int domain, int type, int protocol) {
    int (*real)(int, int, int) = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
    if (domain == AF_UNIX) return real(domain, type, protocol);
    int file = open(getenv("SOCKETS"), O_WRONLY | O_CREAT | O_APPEND, 0644);
    dprintf(file, "socket of family %d\n", domain);
    close(file);
    errno = EACCES;
    return -1;
}
"""
"""Libraries open sockets without asking Python: this stands before the C library's own function."""


def native_watch(folder: Path, record: Path) -> dict[str, str]:
    """Environment in which no native code gets a socket but AF_UNIX; nothing where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return {}
    (folder / "watch.c").write_text(NATIVE)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "watch.so"), str(folder / "watch.c"), "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(folder / "watch.so"), "SOCKETS": str(record)}


def state_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything about a folder but when it was last read."""
    return {
        os.fspath(path): (path.lstat().st_mtime_ns, path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.faults)])
def watched(request, tmp_path_factory):
    """Verbs have run in a child whose home, temporary folder and secrets are known; returns its world."""
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
    environment |= native_watch(world, world / "sockets")
    script = TESTS / "every_verb.py"
    arguments = [request.param, str(world / "record"), str(home / "photos"), str(home / "more"), str(weights)]
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
    return world, before, request.param


def test_no_verb_opens_a_connection(watched):
    assert (watched[0] / "record").read_text() == ""
    assert not (watched[0] / "sockets").exists()


@pytest.mark.parametrize("attempt", ["socket.socket()", "socket.create_connection(('localhost', 9))"])
def test_the_watch_sees_connections(attempt, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import every_verb, socket\n"
    code += f"every_verb.watch({str(tmp_path / 'record')!r})\nsocket.socketpair()\n{attempt}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PermissionError" in done.stderr
    event = json.loads((tmp_path / "record").read_text())[0]
    assert event in ("socket.__new__", "socket.getaddrinfo")


def test_the_watch_sees_native_connections(tmp_path):
    if not (environment := native_watch(tmp_path, tmp_path / "sockets")):
        pytest.skip("needs a C compiler")
    code = "import socket; socket.socketpair(); socket.socket(socket.AF_UNIX); socket.socket()"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True)
    assert b"Permission denied" in done.stderr
    assert (tmp_path / "sockets").read_text() == "socket of family 2\n"


def test_every_verb_leaves_the_images_as_they_were(watched):
    world, before, _ = watched
    assert {name: state_of(world / HOME / name) for name in before} == before


def test_every_verb_writes_only_where_it_was_told(watched):
    world, _, which = watched
    outputs = {"run", "assigned.csv", "embedded.npy", "embedded.images.csv"}
    if which == "all":
        outputs |= {"frozen", "deepcluster", "rotation", "assigned.parquet", "embedded.parquet"}
        outputs |= {"folders-hardlink", "folders-symlink"}
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


def test_what_is_passed_on_tells_nothing_of_the_machine(watched):
    """No part of the environment, no folder of the user, no name of the machine."""
    files = passed_on(watched[0])
    expected = {"report.html", "model.safetensors", "README.md", "clusters.csv", "knn.json"}
    expected |= {"backbone.onnx", "clusters.parquet"} if watched[2] == "all" else set()
    assert expected <= {path.name for path in files}
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
