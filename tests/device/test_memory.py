"""What a device remembers survives a crash at every step, whole or not at all."""

import numpy as np
import pytest

from triplane.device import memory as remembering
from triplane.device.memory import NOTHING, Memory, PersonalState, UpdateFacts
from triplane.proto.disk import OS_DISK
from triplane.proto.errors import Conflict, Corrupt, Unavailable
from triplane.unified_ir.files import container

RUN, OTHER = "0123456789abcdef", "fedcba9876543210"
IMPLIED = PersonalState({"head": np.arange(3.0)}, {"w": np.full((2, 2), 0.25, np.float32)})


def facts(run=RUN, lease="ab" * 16):
    return UpdateFacts(run=run, round=3, lease=lease, examples=20, loss=0.1 + 0.2, seconds=1e-3)


@pytest.fixture
def folders(tmp_path):
    for name in ("personal", "pending"):
        (tmp_path / name).mkdir()
    return tmp_path / "personal", tmp_path / "pending"


def kept(folders, run=RUN, data=b"the update's bytes", implied=IMPLIED):
    source = folders[1] / "new"
    source.write_bytes(data)
    return Memory(*folders).keep(facts(run), source, implied)


def plain(personal):
    return {
        n: x.tolist() for part in (personal.tensors, personal.remainder) for n, x in part.items()
    }


def test_what_was_kept_is_found_by_the_next_process(folders):
    kept(folders)
    (found,) = Memory(*folders).pending()
    assert found.facts == facts()
    assert Memory(*folders).bytes_of(found).read_bytes() == b"the update's bytes"


def test_the_bytes_to_send_are_made_again_where_a_crash_lost_their_file(folders):
    pending = kept(folders)
    pending.path.with_suffix(".out").unlink()
    assert Memory(*folders).bytes_of(pending).read_bytes() == b"the update's bytes"


def test_an_older_update_s_bytes_are_never_sent_for_a_newer_one(folders):
    """A crash after the newer one was kept, before its file took its place."""
    (folders[1] / f"{RUN}.out").write_bytes(b"older")
    source = folders[1] / "new"
    source.write_bytes(b"newer")
    memory = Memory(*folders)

    def crash(_path):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathlib.Path.replace", lambda *_: crash(None))
        patch.setattr(OS_DISK.__class__, "replace", lambda _self, a, b: a.rename(b))
        with pytest.raises(KeyboardInterrupt):
            memory.keep(facts(), source, IMPLIED)
    (found,) = Memory(*folders).pending()
    assert Memory(*folders).bytes_of(found).read_bytes() == b"newer"


def test_it_takes_effect_when_it_counted_and_leaves_nothing_behind(folders):
    memory = Memory(*folders)
    memory.settle(kept(folders), counted=True)
    assert plain(memory.personal(RUN)) == plain(IMPLIED)
    assert list(folders[1].iterdir()) == []


def test_it_is_forgotten_when_it_did_not_count(folders):
    memory = Memory(*folders)
    memory.settle(kept(folders), counted=False)
    assert memory.personal(RUN) == NOTHING
    assert [p for folder in folders for p in folder.iterdir()] == []


def test_a_settlement_that_a_crash_cut_short_is_done_again(folders, monkeypatch):
    """Killed after the personal state was written, before the pending update went."""
    pending = kept(folders)

    def crash(_path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remembering, "drop", crash)
        with pytest.raises(KeyboardInterrupt):
            Memory(*folders).settle(pending, counted=True)
    memory = Memory(*folders)
    (again,) = memory.pending()
    memory.settle(again, counted=True)
    assert plain(memory.personal(RUN)) == plain(IMPLIED)
    assert list(folders[1].iterdir()) == []


def test_what_a_killed_process_renamed_is_synced_before_the_next_one_relies_on_it(
    folders, monkeypatch
):
    """It is seen by then, and a power cut may still take it back."""
    pending = kept(folders)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OS_DISK.__class__, "sync_folder", crash)
        with pytest.raises(KeyboardInterrupt):
            Memory(*folders).settle(pending, counted=True)
    memory = Memory(*folders)
    found = syncs(monkeypatch)
    (again,) = memory.pending()  # before it is sent again
    assert found == [folders[1]]
    memory.settle(again, counted=True)  # before the update is removed
    assert found == [folders[1], folders[0]]
    assert plain(memory.personal(RUN)) == plain(IMPLIED)


