"""One connection to the cloud per verb: whose identity, which calls, what to say when it is away.

Every call is made inside `calls`: a failed one leaves as its error family with the cloud's own
words, and a cloud that cannot be reached leaves as Unavailable with its address and how to start
it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from triplane.proto.errors import NotFound, TriplaneError, Unavailable
from triplane.proto.logs import quiet_grpc
from triplane.unified_ir.cli.shell import json_option

if TYPE_CHECKING:
    import grpc

    from triplane.proto.fleet_pb2_grpc import FleetStub
    from triplane.proto.identity import IdentityFolder
    from triplane.proto.identity_pb2_grpc import IdentityStub
    from triplane.proto.metadata_pb2_grpc import MetadataStub
    from triplane.proto.registry_pb2_grpc import RegistryStub

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

IDENTITY_VARIABLE: Final = "TRIPLANE_IDENTITY"
HOME_VARIABLE: Final = "TRIPLANE_CLOUD_HOME"
DEFAULT_HOME: Final = "~/.triplane/cloud"
OPERATOR_FOLDER: Final = "operator"
KEY_BYTES: Final = 16
RENEWAL_S: Final = 5.0
"""A verb waits no longer for a new certificate; the next one tries again."""
TRANSPORT_WORDS: Final = (
    "failed to connect",
    "connection lost",
    "socket closed",
    "connection reset",
    "broken pipe",
    "goaway",
    "keepalive",
    "endpoint closing",
    "dns resolution",
    "recvmsg",
    "handshake",
)
"""By these grpc's own words for a broken link differ from a cloud's "not now"."""
WAITS_S: Final = (0.5, 1.5)
"""Between the tries of a write that is repeated under its key."""


def home_option(function: F) -> F:
    """`--home DIR`: where the cloud keeps everything."""
    return click.option(
        "--home", type=click.Path(file_okay=False, path_type=Path), envvar=HOME_VARIABLE,
        default=DEFAULT_HOME, show_default=True, metavar="DIR",
        help=f"The cloud's folder (also {HOME_VARIABLE}).",
        callback=lambda _ctx, _param, path: path.expanduser(),
    )(function)  # fmt: skip


def client_options(function: F) -> F:
    """`--identity DIR` and `--json`, which every verb that calls the cloud has."""
    identity = click.option(
        "--identity", type=click.Path(file_okay=False, path_type=Path), envvar=IDENTITY_VARIABLE,
        metavar="DIR", help=f"Who calls: an identity folder (also {IDENTITY_VARIABLE}).  "
        f"[default: {DEFAULT_HOME}/{OPERATOR_FOLDER}, made by `triplane cloud init`]",
    )  # fmt: skip
    return identity(json_option(function))


def identity_path(option: Path | None) -> Path:
    """Return the identity folder to use; NotFound explains how to get one."""
    home = Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME).expanduser()
    path = option.expanduser() if option else home / OPERATOR_FOLDER
    if not (path / "cert.pem").is_file():
        raise NotFound(
            f"no identity in {path}; name one with --identity DIR or {IDENTITY_VARIABLE}. On the "
            "cloud's machine `triplane cloud init` makes one; elsewhere ask an operator for "
            "`triplane cloud token --role ROLE` and give it to `triplane cloud enrol`"
        )
    return path


@dataclass(frozen=True, slots=True)
class Calls:
    """The cloud's services over one channel."""

    channel: grpc.Channel
    fleet: FleetStub
    identity: IdentityStub
    metadata: MetadataStub
    registry: RegistryStub


@contextlib.contextmanager
def calls(identity: Path | None) -> Iterator[Calls]:
    """The services, called as the principal of `identity`; closes the channel at the end."""
    path = identity_path(identity)
    quiet_grpc()
    from triplane.proto.channels import connect
    from triplane.proto.fleet_pb2_grpc import FleetStub
    from triplane.proto.identity import IdentityFolder
    from triplane.proto.identity_pb2_grpc import IdentityStub
    from triplane.proto.metadata_pb2_grpc import MetadataStub
    from triplane.proto.registry_pb2_grpc import RegistryStub

    folder = _renewed(IdentityFolder(path).load())
    channel = connect(folder)
    try:
        with errors_at(folder.cloud, expires_s=folder.expires_s):
            yield Calls(
                channel,
                FleetStub(channel),
                IdentityStub(channel),
                MetadataStub(channel),
                RegistryStub(channel),
            )
    finally:
        channel.close()


def _renewed(folder: IdentityFolder) -> IdentityFolder:
    """With a new certificate in the last third of the old one's life, where the cloud answers."""
    from triplane.cloud.home import one_renews
    from triplane.proto.identity import needs_renewal, renew

    now_s = time.time()
    if now_s >= folder.expires_s or not needs_renewal(folder, now_s):
        return folder
    with contextlib.suppress(TriplaneError, OSError), one_renews(folder):
        return renew(folder, timeout_s=RENEWAL_S)
    return folder


@contextlib.contextmanager
def errors_at(address: str, *, expires_s: float = math.inf) -> Iterator[None]:
    """Raises what the cloud raised; where none answered, Unavailable with the way out.

    expires_s: when the caller's own certificate ends, a common reason for silence.
    """
    import grpc

    from triplane.proto.status import error_from

    try:
        yield
    except grpc.RpcError as error:
        if is_away(error):
            raise Unavailable(_away_text(address, _details(error), expires_s)) from error
        raise error_from(error) from error
    except Unavailable as error:  # where a call was already turned into its family
        cause = error.__cause__
        if isinstance(cause, grpc.RpcError) and is_away(cause):
            raise Unavailable(_away_text(address, _details(cause), expires_s)) from cause
        raise


def is_away(error: grpc.RpcError) -> bool:
    """Whether the call failed without a word of the cloud: nothing listens, or it was cut off."""
    import grpc

    if getattr(error, "code", lambda: None)() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return any(word in _details(error).lower() for word in TRANSPORT_WORDS)


def _details(error: grpc.RpcError) -> str:
    return str(getattr(error, "details", lambda: "")() or "connection lost")


def _away_text(address: str, details: str, expires_s: float) -> str:
    if expires_s < time.time():
        return (
            f"the cloud at {address} lets nobody in whose certificate has ended, as yours has; ask "
            "an operator for a new token (triplane cloud token) and enrol again. Is none left: "
            "triplane cloud operator NAME, on the cloud's machine"
        )
    if "certificate_verify_failed" in details.lower():
        return (
            f"who answers at {address} is not the cloud of this identity, or not under that name "
            f"({details}); `triplane cloud init --host` decides the names"
        )
    return (
        f"the cloud at {address} does not answer ({details}); is it running? "
        "Start it on its machine with: triplane cloud up"
    )


def repeated(call: Callable[[], T]) -> T:
    """The answer of a call that may be made again, made again while the cloud is away."""
    import grpc

    for wait_s in WAITS_S:
        try:
            return call()
        except grpc.RpcError as error:
            if not is_away(error):
                raise
            time.sleep(wait_s)
    return call()


def new_key() -> bytes:
    """For a write that may be sent again: the same key is done once."""
    return os.urandom(KEY_BYTES)
