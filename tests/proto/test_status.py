import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory

from triplane.proto import status
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
from triplane.proto.status import DeadlineExceeded, Unimplemented

FAMILIES = [row.family for row in status.TABLE]


@pytest.fixture
def call():
    """Call a real server whose servicer raises what it is told to."""
    told: list[Exception] = []

    def behaviour(_, context):
        with status.status_of(context):
            raise told.pop()

    handler: Any = grpc.unary_unary_rpc_method_handler(behaviour)
    pool = ThreadPoolExecutor(1)
    server = grpc.server(
        pool,
        handlers=[grpc.method_handlers_generic_handler("test.Service", {"Raise": handler})],
        options=[("grpc.so_reuseport", 0)],
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:

        def raising(error):
            told.append(error)
            with status.remote_errors():
                ask: Any = channel.unary_unary("/test.Service/Raise")
                ask(b"")

        yield raising
    server.stop(None).wait()
    pool.shutdown()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f is not TriplaneError])
def test_a_client_raises_what_the_server_raised(call, family):
    with pytest.raises(family, match=r"the rule, 3 values; do this: ä") as raised:
        call(family("the rule, 3 values; do this: ä"))
    assert type(raised.value) is family
    assert isinstance(raised.value.__cause__, grpc.RpcError)


@pytest.mark.parametrize("error", [KeyError("secret"), TriplaneError("secret")])
def test_anything_else_leaves_as_a_constant_text_and_is_logged_under_its_id(call, error, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(TriplaneError) as raised:
        call(error)
    assert type(raised.value) is TriplaneError
    assert "secret" not in str(raised.value)
    (record,) = caplog.records
    assert record.incident in str(raised.value)
    assert status.facts_of(raised.value) == {"incident": record.incident}
    assert record.exc_info[1] is error


def test_a_long_message_is_cut_to_what_a_trailer_carries(call):
    for sign, most in (
        ("a", status.MAX_DETAIL_CHARS),
        ("語", status.MAX_DETAIL_BYTES // 3),
        ("\U0001f40c", status.MAX_DETAIL_BYTES // 4),
        ("\udc80", 0),
    ):
        with pytest.raises(Conflict) as raised:
            call(Conflict(sign * 10_000))
        assert str(raised.value).rstrip("?") == sign * most


def test_every_status_but_ok_raises_a_family_and_stands_in_one_row():
    listed = [code for row in status.TABLE for code in (row.code, *row.also)]
    assert set(listed) == {*grpc.StatusCode} - {grpc.StatusCode.OK}
    twice = {code for code in listed if listed.count(code) > 1}
    assert twice == {grpc.StatusCode.UNIMPLEMENTED}  # MissingExtra leaves as it, nothing returns
    for code in set(listed):
        assert issubclass(status.family_of(code), TriplaneError)


def test_every_family_has_a_row_and_subclasses_stand_before_their_bases():
    families = {InvalidInput, NotFound, Conflict, Unavailable, Corrupt, MissingExtra, TriplaneError}
    assert set(FAMILIES) == families | {DeadlineExceeded, Unimplemented}
    for index, family in enumerate(FAMILIES):
        assert not any(issubclass(later, family) for later in FAMILIES[index + 1 :])


def test_a_server_that_is_not_there_is_unavailable():
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        ask: Any = channel.unary_unary("/test.Service/Raise")
        with pytest.raises(Unavailable), status.remote_errors():
            ask(b"")


def test_facts_for_scripts_travel_with_the_error(call):
    with pytest.raises(Conflict) as raised:
        call(
            status.with_details(
                Conflict("busy"), rollout="r-1", error="x", absurd="\n", long="y" * 999
            )
        )
    assert status.facts_of(raised.value) == {"rollout": "r-1", "error": "x"}
    assert status.facts_of(KeyError()) == {}


def test_a_client_in_an_event_loop_raises_the_same():
    async def behaviour(_: Any, context: Any) -> None:
        async with status.status_of_aio(context):
            raise status.with_details(MissingExtra("needs more"), extra="xla")

    async def story():
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler: Any = grpc.unary_unary_rpc_method_handler(behaviour)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", {"Raise": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask: Any = channel.unary_unary("/test.Service/Raise")
                with (
                    pytest.raises(MissingExtra, match="needs more") as raised,
                    status.remote_errors(),
                ):
                    await ask(b"")
            return raised.value
        finally:
            await server.stop(None)

    assert status.facts_of(asyncio.run(story())) == {"extra": "xla"}


def test_a_caller_that_left_while_it_was_answered_is_no_internal_error(caplog):
    """grpc.aio fails the write first and cancels the call later, by an instant or by many."""
    ended: asyncio.Queue[BaseException] = asyncio.Queue()

    async def behaviour(_: Any, context: Any) -> None:
        try:
            async with status.status_of_aio(context):
                raise grpc.aio.InternalError('Failed "execute_batch"')
        except BaseException as error:
            ended.put_nowait(error)
            raise

    async def story():
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler: Any = grpc.unary_unary_rpc_method_handler(behaviour)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", {"Raise": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask: Any = channel.unary_unary("/test.Service/Raise")
                call = ask(b"")
                error = await ended.get()
                call.cancel()
                return type(error)
        finally:
            await server.stop(None)

    assert asyncio.run(story()) is asyncio.CancelledError
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def google():
    """google.rpc.Status and ErrorInfo as Google publishes them, in a pool of their own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="google/rpc/status.proto", package="google.rpc", syntax="proto3",
        dependency=["google/protobuf/any.proto"],
    )  # fmt: skip
    made = file.message_type.add(name="Status")
    made.field.add(name="code", number=1, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
    made.field.add(name="message", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    made.field.add(
        name="details", number=3, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED,
        type_name=".google.protobuf.Any",
    )  # fmt: skip
    info = file.message_type.add(name="ErrorInfo")
    for number, name in enumerate(("reason", "domain"), 1):
        info.field.add(name=name, number=number, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    info.field.add(
        name="metadata", number=3, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED,
        type_name=".google.rpc.ErrorInfo.MetadataEntry",
    )  # fmt: skip
    entry = info.nested_type.add(name="MetadataEntry")
    entry.options.map_entry = True
    for number, name in enumerate(("key", "value"), 1):
        entry.field.add(
            name=name, number=number, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL
        )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    names = ("google.rpc.Status", "google.rpc.ErrorInfo")
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(n)) for n in names]


def test_other_tools_read_the_trailer_as_an_error_info():
    Status, ErrorInfo = google()
    answer = status.answer_to(status.with_details(Conflict("busy"), rollout="r-1"))
    ((key, data),) = answer.trailer()
    assert key == "grpc-status-details-bin"
    read: Any = Status.FromString(data)
    assert (read.code, read.message) == (grpc.StatusCode.FAILED_PRECONDITION.value[0], "busy")
    info: Any = ErrorInfo()
    assert read.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "Conflict", "triplane", {"rollout": "r-1"},
    )  # fmt: skip


class Failed(grpc.RpcError):
    """A failed call with the trailer of a peer that may be anybody."""

    def __init__(self, trailer):
        super().__init__()
        self.trailer = trailer

    def code(self):
        return grpc.StatusCode.UNIMPLEMENTED

    def details(self):
        return "no such thing"

    def trailing_metadata(self):
        return ((status.TRAILER, self.trailer),)


def trailer(**options):
    reason = pb.Reason(**{"family": "MissingExtra", "domain": status.DOMAIN} | options)
    packed = any_pb2.Any(type_url=status.ERROR_INFO, value=reason.SerializeToString())
    return pb.Status(details=[packed]).SerializeToString()


def test_a_trailer_that_is_damaged_foreign_or_contradicts_the_status_is_ignored():
    assert type(status.error_from(Failed(trailer()))) is MissingExtra
    for odd in (
        b"",
        b"\xff" * 40,
        "text",
        trailer()[:-1],
        trailer(domain="example.org"),
        trailer(family="Corrupt"),
        trailer(family="SystemExit"),
        trailer(fields={"x": "y" * status.MAX_TRAILER_BYTES}),
    ):
        assert type(status.error_from(Failed(odd))) is Unimplemented
