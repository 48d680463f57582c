import asyncio
import contextlib
import hashlib
import itertools
import os
import random
import threading
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from tests.faults.crash_disk import CrashDisk

from triplane.proto import transfer_pb2 as pb
from triplane.proto.blobs import BlobFolder, digest_of
from triplane.proto.disk import NoRoom, OsDisk
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from triplane.proto.status import error_from
from triplane.proto.transfer import TRIES, TransferServicer, download, upload
from triplane.proto.transfer_pb2_grpc import TransferStub, add_TransferServicer_to_server


@contextlib.contextmanager
def serving_with(servicer):
    """The cloud's half on a loopback port, in a thread with a loop of its own."""
    ready, address, ends = threading.Event(), [], []

    async def main():
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(done.set))
        server = grpc.aio.server()
        add_TransferServicer_to_server(servicer, server)
        address.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        ready.set()
        await done.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    ready.wait(60)
    try:
        with grpc.insecure_channel(address[0]) as channel:
            yield channel
    finally:
        ends[0]()
        thread.join(60)


def serving(blobs, *hooks):
    return serving_with(TransferServicer(blobs, *hooks))


@pytest.fixture
def cloud(tmp_path):
    blobs = BlobFolder(tmp_path / "cloud")
    with serving(blobs) as channel:
        yield blobs, channel


def file_of(tmp_path, n_bytes):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(n_bytes))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("n_bytes", [0, 1, (1 << 20) - 1, 1 << 20, 3_500_000])
def test_a_file_goes_up_and_down_unchanged(tmp_path, cloud, n_bytes):
    blobs, channel = cloud
    path = file_of(tmp_path, n_bytes)
    sha256 = upload(channel, path)
    assert blobs.find(sha256).read_bytes() == path.read_bytes()
    node = BlobFolder(tmp_path / "node")
    assert download(channel, sha256, n_bytes, node).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("there", [1, 999, 1000])
def test_a_small_upload_goes_on_where_it_stopped_though_it_asks_nothing_first(
    tmp_path, cloud, there
):
    blobs, channel = cloud
    path = file_of(tmp_path, 1000)
    with blobs.receive(digest_of(path), 1000) as receiving:
        receiving.write(path.read_bytes()[:there])
    assert blobs.find(upload(channel, path)).read_bytes() == path.read_bytes()


def test_a_caller_writes_where_it_may_and_only_that(tmp_path):
    blobs, other = BlobFolder(tmp_path / "cloud"), BlobFolder(tmp_path / "other")
    asked = []

    async def everything(_sha256):
        return None

    async def small_ones_elsewhere(sha256, size):
        asked.append((sha256, size))
        if size > 1000:
            raise Conflict("no lease for so much")
        return other

    with serving(blobs, everything, small_ones_elsewhere) as channel:
        sha256 = upload(channel, file_of(tmp_path, 1000))
        with pytest.raises(Conflict, match="no lease"):
            upload(channel, file_of(tmp_path, 1001))
        known = TransferStub(channel).Stat(pb.StatRequest(sha256=sha256, size=1000))
    assert other.has(sha256)
    assert not blobs.has(sha256)
    assert known.complete
    assert asked[0] == (sha256, 1000)


def test_an_upload_goes_on_where_it_stopped(tmp_path, cloud):
    blobs, channel = cloud
    path = file_of(tmp_path, 3_000_000)
    sha256 = digest_of(path)
    with blobs.receive(sha256, 3_000_000) as receiving:
        receiving.write(path.read_bytes()[:1_700_000])
    told = []
    assert upload(channel, path, lambda done, _: told.append(done)) == sha256
    assert min(told) > 1_700_000
    assert blobs.find(sha256).read_bytes() == path.read_bytes()


