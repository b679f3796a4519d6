"""The run directory: what a training leaves behind, and who may write to it.

    RUN/ config.json  manifest.csv  metrics.jsonl  train.log  bad_images.csv  checkpoints/  clusters.csv  backbone/
    changes/ (while a checkpoint is left from before images were added or removed: manifest and configuration of then)

Nothing is written anywhere else. A lock makes sure that one process at a time works on a run.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from odcluster.config import Config
from odcluster.config_file import from_json, to_json
from odcluster.data.names import guard
from odcluster.data.sources import Manifest
from odcluster.errors import DataError, InUse, UserError
from odcluster.training import checkpoint
from odcluster.training.checkpoint import write_flushed


class Run:
    """Paths and small files of one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.manifest_file = path / "manifest.csv"
        self.metrics_file = path / "metrics.jsonl"
        self.log_file = path / "train.log"
        self.refused_file = path / "bad_images.csv"
        self.checkpoints = path / "checkpoints"
        self.changes = path / "changes"
        self.clusters_file = path / "clusters.csv"
        self.backbone = path / "backbone"

    def config(self) -> Config:
        try:
            return from_json(self.config_file.read_text())
        except (UserError, OSError, ValueError) as error:
            raise DataError(f"{self.path} cannot be used: {error}") from error

    def manifest(self) -> Manifest:
        return Manifest.read(self.manifest_file)

    def sweep(self) -> None:
        """Remove what a killed training left half-written; for the process that holds the lock, before it reads."""
        checkpoint.sweep(self.checkpoints)
        for name in ("bad_images.csv", "clusters.csv", "clusters.png", "curves.png", "features/state.json"):
            for file in (self.path / name).parent.glob(f".{Path(name).name}.*"):
                file.unlink(missing_ok=True)
        for file in self.path.glob("manifest.csv.tmp-*"):
            file.unlink(missing_ok=True)
        for folder in self.path.glob(".backbone.*"):
            shutil.rmtree(folder, ignore_errors=True)

    def write_refused(self, refused: Iterable[tuple[int, str, str]]) -> None:
        """bad_images.csv: id, path and reason of every image that could not be used."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["id", "path", "reason"])
        writer.writerows((id, guard(path), why) for id, path, why in sorted(refused))
        write_atomically(self.refused_file, text.getvalue())


def check_free(path: Path, data_root: str = "") -> None:
    """Refuse a place for a run that is taken, or that lies among the images (it would be taken for more images)."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; choose another --out")
    if path.is_dir() and any(path.iterdir()):
        if (path / "config.json").exists():
            raise UserError(f"{path} is a run already: go on with `odcluster resume {path}`, or choose another --out")
        raise UserError(f"{path} exists and is not empty; choose another --out")
    root = os.path.realpath(data_root)
    if data_root and os.path.commonpath([root, os.path.realpath(path)]) == root:
        raise UserError(f"the run directory {path} would lie among the images in {data_root}; choose another --out")


def create_run(path: Path, config: Config, manifest: Manifest) -> Run:
    """A new run directory, complete from its first instant: it is prepared beside its place and renamed."""
    text = to_json(config)
    prepared: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        prepared = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        prepared.chmod(0o755)
        manifest.write(prepared / "manifest.csv")
        write_flushed(prepared / "config.json", text)
        os.replace(prepared, path)
    except OSError as error:
        if prepared is not None:
            shutil.rmtree(prepared, ignore_errors=True)
        raise UserError(f"the run directory {path} cannot be made ({error.strerror}); choose another --out") from error
    return Run(path)


def open_run(path: Path, *, settled: bool = True) -> Run:
    """An existing run directory; with `settled`, not one in which a change of its images was interrupted."""
    if not path.is_dir():
        raise DataError(f"there is no run directory {path}; `odcluster train DATA --out {path}` makes one")
    if not (path / "config.json").is_file() or not (path / "manifest.csv").is_file():
        raise DataError(f"{path} is not a run directory (no config.json and manifest.csv in it)")
    run = Run(path)
    if settled and any((run.checkpoints / file.parent.name).is_dir() for file in run.changes.glob("*/manifest.csv")):
        raise DataError(f"a change of the images of {path} was interrupted; `odcluster resume {path}` completes it")
    return run


class FileLock:
    """Held while a process writes to a folder. The operating system drops it with the process, so it is never stale."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> FileLock:
        try:
            import fcntl
        except ImportError:  # Windows has no such locks
            return self
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DataError(
                f"{self._path.parent} cannot be written to ({error.strerror}); check its permissions"
            ) from error
        try:
            # A record lock, not flock: loader processes that outlive a killed parent for a moment must not hold it.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 4096).decode(errors="replace").strip()
            os.close(self._descriptor)
            holder = holder or "unknown"
            raise InUse(
                f"{self._path.parent} is in use by another process ({holder}); wait for it or stop it", holder
            ) from error
        os.truncate(self._descriptor, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(
            self._descriptor,
            json.dumps(
                {"pid": os.getpid(), "host": socket.gethostname(), "since": started, "launch": launch_name()}
            ).encode(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def run_lock(run: Run) -> FileLock:
    """Held while a process trains a run, or fills a folder that is used like one."""
    return FileLock(run.path / "lock")


def launch_name() -> str | None:
    """What torchrun calls this launch, the same after each of its restarts; None without it."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def last_launch(path: Path) -> str | None:
    """The launch that last worked on a run; None where there is no run, or torchrun did not start it."""
    try:
        return json.loads((path / "lock").read_text()).get("launch")
    except (OSError, ValueError, AttributeError):
        return None


def write_atomically(path: Path, text: str) -> None:
    """The file has either its old content or all of the new."""
    prepared = path.with_name(f".{path.name}.{os.getpid()}")
    with open(prepared, "w", errors="surrogateescape", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(prepared, path)
