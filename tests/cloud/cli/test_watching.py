import json
import threading
from concurrent import futures
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from triplane.cloud.cli import watching
from triplane.cloud.cli.connection import Calls, errors_at, repeated
from triplane.cloud.cli.rollouts import watchable
from triplane.proto.errors import Conflict, Unavailable
from triplane.proto.fleet_pb2 import COMMITTED, FAILED, DeployRequest, GetRolloutRequest, Rollout
from triplane.proto.status import remote_errors

NO_PORT_SHARING = (("grpc.so_reuseport", 0),)


FLEET = "triplane.fleet.v1.Fleet"


def written_watch(*rollouts):
    """Streams the written rollouts to each watcher, then ends the stream."""
    stream = grpc.unary_stream_rpc_method_handler(
        lambda _request, _context: iter(rollouts),
        GetRolloutRequest.FromString,
        Rollout.SerializeToString,
    )
    return {"WatchRollout": stream}


def refusing(code, words):
    """Refuses every call."""

    def refuse(_request, context):
        context.abort(code, words)

    return {
        "Deploy": grpc.unary_unary_rpc_method_handler(refuse),
        "WatchRollout": grpc.unary_stream_rpc_method_handler(refuse),
    }


@contextmanager
def serving(methods, port=0):
    pool = futures.ThreadPoolExecutor(4)
    server = grpc.server(pool, options=NO_PORT_SHARING)
    server.add_registered_method_handlers(FLEET, methods)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait(10)
        pool.shutdown()


@contextmanager
def calls_to(port):
    options = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50))
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        yield Calls(channel)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watching, "RETRY_S", 0.05)


def rollout(state, node_state=COMMITTED):
    made = Rollout(id="r-1", model="digits", version=4, selector="all", state=state)
    made.nodes.add(name="n0", state=node_state, connected=True)
    return made


RUNNING, DONE = rollout(Rollout.RUNNING), rollout(Rollout.DONE)


@pytest.mark.parametrize(
    ("state", "code"),
    [(Rollout.DONE, 0), (Rollout.PAUSED, 4), (Rollout.FAILED, 4), (Rollout.ABORTED, 4)],
)
def test_the_exit_code_tells_done_from_everything_else(state, code, capsys):
    with serving(written_watch(RUNNING, rollout(state))) as port, calls_to(port) as cloud:
        assert watching.watch_to_end(watchable(cloud, "r-1"), RUNNING, as_json=False) == code
    assert capsys.readouterr().out.startswith("[r-1] digits@4 to all: running")


def test_json_is_one_object_a_line_and_nothing_else(capsys):
    with serving(written_watch(RUNNING, DONE)) as port, calls_to(port) as cloud:
        assert watching.watch_to_end(watchable(cloud, "r-1"), RUNNING, as_json=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["state"] for line in lines] == ["running", "done"]


def test_a_paused_rollout_tells_the_reason_of_a_node_and_the_ways_out(capsys):
    paused = rollout(Rollout.PAUSED, FAILED)
    paused.nodes[0].reason = "golden sample 3"
    with serving(written_watch(paused)) as port, calls_to(port) as cloud:
        watching.watch_to_end(watchable(cloud, "r-1"), paused, as_json=False)
    out = capsys.readouterr().out
    assert "n0: golden sample 3" in out
    assert "triplane rollout resume r-1" in out


def test_a_cloud_that_restarts_meanwhile_is_watched_on():
    heard = []
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        port = first.enter_context(serving(written_watch(RUNNING)))
        stream = watching.updates(watchable(stack.enter_context(calls_to(port)), "r-1"))
        assert next(stream).state == Rollout.RUNNING
        first.close()
        later = threading.Thread(target=lambda: heard.append(next(stream)))
        later.start()  # nothing listens yet
        stack.enter_context(serving(written_watch(DONE), port))
        later.join(20)
    assert [rollout.state for rollout in heard] == [Rollout.DONE]


def test_a_cloud_that_stays_away_ends_the_watch_with_the_way_back(monkeypatch):
    monkeypatch.setattr(watching, "AWAY_S", 0.2)
    with serving(written_watch()) as port:
        pass
    with (
        calls_to(port) as cloud,
        pytest.raises(Unavailable, match="triplane rollout show r-1 --watch"),
    ):
        next(watching.updates(watchable(cloud, "r-1")))


def test_a_refusal_is_not_tried_again():
    with (
        serving(refusing(grpc.StatusCode.NOT_FOUND, "no rollout r-1")) as port,
        calls_to(port) as cloud,
        pytest.raises(grpc.RpcError, match="no rollout r-1"),
    ):
        next(watching.updates(watchable(cloud, "r-1")))


def test_a_cloud_that_is_away_is_named_with_how_to_start_it():
    with serving(written_watch()) as port:
        pass
    with (
        calls_to(port) as cloud,
        pytest.raises(Unavailable, match=r"fleet\.example:8443 does not answer.*cloud up"),
        errors_at("fleet.example:8443"),
    ):
        cloud.fleet.GetRollout(GetRolloutRequest(id="last"))


def test_a_cloud_that_is_away_is_named_by_verbs_that_sign_too():
    with serving(written_watch()) as port:
        pass
    with (
        calls_to(port) as cloud,
        pytest.raises(Unavailable, match=r"fleet\.example:8443 does not answer.*cloud up"),
        errors_at("fleet.example:8443"),
        remote_errors(),
    ):
        cloud.fleet.GetRollout(GetRolloutRequest(id="last"))


def test_a_cloud_that_speaks_is_quoted():
    with (
        serving(refusing(grpc.StatusCode.FAILED_PRECONDITION, "rollout r-1 still runs")) as port,
        calls_to(port) as cloud,
        pytest.raises(Conflict, match=r"^rollout r-1 still runs$"),
        errors_at("fleet.example:8443"),
    ):
        repeated(lambda: cloud.fleet.Deploy(DeployRequest()))


def test_a_cloud_that_says_not_now_is_quoted_and_not_called_away():
    words = "64 conversions wait; try later"
    with (
        serving(refusing(grpc.StatusCode.UNAVAILABLE, words)) as port,
        calls_to(port) as cloud,
        pytest.raises(Unavailable, match=f"^{words}$"),
        errors_at("fleet.example:8443"),
    ):
        cloud.fleet.Deploy(DeployRequest())


def test_silence_towards_an_ended_certificate_says_so():
    with serving(written_watch()) as port:
        pass
    with (
        calls_to(port) as cloud,
        pytest.raises(Unavailable, match=r"certificate, which has expired.*triplane cloud token"),
        errors_at("fleet.example:8443", expires_s=1.0),
    ):
        cloud.fleet.GetRollout(GetRolloutRequest(id="last"))
