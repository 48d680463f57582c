"""Power cuts at every disk operation of a node that is brought from version to version.

The real agent code runs on a disk that forgets; only what stands beyond its seams is played: the
server (as a dictionary that a restart empties down to the pointers), the signed metadata, the
trial. After each cut the node starts anew on what is left and must stand on a committed version.
"""

import pytest
from tests.support.node_power import OUTCOMES, cuts

from triplane.proto.errors import Corrupt


@pytest.mark.parametrize(
    ("points", "seed"),
    [
        pytest.param(600, 1, marks=pytest.mark.slow),
        pytest.param(1000, 1, marks=pytest.mark.long),
        pytest.param(5000, 2, marks=pytest.mark.deep),
    ],
)
def test_power_cuts_leave_a_committed_version_serving(quick_folder, points, seed):
    assert 50 < cuts(quick_folder, points=points, seed=seed) <= points / OUTCOMES, "each operation"


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_the_search_finds_a_missing_sync(quick_folder, forgotten):
    with pytest.raises((AssertionError, Corrupt, KeyError)):
        cuts(quick_folder, points=400, seed=1, unsynced=(forgotten,))
