"""Send files of any size between two machines in chunks; both directions can be resumed.

The receiver, on either side, stores a file in a `blobs.BlobFolder`, which keeps incomplete files.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import grpc

from triplane.proto import transfer_pb2 as pb
from triplane.proto.blobs import (
    CHUNK_BYTES,
    BlobFolder,
    IncomingBlob,
    chunks_of,
    digest_of,
    sha256_of,
)
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, Unavailable
from triplane.proto.status import error_from, status_of_aio
from triplane.proto.transfer_pb2_grpc import TransferServicer as Base
from triplane.proto.transfer_pb2_grpc import TransferStub

UPLOAD_BYTES: Final = 128 << 10
"""Size of the first message of an upload: only complete ones are stored, also over a link below
the pace."""
FAST_S: Final = 0.05
"""A message that leaves in less time is followed by one twice as large, up to `CHUNK_BYTES`."""
TRIES: Final = 8
WAIT_S: Final = 0.25
"""Wait before the first retry; it doubles up to `MAX_WAIT_S`."""
MAX_WAIT_S: Final = 5.0
MIN_BYTES_PER_S: Final = 16 << 10
PATIENCE_S: Final = 30.0

Report = Callable[[int, int], None]
"""Called with (bytes so far, total bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The slowest pace of a transfer: one that is slower for `patience_s` is ended.

    So a blob of n bytes takes at most n / min_bytes_per_s + patience_s seconds.
    """

    min_bytes_per_s: int = MIN_BYTES_PER_S
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        if self.min_bytes_per_s < 1 or not 0 < self.patience_s < math.inf:
            raise InvalidInput(f"a pace has at least 1 byte/s and a finite patience, got {self}")

    def deadline_s(self, n_bytes: int) -> float:
        """Return how many seconds these bytes may take in total, including retries."""
        return n_bytes / self.min_bytes_per_s + self.patience_s


DEFAULT_PACE: Final = Pace()


class TooSlow(Unavailable):
    """The peer sends too slowly: it is broken, or delays the receiver on purpose.

    The received bytes are kept, so a retry continues after them.
    """


class WrongLength(Corrupt):
    """The peer has a blob of another length than the signed one."""


class _Watch:
    """A thread that ends a call whose peer is too slow, falls silent or takes too long.

    The receiver cannot do this: it waits for the next chunk, which may never come.
    """

    def __init__(self, call: Any, pace: Pace, until_s: float) -> None:
        self._call, self._pace, self._until_s = call, pace, until_s
        self._bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="transfer pace", daemon=True)
        self.verdict: TooSlow | None = None
        self._thread.start()

    def moved(self, n_bytes: int) -> None:
        """Count received bytes; only the receiving thread calls it."""
        self._bytes += n_bytes

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        counted = 0
        while True:
            left_s = self._until_s - time.monotonic()
            if self._over.wait(max(0.0, min(self._pace.patience_s, left_s))):
                return
            came, counted = self._bytes - counted, self._bytes
            self.verdict = self._judge(came, left_s)
            if self.verdict:
                self._call.cancel()
                return

    def _judge(self, came: int, left_s: float) -> TooSlow | None:
        patience_s, least = self._pace.patience_s, self._pace.min_bytes_per_s
        # Less than one look was left when this one began, so the deadline has passed by now.
        if left_s <= patience_s:
            return TooSlow(
                f"the transfer did not end within its deadline, which {least} bytes/s would have "
                "met; the other side delays it"
            )
        if came < least * patience_s:
            return TooSlow(
                f"the other side sent {came} bytes in {patience_s:g} s; at least {least} bytes/s "
                "are required"
            )
        return None


Buffers = Sequence[memoryview]
"""The bytes of a blob that is in memory, one buffer after another."""


def upload(
    channel: grpc.Channel, source: Path | Buffers, progress: Report = lambda *_: None
) -> bytes:
    """Send a file, or what is in memory; return its SHA-256 once the peer has stored all of it.

    It continues where an earlier call stopped. On a broken link it retries as long as the peer
    stores more of it each time, and `TRIES` times after that.
    """
    sha256 = digest_of(source) if isinstance(source, Path) else sha256_of(source)
    size = size_of(source)
    stub, tries, most = TransferStub(channel), _Tries(), 0
    # A small file is sent without a call of Stat, in the hope that the peer has nothing of it.
    guess = size <= CHUNK_BYTES
    for attempt in tries:
        have = pb.Progress()
        try:
            if not guess:
                have = stub.Stat(pb.StatRequest(sha256=sha256, size=size))
                # Progress renews the tries, so a large file gets through over a link that often
                # breaks.
                if have.stored > most:
                    most = have.stored
                    tries.renew()
            if not have.complete:
                have = stub.Upload(_upload_chunks(source, sha256, size, have.stored, progress))
        except grpc.RpcError as error:
            refusal = error_from(error)
            # Conflict answers a wrong guess, because the peer has a part of the file; Stat tells
            # how much.
            if not (guess and isinstance(refusal, Conflict)):
                attempt(refusal)
            guess = False
            continue
        if have.complete:
            progress(size, size)
            return sha256
    raise AssertionError("the tries end with an error")


def size_of(source: Path | Buffers) -> int:
    """Return how many bytes a source of an upload has."""
    if isinstance(source, Path):
        return source.stat().st_size
    return sum(buffer.nbytes for buffer in source)


def _upload_chunks(
    source: Path | Buffers, sha256: bytes, size: int, offset: int, progress: Report
) -> Iterator[pb.UploadChunk]:
    names = pb.UploadChunk(sha256=sha256, size=size, offset=offset)
    if size > UPLOAD_BYTES:  # a small file goes in one message
        yield names
        names = pb.UploadChunk()
    with contextlib.closing(_reading(source, offset)) as file:
        began_s, n_bytes = time.monotonic(), UPLOAD_BYTES
        while chunk := file.read(n_bytes):
            names.data = chunk
            yield names
            names = pb.UploadChunk()
            offset += len(chunk)
            progress(offset, size)
            # Returned to once the message has left, so its time tells how fast the link is.
            is_fast, began_s = time.monotonic() - began_s < FAST_S, time.monotonic()
            n_bytes = min(2 * n_bytes, CHUNK_BYTES) if is_fast else UPLOAD_BYTES
    if names.sha256:
        yield names


def _reading(source: Path | Buffers, offset: int) -> BinaryIO | _BufferReader:
    if not isinstance(source, Path):
        return _BufferReader(source, offset)
    file = source.open("rb")
    file.seek(offset)
    return file


class _BufferReader:
    """Reads buffers as one file, without joining them."""

    def __init__(self, buffers: Buffers, offset: int) -> None:
        self._left = deque(buffers)
        self._skip(offset)

    def _skip(self, n_bytes: int) -> None:
        while self._left and n_bytes >= self._left[0].nbytes:
            n_bytes -= self._left.popleft().nbytes
        if n_bytes and self._left:
            self._left[0] = self._left[0][n_bytes:]

    def read(self, n_bytes: int) -> bytes:
        """Return the next bytes, at most so many; empty at the end."""
        parts, left = [], n_bytes
        for buffer in self._left:
            parts.append(buffer[:left])
            left -= parts[-1].nbytes
            if not left:
                break
        self._skip(n_bytes - left)
        return b"".join(parts)

    def close(self) -> None:
        """Release the buffers."""
        self._left.clear()


def download(
    channel: grpc.Channel,
    sha256: bytes,
    size: int,
    into: BlobFolder,
    progress: Report = lambda *_: None,
    *,
    pace: Pace = DEFAULT_PACE,
) -> Path:
    """Fetch a blob of exactly `size` bytes, verify it and return its file.

    It continues where an earlier call stopped. Corrupt: other bytes came. TooSlow: below the pace.
    Unavailable: the link is down, or the disk is full.
    """
    if into.has(sha256):
        return into.find(sha256)
    # One deadline for all attempts: a peer cannot prolong a transfer by breaking it off.
    stub, until_s = TransferStub(channel), time.monotonic() + pace.deadline_s(size)
    with into.receive(sha256, size) as receiving:
        for attempt in _Tries():
            try:
                _pull(stub, receiving, progress, pace, until_s)
            except grpc.RpcError as error:
                attempt(error_from(error))
                continue
            return receiving.finish()
    raise AssertionError("the tries end with an error")


def _pull(
    stub: TransferStub, receiving: IncomingBlob, progress: Report, pace: Pace, until_s: float
) -> None:
    if receiving.stored == receiving.size:
        return
    call = stub.Download(pb.DownloadRequest(sha256=receiving.sha256, offset=receiving.stored))
    # A thread for each download, because a synchronous gRPC iterator cannot wait with a timeout.
    watch = _Watch(call, pace, until_s)
    try:
        for chunk in call:
            _check_chunk(chunk, receiving)
            if len(chunk.data) == receiving.size:
                receiving.take(chunk.data)
            else:
                receiving.write(chunk.data)
            watch.moved(len(chunk.data))
            progress(receiving.stored, receiving.size)
    except grpc.RpcError as error:
        # The watch cancelled the call; report its reason instead of CANCELLED.
        if watch.verdict:
            raise watch.verdict from error
        raise
    finally:
        watch.close()
        call.cancel()


def _check_chunk(chunk: pb.DownloadChunk, receiving: IncomingBlob) -> None:
    # The size is signed (TUF), so a peer that states another one is faulty or malicious: endless
    # data attack.
    if chunk.size != receiving.size:
        raise WrongLength(
            f"the other side says the blob has {chunk.size} bytes, but {receiving.size} are signed"
        )
    if not 0 < len(chunk.data) <= CHUNK_BYTES:
        raise Corrupt(f"a chunk has 1 to {CHUNK_BYTES} bytes, got {len(chunk.data)}")
    if receiving.stored + len(chunk.data) > receiving.size:
        raise WrongLength(
            f"{receiving.size} bytes are signed; the other side sends {len(chunk.data)} more after "
            f"{receiving.stored}"
        )


class _Tries:
    """For each attempt, yield a function that takes a failure and raises it if no retry helps."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Restart the count at the current attempt."""
        self._left, self._wait_s = TRIES, WAIT_S

    def __iter__(self) -> Iterator[Callable[[Exception], None]]:
        while self._left:
            self._left -= 1
            yield self._failed
            time.sleep(self._wait_s)
            self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)

    def _failed(self, error: Exception) -> None:
        if not self._left or not isinstance(error, Unavailable):
            raise error


