"""Files that appear whole or not at all.

Bytes go to a temporary file beside the target, are flushed to the disk, and take the target's name
in one rename that is itself flushed. A crash or an error at any instant leaves the old file or the
new one, and an error leaves no temporary file (a killed process may: `.NAME.HEX.tmp`).
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from triplane.proto.errors import InvalidInput, Unavailable
from triplane.unified_ir.files.digests import Buffer


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a seekable binary file that becomes `path` when the block ends without an error.

    Unavailable: the disk refused; a failure of the very last flush may leave the new file in place.
    InvalidInput: `path` is a folder, a device or a pipe, which a rename would replace for good.
    """
    if not path.name or "\0" in path.name or (path.exists() and not path.is_file()):
        raise InvalidInput(f"{path} cannot become a file; give the name of a new or a regular one")
    temp = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temp.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        raise Unavailable(f"could not write {path}: {error}; the old file is kept") from error
    finally:
        with contextlib.suppress(OSError):
            temp.unlink()


def write_atomic(path: Path, data: Buffer) -> None:
    """Write `data` as the whole of `path`; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(data)


def flush_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename survives a power cut only after this."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
