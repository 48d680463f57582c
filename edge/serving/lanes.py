"""Thread pools for kinds of calls: which thread receives a call, and how many calls may wait.

Separate pools keep kinds of calls from starving each other: no number of inference or metadata
calls delays a health check. A thread of a lane waits for the call's request, and in the lane of
inference then for its turn to compute (`turns.py`); threads that wait cost memory only. A call
beyond its lane's backlog is refused with UNAVAILABLE before its bytes are read.

Handlers are synchronous on purpose: on grpc.aio a small call took twice the processor time
(docs/decisions/0038).

grpc lets a behaviour name its own pool (`experimental_thread_pool`); if that ever goes, calls share
the default pool and only the isolation is lost.
"""

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


BACKLOG: Final = 1024  # calls that wait for a thread of their lane, for milliseconds


class BoundedExecutor(ThreadPoolExecutor):
    """A thread pool that knows how many calls it holds, waiting and running.

    `receiving`: calls that may wait for their request at once for more than a moment; fewer than
    `threads`, so that a burst does not keep others out.
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
        """Calls that this pool holds."""
        return self._held

    @property
    def full(self) -> bool:
        """Whether the next call must be refused."""
        return self._held >= self.capacity

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue `fn`; counted until it is done, whatever becomes of its call."""
        with self._count:
            self._held += 1
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Any]) -> None:
        with self._count:
            self._held -= 1


class Routed:
    """A behaviour that runs in `lane`."""

    def __init__(self, behaviour: Behaviour, lane: BoundedExecutor) -> None:
        self._behaviour = behaviour
        self.experimental_thread_pool = lane

    def __call__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        """Run the behaviour."""
        return self._behaviour(messages, context)


class Routes(grpc.GenericRpcHandler):
    """Full method name to handler and lane; asked on the serving thread, so it only looks up.

    All handlers take a message iterator, also those of single-message methods: only so does a
    behaviour start before the message has arrived and can give up on it. The wire is the same.
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
        self.last_call_s = 0.0  # when a call was last looked up, on `time.monotonic`
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
        """Add a service: method name to lane, behaviour and whether it answers with a stream."""
        self._services += (f"/{service}/",)
        for method, (lane, behaviour, streams) in methods.items():
            self._handlers[f"/{service}/{method}"] = (
                lane,
                _handler(behaviour, lane, streams=streams),
            )

    def refuse_new(self) -> None:
        """Answer UNAVAILABLE to all but control and health calls from now on."""
        self._leaving = True

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """See `grpc.GenericRpcHandler`."""
        self.last_call_s = time.monotonic()
        method = handler_call_details.method
        if (route := self._handlers.get(method)) is None:
            return self._unknown if method.startswith(self._services) else None
        lane, handler = route
        leaving = self._leaving and lane not in self._open_to_the_end
        if leaving or lane.full:
            self._on_refusal()
            return self._gone if leaving else self._busy
        return handler


def _handler(behaviour: Behaviour, lane: BoundedExecutor, *, streams: bool) -> Handler:
    make = (
        grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    )
    return make(Routed(behaviour, lane), None, None)


def _answering(lane: BoundedExecutor, code: grpc.StatusCode, text: str) -> Handler:
    def answer(_: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        context.abort(code, text)

    return _handler(answer, lane, streams=False)
