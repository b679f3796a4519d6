"""New images get the cluster that training would give them, merged and named as people want it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import TINY, make_images

import odcluster
from odcluster.clustering.pca import pca_whiten, whitening
from odcluster.data.sources import open_source
from odcluster.data.views import evaluation_view
from odcluster.errors import DataError
from odcluster.explore.assign import Assigned, assign_images, open_assigner
from odcluster.explore.collection import open_collection
from odcluster.explore.curation import open_curation
from odcluster.explore.export import read_clusters_csv
from odcluster.explore.features import load_network, read_memory
from odcluster.training import checkpoint
from odcluster.training.run import Run

CPU = torch.device("cpu")
SHORT = {**TINY, "epochs": 2, "warm_share": 0.5}


@pytest.fixture(scope="module")
def trained(image_folder, tmp_path_factory) -> Run:
    run = tmp_path_factory.mktemp("runs") / "odc"
    return Run(odcluster.train(image_folder, out=run, quiet=True, **SHORT))


@pytest.fixture
def run(trained, tmp_path) -> Run:
    """A run of one's own, to edit."""
    shutil.copytree(trained.path, tmp_path / "run")
    return Run(tmp_path / "run")


def quietly(activity: str, done: int, total: int) -> None:
    return None


def assigned(run: Run, data: Path, batch_size: int = 16) -> Assigned:
    """All batches as one."""
    batches = list(
        assign_images(
            open_assigner(run, CPU, quietly),
            open_source(data),
            batch_size=batch_size,
            workers=0,
            device=CPU,
            progress=quietly,
        )
    )
    columns = [np.concatenate([getattr(b, name) for b in batches]) for name in ("ids", "clusters", "confidences")]
    distances = np.concatenate([b.distances for b in batches])
    return Assigned(*columns, distances, [entry for b in batches for entry in b.refused])


def test_cluster_confidence_and_distance_are_those_of_the_centroids_memory(trained, image_folder):
    found = assigned(trained, image_folder)
    config, memory = trained.config(), read_memory(trained)
    network = load_network(trained, config, with_neck=True)
    image = open_source(image_folder).image(11)
    pixels = torch.from_numpy(evaluation_view(image, config.image_size))[None].float() / 255
    pixels = ((pixels - torch.tensor(network.backbone.mean)) / torch.tensor(network.backbone.std)).movedim(-1, 1)
    half = config.running.precision == "bfloat16"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        feature = network.neck(network.backbone(pixels))[0].float().numpy()
    feature /= np.linalg.norm(feature)
    nearest = np.linalg.norm(memory.centroids - feature, axis=1).argmin()
    cosines = memory.centroids @ feature / np.linalg.norm(memory.centroids, axis=1)
    exponentials = np.exp(cosines / config.head.temperature)
    assert found.clusters[11] == nearest
    assert found.confidences[11] == pytest.approx(exponentials[nearest] / exponentials.sum(), abs=1e-4)
    assert found.distances[11] == pytest.approx(1 - cosines[nearest], abs=1e-4)


def test_the_batch_size_changes_nothing_but_rounding(trained, image_folder):
    one, other = assigned(trained, image_folder, 97), assigned(trained, image_folder, 7)
    assert one.ids.tolist() == other.ids.tolist() == list(range(97))
    assert (one.clusters == other.clusters).mean() > 0.98
    np.testing.assert_allclose(one.confidences, other.confidences, atol=1e-3)


def test_after_a_final_pass_the_own_images_get_the_clusters_of_training(image_folder, tmp_path):
    run = Run(odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **{**SHORT, "final_pass": True}))
    found = assigned(run, image_folder)
    assert (found.clusters == read_clusters_csv(run.clusters_file).labels).mean() > 0.98


