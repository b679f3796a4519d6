"""Who may ask, and what every answer carries.

The app listens on this machine only, but so may any web page that is open in its browser send requests here, under any
name it makes lead to 127.0.0.1. Hence three questions before anything is answered: the host name, the token of this
start, and, for whatever changes something, a header that pages of other origins cannot set.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; style-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Json(Response):
    """Strict JSON: no NaN, and text that no byte of a file name can spoil."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


class Guard:
    """Lets only this machine's user in: right host name, right token, and for changes a header of our own."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                added = {"cache-control": "no-store", **{name.lower(): value for name, value in HEADERS.items()}}
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in added.items() if name.encode() not in given),
                ]
            await send(message)

        request = Request(scope)
        answer = self._answer(request) or self._app
        await answer(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The answer to a request that must not, or need not, go further."""
        host, _, port = request.headers.get("host", "").partition(":")
        if host not in ("127.0.0.1", "localhost"):  # a page elsewhere that made its own name lead here
            return Json({"error": "this address is not served; use the one that was printed"}, 403)
        cookie = f"odcluster-{port}" if port.isdecimal() else "odcluster"  # cookies are shared by all ports
        in_address = request.query_params.get("token", "")
        offered = (in_address, request.headers.get("x-token", ""))
        cookies = (request.cookies.get(cookie, ""), request.cookies.get("odcluster", ""))
        if not any(self._is_right(token) for token in (*offered, *cookies)):
            sentence = "open the whole address that `odcluster explore` printed, with its token"
            return PlainTextResponse(sentence, 403) if request.url.path == "/" else Json({"error": sentence}, 403)
        if request.method not in ("GET", "HEAD") and request.headers.get("x-odcluster") != "1":
            return Json({"error": "changes must come from the page itself"}, 403)
        if request.url.path == "/" and request.method == "GET" and self._is_right(in_address):
            response = RedirectResponse("/", 303)
            response.set_cookie(cookie, in_address, httponly=True, samesite="strict", path="/")
            return response
        return None

    def _is_right(self, token: str) -> bool:
        return secrets.compare_digest(token.encode("utf-8", "replace"), self._token)
