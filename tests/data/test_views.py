"""Views are drawn and look as torchvision's, and depend on (seed, epoch, id, view) alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import BILINEAR, noise, photo, psnr, to_array, to_tensor
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional

from odcluster.config import Augmentation
from odcluster.data.views import (
    Box,
    Image,
    ViewDraws,
    ViewParameters,
    apply_view,
    crop_scale_hint,
    draw_views,
    evaluation_view,
    whole_view,
)

pytestmark = pytest.mark.usefixtures("one_thread")
NEUTRAL = (1.0, 1.0, 1.0, 0.0)


def plain(image: Image, box: Box | None = None) -> ViewParameters:
    """The view that changes nothing but the size."""
    height, width, _ = image.shape
    whole = Box(0, 0, height, width)
    return ViewParameters(height, width, box or whole, False, 0.0, False, (0, 1, 2, 3), NEUTRAL, False)


def draw(augmentation: Augmentation, num: int, seed: int = 0, epoch: int = 0, view: int = 0) -> ViewDraws:
    return draw_views(augmentation, seed, epoch, np.arange(num), view)


def reference_geometry(image: Image, parameters: ViewParameters, size: int) -> Image:
    tensor = functional.resized_crop(
        to_tensor(image), *parameters.box, size=[size, size], interpolation=BILINEAR, antialias=True
    )
    if parameters.flip:
        tensor = functional.horizontal_flip(tensor)
    # Without a fill, the outside counts as 0. With fill=0 torchvision darkens edge pixels twice (mixes
    # them with 0, then weighs them again), which alone makes 38 dB on CIFAR-10 of 57.
    return to_array(functional.rotate(tensor, parameters.angle, interpolation=BILINEAR))


def reference_colour(image: Image, parameters: ViewParameters) -> Image:
    operations = (
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    )
    tensor = to_tensor(image)
    for operation in parameters.order:
        tensor = operations[operation](tensor, parameters.factors[operation])
    if parameters.grey:
        tensor = functional.rgb_to_grayscale(tensor, num_output_channels=3)
    return to_array(tensor)


def grey_levels(a: Image, b: Image) -> float:
    return float(np.abs(a.astype(float) - b).mean())


def distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Kolmogorov-Smirnov distance in units that samples of one distribution exceed 1.95 in once in 1,000."""
    points = np.concatenate([a, b])
    below = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (a, b)]
    return float(np.abs(below[0] - below[1]).max() * math.sqrt(len(a) * len(b) / (len(a) + len(b))))


# What is drawn


@pytest.mark.parametrize(("height", "width"), [(375, 500), (32, 32), (100, 400)])
def test_boxes_are_distributed_as_torchvisions(height: int, width: int) -> None:
    num = 4000
    torch.manual_seed(0)
    blank = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(num)])
    draws = draw(Augmentation(), num)
    ours = np.array([draws.box(row, height, width) for row in range(num)])
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()
    for measure in (
        lambda box: box[:, 2] * box[:, 3] / (height * width),
        lambda box: box[:, 3] / box[:, 2],
        lambda box: box[:, 0],
        lambda box: box[:, 1],
    ):
        assert distance(measure(ours), measure(theirs)) < 2.5  # by chance once in 100,000


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 20_000), (20_000, 1), (3, 2)])
def test_boxes_fit_into_strange_images(height: int, width: int) -> None:
    draws = draw(Augmentation(), 200)
    for row in range(200):
        top, left, h, w = draws.box(row, height, width)
        assert 0 <= top < top + h <= height
        assert 0 <= left < left + w <= width


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10)])
def test_the_fallback_box_is_torchvisions(height: int, width: int) -> None:
    theirs = RandomResizedCrop.get_params(torch.empty(3, height, width), [0.9, 1.0], [3 / 4, 4 / 3])
    ours = draw(Augmentation(crop_scale=(0.9, 1.0)), 1).box(0, height, width)
    assert ours == theirs


def test_draws_follow_the_options() -> None:
    num = 20_000
    options = Augmentation(flip=0.3, rotation=5, jitter=0.8, grey=0.2, brightness=0.4, saturation=1.5, hue=0.1)
    draws = draw(options, num)
    for drawn, probability in ((draws.flip, 0.3), (draws.jitter, 0.8), (draws.grey, 0.2)):
        error = math.sqrt(probability * (1 - probability) / num)
        assert abs(drawn.mean() - probability) < 5 * error
    limits = [(0.6, 1.4), (0.6, 1.4), (0.0, 2.5), (-0.1, 0.1)]
    for drawn, (low, high) in zip([*draws.factors.T, draws.angle], [*limits, (-5.0, 5.0)], strict=True):
        expected = low + (high - low) * (np.arange(num) + 0.5) / num
        assert low <= drawn.min() <= drawn.max() <= high
        assert distance(drawn, expected) < 2.5
    _, counts = np.unique(draws.order, axis=0, return_counts=True)
    assert len(counts) == 24
    assert np.abs(counts - num / 24).max() < 5 * math.sqrt(num / 24)


