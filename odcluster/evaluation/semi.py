"""Semi-supervised fine-tuning: the whole backbone and a linear head, trained on 1 % or 10 % of the labels.

Nine settings are tried, three learning rates with three multipliers for the head, and one accuracy is reported. There
are two ways to choose it, and both are given:

    published   the setting that is best on the test images themselves: comparable with published numbers, and too good
    honest      the setting that is best on a fifth of the drawn labels, held out while nine more networks are trained
                on the rest; its accuracy is that of the network which saw all drawn labels

Hence 18 fits and 9 passes over the test images: the honest choice needs no fit of its own, as the network of that
setting on all drawn labels is already one of the first nine.

Promises: every fit starts from the weights the factory gives; what is drawn is a function of the seed; each finished
fit is kept, and a stopped evaluation goes on with the next. Recording and comparing are left to others.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from odcluster.data.loading import Loader
from odcluster.data.order import batch_ids, epoch_order, num_steps
from odcluster.data.randomness import Purpose, permutation
from odcluster.errors import DataError, Diverged, UserError
from odcluster.evaluation.linear_sgd import (
    LabelledImages,
    Progress,
    check_labelled,
    class_numbers,
    count_right,
    named,
    open_loader,
)
from odcluster.models.backbones import Backbone
from odcluster.models.sobel import represent
from odcluster.training.checkpoint import content_hash, reason
from odcluster.training.devices import seed_torch
from odcluster.training.run import write_atomically
from odcluster.training.survey import to_network

EPOCHS = 20
LEARNING_RATES = (0.001, 0.01, 0.1)
HEAD_MULTIPLIERS = (1, 10, 100)
DROP = 0.2
"""Factor of the learning rate after 60 % and again after 80 % of the epochs: of 20, at 12 and 16."""

# The protocol leaves these open; they are those of the published linear probe.
BATCH_SIZE = 256
MOMENTUM = 0.9  # Nesterov's
WEIGHT_DECAY = 1e-4
HEAD_STD = 0.01  # of the head's initial weights; its bias starts at 0

HELD_OUT = 5
"""One in so many of the drawn labels is held out for the honest choice."""


@dataclass(frozen=True)
class Setting:
    """One of the nine."""

    lr: float
    head_multiplier: int
    """The head learns this many times faster than the backbone."""


SETTINGS = tuple(itertools.starmap(Setting, itertools.product(LEARNING_RATES, HEAD_MULTIPLIERS)))


@dataclass(frozen=True)
class SettingResult:
    """What one setting led to. An accuracy is None where training diverged."""

    setting: Setting
    accuracy: float | None
    """Top-1 on the test images after the last epoch, trained on all drawn labels."""
    held_out_accuracy: float | None
    """Top-1 on the held-out fifth, trained on the rest of the drawn labels; None too where nothing was held out."""


@dataclass(frozen=True, kw_only=True)
class SemiResult:
    """All nine settings, and the two ways to choose among them."""

    share: float
    epochs: int
    ids: tuple[int, ...]
    """The training images whose labels were drawn."""
    held_out_ids: tuple[int, ...]
    """Those of them that only chose the honest setting."""
    settings: tuple[SettingResult, ...]
    published: SettingResult
    """Best on the test images."""
    honest: SettingResult | None
    """Best on the held-out labels; None when no class has two to hold one out of, or all of those fits diverged."""
    num_classes: int
    num_test: int
    """Test images that could be used."""
    refused: tuple[tuple[str, str], ...]
    """Path and reason of each image that was left out, in training and in testing."""


@dataclass(frozen=True)
class Fit:
    """What one fine-tuned network did on images it had not seen; accuracy None when its loss was not finite."""

    accuracy: float | None
    num_test: int
    refused: list[tuple[str, str]]


def semi_supervised(
    backbone_factory: Callable[[], Backbone],
    train: LabelledImages,
    test: LabelledImages,
    share: float,
    *,
    seed: int,
    device: torch.device,
    workers: int,
    store: Path | None,
    key: str,
    progress: Progress,
    epochs: int = EPOCHS,
) -> SemiResult:
    """Draw `share` of the training labels and fine-tune with every setting.

    `backbone_factory` gives a backbone of its own at each call, with the weights to evaluate. `store` is a folder for
    finished fits; one under another `key` (the caller's name for the weights) or of other images is done again.
    """
    if not 0 < share <= 1 or epochs < 1:
        raise UserError(f"a share of {share:g} for {epochs} epochs cannot be used; 0.01 and 0.1 for 20 are usual")
    classes = check_labelled(train, test)
    drawn = draw_share(train, share, seed)
    kept, held_out = hold_out(drawn, seed)
    jobs = [("all", setting, drawn, test) for setting in SETTINGS]
    if len(held_out.ids):
        jobs += [("kept", setting, kept, held_out) for setting in SETTINGS]
    sizes = [epochs * _images_per_epoch(images) + len(tested.ids) for _, _, images, tested in jobs]
    fits: dict[tuple[str, Setting], Fit] = {}
    for number, (part, setting, images, tested) in enumerate(jobs):
        name = f"{share:g}-{part}-lr{setting.lr:g}-head{setting.head_multiplier}.json"
        identity = [key, seed, epochs, asdict(setting), images.fingerprint, tested.fingerprint]
        file = FitFile(None if store is None else store / "semi" / name, identity)
        fit = file.read()
        if fit is None:
            notice = partial(
                _report, progress, f"fine-tuning, {100 * share:g} % of labels", sum(sizes[:number]), sum(sizes)
            )
            tuning = FineTuning(backbone_factory(), len(classes), setting, epochs=epochs, seed=seed, device=device)
            fit = fine_tune(tuning, images, tested, classes, workers, notice)
            file.write(fit)
            notice(sizes[number])  # after the write: a stop here loses nothing
        fits[part, setting] = fit
    return _result(fits, share, epochs, drawn, held_out, len(classes))


def draw_share(images: LabelledImages, share: float, seed: int) -> LabelledImages:
    """The same number of images of every class: the share of the mean class, and at least one.

    A class that has fewer gives all it has. A larger share of the same seed holds all of a smaller one.
    """
    num_classes = len(np.unique(images.labels))
    per_class = max(1, round(share * len(images.ids) / num_classes))
    order = permutation(seed, 0, len(images.ids), Purpose.SPLIT)
    return _chosen(images, order[_rank_in_class(images.labels[order]) < per_class])


def hold_out(drawn: LabelledImages, seed: int) -> tuple[LabelledImages, LabelledImages]:
    """The rest and a fifth of the drawn images, class by class: at least one of two, none of one."""
    order = permutation(seed, 1, len(drawn.ids), Purpose.SPLIT)
    labels = drawn.labels[order]
    _, number, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    num_held = np.where(sizes < 2, 0, np.maximum(1, np.rint(sizes / HELD_OUT))).astype(np.int64)
    held = _rank_in_class(labels) < num_held[number]
    return _chosen(drawn, order[~held]), _chosen(drawn, order[held])


class FineTuning:
    """A backbone, a new head and their optimiser, for one setting."""

    def __init__(
        self, backbone: Backbone, num_classes: int, setting: Setting, *, epochs: int, seed: int, device: torch.device
    ) -> None:
        self.backbone, self.setting, self.epochs, self.seed, self.device = backbone, setting, epochs, seed, device
        cast(Any, backbone).to(device=device, memory_format=torch.channels_last).requires_grad_(True)
        self._represent = represent(backbone)
        seed_torch(seed, Purpose.WEIGHTS, 1)  # 0 is the backbone's; the head starts the same in every setting
        self.head = nn.Linear(backbone.num_features, num_classes)
        nn.init.normal_(self.head.weight, std=HEAD_STD)
        nn.init.zeros_(self.head.bias)
        self.head.to(device)
        groups = [
            {"params": list(backbone.parameters()), "scale": 1},
            {"params": list(self.head.parameters()), "scale": setting.head_multiplier},
        ]
        self.optimizer = torch.optim.SGD(
            groups, lr=setting.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True
        )
        self.refused: dict[int, str] = {}

    def logits(self, images: Tensor) -> Tensor:
        return self.head(self._represent(images))

    def set_lr(self, epoch: int) -> None:
        num_drops = (5 * epoch >= 3 * self.epochs) + (5 * epoch >= 4 * self.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = self.setting.lr * group["scale"] * DROP**num_drops

    def train(self, images: LabelledImages, targets: Tensor, loader: Loader, notice: Callable[[int], None]) -> bool:
        """All epochs; `notice` hears how many images are done. False as soon as a loss is not finite."""
        mean, std = loader.normalisation_on(self.device)
        batch_size = min(BATCH_SIZE, len(images.ids))
        steps = num_steps(len(images.ids), batch_size)
        for epoch in range(self.epochs):
            self.set_lr(epoch)
            order = images.ids[epoch_order(self.seed, epoch, len(images.ids))]
            batches = [batch_ids(order, at, batch_size) for at in range(steps)]
            for step, raw in enumerate(loader.training(epoch, batches), start=epoch * steps):
                notice(step * batch_size)
                self.refused.update(raw.refused)
                if len(raw.ids) < 2:  # batch norm needs two
                    continue
                seed_torch(self.seed, Purpose.STEP, step)  # of dropout, where a backbone has it
                if not self._step(to_network(raw.images[0], mean, std), targets[raw.ids].to(self.device)):
                    return False
        if not self.optimizer.state:  # no step was made
            raise DataError("none of the labelled training images can be used; are these images?")
        return True

    def _step(self, images: Tensor, targets: Tensor) -> bool:
        self.backbone.train()
        with torch.enable_grad():
            loss = F.cross_entropy(self.logits(images), targets)
            if not torch.isfinite(loss):
                return False
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        return True


def fine_tune(
    tuning: FineTuning,
    train: LabelledImages,
    test: LabelledImages,
    classes: NDArray[np.int64],
    workers: int,
    notice: Callable[[int], None],
) -> Fit:
    """Train, then test; `notice` hears how many images are done."""
    backbone, seed, device = tuning.backbone, tuning.seed, tuning.device
    with open_loader(train.source, backbone, seed, device, workers) as loader:
        finished = tuning.train(train, class_numbers(train, classes), loader, notice)
    refused = named(tuning.refused, train)
    if not finished:
        return Fit(None, 0, refused)
    backbone.eval()
    trained = tuning.epochs * _images_per_epoch(train)
    with open_loader(test.source, backbone, seed, device, workers) as loader:
        right, num_test, test_refused = count_right(
            lambda images: {"head": tuning.logits(images)},
            loader,
            test,
            class_numbers(test, classes),
            device,
            lambda done: notice(trained + done),
        )
    return Fit(right["head"] / num_test, num_test, [*refused, *named(test_refused, test)])


class FitFile:
    """The file of a finished fit. One that is damaged, or of another identity, counts as not there."""

    def __init__(self, path: Path | None, identity: list[Any]) -> None:
        self.path = path
        self.key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def read(self) -> Fit | None:
        if self.path is None or not self.path.is_file():
            return None
        try:
            content = json.loads(self.path.read_text())
            if content.pop("sha256") != content_hash(content) or content["key"] != self.key:
                return None
            refused = [(path, why) for path, why in content["refused"]]
            return Fit(content["accuracy"], content["num_test"], refused)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None

    def write(self, fit: Fit) -> None:
        if self.path is None:
            return
        content = {"key": self.key, **asdict(fit)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({**content, "sha256": content_hash(content)}, indent=1))
        except OSError as error:
            raise DataError(
                f"{self.path} could not be written ({reason(error)}); make room there, then the same command goes on"
            ) from error


def _result(
    fits: dict[tuple[str, Setting], Fit],
    share: float,
    epochs: int,
    drawn: LabelledImages,
    held_out: LabelledImages,
    num_classes: int,
) -> SemiResult:
    results = [
        SettingResult(
            setting, fits["all", setting].accuracy, fits["kept", setting].accuracy if len(held_out.ids) else None
        )
        for setting in SETTINGS
    ]
    tested = [result for result in results if result.accuracy is not None]
    if not tested:
        raise Diverged("fine-tuning diverged with every setting; use weights of an earlier checkpoint")
    # A setting must have an accuracy to report to be chosen. Of equals max takes the first, which learns slowest.
    chosen = [result for result in tested if result.held_out_accuracy is not None]
    return SemiResult(
        share=share,
        epochs=epochs,
        ids=tuple(drawn.ids.tolist()),
        held_out_ids=tuple(held_out.ids.tolist()),
        settings=tuple(results),
        published=max(tested, key=lambda result: cast(float, result.accuracy)),
        honest=max(chosen, key=lambda result: cast(float, result.held_out_accuracy), default=None),
        num_classes=num_classes,
        num_test=fits["all", tested[0].setting].num_test,
        refused=tuple(dict.fromkeys(entry for fit in fits.values() for entry in fit.refused)),
    )


def _report(progress: Progress, activity: str, before: int, total: int, done: int) -> None:
    progress(activity, before + done, total)


def _images_per_epoch(images: LabelledImages) -> int:
    batch_size = min(BATCH_SIZE, len(images.ids))
    return num_steps(len(images.ids), batch_size) * batch_size


def _rank_in_class(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the same label come before each [N]."""
    by_class = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[by_class], return_index=True, return_counts=True)
    ranks = np.empty(len(labels), np.int64)
    ranks[by_class] = np.arange(len(labels)) - np.repeat(starts, sizes)
    return ranks


def _chosen(images: LabelledImages, positions: NDArray[np.int64]) -> LabelledImages:
    positions = np.sort(positions)
    return LabelledImages(images.source, images.ids[positions], images.labels[positions])
