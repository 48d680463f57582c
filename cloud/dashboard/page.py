"""The HTTP server of the dashboard, within the process that holds the data it shows.

It uses the plain event loop and the plain parser whatever else is installed: uvicorn would pick up
a WebSocket library or another event loop of another package, and the page needs neither.
"""

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

GRACE_S = 1  # an open event stream is cut after this


class Page(uvicorn.Server):
    """Serves `app` until `should_exit`; the process keeps its own signal handlers and log."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app, loop="asyncio", http="h11", ws="none", lifespan="on",
                log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S,
            )
        )  # fmt: skip

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        # uvicorn would replace the handlers of `signals.Termination`, and the cloud would not
        # drain.
        yield
