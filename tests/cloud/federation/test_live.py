"""What shares a commit in a live run, and that nothing is acknowledged before its own."""

import asyncio
import contextlib
import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.cloud.federation.given import spec
from tests.cloud.federation.journals import PREPARED, entry

from triplane.cloud.federation import journal, live
from triplane.cloud.federation.live import LiveRun
from triplane.cloud.federation.live_runs import LiveRuns
from triplane.cloud.federation.spec import with_defaults
from triplane.cloud.store import Database
from triplane.proto import federation_pb2 as pb
from triplane.proto.disk import NoRoom
from triplane.proto.errors import Corrupt, Unavailable
from triplane.unified_ir.federated.core.lease_changes import lease_of
from triplane.unified_ir.federated.core.masked_step import STEPS, MaskedStep, StepAnswer
from triplane.unified_ir.federated.core.run import (
    NEWEST_RULES,
    Arrived,
    Exchanged,
    Joined,
    Masked,
    Phase,
    Reduced,
    Stopped,
    Update,
)

DEADLINE_S = 60.0
NAMES = ("ann", "bob")


def digest(data):
    return hashlib.sha256(data).hexdigest()


class Counted(Database):
    """commits: writes that were asked for. opened: set while they may go on."""

    commits = 0
    opened: Any = None
    fails: Any = None

    async def write(self, work):
        if self.opened is not None:
            await self.opened.wait()
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.commits += 1
        return await super().write(work)


@dataclass
class Reducer:
    """The next state is the digest of the updates' bytes; `settled` is what a worker is told."""

    run: Any = None
    orders: list = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    leases: list = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def reduce(self, record, projection, order):
        self.orders.append(order)
        self.begun.set()
        await self.opened.wait()
        state = digest("".join((x.update or x.answers[-1]).blob for x in order.leases).encode())

        def make(now, at_s):
            if now.phase is not Phase.REDUCING or now.turn[0] != order.number:
                return None
            return Reduced(at_s=at_s, number=order.number, shared=state)

        return make, None

    async def exchange(self, record, projection, order):
        self.orders.append(order)
        return lambda _, at_s: Exchanged(
            at_s=at_s, number=order.number, attempt=order.attempt, step=order.step, refused={}
        )

    def arrived(self, record, projection, devices):
        pass

    async def judged(self, record, projection, order):
        pass

    async def finish(self, record, projection):
        raise AssertionError

    def settled(self, old, new, before, after):
        closed, at_hand = before.state.round, after.state.round
        if closed is not None and (at_hand is None or at_hand.number != closed.number):
            self.leases.append(closed.leases)

    def tell(self, device):
        pass

    def moved_now(self, *, over):
        self.moved.set()


@dataclass
class Played:
    database: Any
    worker: Reducer
    run: LiveRun

    def arriving(self, name, data):
        """A contribution of a device to its open lease, on its way."""
        held = lease_of(self.run.projection.state, name)
        assert held is not None
        lease = held.id
        update = Update(blob=digest(data), size=len(data), examples=4, loss=0.5, seconds=1.0)

        def make(_, at_s):
            return Arrived(at_s=at_s, device=name, lease=lease, update=update)

        return asyncio.ensure_future(self.run.put(make, data))

    async def answering(self, step, text=""):
        """The answers of all devices to a step of a masked round; returns after their commit."""
        round_ = self.run.projection.state.round
        assert round_ is not None
        answers = [(x, f"{x.device} {step}{text}") for x in round_.leases]
        await asyncio.gather(*(self._answered(lease, step, data) for lease, data in answers))

    def step(self) -> Any:
        """The step of the masked round, as of the newest commit."""
        round_ = self.run.projection.state.round
        return round_ and round_.masked and round_.masked.step

    async def _answered(self, lease, step, data):
        answer = StepAnswer(step=step, blob=digest(data.encode()), size=len(data))

        def make(_, at_s):
            return Masked(at_s=at_s, device=lease.device, lease=lease.id, answer=answer)

        return await self.run.put(make, data.encode())

    def rows(self):
        run = self.run.record.id
        named = [digest(b"ann 1"), digest(b"bob 1")]
        return [
            self.database.read_now(lambda c, n=n: journal.small_update(c, run, bytes.fromhex(n)))
            for n in named
        ]

    def journaled(self):
        return self.database.read_now(lambda c: journal.events(c, self.run.record.id))


def played(tmp_path, tell, *, open_=True, names=NAMES, **fields):
    """Run `tell(played)` on a run of devices whose first round is open; what it returns."""

    async def story():
        async with asyncio.timeout(DEADLINE_S):
            opened = Counted.open(f"sqlite:///{tmp_path / 'cloud.db'}")
            with contextlib.closing(opened) as database:
                asked = with_defaults(spec(model="tiny@1", rounds=3, **fields))
                prepared = replace(PREPARED, rules=NEWEST_RULES)
                made = entry(spec=asked, prepared=prepared)
                database.write_now(lambda c: journal.begin(c, made))
                database.write_now(lambda c: journal.prepare(c, made.id, prepared))
                worker = Reducer()
                run = LiveRun(
                    database, made, journal.first_projection(made), worker, worker, lambda: 2.0
                )
                run.start()
                try:
                    for name in names:
                        await run.put(joined(name))
                    if open_:
                        worker.opened.set()
                    found: Any = database
                    found.commits = 0
                    return await tell(Played(found, worker, run))
                finally:
                    await run.stop()

    return asyncio.run(story())


