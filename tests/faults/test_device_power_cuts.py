"""Power cuts and kills at every disk operation of a device that takes part in a run.

The real desk, plan, memory and settlement run on a disk that forgets; played are the cloud, which
keeps what it was sent, and the wire. An update leaves once and in one form, what counted is
remembered, and the personal state is that of a number of updates, never of a part of one. A device
whose updates imply nothing keeps none of them on its disk, and learns the same bytes again.
"""

import pytest
from tests.faults.cuts import cuts
from tests.faults.device_power import NOTHING_PERSONAL, POINTS, stories

from triplane.proto.errors import Corrupt


@pytest.fixture
def play(quick_folder):
    return stories(quick_folder)


@pytest.mark.slow
def test_power_cuts_and_kills_leave_a_device_what_it_sent_and_what_counted(quick_folder, play):
    operations, made, kills = cuts(quick_folder, play, points=POINTS, seed=1)
    assert 50 < operations <= made
    assert kills == POINTS // 2


@pytest.mark.slow
def test_a_device_that_keeps_no_update_sends_the_same_bytes_after_power_cuts_and_kills(
    quick_folder,
):
    play = stories(quick_folder, roles=NOTHING_PERSONAL, compression="")
    operations, made, kills = cuts(quick_folder, play, points=POINTS, seed=1)
    assert 20 < operations <= made
    assert kills == POINTS // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "folder"),
    [
        ("sync", ""),
        ("sync", "pending"),
        ("sync", "personal"),
        ("sync", "plans/partial"),
        ("sync_folder", ""),
        ("sync_folder", "pending"),
        ("sync_folder", "personal"),
    ],
)
def test_the_search_finds_a_sync_that_a_device_leaves_out(quick_folder, play, method, folder):
    with pytest.raises((AssertionError, Corrupt)):
        cuts(quick_folder, play, points=6 * POINTS, seed=1, forgets=(method, folder))
