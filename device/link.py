"""A channel that one thread may close while another works with it.

grpc ends the process by a segmentation fault where a stub is made of a closed channel. Here that
is `Unavailable`; a call that is under way when the channel closes ends as any that lost its link.
"""

import threading
from typing import Any, Self

import grpc

from triplane.proto.errors import Unavailable


class Link(grpc.Channel):
    """Hands everything on to `channel` until `close`."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._closed = False

    def _made(self, kind: str, *args: Any, **options: Any) -> Any:
        with self._lock:
            if self._closed:
                raise Unavailable("the link to the cloud was closed meanwhile")
            return getattr(self._channel, kind)(*args, **options)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """See `grpc.Channel`."""
        return self._made("unary_unary", *args, **options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """See `grpc.Channel`."""
        return self._made("unary_stream", *args, **options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """See `grpc.Channel`."""
        return self._made("stream_unary", *args, **options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """See `grpc.Channel`."""
        return self._made("stream_stream", *args, **options)

    def subscribe(self, *args: Any, **options: Any) -> None:
        """See `grpc.Channel`."""
        self._made("subscribe", *args, **options)

    def unsubscribe(self, *args: Any, **options: Any) -> None:
        """See `grpc.Channel`."""
        self._made("unsubscribe", *args, **options)

    def close(self) -> None:
        """May be said again; calls that are under way end."""
        with self._lock:
            self._closed = True
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
