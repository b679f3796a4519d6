"""Colorization (Zhang, Isola & Efros 2016): see the lightness of an image, predict its colours.

A view becomes CIE Lab (D65). L goes in; a and b, averaged down to a coarse grid, are quantised to bins of 10 x 10 and
predicted as a distribution over bins, with soft targets (5 nearest bins, Gaussian of sigma 5) and rare colours weighted
up. The published numbers throughout, but for three:

- 261 bins. Here a bin is a multiple of 10 in a and b that is the nearest one to some sRGB colour; the authors' list has
  313, made by a procedure of their own.
- The grid has a quarter of the view's side, from 4 to 28 cells (8 at 32 px, 28 at 224), not 56: at 64 images the logits
  take 52 MB instead of 210.
- The prior of the bins, from which the weights follow, is counted on the user's images before the first epoch, not on
  ImageNet; it is part of the state.

L / 100 is repeated over three channels and normalised like any image, so that the trained backbone takes ordinary RGB
(it is within 0.04 of the sRGB value of the grey with that lightness). Having seen grey images only, it has learned
nothing about differences between channels: on colour images these pass through its first layer as that began.

Views must keep their colours: the recipes set jitter and grey to 0. Nothing here is random. Layers behind the last
stage (AlexNet's fc6 and fc7, the last norm of a transformer) have no part in the loss and stay as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from odcluster.config import Config
from odcluster.errors import DataError
from odcluster.methods.interface import Batch, Outcome, Survey
from odcluster.methods.pretext import Pretext
from odcluster.models.backbones import Backbone
from odcluster.ranks import SINGLE, Ranks

BIN_SIZE = 10
NEIGHBOURS = 5
SIGMA = 5.0
"""Width of the Gaussian over ab, for soft targets and for the smoothed prior."""
UNIFORM_SHARE = 0.5
"""lambda: how much of a uniform distribution is mixed into the prior before the weights are taken."""
HEAD_WIDTH = 64

SRGB_TO_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
"""Linear sRGB to XYZ; the sums of the rows are the white point D65."""


def rgb_to_lab(rgb: Tensor) -> Tensor:
    """Convert sRGB in 0..1 [..., 3, H, W] to CIE Lab: L in 0..100, a and b around -100..100, both 0 for grey."""
    with torch.autocast(rgb.device.type, enabled=False):
        linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        matrix = rgb.new_tensor(SRGB_TO_XYZ)
        matrix = matrix / matrix.sum(dim=1, keepdim=True)  # XYZ relative to white
        xyz = torch.einsum("ij,...jhw->...ihw", matrix, linear)
        delta = 6 / 29
        f = torch.where(xyz > delta**3, xyz.clamp_min(delta**3) ** (1 / 3), xyz / (3 * delta**2) + 4 / 29)
        x, y, z = f.unbind(dim=-3)
        return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), dim=-3)


@functools.lru_cache
def _gamut() -> tuple[tuple[int, int], ...]:
    """Multiples of 10 that are nearest to some colour, from all 8-bit colours on the surface of the RGB cube.

    The surface is enough: colours of one (a, b) form a line through the cube that enters and leaves it.
    """
    side = torch.arange(256, dtype=torch.float64) / 255
    u, v = torch.meshgrid(side, side, indexing="ij")
    ends = [torch.full_like(u, end) for end in (0.0, 1.0)]
    faces = [torch.stack(face) for end in ends for face in ((end, u, v), (u, end, v), (u, v, end))]
    ab = rgb_to_lab(torch.stack(faces))[:, 1:]  # [6, 2, 256, 256]
    a, b = (ab / BIN_SIZE).round().long().unbind(dim=1)
    reach = 20  # |a| and |b| stay below 200
    inside = torch.zeros(2 * reach, 2 * reach, dtype=torch.bool)
    inside[a + reach, b + reach] = True
    return tuple((BIN_SIZE * (i - reach), BIN_SIZE * (j - reach)) for i, j in inside.nonzero().tolist())


def ab_bins() -> Tensor:
    """Centres of the bins [Q, 2], in order of a, then b."""
    return torch.tensor(_gamut(), dtype=torch.float32)


def nearest_bins(ab: Tensor, centres: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the `num` nearest bins of ab [B, 2, H, W], nearest first: squared distances and indices [B, num, H, W]."""
    points = ab.movedim(1, -1).unsqueeze(-2)  # [B, H, W, 1, 2]
    squared = (points[..., 0] - centres[:, 0]) ** 2 + (points[..., 1] - centres[:, 1]) ** 2  # [B, H, W, Q]
    found = squared.min(dim=-1, keepdim=True) if num == 1 else squared.topk(num, largest=False)
    return found[0].movedim(-1, 1), found[1].movedim(-1, 1)


