"""What the trainer and a method say to each other.

A method is an nn.Module with the functions of `Method`; all its state is parameters and persistent buffers, so that a
checkpoint holds it all. The trainer owns time, optimiser, signals and disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from odcluster.ranks import SINGLE, Ranks


@dataclass(frozen=True)
class Batch:
    """Images of one step, normalised and on the device; across ranks, this rank's part of them."""

    ids: Tensor  # [B], which images
    images: Tensor  # [V, B, 3, H, W], V views of each
    epoch: int
    step: int
    everyone: Tensor | None = None
    """The ids of all ranks, in their order; None: there is only this one."""
    sizes: tuple[int, ...] = ()
    """How many of them each rank has."""
    ranks: Ranks = SINGLE

    @property
    def whole_ids(self) -> Tensor:
        """The ids of the whole batch."""
        return self.ids if self.everyone is None else self.everyone

    def places(self, num_views: int) -> Tensor:
        """Places of this rank's views [V B] among all views of the whole batch."""
        if self.everyone is None:
            return torch.arange(num_views * len(self.ids), device=self.ids.device)
        within = torch.arange(len(self.ids), device=self.ids.device) + sum(self.sizes[: self.ranks.rank])
        return (torch.arange(num_views, device=self.ids.device)[:, None] * len(self.everyone) + within).flatten()

    def fair(self, mean: Tensor) -> Tensor:
        """A mean over this rank's images, weighted so that the mean of all ranks' is that over the whole batch."""
        if self.everyone is None:
            return mean
        return mean * (len(self.ids) * self.ranks.world_size / len(self.everyone))

    def mean_of_all(self, mean: Tensor) -> Tensor:
        """The mean over the whole batch of what this rank knows for its images."""
        if self.everyone is None:
            return mean
        return self.ranks.sum(self.fair(mean.detach())) / self.ranks.world_size


@dataclass(frozen=True)
class Outcome:
    """The loss to minimise, and the detached features that the memory needs (None: no memory in this phase).

    The mean of all ranks' losses is the loss of the whole batch.
    """

    loss: Tensor
    features: Tensor | None = None  # [B, D]


@dataclass(frozen=True)
class Phase:
    """A stretch of epochs with its own learning rate curve, where the optimiser starts afresh; or with `continues`, one
    that goes on with the curve and the optimiser of the phase before.
    """

    name: str
    epochs: int
    lr: float
    weight_decay: float
    schedule: str
    warmup_epochs: float = 0.0
    continues: bool = False


class Survey(Protocol):
    """A look at all images outside the training steps, provided by the trainer."""

    def features(self, embed: Callable[[Tensor], Tensor], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Evaluation view of every image through `embed`, in evaluation mode: rows [N, D], and which were read [N].

        The rows are those of `out`, if given: a table of features may be most of the memory there is. Across ranks,
        all of this is about the images that the rank owns.
        """

    def calibrate(self, network: nn.Module, embed: Callable[[Tensor], Tensor], num_batches: int) -> None:
        """Training views through `embed` without gradient, so that the batch-norm statistics of `network` fit."""

    def poll(self, doing: str, done: int, total: int) -> None:
        """Progress for people; raises when the user asked to stop."""


class Method(Protocol):
    """See methods/odc.py for the one that matters most."""

    backbone: nn.Module

    def phases(self) -> list[Phase]: ...

    def begin_epoch(self, epoch: int, survey: Survey) -> Mapping[str, float]: ...

    def epoch_order(self, epoch: int) -> NDArray[np.int64] | None:
        """The ids of an epoch in order, where the method has its own way to draw them; None: the trainer's."""

    def renewed(self) -> Iterable[nn.Parameter]:
        """Parameters that begin_epoch starts afresh: the optimiser forgets what it knew of them."""

    def forward(self, batch: Batch) -> Outcome: ...

    def after_step(self, batch: Batch, outcome: Outcome) -> Mapping[str, Tensor | float]: ...

    def end_epoch(self, epoch: int) -> None: ...

    def finish(self, survey: Survey) -> None:
        """After the last step; done again if the run was killed before its last checkpoint."""

    def complete(self, survey: Survey) -> Mapping[str, float]:
        """Images were added or removed: find out what is known of every image but not of the new ones."""

    def health(self) -> Mapping[str, float]: ...
