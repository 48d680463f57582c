"""Power cuts and kills at every disk operation of a cloud that gathers and reduces updates.

The real federation, its spool, its live run and its journal; played are devices, which send what
they are asked for. The files are on a disk that forgets; the database is one that keeps what it
committed and nothing else. What was acknowledged is there after a cut, and so is every file that
the journal names, or its row, and the run goes on to the very states of an undisturbed one.
Updates are uploaded, or come within their contributions; together, or one after another.
"""

import pytest
from tests.faults.cuts import cuts
from tests.faults.spool_power import POINTS, check_found, stories

from triplane.cloud import machine
from triplane.cloud.federation import journal, results


@pytest.fixture
def play(quick_folder):
    return stories(quick_folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        {},
        pytest.param({"inline": True}, marks=pytest.mark.long),
        pytest.param({"vector": True}, marks=pytest.mark.long),
    ],
    ids=("uploaded", "inline", "vector"),
)
def test_power_cuts_and_kills_leave_what_was_acknowledged_and_what_is_journaled(quick_folder, way):
    play = stories(quick_folder, **way)
    operations, made, kills = cuts(quick_folder, play, points=POINTS, seed=1)
    assert 20 < operations <= made
    assert kills == POINTS // 2


@pytest.fixture
def large_states(monkeypatch):
    """Every state is one that goes to a file of its own."""
    monkeypatch.setattr(results, "INLINE_BYTES", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("large_states")
def test_power_cuts_and_kills_leave_large_states_whole(quick_folder, play):
    operations, made, _ = cuts(quick_folder, play, points=POINTS // 2, seed=1)
    assert operations > 50
    assert made == 3 * (POINTS // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "folder"),
    [
        ("sync", ""),
        ("sync_folder", ""),
        ("sync", "federation/updates/partial"),
        ("sync_folder", "federation/updates"),
    ],
)
def test_the_search_finds_a_sync_that_the_cloud_leaves_out(quick_folder, play, method, folder):
    check_found(quick_folder, play, forgets=(method, folder))


@pytest.mark.slow
@pytest.mark.usefixtures("large_states")
@pytest.mark.parametrize(
    ("method", "folder"), [("sync", "blobs/partial"), ("sync_folder", "blobs")]
)
def test_the_search_finds_a_sync_of_a_large_state_that_is_left_out(
    quick_folder, play, method, folder
):
    check_found(quick_folder, play, forgets=(method, folder))


@pytest.mark.slow
def test_the_search_finds_a_small_state_whose_row_is_left_out(quick_folder, play, monkeypatch):
    monkeypatch.setattr(journal, "save_small_states", lambda *_: None)
    check_found(quick_folder, play)


@pytest.mark.slow
def test_the_search_finds_a_small_state_that_is_not_written_again(quick_folder, play, monkeypatch):
    monkeypatch.setattr(results.Results, "_restore", lambda *_: None)
    check_found(quick_folder, play)


@pytest.mark.slow
def test_the_search_finds_an_acknowledgement_before_the_commit(quick_folder, monkeypatch):
    def answered(run, taken):
        folded(run, taken)
        machine._answer(taken, run.state)

    play = stories(quick_folder, inline=True)
    folded = machine.Machine._fold
    monkeypatch.setattr(machine.Machine, "_fold", answered)
    check_found(quick_folder, play)
