"""Authentication and authorization of every call on the main port.

The peer certificate of a call must have a serial number that was issued to its name and is neither
revoked nor expired, according to the database (`admission_cache.py`); then the method's row of
`RIGHTS` decides. A servicer gets the caller from `caller()`. Revoking a name ends its streams at
once; the methods of `FAREWELL` first get a moment to send a last message.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final

import grpc
import grpc.aio
from cryptography import x509

from triplane.cloud.identity.principals import Principal, Principals, serial_of
from triplane.cloud.identity.rights import RIGHTS
from triplane.proto.errors import Corrupt, Unavailable
from triplane.proto.identity import common_name, key_digest
from triplane.proto.status import Answer, family_of

logger = logging.getLogger(__name__)

FAREWELL: Final = frozenset({"/triplane.session.v1.Session/Open"})
FAREWELL_S: Final = 0.5
MAX_STREAMS: Final = 128
"""Largest number of open streams of one name, including uploads."""
OPEN_BURST: Final = 32
"""Sessions that one name may open in quick succession: each takes some milliseconds."""
OPEN_EVERY_S: Final = 1.0
"""Time after which a name may open one more; a caller that reconnects waits longer."""
CERTIFICATES: Final = 4096
"""Number of parsed certificates that are cached."""

_CALLER: Final[ContextVar[Principal]] = ContextVar("caller")
_S = grpc.StatusCode
# fmt: off
_SHAPES: Final = {  # (request streams, response streams): the handler's attribute, its maker
    (False, False): ("unary_unary",   grpc.unary_unary_rpc_method_handler),
    (False, True):  ("unary_stream",  grpc.unary_stream_rpc_method_handler),
    (True,  False): ("stream_unary",  grpc.stream_unary_rpc_method_handler),
    (True,  True):  ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
# fmt: on


class CallRefused(Exception):
    """A call that is refused. answer: the status and text that the caller gets."""

    def __init__(self, code: grpc.StatusCode, text: str, **facts: str) -> None:
        super().__init__(text)
        self.answer = Answer(code, text, family_of(code), facts)


def caller() -> Principal:
    """Return the principal whose call is being served."""
    return _CALLER.get()


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that the table does not allow; limits open streams by name."""

    def __init__(self, principals: Principals) -> None:
        self._principals = principals
        self._streams: dict[str, dict[asyncio.Task[Any], str]] = {}
        self._ended: set[asyncio.Task[Any]] = set()
        self._callbacks: list[Callable[[str], None]] = []
        self._revocations = 0
        self._opened: dict[str, tuple[float, float]] = {}  # by name: opened lately, as of when

    def on_revoked(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with each revoked name, before its streams are ended."""
        self._callbacks.append(callback)

    def revoked(self, name: str) -> None:
        """End the name's open streams."""
        # Before anything else: calls that are being admitted now notice it and look again.
        self._revocations += 1
        for callback in self._callbacks:
            callback(name)
        held = self._streams.get(name, {})
        # Marked now, so that a stream that ends by itself during the farewell is also reported as
        # revoked.
        self._ended.update(held)
        for task, method in list(held.items()):
            if method in FAREWELL:
                asyncio.get_running_loop().call_later(FAREWELL_S, self._cut, task)
            else:
                self._cut(task)

    def _cut(self, task: asyncio.Task[Any]) -> None:
        if task in self._ended:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See `grpc.aio.ServerInterceptor`."""
        # None means that no service has the method; grpc answers UNIMPLEMENTED.
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind, make = _SHAPES[handler.request_streaming, handler.response_streaming]
        behaviour = self._admitted(handler, getattr(handler, kind), handler_call_details.method)
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _admitted(
        self, handler: Any, inner: Any, method: str
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return the handler as a coroutine that checks the caller first.

        Streams get a coroutine too: its clean-up runs as soon as grpc.aio cancels the call, while a
        generator of responses would wait for the garbage collector.
        """
        if inspect.isasyncgenfunction(inner):
            inner = _written(inner)
        is_stream = handler.request_streaming or handler.response_streaming

        async def behave(request: Any, context: Any) -> Any:
            who = await self._let_in(method, context, streams=is_stream)
            if not is_stream:
                return await inner(request, context)
            task, answer = self._enter(who, method), None
            try:
                answer = await inner(request, context)
            except asyncio.CancelledError:
                # Cancelled by grpc.aio because the caller has left, not by a revocation.
                if task not in self._ended:
                    raise
            finally:
                was_revoked = self._leave(who, task)
            if was_revoked:
                text = f"the certificate of {who.name!r} was revoked"
                await _end(context, CallRefused(_S.UNAUTHENTICATED, text, name=who.name))
            return answer

        return behave

    def _enter(self, who: Principal, method: str) -> asyncio.Task[Any]:
        task = asyncio.current_task()
        assert task is not None
        self._streams.setdefault(who.name, {})[task] = method
        return task

    def _leave(self, who: Principal, task: asyncio.Task[Any]) -> bool:
        """Return whether the stream ends because its name was revoked."""
        held = self._streams[who.name]
        del held[task]
        if not held:
            del self._streams[who.name]
        was_revoked = task in self._ended
        self._ended.discard(task)
        return was_revoked

    def _admit(self, name: str, method: str) -> None:
        """Raise CallRefused if a caller has too many streams or opens sessions too fast."""
        held = len(self._streams.get(name, {}))
        if held >= MAX_STREAMS:
            raise CallRefused(
                _S.UNAVAILABLE,
                f"{name!r} has {held} open streams (limit {MAX_STREAMS}); close some and try again",
                name=name,
            )
        if method not in FAREWELL:
            return
        now_s = asyncio.get_running_loop().time()
        opened, since_s = self._opened.get(name, (0.0, now_s))
        # A token bucket that drains by one every OPEN_EVERY_S.
        opened = max(0.0, opened - (now_s - since_s) / OPEN_EVERY_S)
        if opened > OPEN_BURST - 1:
            raise CallRefused(
                _S.UNAVAILABLE,
                f"{name!r} opened {OPEN_BURST} sessions within a short time; wait {OPEN_EVERY_S:g} "
                "s and try again. Does another process use the same certificate?",
                name=name,
            )
        self._opened[name] = opened + 1, now_s

    async def _let_in(self, method: str, context: Any, *, streams: bool = False) -> Principal:
        try:
            who = await self._who(context)
            roles = RIGHTS.get(method, frozenset())
            if who.role not in roles:
                raise CallRefused(
                    _S.PERMISSION_DENIED,
                    f"{who.name!r} is a {who.role} and may not call {method.rpartition('/')[2]}; "
                    f"that is for: {', '.join(sorted(roles)) or 'none'}",
                    name=who.name,
                    role=who.role,
                )
            if streams:
                self._admit(who.name, method)
        except CallRefused as refusal:
            logger.warning("call refused", extra={"method": method, "reason": str(refusal)})
            await _end(context, refusal)
        # The database does not answer. Nobody is admitted without it, but a retry may succeed.
        except Unavailable as error:
            await _end(context, CallRefused(_S.UNAVAILABLE, str(error)))
        _CALLER.set(who)
        return who

    async def _who(self, context: Any) -> Principal:
        # TLS has verified the chain to our authority and its lifetime; the database knows the rest.
        pem = context.auth_context().get("x509_pem_cert", [b""])[0]
        try:
            serial, name, key = _read(pem)
        except (ValueError, Corrupt) as error:
            text = "a certificate of this cloud is needed"
            raise CallRefused(_S.UNAUTHENTICATED, text) from error
        principal = await self._holder(serial, name, key)
        if principal is None:
            raise CallRefused(
                _S.UNAUTHENTICATED,
                f"the certificate of {name[:80]!r} is revoked, replaced or not of this cloud; "
                "enrol with a new token",
            )
        return principal

    async def _holder(self, serial: str, name: str, key: bytes) -> Principal | None:
        """Query again if a name was revoked meanwhile: the answer may be older than that."""
        while True:
            revocations = self._revocations
            principal = await self._principals.holder(serial, name, key)
            if revocations == self._revocations:
                return principal


def _written(
    generate: Callable[[Any, Any], AsyncGenerator[Any, None]],
) -> Callable[[Any, Any], Awaitable[None]]:
    """Return a coroutine that writes a generator's responses and closes it at the call's end."""

    async def behave(request: Any, context: Any) -> None:
        async with contextlib.aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return behave


@lru_cache(maxsize=CERTIFICATES)
def _read(pem: bytes) -> tuple[str, str, bytes]:
    """Return serial number, name and digest of the key of a certificate. ValueError, Corrupt."""
    certificate = x509.load_pem_x509_certificate(pem)
    return serial_of(certificate), common_name(certificate), key_digest(certificate)


async def _end(context: Any, refusal: CallRefused) -> None:
    answer = refusal.answer
    await context.abort(answer.code, answer.text, answer.trailer())
