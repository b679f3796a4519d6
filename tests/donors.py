"""Networks whose weights are foreign ones in the tests, and what a backbone has taken from them."""

from __future__ import annotations

from typing import Any

import torch
import torch.storage
from torch import Tensor, nn

from odcluster.models.backbones import Backbone, create_backbone
from odcluster.models.compat import timm

State = dict[str, Tensor]


def donor(name: str = "test_resnet", seed: int = 1, **options: Any) -> nn.Module:
    """A plain timm network with weights and statistics unlike those of a fresh backbone."""
    torch.manual_seed(seed)
    network = timm.create_model(name, num_classes=7, **options)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.01, 0.2)
    return network


def fresh(name: str = "test_resnet", **options: Any) -> Backbone:
    return create_backbone(name, **{"image_size": 96, **options})


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def assert_holds(backbone: Backbone, state: State, except_for: tuple[str, ...] = ()) -> None:
    for name, tensor in backbone.network.state_dict().items():
        if name not in except_for:
            torch.testing.assert_close(tensor, state[name], msg=name)


def fingerprint(module: nn.Module) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in module.state_dict().values())
