"""Weight gradients of convolutions on a CPU that does other things too.

oneDNN spreads the weight gradient of a bfloat16 convolution over all threads, which wait for each other in a loop that
never sleeps. Where another program has one of the cores, the rest burn their time waiting: a training step then takes
half as long again, at times 50 times as long (benchmarks/busy.py). Here each thread computes the gradient of its share
of the batch by itself, and the shares are added in float32; on an idle machine that takes as long.

Promises: torch's gradients but for rounding; the same bits for the same number of threads. What is not a plain
convolution (another class, padding other than with zeros) is left as it is, and so is what would only lose: many
weights, which oneDNN shares out without waiting; 1x1 and depthwise convolutions, whose steps got no faster.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MOST_WEIGHTS = 400_000
"""Of one convolution: with more, adding up the shares costs more than waiting does (ResNets, two cores)."""


class SharedConv2d(nn.Conv2d):
    """nn.Conv2d under bfloat16 autocast on a CPU; in every other case what it always was."""

    def forward(self, input: Tensor) -> Tensor:
        learns = torch.is_grad_enabled() and self.weight.requires_grad and torch.is_autocast_enabled("cpu")
        if not learns or torch.get_num_threads() == 1:
            return super().forward(input)
        layout = (self.stride, self.padding, self.dilation)
        return cast(Tensor, _Convolution.apply(input.bfloat16(), self.weight, self.bias, layout))


def share_weight_gradients(network: nn.Module) -> None:
    """Let the convolutions of the network that gain by it compute their weight gradients by shares of the batch."""
    for module in network.modules():
        if type(module) is nn.Conv2d and _gains(module):
            module.__class__ = SharedConv2d


def _gains(layer: nn.Conv2d) -> bool:
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return plain and max(layer.kernel_size) > 1 and layer.weight.numel() <= MOST_WEIGHTS


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: tuple[Any, ...]) -> Tensor:
        half = weight.bfloat16()
        ctx.save_for_backward(x, half)
        ctx.layout = layout
        return F.conv2d(x, half, None if bias is None else bias.bfloat16(), *layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _gradients(gradient, x, weight, ctx.layout, 0)
        if ctx.needs_input_grad[1]:
            shares = torch.get_num_threads()
            parts = zip(gradient.chunk(shares), x.chunk(shares), strict=True)
            jobs = [_crew(shares).submit(_gradients, g, part, weight, ctx.layout, 1) for g, part in parts]
            of_weight = jobs[0].result().float()
            for job in jobs[1:]:  # in the order of the batch, whoever is done first
                of_weight += job.result()
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(dim=(0, 2, 3), dtype=torch.float32)
        return of_x, of_weight, of_bias, None


@torch.no_grad()  # gradients are on in every new thread
def _gradients(gradient: Tensor, x: Tensor, weight: Tensor, layout: tuple[Any, ...], which: int) -> Tensor:
    """With respect to the images (0) or the weights (1)."""
    stride, padding, dilation = layout
    wanted = [which == 0, which == 1, False]
    found = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, dilation, False, [0, 0], 1, wanted
    )
    return cast(Tensor, found[which])


@lru_cache(maxsize=1)
def _crew(size: int) -> ThreadPoolExecutor:
    """So many threads, each of which computes alone."""
    threads = torch.get_num_threads()
    crew = ThreadPoolExecutor(size, "convolution", _compute_alone)
    everyone = threading.Barrier(size)
    for begun in [crew.submit(everyone.wait) for _ in range(size)]:
        begun.result()
    torch.set_num_threads(threads)  # theirs also became that of threads that are yet to come
    return crew


def _compute_alone() -> None:
    torch.get_num_threads()  # a thread that has not asked yet is given everybody's number later, at its first product
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_crew.cache_clear)
