"""What a device refuses in masked rounds, from a cloud that breaks the protocol."""

import hashlib
from typing import Any

import pytest
from tests.device.masked_play import play, pseudonym_of
from tests.device.stage import lease
from tests.federated.masking.rounds import identity_key, public_der
from tests.support.deadlines import within

from triplane.device.tasks import STEPS
from triplane.proto import federation_pb2 as pb

KNOWN = {public_der(identity_key(number)) for number in range(4)}
"""Identity keys of simulated devices."""


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
    "a score": ({"evaluate": pb.Evaluate(steps=1)}, "plan and encoding are 2 of 25+0 bits"),
    "an answer of an app": ({"flower": pb.Blob()}, "a task to learn or evaluate, got 'keys'"),
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
