"""No command opens a connection or listens unless it is asked to: told by Python's audit events, and by a machine
without any network in which everything works.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
from figures import record
from harness import SHORT, Child

from odcluster.cli import main

CLONE_NEWNET = 0x40000000
WATCHED = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"}


def watch() -> None:
    """In a child: end it when anything but a local (AF_UNIX) socket is used; loader processes talk through those."""

    def hook(event: str, arguments: tuple) -> None:
        if event in WATCHED and not (isinstance(arguments[0], socket.socket) and arguments[0].family == socket.AF_UNIX):
            os.write(2, f"{event} {arguments[1:]}\n".encode())
            os._exit(99)

    sys.addaudithook(hook)


def cut_off() -> None:
    """In a child: no network device but an inactive loopback. Where that is not permitted, only `watch` counts."""
    ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET)


def test_the_watch_works(tmp_path):
    """A check of the check."""

    def work() -> None:
        watch()
        socket.create_connection(("127.0.0.1", 9))

    assert Child(work, tmp_path / "said.txt").wait() == 99


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Every verb that does not serve anything."""
    folder = tmp_path_factory.mktemp("network")
    from tiny_runs import make_images

    data, run = folder / "data", folder / "run"
    for seed, label in enumerate(("a", "b")):
        make_images(data / label, 60, seed=seed)
    options = {**SHORT, "workers": 1}
    train = ["train", str(data), "--out", str(run), *(f"--{k.replace('_', '-')}={v}" for k, v in options.items())]
    return {
        "train": train,
        "resume": ["resume", str(run)],
        "evaluate": ["evaluate", str(run), "--task", "knn", "--data", str(data), "--workers", "1"],
        "report": ["report", str(run)],
        "assign": ["assign", str(run), str(data), "--out", str(folder / "assigned.csv")],
        "embed": ["embed", str(run), str(data), "--out", str(folder / "features.npz")],
        "export": ["export", str(run), "--to", "folders", "--out", str(folder / "folders")],
        "info": ["info"],
    }


def test_no_command_uses_the_network(commands, tmp_path):
    for verb, arguments in commands.items():

        def work(arguments=arguments) -> None:
            watch()
            cut_off()
            main(arguments)

        child = Child(work, tmp_path / f"{verb}.txt")
        assert child.wait() == 0, f"{verb}: {child.said()}"
        record("no network needed or used", True)
    shutil.rmtree(Path(commands["train"][3]))
