"""Whole masked runs over mutual TLS: sums, losses in each step, dishonest devices, spent devices."""

import pytest
from tests.cloud.federation.given import ended, enrolled, living, make_home, registered
from tests.cloud.federation.masked import MaskedDevice, masked_request
from tests.support.deadlines import within

from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb

NAMES = ("ann", "bob", "cem", "dia", "eli", "fay")


async def masked_devices(cloud, folder, count, **fields):
    plain = [await enrolled(cloud, folder, name, n) for n, name in enumerate(NAMES[:count])]
    return [MaskedDevice(d.identity, d.shard, d.folder, **fields) for d in plain]


@pytest.mark.slow
def test_a_masked_run_registers_its_result(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await masked_devices(cloud, tmp_path, 3)
            async with living(devices):
                made = await cloud.federation.begin(masked_request(), by="operator")
                return await ended(cloud, made.id), devices

    run, devices = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 3), (2, False, 3), (2, True, 3),
    ]  # fmt: skip
