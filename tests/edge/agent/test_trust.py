import errno

import pytest
from tests.attacks.trust_stage import DAY_S, Clock, bundle_entry, stage
from tuf.api import exceptions as errors

from triplane.proto.disk import OsDisk
from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable
from triplane.proto.signed.explain import ROWS
from triplane.proto.signed.trust import CLOCK_TOLERANCE_S, LATEST_TIME, Trust

PATH = "release/digits@1+ort-x64.bundle"


@pytest.fixture
def cloud(tmp_path):
    made = stage(tmp_path)
    made.release(bundle_entry(PATH))
    return made


def test_a_warm_refresh_fetches_two_files(cloud):
    assert cloud.node().refresh().is_fresh
    cloud.asked.clear()
    assert cloud.node().refresh().is_fresh
    assert cloud.asked == ["2.root.json", "timestamp.json"]


def test_nothing_is_trusted_before_the_first_refresh(cloud):
    node = cloud.node()
    with pytest.raises(Unavailable, match="refresh first"):
        node.target(PATH)
    with pytest.raises(Unavailable, match="refresh first"):
        node.policy()


def test_a_node_without_a_bootstrap_root_says_what_to_do(cloud, tmp_path):
    node = Trust(tmp_path / "bare", cloud.fetch, cloud.clock)
    with pytest.raises(NotFound, match=r"bootstrap\.json is missing; enrol this node again"):
        node.refresh()


def test_a_damaged_bootstrap_root_says_what_to_do(cloud):
    cloud.node()
    (cloud.path / "node" / "bootstrap.json").write_bytes(b"{")
    with pytest.raises(Corrupt, match=r"bootstrap\.json is damaged .* enrol this node again"):
        cloud.node().refresh()


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf", "1e300", "9" * 70])
def test_a_damaged_latest_time_is_named_and_takes_nothing_new(cloud, text):
    cloud.node()
    file = cloud.path / "node" / LATEST_TIME
    file.write_text(text)
    node = cloud.node()
    found = node.refresh()
    assert not found.is_fresh
    assert "set the clock right, then remove the file" in found.refusals[0].text
    file.unlink()
    assert node.refresh().is_fresh


def test_the_latest_time_survives_a_restart_and_only_grows(cloud):
    assert cloud.node().refresh().is_fresh
    start = cloud.clock()
    early = Trust(cloud.path / "node", cloud.fetch, Clock(start - 500))
    assert early.now_s == start
    early.refresh()
    assert float((cloud.path / "node" / LATEST_TIME).read_text()) == start
    assert Trust(cloud.path / "node", cloud.fetch, Clock(start + 9)).now_s == start + 9


def test_a_small_correction_of_the_clock_is_no_incident(cloud):
    assert cloud.node().refresh().is_fresh
    for back_s, kinds in ((CLOCK_TOLERANCE_S - 1, []), (CLOCK_TOLERANCE_S + 1, ["clock"])):
        node = Trust(cloud.path / "node", cloud.fetch, Clock(cloud.clock() - back_s))
        found = node.refresh()
        assert found.is_fresh
        assert [refused.kind for refused in found.refusals] == kinds


def test_known_targets_stay_good_offline_until_they_expire(cloud):
    node = cloud.node()
    assert node.refresh().is_fresh
    assert node.target(PATH).length == 16

    def away(name):
        raise Unavailable("the link is down")

    node._fetcher._get = away
    cloud.clock.now_s += DAY_S / 2
    found = node.refresh()
    assert found.is_fresh
    assert found.verified_s == cloud.clock() - DAY_S / 2
    assert node.target(PATH).length == 16


@pytest.mark.parametrize(
    "error", [Unavailable("down"), InvalidInput("denied"), OSError("socket"), KeyError("bug")]
)
def test_whatever_the_link_raises_is_no_incident(cloud, error):
    node = cloud.node()

    def broken(name):
        raise error

    node._fetcher._get = broken
    found = node.refresh()
    assert (found.is_fresh, found.refusals) == (False, ())
    assert str(error) in str(found.error)


class FullDisk(OsDisk):
    def create(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_unavailable_and_keeps_what_was_there(cloud):
    assert cloud.node().refresh().is_fresh
    cloud.release(bundle_entry("release/digits@2+ort-x64.bundle"))
    node = Trust(cloud.path / "node", cloud.fetch, cloud.clock, FullDisk())
    found = node.refresh()
    assert (found.is_fresh, found.refusals) == (False, ())
    assert "No space left on device" in str(found.error)
    assert cloud.node().refresh().is_fresh


def test_every_error_of_the_client_has_a_row():
    """A class that python-tuf adds must be decided here."""
    families = (errors.RepositoryError, errors.DownloadError)
    known = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, families)}
    assert {row for row, _ in ROWS} >= set(families)
    decided = {
        errors.RepositoryError, errors.UnsignedMetadataError, errors.BadVersionNumberError,
        errors.EqualVersionNumberError, errors.ExpiredMetadataError,
        errors.LengthOrHashMismatchError, errors.DownloadError, errors.DownloadLengthMismatchError,
        errors.SlowRetrievalError, errors.DownloadHTTPError,
    }  # fmt: skip
    assert known == decided


def test_a_derived_error_stands_before_its_base():
    classes = [row for row, _ in ROWS]
    for at, row in enumerate(classes):
        assert not any(issubclass(later, row) for later in classes[at + 1 :])


def test_the_clock_of_the_machine_is_not_asked(cloud):
    """Expiry is judged by the node's own time, also where python-tuf would ask the system."""
    cloud.clock.now_s += 20 * 365 * DAY_S
    found = cloud.node().refresh()
    assert [refused.kind for refused in found.refusals] == ["freeze"]
    assert "root 1 expired" in found.refusals[0].text
