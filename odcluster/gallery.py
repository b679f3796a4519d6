"""The verb `explore`: a run as a web app, for whoever sits at this machine and nobody else."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager

from odcluster.errors import Interrupted, UserError
from odcluster.explore.collection import Collection, open_collection
from odcluster.models.checkpoints import printable
from odcluster.training.console import Console
from odcluster.training.devices import StopFlag

STOP_SECONDS = 3
"""After Ctrl-C, answers that are on their way have this long."""


def explore(run: str | os.PathLike[str], *, port: int | None = None, open_browser: bool = True) -> None:
    """Show a run in the browser until Ctrl-C. The address is printed; only this machine can open it, with its token.

    A run that still trains may be explored; what is new appears by itself. Edits are kept in RUN/curation.sqlite.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"exploring needs {' and '.join(missing)}: pip install 'odcluster[explore]'")
    from odcluster.explore.server import Server

    with listening(port) as connection:
        collection = opened(run)
        token = secrets.token_urlsafe(24)
        server = Server(collection, token)
        address = f"http://127.0.0.1:{connection.getsockname()[1]}/?token={token}"
        status = collection.status()
        shown = printable(os.path.basename(os.path.abspath(collection.run.path)))
        num_clusters = len(collection.view().listed)
        print(f"{shown} ({status.state}): {len(collection):,} images, {num_clusters:,} clusters")
        print(f"{address}\nCtrl-C stops", flush=True)
        if open_browser and has_screen():
            webbrowser.open(address)
        try:
            serve(server.app, connection)
        finally:
            server.stop()


def opened(run: str | os.PathLike[str]) -> Collection:
    """The run, with what is still to be computed for it computed."""
    with Console() as console, StopFlag() as stop:

        def progress(activity: str, done: int, total: int) -> None:
            stop.poll()
            console.progress(activity, done, total)

        try:
            collection = open_collection(run, say=console.say, progress=progress)
            stop.poll()
            return collection
        except Interrupted as stopped:
            raise Interrupted("stopped as asked: the same command goes on from here") from stopped


@contextmanager
def listening(port: int | None) -> Iterator[socket.socket]:
    """A connection of this machine with itself, on a free port unless one is given."""
    if port is not None and not 0 <= port <= 65535:
        raise UserError(f"--port {port} must lie between 1 and 65535")
    # By its own number: asyncio sends answers at once only where it sees that it is TCP, else 40 ms late.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            connection.bind(("127.0.0.1", port or 0))
            connection.listen(128)  # from now on requests wait instead of being turned away
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used ({error.strerror}); leave --port out to get a free one"
            ) from error
        yield connection


def serve(app: object, connection: socket.socket) -> None:
    """Answer until Ctrl-C or SIGTERM, then stop within seconds and without a word."""
    import uvicorn

    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application of another library's types
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = uvicorn.Server(config)
    log = logging.getLogger("uvicorn.error")

    def still_serving(record: logging.LogRecord) -> bool:
        return not server.should_exit

    log.addFilter(still_serving)
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.run(sockets=[connection])
    except KeyboardInterrupt:
        pass
    finally:
        log.removeFilter(still_serving)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def has_screen() -> bool:
    """Whether a browser would open in a window; one in the terminal is not what is wanted."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
