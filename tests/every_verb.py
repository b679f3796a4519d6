"""Run in a process of its own: every verb that works on images, with a watch on what Python is asked to do.

    every_verb.py some|all RECORD IMAGES MORE WEIGHTS

Sockets of any kind but AF_UNIX, and any question to a name server, are noted in RECORD and refused. AF_UNIX is how the
loader's processes hand pictures to each other (multiprocessing); it cannot leave the machine. Loader processes are
forked, so the watch holds in them too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys

RESOLVING = {
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyaddr",
    "socket.getnameinfo",
    "urllib.Request",
}


def watch(record: str) -> None:
    descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        foreign = event == "socket.__new__" and arguments[1] not in (socket.AF_UNIX, -1)  # -1: a known descriptor
        if foreign or event in RESOLVING:
            os.write(descriptor, (json.dumps([event, str(arguments)]) + "\n").encode())
            raise PermissionError(f"{event} {arguments}")

    sys.addaudithook(hook)


OPTIONS = {
    "image_size": 32,
    "crop_size": 32,
    "clusters": 4,
    "small_cluster": 2,
    "batch_size": 16,
    "epochs": 2,
    "dim": 8,
    "calibration_batches": 1,
    "max_refused": 0.1,
    "quiet": True,
}


def some(images: str, more: str, backbone: str = "smallconv") -> None:
    """A run from its start to what people take away."""
    import odcluster

    run = odcluster.train(images, out="run", backbone=backbone, workers=2, hidden=16, **OPTIONS)
    odcluster.resume(run, add=more, epochs=1, quiet=True)
    odcluster.evaluate(run, task="knn", workers=0, data=images)
    odcluster.assign(run, more, out="assigned.csv", workers=0, quiet=True)
    odcluster.embed(run, more, out="embedded.npy", workers=0, quiet=True)
    odcluster.load_backbone(run)
    odcluster.report(run, quiet=True)
    for to in ("csv", "folders"):
        odcluster.export(run, to=to, quiet=True)


def others(images: str, more: str, weights: str) -> None:
    """All that `some` leaves out."""
    import odcluster
    from odcluster.cli import main as command

    frozen = {"fine_clusters": 6, "cached_views": 1, "workers": 0, "weights": weights}
    few = {name: value for name, value in OPTIONS.items() if name not in ("image_size", "crop_size")}
    odcluster.train(images, out="frozen", **few, **frozen)
    for method in ("deepcluster", "rotation"):
        odcluster.train(images, out=method, backbone="smallconv", method=method, workers=0, **OPTIONS)
    odcluster.resume("rotation", quiet=True)
    odcluster.report("rotation", quiet=True)
    for task in ("linear", "clusters", "semi"):
        given = {"linear": {"data": images}, "clusters": {}, "semi": {"data": images, "epochs": 1}}[task]
        odcluster.evaluate("run", task=task, workers=0, **given)
    odcluster.assign("run", more, out="assigned.parquet", workers=0, quiet=True)
    odcluster.embed("smallconv", more, untrained=True, out="embedded.parquet", workers=0, quiet=True)
    for to in ("parquet", "timm", "onnx", "projector", "coco", "fiftyone"):
        odcluster.export("run", to=to, quiet=True)
    for mode in ("hardlink", "symlink"):
        odcluster.export("run", to="folders", mode=mode, out=f"folders-{mode}", quiet=True)
    with contextlib.suppress(SystemExit):
        command(["info"])


if __name__ == "__main__":
    which, record, images, more, weights = sys.argv[1:]
    watch(record)
    some(images, more, "test_resnet" if which == "all" else "smallconv")
    if which == "all":
        others(images, more, weights)
    print("done")
