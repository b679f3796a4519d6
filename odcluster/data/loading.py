"""Batches: the views of the images of a step, made by worker processes, the same whatever their number.

A worker receives the ids of a whole batch and returns uint8 pixels; images that cannot be used are left out of the
batch and returned by id with the reason. Nothing here is random: what a batch holds is a function of (seed, epoch,
ids).
"""

from __future__ import annotations

import ctypes
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from odcluster.config import Augmentation
from odcluster.data.images import decode, image_size
from odcluster.data.sources import Source
from odcluster.data.views import (
    Box,
    ViewDraws,
    apply_view,
    crop_scale_hint,
    draw_views,
    evaluation_box,
    evaluation_view,
    whole_side,
    whole_view,
)
from odcluster.errors import DataError, ImageRefused

TIMEOUT_SECONDS = 180.0
"""Workers that deliver nothing for this long are taken for hung."""
POLL_SECONDS = 1.0
"""While a batch is waited for: how often to look whether the workers live and whether a stop is wanted."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class RawBatch:
    """Pixels as they come from the workers."""

    ids: Tensor  # [B] int64, without the refused
    images: Tensor  # [V, B, size, size, 3] uint8
    refused: list[tuple[int, str]]

    def pin_memory(self) -> RawBatch:
        """The same in page-locked memory, from which a GPU copies by itself; torch asks for it by this name."""
        return RawBatch(self.ids.pin_memory(), self.images.pin_memory(), self.refused)


@dataclass(frozen=True)
class Request:
    """The images of one batch; epoch None asks for the evaluation view, or for that of the `whole` image."""

    ids: Ids
    epoch: int | None
    whole: bool = False


class Cache:
    """Decoded images in memory, shared with forked workers.

    Holds only images that no view would shrink while decoding (see views.crop_scale_hint), so that a cached image and a
    freshly decoded one give the same bits.
    """

    def __init__(self, source: Source, size: int, max_bytes: int) -> None:
        self.images: list[NDArray[np.uint8] | None] = [None] * len(source)
        self.num_bytes = 0
        self._source, self._size, self._max_bytes = source, size, max_bytes

    def fill(self, notice: Callable[[int], object]) -> None:
        """Decode all images, several at a time; `notice` hears how many are done and may stop by raising."""
        with ThreadPoolExecutor() as pool:  # decoders release the interpreter lock
            for start in range(0, len(self.images), 256):
                ids = range(start, min(start + 256, len(self.images)))
                for i, image in zip(ids, pool.map(self._decoded, ids), strict=True):
                    if image is None:
                        continue
                    if self.num_bytes + image.nbytes > self._max_bytes:
                        notice(len(self.images))
                        return
                    self.images[i] = image
                    self.num_bytes += image.nbytes
                notice(ids.stop)

    def _decoded(self, i: int) -> NDArray[np.uint8] | None:
        try:
            image = self._source.image(i)
        except ImageRefused:
            return None  # whoever needs it will be told
        return image if min(image.shape[:2]) < 2 * self._size else None


class Views(Dataset[RawBatch]):
    """A batch of views for a request. Lives in the workers."""

    def __init__(
        self, source: Source, augmentation: Augmentation, image_size: int, seed: int, cache: Cache | None
    ) -> None:
        self.source, self.augmentation, self.image_size, self.seed, self.cache = (
            source,
            augmentation,
            image_size,
            seed,
            cache,
        )

    def __getitem__(self, request: Request) -> RawBatch:
        training = request.epoch is not None
        size = (self.augmentation.crop_size or self.image_size) if training else self.image_size
        num_views = self.augmentation.num_views if training else 1
        draws = [
            draw_views(self.augmentation, self.seed, request.epoch, request.ids, view)
            for view in range(num_views)
            if request.epoch is not None
        ]
        images = np.empty((num_views, len(request.ids), size, size, 3), np.uint8)
        kept: list[int] = []
        refused: list[tuple[int, str]] = []
        for row, i in enumerate(request.ids.tolist()):
            try:
                if training:
                    views = self._training_views(i, row, draws, size)
                else:
                    views = [self._whole_view(i, size) if request.whole else self._evaluation_view(i, size)]
            except ImageRefused as error:
                refused.append((i, str(error)))
                continue
            images[:, len(kept)] = views
            kept.append(i)
        return RawBatch(torch.tensor(kept, dtype=torch.int64), torch.from_numpy(images[:, : len(kept)]), refused)

    def _training_views(self, i: int, row: int, draws: Sequence[ViewDraws], size: int) -> list[NDArray[np.uint8]]:
        stored = self._stored(i)
        height, width = image_size(stored) if isinstance(stored, bytes) else stored.shape[:2]
        decoded: dict[int, NDArray[np.uint8]] = {}
        views = []
        for draw in draws:
            parameters = draw.parameters(row, height, width)
            if isinstance(stored, bytes):
                factor = crop_scale_hint(parameters.box, size)
                if factor not in decoded:
                    decoded[factor] = decode(stored, -(-min(height, width) // factor) if factor > 1 else 0)
                image = decoded[factor]
            else:
                image = stored
            views.append(apply_view(image, parameters, size))
        return views

    def _evaluation_view(self, i: int, size: int) -> NDArray[np.uint8]:
        stored = self._stored(i)
        if not isinstance(stored, bytes):
            return evaluation_view(stored, size)
        height, width = image_size(stored)
        factor = crop_scale_hint(evaluation_box(height, width, size), size)
        return evaluation_view(decode(stored, -(-min(height, width) // factor) if factor > 1 else 0), size)

    def _whole_view(self, i: int, size: int) -> NDArray[np.uint8]:
        stored = self._stored(i)
        if not isinstance(stored, bytes):
            return whole_view(stored, size)
        height, width = image_size(stored)
        factor = crop_scale_hint(Box(0, 0, height, width), whole_side(size))
        return whole_view(decode(stored, -(-min(height, width) // factor) if factor > 1 else 0), size)

    def _stored(self, i: int) -> bytes | NDArray[np.uint8]:
        """The image as it is kept: pixels, or the bytes of its file."""
        if self.cache is not None and (cached := self.cache.images[i]) is not None:
            return cached
        return self.source.stored(i)


class Batches(Protocol):
    """Where a training gets its batches from: a `Loader` of images, or features of a frozen backbone."""

    def normalisation_on(self, device: torch.device) -> tuple[Tensor, Tensor]: ...

    def training(self, epoch: int, batches: Iterable[Ids]) -> Iterator[RawBatch]: ...

    def evaluation(self, ids: Ids, batch_size: int, whole: bool = False) -> Iterator[RawBatch]: ...


class Loader:
    """Batches of training and evaluation views.

    Should workers die or hang, others take their place once and go on with the batch that is due. `poll` is called
    while a batch is waited for and may raise.
    """

    def __init__(
        self,
        source: Source,
        augmentation: Augmentation,
        *,
        image_size: int,
        seed: int,
        workers: int,
        normalisation: tuple[Sequence[float], Sequence[float]],
        cache: Cache | None = None,
        pin_memory: bool = False,
        poll: Callable[[], object] = lambda: None,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self._normalisation = normalisation
        self._paths, self._poll, self._warn = source.manifest.paths, poll, warn
        self._waited, self._watchdog = 0.0, _Watchdog()
        self._requests = _Requests()
        keep_freed_memory()
        cv2.setNumThreads(0)  # the views of a batch are made by one process each
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores: the user's choice
        self._loader: DataLoader[RawBatch] = DataLoader(
            Views(source, augmentation, image_size, seed, cache),
            batch_size=None,
            sampler=cast(Any, self._requests),
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers > 0 else None,
            timeout=TIMEOUT_SECONDS if workers > 0 else 0,
            worker_init_fn=_quiet_worker,
            pin_memory=pin_memory,
        )

    def normalisation_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the pixels that the network expects, per channel."""
        mean, std = (torch.tensor(values, device=device) for values in self._normalisation)
        return mean, std

    def training(self, epoch: int, batches: Iterable[Ids]) -> Iterator[RawBatch]:
        """One batch of views per array of ids, in order."""
        return self._serve([Request(ids, epoch) for ids in batches])

    def evaluation(self, ids: Ids, batch_size: int, whole: bool = False) -> Iterator[RawBatch]:
        """The evaluation view of the given images, or the view of the `whole` image, in order."""
        return self._serve([Request(ids[at : at + batch_size], None, whole) for at in range(0, len(ids), batch_size)])

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, where: object) -> None:
        """End the workers now: left to the garbage collector, a later run's workers would inherit them."""
        self._watchdog.over.set()
        if kind is KeyboardInterrupt:  # at once
            self._kill_workers()
        elif (iterator := self._running()) is not None:
            self._loader._iterator = None
            iterator._shutdown_workers()
            for worker in iterator._workers:
                worker.kill()  # hung, and deaf to torch's SIGTERM

    def _serve(self, requests: list[Request]) -> Iterator[RawBatch]:
        at, begun, failed_at = 0, 0, -1
        while at < len(requests):
            try:
                if at == begun:  # after a failure first the batch that is due, alone: it may be another's fault
                    begun = at + 1 if at == failed_at else len(requests)
                    iterator = self._start(requests[at:begun])
                batch = self._next(iterator)
            except (RuntimeError, OSError, EOFError) as error:
                if self._running() is None or "in DataLoader worker process" in str(error):
                    raise  # our own code's, not a lost worker's
                why = self._why_workers_failed()
                self._kill_workers()
                if at == failed_at:
                    names = ", ".join(ascii(self._paths[i]) for i in requests[at].ids[:5].tolist())
                    raise DataError(
                        f"the processes that read images {why}, twice at the same batch of {len(requests[at].ids)} "
                        f"images ({names}, ...); correct that or remove the image that does it, then repeat the "
                        "command or `odcluster resume`"
                    ) from error
                self._warn(f"the processes that read images {why}; others take their place and go on from there")
                begun = failed_at = at
                continue
            at += 1
            yield batch

    def _start(self, requests: list[Request]) -> Iterator[RawBatch]:
        """Let the workers begin with these requests; new workers, if there are none or one has died."""
        self._requests.pending = requests
        if (running := self._running()) is not None:
            if all(worker.is_alive() for worker in running._workers):
                running._timeout = TIMEOUT_SECONDS  # for the greeting between torch and its workers
            else:
                self._kill_workers()
        iterator = iter(self._loader)
        if (running := self._running()) is not None:
            running._timeout = POLL_SECONDS
            if running._worker_pids_set:  # else torch raises wherever we are, in the middle of a step, when one dies
                signal_handling._remove_worker_pids(id(running))
                running._worker_pids_set = False
        return iterator

    def _next(self, iterator: Iterator[RawBatch]) -> RawBatch:
        asked = time.monotonic()
        self._watchdog.expect(self._running(), asked + TIMEOUT_SECONDS)
        try:
            while True:
                try:
                    return next(iterator)
                except RuntimeError as error:
                    if self._running() is None or "timed out" not in str(error):
                        raise
                    self._poll()
        finally:
            self._watchdog.expect(None, math.inf)
            self._waited = time.monotonic() - asked

    def _running(self) -> Any:
        """torch's iterator with the workers, if there are any."""
        return self._loader._iterator

    def _kill_workers(self) -> None:
        """Without torch's own way out, which waits for locks that a killed worker may hold for ever."""
        iterator, self._loader._iterator = self._running(), None
        if iterator is None:
            return
        iterator._shutdown = True
        for worker in iterator._workers:
            worker.kill()
            worker.join()
        if hasattr(iterator, "_pin_memory_thread"):
            iterator._pin_memory_thread_done_event.set()
        for queue in (iterator._worker_result_queue, *iterator._index_queues):
            queue.cancel_join_thread()
            queue.close()

    def _why_workers_failed(self) -> str:
        if self._waited > TIMEOUT_SECONDS:
            return f"delivered nothing for {TIMEOUT_SECONDS:.0f} seconds"
        codes = {worker.exitcode for worker in self._running()._workers}
        if -signal.SIGBUS in codes:
            return "ran out of shared memory (enlarge /dev/shm, docker's --shm-size, or use --workers 0)"
        if -signal.SIGKILL in codes:
            return "were killed (if memory is short, use fewer --workers)"
        ended = sorted(code for code in codes if code)
        return f"ended with code {ended[0]}" if ended else "stopped working"


