"""What is installed here and what it can do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

import torch

from odcluster import __version__
from odcluster.recipes import RECIPES
from odcluster.training.devices import has_bfloat16

REQUIRED = [
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pillow",
    "opencv-python-headless",
    "simplejpeg",
    "scikit-learn",
    "safetensors",
    "matplotlib",
]
OPTIONAL = {
    "starlette": "explore",
    "uvicorn": "explore",
    "pyarrow": "parquet",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "umap-learn": "umap",
}
"""Packages that some verbs need, and the extra of `pip install 'odcluster[...]'` that brings each."""


def info() -> str:
    """Lines for people."""
    lines = [
        f"odcluster {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "",
    ]
    lines += [f"  {name:24} {version(name)}" for name in REQUIRED]
    lines += ["", "optional"]
    for name, extra in OPTIONAL.items():
        found = version(name)
        lines.append(f"  {name:24} {found}" + (f": pip install 'odcluster[{extra}]'" if found == "missing" else ""))
    lines += ["", "devices"]
    cpu = torch.device("cpu")
    lines.append(
        f"  cpu                      {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads{native(cpu)}"
    )
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device = torch.device("cuda", index)
        lines.append(f"  {device!s:24} {properties.name}, {properties.total_memory >> 30} GB{native(device)}")
    if torch.backends.mps.is_available():
        lines.append("  mps                      Apple GPU")
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        lines.append("  no GPU: training uses the CPU")
    lines += ["", "recipes (odcluster train DATA --recipe NAME)"]
    lines += [f"  {name:24} {(make.__doc__ or '').splitlines()[0]}" for name, make in RECIPES.items()]
    return "\n".join(lines)


def native(device: torch.device) -> str:
    return ", bfloat16" if has_bfloat16(device) else ""


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
