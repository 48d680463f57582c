"""One host of state machines: what is committed when, and who learns of it."""

import asyncio
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from triplane.cloud.machine import Machine, MachineRules
from triplane.proto.errors import Conflict, Unavailable

DEADLINE_S = 30.0
TOO_MUCH = 100


@dataclass
class Account:
    """A sum of integers in a file, one line for each commit; `log` is what happened, in order."""

    path: Path
    log: list = field(default_factory=list)
    opened: asyncio.Event | None = None
    fails: list = field(default_factory=list)
    batches: list = field(default_factory=list)

    def stored(self):
        return sum(sum(line) for line in self.lines())

    def lines(self):
        return [json.loads(x) for x in self.path.read_text().splitlines()]

    def machine(self, **changes):
        rules = MachineRules(fold=self.fold, commit=self.commit, act=self.act, max_batch=8)
        machine = Machine("account", self.stored(), replace(rules, **changes))
        machine.start()
        return machine

    def fold(self, state, events):
        for event in events:
            if state + event > TOO_MUCH:
                raise Conflict(f"{state} and {event} are more than {TOO_MUCH}")
            state += event
            yield (event or None), state, [f"effect {event}"]

    async def commit(self, before, batch):
        self.batches.append(batch)
        if self.opened is not None:
            await self.opened.wait()
        if self.fails:
            raise self.fails.pop()
        events = [event for event, _ in batch.steps]
        self.log.append(f"commit {events}")
        with self.path.open("a") as file:
            file.write(json.dumps(events) + "\n")
        return batch.state

    def act(self, before, batch):
        self.log += batch.effects


@pytest.fixture
def account(tmp_path):
    path = tmp_path / "account"
    path.touch()
    return Account(path)


def within(story):
    async def limited():
        async with asyncio.timeout(DEADLINE_S):
            return await story

    return asyncio.run(limited())


async def turns():
    for _ in range(20):
        await asyncio.sleep(0)


def test_effects_follow_the_commit_and_answers_follow_the_effects(account):
    async def story():
        machine = account.machine()
        for event in (1, 2):
            account.log.append(f"answer {await machine.put(event)}")
        await machine.stop()

    within(story())
    assert account.log == [
        "commit [1]", "effect 1", "answer 1", "commit [2]", "effect 2", "answer 3",
    ]  # fmt: skip


def test_events_that_come_together_share_a_commit_in_their_order(account):
    async def story():
        machine = account.machine()
        states = await asyncio.gather(*(machine.put(event) for event in (1, 2, 3)))
        await machine.stop()
        return states

    assert within(story()) == [6, 6, 6]
    assert account.lines() == [[1, 2, 3]]
    assert account.log == ["commit [1, 2, 3]", "effect 1", "effect 2", "effect 3"]


def test_nothing_is_seen_before_its_commit(account):
    async def story():
        account.opened = asyncio.Event()
        machine = account.machine()
        put = asyncio.ensure_future(machine.put(1))
        await turns()
        early = put.done(), machine.state, machine.ahead.state, list(account.log)
        account.opened.set()
        late = await put, machine.state
        await machine.stop()
        return early, late

    assert within(story()) == ((False, 0, 1, []), (1, 1))


def test_a_crash_between_commit_and_effects_loses_no_event(account):
    class Killed(BaseException):
        pass

    def killed(before, batch):
        raise Killed

    async def story():
        machine = account.machine(act=killed)
        with pytest.raises(Unavailable, match="stopping"):
            await machine.put(7)
        await machine.stop()
        again = account.machine()
        seen = again.state, await again.put(1)
        await again.stop()
        return seen

    assert within(story()) == (7, 8)
    assert account.lines() == [[7], [1]]


def test_an_effect_that_fails_does_not_undo_its_commit(account):
    def fail(before, batch):
        raise RuntimeError("the observer is broken")

    async def story():
        machine = account.machine(act=fail)
        states = [await machine.put(event) for event in (1, 2)]
        await machine.stop()
        return states

    assert within(story()) == [1, 3]
    assert account.lines() == [[1], [2]]


def test_an_event_that_fails_costs_no_other_event_its_commit(account):
    failed = []

    async def story():
        machine = account.machine(failed=lambda event, error: failed.append((event, str(error))))
        puts = [machine.put(event) for event in (1, TOO_MUCH, 2)]
        answers = await asyncio.gather(*puts, return_exceptions=True)
        await machine.stop()
        return answers

    first, refused, last = within(story())
    assert (first, last) == (1, 3)
    assert isinstance(refused, Conflict)
    assert failed == [(TOO_MUCH, "1 and 100 are more than 100")]
    assert account.lines() == [[1], [2]]


