"""Executors: one thread pool for each kind of calls, with a limit of calls that wait.

With separate pools, one kind of calls cannot starve another: no number of inference or metadata
calls delays a health check. A thread waits for the call's request, and for inference then for its
turn to compute (`turns.py`); a thread that waits only costs memory. A call beyond the backlog of
its executor is refused with UNAVAILABLE before its bytes are read.

Handlers are synchronous on purpose: on grpc.aio a small call took twice the processor time
(docs/decisions/0038).

grpc lets a behaviour name its own pool (`experimental_thread_pool`). If a later version drops that,
calls share the default pool, and only the isolation is lost.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import grpc

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[bytes, bytes]
else:  # generic for type checkers only
    Handler = grpc.RpcMethodHandler

Behaviour = Callable[[Iterator[bytes], grpc.ServicerContext], Any]


BACKLOG: Final = 1024  # calls that wait for a thread, for milliseconds


class BoundedExecutor(ThreadPoolExecutor):
    """A thread pool that counts its calls, waiting and running.

    receiving: calls that may wait for their request at once for more than a moment; fewer than
    `threads`, so that a burst does not block others.
    """

    def __init__(self, name: str, *, threads: int, receiving: int) -> None:
        super().__init__(max_workers=threads, thread_name_prefix=name)
        self.name = name
        self.receiving = receiving
        self.capacity = threads + BACKLOG
        self._held = 0
        self._count = threading.Lock()

    @property
    def held(self) -> int:
        """Number of calls in this pool."""
        return self._held

    @property
    def full(self) -> bool:
        """Whether the next call must be refused."""
        return self._held >= self.capacity

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue `fn`; it is counted until it ends, even if its call has ended."""
        with self._count:
            self._held += 1
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Any]) -> None:
        with self._count:
            self._held -= 1


class Routes(grpc.GenericRpcHandler):
    """Finds handler and executor of a method; it is called on grpc's serving thread.

    All handlers take an iterator of messages, also for methods with a single message. Only then a
    behaviour starts before the message has arrived, and can give up on it. The wire is the same.
    """

    def __init__(
        self,
        control: BoundedExecutor,
        open_to_the_end: Collection[BoundedExecutor],
        on_refusal: Callable[[], None],
    ) -> None:
        self._open_to_the_end = open_to_the_end
        self._on_refusal = on_refusal
        self._handlers: dict[str, tuple[BoundedExecutor, Handler]] = {}
        self._services: tuple[str, ...] = ()
        self._leaving = False
        self.last_call_s = 0.0  # time of the newest call, on `time.monotonic`
        self._gone = _answering(
            control, grpc.StatusCode.UNAVAILABLE, "the server is shutting down; call again later"
        )
        self._busy = _answering(control, grpc.StatusCode.UNAVAILABLE, "all queues are full; retry")
        self._unknown = _answering(
            control,
            grpc.StatusCode.UNIMPLEMENTED,
            "this server does not have that method; docs/serving.md lists those it has",
        )

    def add(
        self, service: str, methods: Mapping[str, tuple[BoundedExecutor, Behaviour, bool]]
    ) -> None:
        """Add a service: executor and behaviour of each method, and whether it answers a stream."""
        self._services += (f"/{service}/",)
        for method, (executor, behaviour, streams) in methods.items():
            handler = _handler(behaviour, executor, streams=streams)
            self._handlers[f"/{service}/{method}"] = executor, handler

    def refuse_new(self) -> None:
        """Answer UNAVAILABLE to all but control and health calls from now on."""
        self._leaving = True

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """See `grpc.GenericRpcHandler`."""
        self.last_call_s = time.monotonic()
        method = handler_call_details.method
        if (route := self._handlers.get(method)) is None:
            return self._unknown if method.startswith(self._services) else None
        executor, handler = route
        leaving = self._leaving and executor not in self._open_to_the_end
        if leaving or executor.full:
            self._on_refusal()
            return self._gone if leaving else self._busy
        return handler


def _handler(behaviour: Behaviour, executor: BoundedExecutor, *, streams: bool) -> Handler:
    make = (
        grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    )
    # A copy with an attribute, which grpc reads to choose the pool for the call.
    routed: Any = functools.partial(behaviour)
    routed.experimental_thread_pool = executor
    return make(routed, None, None)


def _answering(executor: BoundedExecutor, code: grpc.StatusCode, text: str) -> Handler:
    def answer(_: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        context.abort(code, text)

    return _handler(answer, executor, streams=False)
