"""Neck and classifiers: the paper's layers and initial values; cosines that stay finite in any precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from odcluster.config import Head
from odcluster.models.heads import LinearClassifier, Neck, RotationHead, l2_normalise, prototype_logits

SMALL = Head(hidden=64, dropout=0.0, final_relu=False, neck_norm="standard", classifier="prototypes")


def test_paper_neck_is_the_papers() -> None:
    neck = Neck(128, Head(), 256)
    assert isinstance(neck.bn, nn.BatchNorm1d)
    assert (neck.bn.affine, neck.bn.momentum, neck.bn.num_features) == (False, 0.001, 512)
    assert neck.dropout.p == 0.5
    features = neck(torch.randn(32, 128))
    assert features.shape == (32, 256)
    assert (features >= 0).all(), "it ends with a ReLU"


def test_small_neck_keeps_the_sign_and_has_a_common_batch_norm() -> None:
    neck = Neck(128, SMALL, 32)
    assert (neck.bn.affine, neck.bn.momentum) == (True, 0.1)
    features = neck(torch.randn(64, 128))
    assert (features < 0).any()
    assert torch.equal(neck.eval()(torch.ones(1, 128)), neck(torch.ones(1, 128)))


def test_neck_computes_fc_bn_relu_fc() -> None:
    neck = Neck(8, SMALL, 4).eval()
    neck.bn.running_mean = torch.randn(64)
    x = torch.randn(5, 8)
    hidden = torch.relu((neck.fc1(x) - neck.bn.running_mean) / (1 + neck.bn.eps) ** 0.5)
    torch.testing.assert_close(neck(x), hidden @ neck.fc2.weight.T + neck.fc2.bias)


@pytest.mark.parametrize("seed", range(3))
def test_initial_values(seed: int) -> None:
    torch.manual_seed(seed)
    neck = Neck(400, Head(), 256)
    for layer in (neck.fc1, neck.fc2):
        assert not layer.bias.any()
        assert layer.weight.std().item() == pytest.approx((2 / layer.in_features) ** 0.5, rel=0.03)
    for classifier in (LinearClassifier(256, 500), RotationHead(20_000)):
        assert not classifier.bias.any()
        assert classifier.weight.std().item() == pytest.approx(0.01, rel=0.03)
    assert RotationHead(16)(torch.zeros(3, 16)).shape == (3, 4)


def test_prototype_logits_are_cosines() -> None:
    features, centroids = torch.randn(6, 16), torch.randn(9, 16)
    expected = nn.functional.cosine_similarity(features[:, None], centroids[None], dim=-1) / 0.1
    torch.testing.assert_close(prototype_logits(features, centroids, 0.1), expected)
    torch.testing.assert_close(prototype_logits(features * 7, centroids * 0.3, 0.1), expected)


def test_prototype_logits_are_float32_under_autocast() -> None:
    features, centroids = torch.randn(6, 16), torch.randn(9, 16)
    expected = prototype_logits(features, centroids, 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = prototype_logits(features, centroids, 0.1)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected)
    assert prototype_logits(features.half(), centroids, 0.1).dtype == torch.float32


def test_zero_rows_stay_finite_forwards_and_backwards() -> None:
    features = torch.zeros(2, 8, requires_grad=True)
    logits = prototype_logits(features, torch.cat([torch.zeros(1, 8), torch.randn(3, 8)]), 0.1)
    assert not logits.any()
    logits.sum().backward()
    assert features.grad is not None
    assert torch.isfinite(features.grad).all()


def test_l2_normalise() -> None:
    rows = torch.randn(5, 7) * torch.tensor([1e-4, 1, 1e3, 1e6, 0])[:, None]
    lengths = l2_normalise(rows).norm(dim=1)
    torch.testing.assert_close(lengths, torch.tensor([1.0, 1, 1, 1, 0]))
    large = torch.full((1, 4096), 60_000.0, dtype=torch.float16)  # its norm overflows in float16
    torch.testing.assert_close(l2_normalise(large).norm(), torch.tensor(1.0))
