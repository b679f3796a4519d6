"""Who gets in to the web app, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from explore_clients import TOKEN, browser, get, stranger

from odcluster.explore.server import Server

# --- Who gets in ----------------------------------------------------------------------------------------

PLACES = ["/", "/app/index.html", "/api/run", "/api/clusters", "/api/images/0", "/thumb/0", "/image/0", "/nothing"]


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_answered_without_the_token(server: Server, place: str) -> None:
    for client, address in [
        (stranger(server), place),
        (stranger(server), f"{place}?token=wrong"),
        (stranger(server), f"{place}?token="),
        (stranger(server, **{"X-Token": TOKEN[:-1]}), place),
        (stranger(server, Cookie="odcluster=wrong; odcluster-8765=wr%F6ng"), place),
    ]:
        answer = client.get(address, follow_redirects=False)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


def test_the_token_opens_by_cookie_header_or_address(server: Server) -> None:
    client = stranger(server)
    answer = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/run").status_code == 200  # the cookie
    for other, address in [
        (stranger(server, Cookie=f"odcluster={TOKEN}"), "/api/run"),
        (stranger(server, **{"X-Token": TOKEN}), "/api/run"),
        (stranger(server), f"/api/run?token={TOKEN}"),
    ]:
        assert other.get(address).status_code == 200
    # two servers on one machine: the other one's cookie is sent along and does no harm
    both = stranger(server, Cookie=f"odcluster-9999=other; odcluster-8765={TOKEN}")
    assert both.get("/api/run").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "0.0.0.0", "x@y"])
def test_other_host_names_are_not_served(server: Server, host: str) -> None:
    for place in ("/api/run", f"/?token={TOKEN}"):
        assert stranger(server, Host=host, **{"X-Token": TOKEN}).get(place, follow_redirects=False).status_code == 403
    assert stranger(server, Host="localhost:1", **{"X-Token": TOKEN}).get("/api/run").status_code == 200


def test_changes_need_a_header_that_other_sites_cannot_send(server: Server) -> None:
    client = stranger(server, **{"X-Token": TOKEN})
    for place in ("/api/edits", "/api/undo", "/api/redo", "/api/similar"):
        assert client.post(place, json={"action": "exclude", "images": [0]}).status_code == 403
        assert client.post(place, headers={"X-Odcluster": "0"}).status_code == 403
    assert client.options("/api/edits").status_code == 403
    assert server.collection.curation.edits() == []
    assert browser(server).get("/api/undo").status_code == 405


def test_every_answer_carries_the_rules_for_the_browser(client: Any, server: Server) -> None:
    for answer in (client.get("/"), client.get("/api/run"), client.get("/thumb/0"), stranger(server).get("/")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; img-src 'self' blob: data:; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    assert "private" in client.get("/thumb/0").headers["cache-control"]
    assert client.get("/api/run").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "place",
    [
        "/app/../server.py",
        "/app/%2e%2e/server.py",
        "/app/..%2fserver.py",
        "/app//etc/passwd",
        "/thumb/80",
        "/thumb/-1",
        "/thumb/0.png",
        "/thumb/..%2f0",
        "/image/99999999999999999999",
        "/image/etc",
        "/api/images/80",
        "/api/images/80/similar",
        "/api/clusters/6",
        "/api/clusters/99999999999999999999",
        "/api/nothing",
        "/config.json",
    ],
)
def test_what_is_not_there_is_404(client: Any, place: str) -> None:
    answer = client.get(place)
    assert answer.status_code == 404
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "place",
    [
        "/api/clusters?sort=price",
        "/api/clusters?page=-1",
        "/api/clusters?page=x",
        "/api/clusters?per_page=\u0663",
        "/api/clusters?show=some",
        "/api/clusters/0?order=up",
        "/thumb/0?size=100",
        "/api/map?kind=globe",
        "/api/oddities?kind=ufo",
        "/api/images/0/similar?count=many",
    ],
)
def test_what_makes_no_sense_is_400_with_a_sentence(client: Any, place: str) -> None:
    assert get(client, place, 400)["error"]
