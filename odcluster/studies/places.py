"""Where the user's images are: from the options of `odcluster reproduce` to paths that training and evaluation take."""

from __future__ import annotations

import glob
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odcluster.data.readers import shown
from odcluster.errors import DataError, UserError
from odcluster.studies.plan import DataName
from odcluster.verbs import Reproduction

FOLDERS = {"cifar10": "cifar10", "tiny-imagenet": "tiny_imagenet", "voc": "voc2007"}
"""Names below --data."""


@dataclass(frozen=True)
class Place:
    """What one trains on, and what one tests on where that is a file of its own."""

    train: str
    test: str | None = None


def find_places(needed: Sequence[DataName], given: Reproduction, out: Path) -> dict[DataName, Place]:
    """All images a study needs, or one sentence about those that are missing. An archive is unpacked below `out`."""
    paths = {name: given_path(name, given) for name in needed}
    if missing := [name for name, path in paths.items() if path is None]:
        asked = " and ".join(f"--{name} FOLDER" for name in missing)
        below = ", or --data with a folder that has it" if given.scale == "small" else ""
        raise UserError(f"this study needs images that were not given: add {asked}{below}")
    return {name: place_of(name, os.path.abspath(path), out) for name, path in paths.items() if path is not None}


def given_path(name: DataName, given: Reproduction) -> str | None:
    """By its own option, else below --data."""
    own: str | None = getattr(given, name.replace("-", "_"))
    if own is not None:
        return os.path.expanduser(own)
    if given.data is None or name not in FOLDERS:
        return None
    folder = os.path.join(os.path.expanduser(given.data), FOLDERS[name])
    if not os.path.exists(folder):
        raise DataError(f"{shown(given.data)} has no {FOLDERS[name]}/ in it; put it there, or give --{name} FOLDER")
    return folder


def place_of(name: DataName, path: str, out: Path) -> Place:
    if not os.path.exists(path):
        raise DataError(f"there is nothing at {shown(path)}; give the folder with the images by --{name}")
    if name == "voc":
        return Place(unpacked(path, out))
    if os.path.isdir(path):
        train, test = packed(path, "train"), packed(path, "test") or packed(path, "val")
        if train and test:
            return Place(train, test)
    return Place(path, path)


def packed(folder: str, part: str) -> str | None:
    """The one .npz file of that part, if the folder has such a file."""
    found = sorted(glob.glob(os.path.join(glob.escape(folder), f"{part}*.npz")))
    return found[0] if found else None


def unpacked(path: str, out: Path) -> str:
    """A VOC folder as it is; an archive of one, or a folder with nothing but such an archive, is unpacked once."""
    if os.path.isdir(path):
        archives = sorted(glob.glob(os.path.join(glob.escape(path), "*.tar*")))
        if len(os.listdir(path)) != 1 or not archives:
            return path
        path = archives[0]
    place = out / "data" / "voc2007"
    if not (place / "unpacked").exists():
        place.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(path) as archive:
                archive.extractall(place, filter="data")  # nothing outside, no devices, no links that lead out
        except (tarfile.TarError, OSError, EOFError) as error:
            raise DataError(f"{shown(path)} cannot be unpacked ({error}); give the unpacked folder by --voc") from error
        (place / "unpacked").touch()
    return os.fspath(place)
