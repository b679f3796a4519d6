"""DeepCluster: what is clustered, how images are drawn, what is new each epoch, and that its state is all there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor
from torch.nn import functional

from odcluster.clustering.agreement import nmi
from odcluster.clustering.kmeans import kmeans
from odcluster.clustering.pca import pca_whiten
from odcluster.config import Config, changed
from odcluster.errors import DataError, Interrupted, UserError
from odcluster.methods.deepcluster import DeepCluster
from odcluster.methods.interface import Batch, Outcome
from odcluster.models.backbones import create_backbone
from odcluster.recipes import odc_resnet50_imagenet

IMAGES, CLUSTERS = 80, 5
SMALL = {"method": "deepcluster", "backbone": "smallconv", "clusters": CLUSTERS, "dim": 6, "epochs": 4, "lr": 0.05}


class FixedSurvey:
    """The evaluation views of a fixed set of images, given as tensors."""

    def __init__(self, method: DeepCluster, images: Tensor, unreadable: tuple[int, ...] = (), stop: str = "") -> None:
        self.method, self.images, self.unreadable, self.stop = method, images, unreadable, stop

    @torch.no_grad()
    def features(self, embed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        self.method.eval()
        seen = torch.ones(len(self.images), dtype=torch.bool)
        seen[list(self.unreadable)] = False
        rows = embed(self.images)
        rows[~seen] = 0
        return rows, seen

    def calibrate(self, network: torch.nn.Module, num_batches: int) -> None:
        raise AssertionError("DeepCluster takes the statistics as they are")

    def poll(self, doing: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        if f"{doing} {done}" == self.stop:
            raise Interrupted("stopped as asked")


def settings(**options: object) -> Config:
    return changed(odc_resnet50_imagenet(), **{**SMALL, "image_size": 16, "batch_size": 10, **options})


def untrained(config: Config) -> DeepCluster:
    torch.manual_seed(0)
    backbone = create_backbone("smallconv", image_size=16, in_channels=2 if config.deepcluster.sobel else 3)
    return DeepCluster(backbone, IMAGES, config)


def some_images(seed: int = 0) -> Tensor:
    """Stripes in a few directions and widths, so that there is something to cluster, and noise."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    kind = (torch.arange(IMAGES) % CLUSTERS).float()[:, None, None]
    phase = 6 * torch.rand(IMAGES, 1, 1, generator=generator)
    wave = torch.sin((x * kind.cos() + y * kind.sin()) * (0.5 + 0.3 * kind) + phase)
    return wave[:, None] + 0.3 * torch.randn(IMAGES, 3, 16, 16, generator=generator)


def make(epoch: int = 0, **options: object) -> tuple[DeepCluster, Tensor]:
    method, images = untrained(settings(**options)), some_images()
    method.begin_epoch(epoch, FixedSurvey(method, images))
    return method, images


def train(method: DeepCluster, images: Tensor, epoch: int, steps: int = 8) -> list[float]:
    """A few steps as the trainer does them: no momentum for the classifier."""
    others = [p for name, p in method.named_parameters() if not name.startswith("classifier.")]
    groups: list[dict[str, Any]] = [
        {"params": others, "momentum": 0.9},
        {"params": list(method.classifier.parameters())},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    order = method.epoch_order(epoch)
    ids = torch.arange(IMAGES) if order is None else torch.from_numpy(order)
    losses = []
    method.train()
    for step in range(steps):
        chosen = ids[(torch.arange(10) + 10 * step) % IMAGES]
        batch = Batch(chosen, images[None, chosen], epoch=epoch, step=step)
        outcome: Outcome = method(batch)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        assert 0 <= float(method.after_step(batch, outcome)["accuracy"]) <= 1
        losses.append(float(outcome.loss.detach()))
    method.end_epoch(epoch)
    return losses


def state(method: DeepCluster) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in method.state_dict().items()}


