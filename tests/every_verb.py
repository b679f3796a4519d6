"""Run in a process of its own: every verb that works on images, with a watch on what Python is asked to do.

    every_verb.py RECORD IMAGES MORE WEIGHTS

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


def main(images: str, more: str, weights: str) -> None:
    import odcluster
    from odcluster.cli import main as command

    options = {"image_size": 32, "crop_size": 32, "clusters": 4, "small_cluster": 2, "batch_size": 16, "epochs": 2}
    options |= {"dim": 8, "hidden": 16, "calibration_batches": 1, "max_refused": 0.1}
    run = odcluster.train(images, out="run", backbone="test_resnet", workers=2, quiet=True, **options)
    small = {
        "workers": 0,
        "clusters": 4,
        "small_cluster": 2,
        "batch_size": 16,
        "epochs": 1,
        "dim": 8,
        "cached_views": 1,
    }
    small |= {"max_refused": 0.1}
    odcluster.train(images, out="frozen", weights=weights, quiet=True, fine_clusters=6, **small)
    for method in ("deepcluster", "rotation"):
        few = {name: value for name, value in options.items() if name != "hidden"}
        odcluster.train(images, out=method, backbone="smallconv", method=method, workers=0, quiet=True, **few)
    odcluster.resume(run, quiet=True)
    odcluster.resume(run, add=more, epochs=1, quiet=True)
    for task in ("knn", "linear", "clusters", "semi"):
        few = {"epochs": 1} if task == "semi" else {}
        data = {} if task == "clusters" else {"data": images}
        odcluster.evaluate(run, task=task, workers=0, **few, **data)
    for ending in ("csv", "parquet"):
        odcluster.assign(run, more, out=f"assigned.{ending}", workers=0, quiet=True)
    odcluster.embed(run, more, out="embedded.npy", workers=0, quiet=True)
    odcluster.embed("smallconv", more, untrained=True, out="embedded.parquet", workers=0, quiet=True)
    odcluster.report(run, quiet=True)
    odcluster.report("rotation", quiet=True)
    for to in ("csv", "parquet", "folders", "timm", "onnx", "projector", "coco", "fiftyone"):
        odcluster.export(run, to=to, quiet=True)
    for mode in ("hardlink", "symlink"):
        odcluster.export(run, to="folders", mode=mode, out=f"folders-{mode}", quiet=True)
    with contextlib.suppress(SystemExit):
        command(["info"])
    print("done")


if __name__ == "__main__":
    watch(sys.argv[1])
    main(*sys.argv[2:])
