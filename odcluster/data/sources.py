"""Where images come from: a folder, a class tree, a list, arrays, packed files, CIFAR-10 or VOC.

Promises: the same images get the same ids, whatever the machine (an id is the position in the manifest's
sorted names); a source can be pickled to a spawned worker and used after a fork, because no open file is
shared; the user's files are only read. Labels are carried for evaluation and never used to learn. Decoding is
left to `images.py`, reading each storage to `readers.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from odcluster.data import arrays, images, readers
from odcluster.data.manifest import Manifest as Manifest
from odcluster.data.readers import Listing, shown
from odcluster.errors import DataError, UserError

SPLITS = ("train", "val", "trainval", "test")
FILES = ("folder", "class tree", "list", "voc")
"""Kinds of data whose images are files of their own: the manifest is all that is needed to open one."""


class Source(ABC):
    """Images by id. `stored` and `image` raise ImageRefused where one cannot be used."""

    manifest: Manifest

    def __len__(self) -> int:
        return len(self.manifest)

    @abstractmethod
    def stored(self, id: int) -> bytes | np.ndarray:
        """Return image `id` as it is kept: the bytes of an encoded file, or pixels."""

    def image(self, id: int, min_size: int = 0) -> np.ndarray:
        """Return image `id` as uint8 RGB [height, width, 3]; `min_size` as in `images.decode`."""
        stored = self.stored(id)
        return images.decode(stored, min_size) if isinstance(stored, bytes) else stored


class FileSource(Source):
    """One file per image, opened anew each time."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def stored(self, id: int) -> bytes:
        return images.read_file(os.path.join(self.manifest.root, self.manifest.paths[id]))


class LoadedSource(Source):
    """Data loaded as a whole. Pickling carries the recipe, not the data: a worker loads or maps its own."""

    def __init__(self, manifest: Manifest, load: Callable[[], Any]) -> None:
        self.manifest = manifest
        self.load = load
        self.loaded: Any = None

    def data(self) -> Any:
        if self.loaded is None:
            self.loaded = self.load()
        return self.loaded

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"loaded": None}


class ArraySource(LoadedSource):
    """uint8 images in one array: [N, H, W], [N, H, W, 1 | 3 | 4] or [N, 1 | 3, H, W]."""

    def __init__(self, manifest: Manifest, load: Callable[[], np.ndarray], channels_first: bool) -> None:
        super().__init__(manifest, load)
        self.channels_first = channels_first

    def stored(self, id: int) -> np.ndarray:
        pixels = np.asarray(self.data()[id])
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        elif self.channels_first:
            pixels = pixels.transpose(1, 2, 0)  # [H, W, channels]
        if pixels.shape[2] == 4:
            return images.rgba_over_white(pixels)
        if pixels.shape[2] == 1:
            return np.repeat(pixels, 3, axis=2)
        return np.array(pixels, order="C")  # a copy: nobody gets to write into the user's array


class PackedSource(LoadedSource):
    """Encoded files one after the other in one array: image i is data[offsets[i] : offsets[i + 1]]."""

    def stored(self, id: int) -> bytes:
        data, offsets = self.data()
        return data[offsets[id] : offsets[id + 1]].tobytes()


# --- Opening ----------------------------------------------------------------------------------------


def open_source(data: str | os.PathLike[str] | np.ndarray, split: str | None = None) -> Source:
    """Recognise what the user gave and list its images.

    `split` is train, val, trainval or test, for data that has such parts; None is the part one trains on: all
    images of a folder without parts, train/ where there is also val/ or test/, CIFAR-10's training batches,
    VOC's trainval.
    """
    if split is not None and split not in SPLITS:
        raise UserError(f"There is no split {split!r}; use one of {', '.join(SPLITS)}, or leave it out.")
    if isinstance(data, np.ndarray):
        if split is not None:
            raise UserError("An array has no splits; leave the split out and give the part you want.")
        return _open_array(data)
    if not isinstance(data, str | os.PathLike) or not os.fspath(data):
        raise UserError(f"{data!r} is no place for images; give a folder, a list, or a .npy or .npz file.")
    given = os.fsdecode(data)
    if "://" in given:
        raise UserError(f"{shown(given)} is an address; download it first and give the folder.")
    path = os.path.abspath(os.path.expanduser(given))
    if os.path.isdir(path):
        return _open_folder(path, split)
    if not os.path.exists(path):
        if given == "digits":
            if split is not None:
                raise DataError("the digits have no splits; leave the split out.")
            return _open_digits()
        raise DataError(_no_such_path(path))
    if not os.path.isfile(path):
        raise DataError(f"{shown(path)} is neither a file nor a folder; give one of them.")
    return _open_file(path, split)


