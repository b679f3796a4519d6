"""What people see while something runs: a live line on a terminal, plain lines elsewhere, everything in train.log."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

PLAIN_SECONDS = 10.0
"""Off a terminal, a progress line appears about this often."""


def duration(seconds: float) -> str:
    """1:23:45, 12:34 or 8 s."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class Console:
    """Say a sentence, warn, and show the progress of one activity at a time."""

    def __init__(self, log: Path | None = None, quiet: bool = False) -> None:
        self._rich = RichConsole(file=sys.stderr, highlight=False, quiet=quiet)
        self._log_path = log
        self._early: list[str] = []  # what was said before there was a run directory
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._activity = ""
        self._started = self._shown = 0.0
        self._first = 0

    def log_to(self, path: Path) -> None:
        self._log_path = path
        early, self._early = self._early, []
        for line in early:
            if self._log_path is not None:  # it may turn out not to be writable
                self._append(line)

    def say(self, text: str, style: str = "") -> None:
        """A line for people, also in train.log."""
        self._log(text)
        target = self._live.console if self._live else self._rich
        target.print(escape(text), style=style or None, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}", style="yellow")

    def progress(self, activity: str, done: int, total: int, detail: str = "") -> None:
        """How far an activity is; a new name begins a new activity. The time left is added by itself."""
        now = time.monotonic()
        if activity != self._activity:
            self._end()
            self._activity, self._started, self._shown, self._first = activity, now, now, done
            if self._rich.is_terminal and not self._rich.quiet:
                self._live = Progress(
                    TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[detail]}"),
                    console=self._rich, transient=True,
                )  # fmt: skip
                self._live.start()
                self._task = self._live.add_task(escape(activity), total=total, detail="")
        text = f"{done}/{total}" + (f" · {detail}" if detail else "")
        if done > self._first and done < total:
            text += f" · {duration((now - self._started) / (done - self._first) * (total - done))} left"
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, total=total, detail=escape(text))
        elif now - self._shown >= PLAIN_SECONDS or done >= total:
            self._shown = now
            self._rich.print(escape(f"{activity}: {text}"), soft_wrap=True)
        if done >= total:
            self._log(f"{activity}: {text}")
            self._end()

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live, self._task, self._activity = None, None, ""

    def _log(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        if self._log_path is None:
            self._early.append(line)
        else:
            self._append(line)

    def _append(self, line: str) -> None:
        assert self._log_path is not None
        try:
            with open(self._log_path, "a", errors="surrogateescape") as file:
                file.write(line)
        except OSError as error:  # the words were shown; a full disk is told once
            path, self._log_path = self._log_path, None
            self.say(f"warning: {path} cannot be written ({error.strerror}); going on without it", style="yellow")

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end()
