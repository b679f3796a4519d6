"""odcluster: from a folder of unlabelled images to clusters and features, by Online Deep Clustering.

The verbs of the command line are functions of the same names and options here; they are imported when first used, so
that `import odcluster` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "demo", "evaluate", "load_backbone", "resume", "train"]

if TYPE_CHECKING:
    from odcluster.api import resume, train
    from odcluster.demonstrate import demo
    from odcluster.judge import evaluate
    from odcluster.models.weights import load_backbone

_HOMES = {
    "train": "odcluster.api",
    "resume": "odcluster.api",
    "demo": "odcluster.demonstrate",
    "evaluate": "odcluster.judge",
    "load_backbone": "odcluster.models.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'odcluster' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