def test_a_new_run_begins_with_the_newest_personal_tensors_and_no_remainder(folders):
    memory = Memory(*folders)
    memory.settle(kept(folders), counted=True)
    assert plain(memory.personal(OTHER)) == {"head": [0, 1, 2]}
    assert memory.personal(OTHER, {"head"}) == NOTHING
    assert plain(memory.personal(RUN, {"head"})) == plain(IMPLIED), "the same run keeps all"


def settled_in_turn(memory, *leases):
    """Settle updates of these leases, whose personal state is their number."""
    for k, lease in enumerate(leases):
        implied = PersonalState({"head": np.array([k])}, {})
        memory.settle(memory.keep(facts(lease=lease), b"data", implied), counted=True)


A, B = "aa" * 16, "bb" * 16


@pytest.mark.parametrize(
    ("included", "left"), [(B, {"head": [1]}), (A, {"head": [0]}), ("cc" * 16, {"head": [1]})]
)
def test_an_update_that_the_cloud_did_not_include_is_taken_back(folders, included, left):
    """The last of them is of a cloud that knows neither, so nothing is known to be wrong."""
    memory = Memory(*folders)
    settled_in_turn(memory, A, B)
    memory.take_back(RUN, included=included)
    memory.take_back(RUN, included=included)
    assert plain(Memory(*folders).personal(RUN)) == left


def test_a_first_update_that_the_cloud_did_not_include_leaves_nothing(folders):
    memory = Memory(*folders)
    memory.take_back(RUN, included="")
    settled_in_turn(memory, A)
    memory.take_back(RUN, included="")
    assert memory.personal(RUN) == NOTHING
    settled_in_turn(memory, B)
    memory.take_back(RUN, included=B)
    assert plain(memory.personal(RUN)) == {"head": [0]}


def test_what_was_before_a_state_that_was_lost_does_not_come_back(folders):
    memory = Memory(*folders)
    settled_in_turn(memory, A, B)
    (state,) = folders[0].glob("*.state")
    state.write_bytes(b"damaged")
    assert Memory(*folders).personal(RUN) == NOTHING
    settled_in_turn(memory, "cc" * 16)
    memory.take_back(RUN, included=A)  # the cloud was restored, or the round of B was abandoned
    assert memory.personal(RUN) == NOTHING


