"""Masked inputs are added to their sum when they arrive, and a device that then leaves is not."""

import asyncio
import threading

import numpy as np
import pytest
from tests.cloud.federation.given import ended, enrolled, living, make_home, registered
from tests.cloud.federation.masked import MaskedDevice, masked_request, weighted_mean
from tests.support.deadlines import within

from triplane.cloud.federation.masked_cohort import MaskedCohort
from triplane.cloud.federation.masked_cohorts import MaskedCohorts
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.files import read_state
from triplane.unified_ir.federated.core.masked_step import MaskedStep

NAMES = ("ann", "bob", "cem", "dia")

pytestmark = pytest.mark.slow


class Watch:
    """Which inputs the cloud adds on arrival, and which at the end of the step."""

    def __init__(self, monkeypatch, enough):
        self.early: list[str] = []
        self.late: list[str] = []
        self.replays = 0
        self.are_added = threading.Event()
        add, take, replay = MaskedCohort.add_input, MaskedCohort.take, MaskedCohorts._replayed

        def adding(cohort, answer):
            add(cohort, answer)
            self.early.append(answer.device)
            if len(self.early) == enough:
                self.are_added.set()

        def taking(cohort, step, answers):
            given = list(answers)
            if step is MaskedStep.INPUTS:
                self.late += [answer.device for answer in given]
            return take(cohort, step, given)

        def replaying(cohorts, record, state):
            self.replays += state.round.masked.step is MaskedStep.INPUTS
            return replay(cohorts, record, state)

        monkeypatch.setattr(MaskedCohort, "add_input", adding)
        monkeypatch.setattr(MaskedCohort, "take", taking)
        monkeypatch.setattr(MaskedCohorts, "_replayed", replaying)


class Late(MaskedDevice):
    """Sends its masked input only once `signal` is set."""

    signal: threading.Event

    def answer(self, task, step):
        if step == "mask":
            assert self.signal.wait(60)
        return super().answer(task, step)


class Leaving(MaskedDevice):
    """Declines once the cloud has added its input, then sets `left`."""

    are_added: threading.Event
    left: threading.Event

    async def _answered(self, task, step):
        await super()._answered(task, step)
        if step == "mask":
            assert await self.apart(self.are_added.wait, 60)
            declined = pb.Contribution(run=task.run, round=task.round, lease=task.lease)
            declined.declined = "its battery is low"
            await self.client.send(declined)
            self.left.set()


async def run_of(tmp_path, kinds, request):
    """(the ended run, devices, the state of the evaluation minus that of the round)."""
    async with running(make_home(tmp_path)) as cloud:
        await registered(cloud, tmp_path)
        plain = [await enrolled(cloud, tmp_path, name, n) for n, name in enumerate(NAMES)]
        devices = [
            kind(d.identity, d.shard, d.folder) for kind, d in zip(kinds, plain, strict=True)
        ]
        for name in ("signal", "are_added", "left"):
            for device in devices:
                if (event := request.events.get((device.name, name))) is not None:
                    setattr(device, name, event)
        async with living(devices):
            made = await cloud.federation.begin(request.start, by="operator")
            run = await ended(cloud, made.id)
            change = await asyncio.to_thread(change_of, devices[-1])
            return run, devices, change


class Asked:
    """A request, and the events that devices wait for or set, by device and attribute."""

    def __init__(self, events, **fields):
        self.events = events
        self.start = masked_request(len(NAMES), lost_share=0.25, rounds=1, **fields)


def change_of(device):
    states = {}
    for task in (task for work in device.heard for task in work.tasks):
        path = device.blobs.find(task.state.sha256)
        states[task.WhichOneof("work")] = read_state(path, plan=device.plan(task).digest)
    return {n: states["evaluate"][n].astype(np.float64) - x for n, x in states["learn"].items()}


def check_change(change, devices):
    mean = weighted_mean([next(iter(d.open.values())) for d in devices], 24)
    off = np.sqrt(sum(float(np.square(change[n] - x).sum()) for n, x in mean.items()))
    assert off < 0.2 * np.sqrt(sum(float(np.square(x).sum()) for x in mean.values()))


def test_inputs_are_added_when_they_arrive(tmp_path, monkeypatch):
    watch = Watch(monkeypatch, enough=3)
    kinds = (MaskedDevice, MaskedDevice, MaskedDevice, Late)
    asked = Asked({("dia", "signal"): watch.are_added})
    run, devices, change = within(run_of(tmp_path, kinds, asked))
    assert run.phase == pb.Run.DONE, run.reason
    assert (run.rounds[0].counted, run.rounds[0].lost) == (4, 0)
    assert (sorted(watch.early), watch.late, watch.replays) == (["ann", "bob", "cem"], ["dia"], 0)
    check_change(change, devices)


def test_a_device_that_leaves_after_its_input_was_added_is_not_in_the_sum(tmp_path, monkeypatch):
    watch, left = Watch(monkeypatch, enough=3), threading.Event()
    kinds = (MaskedDevice, Leaving, MaskedDevice, Late)
    asked = Asked(
        {("bob", "are_added"): watch.are_added, ("bob", "left"): left, ("dia", "signal"): left}
    )
    run, devices, change = within(run_of(tmp_path, kinds, asked))
    assert run.phase == pb.Run.DONE, run.reason
    assert run.rounds[0].counted == 3
    assert sorted(watch.early) == ["ann", "bob", "cem"]
    assert (sorted(watch.late), watch.replays) == (["ann", "cem", "dia"], 1)
    check_change(change, [d for d in devices if d.name != "bob"])
