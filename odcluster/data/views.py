"""How an image is seen: parameters drawn from (seed, epoch, id, view), then applied to uint8 pixels.

Promises: the distribution and the semantics of torchvision's RandomResizedCrop, RandomHorizontalFlip,
RandomRotation (bilinear), ColorJitter and RandomGrayscale in that order (tests compare with them), at a
fraction of their cost; and a view that depends on nothing but its arguments. The device normalises.

A loader goes through four steps, because the crop decides how much of a JPEG has to be decoded:

    draws = draw_views(augmentation, seed, epoch, ids, view)    # once per batch, before any file is open
    parameters = draws.parameters(row, height, width)           # once the header of image ids[row] is read
    factor = crop_scale_hint(parameters.box, size)              # decode at 1 / factor
    pixels = apply_view(image, parameters, size)                # uint8 [size, size, 3]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from odcluster.config import Augmentation
from odcluster.data.randomness import Purpose, uniforms

Image = NDArray[Any]  # uint8 [height, width, 3], RGB; the type stubs of OpenCV know no dtype

_ATTEMPTS = 10  # of RandomResizedCrop to find a box that fits, before it takes the central one
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
_GREY = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green, blue
_DECODE_FACTORS = (1, 2, 4, 8)  # what every JPEG decoder can do at little cost


class Box(NamedTuple):
    """A crop in pixels of the whole image."""

    top: float
    left: float
    height: float
    width: float


class ViewParameters(NamedTuple):
    """One view of one image."""

    image_height: int  # of the whole image, whatever scale it is decoded at
    image_width: int
    box: Box
    flip: bool
    angle: float  # degrees, counter-clockwise
    jitter: bool
    order: tuple[int, ...]  # of brightness 0, contrast 1, saturation 2, hue 3
    factors: tuple[float, ...]  # of the same four: neutral at 1, 1, 1, 0
    grey: bool


@dataclass(frozen=True)
class ViewDraws:
    """The views of a batch as far as they can be known without the images: one row per id."""

    crop_ratio: tuple[float, float]
    share: NDArray[np.float64]  # [n, 10] of the image's area, one per attempt
    ratio: NDArray[np.float64]  # [n, 10] width / height
    position: NDArray[np.float64]  # [n, 2] in [0, 1): top, left
    flip: NDArray[np.bool_]  # [n]
    angle: NDArray[np.float64]  # [n]
    jitter: NDArray[np.bool_]  # [n]
    order: NDArray[np.int64]  # [n, 4]
    factors: NDArray[np.float64]  # [n, 4]
    grey: NDArray[np.bool_]  # [n]

    def parameters(self, row: int, height: int, width: int) -> ViewParameters:
        """The view of one image, now that its size is known."""
        return ViewParameters(
            image_height=height,
            image_width=width,
            box=self.box(row, height, width),
            flip=bool(self.flip[row]),
            angle=float(self.angle[row]),
            jitter=bool(self.jitter[row]),
            order=tuple(self.order[row].tolist()),
            factors=tuple(self.factors[row].tolist()),
            grey=bool(self.grey[row]),
        )

    def box(self, row: int, height: int, width: int) -> Box:
        """The first of ten drawn boxes that fits into the image; else the largest central one."""
        for share, ratio in zip(self.share[row].tolist(), self.ratio[row].tolist(), strict=True):
            w = round(math.sqrt(height * width * share * ratio))
            h = round(math.sqrt(height * width * share / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = self.position[row].tolist()
                return Box(int(top * (height - h + 1)), int(left * (width - w + 1)), h, w)
        low, high = self.crop_ratio
        h, w = height, width
        if width / height < low:
            h = round(width / low)
        elif width / height > high:
            w = round(height * high)
        h, w = max(1, min(h, height)), max(1, min(w, width))
        return Box((height - h) // 2, (width - w) // 2, h, w)


def draw_views(augmentation: Augmentation, seed: int, epoch: int, ids: NDArray[np.int64], view: int) -> ViewDraws:
    """Draw view number `view` of every id. Row i depends on (seed, epoch, ids[i], view) alone."""
    u = uniforms(seed, Purpose.VIEW, epoch, ids, view, 2 * _ATTEMPTS + 14)
    crop, rest = u[:, : 2 * _ATTEMPTS], u[:, 2 * _ATTEMPTS :]
    a = augmentation
    low, high = np.log(a.crop_ratio)
    width = np.array([a.brightness, a.contrast, a.saturation])
    lowest = np.append(np.maximum(0, 1 - width), -a.hue)
    highest = np.append(1 + width, a.hue)
    return ViewDraws(
        crop_ratio=a.crop_ratio,
        share=a.crop_scale[0] + crop[:, :_ATTEMPTS] * (a.crop_scale[1] - a.crop_scale[0]),
        ratio=np.exp(low + crop[:, _ATTEMPTS:] * (high - low)),
        position=rest[:, 0:2],
        flip=rest[:, 2] < a.flip,
        angle=(2 * rest[:, 3] - 1) * a.rotation,
        jitter=rest[:, 4] < a.jitter,
        grey=rest[:, 5] < a.grey,
        order=np.argsort(rest[:, 6:10], axis=1, kind="stable"),
        factors=lowest + rest[:, 10:14] * (highest - lowest),
    )


def crop_scale_hint(box: Box, size: int) -> int:
    """The largest factor 1, 2, 4 or 8 by which a JPEG may be shrunk while decoding without loss to the view.

    The box at 1 / factor still has `size` pixels on both sides. A box is never larger than its image, so an
    image whose shorter side is below 2 * size is never shrunk: a cache may rely on it and keep it whole.
    """
    return max(f for f in _DECODE_FACTORS if f == 1 or min(box.height, box.width) >= f * size)


def apply_view(image: Image, parameters: ViewParameters, size: int) -> Image:
    """One view as [size, size, 3]: crop and resize, flip, rotate, jitter, grey.

    `image` is RGB [height, width, 3], whole, at full size or shrunk by 2, 4 or 8 while decoding.
    Crop and rotation stay two passes: torchvision interpolates twice, and one warp for both is so much
    sharper that it matches to 34 dB where two match to 49 (PASCAL VOC photos at 32 pixels).
    """
    factor = _decode_factor(image, parameters)
    pixels = _resize_box(image, Box(*(x / factor for x in parameters.box)), size, size)
    pixels = _flip_and_rotate(pixels, parameters.flip, parameters.angle)
    if parameters.jitter:
        pixels = _jitter(pixels, parameters.order, parameters.factors)
    if parameters.grey:
        pixels = cv2.cvtColor(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return pixels


def evaluation_box(height: int, width: int, size: int) -> Box:
    """What evaluation sees of an image: the central square; from 96 pixels on, the central 224 / 256 of it.

    That margin is ImageNet's custom: resize the shorter side to 256, cut 224. A small image has no margin to
    give: of 32 pixels it would cost two on every side, where objects reach the frame.
    """
    side = min(height, width) * (size / whole_side(size))
    return Box((height - side) / 2, (width - side) / 2, side, side)


def evaluation_view(image: Image, size: int) -> Image:
    """The one view [size, size, 3] that evaluation takes of an image, at whatever scale it was decoded.

    Only the square is resized, so that a strip of 20,000 x 10 pixels costs no more memory than a photo.
    """
    return _resize_box(image, evaluation_box(image.shape[0], image.shape[1], size), size, size)


def whole_side(size: int) -> int:
    """The shorter side of the image that a view of this size is made from: 256 for 224; below 96, the size itself."""
    return round(size * 256 / 224) if size >= 96 else size


def whole_view(image: Image, size: int) -> Image:
    """All of an image as [size, size, 3], its aspect given up: what the VOC protocol sees, in the protocol's two steps.

    The shorter side becomes `whole_side(size)` pixels, then both become `size`. A strip beyond 1 : 8 is squeezed
    along its length before that: resized as it is, one of 20,000 x 10 pixels would take 390 MB.
    """
    height, width = image.shape[:2]
    side = whole_side(size)
    longest = 8 * max(min(height, width), side)
    if max(height, width) > longest:
        height, width = min(height, longest), min(width, longest)
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    if side > size:
        shorter = min(height, width)
        rows, columns = (min(8 * side, int(side * length / shorter)) for length in (height, width))  # as torchvision
        image = _resize_box(image, Box(0, 0, height, width), rows, columns)
    return _resize_box(image, Box(0, 0, *image.shape[:2]), size, size)


def _decode_factor(image: Image, parameters: ViewParameters) -> int:
    """By how much the decoder has shrunk the image: decoders round the shrunk size up."""
    full = parameters.image_height, parameters.image_width
    for factor in _DECODE_FACTORS:
        if image.shape[:2] == tuple(math.ceil(side / factor) for side in full):
            return factor
    raise AssertionError(f"an image of {full} was decoded to {image.shape[:2]}")


def _resize_box(image: Image, box: Box, rows: int, columns: int) -> Image:
    """The box of the image as [rows, columns, 3], bilinear with antialiasing where it shrinks.

    Filter + bilinear takes a third of the time of cv2.INTER_AREA and is nearer to torchvision's triangle.
    """
    top, left, height, width = box
    first_row, first_column = int(top), int(left)
    pixels = image[first_row : math.ceil(top + height), first_column : math.ceil(left + width)]
    top, left = top - first_row, left - first_column
    while height >= 4 * rows and width >= 4 * columns:  # filtering would take long; halving first does no visible harm
        half = pixels.shape[0] // 2, pixels.shape[1] // 2
        pixels = cv2.resize(pixels[: 2 * half[0], : 2 * half[1]], half[::-1], interpolation=cv2.INTER_AREA)
        top, left, height, width = top / 2, left / 2, height / 2, width / 2
    down, across = height / rows, width / columns
    if max(down, across) > 1.1:  # below, the filter would change less than JPEG does
        pixels = cv2.sepFilter2D(pixels, -1, _antialiasing(across), _antialiasing(down))
    if pixels.shape[:2] == (height, width):
        return cv2.resize(pixels, (columns, rows), interpolation=cv2.INTER_LINEAR)
    # Rounded to whole pixels it would be half a pixel off on either side: 33 dB instead of 41.
    matrix = np.array([[across, 0, left + across / 2 - 0.5], [0, down, top + down / 2 - 0.5]])
    return _warp(pixels, matrix, rows, columns, cv2.BORDER_REPLICATE)


def _antialiasing(shrink: float) -> NDArray[np.float64]:
    """Filter that, followed by bilinear interpolation, is the triangle filter of half-width `shrink`.

    For an integer n that is exactly (n - |i|) / n^2, as linear B-splines refine (n = 2: 1/4, 1/2, 1/4).
    In between, the two neighbours are mixed such that the variance, (shrink^2 - 1) / 6, is right.
    """
    n = max(1, int(shrink))
    share = max(0.0, (shrink**2 - n**2) / (2 * n + 1))  # of the triangle of n + 1
    return np.array(
        [(1 - share) * max(0, n - abs(i)) / n**2 + share * (n + 1 - abs(i)) / (n + 1) ** 2 for i in range(-n, n + 1)]
    )


def _flip_and_rotate(pixels: Image, flip: bool, angle: float) -> Image:
    """Flip left-right, then rotate about the centre; black where there is nothing."""
    if angle == 0:
        return cv2.flip(pixels, 1) if flip else pixels
    size = pixels.shape[0]
    centre = (size - 1) / 2
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    sign = -1 if flip else 1
    matrix = np.array(  # from a pixel of the result to its source
        [
            [sign * cos, -sign * sin, centre * (1 - sign * cos + sign * sin)],
            [sin, cos, centre * (1 - sin - cos)],
        ]
    )
    return _warp(pixels, matrix, size, size, cv2.BORDER_CONSTANT)


def _warp(pixels: Image, matrix: NDArray[np.float64], rows: int, columns: int, border: int) -> Image:
    """Bilinear warp with a fourth channel: OpenCV is twice as fast with four as with three."""
    pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2RGBA)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    pixels = cv2.warpAffine(pixels, matrix, (columns, rows), flags=flags, borderMode=border)
    return cv2.cvtColor(pixels, cv2.COLOR_RGBA2RGB)


def _jitter(pixels: Image, order: tuple[int, ...], factors: tuple[float, ...]) -> Image:
    """Brightness, contrast, saturation and hue in the drawn order, clipped to 0 .. 255 after each."""
    grey = _is_grey(pixels)
    for operation in order:
        factor = factors[operation]
        if operation == _HUE:
            pixels = pixels if grey else _shift_hue(pixels, factor)
        elif factor == 1 or (grey and operation == _SATURATION):
            continue
        elif operation == _BRIGHTNESS:
            pixels = _blend(pixels, factor, (0.0, 0.0, 0.0), 0.0)
        elif operation == _CONTRAST:
            red, green, blue, _ = cv2.mean(pixels)
            mean = _GREY[0] * red + _GREY[1] * green + _GREY[2] * blue
            pixels = _blend(pixels, factor, (0.0, 0.0, 0.0), mean - 0.5)
        else:
            pixels = _blend(pixels, factor, _GREY, -0.5)
    return pixels


def _blend(pixels: Image, factor: float, weights: tuple[float, float, float], constant: float) -> Image:
    """factor * pixels + (1 - factor) * other, clipped; other = weights @ (red, green, blue) + constant.

    Less one half, because torchvision rounds down and OpenCV to the nearest (hence also the -0.5 of callers:
    torchvision rounds the grey image down as well).
    """
    r, g, b = ((1 - factor) * w for w in weights)
    c = (1 - factor) * constant - 0.5
    matrix = np.array([[r + factor, g, b, c], [r, g + factor, b, c], [r, g, b + factor, c]])
    return cv2.transform(pixels, matrix)


def _shift_hue(pixels: Image, shift: float) -> Image:
    """Turn the colour wheel by a share of a turn; OpenCV's full-range hue has 256 steps, as uint8 wraps."""
    steps = round(shift * 256) % 256
    if steps == 0:
        return pixels
    height, width, _ = pixels.shape
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV_FULL).reshape(height, 3 * width)
    row = np.zeros(3 * width, np.uint8)
    row[::3] = steps
    hsv += row  # whole rows: adding to every third byte takes four times as long
    return cv2.cvtColor(hsv.reshape(height, width, 3), cv2.COLOR_HSV2RGB_FULL)


def _is_grey(pixels: Image) -> bool:
    """Whether all channels are equal; one row tells for nearly every image that they are not."""
    row = pixels[pixels.shape[0] // 2]
    if (row[:, 0] != row[:, 1]).any():
        return False
    red, green, blue = cv2.split(pixels)
    return np.array_equal(red, green) and np.array_equal(red, blue)
