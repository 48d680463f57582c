"""Error families and gRPC status, one table for both directions.

A servicer runs its body inside `status_of(context)`; a client runs its call inside
`remote_errors()` and catches what the server raised. Anything that is no family is an internal
error: the caller gets a constant text and an incident id, the log gets the traceback under it.
"""

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import grpc
import grpc.aio

from triplane.proto.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    MissingExtra,
    NotFound,
    TriplaneError,
    Unavailable,
)

logger = logging.getLogger(__name__)

# The text travels in a trailer; peers commonly refuse headers beyond 8 KiB in all, and a
# character may take 3 percent-encoded groups of 3 bytes.
MAX_DETAIL_CHARS: Final = 800


class DeadlineExceeded(Unavailable):
    """The caller's deadline passed before the work was done, perhaps before it began."""


class Unimplemented(InvalidInput):
    """The called method or option does not exist on this server."""


class Aborting(Protocol):
    """What `status_of` needs of a servicer context."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with `code`; raises."""


class AbortingLater(Protocol):
    """The same of a grpc.aio context."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with `code`; raises."""


@dataclass(frozen=True, slots=True)
class Row:
    """One family: the status it leaves as, and the other statuses that come back as it."""

    family: type[TriplaneError]
    code: grpc.StatusCode
    also: tuple[grpc.StatusCode, ...] = ()


_S = grpc.StatusCode
_CALLER_MUST_CHANGE: Final = (_S.OUT_OF_RANGE, _S.UNAUTHENTICATED, _S.PERMISSION_DENIED)
# A subclass stands before its base: the first row whose family matches decides.
# fmt: off
TABLE: Final = (
    Row(DeadlineExceeded, _S.DEADLINE_EXCEEDED),
    Row(Unimplemented,    _S.UNIMPLEMENTED),
    Row(InvalidInput,     _S.INVALID_ARGUMENT, _CALLER_MUST_CHANGE),
    Row(NotFound,         _S.NOT_FOUND),
    Row(Conflict,         _S.FAILED_PRECONDITION, (_S.ALREADY_EXISTS, _S.ABORTED)),
    Row(Unavailable,      _S.UNAVAILABLE, (_S.RESOURCE_EXHAUSTED, _S.CANCELLED)),
    Row(Corrupt,          _S.DATA_LOSS),
    Row(MissingExtra,     _S.UNIMPLEMENTED),
    Row(TriplaneError,    _S.INTERNAL, (_S.UNKNOWN,)),
)
# fmt: on
_FAMILY_OF: Final = {code: row.family for row in reversed(TABLE) for code in (*row.also, row.code)}


def code_of(error: BaseException) -> grpc.StatusCode:
    """Status that `error` leaves as: its family's row, INTERNAL for anything else."""
    for row in TABLE:
        if isinstance(error, row.family):
            return row.code
    return grpc.StatusCode.INTERNAL


def family_of(code: grpc.StatusCode) -> type[TriplaneError]:
    """Family that a received status raises as. OK has none and raises KeyError."""
    return _FAMILY_OF[code]


def describe(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Status and text for the caller; logs `error` with an incident id when it is internal."""
    code = code_of(error)
    if code is not grpc.StatusCode.INTERNAL:
        return code, str(error)[:MAX_DETAIL_CHARS]
    incident = secrets.token_hex(6)
    logger.error("internal error", exc_info=error, extra={"incident": incident})
    return code, f"internal error, incident {incident}; the server's log has it under this id"


@contextlib.contextmanager
def status_of(context: Aborting) -> Iterator[None]:
    """Answer whatever the body raises with its status. The body never aborts by itself."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- the process edge: `describe` logs it
        code, text = describe(error)
        context.abort(code, text)


@contextlib.asynccontextmanager
async def status_of_aio(context: AbortingLater) -> AsyncIterator[None]:
    """`status_of` for a servicer of grpc.aio."""
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception as error:  # noqa: BLE001 -- the process edge: `describe` logs it
        code, text = describe(error)
        await context.abort(code, text)


def error_from(error: grpc.RpcError) -> TriplaneError:
    """What the server raised, as far as its status tells."""
    code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    text: str | None = getattr(error, "details", lambda: None)()
    return family_of(code)(text or code.name)


@contextlib.contextmanager
def remote_errors() -> Iterator[None]:
    """Raise the family of any failed call in the body, chained to the gRPC error."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from(error) from error
