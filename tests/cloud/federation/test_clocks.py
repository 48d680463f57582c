"""Clocks that are wrong or jump, on the cloud and on a device: rounds go on and count the same."""

import time
from types import SimpleNamespace

import pytest
from tests.cloud.federation.given import (
    devices_of,
    ended,
    living,
    make_home,
    registered,
    start_request,
)
from tests.device.devices import client_of, cloud_of, taking_part
from tests.support.deadlines import within

from triplane.cloud.federation import journal
from triplane.cloud.server import running
from triplane.device import client as working
from triplane.proto import federation_pb2 as pb

HOUR_S = 3600.0
YEARS_S = 10 * 365 * 86_400.0
JUMPS = {2: -HOUR_S, 4: 2 * HOUR_S, 6: -3 * HOUR_S}  # by round, before its first update
ROUNDS = 7

pytestmark = pytest.mark.slow


class Jumping:
    """The real time, set forward and back."""

    def __init__(self):
        self.offset_s = 0.0
        self._jumps = dict(JUMPS)

    def __call__(self):
        return time.time() + self.offset_s

    async def act(self, device, task):
        """Learn as a device does; the cloud's clock jumps meanwhile."""
        self.offset_s += self._jumps.pop(task.round, 0.0)
        await device._worked(task)


def test_a_cloud_whose_clock_jumps_gives_rounds_up_at_most_and_ends_the_run(tmp_path):
    clock = Jumping()

    async def story():
        async with running(make_home(tmp_path), clock=clock) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            for device in devices:
                device.act = clock.act
            async with living(devices):
                request = start_request(rounds=ROUNDS)
                made = await cloud.federation.begin(request, by="operator")
                run = await ended(cloud, made.id)
            events = await cloud.database.read(lambda c: journal.events(c, run.id))
            return run, events

    run, events = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    counted = [r.number for r in run.rounds if not r.given_up and not r.evaluates]
    assert counted == [*range(1, ROUNDS + 1)]
    times = [event.at_s for event in events]
    assert times == sorted(times), "time never runs back in the journal"
    assert not run.refusals.reasons


@pytest.mark.parametrize("wrong_by_s", [-YEARS_S, pytest.param(YEARS_S, marks=pytest.mark.long)])
def test_a_device_with_a_wrong_clock_counts_in_every_round(tmp_path, monkeypatch, wrong_by_s):
    """Deadlines come as seconds to go; only renewal looks at the clock, and once an hour."""
    wrong = SimpleNamespace(time=lambda: time.time() + wrong_by_s, monotonic=time.monotonic)

    async def story():
        async with cloud_of(tmp_path) as cloud:
            clients = [await client_of(cloud, tmp_path, n, k) for k, n in enumerate(("ann", "bob"))]
            monkeypatch.setattr(working, "time", wrong)
            async with taking_part(*clients):
                made = await cloud.federation.begin(start_request(rounds=3), by="operator")
                return await ended(cloud, made.id)

    run = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert [(r.counted, r.lost, r.given_up) for r in run.rounds] == [(2, 0, "")] * 4
