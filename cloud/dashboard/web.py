"""The dashboard's web application: one page, read-only JSON under `/api/`, three changes.

Reading needs no credentials, because the cloud serves it on the loopback only. A change needs the
operator token in the `Authorization` header, never in a URL. Requests for another host name are
refused, so that a web site cannot reach it through a visitor's browser (DNS rebinding); the page
itself may run only its own script and call only this server.
"""

from __future__ import annotations

import contextlib
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triplane.cloud.dashboard.feed import DashboardFeed, look
from triplane.cloud.dashboard.rows import SECTIONS, rollout_row
from triplane.cloud.dashboard.source import DashboardSource
from triplane.proto.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    TriplaneError,
    Unavailable,
)
from triplane.proto.fleet_pb2 import Rollout
from triplane.unified_ir.files.content_policy import content_policy

HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")
MOST_BODY_BYTES: Final = 4096
MOST_REASON_CHARS: Final = 200


class Forbidden(InvalidInput):
    """A change without the operator token."""


# fmt: off
STATUS: Final[Mapping[type[TriplaneError], int]] = {
    Forbidden:    403,  # before InvalidInput, of which it is one
    InvalidInput: 400,
    NotFound:     404,
    Conflict:     409,
    Unavailable:  503,
    Corrupt:      500,
}
HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control":                "no-store",
    "Cross-Origin-Opener-Policy":   "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy":              "no-referrer",
    "X-Content-Type-Options":       "nosniff",
    "X-Frame-Options":              "DENY",
}
# fmt: on
POLICY: Final = ("connect-src 'self'", "img-src data:", "frame-ancestors 'none'")
"""What the page may do besides running its own script and style."""


def application(source: DashboardSource, *, token: str) -> Starlette:
    """Return the application over `source`. token: the content of HOME/dashboard.token."""
    page = files("triplane.cloud.dashboard").joinpath("page.html").read_text("utf-8")
    board = _Board(source, token)
    policy = content_policy(page, *POLICY)

    async def home(_: Request) -> Response:
        return HTMLResponse(page)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await board.feed.close()

    app = Starlette(
        routes=[
            Route("/", home),
            Route("/api/state", board.state),
            Route("/api/events", board.events),
            Route("/api/rights", board.rights),
            Route("/api/rollouts/{id}/{verb}", board.steer, methods=["POST"]),
            Route("/api/{section}", board.section),
        ],
        middleware=[
            Middleware(_Headers, {**HEADERS, "Content-Security-Policy": policy}),
            # Against DNS rebinding: a foreign page whose name resolves to 127.0.0.1 sends its own
            # host name.
            Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
        ],
        exception_handlers={TriplaneError: _refusal},
        lifespan=lifespan,
    )
    app.state.feed = board.feed
    return app


class _Board:
    """The endpoints."""

    def __init__(self, source: DashboardSource, token: str) -> None:
        self._source = source
        self._expected = f"Bearer {token}".encode()
        self.feed = DashboardFeed(source)

    async def state(self, _: Request) -> Response:
        return JSONResponse(await look(self._source))

    async def section(self, request: Request) -> Response:
        name = request.path_params["section"]
        if name not in SECTIONS:
            raise NotFound(f"no section {name!r}; the sections are {', '.join(SECTIONS)}")
        return JSONResponse((await look(self._source))[name])

    async def events(self, _: Request) -> Response:
        changes = self.feed.changes()
        first = await anext(changes, None)  # raises Unavailable before the answer begins
        return _Events(first, changes)

    async def rights(self, request: Request) -> Response:
        return JSONResponse({"change": self._may_change(request)})

    async def steer(self, request: Request) -> Response:
        if not self._may_change(request):
            raise Forbidden(
                "a change needs the operator token (HOME/dashboard.token) in the header "
                "Authorization: Bearer TOKEN"
            )
        verb = request.path_params["verb"]
        calls = self._verbs(await _body(request))
        if verb not in calls:
            raise NotFound(f"no change {verb!r}; the changes are {', '.join(calls)}")
        rollout = await calls[verb](request.path_params["id"])
        await self.feed.nudge()
        return JSONResponse(rollout_row(rollout))

    def _verbs(self, body: Mapping[str, Any]) -> dict[str, Callable[[str], Awaitable[Rollout]]]:
        reason, revert = body.get("reason", ""), body.get("revert", False)
        if not isinstance(reason, str) or len(reason) > MOST_REASON_CHARS:
            raise InvalidInput(f"reason must be text of at most {MOST_REASON_CHARS} characters")
        if not isinstance(revert, bool):
            raise InvalidInput(f"revert must be true or false, got {revert!r}")
        source = self._source
        return {
            "pause": lambda name: source.pause(name, reason),
            "resume": lambda name: source.resume(name, reason),
            "abort": lambda name: source.abort(name, reason, revert=revert),
        }

    def _may_change(self, request: Request) -> bool:
        authorization = request.headers.get("authorization", "").encode()
        # Constant time, so that the token cannot be guessed byte by byte.
        return hmac.compare_digest(authorization, self._expected)


async def _body(request: Request) -> Mapping[str, Any]:
    """Return the JSON object of a request; at most `MOST_BODY_BYTES` are read."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        # While reading: the header Content-Length may be missing or wrong.
        if len(data) > MOST_BODY_BYTES:
            raise InvalidInput(f"the body is longer than {MOST_BODY_BYTES} bytes")
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput("the body is not JSON") from error
    if not isinstance(body, dict):
        raise InvalidInput('the body must be a JSON object such as {"reason": "noise"}')
    try:
        # JSON may escape half a surrogate pair, which no database or message could store.
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput("a text in the body is not valid UTF-8: a lone surrogate") from error
    return body


async def _refusal(_: Request, error: Exception) -> Response:
    status = next((code for family, code in STATUS.items() if isinstance(error, family)), 500)
    record = {"family": type(error).__name__, "message": str(error)}
    return JSONResponse({"error": record}, status)


class _Events(StreamingResponse):
    """Server-sent events of one page; closes the page's stream however it ends.

    Starlette does not close the iterator of a response whose caller left, and a generator that was
    never started runs no `finally`: the feed would count the page until it is garbage collected.
    """

    def __init__(
        self, first: Mapping[str, Any] | None, changes: AsyncGenerator[Mapping[str, Any], None]
    ) -> None:
        super().__init__(self._lines(first), media_type="text/event-stream")
        self._changes = changes

    async def _lines(self, change: Mapping[str, Any] | None) -> AsyncIterator[str]:
        while change is not None:
            yield f"data: {json.dumps(change)}\n\n"
            change = await anext(self._changes, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._changes):
            await super().__call__(scope, receive, send)


class _Headers:
    """Adds the same headers to every answer, including refusals."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str]) -> None:
        self._app = app
        self._headers = [(k.lower().encode(), v.encode()) for k, v in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        await self._app(scope, receive, send_with)
