"""PCA with whitening: identity covariance, scikit-learn's values, finite on whatever features there may be."""

from __future__ import annotations

import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from odcluster.clustering import pca
from odcluster.clustering.pca import pca_whiten


def correlated(num: int, width: int, seed: int, offset: float = 0.0) -> Tensor:
    """Rows whose directions have very different variances, away from 0 if asked."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)[:, None]
    return torch.randn(num, width, generator=generator) @ mixing + offset


def covariance(rows: Tensor) -> Tensor:
    return torch.cov(rows.double().T).reshape(rows.shape[1], rows.shape[1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num", "width", "dim"), [(400, 20, 20), (400, 20, 7), (300, 5, 256), (30, 64, 256), (2, 3, 9)]
)
def test_whitened_rows_have_mean_0_and_identity_covariance(num: int, width: int, dim: int, seed: int) -> None:
    whitened = pca_whiten(correlated(num, width, seed, offset=3.0), dim)
    kept = min(dim, width, num - 1)
    assert whitened.shape == (num, kept)
    assert whitened.dtype == torch.float32
    torch.testing.assert_close(covariance(whitened), torch.eye(kept, dtype=torch.float64), atol=1e-4, rtol=0)
    torch.testing.assert_close(whitened.mean(dim=0), torch.zeros(kept), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("num", "width", "dim"), [(500, 12, 12), (500, 12, 4), (20, 40, 19)])
def test_it_is_scikit_learns_up_to_the_sign_of_components(num: int, width: int, dim: int) -> None:
    rows = correlated(num, width, seed=1, offset=-2.0)
    expected = torch.from_numpy(PCA(dim, whiten=True, svd_solver="full").fit_transform(rows.double().numpy()))
    whitened = pca_whiten(rows, dim).double()
    signs = (whitened * expected).sum(dim=0).sign()
    torch.testing.assert_close(whitened * signs, expected, atol=1e-3, rtol=1e-3)


def test_the_first_components_do_not_depend_on_how_many_are_kept() -> None:
    rows = correlated(200, 10, seed=2)
    torch.testing.assert_close(pca_whiten(rows, 3), pca_whiten(rows, 10)[:, :3])


def test_the_sign_is_that_of_the_largest_entry() -> None:
    directions, variances = pca.principal_components(covariance(correlated(200, 10, seed=3)), 10)
    assert bool((directions.amax(dim=0) >= -directions.amin(dim=0)).all())
    assert bool((variances[:-1] >= variances[1:]).all())


def test_the_same_bits_twice_and_the_input_is_left_alone() -> None:
    rows = correlated(300, 16, seed=4)
    copy = rows.clone()
    assert torch.equal(pca_whiten(rows, 8), pca_whiten(rows, 8))
    assert torch.equal(rows, copy)


@pytest.mark.parametrize("block", [1, 17, 16 * 7])
def test_blocks_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = correlated(100, 16, seed=5)
    whole = pca_whiten(rows, 16)
    monkeypatch.setattr(pca, "BLOCK", block)
    torch.testing.assert_close(pca_whiten(rows, 16), whole)


def test_features_far_from_0_are_whitened_as_well() -> None:
    """Deviations of a thousandth of the mean: a one-pass covariance in float32 would lose them."""
    rows = 1000 + correlated(400, 8, seed=6)
    torch.testing.assert_close(covariance(pca_whiten(rows, 8)), torch.eye(8, dtype=torch.float64), atol=1e-3, rtol=0)


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_directions_without_variance_stay_near_0(offset: float) -> None:
    """Dead channels and sums of others: rounding is not blown up to variance 1."""
    rows = torch.zeros(100, 12) + offset
    rows[:, :3] += correlated(100, 3, seed=7)
    rows[:, 3] = rows[:, 0] + rows[:, 1]
    whitened = pca_whiten(rows, 12)
    torch.testing.assert_close(covariance(whitened)[:3, :3], torch.eye(3, dtype=torch.float64), atol=1e-4, rtol=0)
    assert float(whitened[:, 3:].abs().max()) < 0.5
    assert float(whitened[:, 4:].abs().max()) < 1e-3


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-20, 1e15])
def test_identical_rows_become_zeros(value: float) -> None:
    whitened = pca_whiten(torch.full((10, 4), value), 3)
    assert whitened.shape == (10, 3)
    assert float(whitened.abs().max()) < 1e-6


def test_fewer_than_two_rows_are_refused_and_non_finite_rows_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="at least 2 rows"):
        pca_whiten(torch.ones(1, 4), 2)
    with pytest.raises(ValueError, match="dim 1"):
        pca_whiten(torch.ones(5, 4), 0)
    rows = torch.randn(5, 4)
    rows[2, 1] = float("nan")
    with pytest.raises(AssertionError, match="finite"):
        pca_whiten(rows, 2)
