import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.cloud.cli import text
from triplane.proto.fleet_pb2 import COMMITTED, DeployRequest, ModelReport, Node, Report, Wave
from triplane.proto.registry_pb2 import Version

NOW_S = 1_700_000_000.0


@given(st.text())
def test_nothing_that_a_terminal_acts_on_is_shown(told):
    shown = text.shown(told)
    assert len(shown) == len(told)
    assert all(c.isprintable() for c in shown)


def test_a_label_cannot_repaint_the_terminal():
    assert text.shown("\x1b[2Jsite\r\n\u202eevil") == "?[2Jsite???evil"


def test_columns_line_up_and_an_empty_cell_is_a_dash():
    drawn = text.table(("A", "LONG"), [("wide one", ""), ("x", "y")])
    assert drawn == "A         LONG\nwide one  -\nx         y"


HEADINGS = ("NAME", "LABELS", "STATE")
ROWS = [("camera-1", "line=1,site=factory", "ready"), ("camera-2", "", "a reason of many words")]


def test_columns_that_do_not_fit_become_lines_below_their_row():
    full = "NAME      LABELS               STATE\ncamera-1  line=1,site=factory  ready"
    assert text.table(HEADINGS, ROWS[:1], 36) == full
    assert text.table(HEADINGS, ROWS[:1], 35) == (
        "NAME      STATE\ncamera-1  ready\n    labels: line=1,site=factory"
    )
    assert text.table(HEADINGS, ROWS, 20) == (
        "NAME\ncamera-1\n    labels:\n      line=1,site=factory\n    state: ready\n"
        "camera-2\n    state: a reason\n      of many words"
    )


def test_a_terminal_limits_a_table_and_a_pipe_does_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    wide = text.table(HEADINGS, ROWS)
    assert max(map(len, wide.splitlines())) > 30
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert max(map(len, text.table(HEADINGS, ROWS).splitlines())) <= 30


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (172_800, "2 days"),
        (1e9, "11574 days"),
        (-5, "0 s"),
    ],
)
def test_a_duration_is_said_in_the_unit_that_says_it_shortest(seconds, said):
    assert text.duration(seconds) == said


def test_ages_and_ends():
    assert text.age(NOW_S - 30, NOW_S) == "30 s ago"
    assert text.age(0, NOW_S) == "-"
    assert text.until(NOW_S + 86_400 * 30, NOW_S) == "in 30 days"
    assert text.until(NOW_S - 1, NOW_S) == "expired"


@pytest.mark.parametrize(
    ("amount", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (131_207, "128.1 KiB"),
     (1 << 41, "2048.0 GiB")],
)  # fmt: skip
def test_sizes(amount, said):
    assert text.size(amount) == said


def test_a_record_has_hex_digests_lower_case_states_and_plain_numbers():
    version = Version(model="digits", version=3, model_digest=b"\x01\xff", size=1 << 40)
    record = text.record(version)
    assert record["model_digest"] == "01ff"
    assert record["size"] == 1 << 40
    assert record["aliases"] == []
    assert record["recipe"]["quantize"] == ""
    report = Report(models=[ModelReport(model="digits", state=COMMITTED)])
    node = text.record(Node(name="n", labels={"b": "2", "a": "1"}, report=report))
    assert node["labels"] == {"a": "1", "b": "2"}
    assert node["report"]["models"][0]["state"] == "committed"


def test_of_a_choice_only_the_chosen_is_in_the_record():
    request = DeployRequest(waves=[Wave(nodes=2), Wave(percent=50)])
    assert text.record(request)["waves"] == [{"nodes": 2}, {"percent": 50.0}]
