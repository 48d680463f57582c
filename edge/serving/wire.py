"""The protocol's methods as behaviours: bytes in, bytes out, status on the way.

The method table is the service descriptor of our own schema; on the wire it is registered under the
protocol's name. A call's only message is parsed here and not by grpc, so a broken one is the
caller's error, and parsing never runs on the serving thread.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from triplane.edge.serving.lanes import Behaviour, Lane
from triplane.edge.serving.limits import Limits
from triplane.edge.serving.receiving import REST, Receiving, one
from triplane.edge.serving.running import Call, Runs
from triplane.edge.serving.sending import Sending
from triplane.edge.serving.service import Service
from triplane.edge.serving.structure import check_structure
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.status import code_of, describe, status_of

WIRE_NAME: Final = "inference.GRPCInferenceService"
METHODS: Final = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods

M = TypeVar("M", bound=Message)

CONTROL_BYTES: Final = 64 << 10  # a call that carries names only


class Wire:
    """Makes the behaviours of one server."""

    def __init__(
        self,
        service: Service,
        receiving: Receiving,
        runs: Runs,
        sending: Sending,
        limits: Limits,
    ) -> None:
        self._service = service
        self._receiving = receiving
        self._runs = runs
        self._sending = sending
        self._limits = limits

    def methods(
        self, *, infer: Lane, streams: Lane, control: Lane
    ) -> dict[str, tuple[Lane, Behaviour, bool]]:
        """Every method of the protocol that is served: its lane, behaviour and form."""
        own = {
            "ModelInfer": (infer, self._infer(infer), False),
            "ModelStreamInfer": (streams, self._stream, True),
        }
        return {m.name: own.get(m.name) or (control, self._control(m), False) for m in METHODS}

    def _control(self, method: MethodDescriptor) -> Behaviour:
        message_class = GetMessageClass(method.input_type)
        return self.unary(message_class, getattr(self._service, method.name))

    def unary(self, message_class: type[Message], method: Callable[[Any], Message]) -> Behaviour:
        """A behaviour that parses one message, calls `method` and serializes its answer."""

        def behaviour(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
            message = self._receiving.only(messages, context, self._limits.receive_s)
            with status_of(context):
                return method(parse(message_class, one(message))).SerializeToString()

        return behaviour

    def server_stream(
        self,
        message_class: type[M],
        method: Callable[[M, grpc.ServicerContext], Iterator[Message]],
    ) -> Behaviour:
        """A behaviour that parses one message and sends what `method` yields."""

        def behaviour(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            message = self._receiving.only(messages, context, self._limits.receive_s)
            with status_of(context):
                request = parse(message_class, one(message))
            for answer in method(request, context):
                yield answer.SerializeToString()

        return behaviour

    def dialogue(
        self,
        message_class: type[M],
        method: Callable[[Iterator[M], grpc.ServicerContext], Iterator[Message]],
    ) -> Behaviour:
        """A behaviour for messages both ways; the caller may not rest beyond `receive_s`."""

        def received(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[M]:
            timeout_s = self._limits.receive_s
            while (message := self._receiving.following(messages, context, timeout_s)) is not None:
                with status_of(context):
                    parsed = parse(message_class, message)
                yield parsed

        def behaviour(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            for answer in method(received(messages, context), context):
                yield answer.SerializeToString()

        return behaviour

    def _infer(self, lane: Lane) -> Behaviour:
        def behaviour(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
            message = self._receiving.only(messages, context, self._limits.receive_s)
            with status_of(context):
                request = self._request(one(message))
                call = self._call(request, context, lane.submitted_ns)
                answer = self._service.ModelInfer(request, call).SerializeToString()
                return self._sending.last(answer, context)

        return behaviour

    def _stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answers in order, one request in flight; a failed one is told and the stream goes on."""
        strict = ("triton_grpc_error", "true") in context.invocation_metadata()
        while (message := self._receiving.following(messages, context, REST)) is not None:
            arrived_ns = time.perf_counter_ns()
            request = pb.ModelInferRequest()
            try:
                request = self._request(message)
                answer = self._service.ModelInfer(request, self._call(request, context, arrived_ns))
            except Exception as error:
                if strict:
                    with status_of(context):
                        raise
                failure = pb.ModelStreamInferResponse(error_message=describe(error)[1])
                failure.infer_response.id = request.id[: self._limits.name_chars]
                yield failure.SerializeToString()
            else:
                if request.parameters["triton_enable_empty_final_response"].bool_param:
                    answer.parameters["triton_final_response"].bool_param = True
                data = pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
                with self._sending.one_of_many(data, context):
                    yield data

    def _request(self, data: bytes) -> pb.ModelInferRequest:
        try:
            return parse_infer(data, self._limits)
        except InvalidInput as error:
            self._service.unattributed.failed(code_of(error).name, 0)
            raise

    def _call(
        self, request: pb.ModelInferRequest, context: grpc.ServicerContext, arrived_ns: int
    ) -> Call:
        """Deadline: the call's own, the request's `timeout` parameter in us, or the server's."""
        left_s = min(context.time_remaining(), self._limits.call_s)
        if "timeout" in request.parameters:
            timeout_us = request.parameters["timeout"].int64_param
            left_s = min(left_s, timeout_us / 1e6) if timeout_us > 0 else left_s
        return Call(time.monotonic() + left_s, arrived_ns, context.is_active, self._runs)


def parse(message_class: type[M], data: bytes) -> M:
    """Parse a message that carries names only. Raises InvalidInput."""
    if len(data) > CONTROL_BYTES:
        raise InvalidInput(f"the message has {len(data)} bytes; {CONTROL_BYTES} at most")
    return _parsed(message_class, data)


def parse_infer(data: bytes, limits: Limits) -> pb.ModelInferRequest:
    """Parse an inference request whose structure was bounded first. Raises InvalidInput."""
    if len(data) > limits.message_bytes:
        raise InvalidInput(f"the message has {len(data)} bytes; {limits.message_bytes} at most")
    check_structure(data, limits)
    return _parsed(pb.ModelInferRequest, data)


def _parsed(message_class: type[M], data: bytes) -> M:
    message = message_class()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        name = message_class.DESCRIPTOR.name
        raise InvalidInput(f"the message is no {name}; follow the protocol's schema") from error
    return message
