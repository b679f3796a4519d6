"""Jigsaw puzzles (Noroozi & Favaro 2016): cut an image into 3 x 3 tiles, shuffle them, predict the order.

Geometry, for views of S px: a cell is S // 3 px wide (1 or 2 px left over at the right and at the bottom go unused), a
tile 64 / 75 of its cell, as published for 225 px: 63 of 74 px at 224, 9 of 10 at 32, 7 of 8 at 24. Each tile lies
anywhere inside its cell with equal probability. This leaves a gap between neighbours, 0 to 22 px at 224 and 0 to 2 px
at 32, so that edges cannot simply be continued.

Every tile goes through the same backbone (a siamese trunk: 9 B images), and the nine features, side by side in the
shuffled order, through two fully connected layers. Published against shortcuts, and done here: each tile is
normalised by its own mean and standard deviation. Also published, and left to the views: about 30 % grey images
(`--grey 0.3`), which hides chromatic aberration.

The draws are functions of (seed, step, id, view): the same in whatever batch, before and after a resume.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from odcluster.config import Config
from odcluster.data.randomness import Purpose, permutation, uniforms
from odcluster.errors import UserError
from odcluster.methods.interface import Batch, Outcome
from odcluster.methods.pretext import Pretext
from odcluster.models.backbones import Backbone
from odcluster.models.heads import LinearClassifier
from odcluster.ranks import SINGLE, Ranks

GRID = 3
TILES = GRID * GRID
TILE_SHARE = 64 / 75
SMALLEST_VIEW = 12
"""Below this a cell has under 4 px and a tile no room to move in it."""
INPUT_SIZES = (8, 16, 32)
"""Sides to which tiles are enlarged when the backbone cannot take them as they are; 8 px is the least of all."""
MOST_PERMUTATIONS = 10_000
SET_SEED = 0
"""Decides between equally distant permutations. No option: the set of P permutations is the same in every run."""
EPS = 1e-4
"""Added to a tile's variance. Its root, 0.01, is below one grey level of a normalised image: flat tiles stay flat."""


@functools.lru_cache
def permutation_set(num: int) -> NDArray[np.uint8]:
    """Orders of nine tiles that are as different as can be: [num, 9], no two equal.

    Greedy, as published: start with any one, then add again and again the permutation whose smallest Hamming distance
    to those chosen is largest. All 9! candidates are looked at, in a fixed shuffled order that settles ties. Two of
    the first 100 differ in at least 6 places and in 8.1 on average; 1,000 take a second and differ in at least 5.
    """
    if not 2 <= num <= MOST_PERMUTATIONS:
        raise UserError(f"--permutations must be from 2 to {MOST_PERMUTATIONS:,}, not {num}")
    candidates = np.array(list(itertools.permutations(range(TILES))), np.uint8)  # 362,880 x 9
    candidates = candidates[permutation(SET_SEED, 0, len(candidates), Purpose.PRETEXT)]
    places = np.ascontiguousarray(candidates.T)
    nearest = np.full(len(candidates), TILES, np.uint8)  # distance to the nearest chosen one
    chosen = [0]
    while len(chosen) < num:
        distance = np.zeros(len(candidates), np.uint8)
        for place, tile in zip(places, candidates[chosen[-1]], strict=True):
            distance += place != tile
        np.minimum(nearest, distance, out=nearest)
        chosen.append(int(nearest.argmax()))
    result = candidates[chosen]
    result.setflags(write=False)  # one array for all callers
    return result


def tile_geometry(view_size: int) -> tuple[int, int]:
    """Sides of a cell and of a tile in pixels."""
    if view_size < SMALLEST_VIEW:
        raise UserError(
            f"jigsaw cannot cut views of {view_size} px into 3 x 3 tiles; use a larger --image-size or --crop-size "
            f"({SMALLEST_VIEW} px at least, 24 or more to learn something)"
        )
    cell = view_size // GRID
    return cell, round(cell * TILE_SHARE)


