"""Blobs in a folder under their SHA-256, complete or being received.

Complete blobs have their digest as name; incomplete ones are in `partial/`. Bytes count as received
once they are synced, and a blob as complete once its digest was verified. A blob's name is only its
digest, so no name can lead out of the folder.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from triplane.proto import transfer_pb2 as pb
from triplane.proto.disk import OS_DISK, AppendFile, Disk, NoRoom, refusal
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 1 << 20
"""Largest size of one message, and of one read."""
SYNC_BYTES: Final = 16 << 20
"""Received bytes between two syncs: the most that a crash can lose."""
MAX_BLOB_BYTES: Final = 16 << 30
RESERVE_BYTES: Final = 64 << 20
"""Disk space that stays free beside a file; for a small file `RESERVE_FACTOR` times its size."""
RESERVE_FACTOR: Final = 4
LEAST_RESERVE_BYTES: Final = 1 << 20


class BlobFolder:
    """Blobs by SHA-256 under `folder`. Safe to use from many threads; one process per folder."""

    def __init__(
        self, folder: Path, disk: Disk = OS_DISK, *, max_bytes: int = MAX_BLOB_BYTES
    ) -> None:
        self.folder = Path(folder)
        self.partial = self.folder / "partial"
        self.disk = disk
        self.max_bytes = max_bytes
        self._busy: set[bytes] = set()
        # Marks (time, size, inode) of the blobs that this process has read and found undamaged.
        self._whole: dict[bytes, tuple[int, int, int]] = {}
        self._lock = threading.Lock()
        disk.make_folder(self.partial)
        disk.sync_folder(self.folder)  # a killed process may not have synced its last renames

    def path(self, sha256: bytes) -> Path:
        """Return the path that the blob has, or would have."""
        if len(sha256) != 32:
            raise InvalidInput(f"a blob is named by 32 bytes of SHA-256, got {len(sha256)}")
        return self.folder / sha256.hex()

    def find(self, sha256: bytes) -> Path:
        """Return the path of a complete blob. NotFound if it is not complete."""
        path = self.path(sha256)
        if not path.is_file():
            raise NotFound(f"no blob {sha256.hex()[:16]}... here; upload it first")
        return path

    def has(self, sha256: bytes) -> bool:
        """Return whether the blob is complete."""
        return self.path(sha256).is_file()

    def drop_damaged(self, sha256: bytes, *, reread: bool = False) -> bool:
        """Remove a complete blob whose bytes do not match its name; return whether it was removed.

        A blob is read once in the lifetime of a process, and again when its file changed. reread:
        always read it, which also finds damage that left the file's size and time unchanged.
        """
        path = self.path(sha256)
        while True:
            try:
                with path.open("rb") as file:
                    mark = _mark(os.fstat(file.fileno()))
                    if not reread and self._whole.get(sha256) == mark:
                        return False
                    digest = hashlib.file_digest(file, "sha256").digest()
                if digest == sha256:
                    self._whole[sha256] = mark
                    return False
                # Compare once more before the removal: another thread may have replaced the damaged
                # file by a whole one while this thread hashed it. Then the loop reads the new file.
                if _mark(path.stat()) == mark:
                    self.disk.remove(path)
                    break
            except FileNotFoundError:
                return False
        logger.error("damaged blob dropped", extra={"blob": sha256.hex(), "bytes": mark[1]})
        return True

    def is_lost(self, sha256: bytes, *, reread: bool = False) -> bool:
        """Return whether no undamaged copy of the blob is here; a damaged one is removed."""
        self.drop_damaged(sha256, reread=reread)
        return not self.has(sha256)

    def stored(self, sha256: bytes, size: int) -> pb.Progress:
        """Return how many bytes of a blob are stored."""
        path = self.path(sha256)
        if path.is_file():
            return pb.Progress(stored=path.stat().st_size, complete=True)
        partial = self.partial / sha256.hex()
        return pb.Progress(stored=min(partial.stat().st_size if partial.is_file() else 0, size))

    @contextlib.contextmanager
    def receive(self, sha256: bytes, size: int) -> Iterator["IncomingBlob"]:
        """Receive one blob, resuming where an earlier attempt stopped.

        InvalidInput: too large. Conflict: it is being received already. Unavailable: the disk is
        full.
        """
        path = self.path(sha256)
        if not 0 <= size <= self.max_bytes:
            raise InvalidInput(f"a blob has at most {self.max_bytes} bytes here, got {size}")
        # One writer for each blob: two uploads of the same bytes would append to one partial file.
        with self._lock:
            if sha256 in self._busy:
                raise Conflict(f"blob {sha256.hex()[:16]}... is being received already; wait")
            self._busy.add(sha256)
        try:
            blob = IncomingBlob(self, path, self.partial / path.name, sha256, size)
            with contextlib.closing(blob):
                yield blob
        finally:
            with self._lock:
                self._busy.discard(sha256)

    def put(self, data: bytes) -> bytes:
        """Store a blob; return its name."""
        sha256 = hashlib.sha256(data).digest()
        if self.is_lost(sha256):
            with self.receive(sha256, len(data)) as receiving:
                receiving.take(data)
        return sha256

    def put_file(self, source: Path) -> bytes:
        """Store a copy of a file; return its name."""
        sha256, size = digest_of(source), source.stat().st_size
        if self.is_lost(sha256):
            with self.receive(sha256, size) as receiving:
                for chunk in chunks_of(source, receiving.stored):
                    receiving.write(chunk)
                receiving.finish()
        return sha256

    def remove(self, sha256: bytes) -> None:
        """Remove a blob and its incomplete download."""
        for path in (self.path(sha256), self.partial / sha256.hex()):
            with contextlib.suppress(FileNotFoundError):
                self.disk.remove(path)


class IncomingBlob:
    """One blob that is being received; `BlobFolder.receive` creates it.

    stored: number of stored bytes, which is the offset of the next one.
    """

    def __init__(self, to: BlobFolder, path: Path, partial: Path, sha256: bytes, size: int) -> None:
        self._to, self._path, self._partial = to, path, partial
        self.sha256, self.size = sha256, size
        self._file: AppendFile | None = None
        self._is_named = False
        self.stored = partial.stat().st_size if partial.is_file() else 0
        self._unsynced = self.stored  # their writer may have been killed before a sync
        # Hash while receiving if this attempt started at 0; a resumed blob is hashed from its file
        # at the end, because the state of a hash is not stored.
        self._hash = None if self.stored else hashlib.sha256()
        # The declared size differs from the one of the earlier attempt, so those bytes are not a
        # prefix.
        if self.stored > size:
            self.restart()
        self._require_space()

    def write(self, chunk: bytes) -> None:
        """Add the next bytes. InvalidInput beyond the blob's size."""
        if self.stored + len(chunk) > self.size:
            raise InvalidInput(
                f"blob {self.sha256.hex()[:16]}... has {self.size} bytes; {len(chunk)} more after "
                f"{self.stored} were sent"
            )
        self._open().write(chunk)
        if self._hash is not None:
            self._hash.update(chunk)
        self.stored += len(chunk)
        self._unsynced += len(chunk)
        if self._unsynced >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Make the written bytes durable."""
        if self._file is not None and self._unsynced:
            self._file.sync()
        self._unsynced = 0

    def take(self, data: bytes) -> Path:
        """Store a whole blob at once, which takes one sync less than in chunks.

        It replaces an earlier incomplete attempt. Corrupt, before anything is written: other bytes.
        """
        self.restart()
        self._check(hashlib.sha256(data).digest())
        disk = self._to.disk
        try:
            with disk.create(self._partial) as file:
                file.write(data)
                disk.sync(file)
        except OSError as error:
            raise refusal(error, f"could not write {self._partial}: {error}") from error
        self.stored = len(data)
        return self._name()

    def finish(self) -> Path:
        """Verify the blob and give it its name. Corrupt: the bytes were wrong, and are removed."""
        if self._is_named:
            return self._path
        if self.stored != self.size:
            raise InvalidInput(f"{self.stored} of {self.size} bytes are here; send the rest")
        self._open()
        self.sync()
        # Sync before the name: after a power cut, a named blob must not have lost bytes.
        self._check(self._hash.digest() if self._hash else digest_of(self._partial))
        self.close()
        return self._name()

    def _open(self) -> AppendFile:
        if self._file is None:
            self._file = AppendFile(self._partial, self._to.disk)
        return self._file

    def _check(self, digest: bytes) -> None:
        if digest != self.sha256:
            self.restart()
            raise Corrupt(
                f"blob {self.sha256.hex()[:16]}...: the bytes received have the digest "
                f"{digest.hex()[:16]}...; they were dropped, send it again from the start"
            )

    def _name(self) -> Path:
        try:
            self._to.disk.replace(self._partial, self._path)
            self._to.disk.sync_folder(self._path.parent)
        except OSError as error:
            raise refusal(error, f"could not store {self._path}: {error}") from error
        self._is_named = True
        return self._path

    def restart(self) -> None:
        """Remove the stored bytes of this blob."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._to.disk.remove(self._partial)
        self.stored = self._unsynced = 0
        self._hash = hashlib.sha256()

    def close(self) -> None:
        """Close the file; synced bytes stay for the next attempt."""
        if self._file is not None:
            with contextlib.suppress(Unavailable):
                self.sync()
            self._file.close()
            self._file = None

    def _require_space(self) -> None:
        space = os.statvfs(self._to.folder)
        free = space.f_bavail * space.f_frsize
        # The reserve leaves room for the database and journals, which must be able to record the
        # failure.
        reserve = min(RESERVE_BYTES, max(LEAST_RESERVE_BYTES, RESERVE_FACTOR * self.size))
        if free < self.size - self.stored + reserve:
            raise NoRoom(
                f"the disk is full: {self._to.folder} has {free} bytes free, but "
                f"{self.size - self.stored} more bytes are needed besides {reserve} that must stay "
                "free; make room and try again"
            )


def _mark(stat: os.stat_result) -> tuple[int, int, int]:
    """Return a mark that differs between a file and one that replaces it."""
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def digest_of(path: Path) -> bytes:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def sha256_of(buffers: Iterable[memoryview]) -> bytes:
    """Return the SHA-256 of what is in these buffers, one after another."""
    state = hashlib.sha256()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


def chunks_of(path: Path, offset: int, n_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the bytes of a file from `offset` on, `n_bytes` at a time."""
    with path.open("rb") as file:
        file.seek(offset)
        while chunk := file.read(n_bytes):
            yield chunk
