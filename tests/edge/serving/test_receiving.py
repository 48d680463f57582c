from typing import Any

import pytest

from triplane.edge.serving.receiving import REST, Receiving, one
from triplane.proto.errors import InvalidInput

CONTEXT: Any = object()


@pytest.fixture
def receiving():
    made = Receiving()
    yield made
    made.close()


def test_a_stream_may_not_rest_once_the_server_goes(receiving):
    receiving.end_rests()
    assert receiving.following(iter([b"more"]), CONTEXT, REST) is None


def test_a_call_that_is_inside_may_still_finish_sending(receiving):
    receiving.end_rests()
    assert receiving.only(iter([b"last"]), CONTEXT, 30) == b"last"


def test_a_call_must_bring_a_message(receiving):
    with pytest.raises(InvalidInput, match="exactly one"):
        one(receiving.only(iter(()), CONTEXT, 30))
