"""Backbones: one face for all networks, the paper's map sizes, names, stems, freezing, importing timm."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from odcluster.errors import UserError
from odcluster.models.backbones import (
    IMAGENET_MEAN,
    Backbone,
    count_macs,
    create_backbone,
    freeze_stages,
    layer_lr_scales,
    stage_of_parameter,
)


def maps_of(backbone: Backbone, image_size: int | None = None) -> list[tuple[int, ...]]:
    with torch.no_grad():
        return [tuple(m.shape[1:]) for m in backbone.eval().stages(backbone.blank_image(image_size))]


@pytest.fixture(scope="module")
def alexnet() -> Backbone:
    return create_backbone("alexnet")


@pytest.mark.parametrize(
    ("name", "image_size", "first_stage", "num_stages"),
    [
        ("smallconv", 32, "conv1", 5),
        ("test_resnet", 64, "conv1", 5),
        ("test_vit", 32, "stage1", 6),
        ("test_convnext", 64, "stage1", 4),
        (
            "mobilenetv3_small_050",
            64,
            "stage1",
            5,
        ),  # its pooled features have another width than num_features
        ("densenet121", 64, "stage1", 5),  # its maps are found by hooks
        ("sequencer2d_s", 64, "stage1", 1),  # no usable maps: the features themselves
    ],
)
def test_every_network_has_the_same_face(name: str, image_size: int, first_stage: str, num_stages: int) -> None:
    backbone = create_backbone(name, image_size=image_size)
    images = torch.rand(2, 3, image_size, image_size)
    assert backbone(images).shape == (2, backbone.num_features)
    maps = backbone.eval().stages(images)
    assert all(m.ndim == 4 and len(m) == 2 for m in maps)
    assert len(maps) == len(backbone.stage_names) == num_stages
    assert backbone.stage_names[0] == first_stage
    assert len(backbone.mean) == len(backbone.std) == 3
    if name == "smallconv":
        torch.testing.assert_close(maps[-1].mean((2, 3)), backbone(images))


def test_smallconv_costs_what_it_says() -> None:
    backbone = create_backbone("smallconv", image_size=32)
    assert count_macs(backbone) == 19_169_280
    assert backbone.training, "counting must not change the mode"
    assert maps_of(backbone) == [(32, 32, 32), (64, 16, 16), (128, 8, 8), (192, 4, 4), (192, 4, 4)]


@pytest.mark.parametrize(("image_size", "in_channels"), [(8, 1), (8, 3), (28, 1), (64, 3), (32, 2)])
def test_smallconv_takes_small_images(image_size: int, in_channels: int) -> None:
    backbone = create_backbone("smallconv", image_size=image_size, in_channels=in_channels)
    assert backbone(torch.rand(3, in_channels, image_size, image_size)).shape == (3, 192)
    assert len(backbone.mean) == (1 if in_channels == 1 else 3)


def test_alexnet_gives_the_protocols_dimensions(alexnet: Backbone) -> None:
    """VOC07 protocol: average pooling (kernel, stride) per layer, about 9,000 dimensions."""
    pools = [(19, 4), (12, 3), (9, 1), (9, 1), (8, 1)]
    maps = alexnet.eval().stages(alexnet.blank_image())
    assert [m.shape[-1] for m in maps] == [55, 27, 13, 13, 13]
    pooled = [nn.functional.avg_pool2d(m, *pool).numel() for m, pool in zip(maps, pools, strict=True)]
    assert pooled == [9600, 9216, 9600, 9600, 9216]
    assert alexnet.num_features == 4096


@pytest.mark.parametrize("image_size", [32, 64, 96])
def test_alexnet_takes_other_sizes(alexnet: Backbone, image_size: int) -> None:
    assert alexnet.eval()(alexnet.blank_image(image_size)).shape == (1, 4096)
    assert len(maps_of(alexnet, image_size)) == 5


def test_resnet50_gives_the_protocols_dimensions() -> None:
    backbone = create_backbone("resnet50")
    pools = [(10, 10, 4), (16, 8, 0), (13, 5, 0), (8, 3, 0), (6, 1, 0)]
    maps = backbone.eval().stages(backbone.blank_image())
    pooled = [nn.functional.avg_pool2d(m, *pool).numel() for m, pool in zip(maps, pools, strict=True)]
    assert pooled == [9216, 9216, 8192, 9216, 8192]
    assert backbone.stage_names == ["conv1", "res2", "res3", "res4", "res5"]


def test_state_dict_has_timms_names() -> None:
    from odcluster.models.compat import timm

    backbone = create_backbone("test_resnet", image_size=224)
    plain = timm.create_model("test_resnet", num_classes=0)
    assert list(backbone.network.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", ["resnet18", "resnet10t"])
def test_small_stem_keeps_the_resolution(name: str) -> None:
    small = create_backbone(name, image_size=32)
    assert small.stem == "small"
    assert [m[-1] for m in maps_of(small)] == [32, 32, 16, 8, 4]
    standard = create_backbone(name, image_size=32, stem="standard")
    assert standard.stem == "standard"
    assert [m[-1] for m in maps_of(standard)] == [16, 8, 4, 2, 1]
    assert create_backbone(name, image_size=65).stem == "standard"


@pytest.mark.parametrize("name", ["smallconv", "test_vit"])
def test_small_stem_only_for_resnets(name: str) -> None:
    assert create_backbone(name, image_size=32).stem == "standard"
    with pytest.raises(UserError, match="Only ResNets"):
        create_backbone(name, image_size=32, stem="small")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ResNet-50", "resnet50"),
        ("smalconv", "smallconv"),
        ("vit_b_16", "vit_base_patch16_224"),
        ("mobilenet_v2", "mobilenetv2_100"),
        ("resnet50.nonsense", "a1_in1k"),
    ],
)
def test_unknown_names_are_answered_with_known_ones(name: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        create_backbone(name)
    assert "\n" not in str(caught.value)


def test_a_hub_name_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*args: object) -> None:
        raise AssertionError("opened a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(UserError, match="no backbone named"):
        create_backbone("hf-hub:someone/something")


@pytest.mark.parametrize(
    ("name", "image_size"),
    [("vit_tiny_patch16_224", 8), ("inception_v3", 32), ("smallconv", 0), ("smallconv", 10**9)],
)
def test_impossible_sizes_are_one_sentence(name: str, image_size: int) -> None:
    with pytest.raises(UserError, match="--image-size") as caught:
        create_backbone(name, image_size=image_size)
    assert "\n" not in str(caught.value)


def test_transformer_of_another_size_and_normalisation() -> None:
    backbone = create_backbone("vit_tiny_patch16_224", image_size=64, in_channels=1)
    assert backbone.stages(torch.rand(1, 1, 64, 64))[0].shape == (1, 192, 4, 4)
    assert backbone.mean == (0.5,)
    assert create_backbone("smallconv").mean == IMAGENET_MEAN


@pytest.mark.parametrize("name", ["smallconv", "test_resnet", "test_vit", "densenet121"])
def test_stage_of_parameter_follows_the_computation(name: str) -> None:
    """Changing the parameters of stage i changes map i and later ones, and never an earlier one."""
    backbone = create_backbone(name, image_size=32).eval()
    stage_of = stage_of_parameter(backbone)
    assert stage_of.keys() == dict(backbone.named_parameters()).keys()
    images = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        before = backbone.stages(images)
        for stage in range(len(before)):
            changed = {n: backbone.get_parameter(n).clone() for n, s in stage_of.items() if s == stage}
            for parameter_name in changed:
                backbone.get_parameter(parameter_name).add_(0.1)
            after = backbone.stages(images)
            for parameter_name, value in changed.items():
                backbone.get_parameter(parameter_name).copy_(value)
            equal = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert equal == [True] * stage + [False] * (len(before) - stage)


@pytest.mark.parametrize("name", ["smallconv", "test_resnet", "test_vit"])
def test_frozen_stages_stay_while_the_rest_trains(name: str) -> None:
    backbone = create_backbone(name, image_size=32)
    freeze_stages(backbone, 2)
    backbone.train()
    stage_of = stage_of_parameter(backbone)
    before = {n: v.clone() for n, v in backbone.state_dict().items()}
    optimiser = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=0.1)
    backbone(torch.rand(4, 3, 32, 32)).pow(2).sum().backward()
    optimiser.step()
    for parameter_name, parameter in backbone.named_parameters():
        frozen = stage_of[parameter_name] < 2
        assert parameter.requires_grad != frozen
        if frozen:
            assert torch.equal(parameter, before[parameter_name])
    batch_norms = [m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d)]
    if batch_norms:
        first, last = batch_norms[0], batch_norms[-1]
        assert not first.training
        assert int(first.num_batches_tracked or 0) == 0, "statistics of a frozen stage must not move"
        assert last.training
        assert int(last.num_batches_tracked or 0) == 1


def test_freezing_more_than_there_is() -> None:
    with pytest.raises(UserError, match="conv1 to conv5"):
        freeze_stages(create_backbone("smallconv", image_size=16), 6)


def test_layer_wise_decay() -> None:
    backbone = create_backbone("test_vit", image_size=32)
    scales = layer_lr_scales(backbone, 0.5)
    assert scales["network.norm.weight"] == 1
    assert scales["network.blocks.5.mlp.fc2.weight"] == 0.5
    assert scales["network.patch_embed.proj.weight"] == scales["network.blocks.0.norm1.weight"] == 0.5**6
    assert set(layer_lr_scales(backbone, 1.0).values()) == {1.0}


def in_a_new_process(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_timm_and_torchvision_import_through_compat() -> None:
    code = """