def test_certain_and_impossible_are_exact() -> None:
    never = draw(Augmentation(flip=0, jitter=0, grey=0, rotation=0, brightness=0, hue=0), 500)
    for drawn in (never.flip, never.jitter, never.grey, never.angle):
        assert not drawn.any()
    assert (never.factors[:, 0] == 1).all()
    assert (never.factors[:, 3] == 0).all()
    always = draw(Augmentation(flip=1, jitter=1, grey=1), 500)
    assert always.flip.all()
    assert always.jitter.all()
    assert always.grey.all()


def test_a_view_depends_on_seed_epoch_id_and_view_alone() -> None:
    options = Augmentation()
    ids = np.random.default_rng(0).permutation(1000)[:60]
    together = draw_views(options, 3, 2, ids, 1)
    for row, sample in enumerate(ids):
        alone = draw_views(options, 3, 2, ids[row : row + 1], 1)
        assert alone.parameters(0, 375, 500) == together.parameters(row, 375, 500), sample
    seen = {
        draw_views(options, seed, epoch, np.array([sample]), view).parameters(0, 375, 500)
        for seed in (0, 1)
        for epoch in (0, 1)
        for sample in (0, 1)
        for view in (0, 1)
    }
    assert len(seen) == 16


def test_all_but_the_box_is_independent_of_the_size() -> None:
    draws = draw(Augmentation(), 20)
    for row in range(20):
        small, large = draws.parameters(row, 30, 40), draws.parameters(row, 300, 400)
        assert small._replace(box=large.box, image_height=300, image_width=400) == large


# What is applied


@pytest.mark.parametrize("make", [photo, noise])
@pytest.mark.parametrize(
    ("operation", "factors"),
    [
        (0, (0.0, 0.6, 0.9, 1.0, 1.2, 1.4)),
        (1, (0.0, 0.6, 0.9, 1.0, 1.2, 1.4)),
        (2, (0.0, 0.5, 1.0, 1.5, 2.0)),
        (3, (-0.5, -0.3, -0.01, 0.0, 0.001, 0.1, 0.25, 0.5)),
    ],
)
def test_each_colour_operation_is_torchvisions(
    make: Callable[..., Image], operation: int, factors: tuple[float, ...]
) -> None:
    image = make(64, 64, seed=operation)
    for factor in factors:
        changed = tuple(factor if i == operation else neutral for i, neutral in enumerate(NEUTRAL))
        parameters = plain(image)._replace(jitter=True, factors=changed)
        difference = grey_levels(apply_view(image, parameters, 64), reference_colour(image, parameters))
        assert difference <= (1.0 if operation == 3 else 0.5), factor


@pytest.mark.parametrize("make", [photo, noise])
def test_the_whole_jitter_is_torchvisions(make: Callable[..., Image]) -> None:
    draws = draw(Augmentation(), 60)
    differences = []
    for row in range(60):
        image = make(48, 48, seed=row)
        drawn = draws.parameters(row, 48, 48)
        parameters = drawn._replace(box=Box(0, 0, 48, 48), flip=False, angle=0.0)
        differences.append(grey_levels(apply_view(image, parameters, 48), reference_colour(image, parameters)))
    assert np.mean(differences) <= 1
    assert np.max(differences) <= 2


def test_grey_has_three_equal_channels() -> None:
    image = photo(40, 40)
    parameters = plain(image)._replace(grey=True)
    view = apply_view(image, parameters, 40)
    assert (view == view[..., :1]).all()
    assert grey_levels(view, reference_colour(image, parameters)) <= 1


def test_saturation_and_hue_leave_a_grey_image_alone() -> None:
    image = np.repeat(photo(40, 40)[..., :1], 3, axis=2)
    parameters = plain(image)._replace(jitter=True, factors=(1.0, 1.0, 1.7, 0.3))
    np.testing.assert_array_equal(apply_view(image, parameters, 40), image)
    coloured = image.copy()
    coloured[3, 3] = (200, 0, 0)  # one coloured pixel, away from the row that is looked at first
    view = apply_view(coloured, plain(image)._replace(jitter=True, factors=(1.0, 1.0, 1.0, 0.5)), 40)
    np.testing.assert_allclose(view[3, 3], (0, 200, 200), atol=4)  # hue has 256 steps


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((375, 500), 224),
        ((200, 150), 224),
        ((256, 300), 96),
        ((32, 32), 32),
        ((64, 64), 32),
        ((400, 600), 32),
    ],
)
def test_geometry_is_torchvisions(shape: tuple[int, int], size: int) -> None:
    draws = draw(Augmentation(jitter=0, grey=0), 10)
    quality = []
    for row in range(10):
        image = photo(*shape, seed=row)
        parameters = draws.parameters(row, *shape)
        quality.append(psnr(apply_view(image, parameters, size), reference_geometry(image, parameters, size)))
    assert min(quality) >= 36, quality


