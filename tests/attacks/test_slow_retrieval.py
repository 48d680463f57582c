"""A side that sends too little, at the level of one transfer; over the node: test_deploy_path."""

import asyncio
import contextlib
import threading
from typing import Any

import grpc
import grpc.aio
import pytest

from triplane.proto import transfer_pb2 as pb
from triplane.proto.blobs import BlobFolder, digest_of
from triplane.proto.errors import InvalidInput, Unavailable
from triplane.proto.status import remote_errors
from triplane.proto.transfer import Pace, TooSlow, TransferServicer, download, upload
from triplane.proto.transfer_pb2_grpc import TransferStub, add_TransferServicer_to_server

SIZE = 64 << 10
PACE = Pace(min_bytes_per_s=16 << 10, patience_s=0.5)
ENDLESS_S = 60.0


class Crawling(TransferServicer):
    """Sends `steps` of (bytes, seconds until the next), then nothing at all."""

    def __init__(self, data, steps):
        self.data, self.steps = data, steps
        self.asked = []

    async def Download(self, request, context):
        self.asked.append(request.offset)
        at = request.offset
        for n_bytes, pause_s in self.steps:
            yield pb.DownloadChunk(size=len(self.data), data=self.data[at : at + n_bytes])
            at += n_bytes
            if at >= len(self.data):
                return
            await asyncio.sleep(pause_s)
        await asyncio.sleep(ENDLESS_S)


@contextlib.contextmanager
def serving(servicer):
    ready, found = threading.Event(), dict[str, Any]()

    async def main():
        found["done"], found["loop"] = asyncio.Event(), asyncio.get_running_loop()
        server = grpc.aio.server()
        add_TransferServicer_to_server(servicer, server)
        found["port"] = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.set()
        await found["done"].wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(60)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{found['port']}") as channel:
            yield channel
    finally:
        found["loop"].call_soon_threadsafe(found["done"].set)
        thread.join(60)


def sent(tmp_path):
    path = tmp_path / "sent"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path, digest_of(path)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "the other side sent 0 bytes in 0.5 s; at least 16384 bytes/s are required"),
        (
            [(4096, 0.0)],
            "the other side sent \\d+ bytes in 0.5 s; at least 16384 bytes/s are required",
        ),
        ([(1, 0.01)] * SIZE, r"the other side sent \d+ bytes in 0.5 s; at least 16384"),
    ],
    ids=["silent", "silent after the first chunk", "a byte at a time"],
)
def test_a_side_that_sends_too_little_is_given_up_and_what_came_is_kept(tmp_path, steps, message):
    path, sha256 = sent(tmp_path)
    into = BlobFolder(tmp_path / "node")
    slow = Crawling(path.read_bytes(), steps)
    with serving(slow) as channel, pytest.raises(TooSlow, match=message):
        download(channel, sha256, SIZE, into, pace=PACE)
    assert slow.asked == [0], "nothing is gained by asking such a side again at once"
    kept = into.stored(sha256, SIZE).stored
    honest = Crawling(path.read_bytes(), [(SIZE, 0.0)])
    with serving(honest) as channel:
        assert download(channel, sha256, SIZE, into, pace=PACE).read_bytes() == path.read_bytes()
    assert honest.asked == [kept]


@pytest.mark.slow
def test_a_side_that_stays_just_fast_enough_still_ends_at_the_deadline(tmp_path):
    """It keeps the rate within each window, but breaks the link and begins to count again."""
    path, sha256 = sent(tmp_path)
    slow = Crawling(path.read_bytes(), [(1, 0.02)] * 20)
    slow.Download = breaking(slow.Download)  # type: ignore[method-assign]
    pace = Pace(min_bytes_per_s=SIZE, patience_s=1.0)
    with (
        serving(slow) as channel,
        pytest.raises(TooSlow, match="did not end within its deadline, which 65536 bytes/s would"),
    ):
        download(channel, sha256, SIZE, BlobFolder(tmp_path / "node"), pace=pace)
    assert len(slow.asked) > 1


def breaking(download_method):
    async def broken(request, context):
        async for chunk in download_method(request, context):
            yield chunk
            if chunk.data[0] % 16 == 15:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the link broke")

    return broken


def trickle(data, sha256, step, pause_s, until):
    """An upload in pieces, until somebody has had enough."""
    yield pb.UploadChunk(sha256=sha256, size=len(data))
    for at in range(0, len(data), step):
        if until.wait(pause_s):
            return
        yield pb.UploadChunk(data=data[at : at + step])


@pytest.mark.parametrize("step", [1, SIZE], ids=["a byte at a time", "nothing after the name"])
def test_caller_that_sends_too_little_of_an_upload_is_given_up_and_what_came_is_kept(
    tmp_path, step
):
    path, sha256 = sent(tmp_path)
    into = BlobFolder(tmp_path / "cloud")
    over, pace = threading.Event(), Pace(min_bytes_per_s=SIZE, patience_s=0.3)
    pieces = trickle(path.read_bytes(), sha256, step, 0.02 if step == 1 else ENDLESS_S, over)
    with serving(TransferServicer(into, pace=pace)) as channel:
        told = r"\d+ bytes .* at least 65536 bytes/s are required"
        with pytest.raises(Unavailable, match=told), remote_errors():
            TransferStub(channel).Upload(pieces, timeout=ENDLESS_S / 2)
        over.set()
        assert (into.stored(sha256, SIZE).stored > 0) == (step == 1)
        assert upload(channel, path) == sha256
    assert into.find(sha256).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("bad", [{"min_bytes_per_s": 0}, {"patience_s": 0.0}])
def test_a_pace_that_waits_for_ever_is_refused(bad):
    with pytest.raises(InvalidInput, match="a pace has at least 1 byte/s and a finite"):
        Pace(**bad)
