"""The chain is recomputed by whoever asks; the log comes over a real port."""

from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest

from triplane.cloud.cli.auditing import entry_record, entry_table, parse_head, read, verify_log
from triplane.cloud.cli.connection import Calls
from triplane.cloud.identity.audit import START, AuditRecord, digest_of
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.proto.identity_pb2 import AuditEntry, ReadAuditRequest


def chain(count, actor="alex"):
    """A whole log; entry n is done at second n."""
    entries, previous = [], START
    for number in range(1, count + 1):
        told = AuditRecord(
            number, float(number), actor, "rollout.pause", "r-1", "{}", previous, b""
        )
        entry = AuditEntry(
            number=number, time_s=number, actor=actor, action="rollout.pause", subject="r-1",
            details="{}", previous=previous, digest=digest_of(told),
        )  # fmt: skip
        entries.append(entry)
        previous = entry.digest
    return entries


@contextmanager
def log(entries):
    """Calls to an identity service that holds these entries."""

    def from_number(request, _context):
        return iter([entry for entry in entries if entry.number >= request.from_number])

    handler = grpc.unary_stream_rpc_method_handler(
        from_number, ReadAuditRequest.FromString, AuditEntry.SerializeToString
    )
    pool = futures.ThreadPoolExecutor(2)
    server = grpc.server(pool, options=(("grpc.so_reuseport", 0),))
    server.add_registered_method_handlers("triplane.identity.v1.Identity", {"ReadAudit": handler})
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Calls(channel)
    server.stop(0).wait(10)
    pool.shutdown()


def test_a_whole_log_gives_its_head():
    entries = chain(5)
    with log(entries) as cloud:
        assert verify_log(cloud, None) == (5, entries[-1].digest)
        assert verify_log(cloud, (3, entries[2].digest)) == (5, entries[-1].digest)


def test_an_empty_log_is_whole():
    with log([]) as cloud:
        assert verify_log(cloud, None) == (0, START)


def changed(entries):
    entries[2].actor = "nobody"


def dropped(entries):
    del entries[2]


def cut_at_the_front(entries):
    del entries[0]


def swapped(entries):
    entries[2], entries[3] = entries[3], entries[2]


@pytest.mark.parametrize("tamper", [changed, dropped, cut_at_the_front, swapped])
def test_a_log_that_was_touched_is_corrupt(tamper):
    entries = chain(6)
    tamper(entries)
    with log(entries) as cloud, pytest.raises(Corrupt, match="does not follow"):
        verify_log(cloud, None)


def test_a_log_written_anew_is_whole_but_lost_the_kept_head():
    kept = (3, chain(6)[2].digest)
    with log(chain(6, actor="nobody")) as cloud:
        verify_log(cloud, None)
        with pytest.raises(Corrupt, match="rewritten"):
            verify_log(cloud, kept)


def test_a_log_cut_off_behind_lost_the_kept_head():
    kept = (6, chain(6)[5].digest)
    with log(chain(4)) as cloud, pytest.raises(Corrupt, match="kept head"):
        verify_log(cloud, kept)


def test_entries_are_listed_from_a_number_on():
    with log(chain(4)) as cloud:
        entries = list(read(cloud, 3))
    assert [entry.number for entry in entries] == [3, 4]
    assert "rollout.pause" in entry_table(entries)


@pytest.mark.parametrize("text", ["", "5", "0:" + "a" * 64, "5:" + "a" * 63, "5:" + "A" * 64])
def test_a_head_has_one_spelling(text):
    with pytest.raises(InvalidInput, match="NUMBER:DIGEST"):
        parse_head(text)


def test_a_head_is_number_and_digest():
    assert parse_head(" 5:" + "0a" * 32 + "\n") == (5, b"\x0a" * 32)


def test_entries_are_told_with_their_moment_and_details_that_need_no_second_parsing():
    (entry,) = chain(1)
    entry.time_s, entry.details = 1_000_000_000.0, '{"model":"digits","reason":"","version":3}'
    row = entry_table([entry]).splitlines()[1]
    assert "2001-09-09 01:46:40" in row
    assert row.endswith("model=digits version=3")
    told = entry_record(entry)
    assert told["details"] == {"model": "digits", "reason": "", "version": 3}
    assert told["time"] == "2001-09-09 01:46:40"
    entry.details = '{"model":"dig'
    assert entry_record(entry)["details"] == '{"model":"dig'
