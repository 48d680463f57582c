"""A masked run in groups with a liar, whose cloud is killed in a late step of the round."""

import asyncio

import numpy as np
import pytest
from tests.cloud.federation.given import enrolled, living, registered
from tests.cloud.federation.masked import MaskedDevice, masked_request
from tests.faults.lab import Lab, Tally, strike
from tests.faults.nursery import Nursery

from triplane.cloud.federation.masked_cohort import GivenAnswer, MaskedCohort
from triplane.cloud.federation.masked_spec import FewestLeft
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.files import read_state
from triplane.unified_ir.federated.core.masked_step import STEPS
from triplane.unified_ir.federated.masking import wire

NAMES = tuple(f"dev{number:02}" for number in range(12))
LIAR = NAMES[4]
DEADLINE_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("step", ["sign", "unmask"])
def test_a_killed_cloud_reduces_the_same_groups_to_the_same_bits(tmp_path, step):
    with Nursery() as nursery:
        lab, tally = Lab(tmp_path, nursery), Tally()
        devices = asyncio.run(furnish(lab))
        with lab.started():
            run = asyncio.run(killed_run(lab, devices, step, tally))
    assert run.phase == pb.Run.DONE, run.reason
    assert tally.killed == 1
    assert [(r.number, r.counted, r.lost) for r in run.rounds] == [
        (1, 9, 3), (2, 9, 3), (2, 12, 0),
    ]  # fmt: skip
    for round_ in run.rounds[:2]:
        assert "so a device lied, and the state is kept" in round_.left_out
        assert round_.left_out.count("group ") == 1
        check_round(devices, round_.number)


async def furnish(lab):
    async with running(lab.home, **lab.ports) as cloud:
        await registered(cloud, lab.folder)
        plain = [await enrolled(cloud, lab.folder, name, n) for n, name in enumerate(NAMES)]
    devices = [MaskedDevice(d.identity, d.shard, d.folder) for d in plain]
    devices[NAMES.index(LIAR)].lies = True
    return devices


async def killed_run(lab, devices, step, tally):
    reached = asyncio.Event()

    def twist(_device, _task, at, sent):
        if at == step:
            reached.set()
        return sent

    devices[0].twist = twist
    async with asyncio.timeout(DEADLINE_S), living(devices):
        request = masked_request(
            len(NAMES), model="tiny@1", rounds=2, phase_s=120.0, groups=4, aggregator="median",
            cohort={"quorum": 0.75, "deadline_s": 600.0, "patience_s": 120.0},
        )  # fmt: skip
        run_id = await lab.start(request)
        await reached.wait()
        await strike({"cloud": lab.cloud}, tally)
        return await lab.ended(run_id)


def check_round(devices, number):
    """The next state is the median of the means of the groups that the answers give."""
    tasks = [next(t for t, _ in d.answers if t.round == number) for d in devices]
    ours = [d.open[t.lease] for d, t in zip(devices, tasks, strict=True)]
    task, secrets = tasks[0], ours[0]
    sizes = [sum(secrets.change[n].size for n in names) for names in secrets.sections]
    encoding = wire.encoding_of(task.masking.encoding, *sizes, *([0] if len(sizes) == 1 else []))
    terms = wire.terms_of(
        task.masking.terms, run=task.run, round_=task.round, base=task.state.sha256,
        encoding=wire.encoding_digest(task.masking.encoding, task.sampling),
    )  # fmt: skip
    assert terms.groups == 4
    norms = (task.masking.encoding.norm,) * len(sizes)
    cohort = MaskedCohort(terms, encoding, norms, fewest=FewestLeft(3, 9))
    out: set[str] = set()
    for at, step in enumerate(STEPS):
        answers = [
            GivenAnswer(d.name, sent.masked, sent.masked.input.data)
            for d in devices
            for t, sent in d.answers
            if t.round == number and d.name not in out and sent.masked.ListFields()
            and STEPS_OF[t.masking.WhichOneof("asks")] == at
        ]  # fmt: skip
        assert cohort.take(step, answers) == ({}, "")
        out |= {name for names in cohort.left_out.values() for name in names}
    assert LIAR in out
    assert len(out) == 3
    before, after = state_of(devices, number, False), state_of(devices, *AFTER[number])
    stack = np.stack([np.concatenate(mean.sections) for mean in cohort.means])
    median = np.median(stack.astype(np.float64), axis=0)
    first = 0
    for name in [name for names in secrets.sections for name in names]:
        x = before[name]
        moved = x.astype(np.float64) + median[first : first + x.size].reshape(x.shape)
        assert after[name].tobytes() == moved.astype(x.dtype).tobytes()
        first += x.size


STEPS_OF = {"keys": 0, "share": 1, "mask": 2, "sign": 3, "unmask": 4}
AFTER = {1: (2, False), 2: (2, True)}


def state_of(devices, number, evaluates):
    for device in devices:
        for work in device.heard:
            for task in work.tasks:
                kind = task.WhichOneof("work") == "evaluate"
                if (task.round, kind) == (number, evaluates):
                    plan = next(iter(device.plans.values()))
                    return read_state(device.blobs.find(task.state.sha256), plan=plan.digest)
    raise AssertionError((number, evaluates))