Allowed = Callable[[bytes], Awaitable[None]]
MayWrite = Callable[[bytes, int], Awaitable[BlobFolder]]


async def _everybody(_sha256: bytes) -> None:
    """Allow every caller to read every blob."""


class TransferServicer(Base):
    """The cloud's side of transfers, for grpc.aio.

    may_read: raises for a blob that the caller may not read. may_write: returns the folder for the
    caller's file of that digest and size, or raises; by default `blobs` takes every file. pace:
    slowest pace of an upload; a caller that retries continues where it stopped.
    """

    def __init__(
        self,
        blobs: BlobFolder,
        may_read: Allowed = _everybody,
        may_write: MayWrite | None = None,
        *,
        pace: Pace = DEFAULT_PACE,
    ) -> None:
        self._blobs, self._may_read, self._pace = blobs, may_read, pace
        self._may_write = may_write or self._here

    async def _here(self, _sha256: bytes, _size: int) -> BlobFolder:
        return self._blobs

    async def Stat(self, request: pb.StatRequest, context: Any) -> pb.Progress:
        """See transfer.proto."""
        async with status_of_aio(context):
            folder = await self._may_write(request.sha256, request.size)
            # A damaged blob must not answer "complete": the caller would never send it again.
            await asyncio.to_thread(folder.drop_damaged, request.sha256)
            return folder.stored(request.sha256, request.size)
        raise AssertionError

    async def Upload(self, request_iterator: Any, context: Any) -> pb.Progress:
        """See transfer.proto."""
        paced = contextlib.aclosing(_paced(request_iterator, self._pace))
        async with status_of_aio(context), paced as chunks:
            return await self._take(chunks)
        raise AssertionError

    async def _take(self, chunks: AsyncIterator[pb.UploadChunk]) -> pb.Progress:
        first = await anext(chunks, None)
        if first is None:
            raise InvalidInput("an upload begins with a chunk that names the blob")
        # Permission is checked for the first chunk only: it fixes digest and size for the whole
        # call.
        folder = await self._may_write(first.sha256, first.size)
        if not await asyncio.to_thread(folder.is_lost, first.sha256):
            return folder.stored(first.sha256, first.size)
        with folder.receive(first.sha256, first.size) as receiving:
            # A gap or an overlap would damage the file, which would be noticed only at its end.
            if first.offset != receiving.stored:
                raise Conflict(
                    f"{receiving.stored} bytes are here, the upload begins at {first.offset}; ask "
                    "Stat where to go on"
                )
            if len(first.data) == first.size <= CHUNK_BYTES:
                if (more := await anext(chunks, None)) is not None:
                    n_bytes = len(more.data)
                    raise InvalidInput(f"the blob was whole; {n_bytes} more bytes were sent")
                await asyncio.to_thread(receiving.take, first.data)
                return pb.Progress(stored=first.size, complete=True)
            if first.data:
                await self._write(receiving, first)
            async for chunk in chunks:
                await self._write(receiving, chunk)
            if receiving.stored < receiving.size:
                # Sync before the reply, because the caller counts these bytes as stored.
                await asyncio.to_thread(receiving.sync)
                return pb.Progress(stored=receiving.stored)
            await asyncio.to_thread(receiving.finish)
            return pb.Progress(stored=receiving.size, complete=True)

    async def _write(self, receiving: IncomingBlob, chunk: pb.UploadChunk) -> None:
        if len(chunk.data) > CHUNK_BYTES:
            raise InvalidInput(f"a chunk has at most {CHUNK_BYTES} bytes, got {len(chunk.data)}")
        await asyncio.to_thread(receiving.write, chunk.data)

    async def Download(
        self, request: pb.DownloadRequest, context: Any
    ) -> AsyncIterator[pb.DownloadChunk]:
        """See transfer.proto."""
        async with status_of_aio(context):
            await self._may_read(request.sha256)
            path = self._blobs.find(request.sha256)
            size = path.stat().st_size
            if request.offset > size:
                raise InvalidInput(f"the blob has {size} bytes; {request.offset} is beyond its end")
            # From the first piece on the file is open, so its removal does not cut a download off.
            pieces, sent = chunks_of(path, request.offset), request.offset
            while sent < size and (data := await asyncio.to_thread(next, pieces, None)):
                sent += len(data)
                yield pb.DownloadChunk(size=size, data=data)


