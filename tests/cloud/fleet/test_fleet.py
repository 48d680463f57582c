import asyncio

import pytest
from tests.cloud.fleet.given import obey, request, said, until
from tests.support.deadlines import within

from triplane.cloud.fleet import messages, storage
from triplane.cloud.fleet.messages import desired_message, rollout_message
from triplane.cloud.fleet.values import Limit, NodeStage, RolloutState
from triplane.cloud.identity import audit
from triplane.proto import fleet_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput, NotFound, Unavailable
from triplane.proto.targets import in_share

NAMES = ("a", "b", "c", "d")


async def enrolled(fleet, *names, **labels):
    for name in names:
        await fleet.add_node(name, labels)
        await fleet.report(name, said(fleet, name))


async def running(fleet, **options):
    record = await fleet.deploy(request(**options), by="olga")
    found = record.rollout.id
    await until(fleet, lambda: fleet._fleet.rollouts[found].rollout.state is RolloutState.RUNNING)
    return found


def test_a_deploy_reaches_done_over_the_desired_documents(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, *NAMES)
            told = []
            fleet.on_desired(lambda node: told.append((node.name, node.desired_number)))
            found = await running(fleet, waves=[pb.Wave(nodes=1), pb.Wave(percent=100)])
            await until(fleet, lambda: told)
            assert told == [("a", 1)]
            desired = desired_message(fleet.node("a"))
            assert [(a.model, a.version, a.attempt) for a in desired.assignments] == [
                ("digits", 3, 1)
            ]
            assert desired.assignments[0].target_path == "release/digits@3+ort-x64.bundle"
            await obey(fleet, "a")
            assert told[1:] == [("b", 1), ("c", 1), ("d", 1)]
            await obey(fleet, "b", "c", "d")
            record = await fleet.rollout(found)
            assert record.rollout.state is RolloutState.DONE
            assert found not in fleet._fleet.rollouts
            return record.rollout

    rollout = within(story())
    assert {m.stage for m in rollout.members.values()} == {NodeStage.COMMITTED}


def test_everything_acknowledged_is_there_after_a_restart(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, *NAMES, site="lab")
            found = await running(fleet, waves=[pb.Wave(nodes=2), pb.Wave(percent=100)])
            await obey(fleet, "a")
            await fleet.cordon("d", cordoned=True, by="olga")
            before = fleet._fleet
        async with opened() as again:
            assert again._fleet == before
            await obey(again, "b")
            await obey(again, "c")
            return (await again.rollout(found)).rollout

    rollout = within(story())
    assert rollout.state is RolloutState.DONE
    assert rollout.members["d"].excused == "cordoned"


def test_a_waiting_rollout_goes_on_by_itself_when_the_signature_appears(opened, shelf):
    async def story():
        shelf.put("digits", 3, signed=False)
        async with opened() as fleet:
            await enrolled(fleet, "a")
            record = await fleet.deploy(request(), by="olga")
            found = record.rollout.id

            def waits():
                return "triplane sign digits@3" in fleet._fleet.rollouts[found].rollout.reason

            await until(fleet, waits)
        shelf.put("digits", 3)
        async with opened() as again:
            await until(again, lambda: again.node("a").held)
            return again.node("a").held["digits"].path

    assert within(story()) == "release/digits@3+ort-x64.bundle"


@pytest.mark.parametrize(
    ("supply", "state", "reason"),
    [
        ("being made", RolloutState.PREPARING, "waits for the bundle of digits@3 for ort-x64"),
        ("unsigned", RolloutState.PREPARING, "waits for a signature of digits@3 for ort-x64"),
        ("signed", RolloutState.RUNNING, "wave 1: 0 of 1 node committed"),
    ],
)
def test_a_deploy_is_answered_with_what_it_waits_for(opened, shelf, supply, state, reason):
    async def story():
        shelf.bundles.clear()
        if supply != "being made":
            shelf.put("digits", 3, signed=supply == "signed")
        async with opened() as fleet:
            await enrolled(fleet, "a")
            return (await fleet.deploy(request(), by="olga")).rollout

    rollout = within(story())
    assert rollout.state is state
    assert rollout.reason.startswith(reason)


