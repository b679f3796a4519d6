"""Online Deep Clustering with the face of a scikit-learn clusterer."""

from __future__ import annotations

import csv
import os
import posixpath
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from odcluster.api import train
from odcluster.config import did_you_mean, option_names
from odcluster.data.sources import FileSource, Manifest, Source, open_source
from odcluster.errors import UserError
from odcluster.evaluation.features import evaluation_loader
from odcluster.explore.assign import assign_images, open_assigner
from odcluster.explore.features import read_memory
from odcluster.models.sobel import represent
from odcluster.models.weights import load_backbone
from odcluster.training.devices import choose_device
from odcluster.training.resolve import choose_workers
from odcluster.training.run import Run
from odcluster.training.survey import extract

Images = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | np.ndarray
BATCH = 64
FEW = 500
"""Up to so many images, starting another process to read them takes longer than reading them."""


class OnlineDeepClustering(ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin, BaseEstimator):
    """Learn features and clusters of images together, by Online Deep Clustering (Zhan et al., CVPR 2020).

    X is a folder of images (or anything else that `odcluster train` takes), a list of paths, or a uint8 array
    [N, H, W] or [N, H, W, 3]. Results are in the order of the list or array; for a folder in that of `paths_`.

    Parameters: `n_clusters` and `random_state` are --clusters and --seed of `odcluster train`; epochs, minutes,
    backbone, weights, image_size, batch_size, lr, recipe, workers and device have their names there; all its other
    options go into the dictionary `options`. None: chosen from the images. `verbose` shows what the command shows.

    `out` is the run directory to make. It holds all that was learned, and `odcluster explore`, `assign` and `export`
    work on it: to save a fitted estimator, give `out` and keep the run (then it can be pickled, too). Without `out` the
    run is temporary and goes with the estimator.

    Attributes: `labels_` [N], -1 for an image that could not be read; `cluster_centers_` [n_clusters, dim], the
    centroids memory, in the space of the neck; `paths_`, the images' names; `run_`, the run directory;
    `n_features_in_`, pixels times channels, for arrays only.

    `predict` gives the cluster of the most similar centroid. On the images of `fit` it may differ from `labels_`, which
    training took from running averages. `transform` gives the backbone's features, as `odcluster embed` does; rows of
    unreadable images are nan.
    """

    _remove: weakref.finalize[Any, Any] | None = None
    """Removes the temporary run of this estimator."""

    def __init__(
        self,
        n_clusters: int | None = None,
        *,
        epochs: int | None = None,
        minutes: float | None = None,
        backbone: str | None = None,
        weights: str | None = None,
        image_size: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        recipe: str | None = None,
        random_state: int | np.random.RandomState | None = 0,
        workers: int | None = None,
        device: str = "auto",
        out: str | os.PathLike[str] | None = None,
        options: dict[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.n_clusters = n_clusters
        self.epochs = epochs
        self.minutes = minutes
        self.backbone = backbone
        self.weights = weights
        self.image_size = image_size
        self.batch_size = batch_size
        self.lr = lr
        self.recipe = recipe
        self.random_state = random_state
        self.workers = workers
        self.device = device
        self.out = out
        self.options = options
        self.verbose = verbose

    def fit(self, X: Images, y: Any = None) -> OnlineDeepClustering:
        """Train on the images; y is not looked at."""
        options = self._options()
        run = self._place()
        data = write_list(run, paths_of(X)) if is_list(X) else cast(Any, X)
        self.run_ = train(data, out=run, recipe=self.recipe, quiet=not self.verbose, **options)
        memory = read_memory(Run(self.run_))
        assert memory is not None
        assert memory.labels is not None
        assert memory.centroids is not None
        manifest = Run(self.run_).manifest()
        if is_list(X):
            place = {path: at for at, path in enumerate(manifest.paths)}
            self.paths_ = paths_of(X)
            ids = np.array([place.get(path, -1) for path in self.paths_])
            self.labels_ = np.where(ids >= 0, memory.labels[ids], -1)
        else:
            self.paths_, self.labels_ = manifest.paths, memory.labels.copy()
        self.cluster_centers_ = memory.centroids.copy()
        self._n_features_out = load_backbone(self.run_).num_features
        if isinstance(X, np.ndarray) and not is_list(X):
            self.n_features_in_ = int(np.prod(X.shape[1:]))
        return self

    def predict(self, X: Images) -> NDArray[np.int64]:
        """The cluster of each image; -1 for one that cannot be read."""
        check_is_fitted(self, "run_")
        source, device = open_images(X), choose_device(self.device)
        assigner = open_assigner(Run(self.run_), device, no_progress)
        workers = self._workers(source, device)
        found = assign_images(assigner, source, batch_size=BATCH, workers=workers, device=device, progress=no_progress)
        labels = np.concatenate([batch.clusters for batch in found])
        warn_unreadable(labels >= 0, source)
        return labels

    def transform(self, X: Images) -> NDArray[np.float32]:
        """The backbone's features of each image [N, D]; nan for one that cannot be read."""
        check_is_fitted(self, "run_")
        source, device = open_images(X), choose_device(self.device)
        backbone = load_backbone(self.run_).to(device)
        with evaluation_loader(source, backbone, self._workers(source, device), device) as loader:
            ids = np.arange(len(source), dtype=np.int64)
            rows, seen = extract(represent(backbone), loader, ids, device, lambda raw, done: None)
        features, usable = rows.cpu().numpy(), seen.cpu().numpy()
        features[~usable] = np.nan
        warn_unreadable(usable, source)
        return features

    def _options(self) -> dict[str, Any]:
        """Options of `train`, from the arguments that have a name of their own and from `options`."""
        own = {
            "clusters": self.n_clusters,
            "epochs": self.epochs,
            "minutes": self.minutes,
            "backbone": self.backbone,
            "weights": self.weights,
            "image_size": self.image_size,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "workers": self.workers,
            "device": self.device,
        }
        more = dict(self.options or {})
        for name in more:
            if name in own or name in ("seed", "recipe", "out", "data", "method"):
                raise UserError(f"`{name}` does not go into options: it is an argument of its own, or cannot be chosen")
            if name not in option_names():
                raise UserError(f"there is no option {name!r}{did_you_mean(name)}")
        seed = self.random_state
        if seed is None or isinstance(seed, np.random.RandomState):
            seed = int(check_random_state(seed).randint(2**31 - 1))
        return {"seed": seed, **{name: value for name, value in own.items() if value is not None}, **more}

    def _place(self) -> Path:
        """Where the run goes: as given, or a temporary folder that goes with the estimator, or at the next fit."""
        if self._remove is not None:
            self._remove()
            self._remove = None
        if self.out is not None:
            return Path(self.out)
        folder = tempfile.mkdtemp(prefix="odcluster-")
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder) / "run"

    def _workers(self, source: Source, device: torch.device) -> int:
        if self.workers is not None:
            return self.workers
        return 0 if len(source) <= FEW else choose_workers(source, device)[0]

    def __getstate__(self) -> dict[str, Any]:
        if self._remove is not None:
            raise UserError(
                "this estimator's run is temporary and cannot be pickled; fit one with out=... and keep the run"
            )
        return super().__getstate__()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        tags.no_validation = True
        return tags


# --- What X may be ----------------------------------------------------------------------------------


def is_list(X: Images) -> bool:
    """Whether these are paths of images, one by one."""
    if isinstance(X, str | os.PathLike):
        return False
    if isinstance(X, np.ndarray):
        return X.dtype.kind in "OU"
    return True


def paths_of(X: Images) -> list[str]:
    paths = list(X) if isinstance(X, Sequence | np.ndarray) and not isinstance(X, str) else []
    if not paths or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise UserError("X must be a folder, a list of paths, or a uint8 array [N, H, W] or [N, H, W, 3]")
    return [posixpath.normpath(os.path.abspath(os.fsdecode(path))) for path in paths]


def open_images(X: Images) -> Source:
    """The images in the order of X."""
    if not is_list(X):
        return open_source(cast(Any, X))
    paths = paths_of(X)
    return FileSource(Manifest("list", "", paths, np.zeros(len(paths), np.int64)))


def write_list(run: Path, paths: list[str]) -> Path:
    """The list as a file beside the run, so that the run can be resumed and explored."""
    path = run.with_name(f"{run.name}-images.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise UserError(f"{path} exists, and the list of images goes there; choose another out")
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path"])
        writer.writerows([path] for path in dict.fromkeys(paths))
    return path


def warn_unreadable(usable: NDArray[np.bool_], source: Source) -> None:
    if not usable.all():
        first = source.manifest.paths[int(np.flatnonzero(~usable)[0])]
        warnings.warn(f"{(~usable).sum()} of {len(usable)} images cannot be read, the first: {first!r}", stacklevel=3)


def no_progress(activity: str, done: int, total: int) -> None:
    return None