async def _paced(chunks: Any, pace: Pace) -> AsyncGenerator[pb.UploadChunk]:
    """Yield all chunks. TooSlow if they come below the pace; time for writing does not count.

    behind_s: how far the caller is behind the pace. Time gained earlier is not credited. A chunk is
    noticed only when it is complete, so the next one may take as long as the pace allows for it.
    """
    waiting, behind_s, came, size = aiter(chunks), 0.0, 0, CHUNK_BYTES
    while True:
        began_s = time.monotonic()
        # The last chunk is shorter, so it gets less time.
        next_bytes = min(CHUNK_BYTES, max(0, size - came))
        try:
            async with asyncio.timeout(pace.deadline_s(next_bytes) - behind_s):
                chunk = await anext(waiting, None)
        except TimeoutError as error:
            raise TooSlow(
                f"the upload brought {came} bytes and then too little for {pace.patience_s:g} s; "
                f"at least {pace.min_bytes_per_s} bytes/s are required; send it again, and it "
                "continues where it stopped"
            ) from error
        if chunk is None:
            return
        if chunk.sha256:
            size = chunk.size - chunk.offset
        came += len(chunk.data)
        waited_s = time.monotonic() - began_s
        behind_s = max(0.0, behind_s + waited_s - len(chunk.data) / pace.min_bytes_per_s)
        yield chunk
