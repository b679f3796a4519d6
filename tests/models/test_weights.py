"""Foreign weights: every layout is found, and nothing half-loads."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.storage
from donors import State, assert_holds, donor, fingerprint, fresh, prefixed
from safetensors.torch import save_file
from torch import nn

from odcluster.errors import DataError, UserError
from odcluster.models.backbones import create_backbone
from odcluster.models.compat import timm, torchvision
from odcluster.models.matching import adapt_input_channels, match_tensors
from odcluster.models.weights import load_backbone_weights

# Where published codes put a ResNet, and what else their files hold.
LAYOUTS: dict[str, Callable[[State, State], Any]] = {
    "timm, torchvision": lambda s, other: s,
    "timm training": lambda s, other: {"state_dict": other, "state_dict_ema": s, "epoch": 3},
    "DataParallel": lambda s, other: {"model": prefixed(s, "module.")},
    "torch.compile": lambda s, other: prefixed(s, "_orig_mod.module."),
    "MoCo v1, v2": lambda s, other: {
        "arch": "resnet50",
        "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.03}]},
        "state_dict": {
            **prefixed(other, "module.encoder_k."),
            **prefixed(s, "module.encoder_q."),
            "module.queue": torch.zeros(128, 16),
        },
    },
    "MoCo v3": lambda s, other: {
        "state_dict": {
            **prefixed(other, "module.momentum_encoder."),
            **prefixed(s, "module.base_encoder."),
        }
    },
    "SimCLR": lambda s, other: {"state_dict": prefixed(s, "backbone."), "args": argparse.Namespace(lr=0.1)},
    "BYOL": lambda s, other: {**prefixed(other, "target_encoder.net."), **prefixed(s, "online_encoder.net.")},
    "BYOL, lightning": lambda s, other: {"state_dict": prefixed(s, "online_network.encoder.")},
    "SwAV": lambda s, other: {**prefixed(s, "module."), "module.prototypes.weight": torch.zeros(9, 8)},
    "DINO": lambda s, other: {
        "student": prefixed(other, "module.backbone."),
        "teacher": {**prefixed(s, "backbone."), "head.mlp.0.weight": torch.zeros(4, 4)},
        "args": argparse.Namespace(arch="resnet50"),
    },
    "OpenSelfSup ODC": lambda s, other: {
        "meta": {"epoch": 440},
        "state_dict": {
            **prefixed(s, "backbone."),
            "neck.fc0.weight": torch.zeros(8, 8),
            "head.fc_cls.weight": torch.zeros(8, 8),
            "memory_bank.feature_bank": torch.zeros(50, 8),
        },
    },
    "VISSL": lambda s, other: {
        "classy_state_dict": {"base_model": {"model": {"trunk": prefixed(s, "_feature_blocks.")}}}
    },
    "without counters": lambda s, other: {k: v for k, v in s.items() if "num_batches" not in k},
    "half precision": lambda s, other: {k: v.half() if v.is_floating_point() else v for k, v in s.items()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resnet_layouts(layout: str, tmp_path: Path) -> None:
    state, other = donor(seed=1).state_dict(), donor(seed=2).state_dict()
    torch.save(LAYOUTS[layout](state, other), tmp_path / "weights.pth")
    backbone = fresh()
    report = load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert (report.matched, report.missing, report.adapted) == (report.total, [], [])
    for name, tensor in backbone.network.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=1e-4, msg=name)
    assert "fc" in report.left_over
    assert f"{report.total} of {report.total} tensors" in report.text()


def test_the_report_says_where_and_what_was_left(tmp_path: Path) -> None:
    state, other = donor(seed=1).state_dict(), donor(seed=2).state_dict()
    torch.save(LAYOUTS["MoCo v1, v2"](state, other), tmp_path / "moco.pth")
    report = load_backbone_weights(fresh(), tmp_path / "moco.pth")
    assert "moco.pth, under state_dict.encoder_q. (also there: state_dict.encoder_k.)" in report.origin
    assert report.left_over["queue"] == report.left_over["optimizer"] == 1
    assert report.left_over["fc"] == 2
    assert report.left_over["encoder_k"] > 50


def test_numbered_children(tmp_path: Path) -> None:
    """nn.Sequential(*resnet.children()), as in the SimCLR and BYOL codes that many people copied."""
    network = donor()
    numbered = nn.Sequential(*list(network.children())[:-1]).state_dict()
    torch.save({"online_network_state_dict": prefixed(numbered, "encoder.")}, tmp_path / "byol.pth")
    backbone = fresh()
    report = load_backbone_weights(backbone, tmp_path / "byol.pth")
    assert report.matched == report.total
    assert_holds(backbone, network.state_dict())


def test_torchvision_resnet_computes_the_same(tmp_path: Path) -> None:
    network = torchvision.models.resnet18(weights=None).eval()
    torch.save(network.state_dict(), tmp_path / "tv.pth")
    backbone = create_backbone("resnet18", image_size=96).eval()
    load_backbone_weights(backbone, tmp_path / "tv.pth")
    network.fc = nn.Identity()
    images = torch.rand(2, 3, 96, 96)
    torch.testing.assert_close(backbone(images), network(images))


def test_torchvision_transformer_computes_the_same(tmp_path: Path) -> None:
    network = torchvision.models.VisionTransformer(64, 16, 12, 3, 192, 768).eval()
    torch.save(network.state_dict(), tmp_path / "tv.pth")
    backbone = create_backbone("vit_tiny_patch16_224", image_size=64).eval()
    report = load_backbone_weights(backbone, tmp_path / "tv.pth")
    assert report.matched == report.total
    network.heads = nn.Identity()
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(backbone(images), network(images), rtol=1e-4, atol=1e-4)


def test_mmselfsup_transformer(tmp_path: Path) -> None:
    state = donor("test_vit", img_size=96).state_dict()
    theirs = {}
    for name, tensor in state.items():
        name = name.replace("patch_embed.proj.", "patch_embed.projection.").replace("norm.", "ln1.")
        name = re.sub(r"norm(\d)\.", r"ln\1.", name).replace("blocks.", "layers.")
        name = name.replace("mlp.fc1.", "ffn.layers.0.0.").replace("mlp.fc2.", "ffn.layers.1.")
        theirs["backbone." + name] = tensor
    torch.save({"state_dict": theirs}, tmp_path / "mae.pth")
    backbone = fresh("test_vit")
    report = load_backbone_weights(backbone, tmp_path / "mae.pth")
    assert report.matched == report.total
    assert_holds(backbone, state)


@pytest.mark.parametrize("chunked", [False, True])
def test_dino_transformer_at_another_size(chunked: bool, tmp_path: Path) -> None:
    """A teacher of 160 px goes into a backbone of 96 px: the 10 x 10 positions become 6 x 6."""
    state = donor("test_vit", img_size=160).state_dict()
    names = {n: re.sub(r"^blocks\.(\d)", r"blocks.0.\1", n) if chunked else n for n in state}
    theirs = {f"backbone.{names[n]}": t for n, t in state.items()}
    theirs["backbone.mask_token"] = torch.zeros(1, 64)
    torch.save({"teacher": theirs}, tmp_path / "dino.pth")
    backbone = fresh("test_vit")
    report = load_backbone_weights(backbone, tmp_path / "dino.pth")
    assert report.matched == report.total
    assert any("10x10 to 6x6" in text for text in report.adapted)
    assert report.left_over["mask_token"] == 1
    assert_holds(backbone, state, except_for=("pos_embed",))
    positions = backbone.network.state_dict()["pos_embed"]
    assert state["pos_embed"].min() - 0.05 < positions.min() < positions.max() < state["pos_embed"].max() + 0.05


def test_dinov2_with_registers(tmp_path: Path) -> None:
    """timm keeps the class token's position inside the class token; Meta's files do not."""
    name = "vit_small_patch14_reg4_dinov2"
    state = donor(name, img_size=56).state_dict()
    position = torch.full((1, 1, 384), 0.5)
    theirs = {re.sub(r"^blocks\.(\d+)", r"blocks.0.\1", n): t for n, t in state.items()}
    theirs["register_tokens"] = theirs.pop("reg_token")
    theirs["cls_token"] = state["cls_token"] - position
    theirs["pos_embed"] = torch.cat([position, state["pos_embed"]], dim=1)
    save_file(theirs, tmp_path / "dinov2.safetensors")
    backbone = create_backbone(name, image_size=56)
    report = load_backbone_weights(backbone, tmp_path / "dinov2.safetensors")
    assert report.matched == report.total
    assert any("cls_token" in text for text in report.adapted)
    assert_holds(backbone, state)


def test_deepcluster_alexnet_with_sobel() -> None:
    source = create_backbone("alexnet", image_size=64, in_channels=2).network.state_dict()
    theirs = {n.replace("features.", "state_dict.features.module."): t for n, t in source.items()}
    theirs = {n if n.startswith("state") else f"state_dict.{n}": t for n, t in theirs.items()}
    theirs |= {"state_dict.top_layer.weight": torch.zeros(10, 4096), "state_dict.sobel.0.weight": torch.zeros(1)}
    values, report = match_tensors(create_backbone("alexnet", image_size=64), theirs, "deepcluster.pth.tar")
    assert report.matched == report.total
    assert report.adapted == ["features.0.weight: from 2 to 3 input channel(s)"]
    assert set(report.left_over) == {"top_layer", "sobel"}
    assert all(torch.equal(values[n], source[n]) for n in source if n != "features.0.weight")


@pytest.mark.parametrize(("theirs", "ours"), [(3, 1), (1, 3), (3, 2), (2, 3)])
def test_other_input_channels_are_adapted_and_said(theirs: int, ours: int, tmp_path: Path) -> None:
    network = donor(in_chans=theirs)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    backbone = fresh(in_channels=ours)
    report = load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert report.adapted == [f"conv1.0.weight: from {theirs} to {ours} input channel(s)"]
    weight = network.state_dict()["conv1.0.weight"]
    grey = torch.rand(1, 1, 8, 8)
    before = nn.functional.conv2d(grey.expand(-1, theirs, -1, -1), weight)
    after = nn.functional.conv2d(grey.expand(-1, ours, -1, -1), adapt_input_channels(weight, ours))
    torch.testing.assert_close(before, after)


def test_the_small_stem_is_left_out_and_said(tmp_path: Path) -> None:
    torch.save(timm.create_model("resnet18").state_dict(), tmp_path / "weights.pth")
    report = load_backbone_weights(create_backbone("resnet18", image_size=32), tmp_path / "weights.pth")
    assert report.total - report.matched == 1
    ((name, why),) = report.missing
    assert name == "conv1.weight"
    assert "64x3x7x7 in the file, 64x3x3x3 here; the small-image stem" in why
    assert why in report.text()


@pytest.mark.parametrize(
    ("other", "guess"),
    [
        ("resnet50", "resnet50"),
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224"),
        ("test_convnext", "another"),
    ],
)
def test_another_architecture_is_refused_and_nothing_changes(other: str, guess: str, tmp_path: Path) -> None:
    torch.save({"state_dict": timm.create_model(other).state_dict()}, tmp_path / "weights.pth")
    backbone = fresh("resnet18")
    before = fingerprint(backbone)
    with pytest.raises(DataError, match=rf"only \d+ of the \d+ tensors of resnet18; they .*{guess}"):
        load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert fingerprint(backbone) == before


def test_how_much_must_match_can_be_told(tmp_path: Path) -> None:
    state = {n: t for n, t in donor().state_dict().items() if not n.startswith("layer4")}
    torch.save(state, tmp_path / "weights.pth")
    backbone = fresh()
    with pytest.raises(DataError, match="only"):
        load_backbone_weights(backbone, tmp_path / "weights.pth")
    report = load_backbone_weights(backbone, tmp_path / "weights.pth", min_matched=0.5)
    assert report.matched < report.total
    assert all(name.startswith("layer4") and why == "not in the file" for name, why in report.missing)
    assert f"and {len(report.missing) - 10} more" in report.text()


def test_nan_weights_are_refused(tmp_path: Path) -> None:
    state = donor().state_dict()
    state["layer1.0.conv1.weight"][0, 0, 0, 0] = float("nan")
    torch.save(state, tmp_path / "weights.pth")
    backbone = fresh()
    before = fingerprint(backbone)
    with pytest.raises(DataError, match=r"NaN .* layer1.0.conv1.weight"):
        load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert fingerprint(backbone) == before


# timm's own weights: only the parts that need no connection.


def test_timm_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    network = donor("test_resnet")
    asked: list[str] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.append(name)
        return network

    backbone = fresh()
    monkeypatch.setattr(timm, "create_model", create_model)
    for source in ("timm", "timm:r160_in1k"):
        report = load_backbone_weights(backbone, source)
        assert report.matched == report.total
    assert asked == ["test_resnet", "test_resnet.r160_in1k"]
    assert "timm's test_resnet.r160_in1k" in report.origin


def test_timm_weights_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="it has r160_in1k"):
        load_backbone_weights(fresh(), "timm:nonsense")
    with pytest.raises(UserError, match="timm has no weights for smallconv"):
        load_backbone_weights(create_backbone("smallconv", image_size=16), "timm")
    backbone = fresh()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("Name or service not known\nand more")

    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(DataError, match=r"could not be fetched \(Name or service not known\)"):
        load_backbone_weights(backbone, "timm")


def test_a_deeper_resnet_is_not_taken_for_a_shallower_one(tmp_path: Path) -> None:
    torch.save({"state_dict": timm.create_model("resnet34", num_classes=0).state_dict()}, tmp_path / "deeper.pth")
    with pytest.raises(DataError, match="resnet34"):
        load_backbone_weights(create_backbone("resnet18", image_size=64, stem="standard"), tmp_path / "deeper.pth")
