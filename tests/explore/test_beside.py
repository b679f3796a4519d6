"""What takes long is computed once, beside the answers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from odcluster.errors import UserError
from odcluster.explore import beside as beside_module
from odcluster.explore.beside import Beside

# --- What takes long ------------------------------------------------------------------------------------------


def test_what_takes_long_is_computed_once_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_module, "PATIENCE", 0.05)
    beside, begun, go_on = Beside(), [], threading.Event()

    def compute(tell: Any) -> str:
        begun.append(1)
        tell("halfway")
        go_on.wait(20)
        return f"result {len(begun)}"

    for _ in range(3):
        assert beside.get("kind", "a", compute, stale=False) == (None, "halfway")
    go_on.set()
    while beside.result("kind") is None:
        time.sleep(0.01)
    assert beside.get("kind", "a", compute, stale=False) == ("result 1", "")
    assert beside.get("kind", "b", compute, stale=True) == ("result 1", "")  # while it trains, the last will do
    assert beside.get("kind", "b", compute, stale=False)[0] in (None, "result 2")
    while beside.result("kind") != "result 2":
        time.sleep(0.01)

    def fail(tell: Any) -> None:
        raise ValueError("this went wrong")

    monkeypatch.setattr(beside_module, "PATIENCE", 20)
    for _ in range(2):
        with pytest.raises(UserError, match="this went wrong"):
            beside.get("other", "a", fail, stale=False)


def test_what_takes_long_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_module, "PATIENCE", 0.05)
    beside = Beside()

    def compute(tell: Any) -> None:
        while True:
            tell("on and on")
            time.sleep(0.01)

    beside.get("kind", "a", compute, stale=False)
    before = threading.active_count()
    beside.stop()
    deadline = time.monotonic() + 20
    while threading.active_count() >= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
