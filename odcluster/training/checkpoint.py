"""Checkpoints that are either complete and verified, or ignored.

A checkpoint is a directory `step-00001234/` of safetensors files and a state.json that is written last and holds the
size and sha256 of each. It is prepared under another name, flushed to disk, and renamed into place: a process killed
at any instant leaves the previous checkpoints as they were. There is no "latest" pointer that could be wrong: the
newest valid one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from odcluster.errors import DataError

FORMAT = 1


class OtherFormat(DataError):
    """Written by another version: not damaged, so nothing may be trained over it."""


class NotSaved(Exception):
    """A checkpoint could not be written; the message says why. Earlier ones are intact."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, in memory."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def reached(point: str) -> None:
    """The named instants of a save. Does nothing; the fault tests replace it to kill the process just there."""


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    collect: Callable[[Path], dict[str, Any]] = lambda prepared: {},
) -> Path:
    """Write one checkpoint; raises NotSaved (disk full, no permission) with everything older left untouched.

    `collect` may put more files into the folder that is being prepared, and returns their entries (see `file_entry`).
    """
    final = directory / f"step-{step:08d}"
    if is_valid(final) and read_state(final).get("finished") == state.get("finished"):
        return final  # the same step of the same run has the same state
    prepared = directory / f".tmp-{step:08d}-{os.getpid()}"
    try:
        reached("before mkdir")
        directory.mkdir(parents=True, exist_ok=True)
        check_space(directory, tensors)
        shutil.rmtree(prepared, ignore_errors=True)
        prepared.mkdir()
        files = collect(prepared)
        for name, group in tensors.items():
            path = prepared / f"{name}.safetensors"
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in group.items()}, path)
            reached(f"before fsync of {name}")
            flush(path)
            files[path.name] = file_entry(path)
            reached(f"after {name}")
        reached("before state.json")
        content = {"format": FORMAT, **state, "step": step, "files": files}
        write_flushed(prepared / "state.json", json.dumps({**content, "sha256": content_hash(content)}, indent=1))
        flush(prepared)
        reached("before rename")
        replace(prepared, final)
        flush(directory)
        reached("after rename")
    except (OSError, SafetensorError) as error:
        restore(directory)
        shutil.rmtree(prepared, ignore_errors=True)
        raise NotSaved(
            f"the checkpoint of step {step} could not be written to {directory} ({reason(error)})"
        ) from error
    return final


def replace(prepared: Path, final: Path) -> None:
    """Rename into place. One of the same step (invalid, or from before the end) stays until the new one is there."""
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        os.rename(final, old)
        reached("between renames")
    os.rename(prepared, final)
    shutil.rmtree(old, ignore_errors=True)


def restore(directory: Path) -> None:
    """Put back what a replacement that was cut short had moved aside."""
    for old in directory.glob(".old-step-*"):
        final = old.with_name(old.name.removeprefix(".old-"))
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, final)


def find(
    directory: Path,
    warn: Callable[[str], None],
    paths: list[Path] | None = None,
    load_one: Callable[[Path], Checkpoint] | None = None,
) -> Checkpoint | None:
    """The newest valid checkpoint, loaded; each newer invalid one is named to `warn`. None: nothing was saved yet.

    Several ranks must agree about what there is (`paths`) and what is valid (`load_one`).
    """
    reasons = []
    for path in candidates(directory) if paths is None else paths:
        try:
            found = (load_one or load)(path)
        except OtherFormat:
            raise
        except DataError as error:
            reasons.append(str(error))
            continue
        for damage in reasons:
            warn(f"{damage}; going back to the checkpoint before it")
        return found
    if reasons:
        raise DataError(
            f"no checkpoint in {directory} is valid ({reasons[0]}); restore one, or remove the folder to start again"
        )
    return None


def is_valid(path: Path) -> bool:
    """Whether a complete, undamaged checkpoint lies there."""
    try:
        verify(path)
    except DataError:
        return False
    return True


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, of one rank, after verifying it."""
    state = verify(path)
    return Checkpoint(path, state, {Path(name).stem: load_file(path / name) for name in state["files"]})


def verify(path: Path, part: slice = slice(None)) -> dict[str, Any]:
    """The state of a checkpoint whose files all have the size and hash that it says; DataError names what is wrong.

    Of the files, only a part may be looked at.
    """
    state = read_state(path)
    for name, expected in list(state["files"].items())[part]:
        file = path / name
        if not file.is_file():
            raise DataError(f"{file} is missing")
        if file.stat().st_size != expected["size"]:
            raise DataError(f"{file} has {file.stat().st_size} bytes instead of {expected['size']}")
        if file_hash(file) != expected["sha256"]:
            raise DataError(f"{file} is damaged (its sha256 differs)")
    return state


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint, undamaged and of this format."""
    file = path / "state.json"
    try:
        state = json.loads(file.read_text())
        if not isinstance(state, dict):
            raise ValueError("not an object")
        if state.get("format") != FORMAT:
            raise OtherFormat(
                f"{path} has format {state.get('format')} and this version reads format {FORMAT}; "
                "use the version of odcluster that wrote it"
            )
        if state.pop("sha256") != content_hash(state) or path.name != f"step-{state['step']:08d}":
            raise ValueError("its content was changed")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{file} is damaged ({reason(error)})") from error
    return state


def content_hash(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def candidates(directory: Path) -> list[Path]:
    """Checkpoint directories, newest first; other names are ignored."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if path.name.startswith("step-") and path.name[5:].isdigit()]
    return sorted(named, key=lambda path: int(path.name[5:]), reverse=True)


def prune(directory: Path, keep: int, known_valid: Collection[Path] = ()) -> None:
    """Remove what is older than the newest `keep` valid checkpoints, at least two.

    What this process has saved or loaded is known to be valid; others are verified before they count.
    """
    valid = 0
    for path in candidates(directory):
        if valid < max(keep, 2):
            valid += path in known_valid or is_valid(path)
            continue
        reached("during prune")
        # state.json goes first: a half-removed checkpoint must not look like a valid one.
        (path / "state.json").unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what a killed save left behind. Before `find`, and only by the process that holds the run's lock."""
    if directory.is_dir():
        restore(directory)
        for path in directory.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)


def check_space(directory: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    needed = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    free = shutil.disk_usage(directory).free
    if free < needed * 1.05 + (1 << 20):
        raise OSError(f"{needed >> 20} MB are needed and {free >> 20} MB are free")


def reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def flush(path: Path) -> None:
    """Force a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_flushed(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def file_entry(path: Path) -> dict[str, Any]:
    """What state.json says about a file."""
    return {"size": path.stat().st_size, "sha256": file_hash(path)}


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
