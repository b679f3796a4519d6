"""Starts jobs of rank_jobs.py under torchrun, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from odcluster.training import checkpoint

JOBS = Path(__file__).parent / "rank_jobs.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment(**more: str) -> dict[str, str]:
    paths = [str(JOBS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "ODCLUSTER_TIMEOUT": "60",
        **more,
    }


def launch(
    num_ranks: int, *words: str, options: tuple[str, ...] = (), seconds: float = 300, **more: str
) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={num_ranks}", *options, str(JOBS), *words]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=seconds)


def launched(num_ranks: int, *words: str) -> str:
    done = launch(num_ranks, *words)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def hashes(run: Path) -> dict[str, str]:
    """Of every file of the newest checkpoint, by name."""
    newest = checkpoint.candidates(run / "checkpoints")[0]
    files = checkpoint.read_state(newest)["files"].items()
    return {"step": newest.name, **{name: entry["sha256"] for name, entry in files}}
