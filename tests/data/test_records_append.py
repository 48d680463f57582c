"""Appending: commits survive kills, power cuts and torn writes; readers see a committed prefix."""

import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.record_child import rows_from
from tests.faults.crash_disk import CrashDisk, PowerCut

from triplane.proto.disk import AppendFile, NoRoom
from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.data.columns import schema_of
from triplane.unified_ir.data.records import RecordTable, RecordWriter, write_records

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "records-killed.md"
CHILD = Path(__file__).with_name("record_child.py")
SMALL: Any = {"block_bytes": 1 << 10, "shard_bytes": 4 << 10}


def check_rows(opened, n):
    """The set holds the rows 0..n-1 of `rows_from`, with right checksums."""
    assert len(opened) == n
    opened.verify()
    rows = np.random.default_rng(n).permutation(n)
    expected: Any = rows_from(0, n)
    batch = opened.take(rows)
    assert np.array_equal(batch["x"], expected["x"][rows])
    assert batch["t"].tolist() == expected["t"][rows].tolist()
    assert np.array_equal(batch["r"].values, expected["r"].take(rows).values)
    assert np.array_equal(batch["r"].lengths, rows % 4)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.tpr"
    write_records(path, [rows_from(0, 50)], **SMALL)
    return path


def test_what_is_appended_follows_what_is_there(path):
    n = 50
    for size in (1, 0, 70, 200):
        with RecordWriter.open(path, **SMALL) as writer:
            writer.append(rows_from(n, size))
        n += size
        check_rows(RecordTable(path), n)
    assert len(RecordTable(path).shards) > 3


def test_nothing_is_visible_before_the_commit(path):
    with closing(RecordWriter.open(path, **SMALL)) as writer:
        writer.append(rows_from(50, 500))
        check_rows(RecordTable(path), 50)
        assert writer.commit() == 550
        check_rows(RecordTable(path), 550)
        writer.append(rows_from(550, 500))
    check_rows(RecordTable(path), 550)
    with RecordWriter.open(path, **SMALL) as writer:
        writer.append(rows_from(550, 3))
    check_rows(RecordTable(path), 553)


def append_and_fail(writer):
    with writer:
        writer.append(rows_from(50, 5))
        raise KeyError


def test_an_error_in_the_block_commits_nothing(path, tmp_path):
    with pytest.raises(KeyError):
        append_and_fail(RecordWriter.open(path))
    check_rows(RecordTable(path), 50)
    with pytest.raises(KeyError):
        append_and_fail(RecordWriter.create(tmp_path / "b.tpr", RecordTable(path).schema))
    assert [p.name for p in tmp_path.iterdir()] == ["a.tpr"]


def test_a_new_set_takes_its_name_with_its_first_commit(tmp_path):
    path = tmp_path / "a.tpr"
    with closing(RecordWriter.create(path, schema_of(rows_from(0, 1)), **SMALL)) as writer:
        writer.append(rows_from(0, 9))
        assert not path.exists()
        writer.commit()
        check_rows(RecordTable(path), 9)
        writer.append(rows_from(9, 90))
        writer.commit()
    check_rows(RecordTable(path), 99)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tpr"]


def test_one_writer_at_a_time(path):
    with RecordWriter.open(path) as writer:
        with pytest.raises(Conflict, match="by another writer"):
            RecordWriter.open(path)
        writer.append(rows_from(50, 1))
    with pytest.raises(Conflict, match="it is closed"):
        writer.append(rows_from(51, 1))
    RecordWriter.open(path).close()
    check_rows(RecordTable(path), 51)


def test_readers_see_a_committed_prefix_while_a_writer_appends(path):
    counts, is_over = [], threading.Event()

    def read():
        while True:
            last = is_over.is_set()
            opened = RecordTable(path)
            check_rows(opened, len(opened))
            counts.append(len(opened))
            if last:
                return

    old = RecordTable(path)
    reader = threading.Thread(target=read)
    reader.start()
    n = 50
    with RecordWriter.open(path, **SMALL) as writer:
        for k in range(40):
            writer.append(rows_from(n, 13))
            n += 13
            if k % 3 == 0:
                writer.commit()
    is_over.set()
    reader.join()
    assert counts == sorted(counts)
    assert counts[-1] == n
    check_rows(old, 50)


@pytest.mark.slow
def test_every_torn_append_leaves_the_committed_rows(path, tmp_path):
    """Files cut at every byte of an append whose commit did not happen."""
    before = tmp_path / "before"
    shutil.copytree(path, before)
    with RecordWriter.open(path, block_bytes=1 << 10, shard_bytes=1 << 20) as writer:
        writer.append(rows_from(50, 6))
    torn, count = tmp_path / "torn", 0
    for name in ("index", *(p.name for p in path.glob("shard-*"))):
        old = (before / name).stat().st_size if (before / name).exists() else 0
        for size in range(old, (path / name).stat().st_size + 1):
            shutil.rmtree(torn, ignore_errors=True)
            shutil.copytree(path, torn)
            shutil.copy(before / "head", torn)
            os.truncate(torn / name, size)
            (torn / ".head.0123456789abcdef.tmp").write_bytes(b"TPREC")
            check_rows(RecordTable(torn), 50)
            count += 1
            if size % 7:  # syncs take most of the time
                continue
            with RecordWriter.open(torn, **SMALL) as writer:
                assert {p.name for p in torn.iterdir()} == {p.name for p in before.iterdir()}
                writer.append(rows_from(50, 20))
            check_rows(RecordTable(torn), 70)
    assert count > 250


