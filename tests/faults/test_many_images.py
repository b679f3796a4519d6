"""What the fast tests have no time for: every damaged image of the fuzz, a million names, many real files."""

from __future__ import annotations

import os
import stat
import time
import tracemalloc
from collections.abc import Iterator

import figures
import pytest
from fuzz_images import fuzz

from odcluster.data.sources import open_source

pytestmark = pytest.mark.faults


def test_a_hundred_images_a_thousand_times_damaged():
    outcomes = fuzz(100, 1000)
    survived = outcomes["pixels"] + outcomes["refused"]
    for _ in range(100):
        figures.record("1,000 damaged images", survived == 100_000)
    assert set(outcomes) == {"pixels", "refused", "most MB"}, outcomes
    assert survived == 100_000
    assert outcomes["most MB"] < 1000


class Listed:
    """A folder of a million names as os.scandir would list it, in no order."""

    status = os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, 123_456, 0, 0, 0), {"st_mtime_ns": 1_700_000_000_123_456_789})

    def __init__(self, number: int) -> None:
        self.name = f"holiday {number * 7919 % 1_000_003:07d}.jpg"

    def is_dir(self) -> bool:
        return False

    def stat(self) -> os.stat_result:
        return self.status


def test_a_million_names_are_listed_in_ten_seconds_with_little_memory(tmp_path, monkeypatch):
    """The listing is made up: the cost of the file system itself is not ours. Time is that of the processor."""

    class Entries:
        def __enter__(self) -> Iterator[Listed]:
            return map(Listed, range(1_000_000))

        def __exit__(self, *exception: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", lambda path: Entries())
    began = time.process_time()
    manifest = open_source(tmp_path).manifest
    manifest.fingerprint()
    seconds = time.process_time() - began
    assert len(manifest) == 1_000_000
    assert manifest.paths[0] == "holiday 0000000.jpg"
    assert seconds < 10
    del manifest
    tracemalloc.start()
    manifest = open_source(tmp_path).manifest
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(manifest) == 1_000_000
    print(f"{seconds:.1f} s, {kept / 1e6:.0f} MB kept, {most / 1e6:.0f} MB at most")
    assert kept < 150e6  # the names themselves and 16 bytes each
    assert most < 400e6


def test_real_files_in_number(tmp_path):
    for folder in range(100):
        (tmp_path / f"{folder:03d}").mkdir()
        for number in range(1000):
            os.close(os.open(tmp_path / f"{folder:03d}" / f"{number:04d}.jpg", os.O_CREAT | os.O_WRONLY))
    began = time.process_time()
    manifest = open_source(tmp_path).manifest
    print(f"100,000 files: {time.process_time() - began:.1f} s")
    assert len(manifest) == 100_000
    assert time.process_time() - began < 4
