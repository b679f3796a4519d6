"""torchvision is the reference for the views; here it may need help to be imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import odcluster.models.compat  # noqa: F401


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
