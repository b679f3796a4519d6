"""PCA, and PCA with whitening as DeepCluster prepares features for k-means (Caron et al. 2018, section 4).

Promises: rows leave with mean 0 and, in every direction that carries more than rounding, variance 1; the same bits for
the same rows on one machine; memory beside rows and result is one block and a D x D matrix, at any N. Across ranks,
each has rows of its own, and moments are added up. Leaves to others: the L2 normalisation that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from odcluster.clustering.kmeans import BLOCK, accumulator_dtype
from odcluster.ranks import SINGLE, Ranks


@torch.no_grad()
def pca_whiten(rows: Tensor, dim: int, ranks: Ranks = SINGLE) -> Tensor:
    """Project rows [N, D] on their first principal components, each scaled to variance 1: [N, min(dim, D, N - 1)]."""
    mean, projection = whitening(rows, dim, ranks)
    return _project(rows, mean, projection)


def whitening(rows: Tensor, dim: int, ranks: Ranks = SINGLE) -> tuple[Tensor, Tensor]:
    """Mean [D] and projection [D, d] that whiten these rows, and others like them."""
    mean, covariance, components, variances = _components(rows, dim, ranks)
    # float32 rows carry a rounding error of about eps |x|: a direction with less variance than that is made of it
    # (dead channels, few distinct rows) and is not blown up to 1, but stays near 0.
    power = float(covariance.trace() + mean.square().sum())  # mean of |x|^2
    floor = max(torch.finfo(torch.float32).eps ** 2 * power, torch.finfo(torch.float32).tiny)
    return mean, (components * variances.clamp(min=floor).rsqrt()).to(mean)


@torch.no_grad()
def pca(rows: Tensor, dim: int, ranks: Ranks = SINGLE) -> Tensor:
    """Project rows [N, D] on their first principal components as they are: [N, min(dim, D, N - 1)]."""
    mean, _, components, _ = _components(rows, dim, ranks)
    return _project(rows, mean, components)


def _components(rows: Tensor, dim: int, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, width = ranks.total(len(rows)), rows.shape[1]
    if num_rows < 2 or dim < 1:
        raise ValueError(f"{num_rows} row(s) in {dim} dimension(s) have no variance; pass at least 2 rows and dim 1")
    mean, covariance = mean_and_covariance(rows.split(max(1, BLOCK // width)), ranks)
    return mean, covariance, *principal_components(covariance, min(dim, width, num_rows - 1))


def _project(rows: Tensor, mean: Tensor, projection: Tensor) -> Tensor:
    """(rows - mean) @ projection [D, dim], block by block."""
    size, projection = max(1, BLOCK // rows.shape[1]), projection.to(mean)
    projected = rows.new_empty((len(rows), projection.shape[1]))
    for block, target in zip(rows.split(size), projected.split(size), strict=True):
        target.copy_((block.to(mean.dtype) - mean) @ projection)
    return projected


def mean_and_covariance(blocks: tuple[Tensor, ...], ranks: Ranks = SINGLE) -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D] of all rows, in float64 and in two passes: features far from 0 lose nothing."""
    dtype = accumulator_dtype(blocks[0].device)
    num_rows = ranks.total(sum(len(block) for block in blocks))
    mean = ranks.sum(torch.stack([block.sum(dim=0, dtype=dtype) for block in blocks]).sum(dim=0)) / num_rows
    covariance = mean.new_zeros((len(mean), len(mean)))
    for block in blocks:
        centred = block.to(dtype) - mean
        covariance.addmm_(centred.T, centred)
    covariance = ranks.sum(covariance)
    assert bool(covariance.isfinite().all()), "PCA needs finite rows"
    return mean, covariance / (num_rows - 1)


def principal_components(covariance: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` directions of largest variance [D, num] and their variances; each one's largest entry is positive.

    On the CPU wherever the rows are: Apple's GPUs cannot do it, and the matrix is small.
    """
    variances, directions = torch.linalg.eigh(covariance.cpu().double())  # ascending
    variances, directions = variances.flip(0)[:num], directions.flip(1)[:, :num]
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))  # [1, num]
    return directions * torch.where(largest < 0, -1.0, 1.0), variances
