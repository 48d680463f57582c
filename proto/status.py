"""Error families and gRPC status codes: one table for both directions.

A servicer runs its body inside `status_of(context)`; a client runs its call inside
`remote_errors()` and catches the errors that the server raised. An error of no family is internal:
the caller gets a constant text with an incident id, and the log has the traceback under this id.

Some families share a status code, so a trailer names the family, with facts for scripts
(`with_details`, `facts_of`), in the form that other gRPC tools read as google.rpc.ErrorInfo. A
trailer that is damaged, too long or contradicts the status code is ignored; then the code decides.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import DecodeError

from triplane.proto import status_pb2 as pb
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

MAX_DETAIL_CHARS: Final = 800
MAX_DETAIL_BYTES: Final = 1500
"""Length of the text in UTF-8. It is sent twice, percent-encoded (up to 3 bytes per byte) and in
base64 (4 bytes for 3), and peers commonly refuse more than 8 KiB of headers."""
MAX_FACTS: Final = 8
MAX_FACT_CHARS: Final = 64
MAX_TRAILER_BYTES: Final = 8 << 10
TRAILER: Final = "grpc-status-details-bin"
DOMAIN: Final = "triplane"
ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"

E = TypeVar("E", bound=Exception)


class DeadlineExceeded(Unavailable):
    """The caller's deadline passed before the work was done."""


class Unimplemented(InvalidInput):
    """The called method or option does not exist on this server."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One family: the code it is sent as, and other codes that are received as this family."""

    family: type[TriplaneError]
    code: grpc.StatusCode
    also: tuple[grpc.StatusCode, ...] = ()


_S = grpc.StatusCode
_CALLER_MUST_CHANGE: Final = (_S.OUT_OF_RANGE, _S.UNAUTHENTICATED, _S.PERMISSION_DENIED)
# A subclass stands before its base: the first row whose family matches decides.
# fmt: off
TABLE: Final = (
    StatusRow(DeadlineExceeded, _S.DEADLINE_EXCEEDED),
    StatusRow(Unimplemented,    _S.UNIMPLEMENTED),
    StatusRow(InvalidInput,     _S.INVALID_ARGUMENT, _CALLER_MUST_CHANGE),
    StatusRow(NotFound,         _S.NOT_FOUND),
    StatusRow(Conflict,         _S.FAILED_PRECONDITION, (_S.ALREADY_EXISTS, _S.ABORTED)),
    StatusRow(Unavailable,      _S.UNAVAILABLE, (_S.RESOURCE_EXHAUSTED, _S.CANCELLED)),
    StatusRow(Corrupt,          _S.DATA_LOSS),
    StatusRow(MissingExtra,     _S.UNIMPLEMENTED),
    StatusRow(TriplaneError,    _S.INTERNAL, (_S.UNKNOWN,)),
)
# fmt: on
_FAMILY_OF: Final = {code: row.family for row in reversed(TABLE) for code in (*row.also, row.code)}


def _row_of(error: BaseException) -> StatusRow:
    return next((row for row in TABLE if isinstance(error, row.family)), TABLE[-1])


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code that `error` is sent as: INTERNAL if it is of no family."""
    return _row_of(error).code


def family_of(code: grpc.StatusCode) -> type[TriplaneError]:
    """Return the family to raise for a received status code. KeyError for OK."""
    return _FAMILY_OF[code]


def with_details(error: E, /, **facts: str) -> E:
    """Add facts for scripts to `error` and return it; a client reads them with `facts_of`.

    There are at most MAX_FACTS, of at most MAX_FACT_CHARS printable characters each. Others are
    left out rather than raise an error in place of `error`.
    """
    valid = {name: fact for name, fact in facts.items() if _is_fact(name) and _is_fact(fact)}
    vars(error)["facts"] = MappingProxyType(dict(list(valid.items())[:MAX_FACTS]))
    return error


def facts_of(error: BaseException) -> Mapping[str, str]:
    """Return the details of an error, added here or on the server (see `with_details`).

    An internal error has its `incident`.
    """
    details: Mapping[str, str] = vars(error).get("facts", {})
    return details


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that a caller gets for an error."""

    code: grpc.StatusCode
    text: str
    family: type[TriplaneError]
    facts: Mapping[str, str] = field(default_factory=dict)

    def trailer(self) -> tuple[tuple[str, bytes], ...]:
        """Return the metadata that names the family and the facts; see status.proto."""
        reason = pb.Reason(family=self.family.__name__, domain=DOMAIN, fields=self.facts)
        packed = Packed(type_url=ERROR_INFO, value=reason.SerializeToString(deterministic=True))
        number: int = self.code.value[0]
        status = pb.Status(code=number, message=self.text, details=[packed])
        return ((TRAILER, status.SerializeToString()),)