def _no_such_path(path: str) -> str:
    parent = path
    while not os.path.isdir(parent):
        path, parent = parent, os.path.dirname(parent)
    if os.path.exists(path):
        return f"{shown(path)} is a file and has nothing below it; give a folder."
    name = os.path.basename(path)
    close = difflib.get_close_matches(name, readers.glob_names(parent, "[^.].*"), n=1)
    remedy = f"did you mean {shown(os.path.join(parent, close[0]))}?" if close else "check the spelling."
    return f"{shown(parent)} has no file or folder named {shown(name)}; {remedy}"


def _open_folder(root: str, split: str | None) -> Source:
    if voc := readers.find_voc(root):
        listing = readers.read_voc(voc, split)
        return _files("voc", voc, listing, f"{shown(voc)} has no images of its split; unpack JPEGImages there.")
    if cifar := readers.find_cifar(root):
        return _open_cifar(cifar, split)
    root = _split_folder(root, split)
    listing = readers.scan_folder(root)
    if not len(listing.paths):
        arrays = readers.glob_names(root, r".*\.np[yz]")
        hint = f"give the file {arrays[0]} in it, or" if arrays else "give"
        endings = " ".join(readers.EXTENSIONS)
        raise DataError(f"{shown(root)} has no images; {hint} a folder with files ending in {endings}.")
    if tree := readers.class_tree_labels(listing.paths):
        return _files("class tree", root, Listing(listing.paths, listing.sizes, *tree, listing.modified))
    return _files("folder", root, listing)


def available_splits(data: str | os.PathLike[str]) -> set[str]:
    """The parts that `open_source(data, split)` would find there; none for undivided data."""
    path = os.path.abspath(os.path.expanduser(os.fsdecode(data)))
    if os.path.isdir(path):
        if voc := readers.find_voc(path):
            sets = os.path.join(voc, "ImageSets", "Main")
            return {split for split in SPLITS if os.path.isfile(os.path.join(sets, f"{split}.txt"))}
        if cifar := readers.find_cifar(path):
            return {split for split in ("train", "test") if readers.cifar_batches(cifar, split)}
        return set(_part_folders(path))
    if path.lower().endswith(".npz") and os.path.isfile(path):
        members = arrays.npz_members(path)
        return {split for split in SPLITS if f"x_{split}" in members}
    return set()


def _part_folders(root: str) -> dict[str, str]:
    names = {"val": ("val", "valid", "validation")}
    return {
        part: os.path.join(root, name)
        for part in SPLITS
        for name in names.get(part, (part,))
        if os.path.isdir(os.path.join(root, name))
    }


def _split_folder(root: str, split: str | None) -> str:
    """Choose train/, val/ or test/ where a folder is divided so."""
    parts = _part_folders(root)
    if split is None:
        return parts["train"] if "train" in parts and ("val" in parts or "test" in parts) else root
    if split not in parts:
        have = f"use one of its splits ({', '.join(parts)})" if parts else "leave the split out"
        raise DataError(f"{shown(root)} has no folder {split}/; {have}.")
    return parts[split]


