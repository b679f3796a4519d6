"""Chosen options and health warnings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from odcluster.config import BOUNDS, changed, flat
from odcluster.config_file import from_json, to_json
from odcluster.data.sources import open_source
from odcluster.errors import UserError
from odcluster.methods.interface import Phase
from odcluster.recipes import RECIPES, odc_resnet50_imagenet, odc_small
from odcluster.training.health import progress_line, worries
from odcluster.training.resolve import resolve, without_effect
from odcluster.training.schedule import Schedule

CPU = torch.device("cpu")


def array(count, side=32):
    return open_source(np.random.default_rng(0).integers(0, 255, (count, side, side, 3), dtype=np.uint8))


@pytest.mark.parametrize("count", [20, 97, 1000, 5000])
def test_whatever_the_number_of_images_the_choice_can_be_trained(count):
    config, chosen = resolve(odc_small(), array(count), CPU)
    assert config.clusters is not None
    assert config.clustering.small_cluster is not None
    assert count >= 2 * (config.clustering.small_cluster + 1) * config.clusters
    assert config.batch_size is not None
    assert 2 <= config.batch_size <= count
    assert all(reason for _, _, reason in chosen)
    for name in ("epochs", "workers", "lr", "dim", "backbone", "image_size"):
        assert getattr(config, name) is not None, name


def test_given_options_are_left_alone():
    given = changed(odc_small(), clusters=7, batch_size=33, image_size=28, epochs=3, small_cluster=1)
    config, chosen = resolve(given, array(300), CPU)
    assert (config.clusters, config.batch_size, config.image_size, config.epochs) == (7, 33, 28, 3)
    assert not {"clusters", "batch_size", "image_size", "epochs", "small_cluster"} & {name for name, _, _ in chosen}


def test_photos_on_a_cpu_get_a_small_network_and_a_stated_time():
    config, _ = resolve(odc_small(), array(100, side=90), CPU)
    assert (config.backbone, config.image_size, config.augmentation.crop_size) == ("smallconv", 64, 48)
    assert config.minutes == 30
    assert config.epochs is None


def test_a_backbone_for_photos_sees_them_larger():
    config, _ = resolve(changed(odc_small(), backbone="resnet18"), array(100, side=90), CPU)
    assert (config.image_size, config.augmentation.crop_size) == (128, 96)
    assert config.minutes == 30
    on_gpu, _ = resolve(odc_small(), array(100, side=90), torch.device("cuda"))
    assert (on_gpu.backbone, on_gpu.image_size) == ("resnet50", 224)


def test_photos_without_weights_are_told_what_weights_would_do():
    _, chosen = resolve(odc_small(), array(100, side=90), CPU)
    assert ("weights", "none") in [made[:2] for made in chosen]
    for config, side in ((odc_small(), 32), (changed(odc_small(), weights="timm"), 90)):
        assert "weights" not in [name for name, _, _ in resolve(config, array(100, side=side), CPU)[1]]


@pytest.mark.parametrize("side", [32, 90])
def test_weights_of_timm_bring_a_backbone_at_its_own_size(side):
    config, _ = resolve(changed(odc_small(), weights="timm"), array(100, side=side), CPU)
    assert (config.backbone, config.image_size) == ("tf_efficientnet_lite0", 224)
    assert config.fine_tuning.frozen
    on_gpu, _ = resolve(changed(odc_small(), weights="timm"), array(100, side=side), torch.device("cuda"))
    assert (on_gpu.backbone, on_gpu.image_size) == ("resnet50", 224)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_too_few_images_are_refused_with_the_number_needed(count):
    with pytest.raises(UserError, match="image"):
        resolve(changed(odc_small(), clusters=4), array(count), CPU)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("clusters", "6"),
        ("clusters", 6.5),
        ("crop_scale", 0.5),
        ("classifier", "foo"),
        ("head", {}),
        ("precision", "fp16"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(option, value):
    with pytest.raises(UserError, match=option):
        changed(odc_small(), **{option: value})


def test_numpy_numbers_and_paths_are_fine():
    config = changed(odc_small(), clusters=np.int64(6), lr=np.float64(0.1), weights=Path("x.pth"), crop_scale=[0.2, 1])
    assert from_json(to_json(config)) == config


def test_an_unknown_option_in_python_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'clusters'"):
        changed(odc_small(), cluster=5)


def line(**values):
    timing = {"images_per_second": 1234.0, "waiting": 0.4, "seconds": 1.0}
    return {
        "step": 90,
        "epoch": 8,
        "loss": 1.0,
        "change": 0.05,
        "smallest": 5,
        "largest": 30,
        "timing": timing,
        **values,
    }


def test_the_progress_line_says_what_matters():
    text = progress_line(line(), epochs=10)
    for part in ("epoch 9/10", "loss 1.000", "labels changed 5%", "5-30", "1,234 img/s", "40%", "input-bound"):
        assert part in text
    assert "--workers" not in progress_line(line(), epochs=10, frozen=True)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, []),
        ({"change": 0.8}, ["not settling"]),
        ({"change": 0.8, "step": 20}, []),
        ({"largest": 600}, ["swallowing"]),
        ({"loss": 4.6}, ["chance"]),
    ],
)
def test_an_unhealthy_run_is_told_in_words(values, kinds):
    config = changed(odc_resnet50_imagenet(), clusters=100)
    schedule = Schedule([Phase("odc", 10, 0.1, 0.0, "cosine")], 10, 100)
    found = list(worries(line(**values), schedule, 1000, config))
    assert [kind for kind, _ in found] == kinds
    assert all(len(sentence) > 30 for _, sentence in found)


def test_options_that_change_nothing_are_named():
    assert without_effect(odc_small()) == []
    assert without_effect(changed(RECIPES["rotation_small"](), clusters=9)) == [
        "--clusters has no effect with --method rotation"
    ]
    assert "--weights" in without_effect(changed(odc_small(), freeze_stages=2))[0]
    assert without_effect(changed(odc_small(), freeze_stages=2, weights="x.pth")) == []


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("batch_size", 1, "2 or more"),
        ("small_cluster", -1, "0 or more"),
        ("update_interval", 0, "1 or more"),
        ("temperature", 0.0, "above 0"),
        ("lr", float("nan"), "above 0"),
        ("hue", 0.7, "from 0 to 0.5"),
        ("crop_scale", (0.0, 1.0), "above 0"),
        ("crop_scale", (0.9, 0.3), "smallest, then the largest"),
        ("memory_momentum", 1.5, "at most 1"),
        ("image_size", 1, "from 8"),
    ],
)
def test_values_that_make_no_sense_are_refused_with_the_range(option, value, says):
    with pytest.raises(UserError, match=says) as refusal:
        changed(odc_small(), **{option: value})
    assert option.replace("_", "-") in str(refusal.value)


SWITCHES = {"final_relu", "final_pass", "one_pass", "sobel", "compile", "deterministic"}


def test_every_number_has_its_bounds():
    numbers = {name for name, value in flat(odc_small()).items() if isinstance(value, float | int | tuple)}
    numbers |= {"clusters", "epochs", "max_steps", "minutes", "batch_size", "image_size", "workers", "crop_size"}
    assert numbers - set(BOUNDS) <= {"seed", *SWITCHES}