import odcluster.models.compat
import torch, torchvision, timm
from torchvision.transforms.v2 import functional
functional.hflip(torch.zeros(3, 4, 4))
print(timm.create_model("test_resnet", num_classes=0)(torch.zeros(2, 3, 32, 32)).shape[0])
"""
    assert in_a_new_process(code) == "2"


def test_our_own_networks_do_without_timm() -> None:
    """Whose import, with torchvision's, takes as long as that of torch."""
    code = """
import sys
import odcluster.api, odcluster.judge, odcluster.deploy, odcluster.gallery_report
from odcluster.models.backbones import create_backbone
create_backbone("smallconv", image_size=32), create_backbone("alexnet", image_size=64)
print([name for name in ("timm", "torchvision", "torch._dynamo") if name in sys.modules])
"""
    assert in_a_new_process(code) == "[]"


def test_compat_declares_nothing_when_the_library_loads() -> None:
    code = """
import torch
torch.ops.load_library = lambda path: None  # as with a matching torchvision
declared = []
define, torch.library.define = torch.library.define, lambda *a, **k: declared.append(a)
try:
    import odcluster.models.compat
except (RuntimeError, AttributeError):
    pass  # where it does not load in truth, torchvision's own import fails after that
print(len(declared))
"""
    assert in_a_new_process(code) == "0"


def test_importing_the_package_imports_neither_torchvision_nor_timm() -> None:
    code = "import sys, odcluster; print('timm' in sys.modules or 'torchvision' in sys.modules)"
    assert in_a_new_process(code) == "False"