def _open_file(path: str, split: str | None) -> Source:
    ending = os.path.splitext(path)[1].lower()
    if ending == ".npz":
        return _open_npz(path, split)
    if split is not None:
        raise DataError(f"{shown(path)} has no splits; leave the split out.")
    if ending in (".txt", ".lst", ".csv"):
        return _files("list", os.path.dirname(path), readers.read_list(path))
    if ending == ".subset":
        from odcluster.data.subsets import open_subset  # it opens sources in its turn

        return open_subset(path)
    if ending == ".npy":
        return _arrays("arrays", path, partial(arrays.map_npy, path), None, None)
    if readers.is_image_name(path):
        raise DataError(f"{shown(path)} is a single image; give the folder that holds it.")
    if ending in (".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".7z", ".rar"):
        raise DataError(f"{shown(path)} is an archive; unpack it and give the folder.")
    raise DataError(f"{shown(path)} is not a known kind of data; give a folder, or a .txt, .csv, .npy or .npz file.")


def _files(kind: str, root: str, listing: Listing, if_empty: str = "") -> Source:
    if if_empty and not listing.paths:
        raise DataError(if_empty)
    paths, sizes, labels, class_names, modified = listing
    assert modified is not None, "files have times"
    return FileSource(Manifest(kind, root, paths, sizes, labels, class_names, modified=modified))


# --- Arrays -----------------------------------------------------------------------------------------


def _open_array(array: np.ndarray) -> Source:
    """Images in memory. The array is not copied; it must not change during a run."""
    first = arrays.check_images("The array", array.shape, array.dtype)
    digest = hashlib.sha256()
    for id in np.unique(np.linspace(0, len(array) - 1, 256).astype(np.int64)):
        digest.update(np.ascontiguousarray(array[id]).tobytes())
    content = f"{array.dtype} {array.shape} {digest.hexdigest()}"
    sizes = np.full(len(array), array[0].nbytes, dtype=np.int64)
    manifest = Manifest("arrays", "", _numbered("array", len(array)), sizes, content=content)
    return ArraySource(manifest, partial(np.asarray, array), first)


def _open_digits() -> Source:
    """The 1,797 handwritten digits of 8 x 8 pixels that scikit-learn ships, by the name `digits`."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    source = _open_array(np.rint(loaded.images * (255 / 16)).astype(np.uint8))
    manifest = dataclasses.replace(
        source.manifest,
        paths=_numbered("digits", len(source)),
        labels=loaded.target.astype(np.int64),
        class_names=[str(digit) for digit in range(10)],
    )
    source.manifest = manifest
    return source


def _arrays(
    kind: str,
    path: str,
    load: Callable[[], np.ndarray],
    labels: np.ndarray | None,
    class_names: list[str] | None,
) -> Source:
    array = load()
    first = arrays.check_images(shown(path), array.shape, array.dtype)
    sizes = np.full(len(array), array[0].nbytes, dtype=np.int64)
    paths = _numbered(os.path.basename(path), len(array))
    content = f"{array.dtype} {array.shape} {arrays.sampled_hash(path)}"
    source = ArraySource(Manifest(kind, path, paths, sizes, labels, class_names, content), load, first)
    source.loaded = array
    return source


def _open_npz(path: str, split: str | None) -> Source:
    members = arrays.npz_members(path)
    if "data" in members and "offsets" in members:
        if split is not None:
            raise DataError(f"{shown(path)} has no splits; leave the split out.")
        return _open_packed(path, members)
    key = arrays.images_key(path, members, split)
    shape, dtype = members[key]
    arrays.check_images(f"Array {key} of {shown(path)}", shape, dtype)
    names = ("labels", "y", "y_train") if split is None else (f"y_{split}",)
    labels, class_names = _labels_of(path, members, names, shape[0])
    source = _arrays("arrays", path, partial(arrays.load_member, path, key), labels, class_names)
    if split is not None:  # another array of the same file may have the same shape
        source.manifest = dataclasses.replace(source.manifest, content=f"{source.manifest.content} {key}")
    return source


def _open_packed(path: str, members: Iterable[str]) -> Source:
    load = partial(load_packed, path)
    data, offsets = load()
    num_images = len(offsets) - 1
    labels, class_names = _labels_of(path, members, ("labels",), num_images)
    paths = _numbered(os.path.basename(path), num_images)
    content = f"packed {data.shape} {arrays.sampled_hash(path)}"
    manifest = Manifest("packed", path, paths, np.diff(offsets), labels, class_names, content)
    source = PackedSource(manifest, load)
    source.loaded = data, offsets
    return source


def load_packed(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Load `data` and `offsets` of a packed file, checked."""
    data, offsets = arrays.load_member(path, "data"), arrays.load_member(path, "offsets")
    arrays.check_offsets(path, data, offsets)
    return data, offsets.astype(np.int64)


def _labels_of(
    path: str, members: Iterable[str], names: tuple[str, ...], num_images: int
) -> tuple[np.ndarray | None, list[str] | None]:
    name = next((name for name in names if name in members), None)
    if name is None:
        return None, None
    labels, class_names = arrays.array_labels(arrays.load_member(path, name), num_images)
    if labels is not None and "class_names" in members:
        class_names = [str(name) for name in arrays.load_member(path, "class_names").reshape(-1)]
        if labels.max() >= len(class_names):
            raise DataError(f"{shown(path)} has labels beyond its class_names; make them agree.")
    return labels, class_names


def _open_cifar(folder: str, split: str | None) -> Source:
    names = readers.cifar_batches(folder, split) if split in (None, "train", "test") else []
    if not names:
        raise DataError(f"{shown(folder)} has no such CIFAR-10 batches; use split train or test and all its files.")
    files = [os.path.join(folder, name) for name in names]
    batches = [readers.read_cifar_batch(file) for file in files]
    paths = [path for name, (array, _) in zip(names, batches, strict=True) for path in _numbered(name, len(array))]
    manifest = Manifest(
        "cifar10",
        folder,
        paths,
        np.full(len(paths), 3072, dtype=np.int64),
        np.concatenate([labels for _, labels in batches]),
        list(readers.CIFAR10_CLASSES),
        " ".join(map(arrays.sampled_hash, files)),
    )
    source = ArraySource(manifest, partial(load_cifar, files), channels_first=True)
    source.loaded = np.concatenate([array for array, _ in batches])
    return source


def load_cifar(files: list[str]) -> np.ndarray:
    """Load batches into one array uint8 [N, 3, 32, 32]."""
    return np.concatenate([readers.read_cifar_batch(file)[0] for file in files])


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}#{number:08d}" for number in range(count)]
