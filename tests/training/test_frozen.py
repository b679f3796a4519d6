"""Training on the features of a frozen backbone: made once, resumable, and the backbone never touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import TINY, make_images, metrics_without_timings, state_hash

import odcluster
from odcluster.build import build_loader, build_method
from odcluster.clustering.kmeans import nearest_centroids
from odcluster.data.sources import open_source
from odcluster.errors import Interrupted, UserError
from odcluster.explore.export import read_clusters_csv
from odcluster.models.heads import l2_normalise
from odcluster.training import checkpoint
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag
from odcluster.training.run import open_run
from odcluster.training.survey import extract

OPTIONS = {name: value for name, value in TINY.items() if name not in ("backbone", "image_size", "crop_size")}
OPTIONS |= {"fine_clusters": 12, "neighbours": 3, "cached_views": 2, "kmeans_restarts": 1}


@pytest.fixture(scope="module")
def weights(image_folder, tmp_path_factory) -> Path:
    return odcluster.train(image_folder, out=tmp_path_factory.mktemp("weights") / "run", quiet=True, **TINY)


@pytest.fixture(scope="module")
def run(image_folder, weights, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("frozen") / "run"
    return odcluster.train(image_folder, out=out, quiet=True, weights=weights, **OPTIONS)


def test_on_a_cpu_weights_mean_a_frozen_backbone(run):
    config = open_run(run).config()
    assert config.recipe == "finetune_odc"
    assert config.fine_tuning.frozen is True
    assert config.warm_start.fine_share == 0.5


def test_the_backbone_is_the_one_it_started_from(run, weights):
    before, after = (load_file(path / "backbone" / "model.safetensors") for path in (weights, run))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_features_are_those_of_the_backbone(run, image_folder, weights):
    """The first of the kept features is the evaluation view's, in the precision of the run."""
    config, source = open_run(run).config(), open_source(image_folder)
    method = build_method(config, len(source), torch.device("cpu"), Console(quiet=True))
    method.backbone.eval()
    half = config.running.precision == "bfloat16"
    with (
        build_loader(config, source, method, torch.device("cpu"), Console(quiet=True), StopFlag()) as loader,
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        ids = np.arange(len(source))
        rows, _ = extract(method.backbone, loader, ids, torch.device("cpu"), lambda raw, done: None)
    kept = np.load(run / "features" / "features.npy")
    assert kept.shape == (3, len(source), 192)
    assert kept.dtype == np.float16
    np.testing.assert_allclose(kept[0], rows.numpy(), rtol=2e-3, atol=1e-4)
    assert not np.array_equal(kept[1], kept[2])


def test_labels_are_those_of_the_evaluation_views(run, image_folder):
    """The final pass: clusters.csv says what the network and the centroids say of each image, backbone included."""
    config, source = open_run(run).config(), open_source(image_folder)
    found = checkpoint.find(run / "checkpoints", lambda warning: None)
    assert found is not None
    cpu, quiet = torch.device("cpu"), Console(quiet=True)
    method = build_method(config, len(source), cpu, quiet, found)
    method.load_state_dict({**found.tensors["model"], **found.tensors["memory"]})
    method.eval()
    with build_loader(config, source, method, cpu, quiet, StopFlag()) as loader:
        rows, _ = extract(method.embed_images, loader, np.arange(len(source)), cpu, lambda raw, done: None)
    labels, _, _ = nearest_centroids(l2_normalise(rows), method.centroids.centroids)
    written = read_clusters_csv(run / "clusters.csv").labels
    assert (labels.numpy() == written).mean() > 0.98  # features are kept in half precision
    assert len(method.centroids.counts) == TINY["clusters"]


def test_stopped_anywhere_and_resumed(run, image_folder, weights, tmp_path, monkeypatch):
    polls = {"left": 1}

    def poll(self):
        polls["left"] -= 1
        if polls["left"] < 0:
            raise Interrupted("stopped as asked")

    monkeypatch.setattr(StopFlag, "poll", poll)
    again, sittings = tmp_path / "run", 0
    with pytest.raises(Interrupted, match="resume"):
        odcluster.train(image_folder, out=again, quiet=True, weights=weights, **OPTIONS)
    while True:
        polls["left"] = (4, 9, 40, 100)[sittings % 4]  # a hundred get through the first clusters
        sittings += 1
        try:
            odcluster.resume(again, quiet=True)
            break
        except Interrupted:
            assert sittings < 60
    assert sittings >= 3
    assert (again / "features" / "features.npy").read_bytes() == (run / "features" / "features.npy").read_bytes()
    assert metrics_without_timings(again) == metrics_without_timings(run)
    assert state_hash(again) == state_hash(run)


def test_an_unreadable_image_is_named_and_has_no_cluster(weights, tmp_path):
    folder = make_images(tmp_path / "images", 60)
    (folder / "image0007.png").write_bytes(b"not an image")
    run = odcluster.train(folder, out=tmp_path / "run", quiet=True, weights=weights, max_refused=0.1, **OPTIONS)
    table = read_clusters_csv(run / "clusters.csv")
    assert [name for name, label in zip(table.names, table.labels, strict=True) if label < 0] == ["image0007.png"]
    assert "image0007.png" in (run / "bad_images.csv").read_text()


def test_frozen_needs_weights(image_folder, tmp_path):
    with pytest.raises(UserError, match="give --weights"):
        odcluster.train(image_folder, out=tmp_path / "run", quiet=True, frozen=True, **TINY)


def damaged_features(folder: Path, damage: str) -> None:
    file = folder / "features.npy"
    if damage == "gone":
        shutil.rmtree(folder)
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        data = bytearray(file.read_bytes())
        data[-500] ^= 1
        file.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", ["gone", "short", "a bit flipped"])
def test_damaged_features_are_made_again_by_the_same_backbone(damage, run, image_folder, weights, tmp_path):
    """Also when a checkpoint is there already, and the weights it all began with are not needed for it."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    before = (run / "features" / "features.npy").read_bytes()
    shutil.rmtree(copy / "backbone")
    damaged_features(copy / "features", damage)
    odcluster.resume(copy, quiet=True)
    assert (copy / "features" / "features.npy").read_bytes() == before
    assert state_hash(copy) == state_hash(run)
