"""Lets the tests of this room import torchvision, their reference, beside a CPU build of torch.

That build cannot load torchvision's compiled operators, and `import torchvision` then stops at the first of
them it wants to describe. No transform needs them, so their schemas are declared, only when they are missing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def declare_missing_operators() -> None:
    specification = importlib.util.find_spec("torchvision")  # finds it without importing it
    assert specification is not None
    assert specification.origin is not None
    for library in Path(specification.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


declare_missing_operators()