def answer_to(error: Exception) -> Answer:
    """Return the caller's answer for `error`; log it with an incident id if it is internal."""
    row = _row_of(error)
    if row.code is not grpc.StatusCode.INTERNAL:
        return Answer(row.code, _cut(str(error)), row.family, facts_of(error))
    incident = secrets.token_hex(6)
    logger.error("internal error", exc_info=error, extra={"incident": incident})
    text = f"internal error, incident {incident}; the server's log has it under this id"
    return Answer(row.code, text, row.family, {"incident": incident})


@contextlib.contextmanager
def status_of(context: grpc.ServicerContext) -> Iterator[None]:
    """Answer an error of the body with its status code. The body must not abort by itself."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- the process edge: `answer_to` logs it
        answer = answer_to(error)
        context.set_trailing_metadata(answer.trailer())
        context.abort(answer.code, answer.text)


@contextlib.asynccontextmanager
async def status_of_aio(context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[None]:
    """`status_of` for a servicer of grpc.aio.

    A write that fails because its call has ended cancels the servicer, as grpc.aio itself does if
    it notices the end first.
    """
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except grpc.aio.InternalError as error:
        logger.info("the caller left while it was answered: %s", error)
        raise asyncio.CancelledError from None
    except Exception as error:  # noqa: BLE001 -- the process edge: `answer_to` logs it
        answer = answer_to(error)
        context.set_trailing_metadata(answer.trailer())
        await context.abort(answer.code, answer.text)


def error_from(error: grpc.RpcError) -> TriplaneError:
    """Return the error that the server raised, from its trailer and its status."""
    # A bare RpcError has none of these methods; only errors of calls do.
    code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    text: str | None = getattr(error, "details", lambda: None)()
    reason = _reason(getattr(error, "trailing_metadata", lambda: None)())
    return with_details(_family(reason, code)(text or code.name), **reason.fields)


@contextlib.contextmanager
def remote_errors() -> Iterator[None]:
    """Raise the family of any failed call in the body, chained to the gRPC error."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from(error) from error


def _reason(metadata: Any) -> pb.Reason:
    """Return our entry among the trailer's details, empty if there is none or it is damaged."""
    data = next((value for key, value in metadata or () if key == TRAILER), b"")
    if not isinstance(data, bytes) or len(data) > MAX_TRAILER_BYTES:
        return pb.Reason()
    try:
        for packed in pb.Status.FromString(data).details:
            if packed.type_url == ERROR_INFO:
                reason = pb.Reason.FromString(packed.value)
                if reason.domain == DOMAIN:
                    return reason
    except DecodeError:
        logger.info("a trailer is damaged", extra={"bytes": len(data)})
    return pb.Reason()


def _family(reason: pb.Reason, code: grpc.StatusCode) -> type[TriplaneError]:
    for row in TABLE:
        # A trailer cannot turn a status into another family: both must agree.
        if row.family.__name__ == reason.family and code in {row.code, *row.also}:
            return row.family
    return family_of(code)


def _is_fact(text: str) -> bool:
    return 0 < len(text) <= MAX_FACT_CHARS and text.isprintable()


def _cut(text: str) -> str:
    # Cut characters before bytes, so that a huge text is not encoded, then drop a cut character.
    data = text[:MAX_DETAIL_CHARS].encode(errors="replace")
    return data[:MAX_DETAIL_BYTES].decode(errors="ignore")
