"""Real processes, quickly: a child is forked from a process that has imported torch already.

A new interpreter needs five seconds of processor time before it can train; a forked child begins at once. Tests of what
happens to processes fork; a few start new interpreters, to see that nothing depends on what was inherited.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import odcluster.api  # everything a child needs is imported once, here
import odcluster.gallery_report
import odcluster.judge  # noqa: F401
from odcluster.errors import UserError
from odcluster.models.compat import timm  # noqa: F401

torch.set_num_threads(1)  # sums depend on the number of threads, and a forked child must not inherit a pool of them


class Child:
    """A forked process, in a process group of its own; what it says is in `output`."""

    def __init__(self, work: Callable[[], object], output: Path, temporary: Path | None = None) -> None:
        self.output = output
        self.code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(run(work, output, temporary))

    def poll(self) -> int | None:
        """The exit code as subprocess has it (negative: the signal), None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float = 120.0) -> int:
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise TimeoutError(f"still running after {seconds} s:\n{self.said()}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Until something has happened, while the process still runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.poll() is None, f"ended with {self.code} too early:\n{self.said()}"
            assert time.monotonic() < deadline, f"did not happen in {seconds} s:\n{self.said()}"
            time.sleep(0.002)

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it if it still runs (or is stopped)."""
        self.send(signal.SIGKILL)
        self.wait()

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def run(work: Callable[[], object], output: Path, temporary: Path | None) -> int:
    """In the child: do the work and return the code that the command line would exit with."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        if temporary is not None:
            temporary.mkdir(exist_ok=True)
            tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except UserError as error:
        print(f"odcluster: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        multiprocessing.util._exit_function()  # not atexit: the parent's temporary folders would go
        sys.stderr.flush()
    return code


def command(*arguments: str) -> Callable[[], object]:
    """The work of `odcluster ARGUMENTS`."""
    from odcluster.cli import main

    return lambda: main(list(arguments))


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                after_name = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(after_name[2]) == group and after_name[0] != "Z":
                found.append(int(entry))
    return found


def survivors(group: int, patience: float = 20.0) -> int:
    """Processes of an ended command that are still there after a while; they are ended then."""
    deadline = time.monotonic() + patience
    while (left := members(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def finish(work: Callable[[], object], output: Path) -> str:
    """Do the work in a child, which must end well; returns what it said."""
    child = Child(work, output)
    assert child.wait() == 0, child.said()
    return child.said()
