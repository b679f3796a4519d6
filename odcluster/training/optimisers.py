"""Muon: momentum whose matrices are made orthogonal before they are applied, so that all directions learn alike.

Jordan et al. 2024. Each step moves a weight matrix by about the same amount in every direction, where SGD and AdamW
move it mostly along the few directions with large gradients: features form in far fewer steps (docs/recipe.md). What is
not a matrix (biases, batch norm) goes by Adam, at a rate of its own and without decay. torch.optim.Muon takes matrices
only; tests compare with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
BETAS = (0.9, 0.999)
QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of the published iteration X <- a X + (b S + c S S) X, S = X X^T."""
ITERATIONS = 3
"""Published are 5. Features were as good with 3, which take 12 ms of a step of `smallconv` on one core, not 20."""
REST = 0.15
"""Adam's rate over Muon's: 0.003 for 0.02."""


class Muon(torch.optim.Optimizer):
    """Groups with `matrices` True go by Muon, a convolution's weights as [out, in * height * width]; others by Adam."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        self.dtype = dtype
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "matrices": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["matrices"]:
                    self._matrix_step(parameter, group["lr"], group["weight_decay"])
                else:
                    self._adam_step(parameter, group["lr"] * REST)

    def _matrix_step(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(state["momentum_buffer"], MOMENTUM).flatten(1)  # Nesterov's
        rows, columns = update.shape
        turned = orthogonal(update, self.dtype).view_as(parameter)
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(turned, alpha=-lr * max(1.0, rows / columns) ** 0.5)

    def _adam_step(self, parameter: Tensor, lr: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - BETAS[0])
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - BETAS[1])
        first, second = (1 - beta ** float(state["step"]) for beta in BETAS)
        parameter.addcdiv_(state["exp_avg"], (state["exp_avg_sq"] / second).sqrt().add_(1e-8), value=-lr / first)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with the same singular vectors and singular values evened out, all but the smallest near 1."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)
