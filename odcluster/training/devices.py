"""The machine: device, precision, the random seed of a step, and the wish to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch

from odcluster.data.randomness import Purpose, uniforms
from odcluster.errors import Interrupted, UserError
from odcluster.ranks import local_ranks, world_size

ECHO_SECONDS = 5.0


def choose_device(name: str) -> torch.device:
    """The device of that name, or the best there is for `auto`; with several ranks on a machine, each its own GPU."""
    device = named_device(name)
    if device.type != "cuda" or world_size() == 1:
        return device
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.index is not None or local_ranks() > there:
        raise UserError(
            f"{local_ranks()} ranks on this machine need as many GPUs, and there are {there}: use --nproc-per-node "
            f"{there} and --device cuda (each rank takes its own), or --device cpu"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def named_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"the device {name!r} cannot be used here; `odcluster info` lists those that can") from error
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes bfloat16 products natively (emulation would be slower than float32)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return "avx512_bf16" in cpu_flags() or "amx_bf16" in cpu_flags()
    return False


def cpu_flags() -> set[str]:
    """Instruction sets of the CPU, as Linux lists them; empty elsewhere."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(
                (set(line.split(":")[1].split()) for line in file if line.startswith(("flags", "Features"))),
                set(),
            )
    except OSError:
        return set()


def seed_torch(seed: int, purpose: Purpose, number: int = 0, rank: int = 0) -> None:
    """Seed torch (initial weights, dropout) as a function of the step: nothing about random states needs saving."""
    high, low = uniforms(seed, purpose, 0, np.array([number]), rank, 2)[0]
    torch.manual_seed((int(high * 2**31) << 31) | int(low * 2**31))


class StopFlag:
    """Ctrl-C, SIGTERM and SIGUSR1 only set a flag, which every long loop polls. A second Ctrl-C stops at once."""

    SIGNALS = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])

    def __init__(self) -> None:
        self.wanted = False
        self._first = 0.0  # when the first Ctrl-C came
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be handled
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._set)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _set(self, number: int, frame: FrameType | None) -> None:
        # torchrun passes a Ctrl-C on to its processes, which the terminal has told already: not a second one.
        echo = world_size() > 1 and time.monotonic() - self._first < ECHO_SECONDS
        if number == signal.SIGINT and self._first and not echo:
            signal.default_int_handler(number, frame)
        if number == signal.SIGINT:
            self._first = self._first or time.monotonic()
        self.wanted = True

    def poll(self) -> None:
        """Raise Interrupted if a stop is wanted."""
        if self.wanted:
            raise Interrupted("stopped as asked")
