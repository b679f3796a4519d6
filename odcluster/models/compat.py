"""timm and torchvision, importable whatever build of torch is installed, and imported when first used, as
`compat.timm` and `compat.torchvision`: that takes longer than all else at the start, and our own networks need neither.

Why: the CPU build of torch cannot load the compiled operators of the torchvision that PyPI serves (they link
against CUDA libraries). torchvision carries on without them, until it describes the output of `nms` and
`qnms` to torch: those two operators do not exist then, and `import torchvision`, hence `import timm`, stops
with "operator torchvision::nms does not exist". We use nothing of the compiled part, and declaring the two
schemas beforehand is enough for the Python part to import. A torchvision that loads is left alone.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

import torch


def declare_missing_operators() -> bool:
    """Declare the two operators if torchvision's library cannot provide them; return whether it did so."""
    if "torchvision" in sys.modules or _compiled_library_loads():
        return False
    for operator in ("nms", "qnms"):
        if hasattr(torch.ops.torchvision, operator):  # somebody else had to do the same
            continue
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def _compiled_library_loads() -> bool:
    package = importlib.util.find_spec("torchvision")  # finds it without importing it
    if package is None or not package.submodule_search_locations:
        return True  # no torchvision at all: let the import below say so
    folder = package.submodule_search_locations[0]
    library = importlib.machinery.PathFinder.find_spec("_C", [folder])
    if library is None or library.origin is None:
        return False
    if sys.platform == "win32":  # its own libraries lie beside it
        os.add_dll_directory(folder)
    try:
        torch.ops.load_library(library.origin)  # torchvision loads the same file again, which is free
    except OSError:
        return False
    return True


def __getattr__(name: str) -> Any:
    """`compat.timm` and `compat.torchvision`."""
    if name not in ("timm", "torchvision"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import timm
    import torchvision

    globals().update(timm=timm, torchvision=torchvision)
    return globals()[name]


declare_missing_operators()
