"""odcluster: from a folder of unlabelled images to clusters and features, by Online Deep Clustering.

The verbs of the command line are functions of the same names and options here; they are imported when first used, so
that `import odcluster` is quick. Only `explore` is elsewhere, `odcluster.gallery.explore`: here it is a package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "OnlineDeepClustering",
    "__version__",
    "assign",
    "demo",
    "embed",
    "evaluate",
    "export",
    "load_backbone",
    "report",
    "reproduce",
    "resume",
    "train",
]

if TYPE_CHECKING:
    from odcluster.api import resume, train
    from odcluster.demonstrate import demo
    from odcluster.deploy import assign, embed, export
    from odcluster.estimator import OnlineDeepClustering
    from odcluster.gallery_report import report
    from odcluster.judge import evaluate
    from odcluster.models.weights import load_backbone
    from odcluster.reproduce import reproduce

_HOMES = {
    "train": "odcluster.api",
    "resume": "odcluster.api",
    "demo": "odcluster.demonstrate",
    "evaluate": "odcluster.judge",
    "report": "odcluster.gallery_report",
    "reproduce": "odcluster.reproduce",
    "assign": "odcluster.deploy",
    "embed": "odcluster.deploy",
    "export": "odcluster.deploy",
    "OnlineDeepClustering": "odcluster.estimator",
    "load_backbone": "odcluster.models.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'odcluster' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