def assert_same_state(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# Labels ------------------------------------------------------------


@pytest.mark.parametrize("sobel", [True, False])
def test_labels_are_k_means_of_whitened_normalised_features(sobel: bool) -> None:
    method, images = make(epoch=2, sobel=sobel)
    with torch.no_grad():
        features = method.backbone(method.sobel(images))  # in evaluation mode since begin_epoch
    rows = functional.normalize(pca_whiten(features, 6), dim=1)
    assert rows.shape == (IMAGES, 6)
    expected, _ = kmeans(rows, CLUSTERS, iterations=20, seed=3 * 1_000_003)
    assert torch.equal(method.samples.labels, expected)
    assert torch.equal(method.samples.counts, torch.bincount(expected))


def test_what_k_means_sees_has_identity_covariance() -> None:
    method, images = make(dim=256)
    with torch.no_grad():
        whitened = pca_whiten(method.features(images), 256)
    width = whitened.shape[1]
    assert width == IMAGES - 1  # 80 images of 192 features
    power = torch.cov(whitened.double().T)
    alive = power.diagonal() > 0.5  # the others carry no more than rounding
    assert int(alive.sum()) > 40
    unit = torch.eye(int(alive.sum()), dtype=torch.float64)
    torch.testing.assert_close(power[alive][:, alive], unit, atol=1e-3, rtol=0)


def test_agreement_with_the_previous_epoch_is_reported_from_the_second_on() -> None:
    method, images = untrained(settings()), some_images()
    first = method.begin_epoch(0, FixedSurvey(method, images))
    assert set(first) == {"smallest", "largest"}
    before = method.samples.labels.clone()
    train(method, images, epoch=0)
    second = method.begin_epoch(1, FixedSurvey(method, images, unreadable=(4,)))
    known = torch.arange(IMAGES) != 4
    expected = normalized_mutual_info_score(before[known], method.samples.labels[known])
    assert second["nmi_previous"] == pytest.approx(expected)
    counts = torch.bincount(method.samples.labels[known])
    assert (second["smallest"], second["largest"]) == (float(counts.min()), float(counts.max()))
    assert method.health() == {"smallest": second["smallest"], "largest": second["largest"]}


def test_the_start_of_k_means_differs_between_epochs_and_seeds() -> None:
    labels = [make(epoch)[0].samples.labels for epoch in (0, 0, 1)] + [make(0, seed=1)[0].samples.labels]
    assert torch.equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])
    assert not torch.equal(labels[0], labels[3])


def test_unreadable_and_non_finite_images_belong_to_no_cluster() -> None:
    method, images = untrained(settings(balance="weights")), some_images()
    images[11] = float("nan")
    method.begin_epoch(0, FixedSurvey(method, images, unreadable=(3, 7)))
    assert (method.samples.labels < 0).nonzero().flatten().tolist() == [3, 7, 11]
    assert int(method.samples.counts.sum()) == IMAGES - 3
    with_unknown = Batch(torch.tensor([3, 20, 21]), images[None, [3, 20, 21]], epoch=0, step=0)
    logits = method.classifier(method.features(images[[20, 21]]))
    weights = method.samples.counts.float().rsqrt()
    expected = functional.cross_entropy(logits, method.samples.labels[[20, 21]], weight=weights)
    torch.testing.assert_close(method(with_unknown).loss, expected)


# Balance ------------------------------------------------------------


def with_sizes(sizes: list[int], unlabelled: int, **options: object) -> DeepCluster:
    """A method whose clusters have these sizes, the labels scattered over the ids."""
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = torch.cat([labels, torch.full((unlabelled,), -1)])
    config = settings(clusters=len(sizes), **options)
    backbone = create_backbone("smallconv", image_size=16, in_channels=2)
    method = DeepCluster(backbone, len(labels), config)
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))]
    method.samples.assign(shuffled, torch.zeros(len(labels)))
    return method