@pytest.mark.parametrize("cut", ["write", "drop"])
def test_a_settlement_that_a_crash_cut_short_keeps_what_was_before(folders, monkeypatch, cut):
    memory = Memory(*folders)
    settled_in_turn(memory, A)
    pending = memory.keep(facts(lease=B), b"data", IMPLIED)

    def crash(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if cut == "write":  # after the copy, before the new state is there
            patch.setattr(container, "write", crash)
        else:
            patch.setattr(remembering, "drop", crash)  # after both
        with pytest.raises(KeyboardInterrupt):
            memory.settle(pending, counted=True)
    memory = Memory(*folders)
    memory.settle(memory.pending()[0], counted=True)
    assert plain(memory.personal(RUN)) == plain(IMPLIED)
    memory.take_back(RUN, included=A)
    assert plain(memory.personal(RUN)) == {"head": [0]}


def test_after_a_return_a_run_begins_with_its_own_tensors_and_no_remainder(folders):
    memory = Memory(*folders)
    memory.settle(kept(folders), counted=True)
    memory.settle(
        kept(folders, OTHER, implied=PersonalState({"head": np.zeros(3)}, {})), counted=True
    )
    assert plain(memory.personal(RUN, returns=1)) == {"head": [0, 1, 2]}
    assert memory.personal(RUN, {"head"}, returns=1) == NOTHING
    later = PersonalState({"head": np.full(3, 7.0)}, {})
    pending = memory.keep(facts(), b"data", later, returns=1)
    assert [p.facts for p in Memory(*folders).pending()] == [facts()]
    memory.settle(pending, counted=True)
    assert plain(memory.personal(RUN, {"head"}, returns=1)) == {"head": [7, 7, 7]}
    assert plain(memory.personal(RUN)) == plain(IMPLIED), "what it had before"
    assert list(folders[1].iterdir()) == []


def test_damage_is_noticed_and_only_that_file_is_lost(folders):
    memory = Memory(*folders)
    memory.settle(kept(folders), counted=True)
    kept(folders)
    for path in (folders[0] / f"{RUN}.state", folders[1] / f"{RUN}.update"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert Memory(*folders).pending() == ()
    assert Memory(*folders).personal(RUN) == NOTHING
    assert not (folders[0] / f"{RUN}.state").exists()


def test_a_full_disk_keeps_what_was_there(folders, monkeypatch):
    kept(folders)

    def full(_self, _file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(OS_DISK.__class__, "sync", full)
        with pytest.raises(Unavailable, match="No space left"):
            kept(folders, data=b"other")
    (found,) = Memory(*folders).pending()
    assert Memory(*folders).bytes_of(found).read_bytes() == b"the update's bytes"


def test_only_so_many_runs_are_remembered(folders, monkeypatch):
    monkeypatch.setattr(remembering, "MAX_RUNS", 3)
    memory = Memory(*folders)
    for number in range(6):
        memory.settle(kept(folders, run=f"{number:016x}"), counted=True)
    assert len(list(folders[0].iterdir())) == 3


def test_facts_that_are_none_are_corrupt():
    with pytest.raises(Corrupt, match="facts of a file"):
        remembering.parse_facts(UpdateFacts, [("run", RUN), ("round", "x")])


def syncs(monkeypatch):
    """Every file and folder that is made durable from now on."""
    found = []
    for name in ("sync", "sync_folder"):
        real = getattr(OS_DISK.__class__, name)

        def noted(self, what, real=real):
            found.append(what)
            real(self, what)

        monkeypatch.setattr(OS_DISK.__class__, name, noted)
    return found


@pytest.mark.parametrize("as_file", [True, False])
def test_an_update_that_implies_nothing_costs_no_sync_and_leaves_nothing(
    folders, monkeypatch, as_file
):
    source = folders[1] / "new"
    source.write_bytes(b"the update's bytes")
    found = syncs(monkeypatch)
    memory = Memory(*folders)
    pending = memory.hold(facts(), source if as_file else b"the update's bytes")
    assert memory.pending() == (pending,)
    assert memory.inline_of(pending, 100) == (None if as_file else b"the update's bytes")
    assert memory.inline_of(pending, 3) is None
    assert memory.bytes_of(pending).read_bytes() == b"the update's bytes"
    memory.settle(pending, counted=True)
    assert memory.pending() == ()
    assert memory.personal(RUN) == NOTHING
    assert not found
    assert not [p for folder in folders for p in folder.iterdir() if p != source]


def test_an_update_that_is_held_is_gone_with_its_process(folders):
    source = folders[1] / "new"
    source.write_bytes(b"the update's bytes")
    Memory(*folders).hold(facts(), source)
    assert Memory(*folders).pending() == ()


def test_an_update_that_waits_is_not_replaced_by_one_that_is_held(folders):
    kept(folders)
    memory = Memory(*folders)
    with pytest.raises(Conflict, match="waits until the cloud settles it"):
        memory.hold(facts(lease="cd" * 16), b"another")
    assert memory.pending()[0].facts.lease == "ab" * 16


def test_a_run_without_personal_tensors_does_not_hide_those_of_the_run_before(folders):
    memory = Memory(*folders)
    memory.settle(kept(folders), counted=True)
    memory.settle(memory.hold(facts(run=OTHER), b"data"), counted=True)
    assert plain(memory.personal("00" * 8)) == {"head": [0, 1, 2]}


def test_a_home_of_an_earlier_release_that_kept_everything_is_read(folders):
    """It wrote updates that imply nothing too, and a state file without anything in it."""
    earlier = Memory(*folders)
    earlier.settle(kept(folders, implied=NOTHING), counted=True)
    kept(folders, implied=NOTHING, data=b"sent by the earlier release")
    memory = Memory(*folders)
    (found,) = memory.pending()
    assert memory.bytes_of(found).read_bytes() == b"sent by the earlier release"
    memory.settle(found, counted=True)
    assert memory.personal(RUN) == NOTHING
    held = memory.hold(facts(lease="cd" * 16), b"of this release")
    assert memory.pending() == (held,)
