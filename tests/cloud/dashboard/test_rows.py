from hypothesis import given
from hypothesis import strategies as st

from triplane.cloud.dashboard.rows import (
    MOST_REASONS,
    MOST_ROWS,
    MOST_TEXT_CHARS,
    change,
    node_row,
    rollout_row,
    state_from,
)
from triplane.cloud.dashboard.runs import run_row
from triplane.proto.federation_pb2 import Run, Score
from triplane.proto.fleet_pb2 import COMMITTED, FAILED, ModelReport, Node, Report, Rollout, Wave

SECTION = st.dictionaries(st.sampled_from("abcdef"), st.dictionaries(st.just("n"), st.integers()))
STATES = st.dictionaries(st.sampled_from(("nodes", "rollouts")), SECTION)


def applied(state, told):
    """What a page does with a change."""
    after = {name: dict(rows) for name, rows in state.items()}
    for name, section in told.items():
        rows = after.setdefault(name, {})
        for key in section["gone"]:
            del rows[key]
        rows.update(section["set"])
    return after


@given(before=STATES, after=STATES)
def test_a_page_that_applies_the_change_has_the_state(before, after):
    before = {name: before.get(name, {}) for name in after}
    assert applied(before, change(before, after)) == after


@given(STATES)
def test_nothing_is_sent_where_nothing_changed(state):
    assert change(state, state) == {}


def test_a_wave_holds_its_own_nodes_and_its_size():
    rollout = Rollout(id="r", model="m", version=2)
    rollout.request.waves.extend([Wave(nodes=1), Wave(percent=12.5), Wave(percent=100)])
    for name, wave in (("a", 0), ("b", 2), ("c", 2)):
        rollout.nodes.add(name=name, wave=wave)
    waves = rollout_row(rollout)["waves"]
    assert [wave["size"] for wave in waves] == ["1 node", "12.5%", "100%"]
    assert [[node["name"] for node in wave["nodes"]] for wave in waves] == [["a"], [], ["b", "c"]]


def test_a_rollout_without_waves_is_one_wave():
    rollout = Rollout(id="r")
    rollout.nodes.add(name="a")
    (wave,) = rollout_row(rollout)["waves"]
    assert wave["nodes"][0]["state"] == "node_state_unspecified"


def test_a_large_wave_is_counted_and_its_first_failures_are_named():
    rollout = Rollout(id="r")
    for i in range(1000):
        state = FAILED if i % 20 == 0 else COMMITTED
        rollout.nodes.add(name=f"n{i}", state=state, reason="golden" if state == FAILED else "")
    (wave,) = rollout_row(rollout)["waves"]
    assert wave["tally"] == {"failed": 50, "committed": 950}
    assert wave["nodes"] == []
    assert [node["name"] for node in wave["failed"]] == [f"n{20 * i}" for i in range(MOST_REASONS)]


def test_a_state_of_a_newer_program_is_shown_as_its_number():
    newer = ModelReport.FromString(b"\x0a\x01m\x30\x4d")  # field 6, the state, is 77
    node = Node(name="n", report=Report(models=[newer]))
    assert node_row(node)["models"][0]["state"] == "77"


def test_time_that_passes_at_a_connected_node_is_no_change():
    before, after = (
        {"nodes": {"n": node_row(Node(name="n", connected=True, last_seen_s=seen_s))}}
        for seen_s in (1.0, 99.0)
    )
    assert change(before, after) == {}


def test_a_long_reason_is_cut():
    node = Node(report=Report(models=[ModelReport(reason="x" * 100_000)]))
    assert len(node_row(node)["models"][0]["reason"]) == MOST_TEXT_CHARS


def test_a_large_fleet_is_cut_and_counted():
    nodes = [Node(name=f"n{i:05}", connected=i % 2 == 0) for i in range(MOST_ROWS["nodes"] + 5)]
    state = state_from(nodes, [], [], [], [])
    assert len(state["nodes"]) == MOST_ROWS["nodes"]
    assert state["totals"]["all"] == {
        "nodes": len(nodes),
        "connected": (len(nodes) + 1) // 2,
        "due": [],
    }


def test_a_device_that_waits_is_named_first_among_those_that_lag():
    run = Run(id="0" * 16)
    run.members.add(device="ann", dropped=3, reason="late")
    run.members.add(device="bob", waits="the disk is full")
    found = [(row["name"], row["waits"]) for row in run_row(run)["stragglers"]]
    assert found == [("bob", "the disk is full"), ("ann", "")]


def test_a_small_loss_keeps_its_digits_and_an_accuracy_has_four():
    for metric, value in (("loss", 1.235e-05), ("", 0.0)):
        run = Run(id="0" * 16, metric=metric)
        run.members.add(device="ann", score=Score(samples=3, before=1.2345678e-05, after=0.25))
        row = run_row(run)
        assert row["metric"] == metric
        assert [(d["before"], d["after"]) for d in row["devices"]] == [(value, 0.25)]


def test_a_round_has_the_loss_of_its_updates_to_four_digits_and_none_without_them():
    run = Run(id="0" * 16)
    run.rounds.add(number=1, closed_s=1, asked=3, counted=3, loss=1.23456e-14)
    run.rounds.add(number=2, closed_s=1, asked=3, counted=1, loss=0.5, given_up="2 of 3 needed")
    run.rounds.add(number=3, closed_s=1, asked=3)
    run.rounds.add(number=4, closed_s=1, asked=3, counted=3)  # masked
    row = run_row(run)
    assert [r["loss"] for r in row["rounds"]] == [1.235e-14, None, None, None]
    assert row["losses"] == [[1, 1.235e-14]]


def test_rounds_before_the_newest_are_counted_by_outcome():
    run = Run(id="0" * 16)
    for i in range(1, 71):
        run.rounds.add(number=i, closed_s=1, asked=3, counted=3 - (i == 2))
    run.rounds[0].given_up = "2 of 3 needed"
    run.rounds.add(number=4, evaluates=True, asked=3, counted=1)
    run.rounds.add(number=71, asked=3)
    row = run_row(run)
    assert row["older"] == {"complete": 9, "partial": 1, "abandoned": 1}
    assert [r["outcome"] for r in row["rounds"][-2:]] == ["complete", "open"]
    assert row["rounds"][0]["number"] == 12
    run.ClearField("rounds")
    assert run_row(run)["older"] == {}
