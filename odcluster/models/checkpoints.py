"""Tensors out of a file that somebody else wrote, without ever executing what is in it.

A file is recognised by its content, whatever its name. PyTorch files are read with weights_only=True and
nothing else: where that refuses something, so do we, and the sentence says what it was. Nothing is read into
memory that is larger than the file itself.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from odcluster.errors import DataError

# Classes without code of their own that published checkpoints carry (DINO keeps its command line in one).
HARMLESS: list[Any] = [argparse.Namespace]
MAX_DEPTH = 32
"""Nesting of dictionaries beyond which nobody keeps weights."""


def read_tensors(source: str | Path) -> dict[str, Tensor]:
    """Return every tensor of a .safetensors or PyTorch file, or of a run or exported backbone's directory.

    Nested dictionaries and lists become dotted names: {"state_dict": {"fc.bias": t}} is "state_dict.fc.bias".
    """
    path = locate_weights(source)
    try:
        with path.open("rb") as file:
            head = file.read(4096)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(
            f"The weights {printable(path)} cannot be opened ({error.strerror}); check its permissions."
        ) from error
    kind = _recognise(path, head, size)
    tensors = _read_safetensors(path) if kind == "safetensors" else _read_torch(path, is_zip=kind == "zip")
    if not tensors:
        raise DataError(f"{printable(path)} holds no tensors; give a file with a network's weights.")
    return tensors


def locate_weights(source: str | Path) -> Path:
    """Return the weights file that a path stands for: itself, or the one in a run or backbone directory."""
    path = Path(source).expanduser()
    if path.is_dir():
        for candidate in (path / "backbone" / "model.safetensors", path / "model.safetensors"):
            if candidate.is_file():
                return candidate
        raise DataError(
            f"The directory {printable(path)} holds neither backbone/model.safetensors, as a finished run "
            "does, nor model.safetensors; give the weights file itself, or resume the run to its end."
        )
    if not path.exists():
        raise DataError(f"The weights {printable(path)} do not exist; check the path.")
    if not path.is_file():
        raise DataError(f"The weights {printable(path)} are not an ordinary file; give a file or a run.")
    return path


def printable(text: object) -> str:
    """Return text from outside with everything that could steer a terminal replaced."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _recognise(path: Path, head: bytes, size: int) -> str:
    """Tell "safetensors", "zip" or "legacy" (both PyTorch's) from the first bytes, or say what it is."""
    name = printable(path)
    if size == 0:
        raise DataError(f"{name} is empty; copy or download it again.")
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if head[8:9] == b"{":  # eight bytes of header length, then the header, which is JSON
        length = int.from_bytes(head[:8], "little")
        if length > size - 8:
            raise DataError(
                f"{name} is cut short or damaged (its header should have {length:,} bytes and the file has "
                f"{size:,}); copy or download it again."
            )
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "legacy"
    start = head.lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        raise DataError(f"{name} is a Git LFS pointer, not the weights; run `git lfs pull` where it is from.")
    if start.startswith((b"<!doctype html", b"<html")):
        raise DataError(f"{name} is a web page, not weights; the download needs another link, or a login.")
    if all(byte >= 32 or byte in b"\t\n\r\f" for byte in head):
        raise DataError(f"{name} is a text file, not weights; give a .safetensors or .pth file, or a run.")
    raise DataError(
        f"{name} is neither a safetensors nor a PyTorch file; unpack it if it is an archive, convert it to "
        "safetensors if another framework made it."
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)  # checks header, shapes and offsets against the file before it allocates
    except (safetensors.SafetensorError, RuntimeError, OSError, MemoryError, OverflowError) as error:
        raise DataError(_damaged(path, error)) from error


def _read_torch(path: Path, *, is_zip: bool) -> dict[str, Tensor]:
    if is_zip:
        _check_archive(path)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(HARMLESS):
            warnings.simplefilter("ignore")
            with path.open("rb") as file:  # not the path: torch would go by the name's ending
                content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make the reader stumble anywhere
        raise DataError(_why_not_read(path, error, is_zip=is_zip)) from error
    tensors: dict[str, Tensor] = {}
    _collect(content, "", tensors, seen=set(), depth=0)
    for key, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise DataError(
                f"{printable(path)} is refused, because its tensor {printable(key)} claims to be larger than "
                "its data; get the file from where it was made."
            )
    return tensors


def _check_archive(path: Path) -> None:
    """Refuse zip files that PyTorch did not write as weights, and those that unpack to more than they are."""
    name = printable(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(_damaged(path, error)) from error
    endings = {member.filename.rpartition("/")[2] for member in members}
    if "data.pkl" not in endings:
        raise DataError(f"{name} is a zip archive but not PyTorch's; unpack it and give the file inside.")
    if "constants.pkl" in endings:
        raise DataError(
            f"{name} is a TorchScript program, which would have to be executed; save the state_dict of its "
            "network to a .safetensors file and give that."
        )
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if packed or sum(member.file_size for member in members) > path.stat().st_size:
        raise DataError(f"{name} is refused, because it is compressed and PyTorch's files never are.")


def _why_not_read(path: Path, error: Exception, *, is_zip: bool) -> str:
    if "weights only" not in str(error).lower():
        return _damaged(path, error)
    blocked = _blocked_names(path, str(error), is_zip=is_zip)
    what = f"reading it would run {', '.join(blocked)}" if blocked else "it holds more than tensors"
    return (
        f"{printable(path)} is refused, because {what} and weights are only ever read as data; if you trust "
        "its origin, save its tensors alone to a .safetensors file and give that."
    )


def _blocked_names(path: Path, message: str, *, is_zip: bool) -> list[str]:
    """Return the functions and classes that weights_only would not let the file call. Runs nothing."""
    names: list[str] = []
    if is_zip:
        with contextlib.suppress(Exception), path.open("rb") as file:  # stumbles where the reading did
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    names = names or re.findall(r"GLOBAL ([\w.]+)", message)
    if not names:  # a newer format than PyTorch's own: module and name as two strings, then "look it up"
        with path.open("rb") as file:
            head = file.read(1 << 20)
        pairs = re.findall(rb"\x8c.([\w.]+)\x94?\x8c.([\w.]+)\x94?\x93", head, re.DOTALL)
        names = [b".".join(pair).decode() for pair in pairs]
    harmless = {f"{c.__module__}.{c.__qualname__}" for c in HARMLESS}
    return sorted({printable(name) for name in names} - harmless)


def _damaged(path: Path, error: Exception) -> str:
    reason = printable((str(error) or type(error).__name__).splitlines()[0][:200])
    return f"{printable(path)} is cut short or damaged ({reason}); copy or download it again."


def _collect(content: Any, prefix: str, into: dict[str, Tensor], seen: set[int], depth: int) -> None:
    """Gather the ordinary tensors of nested dictionaries and lists under dotted names."""
    if isinstance(content, Tensor):
        if content.layout == torch.strided and content.device.type == "cpu" and not content.is_quantized:
            into[prefix.removesuffix(".") or "tensor"] = content.detach()
        return
    if not isinstance(content, dict | list | tuple) or id(content) in seen or depth > MAX_DEPTH:
        return
    seen.add(id(content))  # a file may refer to one of its parts twice, or to itself
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in entries:
        _collect(value, f"{prefix}{key}.", into, seen, depth + 1)
