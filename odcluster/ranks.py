"""Several processes as one run: who this one is, and the few things they say to each other.

Under torchrun, `joined` makes a `Ranks` of torch.distributed (gloo between CPUs, NCCL between GPUs); alone, every
exchange is with itself and there is no process group. All communication but that of the network's gradients
(DistributedDataParallel) goes through here, and is counted.

Promises: all ranks get the same bits from an exchange; nothing that is received can run code (tensors and JSON only); a
rank that dies, leaves or hangs ends the others with a sentence that names it. Each rank tells a shared store once a
second that it lives and how many exchanges it has begun, which is how the others know whom they wait for. Ranks that
wait for a disk wait in `meet`, as long as the others live; all other waits end after `TIMEOUT` seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from odcluster import errors
from odcluster.errors import RankLost, UserError

START_TIMEOUT = 300.0
TIMEOUT = 120.0
"""Seconds without a word; ODCLUSTER_TIMEOUT in the environment replaces both."""
BEAT_SECONDS = 1.0
SILENCE = 6.0
"""A rank that has not said for so long that it lives is taken for dead where an exchange with it has failed."""

CPU = torch.device("cpu")

T = TypeVar("T")


def world_size() -> int:
    """How many processes the launcher (torchrun) has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks() -> int:
    """How many of them share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world_size() > 1 else 1


class Ranks:
    """This process among `world_size`; with the defaults, alone."""

    def __init__(self, rank: int = 0, world_size: int = 1, pulse: Pulse | None = None) -> None:
        self.rank, self.world_size, self._pulse = rank, world_size, pulse
        self.sent = 0
        """Bytes this rank has put on the wire, as the usual ring algorithms do."""
        self._meetings = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and speaks to people."""
        return self.rank == 0

    def own(self, count: int, rank: int | None = None) -> slice:
        """Which of ids 0 .. count - 1 belong to this rank (or another): a block; sizes differ by at most one."""
        rank = self.rank if rank is None else rank
        return slice(count * rank // self.world_size, count * (rank + 1) // self.world_size)

    def sizes(self, count: int) -> list[int]:
        """How many of `count` ids each rank owns."""
        blocks = (self.own(count, rank) for rank in range(self.world_size))
        return [block.stop - block.start for block in blocks]

    def own_batches(self, count: int, batch_size: int, rank: int | None = None) -> slice:
        """A block of ids as `own`, but of whole batches: each then holds the same ids for any number of ranks."""
        batches = self.own(-(-count // batch_size), rank)
        return slice(min(count, batches.start * batch_size), min(count, batches.stop * batch_size))

    # Exchanges ------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place where there are several."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The largest value of any rank, element by element, in place where there are several."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return flag if self.world_size == 1 else bool(self.max(torch.tensor([int(flag)])))

    def total(self, number: int) -> int:
        """The sum of a number over all ranks."""
        return number if self.world_size == 1 else int(self.sum(torch.tensor([number])))

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """The tensors of all ranks, of the given lengths, one behind the other."""
        if self.world_size == 1:
            return tensor
        assert len(tensor) == sizes[self.rank], (len(tensor), sizes)
        sent = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        sent[: len(tensor)] = tensor
        received = [torch.empty_like(sent) for _ in sizes]
        with self.talking():
            dist.all_gather(received, sent)
        self.sent += sent.nbytes * (self.world_size - 1)
        return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])

    def gather_blocks(self, tensor: Tensor, count: int) -> Tensor:
        """What each rank knows of its own ids, as a tensor over all `count` ids."""
        return self.gather(tensor, self.sizes(count))

    def send_from(self, source: int, tensor: Tensor) -> Tensor:
        """The tensor of rank `source`, on all ranks; in place on the others."""
        if self.world_size > 1:
            with self.talking():
                dist.broadcast(tensor, source)
            self.sent += tensor.nbytes
        return tensor

    def share(self, value: Any) -> list[Any]:
        """What each rank has to say, in the order of ranks; anything that JSON knows."""
        if self.world_size == 1:
            return [value]
        words = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(words)]), [1] * self.world_size).tolist()
        received = self.gather(words, lengths).split(lengths)
        return [json.loads(bytes(part.tolist())) for part in received]

    def first(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides, by JSON, however long that takes; an error of a user there is one everywhere."""
        if self.world_size == 1:
            return decide()
        answer: dict[str, Any] = {}
        failure: UserError | None = None
        if self.is_first:
            try:
                answer = {"decision": decide()}
            except UserError as error:
                failure, answer = error, {"error": type(error).__name__, "why": str(error)}
        self.meet()
        answer = self.share(answer)[0]
        if failure is not None:
            raise failure
        if "error" in answer:
            raise getattr(errors, answer["error"], UserError)(answer["why"])
        return answer["decision"]

    def meet(self) -> None:
        """Wait for all ranks, however long, as long as they live: where some write files and others do not."""
        if self._pulse is not None:
            self._meetings += 1
            self._pulse.meet(f"meeting {self._meetings}", self.world_size)

    def _reduced(self, tensor: Tensor, how: Any) -> Tensor:
        if self.world_size == 1:
            return tensor
        with self.talking():
            dist.all_reduce(tensor, how)
        self.sent += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        return tensor

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Around an exchange: when it fails, the error names the rank that is missing."""
        if self._pulse is None:
            yield
            return
        self._pulse.exchanges += 1
        try:
            yield
        except RuntimeError as error:  # of torch.distributed: connection lost, timeout
            if (sentence := self._pulse.explain(error)) is None:
                raise
            raise RankLost(sentence) from error


SINGLE = Ranks()
"""A process of its own."""


class Pulse(threading.Thread):
    """Tells the store that this rank lives, and listens to the others."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float, exit_when_silent: bool) -> None:
        super().__init__(daemon=True, name="pulse")
        self.exchanges = 0
        self._store, self._rank, self._timeout, self._exit = store, rank, timeout, exit_when_silent
        self._others = [other for other in range(world_size) if other != rank]
        self._host, self._beats = socket.gethostname(), 0
        self._heard: dict[int, dict[str, Any]] = {}
        self._when: dict[int, float] = {}
        self._left: dict[str, Any] | None = None
        self._stopped = threading.Event()
        self._mutex = threading.Lock()
        self._beat()

    def begin(self) -> None:
        """Listen, now that all others have said a first word."""
        self._listen()
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            try:
                self._beat()
                self._listen()
            except (RuntimeError, OSError):  # the store is gone: the next exchange fails and says so
                return
            if self._exit and (silent := self._silent(self._timeout + 10)):
                # NCCL would wait, then abort without a word.
                print(f"odcluster: {self._named(silent)}", file=sys.stderr, flush=True)
                os._exit(RankLost.exit_code)

    def leave(self, reason: str | None) -> None:
        """The last word of this rank: why it leaves, or None when all is done."""
        self._stopped.set()
        self._left = {"reason": reason}
        with contextlib.suppress(RuntimeError, OSError):  # the store may be gone
            self._beat()

    def meet(self, key: str, count: int) -> None:
        try:
            self._store.add(key, 1)
            pause = 0.001
            while self._store.add(key, 0) < count:
                if (failed := self._failed()) is not None:
                    raise RankLost(failed)
                if silent := self._silent(self._timeout):
                    raise RankLost(self._named(silent))
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        except RuntimeError as error:
            raise RankLost(self.explain(error) or str(error)) from error

    def explain(self, error: Exception) -> str | None:
        """Who is to blame for a failed exchange; None where it was not an exchange that failed."""
        try:
            self._listen()
            before = {rank: heard["beat"] for rank, heard in self._heard.items()}
            silent, began = self._others, time.monotonic()
            while silent and self._failed() is None and time.monotonic() - began < SILENCE:
                time.sleep(BEAT_SECONDS / 4)
                self._listen()
                silent = [r for r in silent if self._heard[r]["beat"] == before[r] and self._heard[r]["left"] is None]
        except (RuntimeError, OSError):
            return "the machine of rank 0 does not answer any more; start again with `odcluster resume`"
        if (failed := self._failed()) is not None:
            return failed
        gone = [rank for rank, heard in self._heard.items() if heard["left"] is not None]
        if silent or gone:
            return self._named(silent or gone)
        behind = [rank for rank, heard in self._heard.items() if heard["exchanges"] < self.exchanges]
        words = str(error).lower()
        if behind and any(word in words for word in ("time", "connect", "peer", "socket")):
            hosts = ", ".join(f"rank {rank} on {self._heard[rank]['host']}" for rank in behind)
            return f"waited {self._timeout:.0f} s for {hosts}, which lives but does not go on; look what it waits for"
        return None

    def _failed(self) -> str | None:
        """The reason that another rank gave for leaving; the first cause where several did."""
        left = [(rank, heard["left"]["reason"]) for rank, heard in self._heard.items() if heard["left"] is not None]
        given = [(rank, reason) for rank, reason in left if reason is not None]
        if not given:
            return None
        for _, reason in given:
            if reason.startswith("rank "):  # it lost another: the same cause as ours
                return reason
        return f"rank {given[0][0]} stopped: {given[0][1]}"

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [r for r in self._others if now - self._when[r] > seconds and self._heard[r]["left"] is None]

    def _named(self, ranks: list[int]) -> str:
        named = ", ".join(f"rank {rank} (on {self._heard[rank]['host']})" for rank in ranks)
        return f"{named} stopped answering; what was saved is intact, `odcluster resume` goes on from there"

    def _beat(self) -> None:
        with self._mutex:  # a beat of the thread must not follow the last word
            self._beats += 1
            word = {"beat": self._beats, "exchanges": self.exchanges, "host": self._host, "left": self._left}
            self._store.set(f"pulse {self._rank}", json.dumps(word))

    def _listen(self) -> None:
        for rank, word in zip(self._others, self._store.multi_get([f"pulse {r}" for r in self._others]), strict=True):
            heard = json.loads(word)
            if heard["beat"] != self._heard.get(rank, {}).get("beat"):
                self._heard[rank], self._when[rank] = heard, time.monotonic()


JOINED = itertools.count()
_LEFT: list[Any] = []
"""Gloo's part of groups that were left. Its threads are joined when the last reference goes. Were that the reference of
DistributedDataParallel, which keeps Python's lock meanwhile, a thread that needs the lock to let go of its last tensor
would never end (seen in one of fifteen stops on a busy machine); where it is one of Python's, the lock is free.
"""
atexit.register(_LEFT.clear)


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """All processes that the launcher started, as one; alone without a launcher. Waits until all are there."""
    if world_size() == 1:
        yield SINGLE
        return
    _LEFT.clear()
    limit = os.environ.get("ODCLUSTER_TIMEOUT")
    start, run = (float(limit),) * 2 if limit else (START_TIMEOUT, TIMEOUT)
    on_gpus = device.type == "cuda"
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=start)))
        own_client = store.clone()  # the thread waits for no one
        # A process may join several times, and what an earlier attempt of torchrun left in the store is not for us.
        name = f"odcluster {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {next(JOINED)}"
        store, own_client = dist.PrefixStore(name, store), dist.PrefixStore(name, own_client)
        pulse = Pulse(own_client, rank, world, run, exit_when_silent=on_gpus)
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=run),
            device_id=device if on_gpus else None,
        )  # fmt: skip
        pulse.begin()
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"the {world_size()} ranks did not find each other within {start:.0f} s ({str(error).splitlines()[0]}); "
            "start the same command on every machine, with the same --rdzv-endpoint"
        ) from error
    reason: str | None = None
    lost = False
    try:
        yield Ranks(rank, world, pulse)
    except UserError as error:
        reason, lost = str(error), isinstance(error, RankLost)
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        pulse.leave(reason)
        _LEFT.append(dist.distributed_c10d._get_default_group()._get_backend(CPU))
        if not lost:  # else it might wait for those that are gone
            dist.destroy_process_group()
