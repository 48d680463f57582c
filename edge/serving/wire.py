"""The protocol's methods as functions from bytes to bytes, with errors sent as status codes.

The table of methods is the service descriptor of our own schema, which is registered under the
protocol's name. A call's message is parsed here and not by grpc, so that an invalid one is the
caller's error, and parsing never runs on grpc's serving thread.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from triplane.edge.serving.callers import Caller, caller_of
from triplane.edge.serving.compression import packed_size, unpack
from triplane.edge.serving.executors import Behaviour, BoundedExecutor
from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.memory import RequestMemory
from triplane.edge.serving.receiving import REST, Receiving, one
from triplane.edge.serving.request import Contents
from triplane.edge.serving.running import CallContext, Runs
from triplane.edge.serving.seats import Seats
from triplane.edge.serving.sending import Sending
from triplane.edge.serving.service import Service
from triplane.edge.serving.structure import split_raw
from triplane.edge.serving.turns import Turns
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.status import answer_to, code_of, status_of

WIRE_NAME: Final = "inference.GRPCInferenceService"
METHODS: Final = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods

M = TypeVar("M", bound=Message)

CONTROL_BYTES: Final = 64 << 10  # of a message that only has names


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wire:
    """Makes the behaviours of one server."""

    service: Service
    receiving: Receiving
    runs: Runs
    sending: Sending
    turns: Turns
    seats: Seats
    memory: RequestMemory
    limits: ServingLimits
    by_certificate: bool

    def methods(
        self,
        *,
        infer: BoundedExecutor,
        streams: BoundedExecutor,
        control: BoundedExecutor,
        health: BoundedExecutor,
    ) -> dict[str, tuple[BoundedExecutor, Behaviour, bool]]:
        """Return each method of the protocol that is served: its executor, behaviour and form."""
        methods: dict[str, tuple[BoundedExecutor, Behaviour, bool]] = {}
        for method in METHODS:
            executor = health if method.name in {"ServerLive", "ServerReady"} else control
            if method.name not in {"ModelInfer", "ModelStreamInfer"}:
                message_class = GetMessageClass(method.input_type)
                behaviour = self.unary(executor, message_class, getattr(self.service, method.name))
                methods[method.name] = executor, behaviour, False
        methods["ModelInfer"] = infer, self._infer(infer), False
        methods["ModelStreamInfer"] = streams, self._stream, True
        return methods

    def unary(
        self,
        executor: BoundedExecutor,
        message_class: type[Message],
        method: Callable[[Any], Message],
    ) -> Behaviour:
        """Return a behaviour that parses one message, calls `method` and serializes its answer."""

        def behaviour(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
            caller = self._caller(context)
            received = self.receiving.only(messages, context, caller, executor)
            with status_of(context):
                return method(parse(message_class, one(received))).SerializeToString()

        return behaviour

    def server_stream(
        self,
        executor: BoundedExecutor,
        seats: Seats,
        message_class: type[M],
        method: Callable[[M, grpc.ServicerContext], Iterator[Message]],
    ) -> Behaviour:
        """Return a behaviour that parses one message, takes a seat and sends the answers."""

        def behaviour(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            caller = self._caller(context)
            received = self.receiving.only(messages, context, caller, executor)
            with status_of(context):
                request = parse(message_class, one(received))
            answers = (answer.SerializeToString() for answer in method(request, context))
            return _while_seated(seats, context, caller, answers)

        return behaviour

    def dialogue(
        self,
        message_class: type[M],
        method: Callable[[Iterator[M], grpc.ServicerContext], Iterator[Message]],
    ) -> Behaviour:
        """Return a behaviour for messages both ways, at most `receive_s` apart."""

        def parsed(
            messages: Iterator[bytes], context: grpc.ServicerContext, caller: Caller
        ) -> Iterator[M]:
            timeout_s = self.limits.receive_s
            while (
                received := self.receiving.following(messages, context, caller, timeout_s)
            ) is not None:
                with status_of(context):
                    message = parse(message_class, one(received))
                yield message

        def behaviour(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            caller = self._caller(context)
            answers = method(parsed(messages, context, caller), context)
            return _while_seated(
                self.seats, context, caller, (answer.SerializeToString() for answer in answers)
            )

        return behaviour

    def _caller(self, context: grpc.ServicerContext) -> Caller:
        return caller_of(context, by_certificate=self.by_certificate)

    def _infer(self, executor: BoundedExecutor) -> Behaviour:
        def behaviour(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
            caller = self._caller(context)
            received = self.receiving.only(messages, context, caller, executor)
            arrived_ns = time.perf_counter_ns()
            with status_of(context):
                answer = self._answer(one(received), context, caller, arrived_ns)
                return self.sending.last(answer.SerializeToString(), context)

        return behaviour

    def _answer(
        self, data: bytes, context: grpc.ServicerContext, caller: Caller, arrived_ns: int
    ) -> pb.ModelInferResponse:
        """Run one request that has arrived completely, in its turn."""
        with self._turn(data, context, caller) as (message, until_s):
            request, raw = self._request(message)
            call = self._call(request, context, until_s, arrived_ns)
            return self.service.ModelInfer(request, call, raw)

    @contextlib.contextmanager
    def _turn(
        self, data: bytes, context: grpc.ServicerContext, caller: Caller
    ) -> Iterator[tuple[bytes, float]]:
        """Hold memory and a turn; yield the unpacked message and its latest end."""
        until_s = time.monotonic() + min(context.time_remaining(), self.limits.call_s)
        with contextlib.ExitStack() as held:
            # Memory before the turn: a request that waits for its turn occupies memory, too.
            held.enter_context(self.memory.holding(len(data)))
            held.enter_context(self.turns.turn(caller, until_s))
            with self._counted():
                size = packed_size(data, self.limits.message_bytes)
            if size is not None:
                held.enter_context(self.memory.holding(size))
                data = unpack(data, size)
            yield data, until_s

    def _stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer one request at a time, in order. After an error the stream goes on."""
        caller = self._caller(context)
        return _while_seated(self.seats, context, caller, self._answers(messages, context, caller))

    def _answers(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, caller: Caller
    ) -> Iterator[bytes]:
        strict = ("triton_grpc_error", "true") in context.invocation_metadata()
        while (received := self.receiving.following(messages, context, caller, REST)) is not None:
            arrived_ns = time.perf_counter_ns()
            with status_of(context):
                message = one(received)
            request = pb.ModelInferRequest()
            try:
                with self._turn(message, context, caller) as (unpacked, until_s):
                    request, raw = self._request(unpacked)
                    call = self._call(request, context, until_s, arrived_ns)
                    answer = self.service.ModelInfer(request, call, raw)
            except Exception as error:
                if strict:
                    with status_of(context):
                        raise
                failure = pb.ModelStreamInferResponse(error_message=answer_to(error).text)
                failure.infer_response.id = request.id[: self.limits.name_chars]
                # As Triton does: an error of one request is a message of the stream, unless the
                # caller asked for statuses (triton_grpc_error), which end it.
                yield failure.SerializeToString()
            else:
                if request.parameters["triton_enable_empty_final_response"].bool_param:
                    answer.parameters["triton_final_response"].bool_param = True
                data = pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
                with self.sending.one_of_many(data, context):
                    yield data

    def _request(self, data: bytes) -> tuple[pb.ModelInferRequest, Contents | None]:
        with self._counted():
            return parse_infer(data, self.limits)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request that the body refuses before its model version is known."""
        try:
            yield
        except InvalidInput as error:
            self.service.unattributed.failed(code_of(error).name, 0)
            raise

    def _call(
        self,
        request: pb.ModelInferRequest,
        context: grpc.ServicerContext,
        until_s: float,
        arrived_ns: int,
    ) -> CallContext:
        """Apply the request's `timeout` parameter, in microseconds, to the deadline."""
        if "timeout" in request.parameters:
            timeout_us = request.parameters["timeout"].int64_param
            if timeout_us > 0:
                until_s = min(until_s, time.monotonic() + timeout_us / 1e6)
        return CallContext(until_s, arrived_ns, context.is_active, self.runs)


