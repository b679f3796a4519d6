"""Colorization: Lab against two references, the bins, soft targets, rebalancing as published, and that it learns."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
import torch

from odcluster.config import Config, changed
from odcluster.errors import DataError
from odcluster.methods.colorization import (
    Colorization,
    ab_bins,
    grid_side,
    nearest_bins,
    rebalancing_weights,
    rgb_to_lab,
    smooth_prior,
    soft_encode,
)
from odcluster.methods.interface import Batch
from odcluster.models.backbones import create_backbone
from odcluster.recipes import odc_small

BINS = 261


class FixedSurvey:
    """The evaluation views of a fixed set of images, seven at a time."""

    def __init__(self, images: torch.Tensor, unreadable: tuple[int, ...] = ()) -> None:
        self.images, self.unreadable = images, unreadable

    @torch.no_grad()
    def features(self, embed):
        seen = torch.ones(len(self.images), dtype=torch.bool)
        seen[list(self.unreadable)] = False
        return torch.cat([embed(part) for part in self.images.split(7)]), seen

    def calibrate(self, network, num_batches):
        raise AssertionError("there is nothing to calibrate")

    def poll(self, doing, done, total):
        assert 0 <= done <= total


def settings(**options) -> Config:
    return changed(odc_small(), **{"epochs": 2, "image_size": 16, **options})


def make(backbone: str = "smallconv", seed: int = 0, **options) -> Colorization:
    config = settings(**options)
    torch.manual_seed(seed)
    return Colorization(create_backbone(backbone, image_size=config.image_size), 64, config)


def normalised(method: Colorization, pixels: torch.Tensor) -> torch.Tensor:
    return (pixels - method.mean) / method.std


def coloured(method: Colorization, num_images: int, size: int) -> torch.Tensor:
    """Dark parts are blue, bright parts are orange: the colour follows from the lightness."""
    g = torch.Generator().manual_seed(2)
    bright = torch.rand(num_images, 1, size // 4, size // 4, generator=g) > 0.5
    bright = bright.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    blue, orange = torch.tensor([0.1, 0.1, 0.6]).view(3, 1, 1), torch.tensor([1.0, 0.7, 0.2]).view(3, 1, 1)
    return normalised(method, torch.where(bright, orange, blue))


# Lab ------------------------------------------------------------


def literal_lab(r: float, g: float, b: float) -> tuple[float, float, float]:
    """One pixel, in double precision, as the standards write it (IEC 61966-2-1; CIE 15)."""

    def linear(v: float) -> float:
        return v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4

    def f(t: float) -> float:
        return t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116

    r, g, b = linear(r), linear(g), linear(b)
    x = f((0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047)
    y = f((0.2126729 * r + 0.7151522 * g + 0.0721750 * b) / 1.0)
    z = f((0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_lab_is_that_of_the_standards():
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 0.02, 0.04045, 0.5, 1.0])] * 3)
    pixels = torch.cat([corners, torch.rand(300, 3)])
    lab = rgb_to_lab(pixels.T.reshape(3, 1, -1))
    expected = torch.tensor([literal_lab(*pixel) for pixel in pixels.tolist()])
    assert lab.dtype == torch.float32
    assert (lab[:, 0].T - expected).abs().max() < 1e-3


def test_lab_is_that_of_opencv():
    """From sRGB, OpenCV interpolates in a coarse table (0.04 off on average); from linear RGB it computes."""
    pixels = torch.cat([torch.rand(3, 50, 40), torch.randint(0, 2, (3, 50, 10)).float()], dim=2)
    ours = rgb_to_lab(pixels).permute(1, 2, 0).numpy()
    srgb = np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    assert np.abs(ours - cv2.cvtColor(linear.astype(np.float32), cv2.COLOR_LRGB2Lab)).max() < 0.05
    interpolated = np.abs(ours - cv2.cvtColor(srgb, cv2.COLOR_RGB2Lab))
    assert interpolated.mean() < 0.08
    assert interpolated.max() < 1.0


def test_grey_has_no_colour_and_lightness_is_close_to_the_grey_value():
    grey = torch.linspace(0, 1, 1001)
    lab = rgb_to_lab(grey.expand(3, 1, 1001))[:, 0]
    assert lab[1:].abs().max() < 1e-3
    assert float(lab[0, 0]) == pytest.approx(0, abs=1e-4)
    assert float(lab[0, -1]) == pytest.approx(100, abs=1e-4)
    assert (lab[0] / 100 - grey).abs().max() < 0.04  # what the module says of the network's input


# Bins ------------------------------------------------------------


def test_there_are_261_bins_and_every_colour_falls_into_one():
    centres = ab_bins()
    assert centres.shape == (BINS, 2)
    assert len(torch.unique(centres, dim=0)) == BINS
    assert centres.min(dim=0).values.tolist() == [-90, -110]
    assert centres.max(dim=0).values.tolist() == [100, 90]
    pixels = torch.randint(0, 256, (3, 300, 300)) / 255
    ab = rgb_to_lab(pixels[None])[:, 1:]
    _, bins = nearest_bins(ab, centres, 1)
    assert (centres[bins[:, 0]].movedim(-1, 1) - ab).abs().max() < 5.001


def test_soft_targets_sum_to_one_and_are_largest_at_the_nearest_bin():
    centres = ab_bins()
    ab = torch.rand(3, 2, 6, 6) * 160 - 80
    shares, bins = soft_encode(ab, centres)
    assert shares.shape == bins.shape == (3, 5, 6, 6)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(3, 6, 6))
    assert bool((shares[:, 0] >= shares.max(dim=1).values).all())
    distances = (ab.movedim(1, -1).unsqueeze(-2) - centres).norm(dim=-1)  # [3, 6, 6, Q]
    assert torch.equal(bins[:, 0], distances.argmin(dim=-1))
    nearest = distances.sort(dim=-1).values[..., :5].movedim(-1, 1)
    weights = torch.exp(-(nearest**2) / (2 * 5**2))
    torch.testing.assert_close(shares, weights / weights.sum(dim=1, keepdim=True), rtol=1e-3, atol=1e-5)


def test_the_target_of_a_bins_centre():
    """At grey: 1 for the bin itself, exp(-100 / 50) for the four around it, over their sum."""
    shares, bins = soft_encode(torch.zeros(1, 2, 1, 1), ab_bins())
    side = math.exp(-2)
    expected = torch.tensor([1.0, side, side, side, side]) / (1 + 4 * side)
    torch.testing.assert_close(shares.flatten(), expected)
    centres = {tuple(c) for c in ab_bins()[bins.flatten()].tolist()}
    assert centres == {(0, 0), (10, 0), (-10, 0), (0, 10), (0, -10)}


def test_rebalancing_is_as_published():
    """Prior smoothed: still sums to 1. Weights: sum p w = 1, rare bins weigh more, 1 / ((1 - l) p + l / Q) in ratio."""
    centres = ab_bins()
    prior = torch.zeros(BINS)
    prior[torch.randperm(BINS)[:40]] = torch.rand(40)
    prior /= prior.sum()
    smoothed = smooth_prior(prior, centres)
    assert float(smoothed.sum()) == pytest.approx(1, abs=1e-5)
    assert bool((smoothed >= 0).all())
    weights = rebalancing_weights(smoothed)
    assert float((smoothed * weights).sum()) == pytest.approx(1, abs=1e-5)
    assert bool((weights[smoothed.argsort()].diff() <= 1e-6).all())
    mixed = 0.5 * smoothed + 0.5 / BINS
    torch.testing.assert_close(weights / weights[0], mixed[0] / mixed)
    uniform = torch.full((BINS,), 1 / BINS)
    torch.testing.assert_close(rebalancing_weights(uniform), torch.ones(BINS))


def test_smoothing_reaches_the_neighbours():
    centres = ab_bins()
    grey = int(centres.norm(dim=1).argmin())
    smoothed = smooth_prior(torch.nn.functional.one_hot(torch.tensor(grey), BINS).float(), centres)
    neighbour = int((centres - torch.tensor([10.0, 0.0])).norm(dim=1).argmin())
    assert int(smoothed.argmax()) == grey
    assert float(smoothed[neighbour] / smoothed[grey]) == pytest.approx(math.exp(-2), rel=1e-4)


# The method ------------------------------------------------------------


@pytest.mark.parametrize(("size", "side"), [(12, 4), (16, 4), (24, 6), (32, 8), (64, 16), (112, 28), (224, 28)])
def test_the_grid_is_a_quarter_of_the_view(size, side):
    assert grid_side(size) == side


def test_the_network_sees_lightness_and_no_colour():
    method = make()
    pixels = torch.rand(4, 3, 16, 16)
    grey, ab = method.lightness_and_colours(normalised(method, pixels))
    lab = rgb_to_lab(pixels)
    shown = grey * method.std + method.mean
    torch.testing.assert_close(shown, (lab[:, :1] / 100).expand(4, 3, 16, 16), rtol=0, atol=1e-5)
    expected = lab[:, 1:].unflatten(2, (4, 4)).unflatten(4, (4, 4)).mean(dim=(3, 5))  # 16 px to 4 cells
    torch.testing.assert_close(ab, expected, rtol=1e-3, atol=1e-3)


def test_grey_images_are_in_the_grey_bin():
    method = make()
    images = normalised(method, torch.rand(5, 1, 16, 16).expand(5, 3, 16, 16))
    _, ab = method.lightness_and_colours(images)
    assert ab.abs().max() < 1e-2
    histogram = method.histogram(images)
    grey = int(method.centres.norm(dim=1).argmin())
    assert method.centres[grey].tolist() == [0, 0]
    assert histogram[:, grey].tolist() == [1.0] * 5


def test_the_prior_is_counted_on_all_readable_images_before_the_first_epoch():
    method = make()
    images = torch.cat([coloured(method, 20, 16), normalised(method, torch.rand(3, 3, 16, 16))])
    assert method.begin_epoch(0, FixedSurvey(images, unreadable=(20, 21, 22))) == {}
    torch.testing.assert_close(method.prior, method.histogram(images[:20]).mean(dim=0))
    assert float(method.prior.sum()) == pytest.approx(1, abs=1e-5)
    assert int((method.prior > 0).sum()) == 2  # blue and orange
    smoothed = smooth_prior(method.prior, method.centres)
    assert float((smoothed * method.weights).sum()) == pytest.approx(1, abs=1e-5)
    assert method.weights[method.prior > 0].max() < method.weights[smoothed < 1e-6].min()
    before = method.weights.clone()
    method.begin_epoch(1, FixedSurvey(images[20:]))
    assert torch.equal(method.weights, before)


def test_images_without_any_colour_are_refused():
    method = make()
    grey = normalised(method, torch.rand(5, 1, 16, 16).expand(5, 3, 16, 16))
    with pytest.raises(DataError, match="grey"):
        method.begin_epoch(0, FixedSurvey(grey))


def test_the_loss_is_the_weighted_cross_entropy_against_the_soft_targets():
    """Against dense targets and a loop over cells."""
    method = make().eval()
    images = normalised(method, torch.rand(3, 3, 16, 16))
    method.begin_epoch(0, FixedSurvey(images))
    with torch.no_grad():
        method.head.bins.weight.mul_(100)
        outcome = method(Batch(torch.arange(3), images[None], epoch=0, step=0))
        grey, ab = method.lightness_and_colours(images)
        probabilities = method.head(method.backbone.stages(grey), 4).softmax(dim=1)
        expected, hits = 0.0, 0
        for b, y, x in np.ndindex(3, 4, 4):
            distances = (method.centres - ab[b, :, y, x]).norm(dim=1)
            target = torch.where(distances <= distances.sort().values[4], torch.exp(-(distances**2) / 50), 0.0)
            nearest = int(distances.argmin())
            p = probabilities[b, :, y, x]
            expected -= float(method.weights[nearest] * (target / target.sum() * p.log()).sum())
            hits += int(p.argmax()) == nearest
    assert float(outcome.loss) == pytest.approx(expected / 48, rel=1e-4)
    assert float(method.after_step(Batch(torch.arange(3), images[None], 0, 0), outcome)["accuracy"]) == pytest.approx(
        hits / 48
    )


def test_targets_are_the_same_under_autocast():
    method = make()
    images = normalised(method, torch.rand(3, 3, 16, 16))
    plain = method.lightness_and_colours(images)[1], method.histogram(images)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = method.lightness_and_colours(images)[1], method.histogram(images)
        loss = method(Batch(torch.arange(3), images[None], epoch=0, step=0)).loss
    assert torch.equal(plain[0], mixed[0])
    assert torch.equal(plain[1], mixed[1])
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("backbone", "size"), [("resnet18", 32), ("vit_tiny_patch16_224", 64), ("alexnet", 64), ("smallconv", 12)]
)
def test_any_backbone_makes_a_step(backbone, size):
    method = make(backbone, image_size=size)
    assert method.backbone.training
    images = normalised(method, torch.rand(2, 2, 3, size, size))
    batch = Batch(torch.arange(2), images, epoch=0, step=0)
    outcome = method(batch)
    outcome.loss.backward()
    assert outcome.features is None
    assert math.isclose(float(outcome.loss.detach()), math.log(BINS), abs_tol=0.2)  # at the start: chance
    first, last = method.head.projections[0].weight.grad, method.head.projections[-1].weight.grad
    assert bool(first.isfinite().all())
    assert bool(last.isfinite().all())
    assert next(p for p in method.backbone.parameters() if p.ndim == 4).grad is not None
    assert 0 <= float(method.after_step(batch, outcome)["accuracy"]) <= 1


def train(method: Colorization, images: torch.Tensor, num_steps: int, momentum: float = 0.0) -> list[float]:
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05, momentum=momentum)
    method.train()
    losses = []
    for step in range(num_steps):
        outcome = method(Batch(torch.arange(len(images)), images[None], epoch=0, step=step))
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        losses.append(float(outcome.loss.detach()))
    return losses


def test_colours_can_be_learned():
    """Soft targets have an entropy, below which no loss can fall; what is above it falls to a small part."""
    method = make()
    images = coloured(method, 32, 16)
    method.begin_epoch(0, FixedSurvey(images))
    shares, bins = soft_encode(method.lightness_and_colours(images)[1], method.centres)
    least = float((method.weights[bins[:, 0]] * torch.special.entr(shares).sum(dim=1)).mean())
    losses = train(method, images, 30, momentum=0.9)
    assert min(losses) >= least - 1e-4
    assert losses[-1] - least < 0.2 * (losses[0] - least)
    assert float(method.accuracy) > 0.9


def test_the_state_is_complete():
    """A copy made from the state dict alone, without another look at the images, goes on exactly as the original."""
    method = make()
    images = coloured(method, 16, 16)
    method.begin_epoch(0, FixedSurvey(images))
    train(method, images, 2)
    assert {"prior", "weights"} <= set(method.state_dict())
    assert not {"centres", "mean", "std"} & set(method.state_dict())
    copy = make(seed=5)
    copy.load_state_dict(method.state_dict())
    assert train(copy, images, 3) == train(method, images, 3)
    for name, tensor in method.state_dict().items():
        assert torch.equal(tensor, copy.state_dict()[name]), name


def test_nothing_is_random():
    method = make()
    images = coloured(method, 4, 16)
    state = torch.get_rng_state()
    losses = [float(method(Batch(torch.arange(4), images[None], 0, step)).loss.detach()) for step in range(2)]
    assert losses[0] == losses[1]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_whole_run_is_one_phase():
    (phase,) = make(method="colorization", lr=0.1).phases()
    assert (phase.name, phase.epochs, phase.lr) == ("colorization", 2, 0.1)
