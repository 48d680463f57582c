"""The whole cloud on its ports: real certificates, real streams, real metadata."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha.reflection_pb2_grpc import (  # type: ignore[import-untyped]
    ServerReflectionStub,
)
from tests.cloud.nodes import CAPABILITY, enrolled, living
from tests.cloud.released import copied, make_released
from tests.support.deadlines import within

from triplane.cloud import server
from triplane.cloud.identity.rights import RIGHTS
from triplane.cloud.server import Cloud, CloudOptions, running
from triplane.proto import fleet_pb2 as pb
from triplane.proto import identity_pb2, session_pb2
from triplane.proto.blobs import BlobFolder
from triplane.proto.channels import connect, connect_aio
from triplane.proto.errors import Conflict, InvalidInput, NotFound, Unavailable
from triplane.proto.fleet_pb2_grpc import FleetStub
from triplane.proto.identity import IdentityFolder
from triplane.proto.identity_pb2_grpc import IdentityStub
from triplane.proto.session_pb2_grpc import SessionStub
from triplane.proto.status import facts_of, remote_errors
from triplane.proto.stream import new_epoch
from triplane.proto.transfer import download

pytestmark = pytest.mark.slow  # each test is a whole cloud

DEADLINE_S = 120.0
PATH = "release/digits@1+ort-x64.bundle"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return make_released(tmp_path_factory.mktemp("released"))


@pytest.fixture
def home(released, tmp_path):
    return copied(released, tmp_path)


def test_a_ready_line_that_nobody_can_read_does_not_end_the_cloud(home):
    reader, writer = os.pipe()
    os.close(reader)
    options = {"home": str(home.path), "port": 0, "enrol_port": 0, "dashboard_port": 0}
    with subprocess.Popen(
        [sys.executable, "-m", "triplane.cloud", json.dumps(options)],
        stdout=writer, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.close(writer)
        try:
            assert process.stderr is not None
            assert any("ready line not written" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 0


async def until(cloud, holds):
    while True:
        moved = cloud.fleet.moved
        if found := holds():
            return found
        await moved.wait()


@asynccontextmanager
async def operator(home):
    channel = connect_aio(IdentityFolder(home.operator))
    try:
        yield FleetStub(channel)
    finally:
        await channel.close()


def deploy_request(**options):
    defaults = {"reference": "digits@1", "selector": "all", "key": b"k" * 16, "role": "release"}
    return pb.DeployRequest(**defaults | options)


async def watched(people, rollout_id, *, until_paused=False):
    """States of a rollout as a watcher hears them, to its end."""
    heard = []
    call = people.WatchRollout(pb.GetRolloutRequest(id=rollout_id))
    async for rollout in call:
        heard.append(rollout)
        if until_paused and rollout.state == pb.Rollout.PAUSED:
            call.cancel()
            break
    return heard


def test_a_deploy_over_the_wire_reaches_every_node_in_waves(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            nodes = [await enrolled(cloud, tmp_path, name) for name in ("a", "b", "c")]
            async with living(nodes), operator(home) as people:
                await until(cloud, lambda: all(n.report for n in cloud.fleet.nodes()))
                waves = [pb.Wave(nodes=1), pb.Wave(percent=100)]
                made = await people.Deploy(deploy_request(waves=waves))
                heard = await watched(people, made.id)
                return heard, nodes

    heard, nodes = within(story())
    assert heard[-1].state == pb.Rollout.DONE
    assert [n.state for n in heard[-1].nodes] == [pb.COMMITTED] * 3
    assert [n.wave for n in heard[-1].nodes] == [0, 1, 1]
    for node in nodes:
        assert [a.target_path for a in node.desired.assignments] == [PATH]


def test_a_failing_version_pauses_and_abort_takes_it_back(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            nodes = [await enrolled(cloud, tmp_path, name) for name in ("a", "b")]
            async with living(nodes), operator(home) as people:
                await until(cloud, lambda: all(n.report for n in cloud.fleet.nodes()))
                first = await people.Deploy(deploy_request())
                await watched(people, first.id)
                nodes[0].outcome = pb.FAILED
                bad = deploy_request(
                    reference="digits@2", key=b"2" * 16, waves=[pb.Wave(nodes=1), pb.Wave(nodes=2)]
                )
                second = await people.Deploy(bad)
                heard = await watched(people, second.id, until_paused=True)
                assert "golden sample 3" in heard[-1].nodes[0].reason
                assert "wave 1: 1 of 1 node failed (limit 0%)" in heard[-1].reason
                aborted = await people.Abort(pb.AbortRequest(id=second.id, reason="bad"))
                assert aborted.state == pb.Rollout.ABORTED
                listed = await people.ListNodes(pb.ListNodesRequest())
                return [n.desired.assignments[0] for n in listed.nodes]

    assignments = within(story())
    assert [(a.version, a.target_path) for a in assignments] == [(1, PATH)] * 2


def test_nodes_find_a_restarted_cloud_and_the_rollout_goes_on(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            ports = {"port": cloud.port, "enrol_port": cloud.enrol_port}
            nodes = [await enrolled(cloud, tmp_path, name) for name in ("a", "b")]
            async with living(nodes[:1]), operator(home) as people:
                await until(cloud, lambda: cloud.fleet.node("a").report)
                made = await people.Deploy(deploy_request(failure_share=1.0))
                await until(cloud, lambda: cloud.fleet.node("a").held)
        async with running(home, **ports) as again:
            async with living(nodes), operator(home) as people:
                heard = await watched(people, made.id)
            kept = again.fleet.node("a").held["digits"]
            return heard[-1], kept

    last, kept = within(story())
    assert last.state == pb.Rollout.DONE
    assert (kept.version, kept.attempt) == (1, 1)


def test_a_node_reads_the_bundle_assigned_to_it_and_nothing_else(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            nodes = [await enrolled(cloud, tmp_path, name, site=name) for name in ("a", "b")]
            version = await cloud.registry.version("digits@1")
            bundle = version.bundles[0]
            async with living(nodes), operator(home) as people:
                await until(cloud, lambda: all(n.report for n in cloud.fleet.nodes()))
                made = await people.Deploy(deploy_request(selector="site=a"))
                await watched(people, made.id)

            def read(identity, blob, size, into):
                with connect(identity) as channel:
                    folder = BlobFolder(tmp_path / into)
                    return download(channel, blob, size, folder).stat().st_size

            mine, other = nodes[0].identity, nodes[1].identity
            ask = asyncio.to_thread
            assert await ask(read, mine, bundle.blob, bundle.size, "a1") == bundle.size
            for identity, blob, size in (
                (other, bundle.blob, bundle.size),
                (mine, version.blob, version.size),
            ):
                with pytest.raises(NotFound, match="is assigned to node"):
                    await ask(read, identity, blob, size, "none")
            people_identity = IdentityFolder(home.operator)
            assert await ask(read, people_identity, version.blob, version.size, "o")

    within(story())


async def greeted(identity):
    """A raw stream after its greeting, and what it was told first."""
    channel = connect_aio(identity)
    call = SessionStub(channel).Open()
    await call.write(session_pb2.Frame(hello=session_pb2.Hello(epoch=new_epoch())))
    first = await call.read()
    return channel, call, first


async def refusal(identity):
    """How a stream of a caller that may not have one ends.

    Only read: a caller that writes meets the refusal at any of several instants, and grpc.aio then
    raises InvalidStateError, or INTERNAL, instead of the status.
    """
    channel = connect_aio(identity)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await SessionStub(channel).Open().read()
        return refused.value.code()
    finally:
        await channel.close()


async def ending(call):
    """The frames of a stream to its end, its status and text."""
    frames = []
    try:
        while (frame := await call.read()) is not grpc.aio.EOF:
            frames.append(frame)
    except grpc.aio.AioRpcError as error:
        return frames, error.code(), error.details()
    return frames, await call.code(), await call.details()


def test_a_node_speaks_for_the_name_in_its_certificate_only(home, tmp_path):
    """No field of a report or greeting names a node, so there is nothing to forge."""
    for message in (pb.Report, pb.ModelReport, session_pb2.Hello):
        assert not {"name", "node"} & set(message.DESCRIPTOR.fields_by_name)

    async def story():
        async with running(home) as cloud:
            nodes = [await enrolled(cloud, tmp_path, name) for name in ("a", "b")]
            async with living(nodes[:1]):
                await until(cloud, lambda: cloud.fleet.node("a").report)
            assert cloud.fleet.node("b").report is None
            (tmp_path / "a" / "cert.pem").write_bytes((tmp_path / "b" / "cert.pem").read_bytes())
            with pytest.raises((grpc.aio.AioRpcError, ValueError)):  # b's certificate, a's key
                await greeted(nodes[0].identity)

    within(story())


@pytest.mark.parametrize(
    ("absurd", "message"),
    [
        (pb.Report(metadata_age_s=float("nan")), "metadata_age_s is "),
        (pb.Report(models=[pb.ModelReport(model="../../x")]), "a model's name matches"),
        (pb.Report(models=[pb.ModelReport(model="m", version=2**31)]), "version is at most"),
        (pb.Report(models=[pb.ModelReport(model=f"m{i}") for i in range(65)]), "models is at most"),
        (pb.Report(models=[pb.ModelReport(model="m")] * 2), "names each model once"),
        (
            pb.Report(models=[pb.ModelReport(model="m", state=cast("Any", 77))]),
            "node state 77 is unknown",
        ),
        (pb.Report(incidents=[pb.Incident(text="x" * 2001)]), "at most 2000 characters"),
        (pb.Report(serving_address="x" * 1_100_000), "size of the report in bytes is at most"),
        (pb.Report(capability=pb.Capability(targets=["t"] * 17)), "capability.targets is at most"),
    ],
)
def test_an_absurd_report_is_refused_and_nothing_of_it_is_kept(home, tmp_path, absurd, message):
    async def story():
        async with running(home) as cloud:
            node = await enrolled(cloud, tmp_path, "a")
            before = cloud.fleet._fleet
            channel, call, first = await greeted(node.identity)
            assert first.WhichOneof("body") == "welcome"
            await call.write(session_pb2.Frame(number=1, report=absurd))
            frames, code, text = await ending(call)
            await channel.close()
            assert all(frame.acknowledged == 0 for frame in frames)
            assert cloud.fleet._fleet is before
            async with living([node]):
                await until(cloud, lambda: cloud.fleet.node("a").report)
            return code, text

    code, text = within(story())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in text


def test_revocation_ends_the_stream_and_the_node(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            node = await enrolled(cloud, tmp_path, "a")
            channel, call, _ = await greeted(node.identity)
            people = connect_aio(IdentityFolder(home.operator))
            await IdentityStub(people).Revoke(identity_pb2.RevokeRequest(name="a", reason="lost"))
            frames, code, text = await ending(call)
            await until(cloud, lambda: not cloud.fleet.nodes())
            await channel.close()
            await people.close()
            again = await refusal(node.identity)
            return frames[-1].goodbye.why, code, text, again

    why, code, text, again = within(story())
    assert why == session_pb2.Goodbye.REVOKED
    assert (code, again) == (grpc.StatusCode.UNAUTHENTICATED,) * 2
    assert text == "the certificate of 'a' was revoked"


def test_a_newer_stream_of_a_node_replaces_the_older(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            node = await enrolled(cloud, tmp_path, "a")
            channel, call, _ = await greeted(node.identity)
            other, second, _ = await greeted(node.identity)
            frames, _, _ = await ending(call)
            assert cloud.sessions.is_connected("a")
            await second.write(session_pb2.Frame(number=1, report=pb.Report(capability=CAPABILITY)))
            await until(cloud, lambda: cloud.fleet.node("a").report)
            for each in (channel, other):
                await each.close()
            return frames[-1]

    assert within(story()).goodbye.why == session_pb2.Goodbye.REPLACED


def test_a_cloud_that_stops_says_goodbye_to_its_nodes(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            node = await enrolled(cloud, tmp_path, "a")
            channel, call, _ = await greeted(node.identity)
            stopping = asyncio.create_task(cloud.stop())
            frames, _, _ = await ending(call)
            await stopping
            await channel.close()
            return frames[-1]

    goodbye = within(story()).goodbye
    assert goodbye.why == session_pb2.Goodbye.SHUTTING_DOWN
    assert goodbye.retry_after_s > 0


def test_who_was_enrolled_or_revoked_before_a_crash_is_known_after_it(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            await enrolled(cloud, tmp_path, "gone")

            async def untold(*_):
                raise Unavailable("killed before the fleet was told")

            cloud._joined = untold  # type: ignore[method-assign]
            with pytest.raises(Unavailable):
                # the enrolment port was built with the bound method; ask as it does
                await _enrol_untold(cloud, tmp_path)
            await cloud.principals.revoke("operator", "gone", "stolen")
        async with running(home) as again:
            return {node.name: dict(node.labels) for node in again.fleet.nodes()}

    assert within(story()) == {"late": {"site": "lab"}}


def test_a_start_asks_nothing_about_nodes_that_the_fleet_knows(home, tmp_path, monkeypatch):
    asked = []
    invited_with = Cloud._invited_with

    async def heard(cloud, name):
        asked.append(name)
        return await invited_with(cloud, name)

    async def story():
        async with running(home) as cloud:
            await enrolled(cloud, tmp_path, "a", site="lab")
            known = [dict(node.labels) for node in cloud.fleet.nodes()]
        monkeypatch.setattr(Cloud, "_invited_with", heard)
        async with running(home) as again:
            return known == [dict(node.labels) for node in again.fleet.nodes()]

    assert within(story())
    assert not asked


async def _enrol_untold(cloud, tmp_path):
    from triplane.cloud.identity.rights import PrincipalRole
    from triplane.proto.identity import Token, certificate_request, mac, new_key

    invited = await cloud.principals.invite(
        "operator", PrincipalRole.NODE, name="late", labels={"site": "lab"}
    )
    token, asked = Token.parse(invited.token), certificate_request(new_key())
    made = await cloud.principals.enrol(token.id, asked, mac(token.key, asked))
    await cloud._joined(made.name, made.role, made.labels)


def test_a_second_cloud_on_the_same_home_is_refused(home):
    async def story():
        async with running(home):
            with pytest.raises(Conflict, match="another process runs"):
                await Cloud(home).start()

    within(story())


def test_one_port_for_calls_and_enrolment_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidInput, match="must differ, both are 8444; choose --port or"):
        CloudOptions(home=tmp_path, port=8444)
    assert CloudOptions(home=tmp_path, port=0, enrol_port=0).port == 0


def test_a_taken_port_is_named_and_nothing_stays_open(home):
    async def story():
        async with running(home) as cloud:
            port = cloud.port
            await cloud.stop()
            with (
                socket.create_server(("127.0.0.1", port)),
                pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}"),
            ):
                await Cloud(home, port=port).start()
            async with running(home, port=port) as again:
                assert again.port == port

    within(story())


def test_an_ipv6_address_is_one_to_listen_on(home):
    async def story():
        async with running(home, host="::1") as cloud:
            assert cloud.address == f"[::1]:{cloud.port}"
            with socket.create_connection(("::1", cloud.enrol_port), timeout=10):
                pass
            with pytest.raises(Conflict, match="another process runs"):
                await Cloud(home, host="::1").start()

    within(story())


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("0.0.0.0", "cloud on port 1 (mutual TLS), enrolment on port 2, both on all addresses"),
        ("::", "cloud on port 1 (mutual TLS), enrolment on port 2, both on all addresses"),
        ("127.0.0.1", "cloud on 127.0.0.1:1 (mutual TLS), enrolment on 127.0.0.1:2, dashboard"),
    ],
)
def test_the_ready_line_names_no_address_that_nobody_can_call(host, said):
    cloud = cast("Cloud", SimpleNamespace(port=1, enrol_port=2, dashboard="http://x/"))
    assert server._ready_text(host, cloud).startswith(said)


def test_the_dashboard_shows_the_fleet_on_the_loopback(home, tmp_path):
    def state(url):
        with urllib.request.urlopen(f"{url}/api/state", timeout=10) as answer:
            return json.load(answer)

    async def story():
        async with running(home) as cloud:
            await enrolled(cloud, tmp_path, "a", site="lab")
            ahead = pb.Report(metadata_versions={"release": 99})
            ahead.models.add(model="digits", committed_version=9)
            await cloud.fleet.report("a", ahead)
            return await asyncio.to_thread(state, cloud.dashboard)

    told = within(story())
    due = told["totals"]["all"]["due"]
    assert any("node a: it serves digits@9, which this cloud did not assign" in t for t in due)
    assert any("keys renew --role release --past 99" in text for text in due)
    assert told["nodes"]["a"]["labels"] == {"site": "lab"}
    assert "digits@2" in told["versions"]


def test_people_see_nodes_page_by_page(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            for i in range(5):
                await cloud.fleet.add_node(f"n{i}", {"site": "lab" if i % 2 else "factory"})
            async with operator(home) as people:
                first = await people.ListNodes(pb.ListNodesRequest(page_size=2))
                second = await people.ListNodes(pb.ListNodesRequest(page_size=3, after=first.next))
                assert [n.name for n in first.nodes] == ["n0", "n1"]
                assert [n.name for n in second.nodes] == ["n2", "n3", "n4"]
                assert second.next == ""
                some = await people.ListNodes(pb.ListNodesRequest(selector="site=lab"))
                assert [n.name for n in some.nodes] == ["n1", "n3"]

    within(story())


def test_a_page_of_nodes_ends_before_its_message_is_too_long(home):
    async def story():
        async with running(home) as cloud, operator(home) as people:
            said = pb.Report(capability=CAPABILITY)
            for i in range(64):
                said.models.add(model=f"m{i}", reason="\N{SNAIL}" * 2000)
            names = [f"n{i:02}" for i in range(12)]
            for name in names:
                await cloud.fleet.add_node(name, {})
                await cloud.fleet.report(name, said)
            seen, after = [], ""
            while True:
                page = await people.ListNodes(pb.ListNodesRequest(page_size=1000, after=after))
                seen += [node.name for node in page.nodes]
                if not page.next:
                    return seen == names
                after = page.next

    assert within(story())


def test_people_are_told_what_the_port_serves_and_machines_are_not(home, tmp_path):
    ask = reflection_pb2.ServerReflectionRequest

    async def told(identity, *requests):
        async with connect_aio(identity) as channel:
            call = ServerReflectionStub(channel).ServerReflectionInfo(iter(requests))
            return [answer async for answer in call]

    async def opened(identity):
        # Nothing is sent: if the refusal comes first, grpc reports the failed sending instead.
        async with connect_aio(identity) as channel:
            await ServerReflectionStub(channel).ServerReflectionInfo().read()

    async def story():
        async with running(home) as cloud:
            node = await enrolled(cloud, tmp_path, "a")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await opened(node.identity)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            symbol = "triplane.fleet.v1.Fleet"
            people = IdentityFolder(home.operator)
            return await told(
                people, ask(list_services=""), ask(file_containing_symbol=symbol),
                ask(file_containing_symbol="triplane.nowhere.v1.Nobody"),
            )  # fmt: skip

    listed, found, missing = within(story())
    names = {service.name for service in listed.list_services_response.service}
    assert names == {method.split("/")[1] for method in RIGHTS}
    file = FileDescriptorProto.FromString(found.file_descriptor_response.file_descriptor_proto[0])
    assert file.package == "triplane.fleet.v1"
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_refused_call_names_its_family_and_the_rollout_in_the_way(home, tmp_path):
    async def story():
        async with running(home) as cloud, operator(home) as people:
            node = await enrolled(cloud, tmp_path, "a")
            going = await people.Deploy(deploy_request())
            with pytest.raises(Conflict) as raised, remote_errors():
                await people.Deploy(deploy_request(key=b"2" * 16))
            assert facts_of(raised.value) == {"rollout": going.id}
            async with connect_aio(node.identity) as channel:
                with pytest.raises(InvalidInput) as refused, remote_errors():
                    await FleetStub(channel).Deploy(deploy_request())
            return facts_of(refused.value)

    assert within(story()) == {"name": "a", "role": "node"}


def test_a_node_may_not_steer(home, tmp_path):
    async def story():
        async with running(home) as cloud:
            node = await enrolled(cloud, tmp_path, "a")
            channel = connect_aio(node.identity)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await FleetStub(channel).Deploy(deploy_request())
            await channel.close()
            return refused.value.code()

    assert within(story()) is grpc.StatusCode.PERMISSION_DENIED


def test_the_process_takes_the_descriptors_it_may_have(home):
    """A node costs one; a usual soft limit of 1,024 would end a thousand nodes' fleet."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    options = {"home": str(home.path), "host": "127.0.0.1", "json": True}
    options |= dict.fromkeys(("port", "enrol_port", "dashboard_port"), 0)
    limited = f"ulimit -Sn 256 && exec {sys.executable} -m triplane.cloud '{json.dumps(options)}'"
    with subprocess.Popen(["/bin/sh", "-c", limited], stdout=subprocess.PIPE) as cloud:
        assert cloud.stdout is not None
        try:
            assert json.loads(cloud.stdout.readline())["port"]
            assert resource.prlimit(cloud.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        finally:
            cloud.terminate()
