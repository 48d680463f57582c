"""The noise of private runs on the cloud's disk: drawn once, used again, published once."""

import errno
import json
import stat
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from triplane.cloud.federation.noise_store import NoiseStore
from triplane.proto.disk import NoRoom, OsDisk
from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.federated.privacy.budget import run_budget
from triplane.unified_ir.federated.privacy.release import RoundNoise

RUN = "0123456789abcdef"
BUDGET = run_budget(4.0, 1e-5, 20)


def charged(number):
    budget = BUDGET
    for round_ in range(1, number + 1):
        budget = budget.charge(round_)
    return budget


class Draws:
    """Counts draws; each has other numbers, the first of which is its count."""

    def __init__(self):
        self.count, self.past = 0, []

    def __call__(self, past):
        self.count, self.past = self.count + 1, [int(p[0]) for p in past]
        return RoundNoise(np.array([self.count, -5, 2**40]), 0.25 * self.count)


def noise(folder, number, draws, bands=1, updates="those of ann and bob"):
    """As a process that was just started does."""
    return NoiseStore(folder).noise_of(RUN, charged(number), bands, draws, updates=updates)


def files(folder):
    return sorted(p.name for p in (folder / RUN).iterdir())


def test_noise_that_was_drawn_is_used_again_after_a_kill(tmp_path):
    draws = Draws()
    first, again = (noise(tmp_path, 1, draws) for _ in range(2))
    assert draws.count == 1
    assert np.array_equal(first.steps, again.steps)
    assert first.bits == again.bits == 0.25


@pytest.mark.parametrize("bands", [1, 3])
def test_noise_never_meets_the_sum_of_other_updates(tmp_path, bands):
    """A kill before the note of a publication, then a restored database: the round repeats."""
    draws = Draws()
    noise(tmp_path, 1, draws, bands)
    first = noise(tmp_path, 2, draws, bands)
    repeated = noise(tmp_path, 2, draws, bands, updates="those of bob and cy")
    assert draws.count == 3
    assert not np.array_equal(first.steps, repeated.steps)
    again = noise(tmp_path, 2, draws, bands, updates="those of bob and cy")
    assert draws.count == 3
    assert np.array_equal(again.steps, repeated.steps)


def test_a_power_cut_does_not_take_the_folder_of_a_run_away(tmp_path):
    synced = []

    class Noting(OsDisk):
        def sync_folder(self, folder):
            super().sync_folder(folder)
            synced.append((folder, sorted(path.name for path in folder.iterdir())))

    store = NoiseStore(tmp_path / "noise", Noting())
    store.noise_of(RUN, charged(1), 3, Draws(), updates="")
    assert (tmp_path, ["noise"]) in synced
    assert (tmp_path / "noise", [RUN]) in synced
    assert (tmp_path / "noise" / RUN, ["1.drawn"]) in synced


@pytest.mark.parametrize("method", ["make_folder", "create", "sync", "replace", "sync_folder"])
def test_a_full_disk_has_no_room_and_is_tried_again(tmp_path, method):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    disk = OsDisk()
    setattr(disk, method, full)
    with pytest.raises(NoRoom):
        NoiseStore(tmp_path, disk).noise_of(RUN, charged(1), 3, Draws(), updates="")
    assert noise(tmp_path, 1, Draws(), 3, updates="").steps[0] == 1


def test_a_full_disk_has_no_room_for_the_note_of_a_publication(tmp_path):
    class Full(OsDisk):
        def replace(self, source, target):
            raise OSError(errno.ENOSPC, "no space left")

    noise(tmp_path, 1, Draws(), 3)
    with pytest.raises(NoRoom):
        NoiseStore(tmp_path, Full()).note_published(RUN, 1, 3)


def test_a_publication_is_noted_by_several_threads_at_once(tmp_path):
    """By the one that its commit begins, and by that of the next round's reduction."""
    store, draws = NoiseStore(tmp_path), Draws()
    with ThreadPoolExecutor(4) as threads:
        for number in range(1, 21):
            noise(tmp_path, number, draws, 3)
            list(threads.map(lambda n: store.note_published(RUN, n, 3), [number] * 4))
    assert files(tmp_path) == ["19.published", "20.published"]


def test_only_the_cloud_reads_it(tmp_path):
    noise(tmp_path, 1, Draws())
    assert stat.S_IMODE((tmp_path / RUN).stat().st_mode) == 0o700


def test_independent_noise_goes_once_its_round_is_published(tmp_path):
    draws, store = Draws(), NoiseStore(tmp_path)
    for number in range(1, 4):
        assert noise(tmp_path, number, draws).steps[0] == number
        store.note_published(RUN, number, 1)
        assert files(tmp_path) == [f"{number}.published"]
        assert (tmp_path / RUN / f"{number}.published").read_bytes() == b""
    store.forget(RUN)
    assert not (tmp_path / RUN).exists()
    store.forget(RUN)


@pytest.mark.parametrize("noted", [True, False])
def test_correlated_noise_keeps_the_vectors_that_later_rounds_take_back(tmp_path, noted):
    """noted: whether the cloud lived long enough to note that a round was published."""
    draws, store = Draws(), NoiseStore(tmp_path)
    for number in range(1, 7):
        assert noise(tmp_path, number, draws, bands=4).steps[0] == number
        assert draws.past == list(range(number - 1, max(0, number - 4), -1))
        if noted:
            store.note_published(RUN, number, 4)
    if noted:
        assert files(tmp_path) == [f"{n}.published" for n in (4, 5, 6)]


@pytest.mark.parametrize("bands", [1, 3])
def test_a_database_that_was_restored_without_the_noise_does_not_use_it_twice(tmp_path, bands):
    draws, store = Draws(), NoiseStore(tmp_path)
    for number in range(1, 6):
        noise(tmp_path, number, draws, bands)
        store.note_published(RUN, number, bands)
    for number in (5, 3):
        with pytest.raises(Conflict, match=f"round {number} .* was published before.*round 5"):
            noise(tmp_path, number, draws, bands)
    assert draws.count == 5


def test_missing_noise_of_an_earlier_round_is_not_replaced(tmp_path):
    noise(tmp_path, 1, Draws(), 3)
    (tmp_path / RUN / "1.drawn").unlink()
    with pytest.raises(Conflict, match=r"noise of round 1 .* is missing"):
        noise(tmp_path, 2, Draws(), 3)


def test_a_damaged_file_or_another_charge_is_refused(tmp_path):
    noise(tmp_path, 1, Draws())
    other = run_budget(4.0, 1e-5, 30).charge(1)
    with pytest.raises(Corrupt, match="another charge"):
        NoiseStore(tmp_path).noise_of(RUN, other, 1, Draws(), updates="those of ann and bob")
    path = tmp_path / RUN / "1.drawn"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt):
        noise(tmp_path, 1, Draws())


def test_the_charge_is_written_with_the_noise(tmp_path):
    noise(tmp_path, 2, Draws())
    text = json.dumps(charged(2).to_json()).encode()
    assert text in (tmp_path / RUN / "2.drawn").read_bytes()


def test_a_start_removes_the_noise_of_runs_that_ended(tmp_path):
    store = NoiseStore(tmp_path / "noise")
    store.keep_only({RUN})
    for run in (RUN, "f" * 16):
        store.noise_of(run, charged(1), 1, Draws(), updates="")
    store.keep_only({RUN})
    assert [p.name for p in (tmp_path / "noise").iterdir()] == [RUN]
