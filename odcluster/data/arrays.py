"""Images in npy and npz files: what arrays there are, and which of them are images or labels.

Promises: headers are looked at first, Python objects are never unpickled, and what has no room in memory is refused
before it is unpacked.
"""

from __future__ import annotations

import hashlib
import os
import warnings
import zipfile

import numpy as np

from odcluster.data.names import shown
from odcluster.data.readers import encode_labels
from odcluster.errors import DataError

_ARRAY_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    MemoryError,
    zipfile.BadZipFile,
    NotImplementedError,
)


def npz_members(path: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of each array in an npz file, from their headers."""
    members = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    version = np.lib.format.read_magic(file)
                    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
                    shape, _, dtype = (read or np.lib.format.read_array_header_2_0)(file)
                    members[name.removesuffix(".npy")] = shape, dtype
    except _ARRAY_ERRORS as error:
        raise _not_arrays(path, error) from error
    return members


def load_member(path: str, key: str) -> np.ndarray:
    """Load one array of an npz file into memory; one that has no room there is refused, however well it is packed."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = f"{key}.npy" if f"{key}.npy" in archive.namelist() else key
            needed, room = archive.getinfo(name).file_size, physical_memory()
        if needed > room:
            raise DataError(
                f"The array {shown(key)} of {shown(path)} takes {needed / 1e9:.0f} GB and this machine has "
                f"{room / 1e9:.0f} GB of memory; save it with numpy.save, as a .npy file is read piece by piece."
            )
        with np.load(path, allow_pickle=False) as arrays:
            return arrays[key]
    except _ARRAY_ERRORS as error:
        raise _not_arrays(path, error) from error


def physical_memory() -> int:
    """Bytes of memory of this machine; without limit where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 62


def map_npy(path: str) -> np.ndarray:
    """Map an npy file into memory, read-only; each process that opens it has its own view."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except _ARRAY_ERRORS as error:
        raise _not_arrays(path, error) from error


def _not_arrays(path: str, error: Exception) -> DataError:
    if "allow_pickle" in str(error) or "Python objects" in str(error):
        return DataError(
            f"{shown(path)} holds Python objects, which are never unpickled here; save the images as one "
            "array with .astype(numpy.uint8)."
        )
    return DataError(f"{shown(path)} cannot be read as numpy arrays ({error}); save it again with numpy.save.")


def images_key(path: str, members: dict[str, tuple[tuple[int, ...], np.dtype]], split: str | None) -> str:
    """Choose the array that holds the images."""
    names = ("data", "images", "x", "X", "arr_0", "x_train") if split is None else (f"x_{split}",)
    for name in names:
        if name in members:
            return name
    candidates = [name for name, (shape, kind) in members.items() if kind == np.uint8 and len(shape) in (3, 4)]
    if split is None and len(candidates) == 1:
        return candidates[0]
    wanted = f"an array named {names[0]}" if split else "exactly one uint8 array of images, or one named `images`"
    raise DataError(f"{shown(path)} has arrays {', '.join(map(shown, members)) or 'none'}; it must have {wanted}.")


def check_images(name: str, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Refuse what are not uint8 images; return whether the channels come before rows and columns."""
    if dtype != np.uint8:
        raise DataError(
            f"{name} has dtype {dtype}, but images must be uint8 in 0..255; convert with "
            ".astype(numpy.uint8), after multiplying by 255 if the values are in 0..1."
        )
    last = len(shape) == 4 and shape[3] in (1, 3, 4)
    first = len(shape) == 4 and not last and shape[1] in (1, 3)
    if not (last or first or len(shape) == 3) or (len(shape) == 3 and shape[2] in (1, 3, 4)):
        raise DataError(
            f"{name} has shape {shape}; reshape it to [images, height, width], with 1, 3 or 4 channels last, "
            "or 1 or 3 channels second."
        )
    if 0 in shape:
        raise DataError(f"{name} has shape {shape}, so there is no image in it; give at least one.")
    return first


def check_offsets(path: str, data: np.ndarray, offsets: np.ndarray) -> None:
    """Check that image i can be data[offsets[i] : offsets[i + 1]]."""
    whole = data.ndim == 1 and data.dtype == np.uint8 and offsets.ndim == 1 and offsets.dtype.kind in "iu"
    if not (whole and len(offsets) > 1 and offsets[0] >= 0 and offsets[-1] <= len(data)):
        raise DataError(f"{shown(path)} is packed wrongly: `offsets` must mark parts of `data`; pack it again.")
    if (offsets[1:] < offsets[:-1]).any():
        raise DataError(f"{shown(path)} is packed wrongly: `offsets` must not decrease; pack it again.")


def array_labels(values: np.ndarray, num_images: int) -> tuple[np.ndarray | None, list[str] | None]:
    """Turn an array of one label per image into numbers, and names if they are strings."""
    if values.size != num_images or values.dtype.kind not in "iuUS":
        warnings.warn(f"labels of shape {values.shape} do not fit {num_images} images; ignored", stacklevel=3)
        return None, None
    values = values.reshape(-1)
    if values.dtype.kind in "iu":
        return np.maximum(values.astype(np.int64), -1), None
    return encode_labels([str(value) for value in values.astype(str)])


def sampled_hash(path: str, num_blocks: int = 64, block: int = 65536) -> str:
    """Hash a file's size and up to 64 blocks of 64 KB spread over it: 4 MB, however large the file."""
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for start in sorted({max(size - block, 0) * part // (num_blocks - 1) for part in range(num_blocks)}):
            file.seek(start)
            digest.update(file.read(block))
    return digest.hexdigest()
