"""Semi-supervised fine-tuning: what is drawn, how it is trained, what is chosen, and going on after a stop."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from odcluster.data.sources import open_source
from odcluster.errors import DataError, Diverged, Interrupted, UserError
from odcluster.evaluation import semi
from odcluster.evaluation.linear_sgd import LabelledImages
from odcluster.evaluation.semi import (
    SETTINGS,
    FineTuning,
    Fit,
    SemiResult,
    Setting,
    draw_share,
    fine_tune,
    hold_out,
    semi_supervised,
)
from odcluster.models.backbones import Backbone, create_backbone

CPU = torch.device("cpu")
COLOURS = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200]])


def images_of_classes(num: int, seed: int) -> LabelledImages:
    """Noisy images of 16 pixels in three classes of colour; ids and labels have gaps."""
    random = np.random.default_rng(seed)
    kinds = random.permutation(np.arange(2 * num) % 3)
    pixels = COLOURS[kinds][:, None, None] + random.normal(0, 25, (2 * num, 16, 16, 3))
    ids = random.permutation(2 * num)[:num].astype(np.int64)
    source = open_source(pixels.clip(0, 255).astype(np.uint8))
    return LabelledImages(source, ids, 4 + 2 * kinds[ids].astype(np.int64))


def unbalanced(*sizes: int) -> LabelledImages:
    """Images of no interest, with so many of each class."""
    labels = np.repeat(np.arange(len(sizes)), sizes)[np.random.default_rng(0).permutation(sum(sizes))]
    source = open_source(np.zeros((len(labels), 8, 8), np.uint8))
    return LabelledImages(source, np.arange(len(labels)), labels)


def tiny_backbone(in_channels: int = 3) -> Backbone:
    torch.manual_seed(0)
    return create_backbone("smallconv", image_size=16, in_channels=in_channels)


def run(
    *,
    factory: Callable[[], Backbone] = tiny_backbone,
    train: LabelledImages | None = None,
    share: float = 0.2,
    seed: int = 3,
    workers: int = 0,
    store: Path | None = None,
    key: str = "weights",
    epochs: int = 2,
    progress: Callable[[str, int, int], None] = lambda activity, done, total: None,
) -> SemiResult:
    return semi_supervised(
        factory,
        train or images_of_classes(60, 1),
        images_of_classes(30, 2),
        share,
        seed=seed,
        device=CPU,
        workers=workers,
        store=store,
        key=key,
        progress=progress,
        epochs=epochs,
    )


@pytest.fixture(scope="module")
def expected() -> SemiResult:
    return run()


@pytest.mark.parametrize("seed", range(3))
def test_drawn_labels_are_balanced_and_a_function_of_the_seed(seed: int) -> None:
    images = unbalanced(400, 300, 500)
    drawn = draw_share(images, 0.1, seed)
    assert np.bincount(drawn.labels).tolist() == [40, 40, 40]
    assert len(np.unique(drawn.ids)) == 120
    assert drawn.labels.tolist() == images.labels[drawn.ids].tolist()
    assert drawn.ids.tolist() == draw_share(images, 0.1, seed).ids.tolist()
    assert drawn.ids.tolist() != draw_share(images, 0.1, seed + 1).ids.tolist()
    assert set(draw_share(images, 0.01, seed).ids) < set(drawn.ids)


def test_every_class_is_drawn_and_a_small_one_as_a_whole() -> None:
    assert np.bincount(draw_share(unbalanced(500, 3, 97), 0.1, 0).labels).tolist() == [20, 3, 20]
    assert np.bincount(draw_share(unbalanced(50, 3, 7), 0.01, 0).labels).tolist() == [1, 1, 1]
    assert len(draw_share(unbalanced(5, 5, 5), 1.0, 0).ids) == 15


def test_drawing_favours_no_image() -> None:
    images = unbalanced(20, 20)
    counts = np.bincount(np.concatenate([draw_share(images, 0.25, seed).ids for seed in range(400)]), minlength=40)
    assert counts.sum() == 400 * 10
    assert (abs(counts - 100) < 5 * (400 * 0.25 * 0.75) ** 0.5).all()  # five standard deviations: 43


def test_a_fifth_of_each_class_is_held_out_and_something_always_kept() -> None:
    drawn = unbalanced(10, 5, 2, 1)
    kept, held_out = hold_out(drawn, 0)
    assert np.bincount(held_out.labels, minlength=4).tolist() == [2, 1, 1, 0]
    assert sorted([*kept.ids, *held_out.ids]) == drawn.ids.tolist()
    assert hold_out(drawn, 0)[1].ids.tolist() == held_out.ids.tolist()


def test_settings_are_three_rates_times_three_multipliers() -> None:
    assert [(setting.lr, setting.head_multiplier) for setting in SETTINGS] == [
        (lr, multiplier) for lr in (0.001, 0.01, 0.1) for multiplier in (1, 10, 100)
    ]
    assert (semi.EPOCHS, semi.BATCH_SIZE) == (20, 256)


def test_rates_of_backbone_and_head_fall_to_a_fifth_at_12_and_16() -> None:
    backbone = tiny_backbone()
    next(backbone.parameters()).requires_grad_(False)  # as a run with frozen stages leaves it
    tuning = FineTuning(backbone, 3, Setting(0.01, 100), epochs=20, seed=0, device=CPU)
    body, head = tuning.optimizer.param_groups
    assert {id(p) for p in body["params"]} == {id(p) for p in tuning.backbone.parameters()}
    assert [id(p) for p in head["params"]] == [id(tuning.head.weight), id(tuning.head.bias)]
    assert all(p.requires_grad for p in tuning.backbone.parameters())
    assert {(g["momentum"], g["nesterov"], g["weight_decay"]) for g in (body, head)} == {(0.9, True, 1e-4)}
    rates = []
    for epoch in range(20):
        tuning.set_lr(epoch)
        rates.append((body["lr"], head["lr"]))
    expected = [0.01] * 12 + [0.002] * 4 + [0.0004] * 4
    assert [rate for rate, _ in rates] == pytest.approx(expected, rel=1e-12)
    assert [rate for _, rate in rates] == pytest.approx([100 * rate for rate in expected], rel=1e-12)


def test_training_uses_these_rates_and_changes_the_whole_backbone() -> None:
    train, test = images_of_classes(30, 1), images_of_classes(30, 2)
    backbone = tiny_backbone()
    before = copy.deepcopy(backbone.state_dict())
    tuning = FineTuning(backbone, 3, Setting(0.01, 10), epochs=5, seed=0, device=CPU)
    used: list[list[float]] = []
    step = tuning.optimizer.step
    tuning.optimizer.step = lambda: (used.append([g["lr"] for g in tuning.optimizer.param_groups]), step())[1]  # type: ignore[method-assign, assignment]
    fit = fine_tune(tuning, train, test, np.unique(train.labels), 0, lambda done: None)
    assert np.allclose(used, np.outer([0.01] * 3 + [0.002, 0.0004], [1, 10]), rtol=1e-12)
    after = backbone.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)  # batch statistics too
    assert {int(number) for name, number in after.items() if "num_batches" in name} == {5}  # by training alone
    assert fit.accuracy is not None
    assert fit.accuracy > 0.5


def test_backbones_with_dropout_repeat_exactly() -> None:
    class Dropping(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network, self.dropout = network, nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.network(x))

    weights = []
    for drawn_elsewhere in range(2):
        backbone = tiny_backbone()
        backbone.network = Dropping(backbone.network)
        train = images_of_classes(12, 1)
        tuning = FineTuning(backbone, 3, Setting(0.1, 1), epochs=2, seed=0, device=CPU)
        torch.rand(drawn_elsewhere)  # from the global generator
        fine_tune(tuning, train, train, np.unique(train.labels), 0, lambda done: None)
        weights.append(tuning.head.weight)
    assert torch.equal(*weights)


def test_result_tells_everything(expected: SemiResult) -> None:
    train = images_of_classes(60, 1)
    label_of = dict(zip(train.ids.tolist(), train.labels.tolist(), strict=True))
    assert sorted(label_of[i] for i in expected.ids) == [4] * 4 + [6] * 4 + [8] * 4
    assert set(expected.held_out_ids) < set(expected.ids)
    assert len(expected.held_out_ids) == 3
    assert [result.setting for result in expected.settings] == list(SETTINGS)
    assert (expected.share, expected.epochs, expected.num_classes, expected.num_test) == (0.2, 2, 3, 30)
    assert expected.refused == ()
    assert len({result.accuracy for result in expected.settings}) > 1


def test_published_is_best_on_the_test_images_and_honest_on_those_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    test_accuracy = dict(zip(SETTINGS, [0.1, 0.2, 0.9, 0.3, 0.4, None, 0.5, 0.6, 0.7], strict=True))
    held_accuracy = dict(zip(SETTINGS, [0.5, 0.6, 0.5, 0.9, 0.9, 1.0, None, 0.8, 0.7], strict=True))

    def fitted(tuning: FineTuning, train: LabelledImages, test: LabelledImages, *others: object) -> Fit:
        return Fit((test_accuracy if len(test.ids) == 30 else held_accuracy)[tuning.setting], 30, [("a.png", "empty")])

    monkeypatch.setattr(semi, "fine_tune", fitted)
    found = run()
    assert found.published.setting == SETTINGS[2]
    assert found.honest is not None
    assert found.honest.setting == SETTINGS[3]  # not 5: what diverged has no accuracy; of equals, the gentler
    assert found.honest.accuracy == 0.3
    assert [result.accuracy for result in found.settings] == list(test_accuracy.values())
    assert [result.held_out_accuracy for result in found.settings] == list(held_accuracy.values())
    assert found.refused == (("a.png", "empty"),)


def test_held_out_labels_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[set[int], set[int]]] = []

    def fitted(tuning: FineTuning, train: LabelledImages, test: LabelledImages, *others: object) -> Fit:
        pairs.append((set(train.ids.tolist()), set(test.ids.tolist())))
        return Fit(0.5, 30, [])

    monkeypatch.setattr(semi, "fine_tune", fitted)
    found = run()
    assert len(pairs) == 18
    assert all(trained == set(found.ids) for trained, _ in pairs[:9])
    assert all(tested == set(found.held_out_ids) for _, tested in pairs[9:])
    assert all(trained == set(found.ids) - tested for trained, tested in pairs[9:])


def test_one_label_per_class_leaves_nothing_to_choose_by() -> None:
    found = run(share=0.01, epochs=1)
    assert len(found.ids) == 3
    assert found.held_out_ids == ()
    assert found.honest is None
    assert all(result.held_out_accuracy is None for result in found.settings)


def test_original_weights_serve_every_setting(expected: SemiResult) -> None:
    original = tiny_backbone()
    before = copy.deepcopy(original.state_dict())
    given: list[Backbone] = []

    def factory() -> Backbone:
        given.append(copy.deepcopy(original))
        assert all(torch.equal(tensor, before[name]) for name, tensor in given[-1].state_dict().items())
        return given[-1]

    assert run(factory=factory) == expected
    assert len(given) == 18
    assert all(torch.equal(tensor, before[name]) for name, tensor in original.state_dict().items())


def test_same_numbers_for_any_number_of_workers(expected: SemiResult) -> None:
    train, test = images_of_classes(20, 1), images_of_classes(10, 2)
    fits = [
        fine_tune(
            FineTuning(tiny_backbone(), 3, Setting(0.01, 10), epochs=2, seed=0, device=CPU),
            train, test, np.unique(train.labels), workers, lambda done: None,
        )
        for workers in (0, 2)
    ]  # fmt: skip
    assert fits[0] == fits[1]


def test_stopped_and_started_again_only_the_rest_is_done(tmp_path: Path, expected: SemiResult) -> None:
    calls: list[int] = []

    def stopping(activity: str, done: int, total: int) -> None:
        calls.append(done)
        if done > total // 3:
            raise Interrupted("stopped as asked")

    with pytest.raises(Interrupted):
        run(store=tmp_path, progress=stopping)
    finished = list((tmp_path / "semi").glob("*.json"))
    assert 0 < len(finished) < 18
    made = 0

    def factory() -> Backbone:
        nonlocal made
        made += 1
        return tiny_backbone()

    assert run(store=tmp_path, factory=factory) == expected
    assert made == 18 - len(finished)
    assert run(store=tmp_path, factory=lambda: pytest.fail("all fits are there")) == expected


def test_fits_of_something_else_and_damaged_ones_are_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def fitted(*arguments: object) -> Fit:
        nonlocal count
        count += 1
        return Fit(0.5, 30, [("odd \udce9.png", "empty")])

    def fits_made(**arguments: object) -> int:
        nonlocal count
        count = 0
        run(store=tmp_path, **arguments)  # type: ignore[arg-type]
        return count

    monkeypatch.setattr(semi, "fine_tune", fitted)
    assert fits_made() == 18
    assert fits_made() == 0
    assert run(store=tmp_path).refused == (("odd \udce9.png", "empty"),)
    for change in ({"key": "other"}, {"seed": 4}, {"epochs": 3}, {"train": images_of_classes(60, 9)}):
        assert fits_made(**change) == 18
        assert fits_made(**change) == 0
        assert fits_made() == 18
    assert fits_made(share=0.3) == 18
    assert fits_made() == 0  # another share keeps its own
    first, second, third = sorted((tmp_path / "semi").glob("0.2-*.json"))[:3]
    first.write_text(first.read_text().replace("0.5", "0.9"))
    second.write_text(second.read_text()[:-9])
    third.write_text(json.dumps([1]))
    assert fits_made() == 3
    assert not [path for path in (tmp_path / "semi").iterdir() if path.suffix != ".json" or path.name[0] == "."]


def test_progress_is_one_activity_that_reaches_its_end() -> None:
    calls: list[tuple[str, int, int]] = []
    run(epochs=1, progress=lambda *call: calls.append(call))
    assert {activity for activity, _, _ in calls} == {"fine-tuning, 20 % of labels"}
    done = [number for _, number, _ in calls]
    assert done == sorted(done)
    assert {total for _, _, total in calls} == {done[-1]}
    assert done[-1] == 9 * (12 + 30) + 9 * (9 + 3)


def test_a_setting_that_diverges_is_told_and_the_others_go_on() -> None:
    backbone = tiny_backbone()
    tuning = FineTuning(backbone, 3, Setting(1e30, 1), epochs=4, seed=0, device=CPU)
    train = images_of_classes(12, 1)
    assert fine_tune(tuning, train, train, np.unique(train.labels), 0, lambda done: None) == Fit(None, 0, [])

    def broken() -> Backbone:
        backbone = tiny_backbone()
        with torch.no_grad():
            next(backbone.parameters()).fill_(torch.nan)
        return backbone

    with pytest.raises(Diverged, match="every setting; use weights of an earlier checkpoint"):
        run(factory=broken, epochs=1)


def test_a_network_of_edges_gets_edges() -> None:
    train = images_of_classes(12, 1)
    tuning = FineTuning(tiny_backbone(in_channels=2), 3, Setting(0.01, 1), epochs=1, seed=0, device=CPU)
    fit = fine_tune(tuning, train, train, np.unique(train.labels), 0, lambda done: None)
    assert fit.num_test == 12


def test_unreadable_images_are_left_out_and_named(tmp_path: Path, image_folder: Path) -> None:
    for i, path in enumerate(sorted(image_folder.iterdir())[:16]):
        (tmp_path / f"{i:02d}.png").write_bytes(path.read_bytes() if i not in (3, 4) else b"not an image")
    source = open_source(tmp_path)
    train, test = (
        LabelledImages(source, np.arange(first, 16, 2), np.arange(first, 16, 2) // 2 % 2) for first in (0, 1)
    )
    tuning = FineTuning(tiny_backbone(), 2, Setting(0.01, 1), epochs=2, seed=0, device=CPU)
    fit = fine_tune(tuning, train, test, np.arange(2), 0, lambda done: None)
    assert fit.num_test == 7
    assert [path for path, _ in fit.refused] == ["04.png", "03.png"]
    bad = LabelledImages(source, np.array([3, 4]), np.arange(2))
    tuning = FineTuning(tiny_backbone(), 2, Setting(0.01, 1), epochs=1, seed=0, device=CPU)
    with pytest.raises(DataError, match="none of the labelled training images can be used"):
        fine_tune(tuning, bad, test, np.arange(2), 0, lambda done: None)


def test_bad_input_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(UserError, match=r"0\.01 and 0\.1 for 20 are usual"):
            run(share=share)
    with pytest.raises(UserError, match="0 epochs"):
        run(epochs=0)
    images = images_of_classes(20, 1)
    with pytest.raises(DataError, match="of one class; give images of at least two"):
        run(train=LabelledImages(images.source, images.ids, np.zeros(20, np.int64)))
    monkeypatch.setattr(semi, "fine_tune", lambda *arguments: Fit(0.5, 30, []))
    (tmp_path / "semi").write_text("in the way")
    with pytest.raises(DataError, match=r"could not be written .* make room there"):
        run(store=tmp_path)
