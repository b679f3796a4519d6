"""One ODC step against the paper's text: what is read, in which order, and what changes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from odcluster.clustering import kmeans
from odcluster.config import Config, changed
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.methods.interface import Batch, Outcome
from odcluster.methods.odc import ODC, fine_epochs, warm_epochs
from odcluster.models.backbones import create_backbone
from odcluster.recipes import odc_resnet50_imagenet, odc_small

IMAGES = 80


class FixedSurvey:
    """The evaluation views of a fixed set of images, given as tensors."""

    def __init__(self, images: torch.Tensor, unreadable: tuple[int, ...] = ()) -> None:
        self.images, self.unreadable, self.calibrated = images, unreadable, 0

    @torch.no_grad()
    def features(self, embed, out=None):
        embed.__self__.eval()
        seen = torch.ones(len(self.images), dtype=torch.bool)
        seen[list(self.unreadable)] = False
        rows = embed(self.images)
        return (rows if out is None else out.copy_(rows)), seen

    def calibrate(self, network, embed, num_batches):
        self.calibrated += num_batches

    def poll(self, doing, done, total):
        assert 0 <= done <= total


def settings(recipe=odc_resnet50_imagenet, **options) -> Config:
    small = {"backbone": "smallconv", "clusters": 5, "small_cluster": 3, "dim": 6, "hidden": 12, "epochs": 4}
    return changed(recipe(), **{**small, "image_size": 16, "batch_size": 10, "lr": 0.05, **options})


def make(config: Config, seed: int = 0) -> tuple[ODC, torch.Tensor]:
    torch.manual_seed(seed)
    method = ODC(create_backbone("smallconv", image_size=16), IMAGES, config)
    images = torch.randn(IMAGES, 3, 16, 16)
    method.begin_epoch(method.warm_epochs, FixedSurvey(images))
    return method.train(), images


def test_initial_memories_are_k_means_of_normalised_features():
    method, images = make(settings(dropout=0.0))
    with torch.no_grad():
        features = functional.normalize(method.eval().embed(images), dim=1)
    torch.testing.assert_close(method.samples.rows, features)
    assert int(method.centroids.counts.min()) > 3
    for cluster in range(5):
        members = method.samples.members(cluster)
        torch.testing.assert_close(method.centroids.centroids[cluster], features[members].mean(dim=0))


def test_the_loss_uses_the_labels_as_they_stood_before_the_step():
    method, images = make(settings())
    ids = torch.arange(10)
    batch = Batch(ids, images[None, ids], epoch=0, step=0)
    labels = method.samples.labels[ids].clone()
    torch.manual_seed(3)  # the same dropout twice
    outcome = method(batch)
    torch.manual_seed(3)
    logits = method.classifier(method.embed(images[ids]))
    weights = method.centroids.counts.float().pow(-0.5)
    torch.testing.assert_close(outcome.loss, functional.cross_entropy(logits, labels, weight=weights))
    assert torch.equal(method.samples.labels[ids], labels), "a forward pass must not touch the memory"
    method.after_step(batch, outcome)
    expected = 0.5 * functional.normalize(outcome.features, dim=1)
    assert not torch.equal(method.samples.rows[ids], expected)


def test_rows_move_by_the_momentum_and_labels_go_to_the_nearest_centroid():
    method, images = make(settings())
    ids = torch.tensor([4, 9, 30])
    before, centroids = method.samples.rows[ids].clone(), method.centroids.centroids.clone()
    batch = Batch(ids, images[None, ids], epoch=0, step=0)
    outcome = method(batch)
    method.after_step(batch, outcome)
    rows = 0.5 * functional.normalize(outcome.features, dim=1) + 0.5 * before
    torch.testing.assert_close(method.samples.rows[ids], rows)
    assert torch.equal(method.samples.labels[ids], torch.cdist(rows, centroids).argmin(dim=1))


@pytest.mark.parametrize("interval", [1, 3, 10])
def test_centroids_are_refreshed_every_k_th_step_only(interval):
    method, images = make(settings(update_interval=interval, small_cluster=0))
    for step in range(12):
        before = method.centroids.centroids.clone()
        ids = torch.randperm(IMAGES)[:20]
        batch = Batch(ids, images[None, ids] + torch.randn(1, 20, 3, 16, 16), epoch=0, step=step)
        values = method.after_step(batch, method(batch))
        changed_now = not torch.equal(method.centroids.centroids, before)
        if (step + 1) % interval != 0 and not values["small_clusters"]:
            assert not changed_now


def test_several_views_enter_the_memory_as_their_average_and_share_a_label():
    method, images = make(settings(odc_small, num_views=2, fine_share=0.0, instance_weight=0.0, rotation_weight=0.0))
    ids = torch.arange(6)
    views = torch.stack([images[ids], images[ids].flip(3)])
    method.eval()  # batch norm would mix the views
    outcome = method(Batch(ids, views, epoch=0, step=0))
    with torch.no_grad():
        first, second = (functional.normalize(method.embed(view), dim=1) for view in views)
    torch.testing.assert_close(outcome.features, (first + second) / 2)
    labels = method.samples.labels[ids]
    prototypes = functional.normalize(method.centroids.centroids, dim=1)
    logits = torch.cat([first, second]) @ prototypes.T / 0.1
    weights = method.centroids.counts.float().pow(-0.5)
    expected = functional.cross_entropy(logits, labels.repeat(2), weight=weights)
    torch.testing.assert_close(outcome.loss.detach(), expected)


def test_the_warm_start_learns_rotations_and_leaves_the_memories_alone():
    config = settings(odc_small, warm_share=0.5, fine_share=0.0)
    torch.manual_seed(0)
    method = ODC(create_backbone("smallconv", image_size=16), IMAGES, config)
    assert method.warm_epochs == 2
    assert [(phase.name, phase.epochs) for phase in method.phases()] == [("rotation", 2), ("odc", 2)]
    assert method.begin_epoch(0, FixedSurvey(torch.randn(IMAGES, 3, 16, 16))) == {}
    batch = Batch(torch.arange(8), torch.randn(2, 8, 3, 16, 16), epoch=0, step=0)
    outcome = method(batch)
    assert outcome.features is None
    assert method.after_step(batch, outcome) == {}
    assert bool((method.samples.labels == -1).all())
    survey = FixedSurvey(torch.randn(IMAGES, 3, 16, 16))
    method.begin_epoch(2, survey)
    assert survey.calibrated == 20
    assert bool((method.samples.labels >= 0).all())


@pytest.mark.parametrize(("epochs", "expected"), [(1, 0), (2, 1), (10, 3), (100, 30)])
def test_clustering_always_has_at_least_one_epoch(epochs, expected):
    assert warm_epochs(changed(odc_small(), epochs=epochs, warm_share=0.3)) == expected


@pytest.mark.parametrize(("epochs", "warm_share", "expected"), [(1, 0.0, 0), (2, 0.0, 1), (10, 0.0, 8), (10, 0.5, 4)])
def test_the_final_clusters_always_have_at_least_one_epoch(epochs, warm_share, expected):
    assert fine_epochs(changed(odc_small(), epochs=epochs, warm_share=warm_share)) == expected


def test_companions_are_added_to_the_loss_of_the_clusters():
    """Both against a plain version: the other view among all views of the batch, and four turns of one view."""
    alone = {"num_views": 2, "fine_share": 0.0, "instance_weight": 0.0, "rotation_weight": 0.0}
    ids = torch.arange(6)
    for name, more in {
        "instances": {"instance_weight": 2.0, "instance_temperature": 0.3},
        "rotations": {"rotation_weight": 3.0},
    }.items():
        method, images = make(settings(odc_small, **{**alone, **more}))
        method.eval()
        views = torch.stack([images[ids], images[ids].flip(3)])
        batch = Batch(ids, views, epoch=0, step=1)
        added = method(batch).loss.detach()
        method.config = settings(odc_small, **alone)
        added -= method(batch).loss.detach()
        with torch.no_grad():
            rows = functional.normalize(method.embed(views.flatten(0, 1)), dim=1)
            if name == "instances":
                told_apart = []
                for i in range(12):
                    others = [j for j in range(12) if j != i]
                    logits = torch.stack([rows[i] @ rows[j] / 0.3 for j in others])
                    told_apart.append(-logits.log_softmax(dim=0)[others.index((i + 6) % 12)])
                torch.testing.assert_close(added, 2 * torch.stack(told_apart).mean())
            if name == "rotations":
                turned = torch.stack([torch.rot90(views[1, i], i % 4, dims=(1, 2)) for i in range(6)])
                logits = method.rotation_head(method.backbone(turned))
                expected = 3 * functional.cross_entropy(logits, torch.arange(6) % 4)
                torch.testing.assert_close(added, expected)


def test_fine_clusters_come_first_and_the_final_ones_after_them():
    config = settings(odc_small, fine_share=0.5, fine_clusters=9)
    method, images = make(config)
    assert [(phase.name, phase.epochs) for phase in method.phases()] == [("fine clusters", 2), ("odc", 2)]
    assert [phase.continues for phase in method.phases()] == [False, True]  # one curve of the learning rate
    assert len(method.centroids.counts) == 9
    saved = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    assert method.begin_epoch(1, FixedSurvey(images)) == {}
    method.begin_epoch(2, FixedSurvey(images))
    assert len(method.centroids.counts) == config.clusters
    assert int(method.centroids.counts.sum()) == IMAGES
    other, _ = make(config, seed=1)
    other.begin_epoch(2, FixedSurvey(images))
    other.load_state_dict(saved)  # a checkpoint of the first phase has another number of clusters
    assert len(other.centroids.counts) == 9


def test_after_fine_clusters_a_row_becomes_the_average_of_its_visits():
    method, images = make(settings(odc_small, fine_share=0.5, fine_clusters=10, epochs=6))
    method.begin_epoch(method.fine_epochs, FixedSurvey(images))
    ids = torch.arange(10)
    visits = [method.samples.rows[ids].clone()]
    for epoch in range(3, 6):
        batch = Batch(ids, images[None, ids].repeat(2, 1, 1, 1, 1), epoch=epoch, step=epoch)
        features = functional.normalize(torch.randn(10, 6, generator=torch.Generator().manual_seed(epoch)), dim=1)
        visits.append(features)
        method.after_step(batch, Outcome(torch.zeros(()), features))
    torch.testing.assert_close(method.samples.rows[ids], torch.stack(visits).mean(dim=0))


def test_the_memory_momentum_of_the_paper_is_constant():
    method, _ = make(settings(memory_momentum=0.5, epochs=100))
    assert {method.memory_momentum(epoch) for epoch in range(100)} == {0.5}


def test_unreadable_images_belong_to_no_cluster_until_they_are_seen():
    torch.manual_seed(0)
    method = ODC(create_backbone("smallconv", image_size=16), IMAGES, settings())
    images = torch.randn(IMAGES, 3, 16, 16)
    method.begin_epoch(0, FixedSurvey(images, unreadable=(3, 7)))
    assert method.samples.labels[[3, 7]].tolist() == [-1, -1]
    assert int(method.centroids.counts.sum()) == IMAGES - 2
    batch = Batch(torch.tensor([3, 10, 11]), images[None, [3, 10, 11]], epoch=0, step=0)
    method.after_step(batch, method(batch))
    assert method.samples.labels[3] >= 0
    assert int(method.centroids.counts.sum()) == IMAGES - 1
    method.end_epoch(0)


@pytest.mark.parametrize("stop", ["features", "k-means"])
def test_an_interrupted_initialisation_leaves_the_memories_empty(stop):
    torch.manual_seed(0)
    method = ODC(create_backbone("smallconv", image_size=16), IMAGES, settings())
    survey = FixedSurvey(torch.randn(IMAGES, 3, 16, 16))
    features = survey.features

    def interrupted(*arguments, **options):
        if stop == "features":
            features(*arguments, **options)
        raise Interrupted("stopped as asked")

    setattr(survey, "features" if stop == "features" else "poll", interrupted)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    with pytest.raises(Interrupted):
        method.begin_epoch(0, survey)
    for name, tensor in method.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class Storages(TorchDispatchMode):
    """Notes the size of every storage that an operation returns, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes.append((storage.data_ptr(), storage.nbytes()))
        return result


