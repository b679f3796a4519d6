"""Who asks the web app in the tests."""

from __future__ import annotations

from typing import Any

import pytest

from odcluster.explore.server import Server

testclient = pytest.importorskip("starlette.testclient")

TOKEN = "a-token-of-this-test"
ADDRESS = "http://127.0.0.1:8765"
NASTY = [
    b"<img src=x onerror=alert(1)>.png",
    b"\"quoted' & =1+1.png",
    b"two\nlines\x1b[31m.png",
    b"latin-\xe9.png",
    "中文🐈.png".encode(),
]


def browser(server: Server, **headers: str) -> Any:
    """Somebody who has opened the printed address."""
    client = testclient.TestClient(server.app, base_url=ADDRESS, headers={"X-Odcluster": "1", **headers})
    assert client.get(f"/?token={TOKEN}", follow_redirects=False).status_code == 303
    return client


def stranger(server: Server, **headers: str) -> Any:
    return testclient.TestClient(server.app, base_url=ADDRESS, headers=headers)


def get(client: Any, address: str, status: int = 200) -> Any:
    answer = client.get(address)
    assert answer.status_code == status, answer.text
    return answer.json()


def edit(client: Any, status: int = 200, **given: Any) -> Any:
    answer = client.post("/api/edits", json=given)
    assert answer.status_code == status, answer.text
    return answer.json()