@pytest.mark.parametrize("seed", range(3))
def test_clusters_are_drawn_uniformly_however_unequal_they_are(seed: int) -> None:
    """Chi-square test over 40 epochs; of random seeds one in a million would fail it, for each of the two checks."""
    method = with_sizes([886, 100, 10, 3, 1], unlabelled=50, seed=seed)
    labels = method.samples.labels.numpy()
    orders = [method.epoch_order(epoch) for epoch in range(40)]
    drawn = np.concatenate([order for order in orders if order is not None])
    assert len(drawn) == 40 * 1050  # each epoch is as long as the data
    assert drawn.dtype == np.int64
    assert labels[drawn].min() >= 0  # images without a label are never drawn
    per_cluster = np.bincount(labels[drawn], minlength=5)
    assert stats.chisquare(per_cluster).statistic < stats.chi2.isf(1e-6, df=4)
    members = np.bincount(drawn, minlength=len(labels))[labels == 1]  # 100 images share a fifth of the draws
    assert stats.chisquare(members).statistic < stats.chi2.isf(1e-6, df=99)
    as_they_are = np.bincount(labels[labels >= 0], minlength=5) * 40
    assert stats.chisquare(as_they_are).statistic > 1000 * stats.chi2.isf(1e-6, df=4)  # the test can tell


def test_the_order_is_a_function_of_seed_epoch_and_labels() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        ids = with_sizes([30, 9, 4], unlabelled=2, seed=seed).epoch_order(epoch)
        assert ids is not None
        return ids.tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)


@pytest.mark.parametrize("balance", ["sampling", "weights"])
def test_the_loss_is_cross_entropy_weighted_only_where_sampling_does_not_balance(balance: str) -> None:
    method, images = make(balance=balance)
    method.samples.assign(torch.tensor([0] * 60 + [1] * 15 + [2] * 3 + [3, 4]), torch.zeros(80))
    ids = torch.arange(55, 80)
    weights = torch.tensor([60.0, 15, 3, 1, 1]).pow(-0.5) if balance == "weights" else None
    expected = functional.cross_entropy(
        method.classifier(method.features(images[ids])), method.samples.labels[ids], weight=weights
    )
    torch.testing.assert_close(method(Batch(ids, images[None, ids], epoch=0, step=0)).loss, expected)
    assert (method.epoch_order(0) is None) == (balance == "weights")


def test_all_views_of_an_image_share_its_label() -> None:
    method, images = make()
    method.eval()  # batch norm would mix the views
    ids = torch.tensor([3, 8, 40])
    views = torch.stack([images[ids], images[ids].flip(3)])
    labels = method.samples.labels[ids]
    single = [functional.cross_entropy(method.classifier(method.features(view)), labels) for view in views]
    torch.testing.assert_close(method(Batch(ids, views, epoch=0, step=0)).loss, torch.stack(single).mean())


# What is new each epoch ------------------------------------------------------------


def test_each_epoch_has_a_new_classifier_that_seed_and_epoch_decide() -> None:
    method, images = untrained(settings()), some_images()
    parameters = list(method.classifier.parameters())
    seen = [method.classifier.weight.detach().clone()]
    for epoch in range(3):
        torch.manual_seed(epoch)
        expected = torch.randn(3)
        torch.manual_seed(epoch)
        method.begin_epoch(epoch, FixedSurvey(method, images))
        assert torch.equal(torch.randn(3), expected), "the draws of others must not change"
        fresh = method.classifier.weight.detach().clone()
        assert not any(torch.equal(fresh, old) for old in seen)
        assert float(fresh.std()) == pytest.approx(0.01, rel=0.1)
        assert bool((method.classifier.bias == 0).all())
        seen.append(fresh)
        train(method, images, epoch, steps=2)
        assert not torch.equal(method.classifier.weight, fresh)
    assert all(a is b for a, b in zip(parameters, method.classifier.parameters(), strict=True)), "the optimiser's own"
    again, _ = make(epoch=2)  # another history
    assert torch.equal(again.classifier.weight, seen[3])
    assert not torch.equal(make(epoch=2, seed=1)[0].classifier.weight, seen[3])


@pytest.mark.parametrize("stop", ["PCA 0", "k-means 0", "k-means 20"])
def test_a_stop_while_clustering_changes_nothing(stop: str) -> None:
    method, images = make()
    train(method, images, epoch=0)
    before = state(method)
    with pytest.raises(Interrupted):
        method.begin_epoch(1, FixedSurvey(method, images, stop=stop))
    assert_same_state(state(method), before)


