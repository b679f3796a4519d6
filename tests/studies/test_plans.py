"""Every study's plan is whole: names, settings that can be trained, options that evaluation takes, a stated time."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from odcluster.clustering.balance import check_room
from odcluster.config import changed
from odcluster.config_file import fingerprint
from odcluster.data.sources import Manifest
from odcluster.errors import DataError
from odcluster.judge import check_options
from odcluster.recipes import recipe
from odcluster.studies.catalogue import STUDIES, effort, listing
from odcluster.studies.clusters import choose
from odcluster.studies.plan import Judgement, Plan, Study, Training
from odcluster.studies.settings import draw_classes, draw_long_tail, draw_uniformly, long_tail_sizes
from odcluster.verbs import Evaluation

NAMES = {"table-linear", "table-voc", "fine-tuning", "stability", "update-interval", "small-clusters", "long-tail"}
NAMES |= {"reweighting", "clusters"}
SCALES = ("small", "paper")
SEEDS = (0, 3)


def every_plan() -> list[tuple[Study, str, Plan]]:
    return [(study, scale, study.plan(scale, SEEDS)) for study in STUDIES.values() for scale in SCALES]


def test_all_studies_are_there():
    assert set(STUDIES) == NAMES
    said = listing()
    for name, study in STUDIES.items():
        assert name == study.name
        assert name in said
        assert study.shows in said


def test_the_effort_is_told_in_words():
    plans = {(study.name, scale): study.plan(scale, (0,)) for study in STUDIES.values() for scale in SCALES}
    assert effort(plans["clusters", "small"]) == "1 training, about 20 minutes on two idle cores"
    assert effort(plans["table-linear", "small"]).startswith("7 trainings, about ")
    assert effort(plans["stability", "paper"]) == "2 trainings, days on several GPUs"


@pytest.mark.parametrize(("study", "scale", "plan"), every_plan(), ids=lambda value: getattr(value, "name", None))
def test_a_plan_is_whole(study, scale, plan):
    names = [part.name for part in plan.parts()]
    assert len(set(names)) == len(names)
    known: set[str] = set()
    for training in plan.trainings:
        assert training.start is None or training.start in known
        known.add(training.name)
    assert {training.config.seed for training in plan.trainings} == set(SEEDS)
    for judgement in plan.judgements:
        assert judgement.untrained or judgement.subject in known
        check_options(Evaluation(task=judgement.task, data="x", **judgement.options))
    assert plan.budget
    assert set(plan.needs()) <= (
        {"cifar10", "tiny-imagenet", "voc"} if scale == "small" else {"imagenet", "places", "voc"}
    )


@pytest.mark.parametrize(("study", "scale", "plan"), every_plan(), ids=lambda value: getattr(value, "name", None))
def test_a_plan_can_be_trained(study, scale, plan):
    for training in plan.trainings:
        config = training.config
        assert config.epochs
        assert config.minutes is None, "a budget in minutes is another one on every machine"
        if config.method == "odc" and config.clusters and config.clustering.small_cluster is not None:
            threshold = 0 if config.clustering.one_pass else config.clustering.small_cluster
            check_room(training.images.count, config.clusters, threshold)


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_a_study_takes_a_few_hours_at_small_scale(study):
    minutes = study.plan("small", study.seeds).minutes()
    assert minutes is not None
    assert 5 < minutes < 5 * 60
    assert study.plan("paper", study.seeds).minutes() is None


def test_what_studies_share_under_one_name_is_one_thing():
    seen: dict[str, Training] = {}
    judged: dict[str, Judgement] = {}
    for _, _, plan in every_plan():
        for training in plan.trainings:
            first = seen.setdefault(training.name, training)
            assert fingerprint(first.config) == fingerprint(training.config)
            assert (first.start, first.images.of, first.images.part) == (
                training.start,
                training.images.of,
                training.images.part,
            )
        for judgement in plan.judgements:
            before = judged.setdefault(judgement.name, judgement)
            assert (before.subject, before.task, before.untrained, before.options) == (
                judgement.subject,
                judgement.task,
                judgement.untrained,
                judgement.options,
            )
    shared = [
        STUDIES[name].plan("small", (0,)).trainings for name in ("stability", "update-interval", "small-clusters")
    ]
    assert set.intersection(*({t.name for t in trainings} for trainings in shared)) == {"small-odc-base-s0"}


def test_paper_scale_has_the_papers_settings():
    plan = STUDIES["stability"].plan("paper", (0,))
    odc, deepcluster = (training.config for training in plan.trainings)
    assert odc == recipe("odc_resnet50_imagenet")
    assert deepcluster == recipe("deepcluster_resnet50_imagenet")
    assert (odc.clusters, odc.epochs, odc.lr, odc.batch_size, odc.clustering.update_interval) == (
        10_000,
        440,
        0.06,
        512,
        10,
    )
    tuned = {t.name: t for t in STUDIES["fine-tuning"].plan("paper", (0,)).trainings}
    assert tuned["paper-rotation-then-odc-s0"].config == recipe("finetune_odc_resnet50")
    assert tuned["paper-rotation-then-odc-s0"].start == "paper-rotation-s0"


def test_a_sweep_changes_one_option():
    for name, option, count in (("update-interval", "update_interval", 6), ("small-clusters", "small_cluster", 8)):
        plan = STUDIES[name].plan("small", (0,))
        values = [getattr(training.config.clustering, option) for training in plan.trainings]
        assert len(set(values)) == len(values) == count
        alike = {option: 1, "one_pass": False}
        assert len({fingerprint(changed(training.config, **alike)) for training in plan.trainings}) == 1


def test_only_thresholds_without_room_are_handled_in_one_pass():
    trainings = STUDIES["small-clusters"].plan("small", (0,)).trainings
    assert [t.config.clustering.small_cluster for t in trainings if t.config.clustering.one_pass] == [100, 160]


def test_methods_of_a_table_have_the_same_compute():
    times = [training.minutes() for training in STUDIES["table-linear"].plan("small", (0,)).trainings]
    usual = np.median(times)
    for training, minutes in zip(STUDIES["table-linear"].plan("small", (0,)).trainings, times, strict=True):
        assert abs(minutes - usual) < 0.15 * usual, training.name


def labelled(counts: list[int]) -> Manifest:
    labels = np.repeat(np.arange(len(counts)), counts)[np.random.default_rng(0).permutation(sum(counts))]
    paths = [f"{i:06d}" for i in range(len(labels))]
    return Manifest("packed", "/data", paths, np.ones(len(labels), np.int64), labels)


@pytest.mark.parametrize("ratio", [1, 4, 16, 64])
def test_long_tails_have_the_ratio_and_always_as_many_images(ratio):
    manifest = labelled([500] * 10)
    ids = draw_long_tail(manifest, classes=10, count=1000, ratio=ratio, seed=0)
    assert len(ids) == len(set(ids.tolist())) == 1000
    assert (np.diff(ids) > 0).all()
    sizes = np.sort(np.bincount(manifest.labels[ids]))
    assert len(sizes) == 10
    assert sizes[-1] / sizes[0] == pytest.approx(ratio, rel=0.12)
    assert (draw_long_tail(manifest, classes=10, count=1000, ratio=ratio, seed=0) == ids).all()
    assert (draw_long_tail(manifest, classes=10, count=1000, ratio=ratio, seed=1) != ids).any()


def test_the_papers_long_tails_fit_imagenets_classes():
    assert long_tail_sizes(300, 100_000, 64)[0] <= 1300
    assert long_tail_sizes(300, 100_000, 64).sum() == 100_000


def test_too_few_images_of_a_class_are_said():
    with pytest.raises(DataError, match="give the whole data set"):
        draw_long_tail(labelled([20] * 10), classes=10, count=1000, ratio=4, seed=0)
    without = Manifest("folder", "/data", ["a", "b"], np.ones(2, np.int64))
    with pytest.raises(DataError, match="give the whole data set"):
        draw_classes(without, classes=2, per_class=1, seed=0)


def test_uniform_choices_take_every_class_alike():
    manifest = labelled([400] * 5)
    ids = draw_uniformly(manifest, count=1000, seed=0)
    assert np.bincount(manifest.labels[ids]).min() > 150
    assert len(draw_uniformly(manifest, count=10**6, seed=0)) == len(manifest)
    chosen = draw_classes(manifest, classes=3, per_class=100, seed=0)
    assert sorted(np.bincount(manifest.labels[chosen], minlength=5).tolist()) == [0, 0, 100, 100, 100]


def test_clusters_are_chosen_by_rule():
    """30 images each: one pure, one of two classes and close together, one mixed and loose, one pure but too small."""
    labels = np.repeat([0, 1, 2, 3], [30, 30, 30, 5])
    truth = np.concatenate([np.zeros(30), np.tile([1, 2], 15), np.arange(30) % 3, np.zeros(5)]).astype(np.int64)
    similarities = np.repeat([0.9, 0.8, 0.1, 0.99], [30, 30, 30, 5]) + np.linspace(0, 0.01, 95)
    pure, across = choose(labels, similarities, truth, ["a", "b", "c"])
    assert pure[0].cluster == 0
    assert pure[0].classes == {"a": 1.0}
    assert 3 not in [c.cluster for c in (*pure, *across)]
    assert pure[0].nearest == list(range(29, 18, -1)), "the most central images first"


def test_listing_studies_imports_no_torch():
    code = "import sys; from odcluster.studies.catalogue import listing; listing(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