def joined(name):
    return lambda _, at_s: Joined(at_s=at_s, device=name, examples=10)


async def until_round(played, number):
    while (found := played.run.projection.state.round) is None or found.number < number:
        played.worker.moved.clear()
        await played.worker.moved.wait()


def test_a_round_whose_updates_come_together_is_one_commit_and_leaves_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "HOLD_S", DEADLINE_S)

    async def tell(it):
        told = await asyncio.gather(it.arriving("ann", b"ann 1"), it.arriving("bob", b"bob 1"))
        await until_round(it, 2)
        assert [projection.state.turn for projection in told] == [(2, False)] * 2
        assert [x.update is not None for x in it.worker.leases[0]] == [True, True]
        return it.database.commits, it.rows(), [type(e) for e in it.journaled()]

    commits, rows, kinds = played(tmp_path, tell)
    assert commits == 1
    assert rows == [None, None]
    assert kinds == [Joined, Joined, Arrived, Arrived, Reduced]


def test_an_update_is_acknowledged_only_once_its_commit_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "HOLD_S", DEADLINE_S)

    async def tell(it):
        it.database.opened = asyncio.Event()
        coming = [it.arriving("ann", b"ann 1"), it.arriving("bob", b"bob 1")]
        await it.worker.begun.wait()
        again = it.arriving("ann", b"ann 1")  # sent again by a device that came back
        for _ in range(100):
            await asyncio.sleep(0)
        before = [put.done() for put in (*coming, again)]
        assert it.run.projection.state.round.number == 1, "people see what is committed"
        it.database.opened.set()
        await asyncio.gather(*coming, again)
        return before

    assert played(tmp_path, tell) == [False, False, False]


def test_an_update_does_not_wait_for_a_device_that_stays_away(tmp_path):
    async def tell(it):
        projection = await it.arriving("ann", b"ann 1")
        assert projection.state.phase is Phase.COLLECTING
        return it.database.commits, it.rows()

    assert played(tmp_path, tell) == (1, [b"ann 1", None])


def test_a_long_reduction_does_not_hold_updates_back(tmp_path):
    async def tell(it):
        told = await asyncio.gather(it.arriving("ann", b"ann 1"), it.arriving("bob", b"bob 1"))
        assert {projection.state.phase for projection in told} == {Phase.REDUCING}
        rows = it.rows()
        it.worker.opened.set()
        await until_round(it, 2)
        return rows, it.rows(), len(it.worker.orders)

    found = played(tmp_path, tell, open_=False)
    assert found == ([b"ann 1", b"bob 1"], [None, None], 1)


def test_a_result_of_updates_that_were_not_committed_is_dropped(tmp_path, monkeypatch):
    """The database is full; other updates come when there is room again."""
    monkeypatch.setattr(live, "RETRY_S", 0.0)
    monkeypatch.setattr(live, "HOLD_S", DEADLINE_S)

    async def tell(it):
        it.database.fails = NoRoom("the database has no room")
        first = [it.arriving("ann", b"ann 1"), it.arriving("bob", b"bob 1")]
        for put in first:
            with pytest.raises(Unavailable, match="no room"):
                await put
        assert it.run.projection.state.phase is Phase.COLLECTING
        assert it.run.waits
        await asyncio.gather(it.arriving("ann", b"ann 2"), it.arriving("bob", b"bob 2"))
        await until_round(it, 2)
        assert not it.run.waits
        return it.run.projection.state.shared, it.journaled()

    shared, events = played(tmp_path, tell)
    assert shared == digest((digest(b"ann 2") + digest(b"bob 2")).encode())
    assert [e.shared for e in events if isinstance(e, Reduced)] == [shared]


def test_a_reduction_of_committed_updates_counts_though_its_own_commit_was_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(live, "RETRY_S", 0.0)

    async def tell(it):
        await asyncio.gather(it.arriving("ann", b"ann 1"), it.arriving("bob", b"bob 1"))
        it.database.fails = NoRoom("the database has no room")
        it.worker.opened.set()
        await until_round(it, 2)
        return len(it.worker.orders)

    assert played(tmp_path, tell, open_=False) == 1


MASKED: Any = {
    "names": ("ann", "bob", "cem"),
    "masking": pb.MaskedRounds(colluding_share=0.0),
    "cohort": {"devices": 3},
    "robustness": pb.Robustness(norm_bound="1"),
}


