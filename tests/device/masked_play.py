"""A device at work in masked rounds with simulated devices, and a test that plays the cloud."""

from contextlib import asynccontextmanager
from dataclasses import replace

from tests.device.stage import RUN, client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.masked_rounds import MaskedRound

from triplane.device.home import DeviceHome
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.learn import Work, learn

SHARD = plans.shard(held_out=6)


SHARED = {"parameters": 2, "buffers": 1}
"""Entries of w and of bias, in `plans`."""


def settings(stage, home, **changes):
    """A client whose owner has these settings."""
    client = client_at(stage, home, SHARD)
    if changes:
        DeviceHome(home).save_settings(replace(client.settings, **changes))
        client = client_at(stage, home, SHARD)
    return client


class Play:
    """A device at work on a stage, in a round with simulated devices."""

    def __init__(self, stage, *, statement=(), simulated=3, **changes):
        self.stage = stage
        plan, digest = stage.plan(sign=False)
        stage.signer.sign(stage.folder / "made.plan", **dict(statement))
        self.files = {"plan": plan, "state": stage.state(digest)}
        self.simulated, self.changes = simulated, changes
        self.begin(1)

    def begin(self, number):
        """Begin another round, with a lease and a run of its own."""
        self.number, self.run = number, RUN if number == 1 else f"{number:016x}"
        self.round = self.new_round()

    def new_round(self, **changes):
        options = {"simulated": self.simulated, **SHARED, **self.changes, **changes}
        return MaskedRound(self.run, 1, self.files["state"].sha256, **options)

    def task(self, step, number, **changes):
        options = {"run": self.run, "masking": step, "inline_bytes": 65536, **changes}
        return self.stage.task(number, **{**self.files, **options})

    async def asked(self, step, number=None, **changes):
        """The device's answer to a step."""
        number = number or self.number
        before = len(self.stage.heard)
        self.stage.tell(self.task(step, number, **changes))
        async with self.stage.moved:
            await self.stage.moved.wait_for(
                lambda: any(isinstance(m, pb.Contribution) for m in self.stage.heard[before:])
            )
        said = next(m for m in self.stage.heard[before:] if isinstance(m, pb.Contribution))
        assert said.lease == lease(number)
        return said

    async def answered(self, step, **changes):
        said = await self.asked(step, **changes)
        assert said.WhichOneof("outcome") == "masked", said.declined
        return said.masked

    async def reach(self, upto):
        """Play honestly; return what the step `upto` asks."""
        round_ = self.round
        keys = await self.answered(round_.step())
        step = round_.share(keys)
        if upto == "share":
            return step
        position = round_.position(keys.keys.device)
        step = round_.mask(await self.answered(step))(position)
        if upto == "mask":
            return step
        step = round_.sign(await self.answered(step))
        if upto == "sign":
            return step
        return round_.unmask(await self.answered(step))(position)


@asynccontextmanager
async def play(folder, *, owner=(), **options):
    async with staged(folder / "stage") as stage:
        made = Play(stage, **options)
        async with serving(settings(stage, folder / "ann", **dict(owner))):
            await stage.offer()
            yield made


def plain_change(folder, device="ann", shard=SHARD):
    """What a device learns in a plain round, as w and bias."""
    work = Work(run=RUN, round=1, device=device, seed=7, steps=3, batch_size=4, support=4, query=3)
    return learn(plans.plan(folder), work, shard).change


def pseudonym_of(round_):
    """The name of the one device that is not simulated."""
    simulated = {device.advertise().device for device in round_.simulated}
    (name,) = set(round_.cloud.session.devices) - simulated
    return name
