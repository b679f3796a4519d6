"""Backbones in files that others can load, and that are loaded again."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.storage
from donors import fingerprint, fresh
from safetensors.torch import load_file
from torch import nn

from odcluster.errors import DataError, UserError
from odcluster.models.backbones import create_backbone
from odcluster.models.weights import export_backbone, load_backbone, load_backbone_weights

# Backbones in files that others can load.


def run_card(directory: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Execute the README's own snippet, in the directory it speaks of."""
    (code,) = re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(directory)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["backbone"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_resnet", {"image_size": 96}),
        ("test_resnet", {"image_size": 96, "in_channels": 1}),
        ("test_resnet", {"image_size": 32}),  # small stem
        ("test_vit", {"image_size": 64}),
        ("test_vit.r160_in1k", {"image_size": 160}),
        ("smallconv", {"image_size": 24, "in_channels": 2}),
    ],
)
def test_exported_backbones_load_as_their_card_says(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = create_backbone(name, **options)
    images = torch.rand(4, backbone.in_channels, backbone.image_size, backbone.image_size)
    backbone(images)  # moves the batch statistics
    export_backbone(backbone, tmp_path / "out", provenance={"method": "odc", "seed": 0})
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "config.json", "model.safetensors"]
    expected = backbone.eval()(images)
    loaded = load_backbone(tmp_path / "out")
    assert torch.equal(loaded(images), expected)
    for attribute in (
        "name",
        "stem",
        "image_size",
        "in_channels",
        "num_features",
        "mean",
        "std",
        "stage_names",
    ):
        assert getattr(loaded, attribute) == getattr(backbone, attribute)
    assert torch.equal(run_card(tmp_path / "out", monkeypatch)(images), expected)
    text = (tmp_path / "out" / "config.json").read_text() + (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in text, "no path of this machine in what is passed on"


def test_a_run_directory_is_a_starting_point(tmp_path: Path) -> None:
    source = create_backbone("smallconv", image_size=16)
    source.set_normalisation((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")  # the run's own, not the backbone's
    export_backbone(source, tmp_path / "run" / "backbone", provenance={})
    backbone = create_backbone("smallconv", image_size=24)
    report = load_backbone_weights(backbone, tmp_path / "run")
    assert report.matched == report.total
    assert backbone.mean == (0.1, 0.2, 0.3)
    assert fingerprint(backbone) == fingerprint(load_backbone(tmp_path / "run")) == fingerprint(source)
    with pytest.raises(DataError, match="--backbone smallconv"):
        load_backbone_weights(fresh(), tmp_path / "run")


def test_export_replaces_an_older_one(tmp_path: Path) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        backbone = create_backbone("smallconv", image_size=16)
        export_backbone(backbone, tmp_path / "out", provenance={"seed": seed})
    assert fingerprint(load_backbone(tmp_path / "out")) == fingerprint(backbone)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["provenance"] == {"seed": 1}


def test_export_to_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "file" / "x", provenance={})


@pytest.mark.parametrize(
    "settings",
    ["", "[]", "{}", '{"architecture": 3}', "\x00", '{"architecture": "smallconv", "mean": "abc"}'],
)
def test_a_damaged_description_is_one_sentence(settings: str, tmp_path: Path) -> None:
    export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "out", provenance={})
    (tmp_path / "out" / "config.json").write_text(settings)
    with pytest.raises(DataError, match="does not describe a backbone") as caught:
        load_backbone(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_description_of_another_network_is_refused(tmp_path: Path) -> None:
    export_backbone(create_backbone("smallconv", image_size=16), tmp_path / "out", provenance={})
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    settings["architecture"] = "test_resnet"
    (tmp_path / "out" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="only"):
        load_backbone(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors"), "untouched"
