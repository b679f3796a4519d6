"""One tiny run, one server and one Chromium for all browser tests.

ODCLUSTER_BROWSER names the browser (`make test-browser` sets it); without it this folder is left out, so that the other
tests need none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_runs import TINY, make_images

BROWSER = os.environ.get("ODCLUSTER_BROWSER")
collect_ignore_glob = [] if BROWSER else ["test_*.py"]

NASTY = [
    "<script>alert(1)<script>.png",
    '" onerror="alert(2)" \'.png',
    "<img src=x onerror=alert(3)>.png",
    "line\nbreak\x1b[31m.png",
    os.fsdecode(b"caf\xe9\xff.png"),
]
PATIENCE = 20_000
"""Milliseconds to wait for what should take a few: machines that run tests are busy."""

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Striped images, one of them twice, and five with names that nobody should trust."""
    folder = make_images(tmp_path_factory.mktemp("browser") / "photos", 90)
    shutil.copy(folder / "image0007.png", folder / "twin of image0007.png")
    for i, name in enumerate(NASTY):
        shutil.copy(folder / f"image{10 + i:04d}.png", folder / name)
    return folder


@pytest.fixture(scope="session")
def run(photos: Path) -> Path:
    import odcluster

    return Path(odcluster.train(photos, out=photos.parent / "<b>run", quiet=True, **TINY))


@pytest.fixture(scope="session")
def server(run: Path) -> Iterator[str]:
    """The address with the token, as a user gets it."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "odcluster", "explore", str(run), "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line):
            break
    else:
        raise AssertionError("the server did not start:\n" + "".join(said))
    yield found.group()
    process.terminate()
    process.wait(20)


@pytest.fixture(scope="session")
def address(server: str) -> str:
    return server.split("/?")[0]


@pytest.fixture(scope="session")
def token(server: str) -> str:
    return server.split("token=")[1]


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def browser_page(browser, address: str, token: str) -> Iterator[Callable[..., object]]:
    """Makes pages that hold the token. A dialog, a console error or a script error in one of them fails the test."""
    contexts, wrong = [], []

    def make(**options: object) -> object:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.add_cookies([{"name": "odcluster", "value": token, "url": address, "sameSite": "Strict"}])
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.address = address
        allowed: list[str] = []

        def allow_failures(status: int | None = None) -> None:
            """Chromium reports every failed request as a console error; those of this status (or all) are meant."""
            allowed.append(f"status of {status}" if status else "Failed to load resource")

        def heard(message: object) -> None:
            if message.type in {"error", "warning"} and not any(words in message.text for words in allowed):
                wrong.append(f"console: {message.text}")

        def asked(dialog: object) -> None:
            wrong.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.allow_failures = allow_failures
        page.on("console", heard)
        page.on("dialog", asked)
        page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
        return page

    yield make
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def page(browser_page):
    return browser_page()


@pytest.fixture
def phone(browser_page):
    return browser_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True, device_scale_factor=2)


@pytest.fixture
def nasty_names(page) -> dict[int, str]:
    """Ids of the images with nasty names, and the names as they should be shown."""
    shown = [name.encode(errors="surrogateescape").decode(errors="replace") for name in NASTY]
    total = page.request.get(page.address + "/api/run").json()["images"]
    names = {i: page.request.get(f"{page.address}/api/images/{i}").json()["name"] for i in range(total)}
    return {i: name for i, name in names.items() if name in shown}