@pytest.mark.parametrize("box", [Box(0, 0, 60, 20), Box(4, 4, 20, 60), Box(0, 0, 64, 64), Box(7, 3, 1, 1)])
@pytest.mark.parametrize("angle", [0.0, 2.0, -30.0, 90.0])
@pytest.mark.parametrize("flip", [False, True])
def test_geometry_of_single_boxes(box: Box, angle: float, flip: bool) -> None:
    image = photo(64, 64, seed=1)
    parameters = plain(image, box)._replace(angle=angle, flip=flip)
    assert psnr(apply_view(image, parameters, 32), reference_geometry(image, parameters, 32)) >= 30


@pytest.mark.parametrize(("shape", "size", "factor"), [((501, 603), 224, 2), ((401, 515), 64, 4), ((401, 515), 32, 8)])
def test_a_jpeg_shrunk_while_decoding_gives_the_same_view(shape: tuple[int, int], size: int, factor: int) -> None:
    draws = draw(Augmentation(jitter=0, grey=0, crop_scale=(0.8, 1.0), crop_ratio=(0.9, 1.2)), 6)
    flags = {2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4, 8: cv2.IMREAD_REDUCED_COLOR_8}
    for row in range(6):
        _, encoded = cv2.imencode(".jpg", photo(*shape, seed=row), [cv2.IMWRITE_JPEG_QUALITY, 95])
        parameters = draws.parameters(row, *shape)
        assert crop_scale_hint(parameters.box, size) == factor
        whole, shrunk = cv2.imdecode(encoded, cv2.IMREAD_COLOR), cv2.imdecode(encoded, flags[factor])
        assert whole is not None
        assert shrunk is not None
        view = apply_view(shrunk, parameters, size)
        assert psnr(view, reference_geometry(whole, parameters, size)) >= 30


def test_an_image_of_another_size_than_announced_is_noticed() -> None:
    with pytest.raises(AssertionError, match="decoded"):
        apply_view(photo(40, 40), plain(photo(64, 64)), 32)


def test_a_shrunk_box_still_fills_the_view() -> None:
    draws = draw(Augmentation(), 300)
    for row in range(300):
        height, width = 200 + 7 * row, 2300 - 7 * row
        box = draws.box(row, height, width)
        factor = crop_scale_hint(box, 96)
        assert factor in (1, 2, 4, 8)
        if factor > 1:
            assert min(box.height, box.width) >= 96 * factor
            assert min(height, width) >= 2 * 96  # what a cache relies on
        if factor < 8:
            assert min(box.height, box.width) < 96 * 2 * factor


def test_the_image_is_never_written_to() -> None:
    image = photo(50, 60)
    before = image.copy()
    image.flags.writeable = False
    draws = draw(Augmentation(), 20)
    for row in range(20):
        view = apply_view(image, draws.parameters(row, 50, 60), 32)
        assert view.shape == (32, 32, 3)
        assert view.dtype == np.uint8
        assert not np.shares_memory(view, image)
    assert not np.shares_memory(apply_view(image, plain(image, Box(0, 0, 50, 50)), 50), image)
    assert not np.shares_memory(evaluation_view(image, 50), image)
    square = image[:50, :50]
    assert not np.shares_memory(whole_view(square, 50), image)
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (3000, 1), (2, 5)])
def test_strange_images_have_views(shape: tuple[int, int]) -> None:
    image = noise(*shape)
    draws = draw(Augmentation(), 10)
    for row in range(10):
        assert apply_view(image, draws.parameters(row, *shape), 32).shape == (32, 32, 3)
    for size in (32, 128):
        assert evaluation_view(image, size).shape == (size, size, 3)
        assert whole_view(image, size).shape == (size, size, 3)


def test_every_option_of_augmentation_is_used() -> None:
    base = Augmentation()
    drawn = draw(base, 50)
    others: dict[str, Any] = {
        "crop_scale": (0.5, 1.0),
        "crop_ratio": (1.0, 1.1),
        "flip": 0.0,
        "rotation": 10.0,
        "brightness": 0.1,
        "contrast": 0.1,
        "saturation": 0.1,
        "hue": 0.1,
        "jitter": 0.5,
        "grey": 0.5,
    }
    for name, value in others.items():
        changed = draw(dataclasses.replace(base, **{name: value}), 50)
        same = [changed.parameters(i, 300, 400) == drawn.parameters(i, 300, 400) for i in range(50)]
        assert not all(same), name