def test_a_commit_that_is_refused_changes_nothing_and_what_nobody_waits_for_is_retried(account):
    refused: list[Unavailable] = []
    account.fails = [Unavailable("the disk is full")]

    async def story():
        machine = account.machine(refused=refused.append)
        machine.note(5)
        with pytest.raises(Unavailable, match="the disk is full"):
            await machine.put(1)
        assert (machine.state, account.log) == (0, [])
        state = await machine.put(2)
        await machine.stop()
        return state

    assert within(story()) == 7
    assert [str(error) for error in refused] == ["the disk is full"]
    assert [batch.is_lost for batch in account.batches] == [True, False]
    assert account.stored() == 7


def test_an_effect_may_queue_another_event(account):
    async def story():
        def act(before, batch):
            account.log.append(f"act {batch.state}")
            if batch.state == 1:
                machine.note(10)

        machine = account.machine(act=act)
        assert await machine.put(1) == 1
        state = await machine.put(2)
        await machine.stop()
        return state

    assert within(story()) == 13
    assert account.log == ["commit [1]", "act 1", "commit [10]", "act 11", "commit [2]", "act 13"]


def test_an_event_is_applied_though_its_caller_left(account):
    async def story():
        machine = account.machine()
        put = asyncio.ensure_future(machine.put(1))
        await asyncio.sleep(0)
        put.cancel()
        state = await machine.put(2)
        await machine.stop()
        return state

    assert within(story()) == 3


def test_a_held_commit_takes_later_events_and_is_refused_at_the_end(account):
    async def story():
        machine = account.machine(hold=lambda batch: batch.state < 10, hold_s=DEADLINE_S)
        held = [asyncio.ensure_future(machine.put(event)) for event in (1, 2)]
        await turns()
        assert account.lines() == []
        assert await machine.put(9) == 12
        assert await asyncio.gather(*held) == [12, 12]
        held = asyncio.ensure_future(machine.put(-10))
        await turns()
        await machine.stop()
        with pytest.raises(Unavailable, match="stopping"):
            await held
        with pytest.raises(Unavailable, match="stopping"):
            await machine.put(1)

    within(story())
    assert account.lines() == [[1, 2, 9]]


def test_a_held_commit_is_done_when_its_time_is_over(account):
    async def story():
        machine = account.machine(hold=lambda _: True, hold_s=0.01)
        state = await machine.put(1)
        await machine.stop()
        return state

    assert within(story()) == 1


def test_time_alone_brings_an_event(account):
    async def story():
        ticked = asyncio.Event()

        def act(before, batch):
            if batch.state == 8:
                ticked.set()

        def tick(state):
            return (0.0, 4) if state < 8 else (math.inf, None)

        machine = account.machine(tick=tick, act=act)
        await ticked.wait()
        await machine.stop()

    within(story())
    assert account.lines() == [[4], [4]]


def test_a_machine_that_is_over_answers_with_its_last_state(account):
    async def story():
        machine = account.machine(is_over=lambda state: state >= 5, max_batch=1)
        states = await asyncio.gather(*(machine.put(event) for event in (5, 1)))
        states.append(await machine.put(2))
        await machine.stop()
        return states

    assert within(story()) == [5, 5, 5]
    assert account.lines() == [[5]]


def test_one_event_that_fails_costs_few_commits(account):
    async def story():
        machine = account.machine(max_batch=64)
        puts = [machine.put(1) for _ in range(40)]
        puts.insert(17, machine.put(TOO_MUCH))
        answers = await asyncio.gather(*puts, return_exceptions=True)
        await machine.stop()
        return [a for a in answers if isinstance(a, Exception)]

    (error,) = within(story())
    assert isinstance(error, Conflict)
    assert account.stored() == 40
    assert len(account.lines()) <= 2 * math.ceil(math.log2(41))


def test_urgent_events_go_before_those_that_wait(account):
    async def story():
        account.opened = asyncio.Event()
        machine = account.machine(max_batch=2)
        puts = [asyncio.ensure_future(machine.put(n)) for n in (1, 2, 3, 4)]
        await turns()
        puts.append(asyncio.ensure_future(machine.put(5, urgent=True)))
        account.opened.set()
        await asyncio.gather(*puts)
        await machine.stop()

    within(story())
    assert account.lines() == [[1, 2], [5, 3], [4]]


def test_a_machine_goes_on_from_a_stored_state_with_events_that_came_before(account):
    async def story():
        rules = MachineRules(fold=account.fold, commit=account.commit, act=account.act, max_batch=8)
        machine = Machine("account", 0, rules)
        early = asyncio.ensure_future(machine.put(1))
        await turns()
        machine.start(40)
        state = await early
        await machine.stop()
        return state

    assert within(story()) == 41
