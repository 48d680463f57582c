"""Durable files. Every file that must survive a crash is written through this module.

`write_atomic` writes a file completely or not at all: the bytes go to a temporary file beside the
target, are synced, and are renamed to the target; then the folder is synced. A crash or an error at
any instant leaves the old file or the new one. An error leaves no temporary file; a killed process
may (`.NAME.HEX.tmp`). `AppendFile` is for records and downloads that grow: bytes that were written
before `sync` returned survive a crash.

Code that must survive power cuts takes a `Disk`; tests pass one that forgets what was not synced.
Files are read with `Path`, without a `Disk`.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from triplane.proto.errors import InvalidInput, Unavailable

Buffer = bytes | bytearray | memoryview
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class NoRoom(Unavailable):
    """A disk or a database is full; retry after making room."""


def refusal(error: OSError, message: str) -> Unavailable:
    """Return the error to raise from `error`: NoRoom if the disk is full, else Unavailable."""
    return (NoRoom if error.errno in FULL else Unavailable)(message)


class Disk(Protocol):
    """The operations on a file system. Every method may raise OSError."""

    def create(self, path: Path) -> BinaryIO:
        """Return a new seekable file, open for writing. FileExistsError if the name is taken."""

    def append(self, path: Path) -> BinaryIO:
        """Return the file, open for writing at its end; create it if it does not exist."""

    def sync(self, file: BinaryIO) -> None:
        """Make the contents of `file` durable; its name is durable only after `sync_folder`."""

    def replace(self, source: Path, target: Path) -> None:
        """Rename `source` to `target` atomically, replacing any file of that name."""

    def remove(self, path: Path) -> None:
        """Remove a file. FileNotFoundError if it does not exist."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its missing parents, and sync their names."""

    def sync_folder(self, folder: Path) -> None:
        """Make the names in `folder` durable."""


class OsDisk:
    """The file system of the operating system."""

    def create(self, path: Path) -> BinaryIO:
        """See `Disk`."""
        return path.open("xb")

    def append(self, path: Path) -> BinaryIO:
        """See `Disk`."""
        return path.open("ab")

    def sync(self, file: BinaryIO) -> None:
        """See `Disk`."""
        # fsync sees only what has left Python's buffer.
        file.flush()
        os.fsync(file.fileno())

    def replace(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """See `Disk`."""
        if not path.is_dir():
            self.make_folder(path.parent)
            # Another process may create the folder at the same time.
            with contextlib.suppress(FileExistsError):
                path.mkdir()
            self.sync_folder(path.parent)

    def sync_folder(self, folder: Path) -> None:
        """See `Disk`."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


OS_DISK: Final = OsDisk()


@contextlib.contextmanager
def atomic_file(path: Path, disk: Disk = OS_DISK) -> Iterator[BinaryIO]:
    """Yield a seekable binary file that becomes `path` when the block ends without an error.

    Unavailable: the disk refused. If only the last sync failed, the new file may be in place.
    InvalidInput: `path` is a folder, a device or a pipe, which a rename would replace for good.
    """
    # `--out /dev/null` or a named pipe would be replaced by a regular file of the same name.
    if not path.name or "\0" in path.name or (path.exists() and not path.is_file()):
        raise InvalidInput(f"{path} cannot become a file; give the name of a new or a regular file")
    temp = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with disk.create(temp) as file:
            yield file
            disk.sync(file)
        # The order is what makes this atomic: the bytes are durable before the name refers to them.
        disk.replace(temp, path)
        disk.sync_folder(path.parent)
    except OSError as error:
        raise refusal(error, f"could not write {path}: {error}") from error
    finally:
        # After the rename there is no temporary file, and the removal fails as intended.
        with contextlib.suppress(OSError):
            disk.remove(temp)


def write_atomic(path: Path, data: Buffer, disk: Disk = OS_DISK) -> None:
    """Replace the contents of `path` by `data`; see `atomic_file`."""
    with atomic_file(path, disk) as file:
        file.write(data)


def write_secret(path: Path, data: Buffer) -> None:
    """Replace the contents of `path` as `write_atomic` does; only the owner may read the file."""
    with atomic_file(path) as file:
        # The mode is set on the temporary file, before it has contents or its final name.
        os.fchmod(file.fileno(), 0o600)
        file.write(data)


class AppendFile:
    """A file that grows. Opening makes its name durable; `sync` makes its bytes durable.

    Unavailable when the disk refuses; a failed `write` may leave a part of its bytes.
    """

    def __init__(self, path: Path, disk: Disk = OS_DISK) -> None:
        self._path, self._disk = path, disk
        with self._refusals():
            self._file = disk.append(path)
            # A rename is durable only after its folder is synced.
            disk.sync_folder(path.parent)

    @property
    def size(self) -> int:
        """Number of bytes written so far, synced or not."""
        return self._file.tell()

    def write(self, data: Buffer) -> None:
        """Add `data` at the end."""
        with self._refusals():
            self._file.write(data)

    def sync(self) -> None:
        """Make everything written so far durable."""
        with self._refusals():
            self._disk.sync(self._file)

    def close(self) -> None:
        """Close the file; bytes that were not synced may be lost."""
        with self._refusals():
            self._file.close()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise refusal(error, f"could not write {self._path}: {error}") from error


def lock_file(path: Path) -> BinaryIO:
    """Lock a file until it is closed or this process ends. BlockingIOError if it is locked."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    try:
        # flock belongs to the open file, so the kernel releases it when the process is killed; a
        # file with a process id could name a process that took over the number.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file
