"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import make_images

# Test processes run side by side: more threads than cores make everything several times slower.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """97 images: a number that no batch size divides."""
    return make_images(tmp_path_factory.mktemp("data") / "images", 97)
