"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

# Test processes run side by side: more threads than cores make everything several times slower. Here for all that they
# start and for numpy, which looks only once; below for torch, whoever imported it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from tiny_runs import make_images

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """97 images: a number that no batch size divides."""
    return make_images(tmp_path_factory.mktemp("data") / "images", 97)
