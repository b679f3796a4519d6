"""Muon against torch.optim.Muon and torch.optim.Adam, which do the same for matrices and for all else."""

import pytest
import torch
from torch import nn

from odcluster.training.optimisers import ITERATIONS, REST, Muon, orthogonal


def walk(parameter: nn.Parameter, optimiser: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> torch.Tensor:
    for gradient in gradients:
        parameter.grad = gradient.view_as(parameter).clone()
        optimiser.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (6, 6)])
def test_matrices_go_as_in_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(5)]
    own, reference = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    got = walk(own, Muon([{"params": [own]}], 0.02, 0.01, torch.bfloat16), gradients)
    expected = walk(
        reference, torch.optim.Muon([reference], lr=0.02, weight_decay=0.01, ns_steps=ITERATIONS), gradients
    )
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
    assert (got - start).abs().max() > 0.01


def test_a_convolution_goes_as_the_matrix_of_its_outputs() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(8, 3, 3, 3), [torch.randn(8, 3, 3, 3) for _ in range(3)]
    kernel, matrix = nn.Parameter(start.clone()), nn.Parameter(start.clone().flatten(1))
    got = walk(kernel, Muon([{"params": [kernel]}], 0.02, 0.01, torch.float32), gradients)
    expected = walk(matrix, Muon([{"params": [matrix]}], 0.02, 0.01, torch.float32), gradients)
    assert torch.equal(got.flatten(1), expected)


def test_what_is_no_matrix_goes_by_adam() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(7), [torch.randn(7) for _ in range(5)]
    own, reference = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    got = walk(own, Muon([{"params": [own], "matrices": False}], 0.02, 0.01, torch.float32), gradients)
    expected = walk(reference, torch.optim.Adam([reference], lr=0.02 * REST), gradients)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (1, 9)])
def test_orthogonal_keeps_directions_and_evens_out_lengths(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    found = orthogonal(matrix, torch.float32)
    lengths = torch.linalg.svdvals(found)
    assert 0.6 < lengths.min() <= lengths.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.T @ found @ v.T  # the same singular vectors: diagonal
    assert (turned - torch.diag(turned.diagonal())).abs().max() < 1e-3


def test_a_zero_gradient_moves_nothing() -> None:
    kernel = nn.Parameter(torch.ones(4, 6))
    got = walk(kernel, Muon([{"params": [kernel]}], 0.02, 0.0, torch.float32), [torch.zeros(4, 6)])
    assert torch.equal(got, torch.ones(4, 6))
