"""The ledger of masked rounds on a disk that fails, and next to other processes."""

import random
import threading
from pathlib import Path

import pytest
from tests.faults.crash_disk import CrashDisk, PowerCut
from tests.federated.masking.rounds import terms

from triplane.device import masking_ledger
from triplane.device.masking_ledger import LedgerFile
from triplane.proto.disk import OsDisk
from triplane.proto.errors import Conflict, Corrupt, Unavailable
from triplane.unified_ir.federated.masking import LedgerEntry

ENTRY = LedgerEntry(round=3, attempt=1, session="ab" * 32, survivors="cd" * 32)
RUNS = ("run-1", "run-2", "run-3")


def adding(run):
    return lambda ledger: ledger.with_(terms(run=run), ENTRY)


def runs_of(path):
    return [run for run, _ in LedgerFile(path).load().entries]


def test_what_was_added_is_there_for_the_next_process(tmp_path):
    for run in RUNS:
        LedgerFile(tmp_path / "ledger").update(adding(run))
    assert runs_of(tmp_path / "ledger") == list(RUNS)


@pytest.mark.parametrize("kept_bytes", [0, masking_ledger.KEPT_BYTES])
def test_what_another_process_added_is_read(tmp_path, monkeypatch, kept_bytes):
    monkeypatch.setattr(masking_ledger, "KEPT_BYTES", kept_bytes)
    one, other = LedgerFile(tmp_path / "ledger"), LedgerFile(tmp_path / "ledger")
    for file, run in zip((one, other, one), RUNS, strict=True):
        file.update(adding(run))
    assert one.load() == other.load()
    assert runs_of(tmp_path / "ledger") == list(RUNS)
    (tmp_path / "ledger").write_bytes(b"")
    with pytest.raises(Corrupt):
        one.load()


@pytest.mark.long
@pytest.mark.parametrize("unsynced", [(), ("sync",), ("sync_folder",)])
def test_no_power_cut_loses_what_was_added_before(tmp_path, unsynced):
    """With a disk that does not sync, the same test finds losses."""
    lost, points = 0, 0
    for fail_at in range(1, 40):
        root = tmp_path / f"home-{fail_at}"
        root.mkdir()
        disk, added = CrashDisk(root, fail_at=fail_at, unsynced=unsynced), 0
        try:
            for run in RUNS:
                LedgerFile(root / "ledger", disk).update(adding(run))
                added += 1
        except PowerCut:
            points += 1
        finally:
            disk.close()
        for seed in range(8):
            left = tmp_path / f"left-{fail_at}-{seed}"
            disk.outcome(left, random.Random(seed))
            lost += not _holds(left / "ledger", added)
    assert points > 9, "each update has several instants"
    assert (lost > 0) == bool(unsynced)


def _holds(path, added):
    try:
        left = runs_of(path)
    except Corrupt:
        return False
    return left[:added] == list(RUNS[:added]) and len(left) <= added + 1


@pytest.mark.parametrize("operation", ["create", "sync", "replace", "sync_folder"])
def test_a_disk_that_refuses_lets_nothing_be_sent(tmp_path, operation):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    LedgerFile(tmp_path / "ledger").update(adding("run-1"))
    disk = OsDisk()
    setattr(disk, operation, refuse)
    with pytest.raises(Unavailable, match="No space left"):
        LedgerFile(tmp_path / "ledger", disk).update(adding("run-2"))
    assert runs_of(tmp_path / "ledger")[0] == "run-1"


def test_a_disk_that_lies_is_noticed(tmp_path):
    class Lying(OsDisk):
        def replace(self, source, target):
            source.unlink()

    with pytest.raises(Corrupt, match="does not contain what was just written"):
        LedgerFile(tmp_path / "ledger", Lying()).update(adding("run-1"))


def test_a_full_ledger_refuses_and_forgets_nothing(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    LedgerFile(path).update(adding("run-1"))
    monkeypatch.setattr(masking_ledger, "MAX_LEDGER_BYTES", path.stat().st_size + 10)
    with pytest.raises(Conflict, match=r"is full: 1 contributions .*give this device a new home"):
        LedgerFile(path).update(adding("run-2"))
    assert runs_of(path) == ["run-1"]


def test_a_contribution_takes_at_most_270_bytes(tmp_path):
    def many(ledger):
        for number in range(100):
            ledger = ledger.with_(terms(run=f"{number:016x}"), ENTRY)
        return ledger

    LedgerFile(tmp_path / "ledger").update(many)
    assert (tmp_path / "ledger").stat().st_size <= 100 * 270 + 270


@pytest.mark.parametrize("damage", [b"", b"[]x", b"\0" * 100])
def test_a_damaged_ledger_says_how_to_go_on(tmp_path, damage):
    path = tmp_path / "ledger"
    path.write_bytes(damage)
    for use in (LedgerFile(path).load, lambda: LedgerFile(path).update(adding("run-1"))):
        with pytest.raises(Corrupt, match="Restore it from a backup"):
            use()
    assert path.read_bytes() == damage


def test_an_oversized_file_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(masking_ledger, "MAX_LEDGER_BYTES", 100)
    (tmp_path / "ledger").write_bytes(b" " * 1000)
    with pytest.raises(Corrupt, match="has more than 100 bytes"):
        LedgerFile(tmp_path / "ledger").load()


def test_another_process_is_waited_for_and_never_overwritten(tmp_path):
    path = tmp_path / "ledger"
    inside, go_on = threading.Event(), threading.Event()

    def slow(ledger):
        inside.set()
        go_on.wait(60)
        return adding("run-1")(ledger)

    thread = threading.Thread(target=LedgerFile(path).update, args=(slow,))
    thread.start()
    inside.wait(60)
    with pytest.raises(Unavailable, match="another process writes"):
        LedgerFile(path).update(adding("run-2"))
    go_on.set()
    thread.join()
    LedgerFile(path).update(adding("run-2"))
    assert runs_of(path) == ["run-1", "run-2"]


def test_a_folder_that_is_gone_is_not_an_empty_ledger(tmp_path):
    with pytest.raises(Unavailable, match="could not be locked"):
        LedgerFile(Path(tmp_path / "gone" / "ledger")).update(adding("run-1"))