def test_a_step_of_a_masked_round_is_one_commit_and_the_last_one_has_the_next_state(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(live, "HOLD_S", DEADLINE_S)

    async def tell(it):
        commits = []
        for step in STEPS:
            await it.answering(step)
            commits.append(it.database.commits)
        assert it.run.projection.state.turn == (2, False)
        return commits, [type(e) for e in it.journaled()[3:]]

    commits, kinds = played(tmp_path, tell, **MASKED)
    assert commits == [1, 2, 3, 4, 5]
    assert kinds == [Masked, Masked, Masked, Exchanged] * 5 + [Reduced]


def test_a_run_that_is_stopped_in_the_commit_of_the_last_answers_asks_for_no_exchange(tmp_path):
    """Nothing is left to exchange: it would fail, and stop the run again after it was resumed."""

    async def tell(it):
        async def stopping():  # queued after the answers
            await asyncio.gather(it.run.put(lambda _, at_s: Stopped(at_s=at_s, reason="lunch")))

        await asyncio.gather(it.answering(MaskedStep.KEYS), stopping())
        for _ in range(100):
            await asyncio.sleep(0)
        return it.worker.orders, [type(e) for e in it.journaled()[-2:]]

    assert played(tmp_path, tell, **MASKED) == ([], [Masked, Stopped])


def test_a_masked_step_begins_only_once_the_answers_before_it_are_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "RETRY_S", 0.0)
    monkeypatch.setattr(live, "HOLD_S", DEADLINE_S)

    async def tell(it):
        it.database.fails = NoRoom("the database has no room")
        with pytest.raises(Unavailable, match="no room"):
            await it.answering(MaskedStep.KEYS)
        assert it.step() is MaskedStep.KEYS
        await it.answering(MaskedStep.KEYS, " again")
        assert it.step() is MaskedStep.SHARES
        lost, taken = ([x.answers[0].blob for x in order.leases] for order in it.worker.orders)
        return lost, taken, [e.answer.blob for e in it.journaled() if isinstance(e, Masked)]

    lost, taken, journaled = played(tmp_path, tell, **MASKED)
    assert journaled == taken
    assert not set(lost) & set(taken)


def test_who_is_held_when_the_run_ends_with_the_process_is_told_to_come_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(live, "HOLD_S", DEADLINE_S)

    async def tell(it):
        held = it.arriving("ann", b"ann 1")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(it.run._machine.ahead.queued) == 1
        await it.run.stop()
        with pytest.raises(Unavailable, match="stopping"):
            await held
        return it.journaled()

    assert [type(e) for e in played(tmp_path, tell)] == [Joined, Joined]


STRAY = Update(blob="", size=0, examples=0, loss=math.nan, seconds=0.0)


def test_an_update_that_is_sent_again_after_a_stray_one_costs_no_other_its_commit(tmp_path):
    """Its row is there already; a second one would make the commit of all fail."""

    async def tell(it):
        await it.arriving("ann", b"ann 1")
        await it.run.put(
            lambda _, at_s: Arrived(at_s=at_s, device="ann", lease="0" * 32, update=STRAY)
        )
        await asyncio.gather(it.arriving("ann", b"ann 1"), it.arriving("bob", b"bob 1"))
        it.worker.opened.set()
        await until_round(it, 2)
        return len(it.worker.orders)

    assert played(tmp_path, tell, open_=False) == 1


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_a_run_that_is_over_does_not_say_that_it_waits_for_room(tmp_path, monkeypatch, end):
    monkeypatch.setattr(live, "RETRY_S", 0.01)

    async def tell(it):
        tried, tries = asyncio.Event(), 0

        async def full(record, projection, order):
            nonlocal tries
            tries += 1
            tried.set()
            if end == "failed" and tries > 1:
                raise Corrupt("the state is damaged")
            raise NoRoom("the disk is full")

        it.worker.reduce = full
        await asyncio.gather(it.arriving("ann", b"ann 1"), it.arriving("bob", b"bob 1"))
        await tried.wait()
        if end == "stopped":
            await it.run.put(lambda _, at_s: Stopped(at_s=at_s, reason="lunch"))
        while it.run.waits or it.run.projection.state.phase.value != end:
            it.worker.moved.clear()
            await asyncio.wait([asyncio.ensure_future(it.worker.moved.wait())], timeout=0.02)
        return it.run.projection.state.reason

    assert played(tmp_path, tell) in {"lunch", "the result cannot be used: the state is damaged"}


def test_a_run_of_an_earlier_process_shares_its_plan_before_it_is_live_again(tmp_path):
    """Else another run could remove a state that it is about to need."""
    stored, other = entry(id="1" * 16), entry(id="2" * 16)
    strange = replace(other, prepared=replace(PREPARED, plan_digest="another"))
    worker: Any = Reducer()

    async def life():
        with contextlib.closing(Database.open(f"sqlite:///{tmp_path / 'cloud.db'}")) as database:
            runs = LiveRuns(database, lambda: 1.0, "e")
            assert not runs.shares_plan(other)
            runs.expect([stored])
            shared = [runs.shares_plan(x) for x in (other, stored, strange)]
            run = runs.add(stored, journal.first_projection(stored), worker, worker)
            shared.append(runs.shares_plan(other))
            await runs.drop(run)  # as where the disk has no room
            return [*shared, runs.shares_plan(other)]

    assert asyncio.run(life()) == [True, False, False, True, True]
