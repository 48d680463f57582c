"""Whole runs over mutual TLS, streams and files, with devices that really learn."""

import pytest
from tests.cloud.federation.given import (
    devices_of,
    ended,
    living,
    make_home,
    registered,
    start_request,
)
from tests.support.deadlines import within

from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("maml", marks=pytest.mark.long)])
def test_a_run_over_the_wire_registers_its_result_with_lineage(tmp_path, algorithm):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            async with living(devices):
                request = start_request(algorithm=algorithm, alias="meta")
                made = await cloud.federation.begin(request, by="operator")
                run = await ended(cloud, made.id)
                version = await cloud.registry.version(run.result)
                return run, version, devices

    run, version, devices = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 2), (2, False, 2), (2, True, 2),
    ]  # fmt: skip
    assert (version.model, version.version, version.aliases) == ("tiny", 2, ("meta",))
    assert version.lineage.parent == "tiny@1"
    assert run.id in version.lineage.source
    assert all(kept.acknowledged for device in devices for kept in device.kept)
    assert run.rounds[-1].after.mean > 0
