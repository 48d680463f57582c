"""A device in masked rounds over the wire: what it answers, and what it refuses."""

import asyncio
import hashlib
import math
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.device.stage import RUN, client_at, lease, serving, staged
from tests.federated.core import plans
from tests.federated.masking.rounds import identity_key, public_der
from tests.support.deadlines import within
from tests.support.masked_rounds import MaskedRound

from triplane.device import client as device_client
from triplane.device.home import DeviceHome
from triplane.device.masked_rounds import MAX_OPEN
from triplane.device.memory import Memory
from triplane.device.task_runner import InProcessExecutor
from triplane.device.tasks import STEPS
from triplane.proto import federation_pb2 as pb
from triplane.proto.identity import key_digest
from triplane.proto.plan_statement import Least, LeastMasking
from triplane.unified_ir.federated.core.learn import Work, learn
from triplane.unified_ir.federated.masking import wire
from triplane.unified_ir.federated.masking.messages import MaskingCohort

SHARD = plans.shard(held_out=6)
SHARED = {"parameters": 2, "buffers": 1}
"""Entries of w and of bias, in `plans`."""
KNOWN = {public_der(identity_key(number)) for number in range(4)}
"""Identity keys of simulated devices."""


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


DEMANDS: dict[str, tuple[dict[str, Any], str]] = {
    "devices, of its owner": (
        {"owner": {"least_devices": 4}},
        "at least 4 devices in a round, got 3",
    ),
    "devices, of the signature": (
        {"statement": {"least": Least(devices=5)}},
        "at least 5 devices in a round, got 3",
    ),
    "colluding, of its owner": (
        {"owner": {"least_colluding_share": 0.1}},
        "a share of at least 0.1 colluding devices, got 0",
    ),
    "colluding, of the signature": (
        {"statement": {"masking": LeastMasking(0.2)}},
        "a share of at least 0.2 colluding devices, got 0",
    ),
}


@pytest.mark.parametrize("case", DEMANDS, ids=list(DEMANDS))
def test_weaker_masking_than_is_demanded_is_declined(tmp_path, case):
    options, reason = DEMANDS[case]

    async def story():
        async with play(tmp_path, **options) as made:
            return await made.asked(made.round.step())

    assert reason in within(story()).declined


# Changes of the terms, of the encoding or of the task, and the reason that the device gives.
TERMS: dict[str, tuple[dict[str, Any], str]] = {
    "failure": ({"failure": 1e-3}, "a probability of at most 1e-06, got 0.001"),
    "no failure": ({"failure": float("nan")}, "the largest failure probability"),
    "no least": ({"least": 1}, "the least cohort of a masked round is 3"),
    "other fields": ({"fields": [pb.MaskedField(entries=9, bits=8)]}, "have 9 of 8+0 bits"),
    "no field": ({"fields": []}, "1 to 64 fields, got 32 bytes and 0 fields"),
    "noise bits": (
        {"fields": [pb.MaskedField(entries=256, bits=8, noise_bits=4)]},
        "the terms have 256 of 8+4 bits",
    ),
}
ENCODINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no cap": ({"cap": 0}, "the cap on examples is 1 to"),
    "other cap": ({"cap": 1 << 20}, "1 of 21+0 bits, the terms have"),
    "endless norm": ({"norm": float("inf")}, "a range that float32 has, got 2 entries"),
    "no norm": ({"norm": float("nan")}, "a range that float32 has, got 2 entries"),
    "no buffer norm": ({"buffer_norm": 0.0}, "range that float32 has, got 1 entries"),
    "many bits": ({"bits": 25}, "1 to 24 bits"),
    "other bits": ({"bits": 7}, "256 of 7+0 bits, 1 of 6+0 bits, the terms have"),
}
TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "compression": ({"learn": pb.Learn(compression="int8")}, "is not compressed"),
    "a score": ({"evaluate": pb.Evaluate(steps=1)}, "a task to learn, got 'keys'"),
}


def changed(message, changes):
    for name, value in changes.items():
        if name == "fields":
            del message.fields[:]
            message.fields.extend(value)
        else:
            setattr(message, name, value)