def soft_encode(ab: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Targets of ab [B, 2, H, W]: shares that sum to 1 and the bins they belong to, nearest first, [B, 5, H, W]."""
    squared, bins = nearest_bins(ab, centres, NEIGHBOURS)
    return torch.softmax(squared / (-2 * SIGMA**2), dim=1), bins


def smooth_prior(prior: Tensor, centres: Tensor) -> Tensor:
    """Spread each bin's share [Q] over the bins around it, by a Gaussian; the sum stays 1."""
    squared = (centres[:, None] - centres[None]).square().sum(dim=-1)
    kernel = torch.exp(squared / (-2 * SIGMA**2))  # [Q, Q]
    return (kernel / kernel.sum(dim=0) * prior).sum(dim=1)


def rebalancing_weights(smoothed: Tensor) -> Tensor:
    """w ~ 1 / ((1 - lambda) p + lambda / Q), scaled so that a pixel drawn from p weighs 1 on average: sum p w = 1."""
    weights = 1 / ((1 - UNIFORM_SHARE) * smoothed + UNIFORM_SHARE / len(smoothed))
    return weights / (smoothed * weights).sum()


def grid_side(view_size: int) -> int:
    """Cells along a side of the grid on which colours are predicted."""
    return min(28, max(4, view_size // 4))


class ColorizationHead(nn.Module):
    """Maps of all stages -> 64 channels each -> the grid, summed -> ReLU -> logits over bins [B, Q, side, side].

    A light form of hypercolumns, for any backbone. A map finer than the grid is averaged down first, a coarser one is
    enlarged (bilinear) last: 1 x 1 convolutions commute with both, and so they run on few cells.
    """

    def __init__(self, channels: list[int], num_bins: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Conv2d(width, HEAD_WIDTH, 1) for width in channels)
        self.bins = nn.Conv2d(HEAD_WIDTH, num_bins, 1)
        nn.init.normal_(self.bins.weight, std=0.01)
        nn.init.zeros_(self.bins.bias)  # type: ignore[arg-type]

    def forward(self, maps: list[Tensor], side: int) -> Tensor:
        summed: Tensor | None = None
        for project, stage in zip(self.projections, maps, strict=True):
            factor = min(stage.shape[-2:]) // side
            projected = project(functional.avg_pool2d(stage, factor) if factor > 1 else stage)
            if projected.shape[-2:] != (side, side):
                projected = functional.interpolate(projected, size=(side, side), mode="bilinear")
            summed = projected if summed is None else summed + projected
        assert summed is not None
        return self.bins(torch.relu(summed))


class Colorization(Pretext):
    """Backbone and head; the prior of the bins on these images and the weights that follow from it."""

    centres: Tensor
    mean: Tensor
    std: Tensor
    prior: Tensor
    weights: Tensor

    def __init__(self, backbone: Backbone, num_samples: int, config: Config, ranks: Ranks = SINGLE) -> None:
        assert backbone.in_channels == 3, "colorization repeats the lightness over three channels"
        super().__init__(backbone, config, ranks)
        centres = ab_bins()
        num_bins = len(centres)
        self.head = ColorizationHead(stage_widths(backbone), num_bins)
        self.register_buffer("centres", centres, persistent=False)  # [Q, 2]
        for name, values in (("mean", backbone.mean), ("std", backbone.std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)
        self.register_buffer("prior", torch.full((num_bins,), 1 / num_bins))
        self.register_buffer("weights", torch.ones(num_bins))

    def begin_epoch(self, epoch: int, survey: Survey) -> Mapping[str, float]:
        """Count the colours of all images, once, and weight the bins by them."""
        if epoch != 0:
            return {}
        rows, seen = survey.features(self.histogram)
        prior = self.ranks.sum(seen.to(rows.dtype) @ rows) / self.ranks.sum(seen.sum())
        grey = int(self.centres.square().sum(dim=1).argmin())
        if float(prior[grey]) > 1 - 1e-6:
            raise DataError("all images are grey, so there are no colours to predict; choose another --method")
        self.prior.copy_(prior)
        self.weights.copy_(rebalancing_weights(smooth_prior(prior, self.centres)))
        return {}

    def histogram(self, images: Tensor) -> Tensor:
        """Share of each bin among the cells of every image: [B, Q]."""
        _, ab = self.lightness_and_colours(images)
        bins = nearest_bins(ab, self.centres, 1)[1].flatten(1)  # [B, cells]
        counts = ab.new_zeros((len(images), len(self.centres)))
        return counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=counts.dtype)) / bins.shape[1]

    @torch.no_grad()
    def lightness_and_colours(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Input [B, 3, S, S] and ab on the grid [B, 2, side, side] of normalised RGB images."""
        lab = rgb_to_lab((images.float() * self.std + self.mean).clamp(0, 1))
        grey = (lab[:, :1] / 100 - self.mean) / self.std
        return grey, functional.adaptive_avg_pool2d(lab[:, 1:], grid_side(images.shape[-1]))

    def forward(self, batch: Batch) -> Outcome:
        grey, ab = self.lightness_and_colours(batch.images.flatten(0, 1))
        shares, bins = soft_encode(ab, self.centres)  # [V B, 5, side, side]
        logits = self.head(self.backbone.stages(grey), ab.shape[-1]).float()  # [V B, Q, side, side]
        self.accuracy = (logits.detach().argmax(dim=1) == bins[:, 0]).float().mean()
        losses = -(shares * logits.log_softmax(dim=1).gather(1, bins)).sum(dim=1)
        return Outcome(batch.fair((self.weights[bins[:, 0]] * losses).mean()))


@torch.no_grad()
def stage_widths(backbone: Backbone) -> list[int]:
    """Count the channels of each stage's map, found by a look at one image."""
    training = backbone.training
    try:
        return [stage.shape[1] for stage in backbone.eval().stages(backbone.blank_image())]
    finally:
        backbone.train(training)
