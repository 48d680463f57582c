"""The same node over a real gRPC server of the metadata service, honest and not."""

import asyncio
import contextlib
import threading

import grpc
import pytest
from tests.attacks.trust_stage import DAY_S, bundle_entry, refusal, signed_by, stage

from triplane.cloud.trust import MetadataServicer
from triplane.proto import metadata_pb2 as pb
from triplane.proto.channels import CHANNEL_OPTIONS, server_options
from triplane.proto.errors import InvalidInput, NotFound
from triplane.proto.metadata_pb2_grpc import MetadataStub, add_MetadataServicer_to_server
from triplane.proto.signed.metadata import fetch_over
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import Trust, bootstrap
from triplane.proto.status import remote_errors

PATH = "release/digits@1+ort-x64.bundle"


async def uploaded(names):
    """Every file that a submission names was uploaded."""


class Thief(MetadataServicer):
    """A servicer that answers from `forged` first."""

    def __init__(self, stage, recorded):
        super().__init__(stage.repository, recorded, uploaded)
        self._forged, self._silent = stage.forged, stage.silent

    async def Get(self, request, context):
        if request.name in self._silent:
            await asyncio.Event().wait()
        if request.name in self._forged:
            return pb.GetResponse(metadata=self._forged[request.name])
        return await super().Get(request, context)


@contextlib.contextmanager
def serving(stage, recorded):
    """A grpc.aio server in a thread of its own; yields a channel to it."""
    ready, ports, loop = threading.Event(), [], asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve():
        options = [*server_options(), ("grpc.max_send_message_length", -1)]
        server = grpc.aio.server(options=options)
        add_MetadataServicer_to_server(Thief(stage, recorded), server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        ready.set()
        await done.wait()
        await server.stop(0)
        # A cancelled call may end after its server; if its loop drops it, gRPC's thread stays.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*rest, return_exceptions=True)
        await loop.shutdown_default_executor()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{ports[0]}", CHANNEL_OPTIONS) as channel:
            yield channel
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)
        loop.close()


@pytest.fixture
def cloud(tmp_path):
    made = stage(tmp_path)
    made.release(bundle_entry(PATH))
    return made


@pytest.fixture
def wire(cloud):
    cloud.log = []

    async def recorded(role, submitted):
        cloud.log.append((role, submitted.version, submitted.published))

    with serving(cloud, recorded) as channel:
        yield channel


def node(cloud, channel):
    fetch = fetch_over(channel)
    bootstrap(cloud.path / "wired", fetch)
    return Trust(cloud.path / "wired", fetch, cloud.clock)


def test_a_node_enrols_and_verifies_over_grpc(cloud, wire):
    trust = node(cloud, wire)
    assert trust.refresh().is_fresh
    assert trust.target(PATH).length == 16
    with pytest.raises(AttemptRefused, match="is not listed by the role release"):
        trust.target("release/digits@8+ort-x64.bundle")


def test_what_signers_submit_over_grpc_reaches_the_node_and_the_log(cloud, wire):
    trust, stub = node(cloud, wire), MetadataStub(wire)
    other = "release/digits@2+ort-x64.bundle"
    made = cloud.next_targets("release", [bundle_entry(other)])
    signed_by(cloud.offline, made, "release")
    answer = stub.Submit(pb.SubmitRequest(role="release", metadata=made.to_bytes()))
    assert (answer.published, answer.signatures, answer.threshold, answer.version) == (
        True,
        1,
        1,
        3,
    )
    assert cloud.log == [("release", 3, True)]
    assert trust.refresh().is_fresh
    assert trust.target(other).name.version == 2
    assert stub.GetPending(pb.GetPendingRequest(role="release")).published


@pytest.mark.parametrize(
    ("role", "data", "text"),
    [
        ("timestamp", b"{}", "metadata is submitted for one of"),
        ("release", b"{}", "release is not TUF metadata: KeyError"),
        ("release", b" " * (4 << 20) + b"{", "larger than max"),
    ],
)
def test_a_refused_submission_says_why_and_is_not_logged(cloud, wire, role, data, text):
    with pytest.raises(Exception, match=text), remote_errors():
        MetadataStub(wire).Submit(pb.SubmitRequest(role=role, metadata=data))
    assert cloud.log == []


@pytest.mark.parametrize(
    "name", ["../keys/auto.pem", "pending/release.json", "1.release", "", "x" * 9000]
)
def test_only_metadata_files_are_served(wire, name):
    with pytest.raises(InvalidInput, match=r"metadata files are timestamp\.json"), remote_errors():
        MetadataStub(wire).Get(pb.GetRequest(name=name))
    with pytest.raises(NotFound, match=r"9\.release\.json"), remote_errors():
        MetadataStub(wire).Get(pb.GetRequest(name="9.release.json"))


def test_forged_rolled_back_and_frozen_metadata_is_refused_over_grpc(cloud, wire):
    trust = node(cloud, wire)
    held = cloud.repository.get("timestamp.json")
    cloud.forged["timestamp.json"] = held.replace(b'"version":2', b'"version":3')
    assert refusal(trust).kind == "signature"
    cloud.forged.clear()
    cloud.repository.keep_fresh(cloud.clock() + DAY_S)
    assert trust.refresh().is_fresh
    cloud.forged["timestamp.json"] = held
    assert refusal(trust).kind == "rollback"
    cloud.clock.now_s += 2 * DAY_S
    cloud.forged["timestamp.json"] = cloud.repository.get("timestamp.json")
    assert refusal(trust).kind == "freeze"


def test_an_answer_without_end_is_refused_over_grpc(cloud, wire):
    trust = node(cloud, wire)
    cloud.forged["timestamp.json"] = bytes(5 << 20)
    found = refusal(trust)
    assert found.kind == "endless-data"
    assert "timestamp.json is larger than any message may be" in found.text


def test_an_answer_that_never_comes_ends_at_the_deadline(cloud, wire, monkeypatch):
    trust = node(cloud, wire)
    assert trust.refresh().is_fresh
    monkeypatch.setattr("triplane.proto.signed.metadata.FETCH_DEADLINE_S", 0.2)
    cloud.silent.add("timestamp.json")
    found = trust.refresh()
    assert (found.is_fresh, found.refusals) == (True, ())
    assert "Deadline Exceeded" in str(found.error)
    cloud.clock.now_s += 2 * DAY_S
    assert refusal(trust).kind == "freeze"


def test_a_cloud_that_is_away_is_no_attack(cloud, wire):
    trust = node(cloud, wire)
    assert trust.refresh().is_fresh
    wire.close()
    with grpc.insecure_channel("127.0.0.1:1") as nobody:
        away = Trust(cloud.path / "wired", fetch_over(nobody), cloud.clock).refresh()
    assert (away.is_fresh, away.refusals) == (False, ())
    assert away.error is not None