@pytest.mark.slow
def test_terms_that_do_not_follow_are_declined_with_the_reason(tmp_path):
    """One device meets them all, one after the other, and takes part in an honest round then."""
    cases = [(kind, *case) for kind in (TERMS, ENCODINGS, TASKS) for case in kind.values()]

    async def story():
        said = []
        async with play(tmp_path) as made:
            for number, (kind, changes, _) in enumerate(cases, 2):
                made.begin(number)
                step = made.round.step()
                if kind is not TASKS:
                    changed(step.terms if kind is TERMS else step.encoding, changes)
                said.append(await made.asked(step, **(changes if kind is TASKS else {})))
            made.begin(1)
            await made.reach("unmask")
        return said

    for (_, changes, reason), contribution in zip(cases, within(story()), strict=True):
        assert reason in contribution.declined, (changes, contribution)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_devices_that_are_told_other_norms_have_no_cohort_where_they_send_bits(tmp_path, share):
    """Or a cloud would give the others a norm that nobody has, and read the bit of one device."""

    async def story():
        async with play(tmp_path, encoding={"bit_share": share}) as made:
            keys = await made.answered(made.round.step())
            others = made.new_round(encoding={"bit_share": share, "norm": 1e-6})
            mine, key = wire.advertisement_of(keys.keys)
            both = [mine, *(device.advertise() for device in others.simulated)]
            cohort = MaskingCohort(advertisements=tuple(sorted(both, key=lambda a: a.device)))
            message = wire.cohort_message(cohort, {**others.verifier.keys, mine.device: key})
            return await made.asked(made.round.step(share=message))

    said = within(story())
    if share:
        assert "not signed by its identity key for run" in said.declined
    else:
        assert said.WhichOneof("outcome") == "masked", "as before there were bits"


def test_a_device_says_of_its_update_whether_it_was_short(tmp_path):
    """By its own norm before it was clipped, for parameters and buffers apart."""

    async def story(norm, buffer_norm):
        folder = tmp_path / f"{norm}-{buffer_norm}"
        folder.mkdir()
        values = {"bit_share": 0.5, "norm": norm, "buffer_norm": buffer_norm}
        async with play(folder, encoding=values) as made:
            sums = made.round.sum(await made.answered(await made.reach("unmask")))
            return made.round.codec.sums_of_bits(sums, 4, cohort=4)

    change = plain_change(tmp_path)
    sizes = [float(np.linalg.norm(change[name])) for name in ("w", "bias")]
    # The three simulated devices send zeros, which are short.
    for longer in ((True, False), (False, True)):
        norms = [x * (2.1 if y else 1.9) for x, y in zip(sizes, longer, strict=True)]
        assert within(story(*norms)) == tuple(3 + (1 if y else -1) for y in longer)


def alone(step, _mine):
    del step.share.advertisements[1:]


def without_it(step, _mine):
    (mine,) = [a for a in step.share.advertisements if a.identity_key not in KNOWN]
    step.share.advertisements.remove(mine)


def renamed(step, _mine):
    step.share.advertisements[0].device = "0" * 64


def forged(step, _mine):
    other = next(a for a in step.share.advertisements if a.identity_key in KNOWN)
    other.mask_key = bytes(31) + b"\x01"


def no_key(step, _mine):
    key = b"no key"
    step.share.advertisements[0].identity_key = key
    step.share.advertisements[0].device = hashlib.sha256(key).hexdigest()


def crowded(step, _mine):
    step.share.advertisements.extend([step.share.advertisements[0]] * 10_000)


def two(positions, mine):
    other = next(i for i in positions if i != mine)
    positions[:] = sorted([mine, other])


def fewer_sharers(step, mine):
    two(step.mask.sharers, mine)


def without_me(step, mine):
    step.sign.positions.remove(mine)


def other_seals(step, _mine):
    key = next(iter(step.mask.sealed))
    del step.mask.sealed[key]


def fewer_survivors(step, mine):
    two(step.sign.positions, mine)


def unsorted(step, _mine):
    step.sign.positions.append(0)


def unknown_survivor(step, _mine):
    step.sign.positions.append(77)


def unsigned(step, _mine):
    for position in list(step.unmask.signatures)[2:]:
        del step.unmask.signatures[position]


def forged_signatures(step, _mine):
    for position in step.unmask.signatures:
        step.unmask.signatures[position] = b"x" * 70


