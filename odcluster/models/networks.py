"""The two networks that timm does not have: a small one for small images, and the paper's AlexNet.

Each has `forward(x)`, one feature vector per image, and `stages(x)`, the five maps after batch norm and ReLU.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

OWN_STAGES = ["conv1", "conv2", "conv3", "conv4", "conv5"]


class SmallConv(nn.Module):
    """Five 3x3 convolutions of 32-64-128-192-192 channels with batch norm and ReLU, then average pooling.

    Strides 1, 2, 2, 2, 1: at 32 px the maps are 32, 16, 8, 4 and 4 pixels wide and one RGB image costs
    19,169,280 multiply-adds. Any input of 8 px and more will do.
    """

    widths = (32, 64, 128, 192, 192)
    strides = (1, 2, 2, 2, 1)

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for width, stride in zip(self.widths, self.strides, strict=True):
            # no bias: the batch norm that follows has one
            convolution = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            self.layers.append(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)))
            in_channels = width

    def stages(self, x: Tensor) -> list[Tensor]:
        maps = []
        for layer in self.layers:
            x = layer(x)
            maps.append(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=(2, 3))  # B x 192


class AlexNet(nn.Module):
    """The paper's AlexNet: batch norm after every convolution, no local response norm; output of fc7.

    Widths 96-256-384-384-256; the layers are numbered as in DeepCluster's published weights. At 224 px the
    maps are 55, 27, 13, 13 and 13 pixels wide. Other sizes reach the 6 x 6 that fc6 needs by adaptive
    pooling, which at 224 px changes nothing.
    """

    # (channels, kernel, stride, padding, whether a 3x3 max pooling of stride 2 follows)
    layout = (
        (96, 11, 4, 2, True),
        (256, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    )

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, kernel, stride, padding, pooled in self.layout:
            layers += [nn.Conv2d(in_channels, width, kernel, stride, padding), nn.BatchNorm2d(width)]
            layers += [nn.ReLU(inplace=True)] + [MaxPool()] * pooled
            in_channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            skip_init(nn.Linear, 256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            skip_init(nn.Linear, 4096, 4096),
            nn.ReLU(inplace=True),
        )
        for module in self.modules():  # the linear layers have no values yet: drawing 54 M numbers twice takes a second
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(cast(Tensor, module.bias))
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def stages(self, x: Tensor) -> list[Tensor]:
        maps = []
        for layer in self.features:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                maps.append(x)
        return maps

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), 6)
        return self.classifier(x.flatten(1))  # B x 4096


class MaxPool(nn.MaxPool2d):
    """3x3 max pooling of stride 2 that leaves a map under 3x3 as it is, so that AlexNet runs at 32 px too."""

    def __init__(self) -> None:
        super().__init__(3, stride=2)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if min(input.shape[-2:]) >= 3 else input
