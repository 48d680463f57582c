"""The rules one by one, then what holds after any events in any order."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.cloud.fleet.capability import BundleNeeds, Capability
from triplane.cloud.fleet.rollout import RULES, begin, step, step_all
from triplane.cloud.fleet.values import (
    ENDED,
    LOST,
    SETTLED,
    Abort,
    Assign,
    BundleFailed,
    BundleReady,
    BundleSupply,
    Event,
    Excused,
    NodeStage,
    Pause,
    Reported,
    Restore,
    Resume,
    RolloutMember,
    RolloutPlan,
    RolloutState,
    TimePassed,
)  # fmt: skip
from triplane.cloud.fleet.waves import exceeds
from triplane.proto import fleet_pb2
from triplane.proto.errors import Conflict

X64 = Capability(
    runtime="onnxruntime", runtime_version="1.23.2", max_opset=21, memory_bytes=1 << 30,
    targets=("ort-x64",),
)  # fmt: skip
NEEDS = BundleNeeds(runtime="onnxruntime", min_version="1.20", opset=21)
PATH = "release/digits@3+ort-x64.bundle"


def plan(*waves, **options):
    return RolloutPlan(model="digits", version=3, waves=waves, **options)


def members(*per_wave, capability=X64):
    names = (f"node-{i}" for i in range(sum(per_wave)))
    return [
        RolloutMember(name=next(names), wave=wave, capability=capability)
        for wave, count in enumerate(per_wave)
        for _ in range(count)
    ]


def committed(name, attempt=1):
    return Reported(
        name=name, capability=X64, committed_version=3, version=3, attempt=attempt,
        stage=NodeStage.COMMITTED,
    )  # fmt: skip


def failed(name, attempt=1, stage=NodeStage.FAILED):
    return Reported(
        name=name, capability=X64, committed_version=2, version=3, attempt=attempt, stage=stage,
        reason="golden sample 3",
    )  # fmt: skip


def run(rollout, *events, now_s=10.0):
    effects: list[Any] = []
    for event in events:
        rollout, more = step(rollout, event, now_s)
        effects += more
    return rollout, effects


def running(waves, per_wave, **options):
    rollout, _ = begin("r", plan(*waves, **options), members(*per_wave), 0.0)
    assert wanted(rollout) == ["ort-x64"]
    return run(rollout, BundleReady("ort-x64", NEEDS, PATH))


def wanted(rollout):
    """Targets whose bundle the rollout asks for."""
    return [target for target, supply in rollout.supplies.items() if supply == BundleSupply()]


def stages(rollout):
    return [member.stage for member in rollout.members.values()]


def test_it_waits_by_name_for_the_bundle_and_then_for_its_signature():
    rollout, effects = begin("r", plan(2), members(2), 0.0)
    assert wanted(rollout) == ["ort-x64"]
    assert rollout.reason == "waits for the bundle of digits@3 for ort-x64"
    rollout, effects = run(rollout, BundleReady("ort-x64", NEEDS))
    assert rollout.state is RolloutState.PREPARING
    assert rollout.reason == (
        "waits for a signature of digits@3 for ort-x64: "
        "triplane sign digits@3 --target ort-x64 --keys DIR"
    )
    assert effects == []
    rollout, effects = run(rollout, BundleReady("ort-x64", NEEDS, PATH))
    assert rollout.state is RolloutState.RUNNING
    assert effects == [Assign("node-0", PATH, 1), Assign("node-1", PATH, 1)]


def test_a_wave_opens_when_enough_of_the_one_before_committed():
    rollout, effects = running((1, 3), (1, 2))
    assert effects == [Assign("node-0", PATH, 1)]
    rollout, effects = run(rollout, committed("node-0"))
    assert effects == [Assign("node-1", PATH, 1), Assign("node-2", PATH, 1)]
    rollout, _ = run(rollout, committed("node-1"))
    assert rollout.state is RolloutState.RUNNING
    assert rollout.reason == "wave 2: 1 of 2 nodes committed, 2 needed"
    rollout, _ = run(rollout, committed("node-2"), now_s=77.0)
    assert (rollout.state, rollout.ended_s) == (RolloutState.DONE, 77.0)


def test_a_wave_of_one_node_is_counted_in_the_singular():
    rollout, _ = running((1,), (1,))
    assert rollout.reason == "wave 1: 0 of 1 node committed, 1 needed"
    rollout, _ = run(rollout, failed("node-0"))
    assert rollout.reason.startswith("wave 1: 1 of 1 node failed")


def test_an_order_to_a_rollout_that_is_done_is_refused_in_one_sentence():
    rollout, _ = running((1,), (1,))
    rollout, _ = run(rollout, committed("node-0"))
    with pytest.raises(Conflict) as refusal:
        run(rollout, Abort("", revert=True))
    assert str(refusal.value) == (
        "abort needs a rollout that has not ended; r is done; deploy again"
    )


def test_it_pauses_as_soon_as_more_than_its_share_failed():
    rollout, _ = running((4, 8), (4, 4), failure_share=0.25, success_share=0.75)
    rollout, _ = run(rollout, failed("node-0"))
    assert rollout.state is RolloutState.RUNNING
    rollout, effects = run(rollout, failed("node-1", stage=NodeStage.RETURNED))
    assert rollout.state is RolloutState.PAUSED
    assert rollout.reason.startswith("wave 1: 2 of 4 nodes failed (limit 25%)")
    assert effects == []


def test_it_pauses_when_a_wave_can_no_longer_reach_its_share():
    rollout, _ = running((4,), (4,), failure_share=0.5, success_share=1.0)
    rollout, _ = run(rollout, failed("node-0"))
    assert rollout.state is RolloutState.PAUSED
    assert rollout.reason == "wave 1: 0 of 4 nodes committed, 4 needed, and the others failed"


def test_resume_tries_failed_nodes_again_under_a_new_attempt():
    rollout, _ = running((2,), (2,))
    rollout, _ = run(rollout, failed("node-0"))
    rollout, effects = run(rollout, Resume(), now_s=50.0)
    assert effects == [Assign("node-0", PATH, 2)]
    assert rollout.members["node-0"].deadline_s == 650.0
    rollout, _ = run(rollout, failed("node-0", attempt=1))
    assert rollout.members["node-0"].stage is NodeStage.ASSIGNED, "a report of the old attempt"
    rollout, _ = run(rollout, committed("node-0", 2), committed("node-1"))
    assert rollout.state is RolloutState.DONE


def test_a_silent_node_fails_at_its_deadline_and_may_still_catch_up():
    rollout, _ = running((2,), (2,), success_share=0.5, failure_share=0.5)
    rollout, _ = run(rollout, TimePassed(), now_s=609.9)
    assert stages(rollout) == [NodeStage.ASSIGNED] * 2
    rollout, _ = run(rollout, TimePassed(), now_s=610.0)
    assert rollout.state is RolloutState.PAUSED
    assert rollout.members["node-0"].reason == ("not committed within 600 s; last seen assigned")
    rollout, _ = run(rollout, committed("node-0"))
    assert rollout.members["node-0"].stage is NodeStage.COMMITTED
    rollout, _ = run(rollout, Resume(), committed("node-1", 2))
    assert rollout.state is RolloutState.DONE


def test_the_end_waits_for_nodes_under_way_but_not_beyond_their_deadline():
    rollout, _ = running((2,), (2,), success_share=0.5, failure_share=0.5)
    rollout, _ = run(rollout, committed("node-0"))
    assert rollout.reason == "all waves reached their share; 1 node is still under way"
    rollout, _ = run(rollout, TimePassed(), now_s=610.0)
    assert rollout.state is RolloutState.DONE
    assert stages(rollout) == [NodeStage.COMMITTED, NodeStage.FAILED]


def test_it_waits_for_a_person_between_waves_when_asked_to():
    rollout, _ = running((1, 2, 3), (1, 1, 1), pause_between_waves=True)
    rollout, effects = run(rollout, committed("node-0"))
    assert (rollout.state, effects) == (RolloutState.PAUSED, [])
    assert rollout.reason == "wave 1 is done; resume opens wave 2"
    rollout, effects = run(rollout, Resume())
    assert effects == [Assign("node-1", PATH, 1)]
    rollout, effects = run(rollout, committed("node-1"))
    assert rollout.reason == "wave 2 is done; resume opens wave 3"


def test_pause_stops_waves_but_not_nodes_under_way():
    rollout, _ = running((1, 2), (1, 1))
    rollout, effects = run(rollout, Pause("looks odd"), committed("node-0"))
    assert (rollout.state, rollout.reason, effects) == (RolloutState.PAUSED, "looks odd", [])
    assert rollout.members["node-0"].stage is NodeStage.COMMITTED
    rollout, effects = run(rollout, Resume())
    assert effects == [Assign("node-1", PATH, 1)]


@pytest.mark.parametrize(
    ("revert", "restored"),
    [(False, ["node-1", "node-2"]), (True, ["node-0", "node-1", "node-2"])],
)
def test_abort_takes_back_what_did_not_commit_and_on_request_what_did(revert, restored):
    rollout, _ = running((3, 4), (3, 1), failure_share=1.0)
    rollout, _ = run(rollout, committed("node-0"), failed("node-1"))
    rollout, effects = run(rollout, Abort("wrong", revert), now_s=99.0)
    assert (rollout.state, rollout.ended_s) == (RolloutState.ABORTED, 99.0)
    assert effects == [Restore(name, 2) for name in restored]
    late, effects = run(rollout, committed("node-2"), Abort("again", revert=True))
    assert (late, effects) == (rollout, []), "an ended rollout stays as it ended"


def test_abort_keeps_why_the_rollout_had_paused_and_why_its_nodes_had_failed():
    rollout, _ = running((2, 3), (2, 1))
    rollout, _ = run(rollout, failed("node-0"))
    paused = rollout.reason
    assert rollout.state is RolloutState.PAUSED
    rollout, _ = run(rollout, Abort("bad export", revert=False))
    assert rollout.reason == f"bad export; before that: {paused}"
    reasons = [rollout.members[f"node-{i}"].reason for i in range(2)]
    aborted = "the rollout was aborted"
    assert reasons == [f"{aborted}; before that: golden sample 3", aborted]


def test_a_node_takes_its_first_target_that_can_be_had_and_fits():
    both = replace(X64, targets=("ascend", "ort-x64"))
    few = replace(X64, targets=("ascend",))
    chosen = [
        RolloutMember(name="a", wave=0, capability=both),
        RolloutMember(name="b", wave=0, capability=few),
        RolloutMember(name="c", wave=0, capability=replace(both, max_opset=17)),
    ]
    rollout, effects = begin("r", plan(3, failure_share=0.7, success_share=0.3), chosen, 0.0)
    assert wanted(rollout) == ["ascend"]
    rollout, effects = run(rollout, BundleFailed("ascend", "no such operator: Einsum"))
    assert wanted(rollout) == ["ort-x64"]
    assert rollout.members["b"].reason == "ascend: no such operator: Einsum"
    rollout, effects = run(rollout, BundleReady("ort-x64", NEEDS, PATH))
    assert effects == [Assign("a", PATH, 1)]
    assert "needs opset 21" in rollout.members["c"].reason
    rollout, _ = run(rollout, committed("a"))
    assert rollout.state is RolloutState.DONE


def test_it_fails_where_no_node_can_take_the_version():
    rollout, _ = begin("r", plan(2), members(2), 0.0)
    rollout, effects = run(rollout, BundleFailed("ort-x64", "unsupported"), now_s=5.0)
    assert (rollout.state, effects, rollout.ended_s) == (RolloutState.FAILED, [], 5.0)
    assert rollout.reason == "no node can take digits@3: ort-x64: unsupported"


def test_a_node_that_never_reported_joins_when_it_does():
    silent = [*members(1), RolloutMember(name="silent", wave=0)]
    rollout, _ = begin("r", plan(2), silent, 0.0)
    rollout, effects = run(rollout, BundleReady("ort-x64", NEEDS, PATH))
    assert effects == [Assign("node-0", PATH, 1)]
    rollout, effects = run(rollout, Reported(name="silent", capability=X64))
    assert effects == [Assign("silent", PATH, 1)]


def test_a_node_with_a_new_target_waits_for_its_bundle_while_others_run():
    arm = replace(X64, targets=("ort-arm64",))
    rollout, _ = begin("r", plan(2), [*members(1), RolloutMember(name="arm", wave=0)], 0.0)
    rollout, _ = run(rollout, BundleReady("ort-x64", NEEDS, PATH))
    rollout, effects = run(rollout, Reported(name="arm", capability=arm))
    assert wanted(rollout) == ["ort-arm64"]
    assert rollout.reason.endswith("waits for the bundle of digits@3 for ort-arm64")
    rollout, effects = run(rollout, BundleReady("ort-arm64", NEEDS, "release/arm"))
    assert effects == [Assign("arm", "release/arm", 1)]


def test_an_excused_node_counts_neither_way_and_can_come_back():
    rollout, _ = running((2, 3), (2, 1))
    rollout, effects = run(rollout, Excused({"node-1": "cordoned"}), committed("node-0"))
    assert effects == [Assign("node-2", PATH, 1)]
    rollout, effects = run(rollout, Excused({"node-2": "cordoned", "node-1": "cordoned"}))
    assert rollout.state is RolloutState.DONE
    rollout, _ = running((2,), (2,))
    rollout, _ = run(rollout, Excused({"node-1": "cordoned"}))
    rollout, _ = run(rollout, Excused({}), now_s=400.0)
    assert rollout.members["node-1"].deadline_s == 1000.0


def test_a_node_that_had_the_version_counts_only_when_it_says_so_again():
    has = [replace(member, committed_version=3) for member in members(1)]
    rollout, _ = begin("r", plan(1), has, 0.0)
    rollout, effects = run(rollout, BundleReady("ort-x64", NEEDS, PATH))
    assert effects == [Assign("node-0", PATH, 1)]
    assert rollout.state is RolloutState.RUNNING
    rollout, _ = run(rollout, committed("node-0"))
    assert rollout.state is RolloutState.DONE


def test_the_same_number_with_other_content_does_not_count():
    rollout, _ = begin("r", plan(1), members(1), 0.0)
    rollout, _ = run(rollout, BundleReady("ort-x64", NEEDS, PATH, "ab" * 32))
    rollout, _ = run(rollout, replace(committed("node-0"), committed_sha256="cd" * 32))
    assert rollout.state is RolloutState.RUNNING
    rollout, _ = run(rollout, replace(committed("node-0"), committed_sha256="ab" * 32))
    assert rollout.state is RolloutState.DONE


def test_a_node_that_failed_by_its_deadline_keeps_the_reason_that_it_gave():
    rollout, _ = begin("r", plan(1), members(1), 0.0)
    rollout, _ = run(rollout, BundleReady("ort-x64", NEEDS, PATH))
    full = "waits: the disk is full"
    waiting = Reported(
        name="node-0",
        capability=X64,
        version=3,
        attempt=1,
        stage=NodeStage.DOWNLOADING,
        reason=full,
    )
    rollout, _ = run(rollout, waiting)
    rollout, _ = run(rollout, TimePassed(), now_s=10_000.0)
    assert rollout.members["node-0"].stage is NodeStage.FAILED
    assert rollout.members["node-0"].reason.endswith(f"last seen downloading: {full}")


@pytest.mark.parametrize("event", [Pause(""), Resume(), Abort("", revert=False)])
def test_an_ended_rollout_refuses_people_and_says_how_it_ended(event):
    rollout, _ = running((1,), (1,))
    rollout, _ = run(rollout, committed("node-0"))
    with pytest.raises(Conflict, match="r is done"):
        step(rollout, event, 0.0)


def test_every_state_has_a_rule_for_every_event():
    assert set(RULES) == {(state, event) for state in RolloutState for event in Event.__args__}


def test_states_have_the_numbers_of_the_wire():
    for state in RolloutState:
        assert int(fleet_pb2.Rollout.State.Value(state.name)) == int(state)
    for stage in list(NodeStage)[1:]:
        assert int(fleet_pb2.NodeState.Value(stage.name)) == int(stage)


# Properties

TARGETS = ("ort-x64", "ort-arm64")
NAMES = tuple(f"node-{i}" for i in range(8))
CAPABILITIES = (X64, replace(X64, targets=TARGETS), replace(X64, max_opset=1))


@st.composite
def begun(draw):
    counts = sorted(draw(st.lists(st.integers(1, len(NAMES)), min_size=1, max_size=3)))
    asked = plan(
        *counts, success_share=draw(st.sampled_from([0.5, 0.8, 1.0])),
        failure_share=draw(st.sampled_from([0.0, 0.3, 1.0])),
        pause_between_waves=draw(st.booleans()), node_deadline_s=50.0,
    )  # fmt: skip
    capability = st.sampled_from((None, *CAPABILITIES))
    chosen = [
        RolloutMember(
            name=name, wave=next(w for w, n in enumerate(counts) if i < n),
            capability=draw(capability),
        )
        for i, name in enumerate(NAMES[: counts[-1]])
    ]  # fmt: skip
    return begin("r", asked, chosen, 0.0)


reports = st.builds(
    Reported, name=st.sampled_from(NAMES), capability=st.sampled_from(CAPABILITIES),
    committed_version=st.sampled_from([0, 2, 3]), version=st.sampled_from([2, 3]),
    attempt=st.integers(1, 3), stage=st.sampled_from(NodeStage), reason=st.just("because"),
)  # fmt: skip
targets = st.sampled_from(TARGETS)
events = st.one_of(
    reports, reports, reports, st.builds(TimePassed), st.builds(Resume),
    st.builds(BundleReady, targets, st.just(NEEDS), st.sampled_from(["", PATH])),
    st.builds(BundleReady, targets, st.just(NEEDS), st.just(PATH)),
    st.builds(BundleFailed, targets, st.just("unsupported")),
    st.builds(Pause, st.just("stop")),
    st.builds(Excused, st.dictionaries(st.sampled_from(NAMES), st.just("cordoned"), max_size=3)),
    st.builds(Abort, st.just("no"), st.booleans()),
)  # fmt: skip
histories = st.lists(st.tuples(events, st.sampled_from([0.0, 1.0, 60.0])), max_size=40)


def tried(rollout, event, now_s):
    try:
        return step(rollout, event, now_s)
    except Conflict:
        return rollout, ()


def check(rollout, assigned):
    given_out = {name for name, m in rollout.members.items() if m.assigned}
    assert given_out == set(assigned)
    for name in given_out:
        assert rollout.members[name].wave <= rollout.wave
    open_size = rollout.plan.waves[rollout.wave] if rollout.wave >= 0 else 0
    assert len(given_out) <= open_size
    if rollout.state is RolloutState.RUNNING:
        for wave in range(rollout.wave + 1):
            counted = [m for m in rollout.members.values() if m.wave == wave and not m.excused]
            lost = sum(m.stage in LOST for m in counted)
            assert not exceeds(lost, rollout.plan.failure_share, len(counted))
    if rollout.state not in ENDED:
        assert rollout.reason
    assert bool(rollout.ended_s) is (rollout.state in ENDED and rollout.ended_s > 0)


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 3, deadline=None)
@given(begun(), histories)
def test_no_order_of_events_breaks_a_promise(start, history):
    rollout, effects = start
    assigned = SimpleNamespace(names=[])
    now_s = 0.0
    for event, passed_s in history:
        assigned.names += [e.name for e in effects if isinstance(e, Assign)]
        for effect in effects:
            if isinstance(effect, Assign):
                assert effect.path
                assert rollout.members[effect.name].attempt >= effect.attempt
        check(rollout, assigned.names)
        now_s += passed_s
        before = rollout
        rollout, effects = tried(rollout, event, now_s)
        assert before.state not in ENDED or rollout == before


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(begun(), histories, st.lists(st.lists(reports, max_size=8), max_size=8))
def test_reports_that_come_together_break_no_promise_either(start, history, batches):
    rollout, effects = start
    assigned = [e.name for e in effects if isinstance(e, Assign)]
    now_s = 0.0
    for (event, passed_s), batch in zip(history, batches, strict=False):
        now_s += passed_s
        rollout, effects = tried(rollout, event, now_s)
        assigned += [e.name for e in effects if isinstance(e, Assign)]
        rollout, effects = step_all(rollout, batch, now_s)
        assigned += [e.name for e in effects if isinstance(e, Assign)]
        check(rollout, assigned)


@settings(deadline=None)
@given(begun(), histories)
def test_the_same_events_give_the_same_state_and_effects(start, history):
    def replayed():
        (rollout, effects), now_s = start, 0.0
        told = [effects]
        for event, passed_s in history:
            now_s += passed_s
            rollout, effects = tried(rollout, event, now_s)
            told.append(effects)
        return rollout, told

    assert replayed() == replayed()


@settings(deadline=None)
@given(begun(), histories)
def test_any_event_twice_changes_nothing_more(start, history):
    rollout, _ = start
    now_s = 0.0
    for event, passed_s in history:
        now_s += passed_s
        rollout, _ = tried(rollout, event, now_s)
        if not isinstance(event, Resume):
            assert tried(rollout, event, now_s) == (rollout, ())


@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(begun(), histories)
def test_every_rollout_ends_once_bundles_people_and_nodes_answer(start, history):
    """From wherever events led: sign, resume, commit; at most one round per wave is needed."""
    rollout, _ = start
    now_s = 0.0
    for event, passed_s in history:
        now_s += passed_s
        rollout, _ = tried(rollout, event, now_s)
    for _ in range(2 * len(rollout.plan.waves) + 3):
        for target in TARGETS:
            rollout, _ = tried(rollout, BundleReady(target, NEEDS, PATH), now_s)
        rollout, _ = tried(rollout, Resume(), now_s)
        for target in TARGETS:
            rollout, _ = tried(rollout, BundleReady(target, NEEDS, PATH), now_s)
        for name, member in rollout.members.items():
            rollout, _ = tried(rollout, committed(name, member.attempt), now_s)
        rollout, _ = tried(rollout, TimePassed(), now_s)
    assert rollout.state in ENDED
    if rollout.state is RolloutState.DONE:
        opened = [m for m in rollout.members.values() if not m.excused]
        assert all(m.stage in SETTLED for m in opened)