def no_receipts(step, _mine):
    step.unmask.receipts.clear()


def other_terms(step, _mine):
    step.terms.attempt += 1


def other_encoding(step, _mine):
    step.encoding.norm *= 2


CHANGED = {
    "a cohort of one": ("share", alone, "masking needs 3 <= least cohort <= devices"),
    "a cohort without it": ("share", without_it, "does not contain"),
    "a name that is no digest": ("share", renamed, "is named by the SHA-256 of its identity key"),
    "keys that nobody signed": ("share", forged, "are not signed by its identity key"),
    "an identity key that is none": ("share", no_key, "is not a public key in DER"),
    "a crowd": ("share", crowded, "a masked cohort has at most 10000 devices"),
    "few sharers": ("mask", fewer_sharers, "the sharers must be at least 3 devices"),
    "other shares": ("mask", other_seals, "shares are delivered from exactly the neighbours"),
    "a shrunk set": ("sign", fewer_survivors, "the survivors must be at least 3 devices"),
    "a set without it": ("sign", without_me, "the survivors do not contain this device"),
    "survivors twice": ("sign", unsorted, "positions that rise strictly"),
    "survivors that are not in the cohort": (
        "sign",
        unknown_survivor,
        "positions that rise strictly",
    ),
    "no quorum": ("unmask", unsigned, "the cloud shows 2 valid signatures of 2"),
    "forged signatures": ("unmask", forged_signatures, "the cloud shows 0 valid signatures of 4"),
    "no receipts": ("unmask", no_receipts, "shows no valid signature of its masked input"),
    "other terms": ("sign", other_terms, "the same in all its steps, the cloud changed them"),
    "another encoding": ("share", other_encoding, "the same in all its steps"),
}


@pytest.mark.slow
def test_a_step_that_breaks_the_protocol_ends_the_round_for_the_device(tmp_path):
    """One device meets them all, one after the other, and takes part in an honest round then."""

    async def story():
        said = {}
        async with play(tmp_path) as made:
            for number, (name, (at, change, _)) in enumerate(CHANGED.items(), 2):
                made.begin(number)
                step = await made.reach(at)
                change(step, made.round.position(pseudonym_of(made.round)))
                said[name] = [await made.asked(step)]
                for later in STEPS[STEPS.index(at) + 1 :][:1]:
                    # The step that comes next, whatever it says.
                    said[name].append(await made.asked(made.round.step(**{later: ANY[later]})))
            made.begin(1)
            await made.reach("unmask")
        return said

    for name, (first, *later) in within(story()).items():
        reason = CHANGED[name][2]
        assert reason in first.declined, (name, first)
        for again in later:
            assert "this device left this masked round: " in again.declined
            assert reason in again.declined


ANY = {
    "mask": pb.ShareDelivery(sharers=[0, 1, 2]),
    "sign": pb.SurvivorSet(positions=[0, 1, 2]),
    "unmask": pb.UnmaskRequest(),
}


def test_a_device_signs_one_list_of_survivors_and_reveals_by_no_other(tmp_path):
    """The cloud shows it one list, and another one to the other devices."""

    async def story():
        async with play(tmp_path, simulated=4) as made:
            step = await made.reach("sign")
            mine = made.round.position(pseudonym_of(made.round))
            step.sign.positions.remove(next(i for i in step.sign.positions if i != mine))
            signed = await made.answered(step)
            assert signed.signature.position == mine
            # The others have signed the list of all five.
            requests = made.round.unmask()
            return await made.asked(requests(mine))

    assert (
        "the cloud shows 0 valid signatures of 4; no share is revealed" in within(story()).declined
    )


def pseudonym_of(round_):
    """The name of the one device that is not simulated."""
    simulated = {device.advertise().device for device in round_.simulated}
    (name,) = set(round_.cloud.session.devices) - simulated
    return name