class Breaking(TransferServicer):
    """Breaks each upload once it brought `bytes_each`; notes the size of each message."""

    def __init__(self, blobs, bytes_each):
        super().__init__(blobs)
        self.bytes_each = bytes_each
        self.sizes: list[int] = []

    async def Upload(self, request_iterator, context):
        async def some():
            came = 0
            async for chunk in request_iterator:
                self.sizes.append(len(chunk.data))
                yield chunk
                came += len(chunk.data)
                if came >= self.bytes_each:
                    raise Unavailable("the link broke")

        return await super().Upload(some(), context)


def test_upload_sends_pieces_that_also_a_slow_link_brings_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.proto.transfer.FAST_S", 0.0)
    blobs = BlobFolder(tmp_path / "cloud")
    noting = Breaking(blobs, 1 << 30)
    path = file_of(tmp_path, 1_000_000)
    with serving_with(noting) as channel:
        assert blobs.find(upload(channel, path)).read_bytes() == path.read_bytes()
    assert max(noting.sizes) <= 128 << 10


def test_pieces_grow_while_the_link_is_fast(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.proto.transfer.FAST_S", 1000.0)
    blobs = BlobFolder(tmp_path / "cloud")
    noting = Breaking(blobs, 1 << 30)
    path = file_of(tmp_path, 4_000_000)
    with serving_with(noting) as channel:
        assert blobs.find(upload(channel, path)).read_bytes() == path.read_bytes()
    sizes = [size for size in noting.sizes if size]
    assert sizes[:5] == [128 << 10, 256 << 10, 512 << 10, 1 << 20, 1 << 20]
    assert max(sizes) == 1 << 20


@pytest.mark.parametrize("breaks_after", [1 << 30, 1 << 20], ids=("whole", "broken"))
def test_buffers_arrive_as_the_file_that_they_would_be(tmp_path, monkeypatch, breaks_after):
    monkeypatch.setattr("triplane.proto.transfer.WAIT_S", 0.001)
    blobs = BlobFolder(tmp_path / "cloud")
    data = file_of(tmp_path, 3_000_001).read_bytes()
    cuts = [0, 5, 5, 100_000, 1_500_000, len(data)]
    buffers = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
    with serving_with(Breaking(blobs, breaks_after)) as channel:
        assert blobs.find(upload(channel, buffers)).read_bytes() == data


def test_upload_goes_on_over_a_link_that_breaks_as_long_as_each_try_brings_some(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("triplane.proto.transfer.WAIT_S", 0.001)
    blobs = BlobFolder(tmp_path / "cloud")
    path = file_of(tmp_path, (2 * TRIES + 1) << 20)
    with serving_with(Breaking(blobs, 1 << 20)) as channel:
        assert blobs.find(upload(channel, path)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("n_bytes", [1000, 1_000_000])
def test_upload_that_never_brings_any_is_given_up_after_some_tries(tmp_path, monkeypatch, n_bytes):
    monkeypatch.setattr("triplane.proto.transfer.WAIT_S", 0.001)
    asked = []

    class Broken(TransferServicer):
        async def Upload(self, request_iterator, context):
            asked.append(context)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the link broke")

    broken = Broken(BlobFolder(tmp_path / "cloud"))
    with serving_with(broken) as channel, pytest.raises(Unavailable, match="the link broke"):
        upload(channel, file_of(tmp_path, n_bytes))
    assert len(asked) == TRIES


def test_a_damaged_start_is_dropped_and_the_next_try_arrives(tmp_path, cloud):
    _, channel = cloud
    path = file_of(tmp_path, 2_000_000)
    sha256 = upload(channel, path)
    node = BlobFolder(tmp_path / "node")
    with node.receive(sha256, 2_000_000) as receiving:
        receiving.write(bytes(1_000_000))
    with pytest.raises(Corrupt, match="dropped, send it again"):
        download(channel, sha256, 2_000_000, node)
    assert download(channel, sha256, 2_000_000, node).read_bytes() == path.read_bytes()


def test_another_size_than_the_signed_one_is_corrupt_and_leaves_no_blob(tmp_path, cloud):
    _, channel = cloud
    sha256 = upload(channel, file_of(tmp_path, 2_000_000))
    node = BlobFolder(tmp_path / "node")
    with pytest.raises(Corrupt, match="1000000 are signed"):
        download(channel, sha256, 1_000_000, node)
    assert not node.has(sha256)


@pytest.mark.parametrize("n_bytes", [1000, 3 << 20])
def test_a_damaged_blob_is_replaced_when_its_file_is_sent_again(tmp_path, cloud, n_bytes):
    blobs, channel = cloud
    source = file_of(tmp_path, n_bytes)
    sha256 = upload(channel, source)
    stored = blobs.find(sha256)
    upload(channel, source)
    stored.write_bytes(b"x" * n_bytes)
    os.utime(stored, (1, 1))
    assert upload(channel, source) == sha256
    assert stored.read_bytes() == source.read_bytes()


def test_blob_that_arrives_while_the_damaged_one_is_read_stays(tmp_path, monkeypatch):
    blobs = BlobFolder(tmp_path / "b")
    path = blobs.path(blobs.put(b"good"))
    path.write_bytes(b"evil")
    read = hashlib.file_digest
    reads: list[bytes] = []

    def replaced_meanwhile(file, digest):
        found = read(file, digest)
        if not reads:
            (tmp_path / "new").write_bytes(b"good")
            (tmp_path / "new").replace(path)
        reads.append(found.digest())
        return found

    monkeypatch.setattr(hashlib, "file_digest", replaced_meanwhile)
    assert not blobs.drop_damaged(bytes.fromhex(path.name))
    assert path.read_bytes() == b"good"
    assert not blobs.drop_damaged(bytes.fromhex(path.name))
    assert len(reads) == 2, "a blob is read once"


def test_blob_that_goes_while_it_is_looked_at_is_no_damaged_one(tmp_path):
    class Vanishing(dict[bytes, tuple[int, ...]]):
        def get(self, key, default=None):
            path.unlink()
            return super().get(key, default)

    blobs = BlobFolder(tmp_path / "b")
    path = blobs.path(blobs.put(b"good"))
    path.write_bytes(b"evil")
    blobs._whole = Vanishing()  # type: ignore[assignment]
    assert not blobs.drop_damaged(bytes.fromhex(path.name))


def test_a_small_file_does_not_ask_for_a_large_reserve(tmp_path, monkeypatch):
    space = SimpleNamespace(f_bavail=2 << 20, f_frsize=1)
    monkeypatch.setattr("os.statvfs", lambda _: space)
    blobs = BlobFolder(tmp_path)
    blobs.put(b"x" * 10_000)
    with (
        pytest.raises(NoRoom, match=r"the disk is full: .* has 2097152 bytes free"),
        blobs.receive(bytes(32), 4 << 20),
    ):
        pass


def test_an_absent_blob_is_not_found(tmp_path, cloud):
    _, channel = cloud
    with pytest.raises(NotFound, match="no blob"):
        download(channel, bytes(32), 10, BlobFolder(tmp_path / "node"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"", b"../../etc/passwd", bytes(31), bytes(33)])
def test_a_name_that_is_no_digest_is_refused(cloud, name):
    _, channel = cloud
    with pytest.raises(grpc.RpcError) as caught:
        TransferStub(channel).Stat(pb.StatRequest(sha256=name, size=1))
    assert isinstance(error_from(caught.value), InvalidInput)


def refused(channel, chunks):
    with pytest.raises(grpc.RpcError) as caught:
        TransferStub(channel).Upload(iter(chunks))
    return error_from(caught.value)


def test_endless_data_is_refused_at_the_size(cloud):
    blobs, channel = cloud
    first = pb.UploadChunk(sha256=bytes(32), size=1500, data=bytes(1000))
    error = refused(channel, [first, *[pb.UploadChunk(data=bytes(1000))] * 3])
    assert isinstance(error, InvalidInput)
    assert blobs.stored(bytes(32), 1500).stored <= 1500


def test_a_gap_is_refused(cloud):
    _, channel = cloud
    error = refused(channel, [pb.UploadChunk(sha256=bytes(32), size=1500, offset=7)])
    assert isinstance(error, Conflict)


def test_a_chunk_beyond_the_limit_is_refused(cloud):
    _, channel = cloud
    first = pb.UploadChunk(sha256=bytes(32), size=3 << 20, data=bytes((1 << 20) + 1))
    assert "at most 1048576 bytes" in str(refused(channel, [first]))


def test_a_blob_beyond_the_quota_is_refused_before_a_byte(tmp_path):
    blobs = BlobFolder(tmp_path / "b", max_bytes=100)
    with (
        pytest.raises(InvalidInput, match="at most 100 bytes here, got 101"),
        blobs.receive(bytes(32), 101),
    ):
        pass


def test_one_blob_is_received_once_at_a_time(tmp_path):
    blobs = BlobFolder(tmp_path / "b")
    with blobs.receive(bytes(32), 10), pytest.raises(Conflict), blobs.receive(bytes(32), 10):
        pass


class Steps(OsDisk):
    """Writes down what is asked of it."""

    def __init__(self):
        self.taken = []

    def sync(self, file):
        self.taken.append("sync")
        super().sync(file)

    def replace(self, source, target):
        self.taken.append("replace")
        super().replace(source, target)

    def sync_folder(self, folder):
        self.taken.append("sync_folder")
        super().sync_folder(folder)


def test_a_small_blob_is_synced_before_it_has_its_name_and_with_no_sync_too_many(tmp_path):
    disk = Steps()
    blobs = BlobFolder(tmp_path / "b", disk)
    disk.taken.clear()
    blobs.put(b"small")
    assert disk.taken == ["sync", "replace", "sync_folder"]


def test_a_small_blob_of_other_bytes_leaves_nothing(tmp_path):
    blobs = BlobFolder(tmp_path / "b")
    with blobs.receive(bytes(32), 5) as receiving, pytest.raises(Corrupt, match="send it again"):
        receiving.take(b"small")
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []


def test_what_follows_a_whole_blob_is_refused(cloud):
    blobs, channel = cloud
    chunks = [pb.UploadChunk(sha256=bytes(32), size=1, data=b"a"), pb.UploadChunk(data=b"b")]
    with pytest.raises(grpc.RpcError) as caught:
        TransferStub(channel).Upload(iter(chunks))
    assert isinstance(error_from(caught.value), InvalidInput)
    assert not blobs.has(bytes(32))


def test_what_a_killed_process_did_not_sync_is_durable_once_the_next_says_so(tmp_path):
    data = bytes(range(256)) * 40
    name = hashlib.sha256(data).digest()
    (tmp_path / "disk").mkdir()
    disk = CrashDisk(tmp_path / "disk")
    with contextlib.ExitStack() as killed:  # left too late to matter
        first = killed.enter_context(BlobFolder(disk.root, disk).receive(name, len(data)))
        first.write(data)
        with BlobFolder(disk.root, disk).receive(name, len(data)) as receiving:
            receiving.finish()
        for seed in range(20):
            disk.outcome(tmp_path / str(seed), random.Random(seed))
            assert (tmp_path / str(seed) / name.hex()).read_bytes() == data
    disk.close()


def test_the_name_a_killed_process_gave_is_durable_once_the_next_has_it(tmp_path):
    data = bytes(range(256))
    (tmp_path / "disk").mkdir()
    disk = CrashDisk(tmp_path / "disk", unsynced=("sync_folder",))
    name = BlobFolder(disk.root, disk).put(data)  # and is killed before the folder is synced
    disk.unsynced = ()
    assert BlobFolder(disk.root, disk).has(name)
    for seed in range(20):
        disk.outcome(tmp_path / str(seed), random.Random(seed))
        assert (tmp_path / str(seed) / name.hex()).read_bytes() == data
    disk.close()
