"""Learning with labels: the ceiling. It learns them, and only when there are some."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_runs import TINY, metrics_without_timings, state_hash
from tiny_studies import pack_images

import odcluster
from odcluster.config import changed
from odcluster.errors import DataError
from odcluster.methods.interface import Batch
from odcluster.methods.labels import Labels
from odcluster.models.backbones import create_backbone
from odcluster.recipes import recipe


def test_the_classes_are_learned(tmp_path):
    pack_images(tmp_path / "images.npz", 200, seed=0)
    options = {**TINY, "epochs": 12, "jitter": 0.0, "grey": 0.0, "crop_scale": (0.8, 1.0), "flip": 0.0}
    run = odcluster.train(tmp_path / "images.npz", out=tmp_path / "run", quiet=True, method="labels", **options)
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe"], config["clusters"]) == ("labels_small", 5)
    lines = [line for line in metrics_without_timings(run) if "accuracy" in line]
    assert lines[0]["accuracy"] < 0.5
    assert lines[-1]["accuracy"] > 0.8
    before = state_hash(run)
    odcluster.resume(run, quiet=True)
    assert state_hash(run) == before
    assert odcluster.load_backbone(run) is not None


def test_images_without_classes_are_refused(image_folder, tmp_path):
    with pytest.raises(DataError, match="a folder per class"):
        odcluster.train(image_folder, out=tmp_path / "run", quiet=True, method="labels", **TINY)
    assert not (tmp_path / "run").exists()


def test_images_of_unknown_class_teach_nothing():
    backbone = create_backbone("smallconv", image_size=16)
    method = Labels(backbone, 6, changed(recipe("labels_small"), clusters=3)).eval()
    images = torch.randn(1, 4, 3, 16, 16)
    method.take(np.array([0, 1, 2, -1, -1, -1]))
    with_unknown = method(Batch(torch.tensor([0, 1, 2, 3]), images, epoch=0, step=0)).loss
    alone = method(Batch(torch.tensor([0, 1, 2]), images[:, :3], epoch=0, step=0)).loss
    assert torch.allclose(with_unknown, alone)
    nothing = method(Batch(torch.tensor([3, 4]), images[:, :2], epoch=0, step=0)).loss
    assert float(nothing.detach()) == 0