def test_initialising_copies_the_table_nowhere(monkeypatch):
    monkeypatch.setattr(kmeans, "SMALL_BLOCK", 1 << 14)
    count, dim = 20_000, 64
    method = ODC(create_backbone("smallconv", image_size=16), count, settings(dim=dim, clusters=50))
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(0))
    table = method.samples.rows.untyped_storage()

    class Given(FixedSurvey):
        def features(self, embed, out=None):
            assert out.data_ptr() == table.data_ptr()
            out.copy_(rows)
            return out, torch.arange(count) != 5  # one image could not be read

    with Storages() as noted:
        method.begin_epoch(0, Given(rows))
        method.end_epoch(0)
    assert method.samples.rows.data_ptr() == table.data_ptr()
    assert max(size for address, size in noted.sizes if address != table.data_ptr()) < 0.1 * table.nbytes()


def test_identical_images_and_too_many_clusters_are_refused_before_training():
    torch.manual_seed(0)
    method = ODC(create_backbone("smallconv", image_size=16), IMAGES, settings())
    with pytest.raises(DataError, match="all identical"):
        method.begin_epoch(0, FixedSurvey(torch.ones(IMAGES, 3, 16, 16)))
    method = ODC(create_backbone("smallconv", image_size=16), IMAGES, settings(clusters=30))
    with pytest.raises(UserError, match="--clusters 10 or fewer"):
        method.begin_epoch(0, FixedSurvey(torch.randn(IMAGES, 3, 16, 16)))


def test_one_cluster_is_possible():
    method, images = make(settings(clusters=1))
    batch = Batch(torch.arange(6), images[None, :6], epoch=0, step=0)
    values = method.after_step(batch, method(batch))
    assert float(values["change"]) == 0.0


def test_all_state_is_in_the_state_dict():
    """A copy made from the state dict alone goes on exactly alike."""
    method, images = make(settings())
    other = ODC(create_backbone("smallconv", image_size=16), IMAGES, settings())
    other.load_state_dict(method.state_dict())
    for step in range(15):
        ids = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(step))[:10]
        batch = Batch(ids, images[None, ids], epoch=0, step=step)
        for each in (method, other):
            torch.manual_seed(step)
            each.after_step(batch, each(batch))
    for name, tensor in method.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
