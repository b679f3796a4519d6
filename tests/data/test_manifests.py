"""Lists of images: read back as written, and compared with what is there now."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from odcluster.data import arrays
from odcluster.data.sources import Manifest, open_source
from odcluster.errors import DataError

# --- Manifests --------------------------------------------------------------------------------------


def manifest(*names: str, size: int = 10, content: str = "") -> Manifest:
    return Manifest("folder", "/photos", list(names), np.full(len(names), size, np.int64), content=content)


@pytest.mark.parametrize("labels", [None, np.array([0, -1, 2**40, 1, 0])])
@pytest.mark.parametrize("class_names", [None, ["a,b", 'qu"ote', "new\nline"]])
def test_a_written_manifest_reads_back(
    tmp_path: Path, labels: np.ndarray | None, class_names: list[str] | None
) -> None:
    names = ["#a,b.jpg", 'c"d".jpg', "e\nf\r\ng.jpg", os.fsdecode(b"\xff\xfe.jpg"), "日本 é.jpg"]
    sizes = np.array([0, 1, 2**40, 3, 4])
    before = Manifest("class tree", "/a b/\n,c", names, sizes, labels, class_names, "uint8 (2, 3) abc")
    before.write(tmp_path / "manifest.csv")
    after = Manifest.read(tmp_path / "manifest.csv")
    assert os.listdir(tmp_path) == ["manifest.csv"]
    assert (after.kind, after.root, after.paths) == (before.kind, before.root, before.paths)
    assert (after.class_names, after.content) == (before.class_names, before.content)
    np.testing.assert_array_equal(after.sizes, sizes)
    assert (after.labels is None) == (labels is None)
    if labels is not None:
        np.testing.assert_array_equal(after.labels, labels)
    assert after.fingerprint() == before.fingerprint()
    assert before.difference(after) == ""


def test_a_damaged_manifest_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "manifest.csv"
    manifest("a.jpg", "b.jpg").write(path)
    lines = path.read_text().splitlines()
    for text in (
        "",
        "id,path\n",
        "\n".join(lines[:4]),
        "\n".join(lines[:-1]) + "\n1,b",
        "\n".join(lines[:6] + lines[7:]),
    ):
        path.write_text(text)
        with pytest.raises(DataError):
            Manifest.read(path)
    with pytest.raises(DataError):
        Manifest.read(tmp_path / "gone.csv")


def test_the_fingerprint_sees_names_sizes_and_content_but_not_the_place() -> None:
    first = manifest("a", "b")
    moved = Manifest("list", "/elsewhere", ["a", "b"], first.sizes, np.zeros(2, np.int64), ["x"])
    assert first.fingerprint() == moved.fingerprint()
    others = [
        manifest("a", "c"),
        manifest("ab"),
        manifest("a", "b", size=11),
        manifest("a", "b", content="x"),
    ]
    others += [manifest("a"), manifest("a", "b", "c"), manifest()]
    assert len({first.fingerprint(), *(other.fingerprint() for other in others)}) == 8


def test_differences_are_counted_and_named() -> None:
    before = manifest("a", "b", "c", "d", "e")
    sizes = np.array([10, 11, 10, 10, 10, 10])
    now = Manifest("folder", "/x", ["a", "b", "v", "w", "x", "y"], sizes)
    text = before.difference(now)
    assert text == "Of 5 images: 4 added (v, w, x, ...), 3 removed (c, d, e), 1 changed in size (b)."
    assert before.difference(before) == ""
    assert "content" in before.difference(manifest("a", "b", "c", "d", "e", content="other"))


def test_changed_content_of_arrays_is_noticed(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (40, 30, 30), dtype=np.uint8)
    changed = array.copy()
    changed[0, 0, 0] ^= 1
    first, second = open_source(array).manifest, open_source(changed).manifest
    assert first.fingerprint() != second.fingerprint()
    assert first.fingerprint() == open_source(array.copy()).manifest.fingerprint()
    assert "content" in first.difference(second)
    np.save(tmp_path / "a.npy", array)
    first = open_source(tmp_path / "a.npy").manifest
    np.save(tmp_path / "a.npy", changed)
    assert first.fingerprint() != open_source(tmp_path / "a.npy").manifest.fingerprint()


def test_hashing_a_file_samples_its_whole_length(tmp_path: Path) -> None:
    path = tmp_path / "a"
    data = bytearray(200_000)
    seen = set()
    for position in (None, 0, 100_000, 199_999):
        changed = data.copy()
        if position is not None:
            changed[position] = 1
        path.write_bytes(changed)
        seen.add(arrays.sampled_hash(str(path), num_blocks=5, block=1001))
    path.write_bytes(data + b"\0")
    seen.add(arrays.sampled_hash(str(path), num_blocks=5, block=1001))
    assert len(seen) == 5
