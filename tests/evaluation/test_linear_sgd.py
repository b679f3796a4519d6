"""The published linear probe: learns what is there to see, leaves the backbone alone, and survives being killed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from odcluster.data.images import read_file
from odcluster.data.order import epoch_order
from odcluster.data.randomness import Purpose
from odcluster.data.sources import open_source
from odcluster.data.views import apply_view, draw_views, evaluation_view
from odcluster.errors import DataError, Diverged, Interrupted
from odcluster.evaluation import linear_sgd
from odcluster.evaluation.linear_sgd import (
    CROP_AND_FLIP,
    LabelledImages,
    LayerProbe,
    ProbeHead,
    SgdSettings,
    published_linear_probe,
)
from odcluster.models.backbones import Backbone, create_backbone
from odcluster.training import checkpoint

COLOURS = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200], [150, 150, 60]])
SHORT = SgdSettings(epochs=4, batch_size=16, lr=0.05)


def images_of_classes(num: int, seed: int, num_classes: int = 4) -> LabelledImages:
    """Noisy images of 20 pixels whose colour is their class; ids are not 0, 1, 2, ... and labels not 0 .. K - 1."""
    random = np.random.default_rng(seed)
    kinds = random.permutation(np.arange(2 * num) % num_classes)
    pixels = COLOURS[kinds][:, None, None] + random.normal(0, 25, (2 * num, 20, 20, 3))
    ids = random.permutation(2 * num)[:num].astype(np.int64)
    source = open_source(pixels.clip(0, 255).astype(np.uint8))
    return LabelledImages(source, ids, 10 + 3 * kinds[ids].astype(np.int64))


def tiny_backbone(in_channels: int = 3) -> Backbone:
    torch.manual_seed(0)
    backbone = create_backbone("smallconv", image_size=16, in_channels=in_channels)
    for module in backbone.modules():  # statistics that a pass in training mode would change
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return backbone


def all_pools(backbone: Backbone) -> dict[str, Callable[[Tensor], Tensor]]:
    return {name: nn.AdaptiveAvgPool2d(2) for name in backbone.stage_names}


def probe(
    train: LabelledImages | None = None,
    test: LabelledImages | None = None,
    settings: SgdSettings = SHORT,
    *,
    backbone: Backbone | None = None,
    pools: dict[str, Callable[[Tensor], Tensor]] | None = None,
    seed: int = 5,
    workers: int = 0,
    store: Path | None = None,
    key: str = "weights",
    progress: Callable[[str, int, int], None] = lambda activity, done, total: None,
) -> dict[str, LayerProbe]:
    backbone = backbone or tiny_backbone()
    return published_linear_probe(
        backbone,
        train or images_of_classes(48, seed=1),
        test or images_of_classes(40, seed=2),
        pools or all_pools(backbone),
        settings,
        seed=seed,
        device=torch.device("cpu"),
        workers=workers,
        store=store,
        key=key,
        progress=progress,
    )


def stop_at(step: int) -> Callable[[str, int, int], None]:
    def progress(activity: str, done: int, total: int) -> None:
        if activity == "linear probe" and done >= step:
            raise Interrupted("stopped as asked")

    return progress


def state_hash(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_published_values_are_the_defaults() -> None:
    settings = SgdSettings()
    assert (settings.epochs, settings.batch_size, settings.lr) == (100, 256, 0.01)
    assert (settings.momentum, settings.weight_decay) == (0.9, 1e-4)


def test_learning_rate_is_a_tenth_after_every_thirty_percent() -> None:
    settings = SgdSettings()
    assert [settings.lr_at(epoch) for epoch in (0, 29, 30, 59, 60, 89, 90, 99)] == pytest.approx(
        [1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5], rel=1e-12
    )
    assert [SgdSettings(epochs=10).lr_at(epoch) for epoch in range(10)] == pytest.approx(
        [1e-2] * 3 + [1e-3] * 3 + [1e-4] * 3 + [1e-5], rel=1e-12
    )


def test_learning_rate_of_the_schedule_is_the_one_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[dict[str, object]] = []

    class Recording(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            used.append({name: self.param_groups[0][name] for name in ("lr", "momentum", "weight_decay", "nesterov")})
            super().step()

    monkeypatch.setattr(torch.optim, "SGD", Recording)
    settings = SgdSettings(epochs=10, batch_size=16)
    probe(settings=settings, pools={"conv1": nn.AdaptiveAvgPool2d(1)})
    assert [entry["lr"] for entry in used] == [settings.lr_at(epoch) for epoch in range(10) for _ in range(3)]
    assert {(entry["momentum"], entry["weight_decay"], entry["nesterov"]) for entry in used} == {(0.9, 1e-4, True)}


def test_training_views_are_crops_and_flips_alone() -> None:
    draws = draw_views(CROP_AND_FLIP, 0, 0, np.arange(2000), 0)
    assert not draws.jitter.any()
    assert not draws.grey.any()
    assert not draws.angle.any()
    assert 0.45 < draws.flip.mean() < 0.55
    assert 0.08 <= draws.share.min() < 0.1
    assert 0.98 < draws.share.max() <= 1


def test_head_is_batch_norm_per_channel_then_a_linear_layer() -> None:
    torch.manual_seed(0)
    head = ProbeHead(6, 9, 50).train()
    assert [name for name, _ in head.named_parameters()] == ["linear.weight", "linear.bias"]
    assert float(head.linear.weight.detach().std()) == pytest.approx(0.01, rel=0.1)
    assert not head.linear.bias.any()
    pooled = torch.randn(8, 6, 3, 3) * torch.arange(1, 7)[:, None, None] + 5
    mean = pooled.mean(dim=(0, 2, 3), keepdim=True)
    var = pooled.var(dim=(0, 2, 3), keepdim=True, correction=0)
    literal = ((pooled - mean) / (var + 1e-5).sqrt()).reshape(8, -1) @ head.linear.weight.T
    torch.testing.assert_close(head(pooled.flatten(2)), literal, atol=1e-6, rtol=1e-4)


def test_visible_classes_are_learned_and_the_backbone_stays_as_it_was() -> None:
    backbone = tiny_backbone()
    before = state_hash(backbone)
    found = probe(
        images_of_classes(80, 1), images_of_classes(60, 2), SgdSettings(epochs=8, batch_size=16), backbone=backbone
    )
    assert list(found) == backbone.stage_names
    assert all(layer.accuracy > 0.95 for layer in found.values())
    assert [layer.num_dimensions for layer in found.values()] == [4 * width for width in (32, 64, 128, 192, 192)]
    for layer in found.values():
        assert (layer.num_train, layer.num_test, layer.num_classes, layer.refused) == (80, 60, 4, ())
        assert len(layer.losses) == len(layer.train_accuracies) == 8
        assert layer.losses[-1] < layer.losses[0] / 2
        assert layer.train_accuracies[-1] > 0.9
    assert state_hash(backbone) == before
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_random_labels_stay_at_chance() -> None:
    train, test = images_of_classes(64, 3), images_of_classes(400, 4)
    random = np.random.default_rng(0)
    train = LabelledImages(train.source, train.ids, random.permutation(train.labels))
    found = probe(train, LabelledImages(test.source, test.ids, random.permutation(test.labels)))
    standard_error = (0.25 * 0.75 / 400) ** 0.5  # 0.022
    assert all(abs(layer.accuracy - 0.25) < 4 * standard_error for layer in found.values())


def test_layers_trained_together_are_those_trained_alone() -> None:
    together = probe()
    for name in ("conv1", "conv4"):
        assert probe(pools={name: nn.AdaptiveAvgPool2d(2)}) == {name: together[name]}


def test_a_pooled_map_may_be_flat() -> None:
    flat = {"conv3": nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())}
    assert probe(pools=flat) == probe(pools={"conv3": nn.AdaptiveAvgPool2d(2)})


def test_same_numbers_for_any_number_of_workers_and_whatever_the_global_seed() -> None:
    torch.manual_seed(1)
    expected = probe()
    torch.manual_seed(2)
    assert probe(workers=2) == expected
    assert probe(seed=6) != expected


def test_numbers_are_those_of_a_literal_version() -> None:
    """The protocol written out: views one by one, the gradient of the loss by hand, Nesterov's momentum by hand."""
    train, test = images_of_classes(48, 1), images_of_classes(40, 2)
    backbone, settings = tiny_backbone(), SgdSettings(epochs=4, batch_size=16, lr=0.05, weight_decay=0.01)
    found = probe(train, test, settings, backbone=backbone, pools={"conv3": nn.AdaptiveAvgPool2d(2)})["conv3"]

    def features(pixels: list[NDArray[np.uint8]]) -> Tensor:
        x = (torch.from_numpy(np.stack(pixels)).double() / 255 - torch.tensor(backbone.mean)) / torch.tensor(
            backbone.std
        )
        with torch.no_grad():
            return nn.functional.adaptive_avg_pool2d(backbone.stages(x.float().permute(0, 3, 1, 2))[2], 2).double()

    linear_sgd.seed_torch(5, Purpose.WEIGHTS, 3)
    weight = ProbeHead(128, 4, 4).linear.weight.detach().double()
    bias = torch.zeros(4, dtype=torch.float64)
    velocity, bias_velocity = torch.zeros_like(weight), torch.zeros_like(bias)
    mean, var = torch.zeros(128, 1, 1), torch.ones(128, 1, 1)
    number = {label: position for position, label in enumerate(sorted(set(train.labels.tolist())))}
    losses = []
    for epoch in range(4):
        order, total = epoch_order(5, epoch, 48), 0.0
        for rows in (order[0:16], order[16:32], order[32:48]):
            draws = draw_views(CROP_AND_FLIP, 5, epoch, train.ids[rows], 0)
            pixels = [
                apply_view(train.source.image(i), draws.parameters(at, 20, 20), 16)
                for at, i in enumerate(train.ids[rows].tolist())
            ]
            maps = features(pixels)
            batch_mean, batch_var = maps.mean((0, 2, 3))[:, None, None], maps.var((0, 2, 3))[:, None, None]
            mean, var = 0.9 * mean + 0.1 * batch_mean, 0.9 * var + 0.1 * batch_var
            biased = maps.var((0, 2, 3), correction=0)[:, None, None]
            x = ((maps - batch_mean) / (biased + 1e-5).sqrt()).flatten(1)
            targets = nn.functional.one_hot(torch.tensor([number[label] for label in train.labels[rows].tolist()]), 4)
            probabilities = (x @ weight.T + bias).softmax(1)
            total -= float((probabilities.log() * targets).sum())
            slope = (probabilities - targets) / 16
            gradient, bias_gradient = slope.T @ x + 0.01 * weight, slope.sum(0) + 0.01 * bias
            velocity, bias_velocity = 0.9 * velocity + gradient, 0.9 * bias_velocity + bias_gradient
            lr = 0.05 / 10 ** [0, 0, 1, 2][epoch]
            weight = weight - lr * (gradient + 0.9 * velocity)
            bias = bias - lr * (bias_gradient + 0.9 * bias_velocity)
        losses.append(total / 48)
    x = (features([evaluation_view(test.source.image(i), 16) for i in test.ids.tolist()]) - mean) / (var + 1e-5).sqrt()
    right = (x.flatten(1) @ weight.T + bias).argmax(1) == torch.tensor(
        [number[label] for label in test.labels.tolist()]
    )
    assert found.losses == pytest.approx(losses, rel=1e-3)
    assert found.accuracy == pytest.approx(float(right.double().mean()), abs=0.026)  # one image of 40 may be a draw


