"""A 3x3 convolution that learns faster on a CPU with bfloat16; everywhere else it is PyTorch's.

oneDNN's gradient of the weights in bfloat16 takes longer with two threads than with one and was half of a training step
of `smallconv`. Written as one matrix product over all pixels it is the same sum in half the time; see
docs/performance.md. Values, gradient of the input and tensor names are those of `nn.Conv2d`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FEWEST_CHANNELS = 64
"""Below this, oneDNN is faster: copying the patches takes longer than the product saves."""


class Convolution(nn.Conv2d):
    """3x3, padding 1, no bias."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        if not (half and input.device.type == "cpu" and torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(input)
        if self.in_channels < FEWEST_CHANNELS or torch.compiler.is_compiling():
            return super().forward(input)
        return ByProduct.apply(input.bfloat16(), self.weight.bfloat16(), self.stride[0])


class ByProduct(torch.autograd.Function):
    """The convolution, with the gradient of its weights as one matrix product."""

    @staticmethod
    def forward(context: Any, input: Tensor, weight: Tensor, stride: int) -> Tensor:
        context.save_for_backward(input, weight)
        context.stride = stride
        return torch.conv2d(input, weight, stride=stride, padding=1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        input, weight = context.saved_tensors
        of_input = None
        if context.needs_input_grad[0]:
            stride, ones = [context.stride] * 2, [1, 1]
            of_input = torch.ops.aten.convolution_backward(
                gradient, input, weight, None, stride, ones, ones, False, [0, 0], 1, [True, False, False]
            )[0]
        return of_input, weight_gradient(input, gradient, context.stride), None


def weight_gradient(input: Tensor, gradient: Tensor, stride: int) -> Tensor:
    """Gradient [out, in, 3, 3] of the weights: the sum over all pixels of output gradient times input patch."""
    flat = gradient.permute(0, 2, 3, 1).reshape(-1, gradient.shape[1])  # [B H W, out]
    product = flat.T @ patches(input, stride)  # [out, 9 in]
    return product.view(gradient.shape[1], 3, 3, -1).permute(0, 3, 1, 2)


def patches(input: Tensor, stride: int) -> Tensor:
    """What each output pixel sees of the input [B, in, H, W]: [B H' W', 9 in], channels last."""
    batch, channels, height, width = input.shape
    padded = input.new_zeros(batch, height + 2, width + 2, channels)
    padded[:, 1:-1, 1:-1] = input.permute(0, 2, 3, 1)
    image, row, column, _ = padded.stride()
    shape = (batch, (height - 1) // stride + 1, (width - 1) // stride + 1, 3, 3 * channels)  # a row of 3 lies together
    return padded.as_strided(shape, (image, stride * row, stride * column, row, 1)).reshape(-1, 9 * channels)
