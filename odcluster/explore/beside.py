"""What takes long, computed beside the answers: once for everybody who asks, and ended with the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from odcluster.errors import Interrupted, UserError

PATIENCE = 1.5
"""Seconds that a request waits for what is computed beside, before it answers 202."""

STOP_SECONDS = 10
"""The longest that the end of the server waits for that to end."""


class Beside:
    """Long computations, one of each kind at a time, in threads that end with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[str, tuple[str, Any]] = {}
        self._failures: dict[str, tuple[str, str]] = {}
        self._running: dict[str, threading.Event] = {}
        self._progress: dict[str, str] = {}
        self._stopping = False

    def stop(self) -> None:
        """End what runs at its next word about progress."""
        self._stopping = True
        for running in list(self._running.values()):
            running.wait(STOP_SECONDS)

    def result(self, kind: str) -> Any:
        """What was computed last, if anything."""
        return self._results.get(kind, ("", None))[1]

    def get(
        self, kind: str, key: str, compute: Callable[[Callable[[str], None]], Any], *, stale: bool
    ) -> tuple[Any, str]:
        """The result for this key and "", or None and how far it is. With `stale`, that of an earlier key will do."""
        with self._lock:
            done, failure = self._results.get(kind), self._failures.get(kind)
            if done is not None and (done[0] == key or stale):
                return done[1], ""
            if failure is not None and failure[0] == key:
                raise UserError(failure[1])
            if kind not in self._running:
                self._running[kind] = threading.Event()
                self._progress[kind] = ""
                threading.Thread(target=self._compute, args=(kind, key, compute), daemon=True).start()
            running = self._running[kind]
        if running.wait(PATIENCE):
            with self._lock:
                done, failure = self._results.get(kind), self._failures.get(kind)
            if done is not None and done[0] == key:
                return done[1], ""
            if failure is not None and failure[0] == key:
                raise UserError(failure[1])
        return None, self._progress.get(kind, "")

    def _compute(self, kind: str, key: str, compute: Callable[[Callable[[str], None]], Any]) -> None:
        def tell(text: str) -> None:
            if self._stopping:
                raise Interrupted("stopped as asked")
            self._progress[kind] = text

        try:
            result = compute(tell)
            with self._lock:
                self._results[kind] = (key, result)
        except Exception as error:  # told to whoever asked; the server goes on
            with self._lock:
                self._failures[kind] = (key, str(error) or type(error).__name__)
        finally:
            with self._lock:
                self._running.pop(kind).set()