class _Watchdog(threading.Thread):
    """Kills workers that keep us waiting for too long in a place where we cannot look at the clock ourselves: taking a
    batch over from a frozen process has no time limit of its own, but ends when that process does.
    """

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.over = threading.Event()
        self._iterator: Any = None
        self._deadline = math.inf

    def expect(self, iterator: Any, deadline: float) -> None:
        """A batch of this iterator's workers until then (None: nothing)."""
        self._iterator, self._deadline = iterator, deadline
        if iterator is not None and self.ident is None:
            self.start()

    def run(self) -> None:
        while not self.over.wait(POLL_SECONDS):
            if time.monotonic() > self._deadline and (iterator := self._iterator) is not None:
                for worker in iterator._workers:
                    worker.kill()


class _Requests:
    """The sampler of the data loader: whatever is to be served next."""

    def __init__(self) -> None:
        self.pending: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)

    def __len__(self) -> int:
        return len(self.pending)


def _quiet_worker(worker: int) -> None:
    """Signals are the parent's business, also when a whole process group gets them (Ctrl-C, a batch system's SIGTERM).

    A worker ends when the parent says so, or is gone.
    """
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    cv2.setNumThreads(0)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let the C library keep blocks of up to 256 MB that are freed, instead of giving them back to the system at once.

    Images and batches are such blocks, made and freed all the time; getting fresh pages for each took a third of the
    time of a view (0.62 instead of 1.10 ms to decode 500 x 375). Only glibc has these switches; others stay alike.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    trim_threshold, mmap_threshold = -1, -3  # glibc's malloc.h
    mallopt(mmap_threshold, 256 << 20)
    mallopt(trim_threshold, 512 << 20)
