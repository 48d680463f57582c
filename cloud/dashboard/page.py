"""The HTTP server of the dashboard, within the process that holds the data it shows.

It takes the plain event loop and the plain parser whatever else is installed: uvicorn would pick
up a WebSocket library or another loop that a neighbour brought, and the page uses neither.
"""

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

GRACE_S = 1  # an open event stream is cut after this


class Page(uvicorn.Server):
    """Serves `app` until `should_exit`; the process owns its signals and its log, not the page."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app, loop="asyncio", http="h11", ws="none", lifespan="on",
                log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S,
            )
        )  # fmt: skip

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield
