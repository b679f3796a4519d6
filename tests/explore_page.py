"""The explore page in the tests: where to go, what is there."""

from __future__ import annotations

from playwright.sync_api import Page, expect

SHOWN = "[...document.querySelectorAll('.card')].map(card => Number(card.dataset.key))"


def api(page: Page, path: str) -> dict:
    return page.request.get(page.address + path).json()


def open_view(page: Page, view: str = "") -> None:
    page.goto(page.address + "/#/" + view)


def overview(page: Page) -> None:
    open_view(page)
    expect(page.locator(".card .mosaic").first).to_be_visible()


def card(page: Page, cluster: int):
    return page.locator(f'.card[data-key="{cluster}"]')


def largest(page: Page, count: int = 1) -> list[dict]:
    return api(page, f"/api/clusters?sort=size&order=desc&per_page={count}")["clusters"]


def undo(page: Page) -> None:
    """Undo by the page's own key and wait until the server has done it."""
    edits = lambda: sum(not edit["undone"] for edit in api(page, "/api/edits")["edits"])  # noqa: E731
    before = edits()
    page.evaluate("document.activeElement?.blur()")
    page.keyboard.press("Control+z")
    expect(page.locator(".toast", has_text="Undone").last).to_be_visible()
    assert edits() == before - 1
