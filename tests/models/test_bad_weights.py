"""Weights files that are hostile or damaged: nothing runs, and each is one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import resource
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.storage
from donors import donor, fresh, prefixed
from safetensors.torch import save_file
from torch import nn

from odcluster.errors import DataError
from odcluster.models import weights
from odcluster.models.checkpoints import read_tensors
from odcluster.models.weights import load_backbone_weights

# Nothing that is read executes code.


class Call:
    """Pickles to a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def malicious(kind: str, marker: Path) -> bytes:
    touch = Call(os.system, f"touch '{marker}'")
    python = Call(eval, f"open({str(marker)!r}, 'w').close()")
    buffer = io.BytesIO()
    if kind == "system":
        torch.save({"state_dict": {"a": torch.zeros(1), "b": touch}}, buffer)
    elif kind == "eval":
        torch.save({"a": [python]}, buffer)
    elif kind == "nested":
        inner = io.BytesIO()
        torch.save(touch, inner)
        torch.save({"a": Call(torch.storage._load_from_bytes, inner.getvalue())}, buffer)
    elif kind == "legacy":
        torch.save({"a": touch}, buffer, _use_new_zipfile_serialization=False)
    elif kind == "raw":
        buffer.write(pickle.dumps({"a": touch}))
    elif kind == "raw2":
        buffer.write(pickle.dumps({"a": python}, protocol=2))
    elif kind == "protocol4":
        torch.save({"a": touch}, buffer, pickle_protocol=4)
    return buffer.getvalue()


SYSTEM = f"{os.system.__module__}.system"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("system", SYSTEM),
        ("eval", "eval"),
        ("nested", "torch.storage._load_from_bytes"),
        ("legacy", SYSTEM),
        ("raw", SYSTEM),
        ("raw2", "eval"),
        ("protocol4", SYSTEM),
    ],
)
@pytest.mark.parametrize("file_name", ["weights.pth", "weights.safetensors"])
def test_payloads_do_not_run_and_are_named(kind: str, name: str, file_name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / file_name
    path.write_bytes(malicious(kind, marker))
    with pytest.raises(DataError) as caught:
        load_backbone_weights(fresh(), path)
    assert name in str(caught.value)
    assert not marker.exists()
    assert os.listdir(tmp_path) == [file_name], "nothing may be written either"


def test_a_whole_module_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    with pytest.raises(DataError, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_tensors(tmp_path / "model.pth")


def test_no_source_file_reads_unsafely() -> None:
    for path in Path(weights.__file__).parent.glob("*.py"):
        source = path.read_text()
        assert "import pickle" not in source
        assert "weights_only=False" not in source
        assert len(re.findall(r"torch\.load\(", source)) == source.count('map_location="cpu", weights_only=True)')


# Files that are not what they should be: one sentence each.


def safetensors_bytes(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def zipped(name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def scripted() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but such files exist
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), buffer)
    return buffer.getvalue()


WHOLE = saved({"a": torch.zeros(1000)})
OLD = saved({"a": torch.zeros(1000)}, _use_new_zipfile_serialization=False)
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"hello, these are weights\n", "text file"),
    "umlauts": ("schöne Gewichte".encode(), "text file"),
    "html": (b"\n<!DOCTYPE html>\n<html></html>", "web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00", "neither a safetensors nor a PyTorch file"),
    "one byte": (b"\x00", "neither a safetensors nor a PyTorch file"),
    "half a zip": (WHOLE[: len(WHOLE) // 2], "cut short or damaged"),
    "half an old file": (OLD[: len(OLD) // 2], "cut short or damaged"),
    "old header": (OLD[:30], "cut short or damaged"),
    "other zip": (zipped("a.txt", b"hello"), "not PyTorch's"),
    "zip bomb": (zipped("archive/data.pkl", bytes(10**7), zipfile.ZIP_DEFLATED), "compressed"),
    "script": (scripted(), "TorchScript"),
    "no tensors": (saved({"epoch": 3}), "no tensors"),
    "huge view": (saved({"a": torch.zeros(1).expand(10**12)}), "larger than its data"),
    "header too long": (safetensors_bytes({"a": {}}, length=2**40), "cut short or damaged"),
    "header too long, short file": (safetensors_bytes(b"{", length=2**63), "cut short or damaged"),
    "half a safetensors": (safetensors_bytes({"a": entry([4], 0, 16)}, bytes(8)), "cut short or damaged"),
    "overlap": (
        safetensors_bytes({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        "cut short or damaged",
    ),
    "huge shape": (safetensors_bytes({"a": entry([2**40], 0, 8)}, bytes(8)), "cut short or damaged"),
    "overflow": (safetensors_bytes({"a": entry([2**62, 2**62], 0, 8)}, bytes(8)), "cut short or damaged"),
    "deep header": (safetensors_bytes(b'{"a":' + b"[" * 10**5), "cut short or damaged"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_one_sentence(kind: str, tmp_path: Path) -> None:
    content, expected = BAD_FILES[kind]
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=expected) as caught:
        read_tensors(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000, "more than 50 MB"


@pytest.mark.parametrize("whole", [WHOLE, OLD])
def test_files_cut_anywhere_never_do_worse(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    for length in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            read_tensors(path)


def test_bytes_flipped_anywhere_never_do_worse(tmp_path: Path) -> None:
    small = saved({"a": torch.zeros(3)})
    path = tmp_path / "weights.pth"
    for position in range(0, len(small), 11):
        path.write_bytes(small[:position] + bytes([small[position] ^ 0xFF]) + small[position + 1 :])
        with contextlib.suppress(DataError):  # anything else fails the test
            read_tensors(path)


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.pth")
    torch.save({"a": torch.ones(2)}, tmp_path / "b.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "c.ckpt", _use_new_zipfile_serialization=False)
    for name in ("a.pth", "b.safetensors", "c.ckpt"):
        assert torch.equal(read_tensors(tmp_path / name)["a"], torch.ones(2))


def test_nested_content_is_flattened_once(tmp_path: Path) -> None:
    content: dict[Any, Any] = {"state": [{"x": torch.zeros(1)}, (torch.ones(2),)], 3: torch.zeros(3)}
    content["itself"] = content
    torch.save(content, tmp_path / "a.pth")
    assert {n: len(t) for n, t in read_tensors(tmp_path / "a.pth").items()} == {
        "state.0.x": 1,
        "state.1.0": 2,
        "3": 3,
    }


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    state = prefixed(donor().state_dict(), "\x1b[2J\nfake.")
    torch.save({**state, "\x1b[31mred.x": torch.zeros(1)}, tmp_path / "a.pth")
    report = load_backbone_weights(fresh(), tmp_path / "a.pth")
    assert "\x1b" not in report.text()
    assert len(report.text().splitlines()) == 4


def test_missing_and_special_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not exist"):
        read_tensors(tmp_path / "nothing.pth")
    with pytest.raises(DataError, match=r"backbone/model\.safetensors"):
        read_tensors(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not an ordinary file"):
        read_tensors(tmp_path / "pipe")
