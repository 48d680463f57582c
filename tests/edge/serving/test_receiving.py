from typing import Any

import pytest

from triplane.edge.serving.callers import Caller
from triplane.edge.serving.executors import BoundedExecutor
from triplane.edge.serving.memory import RequestMemory
from triplane.edge.serving.receiving import REST, Receiving, one
from triplane.proto.errors import InvalidInput

CONTEXT: Any = object()
CALLER = Caller("ipv4:127.0.0.1", "ipv4:127.0.0.1:5000")


@pytest.fixture
def receiving():
    made = Receiving(RequestMemory(1 << 20, lambda: None), 1 << 20, 30)
    yield made
    made.close()


@pytest.fixture
def executor():
    with BoundedExecutor("infer", threads=2, receiving=1) as made:
        yield made


def test_a_stream_may_not_rest_once_the_server_goes(receiving):
    receiving.end_rests()
    assert receiving.following(iter([b"more"]), CONTEXT, CALLER, REST) is None


def test_a_call_that_is_inside_may_still_finish_sending(receiving, executor):
    receiving.end_rests()
    assert receiving.only(iter([b"last"]), CONTEXT, CALLER, executor) == b"last"


def test_a_call_must_bring_a_message(receiving, executor):
    with pytest.raises(InvalidInput, match="exactly one"):
        one(receiving.only(iter(()), CONTEXT, CALLER, executor))
