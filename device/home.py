"""The home of a device: its files, and its settings (`device.json`).

identity/      key and certificate          plans/     plans and states by SHA-256
personal/      what never leaves            pending/   updates that were not settled yet
device.json    settings                     lock       held by the one process that uses it
"""

import contextlib
import fcntl
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, Final

from triplane.proto.credentials import IdentityFolder
from triplane.proto.disk import OS_DISK, AppendFile, write_atomic
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from triplane.unified_ir.federated.core.defaults import HELD_OUT

DEFAULT_HOME: Final = "~/.triplane/device"
MAX_SETTINGS_BYTES: Final = 64 << 10
POPULATION: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
"""Pattern of a population's name."""
RENEWAL_S: Final = 60.0
CHILD_ENDS_S: Final = 10.0
"""Limit for the child of a killed device to end."""
TEMPORARY: Final = ".*.tmp"
"""Pattern of temporary files that were to replace others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """`device.json`.

    population: which runs this device offers itself for. data: an npz file, for the command.
    held_out: share of the samples that are never learned from. max_disk_bytes: of plans and states
    together; max_blob_bytes: of one. max_memory_bytes, max_cpu_s: of one task, beyond what the
    process takes without it, 0 for no limit; they hold where tasks run in a child process. The time
    is that of all threads together.
    """

    population: str = "default"
    data: str = ""
    held_out: float = HELD_OUT
    max_disk_bytes: int = 4 << 30
    max_blob_bytes: int = 1 << 30
    max_memory_bytes: int = 4 << 30
    max_cpu_s: float = 3600.0 * (os.cpu_count() or 1)

    def __post_init__(self) -> None:
        wanted = {f.name: type(f.default) for f in fields(DeviceSettings)}
        for name, kind in wanted.items():
            value = getattr(self, name)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise InvalidInput(f"{name} is {kind.__name__}, got {value!r}")
        if not POPULATION.fullmatch(self.population):
            raise InvalidInput(
                f"a population is named as in {POPULATION.pattern}, got {self.population[:80]!r}"
            )
        if not (math.isfinite(self.max_cpu_s) and min(self.max_cpu_s, self.max_memory_bytes) >= 0):
            raise InvalidInput(
                "max_memory_bytes and max_cpu_s are positive, or 0 for no limit, got "
                f"{self.max_memory_bytes} and {self.max_cpu_s}"
            )
        if not (math.isfinite(self.held_out) and 0 <= self.held_out < 1):
            raise InvalidInput(f"held_out is a share in [0, 1), got {self.held_out}")

    def but(
        self, *, data: Path | None, population: str | None, held_out: float | None
    ) -> "DeviceSettings":
        """Return the settings with those of the arguments that are not None."""
        changes = {
            "data": None if data is None else str(Path(data).absolute()),
            "population": population,
            "held_out": held_out,
        }
        return DeviceSettings(
            **{**asdict(self), **{k: v for k, v in changes.items() if v is not None}}
        )


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """Facts of the device's certificate. renew_at_s: seconds since 1970."""

    name: str
    renew_at_s: float


@dataclass(frozen=True, slots=True)
class SessionNote:
    """The newest state of a device's session with its cloud.

    state: "connecting" until the first document, then "idle" (no run asks this device), "working".
    population: the one that was offered. since_s: seconds since 1970. population_asked: whether a
    run asks that population, be it this device or others; None where the cloud has not said it.
    """

    state: str
    population: str
    since_s: float
    population_asked: bool | None = None


