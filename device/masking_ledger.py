"""The ledger of masked rounds as a file of a device's home.

Every change is on the disk before the message that it restricts leaves: the whole file is written
beside the old one, synced and renamed, and read back. So after a kill or a power cut at any instant
the device has the ledger before or after the change. It forgets nothing, because a cloud that was
restored may ask for any earlier round again: 270 bytes stay for each contribution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from triplane.proto.disk import OS_DISK, Disk, lock_file, write_atomic
from triplane.proto.errors import Conflict, Corrupt, Unavailable
from triplane.unified_ir.federated.masking.ledger import MaskingLedger

MAX_LEDGER_BYTES: Final = 32 << 20
"""Some 120,000 contributions. It is read and written as a whole, three times in a round."""
KEPT_BYTES: Final = 1 << 20
"""A longer ledger is parsed each time, because a device may not have the memory to keep it."""


class LedgerFile:
    """A `LedgerStore` in one file. Several threads and processes may use it."""

    def __init__(self, path: Path, disk: Disk = OS_DISK) -> None:
        self._path, self._disk = path, disk
        self._known = (b"", MaskingLedger())  # bytes of the file, and what they say

    def load(self) -> MaskingLedger:
        """Return the newest ledger, empty if there is no file. Corrupt names the way out."""
        data = self._bytes()
        if data is None:
            return MaskingLedger()
        # Read each time, since another process may have written it, and parsed when it changed.
        known, ledger = self._known
        if data and data == known:
            return ledger
        ledger = self._parsed(data)
        self._keep(data, ledger)
        return ledger

    def _keep(self, data: bytes, ledger: MaskingLedger) -> None:
        if len(data) <= KEPT_BYTES:
            self._known = data, ledger

    def _bytes(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_LEDGER_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"the masking ledger could not be read: {error}") from error

    def _parsed(self, data: bytes) -> MaskingLedger:
        try:
            if len(data) > MAX_LEDGER_BYTES:
                raise Corrupt(f"the masking ledger has more than {MAX_LEDGER_BYTES} bytes")
            return MaskingLedger.decode(data)
        except Corrupt as error:
            raise Corrupt(
                f"{self._path}: {error}. Restore it from a backup that is newer than this "
                "device's last masked round, or remove it once no run that it took part in asks "
                "for masked rounds any more; runs without masking go on"
            ) from error

    def update(self, change: Callable[[MaskingLedger], MaskingLedger]) -> None:
        """See `LedgerStore`. Conflict: the ledger is full. Unavailable: the disk refused."""
        with self._locked():
            before = self.load()
            after = change(before)
            data = after.encode()
            if len(data) > MAX_LEDGER_BYTES:
                raise Conflict(
                    f"the masking ledger {self._path} is full: {len(before.entries)} contributions "
                    f"of at most {MAX_LEDGER_BYTES} bytes. Once the runs that it took part in are "
                    "over, give this device a new home"
                )
            write_atomic(self._path, data, self._disk)
            # A disk that lies is noticed here, before anything is sent on its word.
            if self._bytes() != data:
                raise Corrupt(f"{self._path} does not contain what was just written to it")
            self._keep(data, after)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Of its own, because the rename replaces the file of the ledger.
        try:
            file = lock_file(self._path.with_suffix(".lock"))
        except BlockingIOError as error:
            raise Unavailable("another process writes the masking ledger; try again") from error
        except OSError as error:
            raise Unavailable(f"the masking ledger could not be locked: {error}") from error
        with file:
            yield
