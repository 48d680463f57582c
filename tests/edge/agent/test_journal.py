import pytest

from triplane.edge.agent.journal import MAX_JOURNAL_BYTES, Journal, Line, readable


def line(model="m", version=1, state="ASSIGNED", reason=""):
    return Line(1.0, model, version, version, "r", state, reason)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def write(path, *lines):
    journal = Journal(path)
    for one in lines:
        journal.add(one)
    journal.close()


def reopened(path):
    journal = Journal(path)
    journal.close()
    return journal.last


def test_the_last_line_of_each_model_is_known_after_a_restart(path):
    write(path, line("a", 1), line("b", 1), line("a", 2, "FAILED", "why"))
    assert reopened(path) == {"a": line("a", 2, "FAILED", "why"), "b": line("b", 1)}


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_that_was_cut_off_is_dropped_and_writing_goes_on(path, cut):
    write(path, line(version=1), line(version=2))
    path.write_bytes(path.read_bytes()[:-cut])
    assert reopened(path)["m"].version == 1
    write(path, line(version=3))
    assert [one.version for one in readable(path)] == [1, 3]


def test_a_changed_byte_ends_what_is_believed(path):
    write(path, *[line(version=n) for n in range(1, 6)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert reopened(path)["m"].version < 5


@pytest.mark.parametrize("data", [b"\n", b"nonsense\n", b"{} 0000000000000000\n", b"\xff" * 100])
def test_bytes_that_are_no_journal_leave_an_empty_one(path, data):
    path.write_bytes(data)
    assert reopened(path) == {}


@pytest.mark.slow
def test_a_long_journal_is_cut_down_to_what_counts(path):
    long = line(reason="x" * 900)
    count = MAX_JOURNAL_BYTES // 900
    write(path, long)
    path.write_bytes(path.read_bytes() * count)
    assert reopened(path) == {"m": long}
    assert path.stat().st_size < 2000
