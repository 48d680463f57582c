"""Shared by all verbs that call the cloud: the identity, one connection, the printed answer.

Every call is made inside `calls`: an error that the cloud reports is raised as its family with the
cloud's own message, and a cloud that cannot be reached raises Unavailable with its address and how
to start it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import click

from triplane.proto.errors import NotFound, TriplaneError, Unavailable
from triplane.proto.logs import quiet_grpc
from triplane.proto.unreachable import LOST, unreachable_cause
from triplane.unified_ir.cli import machines
from triplane.unified_ir.cli.shell import CommandOutput, json_option, open_output

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from triplane.proto.identity import IdentityFolder

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Answer: TypeAlias = "tuple[Mapping[str, Any] | Message, str] | int"
"""The answer of a verb; see `print_answer`."""

IDENTITY_VARIABLE: Final = "TRIPLANE_IDENTITY"
HOME_VARIABLE: Final = "TRIPLANE_CLOUD_HOME"
DEFAULT_HOME: Final = "~/.triplane/cloud"
OPERATOR_FOLDER: Final = "operator"
KEY_BYTES: Final = 16
TEXT: Final = CommandOutput(as_json=False)
"""Output of callers that are not commands."""
RENEWAL_S: Final = 5.0
"""Longest time that a verb waits for a new certificate; the next verb tries again."""
WAITS_S: Final = (0.5, 1.5)
"""Pauses between the attempts of a write that is repeated under its key."""


def home_option(function: F) -> F:
    """Add `--home DIR`, the folder in which the cloud keeps everything."""
    return machines.home_option("cloud", HOME_VARIABLE, DEFAULT_HOME)(function)


def client_options(function: F) -> F:
    """Add `--identity DIR` and `--json`, the options of every verb that calls the cloud."""
    identity = click.option(
        "--identity", type=click.Path(file_okay=False, path_type=Path), envvar=IDENTITY_VARIABLE,
        metavar="DIR", help=f"The identity folder of the caller (also {IDENTITY_VARIABLE}).  "
        f"[default: {DEFAULT_HOME}/{OPERATOR_FOLDER}, made by `triplane cloud init`]",
    )  # fmt: skip
    return identity(json_option(function))


def calls_cloud(verb: Callable[..., Answer]) -> Callable[..., None]:
    """Make a command of a function of the cloud's services and its options; see `print_answer`."""

    @client_options
    @functools.wraps(verb)
    def command(**options: Any) -> None:
        print_answer(verb, **options)

    return command


def print_answer(
    verb: Callable[..., Answer], *, identity: Path | None, as_json: bool, **options: Any
) -> None:
    """Call `verb` with the cloud's services and print its answer: a record and the same as text.

    A verb that printed by itself answers with its exit code.
    """
    output = open_output(as_json)
    with calls(identity, output) as cloud:
        answer = verb(cloud, **options)
    if isinstance(answer, int):
        click.get_current_context().exit(answer)
    from triplane.cloud.cli.text import plain

    record, text = answer
    output.result(plain(record), text)


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


class Calls:
    """The cloud's services over one channel. output: where a verb reports its progress."""

    def __init__(self, channel: grpc.Channel, output: CommandOutput = TEXT) -> None:
        from triplane.proto.federation_pb2_grpc import FederationStub
        from triplane.proto.fleet_pb2_grpc import FleetStub
        from triplane.proto.identity_pb2_grpc import IdentityStub
        from triplane.proto.metadata_pb2_grpc import MetadataStub
        from triplane.proto.registry_pb2_grpc import RegistryStub

        self.channel, self.output = channel, output
        self.federation, self.fleet = FederationStub(channel), FleetStub(channel)
        self.identity, self.metadata = IdentityStub(channel), MetadataStub(channel)
        self.registry = RegistryStub(channel)


@contextlib.contextmanager
def calls(identity: Path | None, output: CommandOutput = TEXT) -> Iterator[Calls]:
    """Connect with the certificate of `identity`; the channel is closed at the end."""
    path = identity_path(identity)
    quiet_grpc()
    from triplane.proto.channels import connect
    from triplane.proto.identity import IdentityFolder

    folder = _renewed(IdentityFolder(path).load())
    guarded = errors_at(folder.cloud, expires_s=folder.expires_s)
    with contextlib.closing(connect(folder)) as channel, guarded:
        yield Calls(channel, output)


def _renewed(folder: IdentityFolder) -> IdentityFolder:
    """Renew a certificate in the last third of its life, if the cloud answers."""
    from triplane.cloud.home import one_renews
    from triplane.proto.identity import needs_renewal, renew

    # An expired certificate cannot renew itself: the TLS handshake would fail.
    now_s = time.time()
    if now_s >= folder.expires_s or not needs_renewal(folder, now_s):
        return folder
    # Best effort: the present certificate is still valid, and the verb must not fail because of
    # this.
    with contextlib.suppress(TriplaneError, OSError), one_renews(folder):
        return renew(folder, timeout_s=RENEWAL_S)
    return folder


@contextlib.contextmanager
def errors_at(address: str, *, expires_s: float = math.inf) -> Iterator[None]:
    """Raise the error that the cloud raised; if it did not answer, Unavailable with advice.

    expires_s: when the caller's own certificate expires, a common reason for no answer.
    """
    import grpc

    from triplane.proto.status import error_from

    try:
        yield
    except grpc.RpcError as error:
        if is_away(error):
            raise Unavailable(_away_text(address, _details(error), expires_s)) from error
        raise error_from(error) from error
    except Unavailable as error:  # of a call whose error was already mapped to its family
        cause = error.__cause__
        if isinstance(cause, grpc.RpcError) and is_away(cause):
            raise Unavailable(_away_text(address, _details(cause), expires_s)) from cause
        raise


def is_away(error: grpc.RpcError) -> bool:
    """Return whether the call failed before the cloud answered: nothing listens, or it broke."""
    import grpc

    if getattr(error, "code", lambda: None)() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return unreachable_cause(_details(error)) is not None


def _details(error: grpc.RpcError) -> str:
    return str(getattr(error, "details", lambda: "")() or "connection lost")


def _away_text(address: str, details: str, expires_s: float) -> str:
    # Checked first: a rejected handshake only looks like a lost connection.
    if expires_s < time.time():
        return (
            f"the cloud at {address} rejects your certificate, which has expired; ask an operator "
            "for a new token (triplane cloud token) and enrol again. If there is no operator left, "
            "run on the cloud's machine: triplane cloud operator NAME"
        )
    if "certificate_verify_failed" in details.lower():
        return (
            f"the server at {address} is not the cloud of this identity, or that name is not in "
            "its certificate; `triplane cloud init --host` sets the names"
        )
    return (
        f"the cloud at {address} does not answer: {unreachable_cause(details) or LOST}. Is it "
        "running, on this port? `triplane cloud up` starts it on its machine and prints its ports"
    )


def repeated(call: Callable[[], T]) -> T:
    """Make a call that is safe to repeat, and repeat it while the cloud cannot be reached."""
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
    """Return a key for a write that may be sent again: the cloud does it once for each key."""
    return os.urandom(KEY_BYTES)