def append_on(disk, path):
    """Append on that disk; return the rows of the last commit that returned."""
    committed = 50
    try:
        with closing(RecordWriter.open(path, disk=disk, **SMALL)) as writer:
            for _ in range(3):
                writer.append(rows_from(committed, 60))
                committed = writer.commit()
    except PowerCut:
        pass
    finally:
        disk.close()
    return committed


def cut_power(path, tmp_path, *, unsynced=()):
    """Cut the power at every operation, and check what each of some outcomes holds."""
    rng, cuts = random.Random(0), 0
    for fail_at in range(1, 1000):
        home = tmp_path / f"{fail_at}"
        shutil.copytree(path, home)
        disk = CrashDisk(home, fail_at=fail_at, unsynced=unsynced)
        committed = append_on(disk, home)
        for k in range(6):
            left = tmp_path / f"{fail_at} {k}"
            disk.outcome(left, rng)
            n = len(RecordTable(left))
            assert committed <= n <= committed + 60
            with RecordWriter.open(left, **SMALL) as writer:
                writer.append(rows_from(n, 7))
            check_rows(RecordTable(left), n + 7)
            shutil.rmtree(left)
            cuts += 1
        shutil.rmtree(home)
        if disk.count < fail_at:
            return cuts
    raise AssertionError


@pytest.mark.slow
def test_power_cuts_at_every_operation_lose_nothing_that_was_committed(path, tmp_path):
    assert cut_power(path, tmp_path) > 100


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sync", "sync_folder"])
def test_the_search_notices_a_sync_that_is_left_out(path, tmp_path, method):
    with pytest.raises((AssertionError, Corrupt)):
        cut_power(path, tmp_path, unsynced=(method,))


def test_a_full_disk_ends_the_writer_and_keeps_the_commits(path, monkeypatch):
    writer = RecordWriter.open(path, **SMALL)
    writer.append(rows_from(50, 60))
    writer.commit()
    write = AppendFile.write

    def full(self, data):
        write(self, bytes(data)[:10])
        raise NoRoom("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(AppendFile, "write", full)
        with pytest.raises(NoRoom):
            writer.append(rows_from(110, 60))
    for call in (writer.commit, lambda: writer.append(rows_from(110, 1))):
        with pytest.raises(Conflict, match="no space left"):
            call()
    writer.close()
    with RecordWriter.open(path, **SMALL) as writer:
        writer.append(rows_from(110, 5))
    check_rows(RecordTable(path), 115)


@pytest.mark.parametrize("name", ["index", "shard-00000"])
def test_a_disk_that_does_not_keep_what_was_written_is_noticed(tmp_path, monkeypatch, name):
    write = AppendFile.write

    def spoil(self, data):
        data = bytearray(data)
        if self._path.name == name and data:
            data[-1] ^= 1
        write(self, data)

    monkeypatch.setattr(AppendFile, "write", spoil)
    with pytest.raises(Corrupt, match=name):
        write_records(tmp_path / "a.tpr", [rows_from(0, 20)])
    assert list(tmp_path.iterdir()) == []


def kill(path, seed, rng):
    """Kill a writer at a random instant; return the rows of the last commit that it printed."""
    child = subprocess.Popen([sys.executable, CHILD, path, str(seed)], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        # By commits, then by time: on a busy machine no commit may end in any fixed time.
        first = b"".join(child.stdout.readline() for _ in range(rng.randint(2, 8)))
        time.sleep(rng.uniform(0, 0.02))
        child.send_signal(signal.SIGKILL)
        lines = (first + child.stdout.read()).splitlines(keepends=True)
    assert child.returncode == -signal.SIGKILL
    return [int(line) for line in lines if line.endswith(b"\n")]


def kill_writers(path, kills, seed):
    """Kill as many writers; return the commits that they printed, and those that were killed."""
    rng, commits, torn = random.Random(seed), 0, 0
    for k in range(kills):
        printed = kill(path, seed + k, rng)
        opened = RecordTable(path)
        # The kill may have come between the commit and its line.
        assert len(opened) - printed[-1] in range(241)
        check_rows(opened, len(opened))
        commits += len(printed) - 1
        sizes = {shard.name: shard.bytes for shard in opened.shards}
        torn += any(p.stat().st_size != sizes.get(p.name, 0) for p in path.glob("shard-*"))
    return commits, torn


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_was_committed(path):
    commits, _ = kill_writers(path, 12, seed=1)
    assert commits >= 12


@pytest.mark.deep
def test_two_hundred_killed_writers_lose_nothing_that_was_committed(path):
    seed = int(os.environ.get("TRIPLANE_SEED", "2026"))
    kills = int(os.environ.get("TRIPLANE_KILLS", "200"))
    start_s = time.time()
    commits, torn = kill_writers(path, kills, seed)
    opened = RecordTable(path)
    EVIDENCE.write_text(
        "# Kills of a writer of records\n\n"
        f"`make deep SUITE=records`, {time.strftime('%Y-%m-%d', time.gmtime())}, seed {seed}, "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{(time.time() - start_s) / 60:.0f} minutes.\n\n"
        "A process appends to one record set and commits in a loop, and gets SIGKILL at a random "
        "instant; then the next one goes on. After each kill the set opens, matches its checksums, "
        "and holds every row that the process had reported as committed.\n\n"
        "| what | count |\n|---|---|\n"
        f"| kill -9 of the writer | {kills} |\n"
        f"| kills that left bytes of an unfinished commit in a shard | {torn} |\n"
        f"| commits that returned | {commits} |\n"
        f"| rows at the end | {len(opened)} |\n"
        f"| shards at the end | {len(opened.shards)} |\n"
        "| committed rows that were lost or differed | 0 |\n"
    )