class DeviceHome:
    """Paths of a device's home."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()
        self.identity = IdentityFolder(self.path / "identity")
        self.plans = self.path / "plans"
        self.personal = self.path / "personal"
        self.pending = self.path / "pending"
        self.model = self.personal / "model"
        self.settings_file = self.path / "device.json"
        self.enrolled_file = self.path / "enrolled.json"
        self.session_file = self.path / "session.json"

    def make(self) -> None:
        """Make the folders; only this user may enter."""
        for folder in (self.path, self.plans, self.personal, self.pending):
            OS_DISK.make_folder(folder)
        self.path.chmod(0o700)

    @property
    def is_enrolled(self) -> bool:
        """Whether the device has an identity."""
        return (self.identity.path / "cert.pem").is_file()

    def require_enrolled(self) -> None:
        """NotFound where this is no home of an enrolled device."""
        if not self.is_enrolled:
            raise NotFound(
                f"no enrolled device in {self.path}; ask an operator for `triplane cloud token "
                f"--role device`, then: triplane device enrol TOKEN --cloud HOST:PORT "
                f"--home {self.path}"
            )

    @property
    def settings(self) -> DeviceSettings:
        """Return the settings of `device.json`, or the defaults without it.

        Corrupt names the error.
        """
        try:
            with self.settings_file.open("rb") as file:
                data = file.read(MAX_SETTINGS_BYTES)
        except FileNotFoundError:
            return DeviceSettings()
        try:
            parsed = json.loads(data)
            known = {field.name for field in fields(DeviceSettings)}
            if not isinstance(parsed, dict) or not parsed.keys() <= known:
                raise InvalidInput(f"keys are {', '.join(sorted(known))}")
            return DeviceSettings(**parsed)
        except (ValueError, TypeError) as error:
            raise Corrupt(f"{self.settings_file} cannot be read: {error}") from error

    def save_settings(self, settings: DeviceSettings) -> None:
        """Write `device.json` whole."""
        text = json.dumps(asdict(settings), indent=1, sort_keys=True)
        write_atomic(self.settings_file, f"{text}\n".encode())

    @property
    def enrolled(self) -> "DeviceIdentity":
        """The stored facts of the certificate, so that the device's process need not parse it."""
        try:
            parsed = json.loads(self.enrolled_file.read_bytes()[:MAX_SETTINGS_BYTES])
            return DeviceIdentity(str(parsed["name"]), float(parsed["renew_at_s"]))
        except (OSError, ValueError, TypeError, KeyError):
            return self.note_certificate()

    def note_certificate(self) -> "DeviceIdentity":
        """Read the certificate, and store and return the facts that a device needs."""
        from triplane.proto.identity import renewal_due_s

        device = DeviceIdentity(self.identity.name, renewal_due_s(self.identity))
        write_atomic(self.enrolled_file, json.dumps(asdict(device)).encode())
        return device

    @property
    def session(self) -> SessionNote | None:
        """Return what `note_session` wrote last; None where nothing can be read."""
        try:
            parsed = json.loads(self.session_file.read_bytes()[:MAX_SETTINGS_BYTES])
            asked = parsed.get("population_asked")
            return SessionNote(
                str(parsed["state"]),
                str(parsed["population"]),
                float(parsed["since_s"]),
                None if asked is None else bool(asked),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def note_session(self, session: SessionNote) -> None:
        """Store it for `triplane device status`.

        It is not synced: it means nothing after a crash.
        """
        new = self.session_file.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk must not end the device
            new.write_text(json.dumps(asdict(session)))
            new.replace(self.session_file)

    def renew(self) -> None:
        """Replace key and certificate in a short-lived process, whose imports take much memory.

        Unavailable: it failed, with its last line.
        """
        command = [sys.executable, "-m", "triplane.device.renewing", str(self.path)]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=RENEWAL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"the certificate was not renewed: {error}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise Unavailable(f"the certificate was not renewed: {said}")

    @property
    def is_held(self) -> bool:
        """Whether a process uses this home."""
        try:
            with (self.path / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the home for this process. Conflict: another uses it. A kill releases the lock."""
        with (self.path / "lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Conflict(
                    f"another process works in {self.path}; one home is one device"
                ) from error
            self.lock_for_tasks().close()
            self.recover()
            yield

    def lock_for_tasks(self) -> BinaryIO:
        """Lock the tasks of this home for this process, until the file is closed.

        The child of a killed device ends at once, and is waited for. Conflict: it does not end.
        """
        file = (self.path / "tasks.lock").open("ab")
        until_s = time.monotonic() + CHILD_ENDS_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() > until_s:
                    file.close()
                    raise Conflict(
                        f"another process does tasks in {self.path}; one home is one device"
                    ) from error
                time.sleep(0.01)
            else:
                return file

    def recover(self) -> None:
        """Remove incomplete files of a killed process, and sync incomplete downloads.

        A complete download gets its name without being read again, so bytes that the killed
        process had not synced are synced here: a later power cut must not tear them.
        """
        unfinished = [
            p for f in (self.path, self.personal, self.pending) for p in f.glob(TEMPORARY)
        ]
        unfinished += self.pending.glob("*.new")
        unfinished += [
            p for p in self.pending.glob("*.out") if not p.with_suffix(".update").exists()
        ]
        for path in unfinished:
            OS_DISK.remove(path)
        for path in (self.plans / "partial").glob("*"):
            file = AppendFile(path)
            file.sync()
            file.close()
