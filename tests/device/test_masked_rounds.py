"""A device in masked rounds over the wire: what it answers, and what it refuses."""

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from tests.device.stage import RUN, client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within
from tests.support.masked_rounds import MaskedRound

from triplane.device.home import DeviceHome
from triplane.proto import federation_pb2 as pb
from triplane.proto.plan_statement import Least, LeastMasking
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
        self.round = self.new_round()

    def new_round(self, **changes):
        options = {"simulated": self.simulated, **SHARED, **self.changes, **changes}
        return MaskedRound(RUN, 1, self.files["state"].sha256, **options)

    def task(self, step, number=1, **changes):
        return self.stage.task(
            number, **{**self.files, "masking": step, "inline_bytes": 65536, **changes}
        )

    async def asked(self, step, number=1, **changes):
        """The device's answer to a step."""
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
    work = Work(
        run=RUN, round=1, device=device, seed=7, steps=3, batch_size=4, support=4, query=3
    )
    return learn(plans.plan(folder), work, shard).change


@pytest.mark.parametrize("inline_bytes", [65536, 0])
def test_a_whole_round_gives_the_update_and_nothing_else(tmp_path, inline_bytes):
    async def story():
        async with play(tmp_path, encoding={"bits": 16}) as made:
            round_ = made.round
            keys = await made.answered(round_.step())
            step = round_.share(keys)
            position = round_.position(keys.keys.device)
            step = round_.mask(await made.answered(step))(position)
            masked = await made.answered(step, inline_bytes=inline_bytes)
            assert bool(masked.input.data) == bool(inline_bytes)

            def data(message):
                blob = message.blob.sha256
                return message.data or made.stage.blobs.find(blob).read_bytes()

            step = round_.sign(masked, data=data)
            step = round_.unmask(await made.answered(step))(position)
            sums = round_.sum(await made.answered(step))
            return round_, round_.mean(sums)

    round_, ((w, bias), weight) = within(story())
    assert weight == 20 + 3
    change = plain_change(tmp_path)
    for section, mean, name in zip(round_.codec.sections, (w, bias), ("w", "bias"), strict=True):
        bound = section.error_bound(4) * 32 / weight
        wanted = change[name].reshape(-1) * 20 / weight
        assert np.linalg.norm(mean - wanted) < bound
        assert np.linalg.norm(wanted) > 10 * bound, "the bound tells something"
    assert [p.name for p in (tmp_path / "ann/pending").iterdir()] == [f"{RUN}.update"]


REFUSED = {
    "too few for its owner": ({"owner": {"least_devices": 4}}, "at least 4 devices in a round, got 3"),
    "too few by the signature": (
        {"statement": {"least": Least(devices=5)}},
        "at least 5 devices in a round, got 3",
    ),
    "too few colluding by its owner": (
        {"owner": {"least_colluding_share": 0.1}},
        "a share of at least 0.1 colluding devices, got 0",
    ),
    "too few colluding by the signature": (
        {"statement": {"masking": LeastMasking(0.2)}},
        "a share of at least 0.2 colluding devices, got 0",
    ),
    "failure": ({"failure": 1e-3}, "a probability of at most 1e-06, got 0.001"),
    "no least": ({"changed": {"least": 1}}, "the least cohort of a masked round is 3"),
    "no failure": ({"changed": {"failure": float("nan")}}, "the largest failure probability"),
    "no cap": ({"encoded": {"cap": 0}}, "the cap on examples is 1 to"),
    "endless norm": ({"encoded": {"norm": float("nan")}}, "a range that float32 has, got 2 ent"),
    "no buffer norm": ({"encoded": {"buffer_norm": 0.0}}, "range that float32 has, got 1 entries"),
    "many bits": ({"encoded": {"bits": 25}}, "1 to 24 bits"),
    "other bits": ({"encoded": {"bits": 7}}, "256 of 7+0 bits, 1 of 6+0 bits, the terms have"),
    "other cap": ({"encoded": {"cap": 1 << 20}}, "1 of 21+0 bits, the terms have"),
    "other fields": ({"changed": {"fields": [pb.MaskedField(entries=9, bits=8)]}}, "9 of 8+0 bits"),
    "compression": ({"task": {"learn": pb.Learn(compression="int8")}}, "is not compressed"),
    "a score": ({"task": {"evaluate": pb.Evaluate(steps=1)}}, "a task to learn, got 'keys'"),
}


@pytest.mark.parametrize("case", REFUSED, ids=list(REFUSED))
def test_terms_that_it_does_not_accept_are_declined_before_it_learns(tmp_path, case):
    options, reason = dict(REFUSED[case][0]), REFUSED[case][1]
    changed, encoded = options.pop("changed", {}), options.pop("encoded", {})
    task = options.pop("task", {})

    async def story():
        async with play(tmp_path, **options) as made:
            step = made.round.step()
            for name, value in changed.items():
                if name == "fields":
                    del step.terms.fields[:]
                    step.terms.fields.extend(value)
                else:
                    setattr(step.terms, name, value)
            for name, value in encoded.items():
                setattr(step.encoding, name, value)
            return await made.asked(step, **task)

    assert reason in within(story()).declined