def test_repeated_steps_with_other_contents_are_not_answered(tmp_path):
    """Another cohort, another list, and both shares of one device."""

    async def story():
        async with play(tmp_path) as made:
            share = await made.reach("share")
            position = made.round.position(pseudonym_of(made.round))
            step = made.round.mask(await made.answered(share))(position)
            step = made.round.sign(await made.answered(step))
            unmask = made.round.unmask(await made.answered(step))(position)
            await made.answered(unmask)
            before = len(made.stage.heard)
            fewer = pb.MaskingStep()
            fewer.CopyFrom(step)
            del fewer.sign.positions[-1]
            other = made.new_round(attempt=1)
            for again in (made.round.step(), share, fewer, unmask, other.step()):
                await made.stage.heeded(pb.Work(tasks=[made.task(again, 1)]))
            # A new lease shows that the device has looked at all of them.
            said = await made.asked(other.step(), 2)
            return made.stage.heard[before:], said

    heard, said = within(story())
    assert [m.lease for m in heard if isinstance(m, pb.Contribution)] == [lease(2)]
    assert "contributes once for each run and base state" in said.declined


@pytest.mark.parametrize("upto", ["share", "sign"])
def test_a_restarted_device_leaves_the_round_and_never_repeats_one(tmp_path, upto):
    async def story():
        async with staged(tmp_path / "stage") as stage:
            made = Play(stage)
            async with serving(settings(stage, tmp_path / "ann")):
                await stage.offer()
                step = await made.reach(upto)
            stage.heard.clear()
            async with serving(settings(stage, tmp_path / "ann")):
                await stage.offer()
                declined = await made.asked(step)
                made.round = made.new_round(attempt=1)
                again = await made.asked(made.round.step(), 2)
                files = {
                    **made.files,
                    "state": stage.state(stage.plan()[1], w=np.ones((2, 1), np.float32)),
                }
                made.files = files
                made.round = made.new_round()
                other = await made.asked(made.round.step(), 3, round=2)
                return declined, again, other

    declined, again, other = within(story())
    assert (
        "no secrets of the masked round: the process that held them has ended" in declined.declined
    )
    if upto == "share":
        assert again.WhichOneof("outcome") == "masked", "it has masked nothing from this state"
    else:
        assert "did so in round 1, attempt 0, and is asked again for round 1, attempt 1" in (
            again.declined
        )
    assert other.WhichOneof("outcome") == "masked", other.declined


def test_a_new_certificate_waits_until_no_masked_round_is_open(tmp_path, monkeypatch):
    """A device uses it in a new process for tasks, which would not have the secrets."""
    events: list[str] = []
    facts = SimpleNamespace(name="ann", renew_at_s=math.inf)
    monkeypatch.setattr(device_client, "RENEWAL_LOOK_S", 0.01)
    monkeypatch.setattr(DeviceHome, "enrolled", facts)

    async def story():
        loop, renewed, used = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def renew(_home):
            facts.renew_at_s = math.inf
            loop.call_soon_threadsafe(renewed.set)

        def use(_runner):
            events.append("used")
            used.set()

        monkeypatch.setattr(DeviceHome, "renew", renew)
        monkeypatch.setattr(InProcessExecutor, "use_new_certificate", use)
        async with play(tmp_path) as made:
            step = await made.reach("mask")
            facts.renew_at_s = 0.0
            await renewed.wait()
            await made.answered(step)
            events.append("over")
            await made.stage.heeded(pb.Work())
            await used.wait()

    within(story())
    assert events == ["over", "used"]