def test_the_same_key_is_one_rollout_and_another_waits_its_turn(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a")
            first, second = await asyncio.gather(
                fleet.deploy(request(), by="olga"), fleet.deploy(request(), by="olga")
            )
            assert first.rollout.id == second.rollout.id
            with pytest.raises(Conflict, match=rf"rollout {first.rollout.id} of digits@3 is"):
                await fleet.deploy(request(key=b"another"), by="olga")
            await fleet.abort(first.rollout.id, reason="", revert=False, by="olga")
            repeated = await fleet.deploy(request(), by="olga")
            assert repeated.rollout.id == first.rollout.id
            assert repeated.rollout.state is RolloutState.ABORTED

    within(story())


def test_abort_with_revert_brings_back_what_was_committed_before(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a", "b")
            first = await running(fleet, reference="digits@2")
            await obey(fleet, "a", "b")
            assert (await fleet.rollout(first)).is_ended
            second = await running(fleet, key=b"second")
            await obey(fleet, "a")
            await fleet.abort(second, reason="wrong", revert=True, by="olga")
            return {name: fleet.node(name).held["digits"] for name in ("a", "b")}

    held = within(story())
    assert {row.version for row in held.values()} == {2}
    assert {row.path for row in held.values()} == {"release/digits@2+ort-x64.bundle"}
    assert {row.attempt for row in held.values()} == {3}


def test_attempts_grow_over_rollouts_so_a_failed_one_is_not_tried_by_itself(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a")
            found = await running(fleet)
            await fleet.report("a", said(fleet, "a", version=3, state=pb.FAILED, reason="golden"))
            paused = await fleet.rollout(found)
            assert paused.rollout.state is RolloutState.PAUSED
            assert paused.rollout.members["a"].reason == "golden"
            await fleet.resume(found, by="olga")
            assert fleet.node("a").held["digits"].attempt == 2
            await fleet.abort(found, reason="", revert=False, by="olga")
            assert fleet.node("a").held["digits"].attempt == 3
            assert not desired_message(fleet.node("a")).assignments
            await running(fleet, key=b"second")
            return fleet.node("a").held["digits"].attempt

    assert within(story()) == 4


def test_a_revoked_node_is_no_node_and_counts_nowhere(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a", "b")
            found = await running(fleet)
            await obey(fleet, "a")
            await fleet.remove_node("b", "revoked: stolen")
            assert (await fleet.rollout(found)).rollout.state is RolloutState.DONE
            with pytest.raises(NotFound, match="no node 'b'"):
                fleet.node("b")
            await fleet.add_node("b", {"site": "new"})
            assert fleet.node("b").labels == {"site": "new"}

    within(story())


def test_labels_decide_who_is_meant(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a", "b", site="lab")
            await enrolled(fleet, "c", site="factory")
            await fleet.set_labels("b", put={"camera": "old"}, remove=[], by="olga")
            record = await fleet.deploy(request(selector="site=lab,camera!=old"), by="olga")
            assert list(record.rollout.members) == ["a"]
            with pytest.raises(NotFound, match="no node is selected by 'site=moon'"):
                await fleet.deploy(
                    request(selector="site=moon", key=b"2", reference="digits@2"), by="olga"
                )
            with pytest.raises(InvalidInput, match="a label's key"):
                await fleet.set_labels("a", put={"Not A Key": "x"}, remove=[], by="olga")
            node = await fleet.set_labels("b", put={}, remove=["camera"], by="olga")
            assert node.labels == {"site": "lab"}

    async def tried():
        try:
            await story()
        except Conflict:  # the first deploy still goes on
            return

    within(tried())


def test_what_people_do_is_in_the_audit_log_of_the_same_transaction(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a")
            found = await running(fleet)
            await fleet.pause(found, reason="noise", by="petra")
            await fleet.pause(found, reason="noise", by="petra")
            await fleet.resume(found, by="petra")
            await fleet.abort(found, reason="", revert=False, by="olga")
            for cordoned in (True, False):
                await fleet.cordon("a", cordoned=cordoned, by="olga")
            return await fleet._database.read(lambda c: audit.page(c, 0)), found

    entries, found = within(story())
    assert [(e.actor, e.action, e.subject) for e in entries] == [
        ("olga", "rollout.deploy", found),
        ("petra", "rollout.pause", found),
        ("petra", "rollout.resume", found),
        ("olga", "rollout.abort", found),
        ("olga", "node.cordon", "a"),
        ("olga", "node.uncordon", "a"),
    ]


def test_a_change_that_could_not_be_written_changes_nothing(opened, monkeypatch):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a")
            before = fleet._fleet

            async def refuse(work):
                raise Unavailable("the database refused: disk full; nothing was changed")

            with monkeypatch.context() as patch:
                patch.setattr(fleet._database, "write", refuse)
                with pytest.raises(Unavailable, match="disk full"):
                    await fleet.deploy(request(), by="olga")
                with pytest.raises(Unavailable, match="report again"):
                    await fleet.report("a", said(fleet, "a", committed_version=1))
                assert fleet._fleet is before
            await running(fleet)

    within(story())


def test_a_change_is_finished_though_its_caller_left(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a")
            asked = asyncio.ensure_future(fleet.cordon("a", cordoned=True, by="olga"))
            await asyncio.sleep(0)
            asked.cancel()
            await until(fleet, lambda: fleet.node("a").cordoned)
            loaded = await fleet._database.read(storage.load)
            assert loaded == fleet._fleet

    within(story())


@pytest.mark.slow
def test_reports_share_commits_and_each_is_there(opened):
    async def story():
        async with opened() as fleet:
            names = [f"n{i:03}" for i in range(200)]
            for name in names:
                await fleet.add_node(name, {})
            writes = 0
            write = fleet._database.write

            async def counted(work):
                nonlocal writes
                writes += 1
                return await write(work)

            fleet._database.write = counted
            await asyncio.gather(*(fleet.report(name, said(fleet, name)) for name in names))
            loaded = await fleet._database.read(storage.load)
            assert all(loaded.nodes[name].report == said(fleet, name) for name in names)
            return writes

    assert within(story()) <= 3


@pytest.mark.slow
def test_incidents_are_kept_once_and_bounded(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a")
            report = said(fleet, "a")
            for i in range(30):
                report.incidents.add(time_s=i, kind="golden", text=f"sample {i}")
            for _ in range(2):
                await fleet.report("a", report)
            assert len(await fleet.incidents(100)) == 30
            for i in range(100, 180):
                report = said(fleet, "a")
                report.incidents.add(time_s=i, kind="golden", text=f"sample {i}")
                await fleet.report("a", report)
            kept = await fleet.incidents(100)
            assert len(kept) == 64
            assert kept[0][1].text == "sample 179"
            assert not fleet.node("a").report.incidents

    within(story())


def test_an_ended_rollout_says_what_forbids_a_change(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a")
            found = await running(fleet)
            await obey(fleet, "a")
            with pytest.raises(Conflict, match=f"{found} is done"):
                await fleet.pause(found, reason="", by="olga")
            assert (await fleet.rollout(found[:5])).rollout.id == found
            assert (await fleet.rollout("last")).rollout.id == found
            with pytest.raises(NotFound, match="no rollout 'r-none'"):
                await fleet.rollout("r-none")

    within(story())


def test_the_reason_of_a_resume_is_kept_and_shown(opened):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a", "b")
            found = await running(fleet)
            await fleet.pause(found, reason="noise", by="petra")
            await fleet.resume(found, reason="disk replaced", by="olga")
        async with opened() as again:
            await obey(again, "a")
            record = await again.rollout(found)
            entries = await again._database.read(lambda c: audit.page(c, 0))
            return rollout_message(record, lambda _: True).reason, entries[-1].details

    reason, details = within(story())
    assert reason.startswith("wave 1: 1 of 2 nodes committed")
    assert reason.endswith("resumed by olga: disk replaced")
    assert details == '{"reason":"disk replaced"}'


INSIDE = [n for n in (f"n{i}" for i in range(40)) if in_share(n, "digits", 0.5)]
OUTSIDE = [n for n in (f"n{i}" for i in range(40)) if not in_share(n, "digits", 0.5)]


@pytest.mark.slow
def test_nodes_outside_the_policys_share_are_left_out_of_the_waves_and_named(opened, shelf):
    async def story():
        shelf.share = Limit(0.5)
        async with opened() as fleet:
            await enrolled(fleet, *INSIDE, *OUTSIDE)
            waves = [pb.Wave(percent=50), pb.Wave(percent=100)]
            found = await running(fleet, role="auto", waves=waves)
            await fleet.cordon(OUTSIDE[0], cordoned=True, by="olga")
            await fleet.cordon(OUTSIDE[0], cordoned=False, by="olga")
            half = -(-len(INSIDE) // 2)
            assert [n for n in sorted(INSIDE) if fleet.node(n).held] == sorted(INSIDE)[:half]
            said_before = rollout_message(await fleet.rollout(found), lambda _: True)
            await obey(fleet, *sorted(INSIDE)[:half])
            await obey(fleet, *sorted(INSIDE)[half:])
            assert not any(fleet.node(n).held for n in OUTSIDE)
            heads = await fleet.rollouts(1)
            return said_before, await fleet.rollout(found), heads[0]

    before, record, head = within(story())
    assert record.rollout.state is RolloutState.DONE
    note = f"{len(OUTSIDE)} of 40 nodes are left out: outside the 50.00% of nodes"
    assert note in before.reason
    assert note in rollout_message(head, lambda _: True).reason
    rows = {n.name: n for n in rollout_message(record, lambda _: True).nodes}
    assert {rows[n].state for n in OUTSIDE} == {pb.NODE_STATE_UNSPECIFIED}
    assert all(rows[n].reason.startswith("not counted: outside the 50.00%") for n in OUTSIDE)
    assert {rows[n].state for n in INSIDE} == {pb.COMMITTED}


def test_a_rollout_that_the_policys_share_leaves_nobody_is_refused(opened, shelf):
    async def story():
        shelf.share = Limit(0.5)
        async with opened() as fleet:
            await enrolled(fleet, *OUTSIDE[:3])
            with pytest.raises(Conflict, match=r"all 3 nodes are outside the 50\.00%"):
                await fleet.deploy(request(role="auto"), by="olga")

    within(story())


def test_a_target_that_people_released_is_no_matter_of_the_share(opened, shelf):
    async def story():
        shelf.share = Limit(0.5, frozenset({"ort-x64"}))
        async with opened() as fleet:
            await enrolled(fleet, *OUTSIDE[:3])
            await running(fleet, role="auto")
            await obey(fleet, *OUTSIDE[:3])
            return (await fleet.rollout("last")).rollout.state

    assert within(story()) is RolloutState.DONE


@pytest.mark.parametrize("verb", ["pause", "resume", "abort"])
def test_a_reason_that_is_no_text_is_refused_and_rollouts_stay_readable(opened, verb):
    options = {"revert": False} if verb == "abort" else {}

    async def story():
        async with opened() as fleet:
            await enrolled(fleet, *NAMES)
            found = await running(fleet)
            with pytest.raises(InvalidInput, match="valid UTF-8"):
                await getattr(fleet, verb)(found, reason="\ud800", by="olga", **options)
            (head,) = await fleet.rollouts(10)
            return rollout_message(head, lambda _: True).reason

    assert "needed" in within(story())


def test_text_that_an_older_release_kept_is_readable(opened, monkeypatch):
    async def story():
        async with opened() as fleet:
            await enrolled(fleet, *NAMES)
            found = await running(fleet)
            with monkeypatch.context() as older:
                older.setattr(messages, "check_text", lambda *_: None)
                await fleet.pause(found, reason="\ud800", by="olga")
        async with opened() as again:
            (head,) = await again.rollouts(10)
            rollout_message(head, lambda _: True)
            return rollout_message(await again.rollout(found), lambda _: True)

    assert within(story()).reason == "?"


@pytest.mark.parametrize("leave", [False, True])
def test_reports_that_wait_are_limited_also_if_their_senders_leave(opened, monkeypatch, leave):
    monkeypatch.setattr("triplane.cloud.fleet.fleet.MAX_WAITING", 5)

    async def story():
        async with opened() as fleet:
            await enrolled(fleet, "a")
            free = asyncio.Event()
            write = fleet._database.write

            async def stalled(work):
                await free.wait()
                return await write(work)

            monkeypatch.setattr(fleet._database, "write", stalled)
            senders = []
            for _ in range(5):
                senders.append(asyncio.ensure_future(fleet.report("a", pb.Report())))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if leave:
                    senders[-1].cancel()
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="5 reports wait"):
                await fleet.report("a", pb.Report())
            free.set()
            await asyncio.gather(*senders, return_exceptions=True)
            await fleet.cordon("a", cordoned=True, by="olga")
            await fleet.report("a", pb.Report())

    within(story())
