"""Who may ask, and with what: host, key, kind and size of a body.

Each guard is an ASGI application around another. A web page can reach a server on
localhost: by a form or `no-cors` fetch (not JSON: 415), or by a name that it makes
point here (`Host`: 403). No page of another origin may read an answer, unless allowed.
"""

import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_edge.core.checks import ConfigError
from moe_edge.serve.api_key import KEY_VARIABLE
from moe_edge.serve.errors import ApiError, report

OPEN_PATHS = ("/health", "/")  # need no key, as what is below /page/: no data there
SECURITY = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}
MOST_DRAINED = (
    8  # largest bodies, that are read of one that is larger, before the answer
)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_public(host: str, key: bytes | None) -> None:
    """Raises ConfigError for an address that others reach, without a key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"host {host} is reachable by others and there is no key; set "
            f"{KEY_VARIABLE} or --api_key_file, or use 127.0.0.1"
        )


def header(scope: Scope, name: bytes) -> bytes | None:
    """A header's value; None without one."""
    return next((value for key, value in scope["headers"] if key == name), None)


def error_response(error: ApiError) -> JSONResponse:
    """An error as an answer."""
    return JSONResponse(error.body(), error.status, error.headers)


class Reported:
    """Says on stderr where an application failed; starlette has answered by then."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            report(error)


class Headers:
    """Adds `SECURITY` to every answer that has no header of that name."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    there.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_more)


class HostGuard:
    """Refuses requests for other hosts: a name that somebody made point here.

    Args:
      host: that the server listens on.
      allowed: more names.
    """

    def __init__(self, app: ASGIApp, host: str, allowed: Collection[str] = ()):
        self._app, self._is_local = app, is_loopback(host)
        self._names = {"localhost", host.lower(), *(name.lower() for name in allowed)}

    def _allows(self, name: str) -> bool:
        if name in self._names:
            return True
        try:  # no name can be made to point here by another one
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = (header(scope, b"host") or b"").decode("latin-1").lower()
        if given.startswith("[") and "]" in given:
            name, _, port = given[1:].partition("]")
        else:
            name, colon, port = given.partition(":")
            port = colon + port
        if not (re.fullmatch("(:[0-9]*)?", port) and self._allows(name)):
            error = ApiError(
                "host_not_allowed",
                "this server does not answer to that Host; start it with "
                "--allowed_host for each further name",
            )
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class KeyGuard:
    """Refuses requests without the key (`Authorization: Bearer KEY`)."""

    def __init__(self, app: ASGIApp, key: bytes):
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
        same = hmac.compare_digest(given.strip(), self._key)
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith("/page/")
        if is_open or (same and scheme.lower() == b"bearer"):
            await self._app(scope, receive, send)
        else:
            error = ApiError(
                "invalid_api_key", "expected the header Authorization: Bearer KEY"
            )
            await error_response(error)(scope, receive, send)


async def read_body(scope: Scope, receive: Receive, max_body_bytes: int) -> bytes:
    """The JSON body of a request; the connection limits its time.

    Raises:
      ApiError: json_required, body_too_large.
      ClientGone: before it was whole.
    """
    kind, *options = (header(scope, b"content-type") or b"").lower().split(b";")
    charset = [o.strip() for o in options if o.strip()]
    if kind.strip() != b"application/json" or charset not in (
        [],
        [b"charset=utf-8"],
        [b'charset="utf-8"'],
    ):
        raise ApiError(
            "json_required", "expected the header Content-Type: application/json"
        )
    if header(scope, b"content-encoding") not in (None, b"identity"):
        raise ApiError("json_required", "expected a body without Content-Encoding")
    length = header(scope, b"content-length")
    too_large = length is not None and int(length) > max_body_bytes
    if too_large and header(scope, b"expect"):
        raise _too_large(max_body_bytes)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size <= max_body_bytes and not too_large:
            parts.append(part)
        elif size > MOST_DRAINED * max_body_bytes:
            break
    # A client that still writes would not see the answer: most of what is too large
    # is read first.
    if too_large or size > max_body_bytes:
        raise _too_large(max_body_bytes)
    return b"".join(parts)


class ClientGone(Exception):
    """Nobody waits for the answer."""


def _too_large(max_body_bytes: int) -> ApiError:
    return ApiError(
        "body_too_large", f"expected a body of at most {max_body_bytes} bytes"
    )


async def until_gone(receive: Receive, then: Callable[[], Any]) -> None:
    """Waits until a client is gone, after its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    then()
