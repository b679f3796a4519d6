"""Looks at all images outside the training steps: features of every image, and batch-norm calibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from odcluster.data.loading import Batches, RawBatch
from odcluster.data.order import batch_ids, epoch_order
from odcluster.errors import DataError
from odcluster.training.parallel import average_statistics

if TYPE_CHECKING:
    from odcluster.training.trainer import Trainer

CHUNK = 256
"""Images per forward pass of an extraction; without gradients this fits wherever a training batch does."""


def to_network(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 [..., H, W, 3] to normalised float [..., 3, H, W] on the device of `mean`; channels stay last in memory.

    Features of a frozen backbone, which are floats already, only move to the device.
    """
    if images.is_floating_point():
        return images.to(mean.device, non_blocking=True).float()
    moved = images.to(mean.device, non_blocking=True).float()
    return ((moved / 255 - mean) / std).movedim(-1, -3)


@torch.no_grad()
def extract(
    embed: Callable[[Tensor], Tensor],
    loader: Batches,
    ids: NDArray[np.int64],
    device: torch.device,
    notice: Callable[[RawBatch, int], None],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`embed` of the evaluation view of each image of sorted ids: rows [n, D] float32, and which could be used [n].

    The rows are those of `out`, if given; they are 0 where the image could not be used. `notice` receives each batch
    and how many images are done: to name the refused, to show progress, to stop by raising.
    """
    mean, std = loader.normalisation_on(device)
    rows = None if out is None else out.zero_()
    seen = torch.zeros(len(ids), dtype=torch.bool, device=device)
    done = 0
    for raw in loader.evaluation(ids, CHUNK):
        done += len(raw.ids) + len(raw.refused)
        notice(raw, done)
        if len(raw.ids) == 0:
            continue
        part = embed(to_network(raw.images[0], mean, std)).float()
        if rows is None:
            rows = part.new_zeros((len(ids), part.shape[1]))
        places = torch.from_numpy(np.searchsorted(ids, raw.ids.numpy())).to(device)
        rows[places], seen[places] = part, True
    if rows is None or not bool(seen.any()):
        raise DataError("none of the images can be used; are these images?")
    return rows, seen


class DataSurvey:
    """See methods.interface.Survey."""

    def __init__(self, trainer: Trainer, epoch: int) -> None:
        self._trainer, self._epoch = trainer, epoch

    def poll(self, doing: str, done: int, total: int) -> None:
        self._trainer.poll()
        self._trainer.console.progress(doing, done, total)

    def features(self, embed: Callable[[Tensor], Tensor], out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        trainer = self._trainer
        trainer.module.eval()
        num_images, ranks = len(trainer.manifest), trainer.ranks
        own = ranks.own(num_images)
        rounds = -(-max(ranks.sizes(num_images)) // CHUNK)  # of all ranks alike: none runs ahead of the others

        def notice(raw: RawBatch, done: int) -> None:
            nonlocal rounds
            rounds -= 1
            trainer.exchange(raw)
            self.poll("features of all images", min(done * ranks.world_size, num_images), num_images)

        with trainer.autocast:
            rows, seen = extract(embed, trainer.loader, np.arange(own.start, own.stop), trainer.device, notice, out)
        while rounds > 0:
            notice(RawBatch(torch.empty(0, dtype=torch.int64), torch.empty(0), []), own.stop - own.start)
        return rows, seen

    @torch.no_grad()
    def calibrate(self, network: nn.Module, embed: Callable[[Tensor], Tensor], num_batches: int) -> None:
        """Statistics of batch norm as the plain average over training batches; put back if interrupted.

        Frozen stages, which stay in evaluation mode, keep theirs.
        """
        trainer = self._trainer
        trainer.module.eval()  # only what is calibrated may change
        network.train()
        norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        if not norms or num_batches == 0:
            return
        before = {
            key: value.clone()
            for key, value in network.state_dict().items()
            if "running_" in key or "num_batches" in key
        }
        momenta = [norm.momentum for norm in norms]
        order = epoch_order(trainer.config.seed, self._epoch, len(trainer.manifest))
        num_batches = min(num_batches, trainer.schedule.steps_per_epoch)
        batches = [trainer.own_part(batch_ids(order, at, trainer.batch_size)) for at in range(num_batches)]
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative average
            for done, raw in enumerate(trainer.loader.training(self._epoch, batches)):
                if min(map(len, trainer.exchange(raw))) > 1:
                    with trainer.autocast:
                        embed(to_network(raw.images, trainer.mean, trainer.std).flatten(0, 1))
                self.poll("batch-norm calibration", done + 1, num_batches)
            average_statistics(trainer.ranks, network)
        except BaseException:
            network.load_state_dict(before, strict=False)
            raise
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
