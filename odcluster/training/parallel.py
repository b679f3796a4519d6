"""The network on several ranks: gradients by DistributedDataParallel, batch-norm statistics, and the check that all
ranks agree.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from odcluster.errors import RankLost
from odcluster.ranks import Ranks

WORDS = 1 << 20
"""Numbers that are hashed at a time."""


def spread_over(ranks: Ranks, module: nn.Module) -> nn.Module:
    """The module whose gradients are the means over all ranks; with one rank, itself.

    Nothing is sent at the start: all ranks have made or read the same parameters, and buffers are the methods'
    business. Which parameters have a part in the loss changes from phase to phase.
    """
    if ranks.world_size == 1:
        return module
    with ranks.talking(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # there is nothing else yet
        return DistributedDataParallel(module, init_sync=False, broadcast_buffers=False, find_unused_parameters=True)


def synchronise_norms(ranks: Ranks, module: nn.Module, device: torch.device) -> nn.Module:
    """On GPUs, batch norm over the whole batch, as published; torch has it nowhere else."""
    if ranks.world_size > 1 and device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return module


@torch.no_grad()
def average_statistics(ranks: Ranks, module: nn.Module) -> None:
    """Where each rank normalises by its part of the batch (on CPUs), running statistics become the mean over ranks."""
    if ranks.world_size == 1:
        return
    found = [
        buffer
        for norm in module.modules()
        if isinstance(norm, nn.modules.batchnorm._BatchNorm)
        and not isinstance(norm, nn.SyncBatchNorm)
        and norm.training
        for buffer in (norm.running_mean, norm.running_var)
        if buffer is not None
    ]
    if not found:
        return
    flat = ranks.sum(torch.cat([buffer.flatten() for buffer in found])) / ranks.world_size
    for buffer, values in zip(found, flat.split([buffer.numel() for buffer in found]), strict=True):
        buffer.copy_(values.view_as(buffer))


def check_agreement(ranks: Ranks, module: nn.Module, step: int) -> None:
    """Raise, on all ranks, if they have come to differ in weights, labels or centroids."""
    if ranks.world_size == 1:
        return
    kept = {name: tensor for name, tensor in module.state_dict().items() if not name.endswith((".rows", ".sums"))}
    mine = [cheap_hash(tensor) for tensor in kept.values()]
    said = ranks.share(mine)
    for name, *hashes in zip(kept, *said, strict=True):
        if len(set(hashes)) > 1:
            others = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
            raise RankLost(
                f"at step {step}, {name} of rank {others[0]} differs from that of rank 0, which must not happen (other "
                "versions, a faulty machine?); `odcluster resume` goes on from the last checkpoint, written before"
            )


def cheap_hash(tensor: Tensor) -> int:
    """A number that differs if any bit does, but for one chance in 2^32 or so; most of it is computed on the device."""
    flat = tensor.detach().contiguous().flatten()
    flat = flat.view(torch.uint8) if flat.element_size() < 4 else flat.view(torch.int32)
    found = 0
    for part in flat.split(WORDS):
        places = torch.arange(1, len(part) + 1, device=part.device)
        mixed = (part.long() + places) * (2 * places + 0x9E3779B1)
        mixed = mixed ^ (mixed >> 29)
        found = (found * 1_000_003 + int((mixed * 0x5851F42D).sum())) % (1 << 61)
    return found