@pytest.mark.parametrize("step", [0, 2, 3, 7, 12])  # three steps an epoch, four epochs
def test_stopped_and_started_again_it_ends_with_the_same_bits(tmp_path: Path, step: int) -> None:
    pools = {"conv2": nn.AdaptiveAvgPool2d(2), "conv5": nn.AdaptiveAvgPool2d(1)}
    expected = probe(pools=pools, store=tmp_path / "whole")
    with pytest.raises(Interrupted):
        probe(pools=pools, store=tmp_path / "stopped", progress=stop_at(step))
    steps: list[int] = []

    def progress(activity: str, done: int, total: int) -> None:
        if activity == "linear probe":
            steps.append(done)

    assert probe(pools=pools, store=tmp_path / "stopped", progress=progress) == expected
    assert sorted(set(steps)) == ([] if step == 12 else list(range(step // 3 * 3, 13)))
    whole, stopped = tmp_path / "whole" / "linear", tmp_path / "stopped" / "linear"
    assert sorted(path.name for path in stopped.iterdir()) == ["step-00000003", "step-00000004"]
    for file in ("heads.safetensors", "momentum.safetensors", "state.json"):
        assert (stopped / "step-00000004" / file).read_bytes() == (whole / "step-00000004" / file).read_bytes()


def test_momentum_goes_on_where_it_stood(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        probe(store=tmp_path, progress=stop_at(6))
    saved = checkpoint.load(tmp_path / "linear" / "step-00000002")
    assert set(saved.tensors["momentum"]) == {
        f"conv{i}.linear.{part}" for i in range(1, 6) for part in ("weight", "bias")
    }
    assert all(tensor.any() for tensor in saved.tensors["momentum"].values())


@pytest.mark.parametrize("changed", ["key", "seed", "settings", "labels", "layers"])
def test_what_was_saved_for_something_else_is_discarded(tmp_path: Path, changed: str) -> None:
    with pytest.raises(Interrupted):
        probe(store=tmp_path, progress=stop_at(6))
    train = images_of_classes(48, seed=1)
    arguments: dict[str, dict[str, object]] = {
        "key": {"key": "other weights"},
        "seed": {"seed": 9},
        "settings": {"settings": SgdSettings(epochs=4, batch_size=16, lr=0.01)},
        "labels": {"train": LabelledImages(train.source, train.ids, train.labels[::-1].copy())},
        "layers": {"pools": {"conv3": nn.AdaptiveAvgPool2d(2)}},
    }
    first: list[int] = []

    def watched(activity: str, done: int, total: int) -> None:
        first.append(done)
        stop_at(6)(activity, done, total)

    with pytest.raises(Interrupted):
        probe(store=tmp_path, progress=watched, **arguments[changed])  # type: ignore[arg-type]
    assert first[0] == 0
    first.clear()
    found = probe(store=tmp_path, progress=lambda activity, done, total: first.append(done), **arguments[changed])  # type: ignore[arg-type]
    assert first[0] == 6  # its own state has taken the place of the other
    assert found == probe(**arguments[changed])  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["heads.safetensors", "momentum.safetensors", "state.json"])
def test_a_damaged_state_is_ignored(tmp_path: Path, file: str) -> None:
    with pytest.raises(Interrupted):
        probe(store=tmp_path, progress=stop_at(9))
    newest = tmp_path / "linear" / "step-00000003" / file
    content = bytearray(newest.read_bytes())
    content[-20] ^= 1
    newest.write_bytes(content)
    first: list[int] = []
    assert probe(store=tmp_path, progress=lambda activity, done, total: first.append(done)) == probe()
    assert first[0] == 6  # the epoch before is whole


def test_a_network_of_edges_gets_edges() -> None:
    found = probe(backbone=tiny_backbone(in_channels=2))
    assert all(0 < layer.accuracy <= 1 for layer in found.values())


def test_unreadable_images_are_left_out_and_named(tmp_path: Path, image_folder: Path) -> None:
    for kind in range(2):
        (tmp_path / f"class{kind}").mkdir()
        for i in range(12):
            name = sorted(image_folder.iterdir())[5 * i + kind]
            (tmp_path / f"class{kind}" / f"{i:02d}.png").write_bytes(read_file(str(name)))
    (tmp_path / "class0" / "03.png").write_bytes(b"not an image")
    source = open_source(tmp_path)
    assert source.manifest.labels is not None
    even, odd = np.arange(0, 24, 2), np.arange(1, 24, 2)
    train, test = (LabelledImages(source, ids, source.manifest.labels[ids]) for ids in (even, odd))
    settings = SgdSettings(epochs=2, batch_size=4)
    found = probe(train, test, settings)["conv5"]
    assert (found.num_train, found.num_test) == (12, 11)
    assert [path for path, _ in found.refused] == ["class0/03.png"]
    store = tmp_path.with_name("store")
    with pytest.raises(Interrupted):  # what was refused before a stop is reported as well
        probe(test, train, settings, store=store, progress=stop_at(6))
    swapped = probe(test, train, settings, store=store)["conv5"]
    assert (swapped.num_train, swapped.num_test) == (11, 12)
    ((path, reason),) = swapped.refused
    assert path == "class0/03.png"
    assert reason
    only = LabelledImages(source, np.array([3]), source.manifest.labels[[3]])
    with pytest.raises(DataError, match="none of the labelled test images can be used"):
        probe(train, only, settings)


def test_a_test_image_is_judged_whatever_the_others_are(tmp_path: Path) -> None:
    test = images_of_classes(40, 2)
    whole = probe(test=test, store=tmp_path)
    num_right = dict.fromkeys(whole, 0.0)
    for label in np.unique(test.labels):
        mine = test.labels == label
        part = LabelledImages(test.source, test.ids[mine], test.labels[mine])
        for name, layer in probe(test=part, store=tmp_path).items():
            num_right[name] += layer.accuracy * layer.num_test
    assert num_right == pytest.approx({name: 40 * layer.accuracy for name, layer in whole.items()})
    assert all(layer.accuracy > 0.6 for layer in whole.values())


def test_a_test_class_unseen_in_training_counts_as_wrong() -> None:
    test = images_of_classes(40, 2)
    numbers = linear_sgd.class_numbers(test, np.array([10, 16, 19]))  # of 10, 13, 16 and 19
    assert [int(numbers[i]) for i in test.ids] == [{10: 0, 13: -1, 16: 1, 19: 2}[label] for label in test.labels]
    assert int((numbers >= 0).sum()) == int((test.labels != 13).sum())
    seen = images_of_classes(48, 1)
    kept = seen.labels != 10
    train = LabelledImages(seen.source, seen.ids[kept], seen.labels[kept])
    found = probe(train, test, SgdSettings(epochs=8, batch_size=16))
    assert found["conv5"].num_classes == 3
    assert max(layer.accuracy for layer in found.values()) <= float(np.mean(test.labels != 10))


def test_bad_input_is_refused_with_a_remedy() -> None:
    images = images_of_classes(20, 1)
    none = LabelledImages(images.source, images.ids[:0], images.labels[:0])
    with pytest.raises(DataError, match="of one class; give images of at least two"):
        probe(LabelledImages(images.source, images.ids, np.zeros(20, np.int64)), images)
    with pytest.raises(DataError, match="no labelled training images; give"):
        probe(none, images)
    with pytest.raises(DataError, match="no labelled test images; give"):
        probe(images, none)
    with pytest.raises(ValueError, match="one label per id"):
        LabelledImages(images.source, images.ids, images.labels[1:])
    with pytest.raises(ValueError, match="leave images without a label out"):
        LabelledImages(images.source, images.ids, images.labels - 12)
    with pytest.raises(ValueError, match="name some of"):
        probe(pools={"res5": nn.AdaptiveAvgPool2d(1)})
    with pytest.raises(ValueError, match="use at least 1 and 2"):
        SgdSettings(epochs=0)


def test_features_that_are_not_finite_end_the_probe_with_a_sentence(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    with torch.no_grad():
        next(reversed(list(backbone.parameters()))).fill_(torch.nan)
    with pytest.raises(Diverged, match=r"probe of conv5 has a loss that is not finite in epoch 1; use weights"):
        probe(backbone=backbone, store=tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_full_disk_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "check_space", full)
    with pytest.raises(DataError, match=r"No space left on device.*make room there"):
        probe(store=tmp_path)


def test_test_images_are_looked_at_once_after_training(monkeypatch: pytest.MonkeyPatch) -> None:
    test = images_of_classes(40, 2)
    seen: list[int] = []
    stored = test.source.stored

    def watched(id: int) -> bytes | NDArray[np.uint8]:
        seen.append(id)
        return stored(id)

    monkeypatch.setattr(test.source, "stored", watched)
    activities: list[str] = []
    probe(test=test, progress=lambda activity, done, total: activities.append(activity))
    assert seen == test.ids.tolist()
    assert activities == ["linear probe"] * 16 + ["testing the linear probe"]