def test_a_device_is_in_so_many_rounds_at_most_and_forgets_those_that_are_over(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            tasks = []
            for number in range(1, MAX_OPEN + 2):
                made.begin(number)
                tasks.append(made.task(made.round.step(), number))
            made.stage.tell(*tasks)
            said = [await made.stage.contribution(lease(n)) for n in range(1, len(tasks) + 1)]
            made.begin(100)
            return said, await made.asked(made.round.step())

    (*taken, refused), later = within(story())
    assert {m.WhichOneof("outcome") for m in taken} == {"masked"}
    assert "takes part in at most 8 masked rounds at a time, it is in 8" in refused.declined
    assert later.WhichOneof("outcome") == "masked"


def test_steps_come_in_their_order(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            await made.answered(made.round.step())
            return await made.asked(made.round.step(mask=ANY["mask"]))

    assert "in this order; mask comes before share" in within(story()).declined


def test_a_device_learns_for_another_run_only_between_the_steps_in_which_others_wait(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            answer = await made.answered(made.round.step())
            share = made.task(made.round.share(answer), 1)
            other = made.stage.task(9, **made.files, run=f"{9:016x}", inline_bytes=65536)
            made.stage.tell(other, share)  # in the order of a cloud: the oldest run is first
            await made.stage._until(
                lambda m: (
                    isinstance(m, pb.Contribution) and m.masked.WhichOneof("answer") == "shares"
                )
            )
            await made.stage.heeded(pb.Work(tasks=[other, share]))
            before = [m.lease for m in made.stage.heard if isinstance(m, pb.Contribution)]
            made.stage.tell(other)
            await made.stage.contribution(lease(9))
            return before

    assert within(story()) == [lease(1), lease(1)]


def test_a_device_that_revealed_its_shares_learns_for_other_runs_at_once(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            asks = await made.reach("unmask")
            await made.answered(asks)
            other = made.stage.task(9, **made.files, run=f"{9:016x}", inline_bytes=65536)
            made.stage.tell(made.task(asks, 1), other)
            return await made.stage.contribution(lease(9))

    assert within(story()).WhichOneof("outcome") == "update"


def test_a_damaged_ledger_stops_masked_rounds_and_no_others(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            (tmp_path / "ann/masking.ledger").write_bytes(b"damaged")
            masked = await made.asked(made.round.step())
            made.stage.tell(made.stage.task(2, **made.files))
            return masked, await made.stage.contribution(lease(2))

    masked, plain = within(story())
    assert "masking.ledger" in masked.declined
    assert "Restore it from a backup" in masked.declined
    assert plain.WhichOneof("outcome") == "update"


@pytest.mark.parametrize(
    "options",
    [{"owner": {"masked_only": True}}, {"statement": {"masking": LeastMasking()}}],
    ids=["owner", "signature"],
)
def test_an_update_in_the_clear_is_declined_where_masking_is_demanded(tmp_path, options):
    async def story():
        async with play(tmp_path, **options) as made:
            made.stage.tell(made.stage.task(1, **made.files))
            plain = await made.stage.contribution(lease(1))
            made.stage.tell(made.stage.task(2, **made.files, evaluate=pb.Evaluate(steps=1)))
            score = await made.stage.contribution(lease(2))
            return plain, score, await made.asked(made.round.step(), 3)

    plain, score, masked = within(story())
    assert "demand masking, and updates are in the clear" in plain.declined
    assert score.WhichOneof("outcome") == "score"
    assert masked.WhichOneof("outcome") == "masked"


def test_the_update_of_a_masked_lease_is_never_sent_in_the_clear(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            await made.answered(made.round.step())
            made.stage.tell(made.stage.task(1, **made.files, inline_bytes=65536))
            return await made.stage._until(
                lambda m: isinstance(m, pb.Contribution) and m.WhichOneof("outcome") == "declined"
            )

    assert "is masked and is sent in no other way" in within(story()).declined


@pytest.mark.parametrize(("counted", "steps"), [(True, [3, 3]), (False, [])])
def test_personal_state_changes_with_a_masked_update_that_counted(tmp_path, counted, steps):
    async def story():
        async with play(tmp_path) as made:
            await made.reach("sign")
            settled = pb.Settlement(run=RUN, lease=lease(1), counted=counted)
            await made.stage.heeded(pb.Work(settled=[settled]))
            made.stage.tell(made.stage.task(2, **made.files))
            await made.stage.contribution(lease(2))

    within(story())
    home = DeviceHome(tmp_path / "ann")
    assert list(Memory(home.personal, home.pending).personal(RUN).tensors.get("head", [])) == steps


@pytest.mark.parametrize("invented", [0, 1])
def test_every_device_of_a_cohort_must_be_in_the_roster(tmp_path, invented):
    async def story():
        async with play(tmp_path) as made:
            mine = key_digest(DeviceHome(tmp_path / "ann").identity.certificate)
            keys = [public_der(identity_key(number)) for number in range(3 - invented)]
            made.stage.signer.enlist(mine, *(hashlib.sha256(key).digest() for key in keys))
            return await made.asked(await made.reach("share"))

    said = within(story())
    if invented:
        assert "is no device of the roster 3 of 3 devices" in said.declined
    else:
        assert said.WhichOneof("outcome") == "masked", said.declined
