import math

import pytest

from odcluster.methods.interface import Phase
from odcluster.recipes import RECIPES, odc_alexnet_imagenet, odc_resnet50_imagenet
from odcluster.training.schedule import Schedule, rate


def test_the_papers_schedule_is_constant_for_400_epochs_and_a_tenth_for_40():
    schedule = Schedule([Phase("odc", 440, 0.06, 1e-5, "step")], 10, 4400)
    rates = [schedule.lr(step) for step in range(4400)]
    assert rates[:4000] == [0.06] * 4000
    assert rates[4000:] == pytest.approx([0.006] * 400)


def test_cosine_goes_from_the_rate_to_nearly_nothing():
    schedule = Schedule([Phase("odc", 10, 0.2, 0.0, "cosine")], 10, 100)
    rates = [schedule.lr(step) for step in range(100)]
    assert rates[0] == 0.2
    assert rates == sorted(rates, reverse=True)
    assert rates[50] == pytest.approx(0.1)
    assert rates[-1] < 0.001


def test_warm_up_rises_linearly():
    schedule = Schedule([Phase("odc", 10, 1.0, 0.0, "constant", warmup_epochs=0.5)], 10, 100)
    assert [schedule.lr(step) for step in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


def test_each_phase_has_its_own_curve():
    phases = [Phase("rotation", 3, 0.1, 0.0, "cosine"), Phase("odc", 7, 0.01, 0.0, "cosine")]
    schedule = Schedule(phases, 4, 40)
    assert schedule.phase_at(11) == (phases[0], 0)
    assert schedule.phase_at(12) == (phases[1], 12)
    assert schedule.phase_at(40) == (phases[1], 12)
    assert schedule.lr(0) == 0.1
    assert schedule.lr(12) == 0.01


def test_max_steps_shortens_the_last_phase():
    schedule = Schedule([Phase("odc", 10, 1.0, 0.0, "cosine")], 10, 35)
    assert schedule.lr(34) == pytest.approx((1 + math.cos(math.pi * 34 / 35)) / 2)
    assert rate("cosine", 1.0) == 0.0


def test_paper_recipes_have_the_papers_settings():
    resnet, alexnet = odc_resnet50_imagenet(), odc_alexnet_imagenet()
    for config, backbone, lr in ((resnet, "resnet50", 0.06), (alexnet, "alexnet", 0.04)):
        assert (config.backbone, config.lr, config.clusters, config.batch_size) == (backbone, lr, 10_000, 512)
        assert (config.epochs, config.image_size, config.dim) == (440, 224, 256)
        assert (config.clustering.memory_momentum, config.clustering.update_interval) == (0.5, 10)
        assert config.clustering.small_cluster == 20
        assert (config.head.dropout, config.head.final_relu, config.head.classifier) == (0.5, True, "linear")
        assert (config.head.hidden, config.head.neck_norm) == (512, "paper")
        assert (config.optimiser.sgd_momentum, config.optimiser.weight_decay) == (0.9, 1e-5)
        assert (config.optimiser.schedule, config.optimiser.sampling) == ("step", "replacement")
        views = config.augmentation
        assert (views.num_views, views.crop_scale, views.crop_ratio) == (1, (0.08, 1.0), (3 / 4, 4 / 3))
        assert (views.flip, views.rotation, views.brightness, views.contrast) == (0.5, 2.0, 0.4, 0.4)
        assert (views.saturation, views.hue, views.jitter, views.grey) == (1.0, 0.5, 1.0, 0.2)
        assert config.warm_start.warm_share == 0.0


def test_every_recipe_states_command_time_and_expectation():
    for make in RECIPES.values():
        assert make().recipe == make.__name__
        for word in ("Command:", "Time:", "Expected"):
            assert word in (make.__doc__ or "")


def test_a_phase_that_continues_goes_on_with_the_curve_before_it() -> None:
    rotation, fine = Phase("rotation", 2, 0.5, 0.0, "cosine"), Phase("fine clusters", 6, 0.1, 0.0, "cosine", 1.0)
    final, whole = Phase("odc", 2, 0.1, 0.0, "cosine", 1.0, continues=True), Phase("odc", 8, 0.1, 0.0, "cosine", 1.0)
    parts, alone = Schedule([rotation, fine, final], 10, 95), Schedule([rotation, whole], 10, 95)
    assert [parts.lr(step) for step in range(95)] == [alone.lr(step) for step in range(95)]
    assert parts.phase_at(80) == (final, 80)
    assert [parts.curve_at(step) for step in (0, 19, 20, 79, 80, 94)] == [(0, 20)] * 2 + [(20, 95)] * 4