@pytest.mark.parametrize("balance", ["sampling", "weights"])
def test_all_state_is_in_the_state_dict(balance: str) -> None:
    """A copy made from the state dict alone goes on exactly alike: in the epoch, and into the next."""
    method, images = make(balance=balance)
    train(method, images, epoch=0, steps=3)
    other = untrained(settings(balance=balance))
    other.load_state_dict(state(method))
    for each in (method, other):
        train(each, images, epoch=0, steps=3)
    events = []
    for seed, each in enumerate((method, other)):
        torch.manual_seed(seed)  # whatever random state there is
        events.append(each.begin_epoch(1, FixedSurvey(each, images)))
        train(each, images, epoch=1)
    assert events[0] == events[1]
    assert "nmi_previous" in events[0]
    assert_same_state(state(method), state(other))


def test_labels_go_to_the_memory_file_and_the_classifier_has_no_optimiser_state() -> None:
    method, images = make()
    names = set(method.state_dict())
    assert {name for name in names if name.startswith("samples.")} == {
        "samples.labels",
        "samples.similarities",
        "samples.counts",
    }
    assert not any("sobel" in name for name in names)
    optimizer = torch.optim.SGD(method.classifier.parameters(), lr=0.1, momentum=0.0, weight_decay=1e-5)
    method(Batch(torch.arange(9), images[None, :9], epoch=0, step=0)).loss.backward()
    optimizer.step()
    assert not any(isinstance(v, Tensor) for entries in optimizer.state.values() for v in entries.values())


def test_one_phase_lasts_the_whole_run() -> None:
    (phase,) = untrained(settings(lr=0.1)).phases()
    assert (phase.name, phase.epochs, phase.lr) == ("deepcluster", 4, 0.1)


def test_it_learns() -> None:
    """Five kinds of stripes: within three epochs the labels are learned, and the clusters are the kinds."""
    method, images = untrained(settings(balance="sampling")), some_images()
    for epoch in range(3):
        method.begin_epoch(epoch, FixedSurvey(method, images))
        losses = train(method, images, epoch, steps=24)
        assert np.mean(losses[-4:]) < 0.5 * losses[0]
    assert nmi(method.samples.labels, torch.arange(IMAGES) % CLUSTERS) > 0.3  # by chance about 0.08


# Degenerate data ------------------------------------------------------------


def test_too_many_clusters_and_identical_images_are_refused_before_training() -> None:
    method = untrained(settings(clusters=41))
    with pytest.raises(UserError, match="--clusters 40 or fewer"):
        method.begin_epoch(0, FixedSurvey(method, some_images()))
    method = untrained(settings(clusters=40))
    with pytest.raises(UserError, match="--clusters 39 or fewer"):
        method.begin_epoch(0, FixedSurvey(method, some_images(), unreadable=(0,)))
    method = untrained(settings())
    for same in (torch.ones(IMAGES, 3, 16, 16), some_images()[:1].expand(IMAGES, 3, 16, 16)):
        with pytest.raises(DataError, match="all identical"):
            method.begin_epoch(0, FixedSurvey(method, same))
    assert bool((method.samples.labels == -1).all())


def test_few_distinct_images_still_fill_every_cluster() -> None:
    """Three images, each many times, in five clusters."""
    method, images = untrained(settings()), some_images()[:3].repeat(IMAGES, 1, 1, 1)[:IMAGES]
    event = method.begin_epoch(0, FixedSurvey(method, images))
    assert event["smallest"] >= 1
    assert all(np.isfinite(train(method, images, epoch=0)))


def test_one_cluster_is_possible() -> None:
    method, images = make(clusters=1)
    assert train(method, images, epoch=0) == [0.0] * 8
    assert method.begin_epoch(1, FixedSurvey(method, images))["nmi_previous"] == 1.0


def test_a_step_before_any_labels_has_no_loss() -> None:
    """The speed is measured before the first clustering."""
    method = untrained(settings())
    outcome = method(Batch(torch.arange(8), torch.randn(1, 8, 3, 16, 16), epoch=0, step=0))
    outcome.loss.backward()
    assert float(outcome.loss.detach()) == 0.0
