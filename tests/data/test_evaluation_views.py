"""What evaluation sees is what torchvision would show it, of images of any shape."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
from pictures import BILINEAR, noise, photo, psnr, to_array, to_tensor
from torchvision.transforms.v2 import functional

from odcluster.data.views import (
    Box,
    Image,
    crop_scale_hint,
    evaluation_box,
    evaluation_view,
    whole_side,
    whole_view,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# What evaluation sees


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((256, 320), 224),
        ((300, 200), 224),
        ((220, 300), 96),
        ((876, 996), 128),
        ((32, 32), 32),
        ((40, 60), 32),
    ],
)
def test_evaluation_view_is_resize_and_centre_crop(shape: tuple[int, int], size: int) -> None:
    """For shapes where torchvision's crop is central too: of an odd margin, it is half a pixel off."""
    image = photo(*shape)
    side = round(size * 256 / 224) if size >= 96 else size
    resized = functional.resize(to_tensor(image), [side], interpolation=BILINEAR, antialias=True)
    assert psnr(evaluation_view(image, size), to_array(functional.center_crop(resized, [size, size]))) >= 30


def test_evaluation_of_a_small_image_at_its_own_size_is_the_image() -> None:
    image = noise(32, 32)
    np.testing.assert_array_equal(evaluation_view(image, 32), image)


def test_evaluation_box_can_be_decoded_shrunk() -> None:
    image = photo(900, 1201)
    factor = crop_scale_hint(evaluation_box(900, 1201, 224), 224)
    assert factor == 2
    shrunk = cv2.resize(image, (601, 450), interpolation=cv2.INTER_AREA)
    assert psnr(evaluation_view(shrunk, 224), evaluation_view(image, 224)) >= 30


def whole_reference(image: Image, size: int) -> Image:
    tensor = to_tensor(image)
    if size >= 96:
        tensor = functional.resize(tensor, [round(size * 256 / 224)], interpolation=BILINEAR, antialias=True)
    return to_array(functional.resize(tensor, [size, size], interpolation=BILINEAR, antialias=True))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((375, 500), 224),
        ((500, 333), 224),
        ((200, 150), 224),
        ((1024, 2000), 224),
        ((901, 1300), 128),
        ((300, 1000), 96),
        ((60, 40), 32),
        ((32, 32), 32),
        ((400, 300), 64),
        ((100, 1500), 128),
    ],
)
def test_whole_view_is_two_resizes_without_a_crop(shape: tuple[int, int], size: int) -> None:
    image = photo(*shape, seed=2)
    assert psnr(whole_view(image, size), whole_reference(image, size)) >= 35


def test_whole_view_goes_by_way_of_256() -> None:
    """Noise keeps what a photo hides: one step from 256 x 512 to 224 x 224 would be sharper than the protocol's two."""
    image = noise(700, 1000, seed=1)
    two_steps = whole_reference(image, 224)
    one_step = to_array(functional.resize(to_tensor(image), [224, 224], interpolation=BILINEAR, antialias=True))
    ours = whole_view(image, 224)
    assert psnr(ours, two_steps) > psnr(ours, one_step) + 3


def test_whole_view_has_all_four_corners() -> None:
    image = np.zeros((300, 500, 3), np.uint8)
    for row, column in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        image[slice(0, 30) if row == 0 else slice(-30, None), slice(0, 30) if column == 0 else slice(-30, None)] = 255
        view = whole_view(image, 224)
        assert (view[row, column] > 240).all()


@pytest.mark.parametrize("shape", [(20_000, 10), (10, 20_000), (40_001, 1025)])
def test_a_long_strip_takes_little_memory_and_is_seen_whole(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 0
    resize = cv2.resize

    def watched(*arguments: Any, **named: Any) -> Any:
        nonlocal largest
        result = resize(*arguments, **named)
        largest = max(largest, result.size)
        return result

    monkeypatch.setattr(cv2, "resize", watched)
    ramp = np.linspace(0, 255, max(shape)).astype(np.uint8)
    image = np.empty((*shape, 3), np.uint8)
    image[:] = ramp[:, None, None] if shape[0] > shape[1] else ramp[None, :, None]
    view = whole_view(image, 224)
    expected = np.linspace(0, 255, 224)
    along = view[:, 112, 0] if shape[0] > shape[1] else view[112, :, 0]
    assert np.abs(along - expected).max() <= 2
    assert largest <= 8 * max(256, min(shape)) ** 2 * 3


@pytest.mark.parametrize(("size", "factor"), [(224, 2), (128, 4), (32, 8)])
def test_the_whole_image_can_be_decoded_shrunk(size: int, factor: int) -> None:
    image = photo(700, 1201)
    assert crop_scale_hint(Box(0, 0, 700, 1201), whole_side(size)) == factor
    _, encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 95])
    flags = {2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4, 8: cv2.IMREAD_REDUCED_COLOR_8}
    whole, shrunk = cv2.imdecode(encoded, cv2.IMREAD_COLOR), cv2.imdecode(encoded, flags[factor])
    assert whole is not None
    assert shrunk is not None
    assert psnr(whole_view(shrunk, size), whole_view(whole, size)) >= 30