def _while_seated(
    seats: Seats, context: grpc.ServicerContext, caller: Caller, answers: Iterator[bytes]
) -> Iterator[bytes]:
    with contextlib.ExitStack() as stack:
        with status_of(context):
            stack.enter_context(seats.seat(caller, context))
        yield from answers


def parse(message_class: type[M], data: bytes) -> M:
    """Parse a message that only has names. Raises InvalidInput."""
    if len(data) > CONTROL_BYTES:
        raise InvalidInput(f"the message has {len(data)} bytes; {CONTROL_BYTES} at most")
    if (size := packed_size(data, CONTROL_BYTES)) is not None:
        data = unpack(data, size)
    return _parsed(message_class, data)


def parse_infer(data: bytes, limits: ServingLimits) -> tuple[pb.ModelInferRequest, Contents | None]:
    """Parse an inference request after checking its structure. Raises InvalidInput.

    Raw contents of a large request are returned as views of `data`, because the parser would copy
    each of them twice. They are None if they are in the request itself.
    """
    if len(data) > limits.message_bytes:
        raise InvalidInput(f"the message has {len(data)} bytes; {limits.message_bytes} at most")
    structure, raw = split_raw(data, limits)
    return _parsed(pb.ModelInferRequest, structure), raw


def _parsed(message_class: type[M], data: bytes) -> M:
    message = message_class()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        name = message_class.DESCRIPTOR.name
        raise InvalidInput(f"the message is not a {name}; follow the protocol's schema") from error
    return message
