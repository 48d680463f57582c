"""Channels to the cloud: mutual TLS, limits, keepalive, and a deadline for every call.

A unary call without a deadline gets `DEADLINE_S`. A stream lasts until either side ends it, and is
kept alive. Message limits are the same on both sides.
"""

import threading
from collections.abc import Callable
from functools import partialmethod
from typing import Any, Final, Self

import grpc
import grpc.aio

from triplane.proto.calls import UNSEEN_CALLS
from triplane.proto.credentials import IdentityFolder
from triplane.proto.errors import Unavailable

MESSAGE_BYTES: Final = 4 << 20
METADATA_BYTES: Final = 16 << 10
DEADLINE_S: Final = 30.0
KEEPALIVE_MS: Final = 30_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000
STREAMS_PER_CONNECTION: Final = 128
HANDSHAKE_MS: Final = 60_000
"""Limit of a TLS handshake on either side: as long as an overloaded cloud needs for a whole fleet
that connects at once. A peer that only connects holds a descriptor for that time."""

Options = tuple[tuple[str, Any], ...]

CHANNEL_OPTIONS: Final[Options] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # gRPC's default backoff grows to two minutes, so a fleet would come back late after a restart.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.min_reconnect_backoff_ms", HANDSHAKE_MS),  # by its use, the time limit of a connection
    # Channels with equal arguments otherwise share a connection, which closing one would not end.
    ("grpc.use_local_subchannel_pool", 1),
)


def server_options() -> Options:
    """Return the options of a grpc.aio server."""
    return (
        # With SO_REUSEPORT a second process could bind the same port and take half of the
        # connections.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Accept the pings that our own clients send. By default a server answers pings on an idle
        # connection with GOAWAY (ENHANCE_YOUR_CALM).
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        *UNSEEN_CALLS,
    )


def server_credentials(authority: bytes, certificate: bytes, key: bytes) -> grpc.ServerCredentials:
    """Return credentials for mutual TLS, all in PEM: callers need a certificate of `authority`."""
    return grpc.ssl_server_credentials(
        [(key, certificate)], root_certificates=authority, require_client_auth=True
    )


def connect(identity: IdentityFolder, *, address: str | None = None) -> grpc.Channel:
    """Return a channel to the identity's cloud, or to `address`. It connects on first use."""
    channel = grpc.secure_channel(
        address or identity.cloud, _credentials(identity), options=CHANNEL_OPTIONS
    )
    # The guard is inside, because an intercepted method is registered only when it is called.
    return grpc.intercept_channel(Guarded(channel), _Deadline())


def connect_aio(identity: IdentityFolder, *, address: str | None = None) -> grpc.aio.Channel:
    """Connect for use in an event loop; see `connect`."""
    return grpc.aio.secure_channel(
        address or identity.cloud,
        _credentials(identity),
        options=CHANNEL_OPTIONS,
        interceptors=[_AioDeadline()],
    )


def _credentials(identity: IdentityFolder) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=identity.authority_pem,
        private_key=identity.key_pem,
        certificate_chain=identity.certificate_pem,
    )


class Guarded(grpc.Channel):
    """A channel that one thread may close while another uses it.

    grpc crashes with a segmentation fault when a stub is made of a closed channel. Here that raises
    `Unavailable`; a call in progress ends like any call that lost its connection.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._closed = False

    def _call(self, kind: str, *args: Any, **options: Any) -> Any:
        # The lock covers only the creation of a stub or call object, not the call itself, so
        # `close` never waits for the network.
        with self._lock:
            if self._closed:
                raise Unavailable("the connection to the cloud was closed")
            return getattr(self._channel, kind)(*args, **options)

    unary_unary: Any = partialmethod(_call, "unary_unary")
    unary_stream: Any = partialmethod(_call, "unary_stream")
    stream_unary: Any = partialmethod(_call, "stream_unary")
    stream_stream: Any = partialmethod(_call, "stream_stream")
    subscribe: Any = partialmethod(_call, "subscribe")
    unsubscribe: Any = partialmethod(_call, "unsubscribe")

    def close(self) -> None:
        """Close the channel; calls in progress end. It may be repeated."""
        with self._lock:
            self._closed = True
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_deadline(details: Any) -> Any:
    """Return the details of a call, with the default deadline if it has none."""
    return details if details.timeout is not None else details._replace(timeout=DEADLINE_S)


class _Deadline(grpc.UnaryUnaryClientInterceptor):
    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Set the default deadline."""
        return continuation(_with_deadline(client_call_details), request)


class _AioDeadline(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Set the default deadline."""
        return await continuation(_with_deadline(client_call_details), request)
