"""The routes of the page: each of its files under a path of its own.

Owns the headers of the files. They are read once, so a request opens no file and no path of a
request reaches the file system.
"""

import hashlib
import importlib.resources
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

#: Of `gateway/page/static/`, by suffix.
_CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}

# The page shows text of models and of its user. The browser runs no script but the page's own
# files, makes no element of text, and asks no other host.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)

_HEADERS = {
    "content-security-policy": _CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # After an update of the gateway, old scripts must not call its new API: browsers ask each time,
    # and are mostly answered 304.
    "cache-control": "no-cache",
}


def page_routes() -> Sequence[Route]:
    """`/`, and `/page/NAME` of every other file; for GET and HEAD."""
    routes = []
    for file in sorted(
        importlib.resources.files("gateway.page").joinpath("static").iterdir(),
        key=lambda file: file.name,
    ):
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        content_type = _CONTENT_TYPES["." + file.name.rpartition(".")[2]]
        routes.append(Route(path, _File(file.read_bytes(), content_type).answer))
    return routes


class _File:
    """One file of the page."""

    def __init__(self, content: bytes, content_type: str) -> None:
        self._content = content
        self._etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        self._headers = {**_HEADERS, "content-type": content_type, "etag": self._etag}

    async def answer(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        # Proxies that compress make the tag a weak one.
        if self._etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)
