from io import StringIO

import pytest
from rich.console import Console

from triplane.cloud.cli import rollouts
from triplane.cloud.cli.rollouts import draw, draw_in
from triplane.cloud.cli.watching import live_view
from triplane.proto.fleet_pb2 import (
    COMMITTED,
    DOWNLOADING,
    FAILED,
    NODE_STATE_UNSPECIFIED,
    RETURNED,
    Rollout,
    Wave,
)


def rollout(*states, state=Rollout.RUNNING, **fields):
    made = Rollout(
        id="r-1", model="digits", version=4, selector="all", state=state, created_s=1, **fields
    )
    made.request.waves.extend([Wave(nodes=1), Wave(percent=100)])
    for i, node_state in enumerate(states):
        reason = "golden sample 3" if node_state == FAILED else ""
        made.nodes.add(
            name=f"n{i}", wave=min(i, 1), state=node_state, reason=reason, connected=True
        )
    return made


def copy(message, **fields):
    made = Rollout()
    made.CopyFrom(message)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_the_headline_says_where_it_stands_and_why():
    paused = rollout(COMMITTED, FAILED, DOWNLOADING, state=Rollout.PAUSED, wave=1)
    paused.reason = "1 of 2 failed\x1b[2J"
    assert rollouts.headline(paused) == (
        "[r-1] digits@4 to all: paused, wave 2 of 2, 1 of 3 nodes committed, 1 failed, "
        "1 of 2 failed?[2J"
    )


def test_a_node_that_an_abort_took_back_did_not_fail():
    aborted = rollout(RETURNED, FAILED, state=Rollout.ABORTED)
    assert rollouts.headline(aborted) == (
        "[r-1] digits@4 to all: aborted, 0 of 2 nodes committed, 1 failed, 1 returned"
    )
    lost = rollout(RETURNED, state=Rollout.PAUSED)
    assert rollouts.headline(lost).endswith("0 of 1 node committed, 1 failed")


def test_only_nodes_that_failed_are_drawn_in_red():
    def styles(state):
        drawn = draw(rollout(RETURNED, state=state), room=9, seconds=1)
        segments = Console(file=StringIO(), force_terminal=True, width=100).render(drawn)
        marks = ("returned ", "x", "<")
        return {str(s.style) for s in segments if s.text.startswith(marks)}

    assert styles(Rollout.PAUSED) == {"red"}
    assert styles(Rollout.ABORTED) == {"yellow"}


def test_the_headline_names_nodes_that_a_wave_waits_for():
    waits = rollout(*[NODE_STATE_UNSPECIFIED] * 6, COMMITTED, wave=1)
    for node in waits.nodes:
        node.connected = node.name == "n1"
    assert rollouts.headline(waits).endswith("committed, waiting for n0, n2, n3, 2 more to connect")
    waits.wave = 0
    assert rollouts.headline(waits).endswith("committed, waiting for n0 to connect")
    waits.state = Rollout.PAUSED
    assert "to connect" not in rollouts.headline(waits)


def test_the_first_lines_are_everything_and_later_ones_what_is_new():
    first = rollout(DOWNLOADING, NODE_STATE_UNSPECIFIED)
    assert rollouts.changes(None, first) == [rollouts.headline(first), "  n0: downloading"]
    assert rollouts.changes(first, first) == []
    second = copy(first, wave=1)
    second.nodes[0].state = COMMITTED
    assert rollouts.changes(first, second) == [rollouts.headline(second), "  n0: committed"]
    third = copy(second)
    third.nodes[1].state, third.nodes[1].reason = FAILED, "does not load"
    assert rollouts.changes(second, third) == ["  n1: failed: does not load"]


def test_bytes_alone_give_no_line():
    first = rollout(DOWNLOADING)
    second = copy(first)
    second.nodes[0].downloaded_bytes = 7
    assert rollouts.changes(first, second) == []


def test_the_end_of_a_paused_rollout_names_the_ways_out():
    said = "\n".join(rollouts.aftermath(rollout(*[FAILED] * 8, state=Rollout.PAUSED)))
    assert said.count("golden sample 3") == rollouts.MOST_REASONS
    assert "and 3 more: triplane rollout show r-1" in said
    for verb in ("resume r-1", "abort r-1\n", "abort r-1 --revert"):
        assert f"triplane rollout {verb}" in said + "\n"


def test_a_done_rollout_leaves_nothing_to_say():
    assert rollouts.aftermath(rollout(COMMITTED, state=Rollout.DONE)) == []


def test_failed_nodes_stand_first_and_committed_last():
    mixed = rollout(COMMITTED, NODE_STATE_UNSPECIFIED, RETURNED, DOWNLOADING, FAILED)
    assert [n.name for n in rollouts.sorted_nodes(mixed)] == ["n4", "n2", "n3", "n0", "n1"]


def test_a_download_shows_its_share_and_a_node_away_is_marked():
    made = rollout(DOWNLOADING)
    made.nodes[0].downloaded_bytes, made.nodes[0].total_bytes = 30, 120
    made.nodes[0].connected = False
    ((_, wave, state, _),) = rollouts.node_rows(made.nodes)
    assert (wave, state) == ("1", "downloading 25% (offline)")


def test_a_rollout_without_nodes_or_waves_is_shown():
    empty = Rollout(id="r", model="m", version=1, state=Rollout.PREPARING)
    assert "preparing" in rollouts.rollout_text(empty)
    assert rollouts.waves(empty) == 1


def printed(renderable, width=100):
    out = StringIO()
    Console(file=out, width=width, height=40).print(renderable)
    return out.getvalue()


def test_the_live_table_is_cut_to_the_window_with_the_urgent_rows():
    many = rollout(*[COMMITTED] * 50, FAILED)
    text = printed(draw(many, room=5, seconds=12))
    assert "n50" in text
    assert "and 46 more" in text
    assert "12 s" in text
    assert "> wave 1" in text


def test_the_live_table_shows_markup_as_text():
    made = rollout(FAILED, reason="[red]not red[/red]")
    made.nodes[0].reason = "[bold]x[/bold] \x1b]0;title\x07"
    text = printed(draw(made, room=5, seconds=0), width=200)
    assert "[red]not red[/red]" in text
    assert "[bold]x[/bold] ?]0;title?" in text


@pytest.mark.parametrize("states", [(), (COMMITTED,), (FAILED, COMMITTED, DOWNLOADING)])
def test_the_live_table_draws_and_leaves_nothing_behind(states):
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24)
    with live_view(draw_in, console) as show:
        show(rollout(*states))
    assert "digits@4" in out.getvalue()
