"""Checkpoints of several ranks: each writes and reads the rows of the samples memory that it owns.

A checkpoint of several ranks has, beside the files of one (without rows and sums), a file memory-0003-of-0008 of each;
one state.json, written by rank 0 when all is on disk, holds sizes and hashes of all. The run directory must lie on a
disk that all ranks share. A run may go on with another number of ranks: rows go to their new owners, sums, of which
only the total over all ranks counts, to any of them. With one rank, checkpoints are those of checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from odcluster.errors import DataError
from odcluster.ranks import SINGLE, Ranks
from odcluster.training import checkpoint
from odcluster.training.checkpoint import Checkpoint, NotSaved, file_entry, flush, reason

ROWS, SUMS = "samples.rows", "centroids.sums"
"""What each rank has a part of; all other tensors are the same on all ranks."""
LABELS = "samples.labels"


def save(
    directory: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], ranks: Ranks
) -> Path:
    """Write one checkpoint, all ranks together; raises NotSaved on all where any of them fails."""
    if ranks.world_size == 1:
        return checkpoint.save(directory, step, tensors, state)
    shard = {name: tensors["memory"][name] for name in (ROWS, SUMS) if name in tensors["memory"]}
    common = {
        file: {name: tensor for name, tensor in group.items() if name not in shard} for file, group in tensors.items()
    }
    asked = False

    def collect(prepared: Path | None) -> dict[str, Any]:
        """The files of all ranks in the folder that rank 0 has prepared."""
        nonlocal asked
        asked = True
        ranks.meet()
        folder = ranks.share(str(prepared) if prepared else None)[0]
        return write_shards(Path(folder), shard, ranks) if folder else {}

    outcome: dict[str, str] = {}
    try:
        if not ranks.is_first:
            collect(None)
        else:
            outcome = {"path": str(checkpoint.save(directory, step, common, state, collect))}
    except NotSaved as error:
        outcome = {"failed": str(error)}
    except OSError:  # rank 0 has heard of it too, and says why
        pass
    if ranks.is_first and not asked:  # nothing to write, or no place to write it to
        collect(None)
    ranks.meet()
    outcome = ranks.share(outcome)[0]
    if "failed" in outcome:
        raise NotSaved(outcome["failed"])
    return Path(outcome["path"])


def write_shards(folder: Path, shard: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Any]:
    """This rank's file; returns the entries of all ranks' files, or raises OSError on all."""
    if not ranks.any(bool(shard)):
        return {}
    answer: dict[str, Any] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / shard_name(ranks.rank, ranks.world_size)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}, path)
        flush(path)
        answer = {"name": path.name, "entry": file_entry(path)}
    except (OSError, SafetensorError) as error:
        answer = {"failed": f"rank {ranks.rank}: {reason(error)}"}
    ranks.meet()
    answers = ranks.share(answer)
    if failed := [answer["failed"] for answer in answers if "failed" in answer]:
        raise OSError(failed[0])
    files = {answer["name"]: answer["entry"] for answer in answers}
    if ranks.is_first and (missing := [name for name in files if not (folder / name).is_file()]):
        raise OSError(f"{missing[0]} is not there: the run directory must be on a disk that all ranks share")
    return files


def shard_name(rank: int, world_size: int) -> str:
    return f"memory-{rank:04d}-of-{world_size:04d}.safetensors"


def find(directory: Path, warn: Callable[[str], None], ranks: Ranks) -> Checkpoint | None:
    """The newest checkpoint that is valid for all ranks; see checkpoint.find."""
    names = ranks.first(lambda: [path.name for path in checkpoint.candidates(directory)])
    return checkpoint.find(directory, warn, [directory / name for name in names], lambda path: load(path, ranks))


def load(path: Path, ranks: Ranks) -> Checkpoint:
    """Read a checkpoint, of the rows only those of this rank. Each rank verifies some of the files."""
    problem, state = None, {}
    try:
        state = checkpoint.verify(path, slice(ranks.rank, None, ranks.world_size))
    except checkpoint.OtherFormat:
        raise
    except DataError as error:
        problem = str(error)
    ranks.meet()
    if problems := [found for found in ranks.share(problem) if found]:
        raise DataError(problems[0])
    tensors = {}
    for name in state["files"]:
        if not name.startswith("memory"):
            tensors[Path(name).stem] = load_file(path / name)
    tensors["memory"] = load_memory(path, state, ranks)
    return Checkpoint(path, state, tensors)


def load_memory(path: Path, state: Mapping[str, Any], ranks: Ranks = SINGLE) -> dict[str, Tensor]:
    """The memories as this rank needs them, whatever the number of ranks that wrote them."""
    shards = sorted(name for name in state["files"] if name.startswith("memory-"))
    with safe_open(path / "memory.safetensors", "pt") as file:
        names = list(file.keys())
        memory = {name: file.get_tensor(name) for name in names if name not in (ROWS, SUMS)}
    if not shards and ROWS not in names:
        return memory
    writers, count = shards or ["memory.safetensors"], len(memory[LABELS])
    wanted, rows, sums = ranks.own(count), [], []
    for writer, name in enumerate(writers):
        block = Ranks(writer, len(writers)).own(count)
        first, last = max(wanted.start, block.start), min(wanted.stop, block.stop)
        with safe_open(path / name, "pt") as file:
            if first < last:
                rows.append(file.get_slice(ROWS)[first - block.start : last - block.start])
            if writer % ranks.world_size == ranks.rank:
                sums.append(file.get_tensor(SUMS))
            elif not sums and writer == len(writers) - 1:  # more ranks than files
                sums.append(torch.zeros_like(file.get_tensor(SUMS)))
    memory[ROWS] = rows[0] if len(rows) == 1 else torch.cat(rows)
    memory[SUMS] = sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0)
    return memory
