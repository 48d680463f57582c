"""A flood of calls that are reset at once, at the port where everyone may knock."""

import asyncio

import grpc
import pytest
from tests.attacks.http2 import connections, rapid_reset

from triplane.cloud.home import initialize
from triplane.cloud.server import running
from triplane.proto.enrolment_pb2 import GetAuthorityRequest
from triplane.proto.enrolment_pb2_grpc import EnrolmentStub

pytestmark = pytest.mark.slow

PATH = "/triplane.enrolment.v1.Enrolment/GetAuthority"
CONNECTIONS = 4
WAIT_S = 60.0
CALLS = 5


def flood(port):
    with connections(port, CONNECTIONS) as hostile:
        return rapid_reset(hostile, PATH)


async def story(folder):
    home = initialize(folder / "home", offline_keys=folder / "keys").home
    async with running(home) as cloud, grpc.aio.insecure_channel(cloud.enrol_address) as channel:
        ask = EnrolmentStub(channel).GetAuthority
        hostile = asyncio.create_task(asyncio.to_thread(flood, cloud.enrol_port))
        answers = 0
        while not hostile.done() or answers < CALLS:
            answers += bool((await ask(GetAuthorityRequest(), timeout=WAIT_S)).authority)
        return await hostile, answers


def test_a_rapid_reset_fails_no_call_of_another_enroller(tmp_path):
    sent, answers = asyncio.run(story(tmp_path))
    assert sent > 0
    assert answers >= CALLS
