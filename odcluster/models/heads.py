"""What sits on a backbone while it learns and is removed afterwards: neck, classifiers, prototypes.

Normalisation and cosines are computed in float32 whatever the precision around them: norms in half precision
are a known source of NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from odcluster.config import Head


class Neck(nn.Module):
    """fc - bn - relu - dropout - fc (- relu): from backbone features [B, in_features] to [B, dim]."""

    def __init__(self, in_features: int, head: Head, dim: int, *, input_norm: bool = False) -> None:
        super().__init__()
        # Features of a frozen backbone differ in scale and do not adapt to the neck.
        self.input_norm = nn.BatchNorm1d(in_features, affine=False) if input_norm else nn.Identity()
        self.fc1 = nn.Linear(in_features, head.hidden)
        self.bn: nn.Module
        if head.neck_norm == "none":
            self.bn = nn.Identity()
        elif head.neck_norm == "paper":
            self.bn = nn.BatchNorm1d(head.hidden, affine=False, momentum=0.001)
        else:
            self.bn = nn.BatchNorm1d(head.hidden)
        self.dropout = nn.Dropout(head.dropout)
        self.fc2 = nn.Linear(head.hidden, dim)
        self.final_relu = head.final_relu
        for layer in (self.fc1, self.fc2):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.fc1(self.input_norm(x))))
        x = self.fc2(self.dropout(x))
        return torch.relu(x) if self.final_relu else x


class LinearClassifier(nn.Linear):
    """The paper's classifier: one logit per cluster; weights start from N(0, 0.01), biases from 0."""

    def __init__(self, dim: int, clusters: int) -> None:
        super().__init__(dim, clusters)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.01)
        nn.init.zeros_(self.bias)


class RotationHead(LinearClassifier):
    """Which of four rotations (0, 90, 180, 270 degrees) an image shows, from the backbone's features."""

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 4)


def prototype_logits(features: Tensor, centroids: Tensor, temperature: float) -> Tensor:
    """Return the cosines of features [B, D] with centroids [C, D], divided by the temperature: [B, C]."""
    with torch.autocast(features.device.type, enabled=False):
        return l2_normalise(features) @ l2_normalise(centroids).T / temperature


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale rows to length 1, in float32. A row shorter than eps is divided by eps, so zeros stay zeros."""
    x = x.float()
    return x / x.norm(dim=-1, keepdim=True).clamp_min(eps)
