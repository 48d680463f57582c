"""A device in masked rounds over the wire: its answers, its restarts, its other work."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
from tests.device.masked_play import Play, plain_change, play, settings
from tests.device.stage import RUN, lease, serving, staged
from tests.support.deadlines import within

from triplane.device import client as device_client
from triplane.device.home import DeviceHome
from triplane.device.masked_rounds import MAX_OPEN
from triplane.device.memory import Memory
from triplane.device.task_runner import InProcessExecutor
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.masking import wire
from triplane.unified_ir.federated.masking.messages import MaskingCohort


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


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_devices_that_are_told_other_norms_have_no_cohort(tmp_path, share):
    """Next to a norm of 1e6 the others' updates are rounded to nothing: the sum is that of one."""

    async def story():
        async with play(tmp_path, encoding={"bit_share": share}) as made:
            keys = await made.answered(made.round.step())
            others = made.new_round(encoding={"bit_share": share, "norm": 1e6})
            mine, key = wire.advertisement_of(keys.keys)
            both = [mine, *(device.advertise() for device in others.simulated)]
            cohort = MaskingCohort(advertisements=tuple(sorted(both, key=lambda a: a.device)))
            message = wire.cohort_message(cohort, {**others.verifier.keys, mine.device: key})
            return await made.asked(made.round.step(share=message))

    assert "not signed by its identity key for run" in within(story()).declined


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


def test_a_device_says_whose_shares_it_could_not_open_and_goes_on(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            step = await made.reach("mask")
            garbled = min(step.mask.sealed)
            step.mask.sealed[garbled] = bytes(len(step.mask.sealed[garbled]))
            masked = await made.answered(step)
            mine = masked.input.position
            step = made.round.unmask(await made.answered(made.round.sign(masked)))(mine)
            return garbled, masked.input, (await made.answered(step)).revealed

    garbled, masked, revealed = within(story())
    assert list(masked.unopened) == [garbled]
    others = {0, 1, 2, 3} - {masked.position, garbled}
    assert (set(revealed.self_masks), dict(revealed.mask_keys)) == (others, {})


def test_steps_come_in_their_order(tmp_path):
    async def story():
        async with play(tmp_path) as made:
            await made.answered(made.round.step())
            return await made.asked(made.round.step(mask=pb.ShareDelivery(sharers=[0, 1, 2])))

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
