"""Jigsaw: the permutation set, the geometry of tiles, what is random and what it depends on, and that it learns."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from odcluster.config import Config, changed
from odcluster.errors import UserError
from odcluster.methods.interface import Batch
from odcluster.methods.jigsaw import (
    TILES,
    Jigsaw,
    cut_tiles,
    draw_puzzles,
    normalise_tiles,
    permutation_set,
    tile_geometry,
    tile_input_size,
)
from odcluster.models.backbones import create_backbone
from odcluster.recipes import odc_small


def settings(**options) -> Config:
    return changed(odc_small(), **{"epochs": 2, "image_size": 24, "hidden": 32, "permutations": 8, **options})


def make(backbone: str = "smallconv", seed: int = 0, **options) -> Jigsaw:
    config = settings(**options)
    torch.manual_seed(seed)
    return Jigsaw(create_backbone(backbone, image_size=config.image_size), 64, config)


def ramps(num_images: int, size: int) -> torch.Tensor:
    """Images whose cell k is a ramp that rises in the direction of 40 k degrees: [B, 3, S, S], brightness random."""
    angles = torch.arange(TILES) * 2 * math.pi / TILES
    cell = size // 3
    y, x = torch.meshgrid(torch.arange(cell), torch.arange(cell), indexing="ij")
    cells = angles.cos()[:, None, None] * x + angles.sin()[:, None, None] * y  # [9, cell, cell]
    image = torch.zeros(size, size)
    for k in range(TILES):
        row, column = k // 3 * cell, k % 3 * cell
        image[row : row + cell, column : column + cell] = cells[k]
    return image + torch.randn(num_images, 3, 1, 1, generator=torch.Generator().manual_seed(0))


def cells_of_ramps(tiles: torch.Tensor) -> torch.Tensor:
    """Which cell each tile [..., 3, T, T] of `ramps` was cut from, read off its pixels."""
    right = (tiles[..., :, 1:] - tiles[..., :, :-1]).mean(dim=(-3, -2, -1))
    down = (tiles[..., 1:, :] - tiles[..., :-1, :]).mean(dim=(-3, -2, -1))
    return torch.round(torch.atan2(down, right) * TILES / (2 * math.pi)).long() % TILES


def step_of(method: Jigsaw, step: int = 0, ids: torch.Tensor | None = None, num_views: int = 1) -> Batch:
    ids = torch.arange(6) if ids is None else ids
    images = torch.randn(
        num_views, 64, 3, method.view_size, method.view_size, generator=torch.Generator().manual_seed(1)
    )
    return Batch(ids, images[:, ids], epoch=0, step=step)


# The permutation set ------------------------------------------------------------


def hamming(permutations: np.ndarray) -> np.ndarray:
    distances = (permutations[:, None] != permutations[None]).sum(axis=2)
    return distances[~np.eye(len(permutations), dtype=bool)]


@pytest.mark.parametrize(("num", "smallest"), [(2, 9), (9, 9), (20, 8), (80, 7), (100, 6), (500, 5)])
def test_permutations_are_distinct_and_far_apart(num, smallest):
    permutations = permutation_set(num)
    assert permutations.shape == (num, TILES)
    assert (np.sort(permutations, axis=1) == np.arange(TILES)).all()
    assert len(np.unique(permutations, axis=0)) == num
    assert hamming(permutations).min() == smallest


def test_every_permutation_was_the_farthest_there_was():
    """Greedy: no permutation of nine is farther from the first k than the next one is."""
    chosen = permutation_set(31)
    candidates = np.array(list(itertools.permutations(range(TILES))), np.uint8)
    for k in (1, 9, 30):
        distance = np.min([(candidates != p).sum(axis=1) for p in chosen[:k]], axis=0)
        assert distance.max() == (chosen[k] != chosen[:k]).sum(axis=1).min()


def test_the_set_is_the_set():
    """Fewer permutations are the first of more; no run can change the set for the next."""
    assert (permutation_set(30) == permutation_set(100)[:30]).all()
    first = permutation_set(30)[0, 0]
    with pytest.raises(ValueError, match="read-only"):
        permutation_set(30)[0, 0] = 5
    assert permutation_set(30)[0, 0] == first
    assert torch.equal(make(seed=1).permutations, make(seed=2).permutations)


@pytest.mark.parametrize("num", [0, 1, 10_001])
def test_an_impossible_number_of_permutations_is_refused(num):
    with pytest.raises(UserError, match="--permutations"):
        permutation_set(num)


# Geometry ------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "cell", "tile"), [(225, 75, 64), (224, 74, 63), (64, 21, 18), (32, 10, 9), (24, 8, 7)]
)
def test_tiles_are_as_published_at_225_px_and_in_proportion_elsewhere(size, cell, tile):
    assert tile_geometry(size) == (cell, tile)


def test_a_tile_always_has_room_in_its_cell():
    for size in range(12, 300):
        cell, tile = tile_geometry(size)
        assert 3 * cell <= size
        assert 1 <= tile < cell


def test_views_that_are_too_small_are_refused_with_the_remedy():
    with pytest.raises(UserError, match="--image-size"):
        make(image_size=11)
    make(image_size=12)


@pytest.mark.parametrize("size", [12, 25, 32, 64])
def test_tiles_put_back_give_the_image(size):
    """Without jitter, tile i is the top left part of cell order[i]."""
    cell, tile = tile_geometry(size)
    images = torch.randn(5, 3, size, size)
    order = torch.from_numpy(permutation_set(5).astype(np.int64))
    tiles = cut_tiles(images, order, torch.zeros(5, TILES, 2, dtype=torch.int64))
    assert tiles.shape == (5, TILES, 3, tile, tile)
    for image, shuffled, cells in zip(images, tiles, order.tolist(), strict=True):
        for part, k in zip(shuffled, cells, strict=True):
            row, column = k // 3 * cell, k % 3 * cell
            assert torch.equal(part, image[:, row : row + tile, column : column + tile])


@pytest.mark.parametrize("size", [12, 32, 224])
def test_jitter_stays_in_the_cell_and_leaves_a_gap(size):
    cell, tile = tile_geometry(size)
    labels, offsets = draw_puzzles(3, 5, np.arange(40), 1, 10, cell - tile)
    place = torch.arange(size).float()
    images = torch.stack([place[:, None].expand(size, size), place.expand(size, size)]).expand(40, 2, size, size)
    tiles = cut_tiles(images, torch.arange(TILES).expand(40, TILES), torch.from_numpy(offsets))  # not shuffled
    first, last = tiles[:, :, :, 0, 0], tiles[:, :, :, -1, -1]  # [B, 9, (row, column)]
    assert torch.equal(last - first, torch.full_like(first, tile - 1))
    corner = cell * torch.stack([torch.arange(TILES) // 3, torch.arange(TILES) % 3], dim=1)
    assert bool((first >= corner).all())
    assert bool((last < corner + cell).all())
    gaps = first[:, 1, 1] - last[:, 0, 1] - 1  # between the first two tiles of the top row
    assert gaps.min() >= 0
    assert gaps.max() <= 2 * (cell - tile)
    assert gaps.max() > 0
    assert labels.min() >= 0
    assert labels.max() < 10


def test_permutations_and_places_are_uniform():
    """20,000 draws: every count within 5 standard deviations of its expectation."""
    labels, offsets = draw_puzzles(0, 0, np.arange(20_000), 1, 10, 4)
    for drawn, values in ((labels, 10), (offsets[:, 0, 0], 5), (offsets[:, 8, 1], 5)):
        expected = len(drawn) / values
        counts = np.bincount(drawn, minlength=values)
        assert len(counts) == values
        assert np.abs(counts - expected).max() < 5 * math.sqrt(expected)


# What is random ------------------------------------------------------------


@pytest.mark.parametrize("size", [24, 32, 50])
def test_the_label_is_the_permutation_that_was_applied(size):
    """The order of the tiles, read off their pixels, is the one that the label names."""
    method = make(image_size=size, permutations=50)
    images = ramps(64, size).expand(2, 64, 3, size, size)
    tiles, labels = method.puzzles(Batch(torch.arange(64), images, epoch=0, step=3))
    assert torch.equal(cells_of_ramps(tiles), method.permutations[labels])
    assert len(labels.unique()) > 20


def test_a_puzzle_depends_on_seed_step_id_and_view_and_on_nothing_else():
    method = make()
    state = torch.get_rng_state()
    ids = torch.tensor([5, 9, 17, 40, 63])
    tiles, labels = method.puzzles(step_of(method, 7, ids, num_views=2))
    tiles, labels = tiles.unflatten(0, (2, 5)), labels.unflatten(0, (2, 5))
    for at in range(5):  # each image alone: the same puzzles
        alone, label = method.puzzles(step_of(method, 7, ids[at : at + 1], num_views=2))
        assert torch.equal(alone, tiles[:, at])
        assert torch.equal(label, labels[:, at])
    assert torch.equal(torch.get_rng_state(), state)
    everyone = torch.arange(64)
    first = method.puzzles(step_of(method, 7, everyone, num_views=2))[1]
    assert not torch.equal(first[:64], first[64:])
    assert not torch.equal(first, method.puzzles(step_of(method, 8, everyone, num_views=2))[1])
    other = Jigsaw(method.backbone, 64, settings(seed=1))
    assert not torch.equal(first, other.puzzles(step_of(method, 7, everyone, num_views=2))[1])


def test_tiles_are_normalised_one_by_one():
    method = make(image_size=32)
    batch = step_of(method)
    tiles, _ = method.puzzles(batch)
    assert tiles.mean(dim=(-2, -1)).abs().max() < 1e-5
    torch.testing.assert_close(tiles.std(dim=(-2, -1), correction=0), torch.ones(6, TILES, 3), rtol=1e-3, atol=0)
    factor, shift = torch.rand(6, TILES, 3, 1, 1) + 0.5, torch.randn(6, TILES, 3, 1, 1)
    torch.testing.assert_close(normalise_tiles(tiles * factor + shift), tiles, rtol=1e-3, atol=1e-3)
    assert normalise_tiles(torch.full((2, 3, 5, 5), 0.7)).abs().max() < 1e-3  # a flat tile is not blown up
    assert torch.equal(batch.images, step_of(method).images)  # the views are left alone


# Networks and learning ------------------------------------------------------------


@pytest.mark.parametrize(
    ("backbone", "size", "expected"),
    [("smallconv", 12, 8), ("smallconv", 24, 8), ("smallconv", 32, 9), ("resnet18", 32, 9), ("alexnet", 64, 18)],
)
def test_convolutional_networks_take_tiles_as_they_are_from_8_px_on(backbone, size, expected):
    network = create_backbone(backbone, image_size=size).eval()
    assert tile_input_size(network, tile_geometry(size)[1]) == expected
    assert not network.training  # left in the mode it was in


@pytest.mark.parametrize(("backbone", "size"), [("resnet18", 32), ("vit_tiny_patch16_224", 64)])
def test_any_backbone_makes_a_step(backbone, size):
    method = make(backbone, image_size=size)
    assert method.backbone.training
    assert method.input_size == (64 if backbone.startswith("vit") else 9)
    batch = step_of(method, ids=torch.arange(2), num_views=2)
    outcome = method(batch)
    outcome.loss.backward()
    assert outcome.features is None
    assert math.isclose(float(outcome.loss.detach()), math.log(8), abs_tol=0.2)  # at the start: chance
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in method.parameters())
    assert 0 <= float(method.after_step(batch, outcome)["accuracy"]) <= 1


def test_under_autocast_the_loss_is_float32_and_the_puzzles_are_the_same():
    method = make()
    batch = step_of(method)
    plain = method.puzzles(batch)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss = method(batch).loss
        tiles = method.puzzles(batch)[0]
    assert loss.dtype == torch.float32
    assert torch.equal(tiles, plain)


def train(method: Jigsaw, images: torch.Tensor, steps: range) -> list[float]:
    optimizer = torch.optim.SGD(method.parameters(), lr=0.05)
    method.train()
    losses = []
    for step in steps:
        outcome = method(Batch(torch.arange(len(images)), images[None], epoch=0, step=step))
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        losses.append(float(outcome.loss.detach()))
    return losses


def test_puzzles_can_be_learned():
    method = make()
    losses = train(method, ramps(32, 24), range(25))
    assert np.mean(losses[:3]) > 1.5
    assert np.mean(losses[-3:]) < 0.7
    assert float(method.accuracy) > 0.8


def test_the_state_is_complete():
    """A copy made from the state dict alone goes on exactly as the original does."""
    method, images = make(), ramps(16, 24)
    train(method, images, range(2))
    copy = make(seed=5)
    copy.load_state_dict(method.state_dict())
    assert train(copy, images, range(2, 5)) == train(method, images, range(2, 5))
    for name, tensor in method.state_dict().items():
        assert torch.equal(tensor, copy.state_dict()[name]), name


def test_the_whole_run_is_one_phase():
    (phase,) = make(method="jigsaw", lr=0.1).phases()
    assert (phase.name, phase.epochs, phase.lr) == ("jigsaw", 2, 0.1)