def draw_puzzles(
    seed: int, step: int, ids: NDArray[np.int64], num_views: int, num_permutations: int, room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which permutation each view gets [V B], and where each tile lies in its cell [V B, 9, 2], from 0 to room."""
    draws = [uniforms(seed, Purpose.PRETEXT, step, ids, view, 1 + 2 * TILES) for view in range(num_views)]
    u = np.concatenate(draws)  # float64: in float32, a number just below 1 would become 1
    labels = np.floor(u[:, 0] * num_permutations).astype(np.int64)
    offsets = np.floor(u[:, 1:] * (room + 1)).astype(np.int64)
    return labels, offsets.reshape(-1, TILES, 2)


def cut_tiles(images: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """Tiles [B, 9, C, T, T] of images [B, C, S, S]: the i-th of image b lies in cell order[b, i], at offsets[b, i]."""
    cell, tile = tile_geometry(images.shape[-1])
    pixels = torch.arange(tile, device=images.device)
    rows = (order // GRID * cell + offsets[..., 0])[..., None] + pixels  # [B, 9, T]
    columns = (order % GRID * cell + offsets[..., 1])[..., None] + pixels
    which = torch.arange(len(images), device=images.device)[:, None, None, None]
    tiles = images[which, :, rows[..., :, None], columns[..., None, :]]  # [B, 9, T, T, C]
    return tiles.movedim(-1, 2)


def normalise_tiles(tiles: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 in every channel of every tile [..., C, T, T]; a flat channel becomes 0."""
    variance, mean = torch.var_mean(tiles, dim=(-2, -1), correction=0, keepdim=True)
    return (tiles - mean) * torch.rsqrt(variance + EPS)


def tile_input_size(backbone: Backbone, tile: int) -> int:
    """Return the smallest side at which this backbone takes tiles: their own, else 8, 16 or 32, else its image size.

    Found by trying. Convolutional networks take tiles as they are (from 8 px on); a transformer of fixed size wants its
    full image size, which makes a step nine times as expensive as one of rotation's forward passes.
    """
    candidates = [tile] if tile >= INPUT_SIZES[0] else []
    candidates += [size for size in INPUT_SIZES if size > tile]
    training = backbone.training
    try:
        for size in candidates:
            try:
                with torch.no_grad():
                    features = backbone.eval()(backbone.blank_image(size))
            except Exception:  # hundreds of networks, each with its own way to refuse a size
                continue
            if features.shape == (1, backbone.num_features) and bool(features.isfinite().all()):
                return size
    finally:
        backbone.train(training)
    return backbone.image_size


class JigsawHead(nn.Module):
    """Nine features in the shuffled order [B, 9 F] -> hidden, ReLU -> one logit per permutation."""

    def __init__(self, in_features: int, hidden: int, num_permutations: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(TILES * in_features, hidden)
        self.fc2 = LinearClassifier(hidden, num_permutations)
        nn.init.kaiming_normal_(self.fc1.weight, nonlinearity="relu")
        nn.init.zeros_(self.fc1.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Jigsaw(Pretext):
    """One puzzle per view and step; the state is that of backbone and head."""

    permutations: Tensor

    def __init__(self, backbone: Backbone, num_samples: int, config: Config, ranks: Ranks = SINGLE) -> None:
        super().__init__(backbone, config, ranks)
        self.view_size = config.augmentation.crop_size or config.image_size or backbone.image_size
        self.cell, self.tile = tile_geometry(self.view_size)
        self.input_size = tile_input_size(backbone, self.tile)
        chosen = torch.from_numpy(permutation_set(config.jigsaw.permutations).astype(np.int64))
        self.register_buffer("permutations", chosen, persistent=False)  # [P, 9]
        self.head = JigsawHead(backbone.num_features, config.head.hidden, len(chosen))

    def puzzles(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Shuffled, normalised tiles [V B, 9, 3, T, T] of the views, and which permutation was applied [V B]."""
        views = batch.images.flatten(0, 1)
        assert views.shape[-1] == self.view_size, "the views are not of the size this was built for"
        labels, offsets = (
            torch.from_numpy(drawn).to(views.device)
            for drawn in draw_puzzles(
                self.config.seed,
                batch.step,
                batch.ids.cpu().numpy(),
                len(batch.images),
                len(self.permutations),
                self.cell - self.tile,
            )
        )
        return normalise_tiles(cut_tiles(views, self.permutations[labels], offsets)), labels

    def forward(self, batch: Batch) -> Outcome:
        tiles, labels = self.puzzles(batch)
        flat = tiles.flatten(0, 1)  # [9 V B, 3, T, T]
        if self.input_size != self.tile:
            flat = functional.interpolate(flat, size=(self.input_size, self.input_size), mode="bilinear")
        features = self.backbone(flat).unflatten(0, (-1, TILES))  # [V B, 9, F]
        logits = self.head(features.flatten(1)).float()
        self.accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return Outcome(batch.fair(functional.cross_entropy(logits, labels)))
