"""Images made up for the tests of views, and how far two are apart."""

from __future__ import annotations

import math

import numpy as np
import torch
from torchvision.transforms import InterpolationMode

from odcluster.data.views import (
    Image,
)

BILINEAR = InterpolationMode.BILINEAR


def photo(height: int, width: int, seed: int = 0) -> Image:
    """Like a photograph: amplitude ~ 1 / frequency, colours vary less than brightness, sharp edges."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(width), np.fft.fftfreq(height)))
    frequency[0, 0] = np.inf
    spectrum = np.fft.fft2(rng.normal(size=(4, height, width))) / frequency
    planes = np.real(np.fft.ifft2(spectrum))
    planes /= planes.std(axis=(1, 2), keepdims=True)
    image = 128 + 45 * planes[0][..., None] + 30 * planes[1:].transpose(1, 2, 0)
    image[height // 3 : height // 2, width // 4 : width // 2] += (60, -40, 20)
    return np.clip(image, 0, 255).astype(np.uint8)


def noise(height: int, width: int, seed: int = 0) -> Image:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def to_tensor(image: Image) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)


def to_array(tensor: torch.Tensor) -> Image:
    return tensor.permute(1, 2, 0).numpy()


def psnr(a: Image, b: Image) -> float:
    return 10 * math.log10(255**2 / max(1e-9, np.mean((a.astype(float) - b) ** 2)))
