"""Sobel: the published filters, literally; edges pass, colours and constants do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from odcluster.models.backbones import create_backbone
from odcluster.models.sobel import Sobel


def literal_sobel(image: Tensor) -> Tensor:
    """The published filter [[1, 0, -1], [2, 0, -2], [1, 0, -1]] and its transpose, pixel by pixel."""
    _, height, width = image.shape
    grey = torch.zeros(height + 2, width + 2)
    grey[1:-1, 1:-1] = (image[0] + image[1] + image[2]) / 3
    gradients = torch.zeros(2, height, width)
    for y in range(height):
        for x in range(width):
            n = grey[y : y + 3, x : x + 3]
            gradients[0, y, x] = n[0, 0] + 2 * n[1, 0] + n[2, 0] - n[0, 2] - 2 * n[1, 2] - n[2, 2]
            gradients[1, y, x] = n[0, 0] + 2 * n[0, 1] + n[0, 2] - n[2, 0] - 2 * n[2, 1] - n[2, 2]
    return gradients


def test_it_is_the_published_filter() -> None:
    images = torch.randn(3, 3, 7, 9)
    torch.testing.assert_close(Sobel()(images), torch.stack([literal_sobel(image) for image in images]))


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (32, 32)])
def test_it_equals_scipys_correlation_at_any_size(size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size)
    horizontal = np.array([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
    grey = images.double().mean(dim=1).numpy()
    expected = [[ndimage.correlate(g, f, mode="constant") for f in (horizontal, horizontal.T)] for g in grey]
    torch.testing.assert_close(Sobel()(images), torch.from_numpy(np.array(expected)).float(), atol=1e-5, rtol=1e-5)


def test_a_constant_image_has_no_gradient_inside() -> None:
    image = torch.tensor([0.3, -1.2, 2.0])[None, :, None, None].expand(1, 3, 8, 8)
    assert bool((Sobel()(image)[:, :, 1:-1, 1:-1].abs() < 1e-6).all())


def test_colours_of_equal_brightness_look_alike() -> None:
    """A permutation of the channels changes every colour, and nothing behind the filter."""
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(Sobel()(images), Sobel()(images[:, [2, 0, 1]]))


def test_a_turned_image_swaps_the_gradients() -> None:
    images = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(Sobel()(images.transpose(2, 3)), Sobel()(images).transpose(2, 3).flip(1))


def test_nothing_is_learned_and_nothing_is_saved() -> None:
    sobel = Sobel()
    assert list(sobel.parameters()) == []
    assert sobel.state_dict() == {}


def test_half_precision_around_it_loses_no_edges() -> None:
    """Differences of 0.001 on a level of 2: bfloat16 has steps of 0.016 there."""
    images = 2 + 0.001 * torch.randn(1, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = Sobel()(images)
    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, Sobel()(images))


def test_a_two_channel_backbone_takes_what_it_gives() -> None:
    backbone = create_backbone("smallconv", image_size=16, in_channels=2)
    assert backbone(Sobel()(torch.randn(4, 3, 16, 16))).shape == (4, backbone.num_features)