def test_an_unreadable_image_has_no_cluster_and_disturbs_no_other(trained, tmp_path):
    folder = make_images(tmp_path / "new", 20, seed=3)
    whole = assigned(trained, folder)
    for broken in (0, 7, 19):
        (folder / f"image{broken:04d}.png").write_bytes(b"no image")
    found = assigned(trained, folder)
    assert sorted(image for image, _ in found.refused) == [0, 7, 19]
    assert found.clusters[[0, 7, 19]].tolist() == [-1, -1, -1]
    assert np.isnan(found.confidences[[0, 7, 19]]).all()
    kept = np.setdiff1d(np.arange(20), [0, 7, 19])
    assert (found.clusters[kept] == whole.clusters[kept]).all()
    np.testing.assert_allclose(found.distances[kept], whole.distances[kept], atol=1e-4)


def test_a_batch_without_any_readable_image_is_assigned_too(trained, tmp_path):
    folder = make_images(tmp_path / "new", 6)
    for broken in range(4):
        (folder / f"image{broken:04d}.png").write_bytes(b"")
    found = assigned(trained, folder, batch_size=2)
    assert (found.clusters >= 0).tolist() == [False] * 4 + [True] * 2


def test_merged_clusters_are_one_and_their_probabilities_add_up(run, image_folder):
    before = assigned(run, image_folder)
    first, second, *_ = np.unique(before.clusters).tolist()
    curation = open_curation(run.path)
    curation.add("name", {"cluster": first, "name": "cats", "expected": ""}, num_images=97, num_clusters=6)
    curation.add("merge", {"clusters": [first, second]}, num_images=97, num_clusters=6)
    after = assigned(run, image_folder)
    assert (after.clusters == np.where(before.clusters == second, first, before.clusters)).all()
    merged = after.clusters == first
    assert (after.confidences[merged] > before.confidences[merged]).all()
    np.testing.assert_allclose(after.confidences[~merged], before.confidences[~merged], atol=1e-6)
    assert open_assigner(run, CPU, quietly).names == {first: "cats"}


def test_deepcluster_finds_its_own_clusters_again(image_folder, tmp_path):
    names = ("backbone", "image_size", "crop_size", "batch_size", "workers", "clusters", "dim")
    options = {"method": "deepcluster", "epochs": 1, **{name: TINY[name] for name in names}}
    run = Run(odcluster.train(image_folder, out=tmp_path / "run", quiet=True, **options))
    found = assigned(run, image_folder)
    assert (found.clusters == read_clusters_csv(run.clusters_file).labels).mean() > 0.8
    assert (found.confidences > 1 / 6).all()


def test_the_clusters_of_a_pretext_task_are_those_that_explore_shows(image_folder, tmp_path):
    options = {name: TINY[name] for name in ("backbone", "image_size", "crop_size", "batch_size", "workers")}
    run = Run(odcluster.train(image_folder, out=tmp_path / "run", quiet=True, method="rotation", epochs=1, **options))
    shown = open_collection(run.path).view().clusters.labels
    assert (assigned(run, image_folder).clusters == shown).mean() > 0.95


@pytest.mark.parametrize("dim", [3, 20])
def test_whitening_is_that_of_training(dim):
    rows = torch.randn(50, 12, generator=torch.Generator().manual_seed(dim)) * torch.linspace(0.1, 3, 12) + 5
    mean, projection = whitening(rows, dim)
    torch.testing.assert_close(((rows - mean) @ projection).float(), pca_whiten(rows, dim))


def test_a_run_that_cannot_say_yet_is_explained(run):
    shutil.rmtree(run.checkpoints)
    with pytest.raises(DataError, match="odcluster resume"):
        open_assigner(run, CPU, quietly)


def test_a_run_in_its_warm_start_has_no_clusters_yet(run):
    newest = checkpoint.load(checkpoint.candidates(run.checkpoints)[0])
    newest.tensors["memory"]["samples.labels"].fill_(-1)
    step = newest.state.pop("step") + 1
    checkpoint.save(run.checkpoints, step, newest.tensors, newest.state)
    with pytest.raises(DataError, match="warm start"):
        open_assigner(run, CPU, quietly)
