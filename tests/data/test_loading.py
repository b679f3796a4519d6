"""Batches are a function of (seed, epoch, ids): workers, caches and neighbours in the batch do not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import make_images

from odcluster.config import Augmentation
from odcluster.data.loading import Cache, Loader, Request, Views
from odcluster.data.sources import open_source
from odcluster.data.views import evaluation_view, whole_view

AUGMENTATION = Augmentation(num_views=2, crop_size=12)
ONE = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture
def folder(tmp_path):
    return make_images(tmp_path / "images", 20)


def batches(folder, workers, cache=None, epoch=3):
    source = open_source(folder)
    with Loader(source, AUGMENTATION, image_size=16, seed=1, workers=workers, normalisation=ONE, cache=cache) as loader:
        return list(loader.training(epoch, [np.array([4, 2, 9]), np.array([0, 19])]))


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_pixels_in_the_same_order(workers, folder):
    for one, other in zip(batches(folder, 0), batches(folder, workers), strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.images, other.images)
        assert one.images.shape == (2, len(one.ids), 12, 12, 3)


def test_a_cache_gives_the_same_pixels(folder):
    source = open_source(folder)
    cache = Cache(source, 12, 20 * 20 * 3 * 7)
    told = []
    cache.fill(told.append)
    assert sum(image is not None for image in cache.images) == 7, "it stops when it is full"
    assert told == [20]
    for one, other in zip(batches(folder, 0), batches(folder, 0, cache), strict=True):
        assert torch.equal(one.images, other.images)


def test_large_images_are_not_cached(tmp_path):
    cache = Cache(open_source(make_images(tmp_path / "big", 3, side=40)), 16, 10**9)
    cache.fill(lambda done: None)
    assert cache.images == [None] * 3


def test_views_differ_between_epochs_and_between_views(folder):
    first, other = batches(folder, 0, epoch=0)[0], batches(folder, 0, epoch=1)[0]
    assert not torch.equal(first.images, other.images)
    assert not torch.equal(first.images[0], first.images[1])


def test_an_unreadable_image_is_left_out_and_the_others_are_unchanged(folder):
    whole = batches(folder, 0)[0]
    (folder / "image0002.png").write_bytes(b"not an image")
    rest = batches(folder, 0)[0]
    assert rest.ids.tolist() == [4, 9]
    assert [i for i, _ in rest.refused] == [2]
    assert torch.equal(rest.images, whole.images[:, [0, 2]])


def test_evaluation_views_come_in_order_and_are_the_evaluation_view(folder):
    source = open_source(folder)
    with Loader(source, AUGMENTATION, image_size=16, seed=1, workers=0, normalisation=ONE) as loader:
        found = list(loader.evaluation(np.arange(20), 8))
    assert torch.cat([batch.ids for batch in found]).tolist() == list(range(20))
    assert np.array_equal(found[0].images[0, 3].numpy(), evaluation_view(source.image(3), 16))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_whole_image_is_served_only_when_asked_for(workers, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 30, 3), dtype=np.uint8)
    source = open_source(pixels)
    with Loader(source, AUGMENTATION, image_size=16, seed=1, workers=workers, normalisation=ONE) as loader:
        whole = list(loader.evaluation(np.array([5, 1, 2]), 2, whole=True))
        central = list(loader.evaluation(np.array([5, 1, 2]), 2))
    assert [batch.ids.tolist() for batch in whole] == [[5, 1], [2]]
    assert np.array_equal(whole[0].images[0, 1].numpy(), whole_view(pixels[1], 16))
    assert np.array_equal(central[0].images[0, 1].numpy(), evaluation_view(pixels[1], 16))
    assert not torch.equal(whole[0].images, central[0].images)


def test_the_whole_view_of_a_large_jpeg_is_decoded_shrunk_and_of_a_cached_one_is_the_same(tmp_path):
    import cv2

    y, x = np.mgrid[0:600, 0:1000]
    pixels = cv2.GaussianBlur(np.stack([x % 256, y % 256, (x + y) // 8 % 256], axis=2).astype(np.uint8), (0, 0), 9)
    cv2.imwrite(str(tmp_path / "large.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 95])
    cv2.imwrite(str(tmp_path / "small.jpg"), pixels[:200, :120], [cv2.IMWRITE_JPEG_QUALITY, 95])
    source = open_source(tmp_path)
    cache = Cache(source, 128, 10**9)
    cache.fill(lambda done: None)
    assert [image is None for image in cache.images] == [True, False], "the small one is in the cache"
    request = Request(np.array([0, 1]), None, whole=True)
    fresh = Views(source, AUGMENTATION, 128, 0, None)[request].images[0].numpy()
    cached = Views(source, AUGMENTATION, 128, 0, cache)[request].images[0].numpy()
    assert np.array_equal(fresh, cached)
    full = whole_view(source.image(0), 128)
    assert not np.array_equal(fresh[0], full), "the scaled decode was not used"
    assert 10 * np.log10(255**2 / np.mean((fresh[0].astype(float) - full) ** 2)) > 35
    assert np.array_equal(fresh[1], whole_view(source.image(1), 128))


def test_a_scaled_decode_sees_nearly_the_same(tmp_path):
    """Large JPEGs are decoded at a fraction of their size; the views must agree with those of a full decode."""
    import cv2

    y, x = np.mgrid[0:800, 0:1000]
    pixels = np.stack([x % 256, y % 256, (x + y) // 8 % 256], axis=2).astype(np.uint8)
    pixels = cv2.GaussianBlur(pixels, (0, 0), 9)
    cv2.imwrite(str(tmp_path / "large.jpg"), pixels[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
    source = open_source(tmp_path)
    plain = Augmentation(num_views=4, crop_scale=(0.5, 1.0), hue=0.0, jitter=0.0, grey=0.0)
    request = Request(np.array([0]), 0)
    scaled = Views(source, plain, 64, 0, None)[request].images.numpy().astype(float)
    cache = Cache(source, 64, 10**9)
    cache.images[0] = source.image(0)
    full = Views(source, plain, 64, 0, cache)[request].images.numpy().astype(float)
    assert not np.array_equal(scaled, full), "the scaled decode was not used"
    assert 10 * np.log10(255**2 / np.mean((scaled - full) ** 2)) > 30
