import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from triplane.proto import status
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


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in {MissingExtra, TriplaneError}])
def test_a_client_raises_what_the_server_raised(call, family):
    with pytest.raises(family, match=r"the rule, 3 values; do this: ä") as raised:
        call(family("the rule, 3 values; do this: ä"))
    assert type(raised.value) is family
    assert isinstance(raised.value.__cause__, grpc.RpcError)


def test_an_extra_that_the_server_lacks_is_unimplemented_there(call):
    with pytest.raises(Unimplemented, match="install it"):
        call(MissingExtra("install it"))


@pytest.mark.parametrize("error", [KeyError("secret"), TriplaneError("secret")])
def test_anything_else_leaves_as_a_constant_text_and_is_logged_under_its_id(call, error, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(TriplaneError) as raised:
        call(error)
    assert type(raised.value) is TriplaneError
    assert "secret" not in str(raised.value)
    (record,) = caplog.records
    assert record.incident in str(raised.value)
    assert record.exc_info[1] is error


def test_a_long_message_is_cut_to_what_a_trailer_carries(call):
    with pytest.raises(NotFound) as raised:
        call(NotFound("語" * 10_000))
    assert str(raised.value) == "語" * status.MAX_DETAIL_CHARS


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
