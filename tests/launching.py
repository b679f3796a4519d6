"""Several ranks on this machine: forked, which takes a second, or started by torchrun, which takes ten."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import rank_jobs
import torch.distributed as dist
from forking import Child

from odcluster.training import checkpoint

JOBS = Path(rank_jobs.__file__)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PATIENCE = 300.0


def environment(**more: str) -> dict[str, str]:
    paths = [str(JOBS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "ODCLUSTER_TIMEOUT": "60",
        **more,
    }


def launch(num_ranks: int, *words: str, options: tuple[str, ...] = (), **more: str) -> subprocess.CompletedProcess[str]:
    """A job of rank_jobs.py under torchrun."""
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={num_ranks}", *options, str(JOBS), *words]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=PATIENCE)


@contextmanager
def forked(folder: Path, num_ranks: int, *words: str, **more: str) -> Iterator[list[Child]]:
    """A job of rank_jobs.py on ranks that are forked and told what torchrun tells; this process holds the store that
    torchrun's agent would hold. What is still running at the end is killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "ODCLUSTER_TIMEOUT": 60,
        **more,
    }

    def work(rank: int) -> None:
        told = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in told.items()})
        getattr(rank_jobs, words[0])(*words[1:])

    children: list[Child] = []
    try:
        for rank in range(num_ranks):
            (folder / f"rank{rank}.txt").unlink(missing_ok=True)
            children.append(Child(partial(work, rank), folder / f"rank{rank}.txt"))
        yield children
    finally:
        for child in children:
            child.end()


def together(folder: Path, num_ranks: int, *words: str, **more: str) -> list[Child]:
    """The same, waited for."""
    with forked(folder, num_ranks, *words, **more) as children:
        for child in children:
            child.wait(PATIENCE)
    return children


def succeed(folder: Path, num_ranks: int, *words: str) -> str:
    """The same, which must end well on all ranks; returns what they said."""
    children = together(folder, num_ranks, *words)
    said = "".join(child.said() for child in children)
    assert [child.code for child in children] == [0] * num_ranks, said[-6000:]
    return said


def hashes(run: Path) -> dict[str, str]:
    """Of every file of the newest checkpoint, by name."""
    newest = checkpoint.candidates(run / "checkpoints")[0]
    files = checkpoint.read_state(newest)["files"].items()
    return {"step": newest.name, **{name: entry["sha256"] for name, entry in files}}
